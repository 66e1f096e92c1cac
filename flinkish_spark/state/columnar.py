"""States of many keys at once, as columns, for vectorised functions and windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.core.elements import MAX_WATERMARK_MS, TimeDomain
from flinkish_spark.state import codec
from flinkish_spark.state.descriptors import TtlUpdate
from flinkish_spark.state.layered import Array, KeyIndex, LayeredTable
from flinkish_spark.types.exact_columns import exact_cast, is_of_kind
from flinkish_spark.types.to_arrow import (
    ValueMismatch,
    first_of,
    first_refused,
    first_repeated,
    first_valid,
    strict_array,
)
from flinkish_spark.types.to_python import to_values

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class GivenColumns:
    layout: codec.TableLayout
    #: All keys, and the numbers of the keys that get a value.
    index: KeyIndex
    chosen: Array

    def of(self, values: Sequence[Any]) -> list[pa.Array]:
        kinds = self.layout.values
        if not isinstance(values, list | tuple) or len(values) != len(kinds):
            given = f"{len(values)} columns" if isinstance(values, list | tuple) else type(values).__name__
            names = f": {', '.join(self.layout.value_names)}" if self.layout.value_names else ""
            raise self._to_error(f"it is a list of {len(kinds)} columns{names}; {given} came")
        return [self._column(at, *one) for at, one in enumerate(zip(values, kinds, strict=True))]

    def _column(self, at: int, given: Any, kind: pa.DataType) -> pa.Array:
        try:
            array = _as_array(given, kind)
        except ValueMismatch as error:
            wrong = next((at for at, value in enumerate(given) if value is error.value), None)
            raise self._to_error_of(at, wrong, len(given), str(error)) from error
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise self._to_error_of(at, None, 0, f"{type(given).__name__}: {error}") from error
        if len(array) not in (len(self.chosen), len(self.index)):
            raise self._to_error_of(at, None, 0, f"{len(array)} values for {len(self.chosen)} of the keys")
        # A DATE keeps the day of a timestamp, as for single values.
        is_day = pa.types.is_date(kind) and pa.types.is_timestamp(array.type)
        if not is_day and not is_of_kind(array.type, kind):
            says = f"the column has the type {array.type}, but the declared type is {kind}{first_of(array)}"
            raise self._to_error_of(at, first_valid(array), len(array), says)
        if len(array) != len(self.chosen):
            array = array.take(pa.array(self.chosen))
        try:
            cast = exact_cast(array, kind)
        except pa.ArrowException as error:
            wrong = first_refused(len(array), lambda count: exact_cast(array.slice(0, count), kind))
            raise self._to_error_of(at, wrong, len(array), str(error)) from error
        if (found := first_repeated(cast)) is not None:
            wrong, key = found
            raise self._to_error_of(at, wrong, len(cast), f"a map has the key {key!r} twice")
        return cast

    def _to_error_of(self, at: int, wrong: int | None, count: int, says: str) -> codec.StateValueError:
        names = self.layout.value_names
        what = f"field {names[at]!r}" if names else "the value"
        if wrong is None:
            return self._to_error(f"{what}: {says}")
        number = int(self.chosen[wrong]) if count == len(self.chosen) else wrong
        parts = [to_values(column.slice(number, 1))[0] for column in self.index.keys]
        key = parts[0] if len(parts) == 1 else tuple(parts)
        return self._to_error(f"{what} of key {key!r:.200}: {says}")

    def _to_error(self, says: str) -> codec.StateValueError:
        return codec.StateValueError(f"state {self.layout.name!r} got a wrong value: {says}")


def _as_array(given: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(given, pa.Array):
        return given
    import pandas as pd

    is_of_objects = isinstance(given, pd.Series | np.ndarray) and given.dtype.kind == "O"
    if is_of_objects and isinstance(given, pd.Series):
        given = given.astype(object).where(given.notna(), None)
    if is_of_objects or isinstance(given, list | tuple):
        return strict_array(list(given), kind)
    made = given if isinstance(given, pa.ChunkedArray) else pa.array(given)
    return made.combine_chunks() if isinstance(made, pa.ChunkedArray) else made


_NOWHERE = -1


class ColumnarState:
    """The entries of the keys of a batch; valid while their key group is worked on."""

    def __init__(self, table: LayeredTable, index: KeyIndex, now_ms: int) -> None:
        if table.layout.form is not codec.SlotForm.KEY:
            raise ValueError(f"state {table.layout.name!r} has an entry per window, not per key")
        if table.layout.expiry is codec.Expiry.ELEMENTS:
            raise ValueError(
                f"state {table.layout.name!r} has elements that expire one by one; it is no column"
            )
        self._table, self._index, self._now_ms = table, index, now_ms
        self._is_touched = False

    @cached_property
    def _places(self) -> tuple[Array, Array]:
        """Each key's row in the delta and in the base; -1 for none."""
        base = self._table.base
        nowhere = np.full(len(self._index), _NOWHERE)
        return (
            _places_of(self._table.delta, self._index),
            nowhere if base is None else _places_of(base, self._index),
        )

    @cached_property
    def _living(self) -> tuple[Array, Array]:
        """The same, without the rows of expired entries."""
        (upper, lower), ttl = self._places, self._table.layout.ttl
        if ttl is None:
            return upper, lower
        is_expired = np.zeros(len(self._index), dtype=bool)
        # The delta last: its row replaces that of the base.
        for layer, places in ((self._table.base, lower), (self._table.delta, upper)):
            there = np.flatnonzero(places != _NOWHERE)
            if layer is not None and len(there):
                touched = layer.column(codec.TOUCHED).to_numpy()[places[there]]
                is_expired[there] = touched + ttl.ttl_ms <= self._now_ms
        return np.where(is_expired, _NOWHERE, upper), np.where(is_expired, _NOWHERE, lower)

    @cached_property
    def exists(self) -> Array:
        """True for keys that have a value, by the key's number; shape (keys,), bool."""
        upper, lower = self._living
        found: Array = lower != _NOWHERE
        in_delta = upper != _NOWHERE
        alive = self._table.delta.column(codec.ALIVE).to_numpy(zero_copy_only=False).astype(bool)
        found[in_delta] = alive[upper[in_delta]]
        return found

    def column(self, at: int = 0) -> pa.Array:
        """Return one column of the values by the key's number, null for keys without one; shape (keys,).

        With TtlUpdate.ON_READ_AND_WRITE this restarts the time to live of the keys' entries.
        """
        self._touch()
        return self._column(at)

    def _touch(self) -> None:
        ttl = self._table.layout.ttl
        if ttl is None or ttl.update is not TtlUpdate.ON_READ_AND_WRITE or self._is_touched:
            return
        self._is_touched = True
        chosen = np.flatnonzero(self.exists)
        if len(chosen):
            taken = pa.array(chosen)
            columns = [self._column(at).take(taken) for at in range(len(self._table.layout.values))]
            self._replace(chosen, columns, alive=np.ones(len(chosen), dtype=bool))

    @cached_property
    def _in_delta(self) -> pa.Array:
        """Each key's living row in the delta, null for none, as an argument of `take`."""
        upper, _ = self._living
        is_missing = upper == _NOWHERE
        return pa.array(upper, mask=is_missing) if is_missing.any() else pa.array(upper)

    def _column(self, at: int) -> pa.Array:
        upper, lower = self._living
        name = f"value_{at}"
        if self._table.base is None:
            return self._table.delta.column(name).take(self._in_delta)
        in_delta = upper != _NOWHERE
        in_base = (lower != _NOWHERE) & ~in_delta
        parts = [self._table.delta.column(name).take(pa.array(upper[in_delta]))]
        if self._table.base is not None:
            parts.append(self._table.base.column(name).take(pa.array(lower[in_base])))
        places = np.full(len(self._index), _NOWHERE)
        places[in_delta] = np.arange(int(in_delta.sum()))
        places[in_base] = int(in_delta.sum()) + np.arange(int(in_base.sum()))
        return pa.concat_arrays(parts).take(pa.array(places, mask=places == _NOWHERE))

    def numbers(self, at: int = 0, absent: float = 0) -> Array:
        """Return one column of numbers by the key's number, `absent` for keys without one.

        They are floats if `absent` is no whole number, such as NaN.
        """
        column = self.column(at)
        if pa.types.is_integer(column.type) and not float(absent).is_integer():
            column = column.cast(pa.float64(), safe=False)
        filled: Array = pc.fill_null(column, absent).to_numpy(zero_copy_only=False)
        return filled

    def put(self, values: Sequence[pa.Array | Array], where: Array | None = None) -> None:
        chosen = self._choose(where)
        columns = GivenColumns(self._table.layout, self._index, chosen).of(values)
        self._replace(chosen, columns, alive=np.ones(len(chosen), dtype=bool))

    def remove(self, where: Array) -> None:
        """Remove the values of the keys for which the array is true; shape (keys,), bool."""
        meant = self._choose(where)
        chosen = meant[self.exists[meant]]
        columns = [pa.nulls(len(chosen), kind) for kind in self._table.layout.values]
        self._replace(chosen, columns, alive=np.zeros(len(chosen), dtype=bool))

    def _choose(self, where: Array | None) -> Array:
        try:
            return self._index.choose(where)
        except ValueError as error:
            raise codec.StateValueError(f"state {self._table.layout.name!r}: {error}") from None

    def _replace(self, chosen: Array, columns: list[pa.Array], alive: Array) -> None:
        table, layout = self._table, self._table.layout
        upper, lower = self._places
        gone = upper[chosen]
        # A removed entry needs a row only if the base has it.
        written = alive | (lower[chosen] != _NOWHERE)
        keys = self._index.keys
        if len(chosen) < len(self._index):
            taken = pa.array(chosen)
            keys = tuple(key.take(taken) for key in keys)
        arrays = [pa.array(self._index.hashes[chosen])]
        arrays += [
            key if key.type == kind else key.cast(kind) for key, kind in zip(keys, layout.keys, strict=True)
        ]
        if layout.expires:
            arrays.append(pa.array(np.full(len(chosen), self._now_ms)))
        rows = pa.RecordBatch.from_arrays([*arrays, *columns, pa.array(alive)], schema=layout.schema)
        kept = rows if written.all() else rows.filter(pa.array(written))
        table.put_rows(kept, gone[gone != _NOWHERE])
        for name in ("_places", "_living", "_in_delta", "exists"):
            self.__dict__.pop(name, None)


