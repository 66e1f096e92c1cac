"""Writer of `format("flinkish-kafka")`: tasks stage, the driver records the decision and commits.

For every micro-batch Spark makes a writer in a Python process on the driver and pickles it into the tasks;
after them it makes a new one, in another call, and commits. The life of a micro-batch, in order:

1. *plan*, when the writer is pickled: it seals earlier attempts, finishes the micro-batch that they decided,
   aborts their other transactions, and numbers this attempt.
2. *stage*, in each task: one transaction, flushed and left open, by the code of a job's sink.
3. *commit*: the committables are stored (the decision), then committed, then confirmed by a receipt. Spark
   writes commits/N when this returns.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from flinkish_spark.checkpoint.micro_batch_commits import (
    Lease,
    MicroBatchCommits,
    find_or_create_uuid,
    open_sinks_dir,
)
from flinkish_spark.checkpoint.ownership import Ownership, process_key
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.client import WIRES
from flinkish_spark.connectors.kafka.client.marks import KafkaMarks
from flinkish_spark.connectors.kafka.client.settings import DEFAULT_MAX_REQUEST_BYTES, StagingSettings
from flinkish_spark.connectors.kafka.client.transactions import KafkaCommittable, TransactionClient
from flinkish_spark.connectors.kafka.format.options import SinkOptions
from flinkish_spark.connectors.kafka.record_encoder import KEY, TOPIC
from flinkish_spark.connectors.kafka.writer import KafkaCommitter, KafkaWork
from flinkish_spark.connectors.task_staging import StageInTasks
from flinkish_spark.contracts.sink import Committer, SinkContext, StageResult
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.errors import BrokerUnavailableError, FlinkishError, InternalError
from flinkish_spark.core.steps import Observer, Step
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.ids import BatchId, TransactionalId
from flinkish_spark.protocol.micro_batches import SINKS
from flinkish_spark.protocol.records import CommitAnswer, StagedBatch, TaskAck
from flinkish_spark.transport import columns as C
from flinkish_spark.worker.daemon import freeze_modules

if TYPE_CHECKING:
    import pyarrow as pa

LOG = logging.getLogger(__name__)
#: Uid of the format's only sink in records and marks, and the block of its transactional ids.
SINK, _BLOCK = "topic", 1
#: Folder with the checkpoints of a Spark pipeline's flows: <sink>/<flow>/<number of full refreshes>.
_PIPELINE_CHECKPOINTS = "_checkpoints"


def find_refreshed_checkpoints(checkpoint_location: StoreSpec) -> list[StoreSpec]:
    """Return earlier checkpoints of a pipeline's flow, before its full refreshes, that a sink used."""
    flow, number = checkpoint_location.to_parent(1), checkpoint_location.url.rpartition("/")[2]
    if _PIPELINE_CHECKPOINTS not in flow.url.split("/") or not number.isdecimal():
        return []
    earlier = (flow.to_child(str(one)) for one in range(int(number)))
    return [one for one in earlier if open_sinks_dir(one).find_uuid() is not None]


@dataclass
class StagedMessage(WriterCommitMessage):
    lease: Lease
    #: The task's report: its ack and its committable.
    report: dict[str, Any]


class KafkaStreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches exactly once."""

    def __init__(self, options: SinkOptions, make_observer: Callable[[], Observer]) -> None:
        self._options, self._make_observer = options, make_observer
        self._lease: Lease | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Spark pickles a writer exactly before it runs the tasks of a micro-batch. At no other moment before
        # the tasks does this code run on the driver.
        if self._lease is None:
            location = self._options.checkpoint_location
            if not open_sinks_dir(location).list_checkpoint_ids():
                for earlier in find_refreshed_checkpoints(location):
                    self._give_up(earlier)
            with self._commits(location) as commits:
                self._lease = commits.plan()
        return {"_options": self._options, "_lease": self._lease}

    @contextmanager
    def _commits(self, checkpoint_location: StoreSpec) -> Iterator[MicroBatchCommits]:
        freeze_modules()
        # Keep the connection for the next micro-batch: opening one takes as long as a small micro-batch.
        with WIRES.wire(self._options.connection) as wire:
            marks, topic = None, self._options.topic
            if topic is not None:
                job = find_or_create_uuid(open_sinks_dir(checkpoint_location))
                marks = KafkaMarks(KafkaAdmin.from_wire(wire), job, SINK, topic)
            client = TransactionClient.from_wire(wire)
            yield make_commits(checkpoint_location, client, self._make_observer(), _identify_driver(), marks)

    def _give_up(self, earlier: StoreSpec) -> None:
        try:
            with self._commits(earlier) as commits:
                commits.give_up()
        except BrokerUnavailableError:
            raise
        except FlinkishError as error:
            # A full refresh must also work if the old checkpoint is damaged or a copy.
            LOG.warning("what %s has left open ends by its timeout: %s", earlier.url, error)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        """Stage one task's rows; on return all are acknowledged and none is visible."""
        lease, options = self._lease, self._options
        if lease is None:
            raise InternalError("a task of the Kafka sink runs without a lease")
        settings = StagingSettings(
            connection=options.connection,
            transactional_id=TransactionalId.prefix(lease.job, lease.owner, _BLOCK),
            transaction_timeout_ms=options.transaction_timeout_ms,
            max_record_bytes=options.producer.max_request_bytes or DEFAULT_MAX_REQUEST_BYTES,
            default_topic=options.topic,
            producer=options.producer,
        )
        names = tuple(dict.fromkeys((*options.columns, KEY, TOPIC)))
        stage = StageInTasks((KafkaWork(settings, (), names),))
        (found,) = stage(self._add_control_columns(batch) for batch in iterator if batch.num_rows)
        return StagedMessage(lease, json.loads(found.column("report")[0].as_py()))

    def _add_control_columns(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Add the control columns and missing record columns that a job's sink expects."""
        import pyarrow as pa

        from flinkish_spark.connectors.kafka.client.admission import row_hashes

        columns = {name: rows.column(name) for name in self._options.columns}
        if self._options.topic is not None:
            columns.pop(TOPIC, None)
        hashes = pa.array(row_hashes(list(columns.values())).view("int64"))
        nothing = pa.repeat(0, rows.num_rows)
        control = {C.KIND: nothing, C.CHECKPOINT: nothing, C.CHANNEL: nothing, C.HASH: hashes}
        columns.setdefault(KEY, pa.nulls(rows.num_rows, pa.binary()))
        columns.setdefault(TOPIC, pa.nulls(rows.num_rows, pa.string()))
        return pa.RecordBatch.from_pydict({**control, **columns})

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Commit a micro-batch, or finish the commit of an earlier attempt of it."""
        if any(not isinstance(message, StagedMessage) for message in messages):
            raise InternalError("Spark commits a micro-batch of which a task reported nothing")
        staged = _to_staged_batch(messages, batchId)
        if staged is None:
            # A micro-batch without tasks has nothing to commit and no attempt.
            return
        with self._commits(self._options.checkpoint_location) as commits:
            commits.commit(staged)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        with self._commits(self._options.checkpoint_location) as commits:
            commits.abort(_to_staged_batch(messages, batchId))


class _ObservedClient:
    """A transaction client that reports each commit to an observer."""

    def __init__(self, client: TransactionClient, observer: Observer) -> None:
        self._client, self._observer = client, observer

    def commit(self, committable: KafkaCommittable) -> CommitAnswer:
        self._observer.on_step_start(Step.SINK_COMMIT, committable.transactional_id)
        answer = self._client.commit(committable)
        self._observer.on_step_end(Step.SINK_COMMIT, committable.transactional_id)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def make_commits(
    checkpoint_location: StoreSpec,
    client: TransactionClient,
    observer: Observer,
    driver: str,
    marks: KafkaMarks | None = None,
) -> MicroBatchCommits:
    """Return the commits of the format's sink."""
    observed = cast(TransactionClient, _ObservedClient(client, observer))

    def make_committers(ownership: Ownership) -> dict[str, Committer]:
        job, place = find_or_create_uuid(ownership.job_dir), checkpoint_location.to_child(SINKS)
        whose = (job, ownership.epoch, SINK, StructType(), CheckpointConfig(), SINK)
        context = SinkContext(*whose, place, SystemClock(), ownership.timeline)
        return {SINK: KafkaCommitter(observed, context, marks)}

    return MicroBatchCommits(checkpoint_location, make_committers, observer, driver)


def _identify_driver() -> str:
    """Return an id that all processes of this driver share, and no other driver on any machine."""
    # Planning and committing are different processes, forked by the same daemon of the same JVM. Host and
    # process id do not identify it: a restarted container gives both to the next daemon.
    daemon = os.getppid()
    return process_key(daemon) or f"{socket.gethostname()}-{daemon}"


def _to_staged_batch(messages: list[WriterCommitMessage | None], batch: int) -> StagedBatch | None:
    found = [message for message in messages if isinstance(message, StagedMessage)]
    leases, reports = {message.lease for message in found}, [message.report for message in found]
    if len(leases) > 1:
        raise InternalError(f"the tasks of one micro-batch belong to several attempts: {leases}")
    payloads = tuple(report["committable"] for report in reports if report["committable"])
    result = StageResult(tuple(map(TaskAck.from_json, reports)), payloads)
    return leases.pop().to_staged_batch(BatchId(batch), {SINK: result}) if leases else None
