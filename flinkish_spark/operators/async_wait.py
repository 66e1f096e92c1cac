"""Runs async functions over the elements of a batch: how many calls at once, time-outs, retries, limits.

Knows neither Spark nor where answers are kept. Nothing is pending when a batch has ended, so a micro-batch
has all that its calls have brought, and a checkpoint never completes over a call that is still on its way.
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
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Generic, TypeVar

from flinkish_spark.core.iterators import USER_ERRORS, elements_of
from flinkish_spark.functions.async_io import (
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
from flinkish_spark.operators.process import ElementFailed
from flinkish_spark.protocol.latency import LatencyHistogram
from flinkish_spark.types.to_python import taken

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
#: The rows that came of an element, of all outputs.
Rows = tuple[Any, ...]


@dataclass(frozen=True)
class AsyncSpec:
    """What a program says of an async function; see :class:`~flinkish_spark.datastream.AsyncDataStream`."""

    function: AsyncFunction | AsyncBatchFunction
    timeout_ms: int
    capacity: int
    retry: AsyncRetryStrategy = NO_RETRY_STRATEGY
    limits: CallLimits = NO_LIMITS
    #: How many elements a call has at most; 1 for an :class:`.AsyncFunction`.
    batch_size: int = 1
    #: Whether answers are durable before anybody uses them.
    is_recorded: bool = False


@dataclass(frozen=True)
class AsyncStatistics:
    """What async calls of an operator cost; names as in PyFlink's metrics where it has them."""

    #: With a result; those whose answer was recorded before are not among them.
    elements: int = 0
    #: Calls that were begun, and how many of them were made again.
    calls: int = 0
    retries: int = 0
    #: Calls that raised, and elements whose calls together took too long.
    failures: int = 0
    timeouts: int = 0
    #: The most calls that ran at once in a worker.
    inflight: int = 0
    batch_size: LatencyHistogram = field(default_factory=LatencyHistogram)
    #: From the begin of an element's first call to its result, with all retries and waits.
    batch_latency_ms: LatencyHistogram = field(default_factory=LatencyHistogram)
    #: Of each call by itself.
    async_call_duration_ms: LatencyHistogram = field(default_factory=LatencyHistogram)

    def merged(self, other: AsyncStatistics) -> AsyncStatistics:
        both: dict[str, Any] = {}
        for each in fields(self):
            one, two = getattr(self, each.name), getattr(other, each.name)
            if isinstance(one, LatencyHistogram):
                both[each.name] = one.merge(two)
            else:
                both[each.name] = max(one, two) if each.name == "inflight" else one + two
        return AsyncStatistics(**both)


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

    def statistics(self) -> AsyncStatistics:
        return AsyncStatistics(
            **self.counted,
            inflight=self.inflight,
            batch_size=LatencyHistogram.of(self.sizes),
            batch_latency_ms=LatencyHistogram.of(self.latencies_ms),
            async_call_duration_ms=LatencyHistogram.of(self.durations_ms),
        )


class _Gate:
    """Holds a call back until its turn by the rate, and while the circuit breaker is open.

    See :class:`.CircuitBreaker`, which holds calls back after failures. Belongs to one event loop.
    """

    def __init__(self, limits: CallLimits, workers: int) -> None:
        rate = limits.rate_per_s(workers)
        self._pause_s = 0.0 if rate is None else 1 / rate
        self._next_s = float("-inf")
        self._breaker, self._failures = limits.circuit_breaker, 0
        self._opens_at_s: float | None = None
        #: Set as long as nobody tries: while one does, all others wait for what comes of it.
        self._nobody_tries = asyncio.Event()
        self._nobody_tries.set()

    async def passed(self) -> None:
        """Wait; what came of the call is to be :meth:`told` then."""
        if self._pause_s:
            now_s = asyncio.get_running_loop().time()
            turn_s = max(self._next_s, now_s)
            self._next_s = turn_s + self._pause_s
            await asyncio.sleep(turn_s - now_s)
        # Last: who is admitted to try must come to an end, or nobody else is.
        while self._opens_at_s is not None:
            wait_s = self._opens_at_s - asyncio.get_running_loop().time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            elif self._nobody_tries.is_set():
                self._nobody_tries.clear()
                return
            else:
                await self._nobody_tries.wait()

    def told(self, error: BaseException | None) -> None:
        """Tell what became of a call."""
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
class Asked:
    #: Its place in the batch.
    at: int
    value: Any
    key: str


