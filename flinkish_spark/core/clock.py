"""The one place that reads a clock; spans of time in the log, and for people; threads that are passed in.

Intervals and timeouts use the monotonic clock, so a wall clock that steps back changes nothing; wall-clock
times are only written down for people.

Spans say at DEBUG how long each part of a start took:

    logging.getLogger("flinkish_spark.spans").setLevel(logging.DEBUG)

What the threads of a job wait for (:mod:`flinkish_spark.core.watchdog`) is logged by itself when it has
ended; parts of it that nobody waits for are marked with :func:`span`. `make bench-start ARGS=--debug`
shows them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Protocol, TypeVar


class Clock(Protocol):
    """The clocks and waits of a process; tests and the simulator have their own."""

    def monotonic_ms(self) -> int:
        """Return milliseconds that never go back; the origin has no meaning."""

    def wall_ms(self) -> int:
        """Return milliseconds since 1970, for display."""

    def sleep_ms(self, duration_ms: int) -> None: ...

    def wait(self, event: threading.Event, timeout_ms: int) -> bool: ...


def wall_ms() -> int:
    """Return the wall clock in milliseconds since 1970, for workers: of no job, or measuring latency."""
    return SystemClock().wall_ms()


class SystemClock:
    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        return int(time.time() * 1000)

    def sleep_ms(self, duration_ms: int) -> None:
        time.sleep(duration_ms / 1000)

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        return event.wait(timeout_ms / 1000)


#: Between two requests to a broker.
FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 20, 500


def backoff_ms(first_ms: int, longest_ms: int) -> Iterator[int]:
    """Yield how long to wait before each further try: twice as long every time, up to `longest_ms`."""
    pause_ms = first_ms
    while True:
        yield pause_ms
        pause_ms = min(longest_ms, 2 * pause_ms)


def tries(
    budget_ms: int, clock: Clock, first_ms: int = FIRST_PAUSE_MS, longest_ms: int = LONGEST_PAUSE_MS
) -> Iterator[int]:
    """Yield the milliseconds left, once at once and then after growing pauses, until none are."""
    end_ms = clock.monotonic_ms() + budget_ms
    yield budget_ms
    for pause_ms in backoff_ms(first_ms, longest_ms):
        if (left_ms := end_ms - clock.monotonic_ms()) > 0:
            clock.sleep_ms(min(pause_ms, left_ms))
        if (left_ms := end_ms - clock.monotonic_ms()) <= 0:
            return
        yield left_ms


LOG = logging.getLogger("flinkish_spark.spans")
#: Shorter spans are not logged: the coordinator's steps and calls to Spark come many times a second.
LEAST_MS = 10


def log_span(what: str, took_ms: int) -> None:
    """Log a span that has ended, unless it was a short one."""
    if took_ms >= LEAST_MS:
        LOG.debug("%6d ms: %s", took_ms, what)


@contextmanager
def span(what: str) -> Iterator[None]:
    began_ns = time.monotonic_ns()
    try:
        yield
    finally:
        log_span(what, (time.monotonic_ns() - began_ns) // 1_000_000)


T = TypeVar("T")
_POLL_MS = 10


class RunningThread(Protocol):
    def is_alive(self) -> bool: ...

    def join(self) -> None: ...


class Threads(Protocol):
    """Starts threads; code in them waits by the :class:`~flinkish_spark.core.clock.Clock`."""

    def start(self, name: str, target: Callable[[], None]) -> RunningThread:
        """Run `target`, which must not raise, in a thread that does not keep the process alive."""


class GivenUp(Exception):
    """The wait for a thread was given up; the thread runs on, and its result is dropped."""


def outcome_of(
    work: Callable[[], T], name: str, threads: Threads, clock: Clock, must_give_up: Callable[[], bool]
) -> T:
    """Run code that may hang, such as a user's function, in a thread of its own; return its result."""
    found: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threads.start(name, run)
    while thread.is_alive():
        if must_give_up():
            raise GivenUp(name)
        clock.sleep_ms(_POLL_MS)
    if failures:
        raise failures[0]
    return found[0]


class SystemThreads:
    def start(self, name: str, target: Callable[[], None]) -> RunningThread:
        thread = threading.Thread(name=name, target=copy_context().run, args=(target,), daemon=True)
        thread.start()
        return thread


def duration_text(ms: int | None) -> str:
    if ms is None:
        return "-"
    if ms < 1_000:
        return f"{ms:.0f} ms"
    seconds = ms / 1_000
    if seconds < 60:
        return f"{seconds:.1f} s"
    for unit, small, length_s, part_s in (("min", "s", 60, 1), ("h", "min", 3_600, 60)):
        if seconds < length_s * (60 if unit == "min" else 24):
            return f"{seconds // length_s:.0f} {unit} {seconds % length_s // part_s:.0f} {small}"
    return f"{seconds // 86_400:.0f} d {seconds % 86_400 // 3_600:.0f} h"
