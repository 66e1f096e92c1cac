"""Counts of the rows that a sink's tasks write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import types as T

from flinkish_spark.core.arrow_pass import ArrowPass, Worker, map_in_arrow
from flinkish_spark.core.clock import wall_ms
from flinkish_spark.core.errors import InternalError
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.latency import SINK_REPORTER
from flinkish_spark.protocol.records import Barrier, TaskAck, TimeReport
from flinkish_spark.transport import columns as C
from flinkish_spark.worker.daemon import freeze_modules

#: Number of control columns before the fields, see StageRequest.
CONTROL_WIDTH = len(C.SINK_CONTROL)
_WRAP = 1 << 64


def begin_staging() -> TaskContext:
    """Prepare this process for staging and return the current task."""
    freeze_modules()
    task = TaskContext.get()
    if task is None:
        raise InternalError("rows are staged outside of a task")
    return task


class RowCount:
    """Counts a task's records, and collects its barriers, time reports and latency markers."""

    def __init__(self, partition: int) -> None:
        self._partition = partition
        self._rows = self._digest = 0
        self._barriers: list[Barrier] = []
        self._reports: list[TimeReport] = []

    def admit(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        import pyarrow.compute as pc

        is_record = pc.equal(batch.column(C.KIND), int(C.Kind.RECORD))
        control = batch.select(list(C.SINK_CONTROL)).filter(pc.invert(is_record))
        if control.num_rows:
            self._note(control)
        records = batch.filter(is_record) if control.num_rows else batch
        self._rows += records.num_rows
        # The digest is a sum of unsigned numbers that wraps around.
        hashes = records.column(C.HASH).to_numpy(zero_copy_only=False).view("uint64")
        self._digest = (self._digest + int(hashes.sum(dtype="uint64"))) % _WRAP
        return records

    def _note(self, control: pa.RecordBatch) -> None:
        # Sinks ignore other kinds of control rows.
        for kind, first, place, second in zip(
            *(column.to_pylist() for column in control.columns), strict=True
        ):
            if kind == int(C.Kind.BARRIER):
                self._barriers.append(Barrier(CheckpointId(first), place))
            elif kind == int(C.Kind.MARKER):
                self._reports.append(TimeReport(SINK_REPORTER, place, first, wall_ms()))
            elif kind >= C.FIRST_REPORT:
                self._reports.append(TimeReport(kind - C.FIRST_REPORT, place, first, second))

    def finish(self) -> TaskAck:
        return TaskAck(
            self._partition, self._rows, self._digest, tuple(self._barriers), reports=tuple(self._reports)
        )


_REPORT = T.StructType([T.StructField("report", T.StringType())])


def collect_reports(rows: DataFrame | ArrowPass, function: Worker) -> Sequence[dict[str, Any]]:
    found = [json.loads(row.report) for row in map_in_arrow(rows, function, _REPORT).collect()]
    return sorted(found, key=lambda report: int(report["partition"]))
