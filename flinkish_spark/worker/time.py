"""Event times before an operator: read from a column, and kept for records that a function drops.

Flink generates watermarks where they are assigned, from all records. Here event times are reported where
records are packed for the shuffle. So if a function in between drops records, a row with a null sequence and
null fields keeps their greatest time, per channel and batch, if it is greater than the remaining times.
Functions of the user never see such rows; only the report reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.core.arrow_pass import Worker
from flinkish_spark.core.errors import BAD_RECORD_MARKER, BadRecordError
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.branches import run_batchwise
from flinkish_spark.types.arrow_types import as_schema
from flinkish_spark.types.rows import arrow_schema
from flinkish_spark.types.schemas import nullable

NULL_TIME = f"{BAD_RECORD_MARKER} its event time is null"
#: Columns whose greatest value is kept; the second one has the watermarks of a generator.
_KEPT = (C.TIME, C.MARK)


def are_records(batch: pa.RecordBatch) -> pa.BooleanArray | None:
    places = batch.column(C.SEQUENCE) if C.SEQUENCE in batch.schema.names else None
    return None if places is None or not places.null_count else places.is_valid()


def only_records(batch: pa.RecordBatch) -> pa.RecordBatch:
    mask = are_records(batch)
    return batch if mask is None else batch.filter(mask)


@dataclass(frozen=True)
class _WorkerWrapper:
    #: Worker from records to records.
    worker: Worker
    #: Columns of its output.
    made: T.StructType

    @property
    def columns(self) -> T.StructType:
        return nullable(self.made)


class ControlRowBypass(_WorkerWrapper):
    """Passes only records to a worker; emits a task's control rows after the worker's output."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema, held = arrow_schema(self.columns), list[pa.RecordBatch]()

        def records() -> Iterator[pa.RecordBatch]:
            for batch in batches:
                is_record = pc.equal(batch.column(C.KIND), int(C.Kind.RECORD))
                if is_record.true_count < batch.num_rows:
                    held.append(batch.filter(pc.invert(is_record)).select(list(C.CONTROL)))
                    batch = batch.filter(is_record)
                if batch.num_rows:
                    yield batch

        # Do not start the worker in a task with control rows alone.
        rest = records()
        for first in rest:
            for made in self.worker(chain([first], rest)):
                yield as_schema(made, schema)
        for control in held:
            columns = [
                control.column(field.name)
                if field.name in C.CONTROL
                else pa.nulls(control.num_rows, field.type)
                for field in schema
            ]
            yield as_schema(pa.RecordBatch.from_arrays(columns, names=schema.names), schema)


@dataclass(frozen=True)
class TimeRowFilter:
    """Drops rows that carry only a time; called by mapInArrow, once per task."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from map(only_records, batches)


@dataclass(frozen=True)
class TimestampsFromColumn:
    """Sets the event time of each record from one of its columns; control rows have none."""

    #: Column with timestamps, or milliseconds since 1970.
    column: str

    @staticmethod
    def columns(given: T.StructType) -> T.StructType:
        own = [field for field in given if field.name not in (C.TIME, C.MARK)]
        return T.StructType([*own, T.StructField(C.TIME, T.LongType())])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            names, times = batch.schema.names, batch.column(self.column)
            if times.null_count:
                is_null = times.is_null().to_numpy(zero_copy_only=False)
                if C.KIND in names:
                    is_null &= batch.column(C.KIND).to_numpy() == int(C.Kind.RECORD)
                if is_null.any():
                    raise BadRecordError(NULL_TIME)
            if pa.types.is_timestamp(times.type):
                times = milliseconds(times)
            own = [name for name in names if name not in (C.TIME, C.MARK)]
            columns = [*(batch.column(name) for name in own), times]
            yield pa.RecordBatch.from_arrays(columns, names=[*own, C.TIME])


def milliseconds(times: pa.Array) -> pa.Array:
    """Return times as milliseconds since 1970, rounded down as Spark's `unix_millis` does."""
    micros = times.cast(pa.timestamp("us", times.type.tz)).view(pa.int64())
    whole = micros.fill_null(0).to_numpy() // 1_000
    missing = times.is_null().to_numpy(zero_copy_only=False) if times.null_count else None
    return pa.array(whole, mask=missing)


class _Greatest:
    def __init__(self) -> None:
        self._values: dict[tuple[str, int], int] = {}

    def note(self, batch: pa.RecordBatch) -> None:
        for name in _KEPT:
            if name not in batch.schema.names or not batch.num_rows:
                continue
            column = batch.column(name)
            rows = batch.filter(column.is_valid()) if column.null_count else batch
            channels, values = rows.column(C.CHANNEL).to_numpy(), rows.column(name).to_numpy()
            for channel in np.unique(channels).tolist():
                greatest = int(values[channels == channel].max())
                self._values[name, channel] = max(greatest, self._values.get((name, channel), greatest))

    def take_in(self, other: _Greatest) -> None:
        for at, value in other._values.items():
            self._values[at] = max(value, self._values.get(at, value))

    def find_greater(self, other: _Greatest) -> dict[int, dict[str, int]]:
        """Return by channel the values that are greater than in `other`, or missing there."""
        found: dict[int, dict[str, int]] = {}
        for (name, channel), value in self._values.items():
            if value > other._values.get((name, channel), value - 1):
                found.setdefault(channel, {})[name] = value
        return found


class DroppedTimesKeeper(_WorkerWrapper):
    """Keeps the times of records that a worker drops; called by mapInArrow, once per task.

    The worker makes one batch of each batch; its rows have the channel and time of the record they come from.
    """

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        given, kept = _Greatest(), _Greatest()
        schema = arrow_schema(self.columns)
        with run_batchwise([self.worker]) as (fed,):
            for batch in batches:
                given.note(batch)
                made = as_schema(fed.process(only_records(batch)), schema)
                kept.note(made)
                lost = given.find_greater(kept)
                yield pa.concat_batches([made, _rows(lost, schema)]) if lost else made
                # Do not report the same time again.
                kept.take_in(given)


def _rows(lost: dict[int, dict[str, int]], schema: pa.Schema) -> pa.RecordBatch:
    nothing = pa.array(np.zeros(len(lost), np.int64))
    known = {
        C.KIND: nothing.cast(pa.int32()),
        C.CHECKPOINT: nothing,
        C.CHANNEL: pa.array(list(lost), pa.int64()),
        **{name: pa.array([one.get(name) for one in lost.values()], pa.int64()) for name in _KEPT},
    }
    arrays = [known.get(field.name, pa.nulls(len(lost), field.type)) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