def _places_of(layer: pa.RecordBatch, index: KeyIndex) -> Array:
    stored = layer.column(0).to_numpy()
    if not len(stored) or not len(index):
        return np.full(len(index), _NOWHERE)
    first = np.searchsorted(stored, index.hashes, side="left")
    count = np.searchsorted(stored, index.hashes, side="right") - first
    places = np.where(count > 0, first, _NOWHERE)
    hit = np.flatnonzero(count > 0)
    if not len(hit):
        return places
    same = np.ones(len(hit), dtype=bool)
    for at, key in enumerate(index.keys):
        here = key if len(hit) == len(key) else key.take(pa.array(hit))
        same &= _equal(here, layer.column(1 + at).take(pa.array(places[hit])))
    for number in hit[~same | (count[hit] > 1)].tolist():
        places[number] = _place_among(layer, index, number, int(first[number]), int(count[number]))
    return places


def _equal(here: pa.Array, there: pa.Array) -> Array:
    """Compare two columns element by element; null equals null."""
    equal = pc.equal(here, there if there.type == here.type else there.cast(here.type))
    if here.null_count or there.null_count:
        equal = pc.or_(pc.fill_null(equal, False), pc.and_(here.is_null(), there.is_null()))
    found: Array = equal.to_numpy(zero_copy_only=False).astype(bool)
    return found


