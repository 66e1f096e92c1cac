"""Rows that a sink's tasks stage and its commit reads again: their control columns, the last row of a key."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.connectors.write_modes import Upsert

#: Control columns of staged rows: micro-batch, position in it, and whether the record deletes its key.
BATCH, ORDER, DELETED = "_fs_batch", "_fs_order", "_fs_deleted"


def add_places(rows: pa.RecordBatch, batch: int, first: int) -> pa.RecordBatch:
    places = range(first, first + rows.num_rows)
    rows = rows.append_column(BATCH, pa.array([batch] * rows.num_rows, pa.int64()))
    return rows.append_column(ORDER, pa.array(places, pa.int64()))


_PLACE = "_fs_place"


def newest_per_key(rows: pa.Table, mode: Upsert) -> pa.Table:
    """Return one row of each key: the one with the greatest sequence, or the later one in the stream."""
    order = [rows.column(name) for name in (BATCH, ORDER)]
    if mode.sequence_by is not None:
        sequence = rows.column(mode.sequence_by)
        # Null is older than everything.
        order = [pc.is_valid(sequence), sequence, *order]
    keys = [f"o{at}" for at in range(len(order))]
    places = pc.sort_indices(pa.table(order, names=keys), sort_keys=[(key, "ascending") for key in keys])
    rows = rows.take(places)
    names = [f"k{at}" for at in range(len(mode.keys))]
    place = pa.array(range(rows.num_rows), pa.int64())
    own = []
    for column in map(rows.column, mode.keys):
        if pa.types.is_floating(column.type):
            # Values that are equal in SQL must have the same bytes.
            nan, zero = (pa.scalar(value, column.type) for value in (float("nan"), 0.0))
            column = pc.if_else(pc.is_nan(column), nan, pc.add(column, zero))
        own.append(column)
    table = pa.table([*own, place], names=[*names, _PLACE])
    last = table.group_by(names, use_threads=False).aggregate([(_PLACE, "max")]).column(f"{_PLACE}_max")
    return rows.take(last)
