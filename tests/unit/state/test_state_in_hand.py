"""What functions are handed of their states: what they change in place counts, fields have names."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any, NamedTuple

import pytest
from pyspark.sql import Row

from flinkish_spark import (
    AggregatingStateDescriptor,
    FlatMapFunction,
    KeyedBroadcastProcessFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateTtl,
    ValueStateDescriptor,
)
from flinkish_spark.state.key_group import BasePolicy, GroupState
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.operator_state import OperatorListDescriptor, OperatorLists
from flinkish_spark.state.states import ValueState
from flinkish_spark.state.tables import may_change, same
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.windows import TumblingEventTimeWindows
from flinkish_spark.windows.functions import ProcessWindowFunction
from tests.support.operator_harness import BroadcastHarness, OperatorHarness

#: Whatever is stored goes into a base at once.
TINY = BasePolicy(smallest_bytes=1, smallest_delta_rows=1)


@dataclasses.dataclass
class Account:
    total: int = 0
    former: list[int] = dataclasses.field(default_factory=list, compare=False)


@dataclasses.dataclass(eq=False)
class Same:
    total: int = 0


class Pair(NamedTuple):
    first: int
    rest: list[int]


@dataclasses.dataclass(frozen=True)
class Fixed:
    total: int
    name: str | None = None


def append(values: list[int]) -> None:
    values.append(len(values))


def count(values: dict[str, int]) -> None:
    values["n"] = values.get("n", 0) + 1


def grow(account: Account) -> None:
    account.former.append(1)


def add(one: Same) -> None:
    one.total += 1


class Last:
    def reduce(self, first: Any, second: Any) -> Any:
        return second


class Items:
    def create_accumulator(self) -> list[int]:
        return []

    def add(self, value: int, accumulator: list[int]) -> list[int]:
        return [*accumulator, value]

    def get_result(self, accumulator: list[int]) -> list[int]:
        return accumulator

    def merge(self, first: list[int], second: list[int]) -> list[int]:
        return [*first, *second]


#: What a value begins with, its type, and what changes it in place.
VALUES: list[tuple[Any, Any, Any]] = [
    ([0], "ARRAY<LONG>", append),
    ({"n": 0}, "MAP<STRING, LONG>", count),
    ((0, [0]), "n LONG, all ARRAY<LONG>", lambda value: append(value[1])),
    (Account(), Account, grow),
    (Same(), Same, add),
    (Pair(1, [0]), Pair, lambda value: append(value.rest)),
]
#: The same of an element of a list, or a value of a map; a single value of that type is a tuple.
STRUCT = ({"a": 0}, "STRUCT<a: LONG>", lambda value: value.update(a=value["a"] + 1))
CASES = [(kind, *one) for kind in ("value", "list", "map", "reducing") for one in VALUES]
CASES += [(kind, *STRUCT) for kind in ("list", "map")]
IDS = [f"{kind} {declared!r}" for kind, _, declared, _ in CASES]


class InPlace(KeyedProcessFunction):
    """Sets a value at the first element of a key, and changes it in place at "change"; never puts it back."""

    def __init__(self, kind: str, begins: Any, declared: Any, change: Any) -> None:
        self.kind, self.begins, self.declared, self.change = kind, begins, declared, change

    def open(self, context: Any) -> None:
        self.other = context.get_state(ValueStateDescriptor("other", "LONG"))
        kind = self.declared
        match self.kind:
            case "value":
                self.state = context.get_state(ValueStateDescriptor("state", self.declared))
            case "list":
                self.state = context.get_list_state(ListStateDescriptor("state", self.declared))
            case "map":
                self.state = context.get_map_state(MapStateDescriptor("state", "STRING", self.declared))
            case "reducing":
                self.state = context.get_reducing_state(ReducingStateDescriptor("state", Last(), kind))
            case "aggregating":
                self.state = context.get_aggregating_state(
                    AggregatingStateDescriptor("state", Items(), self.declared)  # type: ignore[arg-type]
                )

    def process_element(self, element: Any, ctx: Any) -> Any:
        key, what = element
        if what == "begin":
            begins = copy.deepcopy([self.begins] * 2 if self.kind == "list" else self.begins)
            if self.kind == "map":
                self.state["k"] = begins
            elif self.kind in ("reducing", "aggregating"):
                self.state.add(begins)
            else:
                self.state.update(begins)
        elif what == "other":
            # Something else of the key group is stored.
            self.other.update((self.other.value() or 0) + 1)
        elif what == "change":
            self.change(self.found())
        yield key, repr(self.found())

    def found(self) -> Any:
        match self.kind:
            case "value":
                return self.state.value()
            case "list":
                return self.state[1] if self.state else None
            case "map":
                return self.state.get("k")
        return self.state.get()


STEPS = [
    ("a", "begin"), ("b", "other"), ("a", "change"), ("a", "look"), ("b", "begin"), ("a", "other"),
    ("b", "change"), ("b", "look"), ("a", "change"), ("b", "other"), ("a", "look"), ("b", "look"),
]  # fmt: skip


def rows_of(function: Any, sizes: list[int], policy: BasePolicy | None) -> list[Any]:
    """Return what comes of the steps in micro-batches of some sizes, over and over."""
    harness = OperatorHarness(
        function, key=lambda step: step[0], key_type="STRING", max_parallelism=1, policy=policy
    )
    at = 0
    for size in itertools.cycle(sizes):
        harness.push_all([(step, None) for step in STEPS[at : at + size]])
        at += size
        if at >= len(STEPS):
            return harness.take().rows
    raise AssertionError("there are sizes")


@pytest.mark.parametrize("policy", [None, TINY], ids=["in one piece", "in two layers"])
@pytest.mark.parametrize(("kind", "begins", "declared", "change"), CASES, ids=IDS)
def test_what_is_changed_in_place_is_kept_however_the_input_is_cut(
    kind: str, begins: Any, declared: Any, change: Any, policy: BasePolicy | None
) -> None:
    function = InPlace(kind, begins, declared, change)
    (alone, *others) = [rows_of(function, sizes, policy) for sizes in ([1], [100], [2], [3, 1], [5, 2])]
    for other in others:
        assert other == alone
    last = dict(alone)
    assert last["a"] != last["b"] != repr(begins)


def test_an_accumulator_that_a_result_is_is_kept_as_it_was_changed() -> None:
    function = InPlace("aggregating", 7, "ARRAY<LONG>", append)
    runs = [rows_of(function, sizes, None) for sizes in ([1], [100], [3])]
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][-2:] == [("a", "[7, 1, 2]"), ("b", "[7, 1]")]


@pytest.mark.parametrize(("kind", "begins", "declared", "change"), CASES, ids=IDS)
def test_what_is_only_read_is_not_stored_again(
    kind: str, begins: Any, declared: Any, change: Any, monkeypatch: Any
) -> None:
    stored = []
    dump = GroupState.dump
    monkeypatch.setattr(GroupState, "dump", lambda self, *given: stored.append(1) or dump(self, *given))
    function = InPlace(kind, begins, declared, change)
    harness = OperatorHarness(function, key=lambda step: step[0], key_type="STRING")
    harness.push(("a", "begin"))
    assert stored == [1]
    for _ in range(3):
        harness.push(("a", "look"))
    assert stored == [1]
    harness.push(("a", "change"))
    assert stored == [1, 1]


def test_a_change_in_place_is_a_touch() -> None:
    class Lives(KeyedProcessFunction):
        def open(self, context: Any) -> None:
            ttl = StateTtl(100)
            self.state = context.get_state(ValueStateDescriptor("state", list[int], ttl=ttl))

        def process_element(self, what: str, ctx: Any) -> Any:
            if what == "begin":
                self.state.update([0])
            elif what == "change":
                self.state.value().append(1)
            yield self.state.value()

    harness = OperatorHarness(Lives(), key=lambda what: 1, key_type="INT")
    for now_ms, what in ((0, "begin"), (60, "change"), (120, "look"), (159, "look"), (160, "look")):
        harness.processing_time(now_ms)
        harness.push(what)
    assert harness.take().rows == [[0], [0, 1], [0, 1], [0, 1], None]


def test_elements_that_windows_and_joins_hand_out_are_kept_as_they_were_changed() -> None:
    class Marks(ProcessWindowFunction):
        def process(self, key: Any, context: Any, elements: Any) -> Any:
            for one in elements:
                one.tags.append("seen")
            yield key, [tag for one in elements for tag in one.tags]

    def windows(orders: Any) -> Any:
        late = TumblingEventTimeWindows(10)
        return (
            orders.key_by("user").window(late).allowed_lateness(100)
            .process(Marks(), output="user STRING, tags ARRAY<STRING>", uid="marks")
        )  # fmt: skip

    found = []
    for others in ((), ("ben",)):
        harness = ProgramHarness(windows, "user STRING, tags ARRAY<STRING>", max_parallelism=1)
        harness.push_all([(("ann", ["a"]), 1)])
        harness.watermark(20)
        harness.push_all([((user, ["x"]), 3) for user in others])
        harness.push_all([(("ann", ["b"]), 2)])
        found.append([tuple(row) for row in harness.take().rows if row[0] == "ann"])
    assert found[0] == found[1] == [("ann", ["a", "seen"]), ("ann", ["a", "seen", "seen", "b", "seen"])]


def test_values_that_cannot_change_cost_nothing() -> None:
    for declared in ("LONG", "a LONG, b STRING", Fixed, tuple[int, str], int, "BINARY", "DECIMAL(5, 2)"):
        assert not may_change(ValueStateDescriptor("s", declared).value_type)
    ddl = ("a ARRAY<LONG>", "STRUCT<a: LONG>", "MAP<INT, INT>")
    for declared in (Account, list[int], dict[str, int], Pair, list[Fixed], *ddl):
        assert may_change(ValueStateDescriptor("s", declared).value_type)
    states = KeyedStates("uid", 1).view_for_function()
    assert type(states.get_state(ValueStateDescriptor("s", "LONG"))) is ValueState
    assert type(states.get_state(ValueStateDescriptor("f", Fixed))) is ValueState


def test_values_are_the_same_only_if_they_are_stored_alike() -> None:
    nan = float("nan")
    assert same({"a": [nan, (1, None)]}, {"a": [float("nan"), (1, None)]})
    assert not same(Account(1, [1]), Account(1, [2]))
    assert same(Account(1, [1]), Account(1, [1]))
    assert same(Same(3), Same(3))
    different: list[Any] = [[1], [1, 2], [1.0], [True], [None], {"a": 1}, {"b": 1}, {"a": 2}, None, 1, "a"]
    for one, other in itertools.combinations(different, 2):
        assert not same(one, other)


# -- states of fields --------------------------------------------------------------------------------
FIELDS = "total LONG, n LONG, _1 STRING"


class Named(KeyedProcessFunction):
    """Keeps rows of all forms in states of all kinds, and reads them by name and by place."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def open(self, context: Any) -> None:
        self.value = context.get_state(ValueStateDescriptor("value", FIELDS, default=(0, 0, None)))
        self.list = context.get_list_state(ListStateDescriptor("list", FIELDS))
        self.map = context.get_map_state(MapStateDescriptor("map", "STRING", FIELDS))
        self.last = context.get_reducing_state(ReducingStateDescriptor("last", self, FIELDS))
        ttl = StateTtl(1000)
        self.expiring = context.get_state(ValueStateDescriptor("expiring", FIELDS, ttl=ttl))

    def reduce(self, first: Any, second: Any) -> Any:
        return first.total + second.total, first.n + second.n, first._1

    def process_element(self, amount: int, ctx: Any) -> Any:
        before = self.value.value()
        assert before == (before.total, before.n, before._1)
        now = self.make(before.total + amount, before.n + 1, "x")
        self.value.update(now)
        self.list.add(now)
        self.map["k"] = now
        self.last.add(now)
        self.expiring.update(now)
        for one in (self.value.value(), *self.list, self.map["k"], *self.map.values(), self.expiring.value()):
            assert isinstance(one, tuple) and one == (one.total, one.n, one._1)
        assert self.value.value() == self.list[-1] == self.map["k"] == self.expiring.value()
        yield self.value.value().total, self.list[0].total, self.last.get().total, repr(self.list[-1])


