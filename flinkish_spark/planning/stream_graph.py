"""The stream graph: the user's program as values, checked before anything starts."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from pyspark.sql import Column
from pyspark.sql import types as T

from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.errors import GraphError
from flinkish_spark.functions.keyed import RichFunction
from flinkish_spark.protocol.ids import check_name
from flinkish_spark.protocol.job_graph import ChainingStrategy
from flinkish_spark.transport.routing import Distribution

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from flinkish_spark.contracts.operators import OperatorFactory
    from flinkish_spark.contracts.sink import Sink
    from flinkish_spark.core.elements import OutputTag
    from flinkish_spark.functions.keyed import KeyedCoProcessFunction, KeyedProcessFunction
    from flinkish_spark.functions.watermark_strategy import WatermarkStrategy
    from flinkish_spark.operators.vectorized import VectorizedProcessFunction
    from flinkish_spark.planning.factories import BroadcastFunctions, ColumnFolding, FoldingWindows
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
    """A stream into an operator with state, and its key if it is distributed by key."""

    parent: StreamNode
    keys: tuple[Key, ...]
    distribution: Distribution = Distribution.BY_KEY


@dataclass(eq=False)
class KeyedNode:
    """An operator with state; its uid and key groups may change until something reads it."""

    uid: str
    entries: tuple[KeyedEntry, ...]
    #: The operator, or its factory, which needs the fields of the input.
    function: KeyedFunction
    #: Fields of the output; None for the fields of the input.
    output: T.StructType | None
    max_parallelism: int


@dataclass(frozen=True, eq=False)
class SideNode:
    parent: KeyedNode
    tag: OutputTag
    output: T.StructType


@dataclass(frozen=True, eq=False)
class QueryNode:
    """A query of Spark's over one or several streams of sources."""

    uid: str
    parents: tuple[StreamNode, ...]
    #: From a DataFrame for each parent to one DataFrame.
    function: Callable[..., DataFrame]
    #: The mode in which Spark's aggregates in it return rows.
    output_mode: str

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for parent in self.parents for path in find_paths(parent))


@dataclass(frozen=True, eq=False)
class TimedNode:
    parent: StreamNode
    strategy: WatermarkStrategy


StreamNode = SourceNode | QueryNode | TransformNode | TimedNode | UnionNode | KeyedNode | SideNode
#: The first node of a path.
Base = SourceNode | QueryNode | KeyedNode | SideNode
#: A function on a path.
Step = TransformNode | TimedNode


@dataclass(frozen=True, eq=False)
class Path:
    """A path from a source or operator to a stream; steps after a union are on all of its paths."""

    base: Base
    steps: tuple[Step, ...] = ()

    def cut_to(self, steps: int | None) -> Path:
        return Path(self.base, self.steps[:steps])

    def replace_transforms(self, change: Callable[[TransformNode], TransformNode]) -> Path:
        steps = (change(step) if isinstance(step, TransformNode) else step for step in self.steps)
        return Path(self.base, tuple(steps))


@dataclass(frozen=True, eq=False)
class Input:
    """An input of an operator: paths with the same base that lead to one of its entries."""

    #: Number of the operator's entry.
    entry: int
    #: One path from a source, or all paths from one output of an operator, in order.
    paths: tuple[Path, ...]

    @property
    def base(self) -> Base:
        return self.paths[0].base


@dataclass(frozen=True, eq=False)
class Upstream:
    """All inputs of an operator from one other operator, or its input on one path from a source."""

    # Spark plans a frame twice if it is in a plan twice. So an operator whose outputs are read on several
    # paths is there once, and its rows are distributed to all inputs that read them.

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


#: Default number of key groups of a job.
DEFAULT_MAX_PARALLELISM = 128


