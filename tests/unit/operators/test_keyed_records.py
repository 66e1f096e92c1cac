"""map, flat_map and filter on keyed streams, with state per key; and keys on top of keys."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from flinkish_spark import (
    FilterFunction,
    FlatMapFunction,
    ListStateDescriptor,
    MapFunction,
    MapStateDescriptor,
    StateTtl,
    ValueStateDescriptor,
)
from flinkish_spark.core.errors import ConfigError, GraphError, SchemaError, UserFunctionError
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.windows import TumblingEventTimeWindows

ORDERS = "user STRING, amount LONG"


class Average(NamedTuple):
    user: str
    average: float


class CountWindowAverage(FlatMapFunction):
    """The average of each two elements of a key: the first program of Flink's page on state."""

    def open(self, context: Any) -> None:
        self.sum = context.get_state(ValueStateDescriptor("sum", "n LONG, total LONG"))

    def flat_map(self, value: Any) -> Iterator[Average]:
        n, total = self.sum.value() or (0, 0)
        n, total = n + 1, total + value.amount
        self.sum.update((n, total))
        if n == 2:
            self.sum.clear()
            yield Average(value.user, total / n)


class Numbered(MapFunction):
    def open(self, context: Any) -> None:
        self.n = context.get_state(ValueStateDescriptor("n", "LONG", default=0, ttl=StateTtl(100)))
        self.where = (context.uid, context.max_parallelism, context.get_task_name())

    def map(self, value: Any) -> Any:
        self.n.update(self.n.value() + 1)
        return {"n": self.n.value(), "where": str(self.where)}


class FirstOfEach(FilterFunction):
    """Keeps the first element of each key and amount."""

    def open(self, context: Any) -> None:
        self.seen = context.get_map_state(MapStateDescriptor("seen", "LONG", "BOOLEAN"))

    def filter(self, value: Any) -> bool:
        is_new = value.amount not in self.seen
        self.seen[value.amount] = True
        return is_new


class Locked(FilterFunction):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def filter(self, value: Any) -> bool:
        return True


def rows(harness: ProgramHarness) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in harness.take().rows]


def test_a_flat_map_function_keeps_state_for_each_key_over_micro_batches_and_restores() -> None:
    harness = ProgramHarness.of(CountWindowAverage(), ORDERS, key="user", uid="averages")
    assert harness.output_type.simpleString() == "struct<user:string,average:double>"
    harness.push_all([(("ann", 1), 5), (("ben", 10), 6), (("ann", 2), 7)])
    output = harness.take()
    assert [tuple(row) for row in output.rows] == [("ann", 1.5)] and output.times_ms == [7]
    assert harness.entries("sum") == {"ben": (1, 10)}
    later = ProgramHarness.of(
        CountWindowAverage(), ORDERS, key="user", uid="averages", parallelism=3, restore=harness.snapshot()
    )
    later.push(("ben", 20))
    assert rows(later) == [("ben", 15.0)] and later.entries("sum") == {}


def test_a_map_function_sees_the_operator_and_its_state_expires() -> None:
    def program(orders: Any) -> Any:
        keyed = orders.key_by("user").map(
            Numbered(), output="n LONG, where STRING", uid="numbers", max_parallelism=8
        )
        return keyed.name("counting")

    harness = ProgramHarness(program, ORDERS)
    for time_ms in (0, 99, 250):
        harness.processing_time(time_ms)
        harness.push(("ann", 1))
    made = rows(harness)
    assert [n for n, _ in made] == [1, 2, 1]
    assert made[0][1] == "('numbers', 8, 'counting')"


def test_a_filter_function_keeps_the_fields_and_times_of_its_input() -> None:
    harness = ProgramHarness.of(FirstOfEach(), f"{ORDERS}, info STRUCT<a: LONG>", key="user")
    assert [field.name for field in harness.output_type] == ["user", "amount", "info"]
    info = {"a": 1}
    harness.push_all([(("ann", 1, info), 3), (("ann", 1, info), 4), (("ben", 1, None), 5)])
    output = harness.take()
    assert sorted(zip(output.times_ms, map(tuple, output.rows), strict=True)) == [
        (3, ("ann", 1, info)),
        (5, ("ben", 1, None)),
    ]
    harness.push(("ann", 1, info))
    assert rows(harness) == []


