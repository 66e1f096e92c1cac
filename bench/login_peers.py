"""Three failures and then a success, one right behind the other, in transformWithState by hand.

A key's state are the times of its last failures in a row, three at most. The bench's input is in order.
"""

from __future__ import annotations

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

#: How much time may lie between the first failure and the success.
WITHIN_MS = 60_000
#: An amount below is a failure, any other one a success.
FAILS_BELOW = 200
STATE = "first LONG, second LONG, third LONG"
OUTPUT = "user STRING, begins LONG, total LONG"


class RowLogin(StatefulProcessor):
    def init(self, handle):
        self.failures = handle.getValueState("failures", STATE)

    def handleInputRows(self, key, rows, timers):
        given = sorted((row.at_ms, row.amount) for row in rows)
        return [Row(user=key[0], begins=begins, total=amount) for begins, amount in self._found(given)]

    def _found(self, logins):
        found, first, second, third = [], *(self.failures.get() or (None, None, None))
        for at, amount in logins:
            if amount < FAILS_BELOW:
                first, second, third = second, third, at
                continue
            if first is not None and at - first < WITHIN_MS:
                found.append((first, amount))
            first = second = third = None
        self.failures.update((first, second, third))
        return found

    def close(self):
        pass


class PandasLogin(RowLogin):
    def handleInputRows(self, key, rows, timers):
        frame = pd.concat(list(rows)).sort_values("at_ms", kind="stable")
        found = self._found(zip(frame["at_ms"].tolist(), frame["amount"].tolist(), strict=True))
        if found:
            begins, totals = zip(*found, strict=True)
            yield pd.DataFrame({"user": key[0], "begins": begins, "total": totals})
