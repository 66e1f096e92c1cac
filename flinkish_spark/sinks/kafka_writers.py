"""The staging half of the Kafka sink: one output per task, written by the JAR or in Python."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from flinkish_spark.bridge.selection import Selection
from flinkish_spark.bridge.shim import stage_kafka
from flinkish_spark.formats import BadRecordPolicy, DeadLetter
from flinkish_spark.kafka import KafkaAdmin, KafkaCommittable
from flinkish_spark.kafka.barrier_records import BarrierRecords
from flinkish_spark.kafka.barrier_writer import BarrierWriter
from flinkish_spark.kafka.delivery import DeliveryGuarantee, RecordHeaders
from flinkish_spark.kafka.staging_settings import (
    DEFAULT_MAX_REQUEST_BYTES,
    OnRefusal,
    ProducerSettings,
    StagingSettings,
)
from flinkish_spark.kafka.task_ids import MAX_ATTEMPT_INDEX
from flinkish_spark.protocol.ids import TransactionalId
from flinkish_spark.protocol.records import TaskAck
from flinkish_spark.runtime import columns as C
from flinkish_spark.sinks.base import SinkContext, SinkWriter, StageRequest, StageResult
from flinkish_spark.sinks.kafka_barriers import KafkaStaged, checkpoint_in, stage_barrier
from flinkish_spark.sinks.kafka_columns import HEADERS, MISFIT, PARTITION, TIMESTAMP, record_columns
from flinkish_spark.sinks.kafka_sink_settings import KafkaSinkSettings
from flinkish_spark.sinks.python_tasks import StageInPython, reports

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


#: Which job and which of its sinks wrote a record.
JOB_HEADER, UID_HEADER = "flinkish-job", "flinkish-uid"
#: The checkpoint that a record was expected to become visible with.
CHECKPOINT_HEADER = "flinkish-checkpoint"
#: Which micro-batch wrote a record, as ``<lineage>/<batch>``.
BATCH_HEADER = "flinkish-batch"


class KafkaWriter(SinkWriter):
    """Writes the records of a micro-batch into one output per task."""

    def __init__(self, sink: KafkaSinkSettings, context: SinkContext) -> None:
        self._sink, self._context = sink, context
        with KafkaAdmin(sink.connection) as admin:
            limits = {name: info.max_message_bytes for name, info in admin.topics(sink.topics).items()}
        own = int(sink.producer_option("max.request.size") or DEFAULT_MAX_REQUEST_BYTES)
        self._max_record_bytes = min([own, *(limits[name] for name in sink.data_topics if name in limits)])
        letters = [limits[name] for name in sink.dead_letter_topics if name in limits]
        self._max_dead_letter_bytes = min([own, *letters])
        columns = record_columns(sink, context.schema)
        self._names = tuple(columns)
        self._parts = Selection([*map(F.col, C.SINK_CONTROL), *columns.values()])
        self._barriers: BarrierWriter | None = None
        if sink.barriers is BarrierRecords.EACH_CHECKPOINT:
            self._barriers = BarrierWriter(
                sink.connection, sink.topic, context.job, context.uid, sink.transaction_timeout_ms
            )

    def stage(self, request: StageRequest) -> StageResult:
        """Stage, tell acks and committables apart, and close a checkpoint with its barrier records."""
        found = self._reports(self._parts.of(request.rows), self._names, request)
        staged = [
            KafkaStaged(KafkaCommittable.from_json(r["committable"])) for r in found if r["committable"]
        ]
        tasks = tuple(TaskAck.from_json(r) for r in found)
        checkpoint = checkpoint_in(tasks)
        if self._barriers is not None and checkpoint is not None:
            # Last, so that its offsets and its commit come behind those of the data.
            staged.append(stage_barrier(self._barriers, checkpoint, request, self._context))
        return StageResult(tasks, tuple(one.to_payload() for one in staged))

    @abstractmethod
    def _reports(
        self, rows: DataFrame, columns: Sequence[str], request: StageRequest
    ) -> Sequence[Mapping[str, Any]]:
        """Write; return each task's ack with its committable. `columns` come behind the control columns."""

    def _prefix(self, request: StageRequest) -> str:
        return TransactionalId.prefix(self._context.job, self._context.owner_epoch, request.block)

    def _headers(self, request: StageRequest) -> dict[str, str]:
        """Return what every record of a micro-batch carries of ours."""
        batch = {BATCH_HEADER: f"{request.lineage}/{request.batch}"}
        match self._sink.record_headers:
            case RecordHeaders.NONE:
                return {}
            case RecordHeaders.BATCH:
                return batch
            case RecordHeaders.FULL:
                job, uid = str(self._context.job), self._context.uid
                checkpoint = str(request.checkpoint)
                return {JOB_HEADER: job, UID_HEADER: uid, CHECKPOINT_HEADER: checkpoint, **batch}

    def _declared(self) -> list[str] | None:
        return list(self._sink.data_topics) if self._sink.topic_column else None

    def _partitions(self) -> dict[str, int] | None:
        """Ask now: partitions may have been added, and a record may name one of them."""
        if not self._sink.partition:
            return None
        with KafkaAdmin(self._sink.connection) as admin:
            return {name: info.partitions for name, info in admin.topics(self._sink.data_topics).items()}