def _place_among(layer: pa.RecordBatch, index: KeyIndex, number: int, first: int, count: int) -> int:
    wanted = [key[number].as_py() for key in index.keys]
    for place in range(first, first + count):
        if [layer.column(1 + at)[place].as_py() for at in range(len(wanted))] == wanted:
            return place
    return _NOWHERE


#: The first value column of a state with due times: when an entry is due. It has no separate timers.
DUE = "value_0"
FROM, TO = codec.SlotForm.KEY_AND_WINDOW.columns
_NONE: Array = np.empty(0, dtype=np.int64)


def due_clock(layout: codec.TableLayout) -> TimeDomain | None:
    return next(
        (clock for clock, name in codec.DUE_FIELDS.items() if layout.value_names[:1] == (name,)), None
    )


def next_due_of(table: pa.RecordBatch, clock: TimeDomain) -> int | None:
    """Return the earliest due time of a stored state without a base; None without one by this clock."""
    if DUE not in table.schema.names:
        return None
    if codec.reader_name(table.schema.field(DUE)) != codec.DUE_FIELDS[clock]:
        return None
    found: int | None = pc.min(table.column(DUE)).as_py()
    return found


@dataclass(frozen=True)
class SelectedRows:
    """Selected rows of a table: those of the base, then those of the delta."""

    #: In the table's columns: living rows, rows of the base that the delta replaces, and removed ones.
    rows: pa.RecordBatch
    #: How many of them are of the base.
    in_base: int
    #: Places of the others in the delta.
    places: Array

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    @property
    def hashes(self) -> Array:
        return _numbers(self.rows, codec.HASH)

    @property
    def keys(self) -> list[pa.Array]:
        return _keys(self.rows)

    @property
    def bounds(self) -> tuple[Array, Array]:
        return _numbers(self.rows, FROM), _numbers(self.rows, TO)

    @property
    def due_ms(self) -> Array:
        return _due(self.rows)

    @property
    def values(self) -> list[pa.Array]:
        names = [name for name in self.rows.schema.names if name.startswith("value_") and name != DUE]
        return [self.rows.column(name) for name in names]

    def living(self, key: Array) -> Array:
        start_ms, end_ms = self.bounds
        order = np.lexsort((end_ms, start_ms, key))
        if not self.in_base:
            return order
        last = np.append(_changes(order, key, start_ms, end_ms), True)[: len(order)]
        alive: Array = self.rows.column(codec.ALIVE).to_numpy(zero_copy_only=False).astype(bool)
        return order[last & alive[order]]


