"""Reader of offset ranges as Arrow record batches, with the columns of Spark's Kafka source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import attrgetter
from typing import Any

import kafka.errors as kafka_errors
import numpy as np
import pyarrow as pa

from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.batch_decoder import (
    BatchHeader,
    DecodedRecords,
    RawBatch,
    UnreadableBatchError,
    batches,
    control_type,
    decode,
    verify,
)
from flinkish_spark.connectors.kafka.client.batches import HEADERS_TYPE
from flinkish_spark.connectors.kafka.client.client import (
    UNAUTHORIZED,
    WIRES,
    Isolation,
    KafkaWire,
    WirePool,
    describe_code,
)
from flinkish_spark.connectors.kafka.client.codecs import Codec
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.fetch import FetchClient, Marker, PendingFetch, RawSlice
from flinkish_spark.connectors.kafka.client.settings import DOUBT_MS, ReaderSettings
from flinkish_spark.core.clock import Clock, SystemClock, tries
from flinkish_spark.core.errors import (
    AuthorizationError,
    BrokerUnavailableError,
    EnvironmentFault,
    InputLostError,
)
from flinkish_spark.types.record_time import check_times

#: Assumed record size before the first answer; smallest size of a Fetch.
_GUESSED_RECORD_BYTES, _LEAST_BYTES = 1024, 64 * 1024
_ABSENT = "Kafka does not know the topic or the partition"


@dataclass(frozen=True, slots=True)
class OffsetRange:
    topic: str
    partition: int
    start: int
    end: int

    def __post_init__(self) -> None:
        if self.partition < 0 or not 0 <= self.start <= self.end:
            raise ValueError(f"there is no range {self}")

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition} offsets {self.start} to {self.end - 1}"


@dataclass(frozen=True, slots=True)
class LostRange:
    """A part of a range that Kafka no longer has, with the evidence."""

    range: OffsetRange
    why: str


@dataclass(frozen=True, slots=True)
class FetchedBatches:
    batches: list[RawBatch]
    aborted: tuple[tuple[int, int], ...]
    #: The requested offset; the first batch may begin before it.
    start: int


class RangeFetches:
    """Fetches the batches of one range, answer by answer; used once, by one thread."""

    # It sends the next Fetch as soon as it knows where the answer ends, before the answer is decoded. A
    # broker that has just started may not know a topic, or the end of its log, for a moment, so a loss is
    # confirmed only after it has lasted for two seconds.

    def __init__(
        self,
        client: FetchClient,
        bounds: Callable[[], tuple[int, int]],
        wanted: OffsetRange,
        settings: ReaderSettings,
        clock: Clock,
    ) -> None:
        self._client, self._bounds, self._clock = client, bounds, clock
        self._wanted, self._settings = wanted, settings
        self._place = (wanted.topic, wanted.partition)
        self._position, self._end = wanted.start, wanted.end
        self._bytes_per_offset = float(_GUESSED_RECORD_BYTES)
        self._is_waiting = False
        self._ahead: PendingFetch | None = None
        #: Number of offsets that seem lost, and since when.
        self._doubt: tuple[int, int] | None = None
        self.losses: list[LostRange] = []

    def take(self) -> FetchedBatches | None:
        if self._position >= self._end:
            return None
        trouble = "no time was allowed"
        allowed_ms = self._settings.patience_ms
        for left_ms in tries(allowed_ms, self._clock):
            try:
                pending, self._ahead = self._ahead, None
                seen = (pending or self._send(left_ms)).result().get(self._place)
                fetched = None if seen is None else self._take_batches(seen, left_ms)
                if fetched is not None:
                    return fetched
                trouble = self._handle_no_batches(seen)
                if self._position >= self._end:
                    return None
            except BrokerUnavailableError as lost:
                self._doubt = None
                trouble = lost.why or lost.what
        raise BrokerUnavailableError(
            f"Reading {self._wanted} made no progress at offset {self._position} for {allowed_ms} ms",
            why=trouble,
            what_to_do="look at the broker that leads the partition; the task can be tried again",
            topic=self._wanted.topic,
            partition=self._wanted.partition,
            offset=self._position,
        )

    def _send(self, left_ms: int) -> PendingFetch:
        settings = self._settings
        limits = settings.waiting_limits() if self._is_waiting else settings.fetch_limits()
        # A small range needs only a part of the largest answer.
        guessed = max(_LEAST_BYTES, int((self._end - self._position) * self._bytes_per_offset))
        limits = replace(limits, partition_max_bytes=min(limits.partition_max_bytes, guessed))
        return self._client.send({self._place: self._position}, limits, connect_within_ms=left_ms)

    def _take_batches(self, seen: RawSlice, left_ms: int) -> FetchedBatches | None:
        """Return the batches of an answer, move on behind them and send the next Fetch."""
        if seen.code:
            return None
        found = list(batches(seen.records))
        if not found or found[-1].header.last_offset < self._position:
            return None
        asked, behind = self._position, found[-1].header.last_offset + 1
        self._bytes_per_offset = len(seen.records) / (behind - found[0].header.base_offset)
        self._position, self._is_waiting = behind, False
        self._doubt = None
        if self._position < self._end:
            try:
                self._ahead = self._send(left_ms)
            except BrokerUnavailableError:
                self._ahead = None  # take() sends it again; this answer must not be lost
        return FetchedBatches(found, seen.aborted, asked)

    def _handle_no_batches(self, seen: RawSlice | None) -> str:
        """Handle an answer without a batch; return the reason to report if this goes on."""
        if seen is None:
            return "the broker throttles this client"
        error = kafka_errors.for_code(seen.code)
        if error is kafka_errors.NoError:
            return self._handle_empty_answer(seen)
        if error is kafka_errors.OffsetOutOfRangeError:
            return self._handle_out_of_range()
        if error is kafka_errors.UnknownTopicOrPartitionError:
            return self._handle_loss(self._position, self._end, _ABSENT)
        self._doubt = None
        if seen.code in UNAUTHORIZED:
            raise AuthorizationError(
                f"Kafka refuses this principal READ on topic {self._wanted.topic!r} "
                f"({describe_code(seen.code)})",
                topic=self._wanted.topic,
                code=seen.code,
            )
        if not error.retriable:
            raise EnvironmentFault(
                f"Kafka refuses to read {self._wanted} at offset {self._position}",
                why=f"it answers {describe_code(seen.code)}",
                what_to_do="see what the brokers' logs say about it",
                code=seen.code,
            )
        return f"the last answer was {describe_code(seen.code)}"

    def _handle_empty_answer(self, seen: RawSlice) -> str:
        committed = self._settings.isolation is Isolation.READ_COMMITTED
        visible = seen.last_stable_offset if committed else seen.high_watermark
        if visible >= self._end and not seen.records:
            # Compaction can remove markers and records at the end of the range.
            self._position = self._end
            return "nothing is left"
        self._is_waiting = True
        if seen.high_watermark < self._end:
            why = f"the log ends at {seen.high_watermark}"
            return self._handle_loss(max(self._position, seen.high_watermark), self._end, why)
        self._doubt = None
        if visible < self._end:
            return f"a transaction is open at offset {visible}, which hides later records"
        return "the answer held no whole batch"

    def _handle_out_of_range(self) -> str:
        try:
            first, end = self._bounds()
        except InputLostError:
            return self._handle_loss(self._position, self._end, _ABSENT)
        if self._position < first:
            why = f"the log starts at {first}"
            return self._handle_loss(self._position, min(first, self._end), why)
        if self._position > end:
            return self._handle_loss(self._position, self._end, f"the log ends at {end}")
        self._doubt = None
        return "the broker's answers contradict each other"

    def _handle_loss(self, start: int, end: int, why: str) -> str:
        """Skip or report the loss of offsets from `start` to before `end` once it is confirmed."""
        now_ms = self._clock.monotonic_ms()
        if self._doubt is None or end - start < self._doubt[0]:
            # Missing offsets came back: the broker is still opening the log.
            self._doubt = (end - start, now_ms)
        if now_ms - self._doubt[1] < DOUBT_MS:
            return why
        if self._settings.fail_on_data_loss:
            raise InputLostError(
                f"Input is gone: Kafka no longer has the offsets {start} to {end - 1} of "
                f"topic {self._wanted.topic!r} partition {self._wanted.partition}",
                why=f"{why}: retention removed records, or the topic was truncated or created again",
                what_to_do="raise retention.ms, or set failOnDataLoss to false to go on without them",
                topic=self._wanted.topic,
                partition=self._wanted.partition,
                missing_start=start,
                missing_end=end,
            )
        self.losses.append(LostRange(OffsetRange(*self._place, start, end), why))
        if start <= self._position:
            self._position = end
        else:
            self._end = start
        self._doubt = None
        return why


_CLOCK = SystemClock()
_TIMESTAMP = pa.timestamp("us", tz="UTC")
_COLUMNS = (
    ("key", pa.binary()),
    ("value", pa.binary()),
    ("topic", pa.string()),
    ("partition", pa.int32()),
    ("offset", pa.int64()),
    ("timestamp", _TIMESTAMP),
    ("timestampType", pa.int32()),
)
#: Bytes decoded at once: enough to make numpy's calls cheap, little compared with a worker's memory.
_DECODED_BYTES = 8 * 1024 * 1024
#: Assumed compression ratio for this limit.
_EXPECTED_RATIO = 8
_NO_PRODUCER = -1


def record_schema(*, include_headers: bool, include_leader_epoch: bool = False) -> Any:
    headers = (("headers", HEADERS_TYPE),) if include_headers else ()
    epoch = (("leaderEpoch", pa.int32()),) if include_leader_epoch else ()
    return pa.schema([*_COLUMNS, *headers, *epoch])


def select_visible(
    batches: Iterable[RawBatch],
    aborted: Iterable[tuple[int, int]],
    isolation: Isolation,
    marker_of: Callable[[RawBatch], Marker | None] = control_type,
) -> Iterator[RawBatch]:
    """Yield the batches of one answer that are visible to a reader; no control batches."""
    # As Kafka's own consumer (`CompletedFetch`): an aborted transaction hides its producer's transactional
    # batches from its first offset on, up to that producer's next ABORT marker.
    committed = isolation is Isolation.READ_COMMITTED
    coming = sorted(aborted, key=lambda entry: entry[1], reverse=True)
    aborting: set[int] = set()
    for batch in batches:
        header = batch.header
        if committed and header.producer_id != _NO_PRODUCER:
            while coming and coming[-1][1] <= header.last_offset:
                aborting.add(coming.pop()[0])
            if header.producer_id in aborting:
                if header.is_control and marker_of(batch) is Marker.ABORT:
                    aborting.remove(header.producer_id)
                elif header.is_transactional:
                    continue
        if not header.is_control:
            yield batch


class RangeReader:
    """Reads ranges one after the other; one per task, used by one thread."""

    def __init__(
        self, connection: KafkaConnection, settings: ReaderSettings, *, pool: WirePool = WIRES
    ) -> None:
        self._connection, self._settings = connection, settings
        self._pool = pool
        self._schema = record_schema(
            include_headers=settings.include_headers, include_leader_epoch=settings.include_leader_epoch
        )
        self.losses: list[LostRange] = []

    def read(self, wanted: OffsetRange) -> Iterator[Any]:
        """Yield the visible records of a range in order, as non-empty ``pa.RecordBatch``."""
        if wanted.start == wanted.end:
            return
        with self._pool.wire(self._connection) as wire:
            fetches = RangeFetches(
                FetchClient(wire), lambda: find_bounds(wire, wanted), wanted, self._settings, _CLOCK
            )
            try:
                while (fetched := fetches.take()) is not None:
                    yield from self._decode(wanted, fetched)
                    # Free this answer before taking the next one: a third is already under way.
                    del fetched
            except UnreadableBatchError as broken:
                broken.add_note(f"The batch was read from {wanted.topic}-{wanted.partition}.")
                raise
            finally:
                self.losses += fetches.losses

    def _decode(self, wanted: OffsetRange, fetched: FetchedBatches) -> Iterator[Any]:
        inside = takewhile(lambda raw: raw.header.base_offset < wanted.end, fetched.batches)
        checked = map(verify, inside) if self._settings.check_crcs else inside
        seen = select_visible(checked, fetched.aborted, self._settings.isolation)
        for group in _groups(raw for raw in seen if raw.header.records):
            records = decode(*group, with_headers=self._settings.include_headers)
            # A range may begin and end inside a batch.
            bounds = (max(wanted.start, fetched.start), wanted.end)
            first, end = np.searchsorted(records.offsets, bounds).tolist()
            columns = self._columns(wanted, records, group[0].header)
            read = slice(first, end)
            check_times(wanted.topic, wanted.partition, records.offsets[read], records.timestamps_ms[read])
            if first < end:
                yield columns.slice(first, end - first)

    def _columns(self, wanted: OffsetRange, records: DecodedRecords, header: BatchHeader) -> Any:
        offsets = records.offsets
        columns = [
            records.keys,
            records.values,
            pa.repeat(pa.scalar(wanted.topic), len(offsets)),
            pa.repeat(pa.scalar(wanted.partition, pa.int32()), len(offsets)),
            pa.array(offsets),
            pa.array(records.timestamps_ms * 1000).view(_TIMESTAMP),
            pa.repeat(pa.scalar(int(header.timestamp_type), pa.int32()), len(offsets)),
        ]
        if self._settings.include_headers:
            columns.append(records.headers)
        if self._settings.include_leader_epoch:
            columns.append(pa.repeat(pa.scalar(header.partition_leader_epoch, pa.int32()), len(offsets)))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _groups(batches: Iterable[RawBatch]) -> Iterator[list[RawBatch]]:
    """Group batches to decode at once; those of a group share timestamp type and leader epoch."""
    key_of = attrgetter("timestamp_type", "partition_leader_epoch")
    group: list[RawBatch] = []
    size = 0
    for raw in batches:
        more = len(raw.body) * (1 if raw.header.codec is Codec.NONE else _EXPECTED_RATIO)
        alike = group and key_of(raw.header) == key_of(group[0].header)
        if group and (not alike or size + more > _DECODED_BYTES):
            yield group
            group, size = [], 0
        group.append(raw)
        size += more
    if group:
        yield group


def find_bounds(wire: KafkaWire, wanted: OffsetRange) -> tuple[int, int]:
    place = (wanted.topic, wanted.partition)
    admin = KafkaAdmin.from_wire(wire)
    first = admin.beginning_offsets([place])[place]
    return first, admin.end_offsets([place], Isolation.READ_UNCOMMITTED)[place]
