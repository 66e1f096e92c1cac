"""The Kafka sink: one transaction per task and micro-batch, committed with the checkpoint.

Executors write through the JAR of this package, or in Python, and leave the transaction open; the driver ends
it later from its handle (transactional id, producer id, epoch). Each task attempt has an id of
its own, InitProducerId comes before every transaction, and an id is used again only after the
receipt, so a handle can never name somebody else's transaction.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.shim import stage_kafka
from flinkish_spark.config import CheckpointingMode, require_positive
from flinkish_spark.engines import Engine
from flinkish_spark.errors import ConfigError, SchemaError
from flinkish_spark.formats import BadRecordPolicy, DeadLetter, Json, OnBadRecord, Raw
from flinkish_spark.kafka import (
    PREFLIGHT_TIMEOUT_MS,
    KafkaAdmin,
    KafkaCommittable,
    KafkaConnection,
    TransactionClient,
)
from flinkish_spark.kafka.admin import unknown_topic
from flinkish_spark.kafka.barrier_records import BarrierRecords
from flinkish_spark.kafka.barrier_writer import BarrierWriter
from flinkish_spark.kafka.staging_settings import (
    DEFAULT_MAX_REQUEST_BYTES,
    Oversize,
    ProducerSettings,
    StagingSettings,
)
from flinkish_spark.kafka.task_ids import MAX_ATTEMPT_INDEX
from flinkish_spark.protocol.ids import OwnerEpoch, TransactionalId
from flinkish_spark.protocol.records import TaskAck
from flinkish_spark.runtime import columns as C
from flinkish_spark.sinks.base import Committer, Sink, SinkContext, SinkWriter, StageRequest, StageResult
from flinkish_spark.sinks.kafka_barriers import KafkaStaged, checkpoint_in, stage_barrier
from flinkish_spark.sinks.kafka_committer import KafkaCommitter
from flinkish_spark.sinks.kafka_guard import with_advice
from flinkish_spark.sinks.python_tasks import StageInPython, reports

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Header of every record: which micro-batch wrote it, as ``<lineage>/<batch>``.
BATCH_HEADER = "flinkish-batch"
#: The broker's default for transaction.max.timeout.ms.
DEFAULT_TRANSACTION_TIMEOUT_MS = 900_000


@dataclass(frozen=True)
class KafkaSink(Sink):
    """Write to a Kafka topic, exactly once for readers with ``isolation.level=read_committed``.

    Parameters
    ----------
    bootstrap_servers
        ``"host:port,host:port"``.
    topic
        An existing topic.
    key
        Column that becomes the record key (as its string; BINARY as it is); empty for no key.
    value
        ``Json()`` writes all fields as a JSON object, ``Raw("column")`` one column as it is.
    transaction_timeout_ms
        How long staged data may wait for its checkpoint, restarts included; at most the broker's
        transaction.max.timeout.ms, at least interval + restart budget.
    on_oversize
        What to do with a record larger than the topic takes.
    options
        Connection and security options under Kafka's or Spark's names.
    producer
        Further settings of the producer, such as ``{"compression.type": "zstd"}``.
    writer
        ``"jvm"``: the writer in the JAR of this package. ``"python"``: its twin in Python, which
        needs no JAR. May differ from one start of a job to the next.
    barriers
        ``BarrierRecords.EACH_CHECKPOINT`` writes one barrier record per partition and checkpoint, which
        a job chained behind this one can align on (`docs/chained-jobs.md`). Other readers have to
        skip records without value.
    """

    bootstrap_servers: str
    topic: str
    key: str = ""
    value: Json | Raw = field(default_factory=Json)
    transaction_timeout_ms: int = DEFAULT_TRANSACTION_TIMEOUT_MS
    on_oversize: BadRecordPolicy = OnBadRecord.FAIL
    options: Mapping[str, str] = field(default_factory=dict)
    producer: Mapping[str, str] = field(default_factory=dict)
    writer: str | Engine = Engine.JVM
    barriers: BarrierRecords = BarrierRecords.NONE

    def __post_init__(self) -> None:
        object.__setattr__(self, "writer", Engine.of(self.writer, "writer"))
        object.__setattr__(self, "barriers", _barriers(self.barriers))
        require_positive("transaction_timeout_ms", self.transaction_timeout_ms)
        if not self.topic:
            raise ConfigError("the Kafka sink has no topic", what_to_do="name an existing topic")
        for name in self.producer:
            if name.removeprefix("kafka.") in _RESERVED:
                raise ConfigError(
                    f"the producer setting '{name}' cannot be set",
                    why="the sink sets it itself, and exactly-once depends on it",
                    what_to_do="leave it out",
                )

    @property
    def needs_shim(self) -> bool:
        """Whether the JAR's writer is used."""
        return self.writer is Engine.JVM

    @property
    def topics(self) -> tuple[str, ...]:
        """The topic, and the dead-letter topic if there is one."""
        extra = (self.on_oversize.topic,) if isinstance(self.on_oversize, DeadLetter) else ()
        return (self.topic, *extra)

    @cached_property
    def connection(self) -> KafkaConnection:
        """How the brokers are reached."""
        return KafkaConnection(self.bootstrap_servers, self.options)

    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Refuse unknown topics and columns, timeouts that do not fit, and missing rights."""
        self._check_columns(context)
        self._check_barriers(context)
        if not self.needs_shim:
            ProducerSettings.of(self.producer)
        least = context.checkpoint.interval_ms + context.checkpoint.restart_budget_ms
        if self.transaction_timeout_ms < least:
            raise ConfigError(
                f"the transaction timeout of sink '{context.uid}' is {self.transaction_timeout_ms} ms, "
                f"shorter than checkpoint interval + restart budget = {least} ms",
                why="the broker would abort staged data while the job restarts",
                what_to_do=f"set transaction_timeout_ms to {least} or more, or lower restart_budget_ms",
            )
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            found = admin.topics(self.topics)
            for topic in self.topics:
                if topic not in found:
                    raise unknown_topic(topic, self.connection.servers, of=f"sink '{context.uid}'")
            # Block 0 of owner 0 is never leased, and it has the prefix that ACLs are written for.
            probe = TransactionalId(context.job, OwnerEpoch(0), 0, 0, 0)
            try:
                admin.probe_transactional_id(str(probe), self.transaction_timeout_ms)
            except ConfigError as refused:
                raise with_advice(refused, context.uid, least) from refused

    def _check_barriers(self, context: SinkContext) -> None:
        counts = context.checkpoint.mode is CheckpointingMode.AT_LEAST_ONCE
        if counts and self.barriers is BarrierRecords.EACH_CHECKPOINT:
            raise ConfigError(
                f"the sink '{context.uid}' writes barrier records, and the job's checkpoints have "
                "CheckpointingMode.AT_LEAST_ONCE",
                why="then a branch may stage records of a checkpoint behind the barrier record of it",
                what_to_do="use CheckpointingMode.EXACTLY_ONCE, or leave barriers out",
            )

    def _check_columns(self, context: SinkContext) -> None:
        wanted = [("key", self.key)] if self.key else []
        if isinstance(self.value, Raw):
            wanted.append(("value", self.value.column))
        for role, column in wanted:
            if column not in context.schema.names:
                raise SchemaError(
                    f"the {role} of sink '{context.uid}' is the column '{column}', "
                    "which its stream does not have",
                    what_to_do=f"choose from {', '.join(context.schema.names)}",
                )

    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        """Return the staging half."""
        return _JvmWriter(self, context) if self.needs_shim else _PythonWriter(self, context)

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Return the committing half."""
        committer = KafkaCommitter(TransactionClient(self.connection), context)
        committer.staged_lifetime_ms = self.transaction_timeout_ms
        return committer

    def record_columns(self, schema: T.StructType) -> list[Column]:
        """Return key, value and topic of a record as the writer wants them."""
        key = _as_bytes(schema, self.key) if self.key else F.lit(None).cast("binary")
        if isinstance(self.value, Raw):
            value = _as_bytes(schema, self.value.column)
        else:
            fields = F.struct(*[F.col(C.quoted(n)).alias(n) for n in schema.names])
            value = F.to_json(fields, {"ignoreNullFields": "false"}).cast("binary")
        return [key.alias("key"), value.alias("value"), F.lit(None).cast("string").alias("topic")]


