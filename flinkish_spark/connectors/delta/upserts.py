"""The last record of each key, of the rows of a checkpoint."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.connectors.delta.table import Upsert
from flinkish_spark.connectors.delta.writer import BATCH, ORDER

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
    own = [_as_key(rows.column(key)) for key in mode.keys]
    table = pa.table([*own, place], names=[*names, _PLACE])
    last = table.group_by(names, use_threads=False).aggregate([(_PLACE, "max")]).column(f"{_PLACE}_max")
    return rows.take(last)


def _as_key(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return values of which those that SQL takes for equal are the same bytes."""
    if not pa.types.is_floating(column.type):
        return column
    nan = pa.scalar(float("nan"), column.type)
    return pc.if_else(pc.is_nan(column), nan, pc.add(column, pa.scalar(0.0, column.type)))