class PythonWriter(KafkaWriter):
    """Runs the writer in Python workers."""

    def _reports(
        self, rows: DataFrame, columns: Sequence[str], request: StageRequest
    ) -> Sequence[Mapping[str, Any]]:
        sink = self._sink
        is_exact = sink.delivery is DeliveryGuarantee.EXACTLY_ONCE
        oversize, letters = _policy(sink.oversize_policy)
        bad_record, bad_letters = _policy(sink.on_bad_record)
        declared = self._declared()
        settings = StagingSettings(
            connection=sink.connection,
            transactional_id=self._prefix(request) if is_exact else None,
            transaction_timeout_ms=sink.transaction_timeout_ms,
            guarantee=sink.delivery,
            uid=self._context.uid,
            max_record_bytes=self._max_record_bytes,
            max_dead_letter_bytes=self._max_dead_letter_bytes,
            default_topic=sink.topic,
            topics=None if declared is None else frozenset(declared),
            partitions=self._partitions(),
            oversize=oversize,
            dead_letter_topic=letters,
            bad_record=bad_record,
            bad_record_topic=bad_letters,
            producer=ProducerSettings.of(sink.producer, sink.delivery),
        )
        headers = tuple((name, text.encode()) for name, text in self._headers(request).items())
        return reports(rows, StageInPython(settings, headers))


class JvmWriter(KafkaWriter):
    """Runs the writer of the JAR."""

    def _reports(
        self, rows: DataFrame, columns: Sequence[str], request: StageRequest
    ) -> Sequence[Mapping[str, Any]]:
        places = {name: len(C.SINK_CONTROL) + place for place, name in enumerate(columns)}
        optional = (PARTITION, TIMESTAMP, HEADERS, MISFIT)
        options = {
            **jvm_options(self._sink, self._max_record_bytes),
            "transactional_id_prefix": self._prefix(request),
            "headers": self._headers(request),
            "uid": self._context.uid,
            "max_dead_letter_bytes": self._max_dead_letter_bytes,
            "topics": self._declared(),
            "partitions": self._partitions(),
            "columns": {name: places[name] for name in optional if name in places},
        }
        return stage_kafka(rows, options)


def jvm_options(sink: KafkaSinkSettings, max_record_bytes: int) -> dict[str, Any]:
    """Return the options of the JAR's writer that are the same for all micro-batches of a sink."""
    producer = {name.removeprefix("kafka."): value for name, value in sink.producer.items()}
    oversize, letters = _policy(sink.oversize_policy)
    bad_record, bad_letters = _policy(sink.on_bad_record)
    return {
        "producer": {**sink.connection.for_java(), **producer},
        "delivery": sink.delivery.value,
        "topic": sink.topic,
        "transactional_id_prefix": "",
        "max_attempt_index": MAX_ATTEMPT_INDEX,
        "transaction_timeout_ms": sink.transaction_timeout_ms,
        "max_record_bytes": max_record_bytes,
        "oversize": oversize.value,
        "dead_letter_topic": letters,
        "bad_record": bad_record.value,
        "bad_record_topic": bad_letters,
    }


def _policy(policy: BadRecordPolicy) -> tuple[OnRefusal, str | None]:
    if isinstance(policy, DeadLetter):
        return OnRefusal.DEAD_LETTER, policy.topic
    return OnRefusal(policy.value), None
