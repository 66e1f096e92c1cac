"""Readers of `format("flinkish-kafka")`: batch, stream and chained stream, on the driver and in tasks."""

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
from flinkish_spark.connectors.kafka.chaining.alignment import (
    MicroBatchPlan,
    Offer,
    Range,
    View,
    plan_micro_batch,
)
from flinkish_spark.connectors.kafka.chaining.upstream import (
    BarrierFinder,
    PassedBarrier,
    Scan,
    SharedPlan,
    describe_status,
)
from flinkish_spark.connectors.kafka.client.admin import PLANNING_TIMEOUT_MS, KafkaAdmin
from flinkish_spark.connectors.kafka.client.barriers import BarrierScan, BarrierScanner, SeenBarrier
from flinkish_spark.connectors.kafka.format.offsets import OffsetFinder, TopicWatch
from flinkish_spark.connectors.kafka.format.options import BarrierRecordPolicy, SourceOptions
from flinkish_spark.connectors.kafka.offsets import store_offsets
from flinkish_spark.connectors.rates import TokenBucket
from flinkish_spark.connectors.splits import ask_once
from flinkish_spark.core.clock import Clock, SystemClock
from flinkish_spark.core.errors import ConfigError, FlinkishError
from flinkish_spark.core.offset_log import OFFSET_KEY
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.stream_readers import (
    TELLS_READERS,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from flinkish_spark.core.upstream_cut import CutState, place_of
from flinkish_spark.protocol.alignment import encode_announced_channel
from flinkish_spark.protocol.control_offset import ControlOffset, TimeOffer
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
#: Column of this package.
LEADER_EPOCH = ", leaderEpoch INT"


class KafkaPiece(InputPartition):
    """The input of a task: a range of a partition and, in an environment's job, control rows after it."""

    def __init__(self, piece: Range | None, rows: Sequence[ControlRow] = ()) -> None:
        super().__init__(None)
        self.range, self.rows = piece, tuple(rows)

    def to_text(self) -> str:
        return json.dumps([None if self.range is None else astuple(self.range), self.rows])

    @classmethod
    def of(cls, text: str) -> KafkaPiece:
        found, rows = json.loads(text)
        return cls(None if found is None else Range(*found), [tuple(row) for row in rows])


def make_schema(options: SourceOptions) -> str:
    """Return the schema of records as DDL."""
    reader = options.reader
    return SCHEMA + HEADERS * reader.include_headers + LEADER_EPOCH * reader.include_leader_epoch


def read_range(options: SourceOptions, wanted: Range) -> Iterator[pa.RecordBatch]:
    """Yield the records of a range, the same in every task attempt; no batch is empty."""
    from flinkish_spark.connectors.kafka.client.reader import OffsetRange, RangeReader

    freeze_modules()
    if not wanted.size:
        return
    reader = RangeReader(options.connection, options.reader)
    for batch in reader.read(OffsetRange(wanted.topic, wanted.partition, wanted.start, wanted.end)):
        if options.barrier_records is BarrierRecordPolicy.SKIP:
            batch = _drop_barrier_records(options, batch)
        if batch.num_rows:
            yield batch


def _drop_barrier_records(options: SourceOptions, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Drop the barrier records of other jobs."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from flinkish_spark.connectors.kafka.client.barriers import BARRIER_KEY, find_mark
    from flinkish_spark.connectors.kafka.client.reader import OffsetRange, RangeReader

    # They have no value, and no key or BARRIER_KEY. The headers of such candidates are read one by one.
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
            found += [offset for headers in one.column("headers").to_pylist() if find_mark(headers)]
    if not found:
        return batch
    return batch.filter(pc.invert(pc.is_in(batch.column("offset"), pa.array(found, pa.int64()))))


class KafkaBatchReader(DataSourceReader):
    """Reads from the starting to the ending offsets, resolved when Spark plans the query."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        with KafkaAdmin(self._options.connection, timeout_ms=PLANNING_TIMEOUT_MS) as admin:
            finder = OffsetFinder(admin, self._options)
            start, end = finder.starting(), finder.ending()
        ranges = [Range(t, p, start.get((t, p), 0), o) for (t, p), o in sorted(end.items())]
        cut = plan.split_ranges(
            [r for r in ranges if r.size > 0],
            min_partitions=self._options.min_partitions,
            max_per_partition=self._options.max_per_partition,
        )
        # Spark needs at least one partition.
        nothing = Range("", 0, 0, 0)
        return [KafkaPiece(piece) for piece in cut or [nothing]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, KafkaPiece)
        assert partition.range is not None
        return read_range(self._options, partition.range)


LOG = logging.getLogger(__name__)
#: Pause after a refusal, so that a missing right does not slow down every micro-batch.
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
        """Store the offsets of finished micro-batches, forward only."""
        group = self._options.group_id
        if not group or offsets == self._committed or time.monotonic() < self._not_before:
            return
        try:
            if self._admin is None:
                self._admin = KafkaAdmin(self._options.connection, timeout_ms=_TIMEOUT_MS)
            store_offsets(self._admin, group, offsets)
        except FlinkishError as error:
            LOG.warning("the offsets of group '%s' are stored later: %s", group, error)
            self._not_before = time.monotonic() + _BACK_OFF_S
        else:
            self._committed = dict(offsets)


#: The control offset of a plain query, and of a job before its driver has written one.
NO_CONTROL = ControlOffset()
#: Key of the initial offset of a plain query; Spark never logs it.
START_KEY = "flinkish:start"
#: Key in the end offset of a first, non-empty micro-batch: the offset at which it begins.
BEGAN_KEY = "flinkish:began"
#: How often to ask the brokers while there is nothing to read; Spark asks every 10 ms.
_ASK_EVERY_S = 0.025


class KafkaStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The streaming source; see `docs/drop-in.md`."""

    # Spark logs the result of `latestOffset` before it runs the micro-batch, so this offset holds everything
    # that a repetition needs: the end of every partition and, in an environment's job, the control offset.
    #
    # Spark does not log where the first micro-batch begins; after a crash it asks again, and the answer may
    # differ. So the first micro-batch of a plain query is empty and ends where the query begins, and an
    # environment's job keeps its first offsets in its job directory. In Spark 4.1 `availableNow` may run a
    # single micro-batch; there the first one reads records, and its end offset holds its beginning.

    def __init__(self, options: SourceOptions, finder: OffsetFinder | None = None) -> None:
        self._options = options
        if finder is None:
            finder = OffsetFinder(KafkaAdmin(options.connection, timeout_ms=PLANNING_TIMEOUT_MS), options)
        self._finder = finder
        self._watch = TopicWatch(self._finder, options.reader.fail_on_data_loss)
        self._group = GroupOffsets(options)
        self._pace = TokenBucket(options.pace, time.monotonic())
        self._target: dict[Place, int] | None = None
        self._newest: dict[Place, int] = {}
        self._asked_at = self._last_batch_at = float("-inf")

    def __getstate__(self) -> dict[str, Any]:
        # Spark pickles the reader into tasks, which need its options only.
        return {"_options": self._options}

    def initialOffset(self) -> dict[str, Any]:
        if not self._options.first_offsets:
            return {**self._to_offset(self._finder.starting(), NO_CONTROL), START_KEY: True}
        # A rewind to before the first micro-batch must begin there again, not at the later end of the topic.
        # Key by subscription: no two sources of a job read one topic.
        digest = hashlib.sha256(repr(self._options.subscription).encode()).hexdigest()
        place, key = StoreSpec.from_text(self._options.first_offsets), f"first-offsets/{digest[:16]}.json"
        first = ask_once(
            place, key, "first-offsets", lambda: {"offsets": plan.to_json(self._finder.starting())}
        )
        return self._to_offset(plan.from_json(first["offsets"]), NO_CONTROL)

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self._options.max_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._watch.ends({})

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._to_offset(self._newest, NO_CONTROL) if self._newest else None

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next micro-batch ends; `start` if there is nothing new."""
        begin, checkpoint = parse_offset(start)
        if START_KEY in start:
            logged = self._to_offset(begin, ControlOffset(checkpoint))
            first_end = logged if TELLS_READERS else self.latestOffset(logged, limit)
            return first_end if first_end == logged else {**first_end, BEGAN_KEY: logged}
        # Spark asks for a new end only after the micro-batch before it is in commits/.
        self._group.commit(begin)
        path = self._options.control_path
        now = to_control_offset(read_control(path)) if path else NO_CONTROL
        offered = ControlOffset.find_newest([start]).merge_max(now)
        self._wait_a_little()
        self._newest = self._watch.ends(begin)
        end = self._cap(begin, self._newest)
        begin = self._watch.add_new_partitions(begin, end)
        begin = {place: min(begin[place], offset) for place, offset in end.items()}
        end = self._hold_back(begin, end)
        if self._should_wait(begin, end):
            end = begin
        if isinstance(limit, ReadMaxRows):
            end = plan.apply_limit(begin, end, limit.max_rows)
        end = self._apply_pace(begin, end)
        if plan.count_available(begin, end):
            self._last_batch_at = time.monotonic()
        return self._to_offset(end, offered)

    def _wait_a_little(self) -> None:
        left = self._asked_at + _ASK_EVERY_S - time.monotonic()
        if left > 0:
            time.sleep(left)
        self._asked_at = time.monotonic()

    def _cap(self, begin: Mapping[Place, int], ends: Mapping[Place, int]) -> dict[Place, int]:
        target = self._target
        if target is None:
            return dict(ends)
        return {
            place: max(begin.get(place, 0), min(end, target.get(place, 0)))
            for place, end in ends.items()
            if place in begin or place in target
        }

    def _hold_back(self, begin: Mapping[Place, int], end: dict[Place, int]) -> dict[Place, int]:
        """Hold back partitions that are too far ahead of others in event time."""
        held = read_held(self._options.held_path, self._options.held_source)
        if held == NONE_HELD:
            return end
        wanted = self._options.subscription
        number = partial(channel_of, wanted.topics or sorted({topic for topic, _ in wanted.assigned}))
        return {place: begin[place] if held.holds(number(*place)) else at for place, at in end.items()}

    def _apply_pace(self, begin: Mapping[Place, int], end: dict[Place, int]) -> dict[Place, int]:
        allowed = self._pace.allowance(time.monotonic())
        # With `availableNow` an empty micro-batch would end the query, so there is no pace.
        if allowed is None or self._target is not None:
            return end
        paced = plan.apply_limit(begin, end, allowed) if allowed else dict(begin)
        self._pace.spend(plan.count_available(begin, paced))
        return paced

    def _should_wait(self, begin: Mapping[Place, int], end: Mapping[Place, int]) -> bool:
        least = self._options.min_per_trigger
        if least is None or self._target is not None:
            return False
        waited_ms = (time.monotonic() - self._last_batch_at) * 1000
        return plan.count_available(begin, end) < least and waited_ms < self._options.max_trigger_delay_ms

    def _to_offset(self, offsets: Mapping[Place, int], control: ControlOffset) -> dict[str, Any]:
        said = control.to_json() if self._options.control_path else {}
        return {**plan.to_json(offsets), **said}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the input of a micro-batch's tasks; the last range of each partition carries its barrier."""
        if START_KEY in start:
            if BEGAN_KEY not in end:
                return []
            start = end[BEGAN_KEY]
        (begin, before), (finish, checkpoint) = parse_offset(start), parse_offset(end)
        begin = self._watch.add_new_partitions(begin, finish)
        whole = [Range(t, p, min(begin[t, p], o), o) for (t, p), o in sorted(finish.items())]
        carries_barrier = checkpoint > before
        if not carries_barrier:
            whole = [r for r in whole if r.size]
        options = self._options
        cut = plan.split_ranges(
            whole, min_partitions=options.min_partitions, max_per_partition=options.max_per_partition
        )

        def make_barrier(number: int, of: int) -> ControlRow:
            return int(C.Kind.BARRIER), checkpoint, encode_announced_channel(number, of), 0

        barriers = {(r.topic, r.partition): [make_barrier(i, len(whole))] for i, r in enumerate(whole)}
        pieces: list[InputPartition] = [
            KafkaPiece(p, barriers[p.topic, p.partition] if carries_barrier and p.is_last else ())
            for p in cut
        ]
        wakes = list(wake_rows(TimeOffer.from_json(start), TimeOffer.from_json(end)))
        if carries_barrier and not whole:
            # No topic matches the pattern yet.
            wakes.append(make_barrier(0, 1))
        return [*pieces, KafkaPiece(None, wakes)] if wakes else pieces

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the records of a range; in an environment's job one row with the range itself."""
        assert isinstance(partition, KafkaPiece)
        if self._options.gives_pieces:
            return iter([(partition.to_text(),)])
        assert partition.range is not None
        return read_range(self._options, partition.range)

    def commit(self, end: dict[str, Any]) -> None:
        self._group.commit(parse_offset(end)[0])


def parse_offset(offset: Mapping[str, Any]) -> tuple[dict[Place, int], int]:
    """Return the positions and the checkpoint in an offset."""
    topics = {topic: value for topic, value in offset.items() if not topic.startswith(OWN_KEYS)}
    return plan.from_json(topics), int(offset.get(OFFSET_KEY, 0))


_CLOCK = SystemClock()
#: How long an offered checkpoint may wait for its cut before a warning.
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
        self._look = BarrierFinder(_keep_barriers_of(scan, self._upstream.wanted))
        self._shared = SharedPlan(Path(options.control_path).with_suffix(".rounds"))
        self._first_offsets: dict[Place, int] = {}
        #: Whether channel state of the first start offset is still being replayed; None at first.
        self._is_replaying: bool | None = None
        self._status: AlignmentStatus | None = None
        self._waiting_for, self._waiting_since_ms = CheckpointId(0), 0

    def initialOffset(self) -> dict[str, Any]:
        first = super().initialOffset()
        positions, _ = parse_offset(first)
        # The channels are those of the restored position; partitions added since wait for their cut.
        state = CutState.from_json(json.loads(self._options.upstream_start or "{}"), self._settings)
        if state is None:
            state = CutState.create_at_start(positions, self._settings)
        elif not {place_of(channel) for channel in state.gate.channels} <= positions.keys():
            # A topic was removed, so the restored position is no cut of the remaining ones.
            state = CutState.create_midway(positions, self._settings)
        return {**first, **state.to_json(positions)}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next micro-batch ends; `start` if there should be none now."""
        self._wait_a_little()
        return self._shared.plan_once(start, lambda: self._plan(start, limit))

    def _plan(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        begin, drawn = parse_offset(start)
        state = CutState.from_json(start, self._settings) or CutState.create_midway(begin, self._settings)
        state = self._follow_wanted_job(state, begin)
        # Spark asks for a new end only after the micro-batch before it is in commits/.
        self._group.commit(begin)
        ends = self._newest = self._watch.ends(begin)
        view = View(
            begin=(begin := self._add_new_partitions(begin, ends)),
            ahead={p: self._find_ahead(state, p, begin[p], max(ends.get(p, 0), begin[p])) for p in begin},
            drawn=CheckpointId(drawn),
            offer=_parse_offer(content := read_control(self._options.control_path), drawn),
            now_ms=self._clock.wall_ms(),
            most=limit.max_rows if isinstance(limit, ReadMaxRows) else None,
            held=self._find_held(state, begin),
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
        time = before.merge_max(TimeOffer.from_json(content))
        if planned is None:
            # Processing time advances while the source stands still.
            return start if time == before else {**start, **time.to_json()}
        drained = to_control_offset(content).drained
        drawn = int(planned.drawn)
        said = ControlOffset(
            drawn, time, drained=drawn if drawn == drained else ControlOffset.from_json(start).drained
        )
        return {**self._to_offset(planned.end, said), **planned.state.to_json(planned.end)}

    def _add_new_partitions(self, begin: Mapping[Place, int], ends: Mapping[Place, int]) -> dict[Place, int]:
        """Add new partitions to `begin`; they may have to wait for their cut."""
        known = {**begin, **{p: o for p, o in self._first_offsets.items() if p not in begin and p in ends}}
        found = self._watch.add_new_partitions(known, ends)
        self._first_offsets = {place: offset for place, offset in found.items() if place not in begin}
        return found

    def _find_ahead(self, state: CutState, place: Place, begin: int, end: int) -> BarrierScan:
        checkpoint = state.passed.get(place)
        passed = None if checkpoint is None or state.job is None else PassedBarrier(state.job, checkpoint)
        return self._look.find_ahead(place, begin, end, passed)

    def _follow_wanted_job(self, state: CutState, begin: Mapping[Place, int]) -> CutState:
        """Return the state, or a new one if the user now names another upstream job."""
        wanted = self._upstream.wanted
        if wanted is None or state.job in (None, wanted):
            return state
        LOG.warning("the upstream job is %s now and was %s; cuts of the old one end here", wanted, state.job)
        return replace(CutState.create_midway(begin, self._settings), job=wanted)

    def _find_held(self, state: CutState, begin: Mapping[Place, int]) -> frozenset[Place]:
        if self._is_replaying is not False:
            self._is_replaying = bool(state.channel_state)
        return frozenset(begin.keys() - state.channel_state.keys()) if self._is_replaying else frozenset()

    def _report(self, state: CutState, view: View, planned: MicroBatchPlan | None) -> None:
        if planned is not None:
            state, view = planned.state, replace(view, begin=planned.end, drawn=planned.drawn)
            for checkpoint in planned.skipped:
                LOG.warning("no checkpoint of this job will name the upstream checkpoint %s", checkpoint)
        topics = ", ".join(sorted({topic for topic, _ in view.begin}))
        status = describe_status(state, view, topics)
        if status != self._status:
            write_status(self._options.control_path, status)
            self._status = status
        offered, now_ms = view.offer.checkpoint, self._clock.monotonic_ms()
        if not view.is_offered or offered != self._waiting_for:
            self._waiting_for, self._waiting_since_ms = offered, now_ms
        elif now_ms - self._waiting_since_ms >= _PATIENCE_MS:
            LOG.warning("checkpoint %s has to wait: the source %s", offered, status.text)
            self._waiting_since_ms = now_ms


def _parse_offer(control: Mapping[str, Any], drawn: int) -> Offer:
    if "checkpoint" not in control:
        return Offer(CheckpointId(drawn))
    purpose = CheckpointPurpose(control.get("purpose", CheckpointPurpose.PERIODIC.value))
    kind = BarrierKind.SAVEPOINT if purpose.is_savepoint else BarrierKind.CHECKPOINT
    return Offer(CheckpointId(int(control["checkpoint"])), kind)


def _keep_barriers_of(scan: Scan, wanted: JobUuid | None) -> Scan:
    def scan_wanted(place: Place, start: int, end: int) -> BarrierScan:
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
                what_to_do="name one of them: UpstreamJob(job=...) with the uuid in its job.json; "
                "if the upstream job was replaced, name the new job",
                topic=place[0],
            )
        if mark.checkpoint == passed:
            raise ConfigError(
                f"the topic '{place[0]}' has two barrier records of checkpoint {passed}; "
                f"the sink '{mark.sink}' wrote the second one",
                why="records of the checkpoint may follow the first barrier record",
                what_to_do="find the sinks of the upstream job that write this topic, and give "
                "barriers=BarrierRecords.EACH_CHECKPOINT only to the last one",
                topic=place[0],
            )
        job, passed = mark.job, mark.checkpoint
