"""The rule that lets operators over sources share tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flinkish_spark.planning.logical_plan import LogicalPlan, Reader, TaskGroup
from flinkish_spark.planning.rules.cut_chains import find_chain
from flinkish_spark.planning.stream_graph import (
    KeyedNode,
    QueryNode,
    find_operator,
    find_operator_scans,
    find_upstreams,
)
from flinkish_spark.protocol.plan_layout import Chain


def share_tasks(plan: LogicalPlan) -> LogicalPlan:
    """Note the groups of operators that share tasks; a live log keeps its groups."""
    if not plan.may_share:
        return plan
    recorded = {} if plan.recorded is None else {one.chain: one for one in plan.recorded.states}
    groups = []
    for operators in _group_by_slot_sharing(plan):
        together: dict[int | None, list[tuple[int, KeyedNode, Chain]]] = {}
        for operator in operators:
            chain = find_chain(plan.graph, operator)
            lies = recorded.get(chain.name)
            number, place = (None, 0) if lies is None else (lies.number, lies.place)
            together.setdefault(number, []).append((place, operator, chain))
        for members in together.values():
            # In the order of the live log; in a new log, in the order of the program.
            members.sort(key=lambda one: one[0])
            groups.append(_make_group([(operator, chain) for _, operator, chain in members]))
    return replace(plan, groups=tuple(groups))


def _group_by_slot_sharing(plan: LogicalPlan) -> Iterator[Sequence[KeyedNode]]:
    """Yield the operators of each group that read sources and that only sinks read."""
    # A single operator makes no group, unless it reads a source several times, which is then scanned once.
    groups: dict[str, list[KeyedNode]] = {}
    for chain, base in {end.chain: end.paths[0].base for end in plan.all_ends}.items():
        operator = find_operator(base)
        # A query is planned for each chain, so its readers have scans of their own.
        if operator is not None and len(chain.operators) == 1 and not _reads_query(operator):
            groups.setdefault(plan.graph.slot_sharing.get(operator.uid, "default"), []).append(operator)
    for group in groups.values():
        sources = [scan.source for scan in find_operator_scans(group[0])]
        if len(group) > 1 or len(set(map(id, sources))) < len(sources):
            yield group


def _reads_query(operator: KeyedNode) -> bool:
    return any(isinstance(upstream.base, QueryNode) for upstream in find_upstreams(operator))


def _make_group(members: Sequence[tuple[KeyedNode, Chain]]) -> TaskGroup:
    readers = []
    for place, (operator, chain) in enumerate(members):
        named = zip(find_upstreams(operator), chain.inputs, strict=True)
        inputs = sorted(
            ((upstream.inputs[0], name) for upstream, name in named), key=lambda one: one[0].entry
        )
        readers += [
            Reader(place, number, operator, chain, name, one.entry, one.paths[0])
            for number, (one, name) in enumerate(inputs)
        ]
    return TaskGroup(tuple(members), tuple(readers))
