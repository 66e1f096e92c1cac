"""Restarts of a job's query after failures: which failure ends the job, and how long the next start waits."""

from __future__ import annotations

import logging
from collections.abc import Callable

from flinkish_spark.checkpoint.coordinator import StopWithSavepointError
from flinkish_spark.checkpoint.failures import RepeatableUserError, identity_of, is_outage, kind_of
from flinkish_spark.core.errors import CancellationTimedOut, FlinkishError, NoProgressError, SparkGoneError
from flinkish_spark.job.job_control import JobControl
from flinkish_spark.protocol.ids import BatchId
from flinkish_spark.protocol.limits import Limit
from flinkish_spark.protocol.restart import (
    TRIES_WITHOUT_PROGRESS,
    GiveUp,
    RepeatedFailures,
    RestartHistory,
    RestartStrategy,
)

LOG = logging.getLogger(__name__)


class RestartPolicy:
    """The restart policy: failures of one job in one process; used by the supervisor's thread."""

    def __init__(
        self,
        strategy: RestartStrategy,
        random: Callable[[], float],
        tries_without_progress: Limit = TRIES_WITHOUT_PROGRESS,
    ) -> None:
        self._strategy, self._random = strategy, random
        #: Records for which a user function raised an error: the second time ends the job.
        self._failed_records: set[tuple[object, ...]] = set()
        #: Such errors that name no record; after a checkpoint it is a different record.
        self._unplaced: set[tuple[object, ...]] = set()
        self._failed_while_stopping = False
        self._repeated = RepeatedFailures(tries_without_progress)
        #: The first failure of each counted cause and kind.
        self._first: dict[str, FlinkishError] = {}
        self._first_of_kind: dict[str, FlinkishError] = {}
        self.history = RestartHistory()

    def gives_up(self, error: FlinkishError, control: JobControl) -> bool:
        """Return True if the job ends after this failure since it was stopped or cancelled."""
        if isinstance(error, CancellationTimedOut):
            # The user who cancelled the job must learn that its process was ended.
            raise error
        if control.cancel_wanted.is_set():
            LOG.warning("the job is cancelled; before that it failed: %s", error)
            return True
        if control.stop_wanted.is_set() and self._failed_while_stopping:
            # The query was restarted once for its last checkpoint; more restarts would never end.
            LOG.error("stopped without a last checkpoint; the next start continues: %s", error)
            return True
        self._failed_while_stopping = control.stop_wanted.is_set()
        return False

    def delay_ms_after(self, error: FlinkishError, now_ms: int, batch: BatchId | None = None) -> int:
        """Return the delay before the next start; raise an error if there is none."""
        if isinstance(error, StopWithSavepointError):
            # The savepoint failed and not the job: it restarts, whatever its restart strategy is.
            return 0
        if isinstance(error, SparkGoneError) or not error.restartable:
            raise error
        if isinstance(error, RepeatableUserError):
            if error.record in self._failed_records:
                raise error
            self._failed_records.add(error.record)
            if not error.is_placed:
                self._unplaced.add(error.record)
        self.history = self.history.add_failure(now_ms)
        if error.ends_when_repeated and not is_outage(error):
            self._raise_if_stuck(error, batch)
        verdict = self._strategy.decide(self.history, self._random())
        if isinstance(verdict, GiveUp):
            LOG.error("not restarting: %s", verdict.reason)
            raise error
        return verdict.delay_ms

    def ran_well(self) -> None:
        self._failed_records -= self._unplaced
        self._unplaced.clear()
        self._repeated = self._repeated.reset()
        self._first.clear()
        self._first_of_kind.clear()
        self.history = self.history.reset_attempts()

    def _raise_if_stuck(self, error: FlinkishError, batch: BatchId | None) -> None:
        cause, kind = identity_of(error), kind_of(error)
        self._repeated = repeated = self._repeated.add_failure(
            None if batch is None else batch.value, cause, kind
        )
        if repeated.times_of_kind(kind) == 1:
            self._first_of_kind[kind] = error
        if repeated.times(cause) == 1:
            # Messages may differ each time, so failures that no longer count are removed here, too.
            self._first = {c: e for c, e in self._first.items() if repeated.times(c)} | {cause: error}
        if repeated.is_stuck(cause):
            first, tries = self._first[cause], repeated.times(cause)
        elif repeated.is_stuck_in(kind):
            first, tries = self._first_of_kind[kind], repeated.times_of_kind(kind)
        else:
            return
        LOG.error("not restarting: it failed %s times without progress", tries)
        where = "before its first micro-batch" if batch is None else f"at micro-batch {batch}"
        reason = (
            f"it failed {tries} times {where} with no checkpoint in between, so another restart will not help"
        )
        mend = first.what_to_do or "correct the cause; then the job continues from its last checkpoint"
        raise NoProgressError(
            first.what,
            why=f"{first.why}; {reason}" if first.why else reason,
            what_to_do=f"{mend}. If it does pass by itself, raise tries_without_progress",
            **{**first.facts, "tries": tries, "batch": batch},
        ) from first
