"""Virtual time for product code: its clock and its threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from tests.simulation.scheduler import US_PER_MS, Process, Scheduler, SimThread

#: Wall-clock time at which every run begins.
_BEGAN_AT_MS = 1_700_000_000_000


class SimClock:
    """A :class:`~flinkish_spark.core.clock.Clock` of one process.

    Waits may last longer than asked for, as on a busy machine; never shorter.
    """

    def __init__(self, scheduler: Scheduler, chance: random.Random) -> None:
        self._scheduler, self._random = scheduler, chance.random
        #: Moves the wall clock; only people read it.
        self.wall_offset_ms = 0

    def monotonic_ms(self) -> int:
        """Return virtual milliseconds since the run began."""
        return self._scheduler.now_us // US_PER_MS

    def wall_ms(self) -> int:
        """Return the wall-clock time."""
        return _BEGAN_AT_MS + self.wall_offset_ms + self._scheduler.now_us // US_PER_MS

    def sleep_ms(self, duration_ms: int) -> None:
        """Let others run."""
        self._scheduler.pause(int(duration_ms * US_PER_MS * (1 + self._random())))

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        """Let others run until the time is over; return whether `event` is set by then."""
        if not event.is_set():
            self._scheduler.pause(int(timeout_ms * US_PER_MS * (1 + 2 * self._random())))
        return event.is_set()


class SimThreads:
    """:class:`~flinkish_spark.core.clock.Threads` of one process."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        self._scheduler, self._process = scheduler, process

    def start(self, name: str, target: Callable[[], None]) -> SimThread:
        """Run `target` in a simulated thread."""
        return self._scheduler.spawn(self._process, f"{self._process.name}/{name}", target)
