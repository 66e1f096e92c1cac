"""Where each function adds to accumulators, if it runs in several places; and as what."""

from __future__ import annotations

from typing import Any

from flinkish_spark import MapFunction
from flinkish_spark.planning.logical_plan import LogicalPlan
from flinkish_spark.planning.optimizer import optimize, plan_of_stream
from flinkish_spark.planning.stream_graph import (
    KeyedEntry,
    KeyedNode,
    KeyFunction,
    Path,
    StreamNode,
    TransformNode,
    UnionNode,
    find_paths,
    find_upstreams,
)
from flinkish_spark.planning.transforms import make_map
from flinkish_spark.protocol.plan_layout import Chain
from tests.support.stream_graphs import NOTHING, graph, keyed, source, timed, transform

A, B = source("a"), source("b")


class Counted(MapFunction):
    def map(self, value: Any) -> Any:
        return value


def counted(parent: StreamNode) -> TransformNode:
    return TransformNode(parent, make_map(Counted(), "user STRING", None))


def said(plan: LogicalPlan, path: Path, chain: Chain, *names: str) -> str:
    """As what the last function of a path counts in a chain."""
    step = path.steps[-1]
    assert isinstance(step, TransformNode)
    function: Any = plan.counting.mark_step(step, chain, path, *names).function
    return str(function.function.counts_as)


def test_a_function_counts_in_the_first_chain_that_the_plan_comes_by() -> None:
    one = counted(timed(A))
    plan = optimize(graph(one, keyed("first", one), keyed("second", one)))
    of_sink, of_first, of_second = (end.chain for end in plan.all_ends)
    (path,) = find_paths(one)
    # Operators that share tasks are planned before all sinks.
    assert said(plan, path, of_first, "a") == "function 0002/first/a,a,0.1"
    assert said(plan, path, of_second, "a") == said(plan, path, of_sink, "a") == ""
    assert plan.counting.find_counts(path, of_first) == (True,) != plan.counting.find_counts(path, of_second)


def test_functions_behind_common_steps_count_in_the_chain_of_their_reader() -> None:
    common = counted(A)
    own, other = counted(common), counted(common)
    plan = optimize(graph(keyed("first", own), keyed("second", other)))
    first, second = (end.chain for end in plan.all_ends)
    assert said(plan, *find_paths(common), first) and not said(plan, *find_paths(common), second)
    assert said(plan, *find_paths(own), first) == "function 0003/first/a,0.1"
    assert said(plan, *find_paths(other), second) == "function 0004/second/a,0.2"


def test_a_function_on_two_paths_counts_on_each_under_a_name_of_its_own() -> None:
    step = counted(UnionNode((A, B)))
    plan = optimize(graph(keyed("both", step)))
    (end,) = plan.all_ends
    assert [said(plan, path, end.chain, path.base.uid) for path in find_paths(step)] == [
        "function 0001/both/a,a,0",
        "function 0001/both/b,b,0",
    ]


def test_functions_between_two_operators_know_their_entry_and_path() -> None:
    first = keyed("first", A)
    between = counted(UnionNode((first, transform(first))))
    second = keyed("second", B, between)
    plan = optimize(graph(second))
    (end,) = plan.all_ends
    (upstream,) = (one for one in find_upstreams(second) if one.base is first)
    steps: list[Any] = [path.steps[-1] for path in plan.counting.mark_upstream(upstream, end.chain).paths]
    assert [step.function.function.counts_as for step in steps] == [
        "function 0002/second/1,0,first,0",
        "function 0002/second/1,1,first,1.0",
    ]


def test_operators_and_their_key_functions_count_once() -> None:
    key = KeyFunction(lambda one: one, None, NOTHING)
    first = KeyedNode("first", (KeyedEntry(A, (key,)),), NOTHING, None, 4)
    made = graph(first, keyed("second", first))
    made.begun_chains = frozenset({"first", "second"})
    plan = optimize(made)
    alone, in_front = (end.chain for end in plan.all_ends)
    counting = plan.counting
    assert (counting.find_counter_id(first, alone), counting.find_counter_id(first, in_front)) == (
        "first/first",
        "",
    )
    entries = [counting.mark_entry(first, 0, chain, "feed 0") for chain in (alone, in_front)]
    assert [key.counts_as for entry in entries for key in entry.keys if isinstance(key, KeyFunction)] == [
        "first/first/keys 0 feed 0",
        "",
    ]


def test_the_side_outputs_of_a_function_are_not_counted_again() -> None:
    one = counted(A)
    other = TransformNode(A, one.function)
    plan = optimize(graph(one, other))
    first, second = (end.chain for end in plan.all_ends)
    assert said(plan, *find_paths(one), first) and not said(plan, *find_paths(other), second)


def test_beside_a_job_an_operator_of_two_chains_counts_in_one_and_is_planned_apart() -> None:
    first = keyed("first", A)
    both = UnionNode((first, keyed("second", first)))
    plan = plan_of_stream(graph(first), both)
    counts = [plan.counting.find_counts(Path(first), end.chain) for end in plan.all_ends]
    assert counts == [(True,), (False,)]


def test_functions_without_a_context_never_count() -> None:
    plain = TransformNode(A, make_map(lambda one: one, "user STRING", None))
    plan = optimize(graph(plain))
    assert said(plan, *find_paths(plain), plan.all_ends[0].chain) == ""
