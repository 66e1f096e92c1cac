"""Decoding of Kafka record batches into Arrow columns.

No record becomes a Python object: a plain loop finds where each record begins, numpy reads everything else
from all records at once, and Arrow copies the fields out.

Every length is checked before it is followed: a field ends within its record, and a record within its batch.
A checksum detects damage in transport only, so a batch that contradicts itself is a
:class:`UnreadableBatchError` even if its checksum is valid.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from flinkish_spark.connectors.kafka.client.batches import (
    BATCH_OVERHEAD,
    CHECKED,
    CODEC_BITS,
    CONTROL_BIT,
    HEADERS_TYPE,
    INT_BYTES,
    LENGTH_END,
    LOG_APPEND_BIT,
    MAGIC,
    TRANSACTIONAL_BIT,
    UNCHECKED,
)
from flinkish_spark.connectors.kafka.client.codecs import Codec, decompress
from flinkish_spark.connectors.kafka.client.fetch import Marker
from flinkish_spark.connectors.varints import read_varint
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.types.record_time import Int64s

#: Smallest record: length, attributes, two deltas, two lengths and a count.
_LEAST_RECORD_BYTES = 7

_LEAST_HEADER_BYTES = 2
#: The longest varint of 64 bits.
_LONG_BYTES = 10
#: Zeros after the last record, so that a varint may be read beyond it.
_PADDING = bytes(64)


#: A record with more headers is read by itself.
_MANY_HEADERS = 32


class Misfit(ValueError):
    """A record that exceeds its batch, or a field that exceeds its record; `batch` is an index."""

    def __init__(self, batch: int, why: str) -> None:
        self.batch, self.why = batch, why
        super().__init__(f"batch {batch}: {why}")


class Spans(NamedTuple):
    """Positions of one field in all records; a negative length means null."""

    begins: Int64s
    lengths: Int64s
    ends: Int64s


class RecordFields:
    """The records of several batches in one buffer, and the positions of their fields."""

    def __init__(self, bodies: Sequence[bytes | memoryview], counts: Sequence[int]) -> None:
        self._data = b"".join((*bodies, _PADDING))
        self._bytes = np.frombuffer(self._data, np.uint8)
        self.batch = np.repeat(np.arange(len(bodies)), counts)
        bounds = _bounds(self._data, [len(body) for body in bodies], counts)
        starts, self._ends = bounds[:-1], bounds[1:]
        self._rows = np.arange(len(starts))

        lengths, at = self._varints(self._rows, starts, INT_BYTES)
        self.require(at + lengths == self._ends, "a record has a negative length")
        # Skip one byte of attributes, which are unused.
        self.timestamp_deltas, at = self._varints(self._rows, at + 1, _LONG_BYTES)
        self.offset_deltas, at = self._varints(self._rows, at, INT_BYTES)
        # At least the value's length follows the key, and the number of headers follows the value.
        keys = self._spans(self._rows, at, bytes_after=2)
        values = self._spans(self._rows, keys.ends, bytes_after=1)
        self._header_counts, at = self._varints(self._rows, values.ends, INT_BYTES)
        counted, room = self._header_counts, self._ends - at
        fits = (counted > 0) & (counted * _LEAST_HEADER_BYTES <= room) | (counted == 0) & (room == 0)
        self.require(fits, "a record does not end with its headers")
        self._headers_begin = at
        self.keys, self.values = _columns(self._data, keys, values)

    def require(self, fits: npt.NDArray[np.bool_], why: str, rows: Int64s | None = None) -> None:
        """Raise :class:`Misfit` for the first record that does not fit; `rows` if not all were checked."""
        if not fits.all():
            misfit = int(np.argmin(fits))
            raise Misfit(int(self.batch[misfit if rows is None else rows[misfit]]), why)

    def _varints(self, rows: Int64s, at: Int64s, most_bytes: int) -> tuple[Int64s, Int64s]:
        byte = self._bytes[at]
        coded = (byte & 0x7F).astype(np.uint64)
        ends = at + 1
        unfinished = np.flatnonzero(byte > 0x7F)
        for septet in range(1, most_bytes):
            if not len(unfinished):
                break
            byte = self._bytes[ends[unfinished]]
            coded[unfinished] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * septet)
            ends[unfinished] += 1
            unfinished = unfinished[byte > 0x7F]
        if len(unfinished):
            raise Misfit(int(self.batch[rows[unfinished[0]]]), "a number has no end")
        return (coded >> np.uint64(1)).view(np.int64) ^ -(coded & np.uint64(1)).view(np.int64), ends

    def _spans(self, rows: Int64s, at: Int64s, *, bytes_after: int) -> Spans:
        """Return the positions of the field whose length is at `at`; `bytes_after` bytes must follow it."""
        lengths, begins = self._varints(rows, at, INT_BYTES)
        ends = begins + np.maximum(lengths, 0)
        self.require(ends + bytes_after <= self._ends[rows], "a field is longer than its record", rows)
        return Spans(begins, lengths, ends)

    def headers(self) -> Any:
        """Return the headers as a column of ``HEADERS_TYPE``, copied; null where a record has none."""
        counts = self._header_counts
        firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        names, values = (Spans(*np.zeros((3, firsts[-1]), np.int64)) for _ in range(2))
        few = np.flatnonzero((counts > 0) & (counts <= _MANY_HEADERS))
        self._read_few_headers(few, firsts, names, values)
        for row in np.flatnonzero(counts > _MANY_HEADERS):
            self._read_many_headers(int(row), int(firsts[row]), names, values)
        name_column, value_column = _columns(self._data, names, values)
        fields = list(HEADERS_TYPE.value_type)
        entries = pa.StructArray.from_arrays([_text(name_column), value_column], fields=fields)
        offsets, mask = pa.array(firsts, pa.int32()), pa.array(counts == 0)
        return pa.ListArray.from_arrays(offsets, entries, type=HEADERS_TYPE, mask=mask)

    def _read_few_headers(self, rows: Int64s, firsts: Int64s, names: Spans, values: Spans) -> None:
        """Read the first header of all `rows` at once, then the second of those that have one, and so on."""
        at, number = self._headers_begin[rows], 0
        while len(rows):
            name = self._spans(rows, at, bytes_after=1)
            self.require(name.lengths >= 0, "a header has no name", rows)
            value = self._spans(rows, name.ends, bytes_after=0)
            slots = firsts[rows] + number
            for column, found in zip((*names, *values), (*name, *value), strict=True):
                column[slots] = found
            number += 1
            goes_on = self._header_counts[rows] > number
            fits = goes_on | (value.ends == self._ends[rows])
            self.require(fits, "a record does not end with its headers", rows)
            rows, at = rows[goes_on], value.ends[goes_on]

    def _read_many_headers(self, row: int, first: int, names: Spans, values: Spans) -> None:
        """Read the headers of one record; a round over columns for each of them would be slow."""
        at, end, batch = int(self._headers_begin[row]), int(self._ends[row]), int(self.batch[row])
        for slot in range(first, first + int(self._header_counts[row])):
            for column in (names, values):
                try:
                    coded, begin = read_varint(self._data, at, INT_BYTES)
                except IndexError:
                    raise Misfit(batch, "a number has no end") from None
                length = (coded >> 1) ^ -(coded & 1)
                at = begin + max(length, 0)
                if at > end or (length < 0 and column is names):
                    raise Misfit(batch, "a header is longer than its record or has no name")
                column.begins[slot], column.lengths[slot], column.ends[slot] = begin, length, at
        if at != end:
            raise Misfit(batch, "a record does not end with its headers")


def _bounds(data: bytes, sizes: Sequence[int], counts: Sequence[int]) -> Int64s:
    starts, end = array("q"), 0
    for batch, (size, records) in enumerate(zip(sizes, counts, strict=True)):
        begin, end = end, end + size
        try:
            reached = _walk(data, begin, records, starts)
        except IndexError:
            reached = len(data)
        if reached != end:
            raise Misfit(batch, "its records do not end where it does")
    starts.append(end)
    return np.frombuffer(starts, np.int64)


def _walk(data: bytes, position: int, records: int, starts: array[int]) -> int:
    """Append the start of each record; return the end of the last. IndexError if `data` is too short."""
    append = starts.append
    for _ in range(records):
        append(position)
        length = data[position]
        position += 1
        # Two bytes are common, and are decoded here to save a call.
        if length > 0x7F:
            second = data[position]
            if second > 0x7F:
                length, position = read_varint(data, position - 1, INT_BYTES)
            else:
                length += (second - 1) << 7
                position += 1
        # A negative length is odd here. It moves forward like any other, and is detected later.
        position += length >> 1
    return position


def _columns(data: bytes, first: Spans, second: Spans) -> tuple[Any, Any]:
    """Copy two fields that alternate in `data` into two binary columns."""
    if not len(first.begins):
        return pa.array([], pa.binary()), pa.array([], pa.binary())
    # One column over `data` itself, whose values are the fields and the gaps between them.
    borders = np.stack((first.begins, first.ends, second.begins, second.ends), axis=1).astype(np.int32)
    buffers = [None, pa.py_buffer(borders), pa.py_buffer(data)]
    pieces = pa.BinaryArray.from_buffers(pa.binary(), borders.size - 1, buffers)
    places = np.arange(0, borders.size, 4)
    return (
        pieces.take(pa.array(places, mask=first.lengths < 0)),
        pieces.take(pa.array(places + 2, mask=second.lengths < 0)),
    )


def _text(names: Any) -> Any:
    """Return names as strings; invalid UTF-8 is replaced, as in Java."""
    try:
        return names.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([name.decode(errors="replace") for name in names.to_pylist()], pa.string())


#: Arrow's binary columns have 32-bit offsets.
_MOST_BYTES = 2**31 - 1
_LAST_OFFSET = 2**63 - 1
_MARKER_KEY_BYTES = 4


class UnreadableBatchError(EnvironmentFault):
    """A record batch fails its checksum, contradicts itself, or has an unknown format or codec."""


class TimestampType(enum.IntEnum):
    CREATE_TIME = 0
    LOG_APPEND_TIME = 1


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """Header of a record batch; -1 for fields that the writer did not set."""

    base_offset: int
    last_offset: int
    partition_leader_epoch: int
    is_transactional: bool
    is_control: bool
    codec: Codec
    timestamp_type: TimestampType
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    #: Number of remaining records: compaction removes records, and keeps the batch's offsets.
    records: int


@dataclass(frozen=True, slots=True)
class RawBatch:
    """A record batch that is not decoded yet; it refers to the fetched bytes."""

    header: BatchHeader
    #: The records, compressed as `header.codec` says.
    body: memoryview
    #: The batch's checksum of `covered`.
    crc: int
    covered: memoryview


@dataclass(frozen=True, slots=True)
class DecodedRecords:
    """Records as columns of one length; the Arrow columns are copies and keep nothing alive."""

    #: Offsets in the partition.
    offsets: Int64s
    #: Milliseconds since 1970; -1 for no timestamp.
    timestamps_ms: Int64s
    #: ``pa.BinaryArray``, null where the record has no key or is a tombstone.
    keys: Any
    values: Any
    #: Of the type `HEADERS_TYPE`, null where a record has none; None if not asked for.
    headers: Any | None


def batches(data: bytes | memoryview) -> Iterator[RawBatch]:
    """Yield one partition's batches in a Fetch response, unverified; an incomplete last one is dropped."""
    view, position = memoryview(data), 0
    while position + UNCHECKED.size <= len(view):
        base_offset, length, leader_epoch, magic, crc = UNCHECKED.unpack_from(view, position)
        if magic != MAGIC:
            raise UnreadableBatchError(
                f"The batch at offset {base_offset} has record format {magic}, only {MAGIC} can be read",
                what_to_do="rewrite the topic with a client of Kafka 0.11 or later",
                base_offset=base_offset,
                magic=magic,
            )
        if length < BATCH_OVERHEAD - LENGTH_END:
            raise _make_corrupt_error(base_offset, f"its length of {length} bytes does not hold its header")
        end = position + LENGTH_END + length
        if end > len(view):
            return
        covered = view[position + UNCHECKED.size : end]
        header = _parse_header(base_offset, leader_epoch, covered)
        yield RawBatch(header, covered[CHECKED.size :], crc, covered)
        position = end


