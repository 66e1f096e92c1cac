"""name, uid, parallelism, and a strategy in from_source: what streams and environments take and refuse."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from flinkish_spark import MapFunction, MemorySink, OutputTag, StreamExecutionEnvironment, WatermarkStrategy
from flinkish_spark.contracts.sink import Sink
from flinkish_spark.contracts.source import Source, SourceNode
from flinkish_spark.core.errors import ConfigError, FlinkishError, GraphError, UserFunctionError
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.functions.stream import ProcessFunction
from flinkish_spark.planning.partitioning import Rebalance, Rescale
from flinkish_spark.planning.stream_graph import KeyedNode, KeyFunction, TimedNode, TransformNode
from flinkish_spark.planning.transforms import ProcessTransform
from flinkish_spark.testing import ProgramHarness
from tests.support.jobs import TOTAL, RunningTotal
from tests.unit.planning.test_process_functions import REFUSED, Split

BOUNDED = WatermarkStrategy.for_bounded_out_of_orderness(5)


class Session:
    """Stands for a Spark session: it has settings."""

    readStream = None  # noqa: N815 - by this the environment knows a session

    def __init__(self) -> None:
        self.conf = {"spark.sql.shuffle.partitions": "4"}


class Nowhere(Source):
    def load(self, spark: Any, control_path: str) -> Any:
        raise NotImplementedError


def environment(**settings: Any) -> StreamExecutionEnvironment:
    session: Any = Session()
    return StreamExecutionEnvironment(session, "orders", "/jobs/orders", **settings)


@pytest.fixture
def orders() -> DataStream:
    return environment().from_source(Nowhere(), uid="orders")


def keyed(stream: DataStream, uid: str = "totals", **settings: Any) -> DataStream:
    return stream.key_by("user").process(RunningTotal(), output=TOTAL, uid=uid, **settings)


def function_of(stream: DataStream) -> Any:
    assert isinstance(stream._node, TransformNode)
    return stream._node.function


def same(record: Any) -> Any:
    return record


class Upper(MapFunction):
    def map(self, value: Any) -> tuple[str]:
        return (value.user.upper(),)


# -- name and uid -----------------------------------------------------------------------------------


def test_a_function_may_be_named_behind_its_call(orders: DataStream) -> None:
    mapped = orders.map(Upper(), output="user STRING")
    filtered = mapped.filter(lambda record: True)
    assert mapped.name("upper") is mapped and function_of(mapped).settings.name == "upper"
    assert function_of(filtered).settings.name == "filter"
    # What was made of it before is of the same function.
    assert filtered._node.parent is mapped._node  # type: ignore[union-attr]
    assert function_of(mapped.uid("shout")).settings.name == "shout"


def test_sources_and_keyed_operators_have_a_name_beside_their_uid(orders: DataStream) -> None:
    totals = keyed(orders)
    assert orders.name("all orders") is orders and totals.name("running totals") is totals
    assert totals._environment.graph.names == {"orders": "all orders", "totals": "running totals"}
    timed = orders.assign_timestamps_and_watermarks(BOUNDED)
    for stream in (orders.rebalance(), orders.transform(lambda frame: frame), orders.union(orders), timed):
        assert stream.name("nice") is stream
    assert "nice" not in totals._environment.graph.names.values()
    for wrong in ("", None, 5):
        with pytest.raises((ConfigError, GraphError), match="name"):
            orders.name(wrong)  # type: ignore[arg-type]


def test_the_last_uid_counts_until_something_reads_the_operator(orders: DataStream) -> None:
    with pytest.warns(UserWarning, match="process has no uid"):
        totals = orders.key_by("user").process(RunningTotal(), output=TOTAL)
    graph = totals._environment.graph
    mapped = totals.map(same, output=TOTAL)
    assert totals.name("running").slot_sharing_group("own").uid("first").uid("totals") is totals
    assert [one.uid for one in graph.operators] == ["totals"]
    assert graph.names == {"totals": "running"} and graph.slot_sharing == {"totals": "own"}
    for wrong in ("a/b", "orders"):
        with pytest.raises(GraphError, match="uid"):
            totals.uid(wrong)
    # A uid that is free again may be another one's.
    keyed(mapped, "first")
    with pytest.raises(GraphError, match=r"give it there: process\(\.\.\., uid=\"other\"\)"):
        totals.uid("other")
    assert totals.uid("totals") is totals


def test_a_job_runs_with_what_was_said_last() -> None:
    def program(orders: DataStream) -> DataStream:
        return orders.key_by("user").sum("amount", uid="first").uid("totals").set_max_parallelism(8)

    harness = ProgramHarness(program, "user STRING, amount LONG")
    harness.push_all([(("ann", 3), None), (("ann", 4), None)])
    harness.snapshot()
    harness.crash()
    harness.push(("ann", 5))
    assert [tuple(row) for row in harness.take().rows][-1] == ("ann", 12)


def test_an_operator_behind_which_a_sink_is_keeps_its_uid_and_its_key_groups(orders: DataStream) -> None:
    """In Flink this would be said of the sink."""
    totals = keyed(orders).sink_to(MemorySink("out"), uid="out")
    with pytest.raises(GraphError, match="was called on the keyed operator 'totals'"):
        totals.uid("sink")
    with pytest.raises(GraphError, match=r"has 128 key groups, not 64.*max_parallelism=64"):
        totals.set_max_parallelism(64)
    assert totals.set_max_parallelism(128).uid("totals") is totals


def test_only_what_keeps_something_has_a_uid(orders: DataStream) -> None:
    assert orders.uid("orders") is orders
    with pytest.raises(GraphError, match=r"give it there: process\(\.\.\., uid=\"other\"\)"):
        orders.uid("other")
    timed = orders.assign_timestamps_and_watermarks(BOUNDED)
    for stream in (orders.global_(), orders.union(orders), timed):
        assert stream.uid("other") is stream
    assert orders._environment.graph.uids() == ("orders",)


# -- parallelism ------------------------------------------------------------------------------------


def test_a_function_may_have_its_own_number_of_tasks(orders: DataStream) -> None:
    checked = orders.process(Split()).set_parallelism(6)
    assert function_of(checked).settings.parallelism == 6
    # Its side outputs are of the same function.
    assert function_of(checked.get_side_output(REFUSED)).settings.parallelism == 6


def test_a_side_output_has_one_declaration(orders: DataStream) -> None:
    other = OutputTag(REFUSED.name, "line LONG, why STRING")
    for stream, whose in [(orders.process(Split()), "Split"), (keyed(orders), "totals")]:
        stream.get_side_output(REFUSED)
        stream.get_side_output(REFUSED)
        with pytest.raises(GraphError, match=f"'{REFUSED.name}' of '.*{whose}' is declared as .* and as"):
            stream.get_side_output(other)
    # Another call is another function.
    orders.process(Split()).get_side_output(other)


@pytest.mark.parametrize(
    ("between", "says"),
    [
        (
            lambda totals: totals.map(same, output=TOTAL).set_parallelism(3),
            r"set_parallelism\(3\) was called",
        ),
        (
            lambda totals: totals.global_().map(same, output=TOTAL),
            r"global_\(\) before it would move its records",
        ),
        (
            lambda totals: totals.partition_custom(lambda key, tasks: 0, "user").filter(bool),
            r"partition_custom\(\) before it would move its records",
        ),
    ],
)
def test_what_is_said_of_tasks_between_keyed_operators_and_cannot_be_kept_is_refused(
    between: Any, says: str
) -> None:
    def program(orders: DataStream) -> DataStream:
        return keyed(between(keyed(orders)).key_by("user").max("total", uid="most"), "again")

    with pytest.raises(
        (ConfigError, GraphError), match=f"between the keyed operator 'most' and an earlier one.*{says}"
    ):
        ProgramHarness(program, "user STRING, amount LONG", parallelism=4)


def test_what_changes_nothing_between_keyed_operators_is_left_out() -> None:
    def program(orders: DataStream) -> DataStream:
        mapped = keyed(orders).global_().rebalance(3).map(same, output=TOTAL).set_parallelism(4)
        return mapped.global_().key_by("user").max("total", uid="most")

    harness = ProgramHarness(program, "user STRING, amount LONG", parallelism=4)
    harness.push(("ann", 3))
    assert [tuple(row) for row in harness.take().rows] == [("ann", 3)]


def test_errors_say_what_a_setting_was_called_on(orders: DataStream) -> None:
    mapped, totals = orders.map(Upper(), output="user STRING").name("upper"), keyed(orders)
    with pytest.raises(GraphError, match=r"slot_sharing_group\('own'\) was called on the function 'upper'"):
        mapped.slot_sharing_group("own")
    for stream, what in [
        (orders.union(orders), "a stream that is a union"),
        (orders.transform(lambda frame: frame), r"a stream that transform\(\) made"),
        (orders.rebalance(), "a stream whose records were only moved"),
        (totals.get_side_output(REFUSED), "a side output of the keyed operator 'totals'"),
        (orders.assign_timestamps_and_watermarks(BOUNDED), "a stream that assign_timestamps"),
    ]:
        with pytest.raises(GraphError, match=rf"set_parallelism\(8\) was called on {what}"):
            stream.set_parallelism(8)


def test_keyed_operators_have_as_many_tasks_as_shuffle_partitions(orders: DataStream) -> None:
    totals = keyed(orders)
    assert totals.set_parallelism(4) is totals
    with pytest.raises(ConfigError, match="of the keyed operator 'totals' cannot be 8") as refused:
        totals.set_parallelism(8)
    assert 'spark.conf.set("spark.sql.shuffle.partitions", 8)' in refused.value.what_to_do


def test_what_has_no_tasks_of_its_own_says_what_to_call(orders: DataStream) -> None:
    for stream in (orders, orders.rebalance(), keyed(orders).get_side_output(REFUSED)):
        with pytest.raises(GraphError, match=r"rebalance\(8\)"):
            stream.set_parallelism(8)
    for wrong in (None, 0, True, "4", 2.0):
        with pytest.raises(ConfigError, match="a whole number from 1 to 32768"):
            orders.map(Upper(), output="user STRING").set_parallelism(wrong)  # type: ignore[arg-type]


def test_the_parallelism_of_a_job_is_sparks(monkeypatch: pytest.MonkeyPatch) -> None:
    env = environment()
    assert env.set_parallelism(4) is env
    with pytest.raises(ConfigError, match="the job 'orders' cannot be 8"):
        env.set_parallelism(8)
    with pytest.raises(ConfigError, match="a whole number from 1 to 32768"):
        env.set_parallelism(None)  # type: ignore[arg-type]
    # The setting may change between the call and the start.
    env.spark.conf["spark.sql.shuffle.partitions"] = "8"  # type: ignore[index]
    with pytest.raises(ConfigError, match="the job 'orders' cannot be 4"):
        env.execute_async()


def test_the_last_number_of_key_groups_counts(orders: DataStream) -> None:
    totals = keyed(orders, max_parallelism=64)
    assert totals.set_max_parallelism(64).set_max_parallelism(128) is totals
    assert isinstance(totals._node, KeyedNode) and totals._node.max_parallelism == 128
    # What has no key groups may be told a number, too.
    for stream in (orders, orders.filter(bool), totals.get_side_output(REFUSED), orders.union(orders)):
        assert stream.set_max_parallelism(32) is stream
    assert totals._node.max_parallelism == 128
    with pytest.raises(ConfigError, match="max_parallelism is 0"):
        totals.set_max_parallelism(0)


def test_the_key_groups_of_a_job_are_said_before_its_operators() -> None:
    env = environment().set_max_parallelism(64)
    totals = keyed(env.from_source(Nowhere(), uid="orders"))
    assert isinstance(totals._node, KeyedNode) and totals._node.max_parallelism == 64
    assert env.set_max_parallelism(64) is env
    with pytest.raises(GraphError, match="'totals' has its key groups already"):
        env.set_max_parallelism(128)
    with pytest.raises(ConfigError, match="max_parallelism is 'x'"):
        environment().set_max_parallelism("x")  # type: ignore[arg-type]


# -- redistributions and keys -----------------------------------------------------------------------


def test_each_redistribution_is_a_node_of_its_own(orders: DataStream) -> None:
    assert function_of(orders.rebalance()) == function_of(orders.shuffle()) == Rebalance(None)
    assert function_of(orders.rebalance(3)) == Rebalance(3) and function_of(orders.global_()) == Rebalance(1)
    assert function_of(orders.rescale(2)) == Rescale(2) and orders.forward() is orders
    moved = orders.partition_custom(lambda key, tasks: 0, "user", 5)
    assert function_of(moved).parallelism == 5
    for method in ("rebalance", "shuffle", "rescale"):
        with pytest.raises(ConfigError, match="parallelism is 0"):
            getattr(orders, method)(0)


def test_a_stream_may_be_united_with_no_other(orders: DataStream) -> None:
    others: list[DataStream] = []
    assert orders.union(*others) is orders


def test_what_follows_a_union_is_done_with_each_of_its_streams(orders: DataStream) -> None:
    """So these two could not keep their word."""
    both = orders.union(orders)
    assert function_of(both.rebalance(3)) == Rebalance(3)
    for call in (lambda: both.global_(), lambda: both.map(Upper(), output="user STRING").global_()):
        with pytest.raises(GraphError, match=r"global_\(\) was called on a union"):
            call()
    with pytest.raises(GraphError, match=r"partition_custom\(\) was called on a union"):
        both.partition_custom(lambda key, tasks: 0, "user")


def test_a_stream_may_be_keyed_by_a_function(orders: DataStream) -> None:
    totals = orders.key_by(lambda order: order.user, key="STRING").process(
        RunningTotal(), output=TOTAL, uid="totals"
    )
    assert isinstance(totals._node, KeyedNode)
    (entry,) = totals._node.entries
    assert isinstance(entry.keys[0], KeyFunction)


def test_connected_streams_may_be_keyed_by_functions(orders: DataStream) -> None:
    def user(order: Any) -> str:
        return str(order.user)

    connected = orders.connect(orders)
    both = connected.key_by(user, lambda order: order.user, key="STRING")
    assert [type(entry.keys[0]) for entry in both._entries] == [KeyFunction, KeyFunction]
    mixed = connected.key_by("user", lambda order: order.user, key="STRING")
    assert [type(entry.keys[0]) for entry in mixed._entries] == [str, KeyFunction]


# -- process without a key --------------------------------------------------------------------------


class Held(Split):
    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_a_process_function_without_a_key_has_side_outputs(orders: DataStream) -> None:
    words = orders.process(Split(), name="split")
    refused = words.get_side_output(REFUSED)
    function = function_of(refused)
    assert isinstance(function, ProcessTransform) and function.side == "refused"
    assert function.output is not None and function.output.names == ["text", "at"]
    assert refused._node.parent is orders._node  # type: ignore[union-attr]
    with pytest.raises(GraphError, match="no process"):
        orders.get_side_output(REFUSED)
    with pytest.raises(ConfigError, match="OutputTag"):
        words.get_side_output("refused")  # type: ignore[arg-type]
    with pytest.raises(FlinkishError, match="the output of 'split/bad'"):
        words.get_side_output(OutputTag("bad", "LONGS"))
    with pytest.raises(UserFunctionError, match="'held' cannot be sent"):
        orders.process(Held(), name="held")
    assert issubclass(Held, ProcessFunction)


# -- from_source with a strategy --------------------------------------------------------------------


def test_a_strategy_with_the_source_is_one_right_behind_it() -> None:
    env = environment()
    stream = env.from_source(Nowhere(), BOUNDED, uid="orders")
    assert isinstance(stream._node, TimedNode) and isinstance(stream._node.parent, SourceNode)
    assert stream._node.strategy is BOUNDED and env.graph.timed == [stream._node]
    plain = env.from_source(Nowhere(), uid="plain")
    assert isinstance(plain._node, SourceNode)


def test_a_strategy_that_cannot_be_used_leaves_no_source_behind() -> None:
    env = environment()
    with pytest.raises(ConfigError, match="watermark_strategy is 5"):
        env.from_source(Nowhere(), 5, uid="orders")  # type: ignore[arg-type]
    lock = threading.Lock()
    with pytest.raises(UserFunctionError, match="watermark strategy 'orders'"):
        locked = BOUNDED.with_timestamp_assigner(lambda record, known: int(lock.locked()))
        env.from_source(Nowhere(), locked, uid="orders")
    assert not env.graph.sources and not env.graph.timed


def test_sinks_still_come_last(orders: DataStream) -> None:
    with pytest.raises(ConfigError, match="It must be an instance of Sink"):
        orders.rebalance().sink_to(Sink, uid="out")  # type: ignore[arg-type]
