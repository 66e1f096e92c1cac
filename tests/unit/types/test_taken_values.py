"""Rows that are out do not change with the objects that they were made of; nor does a default."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import threading
from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
from pyspark.sql import Row

from flinkish_spark import (
    AggregateFunction,
    BroadcastProcessFunction,
    FlatMapFunction,
    KeyedProcessFunction,
    MapStateDescriptor,
    OutputTag,
    ProcessFunction,
    ValueStateDescriptor,
)
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.types.row_form import RowError, RowForm, element_class
from flinkish_spark.types.to_python import copy_if_mutable
from flinkish_spark.windows import CountTrigger, GlobalWindows, ProcessWindowFunction

ORDERS = "user STRING, amount LONG"
SIDE = OutputTag("side", "total LONG")
AMOUNTS = [(("ann", amount), None) for amount in (1, 2, 4)]


@dataclasses.dataclass
class Total:
    total: int = 0


class Held(KeyedProcessFunction):
    """Emits the very object that it goes on with."""

    def open(self, context: Any) -> None:
        self.kept = context.get_state(ValueStateDescriptor("kept", Total))

    def process_element(self, order: Any, ctx: Any) -> Any:
        kept = self.kept.value() or Total()
        kept.total += order.amount
        self.kept.update(kept)
        ctx.output(SIDE, kept)
        yield kept
        kept.total += 0


class Refilled(FlatMapFunction, ProcessFunction, BroadcastProcessFunction):
    """Fills one dict again and again."""

    def flat_map(self, order: Any) -> Any:
        row: dict[str, int] = {}
        for amount in (order.amount, -order.amount):
            row["total"] = amount
            yield row

    def process_element(self, order: Any, ctx: Any) -> Any:
        row = {"total": order.amount}
        ctx.output(SIDE, row)
        row["total"] = -order.amount
        yield row

    def process_broadcast_element(self, order: Any, ctx: Any) -> Any:
        return ()


class Listed(ProcessWindowFunction):
    def process(self, key: Any, context: Any, elements: Any) -> Any:
        seen: list[int] = []
        for element in elements:
            seen.append(element.amount)
            yield (seen,)


class Sum(AggregateFunction):
    def create_accumulator(self) -> Any:
        return Total()

    def add(self, value: Any, accumulator: Any) -> Any:
        accumulator.total += value.amount
        return accumulator

    def get_result(self, accumulator: Any) -> Any:
        return accumulator


PROGRAMS: dict[str, Any] = {
    "keyed": (lambda s: s.key_by("user").process(Held(), output="total LONG", uid="op"), [(1,), (3,), (7,)]),
    "aggregate": (
        lambda s: s.key_by("user").aggregate(Sum(), accumulator=Total, output="total LONG", uid="op"),
        [(1,), (3,), (7,)],
    ),
    "window": (
        lambda s: (
            s.key_by("user")
            .window(GlobalWindows())
            .trigger(CountTrigger(1))
            .process(Listed(), output="seen ARRAY<LONG>", uid="op")
        ),
        [([1],), ([1],), ([1, 2],), ([1],), ([1, 2],), ([1, 2, 4],)],
    ),
    "flat_map": (
        lambda s: s.flat_map(Refilled(), output="total LONG"),
        [(1,), (-1,), (2,), (-2,), (4,), (-4,)],
    ),
    "process": (lambda s: s.process(Refilled(), output="total LONG"), [(-1,), (-2,), (-4,)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("together", [True, False], ids=["in one micro-batch", "one by one"])
def test_a_row_is_what_it_was_when_it_was_emitted(name, together) -> None:
    program, expected = PROGRAMS[name]
    harness = ProgramHarness(program, ORDERS)
    for batch in [AMOUNTS] if together else [[one] for one in AMOUNTS]:
        harness.push_all(batch)
    assert [tuple(row) for row in harness.take().rows] == expected


def test_rows_of_side_outputs_are_what_they_were() -> None:
    states = [MapStateDescriptor("rules", "STRING", "LONG")]
    for harness, seen in (
        (ProgramHarness.of(Held(), ORDERS, key="user", output="total LONG", side_outputs=[SIDE]), [1, 3, 7]),
        (
            ProgramHarness.of(
                Refilled(), ORDERS, ORDERS, output="total LONG", broadcast=states, side_outputs=[SIDE]
            ),
            [1, 2, 4],
        ),
    ):
        harness.push_all(AMOUNTS)
        assert [row.total for row in harness.take().side["side"]] == seen


@pytest.mark.parametrize("default", [[], {}, Total(1)], ids=["list", "dict", "dataclass"])
def test_a_default_is_each_key_s_own(default) -> None:
    kinds = {list: "ARRAY<LONG>", dict: "MAP<STRING, LONG>", Total: Total}

    class Grown(KeyedProcessFunction):
        def open(self, context: Any) -> None:
            self.kept = context.get_state(ValueStateDescriptor("kept", kinds[type(default)], default=default))

        def process_element(self, order: Any, ctx: Any) -> Any:
            kept = self.kept.value()
            yield order.user, str(kept)
            match kept:
                case list():
                    kept.append(order.amount)
                case dict():
                    kept["n"] = order.amount
                case Total():
                    kept.total += order.amount

    before = str(default)
    harness = ProgramHarness.of(
        Grown(), ORDERS, key="user", output="user STRING, begins STRING", max_parallelism=1
    )
    harness.push_all([(("ann", 1), None), (("ben", 2), None)])
    harness.push(("cid", 3))
    assert [row.begins for row in harness.take().rows] == [before] * 3


class Place(NamedTuple):
    x: int
    tags: list[str]


def test_what_cannot_change_is_the_same_object_and_the_rest_is_not() -> None:
    now = datetime.datetime.now(datetime.UTC)
    for value in (
        1,
        "a",
        None,
        2.5,
        b"x",
        now,
        decimal.Decimal(1),
        (1, "a"),
        Row(a=1),
        namedtuple("P", "x")(1),
    ):
        assert copy_if_mutable(value) is value
    row = (1, Place(2, ["a"]), {"k": [Total(3)]}, Row(a=[1]), np.array([1]))
    out = copy_if_mutable(row)
    row[1].tags.append("b")
    row[2]["k"][0].total = 4
    row[3].a.append(2)
    row[4][0] = 5
    assert out[:4] == (1, Place(2, ["a"]), {"k": [Total(3)]}, Row(a=[1]))
    assert out[3].asDict() == {"a": [1]}
    assert out[4].tolist() == [1]
    lock = threading.Lock()
    assert copy_if_mutable([lock])[0] is lock


def test_elements_have_the_names_of_their_fields_whatever_python_thinks_of_them() -> None:
    names = ["_1", "_2", "_change_type", "class", "two words", "n", "_fields_", "_make"]
    element = element_class(names)._make(range(8))
    assert (element._1, element._2, element._change_type, element.n) == (0, 1, 2, 5)
    assert getattr(element, "class") == 3
    assert getattr(element, "two words") == 4
    assert element._fields == tuple(names)
    assert element._asdict() == dict(zip(names, range(8), strict=True))
    assert repr(element).startswith("Record(_1=0, _2=1, _change_type=2, class=3")


def test_fields_without_names_are_found_by_the_next_function() -> None:
    def first(order: Any) -> tuple[str, int]:
        return order.user, order.amount

    harness = ProgramHarness(
        lambda s: s.map(first).map(lambda r: (r._1, r._2 + 1), output="user STRING, more LONG"), ORDERS
    )
    harness.push(("ann", 1))
    assert [tuple(row) for row in harness.take().rows] == [("ann", 2)]
    same = ProgramHarness(
        lambda s: s.map(lambda r: r, output="_a STRING, class LONG"), "_a STRING, class LONG"
    )
    same.push(("ann", 1))
    assert [tuple(row) for row in same.take().rows] == [("ann", 1)]


def test_a_field_may_have_the_name_of_our_mark() -> None:
    assert element_class(["is_element", "n"])._make((False, 1)).is_element is False
    named = namedtuple("named", "y is_element")
    with pytest.raises(RowError, match="the field 'y'"):
        RowForm(["a", "b"]).tuple_of(named(1, 2))


@dataclasses.dataclass
class Parts:
    pair: tuple[str, int]
    pairs: list[tuple[str, int]]
    by_name: dict[str, tuple[int, Total]]


def test_tuples_within_a_state_are_tuples_in_the_next_micro_batch() -> None:
    class Keeps(KeyedProcessFunction):
        def open(self, context: Any) -> None:
            self.parts = context.get_state(ValueStateDescriptor("parts", Parts))

        def process_element(self, order: Any, ctx: Any) -> Any:
            kept = self.parts.value()
            if kept is not None:
                yield kept.pair[0], kept.pairs[1][1], kept.by_name["a"][1].total
            self.parts.update(Parts(("x", 1), [("y", 2), ("z", 3)], {"a": (4, Total(5))}))

    harness = ProgramHarness.of(Keeps(), ORDERS, key="user", output="a STRING, b LONG, c LONG")
    for _ in range(2):
        harness.push(("ann", 1))
    assert [tuple(row) for row in harness.take().rows] == [("x", 3, 5)]


@pytest.mark.parametrize(
    "declare",
    [
        lambda: ValueStateDescriptor("v", dict[tuple[str, int], int]),
        lambda: ValueStateDescriptor("v", list[dict[Place, int]]),
        lambda: MapStateDescriptor("v", tuple[str, int], int),
        lambda: MapStateDescriptor("v", Place, int),
    ],
)
def test_maps_with_keys_of_several_parts_are_refused(declare) -> None:
    with pytest.raises(SchemaError, match="A key of a map is a scalar"):
        declare()
