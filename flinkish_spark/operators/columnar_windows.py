"""Window aggregates over columns: folds the rows of a key group into its open windows.

Elements are first grouped into parts: elements of a key that share all their windows (a slice of a sliding
window, a tumbling window) or whose windows touch (a part of a session). A part is shuffled and folded as one
row. Steps run in the order of :mod:`flinkish_spark.operators.process`. The state has one row per key and
window, with its next timer; whether a window has fired follows from its end and the watermark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
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
from flinkish_spark.functions.aggregates import AggregateColumn
from flinkish_spark.functions.keyed import AggregateFunction
from flinkish_spark.operators.aggregates import make_value_fold
from flinkish_spark.operators.columnar_aggregates import ColumnAggregation
from flinkish_spark.operators.window_contents import OPEN
from flinkish_spark.state.codec import DUE_FIELDS
from flinkish_spark.state.columnar import DueTable, SelectedRows
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
from flinkish_spark.windows.functions import ProcessWindowFunction, WindowContext
from flinkish_spark.windows.spec import WindowSpec
from flinkish_spark.windows.time_window import NoEventTime


class Parts(NamedTuple):
    #: Number of each element's part; shape (elements,).
    of_row: Array
    #: The first element of each part; shape (parts,).
    first: Array
    #: Smallest and greatest time of its elements for a session; else any time in the slice, twice.
    first_ms: Array
    last_ms: Array


@dataclass(frozen=True)
class AlignedWindows:
    """Tumbling and sliding windows, by a clock; pickled into the plan."""

    clock: TimeDomain
    size_ms: int
    slide_ms: int
    offset_ms: int

    def find_slices(self, times_ms: Array) -> Array:
        """Return a time that identifies the slice: equal for times that share all windows."""
        into = self._find_slide_offset(times_ms)
        begins: Array = times_ms - into
        rest = self.size_ms % self.slide_ms
        if rest:
            # Windows end between two starts: times after such an end are in one window less.
            behind = begins + rest if self.size_ms > self.slide_ms else times_ms
            begins = np.where(into < rest, begins, behind)
        # The first slice may begin before the least 64-bit time.
        return np.where(begins > times_ms, MIN_WATERMARK_MS, begins)

    def _find_slide_offset(self, times_ms: Array) -> Array:
        """Return the time since the latest window start, computed without 64-bit overflow."""
        into: Array = times_ms % self.slide_ms
        if self.offset_ms:
            into = (into - self.offset_ms % self.slide_ms) % self.slide_ms
        return into

    def divide(self, keys: Sequence[pa.Array], times_ms: Array) -> Parts:
        slices = self.find_slices(times_ms)
        varies = len(slices) and slices.min() != slices.max()
        of_row, first = group_numbers([*keys, pa.array(slices)] if varies else keys)
        return Parts(of_row, first, times_ms[first], times_ms[first])

    def assign(self, first_ms: Array, last_ms: Array) -> tuple[Array, Array, Array]:
        """Return the windows of parts, latest first: number of the part, start, end."""
        into = self._find_slide_offset(first_ms)
        latest = first_ms - into
        counts = np.maximum(-((into - self.size_ms) // self.slide_ms), 0)
        of_part = np.repeat(np.arange(len(first_ms)), counts)
        before = np.arange(len(of_part)) - np.repeat(np.cumsum(counts) - counts, counts)
        start_ms = latest[of_part] - before * self.slide_ms
        end_ms = start_ms + self.size_ms
        # A bound on the wrong side of the window's time has overflowed 64 bits and is cut.
        times_ms = first_ms[of_part]
        start_ms = np.where(start_ms > times_ms, MIN_WATERMARK_MS, start_ms)
        return of_part, start_ms, np.where(end_ms <= times_ms, MAX_WATERMARK_MS, end_ms)

    def group(self, key: Array, start_ms: Array, end_ms: Array) -> tuple[Array, Array, Array, Array]:
        """Group windows of the same key (by its number) with the same bounds.

        Returns an order by keys and starts in which equal windows are adjacent, the position where each group
        begins, and start and end of each group's window.
        """
        # Windows of an earlier program and those cut at the ends of 64 bits have another size.
        are_alike = (end_ms - start_ms == self.size_ms).all()
        order = np.lexsort((start_ms, key) if are_alike else (end_ms, start_ms, key))
        key, start_ms, end_ms = key[order], start_ms[order], end_ms[order]
        breaks = (key[1:] != key[:-1]) | (start_ms[1:] != start_ms[:-1]) | (end_ms[1:] != end_ms[:-1])
        begins = _find_begins(breaks, len(order))
        return order, begins, start_ms[begins], end_ms[begins]


@dataclass(frozen=True)
class SessionWindows:
    """Sessions with one gap for all; see :class:`AlignedWindows`."""

    clock: TimeDomain
    gap_ms: int

    def divide(self, keys: Sequence[pa.Array], times_ms: Array) -> Parts:
        """Group the elements of a key between pauses longer than the gap."""
        key, _ = group_numbers(keys)
        is_rising = not len(times_ms) or (times_ms[1:] >= times_ms[:-1]).all()
        if is_rising:
            # Numpy sorts 16 bits by radix, several times as fast.
            narrow = key.astype(np.uint16) if key.max(initial=0) < 1 << 16 else key
            order: Array = np.argsort(narrow, kind="stable")
        else:
            order = np.lexsort((times_ms, key))
        key, ordered_ms = key[order], times_ms[order]
        breaks = (key[1:] != key[:-1]) | (ordered_ms[1:] > add_ms(ordered_ms[:-1], self.gap_ms))
        begins = _find_begins(breaks, len(order))
        lasts = np.append(begins[1:], len(order))[: len(begins)] - 1
        first = np.minimum.reduceat(order, begins) if len(order) else begins
        # Parts are ordered by the arrival of their first elements.
        by_coming = np.argsort(first)
        number = np.empty(len(begins), dtype=np.int64)
        number[by_coming] = np.arange(len(begins))
        of_row = np.empty(len(order), dtype=np.int64)
        of_row[order] = np.repeat(number, lasts + 1 - begins)
        return Parts(of_row, first[by_coming], ordered_ms[begins[by_coming]], ordered_ms[lasts[by_coming]])

    def assign(self, first_ms: Array, last_ms: Array) -> tuple[Array, Array, Array]:
        return np.arange(len(first_ms)), first_ms, add_ms(last_ms, self.gap_ms)

    def group(self, key: Array, start_ms: Array, end_ms: Array) -> tuple[Array, Array, Array, Array]:
        """Group windows of the same key that overlap or touch; see :meth:`AlignedWindows.group`."""
        order = np.lexsort((start_ms, key))
        key, start_ms, end_ms = key[order], start_ms[order], end_ms[order]
        # The latest end so far of each key: ranks of ends are small enough to combine with the key.
        distinct, rank = np.unique(end_ms, return_inverse=True)
        width = max(len(distinct), 1)
        reached = distinct[np.maximum.accumulate(key * width + rank) % width] if len(order) else end_ms
        begins = _find_begins((key[1:] != key[:-1]) | (start_ms[1:] > reached[:-1]), len(order))
        lasts = np.append(begins[1:], len(order))[: len(begins)] - 1
        return order, begins, start_ms[begins], reached[lasts]


ColumnWindows = AlignedWindows | SessionWindows


@dataclass(frozen=True)
class NoColumnWindows:
    """The reason why windows must be computed element by element."""

    what: str
    why: str


def require_column_windows(spec: WindowSpec, uid: str) -> ColumnWindows:
    found = find_column_windows(spec)
    if isinstance(found, NoColumnWindows):
        raise ConfigError(
            f"the windows of '{uid}' cannot be folded over columns with {found.what}",
            why=found.why,
            what_to_do="use sum(), min(), max(), aggregate(), reduce() or process(): element by element",
        )
    return found


def find_column_windows(spec: WindowSpec) -> ColumnWindows | NoColumnWindows:
    assigner, clock = spec.assigner, spec.assigner.clock
    kind, default = type(assigner), type(assigner.default_trigger())
    if spec.evictor is not None:
        return NoColumnWindows(
            f"the evictor {type(spec.evictor).__name__}", "aggregates over columns do not store elements"
        )
    if spec.retraction_field is not None:
        return NoColumnWindows("retractions", "aggregates over columns do not store their results")
    if spec.trigger is not None and type(spec.trigger) is not default:
        return NoColumnWindows(
            f"the trigger {type(spec.trigger).__name__}",
            f"over columns a window fires at its end, as by {default.__name__}",
        )
    if kind in (EventTimeSessionWindows, ProcessingTimeSessionWindows):
        assert isinstance(assigner, EventTimeSessionWindows | ProcessingTimeSessionWindows)
        return SessionWindows(clock, assigner.gap_ms)
    if kind in _ALIGNED:
        assert isinstance(assigner, _ALIGNED)
        return AlignedWindows(clock, *assigner.periods_ms)
    return NoColumnWindows(
        kind.__name__,
        f"only tumbling and sliding windows and sessions with a fixed gap can be folded over columns, not "
        f"{kind.__name__}",
    )


_ALIGNED = (
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
)


def add_ms(times_ms: Array, by_ms: int) -> Array:
    return np.where(times_ms > MAX_WATERMARK_MS - by_ms, MAX_WATERMARK_MS, times_ms + by_ms)


def _find_begins(breaks: Array, count: int) -> Array:
    return np.flatnonzero(np.concatenate([[True], breaks])) if count else np.empty(0, dtype=np.int64)


#: Origin of a window that is new or differs from its stored row.
CHANGED = -1


@dataclass(frozen=True)
class WindowColumns:
    """Open windows, at most one with the same key and bounds."""

    #: Number of each window's key.
    key: Array
    start_ms: Array
    end_ms: Array
    #: Its next timer: when it fires, or, if it has fired, when it is cleaned up.
    due_ms: Array
    #: Position of its stored row; CHANGED if it differs from that.
    origin: Array
    values: tuple[pa.Array, ...]

    def __len__(self) -> int:
        return len(self.key)

    def take(self, places: Array) -> WindowColumns:
        if is_all(places, len(self)):
            return self
        taken = pa.array(places)
        bounds = self.start_ms[places], self.end_ms[places]
        values = tuple(column.take(taken) for column in self.values)
        return WindowColumns(self.key[places], *bounds, self.due_ms[places], self.origin[places], values)


@dataclass
class ArrivedParts:
    """Parts that have arrived, with what is needed to count or emit late ones."""

    hashes: Array
    keys: tuple[pa.Array, ...]
    first_ms: Array
    last_ms: Array
    #: Columns of the partial aggregates.
    values: Sequence[pa.Array]
    elements: Array
    #: Number of each arrived row's part; None if rows are parts.
    of_row: Array | None = None


@dataclass(frozen=True)
class WindowRules:
    """Windows, their allowed lateness and their aggregation; pickled into the plan."""

    windows: ColumnWindows
    #: Ignored for processing time.
    lateness_ms: int
    aggregation: ColumnAggregation

    @property
    def is_by_event_time(self) -> bool:
        return self.windows.clock is TimeDomain.EVENT_TIME

    def fold(
        self, batch: pa.RecordBatch, keys: Sequence[pa.Array], times_ms: Array
    ) -> tuple[Parts, list[pa.Array]]:
        parts = self.windows.divide(keys, times_ms)
        return parts, self.aggregation.fold(batch, parts.of_row, parts.first)

    def cleanup_ms(self, end_ms: Array) -> Array:
        last_ms, lateness_ms = find_last_ms(end_ms), self.lateness_ms if self.is_by_event_time else 0
        return add_ms(last_ms, lateness_ms)

    def add(
        self, windows: WindowColumns, key: Array, came: ArrivedParts, watermark_ms: int
    ) -> tuple[WindowColumns, Array, Array]:
        """Add parts of keys (by their numbers) to their windows.

        Returns the windows, the positions of those that fire again at once (for late parts within the allowed
        lateness), and a mask of the parts that were dropped as too late.
        """
        # Sessions are merged with all parts first, and checked for lateness afterwards. By processing time
        # nothing is late, and nothing fires here, since timers fire before elements are added.
        now_ms, count = watermark_ms if self.is_by_event_time else MIN_WATERMARK_MS, len(windows)
        of_part, start_ms, end_ms = self.windows.assign(came.first_ms, came.last_ms)
        keys = np.concatenate([windows.key, key[of_part]])
        start_ms, end_ms = (
            np.concatenate(both) for both in ((windows.start_ms, start_ms), (windows.end_ms, end_ms))
        )
        order, begins, starts, ends = self.windows.group(keys, start_ms, end_ms)
        sizes = np.diff(np.append(begins, len(order)))
        first = np.minimum.reduceat(order, begins) if len(order) else begins
        # If the smallest position is an open window, the group's window is not over.
        stays = (first < count) | (self.cleanup_ms(ends) > now_ms)
        of_row, is_in = np.empty(len(order), dtype=np.int64), np.empty(len(order), dtype=bool)
        of_row[order] = np.repeat(np.cumsum(stays) - 1, sizes)
        is_in[order] = np.repeat(stays, sizes)
        is_touched = ((first >= count) | (sizes > 1))[stays]
        first, starts, ends = first[stays], starts[stays], ends[stays]
        parts = of_part[is_in[count:]]
        is_lost = np.bincount(parts, minlength=len(key)) == 0
        is_late = is_lost & (add_ms(came.first_ms, self.lateness_ms) <= now_ms)
        values = self._fold_parts(windows, came, parts, of_row[is_in], (np.cumsum(is_in) - 1)[first])
        due_ms = np.where(find_last_ms(ends) > now_ms, find_last_ms(ends), self.cleanup_ms(ends))
        origin, same = np.full(len(first), CHANGED), np.flatnonzero(~is_touched)
        due_ms[same], origin[same] = windows.due_ms[first[same]], windows.origin[first[same]]
        fires = np.flatnonzero(is_touched & (find_last_ms(ends) <= now_ms))
        return WindowColumns(keys[first], starts, ends, due_ms, origin, values), fires, is_late

    def fire(self, windows: WindowColumns, limit_ms: int) -> tuple[WindowColumns, WindowColumns]:
        """Return the windows that remain at a time of their clock, and those that fire by then."""
        is_due = windows.due_ms <= limit_ms
        if not is_due.any():
            return windows, windows.take(np.empty(0, dtype=np.int64))
        places = np.flatnonzero(is_due & (windows.due_ms == find_last_ms(windows.end_ms)))
        fired = windows.take(places[np.argsort(windows.end_ms[places], kind="stable")])
        left = windows.take(np.flatnonzero(~is_due | (self.cleanup_ms(windows.end_ms) > limit_ms)))
        waits = left.due_ms <= limit_ms
        due_ms = np.where(waits, self.cleanup_ms(left.end_ms), left.due_ms)
        return replace(left, due_ms=due_ms, origin=np.where(waits, CHANGED, left.origin)), fired

    def _fold_parts(
        self, windows: WindowColumns, came: ArrivedParts, parts: Array, of_row: Array, first: Array
    ) -> tuple[pa.Array, ...]:
        new = list(came.values)
        if not is_all(parts, len(came.first_ms)):
            taken = pa.array(parts)
            new = [column.take(taken) for column in new]
        if len(windows):
            new = [pa.concat_arrays(both) for both in zip(windows.values, new, strict=True)]
        rows = pa.RecordBatch.from_arrays(new, names=self.aggregation.names)
        return tuple(self.aggregation.fold_partials(rows, of_row, first))


def is_all(places: Array, count: int) -> bool:
    return len(places) == count and bool((places[1:] > places[:-1]).all())


def find_last_ms(end_ms: Array) -> Array:
    return np.where(end_ms == MAX_WATERMARK_MS, MAX_WATERMARK_MS, end_ms - 1)


#: Columns after the partial aggregates: number of elements of a part, and last time of a session's part.
ELEMENTS, LAST_MS = "_fs_elements", "_fs_last_ms"

_TIMESTAMP = pa.timestamp("us", tz="UTC")
#: The years 1 to 9999.
_EPOCH_YEARS_MS = (-62_135_596_800_000, 253_402_300_799_999)


@dataclass(frozen=True)
class KeyedRows:
    """Rows of a key group on one side of the watermark, in their order."""

    hashes: Array
    keys: tuple[pa.Array, ...]
    #: Event times; None if the stream has none.
    times_ms: pa.Array | None
    fields: pa.RecordBatch

    def get_times(self, clock: TimeDomain, processing_time_ms: int) -> Array:
        if clock is TimeDomain.PROCESSING_TIME:
            return np.full(len(self.hashes), processing_time_ms)
        if self.times_ms is None or self.times_ms.null_count:
            raise NoEventTime
        found: Array = self.times_ms.to_numpy()
        return found


#: Turns rows into parts; also takes the processing time of the micro-batch.
Reader = Callable[[KeyedRows, WindowRules, int], ArrivedParts]


def read_partials(rows: KeyedRows, rules: WindowRules, processing_time_ms: int) -> ArrivedParts:
    """Read rows that were combined into parts before the shuffle."""
    first_ms = last_ms = rows.get_times(rules.windows.clock, processing_time_ms)
    fields = rows.fields
    if LAST_MS in fields.schema.names and rules.is_by_event_time:
        last_ms = fields.column(LAST_MS).to_numpy()
    values = [fields.column(name) for name in rules.aggregation.names]
    return ArrivedParts(rows.hashes, rows.keys, first_ms, last_ms, values, fields.column(ELEMENTS).to_numpy())


def read_elements(rows: KeyedRows, rules: WindowRules, processing_time_ms: int) -> ArrivedParts:
    """Read rows that are single elements, so that late ones can go to a side output."""
    times_ms = rows.get_times(rules.windows.clock, processing_time_ms)
    parts, values = rules.fold(rows.fields, rows.keys, times_ms)
    first = parts.first
    keys = tuple(key.take(pa.array(first)) for key in rows.keys)
    elements = np.bincount(parts.of_row, minlength=len(first))
    return ArrivedParts(
        rows.hashes[first], keys, parts.first_ms, parts.last_ms, values, elements, parts.of_row
    )


@dataclass
class Outcome:
    """Batches before and behind the watermark, whose first column is the time."""

    #: Results, with the output's columns.
    rows: tuple[list[pa.RecordBatch], list[pa.RecordBatch]] = field(default_factory=lambda: ([], []))
    #: Late elements, if there is a side output for them.
    late: tuple[list[pa.RecordBatch], list[pa.RecordBatch]] = field(default_factory=lambda: ([], []))
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WindowFold:
    """Window aggregate, as a keyed operator over columns; pickled into the plan."""

    rules: WindowRules
    #: Positions of the key's parts that are emitted before the aggregates.
    key_places: tuple[int, ...]
    reader: Reader
    #: Side output of late elements, needs :func:`read_elements`; None: they are dropped and counted.
    late_output: OutputTag | None = None

    def open(self, states: KeyedStates) -> None:
        aggregation, clock = self.rules.aggregation, self.rules.windows.clock
        own = aggregation.state_type()
        if len(aggregation.names) == 1:
            own = f"{name_text(aggregation.names[0])} {own}"
        states.declare_namespaced(OPEN)
        states.get_state(ValueStateDescriptor(OPEN, f"{DUE_FIELDS[clock]} LONG, {own}"))

    def run(
        self, before: KeyedRows | None, behind: KeyedRows | None, group: GroupState, progress: Progress
    ) -> Outcome:
        clock, now_ms = self.rules.windows.clock, progress.processing_time_ms
        table, limit_ms = group.due_table(OPEN), progress.limits_ms[clock]
        given = [None if rows is None else self.reader(rows, self.rules, now_ms) for rows in (before, behind)]
        came = [one for one in given if one is not None]
        hashes = np.concatenate([np.empty(0, dtype=np.int64), *(one.hashes for one in came)])
        stored = table.select(hashes, limit_ms)
        if not len(stored) and not came:
            return Outcome()
        run = _GroupWindows(self, table, stored, came)
        outcome, is_by_event_time = run.outcome, self.rules.is_by_event_time
        if not is_by_event_time:
            run.fire(progress.processing_limit_ms, outcome.rows[0])
        run.add(0, before, given[0], progress.watermark_before_ms)
        if is_by_event_time:
            run.fire(progress.watermark_ms, outcome.rows[0])
        run.add(1, behind, given[1], progress.watermark_ms)
        if is_by_event_time and progress.drained_to_ms > progress.watermark_ms:
            run.fire(progress.drained_to_ms, outcome.rows[1])
        run.store()
        return outcome


class StoredWindows:
    def __init__(
        self,
        table: DueTable,
        stored: SelectedRows,
        hashes: Sequence[Array],
        keys: Sequence[Sequence[pa.Array]],
    ) -> None:
        self.table, self.stored = table, stored
        columns = table.keys_together([stored.keys, *keys])
        self.index = KeyIndex.of(np.concatenate([stored.hashes, *hashes]), columns)
        #: Key numbers of the stored windows and of the arrived rows.
        self.stored_key, self.arrived_key = np.split(self.index.of_row, [len(stored)])
        #: Positions of the valid stored rows, by key and window.
        self.living = stored.living(self.stored_key)

    def write(
        self, kept: Array, key: Array, bounds: Sequence[Array], due_ms: Array, values: Sequence[pa.Array]
    ) -> bool:
        """Keep some stored rows and write others; return whether the state has changed."""
        if not len(key) and len(kept) == len(self.living):
            return False
        taken = pa.array(key)
        columns = [
            pa.array(self.index.hashes[key]),
            *(column.take(taken) for column in self.index.keys),
            *map(pa.array, (*bounds, due_ms)),
            *values,
            pa.array(np.ones(len(key), dtype=bool)),
        ]
        rows = pa.RecordBatch.from_arrays(columns, schema=self.table.layout.schema)
        self.table.write(self.stored, self.stored_key, kept, rows, key)
        return True


class _GroupWindows:
    """The open windows of a key group during one micro-batch."""

    def __init__(
        self, fold: WindowFold, table: DueTable, stored: SelectedRows, came: Sequence[ArrivedParts]
    ) -> None:
        self._fold, self._rules = fold, fold.rules
        keys, hashes = [one.keys for one in came], [one.hashes for one in came]
        self._stored = StoredWindows(table, stored, hashes, keys)
        #: Key numbers of the parts that are still to be added.
        self._keys_left = self._stored.arrived_key
        columns = self._stored.stored_key, *stored.bounds, stored.due_ms, np.arange(len(stored))
        self._windows = WindowColumns(*columns, tuple(stored.values)).take(self._stored.living)
        self.outcome = Outcome()

    def fire(self, limit_ms: int, out: list[pa.RecordBatch]) -> None:
        self._windows, fired = self._rules.fire(self._windows, limit_ms)
        self._put_results(fired, out)

    def add(self, side: int, rows: KeyedRows | None, came: ArrivedParts | None, watermark_ms: int) -> None:
        """Add the parts of one side of the watermark; fire windows with late parts, put lost parts aside."""
        if rows is None or came is None:
            return
        kinds = self._stored.table.layout.values[1:]
        came.values = [
            column if column.type == kind else column.cast(kind)
            for column, kind in zip(came.values, kinds, strict=True)
        ]
        key, self._keys_left = np.split(self._keys_left, [len(came.hashes)])
        self._windows, fires, is_late = self._rules.add(self._windows, key, came, watermark_ms)
        if is_late.any():
            self._put_late(side, rows, came, is_late)
        if len(fires):
            self._put_results(self._windows.take(fires), self.outcome.rows[side])

    def _put_late(self, side: int, rows: KeyedRows, came: ArrivedParts, is_late: Array) -> None:
        if self._fold.late_output is None:
            counts, late = self.outcome.counts, int(came.elements[is_late].sum())
            counts[LATE_RECORDS_DROPPED] = counts.get(LATE_RECORDS_DROPPED, 0) + late
            return
        assert came.of_row is not None
        places = pa.array(np.flatnonzero(is_late[came.of_row]))
        times = pa.nulls(len(rows.hashes), pa.int64()) if rows.times_ms is None else rows.times_ms
        self.outcome.late[side].append(_prepend_times(times, rows.fields.columns).take(places))

    def _put_results(self, fired: WindowColumns, out: list[pa.RecordBatch]) -> None:
        if not len(fired):
            return
        taken = pa.array(fired.key)
        keys = [self._stored.index.keys[at].take(taken) for at in self._fold.key_places]
        bounds = [to_timestamps(fired.start_ms), to_timestamps(fired.end_ms)]
        out.append(_prepend_times(pa.array(find_last_ms(fired.end_ms)), [*keys, *fired.values, *bounds]))

    def store(self) -> None:
        windows = self._windows
        kept = windows.origin[windows.origin != CHANGED]
        changed = windows.take(np.flatnonzero(windows.origin == CHANGED))
        bounds = changed.start_ms, changed.end_ms
        self._stored.write(kept, changed.key, bounds, changed.due_ms, changed.values)


def _prepend_times(times: pa.Array, columns: Sequence[pa.Array]) -> pa.RecordBatch:
    arrays = [times, *columns]
    return pa.RecordBatch.from_arrays(arrays, names=[f"c{at}" for at in range(len(arrays))])


def to_timestamps(times_ms: Array) -> pa.Array:
    """Return times as timestamps; null outside the years 1 to 9999."""
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
    """Sum, minimum or maximum of a field; null, also as a result, if all values are null."""

    def __init__(self, column: AggregateColumn, input_type: str) -> None:
        fields = ElementType(input_type).fields
        self._at = [field.name for field in fields].index(column.field or "")
        kind = fields[self._at].dataType
        #: Type of the accumulator: a tuple, so that a null result is not taken for no accumulator.
        self.kept = f"value {type_text(kind)}"
        self._fold = make_value_fold(column.fold, column.field or "", kind)

    def create_accumulator(self) -> Any:
        return (None,)

    def add(self, value: Any, accumulator: Any) -> Any:
        return (self._fold(accumulator[0], value[self._at]),)

    def get_result(self, accumulator: Any) -> Any:
        return accumulator

    def merge(self, first: Any, second: Any) -> Any:
        return (self._fold(first[0], second[0]),)
