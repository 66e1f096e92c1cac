"""Restart strategies: how long to wait before the query is started again, if at all.

A strategy is a frozen value; earlier failures are in a :class:`RestartHistory`, and the random
number for jitter is a parameter, so that the supervisor owns clock and randomness and tests own
the history. Names and rules are Flink's. Two strategies count by time and one by success:

- :class:`ExponentialDelay` and :class:`FailureRate` use the times of failures. A checkpoint in
  between changes nothing: a job that fails after each checkpoint must not restart at full speed.
- :class:`FixedDelay` counts failures since the last checkpoint. (Flink counts them over the life
  of the job, so that a job of some months ends for three unrelated failures.)

With every strategy, :class:`RepeatedFailures` ends a job that fails again and again at the same
micro-batch: a restart does not help.

All strategies check their values in the constructor and raise ValueError; users create their
subclasses in `flinkish_spark.core.config`, which raise ConfigError.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Protocol

from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.protocol.limits import (
    MOST_MS,
    UNLIMITED,
    Limit,
    UnusableValueError,
    check_factor,
    check_limit,
    check_whole,
    exceeds,
)

#: Number of failure times that a history keeps; a strategy cannot count more failures.
REMEMBERED_FAILURES = 1_000
#: The random number for which jitter is 0.
NO_JITTER = 0.5
#: Default of how often a micro-batch may fail from the same cause before the job ends.
TRIES_WITHOUT_PROGRESS = 3
#: Factor of that limit for failures of one kind with different texts, such as random names of files.
TEXTS_OF_A_KIND = 3
#: The most causes, and kinds of causes, that are counted at a time; the oldest is dropped first.
REMEMBERED_CAUSES = 20


@dataclass(frozen=True, slots=True)
class RestartHistory:
    #: Monotonic times of the newest :data:`REMEMBERED_FAILURES` failures, oldest first; a success
    #: does not clear them.
    failures_ms: tuple[int, ...] = ()
    #: Failures in a row since the job last ran well.
    attempts: int = 0

    def add_failure(self, now_ms: int) -> RestartHistory:
        kept = self.failures_ms[1 - REMEMBERED_FAILURES :]
        return replace(self, failures_ms=(*kept, now_ms), attempts=self.attempts + 1)

    def reset_attempts(self) -> RestartHistory:
        return replace(self, attempts=0)


@dataclass(frozen=True, slots=True)
class RestartAfter:
    delay_ms: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str


class RestartStrategy(Protocol):
    """Strategy that the supervisor asks after each failure that a restart may mend."""

    def decide(self, history: RestartHistory, random: float = NO_JITTER) -> RestartAfter | GiveUp:
        """Return the delay of the restart, or the reason to give up."""


@dataclass(frozen=True, slots=True)
class NoRestart:
    """Every failure ends the job."""

    def decide(self, history: RestartHistory, random: float = NO_JITTER) -> RestartAfter | GiveUp:
        """Give up."""
        return GiveUp("the restart strategy is NoRestart")


@dataclass(frozen=True, slots=True)
class FixedDelay:
    """Restart up to `attempts` times in a row, `delay_ms` apart."""

    attempts: Limit = 3
    delay_ms: Milliseconds = 1_000

    def __post_init__(self) -> None:
        check_limit("attempts", self.attempts, least=0)
        check_whole("delay_ms", self.delay_ms, least=0, most=MOST_MS)

    def decide(self, history: RestartHistory, random: float = NO_JITTER) -> RestartAfter | GiveUp:
        """Restart while attempts are left."""
        if exceeds(history.attempts, self.attempts):
            return GiveUp(f"{self.attempts} restarts in a row did not help")
        return RestartAfter(self.delay_ms)


@dataclass(frozen=True, slots=True)
class ExponentialDelay:
    """Restart with a delay that grows with each failure; the default, as in Flink."""

    initial_delay_ms: Milliseconds = 500
    max_delay_ms: Milliseconds = 30_000
    backoff_multiplier: float = 2.0
    jitter_factor: float = 0.1
    reset_backoff_threshold_ms: Milliseconds = 3_600_000
    attempts_before_reset_backoff: Limit = UNLIMITED

    def __post_init__(self) -> None:
        check_whole("initial_delay_ms", self.initial_delay_ms, least=1, most=MOST_MS)
        check_whole("max_delay_ms", self.max_delay_ms, least=1, most=MOST_MS)
        if self.max_delay_ms < self.initial_delay_ms:
            wanted = f"at least initial_delay_ms, which is {self.initial_delay_ms}"
            raise UnusableValueError("max_delay_ms", self.max_delay_ms, wanted)
        check_factor("backoff_multiplier", self.backoff_multiplier, least=1.0, most=1_000.0)
        check_factor("jitter_factor", self.jitter_factor, least=0.0, most=1.0)
        check_whole("reset_backoff_threshold_ms", self.reset_backoff_threshold_ms, least=1, most=MOST_MS)
        check_limit("attempts_before_reset_backoff", self.attempts_before_reset_backoff, least=0)
        _refuse_uncountable("attempts_before_reset_backoff", self.attempts_before_reset_backoff)

    def decide(self, history: RestartHistory, random: float = NO_JITTER) -> RestartAfter | GiveUp:
        """Restart after the next delay, or give up after too many failures without a reset."""
        if not 0 <= random < 1:
            raise ValueError(f"random must be at least 0 and below 1, got {random!r}")
        delay, attempts = float(self.initial_delay_ms), 1
        # The delay without jitter, and the number of failures since the last reset.
        for earlier_ms, later_ms in itertools.pairwise(history.failures_ms):
            if later_ms - earlier_ms >= self.reset_backoff_threshold_ms + delay:
                delay, attempts = float(self.initial_delay_ms), 1
            else:
                delay, attempts = min(self.max_delay_ms, delay * self.backoff_multiplier), attempts + 1
        if exceeds(attempts, self.attempts_before_reset_backoff):
            return GiveUp(
                f"{attempts} failures without {self.reset_backoff_threshold_ms} ms of running between them"
            )
        jitter = delay * self.jitter_factor * (2 * random - 1)
        return RestartAfter(min(self.max_delay_ms, round(delay + jitter)))


@dataclass(frozen=True, slots=True)
class FailureRate:
    """Give up when more than `max_failures` happen within `interval_ms`."""

    max_failures: int = 3
    interval_ms: Milliseconds = 60_000
    delay_ms: Milliseconds = 1_000

    def __post_init__(self) -> None:
        check_whole("max_failures", self.max_failures, least=1)
        check_whole("interval_ms", self.interval_ms, least=1, most=MOST_MS)
        check_whole("delay_ms", self.delay_ms, least=0, most=MOST_MS)
        _refuse_uncountable("max_failures", self.max_failures)

    def decide(self, history: RestartHistory, random: float = NO_JITTER) -> RestartAfter | GiveUp:
        """Restart unless failures come too fast."""
        newest_ms = history.failures_ms[-1]
        recent = [t for t in history.failures_ms if newest_ms - t <= self.interval_ms]
        if len(recent) > self.max_failures:
            return GiveUp(f"{len(recent)} failures within {self.interval_ms} ms")
        return RestartAfter(self.delay_ms)


def _refuse_uncountable(name: str, limit: Limit) -> None:
    if isinstance(limit, int) and limit >= REMEMBERED_FAILURES:
        raise UnusableValueError(name, limit, f"below {REMEMBERED_FAILURES}")


@dataclass(frozen=True, slots=True)
class RepeatedFailures:
    """Counter of failures without progress, by cause and by kind.

    Progress is a confirmed checkpoint, or a failure at a later micro-batch than any before. Outages, such as
    a broker that does not answer, are not counted: a job waits for them as long as its strategy says.
    """

    #: How often a cause may occur before the job ends; UNLIMITED for no end.
    tries: Limit = TRIES_WITHOUT_PROGRESS
    #: The latest micro-batch that failed; None before the first failure.
    batch: int | None = None
    #: Number of failures by cause, the oldest cause first.
    counted: tuple[tuple[str, int], ...] = ()
    #: Number of failures by kind.
    kinds: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        check_limit("tries_without_progress", self.tries, least=1)

    def add_failure(self, batch: int | None, cause: str, kind: str) -> RepeatedFailures:
        # A failure at an earlier micro-batch counts, too: a restart may divide the records differently.
        before = self
        if batch is not None and (self.batch is None or batch > self.batch):
            before = replace(self if self.batch is None else self.reset(), batch=batch)
        counted, kinds = _increment(before.counted, cause), _increment(before.kinds, kind)
        return replace(before, counted=counted, kinds=kinds)

    def reset(self) -> RepeatedFailures:
        return replace(self, batch=None, counted=(), kinds=())

    def times(self, cause: str) -> int:
        return dict(self.counted).get(cause, 0)

    def times_of_kind(self, kind: str) -> int:
        return dict(self.kinds).get(kind, 0)

    def is_stuck(self, cause: str) -> bool:
        return exceeds(self.times(cause) + 1, self.tries)

    def is_stuck_in(self, kind: str) -> bool:
        tries = self.tries * TEXTS_OF_A_KIND if isinstance(self.tries, int) else self.tries
        return exceeds(self.times_of_kind(kind) + 1, tries)


def _increment(counted: tuple[tuple[str, int], ...], what: str) -> tuple[tuple[str, int], ...]:
    others = tuple(one for one in counted if one[0] != what)
    times = dict(counted).get(what, 0) + 1
    return (*others, (what, times))[-REMEMBERED_CAUSES:]
