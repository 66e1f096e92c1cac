"""The chains of a stream graph: what Spark runs on its own, from a source to the end of a stream."""

from __future__ import annotations

from flinkish_spark.graph.stream_graph import KeyedNode, SourceNode, StreamGraph, StreamNode
from flinkish_spark.protocol.scans import Chain


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
