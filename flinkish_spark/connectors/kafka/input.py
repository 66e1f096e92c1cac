"""The common part of the Kafka sources: checks of topics, dead letters, group offsets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from flinkish_spark.connectors.bad_records import REASON
from flinkish_spark.connectors.kafka.checks import (
    HEADERS,
    HEADERS_TYPE,
    check_topic_retention,
    find_missing_input,
    find_replaced_topic,
    raise_if_confirmed,
)
from flinkish_spark.connectors.kafka.client.admin import (
    PREFLIGHT_TIMEOUT_MS,
    KafkaAdmin,
    OffsetDirection,
    TopicPattern,
)
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.marks import find_newest_mark
from flinkish_spark.connectors.kafka.client.settings import DeliveryGuarantee
from flinkish_spark.connectors.kafka.offsets import (
    GroupPatience,
    TopicSelection,
    select_partitions,
    store_offsets,
)
from flinkish_spark.connectors.kafka.records import Decoding
from flinkish_spark.connectors.kafka.sink import KafkaSink
from flinkish_spark.connectors.kafka.sink_settings import DEFAULT_TRANSACTION_TIMEOUT_MS
from flinkish_spark.connectors.plain_formats import Raw
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.contracts.format import name_schema_fact
from flinkish_spark.contracts.sink import Sink
from flinkish_spark.contracts.source import JobPlace, SideOutput, Source
from flinkish_spark.core.errors import GraphError
from flinkish_spark.core.formats import BadRecordPolicy, DeadLetter
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.protocol.ids import JobUuid, Place
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.transport import columns as C

#: Suffix of the uid of a source's dead-letter stream.
_OF_LETTERS = "-dead-letter"
_MOST_LETTER_BYTES = 32 * 1024 * 1024


class KafkaInput(Source):
    """Common part of the Kafka sources: checks of topics, dead letters, group offsets."""

    wanted: TopicSelection
    connection: KafkaConnection
    group_id: str
    #: How records are decoded; None if they are not.
    decoding: Decoding | None

    def datasets(self) -> tuple[Dataset, ...]:
        """Return the topics by name; those of a pattern are not known before the source is read."""
        return Dataset.from_topics(self.connection.servers, self.wanted.topics)

    @property
    def drops_records(self) -> bool:
        return self.decoding is not None and self.decoding.drops_records

    @property
    def letters(self) -> str:
        return "" if self.decoding is None else self.decoding.letter_topic

    @property
    def has_side_outputs(self) -> bool:
        return bool(self.letters)

    def side_uids(self, uid: str) -> tuple[str, ...]:
        return (f"{uid}{_OF_LETTERS}",) if self.letters else ()

    def side_outputs(
        self, spark: SparkSession, uid: str, place: JobPlace, peers: Sequence[Sink]
    ) -> tuple[SideOutput, ...]:
        """Return the dead-letter stream: a second scan that keeps only unreadable records."""
        if self.decoding is None or not self.letters:
            return ()
        raw = self.scan_with_headers(spark, place)
        bad = self.decoding.deserializer(uid, place, self.wanted.topics).bad(raw)
        return (make_letter_output(bad, self.decoding.policy, uid, self.connection, peers),)

    @abstractmethod
    def scan_with_headers(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        """Return a scan of the raw records with their headers."""

    @cached_property
    def _admin(self) -> KafkaAdmin:
        return KafkaAdmin(self.connection)

    def topics_now(self) -> Sequence[str]:
        """Return the named topics, or those that match the pattern now. Callable from any thread."""
        if not self.wanted.pattern:
            return self.wanted.topics
        # A connection belongs to one thread, so each call opens its own.
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            return sorted(admin.find_matching_topics(TopicPattern(self.wanted.pattern)))

    def topics_at(self, position: LoggedOffsets | None) -> Sequence[str]:
        """Return :meth:`topics_now`; for a pattern, also topics of `position` that may be deleted."""
        if not self.wanted.pattern or position is None:
            return self.topics_now()
        return sorted({*self.topics_now(), *self.wanted.filter_topics(position.topics())})

    def preflight(self, spark: SparkSession, job_dir: JobDir, uid: str) -> None:
        """Check that the brokers answer and that the topics exist and can be read."""
        super().preflight(spark, job_dir, uid)
        letters = self.letters
        if letters and self.wanted.filter_topics([letters]):
            raise GraphError(
                f"source '{uid}' has its own topic as dead-letter topic",
                what_to_do="name another topic" + (", which does not match" if self.wanted.pattern else ""),
            )
        asked = [*self.wanted.topics, *filter(None, [letters])]
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            found = admin.find_existing(asked, f"source '{uid}'", [letters])
            counts = {name: one.partitions for name, one in found.items()}
            select_partitions(counts, self.wanted.partitions, "the source's partitions")
            self.check_end(admin)

    def check_end(self, admin: KafkaAdmin) -> None:
        """Refuse ending offsets that do not fit the partitions, if they are known before the start."""

    def check_retention(self, uid: str, needed_ms: int) -> None:
        check_topic_retention(self.connection, self.topics_now(), uid, needed_ms)

    def check_position(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> None:
        """Check that Kafka still has the topics and records that the job has to read."""
        admin, topics = self._admin, self.topics_at(position)
        raise_if_confirmed(
            lambda: (
                find_replaced_topic(admin, topics, job_dir, uid, position)
                or find_missing_input(admin, topics, uid, position)
            )
        )

    def identity(self, job_dir: JobDir, uid: str) -> Mapping[str, Any]:
        """Return the topic ids and schemas that the job recorded at its first start."""
        topics = (f"topic-{uid}-{topic}" for topic in self.topics_now())
        names = [*topics, *(name_schema_fact(uid, part) for part in ("key", "value"))]
        facts = {name: job_dir.find_fact(name) for name in names}
        return {name: fact for name, fact in facts.items() if fact is not None}

    @cached_property
    def _group_patience(self) -> GroupPatience:
        return GroupPatience()

    def store_offsets(
        self,
        offsets: Mapping[Place, int],
        note: str = "",
        direction: OffsetDirection = OffsetDirection.FORWARD_ONLY,
    ) -> bool:
        return bool(self.group_id) and self._group_patience.try_store(
            self.group_id, lambda: store_offsets(self._admin, self.group_id, offsets, direction, note)
        )

    def newest_marks(self, job: JobUuid) -> Sequence[Mark]:
        notes = self._admin.find_committed_notes(self.group_id).values() if self.group_id else ()
        mark = find_newest_mark(notes, job)
        return () if mark is None else (mark,)


def make_letter_output(
    bad: DataFrame, policy: BadRecordPolicy, uid: str, connection: KafkaConnection, peers: Sequence[Sink]
) -> SideOutput:
    # The second scan has logged offsets of its own. Every record is good in one scan or bad in the other, in
    # whichever micro-batch each scan reads it, so that each record comes out once.
    assert isinstance(policy, DeadLetter)
    sink = KafkaSink(
        connection.servers,
        policy.topic,
        key="key",
        value=Raw("value"),
        transaction_timeout_ms=letters_timeout_ms(policy, peers),
        # A record fits any topic with the same limits; if the limit is lower, its head is kept.
        on_bad_record=DeadLetter(policy.topic),
        options=connection.options,
        producer={"max.request.size": str(_MOST_LETTER_BYTES)},
        headers=HEADERS,
    )
    letters = bad.select("key", "value", _make_letter_headers(uid).alias(HEADERS), C.CHANNEL, C.SEQUENCE)
    return SideOutput(f"{uid}{_OF_LETTERS}", letters, sink)


def letters_timeout_ms(policy: DeadLetter, peers: Sequence[Sink]) -> int:
    """Return the transaction timeout of letters: the policy's, or else the shortest of the job's sinks."""
    exact = [
        one.transaction_timeout_ms
        for one in peers
        if isinstance(one, KafkaSink) and one.delivery is DeliveryGuarantee.EXACTLY_ONCE
    ]
    return policy.transaction_timeout_ms or min(exact, default=DEFAULT_TRANSACTION_TIMEOUT_MS)


def _make_letter_headers(uid: str) -> Column:
    # A negative timestamp means that the record has none.
    time_ms = F.unix_millis("timestamp")
    ours = {
        "flinkish-error": F.lit("unreadable"),
        "flinkish-source": F.lit(uid),
        "flinkish-topic": F.col("topic"),
        "flinkish-partition": F.col("partition").cast("string"),
        "flinkish-offset": F.col("offset").cast("string"),
        "flinkish-timestamp": F.when(time_ms >= 0, time_ms.cast("string")),
        "flinkish-detail": F.col(REASON),
    }
    entries = [
        F.struct(F.lit(name).alias("key"), text.cast("binary").alias("value")) for name, text in ours.items()
    ]
    told = F.filter(F.array(*entries), lambda one: one["value"].isNotNull())
    return F.concat(F.coalesce(F.col(HEADERS), F.array().cast(HEADERS_TYPE)), told)
