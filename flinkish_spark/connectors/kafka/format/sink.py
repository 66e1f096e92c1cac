"""The sink of `format("flinkish-kafka")`: rows with the columns of Spark's own Kafka sink, as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import types as T

from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.client import KafkaWire
from flinkish_spark.connectors.kafka.client.marks import KafkaMarks
from flinkish_spark.connectors.kafka.client.settings import DEFAULT_MAX_REQUEST_BYTES, StagingSettings
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.connectors.kafka.format.options import SinkOptions
from flinkish_spark.connectors.kafka.record_encoder import TOPIC
from flinkish_spark.connectors.kafka.writer import KafkaCommitter, KafkaWork
from flinkish_spark.connectors.stream_writer import QueryOutput, SinkRows
from flinkish_spark.connectors.task_staging import JoiningWriter, StagePlan
from flinkish_spark.contracts.sink import Committer, Sink, SinkContext, StageRequest, StageResult
from flinkish_spark.protocol.ids import TransactionalId
from flinkish_spark.protocol.records import TaskAck

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Uid of the format's only sink in records and marks.
SINK = "topic"


def make_output(options: SinkOptions, schema: T.StructType, key: str) -> QueryOutput:
    """Return the output of a query whose only sink is a topic."""
    # The option wins over the column.
    names = [name for name in options.columns if name != TOPIC or options.topic is None]
    rows = SinkRows(T.StructType([schema[name] for name in names]))
    return QueryOutput({SINK: RecordsSink(options)}, {SINK: rows}, options.checkpoint_location, key)


@dataclass(frozen=True)
class RecordsSink(Sink):
    options: SinkOptions

    def why_needs_session(self) -> str:
        return ""

    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Check nothing: the options were checked when they were parsed."""

    def create_writer(self, spark: SparkSession, context: SinkContext) -> RecordsWriter:
        return RecordsWriter(self.options, context)

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        wire, topic = KafkaWire(self.options.connection), self.options.topic
        marks = None
        if topic is not None:
            marks = KafkaMarks(KafkaAdmin.from_wire(wire), context.job, context.uid, topic)
        return KafkaCommitter(TransactionClient.from_wire(wire), context, marks)


class RecordsWriter(JoiningWriter):
    """Stages rows in one transaction per task."""

    def __init__(self, options: SinkOptions, context: SinkContext) -> None:
        self._options, self._context = options, context

    def plan(self, request: StageRequest) -> StagePlan:
        options, context = self._options, self._context
        settings = StagingSettings(
            connection=options.connection,
            transactional_id=TransactionalId.prefix(context.job, context.owner_epoch, request.block),
            transaction_timeout_ms=options.transaction_timeout_ms,
            max_record_bytes=options.producer.max_request_bytes or DEFAULT_MAX_REQUEST_BYTES,
            default_topic=options.topic,
            producer=options.producer,
        )
        return StagePlan(KafkaWork(settings, (), tuple(context.schema.names)), _finish)


def _finish(reports: Sequence[Mapping[str, Any]]) -> StageResult:
    payloads = tuple(report["committable"] for report in reports if report["committable"])
    return StageResult(tuple(map(TaskAck.from_json, reports)), payloads)
