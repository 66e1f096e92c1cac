"""The restart strategies as a user makes them: the rules of `protocol.restart`, refused with ConfigError.

The rules themselves are standard library only and raise ValueError.
"""

from __future__ import annotations

from flinkish_spark.arguments import refused_as_config_errors
from flinkish_spark.protocol import restart as rules

NoRestart = rules.NoRestart


class FixedDelay(rules.FixedDelay):
    """Restart up to `attempts` times in a row, `delay_ms` apart.

    Parameters
    ----------
    attempts
        Restarts without a checkpoint in between; 0 for none, UNLIMITED for no end.
    delay_ms
        Time before each.

    Raises
    ------
    ConfigError
        A value is out of range; times are at most 365 days.

    Examples
    --------
    >>> FixedDelay(attempts=10, delay_ms=200)
    FixedDelay(attempts=10, delay_ms=200)
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        with refused_as_config_errors(_LEAVE_OUT.format("FixedDelay")):
            super().__post_init__()


class ExponentialDelay(rules.ExponentialDelay):
    """Restart with a delay that grows with each failure; the default, as in Flink.

    Parameters
    ----------
    initial_delay_ms
        Delay after the first failure.
    max_delay_ms
        No delay is longer, jitter included.
    backoff_multiplier
        Each further delay is this many times the one before; at least 1.
    jitter_factor
        How far a delay is moved at random, in either direction, as a part of it; 0 to 1. Many jobs
        that lose the same broker then do not all come back in the same moment.
    reset_backoff_threshold_ms
        After this long without a failure, counted from the end of the delay, delay and attempts
        start anew.
    attempts_before_reset_backoff
        Restarts until then; one more failure ends the job. 0 for none, UNLIMITED for no end.

    Raises
    ------
    ConfigError
        A value is out of range; times are at most 365 days.

    Examples
    --------
    >>> ExponentialDelay(initial_delay_ms=100).max_delay_ms
    30000
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        with refused_as_config_errors(_LEAVE_OUT.format("ExponentialDelay")):
            super().__post_init__()


class FailureRate(rules.FailureRate):
    """Give up when more than `max_failures` happen within `interval_ms`.

    Parameters
    ----------
    max_failures
        Failures within the interval that are taken; at least 1.
    interval_ms
        Length of the interval, which ends with the newest failure.
    delay_ms
        Time before each restart.

    Raises
    ------
    ConfigError
        A value is out of range; times are at most 365 days.

    Examples
    --------
    >>> FailureRate(max_failures=2).interval_ms
    60000
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        with refused_as_config_errors(_LEAVE_OUT.format("FailureRate")):
            super().__post_init__()


_LEAVE_OUT = "give {} values in this range, or leave them out for the defaults"
