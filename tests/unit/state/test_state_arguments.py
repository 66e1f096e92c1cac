"""What states are told wrongly is refused where they are told."""

from __future__ import annotations

from typing import Any

import pytest

from flinkish_spark import AggregateFunction, Emit, KeyedProcessFunction, ReduceFunction
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.functions.aggregates import AggregateColumn, Fold
from flinkish_spark.state import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateTtl,
    TtlUpdate,
    ValueStateDescriptor,
)
from flinkish_spark.state.operator_state import OperatorListDescriptor
from flinkish_spark.testing import ProgramHarness
from tests.support.operator_harness import OperatorHarness


class Largest(ReduceFunction):
    def reduce(self, first: Any, second: Any) -> Any:
        return max(first, second)


class Sum(AggregateFunction):
    def create_accumulator(self) -> Any:
        return 0

    def add(self, value: Any, accumulator: Any) -> Any:
        return accumulator + value.amount

    def get_result(self, accumulator: Any) -> Any:
        return (accumulator,)


#: A descriptor of each kind, made with what is given.
KINDS: dict[str, Any] = {
    "get_state": lambda name, **more: ValueStateDescriptor(name, "LONG", **more),
    "get_list_state": lambda name, **more: ListStateDescriptor(name, "LONG", **more),
    "get_map_state": lambda name, **more: MapStateDescriptor(name, "LONG", "LONG", **more),
    "get_reducing_state": lambda name, **more: ReducingStateDescriptor(name, max, "LONG", **more),
    "get_aggregating_state": lambda name, **more: AggregatingStateDescriptor(name, Sum(), "LONG", **more),
}


@pytest.mark.parametrize("ttl_ms", [0, -1, 1.5, True, "100", None, 1 << 60])
def test_a_time_to_live_is_a_positive_number_of_milliseconds(ttl_ms: Any) -> None:
    with pytest.raises(ConfigError, match=r"ttl_ms is .*milliseconds"):
        StateTtl(ttl_ms)


@pytest.mark.parametrize("update", ["ON_READ_AND_WRITE", None, 1, TtlUpdate])
def test_a_word_is_no_kind_of_touch(update: Any) -> None:
    with pytest.raises(ConfigError, match=r"update is .*one of TtlUpdate"):
        StateTtl(100, update)


@pytest.mark.parametrize("declare", KINDS.values(), ids=KINDS)
def test_every_descriptor_looks_at_its_name_and_its_time_to_live(declare: Any) -> None:
    for name in (None, 5, b"total"):
        with pytest.raises(ConfigError, match="name is "):
            declare(name)
    for ttl in (60_000, "1h", StateTtl):
        with pytest.raises(ConfigError, match=r"ttl is .*an instance of StateTtl"):
            declare("total", ttl=ttl)
    assert declare("total", ttl=StateTtl(5)).ttl == StateTtl(5)


def test_an_operator_list_looks_at_its_arguments_too() -> None:
    with pytest.raises(ConfigError, match="name is None"):
        OperatorListDescriptor(None, "LONG")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="redistribution is 'SPLIT'"):
        OperatorListDescriptor("places", "LONG", "SPLIT")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [5, None, Largest, lambda one: one, "max"])
def test_a_reducing_state_takes_what_reduces(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"reduce is .*a function that can be called with 2 arguments"):
        ReducingStateDescriptor("largest", wrong, "LONG")
    for good in (Largest(), max, lambda first, second: first):
        assert ReducingStateDescriptor("largest", good, "LONG").reduce is good


@pytest.mark.parametrize("wrong", [5, None, Sum, AggregateFunction, Largest()])
def test_an_aggregating_state_takes_what_aggregates(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"aggregate is .*AggregateFunction"):
        AggregatingStateDescriptor("sum", wrong, "LONG")


@pytest.mark.parametrize("method", KINDS)
def test_a_descriptor_of_another_kind_is_refused_with_the_call_for_it(method: str) -> None:
    class Asks(KeyedProcessFunction):
        def __init__(self, given: Any) -> None:
            self.given = given

        def open(self, context: Any) -> None:
            getattr(context, method)(self.given)

        def process_element(self, value: Any, ctx: Any) -> Any:
            return None

    def opened(given: Any) -> Any:
        return OperatorHarness(Asks(given), key=lambda value: value, key_type="LONG")

    for other, declare in KINDS.items():
        if other != method:
            with pytest.raises(ConfigError, match=rf"in {method}\(\) of operator 'operator'") as refused:
                opened(declare("total"))
            assert f"call {other}() with it" in str(refused.value)
    for wrong in ("total", None, ValueStateDescriptor):
        with pytest.raises(ConfigError, match=rf"in {method}\(\) of operator 'operator'"):
            opened(wrong)
    opened(KINDS[method]("total"))


@pytest.mark.parametrize("emit", Emit)
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda keyed, **more: keyed.reduce(5, **more), "reduce is 5"),
        (lambda keyed, **more: keyed.reduce(Largest, **more), "reduce is "),
        (lambda keyed, **more: keyed.aggregate(5, accumulator="LONG", **more), "aggregate is 5"),
        (lambda keyed, **more: keyed.aggregate(Sum, accumulator="LONG", **more), "aggregate is "),
        (
            lambda keyed, **more: keyed.aggregate(AggregateFunction, accumulator="LONG", **more),
            "aggregate is ",
        ),
        (lambda keyed, **more: keyed.reduce(max, ttl=60_000, **more), "ttl is 60000"),
        (lambda keyed, **more: keyed.sum("amount", ttl=60_000, **more), "ttl is 60000"),
        (lambda keyed, **more: keyed.max_by("amount", ttl="1h", **more), "ttl is '1h'"),
        (
            lambda keyed, emit, **more: keyed.fold(
                AggregateColumn("n", Fold.COUNT, "amount"), ttl=60_000, **more
            ),
            "ttl is 60000",
        ),
        (
            lambda keyed, **more: keyed.aggregate(
                Merging(), accumulator="LONG", output="n LONG", ttl=60_000, **more
            ),
            "ttl is 60000",
        ),
    ],
)
def test_running_aggregates_look_at_their_arguments(call: Any, says: str, emit: Emit) -> None:
    with pytest.raises(ConfigError, match=says):
        ProgramHarness(
            lambda orders: call(orders.key_by("user"), uid="totals", emit=emit), "user STRING, amount LONG"
        )


class Merging(Sum):
    def merge(self, first: Any, second: Any) -> Any:
        return first + second
