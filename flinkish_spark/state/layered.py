"""A table of entries in two layers: an immutable base, and a delta with the changes since."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.core.elements import MAX_WATERMARK_MS
from flinkish_spark.state import codec
from flinkish_spark.state.tables import StateTable, same

Array = np.ndarray[Any, Any]

#: One in this many keys is sampled to estimate how often keys repeat; fewer sampled rows than this are too
#: few.
_SAMPLED_KEYS = 64
_LEAST_SAMPLED_ROWS = 256
#: Samples by the upper bits of hashes: the lower ones determine the key group.
_SAMPLED_BY = 40


@dataclass(frozen=True)
class KeyIndex:
    #: Number of each row's key; shape (rows,).
    of_row: Array
    #: Hash of each key, ascending; equal for two keys only if their hashes collide. Shape (keys,).
    hashes: Array
    #: Columns of the distinct keys, by number.
    keys: tuple[pa.Array, ...]
    #: The first row of each key; shape (keys,).
    first: Array

    def __len__(self) -> int:
        return len(self.hashes)

    def choose(self, where: Array | None) -> Array:
        """Return the numbers of the keys for which a bool array is true; of all keys for None."""
        if where is None:
            return np.arange(len(self))
        given = np.asarray(where)
        is_true_or_false = given.dtype == bool or all(isinstance(one, bool | np.bool_) for one in given.flat)
        if given.shape != (len(self),) or not is_true_or_false:
            raise ValueError(
                f"the array that selects keys has type {given.dtype} and shape {given.shape}; give one true "
                f"or false for each of the {len(self)} keys"
            )
        return np.flatnonzero(given)

    @classmethod
    def of(cls, hashes: Array, keys: Sequence[pa.Array]) -> KeyIndex:
        distinct, first, of_row = np.unique(hashes, return_index=True, return_inverse=True)
        taken = tuple(column.take(pa.array(first)) for column in keys)
        index = cls(of_row, distinct, taken, first)
        if all(_is_repeated(column, first, of_row) for column in keys):
            return index
        return cls._index_collisions(hashes, keys)

    @classmethod
    def _index_collisions(cls, hashes: Array, keys: Sequence[pa.Array]) -> KeyIndex:
        """Assign numbers to keys by their values, for the rare case that two keys have the same hash."""
        rows = list(zip(hashes.tolist(), *(column.to_pylist() for column in keys), strict=True))
        first_of: dict[tuple[Any, ...], int] = {}
        for place, row in enumerate(rows):
            first_of.setdefault(row, place)
        ordered = sorted(first_of, key=lambda row: (row[0], first_of[row]))
        number = {row: at for at, row in enumerate(ordered)}
        first = np.array([first_of[row] for row in ordered], dtype=np.int64)
        of_row = np.array([number[row] for row in rows], dtype=np.int64)
        return cls(of_row, hashes[first], tuple(column.take(pa.array(first)) for column in keys), first)


def group_numbers(keys: Sequence[pa.Array]) -> tuple[Array, Array]:
    """Assign a number to each row by its key, in order of appearance; also return each key's first row."""
    numbers: Array | None = None
    for key in keys:
        encoded = key.dictionary_encode(null_encoding="encode")
        codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        if numbers is None:
            numbers = codes
        else:
            both = pa.array(numbers * len(encoded.dictionary) + codes).dictionary_encode()
            numbers = both.indices.to_numpy().astype(np.int64)
    if numbers is None:
        raise ValueError("rows cannot be told apart without a key column")
    count = int(numbers.max()) + 1 if len(numbers) else 0
    first = np.empty(count, dtype=np.int64)
    # Written in reverse order, so that the first row of each key stays.
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]
    return numbers, first


def keys_rarely_repeat(hashes: Array) -> bool:
    """Estimate by a sample whether fewer than a quarter of the rows repeat the key of an earlier row."""
    # The sample has all rows of some keys: it does not depend on their order, so a micro-batch that runs
    # again gets the same answer.
    sampled = hashes[(hashes >> _SAMPLED_BY) % _SAMPLED_KEYS == 0]
    # A very frequent key makes the sample too small if it is not in it, and too large if it is.
    is_even = 0.5 <= len(sampled) * _SAMPLED_KEYS / max(len(hashes), 1) <= 2
    if len(sampled) < _LEAST_SAMPLED_ROWS or not is_even:
        return False
    return len(np.unique(sampled)) > 0.75 * len(sampled)


