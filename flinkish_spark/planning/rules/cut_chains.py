"""The rule that cuts the graph into chains, each of which ends where a sink reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from flinkish_spark.planning.logical_plan import (
    ChainEnd,
    LogicalPlan,
)
from flinkish_spark.planning.recorded_functions import find_recorded_functions
from flinkish_spark.planning.stream_graph import (
    Base,
    KeyedNode,
    Path,
    SinkNode,
    StreamGraph,
    StreamNode,
    TimedNode,
    collect_operators,
    find_operator,
    find_operator_scans,
    find_paths,
    find_scans,
    find_upstreams,
)
from flinkish_spark.planning.transforms import TransformSettings, has_frames_first
from flinkish_spark.protocol.plan_layout import Chain, make_input_names, source_of


def cut_chains(plan: LogicalPlan) -> LogicalPlan:
    ends = {sink.uid: find_chain_ends(plan.graph, sink.parent) for sink in plan.graph.sinks}
    return replace(plan, ends=ends)


def find_chain_ends(graph: StreamGraph, node: StreamNode) -> tuple[ChainEnd, ...]:
    # All paths from sources to a sink without an operator are one chain. An operator's outputs are ends of
    # the operator's chain, whoever reads them: transforms after it are no part of the plan. The same holds
    # for the outputs of a recorded function after a source, if several sinks read them.
    paths = find_paths(node)
    plain = tuple(path for path in paths if find_operator(path.base) is None)
    found: list[ChainEnd] = []
    if plain:
        deferred_from, sharing = _find_deferred(graph, plain[0]) if len(plain) == 1 else (None, ())
        together = sharing if len(paths) == 1 else ()
        readers = tuple(sink.uid for sink in graph.sinks if sink.parent is node or sink in together)
        sources = [source.uid for path in plain for source in find_scans(path.base)]
        found.append(ChainEnd(Chain(make_input_names(sources), (), readers), plain, deferred_from))
    for path in paths:
        operator = find_operator(path.base)
        if operator is not None:
            found.append(ChainEnd(find_chain(graph, operator), (path,)))
    return tuple(found)


# Streams from a source to sinks are chains of their own, each with its own scan. A recorded function whose
# outputs go to several sinks must see the same elements for all of them. So the chain ends before it, and
# each sink runs the following steps on the evaluated micro-batch, as after a keyed operator.
def _find_deferred(graph: StreamGraph, path: Path) -> tuple[int | None, tuple[SinkNode, ...]]:
    """Return the index of the first step that each sink runs for itself, and these sinks."""
    found = next(find_recorded_functions(path), None)
    if found is None:
        return None, ()
    sharing = tuple(sink for sink in graph.sinks if _reads(sink, path.base, found.settings))
    at = _find_step(path, found.settings)
    if at is None or len({id(sink.parent) for sink in sharing}) < 2:
        return None, ()
    return at, sharing


def _reads(sink: SinkNode, base: Base, settings: TransformSettings) -> bool:
    first, *more = find_paths(sink.parent)
    return not more and first.base is base and _find_step(first, settings) is not None


def _find_step(path: Path, settings: TransformSettings) -> int | None:
    """Return the index of a function on a path; None if absent, or if times are assigned after it."""
    functions = (getattr(step, "function", None) for step in path.steps)
    places = (at for at, one in enumerate(functions) if getattr(one, "settings", None) is settings)
    at = next(places, None)
    # A step that assigns times must be part of the plan.
    return None if at is None or any(isinstance(step, TimedNode) for step in path.steps[at:]) else at


def find_inputs(graph: StreamGraph) -> tuple[str, ...]:
    """Return the names of all inputs of a job's chains, grouped by source."""
    names = {
        name
        for sink in graph.sinks
        for end in find_chain_ends(graph, sink.parent)
        for name in end.chain.inputs
    }
    order = [source.uid for source in graph.sources]
    known = {uid: place for place, uid in enumerate(order)}
    return tuple(sorted(names, key=lambda name: (known[source_of(name)], len(name), name)))


def find_chain(graph: StreamGraph, operator: KeyedNode) -> Chain:
    return _make_chain(find_chain_operators(graph, operator))


def find_chain_operators(graph: StreamGraph, operator: KeyedNode) -> tuple[KeyedNode, ...]:
    """Return the operators that sinks read in the chain of one of them, in the order of the sinks."""
    # An operator that sinks and other operators read is in one chain, so that it runs once. A job keeps the
    # chains that it began with.
    together = next((ends for ends in _group_ends(tuple(graph.sinks)) if operator in ends), (operator,))
    if graph.begun_chains is None:
        return together
    begun = [end.uid for end in together if end.uid in graph.begun_chains]
    return together if begun == list(_make_chain(together).consumers) else (operator,)


def _make_chain(ends: tuple[KeyedNode, ...]) -> Chain:
    inputs = make_input_names([scan.source.uid for scan in find_operator_scans(*ends)])
    operators = tuple(node.uid for node in collect_operators(*ends))
    return Chain(inputs, operators, operators[-1:])


@lru_cache(maxsize=16)
def _group_ends(sinks: tuple[SinkNode, ...]) -> tuple[tuple[KeyedNode, ...], ...]:
    """Return the operators that sinks read, grouped if they read a common operator or each other."""
    read = dict.fromkeys(find_operator(path.base) for sink in sinks for path in find_paths(sink.parent))
    found: list[tuple[set[KeyedNode], list[KeyedNode]]] = []
    for end in read:
        if end is None:
            continue
        below, ends = set(collect_operators(end)), [end]
        for other in [one for one in found if not one[0].isdisjoint(below)]:
            if _can_form_line(below | other[0]):
                found.remove(other)
                below |= other[0]
                ends = [*other[1], *ends]
        found.append((below, ends))
    order = list(read)
    return tuple(tuple(sorted(ends, key=order.index)) for _, ends in found)


def _can_form_line(operators: Iterable[KeyedNode]) -> bool:
    """Return whether operators can form a line, in which each passes the rows of those before it."""
    # A transform() between two operators that is not first on a path of its own would get all paths' rows.
    inputs = (input_ for one in operators for upstream in find_upstreams(one) for input_ in upstream.inputs)
    between = (input_ for input_ in inputs if find_operator(input_.paths[0].base) is not None)
    return all(map(has_frames_first, between))
