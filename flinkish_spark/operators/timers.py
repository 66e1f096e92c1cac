"""Timers of one key group: registered, deleted, fired in order, each once.

Flink's rules: a timer is unique by (time, key, namespace); registering it again does nothing, and
deleting one that is not there does nothing. A timer may be registered in the past: it fires with the
next watermark or processing time, or, while timers fire, still in this round.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from flinkish_spark.operators.elements import Timer


class TimerQueue:
    """The timers of one clock.

    They fire by time, and at the same time in the order of their registration. That order is part of
    the state: whoever restores a queue sees the same calls.

    Parameters
    ----------
    timers
        Those that were stored, and the place of each in the order of registration.
    registered
        Places that were given out.
    """

    __slots__ = ("_heap", "_live", "_stored", "registered")

    def __init__(self, timers: Mapping[Timer, int] = MappingProxyType({}), registered: int = 0) -> None:
        self._stored = timers
        #: Timers that count, and the place of each; a heap entry with another place was deleted.
        self._live = dict(timers)
        self._heap = [(timer.time_ms, place, timer) for timer, place in timers.items()]
        heapq.heapify(self._heap)
        self.registered = registered

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, timer: Timer) -> bool:
        return timer in self._live

    @property
    def next_ms(self) -> int | None:
        """When the first timer is due; None without timers."""
        self._drop_deleted()
        return self._heap[0][0] if self._heap else None

    def register(self, timer: Timer) -> bool:
        """Add a timer; return whether it is new."""
        if timer in self._live:
            return False
        self._live[timer] = self.registered
        heapq.heappush(self._heap, (timer.time_ms, self.registered, timer))
        self.registered += 1
        return True

    def delete(self, timer: Timer) -> bool:
        """Remove a timer; return whether it was there."""
        if self._live.pop(timer, None) is None:
            return False
        if len(self._heap) > 4 * len(self._live) + 64:
            self._heap = self._in_order()
        return True

    def due(self, now_ms: int) -> Iterator[Timer]:
        """Take the timers up to and with `now_ms`, one by one.

        What is registered or deleted between two of them counts: a timer may delete the next one.
        """
        while (next_ms := self.next_ms) is not None and next_ms <= now_ms:
            timer = heapq.heappop(self._heap)[2]
            del self._live[timer]
            yield timer

    def gone(self) -> dict[Timer, int]:
        """Return the stored timers that are not there any more, with their places."""
        live = self._live
        return {timer: place for timer, place in self._stored.items() if timer not in live}

    def new(self) -> dict[Timer, int]:
        """Return the timers that are not stored, or with another place, with their places."""
        place_of = self._stored.get
        return {timer: place for timer, place in self._live.items() if place_of(timer) != place}

    def _in_order(self) -> list[tuple[int, int, Timer]]:
        return sorted((timer.time_ms, place, timer) for timer, place in self._live.items())

    def _drop_deleted(self) -> None:
        while self._heap and self._live.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
