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
    """Open windows, at most one with the same key and start.

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
        open_count = len(pool)
        key = np.concatenate([pool.key, came.key[assigned.of_part]])
        start_ms = np.concatenate([pool.start_ms, assigned.start_ms])
        end_ms = np.concatenate([pool.end_ms, assigned.end_ms])
        order, begins, starts, ends = self.windows.together(key, start_ms, end_ms)
        sizes = np.diff(np.append(begins, len(order)))
        # Windows that were there stand in front, so the least place says whether there was one.
        first = np.minimum.reduceat(order, begins) if len(order) else begins
        stays = (first < open_count) | (self.over_ms(ends) > now_ms)
        of_window = np.empty(len(order), dtype=np.int64)
        of_window[order] = np.repeat(np.cumsum(stays) - 1, sizes)
        is_in = np.empty(len(order), dtype=bool)
        is_in[order] = np.repeat(stays, sizes)
        taken = np.bincount(assigned.of_part[is_in[open_count:]], minlength=len(came.key))
        is_late = (taken == 0) & (later_ms(came.first_ms, self.lateness_ms) <= now_ms)
        places = assigned.of_part if is_in.all() else assigned.of_part[is_in[open_count:]]
        values = self._folded(pool, came, places, of_window[is_in], np.cumsum(is_in)[first[stays]] - 1)
        first, starts, ends = first[stays], starts[stays], ends[stays]
        is_touched = (first >= open_count) | (sizes[stays] > 1)
        new_due = np.where(last_of(ends) > now_ms, last_of(ends), self.over_ms(ends))
        stored = np.where(is_touched, 0, first)
        has_any = len(pool) > 0
        after = Pool(
            key[first],
            starts,
            ends,
            np.where(is_touched, new_due, pool.due_ms[stored]) if has_any else new_due,
            np.where(is_touched, CHANGED, pool.origin[stored]) if has_any else np.full(len(first), CHANGED),
            values,
        )
        return Added(after, np.flatnonzero(is_touched & (last_of(ends) <= now_ms)), is_late)

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

    def _folded(
        self, pool: Pool, came: Arrivals, places: Array, groups: Array, first: Array
    ) -> tuple[pa.Array, ...]:
        """Return the aggregates of windows, from those that are open and the parts at some places."""
        if is_all(places, len(came.key)):
            new = list(came.values)
        else:
            taken = pa.array(places)
            new = [column.take(taken) for column in came.values]
        if not len(pool):
            return tuple(self._aggregates(new, groups, first))
        both = [pa.concat_arrays([old, one]) for old, one in zip(pool.values, new, strict=True)]
        return tuple(self._aggregates(both, groups, first))

    def _aggregates(self, columns: Sequence[pa.Array], groups: Array, first: Array) -> list[pa.Array]:
        rows = pa.RecordBatch.from_arrays(list(columns), names=self.aggregation.names)
        return self.aggregation.fold_partials(rows, groups, first)


def is_all(places: Array, count: int) -> bool:
    """Return whether places are all there are, in their order."""
    return len(places) == count and bool((places[1:] > places[:-1]).all())


def last_of(end_ms: Array) -> Array:
    """Return the last instants of windows; a window without end has no less."""
    last: Array = np.where(end_ms == MAX_WATERMARK_MS, MAX_WATERMARK_MS, end_ms - 1)
    return last
