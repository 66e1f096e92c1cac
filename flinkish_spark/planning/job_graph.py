"""The job graph of a stream graph: which operators Spark runs in the same tasks, and why.

The planner translates the logical plan; this module describes the result. A test compares it with the plan
of a running query.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import Column

from flinkish_spark.contracts.operators import OperatorFactory
from flinkish_spark.contracts.source import Source, SourceNode
from flinkish_spark.planning.factories import BroadcastFunctions, FoldingWindows
from flinkish_spark.planning.logical_plan import LogicalPlan, Reader, TaskGroup
from flinkish_spark.planning.optimizer import optimize
from flinkish_spark.planning.partitioning import CustomPartitioning, Rebalance, Rescale, is_partitioning
from flinkish_spark.planning.rules.set_apart import is_set_apart
from flinkish_spark.planning.sink_rows import PlannedJob
from flinkish_spark.planning.stream_graph import (
    Base,
    Key,
    KeyedNode,
    KeyFunction,
    Path,
    QueryNode,
    SideNode,
    SinkNode,
    Step,
    StreamGraph,
    StreamNode,
    TimedNode,
    TransformNode,
    find_operator,
    find_paths,
    find_upstreams,
)
from flinkish_spark.planning.transforms import TransformSettings, find_frame_function
from flinkish_spark.protocol.job_graph import (
    ChainingReason,
    JobEdge,
    JobGraph,
    JobOperator,
    OperatorKind,
    RunsIn,
    ShipStrategy,
)
from flinkish_spark.protocol.plan_layout import Chain
from flinkish_spark.transport.routing import Distribution
from flinkish_spark.worker.broadcast_runner import UnkeyedCheckpointedFunction

#: Nodes that are operators of a job graph. Unions, moves and side outputs are parts of edges.
_Node = SourceNode | QueryNode | TransformNode | TimedNode | KeyedNode | SinkNode

_OF_STATE = {
    Distribution.BY_KEY: (ShipStrategy.HASH, ChainingReason.BY_KEY),
    Distribution.BY_CHANNEL: (ShipStrategy.CHANNEL, ChainingReason.BY_CHANNEL),
    Distribution.BROADCAST: (ShipStrategy.BROADCAST, ChainingReason.TO_ALL),
}


def describe_job(job: str, graph: StreamGraph, tasks: int, planned: PlannedJob | None = None) -> JobGraph:
    """Describe the operators that Spark runs for a program: those from which a path leads to a sink."""
    logical = optimize(graph) if planned is None else planned.logical
    return JobGraph(job, tuple(_JobGraphBuilder(logical, tasks, planned).describe_operators()))


def name_operators(graph: StreamGraph, tasks: int) -> None:
    """Set each function's id in the job graph; a function with several outputs has the id of the first."""
    known: set[int] = set()
    reading = _JobGraphBuilder(optimize(graph), tasks)
    for _ in reading.describe_operators():
        pass
    for node, own in reading.ids.items():
        settings = _find_settings(node)
        if settings is not None and id(settings) not in known:
            known.add(id(settings))
            settings.operator = own


def describe_stream(job: str, graph: StreamGraph, node: StreamNode, tasks: int) -> JobGraph:
    alone = graph.end_at(node)
    return JobGraph(job, tuple(_JobGraphBuilder(optimize(alone), tasks).describe_upstream(alone.sinks[0])))


@dataclass(frozen=True)
class _Passage:
    """A path from a source or an operator to the next operator with state, or to a sink."""

    path: Path
    end: KeyedNode | QueryNode | SinkNode
    #: Entry of the operator at its end, or number of the query's stream.
    entry: int = 0
    distribution: Distribution | None = None
    #: Index of the first step that each sink runs for itself; None if there is none.
    deferred_from: int | None = None
    #: Index of the first step that is not counted yet.
    counts_from: int = 0
    #: Index of the first step that runs in one pass with steps of other paths; None if there is none.
    branch_from: int | None = None

    @property
    def is_behind_state(self) -> bool:
        return find_operator(self.path.base) is not None

    def is_in_branch(self, at: int) -> bool:
        return self.branch_from is not None and at >= self.branch_from

    @property
    def moves(self) -> bool:
        return not (self.is_behind_state and isinstance(self.end, KeyedNode))


