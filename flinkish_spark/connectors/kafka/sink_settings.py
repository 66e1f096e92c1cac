"""What a Kafka sink is told: topics, formats, columns, policies, the promise; checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pyspark.sql import types as T

from flinkish_spark.connectors.kafka.client.barriers import BarrierRecords
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection, is_connection_option
from flinkish_spark.connectors.kafka.client.settings import (
    PRODUCER_SETTINGS,
    DeliveryGuarantee,
    RecordHeaders,
)
from flinkish_spark.core.config import require_positive
from flinkish_spark.core.errors import ConfigError
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


@dataclass(frozen=True)
class KafkaSinkSettings:
    """The parameters of :class:`~flinkish_spark.KafkaSink`, and what follows of them."""

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
        object.__setattr__(self, "writer", _writer(self.writer))
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
            if form is not None:
                check_format(name, form)
        if self.row_kind and self.key_format is None:
            raise ConfigError(
                "row_kind is given, and the Kafka sink has no key",
                why="a tombstone says by its key which row is gone",
                what_to_do='name the key: key=Json("id LONG")',
            )
        self._check_topics()
        self._check_headers()
        for name in ("options", "producer"):
            values_by_name(name, getattr(self, name), what_to_do="give a dict of Kafka's settings")
        for name, policy in (("on_bad_record", self.on_bad_record), ("on_oversize", self.oversize_policy)):
            check_policy(name, policy)
        if any(isinstance(one, DeadLetter) and one.transaction_timeout_ms for one in self._policies):
            raise ConfigError(
                "a dead letter of a Kafka sink has a transaction_timeout_ms",
                why="it is written in the transactions of its sink",
                what_to_do="give it to the sink",
            )
        check_producer(self.producer, self.delivery)
        _ = self.connection  # Raises if servers or options cannot be used.
        instance_of("atomic", self.atomic, bool, what_to_do="use atomic=True, or leave it out")
        if self.atomic:
            self._check_atomic()

    def _check_atomic(self) -> None:
        if self.delivery is not DeliveryGuarantee.EXACTLY_ONCE:
            raise ConfigError(
                f"a sink cannot be atomic with DeliveryGuarantee.{self.delivery.name}",
                why="then it has no transactions",
                what_to_do="use DeliveryGuarantee.EXACTLY_ONCE, or leave atomic out",
            )
        if self.barriers is not BarrierRecords.NONE:
            raise ConfigError(
                "a sink with barrier records cannot be atomic",
                why="they are in a transaction of their own, so that readers would see them apart",
                what_to_do="leave out barriers or atomic",
            )
        if self.dead_letter_topics:
            raise ConfigError(
                f"an atomic sink cannot write dead letters (to '{self.dead_letter_topics[0]}')",
                why="each partition has one task that writes it, and any task may have a letter to write",
                what_to_do="sort records out in front of the sink and write them with another one, use "
                "OnBadRecord.FAIL or OnBadRecord.DROP, or leave atomic out",
            )

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
    def key_format(self) -> Format | None:
        """How the key is made; None for no key."""
        if isinstance(self.key, str):
            return Raw(self.key) if self.key else None
        return self.key

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
        return KafkaConnection(self.bootstrap_servers, self.options)

    def producer_option(self, name: str) -> str | None:
        """Return a producer's setting by Kafka's name, however it was spelt; None if it is not set."""
        return self.producer.get(name, self.producer.get(f"kafka.{name}"))


def _writer(value: object) -> str:
    if value not in (None, "python"):
        raise ConfigError(
            f"writer is {value!r}", why="tasks write to Kafka in Python", what_to_do="leave writer out"
        )
    return "python"


def _barriers(value: object) -> BarrierRecords:
    try:
        return BarrierRecords(value)
    except ValueError:
        names = " or ".join(f"BarrierRecords.{one.name}" for one in BarrierRecords)
        raise ConfigError(f"barriers is {value!r}", what_to_do=f"use {names}") from None


def check_producer(producer: Mapping[str, str], guarantee: DeliveryGuarantee) -> None:
    """Refuse settings of the producer that are the sink's own, or that break what it promises."""
    for given, value in producer.items():
        name = str(given).removeprefix("kafka.")
        if name in _OWN:
            raise ConfigError(
                f"the producer setting '{given}' cannot be set",
                why="the sink sets it itself, and exactly-once depends on it",
                what_to_do="use the sink's own parameters, or leave it out",
                setting=given,
            )
        if name not in PRODUCER_SETTINGS:
            if is_connection_option(name):
                what_to_do = f"give it to options: options={{'{name}': ...}}"
            else:
                what_to_do = closest(name, PRODUCER_SETTINGS) or "leave it out"
            raise ConfigError(
                f"the producer setting '{given}' is not known",
                why="a setting is taken if it changes nothing that the sink promises",
                what_to_do=what_to_do,
                setting=given,
            )
        if not isinstance(value, str):
            raise ConfigError(
                f"the producer setting '{given}' must be text", what_to_do="write it in quotes", setting=given
            )
        if guarantee is DeliveryGuarantee.NONE:
            continue
        allowed, text = _IDEMPOTENT.get(name), value.strip().lower()
        if (allowed is not None and text not in allowed) or (name == "retries" and text == "0"):
            raise ConfigError(
                f"the producer setting '{given}' cannot have this value",
                why=f"DeliveryGuarantee.{guarantee.name} depends on it",
                what_to_do="leave it out, or use DeliveryGuarantee.NONE",
                setting=given,
            )
