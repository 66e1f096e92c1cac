"""The job graph: a program as Spark runs it, as a value that can be stored, compared and drawn.

Operators that run in the same tasks are a *vertex*: a source with the functions after it, an operator with
state, a sink with the functions before it. Flink's rules make vertices as far as they apply to Spark
(:class:`ChainingStrategy`). :class:`ChainingReason` names Spark's own rules, too.

Names and formats are Flink's: those of its plan visualiser (:meth:`JobGraph.execution_plan`), and of its
REST server (:meth:`JobGraph.job_plan`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.codec import LEFT_OUT, StoredObject


class PlanForm(Choice):
    """The text format of a plan."""

    #: Flink's, for its plan visualiser.
    JSON = "JSON"
    #: Graphviz's.
    DOT = "DOT"
    #: Mermaid's, which GitHub, JupyterLab and MkDocs draw.
    MERMAID = "MERMAID"


class ShipStrategy(enum.Enum):
    """How records go from one operator to the next; Flink's words, except CHANNEL."""

    #: Records stay in their tasks.
    FORWARD = "FORWARD"
    #: To the task that has the state of their key.
    HASH = "HASH"
    #: To the task that has the state of their channel; Flink has no such strategy.
    CHANNEL = "CHANNEL"
    BROADCAST = "BROADCAST"
    #: Evenly, through a shuffle.
    REBALANCE = "REBALANCE"
    #: To fewer tasks, without a shuffle.
    RESCALE = "RESCALE"
    GLOBAL = "GLOBAL"
    #: To the task that the user's partitioner chooses.
    CUSTOM = "CUSTOM"

    @property
    def is_shuffle(self) -> bool:
        return self not in (ShipStrategy.FORWARD, ShipStrategy.RESCALE)


class ChainingStrategy(enum.Enum):
    """Operators with which an operator may share a vertex, as in Flink."""

    ALWAYS = "ALWAYS"
    #: With operators after it, but not before it.
    HEAD = "HEAD"
    NEVER = "NEVER"


class ChainingReason(enum.Enum):
    """Reason for which two operators run in the same tasks, or do not."""

    SAME_PASS = "in one Python pass: rows go to the worker and back once"
    BRANCHES = "in the same tasks, and in one Python pass with what else branches off here"
    SAME_TASKS = "in the same tasks: nothing moves between them"
    BY_KEY = "records go to the task that has the state of their key"
    BY_CHANNEL = "records go to the task that has the state of their channel"
    TO_ALL = "every task gets every record"
    MOVED = "the program moves records here: rebalance() and the like"
    OWN_TASKS = "it has a number of tasks of its own: set_parallelism()"
    SAID = "the program says so: start_new_chain(), disable_chaining()"
    STREAMS_MEET = "streams meet here: it runs in the tasks of each of them, by itself"
    EVALUATED = "the micro-batch is evaluated first, and each sink takes its rows of it"

    @property
    def is_chained(self) -> bool:
        return self in (ChainingReason.SAME_PASS, ChainingReason.BRANCHES, ChainingReason.SAME_TASKS)


class OperatorKind(enum.Enum):
    SOURCE = "SOURCE"
    #: Assigns event times and watermarks.
    TIMESTAMPS = "TIMESTAMPS"
    #: A DataFrame function: `transform()`.
    TRANSFORM = "TRANSFORM"
    #: A function of single records, without state.
    FUNCTION = "FUNCTION"
    #: An operator with state, by key or by channel.
    STATEFUL = "STATEFUL"
    SINK = "SINK"


class RunsIn(enum.Enum):
    JVM = "JVM"
    PYTHON = "Python"


@dataclass(frozen=True, slots=True)
class JobEdge(StoredObject):
    #: Id of the operator that emits the records.
    source: str
    ship: ShipStrategy
    why: ChainingReason
    #: Input of the operator: 0, or 1 for the second one of two connected streams.
    entry: int = 0
    #: Name of the side output that is read; empty for the main output.
    output: str = ""
    #: Redistributions before that, as far as Spark really moves records.
    moved: tuple[ShipStrategy, ...] = ()
    #: Number of occurrences in Spark's plan.
    runs: int = 1


@dataclass(frozen=True, slots=True)
class JobOperator(StoredObject):
    #: 32 hexadecimal digits, a hash of the uid or, without one, of the place in the program. The same in
    #: every process.
    id: str
    #: Empty for operators without a uid: functions without state, timestamps.
    uid: str
    name: str
    #: The operation in a word or two: ``process``, ``tumbling window``, ``KafkaSource``.
    does: str
    kind: OperatorKind
    runs_in: RunsIn
    #: Columns of the key of its state; empty without a key.
    keys: tuple[str, ...] = ()
    #: Number of tasks; None if it follows from the input.
    parallelism: int | None = None
    #: Number of key groups; None without state.
    max_parallelism: int | None = None
    #: Number of occurrences in Spark's plan: it runs as often in each micro-batch.
    runs: int = 1
    inputs: tuple[JobEdge, ...] = ()
    #: Id of the first operator of a group that shares tasks and shuffle; empty for the first one itself.
    shares: str = field(default="", metadata=LEFT_OUT)

    @property
    def has_state(self) -> bool:
        return self.kind is OperatorKind.STATEFUL

    @property
    def shuffles(self) -> int:
        """Number of shuffles directly before it; a stateful operator has one for all inputs."""
        if self.shares:
            return 0
        moves = sum(one.is_shuffle * edge.runs for edge in self.inputs for one in edge.moved)
        if self.has_state:
            return moves + self.runs
        return moves + sum(edge.ship.is_shuffle * edge.runs for edge in self.inputs)

    @property
    def title(self) -> str:
        if self.kind in (OperatorKind.SOURCE, OperatorKind.SINK):
            return f"{self.kind.value.capitalize()}: {self.name}"
        return self.name


