"""Admin client for topics, partitions and consumer groups, and checks before a job starts.

No decision depends on it. All calls may be repeated, and reconnect by themselves.
"""

from __future__ import annotations

import enum
import itertools
import logging
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import kafka.errors as kafka_errors
from kafka import TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType, OffsetSpec
from kafka.structs import OffsetAndMetadata

from flinkish_spark.connectors.kafka.client.client import (
    UNSETTLED,
    Isolation,
    WireClient,
    ask_until_settled,
    describe_code,
)
from flinkish_spark.core.errors import (
    AuthorizationError,
    BrokerUnavailableError,
    ConfigError,
    EnvironmentFault,
    GraphError,
    InputLostError,
)
from flinkish_spark.protocol.ids import Place
from flinkish_spark.types.record_time import TimeLimits

LOG = logging.getLogger(__name__)
#: How long checks before a start wait for a broker; a person waits for them.
PREFLIGHT_TIMEOUT_MS = 10_000
#: How long planning a micro-batch waits for a broker; Kafka's default.api.timeout.ms.
PLANNING_TIMEOUT_MS = 60_000
#: Topic or broker -> its settings.
_Settings = dict[str, dict[str, str]]
#: Kafka's default, used if the broker hides its settings from this principal.
_DEFAULT_TRANSACTION_MAX_TIMEOUT_MS = 900_000
#: Broker setting, true by default.
VERIFICATION = "transaction.partition.verification.enable"
_CLEANUP = "cleanup.policy"
_RETENTION = "retention.ms"
_MAX_MESSAGE_BYTES, _DEFAULT_MAX_MESSAGE_BYTES = "max.message.bytes", 1_048_588
#: Errors that mean that the group has active members.
_ACTIVE_MEMBERS = (
    kafka_errors.UnknownMemberIdError,
    kafka_errors.IllegalGenerationError,
    kafka_errors.RebalanceInProgressError,
    kafka_errors.StaleMemberEpochError,
)


@dataclass(frozen=True, slots=True)
class TopicInfo:
    partitions: int
    #: Distinguishes a topic from a later one of the same name; None before Kafka 2.8.
    topic_id: str | None
    max_message_bytes: int
    times: TimeLimits = field(default_factory=TimeLimits)
    #: A compacted topic accepts no record without a key.
    is_compacted: bool = False
    #: Retention by the producer's timestamps; None if it deletes nothing, or is hidden.
    keeps_ms: int | None = None


class OffsetDirection(enum.Enum):
    FORWARD_ONLY = "FORWARD_ONLY"
    #: Only for an explicit rewind of the job.
    REWIND = "REWIND"


class GroupCommit(enum.Enum):
    COMMITTED = "COMMITTED"
    #: The group's offsets were already as high or higher; nothing was written.
    UNCHANGED = "UNCHANGED"
    #: Consumers are members of the group, and Kafka accepts offsets only from them.
    ACTIVE_MEMBERS = "ACTIVE_MEMBERS"


#: [a[b]] is a nested set in Java but not in Python, which warns about some of them only.
_NESTED_SET = re.compile(r"\[(?:\\.|[^\]\\])*\[")
#: A literal beginning of a pattern.
_PLAIN = re.compile(r"[A-Za-z0-9_-]*")


