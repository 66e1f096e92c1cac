"""Open windows of a key group's keys as columns: what comes is added, what is due fires.

Functions of their arguments alone. Where a window stands follows from its end and the watermark, so nothing
has to be remembered of what was fired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from flinkish_spark.operators.column_windows import ColumnWindows, later_ms
from flinkish_spark.operators.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, TimeDomain
from flinkish_spark.operators.key_index import Array
from flinkish_spark.operators.vectorized_aggregates import ColumnAggregation

#: Origin of a window that is new, or not as it is stored.
CHANGED = -1


@dataclass(frozen=True)
class Pool:
    """Open windows, at most one with the same key and bounds.

    Parameters
    ----------
    key
        Number of each window's key.
    start_ms, end_ms
        Its bounds.
    due_ms
        When something has to be done: it fires, or, if it has fired, it is over.
    origin
        Its place among the stored rows; CHANGED if it is not as it is there.
    values
        Columns of its aggregate.
    """

    key: Array
    start_ms: Array
    end_ms: Array
    due_ms: Array
    origin: Array
    values: tuple[pa.Array, ...]

    def __len__(self) -> int:
        return len(self.key)

    def take(self, places: Array) -> Pool:
        """Return some of the windows."""
        if is_all(places, len(self)):
            return self
        taken = pa.array(places)
        return Pool(
            self.key[places],
            self.start_ms[places],
            self.end_ms[places],
            self.due_ms[places],
            self.origin[places],
            tuple(column.take(taken) for column in self.values),
        )


class Arrivals(NamedTuple):
    """Parts of windows that come in, in their order.

    Parameters
    ----------
    key
        Number of each part's key.
    first_ms, last_ms
        See :class:`~flinkish_spark.operators.column_windows.Parts`.
    values
        Columns of the partial aggregates.
    """

    key: Array
    first_ms: Array
    last_ms: Array
    values: Sequence[pa.Array]


class Added(NamedTuple):
    """Windows behind arrivals, which of them fire at once (places), and whether each arrival was too late."""

    pool: Pool
    fires: Array
    is_late: Array


class Fired(NamedTuple):
    """Windows that are left, and those that fired."""

    pool: Pool
    fired: Pool


class _Together(NamedTuple):
    """Windows that are open or of parts, as they are one.

    Parameters
    ----------
    is_in
        Whether each of them is in one that is not over.
    of_row
        For those that are, in which.
    first
        Least place in each; shape (windows,), as the rest.
    is_touched
        Whether a part has come to it.
    """

    is_in: Array
    of_row: Array
    first: Array
    start_ms: Array
    end_ms: Array
    is_touched: Array


@dataclass(frozen=True)
class WindowRules:
    """Windows, how long they wait for late elements, and what is computed; travels in the plan.

    Parameters
    ----------
    lateness_ms
        Nothing changes for processing time.
    """

    windows: ColumnWindows
    lateness_ms: int
    aggregation: ColumnAggregation

    @property
    def is_by_event_time(self) -> bool:
        """Whether windows go by event time."""
        return self.windows.clock is TimeDomain.EVENT_TIME

    def over_ms(self, end_ms: Array) -> Array:
        """Return when nothing is kept of windows any more."""
        last_ms, lateness_ms = last_of(end_ms), self.lateness_ms if self.is_by_event_time else 0
        return later_ms(last_ms, lateness_ms)

    def add(self, pool: Pool, came: Arrivals, watermark_ms: int) -> Added:
        """Add parts to their windows; those that are late, but in time, fire their windows again.

        Of sessions all parts and windows are put together first; then it is asked whether that is over.

        Raises
        ------
        AggregateOverflow
            A sum leaves the type of its field.
        """
        # Processing time is looked at before anything comes: nothing is late, and nothing fires here.
        now_ms = watermark_ms if self.is_by_event_time else MIN_WATERMARK_MS
        assigned = self.windows.assign(came.first_ms, came.last_ms)
        key = np.concatenate([pool.key, came.key[assigned.of_part]])
        start_ms = np.concatenate([pool.start_ms, assigned.start_ms])
        end_ms = np.concatenate([pool.end_ms, assigned.end_ms])
        together = self._together(len(pool), key, start_ms, end_ms, now_ms)
        parts = assigned.of_part[together.is_in[len(pool) :]]
        is_lost = np.bincount(parts, minlength=len(came.key)) == 0
        is_late = is_lost & (later_ms(came.first_ms, self.lateness_ms) <= now_ms)
        after = self._after(pool, key, together, self._folded(pool, came, parts, together), now_ms)
        fires = together.is_touched & (last_of(after.end_ms) <= now_ms)
        return Added(after, np.flatnonzero(fires), is_late)

    def fire(self, pool: Pool, limit_ms: int) -> Fired:
        """Fire windows that end up to a time of their clock, and give up those that are over then."""
        is_due = pool.due_ms <= limit_ms
        if not is_due.any():
            return Fired(pool, pool.take(np.empty(0, dtype=np.int64)))
        places = np.flatnonzero(is_due & (pool.due_ms == last_of(pool.end_ms)))
        fired = pool.take(places[np.argsort(pool.end_ms[places], kind="stable")])
        over_ms = self.over_ms(pool.end_ms)
        left = pool.take(np.flatnonzero(~is_due | (over_ms > limit_ms)))
        waits = left.due_ms <= limit_ms
        due_ms = np.where(waits, self.over_ms(left.end_ms), left.due_ms)
        origin = np.where(waits, CHANGED, left.origin)
        return Fired(Pool(left.key, left.start_ms, left.end_ms, due_ms, origin, left.values), fired)

    # -- parts of adding ----------------------------------------------------------------------------
    def _together(
        self, open_count: int, key: Array, start_ms: Array, end_ms: Array, now_ms: int
    ) -> _Together:
        """Return which windows are one: those that are open stand in front of those of parts."""
        order, begins, starts, ends = self.windows.together(key, start_ms, end_ms)
        sizes = np.diff(np.append(begins, len(order)))
        first = np.minimum.reduceat(order, begins) if len(order) else begins
        # The least place says whether one of them was open; then it is not over.
        stays = (first < open_count) | (self.over_ms(ends) > now_ms)
        of_row = np.empty(len(order), dtype=np.int64)
        of_row[order] = np.repeat(np.cumsum(stays) - 1, sizes)
        is_in = np.empty(len(order), dtype=bool)
        is_in[order] = np.repeat(stays, sizes)
        is_touched = (first >= open_count) | (sizes > 1)
        return _Together(is_in, of_row[is_in], first[stays], starts[stays], ends[stays], is_touched[stays])

    def _after(
        self, pool: Pool, key: Array, together: _Together, values: tuple[pa.Array, ...], now_ms: int
    ) -> Pool:
        """Return the windows that are open then; those that nothing came to are as they were."""
        is_touched, first, ends = together.is_touched, together.first, together.end_ms
        due_ms = np.where(last_of(ends) > now_ms, last_of(ends), self.over_ms(ends))
        origin = np.full(len(first), CHANGED)
        same = np.flatnonzero(~is_touched)
        due_ms[same], origin[same] = pool.due_ms[first[same]], pool.origin[first[same]]
        return Pool(key[first], together.start_ms, ends, due_ms, origin, values)

    def _folded(self, pool: Pool, came: Arrivals, parts: Array, together: _Together) -> tuple[pa.Array, ...]:
        """Return the aggregates of windows, from those that are open and some parts."""
        first = np.cumsum(together.is_in)[together.first] - 1
        new = list(came.values)
        if not is_all(parts, len(came.key)):
            taken = pa.array(parts)
            new = [column.take(taken) for column in new]
        if len(pool):
            new = [pa.concat_arrays(both) for both in zip(pool.values, new, strict=True)]
        rows = pa.RecordBatch.from_arrays(new, names=self.aggregation.names)
        return tuple(self.aggregation.fold_partials(rows, together.of_row, first))


def is_all(places: Array, count: int) -> bool:
    """Return whether places are all there are, in their order."""
    return len(places) == count and bool((places[1:] > places[:-1]).all())


def last_of(end_ms: Array) -> Array:
    """Return the last instants of windows; a window without end has no less."""
    last: Array = np.where(end_ms == MAX_WATERMARK_MS, MAX_WATERMARK_MS, end_ms - 1)
    return last
