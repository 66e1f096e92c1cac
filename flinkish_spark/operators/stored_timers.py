"""The timers of one key group as they are stored: those of the keys at hand, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flinkish_spark.operators.elements import TimeDomain
from flinkish_spark.operators.layered_table import LayeredTable
from flinkish_spark.operators.stored_rows import Row, rows_by_slot
from flinkish_spark.operators.table_codec import ALIVE, HASH, TIME
from flinkish_spark.operators.timers import TimerQueue

Array = np.ndarray[Any, Any]

_NONE: Array = np.empty(0, dtype=np.int64)


class StoredTimers:
    """A table of timers per clock.

    Parameters
    ----------
    tables
        By clock.
    registered
        How many places in the order of registration were given out, by clock.
    """

    def __init__(
        self, tables: Mapping[TimeDomain, LayeredTable], registered: Mapping[TimeDomain, int]
    ) -> None:
        self._tables = tables
        self.registered = dict(registered)
        #: Hash of each key that has one of the timers that were selected.
        self.hash_of: dict[Any, int] = {}

    def living(self, domain: TimeDomain) -> tuple[Array, Array]:
        """Return times and hashes of a clock's timers, without making objects of them.

        A timer that fired or was deleted stays in the base until the next one; the delta says its place.
        """
        table = self._tables[domain]
        if not len(table):
            return _NONE, _NONE
        living = table.delta.filter(table.delta.column(ALIVE))
        times, hashes = (living.column(name).to_numpy() for name in (TIME, HASH))
        if table.base is None:
            return times, hashes
        covered = table.delta.column("value_1").drop_null().to_numpy()
        kept = ~np.isin(table.base.column("value_0").to_numpy(), covered)
        below = [table.base.column(name).to_numpy()[kept] for name in (TIME, HASH)]
        return np.concatenate([times, below[0]]), np.concatenate([hashes, below[1]])

    def due(self, domain: TimeDomain, limit_ms: int) -> Array:
        """Return the hashes of keys with timers that are due."""
        times, hashes = self.living(domain)
        found: Array = hashes[times <= limit_ms]
        return found

    def select(self, hashes: Array) -> dict[TimeDomain, TimerQueue]:
        """Return the timers of keys with these hashes, which are sorted and unique."""
        queues = {}
        for domain, table in self._tables.items():
            found = table.select(hashes)
            self.hash_of.update((timer.key, row.hash) for timer, row in found.items())
            stored = {timer: row.value[0] for timer, row in found.items()}
            queues[domain] = TimerQueue(stored, self.registered[domain])
        return queues

    def replace(self, queues: Mapping[TimeDomain, TimerQueue], hash_of: Mapping[Any, int]) -> None:
        """Take over what became of the timers of :meth:`select`.

        Parameters
        ----------
        hash_of
            Hash of each key that has one.
        """
        for domain, queue in queues.items():
            self.registered[domain] = queue.registered
            stored = self._tables[domain]
            in_base = stored.in_base
            new, gone = queue.new(), queue.gone()
            below = [in_base[timer].value[0] if timer in in_base else None for timer in new]
            values = list(zip(new.values(), below, strict=True))
            rows = rows_by_slot(list(new), values, [hash_of[timer.key] for timer in new])
            for timer in gone.keys() & in_base.keys():
                value = (gone.pop(timer), in_base[timer].value[0])
                rows[timer] = Row(timer, value, hash_of[timer.key], alive=False)
            stored.replace(rows, gone)
