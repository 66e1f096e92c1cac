"""Report of a job by its owner for other processes: status, vertices, failures, settings.

Checkpoints and decisions are in the job directory anyway. Only the owner knows the current activity of a job,
and the reasons of its restarts. A report decides nothing. It is a value of bounded size, which is replaced
with every change of the status.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from flinkish_spark.protocol.codec import StoredObject, StoredRow, whole
from flinkish_spark.protocol.ids import OwnerEpoch
from flinkish_spark.protocol.job_graph import JobVertex
from flinkish_spark.protocol.job_status import Change, JobStatus, JobStatusChange, TaskState
from flinkish_spark.protocol.statistics import MOST_TEXT

#: The most failures that are kept, as Flink's default.
MOST_FAILURES = 16

_TimeMs = Annotated[int, whole(0)]


@dataclass(frozen=True, slots=True)
class ReportedFailure(StoredObject):
    at_ms: _TimeMs
    #: The failure, its reason, and advice; at most :data:`.MOST_TEXT` characters.
    cause: str
    #: Id of the vertex in which it happened; empty if unknown.
    vertex: str = ""
    #: Attempt of the job; 1 for its first start in a process.
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class ReportedVertex(StoredRow):
    vertex: str
    state: TaskState
    since_ms: int
    attempt: int


@dataclass(frozen=True, slots=True)
class ReportedWait(StoredObject):
    who: str
    what: str
    since_ms: _TimeMs
    error: str = ""


@dataclass(frozen=True)
class JobReport(StoredObject):
    owner_epoch: OwnerEpoch
    status: JobStatus
    #: Wall clock time of the takeover.
    began_at_ms: _TimeMs
    #: By name of a status, the wall clock time at which the job reached it last.
    since_ms: Mapping[str, _TimeMs]
    vertices: tuple[ReportedVertex, ...] = ()
    #: Number of restarts of the query, over all owners that have reported.
    restarts: int = 0
    #: The newest failures under all owners, oldest first.
    failures: tuple[ReportedFailure, ...] = ()
    #: Settings of checkpoints and restarts, as JSON values by name.
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: Waits that delay the job, the longest first.
    waits: tuple[ReportedWait, ...] = ()

    @classmethod
    def begin(
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

    def apply(self, change: Change) -> JobReport:
        if not isinstance(change, JobStatusChange):
            moved = ReportedVertex(change.vertex, change.after, change.at_ms, change.attempt)
            others = (moved if one.vertex == change.vertex else one for one in self.vertices)
            return replace(self, vertices=tuple(others))
        waits = () if change.after.is_terminal else self.waits
        since_ms = {**self.since_ms, change.after.value: change.at_ms}
        found = replace(self, status=change.after, since_ms=since_ms, waits=waits)
        if change.after is JobStatus.RESTARTING:
            found = replace(found, restarts=self.restarts + 1)
        return found._add_failure(change) if change.after is JobStatus.FAILING else found

    @property
    def is_settled(self) -> bool:
        states = {one.state for one in self.vertices}
        return len(states) == 1 or all(state.is_terminal for state in states)

    def _add_failure(self, change: JobStatusChange) -> JobReport:
        # The failure of a vertex is reported before that of the job.
        failed = next((one for one in self.vertices if one.state is TaskState.FAILED), None)
        attempt = max((one.attempt for one in self.vertices), default=1)
        cause = change.cause if len(change.cause) <= MOST_TEXT else change.cause[: MOST_TEXT - 3] + "..."
        one = ReportedFailure(change.at_ms, cause, "" if failed is None else failed.vertex, attempt)
        return replace(self, failures=(*self.failures, one)[-MOST_FAILURES:])