class _JobGraphBuilder:
    def __init__(self, plan: LogicalPlan, tasks: int, planned: PlannedJob | None = None) -> None:
        self._plan, self._graph, self._tasks, self._planned = plan, plan.graph, tasks, planned
        self._runs: Counter[_Node] = Counter()
        #: By target: the edges, each by its source, the entry, and the source's output.
        self._edges: dict[_Node, dict[tuple[_Node, int, str], JobEdge]] = {}
        self.ids: dict[_Node, str] = {}
        self._parallelism: dict[_Node, int | None] = {}
        self._read_plan()

    def describe_operators(self) -> Iterator[JobOperator]:
        yield from self._make_all(self._graph.sinks)
        yield from self._find_dead_letter_sinks()

    def describe_upstream(self, sink: SinkNode) -> Iterable[JobOperator]:
        return self._make_all(front for front, *_ in self._edges[sink])

    def _make_all(self, nodes: Iterable[_Node]) -> Iterable[JobOperator]:
        made: dict[_Node, JobOperator] = {}
        for node in nodes:
            self._make(node, made)
        return made.values()

    # -- the plan as the planner makes it; each part counts as often as it occurs there ----------------
    def _read_plan(self) -> None:
        seen: dict[Chain, set[KeyedNode]] = {}
        shared = {
            operator: passages
            for group in self._plan.groups
            for operator, passages in self._find_passages(group).items()
        }
        for sink in self._graph.sinks:
            self._runs[sink] += 1
            for end in self._plan.ends[sink.uid]:
                is_new = end.chain not in seen
                of_chain = seen.setdefault(end.chain, set())
                for path in end.paths:
                    operator = find_operator(path.base)
                    if operator in shared and is_new:
                        self._runs[operator] += 1
                        for passage in shared[operator]:
                            self._walk(passage)
                    elif operator not in shared and (operator is not None or is_new):
                        self._read_base(path.base, of_chain)
                    # Steps after an operator run on the evaluated micro-batch, for this sink.
                    counts = is_new or find_operator(path.base) is not None
                    counts_from = 0 if counts else len(path.steps)
                    self._walk(_Passage(path, sink, 0, None, end.deferred_from, counts_from))
        for source in self._graph.sources:
            self._runs[source] += len(source.source.side_uids(source.uid))

    def _find_passages(self, group: TaskGroup) -> Mapping[KeyedNode, list[_Passage]]:
        """Return the paths into operators that share tasks; count each shared scan once."""
        found: dict[KeyedNode, dict[str, _Passage]] = {operator: {} for operator, _ in group.members}
        for scan in group.scans:
            beside = [readers for readers in scan.branches if self._is_branch(readers[0])]
            alone = [[readers] for readers in scan.branches if readers not in beside]
            for branches in [beside, *alone] if beside else alone:
                source = branches[0][0].path.base
                assert isinstance(source, SourceNode)
                self._runs[source] += 1
                branch_from = scan.common if len(branches) > 1 else None
                for at, readers in enumerate(branches):
                    for one in readers:
                        counts_from = (
                            len(one.path.steps) if one is not readers[0] else scan.common if at else 0
                        )
                        spread = one.operator.entries[one.entry].distribution
                        found[one.operator][one.name] = _Passage(
                            one.path, one.operator, one.entry, spread, None, counts_from, branch_from
                        )
        return {
            operator: [found[operator][name] for name in chain.inputs] for operator, chain in group.members
        }

    def _is_branch(self, reader: Reader) -> bool:
        """Return whether a path runs in one pass with other paths of its scan, as the planner decided."""
        known = reader.operator.uid, reader.name
        return self._planned is None or any(known in own for own in self._planned.branches)

    def _read_base(self, base: Base, seen: set[KeyedNode]) -> None:
        if isinstance(base, SourceNode | QueryNode):
            self._runs[base] += 1
            if isinstance(base, QueryNode):
                for number, parent in enumerate(base.parents):
                    for path in find_paths(parent):
                        self._read_base(path.base, seen)
                        self._walk(_Passage(path, base, number))
            return
        operator = find_operator(base)
        assert operator is not None
        if operator in seen:
            # Read on several paths or by several sinks, but once in the plan.
            return
        seen.add(operator)
        self._runs[operator] += 1
        for upstream in find_upstreams(operator):
            self._read_base(upstream.base, seen)
            for input_ in upstream.inputs:
                entry = operator.entries[input_.entry]
                for path in input_.paths:
                    self._walk(_Passage(path, operator, input_.entry, entry.distribution))

    def _walk(self, passage: _Passage) -> None:
        """Add the edges of a path; a second sink of the same stream adds its last edge only."""
        base = passage.path.base
        front: _Node = base.parent if isinstance(base, SideNode) else base
        output = base.tag.name if isinstance(base, SideNode) else ""
        moved: list[ShipStrategy] = []
        for at, step in enumerate(passage.path.steps, start=1):
            if isinstance(step, TransformNode) and is_partitioning(step.function):
                moved += [_find_ship_strategy(step)] if passage.moves else []
                continue
            is_evaluated = passage.deferred_from is not None and at > passage.deferred_from
            runs = at > passage.counts_from or is_evaluated
            edge = self._make_edge(passage, front, passage.path.steps[:at], moved, output)
            self._note(front, step, edge, runs)
            self._runs[step] += runs
            front, output, moved = step, "", []
        self._note(front, passage.end, self._make_last_edge(passage, front, moved, output), True)

    def _make_edge(
        self,
        passage: _Passage,
        front: _Node,
        steps: Sequence[Step],
        moved: Sequence[ShipStrategy],
        output: str,
    ) -> JobEdge:
        step, at = steps[-1], len(steps) - 1
        if passage.moves:
            settings = _find_settings(step)
            if settings is not None and settings.parallelism is not None:
                return JobEdge("", ShipStrategy.REBALANCE, ChainingReason.OWN_TASKS, 0, output, tuple(moved))
            if is_set_apart(self._graph, steps):
                return JobEdge("", ShipStrategy.REBALANCE, ChainingReason.SAID, 0, output, tuple(moved))
            if moved:
                why = ChainingReason.MOVED if moved[-1].is_shuffle else ChainingReason.SAME_TASKS
                return JobEdge("", moved[-1], why, 0, output, tuple(moved[:-1]))
        both = _find_settings(front) is not None and _find_settings(step) is not None
        is_first = isinstance(front, KeyedNode) or passage.deferred_from == at
        if is_first and isinstance(passage.end, SinkNode):
            why = ChainingReason.EVALUATED
        elif passage.is_in_branch(at) and _find_settings(step) is not None:
            why = (
                ChainingReason.SAME_PASS if both and passage.is_in_branch(at - 1) else ChainingReason.BRANCHES
            )
        else:
            is_one_pass = self._ends_in_python(front) and self._begins_in_python(step)
            why = ChainingReason.SAME_PASS if is_one_pass else ChainingReason.SAME_TASKS
        return JobEdge("", ShipStrategy.FORWARD, why, 0, output)

    def _make_last_edge(
        self, passage: _Passage, front: _Node, moved: Sequence[ShipStrategy], output: str
    ) -> JobEdge:
        if passage.distribution is not None:
            ship, why = _OF_STATE[passage.distribution]
            return JobEdge("", ship, why, passage.entry, output, tuple(moved))
        if moved and moved[-1].is_shuffle:
            return JobEdge("", moved[-1], ChainingReason.MOVED, passage.entry, output, tuple(moved[:-1]))
        if isinstance(passage.end, QueryNode):
            why = ChainingReason.SAME_TASKS
            return JobEdge("", ShipStrategy.FORWARD, why, passage.entry, output, tuple(moved))
        if passage.is_behind_state and front is not find_operator(passage.path.base):
            return JobEdge("", ShipStrategy.FORWARD, ChainingReason.SAME_TASKS, 0, output, tuple(moved))
        return JobEdge("", ShipStrategy.FORWARD, ChainingReason.EVALUATED, 0, output, tuple(moved))

    def _note(self, front: _Node, behind: _Node, edge: JobEdge, counts: bool) -> None:
        """Add an edge; if another path has it too, keep the reason that holds on both."""
        there = self._edges.setdefault(behind, {})
        place = front, edge.entry, edge.output
        known = there.get(place, replace(edge, runs=0))
        kept = edge if known.why is ChainingReason.SAME_PASS else known
        there[place] = replace(kept, runs=known.runs + counts)

    def _is_in_arrow(self, node: _Node) -> bool:
        """Return whether a transform runs in the Arrow pass that reads records; only the planner knows."""
        return self._planned is not None and node in self._planned.in_arrow

    def _begins_in_python(self, node: _Node) -> bool:
        if isinstance(node, TimedNode):
            timestamps = node.strategy.timestamps
            return timestamps is not None and not isinstance(timestamps, str | Column)
        return _find_settings(node) is not None or self._is_in_arrow(node)

    def _ends_in_python(self, node: _Node) -> bool:
        if isinstance(node, TimedNode) and node.strategy.generator is not None:
            return True
        return self._begins_in_python(node)

    # -- operators ----------------------------------------------------------------------------------
    def _make(self, node: _Node, made: dict[_Node, JobOperator]) -> None:
        if node in made:
            return
        arriving = self._edges.get(node, {})
        for front, *_ in arriving:
            self._make(front, made)
        edges = [replace(edge, source=self.ids[front]) for (front, *_), edge in arriving.items()]
        if len(edges) > 1 and not isinstance(node, KeyedNode):
            edges = [
                replace(one, why=ChainingReason.STREAMS_MEET) if one.why.is_chained else one for one in edges
            ]
        self.ids[node] = self._make_id(node, edges)
        self._parallelism[node] = self._count_tasks(node, arriving)
        made[node] = self._describe(node, tuple(edges))

    def _describe(self, node: _Node, edges: tuple[JobEdge, ...]) -> JobOperator:
        keys: tuple[str, ...] = ()
        uid, groups, shares, settings = "", None, "", _find_settings(node)
        match node:
            case SourceNode():
                uid, kind, does = node.uid, OperatorKind.SOURCE, type(node.source).__name__
                name, is_python = self._graph.names.get(uid, uid), node.source.kind != Source.kind
            case KeyedNode():
                uid, kind, does = node.uid, OperatorKind.STATEFUL, _describe_function(node.function)
                name, is_python = self._graph.names.get(uid, uid), True
                keys = tuple(
                    dict.fromkeys(_describe_key(key) for entry in node.entries for key in entry.keys)
                )
                groups = node.max_parallelism
                for first, *others in ([one for one, _ in group.members] for group in self._plan.groups):
                    shares = _digest(["uid", first.uid]) if node in others else shares
            case QueryNode():
                uid, kind, does, is_python = node.uid, OperatorKind.TRANSFORM, "Spark query", False
                name = self._graph.names.get(uid, uid)
            case SinkNode():
                uid, kind, does = node.uid, OperatorKind.SINK, type(node.sink).__name__
                name, is_python = uid, True
            case TimedNode():
                kind, name, does = OperatorKind.TIMESTAMPS, "Timestamps/Watermarks", ""
                is_python = self._ends_in_python(node)
            case TransformNode() if settings is None:
                kind, does = OperatorKind.TRANSFORM, "DataFrame function"
                name, is_python = f"transform {_name_function(node.function)}", self._is_in_arrow(node)
            case TransformNode():
                assert settings is not None
                kind, is_python, side = OperatorKind.FUNCTION, True, getattr(node.function, "side", None)
                name = f"{settings.name} [{side}]" if side else settings.name
                function: Any = node.function
                does = function.does
        runs_in = RunsIn.PYTHON if is_python else RunsIn.JVM
        tasks, runs = self._parallelism[node], self._runs[node]
        own = self.ids[node]
        return JobOperator(own, uid, name, does, kind, runs_in, keys, tasks, groups, runs, edges, shares)

    def _make_id(self, node: _Node, edges: Sequence[JobEdge]) -> str:
        """Return an id that depends on the program only, so it is the same in every process."""
        if isinstance(node, SourceNode | QueryNode | KeyedNode | SinkNode):
            return _digest(["uid", node.uid])
        sort = "timestamps"
        if isinstance(node, TransformNode):
            sort = "transform" if _find_settings(node) is None else type(node.function).__name__
        place = [sort, [[e.source, e.ship.value, e.output, e.entry] for e in edges]]
        number = 0
        while (found := _digest([*place, number])) in self.ids.values():
            number += 1
        return found

    def _count_tasks(self, node: _Node, arriving: Mapping[tuple[_Node, int, str], JobEdge]) -> int | None:
        if isinstance(node, KeyedNode):
            return self._tasks
        settings = _find_settings(node)
        if settings is not None and settings.parallelism is not None:
            return int(settings.parallelism)
        if len(arriving) != 1 or isinstance(node, QueryNode):
            return None
        (((front, *_), edge),) = arriving.items()
        if edge.ship is ShipStrategy.GLOBAL:
            return 1
        if edge.ship.is_shuffle:
            before = node.parent if isinstance(node, TransformNode | TimedNode | SinkNode) else None
            moved = before.function if isinstance(before, TransformNode) else None
            asked = moved.parallelism if isinstance(moved, Rebalance | CustomPartitioning) else None
            return asked or self._tasks
        return None if edge.ship is ShipStrategy.RESCALE else self._parallelism[front]

    def _find_dead_letter_sinks(self) -> Iterator[JobOperator]:
        for source in self._graph.sources:
            for uid in source.source.side_uids(source.uid):
                front = self.ids.get(source) or _digest(["uid", source.uid])
                edge = JobEdge(front, ShipStrategy.FORWARD, ChainingReason.EVALUATED, output=uid)
                own, kind = _digest(["uid", uid]), OperatorKind.SINK
                yield JobOperator(own, uid, uid, "dead letters", kind, RunsIn.JVM, (), None, None, 1, (edge,))


