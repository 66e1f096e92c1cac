"""Job graphs as DOT, as Mermaid and as a tree."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from flinkish_spark.job.plan_forms import dot, mermaid, plan_in, print_tree, text
from flinkish_spark.protocol.checkpoint import ParticipantKind
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose
from flinkish_spark.protocol.job_graph import (
    ChainingReason,
    JobEdge,
    JobGraph,
    JobOperator,
    OperatorKind,
    PlanForm,
    RunsIn,
    ShipStrategy,
)
from flinkish_spark.protocol.statistics import (
    CheckpointDurations,
    CheckpointStatistics,
    ParticipantStatistics,
    StatisticsHistory,
)
from tests.support.job_graphs import PROGRAMS, graph_of

NASTY = '<b>"&\x1b[2J\\'


def nasty() -> JobGraph:
    source = JobOperator("a" * 32, NASTY, NASTY, NASTY, OperatorKind.SOURCE, RunsIn.JVM)
    edge = JobEdge(source.id, ShipStrategy.HASH, ChainingReason.BY_KEY, output=NASTY)
    state = JobOperator(
        "b" * 32, "s", NASTY * 40, "", OperatorKind.STATEFUL, RunsIn.PYTHON, (NASTY,), 1, 2, inputs=(edge,)
    )
    return JobGraph(NASTY, (source, state))


def test_a_picture_says_what_runs_where() -> None:
    found = mermaid(graph_of(PROGRAMS[9]))
    assert "Source: orders · Python 2#215;" in found
    assert "4 tasks · state in 128 key groups" in found and '-->|"HASH user"|' in found


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_dot_and_mermaid_have_every_vertex_and_every_edge(program: Any) -> None:
    graph = graph_of(program)
    ways = {(way.vertex, vertex.id) for vertex in graph.vertices for way in vertex.inputs}
    assert set(re.findall(r'^  "(\w+)" -> "(\w+)"', dot(graph), re.MULTILINE)) == ways
    assert set(re.findall(r"^  v(\w+) -->.* v(\w+)$", mermaid(graph), re.MULTILINE)) == ways
    for vertex in graph.vertices:
        assert f'"{vertex.id}" [label=' in dot(graph) and f'  v{vertex.id}["' in mermaid(graph)


def test_names_of_others_cannot_break_a_picture() -> None:
    assert "Source: #60;b#62;#34;#38;#63;[2J#92;" in mermaid(nasty())
    assert "\x1b" not in mermaid(nasty()) and "\x1b" not in dot(nasty())
    # An escaped backslash, an escaped quote, or anything else up to the next quote.
    assert re.sub(r'"(\\.|[^"\\])*"', "", dot(nasty())).count('"') == 0
    assert re.sub(r'"[^"\n]*"', "", mermaid(nasty())).count('"') == 0
    assert mermaid(JobGraph("empty", ())) == "flowchart LR"


def test_a_plan_comes_in_three_forms() -> None:
    graph = graph_of(PROGRAMS[0])
    assert json.loads(plan_in(graph, PlanForm.JSON)) == graph.execution_plan()
    assert plan_in(graph, PlanForm.DOT) == dot(graph)
    assert plan_in(graph, PlanForm.MERMAID) == mermaid(graph)


# -- the tree ---------------------------------------------------------------------------------------------


def history() -> StatisticsHistory:
    begun = CheckpointStatistics.begin(CheckpointId(7), CheckpointPurpose.PERIODIC, trigger_at_ms=1)
    done = begun.complete(
        CheckpointDurations(sync_ms=120, commit_ms=14, end_to_end_ms=200),
        rows=1_234,
        bytes_staged=5_678,
        participants=(
            ParticipantStatistics(
                "out", ParticipantKind.SINK, rows=1_234, bytes=5_678, sync_ms=80, commit_ms=9
            ),
            ParticipantStatistics("totals", ParticipantKind.OPERATOR, late_dropped=3, counts={"matches": 2}),
        ),
    )
    failed = CheckpointStatistics.begin(CheckpointId(8), CheckpointPurpose.PERIODIC, trigger_at_ms=2)
    reason = CheckpointFailureReason.TASK_FAILED
    known = StatisticsHistory().add_triggered(begun).add_ended(done)
    return known.add_triggered(failed).add_ended(failed.fail(reason, "no", None, ()))


def test_a_tree_says_where_and_why_and_what_it_cost() -> None:
    shown = text(graph_of(PROGRAMS[1]), history())
    assert shown.splitlines()[:2] == [
        "functions-in-front: 3 vertices; a micro-batch has 1 scan and 1 shuffle",
        "the newest checkpoint with rows, 7: 1,234 rows, 5,678 bytes, staged in 120 ms, committed in 14 ms, "
        "200 ms in all",
    ]
    assert "[2] totals  4 tasks" in shown
    assert "HASH by user: records go to the task that has the state of their key" in shown
    assert "checkpoint 7: 3 late records dropped, matches 2" in shown
    assert "checkpoint 7: 1,234 rows, 5,678 bytes, staged in 80 ms, committed in 9 ms" in shown
    assert "checkpoint" not in text(graph_of(PROGRAMS[1])) and "checkpoint" not in text(
        graph_of(PROGRAMS[1]), StatisticsHistory()
    )


def test_a_vertex_that_is_read_on_two_ways_is_told_once() -> None:
    shown = text(graph_of(PROGRAMS[7]))
    assert shown.count("both: Both; in Python; state by user") == 1 and "[4] both (shown above)" in shown


def test_moves_sides_and_uids_are_told() -> None:
    assert "GLOBAL: the program moves records here" in text(graph_of(PROGRAMS[4]))
    assert "FORWARD of the side output 'late'" in text(graph_of(PROGRAMS[10]))
    assert "uid second" in text(graph_of(PROGRAMS[3]))
    assert "state by partition, 128 key groups" in text(graph_of(PROGRAMS[8]))
    assert "2 times in each micro-batch" in text(graph_of(PROGRAMS[6]))


def test_without_a_terminal_a_tree_has_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    print_tree(graph_of(PROGRAMS[0]))
    assert capsys.readouterr().out.splitlines()[0].startswith("straight: 2 vertices")
