"""Event times and watermarks by functions of the user's: what mapInArrow runs over a source's records.

Adds the time, and for a generator the greatest watermark that it has emitted in the channel so far. Rows of
a channel keep their order. The object is pickled into the plan, so it holds values only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.errors import UserFunctionError
from flinkish_spark.protocol.time_facts import checked_time
from flinkish_spark.protocol.watermark_valve import MIN_WATERMARK_MS
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.arrow_rows import RowReader
from flinkish_spark.runtime.keyed_operator import USER_FUNCTION_MARKER, OperatorFailed, Origins
from flinkish_spark.runtime.row_functions import RowFunction
from flinkish_spark.runtime.worker_gc import freeze_modules
from flinkish_spark.user_iterators import USER_ERRORS
from flinkish_spark.watermark_strategy import ChannelGenerators, WatermarkGenerator


@dataclass(frozen=True)
class TimeStage:
    """Callable for mapInArrow.

    Parameters
    ----------
    assigner
        From a record and the time that it has already, if any, to its time; None where it has its time.
    generator
        Makes a generator; None without one.
    source
        Uid, for messages.
    origins
        Where records come from.
    """

    assigner: Callable[[Any, int | None], int] | None
    generator: Callable[[], WatermarkGenerator] | None
    source: str
    origins: Origins

    def columns(self, given: T.StructType) -> T.StructType:
        """Return what comes out of rows with these columns."""
        own = [field for field in given if field.name not in (C.TIME, C.MARK)]
        added = [C.TIME] if self.generator is None else [C.TIME, C.MARK]
        return T.StructType([*own, *(T.StructField(name, T.LongType()) for name in added)])

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Work through the batches of a task; called once per task."""
        freeze_modules()
        if self.generator is None:
            for batch in batches:
                yield self._with(batch, {C.TIME: self._times(batch, self._records(batch))})
            return
        task = ChannelGenerators(self.generator, self.source)
        #: The last row of each channel: what the generator emits at the end goes with it.
        held: dict[int, pa.RecordBatch] = {}
        for batch in batches:
            if not batch.num_rows:
                continue
            records = self._records(batch)
            times = self._times(batch, records)
            marks = self._marks(task, batch, records, times)
            yield from _but_the_last(self._with(batch, {C.TIME: times, C.MARK: marks}), held)
        try:
            final = task.finish()
        except UserFunctionError as error:
            told = json.dumps({"uid": self.source, "what": _named(error), "error": error.why})
            raise OperatorFailed(f"{USER_FUNCTION_MARKER} {told}") from error
        for channel, row in held.items():
            mark_ms = final[channel]
            yield self._with(row, {C.MARK: [MIN_WATERMARK_MS if mark_ms is None else mark_ms]})

    def _records(self, batch: pa.RecordBatch) -> list[Any]:
        names = [name for name in batch.schema.names if not name.startswith(C.PREFIX)]
        return list(RowReader(names, names, ()).read(batch)[1])

    def _times(self, batch: pa.RecordBatch, records: list[Any]) -> list[int]:
        has_time = C.TIME in batch.schema.names
        known: list[Any] = batch.column(C.TIME).to_pylist() if has_time else [None] * batch.num_rows
        if self.assigner is None:
            return known
        times: list[int] = []
        try:
            for record, known_ms in zip(records, known, strict=True):
                time_ms = checked_time("the event time", self.assigner(record, known_ms))
                if time_ms is None:
                    raise ValueError("the event time must be milliseconds, got None")
                times.append(int(time_ms))
        except USER_ERRORS as error:
            function = self._blaming(f"the timestamp assigner of '{self.source}'")
            raise function.blamed(batch, len(times), error) from error
        return times

    def _marks(
        self, task: ChannelGenerators, batch: pa.RecordBatch, records: list[Any], times: list[int]
    ) -> list[int]:
        marks: list[int] = []
        try:
            channels = batch.column(C.CHANNEL).to_pylist()
            for channel, record, time_ms in zip(channels, records, times, strict=True):
                task.on_event(channel, record, time_ms)
                mark_ms = task.greatest(channel)
                marks.append(MIN_WATERMARK_MS if mark_ms is None else mark_ms)
        except UserFunctionError as error:
            raise self._blaming(_named(error)).blamed(batch, len(marks), error, error.why) from error
        return marks

    def _blaming(self, what: str) -> RowFunction:
        """Return what names the record at which a function failed."""
        return RowFunction(self.source, lambda record: record, origins=self.origins, what=what)

    @staticmethod
    def _with(batch: pa.RecordBatch, added: dict[str, list[int]]) -> pa.RecordBatch:
        """Return a batch with columns added behind, or replaced where they are."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        # What is added stands behind what was there, in the order of `columns()`.
        columns = {name: column for name, column in columns.items() if name not in added or name == C.MARK}
        columns |= {name: pa.array(values, pa.int64()) for name, values in added.items()}
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _named(error: UserFunctionError) -> str:
    """Return what failed; that it did is said where the error is told."""
    return error.what.removesuffix(" failed")


def _but_the_last(batch: pa.RecordBatch, held: dict[int, pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield rows but for the last one of each channel, which is held until the next one comes."""
    channels = batch.column(C.CHANNEL).to_numpy()
    last = {int(channel): at for at, channel in enumerate(channels.tolist())}
    for channel in last:
        if channel in held:
            yield held.pop(channel)
    keep = np.ones(batch.num_rows, dtype=bool)
    keep[list(last.values())] = False
    if keep.any():
        yield batch.filter(pa.array(keep))
    held.update({channel: batch.slice(at, 1) for channel, at in last.items()})
