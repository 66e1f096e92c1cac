"""Finding barrier records in a range of a partition, without looking into any other record.

A barrier record is alone in its batch and its batch is transactional: all other batches are passed
over by their headers. What is not visible to a read_committed reader is not found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

from flinkish_spark.clock import Clock, SystemClock
from flinkish_spark.errors import CorruptObjectError
from flinkish_spark.kafka import Isolation
from flinkish_spark.kafka._wire_fetch import FetchClient
from flinkish_spark.kafka.answers import Place
from flinkish_spark.kafka.barrier_records import BarrierMark, mark_in
from flinkish_spark.kafka.options import KafkaConnection
from flinkish_spark.kafka.range_fetches import FetchedBatches, OffsetRange, RangeFetches
from flinkish_spark.kafka.range_reader import _bounds, visible
from flinkish_spark.kafka.reader_settings import ReaderSettings
from flinkish_spark.kafka.record_decode import RawBatch, control_type, decode
from flinkish_spark.kafka.wire_pool import WIRES, WirePool

_CLOCK = SystemClock()
#: The record of a barrier holds its mark and nothing else.
_MOST_BARRIER_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class SeenBarrier:
    """A visible barrier record and where it is."""

    offset: int
    mark: BarrierMark


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a range holds.

    Parameters
    ----------
    end
        Behind the last visible record, barrier records included; the start of the range if there is none.
        Markers of transactions and what was aborted are no records.
    barriers
        In the order of the log.
    """

    end: int
    barriers: tuple[SeenBarrier, ...]


class BarrierScanner:
    """Scans ranges of partitions one after the other; used by one thread, keeps nothing.

    Parameters
    ----------
    connection
        Where Kafka is.
    settings
        How to read; always read_committed, whatever they say.
    pool, clock
        Replaceable in tests.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        settings: ReaderSettings,
        *,
        pool: WirePool = WIRES,
        clock: Clock = _CLOCK,
    ) -> None:
        self._connection, self._pool, self._clock = connection, pool, clock
        self._settings = replace(settings, isolation=Isolation.READ_COMMITTED)

    def scan(self, place: Place, start: int, end: int) -> Scanned:
        """Return what lies between two offsets, `end` not included.

        Raises
        ------
        InputLostError, BrokerUnavailableError, AuthorizationError
            As :meth:`~flinkish_spark.kafka.range_reader.RangeReader.read`.
        CorruptObjectError
            A barrier record cannot be read.
        """
        if start >= end:
            return Scanned(start, ())
        wanted = OffsetRange(*place, start, end)
        with self._pool.wire(self._connection) as wire:
            fetches = RangeFetches(
                FetchClient(wire), lambda: _bounds(wire, wanted), wanted, self._settings, self._clock
            )
            return scanned(wanted, iter(fetches.take, None))


def scanned(wanted: OffsetRange, answers: Iterable[FetchedBatches]) -> Scanned:
    """Return what the answers to the Fetches of a range hold.

    Parameters
    ----------
    answers
        As :class:`~flinkish_spark.kafka.range_fetches.RangeFetches` takes them.
    """
    behind, barriers = wanted.start, []
    for batch in _visible(wanted, answers):
        behind = max(behind, min(batch.header.last_offset + 1, wanted.end))
        seen = _barrier_in(batch, wanted)
        if seen is not None and wanted.start <= seen.offset < wanted.end:
            barriers.append(seen)
    return Scanned(behind, tuple(barriers))


def _visible(wanted: OffsetRange, answers: Iterable[FetchedBatches]) -> Iterator[RawBatch]:
    for fetched in answers:
        inside = takewhile(lambda raw: raw.header.base_offset < wanted.end, fetched.batches)
        seen = visible(
            inside, fetched.aborted, Isolation.READ_COMMITTED, lambda raw: raw.header, control_type
        )
        # A batch may have lost its records to compaction, or have them all before the range.
        yield from (raw for raw in seen if raw.header.records and raw.header.last_offset >= wanted.start)


def _barrier_in(raw: RawBatch, wanted: OffsetRange) -> SeenBarrier | None:
    header = raw.header
    if header.records != 1 or not header.is_transactional or len(raw.body) > _MOST_BARRIER_BYTES:
        return None
    record = decode(raw, with_headers=True)
    assert record.headers is not None
    try:
        mark = mark_in(record.headers[0].as_py())
    except CorruptObjectError as broken:
        place = f"{wanted.topic}-{wanted.partition} at offset {header.base_offset}"
        broken.add_note(f"The record is in {place}.")
        raise
    return None if mark is None else SeenBarrier(int(record.offsets[0]), mark)
