"""Two rising values, one right behind the other, in Spark's ways for Python: a key's state is its last one.

The bench's input is in order, so rows are compared as micro-batches bring them; with input out of order they
would have to wait for the watermark, as ours do in any case.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from bench.frame_times import times_ms

#: How much time may lie between the two.
WITHIN_MS = 60_000
STATE = "at LONG, amount LONG"
OUTPUT = "user STRING, begins LONG, total LONG"


def _rises(frames, last):
    """Return the first times and second amounts of the pairs, and the last value."""
    frame = pd.concat(list(frames))
    at, amounts = times_ms(frame), frame["amount"].to_numpy()
    order = np.argsort(at, kind="stable")
    at, amounts = at[order], amounts[order]
    if last is not None:
        at, amounts = np.concatenate(([last[0]], at)), np.concatenate(([last[1]], amounts))
    rises = (np.diff(amounts) > 0) & (np.diff(at) < WITHIN_MS)
    return at[:-1][rises], amounts[1:][rises], (int(at[-1]), int(amounts[-1]))


def per_key(key, frames, state):
    """For applyInPandasWithState, a group per key; a state that nobody asks for any more stays."""
    if state.hasTimedOut:
        return
    begins, totals, last = _rises(frames, state.getOption)
    state.update(last)
    if len(begins):
        yield pd.DataFrame({"user": key[0], "begins": begins, "total": totals})


class RowRise(StatefulProcessor):
    def init(self, handle):
        self.last = handle.getValueState("last", STATE)

    def handleInputRows(self, key, rows, timers):
        last = self.last.get()
        for at, amount in sorted((row.at_ms, row.amount) for row in rows):
            if last is not None and amount > last[1] and at - last[0] < WITHIN_MS:
                yield Row(user=key[0], begins=last[0], total=amount)
            last = at, amount
        self.last.update(last)

    def close(self):
        pass


class PandasRise(RowRise):
    def handleInputRows(self, key, rows, timers):
        begins, totals, last = _rises(rows, self.last.get())
        self.last.update(last)
        if len(begins):
            yield pd.DataFrame({"user": key[0], "begins": begins, "total": totals})
