"""What a failure of a query means: wait and start again, or give up."""

from __future__ import annotations

import logging
from collections.abc import Callable

from flinkish_spark.errors import FlinkishError, SparkGoneError
from flinkish_spark.protocol.restart import GiveUp, RestartHistory, RestartStrategy
from flinkish_spark.runtime.coordinator_parts import StopFailed
from flinkish_spark.runtime.failures import RepeatableUserError
from flinkish_spark.runtime.job_control import JobControl

LOG = logging.getLogger(__name__)


class RestartPolicy:
    """The failures of one job in one process; used by the supervisor's thread.

    Parameters
    ----------
    strategy
        Says how long to wait.
    random
        Returns a number in [0, 1), for the jitter.
    """

    def __init__(self, strategy: RestartStrategy, random: Callable[[], float]) -> None:
        self._strategy, self._random = strategy, random
        #: Records on which a user function raised: the second time ends the job.
        self._failed_records: set[tuple[object, ...]] = set()
        #: Those of them that name no record; after a checkpoint it is another one.
        self._unplaced: set[tuple[object, ...]] = set()
        self._failed_while_stopping = False
        self.history = RestartHistory()

    def gives_up(self, error: FlinkishError, control: JobControl) -> bool:
        """Return whether the job ends behind this failure because it was told to end."""
        if control.cancel_wanted.is_set():
            LOG.warning("the job is cancelled; before that it failed: %s", error)
            return True
        if control.stop_wanted.is_set() and self._failed_while_stopping:
            # It was started once more, to take its last checkpoint. For ever would be no stop.
            LOG.error("stopped without a last checkpoint; the next start goes on: %s", error)
            return True
        self._failed_while_stopping = control.stop_wanted.is_set()
        return False

    def delay_ms_after(self, error: FlinkishError, now_ms: int) -> int:
        """Return how long to wait before the next start; raise `error` if there will be none."""
        if isinstance(error, StopFailed):
            # The savepoint failed and not the job: it goes on, whatever its strategy says.
            return 0
        if isinstance(error, SparkGoneError) or not error.restartable:
            raise error
        if isinstance(error, RepeatableUserError):
            if error.record in self._failed_records:
                raise error
            self._failed_records.add(error.record)
            if not error.is_placed:
                self._unplaced.add(error.record)
        self.history = self.history.failed(now_ms)
        verdict = self._strategy.decide(self.history, self._random())
        if isinstance(verdict, GiveUp):
            LOG.error("not restarting: %s", verdict.reason)
            raise error
        return verdict.delay_ms

    def ran_well(self) -> None:
        """Note that a checkpoint was confirmed."""
        self._failed_records -= self._unplaced
        self._unplaced.clear()
        self.history = self.history.ran_well()
