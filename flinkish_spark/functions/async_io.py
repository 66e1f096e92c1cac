"""Calls to systems outside that a program awaits: functions, when they are called again, and how often."""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from flinkish_spark.core.clock import wall_ms
from flinkish_spark.core.elements import OutputTag, tag_name
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.iterators import is_true
from flinkish_spark.core.validation import (
    check_function,
    check_methods,
    hold_plain_values,
    instance_of,
    raise_config_errors,
    to_ms,
    unusable,
)
from flinkish_spark.functions.keyed import RichFunction
from flinkish_spark.protocol.durations import Duration, Milliseconds
from flinkish_spark.protocol.limits import MOST_MS, checked_factor, checked_whole


class ToSide(NamedTuple):
    """A row for a side output among those that an async function returns.

    Examples
    --------
    >>> LETTERS = OutputTag("letters", "id LONG, why STRING")
    >>> ToSide(LETTERS, (7, "it did not answer")).row
    (7, 'it did not answer')
    """

    tag: OutputTag
    row: Any


def side_of(row: Any) -> str | None:
    return tag_name(row.tag) if isinstance(row, ToSide) else None


@dataclass(frozen=True, slots=True)
class AsyncCall:
    """What the function that is being called may know of the call.

    Parameters
    ----------
    idempotency_key
        Of the element: the same whenever the call is made again, be it by a retry, by a repeated task or
        behind a crash. A callee that knows it does its work once. Behind a keyed operator it stays the same
        as long as the micro-batch does; a job that goes back to a checkpoint has other micro-batches. None
        for a call with several elements, see `keys`.
    attempt
        How often the function was called before for this element, in this task.
    keys
        Of each element of a call, in their order.
    """

    idempotency_key: str | None
    attempt: int
    keys: tuple[str, ...]


CURRENT_CALL: ContextVar[AsyncCall | None] = ContextVar("CURRENT_CALL", default=None)


def current_call() -> AsyncCall:
    """Return what is known of the call that runs; for use in `async_invoke` and `async_invoke_batch`.

    Raises
    ------
    RuntimeError
        No call runs.
    """
    found = CURRENT_CALL.get()
    if found is None:
        raise RuntimeError("current_call() is for async_invoke() and async_invoke_batch(), while they run")
    return found


class _Answering(RichFunction):
    """What both kinds of functions share.

    `open` and `close` may be `async def`, for clients that want a running event loop. They are called once
    for each Python worker, not once for each task: a client and its connections are used by all micro-batches
    that the worker has part in. `close` is called when the function has failed, or the worker ends in good
    order; nothing may depend on it.
    """


class AsyncFunction(_Answering, ABC):
    """A function that asks a system outside for what comes of an element; several calls run at once.

    Names and semantics are those of PyFlink's `AsyncFunction`. A function object is serialised once and
    opened in each Python worker. All calls of a worker share one event loop, so whatever blocks
    (`time.sleep`, a client without `await`) holds up all of them.

    A call may be made again: a retry, a repeated task, a crash. What the callee does must bear that, or go by
    :func:`current_call`'s idempotency key. Without `record_answers=True` the answer has to be the same each
    time, as for any other function.

    Examples
    --------
    >>> import asyncio
    >>> class Rated(AsyncFunction):
    ...     async def async_invoke(self, value) -> list[tuple[str, float]]:
    ...         await asyncio.sleep(0.01)
    ...         return [(value.currency, 1.5)]
    """

    @abstractmethod
    async def async_invoke(self, value: Any) -> Iterable[Any] | None:
        """Return the rows that come of an element, as a list; None and an empty list are no row.

        Each is a tuple, named tuple, Row, dict or dataclass, or a :class:`ToSide` for a side output. What it
        raises is retried if the strategy says so, and then given to :meth:`failed`.
        """

    def timeout(self, value: Any) -> Iterable[Any] | None:
        """Return the rows of an element whose calls together took longer than `timeout_ms`.

        Raises
        ------
        TimeoutError
            As long as this method is not overridden: it ends the job.
        """
        raise TimeoutError("async_invoke() took longer than timeout_ms")

    def failed(self, value: Any, error: Exception) -> Iterable[Any] | None:
        """Return the rows of an element whose last call raised, such as a dead letter.

        As long as this method is not overridden it raises the error, which ends the job.
        """
        raise error


