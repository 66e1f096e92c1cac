"""The streaming sink: stage in the tasks, write ahead, commit.

For every micro-batch Spark makes this object in a Python process on the driver and pickles it
into the tasks; behind them it makes a new one, in another call, and commits. The life of a
micro-batch, in order:

1. *plan*, when the object is pickled: earlier attempts are sealed, what they decided is finished,
   what they left open is aborted, and this attempt gets its number.
2. *stage*, in each task: one transaction, flushed and left open.
3. *commit*: the committables are written ahead (the decision), then committed, then confirmed by
   a receipt. Spark writes commits/N when this returns.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from flinkish_spark.drop_in.epoch_dir import EpochDir
from flinkish_spark.drop_in.epochs import Lease, SinkEpochs
from flinkish_spark.drop_in.sink_options import SinkOptions
from flinkish_spark.drop_in.steps import EpochObserver
from flinkish_spark.errors import InternalError
from flinkish_spark.kafka import KafkaAdmin, TransactionClient
from flinkish_spark.kafka.marks import KafkaMarks
from flinkish_spark.kafka.staging_settings import DEFAULT_MAX_REQUEST_BYTES, StagingSettings
from flinkish_spark.kafka.task_ids import free_transactional_id
from flinkish_spark.kafka.wire_pool import WIRES
from flinkish_spark.protocol.ids import BatchId, OwnerEpoch, TransactionalId
from flinkish_spark.protocol.micro_batches import AttemptNumber, StagedPart
from flinkish_spark.runtime.worker_gc import freeze_modules

if TYPE_CHECKING:
    import pyarrow as pa

#: The drop-in sink has attempts in place of owners.
_NO_OWNER = OwnerEpoch(0)


@dataclass
class StagedMessage(WriterCommitMessage):
    """What a task reports: its attempt, and what it staged as JSON values."""

    attempt: int
    part: dict[str, Any]


class KafkaStreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches exactly once; see the module's head.

    Parameters
    ----------
    options
        Of the sink.
    make_observer
        Called on the driver; for crash tests.
    """

    def __init__(self, options: SinkOptions, make_observer: Callable[[], EpochObserver]) -> None:
        self._options, self._make_observer = options, make_observer
        self._lease: Lease | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Spark pickles a writer exactly when it is about to run a micro-batch's tasks with it. There is
        # no other moment before the tasks in which this code runs on the driver.
        if self._lease is None:
            with self._epochs() as epochs:
                self._lease = epochs.plan()
        return {"_options": self._options, "_lease": self._lease}

    @contextmanager
    def _epochs(self) -> Iterator[SinkEpochs]:
        freeze_modules()
        # Planning and committing are different processes, forked by the same daemon of the same JVM.
        planner = f"{socket.gethostname()}-{os.getppid()}"
        directory = EpochDir(self._options.checkpoint_location)
        # The process serves the next micro-batch too, and a connection costs as much as a small one.
        with WIRES.wire(self._options.connection) as wire:
            marks, topic = None, self._options.topic
            if topic is not None:
                marks = KafkaMarks(KafkaAdmin.over(wire), directory.sink_uuid(), "micro-batches", topic)
            client = TransactionClient.over(wire)
            yield SinkEpochs(directory, client, self._make_observer(), planner, marks)

    # -- in a task ------------------------------------------------------------------------------
    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        """Stage one task's rows; everything is acknowledged and invisible when this returns."""
        import pyarrow as pa

        from flinkish_spark.kafka.partitioning import row_digest
        from flinkish_spark.kafka.staging import StagedTransaction

        freeze_modules()
        lease, task = self._lease, TaskContext.get()
        if lease is None or task is None:
            raise InternalError("a task of the Kafka sink runs without a lease")
        rows = digest = 0
        with StagedTransaction(self._settings(lease, task)) as transaction:
            for batch in iterator:
                if not batch.num_rows:
                    continue
                columns = {name: batch.column(name) for name in self._options.columns}
                if self._options.topic is not None:
                    columns.pop("topic", None)
                transaction.write(
                    columns.get("key", pa.nulls(batch.num_rows, pa.binary())),
                    columns["value"],
                    columns.get("headers"),
                    topics=columns.get("topic", self._options.topic),
                    partitions=columns.get("partition"),
                )
                rows += batch.num_rows
                digest += row_digest(list(columns.values()))
            prepared = transaction.prepare()
        payload = None if prepared is None else prepared.to_json()
        part = StagedPart(task.partitionId(), rows, digest % (1 << 64), payload)
        return StagedMessage(int(lease.attempt.number), part.to_json())

    def _settings(self, lease: Lease, task: TaskContext) -> StagingSettings:
        connection = self._options.connection
        prefix = TransactionalId.prefix(lease.sink, _NO_OWNER, lease.attempt.block)
        return StagingSettings(
            connection=connection,
            transactional_id=free_transactional_id(
                connection, prefix, task.partitionId(), task.attemptNumber()
            ),
            transaction_timeout_ms=self._options.transaction_timeout_ms,
            max_record_bytes=self._options.producer.max_request_bytes or DEFAULT_MAX_REQUEST_BYTES,
            producer=self._options.producer,
        )

    # -- on the driver --------------------------------------------------------------------------
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Commit a micro-batch, or finish the commit of an earlier attempt of it."""
        attempts, parts = _read(messages)
        if len(parts) != len(messages):
            raise InternalError("Spark commits a micro-batch of which a task reported nothing")
        if not attempts:
            # A micro-batch without tasks has nothing to commit, and no attempt to name.
            return
        with self._epochs() as epochs:
            epochs.commit(_common_attempt(attempts), BatchId(batchId), parts)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Give up what a failed micro-batch staged."""
        attempts, parts = _read(messages)
        with self._epochs() as epochs:
            epochs.abort(_common_attempt(attempts) if attempts else None, parts)


def _read(messages: list[WriterCommitMessage | None]) -> tuple[list[AttemptNumber], list[StagedPart]]:
    staged = [message for message in messages if isinstance(message, StagedMessage)]
    return [AttemptNumber(m.attempt) for m in staged], [StagedPart.from_json(m.part) for m in staged]


def _common_attempt(attempts: Sequence[AttemptNumber]) -> AttemptNumber:
    """Return the attempt that all messages of a commit belong to."""
    if len(set(attempts)) != 1:
        names = ", ".join(str(a) for a in sorted(set(attempts))) or "none"
        raise InternalError(f"the tasks of one micro-batch belong to the attempts {names}")
    return attempts[0]