class DueTable:
    """A state of :class:`~flinkish_spark.state.key_group.GroupState` whose entries have due times."""

    def __init__(self, table: LayeredTable) -> None:
        if table.layout.form is not codec.SlotForm.KEY_AND_WINDOW:
            raise ValueError(f"state {table.layout.name!r} has an entry per key, not per window")
        self._table, self.layout = table, table.layout

    def keys_together(self, given: Sequence[Sequence[pa.Array]]) -> list[pa.Array]:
        return [
            pa.concat_arrays([own[at] if own[at].type == kind else own[at].cast(kind) for own in given])
            for at, kind in enumerate(self.layout.keys)
        ]

    def due(self, limit_ms: int) -> Array:
        base, delta = self._table.base, self._table.delta
        due = _numbers(delta, codec.HASH)[_due(delta) <= limit_ms]
        if base is not None:
            places = self._counting(np.flatnonzero(_due(base) <= limit_ms))
            due = np.concatenate([due, _numbers(base, codec.HASH)[places]])
        return due

    def select(self, hashes: Array, limit_ms: int) -> SelectedRows:
        """Return all rows of keys with these hashes, and of keys with entries that are due up to a time."""
        base, delta = self._table.base, self._table.delta
        wanted = np.unique(np.concatenate([hashes, self.due(limit_ms)]))
        places = codec.find_places(delta, wanted)
        upper = delta if len(places) == delta.num_rows else delta.take(pa.array(places))
        if base is None:
            return SelectedRows(upper, 0, places)
        lower = base.take(pa.array(codec.find_places(base, wanted)))
        return SelectedRows(pa.concat_batches([lower, upper]), lower.num_rows, places)

    def next_due_ms(self) -> int | None:
        base, delta = self._table.base, self._table.delta
        column = delta.column(DUE)
        # A window at the end of time has the latest possible due time; that does not mean that none is due.
        found: Array = (column.drop_null() if column.null_count else column).to_numpy()
        if base is not None:
            first_ms = int(found.min(initial=MAX_WATERMARK_MS))
            due = _due(base)
            earlier = due < first_ms if len(found) else pc.is_valid(base.column(DUE)).to_numpy(False)
            found = np.concatenate([found, due[self._counting(np.flatnonzero(earlier))]])
        return int(found.min()) if len(found) else None

    def write(
        self, stored: SelectedRows, key: Array, kept: Array, rows: pa.RecordBatch, row_key: Array
    ) -> None:
        """Replace the rows of :meth:`select` by those that are kept and new `rows`."""
        goes = np.ones(len(stored), dtype=bool)
        goes[kept] = False
        if stored.in_base:
            rows = pa.concat_batches([rows, self._traces(stored, key, kept, rows, row_key)])
        self._table.put_rows(rows, stored.places[goes[stored.in_base :]])

    def _traces(
        self, stored: SelectedRows, key: Array, kept: Array, rows: pa.RecordBatch, row_key: Array
    ) -> pa.RecordBatch:
        """Return a row with `alive` false for each slot of the base that has no other row any more."""
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
        """Return the places of the base whose slots have no row in the delta."""
        base, delta = self._table.base, self._table.delta
        if base is None or not len(places) or not delta.num_rows:
            return places
        lower = base.take(pa.array(places))
        upper = delta.take(pa.array(codec.find_places(delta, np.unique(_numbers(lower, codec.HASH)))))
        if not upper.num_rows:
            return places
        both = pa.concat_batches([lower, upper])
        key = KeyIndex.of(_numbers(both, codec.HASH), _keys(both)).of_row
        number = _slot_numbers(key, _numbers(both, FROM), _numbers(both, TO))
        return places[~np.isin(number[: len(places)], number[len(places) :])]


def _slot_numbers(key: Array, start_ms: Array, end_ms: Array) -> Array:
    """Assign numbers to rows, equal ones to rows of the same key and window."""
    order = np.lexsort((end_ms, start_ms, key))
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.cumsum(np.concatenate([[0], _changes(order, key, start_ms, end_ms)]))[: len(order)]
    return number


def _changes(order: Array, *columns: Array) -> Array:
    """Compare each place of an order, except the first, with the one before; True if they differ."""
    changed = np.zeros(max(len(order) - 1, 0), dtype=bool)
    for column in columns:
        ordered = column[order]
        changed |= ordered[1:] != ordered[:-1]
    return changed


def _numbers(rows: pa.RecordBatch, name: str) -> Array:
    found: Array = rows.column(name).to_numpy()
    return found


def _due(rows: pa.RecordBatch) -> Array:
    """Return the due times of rows; the end of time for removed ones."""
    column = rows.column(DUE)
    found: Array = (pc.fill_null(column, MAX_WATERMARK_MS) if column.null_count else column).to_numpy()
    return found


def _keys(rows: pa.RecordBatch) -> list[pa.Array]:
    return [rows.column(name) for name in rows.schema.names if name.startswith("key_")]
