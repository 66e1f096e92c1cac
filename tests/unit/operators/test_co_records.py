"""map and flat_map of connected streams, with a key and without; side outputs of lookup joins."""

from __future__ import annotations

from typing import Any

import pytest

from flinkish_spark import CoFlatMapFunction, CoMapFunction, OutputTag, ValueStateDescriptor
from flinkish_spark.core.errors import GraphError
from flinkish_spark.joins import JoinType, LookupTable, ProcessJoinFunction
from flinkish_spark.testing import ProgramHarness

ORDERS, CONTROLS = "user STRING, amount LONG", "user STRING, is_blocked BOOLEAN"


class Unblocked(CoFlatMapFunction):
    """Lets through the orders of users who are not blocked: the state is one for both methods."""

    def open(self, context: Any) -> None:
        self.is_blocked = context.get_state(ValueStateDescriptor("blocked", "BOOLEAN"))

    def flat_map1(self, value: Any) -> Any:
        if not self.is_blocked.value():
            yield value.user, value.amount

    def flat_map2(self, value: Any) -> Any:
        self.is_blocked.update(value.is_blocked)


class Signed(CoMapFunction):
    def open(self, context: Any) -> None:
        self.is_open = True

    def map1(self, value: Any) -> Any:
        assert self.is_open
        return value.user, value.amount

    def map2(self, value: Any) -> Any:
        assert self.is_open
        return value.user, -1 if value.is_blocked else -2


def test_both_inputs_of_a_keyed_flat_map_share_its_state_which_survives_a_restore() -> None:
    harness = ProgramHarness.of(
        Unblocked(), ORDERS, CONTROLS, key=("user", "user"), output="user STRING, amount LONG"
    )
    harness.push(("ann", 1))
    harness.push(("ann", True), source=1)
    harness.push(("ann", 2))
    harness.push(("ben", 3))
    assert [tuple(row) for row in harness.take().rows] == [("ann", 1), ("ben", 3)]
    other = ProgramHarness.of(
        Unblocked(),
        ORDERS,
        CONTROLS,
        key=("user", "user"),
        output="user STRING, amount LONG",
        restore=harness.snapshot(),
        parallelism=3,
    )
    other.push(("ann", 4))
    other.push(("ann", False), source=1)
    other.push(("ann", 5))
    assert [tuple(row) for row in other.take().rows] == [("ann", 5)]


@pytest.mark.parametrize("keyed", [{}, {"key": ("user", "user")}])
def test_a_map_of_two_streams_opens_its_function_and_makes_one_row_of_each(keyed: dict[str, Any]) -> None:
    harness = ProgramHarness.of(Signed(), ORDERS, CONTROLS, output="user STRING, amount LONG", **keyed)
    harness.push(("ann", 7))
    harness.push(("ben", True), source=1)
    assert sorted(tuple(row) for row in harness.take().rows) == [("ann", 7), ("ben", -1)]


def test_connected_keyed_streams_take_a_function_for_each_input() -> None:
    def program(orders: Any, controls: Any) -> Any:
        keyed = orders.connect(controls).key_by("user", "user")
        return keyed.map(lambda o: (o.user,), lambda c: (c.user.upper(),), output="who STRING", uid="who")

    harness = ProgramHarness(program, ORDERS, CONTROLS)
    harness.push(("ann", 1))
    harness.push(("ben", True), source=1)
    assert [row.who for row in harness.take().rows] == ["ann", "BEN"]


def test_the_type_of_a_key_is_for_functions_only() -> None:
    def program(second: Any) -> Any:
        def keyed(orders: Any, controls: Any) -> Any:
            both = orders.connect(controls).key_by("user", second, key="STRING")
            return both.map(lambda o: (o.user,), lambda c: (c.user,), output="who STRING", uid="who")

        return keyed

    ProgramHarness(program(lambda control: control.user), ORDERS, CONTROLS)
    with pytest.raises(GraphError, match=r"key='STRING' without a function"):
        ProgramHarness(program("user"), ORDERS, CONTROLS)


@pytest.mark.parametrize(
    ("functions", "what"),
    [
        ((lambda o: o,), "nothing beside it"),
        ((Signed(), Signed()), "a Signed beside it"),
        ((Signed, None), "the class Signed"),
        ((Unblocked(), None), "a Unblocked"),
    ],
)
def test_what_is_no_function_for_two_streams_is_refused(functions: tuple[Any, ...], what: str) -> None:
    def program(orders: Any, controls: Any) -> Any:
        return orders.connect(controls).key_by("user", "user").map(*functions, output=ORDERS, uid="both")

    with pytest.raises(GraphError, match=what):
        ProgramHarness(program, ORDERS, CONTROLS)


class Countries(LookupTable):
    def lookup(self, keys: Any) -> Any:
        return {"de": [("Germany",)]}


UNKNOWN = OutputTag("unknown", "user STRING, code STRING")


class Named(ProcessJoinFunction):
    def process_element(self, left: Any, right: Any, ctx: Any) -> Any:
        if right is None:
            ctx.output(UNKNOWN, (left.user, left.code))
        else:
            yield left.user, right[0]


def _named(users: Any) -> Any:
    return users.lookup_join(
        Countries(),
        "country STRING",
        key=lambda user: user.code,
        join_type=JoinType.LEFT,
        function=Named(),
        output="user STRING, country STRING",
    )


def test_side_outputs_of_a_lookup_join_can_be_read() -> None:
    harness = ProgramHarness(_named, "user STRING, code STRING", side_outputs=[UNKNOWN])
    harness.push_all([(("ann", "de"), None), (("bob", "fr"), None), (("eve", "de"), None)])
    output = harness.take()
    assert [row.user for row in output.rows] == ["ann", "eve"]
    assert [tuple(row) for row in output.side["unknown"]] == [("bob", "fr")]


def test_a_side_output_of_a_lookup_join_without_a_function_is_refused() -> None:
    def program(users: Any) -> Any:
        joined = users.lookup_join(Countries(), "country STRING", key=lambda user: user.code)
        return joined.get_side_output(UNKNOWN)

    with pytest.raises(GraphError, match="Only a function can emit"):
        ProgramHarness(program, "user STRING, code STRING")
