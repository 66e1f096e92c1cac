"""A job's plan before Spark knows of it: the stream graph, and what each rule has decided about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flinkish_spark.operators.recorded_answers import Readers
from flinkish_spark.planning.beginning import NOTHING, Beginning
from flinkish_spark.planning.partitioning import CustomPartitioning
from flinkish_spark.planning.stream_graph import (
    Base,
    KeyedEntry,
    KeyedNode,
    KeyFunction,
    Path,
    SideNode,
    Step,
    StreamGraph,
    TransformNode,
    Upstream,
    operator_of,
    upstreams,
)
from flinkish_spark.planning.transforms import LookupTransform, RowTransform
from flinkish_spark.protocol.plan_layout import Chain, PlanLayout


@dataclass(frozen=True, eq=False)
class End:
    """The end of a chain, as a sink reads it."""

    chain: Chain
    #: From sources one or several; from an operator one.
    paths: tuple[Path, ...]
    #: With which step the part begins that each sink does for itself, on the evaluated micro-batch; None
    #: where the chain ends behind all steps from a source, or in front of all from an operator.
    deferred_from: int | None = None


@dataclass(frozen=True, eq=False)
class Reader:
    """An operator that shares tasks, as it reads one path from a source."""

    #: The operator's place among those that share tasks.
    place: int
    #: Of the path among the operator's, in the order of its entries.
    number: int
    operator: KeyedNode
    chain: Chain
    #: Name of the scan among the chain's inputs.
    name: str
    entry: int
    path: Path


@dataclass(frozen=True, eq=False)
class SharedScan:
    """One scan of a source for several readers."""

    #: How many steps all of their paths have in common.
    common: int
    #: Readers of the same path, whose rows are the same; paths that part run in one pass behind the scan.
    branches: tuple[tuple[Reader, ...], ...]


@dataclass(frozen=True, eq=False)
class TaskGroup:
    """Operators that share tasks: one shuffle serves all of them."""

    members: tuple[tuple[KeyedNode, Chain], ...]
    #: Of all operators, those of one behind each other.
    readers: tuple[Reader, ...]
    scans: tuple[SharedScan, ...] = ()


@dataclass(frozen=True, eq=False)
class LineOperator:
    """An operator in a line of operators that stand one behind the other."""

    operator: KeyedNode
    #: Of what it reads of sources: names of the scans, by the upstream's number.
    names: Mapping[int, str]
    #: What operators in front have made, and others behind this one or sinks read: it passes this one.
    passing: tuple[Base, ...]


@dataclass(frozen=True)
class Asking:
    """Who asks about the elements of one path into an async operator."""

    #: Who may ask about the same elements at the same time; None where one alone does, once.
    readers: Readers | None
    is_in_several_chains: bool


@dataclass(frozen=True, eq=False)
class Counting:
    """Where each function and operator counts; it may stand in several places."""

    #: By function or operator the node and the chain in which it counts, in the order of the plan.
    first: Mapping[object, tuple[object, Chain]]
    #: Numbers of steps, by identity, in the same order.
    steps: Mapping[int, int]

    def counts(self, known_as: object, node: object, chain: Chain) -> bool:
        return known_as in self.first and self.first[known_as] == (node, chain)

    def on_path(self, path: Path, chain: Chain) -> tuple[bool, ...]:
        """Return what counts of all that a path in a chain has: paths that differ in it are planned apart."""
        functions = [(identify_counted(step), step) for step in path.steps]
        operators = [(node.uid, node) for node in operators_below(path.base)]
        return tuple(
            self.counts(known_as, node, chain)
            for known_as, node in [*operators, *functions]
            if known_as is not None
        )

    def step(self, step: TransformNode, chain: Chain, path: Path, *front: str) -> TransformNode:
        """Return a step whose function knows as what it counts, if it does; `front` tells its paths apart."""
        function, known_as = step.function, identify_counted(step)
        if known_as is None or not self.counts(known_as, step, chain):
            return step
        number = list(self.first).index(known_as)
        taken = ".".join(str(self.steps[id(one)]) for one in path.steps)
        base = path.base
        named = f"{base.parent.uid}.{base.tag.name}" if isinstance(base, SideNode) else base.uid
        counts_as = f"function {number:04}/{chain.name}/{','.join((*front, named, taken))}"
        if isinstance(function, RowTransform):
            row = replace(function.function, counts_as=counts_as)
            return TransformNode(step.parent, replace(function, function=row))
        assert isinstance(function, LookupTransform | CustomPartitioning)
        return TransformNode(step.parent, replace(function, counts_as=counts_as))

    def mark_upstream(self, upstream: Upstream, chain: Chain) -> Upstream:
        """Return what an operator reads of another one, with functions that know as what they count."""
        inputs = []
        for one in upstream.inputs:
            numbered = enumerate(one.paths)
            paths = (self._mark_path(path, chain, str(one.entry), str(number)) for number, path in numbered)
            inputs.append(replace(one, paths=tuple(paths)))
        return Upstream(tuple(inputs))

    def _mark_path(self, path: Path, chain: Chain, *front: str) -> Path:
        return path.replace_transforms(lambda step: self.step(step, chain, path, *front))

    def entry(self, node: KeyedNode, at: int, chain: Chain, of: str) -> KeyedEntry:
        """Return an entry of an operator whose key functions know as what they count."""
        entry = node.entries[at]
        if not self.counts(node.uid, node, chain):
            return entry
        counts_as = f"{node.uid}/{chain.name}/keys {at} {of}"
        keys = (
            replace(key, counts_as=counts_as) if isinstance(key, KeyFunction) else key for key in entry.keys
        )
        return replace(entry, keys=tuple(keys))

    def keys(self, node: KeyedNode, chain: Chain, of: str) -> KeyedNode:
        entries = (self.entry(node, at, chain, of) for at in range(len(node.entries)))
        return replace(node, entries=tuple(entries))

    def operator(self, node: KeyedNode, chain: Chain) -> str:
        """Return as what an operator counts; empty if it does not."""
        return f"{node.uid}/{chain.name}" if self.counts(node.uid, node, chain) else ""


def identify_counted(step: Step) -> object:
    """Return what is one function where it is counted, if it can add to accumulators; else None."""
    # Its outputs are nodes of their own, each of which runs all of it. Two connected streams have other
    # calls.
    match step.function if isinstance(step, TransformNode) else None:
        case RowTransform(function=function) as transform if function.rich is not None:
            return id(transform.settings), id(step.parent), getattr(function.call, "__name__", "")
        case LookupTransform() as transform if transform.join.function is not None:
            return id(transform.settings), id(step.parent), ""
        case CustomPartitioning() as transform if transform.rich is not None:
            return id(transform), id(step.parent), ""
    return None


def operators_below(base: Base) -> tuple[KeyedNode, ...]:
    operator = operator_of(base)
    if operator is None:
        return ()
    return (operator, *(node for upstream in upstreams(operator) for node in operators_below(upstream.base)))


@dataclass(frozen=True, eq=False)
class LogicalPlan:
    graph: StreamGraph
    beginning: Beginning = NOTHING
    #: Of the live log, which goes on as it began; None where a log begins.
    recorded: PlanLayout | None = None
    #: By the uids of sinks (cut_chains).
    ends: Mapping[str, tuple[End, ...]] = field(default_factory=dict)
    #: Whether the source's control rows may be among its records (mark_records).
    marks_records: bool = False
    #: (share_tasks, share_scans)
    groups: tuple[TaskGroup, ...] = ()
    #: By chain the operators in it, where these stand in a line (pass_streams).
    lines: Mapping[str, tuple[LineOperator, ...]] = field(default_factory=dict)
    #: By async operator and path (place_async_calls).
    calls: Mapping[tuple[str, str], Asking] = field(default_factory=dict)
    #: Which functions add to accumulators, and as what (count_functions).
    counting: Counting = field(default_factory=lambda: Counting({}, {}))

    @property
    def may_share(self) -> bool:
        """True if chains may share a scan; a live log in which each chain has its own scan goes on so."""
        return self.recorded is None or bool(self.recorded.shared) or bool(self.recorded.together)

    @property
    def all_ends(self) -> Sequence[End]:
        """The ends that sinks read, those of each sink behind each other."""
        return [end for ends in self.ends.values() for end in ends]
