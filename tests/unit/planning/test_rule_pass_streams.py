"""Where operators stand in a line, and which streams pass which of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flinkish_spark.planning.logical_plan import LogicalPlan
from flinkish_spark.planning.optimizer import plan_of_stream
from flinkish_spark.planning.rules.cut_chains import cut_chains
from flinkish_spark.planning.rules.pass_streams import pass_streams
from flinkish_spark.planning.stream_graph import KeyedNode, SideNode, StreamGraph, UnionNode
from tests.support.stream_graphs import graph, keyed, side, source, transform

A, B = source("a"), source("b")


def seen(plan: LogicalPlan) -> dict[str, list[tuple[str, list[str]]]]:
    """By chain, of each operator in its line, what passes it."""
    return {
        chain: [(one.operator.uid, list(map(name, one.passing))) for one in line]
        for chain, line in plan.lines.items()
    }


def name(base: Any) -> str:
    if isinstance(base, SideNode):
        return f"{base.parent.uid}.{base.tag.name}"
    assert isinstance(base, KeyedNode)
    return base.uid


def lines(made: StreamGraph) -> dict[str, list[tuple[str, list[str]]]]:
    return seen(pass_streams(cut_chains(LogicalPlan(made))))


def test_operators_each_of_which_is_read_once_are_in_no_line() -> None:
    joined = keyed("joined", keyed("left", A), keyed("right", B))
    assert lines(graph(A, keyed("last", transform(joined)))) == {}
    assert lines(graph(keyed("one", A), keyed("two", A))) == {}


def test_what_another_one_reads_passes_those_in_between() -> None:
    first = keyed("first", A)
    late = side(first)
    second = keyed("second", first)
    third = keyed("third", transform(second), transform(late))
    assert lines(graph(keyed("last", third, first))) == {
        "last": [
            ("first", []),
            ("second", ["first", "first.late"]),
            ("third", ["first"]),
            ("last", []),
        ]
    }


def test_what_a_sink_reads_passes_all_behind_it() -> None:
    first = keyed("first", A)
    late = side(first)
    second, third = keyed("second", first), keyed("third", first)
    assert lines(graph(second, transform(late), third)) == {
        "third": [
            ("first", []),
            ("second", ["first", "first.late"]),
            ("third", ["second", "first.late"]),
        ]
    }


def test_scans_keep_the_names_that_the_chain_gives_them() -> None:
    """Names follow the graph from behind, and operators stand in the line from the front."""
    first = keyed("first", B)
    second = keyed("second", A, first)
    last = keyed("last", UnionNode((A, second)), first)
    plan = pass_streams(cut_chains(LogicalPlan(graph(last))))
    (end,) = plan.all_ends
    assert end.chain.inputs == ("a", "a#2", "b")
    assert [(one.operator.uid, dict(one.names)) for one in plan.lines["last"]] == [
        ("first", {0: ("b",)}),
        ("second", {0: ("a#2",)}),
        ("last", {0: ("a",)}),
    ]


def test_a_job_that_has_begun_with_a_chain_for_each_sink_has_no_line() -> None:
    first = keyed("first", A)
    made = graph(first, keyed("second", first))
    assert list(lines(made)) == ["second"]
    assert lines(replace(made, begun_chains=frozenset({"first", "second"}))) == {}


def test_beside_a_job_only_what_a_stream_needs_passes() -> None:
    first = keyed("first", A)
    second = keyed("second", first, first)
    both = keyed("both", second, first)
    made = graph(first, second, both)
    assert lines(made)["both"] == [("first", []), ("second", ["first"]), ("both", ["second", "first"])]
    assert seen(plan_of_stream(made, both)) == {"both": [("first", []), ("second", ["first"]), ("both", [])]}
    assert seen(plan_of_stream(made, second)) == {}
