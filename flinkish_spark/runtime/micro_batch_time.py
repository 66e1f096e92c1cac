"""Where time stands in the micro-batch that a task belongs to: read from Spark's own offset log.

Spark writes ``offsets/N`` before it runs micro-batch N, with the wall clock of that moment and with the
control source's offset, in which the watermark stands. So every task of the micro-batch sees one time, and
sees it again when the micro-batch is run again, on whatever machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyspark import TaskContext

from flinkish_spark.clock import wall_ms
from flinkish_spark.operators.elements import MIN_WATERMARK_MS
from flinkish_spark.operators.group_run import Progress
from flinkish_spark.runtime.spark_log import OFFSET_KEY, OFFSETS

#: Local property of a query of ours: the folder of its checkpoint. Spark hands it to every task.
CHECKPOINT_PROPERTY = "flinkish.checkpoint"
#: Spark's own: the micro-batch's number.
_BATCH_PROPERTY = "streaming.sql.batchId"
#: Member of the control source's offset.
WATERMARK_KEY = "flinkish:watermark"


def progress_of_task() -> Progress:
    """Return the time of the current task's micro-batch.

    Called in a Python worker, at the first call of an operator in each task. In a query that is not a
    job of ours there is no watermark, and the wall clock stands for the processing time.

    Raises
    ------
    OSError, ValueError
        The offset log cannot be read, which is a fault of the environment.
    """
    task = TaskContext.get()
    folder = None if task is None else task.getLocalProperty(CHECKPOINT_PROPERTY)
    batch = None if task is None else task.getLocalProperty(_BATCH_PROPERTY)
    if folder is None or batch is None:
        return Progress(MIN_WATERMARK_MS, MIN_WATERMARK_MS, wall_ms())
    return progress_of(Path(folder), int(batch))


def progress_of(checkpoint: Path, batch: int) -> Progress:
    """Return the time of a micro-batch of the query whose checkpoint lies in a folder.

    Not to be kept beyond a task: behind a rewind the entry is another one.
    """
    processing_time_ms, watermark_ms = _logged(checkpoint, batch)
    try:
        before_ms = _logged(checkpoint, batch - 1)[1] if batch else MIN_WATERMARK_MS
    except FileNotFoundError:
        # Spark deletes old entries; and the first micro-batch of a lineage has none before it.
        before_ms = MIN_WATERMARK_MS
    return Progress(min(before_ms, watermark_ms), watermark_ms, processing_time_ms)


def _logged(checkpoint: Path, batch: int) -> tuple[int, int]:
    """Return processing time and watermark of an entry."""
    version, facts, *offsets = (checkpoint / OFFSETS / str(batch)).read_text("utf-8").strip().split("\n")
    if version != "v1":
        raise ValueError(f"Spark's offset log entry {batch} has version {version[:20]!r}")
    control: list[Any] = [json.loads(text) for text in offsets if f'"{OFFSET_KEY}"' in text]
    marks = [int(offset.get(WATERMARK_KEY, MIN_WATERMARK_MS)) for offset in control]
    return int(json.loads(facts)["batchTimestampMs"]), max(marks, default=MIN_WATERMARK_MS)
