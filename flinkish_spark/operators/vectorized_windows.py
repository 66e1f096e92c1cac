"""Folds of windows over columns: what a key group's rows make of its open windows.

The order is that of :mod:`flinkish_spark.operators.group_run`: processing time, rows before the watermark,
the watermark, rows behind it. Of each key and window there is one row in the state, with when it is due.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from flinkish_spark.operators.column_windows import Parts
from flinkish_spark.operators.due_table import DUE_FIELDS, DueTable, Stored
from flinkish_spark.operators.element_windows import LATE_RECORDS_DROPPED
from flinkish_spark.operators.elements import OutputTag, TimeDomain
from flinkish_spark.operators.group_run import Progress
from flinkish_spark.operators.group_state import GroupState
from flinkish_spark.operators.key_index import Array, KeyIndex
from flinkish_spark.operators.keyed_context import KeyedStates
from flinkish_spark.operators.window_pool import CHANGED, Arrivals, Pool, WindowRules, last_of
from flinkish_spark.runtime.ddl import name_text
from flinkish_spark.state import ValueStateDescriptor
from flinkish_spark.windows.assigners import NoEventTime

FOLDED = "window/folded"
#: Behind the aggregate, on the way: how many elements a part has, and the last time of a session's.
ELEMENTS, LAST_MS = "_fs_elements", "_fs_last_ms"

_TIMESTAMP = pa.timestamp("us", tz="UTC")
#: The years 1 to 9999.
_EPOCH_YEARS_MS = (-62_135_596_800_000, 253_402_300_799_999)


@dataclass(frozen=True)
class Rows:
    """Rows that came in together: on one side of the watermark, in their order.

    Parameters
    ----------
    hashes, keys
        Of each row's key.
    times_ms
        Event times; None if the stream has none.
    fields
        The columns that an operator reads, by their names.
    """

    hashes: Array
    keys: tuple[pa.Array, ...]
    times_ms: pa.Array | None
    fields: pa.RecordBatch

    def times_by(self, clock: TimeDomain, processing_time_ms: int) -> Array:
        """Return the time by which each row is assigned to windows.

        Raises
        ------
        NoEventTime
            One has none.
        """
        if clock is TimeDomain.PROCESSING_TIME:
            return np.full(len(self.hashes), processing_time_ms)
        if self.times_ms is None or self.times_ms.null_count:
            raise NoEventTime
        found: Array = self.times_ms.to_numpy()
        return found


@dataclass(frozen=True)
class Came:
    """Parts that came, and what is lost of them if they are late.

    Parameters
    ----------
    elements
        How many elements each part has.
    of_row
        Part of each row that came; None where rows are parts.
    """

    hashes: Array
    keys: tuple[pa.Array, ...]
    first_ms: Array
    last_ms: Array
    values: Sequence[pa.Array]
    elements: Array
    of_row: Array | None = None


class Reader(ABC):
    """Makes parts of rows."""

    @abstractmethod
    def read(self, rows: Rows, rules: WindowRules, processing_time_ms: int) -> Came:
        """Return the parts."""


class Partials(Reader):
    """Rows are parts, which were made before the shuffle."""

    def read(self, rows: Rows, rules: WindowRules, processing_time_ms: int) -> Came:
        """Return the parts."""
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
        """Return the parts."""
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
    """Divide elements into parts and fold each; before the shuffle, or behind it.

    Raises
    ------
    AggregateOverflow
        A sum leaves the type of its field.
    """
    parts = rules.windows.parts(keys, times_ms)
    return parts, rules.aggregation.fold(batch, parts.of_row, parts.first)


@dataclass
class Outcome:
    """What a key group emits in a micro-batch.

    Parameters
    ----------
    before, behind
        Rows on both sides of the watermark; each a batch with times, and the output's columns.
    late_before, late_behind
        Elements that came too late, if there is a side output for them.
    counts
        What was counted, by name.
    """

    before: list[pa.RecordBatch] = field(default_factory=list)
    behind: list[pa.RecordBatch] = field(default_factory=list)
    late_before: pa.RecordBatch | None = None
    late_behind: pa.RecordBatch | None = None
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WindowFold:
    """Folds of windows, as a keyed operator over columns; travels in the plan.

    Parameters
    ----------
    key_places
        Which parts of the key come out, in front of the folds.
    reader
        What makes parts of the rows that come in.
    late_output
        Where late elements go; None: they are dropped and counted. Needs :class:`WholeElements`.
    """

    rules: WindowRules
    key_places: tuple[int, ...]
    reader: Reader
    late_output: OutputTag | None = None

    def open(self, states: KeyedStates) -> None:
        """Declare the state."""
        states.per_namespace(FOLDED)
        states.get_state(ValueStateDescriptor(FOLDED, _state_type(self.rules)))

    def run(self, before: Rows | None, behind: Rows | None, group: GroupState, progress: Progress) -> Outcome:
        """Work through the rows of a key group; its state is changed behind it.

        Raises
        ------
        NoEventTime
            An element has none, and windows go by it.
        AggregateOverflow
            A sum leaves the type of its field.
        """
        clock, now_ms = self.rules.windows.clock, progress.processing_time_ms
        table, limit_ms = group.due_table(FOLDED), progress.limits_ms[clock]
        came = [
            None if rows is None else self.reader.read(rows, self.rules, now_ms) for rows in (before, behind)
        ]
        hashes = [one.hashes for one in came if one is not None]
        stored = table.select(np.concatenate(hashes or [np.empty(0, dtype=np.int64)]), limit_ms)
        if not len(stored) and not hashes:
            return Outcome()
        return _GroupWindows(self, table, stored, came[0], came[1]).run(before, behind, progress)


class _GroupWindows:
    """The windows of a key group in one micro-batch."""

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

    # -- steps --------------------------------------------------------------------------------------
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

    # -- state --------------------------------------------------------------------------------------
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
    """Return what is kept of a window, as DDL: when it is due, and its aggregate."""
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