@dataclass
class StreamGraph:
    sources: list[SourceNode] = field(default_factory=list)
    queries: list[QueryNode] = field(default_factory=list)
    operators: list[KeyedNode] = field(default_factory=list)
    sides: list[SideNode] = field(default_factory=list)
    #: Tags and fields of the side outputs of functions without a key, by function and name.
    row_sides: dict[tuple[TransformNode, str], tuple[OutputTag, T.StructType]] = field(default_factory=dict)
    timed: list[TimedNode] = field(default_factory=list)
    #: Uids of async operators, which have answers in the place of state.
    async_uids: list[str] = field(default_factory=list)
    sinks: list[SinkNode] = field(default_factory=list)
    #: Names of sources and operators, by uid.
    names: dict[str, str] = field(default_factory=dict)
    #: Default number of key groups of its operators.
    max_parallelism: int = DEFAULT_MAX_PARALLELISM
    #: Functions without a key that must not share a vertex, by the identity of their settings.
    chained: dict[int, ChainingStrategy] = field(default_factory=dict)
    #: Slot sharing groups of operators, by uid; operators share tasks within a group only.
    slot_sharing: dict[str, str] = field(default_factory=dict)
    #: Names of the chains with which a job began; None if they follow from the graph.
    begun_chains: frozenset[str] | None = None

    def find_chaining(self, node: object) -> ChainingStrategy:
        settings = getattr(node.function, "settings", None) if isinstance(node, TransformNode) else None
        return self.chained.get(id(settings), ChainingStrategy.ALWAYS)

    def check_uid(self, uid: str) -> str:
        try:
            check_name(uid, "uid")
        except ValueError as error:
            raise GraphError(str(error), what_to_do="give such a uid") from None
        if uid in (*self.uids(), *self.async_uids):
            raise GraphError(
                f"the uid '{uid}' is used twice",
                why="state, transactions and table commits are found again by uid after a restart",
                what_to_do="give every source, operator and sink a uid of its own",
            )
        return uid

    def add_async_uid(self, uid: str | None, parent: StreamNode) -> str:
        given = self.derive_uid("async", [parent]) if uid is None else uid
        self.async_uids.append(self.check_uid(given))
        return given

    def derive_uid(self, method: str, fronts: Sequence[str | StreamNode | KeyedEntry]) -> str:
        """Return a free uid derived from the place in the program: the method and its inputs."""
        place = [method, [front if isinstance(front, str) else _describe_place(front) for front in fronts]]
        number = 0
        while True:
            digest = hashlib.sha256(json.dumps([*place, number]).encode()).hexdigest()
            uid = f"{method}-{digest[:8]}"
            if uid not in (*self.uids(), *self.async_uids):
                return uid
            number += 1

    @property
    def read_sources(self) -> list[SourceNode]:
        read = {source for sink in self.sinks for source in find_sources(sink.parent)}
        return [source for source in self.sources if source in read]

    def copy_declared(self) -> StreamGraph:
        """Return a copy of the graph without sources that no sink reads, and without nodes declared later."""
        parts = {each.name: copy.copy(getattr(self, each.name)) for each in fields(self)}
        return StreamGraph(**{**parts, "sources": self.read_sources})

    def end_at(self, node: StreamNode) -> StreamGraph:
        """Return the graph of one stream, with a placeholder for a sink at its end."""
        nothing: Any = None
        return replace(self, sinks=[SinkNode("", node, nothing)])

    def uids(self) -> tuple[str, ...]:
        nodes: Sequence[SourceNode | QueryNode | KeyedNode | SinkNode] = [
            *self.sources,
            *self.queries,
            *self.operators,
            *self.sinks,
        ]
        return tuple(node.uid for node in nodes)

    def needs_own_time(self, source: SourceNode) -> bool:
        return any(node.strategy.uses_own_time and source in find_sources(node) for node in self.timed)

    def is_read(self, node: KeyedNode) -> bool:
        """Return whether a sink or another operator reads an operator, which may then run in a job."""
        parents = [*(sink.parent for sink in self.sinks)]
        parents += (entry.parent for one in self.operators for entry in one.entries)
        return any(find_operator(path.base) is node for parent in parents for path in find_paths(parent))

    def rename(self, node: KeyedNode, uid: str) -> None:
        self.check_uid(uid)
        for by_uid in (self.names, self.slot_sharing):
            if node.uid in by_uid:
                by_uid[uid] = by_uid.pop(node.uid)
        node.uid = uid

    def find_sides(self, node: KeyedNode) -> tuple[SideNode, ...]:
        return tuple(side for side in self.sides if side.parent is node)

    def side(self, node: KeyedNode, tag: OutputTag, output: T.StructType) -> SideNode:
        for known in self.find_sides(node):
            if known.tag.name == tag.name:
                if known.output != output:
                    raise _two_declarations(f"'{node.uid}'", known.tag, tag, uid=node.uid)
                return known
        self.sides.append(SideNode(node, tag, output))
        return self.sides[-1]

    def check_row_side(self, node: TransformNode, name: str, tag: OutputTag, output: T.StructType) -> None:
        """Check a side output of a function without a key, where each output is a node of its own."""
        known, fields = self.row_sides.setdefault((node, tag.name), (tag, output))
        if fields != output:
            raise _two_declarations(f"'{name}'", known, tag)

    def check_complete(self) -> None:
        if not self.sinks:
            raise GraphError("the job has no sink", what_to_do="call sink_to(...) on a stream before it")


def _describe_place(node: StreamNode | KeyedEntry) -> list[Any]:
    """Return a stream's place in the program, back to nodes with a uid: the same in every process."""
    match node:
        case KeyedEntry():
            keys = [key if isinstance(key, str) else type(key).__name__ for key in node.keys]
            return [node.distribution.name, keys, _describe_place(node.parent)]
        case SideNode():
            return ["side", node.parent.uid, node.tag.name]
        case UnionNode():
            return ["union", *map(_describe_place, node.parents)]
        case TimedNode():
            return ["timestamps", _describe_place(node.parent)]
        case TransformNode():
            return [type(node.function).__name__, _describe_place(node.parent)]
    return ["uid", node.uid]