class _KafkaWriter(SinkWriter):
    """Writes the records of a micro-batch into one open transaction per task."""

    def __init__(self, sink: KafkaSink, context: SinkContext) -> None:
        self._sink, self._context = sink, context
        with KafkaAdmin(sink.connection) as admin:
            limits = [info.max_message_bytes for info in admin.topics([sink.topic]).values()]
        own = int(sink.producer.get("max.request.size", DEFAULT_MAX_REQUEST_BYTES))
        self._max_record_bytes = min([own, *limits])
        self._barriers: BarrierWriter | None = None
        if sink.barriers is BarrierRecords.EACH_CHECKPOINT:
            self._barriers = BarrierWriter(
                sink.connection, sink.topic, context.job, context.uid, sink.transaction_timeout_ms
            )

    def stage(self, request: StageRequest) -> StageResult:
        """Stage, tell acks and committables apart, and close a checkpoint with its barrier records."""
        schema = T.StructType(list(request.rows.schema.fields[4:]))
        control = (C.KIND, C.CHECKPOINT, C.CHANNEL, C.HASH)
        rows = request.rows.select(*control, *self._sink.record_columns(schema))
        found = self._reports(rows, request)
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
    def _reports(self, rows: DataFrame, request: StageRequest) -> Sequence[Mapping[str, Any]]:
        """Write; return each task's ack with its committable."""

    def _prefix(self, request: StageRequest) -> str:
        return TransactionalId.prefix(self._context.job, self._context.owner_epoch, request.block)


