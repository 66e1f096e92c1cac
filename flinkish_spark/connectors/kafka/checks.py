"""Checks that Kafka still has the records that a job has to read, and keeps them long enough."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flinkish_spark.connectors.kafka.client.admin import PREFLIGHT_TIMEOUT_MS, KafkaAdmin
from flinkish_spark.connectors.kafka.client.client import poll_until_confirmed
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import ConfigError, InputLostError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets


def find_replaced_topic(
    admin: KafkaAdmin, topics: Sequence[str], job_dir: JobDir, uid: str, position: LoggedOffsets | None
) -> InputLostError | None:
    """Return an error if a topic was deleted, or created again since the job's first start."""
    found = admin.topics(topics)
    # Report deleted topics before the ids of the others are recorded.
    for topic in sorted(topics, key=lambda one: one in found):
        if topic not in found:
            how, to_do = "deleted", "restore the topic"
            why = "the job has not read all of it, or cannot know that it has"
        else:
            now = {"topic_id": found[topic].topic_id or ""}
            if job_dir.record_fact(f"topic-{uid}-{topic}", now) == now:
                continue
            how, to_do = "deleted and created again", "restore the old topic"
            why = "its id changed, so the offsets of the checkpoint mean other records"
        offsets = {} if position is None else position.kafka(frozenset({topic})).get(topic, {})
        places = "; ".join(f"{topic}-{p} from {o} on" for p, o in sorted(offsets.items()))
        return InputLostError(
            f"the input topic '{topic}' was {how}"
            + (f": Kafka no longer has the offsets {places}" if places else ""),
            why=why,
            what_to_do=f"{to_do}, or start a new job with a new job_dir",
            topic=topic,
        )
    return None


def find_missing_input(
    admin: KafkaAdmin, topics: Sequence[str], uid: str, position: LoggedOffsets | None
) -> InputLostError | None:
    """Return an error if Kafka has deleted records that the job has not read yet."""
    needed = {} if position is None else position.kafka(frozenset(topics))
    wanted = {(topic, p): at for topic, partitions in needed.items() for p, at in partitions.items()}
    try:
        first, last = admin.beginning_offsets(wanted), admin.end_offsets(wanted)
        gone = [f"{t}-{p} from {o} to {first[t, p] - 1}" for (t, p), o in wanted.items() if o < first[t, p]]
        gone += [
            f"{t}-{p} from {last[t, p]} to {o - 1}, which the job had read"
            for (t, p), o in wanted.items()
            if o > last[t, p]
        ]
    except InputLostError as error:
        gone = [error.why or error.what]
    if not gone:
        return None
    return InputLostError(
        f"input of source '{uid}' is gone: Kafka no longer has the offsets {'; '.join(sorted(gone))}",
        why="Kafka's retention removed records that the job had not read, or a log was truncated",
        what_to_do="raise retention.ms; start a new job_dir to go on without these records",
        uid=uid,
        missing=tuple(sorted(gone)),
    )


def raise_if_confirmed(loss: Callable[[], InputLostError | None]) -> None:
    error = poll_until_confirmed(loss, lambda found: found is not None, SystemClock())
    if error is not None:
        raise error


LOG = logging.getLogger(__name__)
_SETTINGS = (_POLICY, _RETENTION, _LAG) = "cleanup.policy", "retention.ms", "min.compaction.lag.ms"


@dataclass(frozen=True, slots=True)
class TopicRetention:
    #: Values of ``cleanup.policy``; a topic without any (Kafka 4) keeps everything.
    policies: frozenset[str]
    #: Age at which the policy ``delete`` removes a record; None for never.
    retention_ms: int | None
    #: Age before which the policy ``compact`` removes no record.
    compaction_lag_ms: int

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> TopicRetention:
        retention_ms = int(settings[_RETENTION])
        policies = frozenset(filter(None, (one.strip() for one in settings[_POLICY].split(","))))
        return cls(policies, None if retention_ms < 0 else retention_ms, int(settings[_LAG]))

    @property
    def is_compacted(self) -> bool:
        return "compact" in self.policies

    def deletes_before(self, needed_ms: int) -> bool:
        return "delete" in self.policies and self.retention_ms is not None and self.retention_ms < needed_ms

    def compacts_before(self, needed_ms: int) -> bool:
        return self.is_compacted and self.compaction_lag_ms < needed_ms


def check_topic_retention(
    connection: KafkaConnection, topics: Sequence[str], uid: str, needed_ms: int
) -> None:
    """Refuse topics that delete records younger than `needed_ms`; warn if a topic compacts them."""
    for topic, keeping in read_topic_retention(connection, topics).items():
        if keeping is None:
            LOG.warning(
                "source '%s': the settings of topic '%s' are hidden from this principal (DESCRIBE_CONFIGS); "
                "make sure that its retention.ms is %d or more",
                uid,
                topic,
                needed_ms,
            )
        elif keeping.deletes_before(needed_ms):
            raise ConfigError(
                f"the topic '{topic}' of source '{uid}' has retention.ms = {keeping.retention_ms}, "
                f"shorter than checkpoint interval + restart budget = {needed_ms} ms",
                why="after a failure the job reads again what its last checkpoint does not contain, and "
                "Kafka may have deleted it by then",
                what_to_do=f"set retention.ms of the topic to {needed_ms} or more, or lower interval_ms or "
                "restart_budget_ms",
            )
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


def read_topic_retention(
    connection: KafkaConnection, topics: Sequence[str]
) -> dict[str, TopicRetention | None]:
    """Read the retention of topics; None for a topic whose settings this principal may not read."""
    with KafkaAdmin(connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
        found = admin.topic_settings(topics, _SETTINGS)
    # A setting may be hidden or null.
    return {
        topic: TopicRetention.of(known) if len(known := found.get(topic, {})) == len(_SETTINGS) else None
        for topic in topics
    }


HEADERS = "headers"
HEADERS_TYPE = "array<struct<key:string,value:binary>>"
