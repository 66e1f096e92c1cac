"""Sums of sessions in Spark's three ways for Python: a key's state is its open session, a timer closes it.

There is one open session per key, since the bench's input is in order; with input out of order there could
be more, and these would have to keep a list. Sessions that touch are one, as in Flink and `session_window`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from bench.frame_times import times_ms

GAP_MS = 5_000
STATE = "begins LONG, ends LONG, total LONG"
OUTPUT = "user STRING, begins LONG, total LONG"


def _sessions(frames, opened):
    """Return the sessions that are over, as columns, and the last one, which is open."""
    frames = list(frames)
    frame = frames[0] if len(frames) == 1 else pd.concat(frames)
    at, amounts = times_ms(frame), frame["amount"].to_numpy()
    order = np.argsort(at, kind="stable")
    at, amounts = at[order], amounts[order]
    cuts = np.flatnonzero(np.diff(at) > GAP_MS) + 1
    firsts = np.concatenate(([0], cuts))
    begins, totals = at[firsts], np.add.reduceat(amounts, firsts)
    if opened is not None:
        before, until, total = opened
        if at[0] <= until:
            begins[0], totals[0] = before, totals[0] + total
        else:
            begins, totals = np.concatenate(([before], begins)), np.concatenate(([total], totals))
    last = int(begins[-1]), int(at[-1]) + GAP_MS, int(totals[-1])
    return begins[:-1], totals[:-1], last


def per_key(key, frames, state):
    """For applyInPandasWithState with a timeout in event time, a group per key."""
    if state.hasTimedOut:
        begins, _, total = state.get
        state.remove()
        yield pd.DataFrame({"user": [key[0]], "begins": [begins], "total": [total]})
        return
    begins, totals, opened = _sessions(frames, state.getOption)
    state.update(opened)
    state.setTimeoutTimestamp(opened[1])
    if len(begins):
        yield pd.DataFrame({"user": key[0], "begins": begins, "total": totals})


class RowSession(StatefulProcessor):
    def init(self, handle):
        self.handle = handle
        self.opened = handle.getValueState("session", STATE)

    def handleInputRows(self, key, rows, timers):
        opened = self.opened.get()
        begins, ends, total = opened or (None, None, 0)
        for at, amount in sorted((row.at_ms, row.amount) for row in rows):
            if begins is None:
                begins = at
            elif at > ends:
                yield Row(user=key[0], begins=begins, total=total)
                begins, total = at, 0
            ends, total = at + GAP_MS, total + amount
        self._keep(opened, (begins, ends, total))

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        begins, _, total = self.opened.get()
        self.opened.clear()
        yield self._result(key[0], begins, total)

    def _keep(self, before, opened):
        if before is not None:
            self.handle.deleteTimer(before[1])
        self.handle.registerTimer(opened[1])
        self.opened.update(opened)

    def _result(self, user, begins, total):
        return Row(user=user, begins=begins, total=total)

    def close(self):
        pass


class PandasSession(RowSession):
    def handleInputRows(self, key, rows, timers):
        before = self.opened.get()
        begins, totals, opened = _sessions(rows, before)
        self._keep(before, opened)
        if len(begins):
            yield pd.DataFrame({"user": key[0], "begins": begins, "total": totals})

    def _result(self, user, begins, total):
        return pd.DataFrame({"user": [user], "begins": [begins], "total": [total]})