#: Takes the rows that came of elements; returns when they may be used.
Answered = Callable[[Sequence[tuple[int, Rows]]], Awaitable[None]]


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
        self.run_until_complete(_finished(self._spec.function.open, context))

    def close(self) -> None:
        if self._loop.is_closed():
            return
        try:
            self.run_until_complete(_finished(self._spec.function.close))
            self.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def run_until_complete(self, work: Awaitable[Any]) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run_until_complete(work)
        # A harness in a notebook's cell: this thread has a loop that runs.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(copy_context().run, self._loop.run_until_complete, work).result()

    async def answer(self, elements: Sequence[Asked], answered: Answered) -> None:
        """Call the function for elements; at most `capacity` of them are on their way."""
        size = self._spec.batch_size
        calls = iter([elements[at : at + size] for at in range(0, len(elements), size)])

        async def caller() -> None:
            for call in calls:
                await answered(await self._one(call))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(max(1, self._spec.capacity // size)):
                    group.create_task(caller())
        except BaseExceptionGroup as failed:
            # Tasks that were cancelled are not among them; of several failures the first is told.
            raise failed.exceptions[0] from None

    def taken_statistics(self) -> AsyncStatistics:
        meter, self._meter = self._meter, _Meter()
        return meter.statistics()

    async def _one(self, call: Sequence[Asked]) -> list[tuple[int, Rows]]:
        await self._gate.passed()
        began_s = self._loop.time()
        try:
            made = await self._in_time(call)
            rows = self._checked(call, made)
        except USER_ERRORS as error:
            raise ElementFailed(call[0].at, False, error) from error
        self._meter.counted["elements"] += len(call)
        self._meter.latencies_ms.append(round((self._loop.time() - began_s) * 1_000))
        return [(one.at, found) for one, found in zip(call, rows, strict=True)]

    async def _in_time(self, call: Sequence[Asked]) -> Any:
        """Return what calls with retries bring, or what the function says if that takes too long."""
        error: Exception | None = None
        try:
            async with asyncio.timeout(self._spec.timeout_ms / 1_000) as limit:
                result, error = await self._with_retries(call, limit)
        except TimeoutError:
            if not limit.expired():
                raise
            self._meter.counted["timeouts"] += len(call)
            return self._called("timeout", call)
        return result if error is None else self._called("failed", call, error)

    async def _with_retries(
        self, call: Sequence[Asked], limit: asyncio.Timeout
    ) -> tuple[Any, Exception | None]:
        attempt = 0
        while True:
            result, error = await self._attempt(call, attempt)
            attempt += 1
            if limit.expired():
                # Whatever the function has made of being cancelled.
                raise TimeoutError
            if not self._spec.retry.wants_another(attempt, result, error):
                return result, error
            await asyncio.sleep(self._spec.retry.delay_ms(attempt, error, self._chance) / 1_000)
            when_s = limit.when()
            assert when_s is not None
            left_s = when_s - self._loop.time()
            # What is held back is not late.
            limit.reschedule(None)
            await self._gate.passed()
            limit.reschedule(self._loop.time() + left_s)

    async def _attempt(self, call: Sequence[Asked], attempt: int) -> tuple[Any, Exception | None]:
        keys = tuple(one.key for one in call)
        CURRENT_CALL.set(AsyncCall(keys[0] if self._spec.batch_size == 1 else None, attempt, keys))
        self._meter.begin(len(call), attempt > 0)
        began_s = self._loop.time()
        failed: BaseException | None = None
        try:
            # Each attempt begins with the element as it came.
            return await self._called("async_invoke", call), None
        except asyncio.CancelledError as cut_off:
            task = asyncio.current_task()
            assert task is not None
            if task.cancelling():
                failed = cut_off
                raise
            # Nobody has cancelled this call: it awaited something else that was.
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
            self._gate.told(failed)

    def _called(self, method: str, call: Sequence[Asked], *error: Exception) -> Any:
        function = self._spec.function
        if isinstance(function, AsyncBatchFunction):
            return getattr(function, f"{method}_batch")([taken(one.value) for one in call], *error)
        return getattr(function, method)(taken(call[0].value), *error)

    def _checked(self, call: Sequence[Asked], made: Any) -> list[Rows]:
        function = self._spec.function
        if not isinstance(function, AsyncBatchFunction):
            return [_rows_of(made, type(function).__name__)]
        if made is None or isinstance(made, str | bytes | Mapping) or not isinstance(made, Iterable):
            raise TypeError(
                f"async_invoke_batch() of {type(function).__name__} returned a {type(made).__name__}; return "
                "a list with one row for each element"
            )
        rows = list(elements_of(made))
        if len(rows) != len(call):
            raise ValueError(
                f"async_invoke_batch() of {type(function).__name__} returned {len(rows)} rows for "
                f"{len(call)} elements; return one for each, and None where nothing comes of it"
            )
        return [() if row is None else (_taken(row),) for row in rows]


def _rows_of(made: Any, name: str) -> Rows:
    if made is None:
        return ()
    is_row = (
        isinstance(made, str | bytes | Mapping) or hasattr(made, "_fields") or hasattr(made, "__fields__")
    )
    if is_row or is_dataclass(made) or not isinstance(made, Iterable):
        raise TypeError(f"async_invoke() of {name} returned a {type(made).__name__}; return a list of rows")
    return tuple(map(_taken, elements_of(made)))


def _taken(row: Any) -> Any:
    return ToSide(row.tag, taken(row.row)) if isinstance(row, ToSide) else taken(row)


async def _finished(method: Callable[..., Any], *given: Any) -> None:
    result = method(*given)
    if inspect.isawaitable(result):
        await result


#: How long an answer waits for others that are made durable with it.
_TOGETHER_MS = 50


class DurableAnswers(Generic[_T]):
    """Hands answers on when they are durable, many at a time, while other calls run.

    What a crash costs is bounded: there are never more than `most` answers that are not durable.
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
        """Take answers; waits while there are too many that are not durable."""
        async with self._changed:
            self._waiting.extend(answers)
            self._changed.notify_all()
            await self._changed.wait_for(
                lambda: len(self._waiting) + self._being_written <= self._most or self._is_over
            )
        if self._failure is not None:
            raise self._failure

    @asynccontextmanager
    async def written(self) -> AsyncIterator[None]:
        """Write answers as long as this lasts, and the last ones at its end, also if it fails."""
        writer = asyncio.create_task(self._write())
        try:
            yield
        finally:
            async with self._changed:
                self._is_over = True
                self._changed.notify_all()
            # What was answered cost a call: it is kept also where another element has failed.
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
                # Nobody waits for a writer that has failed.
                self._failure, self._is_over = failure, True
                self._changed.notify_all()
            raise

    async def _wait_for_some(self) -> bool:
        """Wait until there is something to write; return whether there is, or ever will be."""
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
