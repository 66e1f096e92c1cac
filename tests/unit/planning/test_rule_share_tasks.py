"""Which operators share tasks: those of one group that read sources, and that only sinks read."""

from __future__ import annotations

from flinkish_spark.planning.logical_plan import LogicalPlan
from flinkish_spark.planning.rules.cut_chains import cut_chains
from flinkish_spark.planning.rules.share_tasks import share_tasks
from flinkish_spark.planning.stream_graph import StreamGraph, UnionNode
from flinkish_spark.protocol.plan_layout import OperatorInstance, PlanLayout
from tests.support.stream_graphs import graph, keyed, source, transform

A, B = source("a"), source("b")


def plan(made: StreamGraph, recorded: PlanLayout | None = None) -> LogicalPlan:
    return share_tasks(cut_chains(LogicalPlan(made, recorded=recorded)))


def uids(made: StreamGraph, recorded: PlanLayout | None = None) -> list[list[str]]:
    return [[operator.uid for operator, _ in group.members] for group in plan(made, recorded).groups]


def layout(*groups: tuple[str, ...]) -> PlanLayout:
    """Of a live log, by the operators that lie together in it."""
    instances = tuple(OperatorInstance(uid, uid) for group in groups for uid in group)
    return PlanLayout((), instances, tuple(group for group in groups if len(group) > 1))


def test_operators_over_sources_share_tasks_whatever_they_read() -> None:
    one, two, three = keyed("one", A), keyed("two", transform(A)), keyed("three", B)
    assert uids(graph(one, transform(two), three)) == [["one", "two", "three"]]
    assert uids(graph(A, one)) == [], "one alone has its tasks"


def test_one_alone_that_reads_a_source_twice_reads_it_once() -> None:
    twice = keyed("twice", UnionNode((transform(A), A)), B)
    (group,) = plan(graph(twice)).groups
    assert [(one.place, one.number, one.entry, one.name) for one in group.readers] == [
        (0, 0, 0, "a"),
        (0, 1, 0, "a#2"),
        (0, 2, 1, "b"),
    ]
    assert [len(one.path.steps) for one in group.readers] == [1, 0, 0]


def test_paths_are_numbered_by_entry() -> None:
    shared = UnionNode((A, B))
    (group,) = plan(graph(keyed("one", shared, A), keyed("two", A))).groups
    assert [(one.place, one.number, one.entry, one.name) for one in group.readers] == [
        (0, 0, 0, "a"),
        (0, 1, 0, "b"),
        (0, 2, 1, "a#2"),
        (1, 0, 0, "a"),
    ]


def test_who_reads_or_is_read_by_another_operator_has_tasks_of_its_own() -> None:
    first = keyed("first", A)
    assert uids(graph(keyed("second", first), keyed("one", A), keyed("two", A))) == [["one", "two"]]
    assert uids(graph(first, keyed("second", first))) == []


def test_only_operators_of_one_slot_sharing_group_share() -> None:
    made = graph(*(keyed(uid, A) for uid in ("one", "slow", "two", "slower", "alone")))
    made.slot_sharing.update({"slow": "heavy", "slower": "heavy", "alone": "own"})
    assert uids(made) == [["one", "two"], ["slow", "slower"]]


def test_a_log_that_has_begun_goes_on_with_those_that_it_has_together() -> None:
    made = graph(*(keyed(uid, A) for uid in ("one", "two", "three", "new")))
    assert uids(made, layout(("three", "one"), ("two",))) == [["three", "one"], ["two"], ["new"]]
    assert uids(made, layout(("one",), ("two",), ("three",))) == [], "one of before knew no sharing"
