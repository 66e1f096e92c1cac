"""Timers: the queue of one key group, vectorised timers, and the timer service of functions."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from flinkish_spark.core.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, TimeDomain, Timer
from flinkish_spark.state.layered import Array, KeyIndex
from flinkish_spark.state.tables import KeyScope
from flinkish_spark.types.to_python import to_values

#: Faster than a lookup in the enum in each call.
_EVENT_TIME, _PROCESSING_TIME = TimeDomain.EVENT_TIME, TimeDomain.PROCESSING_TIME
_new = tuple.__new__


class TimerQueue:
    """The timers of one clock; they fire by time, then in the order of registration, which is stored.

    Flink's rules: a timer is unique by (time, key, namespace); registering it again and deleting a missing
    one do nothing. A timer in the past fires with the next watermark or processing time, or, while timers
    fire, in the same round.
    """

    __slots__ = ("_heap", "_live", "_stored", "registered")

    def __init__(self, timers: Mapping[Timer, int] = MappingProxyType({}), registered: int = 0) -> None:
        self._stored = timers
        #: The present timers with their places; a heap entry with another place is of a deleted timer.
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
        while self._heap and self._live.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
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
            self._heap = sorted((timer.time_ms, place, timer) for timer, place in self._live.items())
        return True

    def due(self, now_ms: int) -> Iterator[Timer]:
        """Remove and yield the timers up to and including `now_ms`; each may delete later ones."""
        while (next_ms := self.next_ms) is not None and next_ms <= now_ms:
            timer = heapq.heappop(self._heap)[2]
            del self._live[timer]
            yield timer

    def add_of_entries(self, timers: Sequence[tuple[Timer, int | None]]) -> None:
        """Add timers that are stored in entries, with their places."""
        placed = [(timer, place) for timer, place in timers if place is not None]
        if len({*(place for _, place in placed), *self._live.values()}) < len(timers) + len(self._live):
            # A savepoint writer gave them no places, or places that other timers have.
            placed = [(timer, self.registered + at) for at, (timer, _) in enumerate(timers)]
            self.registered += len(placed)
        self._live.update(placed)
        self._heap += [(timer.time_ms, place, timer) for timer, place in placed]
        heapq.heapify(self._heap)

    def first_of_entries(self, entries: Container[Any]) -> dict[Any, tuple[int, int]]:
        """Return time and place of the first timer of each entry, by key and namespace."""
        first: dict[Any, tuple[int, int]] = {}
        for (time_ms, key, namespace), place in self._live.items():
            slot = key, namespace
            if namespace is not None and slot in entries:
                before = first.get(slot)
                if before is None or time_ms < before[0]:
                    first[slot] = time_ms, place
        return first

    def find_gone(self, with_entries: Container[Timer] = ()) -> dict[Timer, int]:
        """Return the stored timers that are deleted or now stored in entries, with their places."""
        live = self._live
        return {
            timer: place
            for timer, place in self._stored.items()
            if timer not in live or timer in with_entries
        }

    def find_new(self, with_entries: Container[Timer] = ()) -> dict[Timer, int]:
        """Return the timers that are not stored yet, or at another place, with their places."""
        place_of = self._stored.get
        return {
            timer: place
            for timer, place in self._live.items()
            if place_of(timer) != place and timer not in with_entries
        }


class BatchTimers:
    """The timers of a key group while a vectorised function works on it."""

    def __init__(
        self,
        queues: Mapping[TimeDomain, TimerQueue],
        hash_of: Mapping[Any, int],
        key_types: Sequence[pa.DataType],
    ) -> None:
        self.queues, self.hash_of = queues, dict(hash_of)
        self._key_types = tuple(key_types)

    def register(
        self, domain: TimeDomain, index: KeyIndex, times_ms: Array | int, where: Array | None
    ) -> None:
        """Register a timer for each chosen key; an existing one keeps its place."""
        for key, hashed, time_ms in _choose(index, times_ms, where):
            self.queues[domain].register(Timer(time_ms, key, None))
            self.hash_of[key] = hashed

    def delete(self, domain: TimeDomain, index: KeyIndex, times_ms: Array | int, where: Array | None) -> None:
        """Delete a timer of each chosen key; a missing one is no error."""
        for key, _, time_ms in _choose(index, times_ms, where):
            self.queues[domain].delete(Timer(time_ms, key, None))

    def take_due(self, domain: TimeDomain, now_ms: int) -> tuple[KeyIndex, Array] | None:
        """Remove the timers up to and including `now_ms`; return their keys and times, in their order."""
        due = list(self.queues[domain].due(now_ms))
        if not due:
            return None
        keys = [timer.key for timer in due]
        parts = [keys] if len(self._key_types) == 1 else list(zip(*keys, strict=True))
        columns = [pa.array(list(part), kind) for part, kind in zip(parts, self._key_types, strict=True)]
        hashes = np.array([self.hash_of[key] for key in keys], dtype=np.int64)
        times_ms = np.array([timer.time_ms for timer in due], dtype=np.int64)
        return KeyIndex.of(hashes, columns), times_ms


def _choose(index: KeyIndex, times_ms: Array | int, where: Array | None) -> list[tuple[Any, int, int]]:
    """Return key, hash and time for the keys for which `where` is true."""
    chosen = index.choose(where)
    times = np.broadcast_to(np.asarray(times_ms), len(index))[chosen]
    if times.dtype.kind not in "iu":
        raise TypeError(f"times of timers are milliseconds as whole numbers, not {times.dtype}")
    if times.dtype.kind == "u" and (times > MAX_WATERMARK_MS).any():
        raise ValueError(f"a timer's time is {times.max()}; 64 bits with a sign must hold it")
    parts = [to_values(column.take(pa.array(chosen))) for column in index.keys]
    keys = parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))
    return list(zip(keys, index.hashes[chosen].tolist(), times.tolist(), strict=True))


class Timers:
    """The timer service of functions, for the current key and namespace."""

    __slots__ = ("_scope", "processing_time_ms", "queues", "watermark_ms")

    def __init__(self, scope: KeyScope) -> None:
        self._scope = scope
        self.queues: dict[TimeDomain, TimerQueue] = {domain: TimerQueue() for domain in TimeDomain}
        self.watermark_ms = MIN_WATERMARK_MS
        self.processing_time_ms = 0

    def current_watermark(self) -> int:
        return self.watermark_ms

    def current_processing_time(self) -> int:
        return self.processing_time_ms

    def register_event_time_timer(self, time_ms: int) -> None:
        self.queues[_EVENT_TIME].register(self._timer(time_ms))

    def register_processing_time_timer(self, time_ms: int) -> None:
        self.queues[_PROCESSING_TIME].register(self._timer(time_ms))

    def delete_event_time_timer(self, time_ms: int) -> None:
        self.queues[_EVENT_TIME].delete(self._timer(time_ms))

    def delete_processing_time_timer(self, time_ms: int) -> None:
        self.queues[_PROCESSING_TIME].delete(self._timer(time_ms))

    def _timer(self, time_ms: int) -> Timer:
        if type(time_ms) is not int or not MIN_WATERMARK_MS <= time_ms <= MAX_WATERMARK_MS:
            time_ms = _whole_ms(time_ms)
        scope = self._scope
        # Takes half the time of `Timer(...)`; most calls for timers come here.
        return _new(Timer, (time_ms, scope.key, scope.namespace))


def _whole_ms(time_ms: Any) -> int:
    try:
        found = operator.index(time_ms)
    except TypeError:
        found = None
    if found is None or isinstance(time_ms, bool) or not MIN_WATERMARK_MS <= found <= MAX_WATERMARK_MS:
        raise ValueError(
            f"a timer's time is {time_ms!r} ({type(time_ms).__name__}); it must be a whole number of "
            "milliseconds since 1970, which 64 bits can hold"
        )
    return found
