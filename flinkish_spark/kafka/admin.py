"""Questions about topics and groups, and the checks before a job starts.

Nothing here takes part in a decision. All calls may be repeated, reconnect by themselves, and
raise :class:`BrokerUnavailableError` when no broker answered within the time allowed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import kafka.errors as kafka_errors
from kafka import TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType, OffsetSpec
from kafka.structs import OffsetAndMetadata

from flinkish_spark.clock import Clock, SystemClock
from flinkish_spark.errors import (
    AuthorizationError,
    BrokerUnavailableError,
    ConfigError,
    EnvironmentFault,
    GraphError,
    InputLostError,
)
from flinkish_spark.kafka._pace import pauses_ms
from flinkish_spark.kafka._wire import KafkaWire
from flinkish_spark.kafka.answers import UNSETTLED, Code, Isolation, Place, name_of
from flinkish_spark.kafka.options import KafkaConnection

#: How long the checks before a start wait for a broker; a person waits for the answer.
PREFLIGHT_TIMEOUT_MS = 10_000
_CLOCK = SystemClock()
#: Kafka's defaults, for a broker that hides its settings from this principal.
_DEFAULT_TRANSACTION_MAX_TIMEOUT_MS = 900_000
_DEFAULT_MAX_MESSAGE_BYTES = 1_048_588
#: UnknownMemberId, IllegalGeneration, RebalanceInProgress, StaleMemberEpoch: the group is in use.
_ACTIVE_MEMBERS = frozenset({25, 22, 27, 113})


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """What a job needs to know about a topic.

    `topic_id` tells a topic from a later one of the same name; None before Kafka 2.8.
    """

    partitions: int
    topic_id: str | None
    max_message_bytes: int


class OffsetDirection(enum.Enum):
    """Whether a group's offsets may be lowered."""

    FORWARD_ONLY = "FORWARD_ONLY"
    #: Only for an explicit rewind of the job.
    REWIND = "REWIND"


class GroupCommit(enum.Enum):
    """What became of a commit of group offsets."""

    COMMITTED = "COMMITTED"
    #: The group already was there or further; nothing was written.
    UNCHANGED = "UNCHANGED"
    #: Consumers are members of the group and Kafka accepts offsets from them only.
    ACTIVE_MEMBERS = "ACTIVE_MEMBERS"


