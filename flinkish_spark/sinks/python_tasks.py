"""The Kafka sink's writer in pure Python: the JVM writer's twin, for where no JAR can be loaded.

Same rows in, same acks and committables out; either side can end what the other prepared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext

from flinkish_spark.clock import wall_ms
from flinkish_spark.errors import InternalError
from flinkish_spark.kafka.staging_settings import StagingSettings
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.latencies import SINK_REPORTER
from flinkish_spark.protocol.records import Barrier, TaskAck, TimeReport
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.worker_gc import freeze_modules

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from flinkish_spark.kafka.staging import StagedTransaction

_WRAP = 1 << 64


@dataclass(frozen=True)
class StageInPython:
    """Callable for mapInArrow: stages the rows of one task, yields one row, its report as JSON.

    Parameters
    ----------
    settings
        Of the transaction; its transactional id is the prefix that task and attempt are added to.
    headers
        What every record gets of ours.
    """

    settings: StagingSettings
    headers: tuple[tuple[str, bytes], ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Stage one task's rows; called once per task attempt."""
        import pyarrow as pa

        from flinkish_spark.kafka.staging import StagedTransaction
        from flinkish_spark.kafka.task_ids import free_transactional_id

        freeze_modules()
        task = TaskContext.get()
        if task is None:
            raise InternalError("rows are staged outside of a task")
        name = self.settings.transactional_id
        if name is not None:
            partition, attempt = task.partitionId(), task.attemptNumber()
            name = free_transactional_id(self.settings.connection, name, partition, attempt)
        settings = replace(self.settings, transactional_id=name)
        ack = RowCount(task.partitionId())
        with StagedTransaction(settings, common_headers=self.headers) as transaction:
            for batch in batches:
                records = ack.admit(batch)
                if records.num_rows:
                    _write(transaction, records)
            prepared = transaction.prepare()
            counts = transaction.counts
        done = replace(ack.done(), dropped=counts.dropped, dead_lettered=counts.dead_lettered)
        report = {**done.to_json(), "committable": None if prepared is None else prepared.to_json()}
        yield pa.record_batch([pa.array([json.dumps(report)])], names=["report"])


def _write(transaction: StagedTransaction, records: pa.RecordBatch) -> None:
    """Write a batch of the columns of `flinkish_spark.sinks.kafka_columns`."""
    columns = dict(zip(records.schema.names, records.columns, strict=True))
    transaction.write(
        columns["key"],
        columns["value"],
        columns.get("headers"),
        topics=columns["topic"],
        partitions=columns.get("partition"),
        timestamps_ms=_timestamps(transaction, columns.get("timestamp")),
        misfits=columns.get("misfit"),
    )


def _timestamps(transaction: StagedTransaction, column: Any) -> Any:
    """Return a column's milliseconds; null is the time of writing."""
    if column is None or not column.null_count:
        return None if column is None else column.to_numpy()
    return column.fill_null(transaction.now_ms()).to_numpy()


class RowCount:
    """Counts records, and takes barriers, reports and markers out, as the row tap in the JAR does.

    Parameters
    ----------
    partition
        Spark partition index of the task.
    """

    def __init__(self, partition: int) -> None:
        self._partition = partition
        self._rows = self._digest = 0
        self._barriers: list[Barrier] = []
        self._reports: list[TimeReport] = []

    def admit(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Count a batch's rows; return its records alone."""
        import pyarrow.compute as pc

        is_record = pc.equal(batch.column(C.KIND), int(C.Kind.RECORD))
        control = batch.select(list(C.SINK_CONTROL)).filter(pc.invert(is_record))
        if control.num_rows:
            self._note(control)
        records = batch.filter(is_record) if control.num_rows else batch
        self._rows += records.num_rows
        # Adding up as unsigned numbers wraps, as the digest is defined.
        hashes = records.column(C.HASH).to_numpy(zero_copy_only=False).view("uint64")
        self._digest = (self._digest + int(hashes.sum(dtype="uint64"))) % _WRAP
        return records

    def _note(self, control: pa.RecordBatch) -> None:
        """Note control rows; of kinds that are for nobody here, nothing."""
        for kind, first, place, second in zip(
            *(column.to_pylist() for column in control.columns), strict=True
        ):
            if kind == int(C.Kind.BARRIER):
                self._barriers.append(Barrier(CheckpointId(first), place))
            elif kind == int(C.Kind.MARKER):
                self._reports.append(TimeReport(SINK_REPORTER, place, first, wall_ms()))
            elif kind >= C.FIRST_REPORT:
                self._reports.append(TimeReport(kind - C.FIRST_REPORT, place, first, second))

    def done(self) -> TaskAck:
        """Return the task's acknowledgement."""
        return TaskAck(
            self._partition,
            self._rows,
            self._digest,
            tuple(self._barriers),
            reports=tuple(self._reports),
        )


def count_in_python(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Count one task's rows; for mapInArrow, yields one row, the ack as JSON."""
    import pyarrow as pa

    task = TaskContext.get()
    if task is None:
        raise InternalError("rows are counted outside of a task")
    ack = RowCount(task.partitionId())
    for batch in batches:
        ack.admit(batch)
    yield pa.record_batch([pa.array([json.dumps(ack.done().to_json())])], names=["report"])


def reports(rows: DataFrame, function: Any) -> Sequence[dict[str, Any]]:
    """Run `function` over every partition and return its reports, in order of partition."""
    found = [json.loads(row.report) for row in C.map_in_arrow(rows, function, "report STRING").collect()]
    return sorted(found, key=lambda report: int(report["partition"]))
