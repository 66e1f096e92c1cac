"""The rule that finds where recorded functions run: several places may ask about the same elements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from flinkish_spark.contracts.calls import Evaluation
from flinkish_spark.planning.logical_plan import LogicalPlan
from flinkish_spark.planning.recorded_functions import find_input_name, find_recorded_functions
from flinkish_spark.planning.stream_graph import (
    KeyedNode,
    Path,
    collect_operators,
    find_operator,
    find_upstreams,
)
from flinkish_spark.protocol.plan_layout import Chain


def find_evaluations(plan: LogicalPlan) -> LogicalPlan:
    """Note, for each recorded function and path, the places where it is evaluated."""
    found: dict[tuple[str, str], list[Evaluation]] = defaultdict(list)
    for path, chain, reader, is_planned in _walk_paths(plan):
        for function in find_recorded_functions(path):
            one = Evaluation(chain, reader, is_planned)
            found[function.known_as, find_input_name(path)].append(one)
    return replace(plan, evaluations={known: tuple(own) for known, own in found.items()})


def _walk_paths(plan: LogicalPlan) -> Iterator[tuple[Path, Chain, str, bool]]:
    planned: dict[Chain, set[KeyedNode]] = {}
    for sink, ends in plan.ends.items():
        for end in ends:
            is_new = end.chain not in planned
            there = planned.setdefault(end.chain, set())
            for path in end.paths:
                operator = find_operator(path.base)
                if operator is not None or end.deferred_from is not None:
                    # Each sink runs its own steps on the evaluated micro-batch.
                    yield path, end.chain, sink, False
                elif is_new:
                    yield path, end.chain, end.chain.name, True
                operators = () if operator is None else collect_operators(operator)
                for node in (one for one in operators if one not in there):
                    there.add(node)
                    for upstream in find_upstreams(node):
                        yield from ((other, end.chain, node.uid, True) for other in upstream.paths)
