"""Entries per key and window that are due some time, as columns: read for the keys at hand, and written.

The first column of such a state's value says when something has to be done about an entry. So there are no
timers beside it: what is due is found in that column, of all keys at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.operators.elements import MAX_WATERMARK_MS, TimeDomain
from flinkish_spark.operators.key_index import Array, KeyIndex
from flinkish_spark.operators.layered_table import LayeredTable
from flinkish_spark.operators.table_codec import ALIVE, HASH, NAME, SlotForm, TableLayout, places_with

DUE = "value_0"
#: Name of the first field of such a state's value, by the clock; it is stored, so a reader knows it too.
DUE_FIELDS = {
    TimeDomain.EVENT_TIME: "_fs_due_by_event_time_ms",
    TimeDomain.PROCESSING_TIME: "_fs_due_by_processing_time_ms",
}
FROM, TO = SlotForm.KEY_AND_WINDOW.columns
_NONE: Array = np.empty(0, dtype=np.int64)


def due_clock(layout: TableLayout) -> TimeDomain | None:
    """Return the clock by which the entries of a state are due; None where they are not."""
    return next((clock for clock, name in DUE_FIELDS.items() if layout.value_names[:1] == (name,)), None)


def next_due_of(table: pa.RecordBatch, clock: TimeDomain) -> int | None:
    """Return when the first entry of a stored state without a base is due; None if none is, by that clock."""
    if DUE not in table.schema.names:
        return None
    metadata = table.schema.field(DUE).metadata or {}
    if metadata.get(NAME.encode()) != DUE_FIELDS[clock].encode():
        return None
    found: int | None = pc.min(table.column(DUE)).as_py()
    return found


@dataclass(frozen=True)
class Stored:
    """Rows of a table, those of the base in front of those of the delta.

    Parameters
    ----------
    rows
        With the table's columns; living ones, ones that others stand for, and removed ones.
    in_base
        How many are of the base.
    places
        Of the others, in the delta.
    """

    rows: pa.RecordBatch
    in_base: int
    places: Array

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    @property
    def hashes(self) -> Array:
        """Hash of each row's key."""
        return _numbers(self.rows, HASH)

    @property
    def keys(self) -> list[pa.Array]:
        """Key columns."""
        return _keys(self.rows)

    @property
    def bounds(self) -> tuple[Array, Array]:
        """Start and end of each row's window."""
        return _numbers(self.rows, FROM), _numbers(self.rows, TO)

    @property
    def due_ms(self) -> Array:
        """When each row is due."""
        return _due(self.rows)

    @property
    def values(self) -> list[pa.Array]:
        """The value's columns behind the first."""
        names = [name for name in self.rows.schema.names if name.startswith("value_") and name != DUE]
        return [self.rows.column(name) for name in names]

    def living(self, key: Array) -> Array:
        """Return the places of the entries: rows that count, in the order of keys and windows.

        Parameters
        ----------
        key
            Number of each row's key; shape (rows,).
        """
        start_ms, end_ms = self.bounds
        order = np.lexsort((end_ms, start_ms, key))
        if not self.in_base:
            return order
        last = np.append(_changes(order, key, start_ms, end_ms), True)[: len(order)]
        alive: Array = self.rows.column(ALIVE).to_numpy(zero_copy_only=False).astype(bool)
        return order[last & alive[order]]


