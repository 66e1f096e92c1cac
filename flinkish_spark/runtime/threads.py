"""Threads, passed in: a simulator gives threads that run one at a time, in an order of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from flinkish_spark.clock import Clock

T = TypeVar("T")
_POLL_MS = 10


class RunningThread(Protocol):
    """A thread that was started."""

    def is_alive(self) -> bool:
        """Whether it has not ended."""

    def join(self) -> None:
        """Wait for its end; called by another thread."""


class Threads(Protocol):
    """Starts threads; what waits in them waits by the :class:`~flinkish_spark.clock.Clock`."""

    def start(self, name: str, target: Callable[[], None]) -> RunningThread:
        """Run `target`, which must not raise, in a thread that does not keep the process alive."""


class GivenUp(Exception):
    """Whoever waited for a thread was told to give up; the thread goes on, and nobody hears of its end."""


def outcome_of(
    work: Callable[[], T], name: str, threads: Threads, clock: Clock, must_give_up: Callable[[], bool]
) -> T:
    """Do what may hang, code of the user's for example, in a thread of its own; return what it returns.

    Raises
    ------
    GivenUp
        `must_give_up` said so before it was done.
    """
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
    """Python's threads."""

    def start(self, name: str, target: Callable[[], None]) -> RunningThread:
        """Start a daemon thread."""
        thread = threading.Thread(name=name, target=target, daemon=True)
        thread.start()
        return thread
