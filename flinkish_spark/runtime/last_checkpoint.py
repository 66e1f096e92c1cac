"""The checkpoint behind which a query ends: asked for once, by a user or by the end of all input."""

from __future__ import annotations

import enum
import threading

from flinkish_spark.answers import Asked
from flinkish_spark.coordinator import CheckpointCoordinator
from flinkish_spark.protocol.purpose import CheckpointPurpose
from flinkish_spark.runtime.job_control import JobControl
from flinkish_spark.runtime.time_keeper import Timekeeping


class QueryEnd(enum.Enum):
    """How a start of the query ended that did not fail."""

    #: The job was told to end, or all its input is over and has been worked through.
    OVER = "OVER"
    #: It was not: timers were left behind the last checkpoint, or input that was over went on.
    NOT_OVER = "NOT_OVER"


class LastCheckpoint:
    """Asks for the last checkpoint of a start as soon as it may be taken.

    Touched by the supervisor's thread and the epoch writer's.

    Parameters
    ----------
    control
        Knows whether a user wants the job to stop.
    time
        Knows whether all input is over.
    coordinator
        Of this start. It asks again by itself where the checkpoint is aborted.
    """

    def __init__(self, control: JobControl, time: Timekeeping, coordinator: CheckpointCoordinator) -> None:
        self._control, self._time, self._coordinator = control, time, coordinator
        self._lock, self._is_asked = threading.Lock(), False

    def look(self) -> None:
        """Ask for it if it may be taken; called ten times a second, and behind each staged micro-batch."""
        if not (self._control.stop_wanted.is_set() or self._time.can_end):
            return
        with self._lock:
            if self._is_asked:
                return
            self._is_asked = True
        self._coordinator.ask(Asked(CheckpointPurpose.FINAL, lambda answer: None))

    @property
    def is_confirmed(self) -> bool:
        """Whether everything in front of it is committed."""
        return self._coordinator.ended_with is not None

    def end(self) -> QueryEnd:
        """Return how the query has ended; called when it was torn down."""
        # One that nobody wished for was asked for because all input was over.
        is_of_input = self._coordinator.ended_with is CheckpointPurpose.FINAL
        is_wish = self._control.end_wanted.is_set()
        return QueryEnd.NOT_OVER if is_of_input and not (is_wish or self._time.has_ended) else QueryEnd.OVER
