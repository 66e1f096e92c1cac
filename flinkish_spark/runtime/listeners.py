"""Telling listeners what a job and its tasks do."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

from flinkish_spark.errors import FlinkishError
from flinkish_spark.protocol.checkpoint import IllegalTransitionError
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.job_status import (
    Change,
    JobEvent,
    JobState,
    JobStatus,
    TaskEvent,
    TaskState,
)
from flinkish_spark.runtime.staged_ages import StagedAge
from flinkish_spark.runtime.watchdog import Waiting, unwatched

LOG = logging.getLogger(__name__)


class JobListener(Protocol):
    """Told of changes, in the order in which they happened, by threads of the job.

    Must return soon; what it raises is logged. Derive from :class:`QuietListener` to be told of
    some changes only; what it has beside the methods here is called only where a listener has it.
    """

    def on_change(self, change: Change) -> None:
        """Note that the status of the job or the state of a task changed."""

    def on_checkpoint_complete(self, checkpoint: CheckpointId) -> None:
        """Note that a checkpoint is confirmed: every sink shows its data."""

    def on_checkpoint_aborted(self, checkpoint: CheckpointId, newest: CheckpointId | None) -> None:
        """Note that a checkpoint was aborted; `newest` is the latest complete one."""


class QuietListener:
    """Notes nothing."""

    def on_change(self, change: Change) -> None:
        """Do nothing."""

    def on_checkpoint_complete(self, checkpoint: CheckpointId) -> None:
        """Do nothing."""

    def on_checkpoint_aborted(self, checkpoint: CheckpointId, newest: CheckpointId | None) -> None:
        """Do nothing."""

    def on_staged_data_aging(self, age: StagedAge) -> None:
        """Do nothing; called once per sink and epoch, when half of its data's lifetime has passed."""


class JobStates:
    """The job's status and its tasks' states, kept by the supervisor and read by anybody.

    Parameters
    ----------
    waiting
        Notes which listener has not returned: whoever changes a state next waits for it, too.
    """

    def __init__(
        self, uids: Iterable[str], listeners: Sequence[JobListener], waiting: Waiting = unwatched
    ) -> None:
        self._state, self._listeners = JobState.created(uids), tuple(listeners)
        self._waiting = waiting
        self._newest: CheckpointId | None = None
        self._lock = threading.RLock()

    @property
    def status(self) -> JobStatus:
        """Return what the job does."""
        return self._state.status

    @property
    def tasks(self) -> dict[str, TaskState]:
        """Return the states of the tasks by uid."""
        return dict(self._state.tasks)

    def on(self, event: JobEvent, cause: str = "") -> None:
        """Take a step; raise IllegalTransitionError if the table has none."""
        with self._lock:
            self._state, changes = self._state.on(event, cause)
            self._tell(changes)

    def failed(self, error: FlinkishError) -> None:
        """Note that the job failed, and in which of its tasks if the error names one."""
        uid, cause = error.facts.get("uid"), str(error)
        if isinstance(uid, str) and uid in self._state.tasks:
            with self._lock, contextlib.suppress(IllegalTransitionError):
                self._state, changes = self._state.on_task(
                    uid, TaskEvent.FAIL, attempt=self._state.attempt, cause=cause
                )
                self._tell(changes)
        self.on(JobEvent.FAILURE, cause)

    def over(self, cause: str) -> None:
        """Note that everything has ended because of `cause`, for good."""
        if self.status is JobStatus.CANCELLING:
            self.on(JobEvent.ALL_ENDED, cause)
        elif not self.status.is_terminal:
            self.on(JobEvent.FAILURE, cause)
            self.on(JobEvent.GIVE_UP, cause)

    def tasks_run(self) -> None:
        """Note that a micro-batch came through: every task of this attempt runs."""
        for event in (TaskEvent.INITIALIZE, TaskEvent.RUN):
            for uid in self._state.tasks:
                with self._lock, contextlib.suppress(IllegalTransitionError):
                    self._state, changes = self._state.on_task(uid, event, attempt=self._state.attempt)
                    self._tell(changes)

    def goes_on_from(self, newest: CheckpointId | None) -> None:
        """Note the latest complete checkpoint behind a recovery, which may be an older one than before."""
        self._newest = newest

    def completed(self, checkpoint: CheckpointId) -> None:
        """Tell everybody that a checkpoint is confirmed."""
        self._newest = checkpoint
        for listener in self._listeners:
            self._safely(listener, lambda one=listener: one.on_checkpoint_complete(checkpoint))

    def aborted(self, checkpoint: CheckpointId) -> None:
        """Tell everybody, once, that a checkpoint was aborted."""
        newest = self._newest
        for listener in self._listeners:
            self._safely(listener, lambda one=listener: one.on_checkpoint_aborted(checkpoint, newest))

    def aging(self, age: StagedAge) -> None:
        """Tell those who want to know that staged data grows old."""
        for listener in self._listeners:
            tell = getattr(listener, "on_staged_data_aging", None)
            if tell is not None:
                self._safely(listener, lambda call=tell: call(age))

    def _tell(self, changes: Sequence[Change]) -> None:
        # With the lock held: two threads change states, and listeners are promised the order.
        for change in changes:
            for listener in self._listeners:
                self._safely(listener, lambda one=listener, what=change: one.on_change(what))

    def _safely(self, listener: JobListener, call) -> None:  # type: ignore[no-untyped-def]
        try:
            with self._waiting(f"the listener {type(listener).__name__} to return"):
                call()
        except Exception as error:
            LOG.warning("a listener failed: %s: %s", type(error).__name__, error)
