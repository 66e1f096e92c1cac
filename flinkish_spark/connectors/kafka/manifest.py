"""A manifest in a Kafka topic: one record per checkpoint, exactly once for read_committed readers.

The writer stages a record as a sink does: in a transaction whose handle it stores in the job directory before
the commit, so that a repetition ends the same transaction. If the transaction has timed out in between, the
writer stages the record again, after the topic's log has proven that it was not visible.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa

from flinkish_spark.connectors.kafka.client.admin import PREFLIGHT_TIMEOUT_MS, KafkaAdmin
from flinkish_spark.connectors.kafka.client.client import KafkaWire
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.marks import KafkaMarks
from flinkish_spark.connectors.kafka.client.producer import StagedTransaction
from flinkish_spark.connectors.kafka.client.settings import StagingSettings
from flinkish_spark.connectors.kafka.client.transactions import KafkaCommittable, TransactionClient
from flinkish_spark.contracts.manifest import Manifest, ManifestContext, ManifestWriter
from flinkish_spark.contracts.sink import require_ours
from flinkish_spark.core.errors import EnvironmentFault, InternalError
from flinkish_spark.core.fields import Name, check_fields
from flinkish_spark.core.store import CreateResult, SealedObjects
from flinkish_spark.protocol.decisions import ManifestRecord
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import OwnerEpoch, TransactionalId
from flinkish_spark.protocol.records import CommitAnswer, Outcome
from flinkish_spark.protocol.timeline import Mark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


LOG = logging.getLogger(__name__)
#: The task number in the transactional id; Spark numbers no partition so high. Block 0 is never leased.
MANIFEST_TASK = 999_999_998
#: Short, since the commit follows at once: a transaction left open by a crash hides later records.
_TRANSACTION_TIMEOUT_MS = 60_000
_FOLDER = "manifest"


@dataclass(frozen=True)
class KafkaManifest(Manifest):
    """Write a JSON record per confirmed checkpoint to a Kafka topic.

    The key is ``<job uuid>/<checkpoint>``, so a compacted topic keeps one record per checkpoint. All records
    of a job are in one partition, in order. Read it with ``isolation.level=read_committed``.

    Parameters
    ----------
    bootstrap_servers
        ``"host:port,host:port"``.
    topic
        An existing topic; several jobs may share it.
    options
        Connection and security options under Kafka's or Spark's names.

    Examples
    --------
    >>> KafkaManifest("localhost:9092", "checkpoints").topic
    'checkpoints'
    """

    bootstrap_servers: str
    topic: Name
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, topic="name an existing topic")
        _ = self.connection  # Raises if servers or options cannot be used.

    @cached_property
    def connection(self) -> KafkaConnection:
        return KafkaConnection(self.bootstrap_servers, self.options)

    def preflight(self, spark: SparkSession, context: ManifestContext) -> None:
        """Refuse an unknown topic and missing rights."""
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            admin.find_existing([self.topic], "the manifest")
            probe = TransactionalId(context.job, OwnerEpoch(0), 0, MANIFEST_TASK, 0)
            admin.probe_transactional_id(str(probe), _TRANSACTION_TIMEOUT_MS)

    def create_writer(self, spark: SparkSession, context: ManifestContext) -> ManifestWriter:
        return _KafkaManifestWriter(self, context)


class _KafkaManifestWriter(ManifestWriter):
    def __init__(self, manifest: KafkaManifest, context: ManifestContext) -> None:
        self._manifest, self._context = manifest, context
        self._objects = SealedObjects(context.store, "the job directory")
        wire = KafkaWire(manifest.connection)
        self._client = TransactionClient.from_wire(wire)
        self._marks = KafkaMarks(KafkaAdmin.from_wire(wire), context.job, ".manifest", manifest.topic)

    def newest_marks(self) -> Sequence[Mark]:
        mark = self._marks.newest()
        return () if mark is None else (mark,)

    def write(self, record: ManifestRecord) -> CommitAnswer:
        try:
            return self._write(record)
        except EnvironmentFault as fault:
            if not fault.restartable:
                raise
            return CommitAnswer(Outcome.RETRY, str(fault))

    def _write(self, record: ManifestRecord) -> CommitAnswer:
        found, ours = self._marks.newest(), self._context.timeline.mark_of(record.checkpoint)
        if found is not None:
            require_ours(self._context.timeline, "the manifest", found, record.checkpoint)
        if found != ours:
            # This order matters: an older copy of the directory must not repeat a visible record.
            self._marks.leave(ours)
        folder = f"{_FOLDER}/{record.checkpoint}"
        numbers = self._objects.numbers(folder)
        if numbers:
            staged = self._objects.read(
                f"{folder}/{max(numbers)}.json", "manifest", KafkaCommittable.from_json
            )
            answer = self._client.commit(staged)
            if answer.outcome is not Outcome.LOST:
                return answer
            if not answer.is_proven_aborted:
                LOG.warning("the manifest may lack a record: %s", answer.detail)
                why = f"nothing proves that it was not written: {answer.detail}"
                return CommitAnswer(Outcome.ALREADY_COMMITTED, why)
            LOG.info("the manifest's record of checkpoint %s is staged again: %s", record.checkpoint, answer)
        handle = self._stage(record)
        number = max(numbers, default=0) + 1
        # This order matters: a repetition must find the transaction that may be committed already.
        created = self._context.store.create_if_absent(
            f"{folder}/{number}.json", seal("manifest", handle.to_json())
        )
        if created is CreateResult.EXISTS:
            self._client.abort(handle)
            return CommitAnswer(Outcome.RETRY, "another owner has staged the same record")
        if max(self._objects.numbers("owners"), default=0) > int(self._context.owner_epoch):
            # A newer owner may have written the record, confirmed the checkpoint and deleted the object that
            # this one has just created. An owner that takes over after this line finds the object, and ends
            # the same transaction.
            self._client.abort(handle)
            return CommitAnswer(Outcome.FENCED, "a newer owner writes the manifest")
        answer = self._client.commit(handle)
        for older in self._objects.numbers(_FOLDER, ""):
            if older < int(record.checkpoint):
                for number in self._objects.numbers(f"{_FOLDER}/{older}"):
                    self._context.store.delete(f"{_FOLDER}/{older}/{number}.json")
        return answer

    def _stage(self, record: ManifestRecord) -> KafkaCommittable:
        context = self._context
        body = {"job": str(context.job), "job_name": context.job_name, **record.to_json()}
        settings = StagingSettings(
            connection=self._manifest.connection,
            # One id is enough: a record is staged after the receipt of the checkpoint before.
            transactional_id=str(TransactionalId(context.job, context.owner_epoch, 0, MANIFEST_TASK, 0)),
            transaction_timeout_ms=_TRANSACTION_TIMEOUT_MS,
            default_topic=self._manifest.topic,
        )
        with StagedTransaction(settings) as transaction:
            transaction.write(
                pa.array([f"{context.job}/{record.checkpoint}".encode()], pa.binary()),
                pa.array([json.dumps(body).encode()], pa.binary()),
                # Partition 0 exists from the start, so that all records of a job are in order.
                partitions=pa.array([0], pa.int32()),
            )
            committable = transaction.prepare()
        if committable is None:
            raise InternalError("a transaction of one record was empty")
        return committable

    def close(self) -> None:
        self._client.close()
