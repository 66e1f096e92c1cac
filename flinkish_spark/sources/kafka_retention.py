"""Whether input topics keep their records for as long as a job may have to read them again (D69)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kafka.admin import ConfigResource, ConfigResourceType

from flinkish_spark.errors import AuthorizationError, ConfigError
from flinkish_spark.kafka import PREFLIGHT_TIMEOUT_MS, KafkaConnection
from flinkish_spark.kafka._wire import KafkaWire

LOG = logging.getLogger(__name__)
_POLICY, _RETENTION, _LAG = "cleanup.policy", "retention.ms", "min.compaction.lag.ms"
_SETTINGS = (_POLICY, _RETENTION, _LAG)
_DELETE, _COMPACT = "delete", "compact"


@dataclass(frozen=True, slots=True)
class TopicKeeping:
    """How long a topic keeps its records.

    Parameters
    ----------
    policies
        Of ``cleanup.policy``; Kafka 4 has topics without any, which keep everything.
    retention_ms
        After which the policy ``delete`` removes a record; None for never.
    compaction_lag_ms
        Before which the policy ``compact`` touches no record.
    """

    policies: frozenset[str]
    retention_ms: int | None
    compaction_lag_ms: int

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> TopicKeeping:
        """Return what a topic's settings say; raise KeyError if one of them is not shown.

        Examples
        --------
        >>> TopicKeeping.of(
        ...     {"cleanup.policy": "delete", "retention.ms": "-1", "min.compaction.lag.ms": "0"}
        ... ).retention_ms is None
        True
        """
        retention_ms = int(settings[_RETENTION])
        policies = frozenset(filter(None, (one.strip() for one in settings[_POLICY].split(","))))
        return cls(policies, None if retention_ms < 0 else retention_ms, int(settings[_LAG]))

    @property
    def is_compacted(self) -> bool:
        """Whether superseded records go at all."""
        return _COMPACT in self.policies

    def deletes_before(self, needed_ms: int) -> bool:
        """Whether records may be gone that are younger than `needed_ms`."""
        return _DELETE in self.policies and self.retention_ms is not None and self.retention_ms < needed_ms

    def compacts_before(self, needed_ms: int) -> bool:
        """Whether superseded records may be gone that are younger than `needed_ms`."""
        return self.is_compacted and self.compaction_lag_ms < needed_ms


def check_topic_retention(
    connection: KafkaConnection, topics: Sequence[str], uid: str, needed_ms: int
) -> None:
    """Refuse topics that delete records younger than `needed_ms`, warn of those that compact them.

    Called before anything starts. Settings that are hidden from the principal are a warning.

    Parameters
    ----------
    uid
        Of the source, for the message.
    needed_ms
        Checkpoint interval + restart budget.

    Raises
    ------
    ConfigError
        A topic's retention.ms is shorter.
    BrokerUnavailableError
        No broker answered.
    """
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
    """Return the error about a topic that deletes too early."""
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
