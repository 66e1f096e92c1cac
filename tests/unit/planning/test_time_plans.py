"""Who reports about time in a program, and what a program may say about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from pyspark.sql import types as T

from flinkish_spark import WatermarkStrategy
from flinkish_spark.contracts.source import Source, SourceNode
from flinkish_spark.core.errors import ConfigError, GraphError, UserFunctionError
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.job.preflight import check_alignment
from flinkish_spark.planning.logical_plan import LogicalPlan
from flinkish_spark.planning.rules.cut_chains import cut_chains
from flinkish_spark.planning.stream_graph import KeyedEntry, KeyedNode, SinkNode, StreamGraph, TransformNode
from flinkish_spark.planning.times import plan_times
from flinkish_spark.protocol.event_time import BoundedOutOfOrderness, NoWatermarkStrategy
from flinkish_spark.protocol.time_plan import Assigner, assigner_uid
from flinkish_spark.sources import CollectionSource
from tests.unit.checkpoint.test_time_keeper import Input

FIRST = WatermarkStrategy.for_bounded_out_of_orderness(5).with_idleness(60_000)
SECOND = WatermarkStrategy.for_monotonous_timestamps()


@dataclass
class Environment:
    """Stands for an environment: it has a graph."""

    graph: StreamGraph


@dataclass
class Planned:
    has_channels: bool = True


class Program:
    """A graph that a test writes."""

    def __init__(self) -> None:
        self.graph = StreamGraph()
        self.environment: Any = Environment(self.graph)

    def source(self, uid: str, source: Source | None = None) -> DataStream:
        node = SourceNode(uid, source or Input())
        self.graph.sources.append(node)
        return DataStream(self.environment, node)

    def keyed(self, stream: DataStream, uid: str) -> DataStream:
        function: Any = None
        entries = (KeyedEntry(stream._node, ("user",)),)
        node = KeyedNode(uid, entries, function, T.StructType([]), 128)
        self.graph.operators.append(node)
        return DataStream(self.environment, node)

    def sink(self, stream: DataStream, uid: str) -> None:
        sink: Any = None
        self.graph.sinks.append(SinkNode(uid, stream._node, sink))

    def plan(self, has_channels: bool = True) -> Any:
        plan = cut_chains(LogicalPlan(self.graph))
        return plan_times(plan, lambda path, chain, name: Planned(has_channels))


@pytest.fixture
def program() -> Program:
    return Program()


def test_a_strategy_belongs_to_a_source_in_a_chain(program: Program) -> None:
    orders = program.source("orders").assign_timestamps_and_watermarks(FIRST)
    program.sink(program.keyed(orders, "sums"), "out")
    found = program.plan()
    assert found.assigners == {assigner_uid("orders", "sums"): Assigner("orders", FIRST.rules)}
    assert (found.chains, found.operators) == ({"out": ("sums",)}, {"sums": ("sums",)})
    assert (found.number_of("sums"), found.number_of("orders"), found.is_timed) == (0, 1, True)
    assert not program.plan(has_channels=False).assigners["orders.sums"].has_channels


def test_what_is_said_last_in_front_of_the_keys_counts(program: Program) -> None:
    orders = program.source("orders").assign_timestamps_and_watermarks(FIRST)
    again = DataStream(orders._environment, TransformNode(orders._node, lambda frame: frame))
    program.sink(program.keyed(again.assign_timestamps_and_watermarks(SECOND), "sums"), "out")
    program.sink(program.keyed(again, "tops"), "top")
    found = program.plan()
    assert [one.rules.generation for one in found.assigners.values()] == [
        BoundedOutOfOrderness(0),
        BoundedOutOfOrderness(5),
    ]


def test_nobody_waits_for_a_stream_that_reaches_no_keyed_operator(program: Program) -> None:
    """It would hold event time of the whole job back: no operator reports its times."""
    orders = program.source("orders").assign_timestamps_and_watermarks(FIRST)
    program.sink(orders, "copy")
    program.sink(program.keyed(program.source("clicks"), "sums"), "out")
    found = program.plan()
    assert {uid: one.rules.generation for uid, one in found.assigners.items()} == {
        "orders": NoWatermarkStrategy(),
        "clicks": NoWatermarkStrategy(),
    }
    assert not found.is_timed


def test_an_operator_that_two_chains_run_is_known_in_both(program: Program) -> None:
    orders = program.source("orders").assign_timestamps_and_watermarks(FIRST)
    shared = program.keyed(orders, "first")
    program.sink(program.keyed(shared, "sums"), "out")
    program.sink(program.keyed(shared, "tops"), "top")
    program.graph.begun_chains = frozenset({"sums", "tops"})
    found = program.plan()
    assert found.instances() == {
        "first.sums": "first",
        "sums": "sums",
        "first.tops": "first",
        "tops": "tops",
    }
    assert set(found.assigners) == {"orders.sums", "orders.tops"}


def test_the_sources_time_is_asked_for_where_somebody_goes_by_it(program: Program) -> None:
    for uid, strategy in (
        ("own", FIRST),
        ("column", FIRST.with_timestamp_assigner("at")),
        ("function", FIRST.with_timestamp_assigner(lambda record, known: known)),
    ):
        program.source(uid).assign_timestamps_and_watermarks(strategy)
    assert [program.graph.needs_own_time(one) for one in program.graph.sources] == [True, False, True]


def test_times_are_given_in_front_of_the_keys(program: Program) -> None:
    keyed = program.keyed(program.source("orders"), "sums")
    with pytest.raises(GraphError, match="after a keyed operator"):
        keyed.assign_timestamps_and_watermarks(FIRST)
    with pytest.raises(ConfigError, match="strategy is '5 s'"):
        program.source("clicks").assign_timestamps_and_watermarks("5 s")  # type: ignore[arg-type]


def test_a_function_that_cannot_travel_is_refused(program: Program) -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(UserFunctionError, match="'orders' cannot be sent"):
        program.source("orders").assign_timestamps_and_watermarks(
            FIRST.with_timestamp_assigner(lambda record, known: lock.locked() or 0)
        )


# -- what is in front of an operator ---------------------------------------------------------------------


def timed(program: Program, uid: str) -> DataStream:
    return program.source(uid).assign_timestamps_and_watermarks(FIRST)


def test_pipelines_that_share_nothing_wait_for_their_own_sources(program: Program) -> None:
    program.sink(program.keyed(program.keyed(timed(program, "orders"), "sums"), "tops"), "out")
    program.sink(program.keyed(timed(program, "clicks"), "counts"), "counted")
    assert program.plan().inputs == {
        "sums": {"orders.tops"},
        "tops": {"orders.tops"},
        "counts": {"clicks.counts"},
    }


def test_who_reads_two_streams_waits_for_both_and_those_in_front_do_not(program: Program) -> None:
    sums = program.keyed(timed(program, "orders"), "sums")
    counts = program.keyed(timed(program, "clicks"), "counts")
    program.sink(program.keyed(sums.union(counts, program.source("raw")), "all"), "out")
    assert program.plan().inputs == {
        "sums": {"orders.all"},
        "counts": {"clicks.all"},
        "all": {"orders.all", "clicks.all", "raw"},
    }


def test_an_operator_in_two_chains_waits_for_both_and_so_do_those_behind_it(program: Program) -> None:
    """They are handed one watermark, and nobody is ahead of whom it reads."""
    shared = program.keyed(timed(program, "orders"), "first")
    program.sink(program.keyed(shared, "sums"), "out")
    program.sink(program.keyed(shared.union(timed(program, "clicks")), "tops"), "top")
    program.graph.begun_chains = frozenset({"sums", "tops"})
    both = {"orders.sums", "orders.tops"}
    found = program.plan()
    assert found.inputs == {"first": both, "sums": both, "tops": {*both, "clicks.tops"}}
    times = found.make_operator_times()
    assert times["first"].instances == {"first.sums", "first.tops"}
    assert (times["tops"].inputs, times["tops"].instances) == (found.inputs["tops"], {"tops"})


def test_an_operator_that_runs_once_for_several_has_one_name(program: Program) -> None:
    shared = program.keyed(timed(program, "orders"), "first")
    program.sink(shared, "all")
    program.sink(program.keyed(shared.union(timed(program, "clicks")), "tops"), "top")
    found = program.plan()
    assert found.inputs == {"first": {"orders.tops"}, "tops": {"orders.tops", "clicks.tops"}}
    assert found.make_operator_times()["first"].instances == {"first"}
    assert found.chains == {"all": ("tops",), "top": ("tops",)}


def test_who_reads_nothing_that_reaches_a_sink_is_no_operator_of_the_plan(program: Program) -> None:
    program.keyed(timed(program, "orders"), "sums")
    program.sink(program.source("raw"), "copy")
    assert program.plan().inputs == {} == program.plan().make_operator_times()


# -- alignment -----------------------------------------------------------------------------------------

ALIGNED = FIRST.with_watermark_alignment("shop", 1_000)


def test_what_spark_reads_cannot_be_aligned(program: Program) -> None:
    plain = program.source("orders").assign_timestamps_and_watermarks(FIRST)
    program.sink(program.keyed(plain, "sums"), "out")
    check_alignment(program.graph, program.plan())
    aligned = program.source("clicks").assign_timestamps_and_watermarks(ALIGNED)
    program.sink(program.keyed(aligned, "counts"), "counted")
    with pytest.raises(GraphError, match="'clicks' cannot be aligned"):
        check_alignment(program.graph, program.plan())


def test_sources_of_splits_can_be_aligned_where_somebody_asks_for_times(program: Program) -> None:
    split = CollectionSource([(1,)], "n LONG")
    orders = program.source("orders", split).assign_timestamps_and_watermarks(ALIGNED)
    program.sink(orders, "raw")
    with pytest.raises(GraphError, match="'orders' is aligned with the group 'shop', and has no watermarks"):
        check_alignment(program.graph, program.plan())
    program.sink(program.keyed(orders, "sums"), "out")
    check_alignment(program.graph, program.plan())


def test_a_union_is_aligned_with_all_of_its_sources(program: Program) -> None:
    split = CollectionSource([(1,)], "n LONG")
    both = program.source("orders", split).union(program.source("clicks"))
    program.sink(program.keyed(both.assign_timestamps_and_watermarks(ALIGNED), "sums"), "out")
    with pytest.raises(GraphError, match="'clicks' cannot be aligned"):
        check_alignment(program.graph, program.plan())


def test_a_source_is_in_one_group(program: Program) -> None:
    orders = program.source("orders", CollectionSource([(1,)], "n LONG"))
    for number, group in enumerate(["shop", "web"]):
        timed = orders.assign_timestamps_and_watermarks(FIRST.with_watermark_alignment(group, 1_000))
        program.sink(program.keyed(timed, f"sums-{number}"), f"out-{number}")
    with pytest.raises(GraphError, match="aligned with the groups 'shop' and 'web'"):
        check_alignment(program.graph, program.plan())


def test_inputs_whose_uids_make_one_name_are_refused(program: Program) -> None:
    """The times of both counted as those of one, so watermarks were further than its records."""
    orders = program.source("orders").assign_timestamps_and_watermarks(FIRST)
    program.sink(program.keyed(orders, "eu.sums"), "all")
    europe = program.source("orders.eu").assign_timestamps_and_watermarks(FIRST)
    program.sink(program.keyed(europe, "sums"), "eu")
    says = "'orders' before 'eu.sums' and 'orders.eu' before 'sums' cannot be told apart"
    with pytest.raises(GraphError, match=rf"{says}.*'orders.eu.sums'.*another uid"):
        program.plan()


def test_so_is_a_source_without_a_strategy_that_has_the_name_of_an_input(program: Program) -> None:
    orders = program.source("orders").assign_timestamps_and_watermarks(FIRST)
    program.sink(program.keyed(orders, "sums"), "all")
    program.sink(program.source("orders.sums"), "copy")
    with pytest.raises(GraphError, match=r"'orders' before 'sums' and 'orders.sums' cannot be told apart"):
        program.plan()


def test_so_is_an_operator_that_has_the_name_of_another_one_in_one_of_its_chains(program: Program) -> None:
    """Its timers and those of the other were taken for each other's."""
    shared = program.keyed(program.source("orders"), "first")
    program.sink(program.keyed(shared, "sums"), "out")
    program.sink(program.keyed(shared, "tops"), "top")
    program.sink(program.keyed(program.source("clicks"), "first.sums"), "other")
    program.plan()
    program.graph.begun_chains = frozenset({"sums", "tops", "first.sums"})
    with pytest.raises(GraphError, match=r"'first' before 'sums' and 'first.sums' cannot"):
        program.plan()
