"""The record format v2: what kafka-python and the Java client make of our batches, and we of theirs."""

from __future__ import annotations

import base64
import contextlib
import itertools
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from crc32c import crc32c
from kafka.errors import CorruptRecordError
from kafka.record import MemoryRecords
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from flinkish_spark.connectors.kafka.client.batch_decoder import (
    DecodedRecords,
    RawBatch,
    TimestampType,
    UnreadableBatchError,
    batches,
    control_type,
    decode,
    verify,
)
from flinkish_spark.connectors.kafka.client.batches import (
    BATCH_OVERHEAD,
    HEADERS_TYPE,
    EncodedBatch,
    all_within,
    encode_batches,
    record_sizes,
    sequence_after,
)
from flinkish_spark.connectors.kafka.client.codecs import Codec, compress, decompress
from flinkish_spark.connectors.kafka.client.fetch import Marker
from flinkish_spark.core.errors import BadRecordError, EnvironmentFault, SchemaError
from tests.support.effort import seeds

#: Offset, timestamp, key, value, headers.
Row = tuple[int, int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]
NOW = 1_700_000_000_000
SEEDS = seeds(12)

#: Batches that kafka-clients 4.1.1 wrote (its MemoryRecordsBuilder), deflated.
JAVA = {
    "none": (
        "eNrtyjFOAlEUBdA3n8kIFAi9YQ2igrgcCyKJE7CBhEp6Oiu3wDpYAHsgIezC8SeSuIlzi/tObl7ENcX00uSk3eBjEP08tPK2"
        "O57ncb3p76//FTefTfOTWd7lqt5nm+76tV7NohfH21REDCOVUZTV/LBP67Qovk+dKKt2vVy8bU+d+9HD49N48jx9ISIiIiIi"
        "IiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIi"
        "IiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIi"
        "IiIiIiL6V/wCDxw15g=="
    ),
    "gzip": (
        "eNpjYIABRqv/QMB0lGHOAgZBIJ8ZKNR9/mkGA5RmgigTmMTAXv///z8gk0W+mwMi+P/tsdOchxxEGA5MT43sYc91WHPw/3IZ"
        "fseDAv5seyLbdCPaWW84a33MEDZePtPVZadZf2F91ntfn0fWvqFHbIL6tKaffj7315XQ9Qv7YtzerrW2b6/aGLPW/PbdfwUm"
        "xoMW/NavK3ywb/o2C0YGAIvbYGc="
    ),
    "snappy": (
        "eNpjYIAB/rD/QMCk8V9zK4MQkM/MwMDYff5pBgOUZoIoE5jEwF7///8/IJOlKdjPMSAgEiTMCMFszg0NTB/sZIA8tuzUSq6y"
        "xJzSVAY+hvP8TEBZOQYmFgZGFraMwyuZypjyGGc84mRgYePIyc9Lb3jEaWBoZGxiamZuYfmPi2EUjaJRNIpG0YhC77gYWLmA"
        "dQcfsBpRAdcF4FphNGBG0SgaRaNoBKJrwAqBgWnHtkIVaPcAWCWMhsooGvxoFSjlAgCoyzMx"
    ),
    "lz4": (
        "eNpjYIABxlv/gYCp78KLYAZhIJ8ZKNR9/mkGA5RmgigTmMTAXv///z8gk4VFyVciwaHJi5GB4b+BDFCELTu1kqssMac0lYGP"
        "4Tw/E1BCjoGJhYGRhS3j8EqmMqY8xhmPOBlY2Dhy8vPSGx5xGhgaGZuYmplbWHIx/B/hYGWAhSUwPHyA4bgeGihALvnhciYA"
        "ZAQ40gBe52A+"
    ),
    "zstd": (
        "eNpjYICD9v9AwPRftfcdgwiQy8zAwNh9/mkGA5RmgqgSmMTAXv///z8gk0Vjq/5fhogQJgYWFhkgny07tZKrLDGnNJWBj+E8"
        "PxMjA4McAxMLAyMLW8bhlUxlTHmMMx5xMrCwceTk56U3POI0MDQyNjE1M7ewZGBksG+/vMeBEagHAM2lJDc="
    ),
    "commit": "eNpjYACDKCB2AmJmptxFG34yGEBEGbvPP81AokFAYBID+38gAAkrAAkOEIMHKgkALI8NtQ==",
    "abort": "eNpjYACDaCB2AmJmpplz0jYyGEBEGbvPP81AokFAYBID+38gAAkrAAkOkCAPVBIAFIMNSQ==",
    "leader": "eNpjYAADViB2BWJmJuFLVcwMChBRxu7zTzPg9H8UABJWAxIcQMwkBFHOyMjAAAAh9RVa",
    "append": "eNpjYAADLiB2BmJmph9TfDMYOIBMRiDqPv80gwFC127+jwKAwkwCICKRyZBBgIGJiSmJyYgBAEyjF/s=",
}
#: What the first five of them hold. The value of the last record spans blocks of every codec.
JAVA_ROWS: list[Row] = [
    (0, NOW, b"key", b"value", []),
    (1, NOW - 1000, None, b"", []),
    (2, NOW + 1, b"", None, [("h\u00e9", b"v"), ("n", None)]),
    (3, NOW + 2, b"long", b"0123456789" * 8000, []),
]


