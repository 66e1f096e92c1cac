"""Checks that the input that a job still needs is there; and the dead letters of Kafka sources."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kafka.admin import ConfigResource, ConfigResourceType
from pyspark.sql import functions as F

from flinkish_spark.connectors.formats.decoding import REASON
from flinkish_spark.connectors.kafka.client.admin import PREFLIGHT_TIMEOUT_MS, KafkaAdmin
from flinkish_spark.connectors.kafka.client.client import KafkaWire, seen_to_stay
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.settings import DeliveryGuarantee
from flinkish_spark.contracts.source import SideOutput
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import AuthorizationError, ConfigError, GraphError, InputLostError
from flinkish_spark.core.formats import BadRecordPolicy, DeadLetter, Raw
from flinkish_spark.transport import columns as C

if TYPE_CHECKING:
    from collections.abc import Container

    from pyspark.sql import Column, DataFrame

    from flinkish_spark.contracts.sink import Sink
    from flinkish_spark.core.job_dir import JobDir
    from flinkish_spark.core.offset_log import LoggedOffsets


_CLOCK = SystemClock()


class InputChecks:
    """Compares what the brokers have with what a job recorded and has read."""

    def __init__(self, admin: KafkaAdmin, topics: Sequence[str]) -> None:
        self._admin, self._topics = admin, tuple(topics)

    def replaced(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> InputLostError | None:
        """Return the error of a topic that is gone or another one than at the job's first start."""
        found = self._admin.topics(self._topics)
        for topic in self._topics:
            if topic not in found:
                return InputLostError(
                    f"the input topic '{topic}' was deleted" + _position_text(position, topic),
                    why="the job has not read all of it, or cannot know that it has",
                    what_to_do="restore the topic, or start a new job with a new job_dir",
                    topic=topic,
                )
        for topic in self._topics:
            now = {"topic_id": found[topic].topic_id or ""}
            if job_dir.recorded_once(f"topic-{uid}-{topic}", now) != now:
                return InputLostError(
                    f"the input topic '{topic}' was deleted and created again"
                    + _position_text(position, topic),
                    why="its id changed, so the offsets of the checkpoint mean other records",
                    what_to_do="start a new job with a new job_dir, or restore the old topic",
                    topic=topic,
                )
        return None

    def gone(self, uid: str, position: LoggedOffsets | None) -> InputLostError | None:
        """Return the error of records that the job has not read and that no longer exist."""
        gone = self._missing(position)
        if not gone:
            return None
        return InputLostError(
            f"input of source '{uid}' is gone: missing are the offsets {'; '.join(gone)}",
            why="Kafka's retention removed records that the job had not read, or a log was truncated",
            what_to_do="raise retention.ms; start a new job_dir to go on without these records",
            uid=uid,
            missing=gone,
        )

    def _missing(self, position: LoggedOffsets | None) -> tuple[str, ...]:
        """Return the ranges that the job needs and Kafka no longer has, as text."""
        if position is None:
            return ()
        wanted = {
            (t, p): o for t, ps in position.kafka(frozenset(self._topics)).items() for p, o in ps.items()
        }
        try:
            first, last = self._admin.beginning_offsets(wanted), self._admin.end_offsets(wanted)
        except InputLostError as error:
            return (error.why or error.what,)
        gone = [f"{t}-{p} from {o} to {first[t, p] - 1}" for (t, p), o in wanted.items() if o < first[t, p]]
        gone += [
            f"{t}-{p} from {last[t, p]} to {o - 1}, which the job had read"
            for (t, p), o in wanted.items()
            if o > last[t, p]
        ]
        return tuple(sorted(gone))


def raise_if_it_stays(loss: Callable[[], InputLostError | None]) -> None:
    error = seen_to_stay(loss, lambda found: found is not None, _CLOCK)
    if error is not None:
        raise error


def _position_text(position: LoggedOffsets | None, topic: str) -> str:
    """Return from where on the job still needed `topic`."""
    if position is None:
        return ""
    offsets = position.kafka(frozenset({topic})).get(topic, {})
    places = "; ".join(f"{topic}-{p} from {o} on" for p, o in sorted(offsets.items()))
    return f": missing are the offsets {places}" if places else ""


LOG = logging.getLogger(__name__)
_POLICY, _RETENTION, _LAG = "cleanup.policy", "retention.ms", "min.compaction.lag.ms"
_SETTINGS = (_POLICY, _RETENTION, _LAG)
_DELETE, _COMPACT = "delete", "compact"


@dataclass(frozen=True, slots=True)
class TopicKeeping:
    #: Of ``cleanup.policy``; Kafka 4 has topics without any, which keep everything.
    policies: frozenset[str]
    #: After which the policy ``delete`` removes a record; None for never.
    retention_ms: int | None
    #: Before which the policy ``compact`` touches no record.
    compaction_lag_ms: int

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> TopicKeeping:
        """Return what a topic's settings say; raise KeyError if one of them is not shown."""
        retention_ms = int(settings[_RETENTION])
        policies = frozenset(filter(None, (one.strip() for one in settings[_POLICY].split(","))))
        return cls(policies, None if retention_ms < 0 else retention_ms, int(settings[_LAG]))

    @property
    def is_compacted(self) -> bool:
        return _COMPACT in self.policies

    def deletes_before(self, needed_ms: int) -> bool:
        return _DELETE in self.policies and self.retention_ms is not None and self.retention_ms < needed_ms

    def compacts_before(self, needed_ms: int) -> bool:
        return self.is_compacted and self.compaction_lag_ms < needed_ms


