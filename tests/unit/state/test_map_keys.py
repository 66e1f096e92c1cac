"""Keys of map states and broadcast states: the same before they are stored and behind it."""

from __future__ import annotations

import datetime
import decimal
import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from flinkish_spark import KeyedBroadcastProcessFunction, KeyedProcessFunction, MapStateDescriptor
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.operators.process import ElementError
from flinkish_spark.state import ListStateDescriptor, StateTtl, TtlUpdate, ValueStateDescriptor
from flinkish_spark.state.states import MapKeys
from flinkish_spark.types.to_python import to_values
from tests.support.operator_harness import BroadcastHarness, OperatorHarness

_MOMENT = datetime.datetime(2024, 5, 6, 7, 8, 9)
_IN_UTC = _MOMENT.replace(tzinfo=datetime.UTC)
_ELSEWHERE = _IN_UTC.astimezone(datetime.timezone(datetime.timedelta(hours=2)))

#: Types, and keys that are one key of it, the last as it is read.
CHANGED: list[tuple[str, list[Any]]] = [
    ("FLOAT", [0.1, np.float32(0.1), 0.10000000149011612]),
    ("DOUBLE", [1, np.float64(1), 1.0]),
    ("DOUBLE", [-0.0, 0, 0.0]),
    ("DOUBLE", [float("nan"), np.float64("nan"), math.nan]),
    ("FLOAT", [float("nan"), math.nan]),
    ("TIMESTAMP", [_MOMENT, pd.Timestamp(_MOMENT), _ELSEWHERE, _MOMENT.replace(fold=1), _IN_UTC]),
    ("TIMESTAMP_NTZ", [pd.Timestamp(_MOMENT), _MOMENT.replace(fold=1), _MOMENT]),
    ("DATE", [_MOMENT, pd.Timestamp(_MOMENT), _MOMENT.date()]),
    ("STRING", [b"ann", np.str_("ann"), "ann"]),
    ("BINARY", ["ann", bytearray(b"ann"), b"ann"]),
    ("INT", [np.int64(7), 7]),
    ("DECIMAL(10, 2)", [1, decimal.Decimal("1.0"), decimal.Decimal("1.00")]),
    ("INTERVAL DAY TO SECOND", [pd.Timedelta("1s"), datetime.timedelta(seconds=1)]),
]
#: Types, and what cannot be a key of theirs.
REFUSED: list[tuple[str, Any]] = [
    ("LONG", "1"),
    ("LONG", 1.0),
    ("INT", True),
    ("STRING", 1),
    ("STRING", b"\xff"),
    ("DOUBLE", "1"),
    ("DECIMAL(10, 2)", decimal.Decimal("1.005")),
    ("TIMESTAMP", 1_700_000_000),
    ("TIMESTAMP", np.datetime64("2024-01-01")),
    ("TIMESTAMP_NTZ", _IN_UTC),
    ("TIMESTAMP", pd.NaT),
    ("DATE", 3),
    ("LONG", [1]),
    ("FLOAT", 1e300),
]


class Counts(KeyedProcessFunction):
    """Counts how often each element came, and asks for it in each way."""

    def __init__(self, key_type: str, ttl: StateTtl | None) -> None:
        self.descriptor = MapStateDescriptor("m", key_type, "LONG", ttl)

    def open(self, context: Any) -> None:
        self.m = context.get_map_state(self.descriptor)

    def process_element(self, value: Any, ctx: Any) -> Any:
        before = (value in self.m, self.m.contains(value), self.m.get(value, 0))
        self.m[value] = self.m.get(value, 0) + 1
        yield before, (value in self.m, list(self.m.items()))


def _harness(key_type: str, ttl: StateTtl | None, restore: Any = None) -> OperatorHarness:
    return OperatorHarness(Counts(key_type, ttl), key=lambda _: "k", key_type="STRING", restore=restore)


@pytest.mark.parametrize("ttl", [None, StateTtl(1000), StateTtl(1000, TtlUpdate.ON_READ_AND_WRITE)])
@pytest.mark.parametrize(("kind", "keys"), CHANGED, ids=repr)
def test_a_key_is_one_key_in_whatever_form_it_comes(kind: str, keys: list[Any], ttl: Any) -> None:
    harness = _harness(kind, ttl)
    for number, key in enumerate(keys * 2):
        harness.push(key)
        [(before, (there, items))] = harness.take().rows
        assert before == (number > 0, number > 0, number) and there
        # NaN is equal to nothing, but as a part of a list.
        assert items == [(keys[-1], number + 1)] and type(items[0][0]) is type(keys[-1])
        harness = _harness(kind, ttl, harness.snapshot())
    assert list(harness.entries("m")["k"].items()) == [(keys[-1], 2 * len(keys))]