class _PythonWriter(_KafkaWriter):
    def _reports(self, rows: DataFrame, request: StageRequest) -> Sequence[Mapping[str, Any]]:
        policy = self._sink.on_oversize
        settings = StagingSettings(
            connection=self._sink.connection,
            transactional_id=self._prefix(request),
            transaction_timeout_ms=self._sink.transaction_timeout_ms,
            max_record_bytes=self._max_record_bytes,
            default_topic=self._sink.topic,
            oversize=Oversize.DEAD_LETTER if isinstance(policy, DeadLetter) else Oversize(policy.value),
            dead_letter_topic=policy.topic if isinstance(policy, DeadLetter) else None,
            producer=ProducerSettings.of(self._sink.producer),
        )
        headers = ((BATCH_HEADER, f"{request.lineage}/{request.batch}".encode()),)
        return reports(rows, StageInPython(settings, headers))


class _JvmWriter(_KafkaWriter):
    def _reports(self, rows: DataFrame, request: StageRequest) -> Sequence[Mapping[str, Any]]:
        return stage_kafka(rows, self._options(request))

    def _options(self, request: StageRequest) -> dict[str, Any]:
        sink = self._sink
        policy = sink.on_oversize
        producer = {name.removeprefix("kafka."): value for name, value in sink.producer.items()}
        return {
            "producer": {**sink.connection.for_java(), **producer},
            "topic": sink.topic,
            "transactional_id_prefix": self._prefix(request),
            "max_attempt_index": MAX_ATTEMPT_INDEX,
            "transaction_timeout_ms": sink.transaction_timeout_ms,
            "headers": {BATCH_HEADER: f"{request.lineage}/{request.batch}"},
            "max_record_bytes": self._max_record_bytes,
            "oversize": "dead-letter" if isinstance(policy, DeadLetter) else policy.value,
            "dead_letter_topic": policy.topic if isinstance(policy, DeadLetter) else None,
        }


_RESERVED = frozenset(
    {
        "transactional.id",
        "transaction.timeout.ms",
        "enable.idempotence",
        "acks",
        "key.serializer",
        "value.serializer",
        "bootstrap.servers",
    }
)


def _barriers(value: object) -> BarrierRecords:
    try:
        return BarrierRecords(value)
    except ValueError:
        names = " or ".join(f"BarrierRecords.{one.name}" for one in BarrierRecords)
        raise ConfigError(f"barriers is {value!r}", what_to_do=f"use {names}") from None


def _as_bytes(schema: T.StructType, column: str) -> Column:
    kind = schema[column].dataType
    value = F.col(C.quoted(column))
    if isinstance(kind, T.BinaryType):
        return value
    if isinstance(kind, T.ArrayType | T.MapType | T.StructType):
        return F.to_json(value).cast("binary")
    return value.cast("string").cast("binary")