class AsyncBatchFunction(_Answering, ABC):
    """A function that asks for many elements in one call, as models and bulk APIs want it.

    Examples
    --------
    >>> class Embedded(AsyncBatchFunction):
    ...     async def async_invoke_batch(self, inputs) -> list[tuple[str, int]]:
    ...         return [(one.text, len(one.text)) for one in inputs]
    """

    @abstractmethod
    async def async_invoke_batch(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return one row for each element, in their order; None where nothing comes of one.

        A row is as in :meth:`AsyncFunction.async_invoke`. Another number of rows than of elements is an
        error: nobody could tell whose is missing.
        """

    def timeout_batch(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return one row for each element of a call that took longer than `timeout_ms`; raises by default."""
        raise TimeoutError("async_invoke_batch() took longer than timeout_ms")

    def failed_batch(self, inputs: Sequence[Any], error: Exception) -> Sequence[Any]:
        """Return one row for each element of a call that raised; raises the error by default."""
        raise error


def check_is_async(function: object, kind: type, method: str) -> None:
    """Refuse what is no such function, or whose method nobody could await."""
    if not isinstance(function, kind):
        raise unusable(
            "async_function",
            function,
            wanted=f"an instance of a subclass of {kind.__name__}",
            what_to_do="derive from it and make one: `MyFunction()`",
        )
    if not inspect.iscoroutinefunction(getattr(function, method)):
        raise ConfigError(
            f"{method}() of the {type(function).__name__} is not async",
            why="it would block the event loop that all calls of a worker share",
            what_to_do=f"define it with `async def {method}`; a stream's map() and flat_map() take functions "
            "that are not",
        )
    for name in ("timeout", "failed", "timeout_batch", "failed_batch"):
        if inspect.iscoroutinefunction(getattr(function, name, None)):
            raise ConfigError(
                f"{name}() of the {type(function).__name__} is async",
                why="it says what comes of an element when time is up, and waits for nobody",
                what_to_do="define it with `def`",
            )
    check_methods(function, kind, f"the {type(function).__name__}", may_await=("open", "close"))


#: Whether what a call has returned, or raised, asks for another one.
ResultPredicate = Callable[[Any], bool]
ExceptionPredicate = Callable[[Exception], bool]


class async_retry_predicates:  # noqa: N801 -- PyFlink has a module of this name
    """Predicates for retry strategies; names as in PyFlink's module."""

    @staticmethod
    def empty_result_predicate(result: Any) -> bool:
        """Whether a call returned no row."""
        return not result

    @staticmethod
    def has_exception_predicate(error: Exception) -> bool:
        """Whether a call raised anything."""
        return True

    @staticmethod
    def exception_type_predicate(error: Exception, expected_error_type: type[Exception]) -> bool:
        """Whether a call raised an error of a type; for `functools.partial`."""
        return isinstance(error, expected_error_type)


@dataclass(frozen=True)
class AsyncRetryStrategy:
    """When a call is made again, and how long to wait before; made by the class methods.

    Semantics are Flink's: of an element whose call failed, `max_attempts` further ones are made at most, all
    within its `timeout_ms`. Beyond Flink's, an error that says how long to wait is obeyed: one with an
    attribute `retry_after_ms`, or the error of an HTTP client whose response has a header Retry-After.

    Parameters
    ----------
    max_attempts
        How often a call is made again; 0 for never.
    first_delay_ms, longest_delay_ms, multiplier
        Of the waits between calls: each is the one before, multiplied, up to the longest.
    result_predicate
        Says of a result whether it asks for another call; None: none does.
    exception_predicate
        The same of an exception; None: none does, as in Flink. Without either predicate every exception does.
    jitter
        By which part of itself a wait is made longer or shorter by chance, from 0 to 1, so that calls which
        failed together do not come back together.

    Examples
    --------
    >>> strategy = AsyncRetryStrategy.exponential_backoff(3, 100, 1_000, 2.0)
    >>> [strategy.delay_ms(attempt, None) for attempt in (1, 2, 3)]
    [100, 200, 400]
    """

    max_attempts: int
    first_delay_ms: Milliseconds = 0
    longest_delay_ms: Milliseconds = 0
    multiplier: float = 1.0
    result_predicate: ResultPredicate | None = None
    exception_predicate: ExceptionPredicate | None = None
    jitter: float = 0.0

    def __post_init__(self) -> None:
        hold_plain_values(self)
        with raise_config_errors("give a whole number; delays are milliseconds"):
            checked_whole("max_attempts", self.max_attempts, least=0)
            checked_whole("the first delay", self.first_delay_ms, least=0)
            checked_whole("the longest delay", self.longest_delay_ms, least=0)
            checked_factor("jitter", self.jitter, 0, 1)
            checked_factor("multiplier", self.multiplier, 1, MOST_MS)
        for name in ("result_predicate", "exception_predicate"):
            if getattr(self, name) is not None:
                check_function(getattr(self, name), name, 1)

    @classmethod
    def no_retry(cls) -> AsyncRetryStrategy:
        """Make each call once."""
        return cls(0)

    @classmethod
    def fixed_delay(
        cls,
        max_attempts: int,
        backoff_time_millis: Duration,
        result_predicate: ResultPredicate | None = None,
        exception_predicate: ExceptionPredicate | None = None,
        *,
        jitter: float = 0.0,
    ) -> AsyncRetryStrategy:
        """Wait as long before each call that is made again."""
        wait_ms = to_ms("backoff_time_millis", backoff_time_millis)
        return cls(max_attempts, wait_ms, wait_ms, 1.0, result_predicate, exception_predicate, jitter)

    @classmethod
    def exponential_backoff(
        cls,
        max_attempts: int,
        initial_delay: Duration,
        max_retry_delay: Duration,
        multiplier: float,
        result_predicate: ResultPredicate | None = None,
        exception_predicate: ExceptionPredicate | None = None,
        *,
        jitter: float = 0.0,
    ) -> AsyncRetryStrategy:
        """Wait longer each time: `initial_delay` ms, multiplied, up to `max_retry_delay` ms."""
        return cls(
            max_attempts,
            initial_delay,
            max_retry_delay,
            multiplier,
            result_predicate,
            exception_predicate,
            jitter,
        )

    def wants_another(self, attempt: int, result: Any, error: Exception | None) -> bool:
        """Whether a call is made again.

        Parameters
        ----------
        attempt
            The number of the call that ended, from 1.
        """
        if attempt > self.max_attempts:
            return False
        by_result, by_error = self.result_predicate, self.exception_predicate
        if error is None:
            return by_result is not None and is_true(by_result(result), "result_predicate")
        # In Flink a strategy without predicates does nothing.
        return by_result is None if by_error is None else is_true(by_error(error), "exception_predicate")

    def delay_ms(self, attempt: int, error: Exception | None, chance: random.Random | None = None) -> int:
        """Return how long to wait behind a call, by its number from 1 and what it raised."""
        asked_ms = None if error is None else retry_after_ms(error)
        if asked_ms is not None:
            # Nobody is to come earlier than asked, so that chance makes it longer only.
            spread = 0.0 if chance is None else chance.random() * self.jitter
            return round(asked_ms * (1 + spread))
        # A float would overflow with many attempts.
        delay_ms = float(self.first_delay_ms)
        for _ in range(attempt - 1):
            if delay_ms >= self.longest_delay_ms:
                break
            delay_ms *= self.multiplier
        delay_ms = min(delay_ms, self.longest_delay_ms)
        spread = 0.0 if chance is None else (2 * chance.random() - 1) * self.jitter
        return round(delay_ms * (1 + spread))


#: PyFlink has it in a module `async_retry_strategies`.
NO_RETRY_STRATEGY = AsyncRetryStrategy.no_retry()


def retry_after_ms(error: Exception) -> int | None:
    """Return what an error's `retry_after_ms`, or a Retry-After of it or its response, asks to wait."""
    said = getattr(error, "retry_after_ms", None)
    if isinstance(said, int | float) and 0 <= said <= MOST_MS:
        return int(said)
    for holder in (error, getattr(error, "response", None)):
        headers = getattr(holder, "headers", None)
        get = getattr(headers, "get", None)
        text = (get("Retry-After") or get("retry-after")) if callable(get) else None
        if text is not None:
            return _header_ms(str(text).strip())
    return None


def _header_ms(text: str) -> int | None:
    if text.isdecimal():
        return int(text) * 1_000
    try:
        return max(0, int(parsedate_to_datetime(text).timestamp() * 1_000) - wall_ms())
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True)
class CircuitBreaker:
    """Makes no calls for a while to a system that fails.

    Behind so many failed calls in a row a worker makes none for a while, then one to try. If that fails, too,
    it waits as long again. Elements wait, and none is lost: the micro-batch takes longer. The wait is no part
    of an element's `timeout_ms`.

    Parameters
    ----------
    failures
        In a row; a call that takes too long is one.
    reset_ms
        How long no call is made.

    Raises
    ------
    ConfigError
        One is not positive.
    """

    failures: int = 10
    reset_ms: Milliseconds = 30_000

    def __post_init__(self) -> None:
        hold_plain_values(self)
        with raise_config_errors("CircuitBreaker(failures=10, reset_ms=30_000)"):
            checked_whole("failures", self.failures, least=1)
            checked_whole("reset_ms", self.reset_ms, least=1)