@dataclass(frozen=True, slots=True)
class VertexInput:
    vertex: str
    ship: ShipStrategy


@dataclass(frozen=True, slots=True)
class JobVertex:
    """Operators that run in the same tasks."""

    #: Id of its first operator.
    id: str
    operators: tuple[JobOperator, ...]
    inputs: tuple[VertexInput, ...]

    @property
    def name(self) -> str:
        return " -> ".join(one.title for one in self.operators)

    @property
    def parallelism(self) -> int | None:
        return self.operators[0].parallelism

    @property
    def max_parallelism(self) -> int | None:
        return self.operators[0].max_parallelism


@dataclass(frozen=True)
class JobGraph(StoredObject):
    job: str
    #: Each after the operators that it reads.
    operators: tuple[JobOperator, ...]

    @cached_property
    def by_id(self) -> Mapping[str, JobOperator]:
        return {one.id: one for one in self.operators}

    @cached_property
    def by_uid(self) -> Mapping[str, JobOperator]:
        return {one.uid: one for one in self.operators if one.uid}

    @cached_property
    def vertices(self) -> tuple[JobVertex, ...]:
        """Vertices of operators that run in the same tasks, each after the vertices that it reads."""
        head: dict[str, str] = {}
        for one in self.operators:
            fronts = [head[edge.source] for edge in one.inputs if edge.why.is_chained]
            head[one.id] = fronts[0] if fronts else one.id
        found = []
        for vertex in dict.fromkeys(head.values()):
            own = tuple(one for one in self.operators if head[one.id] == vertex)
            edges = [edge for one in own for edge in one.inputs if head[edge.source] != vertex]
            ways = dict.fromkeys(VertexInput(head[edge.source], edge.ship) for edge in edges)
            found.append(JobVertex(vertex, own, tuple(ways)))
        return tuple(found)

    @property
    def shuffles(self) -> int:
        return sum(one.shuffles for one in self.operators)

    @property
    def scans(self) -> Mapping[str, int]:
        return {one.uid: one.runs for one in self.operators if one.kind is OperatorKind.SOURCE}

    def execution_plan(self) -> dict[str, Any]:
        """Return the plan in the format of Flink's `getExecutionPlan`; an unknown parallelism is -1."""
        ordered = sorted(self.operators, key=lambda one: one.kind is OperatorKind.SINK)
        numbers = {one.id: number for number, one in enumerate(ordered, start=1)}
        return {"nodes": [_plan_node(one, numbers) for one in ordered]}

    def job_plan(self, job_id: str) -> dict[str, Any]:
        """Return the plan in the format of `/jobs/:id/plan` of Flink's REST server: one node per vertex."""
        nodes: list[dict[str, Any]] = [
            {
                "id": vertex.id,
                "parallelism": _to_flink_parallelism(vertex.parallelism),
                "operator": "",
                "operator_strategy": "",
                "description": vertex.name,
                "optimizer_properties": {},
            }
            for vertex in self.vertices
        ]
        for node, vertex in zip(nodes, self.vertices, strict=True):
            inputs = [
                {"num": number, "id": way.vertex, "ship_strategy": way.ship.value, "exchange": "blocking"}
                for number, way in enumerate(vertex.inputs)
            ]
            node |= {"inputs": inputs} if inputs else {}
        return {"jid": job_id, "name": self.job, "type": "STREAMING", "nodes": nodes}


def _plan_node(one: JobOperator, numbers: Mapping[str, int]) -> dict[str, Any]:
    pacts = {OperatorKind.SOURCE: "Data Source", OperatorKind.SINK: "Data Sink"}
    node: dict[str, Any] = {
        "id": numbers[one.id],
        "type": one.title,
        "pact": pacts.get(one.kind, "Operator"),
        "contents": f"{one.title}: {one.does}" if one.does else one.title,
        "parallelism": _to_flink_parallelism(one.parallelism),
    }
    if one.kind is not OperatorKind.SOURCE:
        sides = [(edge, "second" if edge.entry else "first") for edge in one.inputs]
        node["predecessors"] = [
            {"id": numbers[edge.source], "ship_strategy": edge.ship.value, "side": side}
            for edge, side in sides
        ]
    return node


def _to_flink_parallelism(parallelism: int | None) -> int:
    return -1 if parallelism is None else parallelism
