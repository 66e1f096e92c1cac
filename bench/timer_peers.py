"""An alarm per key that each record moves, in Spark's three ways for Python: the state is when it is due.

Spark calls a function with a key's new rows before its timers of that micro-batch, so an alarm that the
watermark has reached is found there: else it would be moved although the key was silent for long enough.
"""

from __future__ import annotations

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from bench.frame_times import times_ms

ALARM_MS = 30_000
STATE = "due LONG"
OUTPUT = "user STRING, begins LONG, total LONG"


def _latest(frames):
    return max(int(times_ms(frame).max()) for frame in frames)


def _frame(user, due):
    return pd.DataFrame({"user": [user], "begins": [due], "total": [0]})


def per_key(key, frames, state):
    """For applyInPandasWithState with a timeout in event time, a group per key."""
    (before,) = state.getOption or (None,)
    if state.hasTimedOut:
        state.remove()
        yield _frame(key[0], before)
        return
    due = _latest(frames) + ALARM_MS
    state.update((due,))
    state.setTimeoutTimestamp(due)
    if before is not None and before <= state.getCurrentWatermarkMs():
        yield _frame(key[0], before)


class RowSilence(StatefulProcessor):
    def init(self, handle):
        self.handle = handle
        self.due = handle.getValueState("due", STATE)

    def handleInputRows(self, key, rows, timers):
        return self._moved(key[0], max(row.at_ms for row in rows) + ALARM_MS, timers)

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        self.due.clear()
        yield self._alarm(key[0], expiredTimerInfo.getExpiryTimeInMs())

    def _moved(self, user, due, timers):
        (before,) = self.due.get() or (None,)
        if before is not None:
            self.handle.deleteTimer(before)
        self.handle.registerTimer(due)
        self.due.update((due,))
        if before is not None and before <= timers.getCurrentWatermarkInMs():
            yield self._alarm(user, before)

    def _alarm(self, user, due):
        return Row(user=user, begins=due, total=0)

    def close(self):
        pass


class PandasSilence(RowSilence):
    def handleInputRows(self, key, rows, timers):
        return self._moved(key[0], _latest(rows) + ALARM_MS, timers)

    def _alarm(self, user, due):
        return _frame(user, due)