def _is_repeated(column: pa.Array, first: Array, of_row: Array) -> bool:
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return _same(column, column.take(pa.array(first)).take(pa.array(of_row)))
    # Comparing codes takes a fraction of the time for moving the texts.
    codes = column.dictionary_encode(null_encoding="encode").indices.to_numpy()
    return bool((codes[first][of_row] == codes).all())


def _same(left: pa.Array, right: pa.Array) -> bool:
    if left.null_count or right.null_count:
        if not left.is_null().equals(right.is_null()):
            return False
        left, right = left.drop_null(), right.drop_null()
    return bool(pc.all(pc.equal(left, right), min_count=0).as_py())


class LayeredTable:
    """The stored rows of one state of one key group: a base, which may lie in a mapped file, and a delta.

    A row of the delta replaces the base's row of the same slot; with `alive` false it removes that. Use:
    :meth:`select` the rows of some keys, change them, and :meth:`replace` them; then store :attr:`delta`
    again if :attr:`is_changed`.
    """

    def __init__(
        self, layout: codec.TableLayout, base: pa.RecordBatch | None, delta: pa.RecordBatch | None
    ) -> None:
        self.layout, self.base = layout, base
        self.delta = layout.empty if delta is None else delta
        self.is_changed = False
        #: The unselected rows of the delta; its selected rows; and the selected rows of the base.
        self._kept = self.delta
        self._in_delta: dict[Any, codec.Row] = {}
        self.in_base: dict[Any, codec.Row] = {}

    def __len__(self) -> int:
        """Return the number of rows in both layers, an upper bound of the entries."""
        return sum(int(layer.num_rows) for layer in self.layers)

    @property
    def layers(self) -> list[pa.RecordBatch]:
        return [self.delta] if self.base is None else [self.base, self.delta]

    def select(self, hashes: Array) -> dict[Any, codec.Row]:
        """Return the living rows, by slot, of keys with one of these hashes (sorted, unique)."""
        if not len(self):
            return {}
        found: dict[Any, codec.Row] = {}
        if self.base is not None:
            found = {row.slot: row for row in self._decode(self.base, codec.find_places(self.base, hashes))}
        self.in_base = dict(found)
        places = codec.find_places(self.delta, hashes)
        self._in_delta = {row.slot: row for row in self._decode(self.delta, places)}
        self._kept = _drop_rows(self.delta, places)
        found.update(self._in_delta)
        if self.base is None:
            # Without a base the delta has no rows that are not alive.
            return found
        return {slot: row for slot, row in found.items() if row.alive}

    def decode(self, hashes: Array) -> dict[Any, codec.Row]:
        """Decode the rows of :meth:`select` anew, without changing the selection."""
        found: dict[Any, codec.Row] = {}
        for layer in self.layers:
            found.update((row.slot, row) for row in self._decode(layer, codec.find_places(layer, hashes)))
        return {slot: row for slot, row in found.items() if row.alive}

    def replace(self, changes: Mapping[Any, codec.Row], gone: Collection[Any] = ()) -> None:
        """Put rows, by slot, into the delta and remove `gone` slots; all are of selected keys."""
        if not changes and not gone:
            return
        upper = self._in_delta
        for slot in gone:
            upper.pop(slot, None)
        upper.update(changes)
        self.delta = _concat([self._kept, codec.encode_rows(self.layout, list(upper.values()))])
        self.is_changed = True

    def put_rows(self, rows: pa.RecordBatch, gone: Array) -> None:
        if rows.num_rows or len(gone):
            self.delta = _concat([_drop_rows(self.delta, gone), rows])
            self.is_changed = True

    def forget_expired(self, now_ms: int) -> None:
        """Drop expired rows of the delta, unless a base would show through."""
        if self.base is None:
            self.delta = self.drop_expired(self.delta, now_ms)

    @property
    def expired_at_ms(self) -> int | None:
        """Time at which all rows of both layers will have expired; None for never, or without rows."""
        layers = [layer for layer in self.layers if layer.num_rows]
        if self.layout.ttl is None or not layers:
            return None
        latest_ms = max(int(layer.column(codec.TOUCHED).to_numpy().max()) for layer in layers)
        return latest_ms + self.layout.ttl.ttl_ms

    @property
    def clean_up_at_ms(self) -> int | None:
        """Time of a cleaning that drops everything: the next full quarter of the time to live since 1970."""
        at_ms, ttl = self.expired_at_ms, self.layout.ttl
        if at_ms is None or ttl is None:
            return None
        # The rounding lets many key groups be cleaned together.
        quarter_ms = -(-ttl.ttl_ms // 4)
        return min(-(-at_ms // quarter_ms) * quarter_ms, MAX_WATERMARK_MS)

    def forget_all(self) -> None:
        """Drop all rows; the caller has to write a new base."""
        self.base, self.delta, self._kept = None, self.layout.empty, self.layout.empty
        self.is_changed = True

    def count_expired_in_base(self, now_ms: int) -> int:
        """Count the expired rows of the base, also those that the delta replaces."""
        is_fresh = None if self.base is None else self._is_fresh(self.base, now_ms)
        return 0 if is_fresh is None else int(len(is_fresh) - np.count_nonzero(is_fresh))

    def drop_expired(self, rows: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
        is_fresh = self._is_fresh(rows, now_ms)
        return rows if is_fresh is None or is_fresh.all() else rows.filter(pa.array(is_fresh))

    def _is_fresh(self, rows: pa.RecordBatch, now_ms: int) -> Array | None:
        """Return for each row whether it is unexpired; None for states without a time to live."""
        ttl = self.layout.ttl
        if ttl is None:
            return None
        is_fresh: Array = rows.column(codec.TOUCHED).to_numpy() > now_ms - ttl.ttl_ms
        return is_fresh

    def merge(self) -> pa.RecordBatch:
        """Return all living entries as one layer, sorted by hash."""
        delta = self.delta
        if self.base is None:
            return delta
        places = codec.find_places(self.base, np.unique(delta.column(0).to_numpy()))
        both = pa.concat_batches([self.base.take(pa.array(places)), delta])
        if not both.num_rows:
            return self.base
        names = [codec.HASH, *(f"key_{at}" for at in range(len(self.layout.keys))), *self.layout.form.columns]
        slots = [both.column(name) for name in names]
        numbers, first = group_numbers(slots)
        # Rows of the delta come last, so they replace those of the base.
        last = np.empty(len(first), dtype=np.int64)
        last[numbers] = np.arange(len(numbers))
        upper = both.take(pa.array(last))
        return _concat([_drop_rows(self.base, places), upper.filter(upper.column(codec.ALIVE))])

    def rows(self) -> Iterable[codec.Row]:
        merged = self.merge()
        return self._decode(merged, np.arange(merged.num_rows))

    def _decode(self, batch: pa.RecordBatch, places: Array) -> Iterable[codec.Row]:
        if not len(places):
            return ()
        return codec.decode_rows(
            self.layout, batch if len(places) == batch.num_rows else batch.take(pa.array(places))
        )


def _drop_rows(batch: pa.RecordBatch, places: Array) -> pa.RecordBatch:
    if not len(places):
        return batch
    keep = np.ones(batch.num_rows, dtype=bool)
    keep[places] = False
    return batch.filter(pa.array(keep))


def _concat(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    joined = pa.concat_batches([batch for batch in batches if batch.num_rows] or batches[:1])
    order = np.argsort(joined.column(0).to_numpy(), kind="stable")
    return joined.take(pa.array(order))


def note_changes_in_place(
    table: StateTable, stored: LayeredTable, hash_of: Mapping[Any, int], now_ms: int
) -> None:
    """Mark lent entries as changed if a function has changed them in place."""
    has_window = stored.layout.form is codec.SlotForm.KEY_AND_WINDOW
    lent = [slot for slot in table.lent - table.changed if slot in table.entries]
    if not lent:
        return
    hashes = {hash_of[slot[0] if has_window else slot] for slot in lent}
    before = stored.decode(np.array(sorted(hashes), dtype=np.int64))
    for slot in lent:
        held = before[slot].value if slot in before else None
        if stored.layout.is_due and held is not None:
            held = held[2]
        if held is None or not same(table.entries[slot], held):
            table.write_in_place(slot, now_ms)