def _find_settings(step: _Node) -> TransformSettings | None:
    if not isinstance(step, TransformNode) or find_frame_function(step) is not None:
        return None
    return getattr(step.function, "settings", None)


def _find_ship_strategy(step: TransformNode) -> ShipStrategy:
    match step.function:
        case Rescale():
            return ShipStrategy.RESCALE
        case CustomPartitioning():
            return ShipStrategy.CUSTOM
    return ShipStrategy.GLOBAL if step.function == Rebalance(1) else ShipStrategy.REBALANCE


def _describe_key(key: Key) -> str:
    if isinstance(key, KeyFunction):
        return "a function"
    return key if isinstance(key, str) else "an expression"


#: Display names of operators that no user's class names.
_OF_OURS = {
    "AggregatingColumns": "running aggregate",
    "CoFlatMapRecords": "flat_map with state",
    "CoMapRecords": "map with state",
    "FilterRecords": "filter with state",
    "FlatMapRecords": "flat_map with state",
    "FoldingColumns": "running fold",
    "MapRecords": "map with state",
    "ReducingColumns": "running reduce",
}


def _describe_function(function: object) -> str:
    match function:
        case OperatorFactory():
            return function.display_name
        case FoldingWindows():
            return type(function.spec.assigner).__name__
        case BroadcastFunctions() | UnkeyedCheckpointedFunction():
            return type(function.function).__name__
    name = type(function).__name__
    return _OF_OURS.get(name, name)


def _name_function(function: object) -> str:
    named = str(getattr(function, "__name__", type(function).__name__))
    return "(lambda)" if named == "<lambda>" else named


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]