@pytest.mark.parametrize(("kind", "key"), REFUSED, ids=repr)
@pytest.mark.parametrize("ttl", [None, StateTtl(1000)])
def test_what_cannot_be_a_key_is_refused_by_operator_state_and_key(kind: str, key: Any, ttl: Any) -> None:
    with pytest.raises(ElementError) as failed:
        _harness(kind, ttl).push(key)
    error = failed.value.error
    assert isinstance(error, SchemaError)
    assert "the state 'm' of operator 'operator'" in str(error) and repr(key) in str(error)


def test_none_is_looked_for_in_vain_and_never_put() -> None:
    class Asks(Counts):
        def process_element(self, value: Any, ctx: Any) -> Any:
            assert None not in self.m and self.m.get(None) is None
            self.m.remove(None)
            self.m[None] = 1

    with pytest.raises(ElementError) as failed:
        OperatorHarness(Asks("STRING", None), key=lambda _: "k", key_type="STRING").push("a")
    assert "A key is never null" in str(failed.value.error)


def test_entries_are_removed_by_any_form_of_their_key() -> None:
    class Removes(Counts):
        def process_element(self, value: Any, ctx: Any) -> Any:
            put, removed = value
            self.m[put] = 1
            assert self.m.pop(removed) == 1
            self.m[put] = 2
            del self.m[removed]
            self.m.setdefault(put, 3)
            self.m.remove(removed)
            yield self.m.is_empty()

    for kind, keys in CHANGED:
        for ttl in (None, StateTtl(1000)):
            harness = OperatorHarness(Removes(kind, ttl), key=lambda _: "k", key_type="STRING")
            for key in keys:
                harness.push((key, keys[-1]))
                harness.push((keys[-1], key))
            assert set(harness.take().rows) == {True}


def test_several_nans_of_an_older_version_stay_readable_and_one_is_found() -> None:
    stored = pa.array(
        [[(float("nan"), 1), (float("nan"), 2)], [], [(1.0, 3)], [(float("nan"), 4)]],
        pa.map_(pa.float64(), pa.int64()),
    )
    found = to_values(stored)
    assert [len(one) for one in found] == [2, 0, 1, 1]
    assert found[0][math.nan] == 2 and found[3][math.nan] == 4


def test_common_keys_are_returned_as_they_are() -> None:
    for kind, key in (("LONG", 5), ("STRING", "a"), ("DATE", _MOMENT.date()), ("DOUBLE", 1.5)):
        assert MapKeys("operator 'x'", "m", kind).put(key) is key


class Rules(KeyedBroadcastProcessFunction):
    """Says which rule an element has, by any form of its key."""

    def __init__(self, descriptor: MapStateDescriptor) -> None:
        self.rules = descriptor

    def process_element(self, value: Any, ctx: Any) -> Any:
        rules = ctx.get_broadcast_state(self.rules)
        yield value in rules, rules.contains(value), rules.get(value), None in rules

    def process_broadcast_element(self, value: Any, ctx: Any) -> None:
        rules = ctx.get_broadcast_state(self.rules)
        rules[value] = rules.get(value, 0) + 1


@pytest.mark.parametrize(("kind", "keys"), CHANGED, ids=repr)
def test_keys_of_broadcast_states_are_one_key_too(kind: str, keys: list[Any]) -> None:
    descriptor = MapStateDescriptor("rules", kind, "LONG")
    harness = BroadcastHarness(Rules(descriptor), [descriptor], key=lambda _: "k", key_type="STRING")
    for number, key in enumerate(keys, 1):
        harness.micro_batch([(key, None)], [(one, None) for one in keys])
        assert set(harness.take().rows) == {(True, True, number, False)}
    assert [list(copy.items()) for copy in harness.copies(descriptor)] == [[(keys[-1], len(keys))]] * 2


class Place(NamedTuple):
    x: int


@pytest.mark.parametrize(
    "kind",
    [
        "ARRAY<INT>",
        "STRUCT<a: INT>",
        "a INT, b INT",
        "a INT",
        "MAP<INT, INT>",
        Place,
        Place | None,
        list[int],
    ],
    ids=str,
)
def test_a_key_with_parts_is_refused_where_it_is_declared_however_it_is_written(kind: Any) -> None:
    with pytest.raises(SchemaError, match="the state 'm' cannot have the type") as refused:
        MapStateDescriptor("m", kind, "LONG")
    assert "A key of a map is a scalar" in str(refused.value)


@pytest.mark.parametrize("declare", [ValueStateDescriptor, ListStateDescriptor])
def test_maps_in_text_have_no_keys_with_parts_at_any_depth(declare: Any) -> None:
    for text in ("MAP<ARRAY<INT>, INT>", "a LONG, b ARRAY<MAP<STRUCT<c: INT>, INT>>"):
        with pytest.raises(SchemaError, match="A key of a map is a scalar"):
            declare("v", text)
