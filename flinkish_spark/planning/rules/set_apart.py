"""Keep functions in tasks of their own, where the program says so; asked while paths are translated."""

from __future__ import annotations

from collections.abc import Sequence

from flinkish_spark.planning.partitioning import Narrow, is_partitioning
from flinkish_spark.planning.stream_graph import (
    Step,
    StreamGraph,
    TransformNode,
)
from flinkish_spark.protocol.job_graph import ChainingStrategy


def is_set_apart(graph: StreamGraph, steps: Sequence[Step]) -> bool:
    """Whether the program keeps the last of some steps from those before, so that there is a shuffle."""
    # Not where there is one anyway: behind `rebalance` and the like, and before a function with a number of
    # tasks of its own.
    *before, step = steps
    front = before[-1] if before else None
    if isinstance(step, TransformNode):
        settings = getattr(step.function, "settings", None)
        if is_partitioning(step.function) or getattr(settings, "parallelism", None) is not None:
            return False
    if isinstance(front, TransformNode) and is_partitioning(front.function):
        return isinstance(front.function, Narrow) and is_set_apart(graph, [*before[:-1], step])
    return (
        graph.chained_of(front) is ChainingStrategy.NEVER
        or graph.chained_of(step) is not ChainingStrategy.ALWAYS
    )
