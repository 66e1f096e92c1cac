"""A job's plan before Spark is involved: the stream graph, and the decision of each rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flinkish_spark.contracts.calls import Evaluation
from flinkish_spark.planning.beginning import NOTHING, Beginning
from flinkish_spark.planning.partitioning import CustomPartitioning
from flinkish_spark.planning.stream_graph import (
    Base,
    KeyedEntry,
    KeyedNode,
    KeyFunction,
    Path,
    QueryNode,
    SideNode,
    Step,
    StreamGraph,
    TransformNode,
    Upstream,
    find_operator,
    find_upstreams,
)
from flinkish_spark.planning.transforms import LookupTransform, RowTransform
from flinkish_spark.protocol.plan_layout import Chain, PlanLayout


@dataclass(frozen=True, eq=False)
class ChainEnd:
    """The end of a chain, as a sink reads it."""

    chain: Chain
    #: One or several from sources, or one from an operator.
    paths: tuple[Path, ...]
    #: Index of the first step that each sink runs for itself on the evaluated micro-batch; None if the chain
    #: contains all steps from a source, or none from an operator.
    deferred_from: int | None = None


@dataclass(frozen=True, eq=False)
class Reader:
    """One path from a source into an operator that shares tasks."""

    #: The operator's place in its task group.
    place: int
    #: The path's number at the operator, in the order of its entries.
    number: int
    operator: KeyedNode
    chain: Chain
    #: Name of the scan among the chain's inputs.
    name: str
    entry: int
    path: Path


@dataclass(frozen=True, eq=False)
class SharedScan:
    #: Number of steps that all of their paths share.
    common: int
    #: Readers grouped by path; different paths run in one pass after the scan.
    branches: tuple[tuple[Reader, ...], ...]


@dataclass(frozen=True, eq=False)
class TaskGroup:
    """Operators that share tasks: one shuffle serves all of them."""

    members: tuple[tuple[KeyedNode, Chain], ...]
    #: Readers of all operators, grouped by operator.
    readers: tuple[Reader, ...]
    scans: tuple[SharedScan, ...] = ()


@dataclass(frozen=True, eq=False)
class LineOperator:
    """An operator in a line, where each operator reads the one before it."""

    operator: KeyedNode
    #: Names of the scans of sources that it reads, by the upstream's number.
    names: Mapping[int, tuple[str, ...]]
    #: Outputs of earlier operators that later operators or sinks read; these streams pass this operator.
    passing: tuple[Base, ...]


@dataclass(frozen=True, eq=False)
class Counting:
    """The one place in the plan where each function and operator adds to accumulators."""

    #: By function or operator: node and chain where it counts, in the order of the plan.
    first: Mapping[object, tuple[object, Chain]]
    #: Numbers of steps, by identity, in the same order.
    steps: Mapping[int, int]

    def counts(self, known_as: object, node: object, chain: Chain) -> bool:
        return known_as in self.first and self.first[known_as] == (node, chain)

    def find_counts(self, path: Path, chain: Chain) -> tuple[bool, ...]:
        """Return which parts of a path count in a chain; paths that differ in this are planned apart."""
        functions = [(identify_counted(step), step) for step in path.steps]
        operators = [(node.uid, node) for node in find_operators_below(path.base)]
        inner = path.base.paths if isinstance(path.base, QueryNode) else ()
        of_query = (counts for one in inner for counts in self.find_counts(one, chain))
        own = (
            self.counts(known_as, node, chain)
            for known_as, node in [*operators, *functions]
            if known_as is not None
        )
        return (*of_query, *own)

    def mark_step(self, step: TransformNode, chain: Chain, path: Path, *front: str) -> TransformNode:
        """Set the counter id of a step's function if it counts here; `front` distinguishes its paths."""
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
        """Set the counter ids of the functions between two operators."""
        inputs = []
        for one in upstream.inputs:
            numbered = enumerate(one.paths)
            paths = (self._mark_path(path, chain, str(one.entry), str(number)) for number, path in numbered)
            inputs.append(replace(one, paths=tuple(paths)))
        return Upstream(tuple(inputs))

    def _mark_path(self, path: Path, chain: Chain, *front: str) -> Path:
        return path.replace_transforms(lambda step: self.mark_step(step, chain, path, *front))

    def mark_entry(self, node: KeyedNode, at: int, chain: Chain, of: str) -> KeyedEntry:
        """Set the counter ids of the key functions of an operator's entry."""
        entry = node.entries[at]
        if not self.counts(node.uid, node, chain):
            return entry
        counts_as = f"{node.uid}/{chain.name}/keys {at} {of}"
        keys = (
            replace(key, counts_as=counts_as) if isinstance(key, KeyFunction) else key for key in entry.keys
        )
        return replace(entry, keys=tuple(keys))

    def mark_keys(self, node: KeyedNode, chain: Chain, of: str) -> KeyedNode:
        entries = (self.mark_entry(node, at, chain, of) for at in range(len(node.entries)))
        return replace(node, entries=tuple(entries))

    def find_counter_id(self, node: KeyedNode, chain: Chain) -> str:
        """Return an operator's counter id; empty if it does not count here."""
        return f"{node.uid}/{chain.name}" if self.counts(node.uid, node, chain) else ""


def identify_counted(step: Step) -> object:
    """Return the identity of a step's function if it can add to accumulators, else None."""
    # Each output of a function is a node that runs the whole function. Two connected streams call different
    # methods.
    match step.function if isinstance(step, TransformNode) else None:
        case RowTransform(function=function) as transform if function.rich is not None:
            return id(transform.settings), id(step.parent), getattr(function.call, "__name__", "")
        case LookupTransform() as transform if transform.join.function is not None:
            return id(transform.settings), id(step.parent), ""
        case CustomPartitioning() as transform if transform.rich is not None:
            return id(transform), id(step.parent), ""
    return None


def find_operators_below(base: Base) -> tuple[KeyedNode, ...]:
    operator = find_operator(base)
    if operator is None:
        return ()
    return (
        operator,
        *(node for upstream in find_upstreams(operator) for node in find_operators_below(upstream.base)),
    )


@dataclass(frozen=True, eq=False)
class LogicalPlan:
    graph: StreamGraph
    beginning: Beginning = NOTHING
    #: Layout of the live log, which must not change; None for a new log.
    recorded: PlanLayout | None = None
    #: By the uid of the sink (cut_chains).
    ends: Mapping[str, tuple[ChainEnd, ...]] = field(default_factory=dict)
    #: True if the source's control rows may be among its records (mark_records).
    marks_records: bool = False
    #: (share_tasks, share_scans)
    groups: tuple[TaskGroup, ...] = ()
    #: By chain: its operators, if they form a line (pass_streams).
    lines: Mapping[str, tuple[LineOperator, ...]] = field(default_factory=dict)
    #: By recorded function and path (find_evaluations).
    evaluations: Mapping[tuple[str, str], tuple[Evaluation, ...]] = field(default_factory=dict)
    #: Where each function adds to accumulators (count_functions).
    counting: Counting = field(default_factory=lambda: Counting({}, {}))

    @property
    def may_share(self) -> bool:
        """True if chains may share a scan; a live log in which each chain has its own scan goes on so."""
        return self.recorded is None or bool(self.recorded.shared) or bool(self.recorded.together)

    @property
    def all_ends(self) -> Sequence[ChainEnd]:
        return [end for ends in self.ends.values() for end in ends]
