"""What a failure of a query means: wait and start again, or give up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from flinkish_spark.errors import FlinkishError, NoProgressError, SparkGoneError, raise_translated
from flinkish_spark.protocol.causes import Chain
from flinkish_spark.protocol.ids import BatchId
from flinkish_spark.protocol.limits import Limit
from flinkish_spark.protocol.restart import (
    TRIES_WITHOUT_PROGRESS,
    GiveUp,
    RepeatedFailures,
    RestartHistory,
    RestartStrategy,
)
from flinkish_spark.runtime.coordinator_parts import StopFailed
from flinkish_spark.runtime.failures import RepeatableUserError, classify, is_outage

if TYPE_CHECKING:
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
    tries_without_progress
        How often a micro-batch may fail from the same cause.
    """

    def __init__(
        self,
        strategy: RestartStrategy,
        random: Callable[[], float],
        tries_without_progress: Limit = TRIES_WITHOUT_PROGRESS,
    ) -> None:
        self._strategy, self._random = strategy, random
        #: Records on which a user function raised: the second time ends the job.
        self._failed_records: set[tuple[object, ...]] = set()
        #: Those of them that name no record; after a checkpoint it is another one.
        self._unplaced: set[tuple[object, ...]] = set()
        self._failed_while_stopping = False
        self._repeated = RepeatedFailures(tries_without_progress)
        #: The first failure from each cause, and of each kind, that is counted.
        self._first: dict[str, FlinkishError] = {}
        self._first_of_kind: dict[str, FlinkishError] = {}
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

    def delay_ms_after(self, error: FlinkishError, now_ms: int, batch: BatchId | None = None) -> int:
        """Return how long to wait before the next start; raise an error if there will be none.

        Parameters
        ----------
        batch
            The first micro-batch that was not through; None if the query did not come so far.

        Raises
        ------
        NoProgressError
            The same came back at this micro-batch, as often as it may.
        FlinkishError
            `error`: a restart cannot mend it, or the strategy gives up.
        """
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
        if error.ends_when_repeated and not is_outage(error):
            self._raise_if_stuck(error, batch)
        verdict = self._strategy.decide(self.history, self._random())
        if isinstance(verdict, GiveUp):
            LOG.error("not restarting: %s", verdict.reason)
            raise error
        return verdict.delay_ms

    def ran_well(self) -> None:
        """Note that a checkpoint was confirmed."""
        self._failed_records -= self._unplaced
        self._unplaced.clear()
        self._repeated = self._repeated.progressed()
        self._first.clear()
        self._first_of_kind.clear()
        self.history = self.history.ran_well()

    def _raise_if_stuck(self, error: FlinkishError, batch: BatchId | None) -> None:
        cause, kind = identity_of(error), kind_of(error)
        self._repeated = repeated = self._repeated.failed(None if batch is None else batch.value, cause, kind)
        if repeated.times_of_kind(kind) == 1:
            self._first_of_kind[kind] = error
        if repeated.times(cause) == 1:
            # Texts may be new each time: what is counted no more is forgotten here, too.
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
        mend = first.what_to_do or "correct what it names; the job goes on from its last checkpoint then"
        raise NoProgressError(
            first.what,
            why=f"{first.why}; {reason}" if first.why else reason,
            what_to_do=f"{mend}. If it does pass by itself, raise tries_without_progress",
            **{**first.facts, "tries": tries, "batch": batch},
        ) from first


def identity_of(error: FlinkishError) -> str:
    """Return what is the same when a failure comes back."""
    return str(error.facts.get("cause") or Chain.of(f"{type(error).__name__}: {error.what}").identity)


def kind_of(error: FlinkishError) -> str:
    """Return the class or condition of the innermost cause, which comes back although the text differs."""
    return str(error.facts.get("kind") or type(error).__name__)


class Patience:
    """What a loop that asks until it is answered waits for: outages; whatever else may pass, a few times."""

    def __init__(self) -> None:
        self._repeated = RepeatedFailures()

    def takes(self, error: Exception) -> FlinkishError:
        """Return what failed, with its type, if it is worth another try.

        Raises
        ------
        FlinkishError
            It is not: asking again does not mend it, or has not so far.
        """
        known = classify(error)
        if known.restartable and is_outage(known):
            return known
        cause, kind = identity_of(known), kind_of(known)
        self._repeated = self._repeated.failed(None, cause, kind)
        if not known.restartable or self._repeated.is_stuck(cause) or self._repeated.is_stuck_in(kind):
            raise_translated(known, error)
        return known
