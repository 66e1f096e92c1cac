"""The rules in their order, over the programs whose job graphs are known; no session is near."""

from __future__ import annotations

from typing import Any

import pytest

from flinkish_spark import StreamExecutionEnvironment
from flinkish_spark.planning.logical_plan import LogicalPlan
from flinkish_spark.planning.optimizer import RULES, optimize, plan_of_stream
from tests.support.job_graphs import PROGRAMS, Session
from tests.support.stream_graphs import graph, keyed, record_function, source


def summary(plan: LogicalPlan) -> dict[str, Any]:
    """What a plan says, without the identities of nodes."""
    return {
        "ends": {
            sink: [(end.chain, [len(path.steps) for path in end.paths], end.deferred_from) for end in ends]
            for sink, ends in plan.ends.items()
        },
        "marks_records": plan.marks_records,
        "groups": [
            (
                [operator.uid for operator, _ in group.members],
                [(scan.common, [len(branch) for branch in scan.branches]) for scan in group.scans],
            )
            for group in plan.groups
        ],
        "lines": {
            chain: [(one.operator.uid, dict(one.names), len(one.passing)) for one in line]
            for chain, line in plan.lines.items()
        },
        "evaluations": plan.evaluations,
        "counting": (len(plan.counting.first), list(plan.counting.steps.values())),
    }


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_rules_depend_on_the_graph_and_on_rules_in_front_of_them_alone(program: Any) -> None:
    session: Any = Session()
    env = StreamExecutionEnvironment(session, "job", "/jobs/any")
    program(env)
    plan = again = optimize(env.graph)
    for rule in RULES:
        again = rule(again)
    assert summary(again) == summary(plan)


def test_each_rule_says_its_part_and_leaves_the_others_parts_alone() -> None:
    a = source("a")
    large = record_function(a)
    made = graph(keyed("one", a), keyed("two", large), keyed("three", keyed("first", a), keyed("last", a)))
    plan, changed = LogicalPlan(made), {}
    for rule in RULES:
        before, plan = plan, rule(plan)
        changed[rule.__name__] = {
            name for name, value in vars(plan).items() if value is not getattr(before, name)
        }
    assert changed == {
        "cut_chains": {"ends"},
        "mark_records": set(),
        "share_tasks": {"groups"},
        "share_scans": {"groups"},
        "pass_streams": {"lines"},
        "find_evaluations": {"evaluations"},
        "count_functions": {"counting"},
    }
    assert plan.graph is made


def test_beside_a_job_nothing_is_shared_or_marked() -> None:
    a = source("a")
    one, two = keyed("one", a), keyed("two", record_function(a))
    made = graph(one, two)
    assert optimize(made).groups and optimize(graph(a)).marks_records
    plan = plan_of_stream(made, one)
    assert (plan.groups, plan.marks_records, plan.evaluations) == ((), False, {})
    assert [end.chain.name for end in plan.all_ends] == ["one"]