def java(name: str) -> bytes:
    return zlib.decompress(base64.b64decode(JAVA[name]))


def some_bytes(rng: random.Random, most: int) -> bytes | None:
    if rng.random() < 0.1:
        return None
    size = rng.choice([0, 1, 62, 63, 64, 65, rng.randrange(most + 1)])
    return rng.randbytes(size) if rng.random() < 0.5 else bytes(rng.choices(b"ab", k=size))


def some_rows(rng: random.Random, records: int, most: int = 300) -> list[Row]:
    spread = rng.choice([0, 3, 70, 10**4, 10**11])
    rows: list[Row] = []
    for offset in range(records):
        count = rng.choice([0, 0, 1, 2, 40])
        headers = [(rng.choice(["", "trace", "h\u00e9"]), some_bytes(rng, 20)) for _ in range(count)]
        timestamp = NOW + rng.randint(-spread, spread)
        rows.append((offset, timestamp, some_bytes(rng, most), some_bytes(rng, most), headers))
    return rows


def header_column(rows: Sequence[Row]) -> Any:
    lists = [[{"key": name, "value": value} for name, value in row[4]] for row in rows]
    return pa.array([entries or None for entries in lists], HEADERS_TYPE)


def encoded(rows: Sequence[Row], most: int = 10**9, codec: Codec = Codec.NONE) -> list[EncodedBatch]:
    return list(
        encode_batches(
            pa.array([row[2] for row in rows], pa.binary()),
            pa.array([row[3] for row in rows], pa.binary()),
            header_column(rows),
            np.array([row[1] for row in rows], np.int64),
            producer_id=4242,
            producer_epoch=7,
            base_sequence=100,
            codec=codec,
            max_batch_bytes=most,
        )
    )


def plain(
    keys: Any, values: Any, headers: Any = None, most: int = 10**6, base_sequence: int = 0
) -> list[EncodedBatch]:
    return list(
        encode_batches(
            keys,
            values,
            headers,
            NOW,
            producer_id=1,
            producer_epoch=0,
            base_sequence=base_sequence,
            codec=Codec.NONE,
            max_batch_bytes=most,
        )
    )


def written_by_kafka_python(rows: Sequence[Row], codec: Codec = Codec.NONE) -> bytes:
    builder = DefaultRecordBatchBuilder(2, int(codec), True, 4242, 7, 100, 10**9)
    for row in rows:
        assert builder.append(*row) is not None
    return bytes(builder.build())


def read_by_kafka_python(data: bytes) -> list[Row]:
    found: list[Row] = []
    for batch in MemoryRecords(data):
        assert batch.validate_crc()
        found += [(r.offset, r.timestamp, r.key, r.value, r.headers) for r in batch]
    return found


def rows_of(decoded: DecodedRecords) -> list[Row]:
    assert decoded.headers is not None
    for column in (decoded.keys, decoded.values, decoded.headers):
        column.validate(full=True)
    assert decoded.keys.type == decoded.values.type == pa.binary()
    assert decoded.headers.type == HEADERS_TYPE
    headers = [[(h["key"], h["value"]) for h in entries or ()] for entries in decoded.headers.to_pylist()]
    columns = (decoded.offsets, decoded.timestamps_ms, decoded.keys, decoded.values)
    return list(zip(*(column.tolist() for column in columns), headers, strict=True))


