"""The Kafka sink: one transaction per task and micro-batch, committed with the checkpoint.

Tasks write in Python and leave the transaction open; the driver ends it later from its handle (transactional
id, producer id, epoch). Each task attempt has an id of its own,
InitProducerId comes before every transaction, and an id is used again only after the receipt, so a handle can
never name somebody else's transaction. Under a weaker `DeliveryGuarantee` there are no transactions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pyspark.sql import SparkSession
from pyspark.sql import types as T

from flinkish_spark.connectors.formats.encoding import check_written
from flinkish_spark.connectors.kafka.atomic import AtomicWriter, check_atomic
from flinkish_spark.connectors.kafka.client.admin import (
    PREFLIGHT_TIMEOUT_MS,
    KafkaAdmin,
    check_letters_stay,
    unknown_topic,
    warn_of_old_times,
)
from flinkish_spark.connectors.kafka.client.barriers import BarrierRecords
from flinkish_spark.connectors.kafka.client.batches import require_codec
from flinkish_spark.connectors.kafka.client.client import KafkaWire, ProduceClient
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection, is_connection_option
from flinkish_spark.connectors.kafka.client.marks import KafkaMarks
from flinkish_spark.connectors.kafka.client.settings import (
    PRODUCER_SETTINGS,
    DeliveryGuarantee,
    ProducerSettings,
    RecordHeaders,
)
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.connectors.kafka.record_encoder import check_columns
from flinkish_spark.connectors.kafka.writer import KafkaCommitter, KafkaWriter
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.contracts.sink import Committer, Sink, SinkContext, SinkWriter
from flinkish_spark.core.config import CheckpointingMode, require_positive
from flinkish_spark.core.errors import AuthorizationError, ConfigError, raise_translated
from flinkish_spark.core.formats import (
    BadRecordPolicy,
    DeadLetter,
    Format,
    Json,
    OnBadRecord,
    Raw,
    check_format,
    check_policy,
)
from flinkish_spark.core.validation import hold_plain_values, instance_of, values_by_name
from flinkish_spark.protocol.choices import closest
from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.protocol.ids import OwnerEpoch, TransactionalId

#: The broker's default for transaction.max.timeout.ms.
DEFAULT_TRANSACTION_TIMEOUT_MS = 900_000
#: Headers that are ours to write.
_OUR_HEADERS = "flinkish-"
#: Settings that are the sink's own.
_OWN = frozenset(
    {
        "bootstrap.servers",
        "key.serializer",
        "transaction.timeout.ms",
        "transaction.two.phase.commit.enable",
        "transactional.id",
        "value.serializer",
    }
)
#: Setting -> the values that leave idempotence as it is.
_IDEMPOTENT: Mapping[str, frozenset[str]] = {
    "acks": frozenset({"all", "-1"}),
    "enable.idempotence": frozenset({"true"}),
    "max.in.flight.requests.per.connection": frozenset("12345"),
}
_SETTING = "transaction.max.timeout.ms"
_EXACTLY_ONCE = DeliveryGuarantee.EXACTLY_ONCE


def with_advice(refused: ConfigError, uid: str, needed_ms: int) -> ConfigError:
    """Return a broker's refusal of a sink's transaction timeout, with what helps."""
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
        Column that becomes the record key (as its string; BINARY as it is), or a format for the fields that
        it names, such as ``Json("user STRING")``; empty for no key.
    value
        The format, see `docs/formats.md`: ``Json()`` writes all fields as a JSON object, ``Json("user
        STRING")`` those that it names, ``Csv(...)`` a line, ``Avro(schema)`` a record of its schema,
        ``Protobuf(...)`` a message, ``JsonSchema(...)`` an object that is valid, ``String("column")`` and
        ``Raw("column")`` one column.
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
        ``"python"``, or None: tasks write in Python, and need no JAR.
    barriers
        ``BarrierRecords.EACH_CHECKPOINT`` writes one barrier record per partition and checkpoint, which
        a job chained behind this one can align on (`docs/chained-jobs.md`). Other readers have to
        skip records without value. Needs EXACTLY_ONCE and a single topic.
    delivery
        What is promised about the records; may differ from one start of a job to the next.
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
        The topics, beside `topic`, that records may name; they exist.
    on_bad_record
        What to do with a record that names a topic that is not declared or a partition that there is
        not, has a timestamp before 1970, after 9999 or beyond its topic's limits, does not fit its schema,
        has a header without a name, has no key where the topic is compacted, or is a change without a row
        kind or a key.
    record_headers
        Which headers of ours each record carries. `BATCH` tells readers, after a rewind to an older
        checkpoint, which records are left over from what was given up.
    row_kind
        Of a changelog, the column with the kinds of its rows, ``"_row_kind"``: -D and -U are tombstones, +I
        and +U records with a value. `key` says which row it is; the column is not written. As Flink's
        `upsert-kafka`, for topics that are compacted by key.
    atomic
        Whether a checkpoint is one transaction, with the offsets of the sources' groups in it: readers of
        all partitions see it whole or not at all. Wants EXACTLY_ONCE, no dead letters, no barrier records,
        Kafka 3.7 or later and the right to READ the topics (`docs/kafka-sink.md`).
    """

    bootstrap_servers: str
    topic: str
    key: str | Format = ""
    value: Format = field(default_factory=Json)
    transaction_timeout_ms: Milliseconds = DEFAULT_TRANSACTION_TIMEOUT_MS
    on_oversize: BadRecordPolicy | None = None
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    producer: Mapping[str, str] = field(default_factory=dict, repr=False)
    writer: str | None = None
    barriers: BarrierRecords = BarrierRecords.NONE
    delivery: DeliveryGuarantee = DeliveryGuarantee.EXACTLY_ONCE
    headers: Mapping[str, str] | str = field(default_factory=dict)
    timestamp: str = ""
    partition: str = ""
    topic_column: str = ""
    other_topics: Sequence[str] = ()
    on_bad_record: BadRecordPolicy = OnBadRecord.FAIL
    record_headers: RecordHeaders = RecordHeaders.NONE
    row_kind: str = ""
    atomic: bool = False

    def __post_init__(self) -> None:
        hold_plain_values(self)
        if self.writer not in (None, "python"):
            raise ConfigError(
                f"writer is {self.writer!r}",
                why="tasks write to Kafka in Python",
                what_to_do="leave writer out",
            )
        object.__setattr__(self, "writer", "python")
        for name, kind, to_do in (
            ("barriers", BarrierRecords, "use BarrierRecords.EACH_CHECKPOINT, or leave it out"),
            ("delivery", DeliveryGuarantee, "use DeliveryGuarantee.EXACTLY_ONCE"),
            ("record_headers", RecordHeaders, "use RecordHeaders.BATCH"),
            ("atomic", bool, "use atomic=True, or leave it out"),
        ):
            instance_of(name, getattr(self, name), kind, what_to_do=to_do)
        require_positive("transaction_timeout_ms", self.transaction_timeout_ms)
        if not self.topic:
            raise ConfigError("the Kafka sink has no topic", what_to_do="name an existing topic")
        for name, form in self._formats:
            check_format(name, form)
        for name in ("options", "producer"):
            values_by_name(name, getattr(self, name), what_to_do="give a dict of Kafka's settings")
        for name, policy in (("on_bad_record", self.on_bad_record), ("on_oversize", self.oversize_policy)):
            check_policy(name, policy)
        self._check_names()
        self._check_together()
        self._check_producer()
        _ = self.connection  # Raises if servers or options cannot be used.

    def _check_names(self) -> None:
        others = self.other_topics
        if isinstance(others, str) or not all(isinstance(name, str) and name for name in others):
            raise ConfigError(f"other_topics is {others!r}", what_to_do='give a list: other_topics=["late"]')
        object.__setattr__(self, "other_topics", tuple(dict.fromkeys(others)))
        for name, column in () if isinstance(self.headers, str) else self.headers.items():
            is_text = isinstance(name, str) and isinstance(column, str)
            if not is_text or not name or not column or name.startswith(_OUR_HEADERS):
                raise ConfigError(
                    f"headers has the entry {name!r}: {column!r}",
                    why=f"names beginning with '{_OUR_HEADERS}' are the sink's own",
                    what_to_do='give names of headers with their columns: headers={"trace": "trace_id"}',
                )

    def _check_together(self) -> None:
        """Refuse settings that contradict each other."""
        has_barriers, is_exact = self.barriers is not BarrierRecords.NONE, self.delivery is _EXACTLY_ONCE
        letters = self.dead_letter_topics
        for is_wrong, what, why, what_to_do in (
            (
                self.row_kind and self.key_format is None,
                "row_kind is given, and the Kafka sink has no key",
                "a tombstone says by its key which row is gone",
                'name the key: key=Json("id LONG")',
            ),
            (
                self.other_topics and not self.topic_column,
                "other_topics is given and topic_column is not",
                "",
                "name the column with the topic",
            ),
            (
                any(isinstance(one, DeadLetter) and one.transaction_timeout_ms for one in self._policies),
                "a dead letter of a Kafka sink has a transaction_timeout_ms",
                "it is written in the transactions of its sink",
                "give it to the sink",
            ),
            (
                has_barriers and not is_exact,
                f"barrier records cannot be written with DeliveryGuarantee.{self.delivery.name}",
                "a barrier record says that everything before it belongs to its checkpoint",
                "use DeliveryGuarantee.EXACTLY_ONCE, or leave barriers out",
            ),
            (
                has_barriers and self.topic_column,
                "barrier records cannot be written by a sink with a topic_column",
                "they go into the partitions of one topic",
                "use a sink for each topic, or leave barriers out",
            ),
            (
                self.atomic and not is_exact,
                f"a sink cannot be atomic with DeliveryGuarantee.{self.delivery.name}",
                "then it has no transactions",
                "use DeliveryGuarantee.EXACTLY_ONCE, or leave atomic out",
            ),
            (
                self.atomic and has_barriers,
                "a sink with barrier records cannot be atomic",
                "they are in a transaction of their own, so that readers would see them apart",
                "leave out barriers or atomic",
            ),
            (
                self.atomic and letters,
                f"an atomic sink cannot write dead letters (to {', '.join(map(repr, letters))})",
                "each partition has one task that writes it, and any task may have a letter to write",
                "sort records out in front of the sink and write them with another one, use "
                "OnBadRecord.FAIL or OnBadRecord.DROP, or leave atomic out",
            ),
        ):
            if is_wrong:
                raise ConfigError(what, why=why, what_to_do=what_to_do)

    def _check_producer(self) -> None:
        """Refuse settings of the producer that are the sink's own, or that break what it promises."""
        for given, value in self.producer.items():
            name = given.removeprefix("kafka.")
            what, why, what_to_do = "", "", "leave it out"
            if name in _OWN:
                what, why = "cannot be set", "the sink sets it itself, and exactly-once depends on it"
                what_to_do = "use the sink's own parameters, or leave it out"
            elif name not in PRODUCER_SETTINGS:
                what, why = "is not known", "a setting is taken if it changes nothing that the sink promises"
                what_to_do = closest(name, PRODUCER_SETTINGS) or what_to_do
                if is_connection_option(name):
                    what_to_do = f"give it to options: options={{'{name}': ...}}"
            elif not isinstance(value, str):
                what, what_to_do = "must be text", "write it in quotes"
            elif self.delivery is not DeliveryGuarantee.NONE:
                allowed, text = _IDEMPOTENT.get(name), value.strip().lower()
                if (allowed is not None and text not in allowed) or (name == "retries" and text == "0"):
                    what, why = (
                        "cannot have this value",
                        f"DeliveryGuarantee.{self.delivery.name} depends on it",
                    )
                    what_to_do = "leave it out, or use DeliveryGuarantee.NONE"
            if what:
                raise ConfigError(
                    f"the producer setting '{given}' {what}", why=why, what_to_do=what_to_do, setting=given
                )

    @property
    def key_format(self) -> Format | None:
        """How the key is made; None for no key."""
        if isinstance(self.key, str):
            return Raw(self.key) if self.key else None
        return self.key

    @property
    def _formats(self) -> list[tuple[str, Format]]:
        """The parts of a record that there are, with their formats."""
        key = self.key_format
        return [*([] if key is None else [("key", key)]), ("value", self.value)]

    def fields_of(self, schema: T.StructType) -> T.StructType:
        """Return the fields of a stream that are a record's: all but the one with the kinds of rows."""
        return T.StructType([one for one in schema if one.name != self.row_kind])

    @property
    def oversize_policy(self) -> BadRecordPolicy:
        return self.on_bad_record if self.on_oversize is None else self.on_oversize

    @property
    def data_topics(self) -> tuple[str, ...]:
        """The topics of records that are written as they are."""
        return tuple(dict.fromkeys((self.topic, *self.other_topics)))

    @property
    def _policies(self) -> tuple[BadRecordPolicy, BadRecordPolicy]:
        return self.oversize_policy, self.on_bad_record

    @property
    def dead_letter_topics(self) -> tuple[str, ...]:
        """The topics of refused records."""
        return tuple(dict.fromkeys(one.topic for one in self._policies if isinstance(one, DeadLetter)))

    @property
    def topics(self) -> tuple[str, ...]:
        """Every topic that is written, those of dead letters included."""
        return tuple(dict.fromkeys((*self.data_topics, *self.dead_letter_topics)))

    @cached_property
    def connection(self) -> KafkaConnection:
        return KafkaConnection(self.bootstrap_servers, self.options)

    def producer_option(self, name: str) -> str | None:
        """Return a producer's setting by Kafka's name, however it was spelt; None if it is not set."""
        return self.producer.get(name, self.producer.get(f"kafka.{name}"))

    def datasets(self) -> tuple[Dataset, ...]:
        return Dataset.of_topics(self.connection.servers, self.data_topics)

    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Refuse columns, formats, settings, topics, rights and timeouts that cannot work."""
        who = f"sink '{context.uid}'"
        check_columns(self, context.schema, context.uid)
        for part, form in self._formats:
            fields = self.fields_of(context.schema)
            check_written(spark, form, fields, self.data_topics, part, f"the {part} of {who}")
        self._check_checkpoints(context)
        require_codec(ProducerSettings.of(self.producer, self.delivery).codec)
        wire = KafkaWire(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS)
        with KafkaAdmin.over(wire) as admin:
            found = admin.topics(self.topics)
            for topic in self.topics:
                if topic not in found:
                    raise unknown_topic(topic, self.connection.servers, of=who)
            check_letters_stay(found, self.dead_letter_topics, who)
            if self.timestamp:
                warn_of_old_times(found, self.data_topics, who)
            client = ProduceClient(wire)
            denied = wire.call("ask for rights on topics", lambda _admin: client.unwritable(self.topics))
            if denied:
                raise AuthorizationError(
                    f"Kafka refuses this principal WRITE on the topic '{denied[0]}' of {who}",
                    what_to_do="add an ACL that allows WRITE and DESCRIBE on it",
                    topic=denied[0],
                )
            if self.atomic:
                check_atomic(self, spark, wire, context)
            if self.delivery is _EXACTLY_ONCE:
                # Block 0 of owner 0 is never leased, and it has the prefix that ACLs are written for.
                probe = TransactionalId(context.job, OwnerEpoch(0), 0, 0, 0)
                needed_ms = context.checkpoint.interval_ms + context.checkpoint.restart_budget_ms
                try:
                    admin.probe_transactional_id(str(probe), self.transaction_timeout_ms)
                except ConfigError as refused:
                    raise_translated(with_advice(refused, context.uid, needed_ms), refused)

    def _check_checkpoints(self, context: SinkContext) -> None:
        given = context.checkpoint
        if self.barriers is not BarrierRecords.NONE and given.mode is CheckpointingMode.AT_LEAST_ONCE:
            raise ConfigError(
                f"the sink '{context.uid}' writes barrier records, and the job's checkpoints have "
                "CheckpointingMode.AT_LEAST_ONCE",
                why="then a branch may stage records of a checkpoint behind the barrier record of it",
                what_to_do="use CheckpointingMode.EXACTLY_ONCE, or leave barriers out",
            )
        least = given.interval_ms + given.restart_budget_ms
        if self.delivery is _EXACTLY_ONCE and self.transaction_timeout_ms < least:
            raise ConfigError(
                f"the transaction timeout of sink '{context.uid}' is {self.transaction_timeout_ms} ms, "
                f"shorter than checkpoint interval + restart budget = {least} ms",
                why="the broker would abort staged data while the job restarts",
                what_to_do=f"set transaction_timeout_ms to {least} or more, or lower restart_budget_ms",
            )

    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        tasks = KafkaWriter(self, context)
        return AtomicWriter(self, context, tasks) if self.atomic else tasks

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Return the committing half; without transactions it ends those that an earlier start left."""
        wire = KafkaWire(self.connection)
        marks = None
        if self.topics and self.delivery is DeliveryGuarantee.EXACTLY_ONCE:
            marks = KafkaMarks(KafkaAdmin.over(wire), context.job, context.uid, min(self.topics))
        committer = KafkaCommitter(TransactionClient.over(wire), context, marks, shows_whole=self.atomic)
        committer.staged_lifetime_ms = self.transaction_timeout_ms
        return committer
