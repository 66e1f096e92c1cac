"""Ranges of Kafka partitions as Arrow record batches, with the columns of Spark's Kafka source.

This is the task's side of a Kafka source: the driver plans ranges, each task reads some of them.
No record exists as a Python object on the way; see ``record_decode``. What a reader may see is
decided batch by batch, as Kafka's own consumer does it (``CompletedFetch`` there).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from flinkish_spark.clock import Clock, SystemClock
from flinkish_spark.kafka._wire import KafkaWire
from flinkish_spark.kafka._wire_fetch import FetchClient
from flinkish_spark.kafka.admin import KafkaAdmin
from flinkish_spark.kafka.answers import Isolation, Marker
from flinkish_spark.kafka.compression import Codec, UnreadableCompression
from flinkish_spark.kafka.options import KafkaConnection
from flinkish_spark.kafka.range_fetches import FetchedBatches, LostRange, OffsetRange, RangeFetches
from flinkish_spark.kafka.reader_settings import ReaderSettings
from flinkish_spark.kafka.record_batch import HEADERS_TYPE
from flinkish_spark.kafka.record_decode import (
    CorruptBatch,
    DecodedRecords,
    RawBatch,
    UnsupportedFormat,
    control_type,
    decode,
    verify,
)
from flinkish_spark.kafka.record_times import check_times
from flinkish_spark.kafka.wire_pool import WIRES, WirePool

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
#: So much is decoded at once: enough to make numpy's calls cheap, little beside a worker's memory.
_DECODED_BYTES = 8 * 1024 * 1024
#: What compressed records may grow by on average before the above is no bound any more.
_EXPECTED_RATIO = 8
_NO_PRODUCER = -1


def record_schema(*, include_headers: bool) -> Any:
    """Return the Arrow schema of what a :class:`RangeReader` yields."""
    headers = (("headers", HEADERS_TYPE),) if include_headers else ()
    return pa.schema([*_COLUMNS, *headers])


class BatchLike(Protocol):
    """What decides whether a batch is visible; a ``BatchHeader``."""

    @property
    def last_offset(self) -> int: ...
    @property
    def producer_id(self) -> int: ...
    @property
    def is_transactional(self) -> bool: ...
    @property
    def is_control(self) -> bool: ...


_B = TypeVar("_B")


def visible(
    batches: Iterable[_B],
    aborted: Iterable[tuple[int, int]],
    isolation: Isolation,
    header_of: Callable[[_B], BatchLike],
    marker_of: Callable[[_B], Marker | None],
) -> Iterator[_B]:
    """Yield the batches of one answer whose records a reader sees; never a control batch.

    Under read_committed, a transaction in `aborted` hides its producer's transactional batches
    from its first offset on, up to that producer's next ABORT marker.

    Parameters
    ----------
    batches
        The batches of one answer to a Fetch, in the order of the log.
    aborted
        (producer id, first offset) of the aborted transactions, as in the same answer.
    marker_of
        What a control batch says; asked for those only that could end an aborted transaction.
    """
    committed = isolation is Isolation.READ_COMMITTED
    coming = sorted(aborted, key=lambda entry: entry[1], reverse=True)
    aborting: set[int] = set()
    for batch in batches:
        header = header_of(batch)
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
    """Reads ranges one after the other; made by each task, used by one thread.

    Connections come from a pool of the process and go back to it, whatever ends a read. Nothing
    is kept that a crash could lose: a range read again gives the same records.

    Parameters
    ----------
    connection
        Where Kafka is.
    settings
        How to read.
    pool
        Where connections come from.
    clock
        Time, replaceable in tests.

    Attributes
    ----------
    losses
        The ranges that were skipped because Kafka no longer has them, in the order they were
        found; stays empty unless the settings say not to fail on data loss.

    Examples
    --------
    >>> reader = RangeReader(KafkaConnection("broker:9092"), ReaderSettings())
    >>> batches = list(reader.read(OffsetRange("orders", 0, 100, 200)))  # doctest: +SKIP
    """

    def __init__(
        self,
        connection: KafkaConnection,
        settings: ReaderSettings,
        *,
        pool: WirePool = WIRES,
        clock: Clock = _CLOCK,
    ) -> None:
        self._connection, self._settings = connection, settings
        self._pool, self._clock = pool, clock
        self._schema = record_schema(include_headers=settings.include_headers)
        self.losses: list[LostRange] = []

    def read(self, wanted: OffsetRange) -> Iterator[Any]:
        """Yield the visible records of a range as ``pa.RecordBatch`` of :func:`record_schema`.

        In the order of the log; no batch is empty, and a range without a visible record yields
        none. Asks Kafka for nothing if the range is empty. While the caller works on a batch the
        next answer is already on its way.

        Raises
        ------
        InputLostError
            If a part of the range is gone and the settings say to fail.
        BrokerUnavailableError
            If reading did not get on within ``default.api.timeout.ms``.
        AuthorizationError
            If the principal may not read the topic.
        CorruptBatch, UnsupportedFormat, UnreadableCompression
            If a batch cannot be decoded.
        """
        if wanted.start == wanted.end:
            return
        with self._pool.wire(self._connection) as wire:
            fetches = RangeFetches(
                FetchClient(wire), lambda: _bounds(wire, wanted), wanted, self._settings, self._clock
            )
            try:
                while (fetched := fetches.take()) is not None:
                    yield from self._decoded(wanted, fetched)
                    # Not the next answer beside this one and the one that is then on its way.
                    del fetched
            except (CorruptBatch, UnsupportedFormat, UnreadableCompression) as broken:
                broken.add_note(f"The batch was read from {wanted.topic}-{wanted.partition}.")
                raise
            finally:
                self.losses += fetches.losses

    def _decoded(self, wanted: OffsetRange, fetched: FetchedBatches) -> Iterator[Any]:
        inside = takewhile(lambda raw: raw.header.base_offset < wanted.end, fetched.batches)
        checked = map(_verified, inside) if self._settings.check_crcs else inside
        seen = visible(
            checked, fetched.aborted, self._settings.isolation, lambda raw: raw.header, control_type
        )
        for group in _groups(raw for raw in seen if raw.header.records):
            records = decode(*group, with_headers=self._settings.include_headers)
            # The range may begin and end inside a batch.
            bounds = (max(wanted.start, fetched.start), wanted.end)
            first, end = np.searchsorted(records.offsets, bounds).tolist()
            columns = self._columns(wanted, records, int(group[0].header.timestamp_type))
            read = slice(first, end)
            check_times(wanted.topic, wanted.partition, records.offsets[read], records.timestamps_ms[read])
            if first < end:
                yield columns.slice(first, end - first)

    def _columns(self, wanted: OffsetRange, records: DecodedRecords, timestamp_type: int) -> Any:
        offsets = records.offsets
        columns = [
            records.keys,
            records.values,
            pa.repeat(pa.scalar(wanted.topic), len(offsets)),
            pa.repeat(pa.scalar(wanted.partition, pa.int32()), len(offsets)),
            pa.array(offsets),
            pa.array(records.timestamps_ms * 1000).view(_TIMESTAMP),
            pa.repeat(pa.scalar(timestamp_type, pa.int32()), len(offsets)),
        ]
        if self._settings.include_headers:
            columns.append(records.headers)
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _verified(raw: RawBatch) -> RawBatch:
    verify(raw)
    return raw


def _groups(batches: Iterable[RawBatch]) -> Iterator[list[RawBatch]]:
    """Cut a run of batches into lists that are decoded at once, of one timestamp type each."""
    group: list[RawBatch] = []
    size = 0
    for raw in batches:
        more = len(raw.body) * (1 if raw.header.codec is Codec.NONE else _EXPECTED_RATIO)
        alike = group and raw.header.timestamp_type is group[0].header.timestamp_type
        if group and (not alike or size + more > _DECODED_BYTES):
            yield group
            group, size = [], 0
        group.append(raw)
        size += more
    if group:
        yield group


def _bounds(wire: KafkaWire, wanted: OffsetRange) -> tuple[int, int]:
    """Return the first offset that the log holds and the offset after its last record."""
    place = (wanted.topic, wanted.partition)
    admin = KafkaAdmin.over(wire)
    first = admin.beginning_offsets([place])[place]
    return first, admin.end_offsets([place], Isolation.READ_UNCOMMITTED)[place]


__all__ = ["LostRange", "OffsetRange", "RangeReader", "ReaderSettings", "record_schema", "visible"]
