"""Columns become the values that Arrow makes of them one by one, whatever their type."""

from __future__ import annotations

import datetime
import decimal
import random
from typing import Any

import pyarrow as pa
import pytest

from flinkish_spark.types.to_python import to_lists_of_rows, to_values
from tests.support.effort import seeds

PLAIN: dict[pa.DataType, list[Any]] = {
    pa.int64(): [-(2**63), 0, 2**63 - 1],
    pa.int8(): [-128, 127],
    pa.float64(): [float("inf"), -0.0, 1.25],
    pa.float32(): [0.5],
    pa.bool_(): [True, False],
    pa.string(): ["", "ä", "x\0y", "long" * 20],
    pa.binary(): [b"", b"\xff\0"],
    pa.timestamp("us", "UTC"): [datetime.datetime(1969, 1, 2, 3, tzinfo=datetime.UTC)],
    pa.timestamp("us"): [datetime.datetime(2026, 1, 2, 3, 4, 5, 6)],
    pa.date32(): [datetime.date(2026, 1, 2)],
    pa.decimal128(10, 2): [decimal.Decimal("1.25")],
}


def any_type(draw: random.Random, depth: int = 0) -> pa.DataType:
    def inner() -> pa.DataType:
        return any_type(draw, depth + 1)

    nested = [
        lambda: pa.list_(inner()),
        lambda: pa.large_list(inner()),
        lambda: pa.map_(draw.choice([pa.int64(), pa.string()]), inner()),
        lambda: pa.struct([(f"f{at}", inner()) for at in range(draw.randrange(4))]),
    ]
    if depth < 3 and draw.random() < 0.6:
        return draw.choice(nested)()
    return draw.choice(list(PLAIN))


def any_value(draw: random.Random, kind: pa.DataType) -> Any:
    if draw.random() < 0.2:
        return None
    if pa.types.is_map(kind):
        keys = {draw.choice(PLAIN[kind.key_type]) for _ in range(draw.randrange(4))}
        return [(key, any_value(draw, kind.item_type)) for key in keys]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [any_value(draw, kind.value_type) for _ in range(draw.randrange(4))]
    if pa.types.is_struct(kind):
        return {field.name: any_value(draw, field.type) for field in kind}
    return draw.choice(PLAIN[kind])


def plainly(values: list[Any]) -> str:
    """Return values as text, in which an int is no float and UTC is one."""
    zone = "datetime.timezone.utc"
    return repr(values).replace("zoneinfo.ZoneInfo(key='UTC')", zone).replace("<UTC>", zone)


@pytest.mark.parametrize("seed", seeds(300))
def test_a_column_has_the_values_that_arrow_makes_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    kind = any_type(draw)
    column = pa.array([any_value(draw, kind) for _ in range(draw.randrange(12))], kind)
    for part in (column, column.slice(2), column.slice(1, 3)):
        wanted = [scalar.as_py(maps_as_pydicts="strict") for scalar in part]
        assert plainly(to_values(part)) == plainly(wanted)


@pytest.mark.parametrize("seed", seeds(100))
def test_lists_of_structs_become_the_rows_that_arrow_makes_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    kind = pa.list_(pa.struct([(f"f{at}", any_type(draw, depth=1)) for at in range(draw.randrange(1, 4))]))
    column = pa.array([any_value(draw, kind) for _ in range(draw.randrange(12))], kind)
    for part in (column, column.slice(2), column.slice(1, 3)):
        lists = [scalar.as_py(maps_as_pydicts="strict") for scalar in part]
        wanted = [
            None if rows is None else [None if row is None else tuple(row.values()) for row in rows]
            for rows in lists
        ]
        assert plainly(to_lists_of_rows(part, tuple)) == plainly(wanted)


def test_a_map_with_a_key_twice_is_an_error() -> None:
    column = pa.array([[("a", 1)], [("b", 1), ("b", 2)]], pa.map_(pa.string(), pa.int64()))
    with pytest.raises(KeyError, match="b"):
        to_values(column)


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_a_time_that_python_has_not_is_an_error(zone: str | None) -> None:
    kind = pa.timestamp("us", zone)
    ends = [datetime.datetime.min, None, datetime.datetime.max]
    assert [one and one.replace(tzinfo=None) for one in to_values(pa.array(ends, kind))] == ends
    for beyond in (-62_135_596_800_000_001, 253_402_300_800_000_000):
        with pytest.raises(OverflowError, match=f"^{beyond} microseconds .* beyond the years"):
            to_values(pa.array([0, None, beyond]).cast(kind))
