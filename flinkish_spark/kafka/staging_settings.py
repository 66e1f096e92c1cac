"""How a task writes into its Kafka transaction: checked on the driver, pickled into tasks.

Producer settings have Kafka's names. Only those that mean something here are taken; an unknown
one is refused, because a setting that silently does nothing is found out in production. No
message quotes a value: people put secrets among them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from flinkish_spark.config import require_positive
from flinkish_spark.errors import ConfigError
from flinkish_spark.kafka.compression import Codec
from flinkish_spark.kafka.delivery import DeliveryGuarantee
from flinkish_spark.kafka.options import KafkaConnection

_PREFIX = "kafka."
#: The Java producer's default for max.request.size.
DEFAULT_MAX_REQUEST_BYTES = 1_048_576


class Acks(enum.IntEnum):
    """Whose acknowledgement a record needs; the numbers are the protocol's."""

    NOBODY = 0
    LEADER = 1
    ALL = -1


class OnRefusal(enum.Enum):
    """What to do with a record that cannot be written as it is; the values are the JVM writer's."""

    FAIL = "fail"
    DROP = "drop"
    DEAD_LETTER = "dead-letter"


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """The settings of a Kafka producer that mean something to this writer.

    Parameters
    ----------
    codec
        ``compression.type``.
    batch_bytes
        ``batch.size``: no batch is larger before compression, but for one with a single record;
        also how much goes to one partition before records without key turn to the next.
    max_request_bytes
        ``max.request.size``: the most one record may take, and the most one request takes.
        None: 1 MiB, or more where the limit for records is higher.
    request_timeout_ms
        ``request.timeout.ms``: how long a broker may take to answer.
    delivery_timeout_ms
        ``delivery.timeout.ms``: how long one thing is tried again before the attempt fails.
    acks
        ``acks``; anything but ALL is for ``DeliveryGuarantee.NONE``.
    """

    codec: Codec = Codec.NONE
    batch_bytes: int = 262_144
    max_request_bytes: int | None = None
    request_timeout_ms: int = 30_000
    delivery_timeout_ms: int = 120_000
    acks: Acks = Acks.ALL

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name not in ("codec", "acks") and value is not None:
                require_positive(one.name, value)

    @classmethod
    def of(
        cls, settings: Mapping[str, str], guarantee: DeliveryGuarantee = DeliveryGuarantee.EXACTLY_ONCE
    ) -> ProducerSettings:
        """Return what `settings` say, under Kafka's names, with or without ``kafka.`` before them.

        Unless the guarantee is NONE, ``acks`` may be given only as ``all`` and ``enable.idempotence`` only
        as ``true``. ``linger.ms`` has no meaning here: what is written is sent when there is enough of
        it, or when the task ends.

        Raises
        ------
        ConfigError
            If a name is unknown (the message lists the known ones) or a value cannot be used.

        Examples
        --------
        >>> ProducerSettings.of({"compression.type": "zstd", "kafka.batch.size": "65536"}).batch_bytes
        65536
        """
        parsed: dict[str, Any] = {}
        for given, value in settings.items():
            name = given.removeprefix(_PREFIX)
            if name not in _KNOWN:
                raise ConfigError(
                    f"the producer setting '{given}' is not known",
                    why="records are written from Python, without Kafka's Java producer",
                    what_to_do=f"leave it out; known are {', '.join(sorted(_KNOWN))}",
                    setting=given,
                )
            attribute, parse = _KNOWN[name]
            result = parse(name, value)
            if attribute:
                parsed[attribute] = result
        if guarantee is not DeliveryGuarantee.NONE and parsed.get("acks", Acks.ALL) is not Acks.ALL:
            raise ConfigError(
                "the producer setting 'acks' must be all",
                why="a record that only the leader has can be lost after its task was done",
                setting="acks",
            )
        return cls(**parsed)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingSettings:
    """Everything a task needs to write one transaction; safe to print, and to pickle into tasks.

    Parameters
    ----------
    connection
        Where Kafka is.
    transactional_id
        Of this task attempt alone: two attempts that share one fence each other. None where there is no
        transaction, which is under every guarantee but EXACTLY_ONCE.
    transaction_timeout_ms
        How long the transaction may stay open until it is committed; at most the broker's
        transaction.max.timeout.ms.
    guarantee
        What is promised about the records.
    uid
        Of the sink, for its dead letters.
    max_record_bytes
        The most a record may take with everything around it; at most what its topic takes.
    max_dead_letter_bytes
        The same for dead letters; None: as for other records.
    default_topic
        The topic of records that name none.
    topics
        Those that records may name; None: any.
    partitions
        How many each of `topics` has, for records that name one; None: Kafka is asked, and a record that
        names another one fails the task.
    oversize
        What to do with larger records.
    dead_letter_topic
        Where they go under ``OnRefusal.DEAD_LETTER``, as part of the same transaction.
    bad_record, bad_record_topic
        The same for records that cannot be written for another reason.
    producer
        How batches are made and sent.
    """

    connection: KafkaConnection
    transactional_id: str | None
    transaction_timeout_ms: int
    guarantee: DeliveryGuarantee = DeliveryGuarantee.EXACTLY_ONCE
    uid: str = ""
    max_record_bytes: int = DEFAULT_MAX_REQUEST_BYTES
    max_dead_letter_bytes: int | None = None
    default_topic: str | None = None
    topics: frozenset[str] | None = None
    partitions: Mapping[str, int] | None = None
    oversize: OnRefusal = OnRefusal.FAIL
    dead_letter_topic: str | None = None
    bad_record: OnRefusal = OnRefusal.FAIL
    bad_record_topic: str | None = None
    producer: ProducerSettings = field(default_factory=ProducerSettings)

    def __post_init__(self) -> None:
        require_positive("transaction_timeout_ms", self.transaction_timeout_ms)
        require_positive("max_record_bytes", self.max_record_bytes)
        if (self.guarantee is DeliveryGuarantee.EXACTLY_ONCE) is not bool(self.transactional_id):
            raise ConfigError(
                "a Kafka transaction needs a transactional id, and nothing else has one",
                guarantee=self.guarantee,
            )
        for name, action, topic in (
            ("oversize", self.oversize, self.dead_letter_topic),
            ("bad", self.bad_record, self.bad_record_topic),
        ):
            if action is OnRefusal.DEAD_LETTER and not topic:
                raise ConfigError(
                    f"{name} records go to the dead-letter topic, and there is none",
                    what_to_do="name a topic",
                )

    @property
    def dead_letter_limit_bytes(self) -> int:
        """The most a dead letter may take; only the head of a larger record is kept."""
        own = self.max_dead_letter_bytes
        return self.record_limit_bytes if own is None else min(own, self.request_limit_bytes)

    @property
    def record_limit_bytes(self) -> int:
        """The most a record may take: the smaller of ours and ``max.request.size``."""
        given = self.producer.max_request_bytes
        return self.max_record_bytes if given is None else min(given, self.max_record_bytes)

    @property
    def request_limit_bytes(self) -> int:
        """The most the batches of one request may take, unless it is a single batch."""
        return self.producer.max_request_bytes or max(DEFAULT_MAX_REQUEST_BYTES, self.max_record_bytes)

    @property
    def batch_limit_bytes(self) -> int:
        """The most several records may take in one batch."""
        return min(self.producer.batch_bytes, self.record_limit_bytes)


