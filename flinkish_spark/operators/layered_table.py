"""A table of entries in two layers: an old one that is not touched, and what has changed since.

The lower layer (the base) may be large and lie in a file that is mapped into memory; the upper one (the
delta) is small and travels with the key group's value. A row of the delta stands for the base's row of the
same slot; with `alive` false it says that the base's does not count any more. Without a base the delta is
the whole table.

Only rows of keys that are worked on become Python objects. Rows are found by their key's hash; two keys of
one hash are both found, and told apart by their slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from flinkish_spark.operators.elements import MAX_WATERMARK_MS
from flinkish_spark.operators.key_index import group_numbers
from flinkish_spark.operators.stored_rows import Row
from flinkish_spark.operators.table_codec import (
    ALIVE,
    HASH,
    TOUCHED,
    TableLayout,
    decode_rows,
    encode_rows,
    places_with,
)

Array = np.ndarray[Any, Any]


class LayeredTable:
    """The stored rows of one state of one key group.

    Use: :meth:`select` the rows of the keys at hand, work, :meth:`replace` what became of them; then
    :attr:`delta` is to be stored again if :attr:`is_changed`.
    """

    def __init__(
        self, layout: TableLayout, base: pa.RecordBatch | None, delta: pa.RecordBatch | None
    ) -> None:
        self.layout, self.base = layout, base
        self.delta = layout.empty if delta is None else delta
        self.is_changed = False
        #: The delta without the rows that were selected; those; and the rows of the base that were.
        self._kept = self.delta
        self._in_delta: dict[Any, Row] = {}
        self.in_base: dict[Any, Row] = {}

    def __len__(self) -> int:
        """Rows of both layers, an upper bound of the entries."""
        return sum(int(layer.num_rows) for layer in self.layers)

    @property
    def layers(self) -> list[pa.RecordBatch]:
        """The base, if there is one, and the delta."""
        return [self.delta] if self.base is None else [self.base, self.delta]

    def select(self, hashes: Array) -> dict[Any, Row]:
        """Return the living rows, by slot, of keys with one of these hashes, which are sorted and unique."""
        if not len(self):
            return {}
        found: dict[Any, Row] = {}
        if self.base is not None:
            found = {row.slot: row for row in self._decoded(self.base, places_with(self.base, hashes))}
        self.in_base = dict(found)
        places = places_with(self.delta, hashes)
        self._in_delta = {row.slot: row for row in self._decoded(self.delta, places)}
        self._kept = _without(self.delta, places)
        found.update(self._in_delta)
        if self.base is None:
            # Only what lies over a base has rows that are not alive.
            return found
        return {slot: row for slot, row in found.items() if row.alive}

    def decoded(self, hashes: Array) -> dict[Any, Row]:
        """Return the rows as :meth:`select` does, made anew, and without anything being selected."""
        found: dict[Any, Row] = {}
        for layer in self.layers:
            found.update((row.slot, row) for row in self._decoded(layer, places_with(layer, hashes)))
        return {slot: row for slot, row in found.items() if row.alive}

    def replace(self, changes: Mapping[Any, Row], gone: Collection[Any] = ()) -> None:
        """Put rows, by slot, into the delta, and take others out.

        Their keys are among those that were selected.

        Parameters
        ----------
        changes
            By slot. A row that is not alive says that the base's does not count.
        gone
            Slots of removed entries. For those in :attr:`in_base` such a row is among `changes`, too.
        """
        if not changes and not gone:
            return
        upper = self._in_delta
        for slot in gone:
            upper.pop(slot, None)
        upper.update(changes)
        self.delta = _joined([self._kept, encode_rows(self.layout, list(upper.values()))])
        self.is_changed = True

    def put_rows(self, rows: pa.RecordBatch, gone: Array) -> None:
        """Put rows into the delta, and take out those at some places of it; for whoever works on columns."""
        if rows.num_rows or len(gone):
            self.delta = _joined([_without(self.delta, gone), rows])
            self.is_changed = True

    def forget_expired(self, now_ms: int) -> None:
        """Leave out what has expired, where no older layer would show through."""
        if self.base is None:
            self.delta = self._fresh(self.delta, now_ms)

    def expired_in_base(self, now_ms: int) -> int:
        """Return how many rows of the base have expired, whether or not the delta has newer ones."""
        is_fresh = None if self.base is None else self._is_fresh(self.base, now_ms)
        return 0 if is_fresh is None else int(len(is_fresh) - np.count_nonzero(is_fresh))

    @property
    def expired_at_ms(self) -> int | None:
        """When everything in both layers will have expired; None for never, or if there is nothing."""
        layers = [layer for layer in self.layers if layer.num_rows]
        if self.layout.ttl is None or not layers:
            return None
        latest_ms = max(int(layer.column(TOUCHED).to_numpy().max()) for layer in layers)
        return latest_ms + self.layout.ttl.ttl_ms

    @property
    def clean_up_at_ms(self) -> int | None:
        """When everything may be forgotten: the next full quarter of the time to live, counted from 1970."""
        at_ms, ttl = self.expired_at_ms, self.layout.ttl
        if at_ms is None or ttl is None:
            return None
        quarter_ms = -(-ttl.ttl_ms // 4)
        return min(-(-at_ms // quarter_ms) * quarter_ms, MAX_WATERMARK_MS)

    def forget_all(self) -> None:
        """Leave out everything; whoever has the base must write one without it."""
        self.base, self.delta, self._kept = None, self.layout.empty, self.layout.empty
        self.is_changed = True

    def merged_at(self, now_ms: int) -> pa.RecordBatch:
        """Return all entries that have not expired as one layer, sorted by hash."""
        return self._fresh(self.merged(), now_ms)

    def _fresh(self, rows: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
        is_fresh = self._is_fresh(rows, now_ms)
        return rows if is_fresh is None or is_fresh.all() else rows.filter(pa.array(is_fresh))

    def _is_fresh(self, rows: pa.RecordBatch, now_ms: int) -> Array | None:
        """Return of each row whether it has not expired; None where entries do not expire."""
        ttl = self.layout.ttl
        if ttl is None:
            return None
        is_fresh: Array = rows.column(TOUCHED).to_numpy() > now_ms - ttl.ttl_ms
        return is_fresh

    def merged(self) -> pa.RecordBatch:
        """Return all living entries as one layer, sorted by hash."""
        delta = self.delta
        if self.base is None:
            return delta
        places = places_with(self.base, np.unique(delta.column(0).to_numpy()))
        both = pa.concat_batches([self.base.take(pa.array(places)), delta])
        if not both.num_rows:
            return self.base
        slots = [both.column(at) for at, name in enumerate(both.schema.names) if name in self._slot_names]
        numbers, first = group_numbers(slots)
        # Of the rows of a slot the one that is written last stays: the delta's.
        last = np.empty(len(first), dtype=np.int64)
        last[numbers] = np.arange(len(numbers))
        upper = both.take(pa.array(last))
        return _joined([_without(self.base, places), upper.filter(upper.column(ALIVE))])

    @property
    def _slot_names(self) -> set[str]:
        """Names of the columns that tell entries apart."""
        return {HASH, *self.layout.form.columns, *(f"key_{at}" for at in range(len(self.layout.keys)))}

    def rows(self) -> Iterable[Row]:
        """Return all living entries; for readers of checkpoints and for savepoints."""
        merged = self.merged()
        return self._decoded(merged, np.arange(merged.num_rows))

    def _decoded(self, batch: pa.RecordBatch, places: Array) -> Iterable[Row]:
        if not len(places):
            return ()
        return decode_rows(
            self.layout, batch if len(places) == batch.num_rows else batch.take(pa.array(places))
        )


def _without(batch: pa.RecordBatch, places: Array) -> pa.RecordBatch:
    if not len(places):
        return batch
    keep = np.ones(batch.num_rows, dtype=bool)
    keep[places] = False
    return batch.filter(pa.array(keep))


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows of several batches as one, sorted by hash."""
    joined = pa.concat_batches([batch for batch in batches if batch.num_rows] or batches[:1])
    order = np.argsort(joined.column(0).to_numpy(), kind="stable")
    return joined.take(pa.array(order))
