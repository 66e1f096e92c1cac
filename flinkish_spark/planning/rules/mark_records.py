"""The rule that lets barriers come from the source itself, if possible."""

from __future__ import annotations

from dataclasses import replace

from flinkish_spark.planning.logical_plan import LogicalPlan


def mark_records(plan: LogicalPlan) -> LogicalPlan:
    """Note whether barriers may come from the source itself."""
    # Several scans that meet would each put a barrier into the micro-batch for which *they* saw the trigger.
    # The planner finds out whether control rows can pass all steps, after Spark's analysis.
    sources = plan.graph.sources
    is_plain = len(sources) == 1 and not sources[0].source.has_side_outputs
    is_straight = all(len(end.chain.inputs) == 1 for end in plan.all_ends)
    has_unions = any(sum(len(end.paths) for end in ends) > 1 for ends in plan.ends.values())
    return replace(plan, marks_records=is_plain and is_straight and not has_unions)
