"""Clocks that tests move."""

from __future__ import annotations

import threading


class ManualClock:
    """Moves only when somebody sleeps."""

    def __init__(self, now_ms: int = 0) -> None:
        self.now_ms = now_ms

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.now_ms

    def sleep_ms(self, duration_ms: int) -> None:
        self.now_ms += duration_ms

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        if not event.is_set():
            self.now_ms += timeout_ms
        return event.is_set()
