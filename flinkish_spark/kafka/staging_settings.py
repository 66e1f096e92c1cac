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
from flinkish_spark.kafka.options import KafkaConnection

_PREFIX = "kafka."
#: The Java producer's default for max.request.size.
DEFAULT_MAX_REQUEST_BYTES = 1_048_576


class Oversize(enum.Enum):
    """What to do with a record that is larger than the limit; the values are the JVM writer's."""

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
    """

    codec: Codec = Codec.NONE
    batch_bytes: int = 262_144
    max_request_bytes: int | None = None
    request_timeout_ms: int = 30_000
    delivery_timeout_ms: int = 120_000

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name != "codec" and value is not None:
                require_positive(one.name, value)

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> ProducerSettings:
        """Return what `settings` say, under Kafka's names, with or without ``kafka.`` before them.

        ``acks`` may be given if it is ``all``, and ``linger.ms``, which has no meaning here: what
        is written is sent when there is enough of it, or when the transaction is prepared.

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
        return cls(**parsed)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingSettings:
    """Everything a task needs to write one transaction; safe to print, and to pickle into tasks.

    Parameters
    ----------
    connection
        Where Kafka is.
    transactional_id
        Of this task attempt alone: two attempts that share one fence each other.
    transaction_timeout_ms
        How long the transaction may stay open until it is committed; at most the broker's
        transaction.max.timeout.ms.
    max_record_bytes
        The most a record may take with everything around it; at most what its topic takes.
    default_topic
        The topic of records that name none.
    oversize
        What to do with larger records.
    dead_letter_topic
        Where they go under ``Oversize.DEAD_LETTER``, as part of the same transaction.
    producer
        How batches are made and sent.
    """

    connection: KafkaConnection
    transactional_id: str
    transaction_timeout_ms: int
    max_record_bytes: int = DEFAULT_MAX_REQUEST_BYTES
    default_topic: str | None = None
    oversize: Oversize = Oversize.FAIL
    dead_letter_topic: str | None = None
    producer: ProducerSettings = field(default_factory=ProducerSettings)

    def __post_init__(self) -> None:
        require_positive("transaction_timeout_ms", self.transaction_timeout_ms)
        require_positive("max_record_bytes", self.max_record_bytes)
        if not self.transactional_id:
            raise ConfigError("a Kafka transaction needs a transactional id")
        if self.oversize is Oversize.DEAD_LETTER and not self.dead_letter_topic:
            raise ConfigError(
                "oversize records go to the dead-letter topic, and there is none",
                what_to_do="name a topic",
            )

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


def _acks(name: str, value: str) -> None:
    if value.strip().lower() not in ("all", "-1"):
        raise ConfigError(
            f"the producer setting '{name}' must be all",
            why="a record that only the leader has can be lost after its transaction was prepared",
            setting=name,
        )


#: Kafka's name -> our attribute ("" for none) and how a value is read.
_KNOWN: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "acks": ("", _acks),
    "batch.size": ("batch_bytes", _whole),
    "compression.type": ("codec", _codec),
    "delivery.timeout.ms": ("delivery_timeout_ms", _whole),
    "linger.ms": ("", _pause),
    "max.request.size": ("max_request_bytes", _whole),
    "request.timeout.ms": ("request_timeout_ms", _whole),
}
