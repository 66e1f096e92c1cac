"""Where time stands in the micro-batch that a task belongs to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types as T

from flinkish_spark.core.clock import wall_ms
from flinkish_spark.core.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, Progress
from flinkish_spark.core.errors import CorruptObjectError, InternalError
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.protocol.codec import Stored
from flinkish_spark.protocol.control_offset import ControlOffset, StoredWatermarks
from flinkish_spark.protocol.event_time import Watermarks
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import as_schema
from flinkish_spark.transport.branches import all_fed
from flinkish_spark.transport.columns import Worker
from flinkish_spark.types.rows import arrow_schema
from flinkish_spark.types.schemas import nullable

# ----------------------------------------------------------------------------------------------------------
# Where time stands in the micro-batch that a task belongs to, as Spark's own offset log has it.
#
# Spark writes ``offsets/N`` before it runs micro-batch N, with the wall clock of that moment and with the
# control source's offset, in which the watermarks stand. The driver reads the entry when the micro-batch is
# to be staged, and every task gets what follows from it as a local property. So all tasks of a micro-batch
# see one time, on whatever machine, and see it again when the micro-batch is run again.


#: Local property of a query of ours, set for each micro-batch; Spark hands it to every task.
MICRO_BATCH_PROPERTY = "flinkish.micro-batch"
#: Spark's own: the micro-batch's number.
_BATCH_PROPERTY = "streaming.sql.batchId"


#: What a harness without Spark says in place of a task's own micro-batch.
MICRO_BATCH_IN_HARNESS: ContextVar[MicroBatch | None] = ContextVar("MICRO_BATCH_IN_HARNESS", default=None)


@dataclass(frozen=True, slots=True)
class MicroBatch(Stored):
    """What a task knows of its micro-batch."""

    #: Of the operators, in the micro-batch before it and in this one.
    before: StoredWatermarks
    watermarks: StoredWatermarks
    processing_time_ms: int
    #: Where operators keep the bases of big key groups, as `StoreSpec.to_text` writes it; None outside of a
    #: job.
    bases: str | None = None
    number: int = 0
    #: Number of the micro-batch of the newest checkpoint whose state is pinned; None if none is known.
    pinned: int | None = None
    #: What the watermark of all operators becomes behind the elements, if that is more.
    drained_to_ms: int = MIN_WATERMARK_MS
    #: The live one of the job; with the number it tells a micro-batch from all others.
    lineage: int = 0

    @classmethod
    def logged(cls, number: int, here: LoggedOffsets, earlier: LoggedOffsets | None) -> MicroBatch:
        """Return a micro-batch of a query by its entry of the offset log.

        Not to be kept: behind a rewind the entry is another one.
        """
        if here.processing_time_ms is None:
            raise CorruptObjectError(f"Spark's offset log entry {number} does not say when it was planned")
        control = here.control
        # A log that begins with stored state says what that has seen: no watermark goes back.
        before = control.time.seen if earlier is None else earlier.control.time.watermarks
        # Offsets say it until the next checkpoint, also where a job is started again.
        drained_before = 0 if earlier is None else ControlOffset.drained_in(earlier.sources)
        drains = ControlOffset.drained_in(here.sources) > drained_before
        return cls(
            before,
            control.time.watermarks,
            here.processing_time_ms,
            number=number,
            pinned=control.pinned_batch,
            drained_to_ms=MAX_WATERMARK_MS if drains else MIN_WATERMARK_MS,
        )

    def progress(self, uid: str) -> Progress:
        """Return where time stands for an operator."""
        watermark_ms = self.watermarks.at(uid)
        before_ms = min(self.before.at(uid), watermark_ms)
        # A window that ends with this millisecond takes the elements of this micro-batch before it fires.
        timers_to_ms = self.processing_time_ms - 1
        return Progress(before_ms, watermark_ms, self.processing_time_ms, self.drained_to_ms, timers_to_ms)


def micro_batch_of_task() -> MicroBatch:
    """Return the current task's micro-batch.

    Called in a Python worker, at the first call of an operator in each task. In a query that is not a
    job of ours there is no watermark, and the wall clock stands for the processing time.
    """
    given = MICRO_BATCH_IN_HARNESS.get()
    if given is not None:
        return given
    task = TaskContext.get()
    text = None if task is None else task.getLocalProperty(MICRO_BATCH_PROPERTY)
    if task is None or text is None:
        return MicroBatch(Watermarks(), Watermarks(), wall_ms())
    found = MicroBatch.from_json(json.loads(text))
    if str(found.number) != task.getLocalProperty(_BATCH_PROPERTY):
        raise InternalError(
            f"a task of micro-batch {task.getLocalProperty(_BATCH_PROPERTY)} was told of {found.number}"
        )
    return found


# Reports of event time are made where records are packed for a key, and not where times are assigned. So what
# a function between the two drops leaves a row without a place (its sequence is null) and without fields: one
# per channel and batch, with the greatest time, and only if that is greater than what was kept. Functions of
# the user's never see such rows, and nothing but the report takes notice of them.

#: Columns whose greatest value counts; the second stands for the watermarks of a generator.
_KEPT = (C.TIME, C.MARK)


def are_records(batch: pa.RecordBatch) -> pa.BooleanArray | None:
    places = batch.column(C.SEQUENCE) if C.SEQUENCE in batch.schema.names else None
    return None if places is None or not places.null_count else places.is_valid()


def only_records(batch: pa.RecordBatch) -> pa.RecordBatch:
    mask = are_records(batch)
    return batch if mask is None else batch.filter(mask)


@dataclass(frozen=True)
class OnlyRecords:
    """Leaves out rows that are times only: called by mapInArrow, once per task."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from map(only_records, batches)


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

    def beyond(self, other: _Greatest) -> dict[int, dict[str, int]]:
        """Return by channel what is greater than in `other`, or not in it."""
        found: dict[int, dict[str, int]] = {}
        for (name, channel), value in self._values.items():
            if value > other._values.get((name, channel), value - 1):
                found.setdefault(channel, {})[name] = value
        return found


@dataclass(frozen=True)
class KeepsTimes:
    """Around the worker of a function that may drop records: called by mapInArrow, once per task."""

    #: From records to records with the channels and times of those that they are made of; it makes one batch
    #: of each.
    worker: Worker
    #: Columns that come out of it.
    made: T.StructType

    @property
    def columns(self) -> T.StructType:
        """Columns that come out: those of the worker, any of which may be null."""
        return nullable(self.made)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        given, kept = _Greatest(), _Greatest()
        schema = arrow_schema(self.columns)
        with all_fed([self.worker]) as (fed,):
            for batch in batches:
                given.note(batch)
                made = as_schema(fed.made_of(only_records(batch)), schema)
                kept.note(made)
                lost = given.beyond(kept)
                yield pa.concat_batches([made, _rows(lost, schema)]) if lost else made
                # What has been told of is not told of again.
                kept.take_in(given)


def _rows(lost: dict[int, dict[str, int]], schema: pa.Schema) -> pa.RecordBatch:
    known = {
        C.CHANNEL: pa.array(list(lost), pa.int64()),
        **{name: pa.array([one.get(name) for one in lost.values()], pa.int64()) for name in _KEPT},
    }
    arrays = [known.get(field.name, pa.nulls(len(lost), field.type)) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
