"""Encoding of Arrow columns as Kafka record batches (format v2, KIP-98), and decoding.

No record becomes a Python object. To encode, numpy makes the few bytes between the fields, and Arrow joins
them with keys, values and headers. To decode, a plain loop finds where each record begins, numpy reads
everything else from all records at once, and Arrow copies the fields out.

The decoder checks every length before it follows it: a field ends within its record, and a record within its
batch. A checksum detects damage in transport only, so a batch that contradicts itself is a
:class:`UnreadableBatchError` even if its checksum is valid.
"""

from __future__ import annotations

import enum
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from flinkish_spark.connectors.kafka.client.codecs import Codec, compress, decompress
from flinkish_spark.connectors.kafka.client.fetch import Marker
from flinkish_spark.connectors.varints import read_varint
from flinkish_spark.core.errors import BadRecordError, EnvironmentFault, SchemaError
from flinkish_spark.types.record_time import Int64s

#: An Arrow column, chunked or not; pyarrow is untyped.
Column = Any
#: Headers that all records of a call get.
CommonHeaders = Sequence[tuple[str, bytes | None]]

#: The type of Spark's headers column.
HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

#: Base offset, length of what follows, partition leader epoch, magic, CRC-32C of what follows.
UNCHECKED = struct.Struct(">qiibI")
#: Attributes, last offset delta, base and maximum timestamp, producer id and epoch, base
#: sequence, number of records.
CHECKED = struct.Struct(">hiqqqhii")
BATCH_OVERHEAD = UNCHECKED.size + CHECKED.size
#: The batch's length counts from the partition leader epoch on.
LENGTH_END = 12
MAGIC = 2
#: Bits of the attributes; the codec takes the lowest three.
CODEC_BITS = 0x07
LOG_APPEND_BIT = 0x08
TRANSACTIONAL_BIT = 0x10
CONTROL_BIT = 0x20
#: Java's estimate for a record without key, value and headers, with the longest varints.
_MOST_RECORD_OVERHEAD = 21
_NO_LEADER_EPOCH = -1
_SEQUENCES = 2**31
#: The protocol's numbers for a batch without a producer id, whose repeats cannot be recognised.
_NO_PRODUCER = _NO_SEQUENCE = -1
_NO_HEADERS = b"\x00"


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    data: bytes
    #: Number of records, at least one.
    records: int
    #: Sequence number of its first record.
    base_sequence: int


def encode_batches(
    keys: Column,
    values: Column,
    headers: Column | CommonHeaders | None,
    timestamps_ms: int | Int64s,
    *,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    codec: Codec,
    max_batch_bytes: int,
    attributes: int = TRANSACTIONAL_BIT,
) -> Iterator[EncodedBatch]:
    """Encode the records of one partition at the first step, then yield one compressed batch per step."""
    bodies = _encode_bodies(
        binary(keys), binary(values), headers, timestamps_ms, max_batch_bytes - BATCH_OVERHEAD
    )
    if producer_id == _NO_PRODUCER:
        base_sequence = _NO_SEQUENCE
    for records, count, base_ms, latest_ms in bodies:
        bits, body = attributes, records
        # Keep what compression would not shrink, so that no batch exceeds the limit.
        if codec is not Codec.NONE and len(squeezed := compress(codec, body)) < len(body):
            bits, body = bits | codec, memoryview(squeezed)
        handle = (producer_id, producer_epoch, base_sequence)
        checked = CHECKED.pack(bits, count - 1, base_ms, latest_ms, *handle, count)
        length = BATCH_OVERHEAD - LENGTH_END + len(body)
        crc = crc32c(body, crc32c(checked))
        head = UNCHECKED.pack(0, length, _NO_LEADER_EPOCH, MAGIC, crc)
        yield EncodedBatch(b"".join((head, checked, body)), count, base_sequence)
        if producer_id != _NO_PRODUCER:
            base_sequence = sequence_after(base_sequence, count)


def sequence_after(base_sequence: int, records: int) -> int:
    return (base_sequence + records) % _SEQUENCES


def record_sizes(keys: Column, values: Column, headers: Column | CommonHeaders | None) -> Int64s:
    """Return an upper bound for the size of a batch of each record alone, as Java's producer does."""
    keys, values = binary(keys), binary(values)
    _check_rows(values, len(keys), "values")
    content = _encode_lengths(keys)[1] + _encode_lengths(values)[1]
    block_sizes = _header_block_sizes(_header_blocks(headers, len(keys)))
    return content + block_sizes + (BATCH_OVERHEAD + _MOST_RECORD_OVERHEAD)


def all_within(limit: int, keys: Column, values: Column, headers: Column | CommonHeaders | None) -> bool:
    """Return whether even the longest key, value and headers together are within the limit."""
    sizes = [*(np.diff(extents(column)) for column in (keys, values))]
    sizes.append(_header_block_sizes(_header_blocks(headers, len(keys))))
    longest = sum(int(size.max(initial=0)) for size in sizes)
    return longest + 2 * _INT_BYTES + BATCH_OVERHEAD + _MOST_RECORD_OVERHEAD <= limit


