"""The rule that cuts a program into chains: what Spark runs on its own, with positions and state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.planning.logical_plan import End, LogicalPlan
from flinkish_spark.planning.rules.defer_transforms import deferred_from, sharing
from flinkish_spark.planning.stream_graph import (
    KeyedNode,
    Path,
    SinkNode,
    StreamGraph,
    StreamNode,
    operator_of,
    operator_scans,
    operators_upto,
    paths_to,
    upstreams,
)
from flinkish_spark.planning.transforms import has_frames_first
from flinkish_spark.protocol.plan_layout import Chain, input_names, source_of


def cut_chains(plan: LogicalPlan) -> LogicalPlan:
    """Note the chains whose ends each sink reads."""
    ends = {
        sink.uid: tuple(End(chain, paths) for chain, paths in chains_to(plan.graph, sink.parent))
        for sink in plan.graph.sinks
    }
    return replace(plan, ends=ends)


def chains_to(graph: StreamGraph, node: StreamNode) -> tuple[tuple[Chain, tuple[Path, ...]], ...]:
    """Return the chains whose ends a stream is, each with the paths that are its end."""
    # All paths from sources to sinks without an operator on them are one chain. An operator's outputs are
    # ends of the operator's chain, whoever reads them: transforms behind it are no part of the plan. So it is
    # with the outputs of an async operator behind a source, if several sinks read them.
    paths = paths_to(node)
    plain = tuple(path for path in paths if isinstance(path.base, SourceNode))
    found: list[tuple[Chain, tuple[Path, ...]]] = []
    if plain:
        sources = [path.base.uid for path in plain if isinstance(path.base, SourceNode)]
        is_shared = deferred_from(graph, plain[0], len(paths)) is not None
        together = sharing(graph, plain[0]) if is_shared else ()
        readers = tuple(sink.uid for sink in graph.sinks if sink.parent is node or sink in together)
        found.append((Chain(input_names(sources), (), readers), plain))
    for path in paths:
        operator = operator_of(path.base)
        if operator is not None:
            found.append((chain_of(graph, operator), (path,)))
    return tuple(found)


def chains_of_sink(graph: StreamGraph, sink: SinkNode) -> tuple[Chain, ...]:
    return tuple(chain for chain, _ in chains_to(graph, sink.parent))


def inputs_of(graph: StreamGraph) -> tuple[str, ...]:
    """Return the names of all inputs of a job's chains, those of the same source one behind the other."""
    names = {name for sink in graph.sinks for chain in chains_of_sink(graph, sink) for name in chain.inputs}
    order = [source.uid for source in graph.sources]
    known = {uid: place for place, uid in enumerate(order)}
    return tuple(sorted(names, key=lambda name: (known[source_of(name)], len(name), name)))


def chain_of(graph: StreamGraph, operator: KeyedNode) -> Chain:
    return _chain(ends_with(graph, operator))


def ends_with(graph: StreamGraph, operator: KeyedNode) -> tuple[KeyedNode, ...]:
    """Return the operators that sinks read in the chain of one of them, in the order of the sinks."""
    # What an operator makes for sinks and for others stands in one chain, so that it runs once. A job goes on
    # with the chains that it has begun with.
    together = next((ends for ends in _ends(tuple(graph.sinks)) if operator in ends), (operator,))
    if graph.begun_chains is None:
        return together
    begun = [end.uid for end in together if end.uid in graph.begun_chains]
    return together if begun == list(_chain(together).consumers) else (operator,)


def _chain(ends: tuple[KeyedNode, ...]) -> Chain:
    inputs = input_names([scan.source.uid for scan in operator_scans(*ends)])
    operators = tuple(node.uid for node in operators_upto(*ends))
    return Chain(inputs, operators, operators[-1:])


@lru_cache(maxsize=16)
def _ends(sinks: tuple[SinkNode, ...]) -> tuple[tuple[KeyedNode, ...], ...]:
    """Return the operators that sinks read, those together that read one operator, or each other."""
    read = dict.fromkeys(operator_of(path.base) for sink in sinks for path in paths_to(sink.parent))
    found: list[tuple[set[KeyedNode], list[KeyedNode]]] = []
    for end in read:
        if end is None:
            continue
        below, ends = set(operators_upto(end)), [end]
        for other in [one for one in found if not one[0].isdisjoint(below)]:
            if _go_in_line(below | other[0]):
                found.remove(other)
                below |= other[0]
                ends = [*other[1], *ends]
        found.append((below, ends))
    order = list(read)
    return tuple(tuple(sorted(ends, key=order.index)) for _, ends in found)


def _go_in_line(operators: Iterable[KeyedNode]) -> bool:
    """Whether operators can stand one behind the other, so that rows of one pass the next."""
    # A transform() between two of them that stands first on no path of its own would get the rows of all.
    inputs = (input_ for one in operators for upstream in upstreams(one) for input_ in upstream.inputs)
    between = (input_ for input_ in inputs if operator_of(input_.paths[0].base) is not None)
    return all(map(has_frames_first, between))
