"""The rule that ends a chain in front of an async operator whose outputs several sinks read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flinkish_spark.planning.async_calls import AsyncSettings, AsyncTransform, async_functions
from flinkish_spark.planning.logical_plan import LogicalPlan
from flinkish_spark.planning.stream_graph import (
    Path,
    SinkNode,
    StreamGraph,
    TimedNode,
    TransformNode,
    operator_of,
    paths_to,
)


def defer_transforms(plan: LogicalPlan) -> LogicalPlan:
    """Note with which step the part of a path begins that each sink does for itself."""
    ends = {
        sink: tuple(
            replace(one, deferred_from=deferred_from(plan.graph, one.paths[0], len(one.paths))) for one in own
        )
        for sink, own in plan.ends.items()
    }
    return replace(plan, ends=ends)


# Streams from a source to sinks are chains of their own, each with its own scan. An async operator whose
# outputs go to different sinks is to run over the same elements for all of them. So the chain ends in front
# of it, and what follows is done for each sink on the evaluated micro-batch, as behind a keyed operator.
def deferred_from(graph: StreamGraph, path: Path, paths: int) -> int | None:
    """Return the number of the step with which the part of a path begins that each sink runs for itself."""
    if paths > 1 or operator_of(path.base) is not None:
        return None
    found = next(async_functions(path), None)
    if found is None or len({id(sink.parent) for sink in sharing(graph, path)}) < 2:
        return None
    at = next(at for at, step in enumerate(path.steps) if _is_of(step, found.settings))
    # What gives times is planned.
    return None if any(isinstance(step, TimedNode) for step in path.steps[at:]) else at


def sharing(graph: StreamGraph, path: Path) -> tuple[SinkNode, ...]:
    """Return the sinks that read outputs of the first async operator on a path from a source."""
    found = next(async_functions(path), None)
    if found is None:
        return ()
    return tuple(sink for sink in graph.sinks if _reads(sink, path, found.settings))


def _reads(sink: SinkNode, path: Path, settings: AsyncSettings) -> bool:
    first, *more = paths_to(sink.parent)
    if more or first.base is not path.base:
        return False
    steps = first.steps
    at = next((at for at, step in enumerate(steps) if _is_of(step, settings)), None)
    return at is not None and not any(isinstance(step, TimedNode) for step in steps[at:])


def _is_of(step: object, settings: AsyncSettings) -> bool:
    function: Any = step.function if isinstance(step, TransformNode) else None
    return isinstance(function, AsyncTransform) and function.settings is settings