class DueTable:
    """A state of :class:`~flinkish_spark.operators.group_state.GroupState` whose entries are due some time.

    Parameters
    ----------
    table
        With an entry per key and window, and a first value that is a time in milliseconds.
    """

    def __init__(self, table: LayeredTable) -> None:
        if table.layout.form is not SlotForm.KEY_AND_WINDOW:
            raise ValueError(f"state {table.layout.name!r} has an entry per key, not per window")
        self._table = table

    @property
    def layout(self) -> TableLayout:
        """Of the table."""
        return self._table.layout

    def keys_together(self, given: Sequence[Sequence[pa.Array]]) -> list[pa.Array]:
        """Return the key columns of several batches of rows, one behind the other, with the table's types."""
        return [
            pa.concat_arrays([own[at] if own[at].type == kind else own[at].cast(kind) for own in given])
            for at, kind in enumerate(self.layout.keys)
        ]

    def select(self, hashes: Array, limit_ms: int) -> Stored:
        """Return all rows of keys with these hashes, and of keys that have entries due up to a time."""
        base, delta = self._table.base, self._table.delta
        due = _numbers(delta, HASH)[_due(delta) <= limit_ms]
        if base is not None:
            places = self._counting(np.flatnonzero(_due(base) <= limit_ms))
            due = np.concatenate([due, _numbers(base, HASH)[places]])
        wanted = np.unique(np.concatenate([hashes, due]))
        places = places_with(delta, wanted)
        upper = delta if len(places) == delta.num_rows else delta.take(pa.array(places))
        if base is None:
            return Stored(upper, 0, places)
        lower = base.take(pa.array(places_with(base, wanted)))
        return Stored(pa.concat_batches([lower, upper]), lower.num_rows, places)

    def next_due_ms(self) -> int | None:
        """Return when the first entry is due; None if there is none."""
        base, delta = self._table.base, self._table.delta
        column = delta.column(DUE)
        # Windows of elements at the end of time are due then: that time is no sign of none.
        found: Array = (column.drop_null() if column.null_count else column).to_numpy()
        if base is not None:
            first_ms = int(found.min(initial=MAX_WATERMARK_MS))
            due = _due(base)
            earlier = due < first_ms if len(found) else pc.is_valid(base.column(DUE)).to_numpy(False)
            found = np.concatenate([found, due[self._counting(np.flatnonzero(earlier))]])
        return int(found.min()) if len(found) else None

    def write(self, stored: Stored, key: Array, kept: Array, rows: pa.RecordBatch, row_key: Array) -> None:
        """Put what became of the rows of :meth:`select`.

        Parameters
        ----------
        stored, key
            Those rows, and the number of each one's key.
        kept
            Places of those that stay as they are.
        rows, row_key
            Rows that are new or in place of others, and the numbers of their keys.
        """
        goes = np.ones(len(stored), dtype=bool)
        goes[kept] = False
        if stored.in_base:
            rows = pa.concat_batches([rows, self._traces(stored, key, kept, rows, row_key)])
        self._table.put_rows(rows, stored.places[goes[stored.in_base :]])

    def _traces(
        self, stored: Stored, key: Array, kept: Array, rows: pa.RecordBatch, row_key: Array
    ) -> pa.RecordBatch:
        """Return a removed row for each slot of the base that nothing else stands for any more."""
        below = np.arange(stored.in_base)
        start_ms, end_ms = stored.bounds
        above_start, above_end = _numbers(rows, FROM), _numbers(rows, TO)
        slots = [
            np.concatenate([column[below], column[kept], new])
            for column, new in ((key, row_key), (start_ms, above_start), (end_ms, above_end))
        ]
        number = _slot_numbers(*slots)
        gone = below[~np.isin(number[: stored.in_base], number[stored.in_base :])]
        removed = stored.rows.take(pa.array(gone))
        columns = [
            pa.nulls(len(gone), field.type) if name.startswith("value_") else removed.column(name)
            for name, field in zip(removed.schema.names, removed.schema, strict=True)
        ]
        columns[-1] = pa.array(np.zeros(len(gone), dtype=bool))
        return pa.RecordBatch.from_arrays(columns, schema=self.layout.schema)

    def _counting(self, places: Array) -> Array:
        """Return those places of the base for which no row of the delta stands."""
        base, delta = self._table.base, self._table.delta
        if base is None or not len(places) or not delta.num_rows:
            return places
        lower = base.take(pa.array(places))
        upper = delta.take(pa.array(places_with(delta, np.unique(_numbers(lower, HASH)))))
        if not upper.num_rows:
            return places
        both = pa.concat_batches([lower, upper])
        key = KeyIndex.of(_numbers(both, HASH), _keys(both)).of_row
        number = _slot_numbers(key, _numbers(both, FROM), _numbers(both, TO))
        return places[~np.isin(number[: len(places)], number[len(places) :])]


def _slot_numbers(key: Array, start_ms: Array, end_ms: Array) -> Array:
    """Return a number per row, the same for rows of the same key and window."""
    order = np.lexsort((end_ms, start_ms, key))
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.cumsum(np.concatenate([[0], _changes(order, key, start_ms, end_ms)]))[: len(order)]
    return number


def _changes(order: Array, *columns: Array) -> Array:
    """Return at each place of an order but the first whether it differs from the one before."""
    changed = np.zeros(max(len(order) - 1, 0), dtype=bool)
    for column in columns:
        ordered = column[order]
        changed |= ordered[1:] != ordered[:-1]
    return changed


def _numbers(rows: pa.RecordBatch, name: str) -> Array:
    found: Array = rows.column(name).to_numpy()
    return found


def _due(rows: pa.RecordBatch) -> Array:
    """Return when rows are due; never for removed ones."""
    column = rows.column(DUE)
    found: Array = (pc.fill_null(column, MAX_WATERMARK_MS) if column.null_count else column).to_numpy()
    return found


def _keys(rows: pa.RecordBatch) -> list[pa.Array]:
    return [rows.column(name) for name in rows.schema.names if name.startswith("key_")]
