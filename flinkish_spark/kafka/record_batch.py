"""Arrow columns to Kafka record batches: the writing half of the record format v2 (KIP-98, magic 2).

No record exists as a Python object on the way. numpy writes the few bytes between the fields of
all records, varints all of them; Arrow joins these with keys, values and headers, and the joined
column's data is the body of the batches. Rules of this file:

- One call encodes the records of one partition, in their order; it may make several batches.
- A batch that compression would not shrink is sent uncompressed: the codec is a property of the
  batch, and so no batch is larger than the limit that its uncompressed records obey.
- What every batch of a producer is, transactional or not, its attributes say; the caller knows.
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

from flinkish_spark.errors import BadRecordError, SchemaError
from flinkish_spark.kafka.compression import Codec, compress

Int64s = npt.NDArray[np.int64]
#: An Arrow column, in one piece or several; pyarrow is untyped.
Column = Any
#: Headers that every record of a call gets.
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
#: What Java counts for a record beside key, value and headers, each varint at its longest.
_MOST_RECORD_OVERHEAD = 21
_NO_LEADER_EPOCH = -1
_SEQUENCES = 2**31
#: The protocol's own words for a batch that repeats cannot be told from.
_NO_PRODUCER = _NO_SEQUENCE = -1
_NO_HEADERS = b"\x00"


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """One record batch, ready for a Produce request; the broker sets its base offset.

    Attributes
    ----------
    data
        The whole batch.
    records
        How many records it holds, at least one.
    base_sequence
        The sequence number of its first record.
    """

    data: bytes
    records: int
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
    """Encode the records of one partition as record batches, in their order.

    Nothing happens before the first step of the iterator, which lays all records out and takes
    about twice their size in memory; each step then compresses and seals one batch.

    Parameters
    ----------
    keys, values
        Binary or string columns of one length. A null key is a record without key, a null value
        a tombstone.
    headers
        None, or (name, value) pairs for every record, or a column of Spark's type
        ``array<struct<key:string,value:binary>>``, where null is a record without headers.
    timestamps_ms
        Milliseconds since 1970, for all records or for each.
    producer_id, producer_epoch
        As InitProducerId granted them; both -1 for batches without sequence numbers.
    base_sequence
        The sequence number of the first record; :func:`sequence_after` has the next call's.
    max_batch_bytes
        No batch is larger, but for one that holds a single record.
    attributes
        Bits that every batch has beside its codec's.

    Raises
    ------
    BadRecordError
        If a timestamp is negative or a header has no name.
    SchemaError
        If a column is of another type, or the columns differ in length.
    """
    layout = _Layout(keys, values, headers, timestamps_ms, max_batch_bytes - BATCH_OVERHEAD)
    if producer_id == _NO_PRODUCER:
        base_sequence = _NO_SEQUENCE
    for batch in layout.batches():
        bits, body = attributes, batch.body
        if codec is not Codec.NONE and len(squeezed := compress(codec, body)) < len(body):
            bits, body = bits | codec, memoryview(squeezed)
        checked = CHECKED.pack(
            bits,
            batch.records - 1,
            batch.base_timestamp_ms,
            batch.max_timestamp_ms,
            producer_id,
            producer_epoch,
            base_sequence,
            batch.records,
        )
        length = BATCH_OVERHEAD - LENGTH_END + len(body)
        crc = crc32c(body, crc32c(checked))
        head = UNCHECKED.pack(0, length, _NO_LEADER_EPOCH, MAGIC, crc)
        yield EncodedBatch(b"".join((head, checked, body)), batch.records, base_sequence)
        if producer_id != _NO_PRODUCER:
            base_sequence = sequence_after(base_sequence, batch.records)


def sequence_after(base_sequence: int, records: int) -> int:
    """Return the sequence number that follows `records` records; after 2**31 - 1 comes 0."""
    return (base_sequence + records) % _SEQUENCES


def record_sizes(keys: Column, values: Column, headers: Column | CommonHeaders | None) -> Int64s:
    """Return for each record the most bytes that an uncompressed batch of it alone can take.

    This is what the Java producer holds against ``max.request.size`` before it sends
    (``AbstractRecords.estimateSizeInBytesUpperBound``). Parameters and errors are those of
    :func:`encode_batches`.
    """
    keys, values = binary(keys), binary(values)
    _check_rows(values, len(keys), "values")
    content = _field_sizes(lengths(keys)) + _field_sizes(lengths(values))
    return (
        content
        + _header_block_sizes(_header_blocks(headers, len(keys)))
        + (BATCH_OVERHEAD + _MOST_RECORD_OVERHEAD)
    )


# -- columns ----------------------------------------------------------------------------------


def binary(column: Column) -> Any:
    """Return a binary or string column as one ``pa.LargeBinaryArray``, without copying its data.

    Raises
    ------
    SchemaError
        If the column is of another type.
    """
    try:
        column = column.cast(pa.large_binary())
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as wrong:
        raise SchemaError(f"Kafka needs binary or string data, not {column.type}", why=str(wrong)) from wrong
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def extents(column: Any) -> Int64s:
    """Return where in its data each value of a ``pa.LargeBinaryArray`` begins, and the last ends."""
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
        # Data may lie behind a null: Arrow leaves the length of such a value open.
        found[column.is_null().to_numpy(zero_copy_only=False)] = -1
    return found


def joined(*pieces: Any) -> Any:
    """Concatenate row by row; a piece is a ``pa.LargeBinaryArray``, or bytes for every row."""
    empty = pa.scalar(b"", pa.large_binary())
    arrow = [pa.scalar(p, pa.large_binary()) if isinstance(p, bytes) else p for p in pieces]
    return pc.binary_join_element_wise(*arrow, empty, null_handling="replace", null_replacement="")


# -- varints ----------------------------------------------------------------------------------


def _zigzag(numbers: Int64s) -> npt.NDArray[np.uint64]:
    """Map 0, -1, 1, -2 .. to 0, 1, 2, 3 .., so that small numbers of either sign are short varints."""
    return ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)


def _varint_sizes(numbers: Int64s) -> Int64s:
    coded = _zigzag(numbers)
    sizes = np.ones(len(coded), np.int64)
    septets, most = 1, int(coded.max(initial=0))
    while most >> (7 * septets):
        sizes += coded >= np.uint64(1 << (7 * septets))
        septets += 1
    return sizes


def _varints(*fields: Int64s) -> Any:
    """Return a column whose values are the varints of one number of each field, in this order."""
    sizes = [_varint_sizes(field) for field in fields]
    widths = [int(size.max(initial=1)) for size in sizes]
    # Each byte of the longest varint of a field has a column; those that a row does not use go.
    cells = np.empty((len(fields[0]), sum(widths)), np.uint8)
    used = np.ones(cells.shape, np.bool_)
    column = 0
    for field, size, width in zip(fields, sizes, widths, strict=True):
        coded = _zigzag(field)
        for septet in range(width):
            byte = (coded >> np.uint64(7 * septet)).astype(np.uint8) & 0x7F
            cells[:, column] = byte | ((size > septet + 1).view(np.uint8) << 7)
            if septet:
                used[:, column] = size > septet
            column += 1
    return _large_binary(_running_total(sum(sizes[1:], sizes[0])), cells[used])


def _running_total(sizes: Int64s) -> Int64s:
    total = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=total[1:])
    return total


def _large_binary(begins: Int64s, data: Any) -> Any:
    buffers = [None, pa.py_buffer(np.ascontiguousarray(begins)), pa.py_buffer(data)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(begins) - 1, buffers)


def _field_sizes(lengths: Int64s) -> Int64s:
    """Return the bytes that values of these lengths take with their lengths; -1 is null."""
    return _varint_sizes(lengths) + np.maximum(lengths, 0)


# -- headers ----------------------------------------------------------------------------------


def _header_blocks(headers: Column | CommonHeaders | None, records: int) -> bytes | Any:
    """Return what follows a record's value: one block for all records, or a column of blocks."""
    if isinstance(headers, pa.Array | pa.ChunkedArray):
        return _listed_headers(headers, records)
    if not headers:
        return _NO_HEADERS
    names = pa.array([name for name, _value in headers], pa.string())
    values = pa.array([value for _name, value in headers], pa.binary())
    count = _varints(np.array([len(headers)], np.int64))
    return b"".join([*count.to_pylist(), *_header_entries(names, values).to_pylist()])


