"""Parameters of a Kafka sink and their checks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

from pyspark.sql import types as T

from flinkish_spark.connectors.kafka.client.barriers import BarrierRecords
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.settings import DeliveryGuarantee, ProducerSettings, RecordHeaders
from flinkish_spark.connectors.plain_formats import Json, Raw
from flinkish_spark.contracts.format import FORMATS, Format
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.fields import Name, Names, Range, check_fields
from flinkish_spark.core.formats import BadRecordPolicy, DeadLetter, OnBadRecord
from flinkish_spark.core.validation import values_by_name
from flinkish_spark.protocol.durations import Milliseconds

#: The broker's default for transaction.max.timeout.ms.
DEFAULT_TRANSACTION_TIMEOUT_MS = 900_000
#: Prefix of the headers that the sink writes itself.
_OUR_HEADERS = "flinkish-"
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
#: Producer setting -> a pattern of its values that keep the producer idempotent.
_IDEMPOTENT = {
    "acks": "all|-1",
    "enable.idempotence": "true",
    "max.in.flight.requests.per.connection": "[1-5]",
    "retries": "(?!0$).*",
}


@dataclass(frozen=True)
class KafkaSinkSettings:
    """Parameters of :class:`~flinkish_spark.KafkaSink`, checked, and values derived from them."""

    bootstrap_servers: str
    topic: Name
    key: str | Format | None = ""
    value: Format = field(default_factory=Json)
    transaction_timeout_ms: Annotated[Milliseconds, Range(1)] = DEFAULT_TRANSACTION_TIMEOUT_MS
    on_oversize: BadRecordPolicy | None = None
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    producer: Mapping[str, str] = field(default_factory=dict, repr=False)
    writer: Literal["python"] | None = None
    barriers: BarrierRecords = BarrierRecords.NONE
    delivery: DeliveryGuarantee = DeliveryGuarantee.EXACTLY_ONCE
    headers: Mapping[str, str] | str = field(default_factory=dict)
    timestamp: str = ""
    partition: str = ""
    topic_column: str = ""
    other_topics: Names = ()
    on_bad_record: BadRecordPolicy = OnBadRecord.FAIL
    record_headers: RecordHeaders = RecordHeaders.NONE
    row_kind: str = ""
    atomic: bool = False

    def __post_init__(self) -> None:
        check_fields(
            self, value=FORMATS, key=FORMATS, writer="leave writer out", topic="name an existing topic"
        )
        object.__setattr__(self, "writer", "python")
        for name in ("options", "producer"):
            values_by_name(name, getattr(self, name), what_to_do="give a dict of Kafka's settings")
        object.__setattr__(self, "other_topics", tuple(dict.fromkeys(self.other_topics)))
        for name, column in () if isinstance(self.headers, str) else self.headers.items():
            if not name or not column or name.startswith(_OUR_HEADERS):
                raise ConfigError(
                    f"headers has the entry {name!r}: {column!r}",
                    why=f"names beginning with '{_OUR_HEADERS}' are the sink's own",
                    what_to_do='give names of headers with their columns: headers={"trace": "trace_id"}',
                )
        for is_wrong, what, what_to_do in self._contradictions():
            if is_wrong:
                raise ConfigError(what, what_to_do=what_to_do)
        self._check_producer()
        _ = self.connection  # Raises if servers or options cannot be used.

    def _contradictions(self) -> Iterator[tuple[object, str, str]]:
        """Yield settings that contradict each other, as true or false, with an error and what to do."""
        letters, guarantee = self.dead_letter_topics, f"DeliveryGuarantee.{self.delivery.name}"
        has_barriers, exact = self.barriers is not BarrierRecords.NONE, "use DeliveryGuarantee.EXACTLY_ONCE"
        is_exact = self.delivery is DeliveryGuarantee.EXACTLY_ONCE
        has_key = self.key_format is not None
        lasts = any(isinstance(one, DeadLetter) and one.transaction_timeout_ms for one in self._policies)
        what = "row_kind is given, and the sink has no key, which says the row that a tombstone deletes"
        yield self.row_kind and not has_key, what, 'name the key: key=Json("id LONG")'
        what = "other_topics is given and topic_column is not"
        yield self.other_topics and not self.topic_column, what, "name the column with the topic"
        what = "a DeadLetter has transaction_timeout_ms, and is written in the transactions of its sink"
        yield lasts, what, "give it to the sink"
        what = (
            f"barriers is given, and with {guarantee} records of a checkpoint may follow its barrier record"
        )
        yield has_barriers and not is_exact, what, f"{exact}, or leave barriers out"
        what = "barriers is given and topic_column too: barrier records go into the partitions of one topic"
        yield has_barriers and self.topic_column, what, "use a sink for each topic, or leave barriers out"
        what = f"atomic is given, and with {guarantee} there are no transactions"
        yield self.atomic and not is_exact, what, f"{exact}, or leave atomic out"
        what = "atomic is given and barriers too: barrier records are in a transaction of their own"
        yield self.atomic and has_barriers, what, "leave out barriers or atomic"
        what = (
            f"an atomic sink has dead letters (to {', '.join(map(repr, letters))}), which any task may write"
        )
        yield self.atomic and letters, what, "sort records out in front of the sink, or leave atomic out"

    def _check_producer(self) -> None:
        """Refuse producer settings that the sink sets itself, or that break its guarantee."""
        allowed = {} if self.delivery is DeliveryGuarantee.NONE else _IDEMPOTENT
        for given, value in self.producer.items():
            what, name = "", given.removeprefix("kafka.")
            if name in _OWN:
                what = "cannot be set: the sink sets it itself, by parameters of its own"
            elif name in allowed and not re.fullmatch(allowed[name], str(value).strip().lower()):
                what = f"cannot have this value: DeliveryGuarantee.{self.delivery.name} depends on it"
            if what:
                raise ConfigError(f"the producer setting '{given}' {what}", what_to_do="leave it out")
        ProducerSettings.of(self.producer, self.delivery)

    @property
    def key_format(self) -> Format | None:
        if isinstance(self.key, str):
            return Raw(self.key) if self.key else None
        return self.key

    @property
    def formats(self) -> list[tuple[str, Format]]:
        key = self.key_format
        return [*([] if key is None else [("key", key)]), ("value", self.value)]

    def fields_of(self, schema: T.StructType) -> T.StructType:
        """Return the fields that are written: all but the column with the row kind."""
        return T.StructType([one for one in schema if one.name != self.row_kind])

    @property
    def oversize_policy(self) -> BadRecordPolicy:
        return self.on_bad_record if self.on_oversize is None else self.on_oversize

    @property
    def data_topics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.topic, *self.other_topics)))

    @property
    def _policies(self) -> tuple[BadRecordPolicy, BadRecordPolicy]:
        return self.oversize_policy, self.on_bad_record

    @property
    def dead_letter_topics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.topic for one in self._policies if isinstance(one, DeadLetter)))

    @property
    def topics(self) -> tuple[str, ...]:
        """Every topic that the sink writes to, those of dead letters included."""
        return tuple(dict.fromkeys((*self.data_topics, *self.dead_letter_topics)))

    @cached_property
    def connection(self) -> KafkaConnection:
        return KafkaConnection(self.bootstrap_servers, self.options)

    def producer_option(self, name: str) -> str | None:
        return self.producer.get(name, self.producer.get(f"kafka.{name}"))
