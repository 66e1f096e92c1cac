"""The Kafka sink: one transaction per task and micro-batch, committed with the checkpoint.

Executors write through the JAR of this package, or in Python, and leave the transaction open; the driver ends
it later from its handle (transactional id, producer id, epoch). Each task attempt has an id of
its own, InitProducerId comes before every transaction, and an id is used again only after the
receipt, so a handle can never name somebody else's transaction. Under a weaker
:class:`~flinkish_spark.kafka.delivery.DeliveryGuarantee` there is no transaction, no id and no handle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flinkish_spark.kafka import KafkaAdmin, TransactionClient
from flinkish_spark.kafka._wire import KafkaWire
from flinkish_spark.kafka.delivery import DeliveryGuarantee
from flinkish_spark.kafka.marks import KafkaMarks
from flinkish_spark.sinks.base import Committer, Sink, SinkContext, SinkWriter
from flinkish_spark.sinks.kafka_committer import KafkaCommitter
from flinkish_spark.sinks.kafka_preflight import preflight
from flinkish_spark.sinks.kafka_sink_settings import DEFAULT_TRANSACTION_TIMEOUT_MS, KafkaSinkSettings
from flinkish_spark.sinks.kafka_writers import BATCH_HEADER, JvmWriter, PythonWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["BATCH_HEADER", "DEFAULT_TRANSACTION_TIMEOUT_MS", "KafkaSink"]


@dataclass(frozen=True)
class KafkaSink(KafkaSinkSettings, Sink):
    """Write to Kafka topics, exactly once for readers with ``isolation.level=read_committed``.

    What a null means in each part of a record is said in `docs/kafka-sink.md`.

    Parameters
    ----------
    bootstrap_servers
        ``"host:port,host:port"``.
    topic
        An existing topic; of the records that name no other.
    key
        Column that becomes the record key (as its string; BINARY as it is), or ``Json("user STRING")`` or
        ``Avro(schema)`` for the fields that these name; empty for no key.
    value
        ``Json()`` writes all fields as a JSON object, ``Json("user STRING")`` those that it names,
        ``Avro(schema)`` a record of its schema, ``Raw("column")`` one column as it is.
    transaction_timeout_ms
        How long staged data may wait for its checkpoint, restarts included; at most the broker's
        transaction.max.timeout.ms, at least interval + restart budget. Of no meaning without
        transactions.
    on_oversize
        What to do with a record larger than the topic takes; None: as `on_bad_record` says.
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
        skip records without value. Needs EXACTLY_ONCE and a single topic.
    delivery
        What is promised about the records; may differ from one start of a job to the next.
    headers
        Name of a header -> the column (STRING or BINARY) with its value. Or one column with all headers,
        in their order: ARRAY<STRUCT<key: STRING, value: BINARY>>.
    timestamp
        Column (TIMESTAMP, or BIGINT in milliseconds since 1970) with the record's timestamp.
    partition
        Column (INT) with the record's partition.
    topic_column
        Column (STRING) with the record's topic: `topic` or one of `other_topics`.
    other_topics
        The topics, beside `topic`, that records may name; they exist.
    on_bad_record
        What to do with a record that names a topic that is not declared or a partition that there is
        not, has a timestamp before 1970 or after 9999, or does not fit its Avro schema.
    record_headers
        Which headers of ours each record carries. `BATCH` tells readers, after a rewind to an older
        checkpoint, which records are left over from what was given up.
    """

    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Refuse what cannot work.

        Unknown columns and wrong types, formats that do not fit the stream, settings that the producer
        does not take, unknown topics, missing rights; of transactions, where there are any, a timeout
        that does not fit and a right that is missing.
        """
        preflight(self, spark, context)

    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        """Return the staging half."""
        return JvmWriter(self, context) if self.needs_shim else PythonWriter(self, context)

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Return the committing half; without transactions it ends those that an earlier start left."""
        wire = KafkaWire(self.connection)
        marks = None
        if self.topics and self.delivery is DeliveryGuarantee.EXACTLY_ONCE:
            marks = KafkaMarks(KafkaAdmin.over(wire), context.job, context.uid, min(self.topics))
        committer = KafkaCommitter(TransactionClient.over(wire), context, marks)
        committer.staged_lifetime_ms = self.transaction_timeout_ms
        return committer
