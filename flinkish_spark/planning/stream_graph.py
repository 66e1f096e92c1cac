"""The stream graph: what the user wrote, as values. Checked before anything starts."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from pyspark.sql import Column
from pyspark.sql import types as T

from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.errors import GraphError
from flinkish_spark.functions.keyed import RichFunction
from flinkish_spark.protocol.ids import checked_name
from flinkish_spark.protocol.job_graph import Chained
from flinkish_spark.transport.routing import Distribution

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from flinkish_spark.contracts.sink import Sink
    from flinkish_spark.core.elements import OutputTag
    from flinkish_spark.functions.keyed import KeyedCoProcessFunction, KeyedProcessFunction
    from flinkish_spark.functions.watermark_strategy import WatermarkStrategy
    from flinkish_spark.operators.vectorized import VectorizedProcessFunction
    from flinkish_spark.planning.factories import (
        BroadcastFunctions,
        ColumnFolding,
        FoldingWindows,
        OperatorFactory,
    )
    from flinkish_spark.worker.broadcast_runner import UnkeyedCheckpointedFunction

    KeyedFunction: TypeAlias = (
        KeyedProcessFunction
        | KeyedCoProcessFunction
        | VectorizedProcessFunction
        | OperatorFactory
        | ColumnFolding
        | FoldingWindows
        | BroadcastFunctions
        | UnkeyedCheckpointedFunction
    )


@dataclass(frozen=True, eq=False)
class TransformNode:
    parent: StreamNode
    function: Callable[[DataFrame], DataFrame]


@dataclass(frozen=True, eq=False)
class UnionNode:
    parents: tuple[StreamNode, ...]


@dataclass(frozen=True, eq=False)
class KeyedEntry:
    """A stream on its way into an operator with state, and its key if it is spread by one."""

    parent: StreamNode
    keys: tuple[Key, ...]
    distribution: Distribution = Distribution.BY_KEY


@dataclass(eq=False)
class KeyedNode:
    """A function with state. Its uid and key groups may change as long as nothing reads it."""

    uid: str
    entries: tuple[KeyedEntry, ...]
    #: What runs, or what makes it once the fields of its input are known.
    function: KeyedFunction
    #: Fields of what is emitted; None where these are the fields of the input.
    output: T.StructType | None
    max_parallelism: int


@dataclass(frozen=True, eq=False)
class SideNode:
    parent: KeyedNode
    tag: OutputTag
    output: T.StructType


@dataclass(frozen=True, eq=False)
class TimedNode:
    parent: StreamNode
    strategy: WatermarkStrategy


StreamNode = SourceNode | TransformNode | TimedNode | UnionNode | KeyedNode | SideNode
#: What a path begins with.
Base = SourceNode | KeyedNode | SideNode
#: What is done to records on a path.
Step = TransformNode | TimedNode


@dataclass(frozen=True, eq=False)
class Path:
    """From a source or an operator through steps to a stream; what follows a union is on all of its paths."""

    base: Base
    steps: tuple[Step, ...] = ()

    def upto(self, steps: int | None) -> Path:
        """Return the path through its first steps; None for all."""
        return Path(self.base, self.steps[:steps])

    def changed(self, change: Callable[[TransformNode], TransformNode]) -> Path:
        """Return the path with other transforms."""
        steps = (change(step) if isinstance(step, TransformNode) else step for step in self.steps)
        return Path(self.base, tuple(steps))


@dataclass(frozen=True, eq=False)
class Input:
    """An input of an operator: paths with the same base that lead to one of its entries."""

    #: Number of the operator's entry.
    entry: int
    #: From a source one; from an operator all that begin with one of its outputs, in their order.
    paths: tuple[Path, ...]

    @property
    def base(self) -> Base:
        return self.paths[0].base


@dataclass(frozen=True, eq=False)
class Upstream:
    """What an operator reads of one other operator, or on one path from a source."""

    # A frame that stands twice in a plan is planned twice. So an operator whose outputs are read on several
    # paths stands there once, and its rows are dealt to all inputs that want them.

    inputs: tuple[Input, ...]

    @property
    def base(self) -> Base:
        return self.inputs[0].base

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for one in self.inputs for path in one.paths)


@dataclass(frozen=True, eq=False)
class SinkNode:
    uid: str
    parent: StreamNode
    sink: Sink


#: Key groups of a job that says nothing else.
DEFAULT_MAX_PARALLELISM = 128


@dataclass
class StreamGraph:
    sources: list[SourceNode] = field(default_factory=list)
    operators: list[KeyedNode] = field(default_factory=list)
    sides: list[SideNode] = field(default_factory=list)
    #: Tags and fields of the side outputs of functions without a key, by function and name.
    row_sides: dict[tuple[TransformNode, str], tuple[OutputTag, T.StructType]] = field(default_factory=dict)
    timed: list[TimedNode] = field(default_factory=list)
    #: Uids of async operators, which have answers in the place of state.
    async_uids: list[str] = field(default_factory=list)
    sinks: list[SinkNode] = field(default_factory=list)
    #: What sources and operators are called beside their uid, by that.
    names: dict[str, str] = field(default_factory=dict)
    #: Key groups of operators that say nothing else.
    max_parallelism: int = DEFAULT_MAX_PARALLELISM
    #: Functions without a key that may not share a vertex with others, by the identity of their settings.
    chained: dict[int, Chained] = field(default_factory=dict)
    #: Operators that share tasks with those of the same group only, by uid.
    slot_sharing: dict[str, str] = field(default_factory=dict)
    #: Names of the chains that a job has begun with; None where these follow from the graph.
    begun_chains: frozenset[str] | None = None

    def chained_of(self, node: object) -> Chained:
        settings = getattr(node.function, "settings", None) if isinstance(node, TransformNode) else None
        return self.chained.get(id(settings), Chained.ALWAYS)

    def check_uid(self, uid: str) -> str:
        try:
            checked_name(uid, "uid")
        except ValueError as error:
            raise GraphError(str(error), what_to_do="give such a uid", uid=uid) from None
        if uid in (*self.uids(), *self.async_uids):
            raise GraphError(
                f"the uid '{uid}' is used twice",
                why="state, transactions and table commits are found again by uid after a restart",
                what_to_do="give every source, operator and sink a uid of its own",
                uid=uid,
            )
        return uid

    def async_uid(self, uid: str | None, parent: StreamNode) -> str:
        given = self.derived_uid("async", [parent]) if uid is None else uid
        self.async_uids.append(self.check_uid(given))
        return given

    def derived_uid(self, method: str, fronts: Sequence[str | StreamNode | KeyedEntry]) -> str:
        """Return a free uid that follows from the place in the program: the method, and what it reads."""
        place = [method, [front if isinstance(front, str) else _place(front) for front in fronts]]
        number = 0
        while True:
            digest = hashlib.sha256(json.dumps([*place, number]).encode()).hexdigest()
            uid = f"{method}-{digest[:8]}"
            if uid not in (*self.uids(), *self.async_uids):
                return uid
            number += 1

    def as_declared(self) -> StreamGraph:
        """Return a graph of the nodes that there are now; what is declared later is not in it."""
        parts = {each.name: copy.copy(getattr(self, each.name)) for each in fields(self)}
        return StreamGraph(**parts)

    def ending_with(self, node: StreamNode) -> StreamGraph:
        """Return the graph of one stream, which ends where a sink would be."""
        nothing: Any = None
        return replace(self, sinks=[SinkNode("", node, nothing)])

    def uids(self) -> tuple[str, ...]:
        nodes: Sequence[SourceNode | KeyedNode | SinkNode] = [*self.sources, *self.operators, *self.sinks]
        return tuple(node.uid for node in nodes)

    def needs_own_time(self, source: SourceNode) -> bool:
        return any(node.strategy.uses_own_time and source in sources_of(node) for node in self.timed)

    def is_read(self, node: KeyedNode) -> bool:
        """Whether a sink or another operator reads an operator: so it may be part of a job that runs."""
        parents = [*(sink.parent for sink in self.sinks)]
        parents += (entry.parent for one in self.operators for entry in one.entries)
        return any(operator_of(path.base) is node for parent in parents for path in paths_to(parent))

    def rename(self, node: KeyedNode, uid: str) -> None:
        self.check_uid(uid)
        for by_uid in (self.names, self.slot_sharing):
            if node.uid in by_uid:
                by_uid[uid] = by_uid.pop(node.uid)
        node.uid = uid

    def sides_of(self, node: KeyedNode) -> tuple[SideNode, ...]:
        return tuple(side for side in self.sides if side.parent is node)

    def side(self, node: KeyedNode, tag: OutputTag, output: T.StructType) -> SideNode:
        for known in self.sides_of(node):
            if known.tag.name == tag.name:
                if known.output != output:
                    raise _two_declarations(f"'{node.uid}'", known.tag, tag, uid=node.uid)
                return known
        self.sides.append(SideNode(node, tag, output))
        return self.sides[-1]

    def check_row_side(self, node: TransformNode, name: str, tag: OutputTag, output: T.StructType) -> None:
        """Check the side output of a function without a key, whose every output is a node of its own."""
        known, fields = self.row_sides.setdefault((node, tag.name), (tag, output))
        if fields != output:
            raise _two_declarations(f"'{name}'", known, tag)

    def check_complete(self) -> None:
        if not self.sinks:
            raise GraphError(
                "the job has no sink", what_to_do="call sink_to(...) on a stream before execute()"
            )


def _place(node: StreamNode | KeyedEntry) -> list[Any]:
    """Return where in the program a stream is, back to what has a uid: the same in every process."""
    match node:
        case KeyedEntry():
            keys = [key if isinstance(key, str) else type(key).__name__ for key in node.keys]
            return [node.distribution.name, keys, _place(node.parent)]
        case SideNode():
            return ["side", node.parent.uid, node.tag.name]
        case UnionNode():
            return ["union", *map(_place, node.parents)]
        case TimedNode():
            return ["timestamps", _place(node.parent)]
        case TransformNode():
            return [type(node.function).__name__, _place(node.parent)]
    return ["uid", node.uid]


def _two_declarations(whose: str, known: OutputTag, tag: OutputTag, **facts: Any) -> GraphError:
    return GraphError(
        f"the side output '{tag.name}' of {whose} is declared as {known.output!r} and as {tag.output!r}",
        what_to_do="use one OutputTag object in the function and in get_side_output()",
        **facts,
    )


def paths_to(node: StreamNode) -> tuple[Path, ...]:
    """Return the paths into a stream, in the order in which its unions name them."""
    if isinstance(node, UnionNode):
        return tuple(path for parent in node.parents for path in paths_to(parent))
    if isinstance(node, TransformNode | TimedNode):
        return tuple(Path(path.base, (*path.steps, node)) for path in paths_to(node.parent))
    return (Path(node),)


def upstreams(node: KeyedNode) -> tuple[Upstream, ...]:
    """Return what an operator reads, in the order in which its entries come by it first."""
    # By the operator, or by the path from a source; then by the entry and the output.
    found: dict[int, dict[tuple[int, int], list[Path]]] = {}
    for number, entry in enumerate(node.entries):
        for path in paths_to(entry.parent):
            in_front = operator_of(path.base)
            inputs = found.setdefault(id(path if in_front is None else in_front), {})
            inputs.setdefault((number, id(path.base)), []).append(path)
    return tuple(
        Upstream(tuple(Input(number, tuple(paths)) for (number, _), paths in inputs.items()))
        for inputs in found.values()
    )


def operator_of(base: Base) -> KeyedNode | None:
    if isinstance(base, SideNode):
        return base.parent
    return base if isinstance(base, KeyedNode) else None


def sources_of(node: StreamNode) -> tuple[SourceNode, ...]:
    return tuple(source for path in paths_to(node) for source in scans_of(path.base))


def scans_of(base: Base) -> tuple[SourceNode, ...]:
    """Return the source of each scan below a base, in the order of the plan."""
    operator = operator_of(base)
    if operator is None:
        assert isinstance(base, SourceNode)
        return (base,)
    return tuple(scan.source for scan in operator_scans(operator))


@dataclass(frozen=True, eq=False)
class OperatorScan:
    operator: KeyedNode
    #: The number of the operator's upstream that it is.
    upstream: int
    source: SourceNode


def operator_scans(*nodes: KeyedNode) -> tuple[OperatorScan, ...]:
    """Return the scans of operators of one chain and of all that they read, in the order of the plan."""
    seen = set[int]()
    return tuple(scan for node in nodes for scan in _scans(node, seen))


def _scans(node: KeyedNode, seen: set[int]) -> Iterator[OperatorScan]:
    if id(node) in seen:
        return
    seen.add(id(node))
    for number, upstream in enumerate(upstreams(node)):
        in_front = operator_of(upstream.base)
        if in_front is not None:
            yield from _scans(in_front, seen)
        else:
            assert isinstance(upstream.base, SourceNode)
            yield OperatorScan(node, number, upstream.base)


def operators_upto(*nodes: KeyedNode) -> list[KeyedNode]:
    """Return operators, each behind all those that it reads, directly or not, and once."""
    found: dict[int, KeyedNode] = {}
    for node in nodes:
        _collect(node, found)
    return list(found.values())


def _collect(node: KeyedNode, found: dict[int, KeyedNode]) -> None:
    if id(node) in found:
        return
    for upstream in upstreams(node):
        in_front = operator_of(upstream.base)
        if in_front is not None:
            _collect(in_front, found)
    found[id(node)] = node


def has_paths_that_meet(node: KeyedNode) -> bool:
    operators = operators_upto(node)
    read = sum(operator_of(upstream.base) is not None for one in operators for upstream in upstreams(one))
    return read >= len(operators)


def is_behind_keys(node: StreamNode) -> bool:
    return any(operator_of(path.base) is not None for path in paths_to(node))


def uid_of(path: Path) -> str:
    return path.base.parent.uid if isinstance(path.base, SideNode) else path.base.uid


def base_of(node: StreamNode) -> str:
    return "+".join(dict.fromkeys(map(uid_of, paths_to(node))))


@dataclass(frozen=True)
class KeyFunction:
    #: From a record to a row with the parts of its key.
    call: Callable[[Any], Any]
    #: Opened in each task, if it wants to be.
    rich: RichFunction | None
    parts: T.StructType
    #: Tells what it adds to accumulators from what others add; empty where that does not count.
    counts_as: str = ""


Key = str | Column | KeyFunction
