"""The running sum and count of a key, in Spark's three ways for Python: one state, read and written once.

What is yielded is what the API asks for: frames of pandas here, rows there. `get` answers nothing for a key
that has no state, so nobody asks `exists` before; every question is a way to the JVM and back.
"""

from __future__ import annotations

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

STATE = "total LONG, orders LONG"
OUTPUT = "user STRING, total LONG, orders LONG"


def _with(frames, total, orders):
    for frame in frames:
        amounts = frame["amount"].to_numpy()
        total, orders = total + int(amounts.sum()), orders + len(amounts)
    return total, orders


def per_key(key, frames, state):
    """For applyInPandasWithState, a group per key."""
    total, orders = _with(frames, *(state.getOption or (0, 0)))
    state.update((total, orders))
    yield pd.DataFrame({"user": [key[0]], "total": [total], "orders": [orders]})


class RowTotal(StatefulProcessor):
    def init(self, handle):
        self.total = handle.getValueState("total", STATE)

    def handleInputRows(self, key, rows, timers):
        total, orders = self.total.get() or (0, 0)
        for row in rows:
            total, orders = total + row.amount, orders + 1
        self.total.update((total, orders))
        yield Row(user=key[0], total=total, orders=orders)

    def close(self):
        pass


class PandasTotal(RowTotal):
    def handleInputRows(self, key, rows, timers):
        total, orders = _with(rows, *(self.total.get() or (0, 0)))
        self.total.update((total, orders))
        yield pd.DataFrame({"user": [key[0]], "total": [total], "orders": [orders]})
