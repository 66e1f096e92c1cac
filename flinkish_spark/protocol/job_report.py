"""What the owner of a job says about it for other processes: status, vertices, failures, settings.

Checkpoints and decisions are in the job directory anyway. What a job does at this moment, and why it was
started again, only its owner knows. A report decides nothing. It is a value of bounded size, which is
replaced with every change of the status.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from flinkish_spark.protocol.codec import Stored, StoredRow, whole
from flinkish_spark.protocol.ids import OwnerEpoch
from flinkish_spark.protocol.job_graph import JobVertex
from flinkish_spark.protocol.job_status import Change, JobStatus, JobStatusChange, TaskState
from flinkish_spark.protocol.statistics import MOST_TEXT

#: Failures that are kept; as many as Flink keeps by default.
MOST_FAILURES = 16

_TimeMs = Annotated[int, whole(0)]


@dataclass(frozen=True, slots=True)
class ReportedFailure(Stored):
    """Why a job was started again, or has ended."""

    at_ms: _TimeMs
    #: What happened, why, and what to do; at most :data:`.MOST_TEXT` characters.
    cause: str
    #: Id of the vertex in which it happened; empty where that is not known.
    vertex: str = ""
    #: Of the job; 1 for its first start in a process.
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class ReportedVertex(StoredRow):
    """Where a vertex stands: its id in the job graph, its state, since when (wall clock), its attempt."""

    vertex: str
    state: TaskState
    since_ms: int
    attempt: int


@dataclass(frozen=True, slots=True)
class ReportedWait(Stored):
    """Who has waited for what, since when (wall clock), and what went wrong last."""

    who: str
    what: str
    since_ms: _TimeMs
    error: str = ""


@dataclass(frozen=True)
class JobReport(Stored):
    """See the module's head."""

    owner_epoch: OwnerEpoch
    status: JobStatus
    #: Wall clock time of the takeover.
    began_at_ms: _TimeMs
    #: Wall clock time at which each status was reached last, by its name.
    since_ms: Mapping[str, _TimeMs]
    vertices: tuple[ReportedVertex, ...] = ()
    #: How often the query was started again, over all owners that have reported.
    restarts: int = 0
    #: The newest ones of all owners, oldest first.
    failures: tuple[ReportedFailure, ...] = ()
    #: What was said of checkpoints and restarts, as JSON values by name.
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: What holds it back, the longest first.
    waits: tuple[ReportedWait, ...] = ()

    @classmethod
    def begun(
        cls,
        epoch: OwnerEpoch,
        at_ms: int,
        vertices: Iterable[JobVertex],
        settings: Mapping[str, Any],
        earlier: JobReport | None,
    ) -> JobReport:
        return cls(
            epoch,
            JobStatus.CREATED,
            at_ms,
            {JobStatus.CREATED.value: at_ms},
            tuple(ReportedVertex(one.id, TaskState.CREATED, at_ms, 1) for one in vertices),
            0 if earlier is None else earlier.restarts,
            () if earlier is None else earlier.failures,
            settings,
        )

    def after(self, change: Change) -> JobReport:
        if not isinstance(change, JobStatusChange):
            moved = ReportedVertex(change.vertex, change.after, change.at_ms, change.attempt)
            others = (moved if one.vertex == change.vertex else one for one in self.vertices)
            return replace(self, vertices=tuple(others))
        waits = () if change.after.is_terminal else self.waits
        since_ms = {**self.since_ms, change.after.value: change.at_ms}
        found = replace(self, status=change.after, since_ms=since_ms, waits=waits)
        if change.after is JobStatus.RESTARTING:
            found = replace(found, restarts=self.restarts + 1)
        return found._failed(change) if change.after is JobStatus.FAILING else found

    @property
    def is_settled(self) -> bool:
        states = {one.state for one in self.vertices}
        return len(states) == 1 or all(state.is_terminal for state in states)

    def _failed(self, change: JobStatusChange) -> JobReport:
        # A vertex that fails is told of before the job that fails with it.
        failed = next((one for one in self.vertices if one.state is TaskState.FAILED), None)
        attempt = max((one.attempt for one in self.vertices), default=1)
        cause = change.cause if len(change.cause) <= MOST_TEXT else change.cause[: MOST_TEXT - 3] + "..."
        one = ReportedFailure(change.at_ms, cause, "" if failed is None else failed.vertex, attempt)
        return replace(self, failures=(*self.failures, one)[-MOST_FAILURES:])