@dataclass(frozen=True)
class CallLimits:
    """How often a system outside is called, beside `capacity`.

    Parameters
    ----------
    per_worker_per_s
        Calls that a Python worker begins in a second, evenly spread; retries count. None: as many as it can.
    per_job_per_s
        The same for the whole job. Each worker has an equal share of it, as if all cores that the session
        has when the query starts were at work. So it is not exceeded unless executors are added later, and
        not reached where fewer tasks run.
    circuit_breaker
        None: a system that fails is called on.

    Raises
    ------
    ConfigError
        A rate is not positive.
    """

    per_worker_per_s: float | None = None
    per_job_per_s: float | None = None
    circuit_breaker: CircuitBreaker | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("per_worker_per_s", self.per_worker_per_s),
            ("per_job_per_s", self.per_job_per_s),
        ):
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise ConfigError(
                    f"{name} is {value!r}", what_to_do="give a positive number of calls, or leave it out"
                )
        if self.circuit_breaker is not None:
            instance_of(
                "circuit_breaker",
                self.circuit_breaker,
                CircuitBreaker,
                what_to_do="CircuitBreaker(failures=10)",
            )

    def rate_per_s(self, workers: int) -> float | None:
        """Return how many calls a second one of so many workers may begin; None for any number."""
        share = None if self.per_job_per_s is None else self.per_job_per_s / workers
        rates = [one for one in (self.per_worker_per_s, share) if one is not None]
        return min(rates, default=None)


#: As many calls as `capacity` lets.
NO_LIMITS = CallLimits()