class TopicPattern:
    """A regular expression for whole topic names, as in Java's ``matches()``."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            if _NESTED_SET.search(text):
                raise re.error("a set in a set", text)
            with warnings.catch_warnings():
                # Python warns of [a&&b], an intersection in Java but not here.
                warnings.simplefilter("error", FutureWarning)
                # Java's \w, \d and (?i) mean ASCII.
                self._compiled = re.compile(text, re.ASCII)
        except (re.error, FutureWarning) as wrong:
            raise ConfigError(
                f"the topic pattern {text!r} cannot be used",
                why=f"Python reads it otherwise than Java, or not at all: {wrong}",
                what_to_do="write it with what both know, such as [a-z], \\d, ., *, +, ?, | and ( )",
            ) from wrong

    def matches(self, topic: str) -> bool:
        return self._compiled.fullmatch(topic) is not None

    def __contains__(self, topic: object) -> bool:
        return isinstance(topic, str) and self.matches(topic)

    def may_overlap(self, other: TopicPattern) -> bool:
        """Return False if no topic can match both patterns, judged by their literal prefixes."""
        mine, theirs = _literal_prefix(self.text), _literal_prefix(other.text)
        return mine.startswith(theirs) or theirs.startswith(mine)


def _literal_prefix(pattern: str) -> str:
    """Return a literal prefix of all names that match the pattern; may be empty."""
    if "|" in pattern:
        return ""
    plain = _PLAIN.match(pattern)
    found = "" if plain is None else plain[0]
    # The last character is optional.
    return found[:-1] if pattern[len(found) : len(found) + 1] in ("?", "*", "{") else found


#: The broker stores the offsets of a request as one batch, which must fit its offsets topic (1 MB).
_MOST_OFFSETS_BYTES, _OFFSET_BYTES = 500_000, 150


class KafkaAdmin(WireClient):
    """Reads metadata of topics, and reads and stores group offsets."""

    # A broker that has just started may not know a topic, or the end of a log, for a second or two. A caller
    # that would conclude from an answer that input is lost asks again first.

    def topics(self, names: Iterable[str]) -> dict[str, TopicInfo]:
        rows = self._describe(names)
        wanted = (_MAX_MESSAGE_BYTES, _CLEANUP, _RETENTION, *TimeLimits.SETTINGS)
        settings = self.topic_settings([row["name"] for row in rows], wanted)
        found = {}
        for row in rows:
            own, topic_id = settings.get(row["name"], {}), str(row.get("topic_id") or "")
            found[row["name"]] = TopicInfo(
                len(row["partitions"]),
                topic_id if topic_id.strip("0-A=") else None,
                int(own.get(_MAX_MESSAGE_BYTES, _DEFAULT_MAX_MESSAGE_BYTES)),
                TimeLimits.from_settings(own),
                "compact" in own.get(_CLEANUP, ""),
                _keeps_ms(own),
            )
        return found

    def find_existing(
        self, names: Sequence[str], of: str, letters: Sequence[str] = ()
    ) -> dict[str, TopicInfo]:
        """Return topics; raise an error if one is missing, or would keep only some dead letters."""
        found = self.topics(names)
        for topic in names:
            if topic not in found:
                raise make_unknown_topic_error(topic, self._wire.connection.servers, of=of)
            if topic in letters and found[topic].is_compacted:
                raise ConfigError(
                    f"the dead-letter topic '{topic}' of {of} is compacted",
                    why="it keeps only the last dead letter of each key, and refuses one without a key",
                    what_to_do="use a topic with cleanup.policy=delete",
                )
        return found

    def topic_settings(self, names: Sequence[str], wanted: Sequence[str]) -> _Settings:
        """Return settings of topics, without those that are hidden from this principal."""
        return self._settings(ConfigResourceType.TOPIC, names, wanted) if names else {}

    def partition_counts(self, names: Iterable[str]) -> dict[str, int]:
        """Return the number of partitions of the existing ones of the topics; none is created."""
        return {row["name"]: len(row["partitions"]) for row in self._describe(names)}

    def _describe(self, names: Iterable[str]) -> list[dict[str, Any]]:
        wanted = sorted(set(names))

        def describe(admin: Any) -> list[dict[str, Any]]:
            rows: list[dict[str, Any]] = []
            for row in admin.describe_topics(wanted):
                error = kafka_errors.for_code(row["error_code"])
                if error is kafka_errors.NoError:
                    rows.append(row)
                elif error is not kafka_errors.UnknownTopicOrPartitionError:
                    raise error(row["name"])
            return rows

        return self._wire.call("describe topics", describe) if wanted else []

    def find_matching_topics(self, pattern: TopicPattern) -> dict[str, int]:
        """Return the partition counts of matching topics, without internal and hidden ones."""
        rows = self._wire.call("list topics", lambda admin: admin.describe_topics(None))
        return {
            row["name"]: len(row["partitions"])
            for row in rows
            if not row["is_internal"] and not row["error_code"] and pattern.matches(row["name"])
        }

    def create_topic(self, name: str, partitions: int, configs: Mapping[str, str] | None = None) -> None:
        spec = {name: {"num_partitions": partitions, "configs": dict(configs or {})}}

        def create(admin: Any) -> None:
            try:
                admin.create_topics(spec, wait_for_metadata=True)
            except kafka_errors.TopicAlreadyExistsError as exists:
                to_do = "take another name, or use the topic as it is"
                raise ConfigError(f"Kafka topic {name!r} exists already", what_to_do=to_do) from exists

        self._wire.call(f"create topic {name}", create)

    def beginning_offsets(self, places: Iterable[Place]) -> dict[Place, int]:
        return self._offsets(dict.fromkeys(places, OffsetSpec.EARLIEST), Isolation.READ_UNCOMMITTED)

    def end_offsets(
        self, places: Iterable[Place], isolation: Isolation = Isolation.READ_COMMITTED
    ) -> dict[Place, int]:
        """Return each partition's end; under read_committed this is its first open transaction."""
        return self._offsets(dict.fromkeys(places, OffsetSpec.LATEST), isolation)

    def offsets_at(
        self, timestamps_ms: Mapping[Place, int], isolation: Isolation = Isolation.READ_COMMITTED
    ) -> dict[Place, int | None]:
        """Return the first offset at or after each timestamp; None if no visible record is as late."""
        found = self._offsets(timestamps_ms, isolation)
        return {place: offset if offset >= 0 else None for place, offset in found.items()}

    def committed_offsets(
        self, group: str, isolation: Isolation = Isolation.READ_UNCOMMITTED
    ) -> dict[Place, int]:
        return {place: offset for place, (offset, _) in self._wire.group_offsets(group, isolation).items()}

    def find_committed_notes(
        self, group: str, isolation: Isolation = Isolation.READ_UNCOMMITTED
    ) -> dict[Place, str]:
        return {place: note for place, (_, note) in self._wire.group_offsets(group, isolation).items()}

    def commit_offsets(
        self,
        group: str,
        offsets: Mapping[Place, int],
        direction: OffsetDirection = OffsetDirection.FORWARD_ONLY,
        note: str = "",
    ) -> GroupCommit:
        """Store `offsets` for a group without members."""
        # This takes several requests: only the owner of the job may call it, and repeats it until all offsets
        # are stored.
        current = self.committed_offsets(group)
        changed = {
            place: offset
            for place, offset in offsets.items()
            if place not in current
            or (
                offset > current[place]
                if direction is OffsetDirection.FORWARD_ONLY
                else offset != current[place]
            )
        }
        if not changed:
            return GroupCommit.UNCHANGED
        entries = {
            TopicPartition(*place): OffsetAndMetadata(offset, note, -1) for place, offset in changed.items()
        }
        own = max(len(topic) for topic, _ in changed) + len(note) + len(group)
        count = max(1, _MOST_OFFSETS_BYTES // (_OFFSET_BYTES + 3 * own))

        def alter(admin: Any) -> GroupCommit:
            left = iter(entries.items())
            while some := dict(itertools.islice(left, count)):
                for place, error in admin.alter_group_offsets(group, some).items():
                    if error in _ACTIVE_MEMBERS:
                        return GroupCommit.ACTIVE_MEMBERS
                    if error is not kafka_errors.NoError:
                        raise error(f"{place.topic}-{place.partition} of group {group}")
            return GroupCommit.COMMITTED

        return self._wire.call(f"store the offsets of group {group}", alter)

    def broker_transaction_max_timeout_ms(self) -> int:
        """Return the longest transaction timeout that every broker allows."""
        values = self._read_broker_setting("transaction.max.timeout.ms").values()
        return min(map(int, values), default=_DEFAULT_TRANSACTION_MAX_TIMEOUT_MS)

    def brokers_that_verify_no_partitions(self) -> list[str]:
        """Return the ids of brokers that accept records for partitions outside a transaction (KIP-890)."""
        values = self._read_broker_setting(VERIFICATION)
        return sorted(broker for broker, value in values.items() if value.lower() == "false")

    def probe_transactional_id(self, transactional_id: str, timeout_ms: int) -> None:
        """Check that Kafka allows transactions of `timeout_ms` under an id that nobody else uses."""
        # This takes a new epoch of the id, aborts its open transaction, and fences its producers.
        wire = self._wire
        denied = int(kafka_errors.TransactionalIdAuthorizationFailedError.errno)

        def ask(left_ms: int) -> int:
            try:
                return wire.init_producer_id(transactional_id, timeout_ms, connect_within_ms=left_ms).code
            except AuthorizationError as refused:
                # Without DESCRIBE on the id Kafka already refuses the search for its coordinator.
                if getattr(refused.__cause__, "errno", 0) != denied:
                    raise
                return denied

        code, lost = ask_until_settled(wire, wire.timeout_ms, ask)
        if lost is not None:
            raise lost
        if not code:
            return
        if code == kafka_errors.InvalidTransactionTimeoutError.errno:
            maximum_ms = self.broker_transaction_max_timeout_ms()
            # If the maximum is hidden, Kafka's default is used, which may contradict the refusal.
            known = f", which is {maximum_ms} ms" if maximum_ms < timeout_ms else ""
            raise ConfigError(
                f"A transaction timeout of {timeout_ms} ms cannot be used",
                why=f"it exceeds the broker's transaction.max.timeout.ms{known}",
                what_to_do="lower the transaction timeout of the sink or raise the broker's maximum",
                timeout_ms=timeout_ms,
                maximum_ms=maximum_ms if known else None,
            )
        if code == denied:
            raise AuthorizationError(
                f"Kafka refuses this principal the transactional id {transactional_id!r}",
                why="every transaction of a Kafka sink needs one",
                what_to_do="add an ACL that allows WRITE and DESCRIBE on transactional ids with the "
                "prefix 'flinkish-'",
                code=code,
            )
        if code in UNSETTLED:
            raise BrokerUnavailableError(
                f"No Kafka transaction coordinator was ready within {wire.timeout_ms} ms",
                why=f"the last answer was {describe_code(code)}",
                what_to_do="check that the topic __transaction_state can have its replicas",
                code=code,
            )
        raise EnvironmentFault(
            f"Kafka refuses transactional id {transactional_id!r} with {describe_code(code)}",
            what_to_do="see the brokers' logs",
            code=code,
        )

    def _read_broker_setting(self, setting: str) -> dict[str, str]:
        """Return a setting of each broker that shows it to this principal."""
        found = self._settings(ConfigResourceType.BROKER, None, [setting])
        return {name: known[setting] for name, known in found.items() if known}

    def _settings(self, kind: Any, names: Iterable[str] | None, wanted: Sequence[str]) -> _Settings:
        """Return settings of topics, or of all brokers, without hidden ones."""
        of = kind.name.lower()

        def read(admin: Any) -> _Settings:
            asked = names
            if asked is None:
                asked = [str(row["broker_id"]) for row in admin.describe_cluster()["brokers"]]
            resources = [ConfigResource(kind, name, dict.fromkeys(wanted)) for name in asked]
            found = {}
            for name, rows in admin.describe_configs(resources, config_filter="all").get(of, {}).items():
                values = {one: rows.get(one, {}).get("value") for one in wanted}
                found[name] = {one: str(value) for one, value in values.items() if value is not None}
            return found

        try:
            return self._wire.call(f"read the settings of each {of}", read)
        except AuthorizationError:
            return {}

    def _offsets(self, specs: Mapping[Place, Any], isolation: Isolation) -> dict[Place, int]:
        wanted = {TopicPartition(*place): spec for place, spec in specs.items()}
        if not wanted:
            return {}

        def read(admin: Any) -> dict[Any, Any]:
            try:
                found: dict[Any, Any] = admin.list_partition_offsets(wanted, isolation_level=int(isolation))
            except kafka_errors.UnknownTopicOrPartitionError as unknown:
                raise InputLostError(
                    "A Kafka partition does not exist",
                    why=str(unknown),
                    what_to_do="look whether the topic was deleted or made again, with fewer partitions",
                ) from unknown
            return found

        found = self._wire.call("read partition offsets", read)
        return {(place.topic, place.partition): int(entry.offset) for place, entry in found.items()}


def list_places(counts: Mapping[str, int]) -> list[Place]:
    return [(name, number) for name, count in sorted(counts.items()) for number in range(count)]


def make_unknown_topic_error(topic: str, servers: str, *, of: str = "") -> GraphError:
    return GraphError(
        f"the topic '{topic}' {f'of {of} ' if of else ''}does not exist",
        why=f"the brokers at {servers} do not know it",
        what_to_do="create it, or correct its name",
    )


def _keeps_ms(settings: Mapping[str, str]) -> int | None:
    retention_ms = int(settings.get(_RETENTION, -1))
    is_by_own_time = settings.get("message.timestamp.type") != "LogAppendTime"
    deletes = "delete" in settings.get(_CLEANUP, "") and retention_ms >= 0
    return retention_ms if deletes and is_by_own_time else None


def warn_of_old_times(found: Mapping[str, TopicInfo], topics: Sequence[str], of: str) -> None:
    """Warn about topics that delete records by the timestamps that we set; called before a start."""
    for topic in topics:
        keeps_ms = found[topic].keeps_ms
        if keeps_ms is not None:
            LOG.warning(
                "%s gives records of the topic '%s' times of their own, and its retention.ms is %d: Kafka "
                "deletes what is older by that time, within minutes of its writing; for old records set "
                "retention.ms=-1, or message.timestamp.type=LogAppendTime",
                of,
                topic,
                keeps_ms,
            )