def read(data: bytes) -> list[Row]:
    raws = list(batches(data))
    for raw in raws:
        verify(raw)
    return rows_of(decode(*raws, with_headers=True))


def only(data: bytes) -> RawBatch:
    (raw,) = batches(data)
    return raw


def altered(data: bytes, **fields: int) -> bytes:
    """Return the batch with other header fields, its length and checksum made to fit again."""
    names = ["base_offset", "length", "leader_epoch", "magic", "crc", "attributes", "last_delta"]
    names += ["base_ms", "max_ms", "producer_id", "producer_epoch", "sequence", "records"]
    found = dict(zip(names, struct.unpack_from(">qiibIhiqqqhii", data), strict=True)) | fields
    rest = struct.pack(">hiqqqhii", *[found[name] for name in names[5:]]) + data[BATCH_OVERHEAD:]
    found |= {"length": 9 + len(rest), "crc": crc32c(rest)} | fields
    return struct.pack(">qiibI", *[found[name] for name in names[:5]]) + rest


# -- what others read of ours -----------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_kafka_python_writes_the_same_bytes(seed: int) -> None:
    rng = random.Random(seed)
    rows = some_rows(rng, rng.choice([1, 2, 63, 64, 65, 200]))
    (ours,) = encoded(rows)
    theirs = written_by_kafka_python(rows)
    # Bytes 12 to 16 are the leader epoch: -1 from Java and here, 0 from kafka-python.
    assert ours.data[:12] + ours.data[16:] == theirs[:12] + theirs[16:]
    assert ours.data[12:16] == b"\xff" * 4


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP])
@pytest.mark.parametrize("seed", SEEDS)
def test_kafka_python_reads_what_was_written(seed: int, codec: Codec) -> None:
    rng = random.Random(seed)
    rows = some_rows(rng, 200)
    most = rng.choice([100, 1000, 20_000])
    sequence, position = 100, 0
    for batch in encoded(rows, most, codec):
        assert batch.base_sequence == sequence
        assert len(batch.data) <= most or batch.records == 1
        expected = [(o, *row[1:]) for o, row in enumerate(rows[position : position + batch.records])]
        assert read_by_kafka_python(batch.data) == expected
        theirs = DefaultRecordBatch(batch.data)
        assert theirs.is_transactional and not theirs.is_control_batch
        assert (theirs.producer_id, theirs.producer_epoch, theirs.base_sequence) == (4242, 7, sequence)
        assert theirs.max_timestamp == max(row[1] for row in expected)
        sequence, position = sequence + batch.records, position + batch.records
    assert position == len(rows)


def test_the_sequence_number_starts_again_at_zero() -> None:
    column = pa.array([b"x"] * 10)
    found = plain(column, column, most=BATCH_OVERHEAD + 30, base_sequence=2**31 - 4)
    assert [batch.records for batch in found] == [3, 3, 3, 1]
    assert [batch.base_sequence for batch in found] == [2**31 - 4, 2**31 - 1, 2, 5]
    assert sequence_after(2**31 - 1, 1) == 0


def test_a_batch_holds_at_least_one_record_however_large() -> None:
    column = pa.array([b"x" * 5000, b"y", b"z"])
    assert [batch.records for batch in plain(column, column, most=200)] == [1, 2]
    assert [batch.records for batch in plain(column, column, most=0)] == [1, 1, 1]


def test_what_does_not_shrink_is_sent_uncompressed() -> None:
    noise: list[Row] = [(0, NOW, b"k", random.Random(1).randbytes(1000), [])]
    for codec in Codec:
        (batch,) = encoded(noise, codec=codec)
        assert only(batch.data).header.codec is Codec.NONE
        assert read_by_kafka_python(batch.data) == noise


def test_no_records_make_no_batch() -> None:
    nothing = pa.array([], pa.binary())
    assert plain(nothing, nothing) == []
    assert plain(nothing, nothing, pa.array([], HEADERS_TYPE)) == []
    assert len(record_sizes(nothing, nothing, None)) == 0