@dataclasses.dataclass
class Parts:
    total: int
    n: int
    _1: str


@pytest.mark.parametrize(
    "make",
    [
        lambda total, n, one: (total, n, one),
        lambda total, n, one: [total, n, one],
        lambda total, n, one: {"n": n, "_1": one, "total": total},
        lambda total, n, one: Row(n=n, total=total, _1=one),
        lambda total, n, one: Parts(total, n, one),
    ],
    ids=["tuple", "list", "dict", "Row", "dataclass"],
)
def test_fields_are_read_by_name_in_the_same_micro_batch_and_later(make: Any) -> None:
    found = []
    for cut in (1, 2, 4):
        harness = OperatorHarness(Named(make), key=lambda amount: 1, key_type="INT")
        for at in range(0, 4, cut):
            harness.push_all([(amount, None) for amount in range(at + 1, at + cut + 1)])
        found.append(harness.take().rows)
    assert found[0] == found[1] == found[2]
    assert found[0][-1] == (10, 1, 20, "Record(total=10, n=4, _1='x')")


def test_a_row_that_does_not_fit_is_named_where_it_is_stored_as_ever() -> None:
    class Wrong(KeyedProcessFunction):
        def __init__(self, row: Any) -> None:
            self.row = row

        def open(self, context: Any) -> None:
            self.state = context.get_state(ValueStateDescriptor("state", "total LONG, n LONG"))

        def process_element(self, value: Any, ctx: Any) -> Any:
            self.state.update(self.row)
            self.state.value()

    for row, says in (((1,), "1 fields, but 2 are declared"), ({"totals": 1, "n": 2}, "the field 'totals'")):
        harness = OperatorHarness(Wrong(row), key=lambda value: "ann", key_type="STRING")
        with pytest.raises(Exception, match=f"state 'state' got a wrong value: of key 'ann': .*{says}"):
            harness.push(1)


