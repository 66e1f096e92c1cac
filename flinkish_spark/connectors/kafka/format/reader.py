"""Reading `format("flinkish-kafka")`: the driver's side of a stream, a batch, and the tasks."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from flinkish_spark.checkpoint.control import (
    AlignmentStatus,
    read_control,
    read_held,
    to_control_offset,
    write_status,
)
from flinkish_spark.connectors.control_source import ControlRow, wake_rows
from flinkish_spark.connectors.kafka.chaining import alignment as plan
from flinkish_spark.connectors.kafka.chaining.alignment import Offer, Planned, Range, View, plan_micro_batch
from flinkish_spark.connectors.kafka.chaining.upstream import LookAhead, Passed, Scan, SharedPlan, described
from flinkish_spark.connectors.kafka.client.admin import PLANNING_TIMEOUT_MS, GroupCommit, KafkaAdmin
from flinkish_spark.connectors.kafka.client.barriers import BarrierScanner, Scanned, SeenBarrier
from flinkish_spark.connectors.kafka.format.offsets import OffsetFinder, TopicWatch
from flinkish_spark.connectors.kafka.format.options import BarrierRecordPolicy, SourceOptions
from flinkish_spark.connectors.rates import Pace
from flinkish_spark.core.clock import Clock, SystemClock
from flinkish_spark.core.errors import ConfigError, FlinkishError
from flinkish_spark.core.offset_log import OFFSET_KEY
from flinkish_spark.core.store import SealedObjects
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.stream_readers import (
    TELLS_READERS,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from flinkish_spark.core.upstream_cut import CutState, place_of
from flinkish_spark.protocol.alignment import announced_channel
from flinkish_spark.protocol.control_offset import ControlOffset, TimeOffer
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose, JobUuid, Place
from flinkish_spark.protocol.input_gate import BarrierKind
from flinkish_spark.protocol.plan_layout import OWN_KEYS
from flinkish_spark.protocol.watermark_alignment import NONE_HELD
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.channels import channel_of
from flinkish_spark.worker.daemon import freeze_modules

if TYPE_CHECKING:
    import pyarrow as pa


#: Columns of Spark's own Kafka source.
SCHEMA = (
    "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, "
    "timestamp TIMESTAMP, timestampType INT"
)
HEADERS = ", headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
#: Ours.
LEADER_EPOCH = ", leaderEpoch INT"


class KafkaPiece(InputPartition):
    """The work of a task: a range of a partition, and behind it, in an environment's job, control rows."""

    def __init__(self, piece: Range | None, rows: Sequence[ControlRow] = ()) -> None:
        super().__init__(None)
        self.range, self.rows = piece, tuple(rows)

    def to_text(self) -> str:
        return json.dumps([None if self.range is None else astuple(self.range), self.rows])

    @classmethod
    def of(cls, text: str) -> KafkaPiece:
        found, rows = json.loads(text)
        return cls(None if found is None else Range(*found), [tuple(row) for row in rows])


def schema_of(options: SourceOptions) -> str:
    """Return the columns of records."""
    reader = options.reader
    return SCHEMA + HEADERS * reader.include_headers + LEADER_EPOCH * reader.include_leader_epoch


def read_range(options: SourceOptions, wanted: Range) -> Iterator[pa.RecordBatch]:
    """Yield the records of a range, in a task, the same at each attempt; no batch is empty."""
    from flinkish_spark.connectors.kafka.client.reader import OffsetRange, RangeReader

    freeze_modules()
    if not wanted.size:
        return
    reader = RangeReader(options.connection, options.reader)
    for batch in reader.read(OffsetRange(wanted.topic, wanted.partition, wanted.start, wanted.end)):
        if options.barrier_records is BarrierRecordPolicy.SKIP:
            batch = _without_barrier_records(options, batch)
        if batch.num_rows:
            yield batch