def _two_declarations(whose: str, known: OutputTag, tag: OutputTag, **facts: Any) -> GraphError:
    return GraphError(
        f"the side output '{tag.name}' of {whose} is declared as {known.output!r} and as {tag.output!r}",
        what_to_do="use one OutputTag object in the function and in get_side_output()",
        **facts,
    )


def find_paths(node: StreamNode) -> tuple[Path, ...]:
    if isinstance(node, UnionNode):
        return tuple(path for parent in node.parents for path in find_paths(parent))
    if isinstance(node, TransformNode | TimedNode):
        return tuple(Path(path.base, (*path.steps, node)) for path in find_paths(node.parent))
    return (Path(node),)


def find_upstreams(node: KeyedNode) -> tuple[Upstream, ...]:
    """Return the upstreams of an operator, in the order of their first use by its entries."""
    # By the operator, or by the path from a source; then by the entry and the output.
    found: dict[int, dict[tuple[int, int], list[Path]]] = {}
    for number, entry in enumerate(node.entries):
        for path in find_paths(entry.parent):
            in_front = find_operator(path.base)
            inputs = found.setdefault(id(path if in_front is None else in_front), {})
            inputs.setdefault((number, id(path.base)), []).append(path)
    return tuple(
        Upstream(tuple(Input(number, tuple(paths)) for (number, _), paths in inputs.items()))
        for inputs in found.values()
    )


def find_operator(base: Base) -> KeyedNode | None:
    if isinstance(base, SideNode):
        return base.parent
    return base if isinstance(base, KeyedNode) else None


def find_sources(node: StreamNode) -> tuple[SourceNode, ...]:
    return tuple(source for path in find_paths(node) for source in find_scans(path.base))


def find_scans(base: Base) -> tuple[SourceNode, ...]:
    if isinstance(base, SourceNode):
        return (base,)
    if isinstance(base, QueryNode):
        return tuple(scan for path in base.paths for scan in find_scans(path.base))
    operator = find_operator(base)
    assert operator is not None
    return tuple(scan.source for scan in find_operator_scans(operator))


def deal_names(paths: Sequence[Path], names: Sequence[str]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    rest = iter(names)
    for path in paths:
        yield path, tuple(islice(rest, len(find_scans(path.base))))


@dataclass(frozen=True, eq=False)
class OperatorScan:
    operator: KeyedNode
    #: The number of the operator's upstream that it is.
    upstream: int
    source: SourceNode


def find_operator_scans(*nodes: KeyedNode) -> tuple[OperatorScan, ...]:
    """Return the scans of a chain's operators and their upstream operators, in the order of the plan."""
    seen = set[int]()
    return tuple(scan for node in nodes for scan in _iterate_scans(node, seen))


def _iterate_scans(node: KeyedNode, seen: set[int]) -> Iterator[OperatorScan]:
    if id(node) in seen:
        return
    seen.add(id(node))
    for number, upstream in enumerate(find_upstreams(node)):
        in_front = find_operator(upstream.base)
        if in_front is not None:
            yield from _iterate_scans(in_front, seen)
        else:
            yield from (OperatorScan(node, number, source) for source in find_scans(upstream.base))


def collect_operators(*nodes: KeyedNode) -> list[KeyedNode]:
    """Return operators and all their upstream operators, each once, and after those it reads."""
    found: dict[int, KeyedNode] = {}
    for node in nodes:
        _collect(node, found)
    return list(found.values())


def _collect(node: KeyedNode, found: dict[int, KeyedNode]) -> None:
    if id(node) in found:
        return
    for upstream in find_upstreams(node):
        in_front = find_operator(upstream.base)
        if in_front is not None:
            _collect(in_front, found)
    found[id(node)] = node


def has_paths_that_meet(node: KeyedNode) -> bool:
    operators = collect_operators(node)
    read = sum(
        find_operator(upstream.base) is not None for one in operators for upstream in find_upstreams(one)
    )
    return read >= len(operators)


def is_behind_keys(node: StreamNode) -> bool:
    return any(find_operator(path.base) is not None for path in find_paths(node))


def find_uid(path: Path) -> str:
    return path.base.parent.uid if isinstance(path.base, SideNode) else path.base.uid


def name_bases(node: StreamNode) -> str:
    return "+".join(dict.fromkeys(map(find_uid, find_paths(node))))


@dataclass(frozen=True)
class KeyFunction:
    #: Makes a row with the parts of a record's key.
    call: Callable[[Any], Any]
    #: The object to open in each task; None for plain functions.
    rich: RichFunction | None
    parts: T.StructType
    #: Identifies its share of the accumulators; empty where it does not count.
    counts_as: str = ""


Key = str | Column | KeyFunction
