"""The optimizer, which makes a logical plan of a stream graph by rules; each rule decides one thing.

A rule is a function from a logical plan to a logical plan; it uses no session and no DataFrame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flinkish_spark.planning.beginning import NOTHING, Beginning
from flinkish_spark.planning.logical_plan import (
    LogicalPlan,
)
from flinkish_spark.planning.rules.count_functions import count_functions
from flinkish_spark.planning.rules.cut_chains import cut_chains
from flinkish_spark.planning.rules.find_evaluations import find_evaluations
from flinkish_spark.planning.rules.mark_records import mark_records
from flinkish_spark.planning.rules.pass_streams import pass_streams
from flinkish_spark.planning.rules.share_scans import share_scans
from flinkish_spark.planning.rules.share_tasks import share_tasks
from flinkish_spark.planning.stream_graph import (
    StreamGraph,
    StreamNode,
)
from flinkish_spark.protocol.plan_layout import PlanLayout

Rule = Callable[[LogicalPlan], LogicalPlan]

#: The order matters. All rules use the chains. Only operators that share tasks share scans. A function counts
#: at its first place in the plan, so the last rule must see the results of all others.
RULES: tuple[Rule, ...] = (
    cut_chains,
    mark_records,
    share_tasks,
    share_scans,
    pass_streams,
    find_evaluations,
    count_functions,
)


def optimize(
    graph: StreamGraph, beginning: Beginning = NOTHING, recorded: PlanLayout | None = None
) -> LogicalPlan:
    """Return the logical plan of a job; `recorded` is the layout of the live log, if there is one."""
    plan = LogicalPlan(graph, beginning, recorded)
    for rule in RULES:
        plan = rule(plan)
    return plan


def plan_of_stream(graph: StreamGraph, node: StreamNode) -> LogicalPlan:
    """Return the logical plan of one stream outside of a job: nothing in it is shared or marked."""
    # No chain has begun, so each operator read is a chain of its own, which is planned apart.
    alone = replace(graph.end_at(node), begun_chains=frozenset())
    return count_functions(pass_streams(cut_chains(LogicalPlan(alone))))
