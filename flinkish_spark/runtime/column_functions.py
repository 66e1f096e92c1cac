"""Columns that functions of the user's make of single records, as mapInArrow adds them: keys, partitions.

Rows stay where they are, with all of their columns. Where records and control rows stand in one frame,
control rows get nulls, and no function sees them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.runtime.arrow_rows import OutputError, RowWriter
from flinkish_spark.runtime.columns import KIND, Kind
from flinkish_spark.runtime.kept_times import are_records
from flinkish_spark.runtime.row_blocks import arrow_schema
from flinkish_spark.runtime.row_functions import RowFunction, records_of
from flinkish_spark.user_iterators import USER_ERRORS


@dataclass(frozen=True)
class AppendColumns:
    """Callable for mapInArrow.

    Parameters
    ----------
    function
        From a record to a row of `made`.
    given
        Columns that come in.
    made
        Fields of the row, under the names that errors call them by.
    names
        Of the columns that are added.
    """

    function: RowFunction
    given: T.StructType
    made: T.StructType
    names: tuple[str, ...]

    @property
    def columns(self) -> T.StructType:
        """Columns that come out."""
        pairs = zip(self.names, self.made, strict=True)
        return T.StructType([*self.given, *(T.StructField(name, field.dataType) for name, field in pairs)])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Work through the batches of a task."""
        writer = RowWriter(arrow_schema(self.made))
        with self.function.opened():
            for batch in batches:
                yield self._appended(batch, writer)

    def _appended(self, batch: pa.RecordBatch, writer: RowWriter) -> pa.RecordBatch:
        places = _places(batch)
        records = batch if places is None else batch.take(pa.array(places))
        arrays = self._arrays(records, writer)
        if places is not None:
            arrays = [array.take(_spread(places, batch.num_rows)) for array in arrays]
        names = [*batch.schema.names, *self.names]
        return pa.RecordBatch.from_arrays([*batch.columns, *arrays], names=names)

    def _arrays(self, records: pa.RecordBatch, writer: RowWriter) -> list[pa.Array]:
        rows: list[Any] = []
        try:
            for record in records_of(records):
                rows.append(self.function.call(record))
        except USER_ERRORS as error:
            raise self.function.blamed(records, len(rows), error) from error
        try:
            return writer.write(rows)
        except OutputError as error:
            raise self.function.blamed(records, error.row or 0, error, f"it {error}") from error


def _places(batch: pa.RecordBatch) -> np.ndarray[Any, Any] | None:
    """Return which rows are records; None if all of them are."""
    if KIND not in batch.schema.names:
        mask = are_records(batch)
        return None if mask is None else np.flatnonzero(mask.to_numpy(zero_copy_only=False))
    is_record = batch.column(KIND).to_numpy() == int(Kind.RECORD)
    return None if is_record.all() else np.flatnonzero(is_record)


def _spread(places: np.ndarray[Any, Any], rows: int) -> pa.Array:
    """Return, for each row of a batch, which of the records it is; null where it is none."""
    number = np.zeros(rows, dtype=np.int64)
    number[places] = np.arange(len(places))
    is_other = np.ones(rows, dtype=bool)
    is_other[places] = False
    return pa.array(number, mask=is_other)


@dataclass(frozen=True)
class TargetOf:
    """From a record to its partition, as a row; travels in the plan.

    Parameters
    ----------
    partition
        From a key and the number of partitions to a partition.
    key
        From a record to its key.
    partitions
        How many there are.
    """

    partition: Callable[[Any, int], int]
    key: Callable[[Any], Any]
    partitions: int

    def __call__(self, record: Any) -> tuple[int]:
        """Choose.

        Raises
        ------
        ValueError
            The function has chosen no partition.
        """
        chosen: Any = self.partition(self.key(record), self.partitions)
        # Whole numbers of numpy are as good; True would be partition 1.
        is_number = hasattr(chosen, "__index__") and not isinstance(chosen, bool)
        if not is_number or not 0 <= chosen < self.partitions:
            raise ValueError(
                f"the partitioner returned {chosen!r}; there are partitions 0 to {self.partitions - 1}"
            )
        return (operator.index(chosen),)
