"""The staging half of two-phase sinks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from flinkish_spark.formats import OnBadRecord
from flinkish_spark.protocol.records import TaskAck
from flinkish_spark.runtime.columns import map_in_arrow
from flinkish_spark.sinks.base import SinkContext, SinkWriter, StageRequest, StageResult
from flinkish_spark.sinks.two_phase import TwoPhaseCommitSink
from flinkish_spark.sinks.two_phase_tasks import (
    REASON,
    RECORD,
    REPORT,
    TASK_SCHEMA,
    Refusals,
    StageTransaction,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class StagedWithRefused:
    """What was staged, and what the sink refused: rows `reason` and `record`, as JSON."""

    result: StageResult
    refused: DataFrame

    @property
    def refused_count(self) -> int:
        """How many records were refused."""
        return sum(task.dead_lettered for task in self.result.tasks)


class TwoPhaseWriter(SinkWriter):
    """Stages micro-batches, one transaction per task.

    Parameters
    ----------
    sink
        As the user made it; serialised anew for every micro-batch.
    """

    def __init__(self, sink: TwoPhaseCommitSink, context: SinkContext) -> None:
        self._sink, self._context = sink, context

    def stage(self, request: StageRequest) -> StageResult:
        """Stage; refused records go as the sink's policy says."""
        is_dropped = self._sink.on_refused is OnBadRecord.DROP
        rows = self._staging(request, Refusals.DROP if is_dropped else Refusals.FAIL)
        return _result(row.report for row in rows.collect())

    @contextmanager
    def staging_with_refused(self, request: StageRequest) -> Iterator[StagedWithRefused]:
        """Stage; give out what was refused, which is kept as long as the block lasts."""
        # Kept, because going over the rows a second time would stage them a second time.
        rows = self._staging(request, Refusals.KEEP).persist()
        try:
            found = rows.where(F.col(REPORT).isNotNull()).collect()
            refused = rows.where(F.col(REASON).isNotNull()).select(REASON, RECORD)
            yield StagedWithRefused(_result(row.report for row in found), refused)
        finally:
            rows.unpersist()

    def _staging(self, request: StageRequest, refusals: Refusals) -> DataFrame:
        context = self._context
        stage = StageTransaction(
            sink=self._sink,
            job=str(context.job),
            uid=context.uid,
            owner_epoch=int(context.owner_epoch),
            block=request.block,
            batch=batch_label(request),
            refusals=refusals,
        )
        return map_in_arrow(request.rows, stage, TASK_SCHEMA)


def batch_label(request: StageRequest) -> str:
    """Return the name of a micro-batch that a rewind does not make ambiguous."""
    return f"{request.lineage}/{request.batch}"


def _result(reports: Iterator[str]) -> StageResult:
    found: list[dict[str, Any]] = sorted(map(json.loads, reports), key=lambda one: int(one["partition"]))
    payloads = tuple(one["committable"] for one in found if one["committable"] is not None)
    return StageResult(tuple(TaskAck.from_json(one) for one in found), payloads)
