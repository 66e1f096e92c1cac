"""Sums of sliding windows in Spark's three ways for Python: a key has one value, with a sum per slice.

An element counts once, in the slice of its slide; a window is the sum of its slices. A timer waits for the
next window of the key only. In a map state or with a timer per window, each slice would be a way to the JVM.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from bench.frame_times import times_ms

SIZE_MS, SLIDE_MS = 60_000, 20_000
#: Where the last window ended that was emitted, and the slices that later ones need.
LISTS = "until LONG, begins ARRAY<LONG>, totals ARRAY<LONG>"
#: The same for applyInPandasWithState, packed: PySpark 4.2's workers read the schema of its state in small
#: letters, and find no `elementType` in it.
STATE = "until LONG, begins BINARY, totals BINARY"
OUTPUT = "user STRING, begins LONG, total LONG"


def _opened(stored):
    """Return until where windows were emitted, and the slices: their sums by their beginnings."""
    if stored is None:
        return 0, {}
    until, begins, totals = stored
    return until, dict(zip(begins, totals, strict=True))


def _stored(until, slices):
    return until, list(slices), list(slices.values())


def _unpacked(stored):
    if stored is None:
        return 0, {}
    until, begins, totals = stored
    slices = (np.frombuffer(packed, np.int64).tolist() for packed in (begins, totals))
    return until, dict(zip(*slices, strict=True))


def _packed(until, slices):
    columns = (np.fromiter(numbers, np.int64, len(slices)) for numbers in (slices, slices.values()))
    return until, *(column.tobytes() for column in columns)


def _due(until, slices):
    """Return where the next window ends that has anything in it."""
    return max(until, min(slices)) + SLIDE_MS if slices else None


def _over(until, slices, watermark_ms):
    """Return the windows that are over, and until where; slices that no later one needs go."""
    begins, totals = [], []
    while slices:
        due = _due(until, slices)
        if due > watermark_ms:
            break
        begins.append(due - SIZE_MS)
        totals.append(sum(slices.get(at, 0) for at in range(due - SIZE_MS, due, SLIDE_MS)))
        slices.pop(due - SIZE_MS, None)
        until = due
    return begins, totals, until


def _add(frames, slices):
    for frame in frames:
        begins = times_ms(frame) // SLIDE_MS * SLIDE_MS
        found, places = np.unique(begins, return_inverse=True)
        sums = np.zeros(len(found), np.int64)
        np.add.at(sums, places, frame["amount"].to_numpy())
        for begin, total in zip(found.tolist(), sums.tolist(), strict=True):
            slices[begin] = slices.get(begin, 0) + total


def per_key(key, frames, state):
    """For applyInPandasWithState with a timeout in event time, a group per key."""
    until, slices = _unpacked(state.getOption)
    if not state.hasTimedOut:
        _add(frames, slices)
    begins, totals, until = _over(until, slices, state.getCurrentWatermarkMs())
    if slices:
        state.update(_packed(until, slices))
        state.setTimeoutTimestamp(_due(until, slices))
    else:
        state.remove()
    if begins:
        yield pd.DataFrame({"user": key[0], "begins": begins, "total": totals})


class RowSliding(StatefulProcessor):
    def init(self, handle):
        self.handle = handle
        self.slices = handle.getValueState("slices", LISTS)

    def handleInputRows(self, key, rows, timers):
        until, slices = _opened(self.slices.get())
        before = _due(until, slices)
        self._add(rows, slices)
        begins, totals, until = _over(until, slices, timers.getCurrentWatermarkInMs())
        due = _due(until, slices)
        if due != before:
            if before is not None:
                self.handle.deleteTimer(before)
            self.handle.registerTimer(due)
        self.slices.update(_stored(until, slices))
        yield from self._results(key[0], begins, totals)

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        # The timer that fires is gone without our doing.
        until, slices = _opened(self.slices.get())
        begins, totals, until = _over(until, slices, timerValues.getCurrentWatermarkInMs())
        if slices:
            self.handle.registerTimer(_due(until, slices))
            self.slices.update(_stored(until, slices))
        else:
            self.slices.clear()
        yield from self._results(key[0], begins, totals)

    def _add(self, rows, slices):
        for row in rows:
            begin = row.at_ms - row.at_ms % SLIDE_MS
            slices[begin] = slices.get(begin, 0) + row.amount

    def _results(self, user, begins, totals):
        for begin, total in zip(begins, totals, strict=True):
            yield Row(user=user, begins=begin, total=total)

    def close(self):
        pass


class PandasSliding(RowSliding):
    def _add(self, rows, slices):
        _add(rows, slices)

    def _results(self, user, begins, totals):
        if begins:
            yield pd.DataFrame({"user": user, "begins": begins, "total": totals})
