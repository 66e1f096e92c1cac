"""A value state of many keys at once, as columns: what vectorised functions read and write."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.operators.decoded_values import StateValueError
from flinkish_spark.operators.given_columns import GivenColumns
from flinkish_spark.operators.key_index import Array, KeyIndex
from flinkish_spark.operators.layered_table import LayeredTable
from flinkish_spark.operators.table_codec import ALIVE, TOUCHED, Expiry, SlotForm
from flinkish_spark.state.ttl import TtlUpdate

_NOWHERE = -1


class ColumnarState:
    """The entries of the keys of a batch; valid while their key group is worked on.

    Parameters
    ----------
    table
        A state with one entry per key.
    index
        The keys, by number.
    now_ms
        The micro-batch's processing time.
    """

    def __init__(self, table: LayeredTable, index: KeyIndex, now_ms: int) -> None:
        if table.layout.form is not SlotForm.KEY:
            raise ValueError(f"state {table.layout.name!r} has an entry per window, not per key")
        if table.layout.expiry is Expiry.ELEMENTS:
            raise ValueError(
                f"state {table.layout.name!r} has elements that expire one by one; it is no column"
            )
        self._table, self._index, self._now_ms = table, index, now_ms
        self._is_touched = False

    @cached_property
    def _places(self) -> tuple[Array, Array]:
        """Each key's row in the delta and in the base; -1 where there is none."""
        base = self._table.base
        nowhere = np.full(len(self._index), _NOWHERE)
        return (
            _places_of(self._table.delta, self._index),
            nowhere if base is None else _places_of(base, self._index),
        )

    @cached_property
    def _living(self) -> tuple[Array, Array]:
        """The same, without the rows of entries that are expired."""
        (upper, lower), ttl = self._places, self._table.layout.ttl
        if ttl is None:
            return upper, lower
        is_expired = np.zeros(len(self._index), dtype=bool)
        # The delta's last: its row stands for the base's.
        for layer, places in ((self._table.base, lower), (self._table.delta, upper)):
            there = np.flatnonzero(places != _NOWHERE)
            if layer is not None and len(there):
                touched = layer.column(TOUCHED).to_numpy()[places[there]]
                is_expired[there] = touched + ttl.ttl_ms <= self._now_ms
        return np.where(is_expired, _NOWHERE, upper), np.where(is_expired, _NOWHERE, lower)

    @cached_property
    def exists(self) -> Array:
        """Whether there is a value, by the key's number; shape (keys,), bool."""
        upper, lower = self._living
        found: Array = lower != _NOWHERE
        in_delta = upper != _NOWHERE
        alive = self._table.delta.column(ALIVE).to_numpy(zero_copy_only=False).astype(bool)
        found[in_delta] = alive[upper[in_delta]]
        return found

    def column(self, at: int = 0) -> pa.Array:
        """Return one column of the value by the key's number, null where there is none; shape (keys,).

        If reads count as touches, the time to live of the keys' entries begins anew.
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
        """Each key's living row in the delta, null where there is none: what `take` wants."""
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
        """Return one column of numbers by the key's number, with `absent` where there is none.

        They are floats where `absent` is no whole number, such as NaN.
        """
        column = self.column(at)
        if pa.types.is_integer(column.type) and not float(absent).is_integer():
            column = column.cast(pa.float64(), safe=False)
        filled: Array = pc.fill_null(column, absent).to_numpy(zero_copy_only=False)
        return filled

    def put(self, values: Sequence[pa.Array | Array], where: Array | None = None) -> None:
        """Set values.

        Parameters
        ----------
        values
            A column per column of the state's type, as long as the keys or as `where` has trues: of Arrow,
            numpy or pandas, or a list of Python's values. Of pandas, NaN is null.
        where
            Which keys get one, shape (keys,), bool; all by default.

        Raises
        ------
        StateValueError
            They are of another type or number than declared, or `where` is; names state, field and key.
        """
        chosen = self._chosen(where)
        columns = GivenColumns(self._table.layout, self._index, chosen).of(values)
        self._replace(chosen, columns, alive=np.ones(len(chosen), dtype=bool))

    def remove(self, where: Array) -> None:
        """Remove the values of the keys where the array says so; shape (keys,), bool."""
        meant = self._chosen(where)
        chosen = meant[self.exists[meant]]
        columns = [pa.nulls(len(chosen), kind) for kind in self._table.layout.values]
        self._replace(chosen, columns, alive=np.zeros(len(chosen), dtype=bool))

    def _chosen(self, where: Array | None) -> Array:
        try:
            return self._index.chosen(where)
        except ValueError as error:
            raise StateValueError(f"state {self._table.layout.name!r}: {error}") from None

    def _replace(self, chosen: Array, columns: list[pa.Array], alive: Array) -> None:
        table, layout = self._table, self._table.layout
        upper, lower = self._places
        gone = upper[chosen]
        # A removed entry leaves a trace only where there is a base in which it could be found again.
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
    """Return the row of each key in a layer that is sorted by hash."""
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
    """Return where two columns are equal; null is equal to null."""
    equal = pc.equal(here, there if there.type == here.type else there.cast(here.type))
    if here.null_count or there.null_count:
        equal = pc.or_(pc.fill_null(equal, False), pc.and_(here.is_null(), there.is_null()))
    found: Array = equal.to_numpy(zero_copy_only=False).astype(bool)
    return found


def _place_among(layer: pa.RecordBatch, index: KeyIndex, number: int, first: int, count: int) -> int:
    """Find a key among several of one hash."""
    wanted = [key[number].as_py() for key in index.keys]
    for place in range(first, first + count):
        if [layer.column(1 + at)[place].as_py() for at in range(len(wanted))] == wanted:
            return place
    return _NOWHERE
