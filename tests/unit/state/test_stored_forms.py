"""Values of states that a declared type makes other ones of: they are that from the moment they are put."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import Row

from flinkish_spark import (
    AggregatingStateDescriptor,
    KeyedBroadcastProcessFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateTtl,
    ValueStateDescriptor,
)
from flinkish_spark.state.codec import StateValueError
from flinkish_spark.state.operator_state import OperatorListDescriptor, OperatorLists
from tests.support.operator_harness import BroadcastHarness, OperatorHarness

_MOMENT = datetime.datetime(2024, 5, 6, 7, 8, 9)
_IN_UTC = _MOMENT.replace(tzinfo=datetime.UTC)
_ELSEWHERE = _IN_UTC.astimezone(datetime.timezone(datetime.timedelta(hours=2)))
_SINGLE = 0.10000000149011612


@dataclasses.dataclass
class Priced:
    at: datetime.datetime
    price: float


#: What is put, its type, and what is read.
CASES: list[tuple[Any, str, Any]] = [
    (0.1, "FLOAT", _SINGLE),
    (np.float32(0.1), "FLOAT", _SINGLE),
    (np.float64(0.1), "FLOAT", _SINGLE),
    (3, "FLOAT", 3.0),
    (_MOMENT, "TIMESTAMP", _IN_UTC),
    (_MOMENT.replace(fold=1), "TIMESTAMP", _IN_UTC),
    (_ELSEWHERE, "TIMESTAMP", _IN_UTC),
    (pd.Timestamp(_MOMENT), "TIMESTAMP", _IN_UTC),
    (_MOMENT, "DATE", _MOMENT.date()),
    (_MOMENT.date(), "DATE", _MOMENT.date()),
    ((_MOMENT, 0.1), "at TIMESTAMP, price FLOAT", (_IN_UTC, _SINGLE)),
    ((None, 1), "at TIMESTAMP, price FLOAT", (None, 1.0)),
    ({"price": 0.1}, "at TIMESTAMP, price FLOAT", (None, _SINGLE)),
    (Row(price=0.1, at=_MOMENT), "at TIMESTAMP, price FLOAT", (_IN_UTC, _SINGLE)),
    (Priced(_MOMENT, 0.1), "at TIMESTAMP, price FLOAT", (_IN_UTC, _SINGLE)),
    ((7, "x", _MOMENT), "n LONG, name STRING, day DATE", (7, "x", _MOMENT.date())),
    ((0.1,), "price FLOAT", (_SINGLE,)),
]
IDS = [f"{declared} {value!r}" for value, declared, _ in CASES]
KINDS = ("value", "list", "map", "reducing", "aggregating")


def shown(value: Any) -> str:
    """Return a value as a text: times that are equal differ by their zones there."""
    if isinstance(value, tuple):
        return ", ".join(map(shown, value))
    return value.isoformat() if isinstance(value, datetime.date) else repr(value)


class Newest:
    def reduce(self, before: Any, added: Any) -> Any:
        return added

    def create_accumulator(self) -> Any:
        return None

    def add(self, value: Any, accumulator: Any) -> Any:
        return value

    def get_result(self, accumulator: Any) -> Any:
        return accumulator

    def merge(self, first: Any, second: Any) -> Any:
        return second


class Keeps(KeyedProcessFunction):
    """Puts an element's value, if it has one, and emits how the state has it."""

    def __init__(self, kind: str, declared: str, ttl: StateTtl | None = None) -> None:
        self.kind, self.declared, self.ttl = kind, declared, ttl

    def open(self, context: Any) -> None:
        declared, ttl = self.declared, self.ttl
        match self.kind:
            case "value":
                self.state = context.get_state(ValueStateDescriptor("s", declared, ttl=ttl))
            case "list":
                self.state = context.get_list_state(ListStateDescriptor("s", declared, ttl))
            case "map":
                self.state = context.get_map_state(MapStateDescriptor("s", "STRING", declared, ttl))
            case "reducing":
                self.state = context.get_reducing_state(ReducingStateDescriptor("s", Newest(), declared, ttl))
            case "aggregating":
                newest: Any = Newest()
                described = AggregatingStateDescriptor("s", newest, declared, ttl)
                self.state = context.get_aggregating_state(described)

    def process_element(self, element: Any, ctx: Any) -> Any:
        if element is not None:
            self.put(element)
        yield shown(self.found())

    def put(self, value: Any) -> None:
        match self.kind:
            case "value":
                self.state.update(value)
            case "map":
                self.state["k"] = value
            case _:
                self.state.add(value)

    def found(self) -> Any:
        match self.kind:
            case "value":
                return self.state.value()
            case "list":
                return self.state[-1]
            case "map":
                return self.state["k"]
        return self.state.get()


