"""Which paths are read by one scan, and behind how many steps they part."""

from __future__ import annotations

from typing import Any

from flinkish_spark import AsyncFunction
from flinkish_spark.async_io.transform import make_async_calls
from flinkish_spark.async_io.wait import AsyncSpec
from flinkish_spark.planning.beginning import NOTHING, Beginning
from flinkish_spark.planning.logical_plan import LogicalPlan
from flinkish_spark.planning.partitioning import Rebalance
from flinkish_spark.planning.rules.cut_chains import cut_chains
from flinkish_spark.planning.rules.share_scans import share_scans
from flinkish_spark.planning.rules.share_tasks import share_tasks
from flinkish_spark.planning.stream_graph import StreamGraph, StreamNode, TransformNode
from flinkish_spark.protocol.job_graph import ChainingStrategy
from flinkish_spark.protocol.plan_layout import (
    Chain,
    OperatorInstance,
    PlanLayout,
    Scan,
    ScannedInput,
    ScanRole,
)
from tests.support.stream_graphs import graph, keyed, record_function, source, timed, transform

A, B = source("a"), source("b")


class Asked(AsyncFunction):
    async def async_invoke(self, value: Any) -> list[Any]:
        return []


class Begun(Beginning):
    """The chain of the operator 1 begins elsewhere."""

    def find_input_label(self, chain: Chain, name: str) -> str:
        return "later" if chain.name == "1" else ""


def scans(made: StreamGraph, **known: Any) -> list[tuple[int, list[list[str]]]]:
    """Of each scan of the one group, the common steps and the operators of each branch."""
    (group,) = share_scans(share_tasks(cut_chains(LogicalPlan(made, **known)))).groups
    return [
        (scan.common, [[one.operator.uid for one in branch] for branch in scan.branches])
        for scan in group.scans
    ]


def of(*parents: StreamNode) -> StreamGraph:
    """A graph with an operator for each stream, called by its number."""
    return graph(*(keyed(str(number), parent) for number, parent in enumerate(parents)))


def test_who_reads_the_same_stream_reads_one_branch() -> None:
    large = record_function(A)
    assert scans(of(large, large)) == [(1, [["0", "1"]])]
    assert scans(of(A, B)) == [(0, [["0"]]), (0, [["1"]])]


def test_paths_part_behind_the_steps_that_all_have() -> None:
    times = timed(transform(A))
    large = record_function(times)
    larger = record_function(large, "larger")
    assert scans(of(times, large, larger, transform(times))) == [(2, [["0"], ["1"], ["2"], ["3"]])]
    assert scans(of(large, larger)) == [(3, [["0"], ["1"]])]


def test_what_gives_times_is_in_front_of_all_branches() -> None:
    """So a path with times of its own has a scan of its own."""
    other = timed(record_function(A))
    assert scans(of(A, record_function(A), record_function(other))) == [
        (0, [["0"], ["1"]]),
        (3, [["2"]]),
    ]


def test_frames_run_beside_others_only_in_front_of_functions() -> None:
    behind = transform(record_function(A))
    assert scans(of(A, behind)) == [(0, [["0"]]), (2, [["1"]])]
    assert scans(of(A, record_function(transform(A)))) == [(0, [["0"], ["1"]])]


def test_what_moves_or_has_its_own_tasks_runs_beside_nothing() -> None:
    moved = TransformNode(A, Rebalance(3))
    assert len(scans(of(A, moved))) == 2
    apart = record_function(A)
    made = of(A, apart)
    made.chained[id(apart.function.settings)] = ChainingStrategy.NEVER  # type: ignore[attr-defined]
    assert len(scans(made)) == 2
    wide = record_function(A)
    wide.function.settings.parallelism = 2  # type: ignore[attr-defined]
    assert len(scans(of(A, wide))) == 2


def test_calls_to_a_system_outside_run_beside_nothing() -> None:
    asked = TransformNode(A, make_async_calls(AsyncSpec(Asked(), 100, 10), "user STRING", "asked"))
    assert len(scans(of(A, asked))) == 2


def test_only_what_begins_at_the_same_place_is_read_together() -> None:
    made = of(A, record_function(A), record_function(A))
    assert scans(made, beginning=NOTHING) == [(0, [["0"], ["1"], ["2"]])]
    assert scans(made, beginning=Begun()) == [(0, [["0"], ["2"]]), (1, [["1"]])]


def test_a_log_that_has_begun_goes_on_with_the_scans_that_it_has() -> None:
    made = of(A, record_function(A), record_function(A))
    records = (Scan(ScanRole.RECORDS, "a", "0,2"), Scan(ScanRole.RECORDS, "a", "1"))
    operators = tuple(OperatorInstance(uid, uid) for uid in "012")
    together = (ScannedInput(0, "0", "a"), ScannedInput(0, "2", "a"))
    recorded = PlanLayout(records, operators, (("0", "1", "2"),), together)
    assert scans(made, recorded=recorded) == [(0, [["0"], ["2"]]), (1, [["1"]])]
