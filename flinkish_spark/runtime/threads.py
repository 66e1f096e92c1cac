"""Threads, passed in: a simulator gives threads that run one at a time, in an order of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol


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


class SystemThreads:
    """Python's threads."""

    def start(self, name: str, target: Callable[[], None]) -> RunningThread:
        """Start a daemon thread."""
        thread = threading.Thread(name=name, target=target, daemon=True)
        thread.start()
        return thread
