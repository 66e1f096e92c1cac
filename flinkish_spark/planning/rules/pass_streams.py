"""The rule that lets outputs of operators in a line pass the later operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flinkish_spark.planning.logical_plan import LineOperator, LogicalPlan
from flinkish_spark.planning.rules.cut_chains import find_chain_operators
from flinkish_spark.planning.stream_graph import (
    Base,
    KeyedNode,
    StreamGraph,
    collect_operators,
    find_operator,
    find_operator_scans,
    find_paths,
    find_upstreams,
    has_paths_that_meet,
)


def pass_streams(plan: LogicalPlan) -> LogicalPlan:
    """Note the operators of each chain that form a line, and the streams that pass each of them."""
    # Each operator is in the plan once. If a later operator or a sink reads an earlier operator, that stream
    # passes the operators between them, as another output.
    lines = {}
    for end in plan.all_ends:
        operator = find_operator(end.paths[0].base)
        if operator is not None:
            last = find_chain_operators(plan.graph, operator)
            if len(last) > 1 or has_paths_that_meet(last[0]):
                lines[end.chain.name] = tuple(_find_line(plan.graph, last, end.chain.inputs))
    return replace(plan, lines=lines)


def _find_line(
    graph: StreamGraph, last: Sequence[KeyedNode], inputs: Sequence[str]
) -> Iterator[LineOperator]:
    names: dict[KeyedNode, dict[int, tuple[str, ...]]] = {}
    for scan, name in zip(find_operator_scans(*last), inputs, strict=True):
        own = names.setdefault(scan.operator, {})
        own[scan.upstream] = (*own.get(scan.upstream, ()), name)
    of_sinks = {id(path.base) for sink in graph.sinks for path in find_paths(sink.parent)}
    operators, made = collect_operators(*last), list[Base]()
    for place, operator in enumerate(operators, start=1):
        behind = (upstream for one in operators[place:] for upstream in find_upstreams(one))
        read = of_sinks | {id(path.base) for upstream in behind for path in upstream.paths}
        passing = tuple(base for base in made if id(base) in read)
        yield LineOperator(operator, names.get(operator, {}), passing)
        made = [operator, *graph.find_sides(operator), *passing]
