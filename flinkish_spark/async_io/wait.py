"""Runs async functions over the elements of a batch, with capacity, time-outs, retries and limits.

Independent of Spark and of the place where answers are stored. No call is pending when a batch ends, so a
micro-batch contains the results of all of its calls, and no checkpoint completes over a pending call.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass, is_dataclass
from typing import Any, Generic, TypeVar

from flinkish_spark.async_io.functions import (
    CURRENT_CALL,
    NO_LIMITS,
    NO_RETRY_STRATEGY,
    AsyncBatchFunction,
    AsyncCall,
    AsyncFunction,
    AsyncRetryStrategy,
    CallLimits,
    ToSide,
)
from flinkish_spark.contracts.calls import AsyncStatistics
from flinkish_spark.core.iterators import USER_ERRORS, elements_of
from flinkish_spark.operators.process import ElementError
from flinkish_spark.protocol.latency import LatencyHistogram
from flinkish_spark.types.to_python import copy_if_mutable

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
#: The rows made of one element, for all outputs.
Rows = tuple[Any, ...]


@dataclass(frozen=True)
class AsyncSpec:
    """An async function and its settings; see :class:`~flinkish_spark.datastream.AsyncDataStream`."""

    function: AsyncFunction | AsyncBatchFunction
    timeout_ms: int
    capacity: int
    retry: AsyncRetryStrategy = NO_RETRY_STRATEGY
    limits: CallLimits = NO_LIMITS
    #: Greatest number of elements per call; 1 for an :class:`.AsyncFunction`.
    batch_size: int = 1
    #: Whether answers are stored durably before they are used.
    is_recorded: bool = False


class _Meter:
    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self.running = self.inflight = 0
        self.sizes: list[int] = []
        self.latencies_ms: list[int] = []
        self.durations_ms: list[int] = []

    def begin(self, size: int, is_retry: bool) -> None:
        self.counted["calls"] += 1
        self.counted["retries"] += is_retry
        self.sizes.append(size)
        self.running += 1
        self.inflight = max(self.inflight, self.running)

    def end(self, took_s: float) -> None:
        self.running -= 1
        self.durations_ms.append(round(took_s * 1_000))

    def to_statistics(self) -> AsyncStatistics:
        return AsyncStatistics(
            **self.counted,
            inflight=self.inflight,
            batch_size=LatencyHistogram.of(self.sizes),
            batch_latency_ms=LatencyHistogram.of(self.latencies_ms),
            async_call_duration_ms=LatencyHistogram.of(self.durations_ms),
        )


class _Gate:
    """Delays calls to keep the rate limit, and while the :class:`.CircuitBreaker` is open.

    Belongs to one event loop.
    """

    def __init__(self, limits: CallLimits, workers: int) -> None:
        rate = limits.rate_per_s(workers)
        self._pause_s = 0.0 if rate is None else 1 / rate
        self._next_s = float("-inf")
        self._breaker, self._failures = limits.circuit_breaker, 0
        self._opens_at_s: float | None = None
        #: Cleared while one call probes a half-open breaker; the others wait for its result.
        self._nobody_tries = asyncio.Event()
        self._nobody_tries.set()

    async def wait_for_turn(self) -> None:
        """Wait until a call may start; report its result to :meth:`on_result` afterwards."""
        if self._pause_s:
            now_s = asyncio.get_running_loop().time()
            turn_s = max(self._next_s, now_s)
            self._next_s = turn_s + self._pause_s
            await asyncio.sleep(turn_s - now_s)
        # Last: the call that probes the breaker must end, or the others wait for ever.
        while self._opens_at_s is not None:
            wait_s = self._opens_at_s - asyncio.get_running_loop().time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            elif self._nobody_tries.is_set():
                self._nobody_tries.clear()
                return
            else:
                await self._nobody_tries.wait()

    def on_result(self, error: BaseException | None) -> None:
        """Count the result of a call: its error, or None for success."""
        if self._breaker is None:
            return
        if error is None:
            self._failures, self._opens_at_s = 0, None
        else:
            self._failures += 1
            if self._failures >= self._breaker.failures or not self._nobody_tries.is_set():
                self._opens_at_s = asyncio.get_running_loop().time() + self._breaker.reset_ms / 1_000
        self._nobody_tries.set()


@dataclass(frozen=True)
class AsyncElement:
    #: Its position in the batch.
    at: int
    value: Any
    key: str


#: Takes positions of elements and the rows made of them; returns when the rows may be used.
TakeAnswers = Callable[[Sequence[tuple[int, Rows]]], Awaitable[None]]


class AsyncWait:
    """An opened async function and the event loop that all of its calls share."""

    def __init__(
        self, spec: AsyncSpec, workers: int = 1, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._spec = spec
        self._loop = asyncio.new_event_loop() if loop is None else loop
        self._gate = _Gate(spec.limits, workers)
        self._chance = random.Random()
        self._meter = _Meter()

    def open(self, context: Any) -> None:
        self.run_until_complete(_call_and_await(self._spec.function.open, context))

    def close(self) -> None:
        if self._loop.is_closed():
            return
        try:
            self.run_until_complete(_call_and_await(self._spec.function.close))
            self.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def run_until_complete(self, work: Awaitable[Any]) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run_until_complete(work)
        # In a notebook's cell this thread already runs an event loop.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(copy_context().run, self._loop.run_until_complete, work).result()

    async def answer(self, elements: Sequence[AsyncElement], take: TakeAnswers) -> None:
        """Call the function for elements, at most `capacity` of them at a time."""
        size = self._spec.batch_size
        calls = iter([elements[at : at + size] for at in range(0, len(elements), size)])

        async def caller() -> None:
            for call in calls:
                await take(await self._call(call))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(max(1, self._spec.capacity // size)):
                    group.create_task(caller())
        except BaseExceptionGroup as failed:
            # Cancelled tasks are not among the exceptions; report the first failure.
            raise failed.exceptions[0] from None

    def take_statistics(self) -> AsyncStatistics:
        meter, self._meter = self._meter, _Meter()
        return meter.to_statistics()

    async def _call(self, call: Sequence[AsyncElement]) -> list[tuple[int, Rows]]:
        await self._gate.wait_for_turn()
        began_s = self._loop.time()
        try:
            made = await self._call_with_timeout(call)
            rows = self._check_rows(call, made)
        except USER_ERRORS as error:
            raise ElementError(call[0].at, False, error) from error
        self._meter.counted["elements"] += len(call)
        self._meter.latencies_ms.append(round((self._loop.time() - began_s) * 1_000))
        return [(one.at, found) for one, found in zip(call, rows, strict=True)]

    async def _call_with_timeout(self, call: Sequence[AsyncElement]) -> Any:
        """Return the result of the calls, or of the function's `timeout` or `on_error` method."""
        error: Exception | None = None
        try:
            async with asyncio.timeout(self._spec.timeout_ms / 1_000) as limit:
                result, error = await self._call_with_retries(call, limit)
        except TimeoutError:
            if not limit.expired():
                raise
            self._meter.counted["timeouts"] += len(call)
            return self._invoke("timeout", call)
        return result if error is None else self._invoke("on_error", call, error)

    async def _call_with_retries(
        self, call: Sequence[AsyncElement], limit: asyncio.Timeout
    ) -> tuple[Any, Exception | None]:
        attempt = 0
        while True:
            result, error = await self._attempt(call, attempt)
            attempt += 1
            if limit.expired():
                # Even if the function has caught its cancellation.
                raise TimeoutError
            if not self._spec.retry.wants_another(attempt, result, error):
                return result, error
            await asyncio.sleep(self._spec.retry.delay_ms(attempt, error, self._chance) / 1_000)
            when_s = limit.when()
            assert when_s is not None
            left_s = when_s - self._loop.time()
            # Waiting for the rate limit or the breaker does not count towards the time-out.
            limit.reschedule(None)
            await self._gate.wait_for_turn()
            limit.reschedule(self._loop.time() + left_s)

    async def _attempt(self, call: Sequence[AsyncElement], attempt: int) -> tuple[Any, Exception | None]:
        keys = tuple(one.key for one in call)
        CURRENT_CALL.set(AsyncCall(keys[0] if self._spec.batch_size == 1 else None, attempt, keys))
        self._meter.begin(len(call), attempt > 0)
        began_s = self._loop.time()
        failed: BaseException | None = None
        try:
            # Each attempt gets an unchanged copy of the element.
            return await self._invoke("async_invoke", call), None
        except asyncio.CancelledError as cut_off:
            task = asyncio.current_task()
            assert task is not None
            if task.cancelling():
                failed = cut_off
                raise
            # This call was not cancelled itself: it awaited something that was.
            failed = error = RuntimeError("what the call awaited was cancelled")
            error.__cause__ = cut_off
            self._meter.counted["failures"] += 1
            return None, error
        except Exception as error:
            failed = error
            self._meter.counted["failures"] += 1
            return None, error
        except BaseException as cut_off:
            failed = cut_off
            raise
        finally:
            self._meter.end(self._loop.time() - began_s)
            CURRENT_CALL.set(None)
            self._gate.on_result(failed)

    def _invoke(self, method: str, call: Sequence[AsyncElement], *error: Exception) -> Any:
        function = self._spec.function
        if isinstance(function, AsyncBatchFunction):
            return getattr(function, f"{method}_batch")([copy_if_mutable(one.value) for one in call], *error)
        return getattr(function, method)(copy_if_mutable(call[0].value), *error)

    def _check_rows(self, call: Sequence[AsyncElement], made: Any) -> list[Rows]:
        function = self._spec.function
        if not isinstance(function, AsyncBatchFunction):
            return [_to_rows(made, type(function).__name__)]
        if made is None or isinstance(made, str | bytes | Mapping) or not isinstance(made, Iterable):
            raise TypeError(
                f"async_invoke_batch() of {type(function).__name__} returned a {type(made).__name__}; return "
                "a list with one row for each element"
            )
        rows = list(elements_of(made))
        if len(rows) != len(call):
            raise ValueError(
                f"async_invoke_batch() of {type(function).__name__} returned {len(rows)} rows for "
                f"{len(call)} elements; return one for each, and None for an element without a row"
            )
        return [() if row is None else (_copy_row(row),) for row in rows]