def _listed_headers(headers: Column, records: int) -> Any:
    if isinstance(headers, pa.ChunkedArray):
        headers = headers.combine_chunks()
    kind = headers.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not pa.types.is_struct(kind.value_type) or kind.value_type.num_fields != 2:
        raise SchemaError(f"Headers must be array<struct<key:string,value:binary>>, not {kind}")
    _check_rows(headers, records, "lists of headers")
    counts = pc.list_value_length(headers).fill_null(0).to_numpy().astype(np.int64)
    # flatten() leaves out what lies behind null, so that the counts tell where each list begins.
    names, values = headers.flatten().flatten()
    entries = _header_entries(names, values)
    begins = extents(entries)[_running_total(counts)]
    return joined(_varints(counts), _large_binary(begins, entries.buffers()[2]))


def _check_rows(column: Any, records: int, what: str) -> None:
    if len(column) != records:
        raise SchemaError(f"{records} keys came with {len(column)} {what}")


def _header_entries(names: Any, values: Any) -> Any:
    """Return each header as it is written: name and value, behind their lengths."""
    names, values = binary(names), binary(values)
    if names.null_count:
        raise BadRecordError("A Kafka header needs a name, and one is null")
    return joined(_varints(lengths(names)), names, _varints(lengths(values)), values)


