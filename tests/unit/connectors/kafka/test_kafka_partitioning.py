"""Hashes of columns: the Java client's partitions, and digests that add up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from kafka.partitioner import murmur2 as murmur2_of_kafka_python

from flinkish_spark.connectors.kafka.client.admission import murmur2, partitions_for_keys, row_hashes
from flinkish_spark.connectors.kafka.client.batches import HEADERS_TYPE
from flinkish_spark.core.errors import SchemaError
from tests.support.effort import seeds

#: Key, Utils.murmur2 and partition of 12 in kafka-clients 4.1.1.
JAVA = [
    ("", 275646681, 9),
    ("21", 3321034988, 0),
    ("foobar", 3504634814, 6),
    ("a-little-bit-long-string", 3308985760, 8),
    ("a-little-bit-longer-string", 2808662467, 11),
    ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", 4236069325, 5),
    ("\u00ff\u0080h\u00e9", 3652559245, 5),
]

KEYS = pa.array([b"ab", b"a", b"", None, b"12345678", b"123456789"])
VALUES = pa.array(["c", "bc", "", "", "x" * 1000, None])
NUMBERS = pa.array([1, -1, 0, None, 2**40, 1])
HEADERS = pa.array(
    [
        None,
        [],
        [{"key": "a", "value": b"1"}],
        [{"key": "a", "value": b"1"}, {"key": "b", "value": None}],
        [{"key": "b", "value": None}, {"key": "a", "value": b"1"}],
        [{"key": "a1", "value": b""}],
    ],
    HEADERS_TYPE,
)
COLUMNS = [KEYS, VALUES, NUMBERS, HEADERS]
DIGESTS = [13758972762269495074, 2907909940395775155, 813460896137056450, 16079337754470189919]
DIGEST = 11625397775971339613


# -- partitions -------------------------------------------------------------------------------


def test_keys_go_where_java_sends_them() -> None:
    keys, hashes, partitions = zip(*JAVA, strict=True)
    assert murmur2(pa.array(keys)).tolist() == list(hashes)
    assert partitions_for_keys(pa.array(keys), 12).tolist() == list(partitions)


@pytest.mark.parametrize("seed", seeds(8))
def test_keys_of_every_length_hash_as_in_kafka_python(seed: int) -> None:
    rng = random.Random(seed)
    keys = [rng.randbytes(length) for length in range(70)] + [b"\xff" * length for length in range(70)]
    keys += [rng.randbytes(rng.randrange(2000)) for _ in range(5)]
    rng.shuffle(keys)
    expected = [murmur2_of_kafka_python(key) for key in keys]
    assert murmur2(pa.array(keys)).tolist() == expected
    for partitions in (1, 2, 3, 7, 50, 2**31 - 1):
        found = partitions_for_keys(pa.array(keys), partitions)
        assert found.dtype == np.int32
        assert found.tolist() == [(hashed & 0x7FFFFFFF) % partitions for hashed in expected]


@pytest.mark.parametrize("seed", seeds(4))
def test_keys_of_a_part_of_a_column_hash_as_they_do_alone(seed: int) -> None:
    """Bytes lie in front of the part, behind it, and behind its nulls."""
    rng = random.Random(seed)
    keys = [rng.randbytes(rng.randrange(10)) for _ in range(60)] + [rng.randbytes(40_000)]
    hidden = pa.array([rng.random() < 0.2 for _ in keys])
    column = pc.if_else(hidden, pa.scalar(None, pa.binary()), pa.array(keys, pa.binary()))
    for _ in range(20):
        first = rng.randrange(len(keys))
        part = column.slice(first, rng.randrange(len(keys) - first + 1))
        wanted = [
            -1 if key is None else (murmur2_of_kafka_python(key) & 0x7FFFFFFF) % 7 for key in part.to_pylist()
        ]
        assert partitions_for_keys(part, 7).tolist() == wanted


def test_a_null_key_has_no_partition() -> None:
    assert partitions_for_keys(pa.array([None, b"21", None], pa.binary()), 12).tolist() == [-1, 0, -1]
    assert partitions_for_keys(pa.nulls(2), 12).tolist() == [-1, -1]
    assert partitions_for_keys(pa.array([], pa.binary()), 12).tolist() == []


def test_the_shape_of_the_column_does_not_count() -> None:
    keys = pa.array([b"dropped", b"foobar", None, b"21"])[1:]
    for shaped in (keys, keys.cast(pa.large_string()), pa.chunked_array([keys[:1], keys[1:]])):
        assert partitions_for_keys(shaped, 12).tolist() == [6, -1, 0]


def test_keys_are_bytes_or_text() -> None:
    with pytest.raises(SchemaError, match="not int64"):
        partitions_for_keys(NUMBERS, 12)


# -- digests ----------------------------------------------------------------------------------


def row_digest(columns: Sequence[Any]) -> int:
    """What a task of the drop-in sink tells of its rows."""
    return int(row_hashes(columns).sum(dtype=np.uint64)) if columns else 0


def test_a_digest_never_changes() -> None:
    """Stored digests are compared by later versions. Never adapt these numbers."""
    assert [row_digest([column]) for column in COLUMNS] == DIGESTS
    assert row_digest(COLUMNS) == DIGEST


def test_the_digests_of_parts_add_up_in_any_order() -> None:
    rng = random.Random(1)
    for _ in range(20):
        order = rng.sample(range(6), 6)
        cuts = sorted(rng.choices(range(7), k=2))
        pieces = [order[: cuts[0]], order[cuts[0] : cuts[1]], order[cuts[1] :]]
        taken = [[column.take(pa.array(piece, pa.int64())) for column in COLUMNS] for piece in pieces]
        parts = [row_digest(columns) for columns in taken]
        assert sum(parts) % 2**64 == row_digest(COLUMNS)


def test_the_shape_of_the_columns_does_not_count_for_a_digest() -> None:
    shapes: list[Callable[[Any], Any]] = [
        lambda column: pa.chunked_array([column[:2], column[2:2], column[2:]]),
        lambda column: pa.concat_arrays([column[3:], column])[3:],
    ]
    for shape in shapes:
        assert row_digest([shape(column) for column in COLUMNS]) == row_digest(COLUMNS)
    for kind in (pa.large_binary(), pa.string(), pa.large_string(), pa.binary_view()):
        assert row_digest([KEYS.cast(kind)]) == row_digest([KEYS])
    small = pa.array([1, None, -1])
    for kind in (pa.int8(), pa.int32(), pa.timestamp("ms")):
        assert row_digest([small.cast(kind)]) == row_digest([small])


def test_different_rows_hash_differently() -> None:
    rows: list[list[Any]] = [
        [pa.array([first]), pa.array([second])]
        for first, second in [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), ("c", "ab"), ("ab\0", "c")]
    ]
    rows += [[pa.array([b""]), pa.nulls(1, pa.binary())], [pa.nulls(1, pa.binary()), pa.array([b""])]]
    rows += [[pa.array([b""]), pa.array([b""])], [pa.nulls(1), pa.nulls(1)]]
    rows += [[pa.array(["abc"])], [pa.array(["cba"])], [pa.array([b"\0"])], [pa.array([b"\0\0"])]]
    rows += [[pa.array(["12345678abcdefgh"])], [pa.array(["abcdefgh12345678"])]]
    rows += [[pa.array([b""])], [pa.array([b""])] * 3]
    assert len({row_digest(columns) for columns in rows}) == len(rows)
    assert len(set(row_hashes([HEADERS]).tolist())) == len(HEADERS)
    assert len(set(row_hashes([NUMBERS]).tolist())) == len(NUMBERS) - 1


def test_one_flipped_bit_changes_half_of_the_hash() -> None:
    """Also where two flips could cancel out: the topmost bit of two words of a value."""
    value = random.Random(1).randbytes(24)
    flipped = [bytearray(value) for _ in range(24 * 8)]
    for bit, copy in enumerate(flipped):
        copy[bit // 8] ^= 1 << bit % 8
    original = row_hashes([pa.array([value])])[0]
    changes = row_hashes([pa.array([bytes(copy) for copy in flipped])]) ^ original
    assert all(10 < int(change).bit_count() < 54 for change in changes)

    rng = np.random.default_rng(1)
    words = rng.integers(0, 2**64, (20_000, 4), np.uint64)
    twice = words.copy()
    twice[:, [0, 2]] ^= np.uint64(1 << 63)
    values, others = (pa.array([row.tobytes() for row in rows]) for rows in (words, twice))
    assert not (row_hashes([values]) == row_hashes([others])).any()


def test_many_rows_have_as_many_hashes() -> None:
    numbers = pa.array(range(50_000))
    texts = numbers.cast(pa.string())
    for columns in ([numbers], [texts], [numbers, texts], [pa.nulls(50_000, pa.binary()), numbers]):
        assert len(np.unique(row_hashes(columns))) == 50_000


def test_only_no_rows_have_the_digest_zero() -> None:
    assert row_digest([]) == row_digest([column[:0] for column in COLUMNS]) == 0
    assert all(row_digest([pa.array([nothing])]) for nothing in ("", b"", 0, None, False))
    assert all(row_digest([HEADERS[row : row + 1]]) for row in range(2))


def test_what_cannot_be_hashed_is_refused() -> None:
    with pytest.raises(SchemaError, match="not double"):
        row_digest([pa.array([1.0])])
    with pytest.raises(SchemaError, match="of 6 and of 5 rows"):
        row_digest([KEYS, VALUES[:5]])
