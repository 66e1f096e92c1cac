"""The one place that reads a clock.

Intervals and timeouts use the monotonic clock, so a wall clock that steps back changes nothing;
wall-clock times are only written down for people.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """What the coordinator needs of time."""

    def monotonic_ms(self) -> int:
        """Return milliseconds that never go back; the origin has no meaning."""

    def wall_ms(self) -> int:
        """Return milliseconds since 1970, for display."""

    def sleep_ms(self, duration_ms: int) -> None:
        """Wait."""

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        """Wait until `event` is set, at most `timeout_ms`; return whether it is."""


def wall_ms() -> int:
    """Return the wall clock in milliseconds since 1970, for workers: of no job, or measuring latency."""
    return SystemClock().wall_ms()


class SystemClock:
    """The machine's clocks."""

    def monotonic_ms(self) -> int:
        """Return the monotonic clock."""
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        """Return the wall clock."""
        return int(time.time() * 1000)

    def sleep_ms(self, duration_ms: int) -> None:
        """Sleep."""
        time.sleep(duration_ms / 1000)

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        """Wait for the event."""
        return event.wait(timeout_ms / 1000)