def check_topic_retention(
    connection: KafkaConnection, topics: Sequence[str], uid: str, needed_ms: int
) -> None:
    """Refuse topics that delete records younger than `needed_ms`, warn of those that compact them."""
    for topic, keeping in keeping_of(connection, topics).items():
        if keeping is None:
            LOG.warning(
                "source '%s': the settings of topic '%s' are hidden from this principal (DESCRIBE_CONFIGS); "
                "make sure that its retention.ms is %d or more",
                uid,
                topic,
                needed_ms,
            )
        elif keeping.deletes_before(needed_ms):
            raise retention_too_short(topic, uid, keeping.retention_ms, needed_ms)
        elif keeping.compacts_before(needed_ms):
            LOG.warning(
                "source '%s': the topic '%s' is compacted, and its min.compaction.lag.ms is %d, shorter than "
                "checkpoint interval + restart budget = %d ms: what is read again after a failure may miss "
                "records that a later one of their key superseded",
                uid,
                topic,
                keeping.compaction_lag_ms,
                needed_ms,
            )


def retention_too_short(topic: str, uid: str, retention_ms: int | None, needed_ms: int) -> ConfigError:
    return ConfigError(
        f"the topic '{topic}' of source '{uid}' has retention.ms = {retention_ms}, "
        f"shorter than checkpoint interval + restart budget = {needed_ms} ms",
        why="after a failure the job reads again what its last checkpoint does not contain, and Kafka may "
        "have deleted it by then",
        what_to_do=f"set retention.ms of the topic to {needed_ms} or more, or lower interval_ms or "
        "restart_budget_ms",
        topic=topic,
        retention_ms=retention_ms,
        needed_ms=needed_ms,
    )


def keeping_of(connection: KafkaConnection, topics: Sequence[str]) -> dict[str, TopicKeeping | None]:
    """Ask the brokers; None for a topic whose settings they do not show."""
    resources = [
        ConfigResource(ConfigResourceType.TOPIC, topic, dict.fromkeys(_SETTINGS)) for topic in topics
    ]

    def read(admin: Any) -> Any:
        return admin.describe_configs(resources, config_filter="all")

    wire = KafkaWire(connection, timeout_ms=PREFLIGHT_TIMEOUT_MS)
    try:
        found = wire.call("read the topics' settings", read).get("topic", {})
    except AuthorizationError:
        found = {}
    finally:
        wire.close()
    return {topic: _keeping(found.get(topic, {})) for topic in topics}


def _keeping(settings: Mapping[str, Mapping[str, Any]]) -> TopicKeeping | None:
    try:
        return TopicKeeping.of({name: str(settings[name]["value"]) for name in _SETTINGS})
    except (KeyError, ValueError):
        # Not shown, or null.
        return None


#: The column of a scan with the headers of records.
HEADERS = "headers"
#: Its type, in Spark's words.
HEADERS_TYPE = "array<struct<key:string,value:binary>>"
_MOST_LETTER_BYTES = 32 * 1024 * 1024


def letter_topic(policy: BadRecordPolicy) -> str:
    return policy.topic if isinstance(policy, DeadLetter) else ""


def letters_uid(uid: str) -> str:
    return f"{uid}-dead-letter"


def letters_of(
    bad: DataFrame,
    policy: BadRecordPolicy,
    uid: str,
    connection: KafkaConnection,
    peers: Sequence[Sink],
) -> SideOutput:
    from flinkish_spark.connectors.kafka.sink import KafkaSink

    # By a scan of their own, which ends where its logged offsets say: a record is good in the one or bad in
    # the other, whichever micro-batch brings it, so each comes out once.
    topic = letter_topic(policy)
    sink = KafkaSink(
        connection.servers,
        topic,
        key="key",
        value=Raw("value"),
        transaction_timeout_ms=letters_timeout_ms(policy, peers),
        # What a topic holds fits another one that takes as much; where it takes less, its head is kept.
        on_bad_record=DeadLetter(topic),
        options=connection.options,
        producer={"max.request.size": str(_MOST_LETTER_BYTES)},
        headers=HEADERS,
    )
    letters = bad.select(
        "key",
        "value",
        _headers(uid).alias(HEADERS),
        C.CHANNEL,
        C.SEQUENCE,
    )
    return SideOutput(letters_uid(uid), letters, sink)


def letters_timeout_ms(policy: BadRecordPolicy, peers: Sequence[Sink]) -> int:
    """Return how long staged letters may wait: as long as what their job stages otherwise."""
    from flinkish_spark.connectors.kafka.sink import KafkaSink
    from flinkish_spark.connectors.kafka.sink_settings import DEFAULT_TRANSACTION_TIMEOUT_MS

    if isinstance(policy, DeadLetter) and policy.transaction_timeout_ms is not None:
        return policy.transaction_timeout_ms
    exact = DeliveryGuarantee.EXACTLY_ONCE
    found = [
        one.transaction_timeout_ms for one in peers if isinstance(one, KafkaSink) and one.delivery is exact
    ]
    return min(found, default=DEFAULT_TRANSACTION_TIMEOUT_MS)


def _headers(uid: str) -> Column:
    # Before 1970 no sink writes; it is how a log says that it has no time.
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


def check_letter_topic(uid: str, topic: str, read: Container[str]) -> None:
    """Refuse a source that would read its own dead letters; called by the preflight."""
    if topic and topic in read:
        raise GraphError(
            f"source '{uid}' has its own topic as dead-letter topic",
            what_to_do="name another topic" + ("" if isinstance(read, tuple) else ", which does not match"),
        )
