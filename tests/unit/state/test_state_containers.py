"""List and map states beside lists and dicts: whatever is done to both, both say the same."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest

from flinkish_spark import KeyedProcessFunction, ListStateDescriptor, MapStateDescriptor
from flinkish_spark.state import ListState, MapState
from flinkish_spark.state.states import MapKeys
from flinkish_spark.state.tables import KeyScope, StateTable
from flinkish_spark.testing import ProgramHarness


def list_state(*values: int) -> ListState[int]:
    state: ListState[int] = ListState(KeyScope(), StateTable())
    state.update(values)
    return state


def map_state(**entries: int) -> MapState[str, int]:
    state: MapState[str, int] = MapState(
        KeyScope(), StateTable(), None, False, MapKeys("operator 'one'", "map", "STRING")
    )
    state.put_all(entries)
    return state


def outcome(call: Callable[[Any], Any], given: Any) -> Any:
    """Return what a call returns, or the type of what it raises, with what the container is then."""
    try:
        said = call(given)
    except Exception as error:
        said = type(error)
    plain = (ListState, MapState, list)
    return (said if said is not given else "itself"), (
        list(given) if isinstance(given, plain) and not isinstance(given, MapState) else dict(given)
    )


def added(value: Any, more: Any) -> Any:
    value += more
    return value


def updated(value: Any, more: Any) -> Any:
    value |= more
    return value


LISTS: list[Callable[[Any], Any]] = [
    lambda one: one[0],
    lambda one: one[-1],
    lambda one: one[3],
    lambda one: one["x"],
    lambda one: one[1:],
    lambda one: one[::-2],
    lambda one: list(reversed(one)),
    lambda one: one.reverse(),
    lambda one: one.append(7),
    lambda one: one.extend([7, 8]),
    lambda one: one.extend(one),
    lambda one: one.insert(1, 9),
    lambda one: one.pop(),
    lambda one: one.pop(0),
    lambda one: one.remove(2),
    lambda one: one.remove(100),
    lambda one: one.index(2),
    lambda one: one.count(2),
    lambda one: 2 in one,
    lambda one: one.clear(),
    lambda one: one == [1, 2, 3],
    lambda one: one != [1, 2, 3],
    lambda one: one == (1, 2, 3),
    lambda one: one == [],
    lambda one: one == [1, 2, 3],
    lambda one: one.__setitem__(0, 5),
    lambda one: one.__setitem__(9, 5),
    lambda one: one.__setitem__(slice(1, None), [4, 4, 4]),
    lambda one: one.__setitem__(slice(0, 1), one),
    lambda one: one.__delitem__(0),
    lambda one: one.__delitem__(slice(None)),
    lambda one: added(one, [7]),
    lambda one: hash(one),
    lambda one: (len(one), bool(one), sorted(one), sum(one)),
]
MAPS: list[Callable[[Any], Any]] = [
    lambda one: updated(one, {"c": 3}),
    lambda one: updated(one, [("a", 9)]),
    lambda one: one.copy(),
    lambda one: one.popitem(),
    lambda one: list(reversed(one)),
    lambda one: one == {"a": 1, "b": 2},
    lambda one: one == {},
    lambda one: one.setdefault("z", 3),
    lambda one: one.pop("a"),
    lambda one: one.pop("z", 0),
    lambda one: one["z"],
    lambda one: one.update(a=5, q=6),
    lambda one: (list(one), list(one.values()), list(one.items()), len(one), bool(one)),
    lambda one: one.clear(),
    lambda one: hash(one),
]


@pytest.mark.parametrize("number", range(len(LISTS)))
def test_a_list_state_does_what_a_list_does(number: int) -> None:
    for values in ((), (1,), (1, 2, 3), (2, 2, 1, 2)):
        assert outcome(LISTS[number], list_state(*values)) == outcome(LISTS[number], list(values))


@pytest.mark.parametrize("number", range(len(MAPS)))
def test_a_map_state_does_what_a_dict_does(number: int) -> None:
    for entries in ({}, {"a": 1, "b": 2}, {"b": 2, "z": 1, "a": 1}):
        assert outcome(MAPS[number], map_state(**entries)) == outcome(MAPS[number], dict(entries))


def test_any_calls_one_after_the_other_do_the_same_to_both() -> None:
    chance = random.Random(7)
    state, plain = list_state(), []
    for _ in range(2_000):
        call = chance.choice(LISTS)
        assert outcome(call, state) == outcome(call, plain)
        if len(plain) > 30:
            state.clear()
            plain.clear()


def test_states_say_what_they_hold_and_are_equal_by_it() -> None:
    assert repr(list_state(1, 2)) == "ListState([1, 2])" and repr(list_state()) == "ListState([])"
    assert str(map_state(a=1)) == "MapState({'a': 1})" and f"{map_state()}" == "MapState({})"
    assert list_state(1) == list_state(1) != list_state(2) and map_state(a=1) == map_state(a=1)


def test_what_a_state_returns_is_a_list_or_dict_of_its_own() -> None:
    numbers, counts = list_state(1, 2), map_state(a=1)
    for taken in (numbers.get(), numbers[:], copy.copy(numbers), copy.deepcopy(numbers)):
        taken.append(3)
    for entries in (counts.copy(), copy.copy(counts), copy.deepcopy(counts)):
        entries["b"] = 2
    assert numbers == [1, 2] and counts == {"a": 1}


@pytest.mark.parametrize(
    "call",
    [
        lambda one: one.append(None),
        lambda one: one.insert(0, None),
        lambda one: one.extend([4, None]),
        lambda one: one.__setitem__(0, None),
        lambda one: one.__setitem__(slice(None), [None]),
    ],
)
def test_none_is_refused_however_it_comes_and_nothing_has_changed(call: Any) -> None:
    state = list_state(1, 2)
    with pytest.raises(ValueError, match="takes no None"):
        call(state)
    assert state == [1, 2]


def test_what_is_changed_in_place_is_stored() -> None:
    class Last(KeyedProcessFunction):
        """Keeps the last two amounts, the newest in front, and how often each came."""

        def open(self, context: Any) -> None:
            self.last = context.get_list_state(ListStateDescriptor("last", "LONG"))
            self.counts = context.get_map_state(MapStateDescriptor("counts", "LONG", "LONG"))

        def process_element(self, value: Any, ctx: Any) -> Any:
            self.last.insert(0, value.amount)
            del self.last[2:]
            self.counts |= {value.amount: self.counts.get(value.amount, 0) + 1}
            yield list(self.last), self.counts.copy()

    harness = ProgramHarness.of(
        Last(), "user STRING, amount LONG", key="user", output="last ARRAY<LONG>, counts MAP<LONG, LONG>"
    )
    for amount in (1, 2, 1):
        harness.push(("ann", amount))
    assert tuple(harness.take().rows[-1]) == ([1, 2], {1: 2, 2: 1})
    assert harness.entries("last") == {"ann": [1, 2]}


def test_states_may_be_emitted_and_are_out_as_they_were() -> None:
    class Seen(KeyedProcessFunction):
        def open(self, context: Any) -> None:
            self.seen = context.get_list_state(ListStateDescriptor("seen", "LONG"))
            self.counts = context.get_map_state(MapStateDescriptor("counts", "LONG", "LONG"))

        def process_element(self, value: Any, ctx: Any) -> Any:
            self.seen.append(value.amount)
            self.counts[value.amount] = len(self.seen)
            yield self.seen, self.counts

    fields, output = "user STRING, amount LONG", "seen ARRAY<LONG>, counts MAP<LONG, LONG>"
    harness = ProgramHarness.of(Seen(), fields, key="user", output=output, max_parallelism=1)
    harness.push_all([(("ann", 1), None), (("ben", 2), None), (("ann", 3), None)])
    assert [tuple(row) for row in harness.take().rows] == [
        ([1], {1: 1}),
        ([2], {2: 1}),
        ([1, 3], {1: 1, 3: 2}),
    ]


@pytest.mark.parametrize("value_type", ["LONG", "n LONG", "n LONG, name STRING", list[int]])
def test_a_value_of_a_map_may_be_none_and_is_read_again(value_type: Any) -> None:
    class Known(KeyedProcessFunction):
        def open(self, context):
            self.known = context.get_map_state(MapStateDescriptor("known", "STRING", value_type))

        def process_element(self, element, ctx):
            self.known.setdefault("nothing", None)
            yield (str(dict(self.known)),)

    run = ProgramHarness.of(Known(), "user STRING", output="known STRING", key="user")
    for _ in range(2):
        run.push_all([(("ann",), None)])
    assert [row.known for row in run.take().rows] == ["{'nothing': None}"] * 2
