"""The chains of a stream graph: what Spark runs on its own, from a source to the end of a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flinkish_spark.graph.stream_graph import KeyedNode, SourceNode, StreamGraph, StreamNode
from flinkish_spark.protocol.scans import Chain

if TYPE_CHECKING:
    from flinkish_spark.graph.planner import PlannedJob


def chain_to(graph: StreamGraph, node: StreamNode) -> Chain:
    """Return the chain that ends in `node`."""
    operators: list[str] = []
    at = node
    while not isinstance(at, SourceNode):
        if isinstance(at, KeyedNode):
            operators.insert(0, at.uid)
        at = at.parent
    readers = tuple(sink.uid for sink in graph.sinks if sink.parent is node)
    # Transforms behind an operator are no part of the plan, so all that reads the operator is one chain.
    return Chain(at.uid, tuple(operators), (operators[-1],) if operators else readers)


def read_by(planned: PlannedJob) -> dict[Chain, tuple[str, ...]]:
    """Return each chain of a plan with the uids of the sinks that read its end, in the plan's order."""
    return {
        chain: tuple(sink.uid for sink in planned.sinks if sink.stream == stream)
        for stream, chain in enumerate(planned.chains)
    }