def test_a_column_may_come_in_any_shape() -> None:
    keys, values = pa.array([b"a", None, b"ccc"]), pa.array([b"1", b"22", None])
    (expected,) = plain(keys, values)
    shapes: list[Callable[[Any], Any]] = [
        lambda column: column.cast(pa.large_binary()),
        lambda column: column.cast(pa.string()),
        lambda column: column.cast(pa.large_string()),
        lambda column: column.cast(pa.binary_view()),
        lambda column: column.dictionary_encode(),
        lambda column: pa.chunked_array([column[:1], column[1:1], column[1:]]),
        lambda column: pa.concat_arrays([pa.array([b"skipped", None]), column])[2:],
    ]
    for one, other in itertools.product(shapes, shapes):
        assert plain(one(keys), other(values)) == [expected]


def test_bytes_behind_a_null_are_not_written() -> None:
    """Arrow leaves open what a null's slot holds."""
    offsets, data = pa.py_buffer(np.array([0, 3, 6], np.int32)), pa.py_buffer(b"abcdef")
    keys = pa.Array.from_buffers(pa.binary(), 2, [pa.py_buffer(b"\x02"), offsets, data])
    (batch,) = plain(keys, keys)
    assert [row[2:4] for row in read_by_kafka_python(batch.data)] == [(None, None), (b"def", b"def")]

    names = pa.array([{"key": "a", "value": b"1"}, {"key": "b", "value": None}], HEADERS_TYPE.value_type)
    hidden = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), names, mask=pa.array([True, False]))
    (batch,) = plain(keys, keys, hidden)
    assert [row[4] for row in read_by_kafka_python(batch.data)] == [[], [("b", None)]]


def test_headers_for_all_records_equal_a_column_of_them() -> None:
    keys = pa.array([b"a", b"b"])
    common = (("job", b"7"), ("h\u00e9", None))
    column = pa.array([[{"key": name, "value": value} for name, value in common]] * 2, HEADERS_TYPE)
    assert plain(keys, keys, common) == plain(keys, keys, column)
    assert plain(keys, keys, ()) == plain(keys, keys, None) == plain(keys, keys, pa.nulls(2, HEADERS_TYPE))
    sliced = pa.chunked_array([column[1:], column[:1]])
    assert plain(keys, keys, sliced) == plain(keys, keys, common)


def test_what_kafka_cannot_hold_is_refused() -> None:
    keys = pa.array([b"a", b"b"])
    nameless = pa.array([[{"key": None, "value": b"1"}], None], HEADERS_TYPE)
    with pytest.raises(BadRecordError, match="needs a name"):
        plain(keys, keys, nameless)
    with pytest.raises(SchemaError, match="not int64"):
        plain(keys, pa.array([1, 2]))
    with pytest.raises(SchemaError, match="2 keys came with 1 values"):
        plain(keys, keys[:1])
    with pytest.raises(SchemaError, match="2 keys came with 1 values"):
        record_sizes(keys, keys[:1], None)
    with pytest.raises(SchemaError, match="2 keys came with 1 lists of headers"):
        plain(keys, keys, nameless[:1])
    with pytest.raises(SchemaError, match="Headers must be"):
        plain(keys, keys, keys)
    with pytest.raises(BadRecordError, match="-1 ms"):
        encoded([(0, -1, b"k", b"v", [])])


def test_sizes_are_those_the_java_producer_estimates() -> None:
    """AbstractRecords.estimateSizeInBytesUpperBound of kafka-clients 4.1.1, without and with headers."""
    estimates = [85, 85, 213, 213, 16471, 1056858], [158, 158, 286, 286, 16544, 1056931]
    keys = pa.array([None, b"", bytes(63), bytes(64), bytes(8191), bytes(8192)], pa.binary())
    values = pa.array([None, b"", bytes(64), bytes(63), bytes(8192), bytes(1 << 20)], pa.binary())
    common = (("h\u00e9", b"v" * 64), ("n", None))
    column = pa.array([[{"key": name, "value": value} for name, value in common]] * 6, HEADERS_TYPE)
    assert record_sizes(keys, values, None).tolist() == estimates[0]
    assert record_sizes(keys, values, common).tolist() == estimates[1]
    assert record_sizes(keys, values, column).tolist() == estimates[1]