def binary(column: Column) -> Any:
    """Return a binary or string column as one ``pa.LargeBinaryArray``, without copying its data."""
    try:
        column = column.cast(pa.large_binary())
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as wrong:
        raise SchemaError(
            f"Kafka needs binary or string data, not {column.type}",
            why=str(wrong),
            what_to_do="cast the column to a string or binary",
        ) from wrong
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def extents(column: Any) -> Int64s:
    """Return the offsets of a ``pa.LargeBinaryArray``: where each value begins, and the last ends."""
    if not len(column):
        return np.zeros(1, np.int64)
    begins: Int64s = np.frombuffer(
        column.buffers()[1], np.int64, count=len(column) + 1, offset=column.offset * 8
    )
    return begins


def lengths(column: Any) -> Int64s:
    """Return the length of each value of a ``pa.LargeBinaryArray``, -1 for null."""
    found = np.diff(extents(column))
    if column.null_count:
        # Arrow does not define the length of a null value.
        found[column.is_null().to_numpy(zero_copy_only=False)] = -1
    return found


def join_bytes(*pieces: Any) -> Any:
    """Concatenate pieces row by row; each is a ``pa.LargeBinaryArray``, or bytes for every row."""
    empty = pa.scalar(b"", pa.large_binary())
    arrow = [pa.scalar(p, pa.large_binary()) if isinstance(p, bytes) else p for p in pieces]
    return pc.binary_join_element_wise(*arrow, empty, null_handling="replace", null_replacement="")


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Zigzag-encoded numbers and the number of bytes of each as a varint."""

    coded: npt.NDArray[np.uint64]
    sizes: Int64s

    @classmethod
    def of(cls, numbers: Int64s) -> _Numbers:
        # Zigzag: 0, -1, 1, -2 .. become 0, 1, 2, 3 .., so that small negative numbers are short, too.
        coded = ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
        sizes = np.ones(len(coded), np.int64)
        septets, most = 1, int(coded.max(initial=0))
        while most >> (7 * septets):
            sizes += coded >= np.uint64(1 << (7 * septets))
            septets += 1
        return cls(coded, sizes)


def _varints(*fields: _Numbers) -> Any:
    """Return a column that holds, for each row, the varints of the fields in this order."""
    sizes = [field.sizes for field in fields]
    bounds = [(int(size.min(initial=1)), int(size.max(initial=1))) for size in sizes]
    # Each byte of a field's longest varint is a matrix column; unused cells are dropped at the end.
    cells = np.empty((len(sizes[0]), sum(most for _, most in bounds)), np.uint8)
    used = np.ones(cells.shape, np.bool_) if any(least < most for least, most in bounds) else None
    column = 0
    for field, (least, most) in zip(fields, bounds, strict=True):
        rest = field.coded
        for septet in range(most):
            byte = rest.astype(np.uint8)
            if septet + 1 < least:
                byte |= 0x80
            elif septet + 1 < most:
                byte &= 0x7F
                byte |= (field.sizes > septet + 1).view(np.uint8) << 7
            cells[:, column] = byte
            if used is not None and septet >= least:
                used[:, column] = field.sizes > septet
            rest = rest >> np.uint64(7) if septet + 1 < most else rest
            column += 1
    return _large_binary(_running_total(sum(sizes[1:], sizes[0])), cells if used is None else cells[used])


def _running_total(sizes: Int64s) -> Int64s:
    total = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=total[1:])
    return total


def _large_binary(begins: Int64s, data: Any) -> Any:
    buffers = [None, pa.py_buffer(np.ascontiguousarray(begins)), pa.py_buffer(data)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(begins) - 1, buffers)


def _encode_lengths(column: Any) -> tuple[_Numbers, Int64s]:
    """Return the encoded lengths of a column's values, and the size of each value with its length."""
    found = lengths(column)
    coded = _Numbers.of(found)
    return coded, coded.sizes + np.maximum(found, 0)


def _header_blocks(headers: Column | CommonHeaders | None, records: int) -> bytes | Any:
    """Encode the headers, which follow a record's value: one block for all records, or a column."""
    if isinstance(headers, pa.Array | pa.ChunkedArray):
        return _encode_header_lists(headers, records)
    if not headers:
        return _NO_HEADERS
    names = pa.array([name for name, _value in headers], pa.string())
    values = pa.array([value for _name, value in headers], pa.binary())
    count = _varints(_Numbers.of(np.array([len(headers)], np.int64)))
    return b"".join([*count.to_pylist(), *_header_entries(names, values).to_pylist()])


def _encode_header_lists(headers: Column, records: int) -> Any:
    if isinstance(headers, pa.ChunkedArray):
        headers = headers.combine_chunks()
    kind = headers.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not pa.types.is_struct(kind.value_type) or kind.value_type.num_fields != 2:
        raise SchemaError(
            f"Headers must be array<struct<key:string,value:binary>>, not {kind}",
            what_to_do="cast the column",
        )
    _check_rows(headers, records, "lists of headers")
    counts = pc.list_value_length(headers).fill_null(0).to_numpy().astype(np.int64)
    # flatten() drops the entries of null lists, so that the counts tell where each list begins.
    names, values = headers.flatten().flatten()
    entries = _header_entries(names, values)
    begins = extents(entries)[_running_total(counts)]
    return join_bytes(_varints(_Numbers.of(counts)), _large_binary(begins, entries.buffers()[2]))


