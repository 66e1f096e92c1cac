"""Orders that no payment follows within a minute, in transformWithState by hand.

A key's state are its orders that wait, with a timer for the first. The bench's input is in order. Spark calls
a function with a key's new rows before its timers, so an order whose minute is over is found there, too.
"""

from __future__ import annotations

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

WITHIN_MS = 60_000
#: An amount below pays all orders that wait, one from there on is an order; what lies between is neither.
PAYS_BELOW, ORDERS_FROM = 100, 900
STATE = "waiting ARRAY<STRUCT<at: LONG, amount: LONG>>"
OUTPUT = "user STRING, begins LONG, total LONG"


class RowUnpaid(StatefulProcessor):
    def init(self, handle):
        self.handle = handle
        self.waiting = handle.getValueState("waiting", STATE)

    def handleInputRows(self, key, rows, timers):
        events = sorted((row.at_ms, row.amount) for row in rows)
        return self._rows(key[0], self._found(events, timers.getCurrentWatermarkInMs()))

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        waiting, now = self._waiting(), timerValues.getCurrentWatermarkInMs()
        self._keep(None, [one for one in waiting if one[0] + WITHIN_MS > now])
        return self._rows(key[0], [one for one in waiting if one[0] + WITHIN_MS <= now])

    def _found(self, events, watermark):
        before, found = self._waiting(), []
        waiting = list(before)
        for at, amount in events:
            if amount >= ORDERS_FROM:
                waiting.append((at, amount))
            elif waiting and amount < PAYS_BELOW:
                found += [one for one in waiting if one[0] + WITHIN_MS <= at]
                waiting = []
        found += [one for one in waiting if one[0] + WITHIN_MS <= watermark]
        self._keep(before[0] if before else None, [one for one in waiting if one[0] + WITHIN_MS > watermark])
        return found

    def _waiting(self):
        (waiting,) = self.waiting.get() or ((),)
        return [tuple(one) for one in waiting]

    def _keep(self, first, waiting):
        """Store what waits, with a timer for the first of it in place of another one."""
        now_first = waiting[0] if waiting else None
        if first is not None and first != now_first:
            self.handle.deleteTimer(first[0] + WITHIN_MS)
        if now_first is not None and first != now_first:
            self.handle.registerTimer(now_first[0] + WITHIN_MS)
        if waiting:
            self.waiting.update((waiting,))
        else:
            self.waiting.clear()

    def _rows(self, user, found):
        return [Row(user=user, begins=at, total=amount) for at, amount in found]

    def close(self):
        pass


class PandasUnpaid(RowUnpaid):
    def handleInputRows(self, key, rows, timers):
        frame = pd.concat(list(rows)).sort_values("at_ms", kind="stable")
        events = zip(frame["at_ms"].tolist(), frame["amount"].tolist(), strict=True)
        return self._rows(key[0], self._found(events, timers.getCurrentWatermarkInMs()))

    def _rows(self, user, found):
        if not found:
            return []
        begins, totals = zip(*found, strict=True)
        return [pd.DataFrame({"user": user, "begins": begins, "total": totals})]
