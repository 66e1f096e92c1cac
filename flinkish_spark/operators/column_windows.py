"""Windows of many elements at once, as columns: which they are, what is combined early, what merges.

Elements are first divided into parts: those of a key that share all their windows (a slice of a sliding
window, a tumbling window) or whose windows touch (a part of a session). A part travels and is folded as one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from flinkish_spark.errors import ConfigError
from flinkish_spark.operators.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, TimeDomain
from flinkish_spark.operators.key_index import Array, group_numbers
from flinkish_spark.windows.assigners import (
    EventTimeSessionWindows,
    ProcessingTimeSessionWindows,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
)
from flinkish_spark.windows.spec import WindowSpec


class Parts(NamedTuple):
    """Elements divided into parts.

    Parameters
    ----------
    of_row
        Number of each element's part; shape (elements,).
    first
        The first element of each part; shape (parts,).
    first_ms, last_ms
        Least and greatest time of its elements, of a session; else any time in the slice, twice.
    """

    of_row: Array
    first: Array
    first_ms: Array
    last_ms: Array


class Assigned(NamedTuple):
    """Windows of parts: `of_part` says whose, several or none of each; of sessions one that may merge."""

    of_part: Array
    start_ms: Array
    end_ms: Array


class Together(NamedTuple):
    """Which windows are one.

    Parameters
    ----------
    order
        Places of all windows, those that are one behind each other, in the order of keys and starts.
    begins
        Where each group begins there; shape (groups,).
    start_ms, end_ms
        Of the window that a group is; shape (groups,).
    """

    order: Array
    begins: Array
    start_ms: Array
    end_ms: Array


class ColumnWindows(ABC):
    """Windows over columns; made by :func:`column_windows`, pickled into the plan.

    `clock` is what the windows go by. By processing time all elements of a micro-batch have one time.
    """

    clock: TimeDomain

    @abstractmethod
    def parts(self, keys: Sequence[pa.Array], times_ms: Array) -> Parts:
        """Divide elements.

        Parameters
        ----------
        keys
            Columns that tell apart what must not be combined; at least one.
        times_ms
            By which the elements are assigned.
        """

    @abstractmethod
    def assign(self, first_ms: Array, last_ms: Array) -> Assigned:
        """Return the windows of parts."""

    @abstractmethod
    def together(self, key: Array, start_ms: Array, end_ms: Array) -> Together:
        """Return which windows of the same key (by its number) are one."""


@dataclass(frozen=True)
class AlignedWindows(ColumnWindows):
    """Tumbling and sliding windows.

    Examples
    --------
    >>> windows = AlignedWindows(TimeDomain.EVENT_TIME, 12, 5, 0)
    >>> windows.slices(np.array([10, 11, 12, 14])).tolist()
    [10, 10, 12, 12]
    >>> assigned = windows.assign(np.array([11, 14]), np.array([11, 14]))
    >>> assigned.of_part.tolist(), assigned.start_ms.tolist()
    ([0, 0, 0, 1, 1], [10, 5, 0, 10, 5])
    """

    clock: TimeDomain
    size_ms: int
    slide_ms: int
    offset_ms: int

    def slices(self, times_ms: Array) -> Array:
        """Return a time that is the same for times that share all windows; their own for times in none."""
        into = self._into_slide(times_ms)
        begins: Array = times_ms - into
        rest = self.size_ms % self.slide_ms
        if rest:
            # Windows end between two starts: what is behind that end is in one window less.
            behind = begins + rest if self.size_ms > self.slide_ms else times_ms
            begins = np.where(into < rest, begins, behind)
        # Before 64 bits begin a slice has no such time; there is one of that kind at most.
        return np.where(begins > times_ms, MIN_WATERMARK_MS, begins)

    def _into_slide(self, times_ms: Array) -> Array:
        """Return how long before each time a window begins, without leaving 64 bits on the way."""
        into: Array = times_ms % self.slide_ms
        if self.offset_ms:
            into = (into - self.offset_ms % self.slide_ms) % self.slide_ms
        return into

    def parts(self, keys: Sequence[pa.Array], times_ms: Array) -> Parts:
        """Divide elements into slices."""
        slices = self.slices(times_ms)
        varies = len(slices) and slices.min() != slices.max()
        of_row, first = group_numbers([*keys, pa.array(slices)] if varies else keys)
        return Parts(of_row, first, times_ms[first], times_ms[first])

    def assign(self, first_ms: Array, last_ms: Array) -> Assigned:
        """Return the windows around times, the latest first."""
        into = self._into_slide(first_ms)
        latest = first_ms - into
        counts = np.maximum(-((into - self.size_ms) // self.slide_ms), 0)
        of_part = np.repeat(np.arange(len(first_ms)), counts)
        before = np.arange(len(of_part)) - np.repeat(np.cumsum(counts) - counts, counts)
        start_ms = latest[of_part] - before * self.slide_ms
        end_ms = start_ms + self.size_ms
        # Windows are around their times: a bound on the wrong side of those has left 64 bits, and is cut.
        times_ms = first_ms[of_part]
        start_ms = np.where(start_ms > times_ms, MIN_WATERMARK_MS, start_ms)
        return Assigned(of_part, start_ms, np.where(end_ms <= times_ms, MAX_WATERMARK_MS, end_ms))

    def together(self, key: Array, start_ms: Array, end_ms: Array) -> Together:
        """Windows of a key with the same bounds are one."""
        # Of another size are those of an earlier program, and those that are cut where 64 bits end.
        are_alike = (end_ms - start_ms == self.size_ms).all()
        order = np.lexsort((start_ms, key) if are_alike else (end_ms, start_ms, key))
        key, start_ms, end_ms = key[order], start_ms[order], end_ms[order]
        breaks = (key[1:] != key[:-1]) | (start_ms[1:] != start_ms[:-1]) | (end_ms[1:] != end_ms[:-1])
        begins = _begins(breaks, len(order))
        return Together(order, begins, start_ms[begins], end_ms[begins])


@dataclass(frozen=True)
class SessionWindows(ColumnWindows):
    """Sessions with one gap for all.

    Examples
    --------
    >>> windows = SessionWindows(TimeDomain.EVENT_TIME, 5)
    >>> parts = windows.parts([pa.array(["a", "a", "b", "a"])], np.array([8, 1, 2, 3]))
    >>> parts.of_row.tolist(), parts.first_ms.tolist(), parts.last_ms.tolist()
    ([0, 0, 1, 0], [1, 2], [8, 2])
    """

    clock: TimeDomain
    gap_ms: int

    def parts(self, keys: Sequence[pa.Array], times_ms: Array) -> Parts:
        """Divide elements where a pause of a key is longer than the gap."""
        key, _ = group_numbers(keys)
        is_rising = not len(times_ms) or (times_ms[1:] >= times_ms[:-1]).all()
        order = _stably(key) if is_rising else np.lexsort((times_ms, key))
        key, ordered_ms = key[order], times_ms[order]
        breaks = (key[1:] != key[:-1]) | (ordered_ms[1:] > later_ms(ordered_ms[:-1], self.gap_ms))
        begins = _begins(breaks, len(order))
        lasts = np.append(begins[1:], len(order))[: len(begins)] - 1
        first = np.minimum.reduceat(order, begins) if len(order) else begins
        # Parts come in the order of their first elements: the first of a session is the one that came first.
        by_coming = np.argsort(first)
        number = np.empty(len(begins), dtype=np.int64)
        number[by_coming] = np.arange(len(begins))
        of_row = np.empty(len(order), dtype=np.int64)
        of_row[order] = np.repeat(number, lasts + 1 - begins)
        return Parts(of_row, first[by_coming], ordered_ms[begins[by_coming]], ordered_ms[lasts[by_coming]])

    def assign(self, first_ms: Array, last_ms: Array) -> Assigned:
        """Return the windows that parts begin with."""
        return Assigned(np.arange(len(first_ms)), first_ms, later_ms(last_ms, self.gap_ms))

    def together(self, key: Array, start_ms: Array, end_ms: Array) -> Together:
        """Windows of a key that overlap or touch are one."""
        order = np.lexsort((start_ms, key))
        key, start_ms, end_ms = key[order], start_ms[order], end_ms[order]
        # The latest end so far of each key: ranks of ends stay small enough to put the key in front of them.
        distinct, rank = np.unique(end_ms, return_inverse=True)
        width = max(len(distinct), 1)
        reached = distinct[np.maximum.accumulate(key * width + rank) % width] if len(order) else end_ms
        begins = _begins((key[1:] != key[:-1]) | (start_ms[1:] > reached[:-1]), len(order))
        lasts = np.append(begins[1:], len(order))[: len(begins)] - 1
        return Together(order, begins, start_ms[begins], reached[lasts])


@dataclass(frozen=True)
class NotOverColumns:
    """Why windows have to be computed element by element: what they have, and what is missing for that."""

    what: str
    why: str


def column_windows(spec: WindowSpec, uid: str) -> ColumnWindows:
    """Return the windows of a specification.

    Raises
    ------
    ConfigError
        They cannot be computed over columns.
    """
    found = column_windows_or_why_not(spec)
    if isinstance(found, NotOverColumns):
        raise ConfigError(
            f"the windows of '{uid}' cannot be folded over columns with {found.what}",
            why=found.why,
            what_to_do="use sum(), min(), max(), aggregate(), reduce() or process(): element by element",
            uid=uid,
        )
    return found


def column_windows_or_why_not(spec: WindowSpec) -> ColumnWindows | NotOverColumns:
    """Return the windows of a specification, or why they cannot be computed over columns."""
    assigner, clock = spec.assigner, spec.assigner.clock
    kind, default = type(assigner), type(assigner.default_trigger())
    if spec.evictor is not None:
        return NotOverColumns(
            f"the evictor {type(spec.evictor).__name__}", "folds keep no elements to throw away"
        )
    if spec.retraction_field is not None:
        return NotOverColumns("retractions", "folds do not keep what they have emitted")
    if spec.trigger is not None and type(spec.trigger) is not default:
        return NotOverColumns(
            f"the trigger {type(spec.trigger).__name__}",
            f"over columns a window fires at its end, as by {default.__name__}",
        )
    if kind in (EventTimeSessionWindows, ProcessingTimeSessionWindows):
        assert isinstance(assigner, EventTimeSessionWindows | ProcessingTimeSessionWindows)
        return SessionWindows(clock, assigner.gap_ms)
    if kind in _ALIGNED:
        assert isinstance(assigner, _ALIGNED)
        return AlignedWindows(clock, *assigner.periods_ms)
    return NotOverColumns(
        kind.__name__,
        f"folds over columns are there for tumbling and sliding windows and for sessions with a fixed gap, "
        f"and {kind.__name__} is none of these",
    )


_ALIGNED = (
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
)


def later_ms(times_ms: Array, by_ms: int) -> Array:
    """Return times a while later, cut where 64 bits end."""
    later: Array = np.where(times_ms > MAX_WATERMARK_MS - by_ms, MAX_WATERMARK_MS, times_ms + by_ms)
    return later


def _begins(breaks: Array, count: int) -> Array:
    """Return where runs begin, from whether each place but the first begins one."""
    begins: Array = np.flatnonzero(np.concatenate([[True], breaks])) if count else np.empty(0, dtype=np.int64)
    return begins


def _stably(key: Array) -> Array:
    """Return an order by small numbers; numpy sorts 16 bits by radix, several times as fast."""
    narrow = key.astype(np.uint16) if key.max(initial=0) < 1 << 16 else key
    order: Array = np.argsort(narrow, kind="stable")
    return order
