"""Chains of a stream graph: what Spark runs on its own, and under which names its scans stand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flinkish_spark.planning.logical_plan import LogicalPlan
from flinkish_spark.planning.rules.cut_chains import cut_chains, find_chain_ends, find_inputs
from flinkish_spark.planning.stream_graph import (
    StreamNode,
    UnionNode,
    collect_operators,
    find_operator_scans,
    find_paths,
    find_upstreams,
    has_paths_that_meet,
    name_bases,
)
from flinkish_spark.protocol.plan_layout import Chain
from flinkish_spark.protocol.restore import begin_chain
from flinkish_spark.protocol.savepoints import SavedChain
from tests.support.stream_graphs import graph, keyed, record_function, side, source, transform


def chains(end: StreamNode) -> list[Chain]:
    return [one.chain for one in find_chain_ends(graph(end), end)]


A, B = source("a"), source("b")


def test_a_straight_path_is_one_chain() -> None:
    assert chains(transform(A)) == [Chain(("a",), (), ("out-0",))]
    second = keyed("second", keyed("first", transform(A)))
    assert chains(transform(second)) == [Chain(("a",), ("first", "second"), ("second",))]


def test_an_operator_over_several_streams_has_their_sources() -> None:
    joined = keyed("joined", keyed("left", A), UnionNode((B, transform(A))))
    assert chains(joined) == [Chain(("a", "b", "a#2"), ("left", "joined"), ("joined",))]


def test_a_sink_over_a_union_reads_the_end_of_each_path() -> None:
    first = keyed("first", A)
    late = side(first)
    union = UnionNode((transform(A), first, UnionNode((B, transform(late)))))
    ends = find_chain_ends(graph(union), union)
    assert [end.chain for end in ends] == [
        Chain(("a", "b"), (), ("out-0",)),
        Chain(("a",), ("first",), ("first",)),
        Chain(("a",), ("first",), ("first",)),
    ]
    assert [len(end.paths) for end in ends] == [2, 1, 1]
    assert name_bases(union) == "a+first+b"


def test_the_rule_notes_the_ends_of_each_sink() -> None:
    first = keyed("first", A)
    made = graph(UnionNode((B, first, transform(A))), first)
    ends = cut_chains(LogicalPlan(made)).ends
    assert {sink: [end.chain for end in own] for sink, own in ends.items()} == {
        "out-0": [Chain(("b", "a"), (), ("out-0",)), Chain(("a",), ("first",), ("first",))],
        "out-1": [Chain(("a",), ("first",), ("first",))],
    }
    assert [[len(path.steps) for path in end.paths] for end in ends["out-0"]] == [[0, 1], [0]]


def test_what_follows_a_union_is_done_on_each_path() -> None:
    step = transform(UnionNode((A, transform(B))))
    assert [(path.base, len(path.steps), path.steps[-1]) for path in find_paths(step)] == [
        (A, 1, step),
        (B, 2, step),
    ]


def test_inputs_of_a_job_are_those_of_all_chains() -> None:
    twice = keyed("twice", UnionNode((B, A, B)))
    assert find_inputs(graph(twice, transform(A), sources=(A, B))) == ("a", "b", "b#2")


def test_paths_that_begin_with_one_operator_are_one_place_in_its_readers_chain() -> None:
    first = keyed("first", A)
    late = side(first)
    again = keyed("again", UnionNode((first, B, transform(first))), UnionNode((A, transform(late))))
    assert chains(again) == [Chain(("a", "b", "a#2"), ("first", "again"), ("again",))]
    (of_first, of_b, of_a) = find_upstreams(again)
    assert [(one.entry, len(one.paths)) for one in of_first.inputs] == [(0, 2), (1, 1)]
    assert [one.base for one in of_first.inputs] == [first, late]
    assert [upstream.base for upstream in (of_b, of_a)] == [B, A] and of_a.inputs[0].entry == 1


def test_a_source_on_two_paths_is_two_scans() -> None:
    twice = keyed("twice", A, transform(A))
    assert chains(twice) == [Chain(("a", "a#2"), ("twice",), ("twice",))]
    assert [len(upstream.inputs) for upstream in find_upstreams(twice)] == [1, 1]


def test_an_operator_that_others_read_on_several_paths_stands_in_a_chain_once() -> None:
    first = keyed("first", A)
    second, third = keyed("second", first, B), keyed("third", A, side(first))
    last = keyed("last", UnionNode((third, second)), first)
    assert chains(last) == [Chain(("a", "a#2", "b"), ("first", "third", "second", "last"), ("last",))]
    assert [one.uid for one in collect_operators(last)] == ["first", "third", "second", "last"]
    assert [(one.operator.uid, one.upstream, one.source.uid) for one in find_operator_scans(last)] == [
        ("third", 0, "a"),
        ("first", 0, "a"),
        ("second", 1, "b"),
    ]
    assert has_paths_that_meet(last) and not has_paths_that_meet(second) and not has_paths_that_meet(third)


def test_operators_that_sinks_read_stand_in_one_chain_if_they_read_one_operator() -> None:
    first = keyed("first", transform(A))
    late = side(first)
    second, third = keyed("second", first, B), keyed("third", late)
    last, apart = keyed("last", second), keyed("apart", A)
    made = graph(last, transform(late), third, apart, UnionNode((first, B)))
    line = Chain(("a", "b"), ("first", "second", "last", "third"), ("third",))
    assert [find_chain_ends(made, sink.parent)[-1].chain for sink in made.sinks] == [
        line,
        line,
        line,
        Chain(("a",), ("apart",), ("apart",)),
        line,
    ]
    assert find_inputs(made) == ("a", "b")
    # In a job that has begun with a chain for each, they stay what they are.
    begun = replace(made, begun_chains=frozenset({"last", "first", "third", "apart"}))
    assert [find_chain_ends(begun, sink.parent)[-1].chain.name for sink in begun.sinks] == [
        "last",
        "first",
        "third",
        "apart",
        "first",
    ]
    assert find_chain_ends(replace(made, begun_chains=frozenset({line.name})), last)[0].chain == line


def test_a_function_of_dataframes_between_two_operators_stands_first_on_a_path_of_its_own() -> None:
    """Elsewhere it would get the rows of all paths, and keeps sinks apart."""
    first = keyed("first", A)
    large = record_function(first)
    second = keyed("second", record_function(transform(first)))
    made = graph(first, second)
    assert [find_chain_ends(made, sink.parent)[0].chain.name for sink in made.sinks] == ["second"] * 2
    for parent in (transform(large), UnionNode((first, transform(first)))):
        made = graph(first, keyed("second", parent))
        assert [find_chain_ends(made, sink.parent)[0].chain.name for sink in made.sinks] == [
            "first",
            "second",
        ]
    behind = graph(first, transform(keyed("third", first)))
    assert [find_chain_ends(behind, sink.parent)[0].chain.name for sink in behind.sinks] == ["third"] * 2


# -- how a chain of several sources begins -----------------------------------------------------------

JOINED = Chain(("a", "b"), ("left", "joined"), ("joined",))
AT_7, AT_9 = {"t": {"0": 7}}, {"t": {"0": 9}}
BOTH = frozenset({"a", "b"})


def test_every_input_goes_on_where_it_stood() -> None:
    saved = [SavedChain(JOINED, {"a": 5, "b": 7}, ("out",))]
    begun = begin_chain(JOINED, ("out",), saved, BOTH)
    assert (begun.positions, begun.states) == ({"a": 5, "b": 7}, {"left": "joined", "joined": "joined"})
    assert begin_chain(JOINED, ("out",), saved, {"b"}).positions == {"b": 7}


def test_chains_of_different_sources_may_be_joined() -> None:
    saved = [
        SavedChain(Chain(("a",), ("left",), ("left",)), {"a": 5}, ("old",)),
        SavedChain(Chain(("b",), (), ("copy",)), {"b": AT_7}),
        SavedChain(Chain(("b",), (), ("more",)), {"b": AT_9}),
    ]
    begun = begin_chain(JOINED, ("new",), saved, BOTH)
    assert (begun.positions, begun.states) == ({"a": 5, "b": AT_7}, {"left": "left"})
    # What the sink has read of a source decides.
    assert begin_chain(JOINED, ("more",), saved, BOTH).positions == {"a": 5, "b": AT_9}


def test_parts_that_stood_at_different_places_cannot_be_joined() -> None:
    saved = [
        SavedChain(Chain(("a",), ("left",), ("left",)), {"a": 5}, ("old",)),
        SavedChain(Chain(("a", "b"), ("joined",), ("joined",)), {"a": 6, "b": 7}, ("out",)),
    ]
    with pytest.raises(ValueError, match="'left' and 'joined'"):
        begin_chain(JOINED, ("out",), saved, BOTH)


def test_two_scans_of_a_source_have_places_of_their_own() -> None:
    twice = Chain(("a", "a#2"), ("joined",), ("joined",))
    saved = [SavedChain(twice, {"a": 5, "a#2": 6}, ("out",))]
    assert begin_chain(twice, ("out",), saved, BOTH).positions == {"a": 5, "a#2": 6}
    once = [SavedChain(Chain(("a",), ("joined",), ("joined",)), {"a": 5}, ("out",))]
    assert begin_chain(twice, ("out",), once, BOTH).positions == {"a": 5, "a#2": 5}
