"""Layout of Kafka record batches (format v2, KIP-98), and encoding of Arrow columns as such.

No record becomes a Python object: numpy makes the few bytes between the fields, and Arrow joins them with
keys, values and headers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from flinkish_spark.connectors.kafka.client.codecs import Codec, compress
from flinkish_spark.core.errors import BadRecordError, SchemaError
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
#: The longest varint of 32 bits.
INT_BYTES = 5
_NO_LEADER_EPOCH = -1
_SEQUENCES = 2**31
#: The protocol's numbers for a batch without a producer id, whose repeats cannot be recognised.
_NO_PRODUCER = _NO_SEQUENCE = -1
_NO_HEADERS = b"\x00"


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    data: bytes
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
    return longest + 2 * INT_BYTES + BATCH_OVERHEAD + _MOST_RECORD_OVERHEAD <= limit


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
