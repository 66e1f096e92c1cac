"""The reader of Kafka streams, on the driver and in tasks."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from flinkish_spark.checkpoint.control import read_control, read_held, to_control_offset
from flinkish_spark.connectors.control_source import ControlRow, wake_rows
from flinkish_spark.connectors.kafka.client.admin import PLANNING_TIMEOUT_MS, KafkaAdmin
from flinkish_spark.connectors.kafka.offset_ranges import (
    Range,
    apply_limit,
    count_available,
    from_json,
    split_ranges,
    to_json,
)
from flinkish_spark.connectors.kafka.offsets import store_offsets
from flinkish_spark.connectors.kafka.stream_offsets import OffsetFinder, TopicWatch
from flinkish_spark.connectors.kafka.stream_options import BarrierRecordPolicy, SourceOptions
from flinkish_spark.connectors.rates import TokenBucket
from flinkish_spark.connectors.splits import ask_once
from flinkish_spark.core.errors import FlinkishError
from flinkish_spark.core.offset_log import OFFSET_KEY
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.stream_readers import (
    TELLS_READERS,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from flinkish_spark.protocol.alignment import encode_announced_channel
from flinkish_spark.protocol.control_offset import ControlOffset, TimeOffer
from flinkish_spark.protocol.ids import Place
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
        first = ask_once(place, key, "first-offsets", lambda: {"offsets": to_json(self._finder.starting())})
        return self._to_offset(from_json(first["offsets"]), NO_CONTROL)

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
            end = apply_limit(begin, end, limit.max_rows)
        end = self._apply_pace(begin, end)
        if count_available(begin, end):
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
        paced = apply_limit(begin, end, allowed) if allowed else dict(begin)
        self._pace.spend(count_available(begin, paced))
        return paced

    def _should_wait(self, begin: Mapping[Place, int], end: Mapping[Place, int]) -> bool:
        least = self._options.min_per_trigger
        if least is None or self._target is not None:
            return False
        waited_ms = (time.monotonic() - self._last_batch_at) * 1000
        return count_available(begin, end) < least and waited_ms < self._options.max_trigger_delay_ms

    def _to_offset(self, offsets: Mapping[Place, int], control: ControlOffset) -> dict[str, Any]:
        said = control.to_json() if self._options.control_path else {}
        return {**to_json(offsets), **said}

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
        cut = split_ranges(
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
    topics = {topic: value for topic, value in offset.items() if not topic.startswith(OWN_KEYS)}
    return from_json(topics), int(offset.get(OFFSET_KEY, 0))