class KafkaAdmin:
    """Reads metadata and keeps group offsets; one instance belongs to one thread.

    Parameters
    ----------
    connection
        Where Kafka is.
    timeout_ms
        The longest a call may wait for a broker.
    clock
        Time, replaceable in tests.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        *,
        timeout_ms: int = 15_000,
        clock: Clock = _CLOCK,
    ) -> None:
        self._wire = KafkaWire(connection, timeout_ms=timeout_ms, clock=clock)

    @classmethod
    def over(cls, wire: KafkaWire) -> KafkaAdmin:
        """Return an admin that asks over `wire`; the two are used, and closed, as one."""
        admin = cls.__new__(cls)
        admin._wire = wire
        return admin

    def close(self) -> None:
        """Close the connection; a later call opens it again."""
        self._wire.close()

    def __enter__(self) -> KafkaAdmin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- topics -------------------------------------------------------------------------------

    def topics(self, names: Iterable[str]) -> dict[str, TopicInfo]:
        """Return what Kafka knows about `names`; a topic that does not exist is left out.

        Never creates a topic, whatever the broker's auto.create.topics.enable says.
        """
        wanted = sorted(set(names))
        if not wanted:
            return {}
        rows = self._wire.call("describe topics", lambda admin: _described_topics(admin, wanted))
        sizes = self._max_message_bytes([row["name"] for row in rows]) if rows else {}
        return {
            row["name"]: TopicInfo(
                len(row["partitions"]),
                _topic_id(row.get("topic_id")),
                sizes.get(row["name"], _DEFAULT_MAX_MESSAGE_BYTES),
            )
            for row in rows
        }

    def create_topic(self, name: str, partitions: int, configs: Mapping[str, str] | None = None) -> None:
        """Create a topic and wait until its partitions have leaders; for tests and demos.

        Raises
        ------
        ConfigError
            If it exists.
        """
        spec = {name: {"num_partitions": partitions, "configs": dict(configs or {})}}

        def create(admin: Any) -> None:
            try:
                admin.create_topics(spec, wait_for_metadata=True)
            except kafka_errors.TopicAlreadyExistsError as exists:
                raise ConfigError(f"Kafka topic {name!r} exists already", topic=name) from exists

        self._wire.call(f"create topic {name}", create)

    def beginning_offsets(self, places: Iterable[Place]) -> dict[Place, int]:
        """Return the first offset that each partition still holds."""
        return self._offsets(dict.fromkeys(places, OffsetSpec.EARLIEST), Isolation.READ_UNCOMMITTED)

    def end_offsets(
        self, places: Iterable[Place], isolation: Isolation = Isolation.READ_COMMITTED
    ) -> dict[Place, int]:
        """Return the offset after the last record of each partition that a reader may see.

        Under read_committed that is the last stable offset: the first open transaction ends it.

        Raises
        ------
        InputLostError
            If a partition does not exist.
        """
        return self._offsets(dict.fromkeys(places, OffsetSpec.LATEST), isolation)

    def offsets_at(
        self, timestamps_ms: Mapping[Place, int], isolation: Isolation = Isolation.READ_COMMITTED
    ) -> dict[Place, int | None]:
        """Return the offset of each partition's first record that is at least as late.

        None stands for "no such record that a reader may see yet". Timestamps are milliseconds
        since 1970, not negative; Kafka takes negative ones for other questions.

        Raises
        ------
        InputLostError
            If a partition does not exist.
        """
        found = self._offsets(timestamps_ms, isolation)
        return {place: offset if offset >= 0 else None for place, offset in found.items()}

    # -- groups -------------------------------------------------------------------------------

    def committed_offsets(self, group: str) -> dict[Place, int]:
        """Return the group's offsets; empty for a group that Kafka does not know."""
        return {place: offset for place, (offset, _) in self._committed(group).items()}

    def committed_notes(self, group: str) -> dict[Place, str]:
        """Return what stands beside the group's offsets; empty for a group that Kafka does not know."""
        return {place: note for place, (_, note) in self._committed(group).items()}

    def _committed(self, group: str) -> dict[Place, tuple[int, str]]:
        found = self._wire.call(
            f"read the offsets of group {group}", lambda admin: admin.list_group_offsets({group: None})
        )
        return {
            (place.topic, place.partition): (int(entry.offset), str(entry.metadata or ""))
            for place, entry in found[group].items()
            if entry.offset >= 0
        }

    def commit_offsets(
        self,
        group: str,
        offsets: Mapping[Place, int],
        direction: OffsetDirection = OffsetDirection.FORWARD_ONLY,
        note: str = "",
    ) -> GroupCommit:
        """Store `offsets` for a group that nobody else is a member of.

        Under FORWARD_ONLY a partition that is already at or beyond its new offset stays as it
        is. Reading and writing are two requests: only the owner of the job may call this.

        Parameters
        ----------
        note
            Stands beside each offset that is stored.

        Raises
        ------
        EnvironmentFault
            If Kafka refuses a partition for good, such as one that was deleted.
        """
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

        def alter(admin: Any) -> GroupCommit:
            for place, error in admin.alter_group_offsets(group, entries).items():
                if error.errno in _ACTIVE_MEMBERS:
                    return GroupCommit.ACTIVE_MEMBERS
                if error.errno != Code.NONE:
                    raise error(f"{place.topic}-{place.partition} of group {group}")
            return GroupCommit.COMMITTED

        return self._wire.call(f"store the offsets of group {group}", alter)

    # -- checks before a start ----------------------------------------------------------------

    def broker_transaction_max_timeout_ms(self) -> int:
        """Return the longest transaction that every broker allows.

        Kafka's default is returned where a broker does not show its settings to this principal.
        """

        def read(admin: Any) -> int:
            brokers = [str(row["broker_id"]) for row in admin.describe_cluster()["brokers"]]
            values = _settings(admin, ConfigResourceType.BROKER, brokers, "transaction.max.timeout.ms")
            return min(values.values(), default=_DEFAULT_TRANSACTION_MAX_TIMEOUT_MS)

        try:
            return self._wire.call("read the brokers' settings", read)
        except AuthorizationError:
            return _DEFAULT_TRANSACTION_MAX_TIMEOUT_MS

    def probe_transactional_id(self, transactional_id: str, timeout_ms: int) -> None:
        """Check that transactions of `timeout_ms` may be used under `transactional_id`.

        Called once before a job starts. It takes a new epoch of the id, so it aborts what is
        open under it and fences its producers: use an id of its own.

        Raises
        ------
        ConfigError
            If the broker does not allow transactions of that length.
        AuthorizationError
            If the principal may not use the id.
        BrokerUnavailableError
            If no broker answered in time, or the coordinator did not settle.
        """
        wire, code = self._wire, int(Code.COORDINATOR_NOT_AVAILABLE)
        lost: BrokerUnavailableError | None = None
        for left_ms in pauses_ms(wire.timeout_ms, wire.clock):
            try:
                code = wire.init_producer_id(transactional_id, timeout_ms, connect_within_ms=left_ms).code
                lost = None
            except BrokerUnavailableError as unanswered:
                lost = unanswered
                continue
            except AuthorizationError as refused:
                # Without DESCRIBE on the id already the question for its coordinator is refused.
                if getattr(refused.__cause__, "errno", 0) != Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
                    raise
                code = int(Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
                break
            if code not in UNSETTLED:
                break
        if lost is not None:
            raise lost
        if code == Code.NONE:
            return
        if code == Code.INVALID_TRANSACTION_TIMEOUT:
            raise self._timeout_too_long(timeout_ms)
        if code == Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
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
                why=f"the last answer was {name_of(code)}",
                what_to_do="check that the topic __transaction_state can have its replicas",
                code=code,
            )
        raise EnvironmentFault(
            f"Kafka refuses transactional id {transactional_id!r} with {name_of(code)}", code=code
        )

    # -- inside -------------------------------------------------------------------------------

    def _timeout_too_long(self, timeout_ms: int) -> ConfigError:
        maximum_ms = self.broker_transaction_max_timeout_ms()
        # A hidden maximum reads as Kafka's default, which may contradict the refusal.
        known = f", which is {maximum_ms} ms" if maximum_ms < timeout_ms else ""
        return ConfigError(
            f"A transaction timeout of {timeout_ms} ms cannot be used",
            why=f"it exceeds the broker's transaction.max.timeout.ms{known}",
            what_to_do="lower the transaction timeout of the sink or raise the broker's maximum",
            timeout_ms=timeout_ms,
            maximum_ms=maximum_ms if known else None,
        )

    def _max_message_bytes(self, names: list[str]) -> dict[str, int]:
        try:
            return self._wire.call(
                "read the topics' settings",
                lambda admin: _settings(admin, ConfigResourceType.TOPIC, names, "max.message.bytes"),
            )
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
                raise InputLostError("A Kafka partition does not exist", why=str(unknown)) from unknown
            return found

        found = self._wire.call("read partition offsets", read)
        return {(place.topic, place.partition): int(entry.offset) for place, entry in found.items()}


