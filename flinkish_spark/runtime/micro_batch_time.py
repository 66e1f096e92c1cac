"""Where time stands in the micro-batch that a task belongs to: read from Spark's own offset log.

Spark writes ``offsets/N`` before it runs micro-batch N, with the wall clock of that moment and with the
control source's offset, in which the watermarks stand. So every task of the micro-batch sees one time, and
sees it again when the micro-batch is run again, on whatever machine.
"""

from __future__ import annotations

import json
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark import TaskContext

from flinkish_spark.clock import wall_ms
from flinkish_spark.operators.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from flinkish_spark.operators.group_run import Progress
from flinkish_spark.protocol.control_offset import CHECKPOINT_KEY, ControlOffset
from flinkish_spark.protocol.operator_watermarks import Watermarks
from flinkish_spark.runtime.spark_log import OFFSETS

#: Local property of a query of ours: the folder of its checkpoint. Spark hands it to every task.
CHECKPOINT_PROPERTY = "flinkish.checkpoint"
#: Spark's own: the micro-batch's number.
_BATCH_PROPERTY = "streaming.sql.batchId"


#: What a harness without Spark says in place of a task's own micro-batch.
MICRO_BATCH_IN_HARNESS: ContextVar[MicroBatch | None] = ContextVar("MICRO_BATCH_IN_HARNESS", default=None)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a task knows of its micro-batch.

    Parameters
    ----------
    before, watermarks
        Of the operators, in the micro-batch before it and in this one.
    processing_time_ms
        When it began.
    checkpoint
        Folder of the query's checkpoint; None outside of a job.
    number
        Of the micro-batch.
    pinned
        Number of the micro-batch of the newest checkpoint whose state is pinned; None if none is known.
    drained_to_ms
        What the watermark of all operators becomes behind the elements, if that is more.
    """

    before: Watermarks
    watermarks: Watermarks
    processing_time_ms: int
    checkpoint: Path | None = None
    number: int = 0
    pinned: int | None = None
    drained_to_ms: int = MIN_WATERMARK_MS

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

    Raises
    ------
    OSError, ValueError
        The offset log cannot be read, which is a fault of the environment.
    """
    given = MICRO_BATCH_IN_HARNESS.get()
    if given is not None:
        return given
    task = TaskContext.get()
    folder = None if task is None else task.getLocalProperty(CHECKPOINT_PROPERTY)
    batch = None if task is None else task.getLocalProperty(_BATCH_PROPERTY)
    if folder is None or batch is None:
        return MicroBatch(Watermarks(), Watermarks(), wall_ms())
    return micro_batch_of(Path(folder), int(batch))


def micro_batch_of(checkpoint: Path, number: int) -> MicroBatch:
    """Return a micro-batch of the query whose checkpoint lies in a folder.

    Not to be kept beyond a task: behind a rewind the entry is another one.
    """
    processing_time_ms, controls = _logged(checkpoint, number)
    try:
        earlier = _logged(checkpoint, number - 1)[1] if number else []
    except FileNotFoundError:
        # Spark deletes old entries; and the first micro-batch of a lineage has none before it.
        earlier = []
    here = ControlOffset.newest(controls)
    # A log that begins with stored state says what that has seen: no watermark goes back.
    before = ControlOffset.newest(earlier).time.watermarks if earlier else here.time.seen
    drained = ControlOffset.drained_in(controls)
    # Offsets say it until the next checkpoint, also where a job is started again.
    drains = drained > ControlOffset.drained_in(earlier)
    return MicroBatch(
        before,
        here.time.watermarks,
        processing_time_ms,
        checkpoint,
        number,
        here.pinned_batch,
        MAX_WATERMARK_MS if drains else MIN_WATERMARK_MS,
    )


def _logged(checkpoint: Path, number: int) -> tuple[int, list[Any]]:
    """Return processing time and control offsets of an entry."""
    version, facts, *offsets = (checkpoint / OFFSETS / str(number)).read_text("utf-8").strip().split("\n")
    if version != "v1":
        raise ValueError(f"Spark's offset log entry {number} has version {version[:20]!r}")
    control: list[Any] = [json.loads(text) for text in offsets if f'"{CHECKPOINT_KEY}"' in text]
    return int(json.loads(facts)["batchTimestampMs"]), control
