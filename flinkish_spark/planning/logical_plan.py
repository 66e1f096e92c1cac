"""A job's plan before Spark knows of it: the stream graph, and what each rule has decided about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flinkish_spark.operators.recorded_answers import Readers
from flinkish_spark.planning.beginning import NOTHING, Beginning
from flinkish_spark.planning.counting import NOTHING_COUNTS, Counting
from flinkish_spark.planning.stream_graph import Base, KeyedNode, Path, StreamGraph
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
class LogicalPlan:
    graph: StreamGraph
    beginning: Beginning = NOTHING
    #: Of the live log, which goes on as it began; None where a log begins.
    recorded: PlanLayout | None = None
    #: By the uids of sinks (cut_chains, defer_transforms).
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
    counting: Counting = NOTHING_COUNTS

    @property
    def may_share(self) -> bool:
        """Whether several chains may read one scan: not in a log that began when each had its own."""
        return self.recorded is None or bool(self.recorded.shared) or bool(self.recorded.together)

    @property
    def all_ends(self) -> Sequence[End]:
        """The ends that sinks read, those of each sink behind each other."""
        return [end for ends in self.ends.values() for end in ends]