def _codec(name: str, value: str) -> Codec:
    known = {codec.name.lower(): codec for codec in Codec}
    if value.strip().lower() not in known:
        raise ConfigError(f"the producer setting '{name}' must be one of {', '.join(known)}", setting=name)
    return known[value.strip().lower()]


def _whole(name: str, value: str) -> int:
    if not value.strip().isdecimal() or int(value) <= 0:
        raise ConfigError(f"the producer setting '{name}' must be a whole number above zero", setting=name)
    return int(value)


def _pause(name: str, value: str) -> None:
    if not value.strip().isdecimal():
        raise ConfigError(f"the producer setting '{name}' must be a whole number", setting=name)


def _acks(name: str, value: str) -> Acks:
    known = {"all": Acks.ALL, "-1": Acks.ALL, "1": Acks.LEADER, "0": Acks.NOBODY}
    if value.strip().lower() not in known:
        raise ConfigError(f"the producer setting '{name}' must be all, 1 or 0", setting=name)
    return known[value.strip().lower()]


def _truth(name: str, value: str) -> None:
    if value.strip().lower() not in ("true", "false"):
        raise ConfigError(f"the producer setting '{name}' must be true or false", setting=name)


#: Kafka's name -> our attribute ("" for none) and how a value is read.
_KNOWN: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "acks": ("acks", _acks),
    "batch.size": ("batch_bytes", _whole),
    "compression.type": ("codec", _codec),
    "delivery.timeout.ms": ("delivery_timeout_ms", _whole),
    # Checked against the guarantee by the sink; without one nothing here is idempotent.
    "enable.idempotence": ("", _truth),
    "linger.ms": ("", _pause),
    "max.request.size": ("max_request_bytes", _whole),
    "request.timeout.ms": ("request_timeout_ms", _whole),
}
