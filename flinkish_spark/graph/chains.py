"""The chains of a stream graph: what Spark runs on its own, from sources to the end of a stream."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from flinkish_spark.errors import GraphError
from flinkish_spark.graph.stream_graph import (
    KeyedNode,
    Leg,
    SinkNode,
    SourceNode,
    StreamGraph,
    StreamNode,
    feeds,
    legs,
    operator_of,
    scans_of,
)
from flinkish_spark.protocol.scans import Chain, input_names, source_of

if TYPE_CHECKING:
    from flinkish_spark.graph.planned import PlannedJob


def chains_to(graph: StreamGraph, node: StreamNode) -> tuple[tuple[Chain, tuple[Leg, ...]], ...]:
    """Return the chains whose ends a stream is, each with the ways that are its end.

    All ways from sources to sinks without an operator on them are one chain. An operator's outputs are ends
    of the operator's chain, whoever reads them: transforms behind it are no part of the plan.

    Raises
    ------
    GraphError
        An operator would run twice in one chain.
    """
    ways = legs(node)
    plain = tuple(leg for leg in ways if isinstance(leg.base, SourceNode))
    found: list[tuple[Chain, tuple[Leg, ...]]] = []
    if plain:
        sources = [leg.base.uid for leg in plain if isinstance(leg.base, SourceNode)]
        readers = tuple(sink.uid for sink in graph.sinks if sink.parent is node)
        found.append((Chain(input_names(sources), (), readers), plain))
    for leg in ways:
        operator = operator_of(leg.base)
        if operator is not None:
            found.append((_chain_of(operator), (leg,)))
    return tuple(found)


def chains_of_sink(graph: StreamGraph, sink: SinkNode) -> tuple[Chain, ...]:
    """Return the chains whose ends a sink reads, in the order of its parts."""
    return tuple(chain for chain, _ in chains_to(graph, sink.parent))


def read_by(planned: PlannedJob) -> dict[Chain, tuple[str, ...]]:
    """Return each chain of a plan with the uids of the sinks that read its end, in the plan's order."""
    return {
        chain: tuple(sink.uid for sink in planned.sinks if stream in sink.streams)
        for stream, chain in enumerate(planned.chains)
    }


def inputs_of(graph: StreamGraph) -> tuple[str, ...]:
    """Return the names of all inputs of a job's chains, those of the same source one behind the other."""
    names = {name for sink in graph.sinks for chain in chains_of_sink(graph, sink) for name in chain.inputs}
    order = [source.uid for source in graph.sources]
    known = {uid: place for place, uid in enumerate(order)}
    return tuple(sorted(names, key=lambda name: (known[source_of(name)], len(name), name)))


def _chain_of(operator: KeyedNode) -> Chain:
    operators = [node.uid for node in _operators(operator)]
    twice = next((uid for uid, count in Counter(operators).items() if count > 1), None)
    if twice is not None:
        raise GraphError(
            f"operator '{operator.uid}' reads '{twice}' on two ways, and another keyed operator lies on one",
            why="Spark would run that operator, and keep its state, once for each of them, and over other "
            "records",
            what_to_do="let one operator do what those on the two ways do; or write the output of "
            f"'{twice}' to a Kafka topic, and read that with a job of its own (docs/chained-jobs.md)",
            uid=operator.uid,
        )
    inputs = input_names([source.uid for source in scans_of(operator)])
    return Chain(inputs, tuple(operators), (operator.uid,))


def _operators(node: KeyedNode) -> list[KeyedNode]:
    """Return an operator behind all those that it reads, directly or not."""
    upstream = [operator_of(feed.base) for feed in feeds(node)]
    found = [one for operator in upstream if operator is not None for one in _operators(operator)]
    return [*found, node]
