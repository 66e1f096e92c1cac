"""Restart strategies: how long to wait before the query is started again, if at all.

A strategy is a frozen value; what happened so far is a :class:`RestartHistory`, so that the
supervisor owns the clock and tests own the history. Names and rules are Flink's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """What went wrong so far.

    Parameters
    ----------
    failures_ms
        Monotonic times of the last failures, oldest first; kept when the job runs well again,
        since a failure rate is counted over time.
    attempts
        Failures in a row since the job last ran well.
    """

    failures_ms: tuple[int, ...] = ()
    attempts: int = 0

    def failed(self, now_ms: int) -> RestartHistory:
        """Return the history with one more failure."""
        return replace(self, failures_ms=(*self.failures_ms[-99:], now_ms), attempts=self.attempts + 1)

    def ran_well(self) -> RestartHistory:
        """Return the history after enough progress to forget earlier failures."""
        return replace(self, attempts=0)


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """Start again after this long."""

    delay_ms: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start again."""

    reason: str


class RestartStrategy(Protocol):
    """Decides after each failure; `history` already holds that failure."""

    def decide(self, history: RestartHistory) -> RestartAfter | GiveUp:
        """Return the delay or the reason to give up."""


@dataclass(frozen=True, slots=True)
class NoRestart:
    """Every failure ends the job."""

    def decide(self, history: RestartHistory) -> RestartAfter | GiveUp:
        """Give up."""
        return GiveUp("the restart strategy is NoRestart")


@dataclass(frozen=True, slots=True)
class FixedDelay:
    """Restart up to `attempts` times in a row, `delay_ms` apart."""

    attempts: int = 3
    delay_ms: int = 1_000

    def decide(self, history: RestartHistory) -> RestartAfter | GiveUp:
        """Restart while attempts are left."""
        if history.attempts > self.attempts:
            return GiveUp(f"{self.attempts} restarts in a row did not help")
        return RestartAfter(self.delay_ms)


@dataclass(frozen=True, slots=True)
class ExponentialDelay:
    """Restart for ever, doubling the delay up to `max_delay_ms`; the default, as in Flink."""

    initial_delay_ms: int = 500
    max_delay_ms: int = 30_000

    def decide(self, history: RestartHistory) -> RestartAfter | GiveUp:
        """Restart after the next delay."""
        doublings = min(history.attempts - 1, 30)
        return RestartAfter(min(self.max_delay_ms, self.initial_delay_ms << doublings))


@dataclass(frozen=True, slots=True)
class FailureRate:
    """Give up when more than `max_failures` happen within `interval_ms`."""

    max_failures: int = 3
    interval_ms: int = 60_000
    delay_ms: int = 1_000

    def decide(self, history: RestartHistory) -> RestartAfter | GiveUp:
        """Restart unless failures come too fast."""
        newest = history.failures_ms[-1]
        recent = [t for t in history.failures_ms if newest - t < self.interval_ms]
        if len(recent) > self.max_failures:
            return GiveUp(f"{len(recent)} failures within {self.interval_ms} ms")
        return RestartAfter(self.delay_ms)
