"""The Kafka sink: one transaction per task and micro-batch, committed with the checkpoint.

Tasks write in Python and leave the transaction open; the driver ends it later by its handle (transactional
id, producer id, epoch). A handle never names another transaction: each task attempt has an id of its own,
InitProducerId precedes every transaction, and an id is used again only after the checkpoint's receipt.
Under a weaker `DeliveryGuarantee` there are no transactions.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import SparkSession

from flinkish_spark.connectors.kafka.atomic import AtomicWriter, check_atomic
from flinkish_spark.connectors.kafka.client.admin import PREFLIGHT_TIMEOUT_MS, KafkaAdmin, warn_of_old_times
from flinkish_spark.connectors.kafka.client.barriers import BarrierRecords
from flinkish_spark.connectors.kafka.client.client import KafkaWire
from flinkish_spark.connectors.kafka.client.codecs import require_codec
from flinkish_spark.connectors.kafka.client.marks import KafkaMarks
from flinkish_spark.connectors.kafka.client.produce import ProduceClient
from flinkish_spark.connectors.kafka.client.settings import DeliveryGuarantee, ProducerSettings
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.connectors.kafka.record_encoder import check_columns
from flinkish_spark.connectors.kafka.sink_settings import KafkaSinkSettings
from flinkish_spark.connectors.kafka.writer import KafkaCommitter, KafkaWriter
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.contracts.sink import Committer, Sink, SinkContext, SinkWriter
from flinkish_spark.core.config import CheckpointingMode
from flinkish_spark.core.errors import AuthorizationError, ConfigError, raise_translated
from flinkish_spark.protocol.ids import OwnerEpoch, TransactionalId

_SETTING = "transaction.max.timeout.ms"


def add_advice(refused: ConfigError, uid: str, needed_ms: int) -> ConfigError:
    """Return the error of a transaction timeout that the brokers refuse, with advice for this sink."""
    timeout_ms, maximum_ms = refused.facts.get("timeout_ms"), refused.facts.get("maximum_ms")
    if timeout_ms is None:
        return refused
    advice = f"raise {_SETTING} of the brokers to {timeout_ms} or more"
    if not isinstance(maximum_ms, int):
        advice += f", or lower transaction_timeout_ms, to {needed_ms} at the lowest"
    elif maximum_ms >= needed_ms:
        advice += f", or lower transaction_timeout_ms to {maximum_ms}"
    else:
        advice = (
            f"raise {_SETTING} of the brokers to {needed_ms} or more, or lower interval_ms + "
            f"restart_budget_ms to {maximum_ms} or less, and set transaction_timeout_ms in between"
        )
    return ConfigError(
        f"the transaction timeout of sink '{uid}' is {timeout_ms} ms, which the brokers do not allow",
        why=refused.why,
        what_to_do=advice,
        **refused.facts,
    )


@dataclass(frozen=True)
class KafkaSink(KafkaSinkSettings, Sink):
    """Write to Kafka topics, exactly once for readers with ``isolation.level=read_committed``.

    `docs/kafka-sink.md` explains what a null means in each part of a record.

    Parameters
    ----------
    bootstrap_servers
        ``"host:port,host:port"``.
    topic
        An existing topic, for records that name no other.
    key
        Column with the record key (BINARY, or any other type written as text), or a format with the key's
        fields, such as ``Json("user STRING")``; empty for no key.
    value
        The format, see `docs/formats.md`: ``Json()`` writes all fields as a JSON object, ``Json("user
        STRING")`` those that it names, ``Csv(...)`` a line, ``Avro(schema)`` a record of its schema,
        ``Protobuf(...)`` a message, ``JsonSchema(...)`` an object that is valid, ``String("column")`` and
        ``Raw("column")`` one column.
    transaction_timeout_ms
        How long staged data may wait for its checkpoint, restarts included; at most the broker's
        transaction.max.timeout.ms, at least interval + restart budget. Ignored without transactions.
    on_oversize
        Policy for a record larger than the topic takes; None: the policy of `on_bad_record`.
    options
        Connection and security options under Kafka's or Spark's names.
    producer
        Further settings of the producer, such as ``{"compression.type": "zstd"}``.
    writer
        ``"python"`` or None: tasks write in Python and need no JAR.
    barriers
        ``BarrierRecords.EACH_CHECKPOINT`` writes one barrier record per partition and checkpoint, to
        which a downstream chained job can align (`docs/chained-jobs.md`). Other readers have to skip
        records without a value. Needs EXACTLY_ONCE and a single topic.
    delivery
        The guarantee for the records; it may change between two starts of a job.
    headers
        Name of a header -> the column (STRING or BINARY) with its value. Or one column with all headers:
        ``ARRAY<STRUCT<key: STRING, value: BINARY>>``, in their order; or ``MAP<STRING, BINARY>``,
        or ``MAP<STRING, ARRAY<BINARY>>`` where a name comes more than once.
    timestamp
        Column (TIMESTAMP, or BIGINT in milliseconds since 1970) with the record's timestamp.
    partition
        Column (INT) with the record's partition.
    topic_column
        Column (STRING) with the record's topic: `topic` or one of `other_topics`.
    other_topics
        Further existing topics that records may name, besides `topic`.
    on_bad_record
        Policy for a record that cannot be written: it names an undeclared topic or a partition that does
        not exist, its timestamp is before 1970, after 9999 or beyond its topic's limits, it does not fit
        its schema, a header has no name, it has no key and the topic is compacted, or it is a change
        without a row kind or a key.
    record_headers
        The headers that the sink adds to each record. With `BATCH` readers can tell, after a rewind to an
        older checkpoint, which records the rewind gave up.
    row_kind
        Column with the row kind of a changelog, ``"_row_kind"``: -D and -U become tombstones, +I and +U
        records with a value. `key` identifies the row; the column itself is not written. Like Flink's
        `upsert-kafka`, for topics that are compacted by key.
    atomic
        Whether a checkpoint is one transaction, including the offsets of the sources' groups: readers of
        all partitions see it whole or not at all. Needs EXACTLY_ONCE, no dead letters, no barrier records,
        Kafka 3.7 or later and the right to READ the topics (`docs/kafka-sink.md`).
    """

    def datasets(self) -> tuple[Dataset, ...]:
        return Dataset.from_topics(self.connection.servers, self.data_topics)

    def why_needs_session(self) -> str:
        """Return why an atomic sink does: the driver plans the records of all tasks."""
        return "its tasks share one transaction (atomic=True)" if self.atomic else ""

    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Check columns, formats, settings, topics, rights and timeouts before the start."""
        who = f"sink '{context.uid}'"
        check_columns(self, context.schema, context.uid)
        for part, form in self.formats:
            fields = self.fields_of(context.schema)
            form.check_start(spark, fields, f"the {part} of {who}")
            form.make_writer(fields, self.data_topics, part)  # Raises if a registry refuses the schema.
        given = context.checkpoint
        if self.barriers is not BarrierRecords.NONE and given.mode is CheckpointingMode.AT_LEAST_ONCE:
            # In this mode records of a checkpoint can follow its barrier record.
            what = f"the {who} writes barrier records, and checkpoints have CheckpointingMode.AT_LEAST_ONCE"
            to_do = "use CheckpointingMode.EXACTLY_ONCE, or leave barriers out"
            raise ConfigError(what, what_to_do=to_do)
        least = given.replay_ms
        if self.delivery is DeliveryGuarantee.EXACTLY_ONCE and self.transaction_timeout_ms < least:
            raise ConfigError(
                f"the transaction timeout of sink '{context.uid}' is {self.transaction_timeout_ms} ms, "
                f"shorter than checkpoint interval + restart budget = {least} ms",
                why="the broker would abort staged data while the job restarts",
                what_to_do=f"set transaction_timeout_ms to {least} or more, or lower restart_budget_ms",
            )
        require_codec(ProducerSettings.of(self.producer, self.delivery).codec)
        wire = KafkaWire(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS)
        with KafkaAdmin.from_wire(wire) as admin:
            found = admin.find_existing(self.topics, who, self.dead_letter_topics)
            if self.timestamp:
                warn_of_old_times(found, self.data_topics, who)
            client = ProduceClient(wire)
            denied = wire.call(
                "ask for rights on topics", lambda _admin: client.find_unwritable_topics(self.topics)
            )
            if denied:
                raise AuthorizationError(
                    f"Kafka refuses this principal WRITE on the topic '{denied[0]}' of {who}",
                    what_to_do="add an ACL that allows WRITE and DESCRIBE on it",
                    topic=denied[0],
                )
            if self.atomic:
                check_atomic(self, spark, wire, context)
            if self.delivery is DeliveryGuarantee.EXACTLY_ONCE:
                # Block 0 of owner 0 is never leased, and its id has the prefix that ACLs are written for.
                probe = TransactionalId(context.job, OwnerEpoch(0), 0, 0, 0)
                try:
                    admin.probe_transactional_id(str(probe), self.transaction_timeout_ms)
                except ConfigError as refused:
                    raise_translated(add_advice(refused, context.uid, least), refused)

    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        tasks = KafkaWriter(self, context)
        return AtomicWriter(self, context, tasks) if self.atomic else tasks

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Create the committer; without transactions it still ends those of earlier starts."""
        wire = KafkaWire(self.connection)
        marks = None
        if self.topics and self.delivery is DeliveryGuarantee.EXACTLY_ONCE:
            marks = KafkaMarks(KafkaAdmin.from_wire(wire), context.job, context.uid, min(self.topics))
        committer = KafkaCommitter(TransactionClient.from_wire(wire), context, marks, shows_whole=self.atomic)
        committer.staged_lifetime_ms = self.transaction_timeout_ms
        return committer
