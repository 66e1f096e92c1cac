"""Event times of records that a function drops, on their way to the report of the operator behind it.

Flink's watermarks are made where they are assigned, of all records there. Here reports are made where records
are packed for a key. So what a function between the two drops leaves a row without a place (its sequence is
null) and without fields: one per channel and task, with the greatest time, and only if that is greater than
what was kept. Functions of the user's never see such rows, and nothing but the report takes notice of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.row_blocks import arrow_schema

#: What mapInArrow calls, once per task.
Worker = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
#: Columns whose greatest value counts; the second stands for the watermarks of a generator.
_KEPT = (C.TIME, C.MARK)


def are_records(batch: pa.RecordBatch) -> pa.BooleanArray | None:
    """Return which rows are records; None if all of them are."""
    places = batch.column(C.SEQUENCE) if C.SEQUENCE in batch.schema.names else None
    return None if places is None or not places.null_count else places.is_valid()


def only_records(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch without rows that are times only."""
    mask = are_records(batch)
    return batch if mask is None else batch.filter(mask)


class _Greatest:
    """The greatest times of each channel."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, int], int] = {}

    def note(self, batch: pa.RecordBatch) -> None:
        """Look at rows, records or not."""
        for name in _KEPT:
            if name not in batch.schema.names or not batch.num_rows:
                continue
            column = batch.column(name)
            rows = batch.filter(column.is_valid()) if column.null_count else batch
            channels, values = rows.column(C.CHANNEL).to_numpy(), rows.column(name).to_numpy()
            for channel in np.unique(channels).tolist():
                greatest = int(values[channels == channel].max())
                self._values[name, channel] = max(greatest, self._values.get((name, channel), greatest))

    def beyond(self, other: _Greatest) -> dict[int, dict[str, int]]:
        """Return by channel what is greater than in `other`, or not in it."""
        found: dict[int, dict[str, int]] = {}
        for (name, channel), value in self._values.items():
            if value > other._values.get((name, channel), value - 1):
                found.setdefault(channel, {})[name] = value
        return found


@dataclass(frozen=True)
class KeepsTimes:
    """Around the worker of a function that may drop records: called by mapInArrow, once per task.

    Parameters
    ----------
    worker
        From records to records with the channels and times of those that they are made of.
    made
        Columns that come out of it.
    """

    worker: Worker
    made: T.StructType

    @property
    def columns(self) -> T.StructType:
        """Columns that come out: those of the worker, any of which may be null."""
        return T.StructType([T.StructField(field.name, field.dataType) for field in self.made])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Work through the batches of a task."""
        given, kept = _Greatest(), _Greatest()
        # Spark wants all batches of a task alike, and its types are not in each detail those of the schema.
        schema = arrow_schema(self.columns)

        def records() -> Iterator[pa.RecordBatch]:
            for batch in batches:
                given.note(batch)
                found = only_records(batch)
                if found.num_rows:
                    yield found

        for batch in self.worker(records()):
            kept.note(batch)
            schema = pa.schema([field.with_nullable(True) for field in batch.schema])
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)
        lost = given.beyond(kept)
        if lost:
            yield _rows(lost, schema)


def _rows(lost: dict[int, dict[str, int]], schema: pa.Schema) -> pa.RecordBatch:
    known = {
        C.CHANNEL: pa.array(list(lost), pa.int64()),
        **{name: pa.array([one.get(name) for one in lost.values()], pa.int64()) for name in _KEPT},
    }
    arrays = [known.get(field.name, pa.nulls(len(lost), field.type)) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
