"""The Kafka sink: one transaction per task and micro-batch, committed with the checkpoint.

Executors write through the JAR of this package, or in Python, and leave the transaction open; the driver ends
it later from its handle (transactional id, producer id, epoch). Each task attempt has an id of
its own, InitProducerId comes before every transaction, and an id is used again only after the
receipt, so a handle can never name somebody else's transaction. Under a weaker
:class:`~flinkish_spark.kafka.delivery.DeliveryGuarantee` there is no transaction, no id and no handle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from flinkish_spark.arguments import instance_of, values_by_name
from flinkish_spark.config import require_positive
from flinkish_spark.engines import Engine
from flinkish_spark.errors import ConfigError
from flinkish_spark.formats import Avro, BadRecordPolicy, DeadLetter, Json, OnBadRecord, Raw
from flinkish_spark.kafka import KafkaAdmin, KafkaConnection, TransactionClient
from flinkish_spark.kafka._wire import KafkaWire
from flinkish_spark.kafka.barrier_records import BarrierRecords
from flinkish_spark.kafka.delivery import DeliveryGuarantee, RecordHeaders
from flinkish_spark.kafka.marks import KafkaMarks
from flinkish_spark.sinks.base import Committer, Sink, SinkContext, SinkWriter
from flinkish_spark.sinks.kafka_committer import KafkaCommitter
from flinkish_spark.sinks.kafka_preflight import check_producer, preflight
from flinkish_spark.sinks.kafka_writers import BATCH_HEADER, JvmWriter, PythonWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["BATCH_HEADER", "DEFAULT_TRANSACTION_TIMEOUT_MS", "KafkaSink"]

#: The broker's default for transaction.max.timeout.ms.
DEFAULT_TRANSACTION_TIMEOUT_MS = 900_000
#: Headers that are ours to write.
_OUR_HEADERS = "flinkish-"


@dataclass(frozen=True)
class KafkaSink(Sink):
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

    bootstrap_servers: str
    topic: str
    key: str | Json | Raw | Avro = ""
    value: Json | Raw | Avro = field(default_factory=Json)
    transaction_timeout_ms: int = DEFAULT_TRANSACTION_TIMEOUT_MS
    on_oversize: BadRecordPolicy | None = None
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    producer: Mapping[str, str] = field(default_factory=dict, repr=False)
    writer: str | Engine = Engine.JVM
    barriers: BarrierRecords = BarrierRecords.NONE
    delivery: DeliveryGuarantee = DeliveryGuarantee.EXACTLY_ONCE
    headers: Mapping[str, str] | str = field(default_factory=dict)
    timestamp: str = ""
    partition: str = ""
    topic_column: str = ""
    other_topics: Sequence[str] = ()
    on_bad_record: BadRecordPolicy = OnBadRecord.FAIL
    record_headers: RecordHeaders = RecordHeaders.NONE

    def __post_init__(self) -> None:
        object.__setattr__(self, "writer", Engine.of(self.writer, "writer"))
        object.__setattr__(self, "barriers", _barriers(self.barriers))
        instance_of(
            "delivery", self.delivery, DeliveryGuarantee, what_to_do="use DeliveryGuarantee.EXACTLY_ONCE"
        )
        instance_of(
            "record_headers", self.record_headers, RecordHeaders, what_to_do="use RecordHeaders.BATCH"
        )
        require_positive("transaction_timeout_ms", self.transaction_timeout_ms)
        if not self.topic:
            raise ConfigError("the Kafka sink has no topic", what_to_do="name an existing topic")
        for name, form in (("key", self.key_format), ("value", self.value)):
            if form is not None and not isinstance(form, Json | Raw | Avro):
                raise ConfigError(f"{name} is {form!r}", what_to_do='use Json(), Avro(...) or Raw("column")')
        self._check_topics()
        self._check_headers()
        for name in ("options", "producer"):
            values_by_name(name, getattr(self, name), what_to_do="give a dict of Kafka's settings")
        for name, policy in (("on_bad_record", self.on_bad_record), ("on_oversize", self.oversize_policy)):
            if not isinstance(policy, BadRecordPolicy):
                raise ConfigError(
                    f"{name} is {type(policy).__name__}",
                    what_to_do="use OnBadRecord.FAIL or DeadLetter(topic)",
                )
        if any(isinstance(one, DeadLetter) and one.transaction_timeout_ms for one in self._policies):
            raise ConfigError(
                "a dead letter of a Kafka sink has a transaction_timeout_ms",
                why="it is written in the transactions of its sink",
                what_to_do="give it to the sink",
            )
        check_producer(self.producer, self.delivery)

    def _check_topics(self) -> None:
        others = self.other_topics
        if isinstance(others, str) or not all(isinstance(name, str) and name for name in others):
            raise ConfigError(f"other_topics is {others!r}", what_to_do='give a list: other_topics=["late"]')
        object.__setattr__(self, "other_topics", tuple(dict.fromkeys(others)))
        if self.other_topics and not self.topic_column:
            raise ConfigError(
                "other_topics is given and topic_column is not", what_to_do="name the column with the topic"
            )
        if self.barriers is BarrierRecords.NONE:
            return
        if self.delivery is not DeliveryGuarantee.EXACTLY_ONCE:
            raise ConfigError(
                f"barrier records cannot be written with DeliveryGuarantee.{self.delivery.name}",
                why="a barrier record says that everything before it belongs to its checkpoint",
                what_to_do="use DeliveryGuarantee.EXACTLY_ONCE, or leave barriers out",
            )
        if self.topic_column:
            raise ConfigError(
                "barrier records cannot be written by a sink with a topic_column",
                why="they go into the partitions of one topic",
                what_to_do="use a sink for each topic, or leave barriers out",
            )

    def _check_headers(self) -> None:
        if isinstance(self.headers, str):
            return
        for name, column in self.headers.items():
            is_text = isinstance(name, str) and isinstance(column, str)
            if not is_text or not name or not column or name.startswith(_OUR_HEADERS):
                raise ConfigError(
                    f"headers has the entry {name!r}: {column!r}",
                    why=f"names beginning with '{_OUR_HEADERS}' are the sink's own",
                    what_to_do='give names of headers with their columns: headers={"trace": "trace_id"}',
                )

    @property
    def needs_shim(self) -> bool:
        """Whether the JAR's writer is used."""
        return self.writer is Engine.JVM

    @property
    def key_format(self) -> Json | Raw | Avro | None:
        """How the key is made; None for no key."""
        if isinstance(self.key, str):
            return Raw(self.key) if self.key else None
        return self.key

    @property
    def oversize_policy(self) -> BadRecordPolicy:
        """What becomes of records that are too large."""
        return self.on_bad_record if self.on_oversize is None else self.on_oversize

    @property
    def data_topics(self) -> tuple[str, ...]:
        """The topics of records that are written as they are."""
        return tuple(dict.fromkeys((self.topic, *self.other_topics)))

    @property
    def dead_letter_topics(self) -> tuple[str, ...]:
        """The topics of refused records."""
        return tuple(dict.fromkeys(one.topic for one in self._policies if isinstance(one, DeadLetter)))

    @property
    def _policies(self) -> tuple[BadRecordPolicy, BadRecordPolicy]:
        return self.oversize_policy, self.on_bad_record

    @property
    def topics(self) -> tuple[str, ...]:
        """Every topic that is written, those of dead letters included."""
        return tuple(dict.fromkeys((*self.data_topics, *self.dead_letter_topics)))

    @cached_property
    def connection(self) -> KafkaConnection:
        """How the brokers are reached."""
        return KafkaConnection(self.bootstrap_servers, self.options)

    def producer_option(self, name: str) -> str | None:
        """Return a producer's setting by Kafka's name, however it was spelt; None if it is not set."""
        return self.producer.get(name, self.producer.get(f"kafka.{name}"))

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


def _barriers(value: object) -> BarrierRecords:
    try:
        return BarrierRecords(value)
    except ValueError:
        names = " or ".join(f"BarrierRecords.{one.name}" for one in BarrierRecords)
        raise ConfigError(f"barriers is {value!r}", what_to_do=f"use {names}") from None