def _parse_header(base_offset: int, leader_epoch: int, covered: memoryview) -> BatchHeader:
    attributes, last_delta, base_ms, max_ms, pid, epoch, sequence, records = CHECKED.unpack_from(covered)
    if base_offset < 0 or not 0 <= last_delta <= _LAST_OFFSET - base_offset:
        raise _make_corrupt_error(base_offset, f"its last offset is said to be {last_delta} after its first")
    try:
        codec = Codec(attributes & CODEC_BITS)
    except ValueError as unknown:
        raise UnreadableBatchError(
            f"The batch at offset {base_offset} has an unknown codec",
            why=str(unknown),
            what_to_do="let producers use none, gzip, snappy, lz4 or zstd",
            base_offset=base_offset,
        ) from unknown
    return BatchHeader(
        base_offset=base_offset,
        last_offset=base_offset + last_delta,
        partition_leader_epoch=leader_epoch,
        is_transactional=bool(attributes & TRANSACTIONAL_BIT),
        is_control=bool(attributes & CONTROL_BIT),
        codec=codec,
        timestamp_type=TimestampType(bool(attributes & LOG_APPEND_BIT)),
        base_timestamp_ms=base_ms,
        max_timestamp_ms=max_ms,
        producer_id=pid,
        producer_epoch=epoch,
        base_sequence=sequence,
        records=records,
    )


