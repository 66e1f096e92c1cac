"""Values that Arrow would change without a word are refused, however deep in a type they are."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from flinkish_spark import KeyedProcessFunction, ListStateDescriptor, MapStateDescriptor
from flinkish_spark.types.to_arrow import ValueMismatch, strict_array
from tests.support.operator_harness import OperatorHarness

UTC = datetime.UTC
LONGS, POINT = pa.list_(pa.int64()), pa.struct([("x", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
NOON = datetime.datetime(2026, 1, 1, 12)
MIDNIGHT = datetime.datetime(2026, 1, 1)
LAST_IN_NEW_YORK = datetime.datetime.max.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=-5)))


@pytest.mark.parametrize(
    ("kind", "wrong", "says"),
    [
        (pa.int64(), 1.5, "it is a float"),
        (pa.int64(), np.float32(2), "it is a float"),
        (LONGS, [1, 1.5], "1.5 in it: it is a float"),
        (pa.list_(LONGS), [[1], None, [2, 1.5]], "1.5 in it"),
        (pa.map_(pa.string(), pa.int64()), {"a": 1, "b": 0.5}, "0.5 in it"),
        (pa.map_(pa.int64(), pa.string()), {1.5: "a"}, "1.5 in it"),
        (pa.map_(pa.int64(), LONGS), [(1, [2.5])], "2.5 in it"),
        (POINT, (1.5, None), "1.5 in it"),
        (POINT, {"x": 1, "at": 5}, "5 in it: it is a number, and no time"),
        (pa.list_(POINT), [(1, None), {"x": 2.5, "at": None}], "2.5 in it"),
        (pa.list_(pa.string()), "abc", "a text is no list"),
        (pa.list_(pa.binary()), b"abc", "a text is no list"),
        (pa.list_(pa.timestamp("us", "UTC")), [5], "it is a number, and no time"),
        (pa.list_(pa.timestamp("us")), [NOON.replace(tzinfo=UTC)], "it has a time zone"),
        (pa.float32(), 1e300, "beyond what a FLOAT can be"),
        (pa.list_(pa.float32()), [-1e39], "beyond what a FLOAT can be"),
        (pa.list_(pa.date32()), [7], "it is a number, and no time"),
        (LONGS, [float("nan")], "it is a float"),
        (pa.duration("us"), 7, "it is a number, and no time"),
        (pa.int64(), Decimal("1.5"), "it is no whole number"),
        (pa.int16(), Fraction(3, 2), "it is no whole number"),
        (LONGS, [Decimal(1), Decimal("-0.5")], "it is no whole number"),
        (pa.map_(pa.int64(), pa.string()), {Decimal("2.5"): "a"}, "it is no whole number"),
        (POINT, (Decimal("2.5"), None), "it is no whole number"),
        # To Python it is a date, to Arrow the first of all.
        (pa.date32(), pd.NaT, "it is no time: give None"),
        (pa.list_(pa.date32()), [pd.NaT], "it is no time: give None"),
        (pa.timestamp("us", "UTC"), pd.NaT, "it is no time: give None"),
        (pa.timestamp("us", "UTC"), LAST_IN_NEW_YORK, "in UTC it is beyond the years"),
        (pa.list_(POINT), [(1, LAST_IN_NEW_YORK)], "in UTC it is beyond the years"),
        (pa.map_(pa.timestamp("us", "UTC"), LONGS), {LAST_IN_NEW_YORK: []}, "in UTC it is beyond the years"),
    ],
)
def test_a_value_that_would_be_another_one_is_refused(kind: pa.DataType, wrong: Any, says: str) -> None:
    with pytest.raises(ValueMismatch) as refused:
        strict_array([None, wrong], kind)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "value", "kept"),
    [
        (LONGS, [1, None, np.int64(2)], [1, None, 2]),
        (LONGS, np.array([1, 2]), [1, 2]),
        (LONGS, (), []),
        (pa.int64(), Decimal("3.00"), 3),
        (LONGS, [Decimal("1E+3"), Fraction(4, 2)], [1000, 2]),
        # As pandas hands out whole numbers beside nulls.
        (LONGS, [2.0, None], [2, None]),
        # As Spark does.
        (pa.date32(), NOON, NOON.date()),
        (pa.list_(pa.string()), ("a", "bc"), ["a", "bc"]),
        (pa.map_(pa.string(), pa.int64()), {"a": 1, "b": None}, [("a", 1), ("b", None)]),
        (pa.map_(pa.string(), pa.string()), (("a", "c"), ("b", "c")), [("a", "c"), ("b", "c")]),
        (POINT, (1, NOON.replace(tzinfo=UTC)), {"x": 1, "at": NOON.replace(tzinfo=UTC)}),
        (pa.float32(), float("inf"), float("inf")),
        (pa.float32(), 3, 3.0),
        (pa.float64(), 1e300, 1e300),
        (pa.date32(), MIDNIGHT, MIDNIGHT.date()),
        (pa.date32(), NOON.date(), NOON.date()),
        (pa.timestamp("us"), NOON, NOON),
        (
            pa.timestamp("us", "UTC"),
            datetime.datetime.max.replace(tzinfo=UTC),
            datetime.datetime.max.replace(tzinfo=UTC),
        ),
    ],
)
def test_what_stays_as_it_is_is_taken(kind: pa.DataType, value: Any, kept: Any) -> None:
    assert strict_array([None, value], kind).to_pylist() == [None, kept]


def test_the_whole_value_is_named_beside_what_is_wrong_in_it() -> None:
    with pytest.raises(ValueMismatch) as refused:
        strict_array([[1], [2, 2.5]], LONGS)
    assert refused.value.value == [2, 2.5] and "2.5 in it" in str(refused.value)


class Order(NamedTuple):
    user: str
    amount: int


class Halves(KeyedProcessFunction):
    """Keeps what a container declared as LONG cannot hold."""

    def __init__(self, where: str) -> None:
        self.where = where

    def open(self, context: Any) -> None:
        self.found = context.get_map_state(MapStateDescriptor("found", "STRING", "LONG"))
        self.all = context.get_list_state(ListStateDescriptor("all", "LONG"))

    def process_element(self, order: Any, ctx: Any) -> Iterator[Any]:
        if self.where == "map":
            self.found["total"] = self.found.get("total", 0) + order.amount / 2
        else:
            self.all.add(order.amount / 2)
        yield (self.found.get("total", 0),)


@pytest.mark.parametrize("where", ["map", "list"])
def test_states_of_several_values_refuse_what_they_would_cut(where: str) -> None:
    """Else results depended on where a micro-batch ends: what is stored differs from what was put."""
    harness = OperatorHarness(Halves(where), key=lambda order: order.user, key_type="STRING")
    with pytest.raises(Exception, match="it is a float"):
        harness.push(Order("ann", 1))
        harness.snapshot()
