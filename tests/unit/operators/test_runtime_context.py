"""What rich functions are told of their task, and when they are opened and closed; streams without a key."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from flinkish_spark import (
    AggregateFunction,
    DataStream,
    KeyedProcessFunction,
    MapFunction,
    MapStateDescriptor,
    OutputTag,
    ReduceFunction,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from flinkish_spark.core.errors import ConfigError, GraphError, SchemaError, UserFunctionError
from flinkish_spark.core.subtask import Subtask, current_subtask, running_in
from flinkish_spark.functions.stream import CoProcessFunction
from flinkish_spark.joins import Bound, CoGroupFunction, JoinType, ProcessJoinFunction
from flinkish_spark.operators.context import close_operator, close_with
from flinkish_spark.planning.stream_graph import KeyedNode
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.windows import CountEvictor, ProcessWindowFunction, TumblingEventTimeWindows
from flinkish_spark.worker.functions import StatelessContext
from tests.unit.planning.test_stream_settings import environment

ORDERS = "user STRING, amount LONG"
#: What the functions of this module were called with, in order.
HAPPENED: list[str] = []


@pytest.fixture(autouse=True)
def happened() -> Iterator[list[str]]:
    HAPPENED.clear()
    yield HAPPENED
    HAPPENED.clear()


@pytest.fixture
def orders() -> DataStream:
    return environment().from_collection([("ann", 1)], ORDERS, uid="orders")


# -- the task ---------------------------------------------------------------------------------------------


class Telling(KeyedProcessFunction):
    def open(self, context: Any) -> None:
        self.context = context

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        c = self.context
        yield (
            c.get_index_of_this_subtask(),
            c.get_number_of_parallel_subtasks(),
            c.get_max_number_of_parallel_subtasks(),
            c.get_attempt_number(),
            c.get_task_name(),
            c.get_task_name_with_subtasks(),
        )


TOLD = "at INT, of INT, groups INT, attempt INT, name STRING, full_name STRING"


def test_a_keyed_function_is_told_its_subtask_its_name_and_how_many_there_are() -> None:
    def program(stream: DataStream) -> DataStream:
        return stream.key_by("user").process(Telling(), output=TOLD, uid="told").name("the told")

    harness = ProgramHarness(program, ORDERS, parallelism=3, max_parallelism=12)
    harness.push_all([((f"user {number}", 1), None) for number in range(30)])
    found = {tuple(row) for row in harness.take().rows}
    assert found == {(at, 3, 12, 0, "the told", f"the told ({at + 1}/3)") for at in range(3)}


def test_a_window_function_is_told_the_same() -> None:
    class Window(ProcessWindowFunction):
        def open(self, context: Any) -> None:
            self.context = context

        def process(self, key: Any, context: Any, elements: Any) -> Iterator[Any]:
            yield (self.context.get_task_name_with_subtasks(),)

    def program(stream: DataStream) -> DataStream:
        windows = stream.key_by("user").window(TumblingEventTimeWindows(10))
        return windows.process(Window(), output="name STRING", uid="windows")

    harness = ProgramHarness(program, ORDERS)
    harness.push(("ann", 1), 3)
    harness.end_of_input()
    assert harness.take().rows == [("windows (1/1)",)]


def test_a_function_without_state_is_told_what_set_parallelism_said() -> None:
    assert StatelessContext("parse", 4).get_number_of_parallel_subtasks() == 4
    assert StatelessContext("parse", 4).get_task_name_with_subtasks() == "parse (1/4)"
    assert StatelessContext("parse").get_number_of_parallel_subtasks() == 1, "there is no task here"
    assert StatelessContext("parse").get_attempt_number() == 0

    class Where(MapFunction):
        def open(self, context: Any) -> None:
            self.context = context

        def map(self, value: Any) -> Any:
            return (self.context.get_number_of_parallel_subtasks(),)

    harness = ProgramHarness(
        lambda stream: stream.map(Where(), output="n INT").set_parallelism(5), ORDERS, parallelism=2
    )
    harness.push(("ann", 1))
    assert harness.take().rows == [(5,)]


def test_in_a_task_of_spark_the_number_of_subtasks_is_the_operator_s(monkeypatch: pytest.MonkeyPatch) -> None:
    class Task:
        def partitionId(self) -> int:
            return 9

        def attemptNumber(self) -> int:
            return 2

    monkeypatch.setattr("flinkish_spark.core.subtask.TaskContext.get", Task)
    assert current_subtask() == Subtask(9, None, 2)
    with pytest.raises(RuntimeError, match=r"number of tasks of 'parse'.*set_parallelism"):
        StatelessContext("parse").get_number_of_parallel_subtasks()
    assert StatelessContext("parse").get_task_name_with_subtasks() == "parse (10/?)"
    with running_in(4, "totals"):
        assert current_subtask() == Subtask(1, 4, 2, "totals"), "the stage has another operator's tasks, too"
    assert current_subtask() == Subtask(9, None, 2)


# -- opened and closed ------------------------------------------------------------------------------------


class Largest(ReduceFunction):
    def open(self, context: Any) -> None:
        HAPPENED.append(f"open {context.uid}")
        self.is_open = True

    def reduce(self, first: Any, second: Any) -> Any:
        assert self.is_open
        return max(first, second, key=lambda one: one.amount)

    def close(self) -> None:
        HAPPENED.append("close")


class Count(AggregateFunction):
    def open(self, context: Any) -> None:
        HAPPENED.append(f"open {context.uid}")
        self.one = 1

    def create_accumulator(self) -> int:
        return 0

    def add(self, value: Any, accumulator: int) -> int:
        return accumulator + self.one

    def get_result(self, accumulator: int) -> Any:
        return (accumulator,)

    def close(self) -> None:
        HAPPENED.append("close")


class Groups(CoGroupFunction):
    def open(self, context: Any) -> None:
        HAPPENED.append(f"open {context.uid}")

    def co_group(self, key: Any, context: Any, lefts: Any, rights: Any) -> Iterator[Any]:
        yield (len(lefts) + len(rights),)

    def close(self) -> None:
        HAPPENED.append("close")


WINDOWS = TumblingEventTimeWindows(10)
COUNTED: dict[str, Any] = {"accumulator": "LONG", "output": "n LONG", "uid": "part"}


@pytest.mark.parametrize(
    ("program", "result"),
    [
        (lambda s: s.key_by("user").reduce(Largest(), uid="part"), ("ann", 3)),
        (lambda s: s.key_by("user").aggregate(Count(), **COUNTED), (2,)),
        (lambda s: s.key_by("user").window(WINDOWS).reduce(Largest(), uid="part"), ("ann", 3)),
        (lambda s: s.key_by("user").window(WINDOWS).aggregate(Count(), **COUNTED), (2,)),
        (
            lambda s: s.key_by("user").window(WINDOWS).evictor(CountEvictor(5)).aggregate(Count(), **COUNTED),
            (2,),
        ),
        (
            lambda s: (
                s.key_by("user")
                .join(s.key_by("user"))
                .co_group(WINDOWS, Groups(), output="n LONG", uid="part")
            ),
            (4,),
        ),
    ],
    ids=["reduce", "aggregate", "window reduce", "window aggregate", "window with evictor", "co-group"],
)
def test_parts_of_operators_are_opened_once_per_copy_and_closed_with_it(program: Any, result: Any) -> None:
    harness = ProgramHarness(program, ORDERS, parallelism=2)
    harness.crash()
    HAPPENED.clear()
    harness.crash()
    assert HAPPENED == ["open part", "open part"]
    harness.push_all([(("ann", 3), 1), (("ann", 2), 2)])
    harness.end_of_input()
    assert harness.take().rows[-1] == result
    harness.close()
    assert HAPPENED[2:] == ["close", "close"]


def test_a_reduction_that_asks_for_state_is_told_what_to_do() -> None:
    class Asking(ReduceFunction):
        def open(self, context: Any) -> None:
            context.get_state(ValueStateDescriptor("own", "LONG"))

        def reduce(self, first: Any, second: Any) -> Any:
            return first

    with pytest.raises(TypeError, match=r"'part' asks for the state 'own'.*use process\(\)"):
        ProgramHarness(lambda stream: stream.key_by("user").reduce(Asking(), uid="part"), ORDERS)


def test_an_operator_is_closed_when_what_holds_it_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    class Holder:
        pass

    holder = Holder()
    close_with(holder, Groups(), "groups")
    assert HAPPENED == []
    del holder
    gc.collect()
    assert HAPPENED == ["close"]
    close_operator(object(), "nothing to close")

    class Failing:
        def close(self) -> None:
            raise OSError("gone")

    with caplog.at_level(logging.ERROR):
        close_operator(Failing(), "failing")
    assert "close() of operator 'failing' failed" in caplog.text


# -- two inputs without a key, and other calls of Flink's ---------------------------------------------------


class Both(NamedTuple):
    text: str


ODD = OutputTag("odd", "text STRING")


class Merged(CoProcessFunction):
    def process_element1(self, order: Any, ctx: Any) -> Iterator[Both]:
        yield Both(order.user)

    def process_element2(self, refund: Any, ctx: Any) -> Iterator[Both]:
        ctx.output(ODD, (refund.user,))
        return iter(())


def test_two_streams_without_keys_have_one_function(orders: DataStream) -> None:
    made = orders.connect(orders).process(Merged())
    assert made.name("merged") is made
    side = made.get_side_output(ODD)
    for parent in (*made._node.parents, *side._node.parents):  # type: ignore[union-attr]
        assert parent.function.settings.name == "merged"
    with pytest.raises(ConfigError, match=r"CoProcessFunction.*key_by"):
        orders.connect(orders).process(Telling())  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="no process"):
        orders.union(orders).get_side_output(ODD)

    class Unknown(Merged):
        def process_element1(self, order, ctx):  # type: ignore[no-untyped-def]
            yield order

    with pytest.raises(SchemaError, match="not known"):
        orders.connect(orders).process(Unknown())


class Pair(NamedTuple):
    user: str
    behind_ms: int


class Behind(ProcessJoinFunction):
    def process_element(self, left: Any, right: Any, ctx: Any) -> Iterator[Pair]:
        yield Pair(left.user, ctx.right_timestamp() - ctx.left_timestamp())


def test_an_interval_join_has_exclusive_bounds_a_function_and_its_inferred_output() -> None:
    def program(left: DataStream, right: DataStream) -> DataStream:
        return left.key_by("user").interval_join(
            right.key_by("user"),
            lower_ms=0,
            upper_ms=10,
            lower=Bound.EXCLUSIVE,
            upper=Bound.EXCLUSIVE,
            function=Behind(),
            uid="near",
        )

    harness = ProgramHarness(program, ORDERS, ORDERS)
    harness.micro_batch([(("ann", 1), 100)], [(("ann", 1), 100 + ms) for ms in (0, 1, 9, 10)])
    assert sorted(harness.take().rows) == [("ann", 1), ("ann", 9)]
    assert harness.output_type.names == ["user", "behind_ms"]


def test_an_interval_join_may_be_an_outer_one_with_a_declared_output() -> None:
    class Names(ProcessJoinFunction):
        def process_element(self, left: Any, right: Any, ctx: Any) -> Any:
            yield left.user, right is not None

    def program(left: DataStream, right: DataStream) -> DataStream:
        return left.key_by("user").interval_join(
            right.key_by("user"),
            lower_ms=0,
            upper_ms=10,
            join_type=JoinType.LEFT,
            function=Names(),
            output="user STRING, is_paid BOOLEAN",
            uid="near",
        )

    harness = ProgramHarness(program, ORDERS, ORDERS)
    harness.push(("ann", 1), 100)
    harness.end_of_input()
    assert harness.take().rows == [("ann", False)]


def test_what_flink_allows_and_this_does_not_says_why_and_what_to_do(orders: DataStream) -> None:
    with pytest.raises(GraphError, match=r"got no state.*once per task.*MapStateDescriptor.*connect"):
        orders.broadcast()
    keyed = orders.key_by("user").process(Telling(), output=TOLD, uid="told")
    with pytest.raises(GraphError, match=r"after a keyed operator.*time of the record.*between the source"):
        keyed.assign_timestamps_and_watermarks(WatermarkStrategy.for_monotonous_timestamps())
    assert isinstance(keyed._node, KeyedNode)
    rules = orders.broadcast(MapStateDescriptor("rules", "STRING", "LONG"))
    with pytest.raises(GraphError, match="not keyed"):
        orders.connect(rules).process(Telling(), uid="rules")  # type: ignore[arg-type]


def test_what_a_function_emits_wrongly_names_the_operator() -> None:
    class Wrong(CoProcessFunction):
        def process_element1(self, value: Any, ctx: Any) -> Any:
            yield (1,)

        process_element2 = process_element1

    harness = ProgramHarness.of(Wrong(), ORDERS, ORDERS, output="text STRING", uid="wrong")
    with pytest.raises(UserFunctionError, match=r"'wrong'.*'text'"):
        harness.push(("ann", 1), source=1)
