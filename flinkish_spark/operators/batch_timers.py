"""Timers of many keys at once: registered by number of the key, and due together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from flinkish_spark.operators.elements import MAX_WATERMARK_MS, TimeDomain, Timer
from flinkish_spark.operators.key_index import Array, KeyIndex
from flinkish_spark.operators.timers import TimerQueue
from flinkish_spark.runtime.python_values import to_values


class BatchTimers:
    """The timers of a key group while a vectorised function works on it.

    Parameters
    ----------
    queues
        By clock: those of the keys that have rows, and of those whose timers are due.
    hash_of
        Hash of each key that has one of them; it grows with the timers that are registered.
    key_types
        Arrow types of the key's parts.
    """

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
        """Register a timer per key; one that is there already stays."""
        queue = self.queues[domain]
        for key, hashed, time_ms in _chosen(index, times_ms, where):
            queue.register(Timer(time_ms, key, None))
            self.hash_of[key] = hashed

    def delete(self, domain: TimeDomain, index: KeyIndex, times_ms: Array | int, where: Array | None) -> None:
        """Delete a timer per key; one that is not there is no error."""
        queue = self.queues[domain]
        for key, _, time_ms in _chosen(index, times_ms, where):
            queue.delete(Timer(time_ms, key, None))

    def take_due(self, domain: TimeDomain, now_ms: int) -> tuple[KeyIndex, Array] | None:
        """Take the timers up to and with `now_ms`; return their keys and times, None if there are none.

        The rows of the index are the timers, by time; at the same time in the order of their registration.
        """
        due = list(self.queues[domain].due(now_ms))
        if not due:
            return None
        keys = [timer.key for timer in due]
        parts = [keys] if len(self._key_types) == 1 else list(zip(*keys, strict=True))
        columns = [pa.array(list(part), kind) for part, kind in zip(parts, self._key_types, strict=True)]
        hashes = np.array([self.hash_of[key] for key in keys], dtype=np.int64)
        times_ms = np.array([timer.time_ms for timer in due], dtype=np.int64)
        return KeyIndex.of(hashes, columns), times_ms


def _chosen(index: KeyIndex, times_ms: Array | int, where: Array | None) -> list[tuple[Any, int, int]]:
    """Return key, hash and time of the keys where the array says so."""
    chosen = index.chosen(where)
    times = np.broadcast_to(np.asarray(times_ms), len(index))[chosen]
    if times.dtype.kind not in "iu":
        raise TypeError(f"times of timers are milliseconds as whole numbers, not {times.dtype}")
    if times.dtype.kind == "u" and (times > MAX_WATERMARK_MS).any():
        raise ValueError(f"a timer's time is {times.max()}; 64 bits with a sign must hold it")
    parts = [to_values(column.take(pa.array(chosen))) for column in index.keys]
    keys = parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))
    return list(zip(keys, index.hashes[chosen].tolist(), times.tolist(), strict=True))