def _check_rows(column: Any, records: int, what: str) -> None:
    if len(column) != records:
        raise SchemaError(f"{records} keys came with {len(column)} {what}", what_to_do="give as many")


def _header_entries(names: Any, values: Any) -> Any:
    """Encode each header: its name and its value, each after its length."""
    names, values = binary(names), binary(values)
    if names.null_count:
        raise BadRecordError("A Kafka header needs a name, and one is null", what_to_do="leave it out")
    coded = [_varints(_Numbers.of(lengths(column))) for column in (names, values)]
    return join_bytes(coded[0], names, coded[1], values)


def _header_block_sizes(blocks: bytes | Any) -> Int64s:
    return np.array([len(blocks)]) if isinstance(blocks, bytes) else np.diff(extents(blocks))


def _encode_bodies(
    keys: Any, values: Any, headers: Column | CommonHeaders | None, times: int | Int64s, most_bytes: int
) -> Iterator[tuple[memoryview, int, int, int]]:
    """Yield for each batch its encoded records, their number, and their first and latest timestamp."""
    records = len(keys)
    _check_rows(values, records, "values")
    if np.ndim(times):
        _check_rows(times, records, "timestamps")
    times = np.broadcast_to(np.asarray(times, np.int64), records)
    if records and times.min() < 0:
        raise BadRecordError(
            f"A timestamp of {times.min()} ms lies before 1970", what_to_do="give later ones"
        )
    blocks = _header_blocks(headers, records)
    key_lengths, key_sizes = _encode_lengths(keys)
    value_lengths, value_sizes = _encode_lengths(values)
    # Everything but the record's length and deltas; one byte are the record's attributes.
    content = key_sizes + value_sizes + (1 + _header_block_sizes(blocks))
    if not records:
        return
    bounds = _cut(content, int(np.ptp(times)), most_bytes)
    firsts, counts = bounds[:-1], np.diff(bounds)
    first_of_batch = np.repeat(firsts, counts)
    offset_deltas = _Numbers.of(np.arange(records) - first_of_batch)
    timestamp_deltas = _Numbers.of(times - times[first_of_batch])
    sizes = _Numbers.of(content + offset_deltas.sizes + timestamp_deltas.sizes)
    attributes = _Numbers(np.zeros(records, np.uint64), np.ones(records, np.int64))
    heads = _varints(sizes, attributes, timestamp_deltas, offset_deltas, key_lengths)
    written = join_bytes(heads, keys, _varints(value_lengths), values, blocks)
    begins = extents(written)[bounds].tolist()
    data = memoryview(written.buffers()[2])
    latest = np.maximum.reduceat(times, firsts).tolist()
    for batch, (count, earliest_ms) in enumerate(zip(counts.tolist(), times[firsts].tolist(), strict=True)):
        yield data[begins[batch] : begins[batch + 1]], count, earliest_ms, latest[batch]


def _cut(content: Int64s, spread_ms: int, most_bytes: int) -> Int64s:
    """Return the index of each batch's first record, then the number of records."""
    # By upper bounds: offset and timestamp deltas depend on the batch.
    most = content + _Numbers.of(np.array([spread_ms, len(content)])).sizes.sum()
    ends = np.cumsum(most + _Numbers.of(most).sizes)
    firsts, used = [0], 0
    while firsts[-1] < len(content):
        fitting = int(np.searchsorted(ends, used + most_bytes, side="right"))
        firsts.append(max(fitting, firsts[-1] + 1))
        used = int(ends[firsts[-1] - 1])
    return np.array(firsts, np.int64)


#: Smallest record: length, attributes, two deltas, two lengths and a count.
LEAST_RECORD_BYTES = 7

_LEAST_HEADER_BYTES = 2
#: The longest varints of 32 and of 64 bits.
_INT_BYTES = 5
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

        lengths, at = self._varints(self._rows, starts, _INT_BYTES)
        self.require(at + lengths == self._ends, "a record has a negative length")
        # Skip one byte of attributes, which are unused.
        self.timestamp_deltas, at = self._varints(self._rows, at + 1, _LONG_BYTES)
        self.offset_deltas, at = self._varints(self._rows, at, _INT_BYTES)
        # At least the value's length follows the key, and the number of headers follows the value.
        keys = self._spans(self._rows, at, bytes_after=2)
        values = self._spans(self._rows, keys.ends, bytes_after=1)
        self._header_counts, at = self._varints(self._rows, values.ends, _INT_BYTES)
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
        lengths, begins = self._varints(rows, at, _INT_BYTES)
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
                    coded, begin = read_varint(self._data, at, _INT_BYTES)
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
                length, position = read_varint(data, position - 1, _INT_BYTES)
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
    if not 0 <= header.records <= len(body) // LEAST_RECORD_BYTES:
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
