"""Async functions that call external systems, with retry strategies and limits of rates."""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Annotated, Any, NamedTuple

from flinkish_spark.core.clock import wall_ms
from flinkish_spark.core.elements import OutputTag, tag_name
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.fields import Arity, Range, check_fields
from flinkish_spark.core.iterators import is_true
from flinkish_spark.core.validation import (
    check_methods,
    to_ms,
    unusable,
)
from flinkish_spark.functions.keyed import RichFunction
from flinkish_spark.protocol.durations import Duration, Milliseconds
from flinkish_spark.protocol.limits import MOST_MS


class ToSide(NamedTuple):
    """A row for a side output, among the rows that an async function returns.

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
    """The current call of an async function.

    Parameters
    ----------
    idempotency_key
        Key of the element, which stays the same if the call is repeated by a retry, a repeated task or after
        a crash, so that the called system can do its work once. After a keyed operator it stays the same
        within the micro-batch; a job that goes back to a checkpoint has other micro-batches. None for a call
        with several elements, see `keys`.
    attempt
        Number of earlier calls of the function for this element, in this task.
    keys
        Idempotency keys of a call's elements, in order.
    """

    idempotency_key: str | None
    attempt: int
    keys: tuple[str, ...]


CURRENT_CALL: ContextVar[AsyncCall | None] = ContextVar("CURRENT_CALL", default=None)


def current_call() -> AsyncCall:
    """Return the running call; for use in `async_invoke` and `async_invoke_batch`.

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
    """The common base of both kinds of async functions.

    `open` and `close` may be `async def`, for clients that need a running event loop. They are called once
    per Python worker, not once per task: all micro-batches in a worker use the same client and connections.
    `close` is called when the function has failed, or the worker ends regularly; nothing may depend on it.
    """


