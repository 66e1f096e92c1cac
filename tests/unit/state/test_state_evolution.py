"""A changed declaration: what stored state becomes, and which changes are refused."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

import pyarrow as pa
import pytest

from flinkish_spark import (
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    StateTtl,
    ValueStateDescriptor,
)
from flinkish_spark.state.codec import StateValueError
from flinkish_spark.state.evolution import StateMismatch, misfit
from flinkish_spark.state.key_group import BasePolicy
from flinkish_spark.state.operator_state import BroadcastTables, OperatorListDescriptor, OperatorLists
from tests.support.operator_harness import OperatorHarness

TINY = BasePolicy(smallest_bytes=1, delta_share=0.5, smallest_delta_rows=2)


class Writes(KeyedProcessFunction):
    """Writes what it is given into one state, and tells what was there."""

    def __init__(self, descriptor, dropped=()):
        self.descriptor, self.dropped = descriptor, dropped

    def open(self, context):
        for name in self.dropped:
            context.drop_state(name)
        kinds = {ListStateDescriptor: "get_list_state", MapStateDescriptor: "get_map_state"}
        self.state = getattr(context, kinds.get(type(self.descriptor), "get_state"))(self.descriptor)

    def process_element(self, value, ctx):
        before = self.state.value() if hasattr(self.state, "value") else self.state
        yield (dict(before.items()) if hasattr(before, "items") else before,)
        if value is not None:
            self.state.update(value)


def harness(descriptor, restore=None, dropped=(), policy=TINY):
    last = restore
    return OperatorHarness(
        Writes(descriptor, dropped),
        key=lambda value: "k",
        key_type="STRING",
        policy=policy,
        restore=None if last is None else last.snapshot(),
        bases=None if last is None else last.bases,
    )


def seen(before, value, after):
    """Store a value with one declaration; return what another finds."""
    first = harness(before)
    first.push(value)
    second = harness(after, first)
    second.push(None)
    ((found,),) = second.take().rows
    return list(found) if isinstance(after, ListStateDescriptor) else found


V = ValueStateDescriptor


@dataclass
class One:
    a: int


@dataclass
class Two:
    a: int
    b: int | None


@pytest.mark.parametrize(
    "before,value,after,found",
    [
        (V("s", "a LONG, b STRING"), (1, "x"), V("s", "a LONG, b STRING, c DOUBLE"), (1, "x", None)),
        (V("s", "a LONG, b STRING"), (1, "x"), V("s", "b STRING, z LONG"), ("x", None)),
        (V("s", "a LONG, b LONG"), (1, 2), V("s", "b LONG, a LONG"), (2, 1)),
        # A single field is stored as a struct, several as columns.
        (V("s", "a INT"), (1,), V("s", "a LONG, b STRING"), (1, None)),
        (V("s", "a INT, b STRING"), (1, "x"), V("s", "a LONG"), (1,)),
        (V("s", "a INT, b STRING"), (1, "x"), V("s", "b STRING"), ("x",)),
        (
            V("s", "a STRUCT<x: INT>"),
            ((1,),),
            V("s", "b LONG, a STRUCT<x: LONG, y: INT>"),
            (None, {"x": 1, "y": None}),
        ),
        (V("s", "value INT"), (1,), V("s", "value INT, b INT"), (1, None)),
        (V("s", "value INT, b INT"), (1, 2), V("s", "value INT"), (1,)),
        (V("s", One), One(1), V("s", Two), Two(1, None)),
        (V("s", Two), Two(1, 2), V("s", One), One(1)),
        (V("s", "a INT", ttl=StateTtl(5)), (1,), V("s", "a INT, b INT", ttl=StateTtl(5)), (1, None)),
        (V("s", "INT"), 7, V("s", "LONG"), 7),
        (V("s", "FLOAT"), 0.5, V("s", "DOUBLE"), 0.5),
        (V("s", "a INT, b STRING"), (1, "x"), V("s", "a LONG, b STRING"), (1, "x")),
        (
            ListStateDescriptor("s", "a INT, b STRING"),
            [(1, "x")],
            ListStateDescriptor("s", "a LONG, c DOUBLE"),
            [(1, None)],
        ),
        (
            MapStateDescriptor("s", "STRING", "INT"),
            {"k": 1},
            MapStateDescriptor("s", "STRING", "LONG"),
            {"k": 1},
        ),
        (MapStateDescriptor("s", "INT", "INT"), {7: 1}, MapStateDescriptor("s", "LONG", "LONG"), {7: 1}),
        (
            V("s", "a MAP<DECIMAL(4, 1), INT>, b INT"),
            ({Decimal("1.5"): 2}, 3),
            V("s", "a MAP<DECIMAL(9, 3), INT>, b INT"),
            ({Decimal("1.5"): 2}, 3),
        ),
    ],
)
def test_fields_come_and_go_and_grow(before, value, after, found) -> None:
    assert seen(before, value, after) == found


@pytest.mark.parametrize(
    "before,value,after,says",
    [
        (V("s", "LONG"), 7, V("s", "INT"), "'value' is stored as int64 but declared as int32"),
        (V("s", "a LONG, b STRING"), (1, "x"), V("s", "a STRING, b STRING"), "'a' is stored as int64"),
        (V("s", "a LONG, b STRING"), (1, "x"), V("s", "c LONG, d STRING"), "no field in common"),
        (V("s", "a LONG"), (1,), V("s", "b LONG, c LONG"), "no field in common"),
        (V("s", "a LONG, b LONG"), (1, 2), V("s", "c LONG"), "c: int64|no field in common"),
        (V("s", "a LONG, b LONG"), (1, 2), V("s", "a INT"), "'value.a' is stored as int64"),
        (V("s", "LONG"), 7, V("s", "a LONG, b LONG"), "no field in common"),
        (V("s", "LONG"), 7, V("s", "LONG", ttl=StateTtl(5)), "without a time to live"),
        (V("s", "LONG"), 7, V("t", "LONG"), "'s' is no longer declared .*drop_state"),
        (V("s", "LONG"), 7, V("s", "DOUBLE"), "stored as int64 but declared as double"),
        (
            V("s", "orders ARRAY<STRUCT<amount: LONG, at: STRUCT<x: INT>>>, n INT"),
            ([(5, (1,))], 2),
            V("s", "orders ARRAY<STRUCT<amount: INT, at: STRUCT<x: INT>>>, n INT"),
            "'orders.element.amount' is stored as int64 but declared as int32",
        ),
        (
            MapStateDescriptor("s", "STRING", "a LONG, b ARRAY<DATE>"),
            {"k": (1, [])},
            MapStateDescriptor("s", "STRING", "a LONG, b ARRAY<STRING>"),
            "'value.value.b.element' is stored as date32",
        ),
        (
            MapStateDescriptor("s", "LONG", "LONG"),
            {1: 1},
            MapStateDescriptor("s", "INT", "LONG"),
            "'value.key' is stored as int64 but declared as int32",
        ),
    ],
)
def test_what_would_lose_something_is_refused_with_its_field(before, value, after, says) -> None:
    with pytest.raises(StateMismatch, match=says):
        seen(before, value, after)


def test_a_state_may_be_given_up() -> None:
    first = harness(V("old", "LONG"))
    first.push(7)
    second = harness(V("new", "LONG"), first, dropped=["old"])
    second.push(8)
    third = harness(V("new", "LONG"), second, dropped=["old"])
    third.push(None)
    assert third.take().rows == [(8,)]


@pytest.mark.parametrize("again", ["LONG", "STRING"])
def test_a_state_that_was_given_up_is_not_there_again_out_of_a_base(again) -> None:
    # All goes into a base, and what changes then stays beside it for long.
    policy = BasePolicy(smallest_bytes=0, delta_share=100)

    first = harness(V("old", "LONG"), policy=policy)
    first.push(7)
    second = harness(V("new", "LONG"), first, dropped=["old"], policy=policy)
    second.push(8)
    third = harness(V("old", again), second, dropped=["new"], policy=policy)
    third.push(None)
    assert third.take().rows == [(None,)]


def test_a_time_to_live_may_go() -> None:
    assert seen(V("s", "LONG", ttl=StateTtl(5)), 7, V("s", "LONG")) == 7


@pytest.mark.parametrize(
    "stored,declared,wider",
    [
        (pa.decimal128(9, 2), pa.decimal128(12, 3), True),
        (pa.decimal128(9, 2), pa.decimal128(9, 3), False),
        (pa.map_(pa.int32(), pa.int32()), pa.map_(pa.int64(), pa.int32()), True),
        (pa.map_(pa.int64(), pa.int32()), pa.map_(pa.int32(), pa.int32()), False),
        (
            pa.map_(pa.struct([("a", pa.int8()), ("b", pa.int8())]), pa.int8()),
            pa.map_(pa.struct([("a", pa.int8())]), pa.int8()),
            False,
        ),
        (pa.struct([("a", pa.int32())]), pa.struct([("b", pa.int32())]), False),
        (pa.list_(pa.int8()), pa.list_(pa.int16()), True),
        (pa.string(), pa.binary(), False),
        (pa.float64(), pa.float32(), False),
        (pa.int32(), pa.float64(), False),
    ],
)
def test_wider_is_what_loses_nothing(stored, declared, wider) -> None:
    assert (not misfit(stored, declared)) is wider


@pytest.mark.parametrize(
    ("before", "value", "after", "found"),
    [
        ("n INT, name STRING", (1, "x"), "n LONG, name STRING", (1, "x")),
        ("n INT, name STRING", (1, "x"), "more STRING, n LONG", (None, 1)),
        ("n INT", (1,), "n INT, m LONG", (1, None)),
        ("INT", 1, "LONG", 1),
        ("ARRAY<STRUCT<n: INT>>", [{"n": 1}], "ARRAY<STRUCT<m: INT, n: LONG>>", [{"m": None, "n": 1}]),
    ],
)
def test_states_without_keys_may_be_declared_in_another_way_too(before, value, after, found) -> None:
    old, new = (MapStateDescriptor("s", "INT", before), MapStateDescriptor("s", "LONG", after))
    broadcast = BroadcastTables("op", [old], None)
    broadcast.writable(old)[5] = value
    assert dict(BroadcastTables("op", [new], broadcast.dump()).readable(new)) == {5: found}
    old_items, new_items = (OperatorListDescriptor("s", kind) for kind in (before, after))
    lists = OperatorLists("op", [old_items], None)
    lists.state(old_items).add(value)
    assert OperatorLists("op", [new_items], lists.dump()).state(new_items).get() == [found]


def test_of_states_without_keys_too_the_way_to_what_does_not_fit_is_named() -> None:
    broadcast = BroadcastTables("op", [MapStateDescriptor("s", "STRING", "n LONG")], None)
    broadcast.writable(MapStateDescriptor("s", "STRING", "n LONG"))["x"] = (1,)
    for key, value, says in (
        ("STRING", "n STRING", "'value.n' is stored as int64 but declared as string"),
        ("BINARY", "n LONG", "'key' is stored as string but declared as binary"),
        ("STRING", "m LONG", "'value' is stored as struct<n: int64> but declared as struct<m: int64>"),
    ):
        with pytest.raises(StateMismatch, match=f"broadcast state 's': {says}"):
            BroadcastTables("op", [MapStateDescriptor("s", key, value)], broadcast.dump())


@dataclass
class Checked:
    """Takes no field that is null, as one is that is new."""

    total: int
    orders: int = 0

    def __post_init__(self):
        if self.orders < 0:
            raise ValueError("orders cannot be negative")


@pytest.mark.parametrize("kind", [V, ListStateDescriptor])
def test_a_class_that_refuses_what_is_stored_is_told_with_state_and_key(kind) -> None:
    first = harness(kind("s", "total LONG"))
    first.push((7,) if kind is V else [(7,)])
    second = harness(kind("s", Checked), first)
    with pytest.raises(StateValueError, match=r"state 's': the stored value of key 'k' .* '<' not"):
        second.push(None)
