"""The rule that keeps functions in tasks of their own; the planner asks it for each step."""

from __future__ import annotations

from collections.abc import Sequence

from flinkish_spark.planning.partitioning import Rescale, is_partitioning
from flinkish_spark.planning.stream_graph import Step, StreamGraph, TransformNode
from flinkish_spark.protocol.job_graph import ChainingStrategy


def is_set_apart(graph: StreamGraph, steps: Sequence[Step]) -> bool:
    """Return whether the program asks for a shuffle before the last of these steps."""
    # No if there is a shuffle anyway: after `rebalance` and the like, and before a function with its own
    # parallelism.
    *before, step = steps
    front = before[-1] if before else None
    if isinstance(step, TransformNode):
        settings = getattr(step.function, "settings", None)
        if is_partitioning(step.function) or getattr(settings, "parallelism", None) is not None:
            return False
    if isinstance(front, TransformNode) and is_partitioning(front.function):
        return isinstance(front.function, Rescale) and is_set_apart(graph, [*before[:-1], step])
    return (
        graph.find_chaining(front) is ChainingStrategy.NEVER
        or graph.find_chaining(step) is not ChainingStrategy.ALWAYS
    )
