"""Partial aggregates in front of the shuffle: one row per key and task instead of one per record."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from flinkish_spark.operators.vectorized_aggregates import ColumnAggregation, combine


@dataclass(frozen=True)
class Combiner:
    """Combines rows on their way into an operator that merges what this makes; travels in the plan.

    Parameters
    ----------
    aggregation
        What is computed.
    kept
        Columns of which each key's first row stands for all of its rows: control columns and the key.
    keys
        Those of them that are the key.
    fields
        Columns with the fields, and the fields' names, in the same order.
    """

    aggregation: ColumnAggregation
    kept: tuple[str, ...]
    keys: tuple[str, ...]
    fields: tuple[tuple[str, str], ...]

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the columns that are kept and the partial aggregates, a row per key.

        Raises
        ------
        AggregateOverflow
            A sum leaves its type.
        """
        own = [rows.column(column) for column, _ in self.fields]
        batch = pa.RecordBatch.from_arrays(own, names=[name for _, name in self.fields])
        found = combine(self.aggregation, batch, [rows.column(name) for name in self.keys])
        first = rows.select(list(self.kept)).take(pa.array(found.first))
        partials = [f"p{at}" for at in range(found.partials.num_columns)]
        return pa.RecordBatch.from_arrays(
            [*first.columns, *found.partials.columns], names=[*self.kept, *partials]
        )
