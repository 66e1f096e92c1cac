"""Reasons of failed checkpoints, and the number of failures in a row that a job tolerates.

Rules of this file, Flink's where Flink has one:

- Every failure has one reason. :data:`FAILURE_TEXTS` says of each when it may come, and what it means.
- Failures count if a restart may mend them or a user must know of them: expiry, decline, storage,
  hooks. Those that the job itself caused do not count: a refused trigger, subsumption, shutdown, a
  failing task (the restart strategy counts that one), a newer owner.
- Failures *in a row* are counted. One completed checkpoint clears the count; a failure of an id
  that is not newer than the last completed one says nothing about the job as it is now.
- Each id counts once, however often it is declined.
- A savepoint's failure does not count: a person waits for the answer, and failing the job
  would not make the savepoint succeed. The last checkpoint of a job counts, savepoint or not:
  the job stands still after its barrier and must not do so for ever.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose
from flinkish_spark.protocol.limits import Limit, check_limit, exceeds

#: Number of counted ids that are remembered; far more than can be in flight at a time.
REMEMBERED_IDS = 64


class CheckpointFailureReason(Choice):
    """Reason of a failed or refused checkpoint."""

    # The trigger is refused: no id is used up, nothing was asked.
    SHUT_DOWN = "SHUT_DOWN"
    PERIODIC_SCHEDULING_OFF = "PERIODIC_SCHEDULING_OFF"
    ALREADY_QUEUED = "ALREADY_QUEUED"
    QUEUE_FULL = "QUEUE_FULL"
    TOO_MANY_PENDING = "TOO_MANY_PENDING"
    MINIMUM_PAUSE = "MINIMUM_PAUSE"
    PARTICIPANT_NOT_RUNNING = "PARTICIPANT_NOT_RUNNING"
    PARTICIPANT_FINISHED = "PARTICIPANT_FINISHED"
    STORAGE_NOT_READY = "STORAGE_NOT_READY"
    # The attempt begins, and ends before a barrier is out.
    ID_COUNTER_FAILED = "ID_COUNTER_FAILED"
    INITIALISATION_CANCELLED = "INITIALISATION_CANCELLED"
    INITIALISATION_FAILED = "INITIALISATION_FAILED"
    HOOK_FAILED = "HOOK_FAILED"
    # The barrier is out.
    DECLINED = "DECLINED"
    BARRIERS_DO_NOT_ADD_UP = "BARRIERS_DO_NOT_ADD_UP"
    EXPIRED = "EXPIRED"
    SUBSUMED = "SUBSUMED"
    STAGED_DATA_DEAD = "STAGED_DATA_DEAD"
    TASK_FAILED = "TASK_FAILED"
    JOB_STOPPED = "JOB_STOPPED"
    DECISION_FAILED = "DECISION_FAILED"
    OWNER_LOST = "OWNER_LOST"
    COMMITTABLE_LOST = "COMMITTABLE_LOST"
    SAVEPOINT_FAILED = "SAVEPOINT_FAILED"

    @property
    def phase(self) -> FailurePhase:
        """Phase of a checkpoint in which this reason may occur."""
        return next(phase for phase, reasons in FAILURE_TEXTS.items() if self in reasons)

    @property
    def counts(self) -> bool:
        """True if it counts toward the tolerable failures."""
        return self in _COUNTED

    @property
    def text(self) -> str:
        """Explanation in one line, for a log or a table."""
        return FAILURE_TEXTS[self.phase][self]


class FailurePhase(enum.Enum):
    #: Refused; it never had an id.
    PRE_CHECK = "PRE_CHECK"
    #: Begun; nothing was asked of any task yet.
    INITIALISATION = "INITIALISATION"
    #: Its barrier was offered.
    IN_FLIGHT = "IN_FLIGHT"


_R = CheckpointFailureReason

FAILURE_TEXTS: Mapping[FailurePhase, Mapping[CheckpointFailureReason, str]] = {
    FailurePhase.PRE_CHECK: {
        _R.SHUT_DOWN: "the coordinator is shut down",
        _R.PERIODIC_SCHEDULING_OFF: "periodic checkpoints are switched off",
        _R.ALREADY_QUEUED: "a periodic request is waiting in the queue already",
        _R.QUEUE_FULL: "the queue of requests is full of more important ones",
        _R.TOO_MANY_PENDING: "the allowed number of checkpoints is in flight",
        _R.MINIMUM_PAUSE: "the pause after the last checkpoint is not over",
        _R.PARTICIPANT_NOT_RUNNING: "a participant is not running",
        _R.PARTICIPANT_FINISHED: "a participant has finished, and the settings do not allow that",
        _R.STORAGE_NOT_READY: "the storage is not ready to take a checkpoint",
    },
    FailurePhase.INITIALISATION: {
        _R.ID_COUNTER_FAILED: "the next checkpoint id could not be read",
        _R.INITIALISATION_CANCELLED: "it was discarded while it was being triggered",
        _R.INITIALISATION_FAILED: "its record in the job directory could not be written",
        _R.HOOK_FAILED: "a master hook failed",
    },
    FailurePhase.IN_FLIGHT: {
        _R.DECLINED: "a participant declined it",
        _R.BARRIERS_DO_NOT_ADD_UP: "a sink did not see the barrier exactly once on every channel",
        _R.EXPIRED: "it was not decided within its timeout",
        _R.SUBSUMED: "a newer checkpoint completed first",
        _R.STAGED_DATA_DEAD: "data staged for it can no longer be committed",
        _R.TASK_FAILED: "the query failed and is restarted",
        _R.JOB_STOPPED: "the job was stopped or cancelled",
        _R.DECISION_FAILED: "the store did not take the decision",
        _R.OWNER_LOST: "a newer owner has taken the job over",
        _R.COMMITTABLE_LOST: "decided data is lost; the next start replays it",
        _R.SAVEPOINT_FAILED: "the checkpoint is complete, its export as a savepoint failed",
    },
}
_COUNTED = frozenset({_R.ID_COUNTER_FAILED, _R.INITIALISATION_FAILED, _R.HOOK_FAILED, _R.DECLINED})
_COUNTED |= {_R.BARRIERS_DO_NOT_ADD_UP, _R.EXPIRED, _R.STAGED_DATA_DEAD, _R.DECISION_FAILED}


class FailureVerdict(enum.Enum):
    #: It counts, and the job goes on.
    TOLERATED = "TOLERATED"
    #: Its reason, its id or its purpose does not count.
    NOT_COUNTED = "NOT_COUNTED"
    #: There are more failures in a row than tolerable: the job must fail.
    JOB_FAILS = "JOB_FAILS"


@dataclass(frozen=True, slots=True)
class FailureManager:
    """Counter of failed checkpoints in a row, also over restarts of the query."""

    #: Number of failures in a row that the job tolerates: 0 fails it with the first one, UNLIMITED never.
    tolerable_failures: Limit
    #: Failures that counted since the last completed checkpoint.
    consecutive: int = 0
    #: Their ids, as far as they had one; at most :data:`REMEMBERED_IDS`, the newest.
    counted: frozenset[CheckpointId] = frozenset()
    #: Failures of ids up to this one no longer count: a newer checkpoint completed, the job has
    #: failed since, or the id is older than all remembered ones.
    settled_up_to: CheckpointId = field(default_factory=lambda: CheckpointId(0))

    def __post_init__(self) -> None:
        check_limit("tolerable_failures", self.tolerable_failures, least=0)

    def on_failure(
        self,
        checkpoint: CheckpointId | None,
        reason: CheckpointFailureReason,
        purpose: CheckpointPurpose = CheckpointPurpose.PERIODIC,
    ) -> tuple[FailureManager, FailureVerdict]:
        goes_on_anyway = purpose.is_savepoint and not purpose.is_final
        is_settled = checkpoint is not None and (
            checkpoint <= self.settled_up_to or checkpoint in self.counted
        )
        if goes_on_anyway or not reason.counts or is_settled:
            return self, FailureVerdict.NOT_COUNTED
        ids = self.counted if checkpoint is None else self.counted | {checkpoint}
        if exceeds(self.consecutive + 1, self.tolerable_failures):
            # All checkpoints in flight end with the job. Late failures of their ids must not count
            # against the next attempt.
            newest = max(ids, default=self.settled_up_to)
            return FailureManager(self.tolerable_failures, settled_up_to=newest), FailureVerdict.JOB_FAILS
        after = replace(self, consecutive=self.consecutive + 1, counted=ids)
        if len(ids) > REMEMBERED_IDS:
            # All checkpoints up to the oldest id ended long ago.
            oldest = min(ids)
            after = replace(after, counted=ids - {oldest}, settled_up_to=oldest)
        return after, FailureVerdict.TOLERATED

    def on_completion(self, checkpoint: CheckpointId) -> FailureManager:
        """Return the manager after a checkpoint completed, or a process took the job over."""
        if checkpoint <= self.settled_up_to:
            return self
        # Newer ids that failed before stay counted: a second decline must not count again.
        newer = frozenset(c for c in self.counted if c > checkpoint)
        return replace(self, consecutive=0, counted=newer, settled_up_to=checkpoint)
