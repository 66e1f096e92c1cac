"""Settings of a job, checked when they are made."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeVar

from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.fields import Range, check_fields
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.validation import raise_config_errors
from flinkish_spark.protocol import cancellation
from flinkish_spark.protocol import restart as rules
from flinkish_spark.protocol.checkpoint import FinishedParticipants
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.coordination import CoordinationRules
from flinkish_spark.protocol.durations import Milliseconds, PathText
from flinkish_spark.protocol.limits import MOST_MS, Limit
from flinkish_spark.protocol.retention import CheckpointRetention

#: More checkpoints than this are a slip: in flight, each holds transactions open; retained, files on disk.
MOST_CONCURRENT = 100
MOST_RETAINED = 1_000_000
#: Three beats of an owner: a slow one is not a dead one.
_LEAST_LEASE_MS = 15_000
_MOST_PORT = 65_535


class CheckpointingMode(Choice):
    """How exactly the barriers of one checkpoint must agree."""

    #: Every barrier is seen exactly once, in one micro-batch; otherwise the checkpoint is declined.
    EXACTLY_ONCE = "EXACTLY_ONCE"
    #: Branches may show a barrier in different micro-batches; the last one completes the checkpoint.
    AT_LEAST_ONCE = "AT_LEAST_ONCE"


class _NotesGivenFields:
    """Base of settings that know which of their fields the program gave: others may come from outside."""

    __slots__ = ("_given",)


_SettingsT = TypeVar("_SettingsT")


def _note_given_fields(kind: type[_SettingsT]) -> type[_SettingsT]:
    make, names = kind.__init__, _names_of(kind)

    @functools.wraps(make)
    def run(self: _SettingsT, *values: Any, **named: Any) -> None:
        make(self, *values, **named)
        object.__setattr__(self, "_given", {*names[: len(values)], *named})

    kind.__init__ = run  # type: ignore[assignment, method-assign]
    return kind


def _names_of(config: Any) -> list[str]:
    return [one.name for one in fields(config)]


def find_given_fields(config: Any) -> dict[str, Any]:
    """Return the fields that the program gave to these settings; of a copy, all fields."""
    names = getattr(config, "_given", None)
    return {name: getattr(config, name) for name in (_names_of(config) if names is None else names)}


@_note_given_fields
@dataclass(frozen=True, slots=True)
class CheckpointConfig(_NotesGivenFields):
    """When checkpoints are taken, how long they may last, and which are kept.

    Times are at least 1 ms and at most 365 days.

    Parameters
    ----------
    interval_ms
        Time from one periodic trigger to the next, at a restart from the newest checkpoint. Independent of
        Spark's trigger interval.
    timeout_ms
        A checkpoint not decided this long after its trigger is aborted; what it staged passes to
        the next one.
    min_pause_ms
        Least time between the end of one checkpoint and the next periodic trigger; 0 for none.
        Savepoints and checkpoints by hand do not wait for it.
    max_concurrent
        Most checkpoints in flight, from the trigger to the receipt, up to 100. With 2 or more the
        next one is triggered while the sinks still commit.
    tolerable_failures
        How many checkpoints in a row may fail before the job is restarted; `UNLIMITED` for any
        number. What counts is said in `CheckpointFailureReason`.
    restart_budget_ms
        How long the job may be down with data staged but not decided. A Kafka sink's transaction
        timeout must be at least ``interval_ms + restart_budget_ms``.
    retained
        How many confirmed checkpoints can be gone back to, 1 to 1,000,000; the newest is always kept.
    retention
        What becomes of them when the job is cancelled. Savepoints are never deleted.
    mode
        Exactly once, unless the branches of a job are so uneven that checkpoints are declined.
        Sinks commit exactly once in either mode.
    finished
        Whether checkpoints go on when some sources have reached their end.
    owner_lease_ms
        For a job directory in a bucket: how long a start, or a standby, hears nothing of the owner before it
        takes it for dead. Owners are heard of every 5 s; at least 15 s.

    Examples
    --------
    >>> CheckpointConfig(interval_ms=2_000).timeout_ms
    600000
    """

    interval_ms: Annotated[Milliseconds, Range(1, MOST_MS)] = 10_000
    timeout_ms: Annotated[Milliseconds, Range(1, MOST_MS)] = 600_000
    min_pause_ms: Annotated[Milliseconds, Range(0, MOST_MS)] = 0
    restart_budget_ms: Annotated[Milliseconds, Range(1, MOST_MS)] = 120_000
    retained: Annotated[int, Range(1, MOST_RETAINED)] = 50
    max_concurrent: Annotated[int, Range(1, MOST_CONCURRENT)] = 1
    tolerable_failures: Annotated[Limit, Range(0)] = 10
    retention: CheckpointRetention = CheckpointRetention.RETAIN_ON_CANCELLATION
    mode: CheckpointingMode = CheckpointingMode.EXACTLY_ONCE
    finished: FinishedParticipants = FinishedParticipants.ALLOWED
    owner_lease_ms: Annotated[Milliseconds, Range(_LEAST_LEASE_MS, MOST_MS)] = 60_000

    def __post_init__(self) -> None:
        check_fields(self, "give CheckpointConfig such a value, or leave it out for its default")

    @property
    def is_exactly_once(self) -> bool:
        """True if barriers that disagree decline the checkpoint."""
        return self.mode is CheckpointingMode.EXACTLY_ONCE

    @property
    def replay_ms(self) -> int:
        """How long after its staging data may still be decided, so that its input may be read again."""
        return self.interval_ms + self.restart_budget_ms

    def rules(self) -> CoordinationRules:
        """Return the settings that the coordinator's rules need."""
        return CoordinationRules(
            interval_ms=self.interval_ms,
            min_pause_ms=self.min_pause_ms,
            timeout_ms=self.timeout_ms,
            max_concurrent=self.max_concurrent,
            finished=self.finished,
        )