def test_a_state_of_fields_goes_out_by_place_or_by_name() -> None:
    class Goes(FlatMapFunction):
        def open(self, context: Any) -> None:
            self.state = context.get_state(ValueStateDescriptor("state", "a LONG, b LONG"))

        def flat_map(self, order: Any) -> Any:
            self.state.update((order.amount, 2))
            yield self.state.value()

    outputs = (("x LONG, y LONG", (7, 2)), ("b LONG, a LONG", (2, 7)), ("x LONG, b LONG", (7, 2)))
    for output, expected in outputs:

        def program(orders: Any, output: str = output) -> Any:
            return orders.key_by("user").flat_map(Goes(), output=output, uid="goes")

        harness = ProgramHarness(program, "user STRING, amount LONG")
        harness.push_all([(("ann", 7), None)])
        assert [tuple(row) for row in harness.take().rows] == [expected]


# -- states without a key ----------------------------------------------------------------------------
RULES = MapStateDescriptor("rules", "STRING", "least LONG, tags ARRAY<STRING>")


class Ruled(KeyedBroadcastProcessFunction):
    """The broadcast side changes a rule in place; the element side does, too, and must not."""

    def process_element(self, user: str, ctx: Any) -> Any:
        rules = ctx.get_broadcast_state(RULES)
        yield user, rules["all"].least, list(rules["all"].tags)
        rules["all"].tags.append("by an element")

    def process_broadcast_element(self, tag: str, ctx: Any) -> None:
        rules = ctx.get_broadcast_state(RULES)
        if "all" in rules:
            rules["all"].tags.append(tag)
        else:
            rules["all"] = (3, [tag])


