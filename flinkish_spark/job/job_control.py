"""Requests to a running job from any thread, and the checkpoint with which its query ends."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Iterable

from flinkish_spark.checkpoint.answers import CheckpointAnswer, CheckpointTriggerRequest
from flinkish_spark.checkpoint.coordinator import CheckpointCoordinator
from flinkish_spark.checkpoint.event_time import TimeKeeper
from flinkish_spark.core.watchdog import Wait
from flinkish_spark.job.catch_up import CatchUp
from flinkish_spark.protocol.checkpoint import Schedule
from flinkish_spark.protocol.failures import CheckpointFailureReason as Reason
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose

LOG = logging.getLogger(__name__)


class JobControl:
    """Passes requests of any thread to the running coordinator, and keeps what outlives it; never waits."""

    def __init__(self, why_no_savepoint_at: Callable[[str], str]) -> None:
        self._why_no_savepoint_at = why_no_savepoint_at
        self._coordinator: CheckpointCoordinator | None = None
        #: The coordinator whose timer is switched: the same one, but set before it runs.
        self._timed: CheckpointCoordinator | None = None
        self._schedule = Schedule.ON
        self._lock = threading.Lock()
        self._is_over = False
        #: No query runs yet, so no last checkpoint can be taken.
        self.is_starting = True
        #: The job must take a last checkpoint, and end.
        self.stop_wanted = threading.Event()
        #: The job must end at once.
        self.cancel_wanted = threading.Event()
        #: Set with either of the two: ends every wait while no query runs.
        self.end_wanted = threading.Event()

    def stop_with_checkpoint(self) -> None:
        # This order matters: a thread that sees `end_wanted` must be able to tell the reason.
        self.stop_wanted.set()
        self.end_wanted.set()

    def cancel(self) -> None:
        self.cancel_wanted.set()
        self.end_wanted.set()

    def ask(self, asked: CheckpointTriggerRequest) -> None:
        """Trigger a checkpoint or savepoint; it is answered exactly once, perhaps before this returns."""
        coordinator = self._coordinator
        if self._is_over:
            refused = CheckpointAnswer.make_refused(Reason.SHUT_DOWN)
        elif coordinator is None or coordinator.is_stopping:
            text = "the job starts, or starts again: ask once it runs"
            refused = CheckpointAnswer.make_refused(Reason.PARTICIPANT_NOT_RUNNING, text)
        elif asked.purpose.is_savepoint and (why := self._why_no_savepoint_at(asked.target)):
            refused = CheckpointAnswer.make_refused(Reason.STORAGE_NOT_READY, why)
        else:
            coordinator.ask(asked)
            return
        # A caller that ignores the answer would wait for the end of a job that continues.
        LOG.warning("a checkpoint (%s) is refused: %s", asked.purpose.value, refused.text)
        asked.on_answer(refused)

    def schedule(self, schedule: Schedule) -> None:
        """Switch periodic checkpoints on or off, also for later starts of the query."""
        with self._lock:
            self._schedule = schedule
            if self._timed is not None:
                self._timed.schedule(schedule)

    @property
    def exporting(self) -> frozenset[CheckpointId]:
        """Checkpoints whose savepoints are being written; their files must be kept."""
        coordinator = self._coordinator
        return frozenset() if coordinator is None else coordinator.exporting

    def find_waits(self) -> Iterable[Wait]:
        coordinator = self._coordinator
        return () if coordinator is None else coordinator.list_waits()

    def must_give_up(self) -> bool:
        if self.is_starting:
            return self.end_wanted.is_set()
        coordinator = self._coordinator
        return self.cancel_wanted.is_set() or (coordinator is not None and coordinator.is_stopping)

    def prepare(self, coordinator: CheckpointCoordinator) -> None:
        """Switch the timer of a coordinator before it runs, since its first look may trigger."""
        with self._lock:
            if self._schedule is Schedule.OFF:
                coordinator.schedule(Schedule.OFF)
            self._timed = coordinator

    def attach(self, coordinator: CheckpointCoordinator) -> None:
        if self._timed is not coordinator:
            self.prepare(coordinator)
        self._coordinator = coordinator

    def detach(self) -> None:
        """Refuse requests until another coordinator runs."""
        with self._lock:
            self._coordinator, self._timed, self.is_starting = None, None, True

    def close(self) -> None:
        """Refuse all later requests: the job has ended in this process."""
        self._is_over = True


class QueryEnd(enum.Enum):
    #: The job was stopped, or its bounded input is processed.
    OVER = "OVER"
    #: Timers were left after the last checkpoint, or the input grew again.
    NOT_OVER = "NOT_OVER"


class LastCheckpoint:
    """Triggers the final checkpoint of a start; used by the supervisor's and the epoch writer's threads."""

    def __init__(
        self,
        control: JobControl,
        time: TimeKeeper,
        coordinator: CheckpointCoordinator,
        catch_up: CatchUp,
    ) -> None:
        self._control, self._time, self._coordinator = control, time, coordinator
        self._catch_up = catch_up
        self._lock, self._is_asked = threading.Lock(), False

    def look(self) -> None:
        """Trigger it when possible; called ten times a second, and after each staged micro-batch."""
        # What has caught up fires first what its watermark has passed.
        is_over = not self._time.is_due_at_once or self._catch_up.has_waited
        is_caught_up = self._catch_up.is_reached and is_over
        if not (self._control.stop_wanted.is_set() or is_caught_up or self._time.can_end):
            return
        with self._lock:
            if self._is_asked:
                return
            self._is_asked = True
        self._coordinator.ask(CheckpointTriggerRequest(CheckpointPurpose.FINAL, lambda answer: None))

    @property
    def is_confirmed(self) -> bool:
        return self._coordinator.ended_with is not None

    def end(self) -> QueryEnd:
        # A final checkpoint that no user requested means that the input has ended.
        is_of_input = self._coordinator.ended_with is CheckpointPurpose.FINAL
        is_wish = self._control.end_wanted.is_set() or self._catch_up.is_reached
        return QueryEnd.NOT_OVER if is_of_input and not (is_wish or self._time.has_ended) else QueryEnd.OVER