def _to_rows(made: Any, name: str) -> Rows:
    if made is None:
        return ()
    is_row = (
        isinstance(made, str | bytes | Mapping) or hasattr(made, "_fields") or hasattr(made, "__fields__")
    )
    if is_row or is_dataclass(made) or not isinstance(made, Iterable):
        raise TypeError(f"async_invoke() of {name} returned a {type(made).__name__}; return a list of rows")
    return tuple(map(_copy_row, elements_of(made)))


def _copy_row(row: Any) -> Any:
    return ToSide(row.tag, copy_if_mutable(row.row)) if isinstance(row, ToSide) else copy_if_mutable(row)


async def _call_and_await(method: Callable[..., Any], *given: Any) -> None:
    result = method(*given)
    if inspect.isawaitable(result):
        await result


#: How long an answer waits for others to be written with it.
_TOGETHER_MS = 50


class DurableAnswers(Generic[_T]):
    """Writes answers durably in batches while other calls run, then hands them on.

    At most `most` answers are not durable at any time, so a crash repeats at most that many calls.
    """

    def __init__(
        self, append: Callable[[list[tuple[int, Rows]]], _T], on_durable: Callable[[_T], None], most: int
    ) -> None:
        self._append, self._on_durable, self._most = append, on_durable, most
        self._waiting: deque[tuple[int, Rows]] = deque()
        self._being_written = 0
        self._changed = asyncio.Condition()
        self._is_over = False
        self._failure: BaseException | None = None

    async def put(self, answers: Sequence[tuple[int, Rows]]) -> None:
        """Queue answers for writing; wait while too many of them are not durable."""
        async with self._changed:
            self._waiting.extend(answers)
            self._changed.notify_all()
            await self._changed.wait_for(
                lambda: len(self._waiting) + self._being_written <= self._most or self._is_over
            )
        if self._failure is not None:
            raise self._failure

    @asynccontextmanager
    async def run_writer(self) -> AsyncIterator[None]:
        """Run the writer during the block; at its end write the remaining answers, even after an error."""
        writer = asyncio.create_task(self._write())
        try:
            yield
        finally:
            async with self._changed:
                self._is_over = True
                self._changed.notify_all()
            # Each answer cost a call, so keep it even if another element has failed.
            await writer

    async def _write(self) -> None:
        try:
            while await self._wait_for_some():
                batch = list(self._waiting)
                self._waiting.clear()
                self._being_written = len(batch)
                loop = asyncio.get_running_loop()
                self._on_durable(await loop.run_in_executor(None, self._append, batch))
                async with self._changed:
                    self._being_written = 0
                    self._changed.notify_all()
        except BaseException as failure:
            async with self._changed:
                # Wake up all who wait for the writer.
                self._failure, self._is_over = failure, True
                self._changed.notify_all()
            raise

    async def _wait_for_some(self) -> bool:
        """Wait for answers to write; return False if there are none and none will come."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._waiting) or self._is_over)
            if self._is_over or len(self._waiting) >= self._most:
                return bool(self._waiting)
            try:
                async with asyncio.timeout(_TOGETHER_MS / 1_000):
                    await self._changed.wait_for(
                        lambda: self._is_over or 2 * len(self._waiting) >= self._most
                    )
            except TimeoutError:
                pass
            return True