def _without_barrier_records(options: SourceOptions, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Leave out the barrier records of another job."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from flinkish_spark.connectors.kafka.client.barriers import BARRIER_KEY, mark_in
    from flinkish_spark.connectors.kafka.client.reader import OffsetRange, RangeReader

    # They have no value, and no key or ours; only of records that look so the headers are read, one by one.
    if not batch.column("value").null_count:
        return batch
    keys = batch.column("key")
    is_keyed = pc.fill_null(pc.not_equal(keys, BARRIER_KEY), False)
    candidates = batch.filter(pc.and_not(pc.is_null(batch.column("value")), is_keyed))
    reader = RangeReader(options.connection, replace(options.reader, include_headers=True))
    found = []
    for topic, partition, offset in zip(
        *(candidates.column(n).to_pylist() for n in ("topic", "partition", "offset")), strict=True
    ):
        for one in reader.read(OffsetRange(topic, partition, offset, offset + 1)):
            found += [offset for headers in one.column("headers").to_pylist() if mark_in(headers)]
    if not found:
        return batch
    return batch.filter(pc.invert(pc.is_in(batch.column("offset"), pa.array(found, pa.int64()))))


class KafkaBatchReader(DataSourceReader):
    """Reads from the starting to the ending offsets, as they are when Spark plans the query."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        with KafkaAdmin(self._options.connection, timeout_ms=PLANNING_TIMEOUT_MS) as admin:
            finder = OffsetFinder(admin, self._options)
            start, end = finder.starting(), finder.ending()
        ranges = [Range(t, p, start.get((t, p), 0), o) for (t, p), o in sorted(end.items())]
        cut = plan.pieces(
            [r for r in ranges if r.size > 0],
            min_partitions=self._options.min_partitions,
            max_per_partition=self._options.max_per_partition,
        )
        # Spark wants at least one piece.
        nothing = Range("", 0, 0, 0)
        return [KafkaPiece(piece) for piece in cut or [nothing]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, KafkaPiece)
        assert partition.range is not None
        return read_range(self._options, partition.range)


LOG = logging.getLogger(__name__)
#: After a refusal the next try waits, so that a missing right does not slow every micro-batch down.
_BACK_OFF_S = 30.0
_TIMEOUT_MS = 5_000


class GroupOffsets:
    """Commits the offsets of the option `flinkish.group.id`; does nothing without it."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._admin: KafkaAdmin | None = None
        self._committed: dict[Place, int] = {}
        self._not_before = float("-inf")

    def commit(self, offsets: Mapping[Place, int]) -> None:
        """Store the offsets of what Spark has finished, forward only."""
        group = self._options.group_id
        if not group or offsets == self._committed or time.monotonic() < self._not_before:
            return
        try:
            if self._admin is None:
                self._admin = KafkaAdmin(self._options.connection, timeout_ms=_TIMEOUT_MS)
            answer = self._admin.commit_offsets(group, offsets)
        except FlinkishError as error:
            LOG.warning("the offsets of group '%s' are stored later: %s", group, error)
            self._not_before = time.monotonic() + _BACK_OFF_S
            return
        if answer is GroupCommit.ACTIVE_MEMBERS:
            LOG.warning("the group '%s' has active members, so its offsets cannot be stored", group)
            self._not_before = time.monotonic() + _BACK_OFF_S
            return
        self._committed = dict(offsets)


#: What a plain query goes by, and a job's before its driver has said anything.
NOTHING_SAID = ControlOffset()
#: In the offset that a plain query begins with, and in no offset that Spark logs.
START_KEY = "flinkish:start"
#: In the end of a first micro-batch that is not empty: the offset at which it begins.
BEGAN_KEY = "flinkish:began"
#: Spark asks every 10 ms while there is nothing to read; the brokers are asked this often.
_ASK_EVERY_S = 0.025


class KafkaStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The streaming source; see `docs/drop-in.md`."""

    # Spark logs what `latestOffset` returns before it runs the micro-batch, so everything a re-run must
    # repeat is in that offset: the end of every partition and, inside an environment's job, what its driver
    # has said.
    #
    # Spark does not log where the first micro-batch begins; it asks again after a crash, when the answer may
    # be another one. So the first micro-batch of a plain query is empty and ends where the query begins, and
    # an environment's job keeps its first offsets in its job directory. Where `availableNow` may be one
    # micro-batch, in Spark 4.1, the first one goes on to its end, and has its beginning in that end.

    def __init__(self, options: SourceOptions, finder: OffsetFinder | None = None) -> None:
        self._options = options
        if finder is None:
            finder = OffsetFinder(KafkaAdmin(options.connection, timeout_ms=PLANNING_TIMEOUT_MS), options)
        self._finder = finder
        self._watch = TopicWatch(self._finder, options.reader.fail_on_data_loss)
        self._group = GroupOffsets(options)
        self._pace = Pace(options.pace, time.monotonic())
        self._target: dict[Place, int] | None = None
        self._newest: dict[Place, int] = {}
        self._asked_at = self._last_batch_at = float("-inf")

    def __getstate__(self) -> dict[str, Any]:
        # A reader is sent to every task; there it needs its options only.
        return {"_options": self._options}

    def initialOffset(self) -> dict[str, Any]:
        if not self._options.first_offsets:
            return {**self._logged(self._finder.starting(), NOTHING_SAID), START_KEY: True}
        return self._logged(plan.from_json(self._first()["offsets"]), NOTHING_SAID)

    def _first(self) -> dict[str, Any]:
        """Return where the job began, recording it at the first start."""
        # A rewind to before the first micro-batch must begin there, not where the topic ends by then.
        # A job may have several sources; no two read one topic.
        digest = hashlib.sha256(repr(self._options.subscription).encode()).hexdigest()
        folder, key = self._options.first_offsets, f"first-offsets/{digest[:16]}.json"
        store = StoreSpec.from_text(folder).open()
        objects = SealedObjects(store, folder)
        if objects.optional(key, "first-offsets", dict) is None:
            first = {"offsets": plan.to_json(self._finder.starting())}
            store.create_if_absent(key, seal("first-offsets", first))
        return objects.read(key, "first-offsets", dict)

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self._options.max_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._watch.ends({})

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._logged(self._newest, NOTHING_SAID) if self._newest else None

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next micro-batch ends; `start` if there is nothing new."""
        begin, checkpoint = parsed_offset(start)
        if START_KEY in start:
            logged = self._logged(begin, ControlOffset(checkpoint))
            first_end = logged if TELLS_READERS else self.latestOffset(logged, limit)
            return first_end if first_end == logged else {**first_end, BEGAN_KEY: logged}
        # Spark asks for a new end only after the micro-batch before it is in commits/.
        self._group.commit(begin)
        offered = ControlOffset.newest([start]).raised_to(self._offered())
        self._wait_a_little()
        self._newest = self._watch.ends(begin)
        end = self._capped(begin, self._newest)
        begin = self._watch.with_new(begin, end)
        begin = {place: min(begin[place], offset) for place, offset in end.items()}
        end = self._held_back(begin, end)
        if self._should_wait(begin, end):
            end = begin
        if isinstance(limit, ReadMaxRows):
            end = plan.limited(begin, end, limit.max_rows)
        end = self._paced(begin, end)
        if plan.available(begin, end):
            self._last_batch_at = time.monotonic()
        return self._logged(end, offered)

    def _wait_a_little(self) -> None:
        left = self._asked_at + _ASK_EVERY_S - time.monotonic()
        if left > 0:
            time.sleep(left)
        self._asked_at = time.monotonic()

    def _capped(self, begin: Mapping[Place, int], ends: Mapping[Place, int]) -> dict[Place, int]:
        target = self._target
        if target is None:
            return dict(ends)
        return {
            place: max(begin.get(place, 0), min(end, target.get(place, 0)))
            for place, end in ends.items()
            if place in begin or place in target
        }

    def _held_back(self, begin: Mapping[Place, int], end: dict[Place, int]) -> dict[Place, int]:
        """Return the ends, at the beginning where a partition is too far ahead of others in event time."""
        held = read_held(self._options.held_path, self._options.held_source)
        if held == NONE_HELD:
            return end
        wanted = self._options.subscription
        number = partial(channel_of, wanted.topics or sorted({topic for topic, _ in wanted.assigned}))
        return {place: begin[place] if held.holds(number(*place)) else at for place, at in end.items()}

    def _paced(self, begin: Mapping[Place, int], end: dict[Place, int]) -> dict[Place, int]:
        allowed = self._pace.allowance(time.monotonic())
        # A query that is to read what there is, and end, takes nothing new for the end.
        if allowed is None or self._target is not None:
            return end
        paced = plan.limited(begin, end, allowed) if allowed else dict(begin)
        self._pace.took(plan.available(begin, paced))
        return paced

    def _should_wait(self, begin: Mapping[Place, int], end: Mapping[Place, int]) -> bool:
        least = self._options.min_per_trigger
        if least is None or self._target is not None:
            return False
        waited_ms = (time.monotonic() - self._last_batch_at) * 1000
        return plan.available(begin, end) < least and waited_ms < self._options.max_trigger_delay_ms

    def _offered(self) -> ControlOffset:
        path = self._options.control_path
        return to_control_offset(read_control(path)) if path else NOTHING_SAID

    def _logged(self, offsets: Mapping[Place, int], control: ControlOffset) -> dict[str, Any]:
        said = control.to_json() if self._options.control_path else {}
        return {**plan.to_json(offsets), **said}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the pieces of a micro-batch; with a barrier behind the last one of each partition."""
        if START_KEY in start:
            if BEGAN_KEY not in end:
                return []
            start = end[BEGAN_KEY]
        (begin, before), (finish, checkpoint) = parsed_offset(start), parsed_offset(end)
        begin = self._watch.with_new(begin, finish)
        whole = [Range(t, p, min(begin[t, p], o), o) for (t, p), o in sorted(finish.items())]
        carries_barrier = checkpoint > before
        if not carries_barrier:
            whole = [r for r in whole if r.size]
        options = self._options
        cut = plan.pieces(
            whole, min_partitions=options.min_partitions, max_per_partition=options.max_per_partition
        )

        def barrier_of(number: int, of: int) -> ControlRow:
            return int(C.Kind.BARRIER), checkpoint, announced_channel(number, of), 0

        barriers = {(r.topic, r.partition): [barrier_of(i, len(whole))] for i, r in enumerate(whole)}
        pieces: list[InputPartition] = [
            KafkaPiece(p, barriers[p.topic, p.partition] if carries_barrier and p.is_last else ())
            for p in cut
        ]
        wakes = list(wake_rows(TimeOffer.from_json(start), TimeOffer.from_json(end)))
        if carries_barrier and not whole:
            # No topic matches the pattern yet.
            wakes.append(barrier_of(0, 1))
        return [*pieces, KafkaPiece(None, wakes)] if wakes else pieces

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the records of a piece; within a job one row, the piece itself."""
        assert isinstance(partition, KafkaPiece)
        if self._options.gives_pieces:
            return iter([(partition.to_text(),)])
        assert partition.range is not None
        return read_range(self._options, partition.range)

    def commit(self, end: dict[str, Any]) -> None:
        self._group.commit(parsed_offset(end)[0])


def parsed_offset(offset: Mapping[str, Any]) -> tuple[dict[Place, int], int]:
    """Return positions and checkpoint of an offset, without what else is in it."""
    topics = {topic: value for topic, value in offset.items() if not topic.startswith(OWN_KEYS)}
    return plan.from_json(topics), int(offset.get(OFFSET_KEY, 0))


_CLOCK = SystemClock()
#: How long an offered checkpoint may wait for its cut before that is worth a warning.
_PATIENCE_MS = 30_000


class AlignedStreamReader(KafkaStreamReader):
    def __init__(
        self,
        options: SourceOptions,
        finder: OffsetFinder | None = None,
        scan: Scan | None = None,
        clock: Clock = _CLOCK,
    ) -> None:
        super().__init__(options, finder)
        assert options.upstream is not None
        self._upstream, self._settings = options.upstream, options.upstream.settings
        self._clock = clock
        scan = scan or BarrierScanner(options.connection, options.reader).scan
        self._look = LookAhead(_of_job(scan, self._upstream.wanted))
        self._shared = SharedPlan(Path(options.control_path).with_suffix(".rounds"))
        self._first_offsets: dict[Place, int] = {}
        #: Whether the channel state that the first start offset has is still being replayed.
        self._is_replaying: bool | None = None
        self._status: AlignmentStatus | None = None
        self._waiting_for, self._waiting_since_ms = CheckpointId(0), 0

    def initialOffset(self) -> dict[str, Any]:
        first = super().initialOffset()
        positions, _ = parsed_offset(first)
        # The channels are those of the seed's position: what was added since waits for its turn.
        state = CutState.from_json(json.loads(self._options.upstream_start or "{}"), self._settings)
        if state is None:
            state = CutState.at_beginning(positions, self._settings)
        elif not {place_of(channel) for channel in state.gate.channels} <= positions.keys():
            # A topic is read no more, so what was read is no cut of what is read.
            state = CutState.somewhere(positions, self._settings)
        return {**first, **state.to_json(positions)}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next micro-batch ends; `start` if nothing is to be run now."""
        self._wait_a_little()
        return self._shared.agreed(start, lambda: self._planned(start, limit))

    def _planned(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        begin, drawn = parsed_offset(start)
        state = CutState.from_json(start, self._settings) or CutState.somewhere(begin, self._settings)
        state = self._of_wanted_job(state, begin)
        # Spark asks for a new end only after the micro-batch before it is in commits/.
        self._group.commit(begin)
        ends = self._newest = self._watch.ends(begin)
        view = View(
            begin=(begin := self._with_new(begin, ends)),
            ahead={p: self._ahead(state, p, begin[p], max(ends.get(p, 0), begin[p])) for p in begin},
            drawn=CheckpointId(drawn),
            offer=_offered(content := read_control(self._options.control_path), drawn),
            now_ms=self._clock.wall_ms(),
            most=limit.max_rows if isinstance(limit, ReadMaxRows) else None,
            held=self._held(state, begin),
        )
        seen_jobs = (seen.mark.job for _, ahead in sorted(view.ahead.items()) for seen in ahead.barriers)
        state = replace(state, job=state.job or next(seen_jobs, None))
        for place, ahead in view.ahead.items():
            _check_writers(place, state.job, state.passed.get(place), ahead.barriers)
        if any(
            s.mark.partitions > view.partitions(t) for (t, _), a in view.ahead.items() for s in a.barriers
        ):
            self._watch.look_again()
        planned = plan_micro_batch(state, view, self._settings)
        self._report(state, view, planned)
        before = TimeOffer.from_json(start)
        time = before.raised_to(TimeOffer.from_json(content))
        if planned is None:
            # Time goes on where the source stands.
            return start if time == before else {**start, **time.to_json()}
        drained = to_control_offset(content).drained
        drawn = int(planned.drawn)
        said = ControlOffset(
            drawn, time, drained=drawn if drawn == drained else ControlOffset.from_json(start).drained
        )
        return {**self._logged(planned.end, said), **planned.state.to_json(planned.end)}

    def _with_new(self, begin: Mapping[Place, int], ends: Mapping[Place, int]) -> dict[Place, int]:
        """Return `begin` with the partitions that were added, which may have to wait for their turn."""
        known = {**begin, **{p: o for p, o in self._first_offsets.items() if p not in begin and p in ends}}
        found = self._watch.with_new(known, ends)
        self._first_offsets = {place: offset for place, offset in found.items() if place not in begin}
        return found

    def _ahead(self, state: CutState, place: Place, begin: int, end: int) -> Scanned:
        checkpoint = state.passed.get(place)
        passed = None if checkpoint is None or state.job is None else Passed(state.job, checkpoint)
        return self._look.ahead(place, begin, end, passed)

    def _of_wanted_job(self, state: CutState, begin: Mapping[Place, int]) -> CutState:
        """Return the state, or a new one if it is about another job than the user names now."""
        wanted = self._upstream.wanted
        if wanted is None or state.job in (None, wanted):
            return state
        LOG.warning("the upstream job is %s now and was %s; cuts of the old one end here", wanted, state.job)
        return replace(CutState.somewhere(begin, self._settings), job=wanted)

    def _held(self, state: CutState, begin: Mapping[Place, int]) -> frozenset[Place]:
        if self._is_replaying is not False:
            self._is_replaying = bool(state.channel_state)
        return frozenset(begin.keys() - state.channel_state.keys()) if self._is_replaying else frozenset()

    def _report(self, state: CutState, view: View, planned: Planned | None) -> None:
        if planned is not None:
            state, view = planned.state, replace(view, begin=planned.end, drawn=planned.drawn)
            for checkpoint in planned.skipped:
                LOG.warning("no checkpoint of this job will name the upstream checkpoint %s", checkpoint)
        topics = ", ".join(sorted({topic for topic, _ in view.begin}))
        status = described(state, view, topics)
        if status != self._status:
            write_status(self._options.control_path, status)
            self._status = status
        offered, now_ms = view.offer.checkpoint, self._clock.monotonic_ms()
        if not view.is_offered or offered != self._waiting_for:
            self._waiting_for, self._waiting_since_ms = offered, now_ms
        elif now_ms - self._waiting_since_ms >= _PATIENCE_MS:
            LOG.warning("checkpoint %s has to wait: the source %s", offered, status.text)
            self._waiting_since_ms = now_ms


def _offered(control: Mapping[str, Any], drawn: int) -> Offer:
    if "checkpoint" not in control:
        return Offer(CheckpointId(drawn))
    purpose = CheckpointPurpose(control.get("purpose", CheckpointPurpose.PERIODIC.value))
    kind = BarrierKind.SAVEPOINT if purpose.is_savepoint else BarrierKind.CHECKPOINT
    return Offer(CheckpointId(int(control["checkpoint"])), kind)


def _of_job(scan: Scan, wanted: JobUuid | None) -> Scan:
    def scan_wanted(place: Place, start: int, end: int) -> Scanned:
        seen = scan(place, start, end)
        return replace(seen, barriers=tuple(s for s in seen.barriers if wanted in (None, s.mark.job)))

    return scan_wanted


def _check_writers(
    place: Place, job: JobUuid | None, passed: CheckpointId | None, barriers: tuple[SeenBarrier, ...]
) -> None:
    """Refuse barriers of two jobs, or of two sinks of one job, in a partition."""
    for seen in barriers:
        mark = seen.mark
        if job not in (None, mark.job):
            raise ConfigError(
                f"the topic '{place[0]}' has barrier records of two jobs, {job} and {mark.job}",
                why="a source can follow the checkpoints of one upstream job only",
                what_to_do="name the one to follow: UpstreamJob(job=...) with the uuid of its job.json; "
                "if the upstream job was replaced, that is the new one's",
                topic=place[0],
            )
        if mark.checkpoint == passed:
            raise ConfigError(
                f"the topic '{place[0]}' has two barrier records of checkpoint {passed}, "
                f"the second one by the sink '{mark.sink}'",
                why="behind the first one there may be records that belong to the checkpoint",
                what_to_do="let only the last of the upstream job's sinks that write the topic have "
                "barriers=BarrierRecords.EACH_CHECKPOINT",
                topic=place[0],
            )
        job, passed = mark.job, mark.checkpoint