def verify(raw: RawBatch) -> RawBatch:
    """Check all but base offset and leader epoch, which the broker sets, against the checksum."""
    if crc32c(raw.covered) != raw.crc:
        raise _make_corrupt_error(raw.header.base_offset, f"its checksum is not {raw.crc:#010x}")
    return raw


def control_type(raw: RawBatch) -> Marker | None:
    """Return the transaction marker in a batch; None for data and for other control batches."""
    if not raw.header.is_control or not raw.header.records:
        return None
    key = decode(raw, with_headers=False).keys[0].as_py()
    if key is None or len(key) < _MARKER_KEY_BYTES:
        raise _make_corrupt_error(raw.header.base_offset, "its control record has no type")
    # The key is a version and a type, both big-endian int16; later versions may only add to it.
    kind = int.from_bytes(key[2:_MARKER_KEY_BYTES], "big", signed=True)
    return Marker(kind) if kind in (Marker.ABORT.value, Marker.COMMIT.value) else None


def decode(*raws: RawBatch, with_headers: bool) -> DecodedRecords:
    """Decode the records of several batches, without checking checksums or transactions."""
    # In one call, which costs a fraction of a millisecond, and three times the size in memory.
    bodies = [_decompress_records(raw) for raw in raws]
    if sum(map(len, bodies)) > _MOST_BYTES:
        raise UnreadableBatchError(
            "More than 2 GiB of records were to be decoded at once",
            what_to_do="lower max.partition.fetch.bytes",
        )
    batch_headers = [raw.header for raw in raws]
    try:
        fields = RecordFields(bodies, [header.records for header in batch_headers])
        headers = fields.headers() if with_headers else None
        offsets = _offsets(batch_headers, fields)
    except Misfit as misfit:
        raise _make_corrupt_error(batch_headers[misfit.batch].base_offset, misfit.why) from misfit
    created = _repeat_per_record(batch_headers, fields, "base_timestamp_ms") + fields.timestamp_deltas
    appended = _repeat_per_record(batch_headers, fields, "max_timestamp_ms")
    is_appended = _repeat_per_record(batch_headers, fields, "timestamp_type") == TimestampType.LOG_APPEND_TIME
    return DecodedRecords(
        offsets, np.where(is_appended, appended, created), fields.keys, fields.values, headers
    )


