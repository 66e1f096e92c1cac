"""What is wanted of a job: by the threads of its process, and by other processes through its directory."""

from __future__ import annotations

import threading
from collections.abc import Callable

from flinkish_spark.answers import Asked, CheckpointAnswer
from flinkish_spark.coordinator import CheckpointCoordinator
from flinkish_spark.protocol.failures import CheckpointFailureReason as Reason
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.trigger import Schedule


class JobControl:
    """Passes requests to whichever coordinator runs; remembers what outlives it.

    One for the life of a supervisor. Every method may be called by any thread, at any time, and none
    blocks for longer than a look at a directory.

    Parameters
    ----------
    why_no_savepoint_at
        Returns why no savepoint can be written to a directory; empty if one can.
    """

    def __init__(self, why_no_savepoint_at: Callable[[str], str]) -> None:
        self._why_no_savepoint_at = why_no_savepoint_at
        self._coordinator: CheckpointCoordinator | None = None
        self._schedule = Schedule.ON
        self._lock = threading.Lock()
        self._is_over = False
        #: No query runs yet, so there is nothing that a last checkpoint could be taken of.
        self.is_starting = True
        #: A last checkpoint is to be taken, then the job is to end.
        self.stop_wanted = threading.Event()
        #: The job is to end at once.
        self.cancel_wanted = threading.Event()
        #: Set with either of them: where no query runs, nothing has to be waited for any more.
        self.end_wanted = threading.Event()

    # -- wishes ---------------------------------------------------------------------------------
    def stop_with_checkpoint(self) -> None:
        """Let the job take a last checkpoint, finish it and end."""
        # This order matters: whoever sees the second must be able to tell which of the two it is.
        self.stop_wanted.set()
        self.end_wanted.set()

    def cancel(self) -> None:
        """Let the job end at once; the next start goes on from the last checkpoint."""
        self.cancel_wanted.set()
        self.end_wanted.set()

    def ask(self, asked: Asked) -> None:
        """Ask for a checkpoint or a savepoint; it is answered exactly once, perhaps before this returns.

        What can be known before a checkpoint gets an id is refused here: no query runs, or nothing
        can be written where the savepoint is to go.
        """
        coordinator = self._coordinator
        if self._is_over:
            asked.on_answer(CheckpointAnswer.refused(Reason.SHUT_DOWN))
            return
        if coordinator is None or coordinator.is_stopping:
            asked.on_answer(CheckpointAnswer.refused(Reason.PARTICIPANT_NOT_RUNNING))
            return
        why = self._why_no_savepoint_at(asked.target) if asked.purpose.is_savepoint else ""
        if why:
            asked.on_answer(CheckpointAnswer.refused(Reason.STORAGE_NOT_READY, why))
        else:
            coordinator.ask(asked)

    def schedule(self, schedule: Schedule) -> None:
        """Switch the timer on or off, also for later starts of the query."""
        with self._lock:
            self._schedule = schedule
            if self._coordinator is not None:
                self._coordinator.schedule(schedule)

    # -- the supervisor's part ------------------------------------------------------------------
    @property
    def exporting(self) -> frozenset[CheckpointId]:
        """Checkpoints whose savepoints are being written: nothing they need may be deleted."""
        coordinator = self._coordinator
        return frozenset() if coordinator is None else coordinator.exporting

    @property
    def is_tearing_down(self) -> bool:
        """Whether the query is being ended, so that what waits for a system has to give up."""
        coordinator = self._coordinator
        return self.cancel_wanted.is_set() or (coordinator is not None and coordinator.is_stopping)

    def must_give_up(self) -> bool:
        """Whether what waits for an outside system has to give up; asked in every such wait."""
        return self.end_wanted.is_set() if self.is_starting else self.is_tearing_down

    def attach(self, coordinator: CheckpointCoordinator) -> None:
        """Pass requests to `coordinator`, which runs; an earlier one gets none any more."""
        with self._lock:
            if self._schedule is Schedule.OFF:
                coordinator.schedule(Schedule.OFF)
            self._coordinator = coordinator

    def detach(self) -> None:
        """Refuse requests until another coordinator runs."""
        with self._lock:
            self._coordinator, self.is_starting = None, True

    def over(self) -> None:
        """Refuse everything from now on: the job has ended in this process."""
        self._is_over = True
