"""The hash of rows over Arrow columns is Spark's own."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from flinkish_spark.transport.key_hash import can_hash, hash_keys
from flinkish_spark.types.arrow_types import arrow_schema
from flinkish_spark.types.ddl import parse_ddl

_CHANCE = random.Random(7)


def _texts(most: int) -> list[str]:
    alphabet = "abcdefghij0123456789-äß€😀"
    return ["".join(_CHANCE.choices(alphabet, k=length)) for length in range(most) for _ in range(4)]


def _whole(bits: int) -> list[int]:
    edge = 1 << (bits - 1)
    return [0, 1, -1, edge - 1, -edge, *(_CHANCE.randrange(-edge, edge) for _ in range(50))]


VALUES: dict[str, list[Any]] = {
    "STRING": ["", *_texts(80)],
    "BINARY": [b"", b"\x00", *(_CHANCE.randbytes(length) for length in range(140))],
    "BOOLEAN": [True, False],
    "BYTE": _whole(8),
    "SHORT": _whole(16),
    "INT": _whole(32),
    "LONG": _whole(64),
    "FLOAT": [0.0, -0.0, 1.5, -3.25e38, float("inf"), float("-inf"), float("nan"), -float("nan"), 1e-45],
    "DOUBLE": [0.0, -0.0, 0.1, -1.7e308, float("inf"), float("-inf"), float("nan"), -float("nan"), 5e-324],
    "ARRAY<INT>": [[], [1], [None], [1, None, -3], [7] * 40],
    "ARRAY<ARRAY<STRING>>": [[], [[]], [None, ["a", "", None], []], [["x" * 40]] * 3],
    "STRUCT<a: LONG, b: STRING, c: ARRAY<STRUCT<d: DOUBLE>>>": [
        (None, None, None),
        (1, "a", []),
        (1, None, [(0.5,), None, (None,)]),
    ],
    "DATE": [date(1, 1, 1), date(1969, 12, 31), date(1970, 1, 1), date(9999, 12, 31)],
    "TIMESTAMP": [
        datetime(1, 1, 2, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(9999, 12, 30, tzinfo=UTC),
    ],
    "TIMESTAMP_NTZ": [datetime(1, 1, 1), datetime(1969, 12, 31, 23, 59), datetime(2026, 2, 3, 4, 5, 6, 7)],
    "INTERVAL DAY TO SECOND": [timedelta(0), timedelta(days=-3, microseconds=1), timedelta(days=10_000)],
    "DECIMAL(9, 2)": [Decimal("0.00"), Decimal("-1.01"), Decimal("9999999.99"), Decimal("-9999999.99")],
    "DECIMAL(18, 0)": [Decimal(0), Decimal(10**18 - 1), Decimal(1 - 10**18)],
    "DECIMAL(38, 10)": [
        Decimal("0E-10"),
        Decimal("-0.0000000001"),
        Decimal("0.0000000127"),
        Decimal("0.0000000128"),
        Decimal("-0.0000000128"),
        Decimal("-0.0000000129"),
        *(Decimal(_CHANCE.randrange(-(10**38) + 1, 10**38)).scaleb(-10) for _ in range(50)),
    ],
}


@pytest.mark.parametrize("kind", VALUES)
def test_the_hash_of_a_value_is_sparks(spark: SparkSession, kind: str) -> None:
    values = [*VALUES[kind], None, VALUES[kind][0]]
    rows = spark.createDataFrame([(value,) for value in values], f"value {kind}").coalesce(1)
    table = rows.select("value", F.xxhash64("value").alias("hash")).toArrow()

    assert hash_keys([table["value"].combine_chunks()], len(values)).tolist() == table["hash"].to_pylist()


def test_keys_of_several_parts_slices_and_nulls_are_hashed_as_spark_does(spark: SparkSession) -> None:
    schema = parse_ddl("name STRING, number LONG, day DATE, amount DECIMAL(20, 3)")
    rows = [
        (
            _CHANCE.choice([None, "", "a", "someone", "x" * 33]),
            _CHANCE.choice([None, 0, -5, 1 << 40]),
            _CHANCE.choice([None, date(2026, 5, 17)]),
            _CHANCE.choice([None, Decimal("-12345678901234567.890"), Decimal("0.001")]),
        )
        for _ in range(500)
    ]
    names = schema.names  # type: ignore[union-attr]
    frame = spark.createDataFrame(rows, schema).coalesce(1)
    table = frame.select("*", F.xxhash64(*names).alias("hash")).toArrow().combine_chunks()
    (batch,) = table.to_batches()
    sliced = batch.slice(137, 200)

    assert hash_keys([batch.column(name) for name in names], 500).tolist() == table["hash"].to_pylist()
    assert hash_keys([sliced.column(name) for name in names], 200).tolist() == sliced["hash"].to_pylist()
    assert arrow_schema(schema).names == names  # type: ignore[arg-type]


def test_types_without_a_hash_are_told() -> None:
    """Spark hashes no map and no VARIANT; a text with a collation by what it is compared by."""
    kinds = ["MAP<STRING, INT>", "VARIANT", "STRING COLLATE UTF8_LCASE", "INTERVAL YEAR"]
    for kind in kinds:
        assert not can_hash(parse_ddl(f"a {kind}"))
        assert not can_hash(parse_ddl(f"a ARRAY<STRUCT<b: {kind}>>"))
    for kind in VALUES:
        assert can_hash(parse_ddl(f"a {kind}"))


def test_a_key_of_no_columns_is_one_for_all() -> None:
    assert hash_keys([], 3).tolist() == [0, 0, 0]
    assert hash_keys([pa.array([], pa.string())], 0).tolist() == []


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a"]).dictionary_encode(),
        pa.array([1], pa.timestamp("ns")),
        pa.array([1], pa.uint32()),
        pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int32())),
        pa.array([1], pa.decimal256(50, 0)),
    ],
    ids=lambda column: str(column.type),
)
def test_what_is_no_key_has_no_hash(column: Any) -> None:
    with pytest.raises(TypeError, match="have no hash"):
        hash_keys([column], 1)