def _harness(function: Any) -> OperatorHarness:
    return OperatorHarness(function, key=lambda _: "k", key_type="STRING", max_parallelism=1)


@pytest.mark.parametrize("ttl", [None, StateTtl(1_000)], ids=["for ever", "with TTL"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("value", "declared", "read"), CASES, ids=IDS)
def test_a_value_is_at_once_what_the_next_micro_batch_reads(
    value: Any, declared: str, read: Any, kind: str, ttl: StateTtl | None
) -> None:
    harness = _harness(Keeps(kind, declared, ttl))
    harness.push_all([(value, None), (None, None)])
    harness.push(None)
    assert harness.take().rows == [shown(read)] * 3


@pytest.mark.parametrize(("value", "declared", "read"), CASES, ids=IDS)
def test_so_are_items_of_operator_states(value: Any, declared: str, read: Any) -> None:
    described = OperatorListDescriptor("items", declared)
    lists = OperatorLists("o", [described], None)
    lists.state(described).add(value)
    stored = OperatorLists("o", [described], lists.dump())
    for state in (lists.state(described), stored.state(described)):
        [found] = state
        assert shown(found) == shown(read)


def test_so_are_values_of_broadcast_states() -> None:
    rules = MapStateDescriptor("rules", "STRING", "since TIMESTAMP, price FLOAT")

    class Rules(KeyedBroadcastProcessFunction):
        def process_element(self, value: Any, ctx: Any) -> Any:
            yield shown(ctx.get_broadcast_state(rules)["r"])

        def process_broadcast_element(self, value: Any, ctx: Any) -> Any:
            state = ctx.get_broadcast_state(rules)
            state["r"] = (value, 0.1)
            yield shown(state["r"])

    harness = BroadcastHarness(Rules(), [rules], key=lambda _: "k", key_type="STRING")
    harness.broadcast(_MOMENT)
    harness.push(1)
    # Each copy of the operator has applied it.
    assert set(harness.take().rows) == {shown((_IN_UTC, _SINGLE))}


def test_a_time_of_an_hour_ago_can_be_taken_from_one_of_now_in_the_same_micro_batch() -> None:
    class Gaps(KeyedProcessFunction):
        def open(self, context: Any) -> None:
            self.last = context.get_state(ValueStateDescriptor("last", "TIMESTAMP"))

        def process_element(self, at: Any, ctx: Any) -> Any:
            before = self.last.value()
            self.last.update(at)
            yield None if before is None else (self.last.value() - before).total_seconds()

    moments = [_MOMENT, _ELSEWHERE + datetime.timedelta(hours=1), _MOMENT + datetime.timedelta(hours=3)]
    harness = _harness(Gaps())
    harness.push_all([(moment, None) for moment in moments])
    assert harness.take().rows == [None, 3600.0, 7200.0]


def test_what_replace_makes_of_a_row_has_its_form_too() -> None:
    class Moves(KeyedProcessFunction):
        def open(self, context: Any) -> None:
            self.state = context.get_state(ValueStateDescriptor("s", "at TIMESTAMP, n LONG"))

        def process_element(self, at: Any, ctx: Any) -> Any:
            before = self.state.value()
            self.state.update((at, 1) if before is None else before._replace(at=at))
            yield self.state.value().at.tzinfo

    harness = _harness(Moves())
    harness.push_all([(_MOMENT, None), (_MOMENT, None)])
    assert harness.take().rows == [datetime.UTC, datetime.UTC]


def test_a_default_has_its_form_too() -> None:
    class Defaults(KeyedProcessFunction):
        def open(self, context: Any) -> None:
            self.state = context.get_state(ValueStateDescriptor("s", "FLOAT", default=0.1))

        def process_element(self, element: Any, ctx: Any) -> Any:
            yield self.state.value()

    harness = _harness(Defaults())
    harness.push(1)
    assert harness.take().rows == [_SINGLE]


@pytest.mark.parametrize(
    ("value", "declared"),
    [(1e300, "FLOAT"), ("0.1", "FLOAT"), (5, "TIMESTAMP"), (5, "DATE"), ((5, 1), "at TIMESTAMP, n LONG")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_is_refused_where_it_is_stored_with_its_key(
    value: Any, declared: str, kind: str
) -> None:
    with pytest.raises(StateValueError, match=r"state 's' got a wrong value.* of key 'k'"):
        _harness(Keeps(kind, declared)).push(value)