class AsyncFunction(_Answering, ABC):
    """A function that calls an external system for an element; several calls run at once.

    Names and semantics are those of PyFlink's `AsyncFunction`. A function object is serialised once and
    opened in each Python worker. All calls of a worker share one event loop, so whatever blocks
    (`time.sleep`, a client without `await`) holds up all of them.

    A call may be repeated by a retry, a repeated task or after a crash. The called system must tolerate that,
    or use :func:`current_call`'s idempotency key. Without `record_answers=True` the answer must be the same
    each time, as for any other function.

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
        """Return the rows for an element, as a list; None and an empty list mean no row.

        Each is a tuple, named tuple, Row, dict or dataclass, or a :class:`ToSide` for a side output. If it
        raises, it is called again by the retry strategy; the last error goes to :meth:`on_error`.
        """

    def timeout(self, value: Any) -> Iterable[Any] | None:
        """Return the rows for an element whose calls together took longer than `timeout_ms`.

        Raises
        ------
        TimeoutError
            As long as this method is not overridden: it ends the job.
        """
        raise TimeoutError("async_invoke() took longer than timeout_ms")

    def on_error(self, value: Any, error: Exception) -> Iterable[Any] | None:
        """Return the rows for an element whose last call raised an error, such as a dead letter.

        As long as this method is not overridden it raises the error, which ends the job.
        """
        raise error


class AsyncBatchFunction(_Answering, ABC):
    """A function that calls an external system for many elements at once, such as a model or bulk API.

    Examples
    --------
    >>> class Embedded(AsyncBatchFunction):
    ...     async def async_invoke_batch(self, inputs) -> list[tuple[str, int]]:
    ...         return [(one.text, len(one.text)) for one in inputs]
    """

    @abstractmethod
    async def async_invoke_batch(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return one row for each element, in order; None for an element without a row.

        A row is as in :meth:`AsyncFunction.async_invoke`. A number of rows other than the number of elements
        is an error, since rows could not be assigned to elements.
        """

    def timeout_batch(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return one row for each element of a call that took longer than `timeout_ms`; raises by default."""
        raise TimeoutError("async_invoke_batch() took longer than timeout_ms")

    def on_error_batch(self, inputs: Sequence[Any], error: Exception) -> Sequence[Any]:
        """Return one row for each element of a call that raised; raises the error by default."""
        raise error


def check_is_async(function: object, kind: type, method: str) -> None:
    """Refuse an object that is no async function of this kind, or whose method is not async."""
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
    for name in ("timeout", "on_error", "timeout_batch", "on_error_batch"):
        if inspect.iscoroutinefunction(getattr(function, name, None)):
            raise ConfigError(
                f"{name}() of the {type(function).__name__} is async",
                why="it makes the rows for an element after a time-out or error, and must not wait",
                what_to_do="define it with `def`",
            )
    check_methods(function, kind, f"the {type(function).__name__}", may_await=("open", "close"))


#: A predicate: does a call's result or error need another call?
ResultPredicate = Callable[[Any], bool]
ExceptionPredicate = Callable[[Exception], bool]


class async_retry_predicates:  # noqa: N801 -- PyFlink has a module of this name
    """Predicates for retry strategies; names as in PyFlink's module."""

    @staticmethod
    def empty_result_predicate(result: Any) -> bool:
        """Return whether a call returned no row."""
        return not result

    @staticmethod
    def has_exception_predicate(error: Exception) -> bool:
        """Return whether a call raised anything."""
        return True

    @staticmethod
    def exception_type_predicate(error: Exception, expected_error_type: type[Exception]) -> bool:
        """Return whether a call raised an error of a type; for `functools.partial`."""
        return isinstance(error, expected_error_type)


@dataclass(frozen=True)
class AsyncRetryStrategy:
    """A strategy of when to repeat a call, and how long to wait before; made by the class methods.

    As in Flink, at most `max_attempts` further calls are made for an element whose call failed, all within
    its `timeout_ms`. Beyond Flink, the wait may come from the error: from its attribute `retry_after_ms`, or
    from a header Retry-After of an HTTP client's response.

    Parameters
    ----------
    max_attempts
        How often a call is repeated; 0 for never.
    first_delay_ms, longest_delay_ms, multiplier
        Waits between calls: each is the previous one, multiplied, up to the longest.
    result_predicate
        Whether a result needs another call; None: no result does.
    exception_predicate
        Whether an exception does; None: none does, as in Flink. Without either predicate every one does.
    jitter
        Random change of a wait, as a fraction of it from 0 to 1, so that calls that failed together are not
        repeated together.

    Examples
    --------
    >>> strategy = AsyncRetryStrategy.exponential_backoff(3, 100, 1_000, 2.0)
    >>> [strategy.delay_ms(attempt, None) for attempt in (1, 2, 3)]
    [100, 200, 400]
    """

    max_attempts: Annotated[int, Range(0)]
    first_delay_ms: Annotated[Milliseconds, Range(0)] = 0
    longest_delay_ms: Annotated[Milliseconds, Range(0)] = 0
    multiplier: Annotated[float, Range(1, MOST_MS)] = 1.0
    result_predicate: Annotated[ResultPredicate | None, Arity(1)] = None
    exception_predicate: Annotated[ExceptionPredicate | None, Arity(1)] = None
    jitter: Annotated[float, Range(0, 1)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "give a whole number; delays are milliseconds")

    @classmethod
    def no_retry(cls) -> AsyncRetryStrategy:
        """Return a strategy without retries."""
        return cls(0)

    @classmethod
    def fixed_delay(
        cls,
        max_attempts: int,
        backoff_time_millis: Duration,
        result_predicate: Annotated[ResultPredicate | None, Arity(1)] = None,
        exception_predicate: Annotated[ExceptionPredicate | None, Arity(1)] = None,
        *,
        jitter: Annotated[float, Range(0, 1)] = 0.0,
    ) -> AsyncRetryStrategy:
        """Return a strategy that waits equally long before each further call."""
        wait_ms = to_ms("backoff_time_millis", backoff_time_millis)
        return cls(max_attempts, wait_ms, wait_ms, 1.0, result_predicate, exception_predicate, jitter)

    @classmethod
    def exponential_backoff(
        cls,
        max_attempts: int,
        initial_delay: Duration,
        max_retry_delay: Duration,
        multiplier: float,
        result_predicate: Annotated[ResultPredicate | None, Arity(1)] = None,
        exception_predicate: Annotated[ExceptionPredicate | None, Arity(1)] = None,
        *,
        jitter: Annotated[float, Range(0, 1)] = 0.0,
    ) -> AsyncRetryStrategy:
        """Return a strategy of growing waits: `initial_delay` ms, multiplied, up to `max_retry_delay` ms."""
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
        """Return whether to repeat a call.

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
        """Return how long to wait after a call, by its number from 1 and the error that it raised."""
        asked_ms = None if error is None else retry_after_ms(error)
        if asked_ms is not None:
            # A requested wait may only be made longer, never shorter.
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
    """Return the wait that an error, or its response, asks for by `retry_after_ms` or Retry-After."""
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
    """A circuit breaker, which stops calls to a failing system for a while.

    After `failures` failed calls in a row a worker waits `reset_ms`, then makes one call. If it fails too,
    the worker waits again. Elements wait and none is lost: the micro-batch takes longer. The wait is not part
    of an element's `timeout_ms`.

    Parameters
    ----------
    failures
        Number of failed calls in a row; a time-out is a failure.
    reset_ms
        How long calls are stopped.
    """

    failures: Annotated[int, Range(1)] = 10
    reset_ms: Annotated[Milliseconds, Range(1)] = 30_000

    def __post_init__(self) -> None:
        check_fields(self, "CircuitBreaker(failures=10, reset_ms=30_000)")


@dataclass(frozen=True)
class CallLimits:
    """Limits of the rate of calls to an external system, beside `capacity`.

    Parameters
    ----------
    per_worker_per_s
        The most calls per second of a Python worker, evenly spread; retries count. None: no limit.
    per_job_per_s
        The most calls per second of the whole job. Each worker has an equal share, based on the number of
        cores of the session when the query starts. So the limit holds unless executors are added later, and
        is not reached if fewer tasks run.
    circuit_breaker
        None: a failing system is still called.
    """

    per_worker_per_s: float | None = None
    per_job_per_s: float | None = None
    circuit_breaker: CircuitBreaker | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value in (
            ("per_worker_per_s", self.per_worker_per_s),
            ("per_job_per_s", self.per_job_per_s),
        ):
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise ConfigError(f"{name} is {value!r}", what_to_do="give a number above 0, or leave it out")

    def rate_per_s(self, workers: int) -> float | None:
        """Return the calls per second that each of several workers may begin; None for any number."""
        share = None if self.per_job_per_s is None else self.per_job_per_s / workers
        rates = [one for one in (self.per_worker_per_s, share) if one is not None]
        return min(rates, default=None)


#: As many calls as `capacity` lets.
NO_LIMITS = CallLimits()