@pytest.mark.parametrize("seed", seeds(6))
def test_what_is_within_a_limit_at_a_look_is_so_record_by_record(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        rows = some_rows(rng, 9)
        headers = rng.choice([None, rows[0][4], header_column(rows)])
        keys, values = (pa.array([row[part] for row in rows], pa.large_binary()) for part in (2, 3))
        largest = int(record_sizes(keys, values, headers).max())
        assert not all_within(largest - 1, keys, values, headers)
        # The look takes the longest of each of three parts to be in one record.
        assert all_within(3 * largest, keys, values, headers)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_record_is_larger_than_its_size_says(seed: int) -> None:
    rows = some_rows(random.Random(seed), 50)
    keys, values = (pa.array([row[at] for row in rows], pa.binary()) for at in (2, 3))
    sizes = record_sizes(keys, values, header_column(rows))
    assert all(len(batch.data) <= size for batch, size in zip(encoded(rows, 0), sizes, strict=True))


# -- what we read of others -------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_kafka_python_writes_is_read(seed: int, codec: Codec) -> None:
    rng = random.Random(seed)
    # Offsets with gaps are those of a compacted topic.
    steps = itertools.accumulate(rng.choice([1, 1, 5, 1000]) for _ in range(200))
    rows = [(offset, *row[1:]) for offset, row in zip(steps, some_rows(rng, 200), strict=True)]
    assert read(written_by_kafka_python(rows, codec)) == rows


@pytest.mark.parametrize("codec", Codec)
def test_what_java_writes_is_read(codec: Codec) -> None:
    raw = only(java(codec.name.lower()))
    verify(raw)
    assert rows_of(decode(raw, with_headers=True)) == JAVA_ROWS
    header = raw.header
    assert (header.codec, header.records) == (codec, 4)
    assert (header.is_transactional, header.is_control) == (True, False)
    assert (header.base_offset, header.last_offset, header.partition_leader_epoch) == (0, 3, -1)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (4242, 7, 2**31 - 2)
    assert (header.timestamp_type, header.max_timestamp_ms) == (TimestampType.CREATE_TIME, NOW + 2)
    assert control_type(raw) is None


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_written_is_read(seed: int, codec: Codec) -> None:
    rng = random.Random(seed)
    rows = some_rows(rng, 100, most=rng.choice([10, 300, 100_000]) if seed % 4 == 0 else 300)
    written = encoded(rows, rng.choice([1000, 10**9]), codec)
    firsts = itertools.accumulate((batch.records for batch in written), initial=0)
    # As the broker does: it numbers the records, outside of what the checksum covers.
    log = b"".join(struct.pack(">q", o) + batch.data[8:] for o, batch in zip(firsts, written, strict=False))
    assert read(log) == rows


def test_the_batches_of_a_fetch_are_decoded_as_one() -> None:
    names = [codec.name.lower() for codec in Codec]
    assert read(b"".join(java(name) for name in names)) == JAVA_ROWS * len(names)


def test_headers_are_left_unread_unless_asked_for() -> None:
    assert decode(only(java("none")), with_headers=False).headers is None


def test_the_brokers_time_is_that_of_the_batch() -> None:
    raw = only(java("append"))
    assert raw.header.timestamp_type is TimestampType.LOG_APPEND_TIME
    assert decode(raw, with_headers=False).timestamps_ms.tolist() == [NOW + 5555] * 2
    assert decode(raw, with_headers=False).offsets.tolist() == [10, 11]


@pytest.mark.parametrize("name", ["commit", "abort", "leader"])
def test_a_control_batch_tells_its_kind(name: str) -> None:
    kind = {"commit": Marker.COMMIT, "abort": Marker.ABORT}.get(name)
    raw = only(java(name))
    verify(raw)
    assert raw.header.is_control
    assert control_type(raw) is kind
    assert control_type(only(altered(java(name)[:BATCH_OVERHEAD], records=0))) is None


def test_a_control_record_without_kind_is_corrupt() -> None:
    data = written_by_kafka_python([(0, NOW, b"\x00\x00\x00", b"", [])])
    with pytest.raises(UnreadableBatchError, match="no type"):
        control_type(only(altered(data, attributes=0x30)))


def test_a_batch_emptied_by_compaction_has_no_records() -> None:
    raw = only(altered(java("none")[:BATCH_OVERHEAD], records=0))
    assert (raw.header.last_offset, raw.header.records) == (3, 0)
    assert rows_of(decode(raw, with_headers=True)) == []
    assert rows_of(decode(with_headers=True)) == []


def test_a_header_name_that_is_no_text_is_read_as_java_does() -> None:
    data = written_by_kafka_python([(0, NOW, None, None, [("xyz", b"v")])])
    (row,) = read(altered(data.replace(b"xyz", b"x\xffz")))
    assert row[4] == [("x\ufffdz", b"v")]


# -- what is cut, foreign or damaged ----------------------------------------------------------


def test_a_cut_batch_ends_the_iteration() -> None:
    data = java("commit") + java("append")
    for length in range(len(data) + 1):
        whole = (length >= len(java("commit"))) + (length == len(data))
        assert len(list(batches(memoryview(data)[:length]))) == whole


@pytest.mark.parametrize("magic", [0, 1, 3])
def test_another_record_format_is_refused(magic: int) -> None:
    with pytest.raises(UnreadableBatchError, match=f"offset 0 has record format {magic}, only 2"):
        list(batches(altered(java("none"), magic=magic, length=20)))


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(UnreadableBatchError, match="unknown codec"):
        only(altered(java("none"), attributes=5))


@pytest.mark.parametrize("length", [48, 0, -1, -(2**31)])
def test_a_batch_shorter_than_its_header_is_corrupt(length: int) -> None:
    with pytest.raises(UnreadableBatchError, match="does not hold its header"):
        list(batches(altered(java("none"), length=length)))


def test_every_flipped_bit_is_found_by_the_checksum() -> None:
    data = java("append")
    for bit in range(17 * 8, len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((UnreadableBatchError, UnreadableBatchError)):
            verify(only(bytes(damaged)))


@pytest.mark.parametrize("records", [-1, 1, 3, 2**31 - 1])
def test_a_wrong_number_of_records_is_corrupt(records: int) -> None:
    with pytest.raises(UnreadableBatchError, match="batch at offset 10 is corrupt") as caught:
        decode(only(altered(java("append"), records=records)), with_headers=False)
    assert caught.value.facts["base_offset"] == 10


def test_offsets_outside_of_the_batch_are_corrupt() -> None:
    with pytest.raises(UnreadableBatchError, match="ascend within its range"):
        decode(only(altered(java("append"), last_delta=0)), with_headers=False)
    twice = written_by_kafka_python([(1, NOW, b"a", b"", []), (1, NOW, b"b", b"", [])])
    with pytest.raises(UnreadableBatchError, match="ascend within its range"):
        decode(only(twice), with_headers=False)


@pytest.mark.parametrize("offsets", [(-1, 1), (0, -1), (2**63 - 1, 1)])
def test_impossible_offsets_are_corrupt(offsets: tuple[int, int]) -> None:
    with pytest.raises(UnreadableBatchError, match="last offset"):
        only(altered(java("append"), base_offset=offsets[0], last_delta=offsets[1]))
    last = altered(java("append"), base_offset=2**63 - 2)
    assert decode(only(last), with_headers=False).offsets.tolist() == [2**63 - 2, 2**63 - 1]


def test_the_corrupt_one_of_many_batches_is_named() -> None:
    good, bad = java("append"), bytearray(java("append"))
    bad[BATCH_OVERHEAD] += 2  # the first record's length
    with pytest.raises(UnreadableBatchError, match="batch at offset 77"):
        decode(*batches(good + altered(bytes(bad), base_offset=77) + good), with_headers=False)


@pytest.mark.parametrize("body", [b"\xff" * 4000, b"\x80" * 4000, b"\x00" * 4000, b"\x0c" + b"\xff" * 3999])
def test_varints_without_end_are_corrupt(body: bytes) -> None:
    for records in (1, 2, 500):
        data = altered(java("append")[:BATCH_OVERHEAD] + body, records=records)
        with pytest.raises(UnreadableBatchError):
            decode(only(data), with_headers=True)


def test_a_record_of_one_endless_varint_is_corrupt() -> None:
    data = altered(java("append")[:BATCH_OVERHEAD] + b"\x30" + b"\xff" * 24, records=1)
    with pytest.raises(UnreadableBatchError, match="A number has no end"):
        decode(only(data), with_headers=False)


@pytest.mark.parametrize("seed", seeds(4))
def test_damage_under_a_valid_checksum_is_read_as_others_do_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    rows = some_rows(rng, 6, most=70)
    data = encoded(rows)[0].data
    agreed = 0
    for _ in range(400):
        body = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 5])):
            byte = rng.choice([0, 1, 2, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            body[rng.randrange(BATCH_OVERHEAD, len(body))] = byte
        damaged = altered(bytes(body))
        try:
            ours = rows_of(decode(only(damaged), with_headers=True))
        except UnreadableBatchError:
            continue
        try:
            theirs = read_by_kafka_python(damaged)
        except (CorruptRecordError, UnicodeDecodeError):
            continue  # it reads attributes as a varint and refuses names that are not UTF-8
        assert ours == theirs
        agreed += 1
    assert agreed > 20


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
def test_damaged_compression_is_read_or_refused(codec: Codec) -> None:
    rng = random.Random(int(codec))
    rows = some_rows(rng, 30)
    (batch,) = encoded(rows, codec=codec)
    assert only(batch.data).header.codec is codec
    for _ in range(300):
        body = bytearray(batch.data)
        body[rng.randrange(BATCH_OVERHEAD, len(body))] = rng.randrange(256)
        body = body[: rng.choice([len(body), rng.randrange(BATCH_OVERHEAD, len(body))])]
        with contextlib.suppress(UnreadableBatchError):
            rows_of(decode(only(altered(bytes(body))), with_headers=True))


# -- codecs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("size", [0, 1, 32 * 1024, 64 * 1024, 64 * 1024 + 1, 300_000])
def test_every_codec_gives_back_what_it_took(codec: Codec, size: int) -> None:
    for data in (random.Random(size).randbytes(size), bytes(size)):
        assert decompress(codec, compress(codec, data)) == data
        assert decompress(codec, memoryview(compress(codec, memoryview(data)))) == data


def test_other_writers_variants_are_read() -> None:
    data = b"0123456789" * 20_000
    assert decompress(Codec.SNAPPY, pa.Codec("snappy").compress(data, asbytes=True)) == data  # librdkafka
    assert decompress(Codec.LZ4, pa.Codec("lz4").compress(data, asbytes=True)) == data  # linked blocks
    gzip = [zlib.compress(member, wbits=31) for member in (data, b"more")]
    assert decompress(Codec.GZIP, b"".join(gzip)) == data + b"more"


def test_an_lz4_frame_has_the_blocks_that_java_wants() -> None:
    """Its reader refuses linked blocks, and blocks larger than the frame announces."""
    noise = random.Random(1).randbytes(70_000)
    for data in (bytes(70_000), noise):
        frame = compress(Codec.LZ4, data)
        assert frame[:7] == java("lz4")[BATCH_OVERHEAD : BATCH_OVERHEAD + 7]
        position, blocks = 7, []
        while (length := int.from_bytes(frame[position : position + 4], "little")) != 0:
            blocks.append(length & 0x7FFFFFFF)
            position += 4 + blocks[-1]
        assert len(frame) == position + 4
        assert len(blocks) == 2 and max(blocks) <= 64 * 1024


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
def test_data_that_ends_early_is_unreadable(codec: Codec) -> None:
    whole = compress(codec, b"0123456789" * 10_000)
    # Xerial's snappy has no end mark; between two blocks only the records can tell.
    for length in {*range(1, 30), len(whole) - 1} - {16}:
        with pytest.raises(EnvironmentFault, match=f"{length} bytes are not {codec.name} data"):
            decompress(codec, whole[:length])


@pytest.mark.parametrize("claim", [b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\xff\xff", b"\x80", b""])
def test_a_claimed_size_takes_no_memory(claim: bytes) -> None:
    xerial = compress(Codec.SNAPPY, b"")
    for data in (claim + b"x", xerial + struct.pack(">i", len(claim) + 1) + claim + b"x"):
        with pytest.raises(EnvironmentFault, match="are not SNAPPY data"):
            decompress(Codec.SNAPPY, data)
