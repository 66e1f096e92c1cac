"""The rule that finds the one place where each function and operator adds to accumulators."""

from __future__ import annotations

from dataclasses import replace

from flinkish_spark.planning.logical_plan import Counting, LogicalPlan, find_operators_below, identify_counted
from flinkish_spark.planning.stream_graph import (
    Base,
    KeyedNode,
    Path,
    QueryNode,
    TransformNode,
    find_operator,
    find_upstreams,
)
from flinkish_spark.protocol.plan_layout import Chain


def count_functions(plan: LogicalPlan) -> LogicalPlan:
    """Note the first place of each function and operator in the plan: there it counts."""
    walk = _Walk(plan)
    for group in plan.groups:
        for reader in group.readers:
            walk.meet(reader.operator.uid, reader.operator, reader.chain)
        for scan in group.scans:
            for branch in scan.branches:
                walk.walk_path(branch[0].path, branch[0].chain)
    for end in plan.all_ends:
        for path in end.paths:
            walk.walk_path(path, end.chain)
    return replace(plan, counting=Counting(walk.first, walk.steps))


class _Walk:
    """A walk over all parts of a plan; its order matters, since the numbers are stored."""

    def __init__(self, plan: LogicalPlan) -> None:
        self._lines = plan.lines
        self._seen = {(operator, chain) for group in plan.groups for operator, chain in group.members}
        self.first: dict[object, tuple[object, Chain]] = {}
        self.steps: dict[int, int] = {}

    def meet(self, known_as: object, node: object, chain: Chain) -> None:
        if known_as is not None:
            self.first.setdefault(known_as, (node, chain))

    def walk_path(self, path: Path, chain: Chain) -> None:
        for operator in find_operators_below(path.base):
            self.meet(operator.uid, operator, chain)
        for step in path.steps:
            self.meet(identify_counted(step), step, chain)
        self._walk_base(path.base, chain)
        self._number_steps(path)

    def _walk_base(self, base: Base, chain: Chain) -> None:
        if isinstance(base, QueryNode):
            for path in base.paths:
                self.walk_path(path, chain)
        operator = find_operator(base)
        if operator is None or (operator, chain) in self._seen:
            return
        line = self._lines.get(chain.name)
        operators = (operator,) if line is None else tuple(one.operator for one in line)
        self._seen |= {(one, chain) for one in operators}
        for one in operators:
            self._walk_operator(one, chain)

    def _walk_operator(self, operator: KeyedNode, chain: Chain) -> None:
        for upstream in find_upstreams(operator):
            if find_operator(upstream.base) is None:
                self.meet(operator.uid, operator, chain)
                self.walk_path(upstream.paths[0], chain)
                continue
            for path in upstream.paths:
                self._number_steps(path)
                for step in path.steps:
                    self.meet(identify_counted(step), step, chain)
            for one in upstream.inputs:
                self._walk_base(one.base, chain)
        self.meet(operator.uid, operator, chain)

    def _number_steps(self, path: Path) -> None:
        # A final step that assigns times has no number: only functions need one.
        last = max((at for at, step in enumerate(path.steps) if isinstance(step, TransformNode)), default=-1)
        for step in path.steps[: last + 1]:
            self.steps.setdefault(id(step), len(self.steps))
