"""Folds of windows over columns: what a key group's rows make of its open windows.

Elements are first divided into parts: those of a key that share all their windows (a slice of a sliding
window, a tumbling window) or whose windows touch (a part of a session). A part travels and is folded as one.
The order is that of :mod:`flinkish_spark.operators.process`. Of each key and window there is one row in the
state, with when it is due: where a window stands follows from its end and the watermark, so nothing is
remembered of what was fired.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flinkish_spark.core.elements import (
    LATE_RECORDS_DROPPED,
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    OutputTag,
    Progress,
    TimeDomain,
)
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.functions.aggregates import AggregateColumn, ElementChoice
from flinkish_spark.functions.keyed import AggregateFunction
from flinkish_spark.operators.aggregates import element_reduce, value_fold
from flinkish_spark.operators.columnar_aggregates import ColumnAggregation
from flinkish_spark.operators.window_contents import OPEN
from flinkish_spark.state.codec import DUE_FIELDS
from flinkish_spark.state.columnar import DueTable, Stored
from flinkish_spark.state.descriptors import ValueStateDescriptor
from flinkish_spark.state.key_group import GroupState
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.layered import Array, KeyIndex, group_numbers
from flinkish_spark.types.ddl import name_text, type_text
from flinkish_spark.types.rows import ElementType
from flinkish_spark.windows.assigners import (
    EventTimeSessionWindows,
    ProcessingTimeSessionWindows,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
)
from flinkish_spark.windows.functions import ProcessWindowFunction, WindowContext, WithWindow
from flinkish_spark.windows.spec import AggregateWindow, ReduceWindow, WindowComputation, WindowSpec
from flinkish_spark.windows.time_window import NoEventTime


class Parts(NamedTuple):
    #: Number of each element's part; shape (elements,).
    of_row: Array
    #: The first element of each part; shape (parts,).
    first: Array
    #: Least and greatest time of its elements, of a session; else any time in the slice, twice.
    first_ms: Array
    last_ms: Array


class Assigned(NamedTuple):
    """Windows of parts: `of_part` says whose, several or none of each; of sessions one that may merge."""

    of_part: Array
    start_ms: Array
    end_ms: Array


class Together(NamedTuple):
    #: Places of all windows, those that are one behind each other, in the order of keys and starts.
    order: Array
    #: Where each group begins there; shape (groups,).
    begins: Array
    #: Of the window that a group is; shape (groups,).
    start_ms: Array
    end_ms: Array


class ColumnWindows(ABC):
    """Windows over columns, by a clock; pickled into the plan."""

    clock: TimeDomain

    @abstractmethod
    def parts(self, keys: Sequence[pa.Array], times_ms: Array) -> Parts: ...

    @abstractmethod
    def assign(self, first_ms: Array, last_ms: Array) -> Assigned: ...

    @abstractmethod
    def together(self, key: Array, start_ms: Array, end_ms: Array) -> Together:
        """Return which windows of the same key (by its number) are one."""


@dataclass(frozen=True)
class AlignedWindows(ColumnWindows):
    """Tumbling and sliding windows."""

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
    """Sessions with one gap for all."""

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
    later: Array = np.where(times_ms > MAX_WATERMARK_MS - by_ms, MAX_WATERMARK_MS, times_ms + by_ms)
    return later


def _begins(breaks: Array, count: int) -> Array:
    begins: Array = np.flatnonzero(np.concatenate([[True], breaks])) if count else np.empty(0, dtype=np.int64)
    return begins


def _stably(key: Array) -> Array:
    """Return an order by small numbers; numpy sorts 16 bits by radix, several times as fast."""
    narrow = key.astype(np.uint16) if key.max(initial=0) < 1 << 16 else key
    order: Array = np.argsort(narrow, kind="stable")
    return order


#: Origin of a window that is new, or not as it is stored.
CHANGED = -1


@dataclass(frozen=True)
class Pool:
    """Open windows, at most one with the same key and bounds."""

    #: Number of each window's key.
    key: Array
    start_ms: Array
    end_ms: Array
    #: When something has to be done: it fires, or, if it has fired, it is over.
    due_ms: Array
    #: Its place among the stored rows; CHANGED if it is not as it is there.
    origin: Array
    values: tuple[pa.Array, ...]

    def __len__(self) -> int:
        return len(self.key)

    def take(self, places: Array) -> Pool:
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
    #: Number of each part's key.
    key: Array
    first_ms: Array
    last_ms: Array
    #: Columns of the partial aggregates.
    values: Sequence[pa.Array]


class Added(NamedTuple):
    """Windows behind arrivals, which of them fire at once (places), and whether each arrival was too late."""

    pool: Pool
    fires: Array
    is_late: Array


class Fired(NamedTuple):
    pool: Pool
    fired: Pool


class _Together(NamedTuple):
    """Windows that are open or of parts, as they are one."""

    #: Whether each of them is in one that is not over.
    is_in: Array
    #: For those that are, in which.
    of_row: Array
    #: Least place in each; shape (windows,), as the rest.
    first: Array
    start_ms: Array
    end_ms: Array
    #: Whether a part has come to it.
    is_touched: Array


@dataclass(frozen=True)
class WindowRules:
    """Windows, how long they wait for late elements, and what is computed; travels in the plan."""

    windows: ColumnWindows
    #: Nothing changes for processing time.
    lateness_ms: int
    aggregation: ColumnAggregation

    @property
    def is_by_event_time(self) -> bool:
        return self.windows.clock is TimeDomain.EVENT_TIME

    def over_ms(self, end_ms: Array) -> Array:
        last_ms, lateness_ms = last_of(end_ms), self.lateness_ms if self.is_by_event_time else 0
        return later_ms(last_ms, lateness_ms)

    def add(self, pool: Pool, came: Arrivals, watermark_ms: int) -> Added:
        """Add parts to their windows; those that are late, but in time, fire their windows again."""
        # Of sessions all parts and windows are put together first; then it is asked whether that is over.
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
        is_touched, first, ends = together.is_touched, together.first, together.end_ms
        due_ms = np.where(last_of(ends) > now_ms, last_of(ends), self.over_ms(ends))
        origin = np.full(len(first), CHANGED)
        same = np.flatnonzero(~is_touched)
        due_ms[same], origin[same] = pool.due_ms[first[same]], pool.origin[first[same]]
        return Pool(key[first], together.start_ms, ends, due_ms, origin, values)

    def _folded(self, pool: Pool, came: Arrivals, parts: Array, together: _Together) -> tuple[pa.Array, ...]:
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
    last: Array = np.where(end_ms == MAX_WATERMARK_MS, MAX_WATERMARK_MS, end_ms - 1)
    return last


#: Behind the aggregate, on the way: how many elements a part has, and the last time of a session's.
ELEMENTS, LAST_MS = "_fs_elements", "_fs_last_ms"

_TIMESTAMP = pa.timestamp("us", tz="UTC")
#: The years 1 to 9999.
_EPOCH_YEARS_MS = (-62_135_596_800_000, 253_402_300_799_999)


@dataclass(frozen=True)
class Rows:
    """Rows that came in together: on one side of the watermark, in their order."""

    hashes: Array
    keys: tuple[pa.Array, ...]
    #: Event times; None if the stream has none.
    times_ms: pa.Array | None
    fields: pa.RecordBatch

    def times_by(self, clock: TimeDomain, processing_time_ms: int) -> Array:
        if clock is TimeDomain.PROCESSING_TIME:
            return np.full(len(self.hashes), processing_time_ms)
        if self.times_ms is None or self.times_ms.null_count:
            raise NoEventTime
        found: Array = self.times_ms.to_numpy()
        return found


@dataclass(frozen=True)
class Came:
    """Parts that came, and what is lost of them if they are late."""

    hashes: Array
    keys: tuple[pa.Array, ...]
    first_ms: Array
    last_ms: Array
    values: Sequence[pa.Array]
    elements: Array
    #: Part of each row that came; None where rows are parts.
    of_row: Array | None = None


class Reader(ABC):
    @abstractmethod
    def read(self, rows: Rows, rules: WindowRules, processing_time_ms: int) -> Came: ...


class Partials(Reader):
    """Rows are parts, which were made before the shuffle."""

    def read(self, rows: Rows, rules: WindowRules, processing_time_ms: int) -> Came:
        first_ms = last_ms = rows.times_by(rules.windows.clock, processing_time_ms)
        names = rows.fields.schema.names
        if LAST_MS in names and rules.is_by_event_time:
            last_ms = rows.fields.column(LAST_MS).to_numpy()
        values = [rows.fields.column(name) for name in rules.aggregation.names]
        elements = rows.fields.column(ELEMENTS).to_numpy()
        return Came(rows.hashes, rows.keys, first_ms, last_ms, values, elements)


class WholeElements(Reader):
    """Rows are elements: so those that are late can go elsewhere."""

    def read(self, rows: Rows, rules: WindowRules, processing_time_ms: int) -> Came:
        times_ms = rows.times_by(rules.windows.clock, processing_time_ms)
        parts, values = folded_parts(rules, rows.fields, rows.keys, times_ms)
        taken = pa.array(parts.first)
        return Came(
            rows.hashes[parts.first],
            tuple(key.take(taken) for key in rows.keys),
            parts.first_ms,
            parts.last_ms,
            values,
            np.bincount(parts.of_row, minlength=len(parts.first)),
            parts.of_row,
        )


def folded_parts(
    rules: WindowRules, batch: pa.RecordBatch, keys: Sequence[pa.Array], times_ms: Array
) -> tuple[Parts, list[pa.Array]]:
    parts = rules.windows.parts(keys, times_ms)
    return parts, rules.aggregation.fold(batch, parts.of_row, parts.first)


@dataclass
class Outcome:
    #: Rows on both sides of the watermark; each a batch with times, and the output's columns.
    before: list[pa.RecordBatch] = field(default_factory=list)
    behind: list[pa.RecordBatch] = field(default_factory=list)
    #: Elements that came too late, if there is a side output for them.
    late_before: pa.RecordBatch | None = None
    late_behind: pa.RecordBatch | None = None
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WindowFold:
    """Folds of windows, as a keyed operator over columns; travels in the plan."""

    rules: WindowRules
    #: Which parts of the key come out, in front of the folds.
    key_places: tuple[int, ...]
    reader: Reader
    #: Where late elements go; None: they are dropped and counted. Needs :class:`WholeElements`.
    late_output: OutputTag | None = None

    def open(self, states: KeyedStates) -> None:
        states.per_namespace(OPEN)
        states.get_state(ValueStateDescriptor(OPEN, _state_type(self.rules)))

    def run(self, before: Rows | None, behind: Rows | None, group: GroupState, progress: Progress) -> Outcome:
        clock, now_ms = self.rules.windows.clock, progress.processing_time_ms
        table, limit_ms = group.due_table(OPEN), progress.limits_ms[clock]
        came = [
            None if rows is None else self.reader.read(rows, self.rules, now_ms) for rows in (before, behind)
        ]
        hashes = [one.hashes for one in came if one is not None]
        stored = table.select(np.concatenate(hashes or [np.empty(0, dtype=np.int64)]), limit_ms)
        if not len(stored) and not hashes:
            return Outcome()
        return _GroupWindows(self, table, stored, came[0], came[1]).run(before, behind, progress)


class _GroupWindows:
    def __init__(
        self, fold: WindowFold, table: DueTable, stored: Stored, before: Came | None, behind: Came | None
    ) -> None:
        self._fold, self._rules, self._table, self._stored = fold, fold.rules, table, stored
        given = [stored.keys, *(one.keys for one in (before, behind) if one is not None)]
        hashes = [stored.hashes, *(one.hashes for one in (before, behind) if one is not None)]
        keys = table.keys_together(given)
        self._index = KeyIndex.of(np.concatenate(hashes), keys)
        at = len(stored)
        self._stored_key = self._index.of_row[:at]
        came: list[tuple[Came, Arrivals] | None] = []
        for one in (before, behind):
            own = self._index.of_row[at : at + (0 if one is None else len(one.hashes))]
            came.append(None if one is None else (one, self._arrivals(one, own)))
            at += len(own)
        self._before, self._behind = came
        self._pool = self._opened()
        self._outcome = Outcome()

    def run(self, before: Rows | None, behind: Rows | None, progress: Progress) -> Outcome:
        outcome, is_by_event_time = self._outcome, self._rules.is_by_event_time
        if not is_by_event_time:
            outcome.before += self._fire(progress.processing_limit_ms)
        if self._before is not None and before is not None:
            fired, outcome.late_before = self._add(*self._before, before, progress.watermark_before_ms)
            outcome.before += fired
        if is_by_event_time:
            outcome.before += self._fire(progress.watermark_ms)
        if self._behind is not None and behind is not None:
            fired, outcome.late_behind = self._add(*self._behind, behind, progress.watermark_ms)
            outcome.behind += fired
        if is_by_event_time and progress.drained_to_ms > progress.watermark_ms:
            outcome.behind += self._fire(progress.drained_to_ms)
        self._write()
        return outcome

    def _fire(self, limit_ms: int) -> list[pa.RecordBatch]:
        self._pool, fired = self._rules.fire(self._pool, limit_ms)
        return self._results(fired)

    def _add(
        self, came: Came, arrivals: Arrivals, rows: Rows, watermark_ms: int
    ) -> tuple[list[pa.RecordBatch], pa.RecordBatch | None]:
        """Return results of windows that fire again, and the elements that came too late."""
        added = self._rules.add(self._pool, arrivals, watermark_ms)
        self._pool = added.pool
        late = None
        if added.is_late.any():
            late = self._late(came, rows, added.is_late)
        return self._results(added.pool.take(added.fires)) if len(added.fires) else [], late

    def _late(self, came: Came, rows: Rows, is_late: Array) -> pa.RecordBatch | None:
        if self._fold.late_output is None:
            counts = self._outcome.counts
            counts[LATE_RECORDS_DROPPED] = counts.get(LATE_RECORDS_DROPPED, 0) + int(
                came.elements[is_late].sum()
            )
            return None
        assert came.of_row is not None
        places = pa.array(np.flatnonzero(is_late[came.of_row]))
        times = pa.nulls(len(rows.hashes), pa.int64()) if rows.times_ms is None else rows.times_ms
        return _timed(times, rows.fields.columns).take(places)

    def _results(self, fired: Pool) -> list[pa.RecordBatch]:
        if not len(fired):
            return []
        taken = pa.array(fired.key)
        keys = [self._index.keys[at].take(taken) for at in self._fold.key_places]
        bounds = [timestamps(fired.start_ms), timestamps(fired.end_ms)]
        return [_timed(pa.array(last_of(fired.end_ms)), [*keys, *fired.values, *bounds])]

    def _opened(self) -> Pool:
        stored, key = self._stored, self._stored_key
        living = stored.living(key)
        self._living_count = len(living)
        start_ms, end_ms = stored.bounds
        columns = (key, start_ms, end_ms, stored.due_ms)
        pool = Pool(*columns, np.arange(len(stored)), tuple(stored.values))
        return pool.take(living)

    def _arrivals(self, came: Came, key: Array) -> Arrivals:
        kinds = self._table.layout.values[1:]
        values = [
            column if column.type == kind else column.cast(kind)
            for column, kind in zip(came.values, kinds, strict=True)
        ]
        return Arrivals(key, came.first_ms, came.last_ms, values)

    def _write(self) -> None:
        pool, layout = self._pool, self._table.layout
        kept = pool.origin[pool.origin != CHANGED]
        changed = pool.take(np.flatnonzero(pool.origin == CHANGED))
        if not len(changed) and len(kept) == self._living_count:
            return
        taken = pa.array(changed.key)
        columns = [
            pa.array(self._index.hashes[changed.key]),
            *(key.take(taken) for key in self._index.keys),
            *map(pa.array, (changed.start_ms, changed.end_ms, changed.due_ms)),
            *changed.values,
            pa.array(np.ones(len(changed), dtype=bool)),
        ]
        rows = pa.RecordBatch.from_arrays(columns, schema=layout.schema)
        self._table.write(self._stored, self._stored_key, kept, rows, changed.key)


def _state_type(rules: WindowRules) -> str:
    aggregation = rules.aggregation
    one = len(aggregation.names) == 1
    own = f"{name_text(aggregation.names[0])} {aggregation.state_type()}" if one else aggregation.state_type()
    return f"{DUE_FIELDS[rules.windows.clock]} LONG, {own}"


def _timed(times: pa.Array, columns: Sequence[pa.Array]) -> pa.RecordBatch:
    """Return columns behind their times; the names do not matter."""
    arrays = [times, *columns]
    return pa.RecordBatch.from_arrays(arrays, names=[f"c{at}" for at in range(len(arrays))])


def timestamps(times_ms: Array) -> pa.Array:
    """Return times as timestamps; null where a datetime cannot hold them."""
    least, greatest = _EPOCH_YEARS_MS
    outside = (times_ms < least) | (times_ms > greatest)
    if not outside.any():
        return pa.array(times_ms * 1000).view(_TIMESTAMP)
    return pa.array(np.where(outside, 0, times_ms) * 1000, mask=outside).view(_TIMESTAMP)


class KeysAndWindow(ProcessWindowFunction):
    """Puts the key's fields before the computed columns, and the window's bounds after them."""

    def __init__(self, places: tuple[int, ...], key_count: int) -> None:
        self._places, self._key_count = places, key_count

    def process(self, key: Any, context: WindowContext, elements: Sequence[Any]) -> Iterable[Any]:
        parts = (key,) if self._key_count == 1 else key
        own, window = [parts[at] for at in self._places], context.window
        return [(*own, *element, window.start, window.end) for element in elements]


class FoldedField(AggregateFunction):
    """The sum, least or greatest of a field; null of nulls alone, which is a result as any other."""

    def __init__(self, column: AggregateColumn, input_type: str) -> None:
        fields = ElementType(input_type).fields
        self._at = [field.name for field in fields].index(column.field or "")
        kind = fields[self._at].dataType
        #: Type of the accumulator: a tuple, so that a null in it is not none.
        self.kept = f"value {type_text(kind)}"
        self._fold = value_fold(column.fold, column.field or "", kind)

    def create_accumulator(self) -> Any:
        return (None,)

    def add(self, value: Any, accumulator: Any) -> Any:
        return (self._fold(accumulator[0], value[self._at]),)

    def get_result(self, accumulator: Any) -> Any:
        return accumulator

    def merge(self, first: Any, second: Any) -> Any:
        return (self._fold(first[0], second[0]),)


def folded_field(column: AggregateColumn, input_type: str, keys: KeysAndWindow) -> WindowComputation:
    fold = FoldedField(column, input_type)
    return AggregateWindow(fold, fold.kept, keys)


def chosen_element(choice: ElementChoice, input_type: str) -> WindowComputation:
    return ReduceWindow(element_reduce(choice, input_type), WithWindow())