def test_broadcast_rules_are_kept_as_the_broadcast_side_has_changed_them() -> None:
    harness = BroadcastHarness(Ruled(), [RULES], key=lambda user: user, key_type="STRING")
    harness.micro_batch(broadcast=[("a", None)], elements=[("ann", None)])
    harness.micro_batch(broadcast=[("b", None)], elements=[])
    harness.micro_batch(broadcast=[], elements=[("ann", None)])
    harness.micro_batch(broadcast=[], elements=[("ann", None)])
    assert harness.take().rows == [("ann", 3, ["a"]), ("ann", 3, ["a", "b"]), ("ann", 3, ["a", "b"])]
    assert all(copy == {"all": (3, ["a", "b"])} for copy in harness.copies(RULES))


def test_items_of_a_partition_are_kept_as_they_were_changed_and_have_names() -> None:
    items = OperatorListDescriptor("files", "name STRING, at ARRAY<LONG>")
    lists = OperatorLists("uid", [items], None)
    lists.state(items).add(("a", [1]))
    again = OperatorLists("uid", [items], lists.dump())
    (item,) = again.state(items)
    assert item.name == "a" and again.is_changed
    item.at.append(2)
    assert OperatorLists("uid", [items], again.dump()).state(items).get() == [("a", [1, 2])]
    flat = OperatorListDescriptor("flat", "name STRING, at LONG")
    lists = OperatorLists("uid", [flat], None)
    lists.state(flat).add({"at": 1, "name": "a"})
    again = OperatorLists("uid", [flat], lists.dump())
    assert [(one.name, one.at) for one in again.state(flat)] == [("a", 1)] and not again.is_changed