def unknown_topic(topic: str, servers: str, *, of: str = "") -> GraphError:
    """Return the error about a topic that somebody named and no broker knows.

    Parameters
    ----------
    of
        Who named it, such as ``"source 'orders'"``.
    """
    return GraphError(
        f"the topic '{topic}' {f'of {of} ' if of else ''}does not exist",
        why=f"the brokers at {servers} do not know it",
        what_to_do="create it, or correct its name",
        topic=topic,
    )


def _described_topics(admin: Any, names: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for row in admin.describe_topics(names):
        if row["error_code"] == Code.NONE:
            rows.append(row)
        elif row["error_code"] != Code.UNKNOWN_TOPIC_OR_PARTITION:
            raise kafka_errors.for_code(row["error_code"])(row["name"])
    return rows


def _topic_id(value: object) -> str | None:
    text = str(value or "")
    return text if text.strip("0-A=") else None


def _settings(admin: Any, kind: Any, names: list[str], setting: str) -> dict[str, int]:
    """Return `setting` by resource name, without the resources that do not show it."""
    resources = [ConfigResource(kind, name, {setting: None}) for name in names]
    found = admin.describe_configs(resources, config_filter="all").get(kind.name.lower(), {})
    return {
        name: int(settings[setting]["value"])
        for name, settings in found.items()
        if settings.get(setting, {}).get("value") is not None
    }