def test_plain_functions_do_too_and_windows_may_follow() -> None:
    def doubled(order: Any) -> Iterator[tuple[str, int]]:
        yield order.user, order.amount
        yield order.user, order.amount

    def program(orders: Any) -> Any:
        kept = orders.key_by("user").filter(lambda order: order.amount > 0, uid="kept")
        twice = kept.key_by("user").flat_map(doubled, output=ORDERS, uid="twice")
        plus = twice.key_by("user").map(lambda one: (one.user, one.amount + 1), output=ORDERS, uid="plus")
        return plus.key_by("user").window(TumblingEventTimeWindows(10)).sum("amount", uid="sums")

    harness = ProgramHarness(program, ORDERS)
    harness.push_all([(("ann", 1), 3), (("ann", -1), 4), (("ann", 5), 8)])
    harness.watermark(9)
    assert [(user, total) for user, total, *_ in rows(harness)] == [("ann", 16)]


def test_a_function_is_closed_and_a_copy_is_opened_after_a_crash(tmp_path: Any) -> None:
    log = tmp_path / "log"

    class Noted(FlatMapFunction):
        def open(self, context: Any) -> None:
            self.seen = context.get_list_state(ListStateDescriptor("seen", "LONG"))
            with log.open("a") as file:
                file.write("open ")

        def close(self) -> None:
            with log.open("a") as file:
                file.write("close ")

        def flat_map(self, value: Any) -> Any:
            self.seen.add(value.amount)
            return [(len(self.seen),)] if value.amount else None

    harness = ProgramHarness.of(Noted(), ORDERS, key="user", output="n LONG")
    harness.push_all([(("ann", 1), None), (("ann", 0), None)])
    harness.snapshot()
    harness.crash()
    harness.push(("ann", 1))
    assert rows(harness) == [(3,)]
    harness.close()
    assert log.read_text() == "open open close "


def test_a_keyed_stream_may_be_keyed_anew_and_only_the_last_key_counts() -> None:
    class PerKey(MapFunction):
        def open(self, context: Any) -> None:
            self.n = context.get_state(ValueStateDescriptor("n", "LONG", default=0))

        def map(self, value: Any) -> Any:
            self.n.update(self.n.value() + 1)
            return (self.n.value(),)

    def program(orders: Any) -> Any:
        again = orders.key_by("user").key_by(lambda order: order.amount % 2, key="LONG")
        return again.map(PerKey(), output="n LONG", uid="counts")

    harness = ProgramHarness(program, ORDERS)
    harness.push_all([(("ann", 1), None), (("ben", 3), None), (("ann", 2), None)])
    assert sorted(rows(harness)) == [(1,), (1,), (2,)]
    assert harness.entries("n") == {1: 2, 0: 1}


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda keyed: keyed.flat_map(CountWindowAverage, output=ORDERS, uid="x"),
            GraphError,
            r"flat_map\(\) of 'x' got the class CountWindowAverage.*an instance of a FlatMapFunction",
        ),
        (lambda keyed: keyed.map(FirstOfEach(), output=ORDERS, uid="x"), GraphError, "got a FirstOfEach"),
        (lambda keyed: keyed.filter(1, uid="x"), GraphError, "got a int"),
        (lambda keyed: keyed.map(lambda one: one, uid="x"), SchemaError, "the output of 'x' is not known"),
        (lambda keyed: keyed.map(lambda one: one, output=ORDERS, uid="a b/"), GraphError, "uid"),
        (
            lambda keyed: keyed.filter(lambda one: True, uid="x", max_parallelism=0),
            ConfigError,
            "max_parallelism is 0",
        ),
        (
            lambda keyed: keyed.filter(Locked(), uid="x"),
            UserFunctionError,
            "cannot be sent to the workers",
        ),
        (lambda keyed: keyed.key_by(), GraphError, "got no key"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_said(call: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=f"(?s){says}"):
        ProgramHarness(lambda orders: call(orders.key_by("user")), ORDERS)
