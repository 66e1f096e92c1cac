"""From the stream graph to the job graph: which operators Spark runs in the same tasks, and why.

The planner translates the logical plan, and this module says what that runs. A test compares it with the plan
of a running query.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pyspark.sql import Column

from flinkish_spark.connectors.two_phase import TwoPhaseCommitSink
from flinkish_spark.contracts.sink import Sink
from flinkish_spark.contracts.source import Source, SourceNode
from flinkish_spark.planning.async_calls import is_async
from flinkish_spark.planning.factories import (
    BroadcastFunctions,
    FoldingWindows,
    Joining,
    Patterns,
    Windows,
)
from flinkish_spark.planning.logical_plan import LogicalPlan, Reader, TaskGroup
from flinkish_spark.planning.optimizer import optimize
from flinkish_spark.planning.partitioning import ByPartitioner, Narrow, Spread, is_partitioning
from flinkish_spark.planning.rules.set_apart import is_set_apart
from flinkish_spark.planning.sink_rows import PlannedJob
from flinkish_spark.planning.stream_graph import (
    Base,
    Key,
    KeyedNode,
    KeyFunction,
    Path,
    SideNode,
    SinkNode,
    Step,
    StreamGraph,
    StreamNode,
    TimedNode,
    TransformNode,
    operator_of,
    upstreams,
)
from flinkish_spark.planning.transforms import TransformSettings, frame_function
from flinkish_spark.protocol.job_graph import (
    JobEdge,
    JobGraph,
    JobOperator,
    OperatorKind,
    RunsIn,
    ShipStrategy,
    Why,
)
from flinkish_spark.protocol.plan_layout import Chain
from flinkish_spark.transport.routing import Distribution
from flinkish_spark.worker.broadcast_runner import Checkpointed

#: Paths that are branches of one scan, by operator and input.
_Branches = tuple[tuple[tuple[str, str], ...], ...]
#: What stands in a job graph as an operator. Unions, moves and side outputs are parts of edges.
_Node = SourceNode | TransformNode | TimedNode | KeyedNode | SinkNode

_OF_STATE = {
    Distribution.BY_KEY: (ShipStrategy.HASH, Why.BY_KEY),
    Distribution.BY_CHANNEL: (ShipStrategy.CHANNEL, Why.BY_CHANNEL),
    Distribution.BROADCAST: (ShipStrategy.BROADCAST, Why.TO_ALL),
}


def job_graph(job: str, graph: StreamGraph, tasks: int, planned: PlannedJob | None = None) -> JobGraph:
    """Describe what Spark runs of a program; what leads to no sink is not in it."""
    if planned is None:
        return JobGraph(job, tuple(_Reading(optimize(graph), tasks).operators()))
    return JobGraph(job, tuple(_Reading(planned.logical, tasks, planned.branches).operators()))


def name_operators(graph: StreamGraph, tasks: int) -> None:
    """Tell each function of a program which operator of the job graph it is: of its outputs the first."""
    known: set[int] = set()
    reading = _Reading(optimize(graph), tasks)
    for _ in reading.operators():
        pass
    for node, own in reading.ids.items():
        settings = None if isinstance(node, SourceNode | SinkNode | KeyedNode) else _settings_of(node)
        if settings is not None and id(settings) not in known:
            known.add(id(settings))
            settings.operator = own


def job_graph_to(job: str, graph: StreamGraph, node: StreamNode, tasks: int) -> JobGraph:
    alone = graph.ending_with(node)
    return JobGraph(job, tuple(_Reading(optimize(alone), tasks).operators_in_front_of(alone.sinks[0])))


@dataclass(frozen=True)
class _Passage:
    """A path from a source or an operator to the next operator with state, or to a sink."""

    path: Path
    end: KeyedNode | SinkNode
    #: Of the operator that it leads to.
    entry: int = 0
    distribution: Distribution | None = None
    #: With which step of it the part begins that each sink does for itself; None where none does.
    deferred_from: int | None = None
    #: With which step of it the part begins that is not in the plan already.
    counts_from: int = 0
    #: With which step of it the part begins that runs in one pass with the rest of other paths; None where
    #: none does.
    branch_from: int | None = None

    @property
    def is_behind_state(self) -> bool:
        return operator_of(self.path.base) is not None

    def is_in_branch(self, at: int) -> bool:
        return self.branch_from is not None and at >= self.branch_from

    def is_evaluated(self, at: int) -> bool:
        return self.deferred_from is not None and at >= self.deferred_from

    @property
    def moves(self) -> bool:
        return not (self.is_behind_state and isinstance(self.end, KeyedNode))


@dataclass
class _Arriving:
    front: _Node
    edge: JobEdge


class _Reading:
    def __init__(self, plan: LogicalPlan, tasks: int, branches: _Branches | None = None) -> None:
        self._plan, self._graph, self._tasks, self._branches = plan, plan.graph, tasks, branches
        self._runs: Counter[_Node] = Counter()
        self._edges: dict[_Node, list[_Arriving]] = {}
        self._ids: dict[_Node, str] = {}
        self._parallelism: dict[_Node, int | None] = {}

    def operators(self) -> Iterator[JobOperator]:
        self._read()
        made: dict[_Node, JobOperator] = {}
        for sink in self._graph.sinks:
            self._make(sink, made)
        yield from made.values()
        yield from self._beside_sources()

    @property
    def ids(self) -> Mapping[_Node, str]:
        return self._ids

    def operators_in_front_of(self, sink: SinkNode) -> Iterator[JobOperator]:
        self._read()
        made: dict[_Node, JobOperator] = {}
        for arriving in self._edges[sink]:
            self._make(arriving.front, made)
        yield from made.values()

    # -- the plan, as the planner makes it: each part as often as it stands there ---------------------
    def _read(self) -> None:
        seen: dict[Chain, set[KeyedNode]] = {}
        shared = {
            operator: passages
            for group in self._plan.groups
            for operator, passages in self._passages_of_group(group).items()
        }
        for sink in self._graph.sinks:
            self._runs[sink] += 1
            for end in self._plan.ends[sink.uid]:
                is_new = end.chain not in seen
                of_chain = seen.setdefault(end.chain, set())
                for path in end.paths:
                    operator = operator_of(path.base)
                    if operator in shared and is_new:
                        self._runs[operator] += 1
                        for passage in shared[operator]:
                            self._walk(passage)
                    elif operator not in shared and (operator is not None or is_new):
                        self._read_base(path.base, of_chain)
                    # What follows an operator runs on the evaluated micro-batch, for this sink.
                    counts = is_new or operator_of(path.base) is not None
                    counts_from = 0 if counts else len(path.steps)
                    self._walk(_Passage(path, sink, 0, None, end.deferred_from, counts_from))
        for source in self._graph.sources:
            self._runs[source] += len(source.source.side_uids(source.uid))

    def _passages_of_group(self, group: TaskGroup) -> Mapping[KeyedNode, list[_Passage]]:
        """Return the paths into operators that share tasks, and count the scans before them once."""
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
        """Whether a path runs beside others behind one scan; the planner has seen what cannot."""
        known = reader.operator.uid, reader.name
        return self._branches is None or any(known in own for own in self._branches)

    def _read_base(self, base: Base, seen: set[KeyedNode]) -> None:
        operator = operator_of(base)
        if operator is None:
            assert isinstance(base, SourceNode)
            self._runs[base] += 1
            return
        if operator in seen:
            # Read on several paths, or by several sinks: it stands in the plan once.
            return
        seen.add(operator)
        self._runs[operator] += 1
        for upstream in upstreams(operator):
            self._read_base(upstream.base, seen)
            for input_ in upstream.inputs:
                entry = operator.entries[input_.entry]
                for path in input_.paths:
                    self._walk(_Passage(path, operator, input_.entry, entry.distribution))

    def _walk(self, passage: _Passage) -> None:
        """Note the edges of a path; a sink that reads what another one reads counts its last edge only."""
        base = passage.path.base
        front: _Node = base.parent if isinstance(base, SideNode) else base
        output = base.tag.name if isinstance(base, SideNode) else ""
        moved: list[ShipStrategy] = []
        for at, step in enumerate(passage.path.steps, start=1):
            if isinstance(step, TransformNode) and is_partitioning(step.function):
                moved += [_ship_of(step)] if passage.moves else []
                continue
            runs = at > passage.counts_from or passage.is_evaluated(at - 1)
            self._note(
                front, step, self._between(passage, front, passage.path.steps[:at], moved, output), runs
            )
            self._runs[step] += runs
            front, output, moved = step, "", []
        self._note(front, passage.end, self._into_end(passage, front, moved, output), True)

    def _between(
        self,
        passage: _Passage,
        front: _Node,
        steps: Sequence[Step],
        moved: Sequence[ShipStrategy],
        output: str,
    ) -> JobEdge:
        step = steps[-1]
        if passage.moves:
            settings = _settings_of(step)
            if settings is not None and settings.parallelism is not None:
                return JobEdge("", ShipStrategy.REBALANCE, Why.OWN_TASKS, 0, output, tuple(moved))
            if is_set_apart(self._graph, steps):
                return JobEdge("", ShipStrategy.REBALANCE, Why.SAID, 0, output, tuple(moved))
            if moved:
                why = Why.MOVED if moved[-1].is_shuffle else Why.SAME_TASKS
                return JobEdge("", moved[-1], why, 0, output, tuple(moved[:-1]))
        is_first = isinstance(front, KeyedNode) or passage.deferred_from == len(steps) - 1
        if is_first and isinstance(passage.end, SinkNode):
            return JobEdge("", ShipStrategy.FORWARD, Why.EVALUATED, 0, output)
        at = len(steps) - 1
        both = _is_of_records(front) and _is_of_records(step)
        if passage.is_in_branch(at) and _is_of_records(step):
            begins = not both or not passage.is_in_branch(at - 1)
            return JobEdge("", ShipStrategy.FORWARD, Why.BRANCHES if begins else Why.SAME_PASS, 0, output)
        is_one_pass = _ends_in_python(front) and _begins_in_python(step)
        why = Why.SAME_PASS if is_one_pass else Why.SAME_TASKS
        return JobEdge("", ShipStrategy.FORWARD, why, 0, output)

    def _into_end(
        self, passage: _Passage, front: _Node, moved: Sequence[ShipStrategy], output: str
    ) -> JobEdge:
        if passage.distribution is not None:
            ship, why = _OF_STATE[passage.distribution]
            return JobEdge("", ship, why, passage.entry, output, tuple(moved))
        if moved and moved[-1].is_shuffle:
            return JobEdge("", moved[-1], Why.MOVED, 0, output, tuple(moved[:-1]))
        if passage.is_behind_state and front is not operator_of(passage.path.base):
            return JobEdge("", ShipStrategy.FORWARD, Why.SAME_TASKS, 0, output, tuple(moved))
        return JobEdge("", ShipStrategy.FORWARD, Why.EVALUATED, 0, output, tuple(moved))

    def _note(self, front: _Node, behind: _Node, edge: JobEdge, counts: bool) -> None:
        """Keep an edge; one that is there on another path, too, is what holds on both."""
        there = self._edges.setdefault(behind, [])
        for known in there:
            same = (known.edge.entry, known.edge.output) == (edge.entry, edge.output)
            if known.front is front and same:
                kept = edge if known.edge.why is Why.SAME_PASS else known.edge
                known.edge = replace(kept, runs=known.edge.runs + counts)
                return
        there.append(_Arriving(front, replace(edge, runs=int(counts))))

    # -- operators ----------------------------------------------------------------------------------
    def _make(self, node: _Node, made: dict[_Node, JobOperator]) -> None:
        if node in made:
            return
        arriving = self._edges.get(node, [])
        for one in arriving:
            self._make(one.front, made)
        edges = [replace(one.edge, source=self._ids[one.front]) for one in arriving]
        if len(edges) > 1 and not isinstance(node, KeyedNode):
            edges = [replace(one, why=Why.STREAMS_MEET) if one.why.is_chained else one for one in edges]
        self._ids[node] = self._id_of(node, edges)
        self._parallelism[node] = self._tasks_of(node, arriving)
        made[node] = self._described(node, tuple(edges))

    def _described(self, node: _Node, edges: tuple[JobEdge, ...]) -> JobOperator:
        own, runs = self._ids[node], self._runs[node]
        tasks = self._parallelism[node]
        match node:
            case SourceNode():
                name, runs_in = self._graph.names.get(node.uid, node.uid), _where_read(node.source)
                does = type(node.source).__name__
                return JobOperator(own, node.uid, name, does, OperatorKind.SOURCE, runs_in, runs=runs)
            case KeyedNode():
                name, does = self._graph.names.get(node.uid, node.uid), _what(node.function)
                keys = tuple(dict.fromkeys(_key(key) for entry in node.entries for key in entry.keys))
                return JobOperator(
                    own,
                    node.uid,
                    name,
                    does,
                    OperatorKind.STATEFUL,
                    RunsIn.PYTHON,
                    keys,
                    tasks,
                    node.max_parallelism,
                    runs,
                    edges,
                    self._first_sharing(node),
                )
            case SinkNode():
                does, kind = type(node.sink).__name__, OperatorKind.SINK
                runs_in = _where_staged(node.sink)
                return JobOperator(own, node.uid, node.uid, does, kind, runs_in, (), tasks, None, runs, edges)
            case TimedNode():
                is_plain = node.strategy.generator is None and not _is_function(node.strategy.timestamps)
                runs_in = RunsIn.JVM if is_plain else RunsIn.PYTHON
                name, kind = "Timestamps/Watermarks", OperatorKind.TIMESTAMPS
                return JobOperator(own, "", name, "", kind, runs_in, (), tasks, None, runs, edges)
        settings = _settings_of(node)
        if settings is None:
            name = f"transform {_name(node.function)}"
            kind, runs_in, does = OperatorKind.TRANSFORM, RunsIn.JVM, "DataFrame function"
        else:
            side = getattr(node.function, "side", None)
            name = f"{settings.name} [{side}]" if side else settings.name
            kind, runs_in = OperatorKind.FUNCTION, RunsIn.PYTHON
            does = "lookup join" if hasattr(node.function, "join") else "function of single records"
            if is_async(node.function):
                does = "async function"
        return JobOperator(own, "", name, does, kind, runs_in, (), tasks, None, runs, edges)

    def _first_sharing(self, node: KeyedNode) -> str:
        for group in self._plan.groups:
            first, *others = (operator for operator, _ in group.members)
            if node in others:
                return _digest(["uid", first.uid])
        return ""

    def _id_of(self, node: _Node, edges: Sequence[JobEdge]) -> str:
        """Return an id that depends on nothing but the program: the same in every process."""
        if isinstance(node, SourceNode | KeyedNode | SinkNode):
            return _digest(["uid", node.uid])
        place = [_sort_of(node), [[e.source, e.ship.value, e.output, e.entry] for e in edges]]
        number = 0
        while (found := _digest([*place, number])) in self._ids.values():
            number += 1
        return found

    def _tasks_of(self, node: _Node, arriving: Sequence[_Arriving]) -> int | None:
        if isinstance(node, KeyedNode):
            return self._tasks
        settings = None if isinstance(node, SourceNode | SinkNode) else _settings_of(node)
        if settings is not None and settings.parallelism is not None:
            return int(settings.parallelism)
        if len(arriving) != 1:
            return None
        (one,) = arriving
        if one.edge.ship is ShipStrategy.GLOBAL:
            return 1
        if one.edge.ship.is_shuffle:
            return self._moved_to(node)
        return None if one.edge.ship is ShipStrategy.RESCALE else self._parallelism[one.front]

    def _moved_to(self, node: _Node) -> int:
        before = node.parent if isinstance(node, TransformNode | TimedNode | SinkNode) else None
        if isinstance(before, TransformNode) and isinstance(before.function, Spread | ByPartitioner):
            return before.function.parallelism or self._tasks
        return self._tasks

    def _beside_sources(self) -> Iterator[JobOperator]:
        for source in self._graph.sources:
            for uid in source.source.side_uids(source.uid):
                front = self._ids.get(source) or _digest(["uid", source.uid])
                edge = JobEdge(front, ShipStrategy.FORWARD, Why.EVALUATED, output=uid)
                own, kind = _digest(["uid", uid]), OperatorKind.SINK
                yield JobOperator(own, uid, uid, "dead letters", kind, RunsIn.JVM, (), None, None, 1, (edge,))


def _settings_of(step: _Node) -> TransformSettings | None:
    if not isinstance(step, TransformNode) or frame_function(step) is not None:
        return None
    return getattr(step.function, "settings", None)


def _is_of_records(node: _Node) -> bool:
    return _settings_of(node) is not None


def _begins_in_python(node: _Node) -> bool:
    if isinstance(node, TimedNode):
        return _is_function(node.strategy.timestamps)
    return _is_of_records(node)


def _ends_in_python(node: _Node) -> bool:
    if isinstance(node, TimedNode):
        return _is_function(node.strategy.timestamps) or node.strategy.generator is not None
    return _is_of_records(node)


def _ship_of(step: TransformNode) -> ShipStrategy:
    match step.function:
        case Narrow():
            return ShipStrategy.RESCALE
        case ByPartitioner():
            return ShipStrategy.CUSTOM
    return ShipStrategy.GLOBAL if step.function == Spread(1) else ShipStrategy.REBALANCE


def _where_read(source: Source) -> RunsIn:
    return RunsIn.JVM if source.kind == Source.kind else RunsIn.PYTHON


def _where_staged(sink: Sink) -> RunsIn:
    in_python = isinstance(sink, TwoPhaseCommitSink) or bool(sink.topics)
    return RunsIn.PYTHON if in_python else RunsIn.JVM


def _is_function(timestamps: object) -> bool:
    return timestamps is not None and not isinstance(timestamps, str | Column)


def _sort_of(node: TransformNode | TimedNode) -> str:
    if isinstance(node, TimedNode):
        return "timestamps"
    return "transform" if _settings_of(node) is None else type(node.function).__name__


def _key(key: Key) -> str:
    if isinstance(key, KeyFunction):
        return "a function"
    return key if isinstance(key, str) else "an expression"


#: What people call operators of ours that no class of theirs names.
_OF_OURS = {
    "Aggregating": "running aggregate",
    "AggregatingColumns": "running aggregate",
    "ChangelogAggregating": "aggregate over a changelog",
    "ChangelogFolding": "fold over a changelog",
    "CoFlatMapRecords": "flat_map with state",
    "CoMapRecords": "map with state",
    "FilterRecords": "filter with state",
    "FlatMapRecords": "flat_map with state",
    "FoldingColumns": "running fold",
    "FoldingElements": "running fold",
    "MapRecords": "map with state",
    "Normalizing": "changelog of upserts",
    "Reducing": "running reduce",
    "ReducingColumns": "running reduce",
    "RowPatterns": "row pattern",
}


def _what(function: object) -> str:
    match function:
        case Windows() | FoldingWindows():
            return type(function.spec.assigner).__name__
        case Joining():
            return type(function.join).__name__
        case Patterns():
            names = [one.name for one in function.search.patterns if one.name]
            return " ".join(["patterns", *names]) if names else "pattern"
        case BroadcastFunctions() | Checkpointed():
            return type(function.function).__name__
    name = type(function).__name__
    return _OF_OURS.get(name, name)


def _name(function: object) -> str:
    named = str(getattr(function, "__name__", type(function).__name__))
    return "(lambda)" if named == "<lambda>" else named


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]