NoRestart = rules.NoRestart


class _CheckedSettings:
    """Base of settings that a rule checks: times may be texts, and a value it refuses is a ConfigError."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self)
        name = type(self).__name__
        what_to_do = f"give {name} values in this range, or leave them out for the defaults"
        with raise_config_errors(what_to_do):
            super().__post_init__()  # type: ignore[misc]


class FixedDelay(_CheckedSettings, rules.FixedDelay):
    """Restart up to `attempts` times in a row, `delay_ms` apart.

    Parameters
    ----------
    attempts
        Restarts without a checkpoint in between; 0 for none, UNLIMITED for no end.
    delay_ms
        Time before each.

    Examples
    --------
    >>> FixedDelay(attempts=10, delay_ms=200)
    FixedDelay(attempts=10, delay_ms=200)
    """

    __slots__ = ()


class ExponentialDelay(_CheckedSettings, rules.ExponentialDelay):
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

    Examples
    --------
    >>> ExponentialDelay(initial_delay_ms=100).max_delay_ms
    30000
    """

    __slots__ = ()


class FailureRate(_CheckedSettings, rules.FailureRate):
    """Give up when more than `max_failures` happen within `interval_ms`.

    Parameters
    ----------
    max_failures
        Failures within the interval that are taken; at least 1.
    interval_ms
        Length of the interval, which ends with the newest failure.
    delay_ms
        Time before each restart.

    Examples
    --------
    >>> FailureRate(max_failures=2).interval_ms
    60000
    """

    __slots__ = ()


@_note_given_fields
class CancellationConfig(_CheckedSettings, cancellation.CancellationRules):
    """How long a job that is cancelled may take to end, and the micro-batch of one that fails.

    Flink's `task.cancellation.interval` and `task.cancellation.timeout`. Times are at least 1 ms.

    Parameters
    ----------
    interval_ms
        While it does not end, its tasks are interrupted this often, and the log says where they stand.
    timeout_ms
        After this long the JVM is ended in which it runs, with the error `CancellationTimedOut`; UNLIMITED
        for never. A thread on the driver that hangs in a commit, or a listener, is left behind with the same
        error. The next start, or a standby, goes on from the last checkpoint, and commits what is decided.
        A stop by a signal is cancelled when no micro-batch and no checkpoint has ended for so long.

    Examples
    --------
    >>> CancellationConfig(timeout_ms=60_000).interval_ms
    30000
    """

    __slots__ = ("_given",)


@dataclass(frozen=True)
class UiConfig:
    """The configuration of a job's web page and REST server.

    Parameters
    ----------
    host
        The address on which it listens. By default loopback, which other machines cannot reach, and where
        reading needs no token. On any other address reading needs the token, too; put a proxy with TLS before
        the server.
    port
        The port; 0 picks a free one.
    token
        The token that changes must have as `Authorization: Bearer TOKEN`. None makes a new one at each start.
    names
        Further host names of the server, for example a proxy's.
    can_change
        True if the page may trigger checkpoints and savepoints, and stop, cancel and rewind the job.
    savepoint_dir
        Parent directory of savepoints for requests without one: an absolute path, or a URL.

    Examples
    --------
    >>> UiConfig(port=8081, savepoint_dir="/data/savepoints").host
    '127.0.0.1'
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, _MOST_PORT)] = 0
    token: str | None = field(default=None, repr=False)
    names: Sequence[str] = ()
    can_change: bool = True
    savepoint_dir: PathText = ""

    def __post_init__(self) -> None:
        check_fields(
            self,
            host='give an address like "127.0.0.1"',
            port="give a number from 1 to 65535, or 0 for a port that is free",
        )
        if self.token is not None and (not isinstance(self.token, str) or len(self.token) < 16):
            raise ConfigError(
                "the token cannot be used",
                why="it must be a text of 16 characters or more, so that nobody guesses it",
                what_to_do="leave it out for a new one",
            )
        if self.savepoint_dir:
            StoreSpec.parse(self.savepoint_dir)