def _decompress_records(raw: RawBatch) -> bytes | memoryview:
    """Decompress the records; raise UnreadableBatchError if they are too short for the header's count."""
    header = raw.header
    try:
        body = raw.body if header.codec is Codec.NONE else decompress(header.codec, raw.body)
    except EnvironmentFault as broken:
        raise _make_corrupt_error(header.base_offset, broken.what) from broken
    if not 0 <= header.records <= len(body) // _LEAST_RECORD_BYTES:
        raise _make_corrupt_error(
            header.base_offset, f"it claims {header.records} records in {len(body)} bytes"
        )
    return body


def _offsets(batch_headers: Sequence[BatchHeader], fields: RecordFields) -> Int64s:
    offsets = _repeat_per_record(batch_headers, fields, "base_offset") + fields.offset_deltas
    inside = (fields.offset_deltas >= 0) & (
        offsets <= _repeat_per_record(batch_headers, fields, "last_offset")
    )
    inside[1:] &= (np.diff(offsets) > 0) | (np.diff(fields.batch) > 0)
    fields.require(inside, "its offsets do not ascend within its range")
    return offsets


def _repeat_per_record(batch_headers: Sequence[BatchHeader], fields: RecordFields, name: str) -> Int64s:
    of_batches: Int64s = np.array([*map(attrgetter(name), batch_headers)], np.int64)
    return of_batches[fields.batch]


def _make_corrupt_error(base_offset: int, why: str) -> UnreadableBatchError:
    return UnreadableBatchError(
        f"The record batch at offset {base_offset} is corrupt",
        why=why,
        what_to_do="look at the partition with kafka-dump-log; reading again helps if the network did it",
        base_offset=base_offset,
    )
