"""Hashes of columns: the Java client's partitions."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from kafka.partitioner import murmur2 as murmur2_of_kafka_python

from flinkish_spark.connectors.kafka.client.admission import murmur2, partitions_for_keys
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

NUMBERS = pa.array([1, -1, 0, None, 2**40, 1])


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
