"""Watermarks and processing time of the micro-batch of a task, taken from Spark's own offset log.

Spark writes ``offsets/N`` before it runs micro-batch N, with the wall clock of that moment and with the
control source's offset, which holds the watermarks. The driver reads the entry when the micro-batch is to be
staged, and gives the times to every task as a local property. So all tasks of a micro-batch see one time, on
whatever machine, and see it again when the micro-batch is run again.
"""

from __future__ import annotations

import json
from contextvars import ContextVar
from dataclasses import dataclass

from pyspark import TaskContext

from flinkish_spark.core.clock import wall_ms
from flinkish_spark.core.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, Progress
from flinkish_spark.core.errors import CorruptObjectError, InternalError
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.protocol.codec import StoredObject
from flinkish_spark.protocol.control_offset import ControlOffset, StoredWatermarks
from flinkish_spark.protocol.event_time import Watermarks

#: Local property of a query of ours, set for each micro-batch; Spark hands it to every task.
MICRO_BATCH_PROPERTY = "flinkish.micro-batch"
#: Spark's own: the micro-batch's number.
_BATCH_PROPERTY = "streaming.sql.batchId"
#: Set by a harness without Spark in place of a task's own micro-batch.
MICRO_BATCH_IN_HARNESS: ContextVar[MicroBatch | None] = ContextVar("MICRO_BATCH_IN_HARNESS", default=None)


@dataclass(frozen=True, slots=True)
class MicroBatch(StoredObject):
    """Number, time and watermarks of a micro-batch, as each of its tasks gets them."""

    #: Watermarks of the operators in the micro-batch before it, and in this one.
    before: StoredWatermarks
    watermarks: StoredWatermarks
    processing_time_ms: int
    #: Where operators keep the bases of big key groups, as `StoreSpec.to_text` writes it; None outside of a
    #: job.
    bases: str | None = None
    number: int = 0
    #: Number of the micro-batch of the newest checkpoint whose state is pinned; None if none is known.
    pinned: int | None = None
    #: The watermark of all operators after the elements, if it is greater.
    drained_to_ms: int = MIN_WATERMARK_MS
    #: The live lineage of the job; with the number it identifies the micro-batch.
    lineage: int = 0

    @classmethod
    def from_log(cls, number: int, here: LoggedOffsets, earlier: LoggedOffsets | None) -> MicroBatch:
        """Return a micro-batch of a query from its entry in the offset log.

        Do not keep it: a rewind replaces the entry.
        """
        if here.processing_time_ms is None:
            raise CorruptObjectError(f"Spark's offset log entry {number} does not say when it was planned")
        control = here.control
        # A log that begins with stored state holds the watermark of that state: no watermark goes back.
        before = control.time.seen if earlier is None else earlier.control.time.watermarks
        # Offsets hold it until the next checkpoint, also if the job is started again.
        drained_before = 0 if earlier is None else ControlOffset.find_drained(earlier.sources)
        drains = ControlOffset.find_drained(here.sources) > drained_before
        return cls(
            before,
            control.time.watermarks,
            here.processing_time_ms,
            number=number,
            pinned=control.pinned_batch,
            drained_to_ms=MAX_WATERMARK_MS if drains else MIN_WATERMARK_MS,
        )

    def progress(self, uid: str) -> Progress:
        watermark_ms = self.watermarks.get(uid)
        before_ms = min(self.before.get(uid), watermark_ms)
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
