"""The open windows of a key group as they are stored: those of the keys at hand, and what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.operators.due_table import DueTable, Stored
from flinkish_spark.operators.key_index import Array, KeyIndex
from flinkish_spark.operators.open_windows import OpenWindow
from flinkish_spark.operators.table_codec import TableLayout, decode_values, encode_values
from flinkish_spark.operators.window_pool import last_of


class StoredWindows:
    """What is stored of the windows of some keys, in one micro-batch.

    Parameters
    ----------
    table, stored
        The entries, and those of them that may change.
    contents
        How an accumulator is stored: its columns are behind those of an entry's time and order.
    hashes, keys
        Of the keys of elements, column by column as in the table; one of each per element.
    """

    def __init__(
        self,
        table: DueTable,
        stored: Stored,
        contents: TableLayout,
        hashes: Sequence[Array],
        keys: Sequence[Sequence[pa.Array]],
    ) -> None:
        self._table, self._stored, self._contents = table, stored, contents
        columns = table.keys_together([stored.keys, *keys])
        #: All keys at hand.
        self.index = KeyIndex.of(np.concatenate([stored.hashes, *hashes]), columns)
        self._stored_key = self.index.of_row[: len(stored)]
        self._living = stored.living(self._stored_key)

    def key_numbers(self) -> Array:
        """Return the number of each element's key."""
        return self.index.of_row[len(self._stored) :]

    def windows(self) -> list[OpenWindow]:
        """Return the windows that are open."""
        living = self._living
        if not len(living):
            return []
        rows = self._stored.rows.take(pa.array(living))
        order, *contents = Stored(rows, 0, living).values
        start_ms, end_ms = (bounds[living].tolist() for bounds in self._stored.bounds)
        parts = (
            self._stored_key[living].tolist(),
            start_ms,
            end_ms,
            # Whoever has written a window with a savepoint writer need not know of it.
            pc.fill_null(order, 0).to_pylist(),
            decode_values(self._contents, contents),
            living.tolist(),
        )
        return list(map(OpenWindow, *parts))

    def store(self, windows: Iterable[OpenWindow], keys: Sequence[Any]) -> bool:
        """Put what became of them; return whether anything did.

        Parameters
        ----------
        windows
            Those that are open now.
        keys
            All keys by their numbers, for errors.

        Raises
        ------
        StateValueError
            An accumulator does not fit its declared type.
        """
        kept, changed = list[int](), list[OpenWindow]()
        for window in windows:
            if window.row is None:
                changed.append(window)
            else:
                kept.append(window.row)
        if not changed and len(kept) == len(self._living):
            return False
        key = np.array([one.key for one in changed], dtype=np.int64)
        rows = self._rows(changed, key, keys)
        self._table.write(self._stored, self._stored_key, np.array(kept, dtype=np.int64), rows, key)
        return True

    def _rows(self, windows: Sequence[OpenWindow], key: Array, keys: Sequence[Any]) -> pa.RecordBatch:
        taken = pa.array(key)
        end_ms = np.array([one.end_ms for one in windows], dtype=np.int64)
        values = [one.accumulator for one in windows]
        columns = [
            pa.array(self.index.hashes[key]),
            *(column.take(taken) for column in self.index.keys),
            pa.array([one.start_ms for one in windows], pa.int64()),
            pa.array(end_ms),
            pa.array(last_of(end_ms)),
            pa.array([one.order for one in windows], pa.int64()),
            *encode_values(self._contents, values, [keys[one.key] for one in windows]),
            pa.array(np.ones(len(windows), dtype=bool)),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._table.layout.schema)