def _header_block_sizes(blocks: bytes | Any) -> Int64s | int:
    return len(blocks) if isinstance(blocks, bytes) else np.diff(extents(blocks))


# -- layout -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Body:
    body: memoryview
    records: int
    base_timestamp_ms: int
    max_timestamp_ms: int


class _Layout:
    """The records of one call, cut into batches and written one after the other.

    Offset and timestamp of a record are written relative to its batch, so the cut comes first
    and goes by what a record takes at most.
    """

    def __init__(
        self,
        keys: Column,
        values: Column,
        headers: Column | CommonHeaders | None,
        timestamps_ms: int | Int64s,
        max_body_bytes: int,
    ) -> None:
        self._keys, self._values = binary(keys), binary(values)
        records = len(self._keys)
        _check_rows(self._values, records, "values")
        if np.ndim(timestamps_ms):
            _check_rows(timestamps_ms, records, "timestamps")
        self._timestamps = np.broadcast_to(np.asarray(timestamps_ms, np.int64), records)
        if records and self._timestamps.min() < 0:
            raise BadRecordError(f"A timestamp of {self._timestamps.min()} ms lies before 1970")
        self._blocks = _header_blocks(headers, records)
        self._key_lengths, self._value_lengths = lengths(self._keys), lengths(self._values)
        # All but the record's length and its deltas; one byte is the record's attributes.
        self._content = 1 + _field_sizes(self._key_lengths) + _field_sizes(self._value_lengths)
        self._content += _header_block_sizes(self._blocks)
        self._firsts = self._cut(max_body_bytes)

    def _cut(self, max_body_bytes: int) -> Int64s:
        """Return the first record of every batch, and the number of records."""
        records = len(self._keys)
        spread = int(np.ptp(self._timestamps)) if records else 0
        most = self._content + _varint_sizes(np.array([spread, records])).sum()
        ends = np.cumsum(most + _varint_sizes(most))
        firsts, used = [0], 0
        while firsts[-1] < records:
            fitting = int(np.searchsorted(ends, used + max_body_bytes, side="right"))
            firsts.append(max(fitting, firsts[-1] + 1))
            used = int(ends[firsts[-1] - 1])
        return np.array(firsts, np.int64)

    def batches(self) -> Iterator[_Body]:
        firsts = self._firsts[:-1]
        if not len(firsts):
            return
        written = self._written(np.diff(self._firsts))
        begins = extents(written)[self._firsts].tolist()
        data = memoryview(written.buffers()[2])
        latest = np.maximum.reduceat(self._timestamps, firsts).tolist()
        earliest = self._timestamps[firsts].tolist()
        records = np.diff(self._firsts).tolist()
        for batch, base_timestamp_ms in enumerate(earliest):
            body = data[begins[batch] : begins[batch + 1]]
            yield _Body(body, records[batch], base_timestamp_ms, latest[batch])

    def _written(self, records: Int64s) -> Any:
        """Return the records as they are written, as a column; `records` counts those of each batch."""
        firsts = np.repeat(self._firsts[:-1], records)
        offset_deltas = np.arange(len(firsts)) - firsts
        timestamp_deltas = self._timestamps - self._timestamps[firsts]
        sizes = self._content + _varint_sizes(offset_deltas) + _varint_sizes(timestamp_deltas)
        attributes = np.zeros(len(firsts), np.int64)
        heads = _varints(sizes, attributes, timestamp_deltas, offset_deltas, self._key_lengths)
        return joined(heads, self._keys, _varints(self._value_lengths), self._values, self._blocks)
