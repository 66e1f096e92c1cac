"""Kafka record batches to Arrow columns: the reading half of the record format v2 (KIP-98, magic 2).

This file knows batches; what is inside their records is read by ``_record_fields``. Rules:

- A checksum finds damage on the way and proves nothing about a writer: whatever contradicts
  itself is :class:`CorruptBatch`, with a valid checksum too.
- A call of :func:`decode` costs a fraction of a millisecond whatever it decodes, so the many
  small batches of one Fetch belong into one call.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from crc32c import crc32c

from flinkish_spark.errors import EnvironmentFault
from flinkish_spark.kafka._record_fields import LEAST_RECORD_BYTES, Misfit, RecordFields
from flinkish_spark.kafka.answers import Marker
from flinkish_spark.kafka.compression import Codec, UnreadableCompression, decompress
from flinkish_spark.kafka.record_batch import (
    BATCH_OVERHEAD,
    CHECKED,
    CODEC_BITS,
    CONTROL_BIT,
    LENGTH_END,
    LOG_APPEND_BIT,
    MAGIC,
    TRANSACTIONAL_BIT,
    UNCHECKED,
    Int64s,
)

#: Positions in the records are 32-bit in Arrow's binary columns.
_MOST_BYTES = 2**31 - 1
_LAST_OFFSET = 2**63 - 1
_MARKER_KEY_BYTES = 4


class UnsupportedFormat(EnvironmentFault):
    """A record format or codec that this package cannot read."""


class CorruptBatch(EnvironmentFault):
    """A record batch that fails its checksum or contradicts itself."""


class TimestampType(enum.IntEnum):
    """What a record's timestamp says; the numbers are the protocol's."""

    CREATE_TIME = 0
    LOG_APPEND_TIME = 1


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """What a record batch says about itself; -1 where its writer had no such thing."""

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
    #: How many are left: compaction removes records, and keeps the offsets of the batch.
    records: int


@dataclass(frozen=True, slots=True)
class RawBatch:
    """A record batch whose records were not looked at yet; it refers to the fetched bytes.

    Attributes
    ----------
    body
        The records, compressed as `header.codec` says.
    crc
        The checksum it came with, to be held against `covered`.
    """

    header: BatchHeader
    body: memoryview
    crc: int
    covered: memoryview


@dataclass(frozen=True, slots=True)
class DecodedRecords:
    """Records as columns of one length; the Arrow columns are copies and keep nothing alive.

    Attributes
    ----------
    offsets
        The records' places in the partition.
    timestamps_ms
        Milliseconds since 1970; -1 if the writer gave none.
    keys, values
        ``pa.BinaryArray``, null where the record has no key or is a tombstone.
    headers
        Of the type ``record_batch.HEADERS_TYPE``, null where a record has none; None if not
        asked for.
    """

    offsets: Int64s
    timestamps_ms: Int64s
    keys: Any
    values: Any
    headers: Any | None


def batches(data: bytes | memoryview) -> Iterator[RawBatch]:
    """Yield the record batches of one partition in a Fetch response, unchecked.

    A Fetch cuts its last batch where the byte limit falls; such a rest ends the iteration. Not
    even the first batch may be whole in an answer of Fetch v2 or older.

    Raises
    ------
    UnsupportedFormat
        At a batch older than Kafka 0.11 (magic 0 or 1), or with an unknown codec.
    CorruptBatch
        At a batch that is shorter than its own header, or whose offsets cannot be.
    """
    view, position = memoryview(data), 0
    while position + UNCHECKED.size <= len(view):
        base_offset, length, leader_epoch, magic, crc = UNCHECKED.unpack_from(view, position)
        if magic != MAGIC:
            raise UnsupportedFormat(
                f"The batch at offset {base_offset} has record format {magic}, only {MAGIC} can be read",
                what_to_do="rewrite the topic with a client of Kafka 0.11 or later",
                base_offset=base_offset,
                magic=magic,
            )
        if length < BATCH_OVERHEAD - LENGTH_END:
            raise _corrupt(base_offset, f"its length of {length} bytes does not even hold its header")
        end = position + LENGTH_END + length
        if end > len(view):
            return
        covered = view[position + UNCHECKED.size : end]
        header = _header(base_offset, leader_epoch, covered)
        yield RawBatch(header, covered[CHECKED.size :], crc, covered)
        position = end


def _header(base_offset: int, leader_epoch: int, covered: memoryview) -> BatchHeader:
    attributes, last_delta, base_ms, max_ms, pid, epoch, sequence, records = CHECKED.unpack_from(covered)
    if base_offset < 0 or not 0 <= last_delta <= _LAST_OFFSET - base_offset:
        raise _corrupt(base_offset, f"its last offset is said to be {last_delta} after its first")
    try:
        codec = Codec(attributes & CODEC_BITS)
    except ValueError as unknown:
        raise UnsupportedFormat(
            f"The batch at offset {base_offset} has an unknown codec",
            why=str(unknown),
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


def verify(raw: RawBatch) -> None:
    """Check that a batch is what its writer made of it.

    The checksum covers neither the base offset nor the leader epoch, which the broker sets.

    Raises
    ------
    CorruptBatch
        If its CRC-32C does not fit.
    """
    if crc32c(raw.covered) != raw.crc:
        raise _corrupt(raw.header.base_offset, f"its checksum is not {raw.crc:#010x}")


def control_type(raw: RawBatch) -> Marker | None:
    """Return which transaction marker a batch is; None for data and for other control batches.

    Raises
    ------
    CorruptBatch
        As :func:`decode`.
    """
    if not raw.header.is_control or not raw.header.records:
        return None
    key = decode(raw, with_headers=False).keys[0].as_py()
    if key is None or len(key) < _MARKER_KEY_BYTES:
        raise _corrupt(raw.header.base_offset, "its control record has no type")
    # The key is a version and a type, both big-endian int16; later versions may only add to it.
    kind = int.from_bytes(key[2:_MARKER_KEY_BYTES], "big", signed=True)
    return Marker(kind) if kind in (Marker.ABORT.value, Marker.COMMIT.value) else None


def decode(*raws: RawBatch, with_headers: bool) -> DecodedRecords:
    """Return the records of some batches, one after the other.

    Does not :func:`verify`, and leaves it to the caller what to do with control batches and
    aborted transactions. A call takes about three times the uncompressed size in memory.

    Raises
    ------
    CorruptBatch
        If records, lengths or compressed data contradict each other.
    UnsupportedFormat
        If the batches hold more than 2 GiB, uncompressed.
    """
    bodies = [_plain(raw) for raw in raws]
    if sum(map(len, bodies)) > _MOST_BYTES:
        raise UnsupportedFormat("More than 2 GiB of records were to be decoded at once")
    batch_headers = [raw.header for raw in raws]
    try:
        fields = RecordFields(bodies, [header.records for header in batch_headers])
        keys, values = fields.keys_and_values()
        headers = fields.headers() if with_headers else None
        offsets = _offsets(batch_headers, fields)
    except Misfit as misfit:
        raise _corrupt(batch_headers[misfit.batch].base_offset, misfit.why) from misfit
    return DecodedRecords(offsets, _timestamps_ms(batch_headers, fields), keys, values, headers)


def _plain(raw: RawBatch) -> bytes | memoryview:
    """Return the uncompressed records, if there can be as many as the header says."""
    header = raw.header
    try:
        body = raw.body if header.codec is Codec.NONE else decompress(header.codec, raw.body)
    except UnreadableCompression as broken:
        raise _corrupt(header.base_offset, broken.what) from broken
    if not 0 <= header.records <= len(body) // LEAST_RECORD_BYTES:
        raise _corrupt(header.base_offset, f"it claims {header.records} records in {len(body)} bytes")
    return body


def _offsets(batch_headers: Sequence[BatchHeader], fields: RecordFields) -> Int64s:
    offsets = _of_records(batch_headers, fields, "base_offset") + fields.offset_deltas
    inside = (fields.offset_deltas >= 0) & (offsets <= _of_records(batch_headers, fields, "last_offset"))
    inside[1:] &= (np.diff(offsets) > 0) | (np.diff(fields.batch) > 0)
    fields.require(inside, "its offsets do not ascend within its range")
    return offsets


def _timestamps_ms(batch_headers: Sequence[BatchHeader], fields: RecordFields) -> Int64s:
    created = _of_records(batch_headers, fields, "base_timestamp_ms") + fields.timestamp_deltas
    kinds = _of_records(batch_headers, fields, "timestamp_type")
    appended = _of_records(batch_headers, fields, "max_timestamp_ms")
    return np.where(kinds == TimestampType.LOG_APPEND_TIME, appended, created)


def _of_records(batch_headers: Sequence[BatchHeader], fields: RecordFields, name: str) -> Int64s:
    """Return for each record what the header of its batch has under `name`."""
    of_batches: Int64s = np.array([*map(attrgetter(name), batch_headers)], np.int64)
    return of_batches[fields.batch]


def _corrupt(base_offset: int, why: str) -> CorruptBatch:
    return CorruptBatch(
        f"The record batch at offset {base_offset} is corrupt",
        why=why,
        what_to_do="look at the partition with kafka-dump-log; reading again helps if the network did it",
        base_offset=base_offset,
    )
