"""Settings of readers and producers in tasks, and guarantees of a Kafka sink."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flinkish_spark.connectors.kafka.client.client import MAX_FRAME_BYTES, Isolation
from flinkish_spark.connectors.kafka.client.codecs import Codec
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection, is_connection_option
from flinkish_spark.connectors.kafka.client.fetch import FetchLimits
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.protocol.choices import Choice, closest
from flinkish_spark.protocol.ids import Place
from flinkish_spark.types.record_time import TimeLimits

_PREFIX = "kafka."
#: Room for the parts of an answer other than records.
_FRAME_RESERVE_BYTES = 1_000_000
#: How long a loss must last before it is confirmed.
DOUBT_MS = 2_000

#: Settings of the Java consumer about polling, groups and sockets. They are accepted and have no effect: this
#: reader does not poll, joins no group and creates no topics.
HARMLESS_OPTIONS = frozenset(
    {
        *("allow.auto.create.topics", "auto.commit.interval.ms", "heartbeat.interval.ms"),
        *("max.poll.interval.ms", "max.poll.records", "metric.reporters", "metrics.num.samples"),
        *("metrics.recording.level", "metrics.sample.window.ms", "receive.buffer.bytes"),
        *("send.buffer.bytes", "session.timeout.ms"),
    }
)


#: Option of this package: a source reads the column ``leaderEpoch``.
INCLUDE_LEADER_EPOCH = "flinkish.include.leader.epoch"


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """Settings of a :class:`.RangeReader`; names, and most defaults, are those of Kafka's consumer."""

    isolation: Isolation = Isolation.READ_COMMITTED
    #: Whether a lost range is an error; otherwise it is skipped and reported.
    fail_on_data_loss: bool = True
    include_headers: bool = False
    #: Largest size of an answer; the smaller limit counts, since a Fetch is for one partition. A single
    #: larger batch is read nevertheless. A reader holds two answers in memory. Kafka's default per partition,
    #: 1 MiB, is meant for answers with many partitions, and makes this reader 50 % slower.
    fetch_max_bytes: int = 52_428_800
    max_partition_fetch_bytes: int = 4_194_304
    #: How long a broker may wait for how many bytes. Used only while a broker does not yet have records that
    #: the planner has seen; existing records are read without waiting.
    fetch_max_wait_ms: int = 500
    fetch_min_bytes: int = 1
    check_crcs: bool = True
    #: Timeout of a request; after it the connection is closed.
    request_timeout_ms: int = 30_000
    #: How long reading may make no progress before it fails; at least four seconds, so that a loss is not
    #: reported as an outage.
    default_api_timeout_ms: int = 60_000
    include_leader_epoch: bool = False
    #: Rack of the readers; they read from a replica in it if the brokers select replicas by rack. Empty for
    #: the leader.
    client_rack: str = ""

    @classmethod
    def from_options(
        cls,
        options: Mapping[str, str],
        *,
        fail_on_data_loss: bool = True,
        include_headers: bool = False,
        include_leader_epoch: bool = False,
    ) -> ReaderSettings:
        """Translate consumer settings, by Kafka's names with or without the prefix ``kafka.``."""
        given: dict[str, Any] = {}
        for option, text in options.items():
            bare = option.removeprefix(_PREFIX)
            if bare in HARMLESS_OPTIONS:
                continue
            if bare not in READER_OPTIONS:
                raise ConfigError(
                    f"Kafka option {option!r} cannot be used",
                    what_to_do=closest(bare, READER_OPTIONS | HARMLESS_OPTIONS)
                    or f"remove it; known are {', '.join(sorted(READER_OPTIONS))}",
                )
            name, parse = _READER_SETTINGS[bare]
            given[name] = parse(option, text)
        return cls(
            fail_on_data_loss=fail_on_data_loss,
            include_headers=include_headers,
            include_leader_epoch=include_leader_epoch,
            **given,
        )

    @property
    def patience_ms(self) -> int:
        return max(self.default_api_timeout_ms, 2 * DOUBT_MS)

    def fetch_limits(self) -> FetchLimits:
        largest = MAX_FRAME_BYTES - _FRAME_RESERVE_BYTES
        return FetchLimits(
            self.isolation,
            min(self.fetch_max_bytes, largest),
            min(self.max_partition_fetch_bytes, largest),
            min(self.request_timeout_ms, self.patience_ms),
            rack=self.client_rack,
        )

    def waiting_limits(self) -> FetchLimits:
        limits = self.fetch_limits()
        # A delay longer than the request timeout would close the connection.
        max_wait_ms = min(self.fetch_max_wait_ms, limits.request_timeout_ms // 2)
        return replace(limits, max_wait_ms=max_wait_ms, min_bytes=self.fetch_min_bytes)


#: Parses a setting's text. No message quotes the text, which may be a secret put there by mistake.
_Parse = Callable[[str, str], Any]


def _parse_whole(least: int) -> _Parse:
    def parse(name: str, text: str) -> int:
        if not text.strip().isdecimal() or not least <= int(text) < 2**31:
            raise _make_setting_error(name, f"a whole number of at least {least}")
        return int(text)

    return parse


def _parse_word(known: Mapping[str, Any]) -> _Parse:
    def parse(name: str, text: str) -> Any:
        word = text.strip().lower()
        if word not in known:
            *first, last = known
            raise _make_setting_error(name, f"{', '.join(first)} or {last}")
        return known[word]

    return parse


def _make_setting_error(name: str, wanted: str) -> ConfigError:
    return ConfigError(
        f"the Kafka setting '{name}' must be {wanted}",
        what_to_do="give such a value, or leave it out for the default",
    )


_TRUTH = _parse_word({"true": True, "false": False})
_ISOLATION = {"read_committed": Isolation.READ_COMMITTED, "read_uncommitted": Isolation.READ_UNCOMMITTED}
#: Kafka's name -> (field, how its text is read).
_READER_SETTINGS: dict[str, tuple[str, _Parse]] = {
    "check.crcs": ("check_crcs", _TRUTH),
    "client.rack": ("client_rack", lambda _, text: text.strip()),
    "default.api.timeout.ms": ("default_api_timeout_ms", _parse_whole(1)),
    "fetch.max.bytes": ("fetch_max_bytes", _parse_whole(1)),
    "fetch.max.wait.ms": ("fetch_max_wait_ms", _parse_whole(0)),
    "fetch.min.bytes": ("fetch_min_bytes", _parse_whole(0)),
    "isolation.level": ("isolation", _parse_word(_ISOLATION)),
    "max.partition.fetch.bytes": ("max_partition_fetch_bytes", _parse_whole(1)),
    "request.timeout.ms": ("request_timeout_ms", _parse_whole(1)),
}
#: Supported consumer settings, without the prefix ``kafka.``.
READER_OPTIONS = frozenset(_READER_SETTINGS)


class DeliveryGuarantee(Choice):
    """Guarantee of a Kafka sink for its records in case of failures."""

    #: Transactions that are committed with the checkpoint: a read_committed reader sees each record once.
    EXACTLY_ONCE = "exactly-once"
    #: An idempotent producer; all in-sync replicas acknowledge before the task is done. Records are visible
    #: at once, and written again if they are processed again after a failure.
    AT_LEAST_ONCE = "at-least-once"
    #: The producer's settings decide (``acks`` may be 0 or 1). A task only flushes at its end, so records can
    #: be lost or written twice.
    NONE = "none"


class RecordHeaders(Choice):
    """Headers that a Kafka sink adds to every record; each costs bytes and time."""

    #: `flinkish-job`, `flinkish-uid`, `flinkish-checkpoint` and `flinkish-batch`.
    FULL = "FULL"
    #: `flinkish-batch` only, by which the others can be looked up.
    BATCH = "BATCH"
    #: None, the default. After a rewind to a checkpoint readers cannot tell dead records from live ones.
    NONE = "NONE"


#: The Java producer's default for max.request.size.
DEFAULT_MAX_REQUEST_BYTES = 1_048_576


class Acks(enum.IntEnum):
    """Acknowledgements that a record needs; the numbers are the protocol's."""

    NOBODY = 0
    LEADER = 1
    ALL = -1


class OnRefusal(enum.Enum):
    FAIL = "fail"
    DROP = "drop"
    DEAD_LETTER = "dead-letter"


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    codec: Codec = Codec.NONE
    #: ``batch.size``: largest batch before compression, except for a single record; also the number of bytes
    #: after which records without a key go to the next partition.
    batch_bytes: int = 262_144
    #: ``max.request.size``: largest record and largest request. None: 1 MiB, or more if the limit for records
    #: is higher.
    max_request_bytes: int | None = None
    #: ``request.timeout.ms``: how long a broker may take to answer.
    request_timeout_ms: int = 30_000
    #: ``delivery.timeout.ms``: how long an operation is retried before the attempt fails.
    delivery_timeout_ms: int = 120_000
    #: ``acks``; other values than ALL only with ``DeliveryGuarantee.NONE``.
    acks: Acks = Acks.ALL

    @classmethod
    def of(
        cls, settings: Mapping[str, str], guarantee: DeliveryGuarantee = DeliveryGuarantee.EXACTLY_ONCE
    ) -> ProducerSettings:
        """Parse settings by Kafka's names, with or without the prefix ``kafka.``."""
        parsed: dict[str, Any] = {}
        for given, value in settings.items():
            name = given.removeprefix(_PREFIX)
            if name not in PRODUCER_SETTINGS:
                what = "is not known: a setting is taken if it changes nothing that the sink promises"
                raise ConfigError(f"the producer setting '{given}' {what}", what_to_do=_advise(name))
            if not isinstance(value, str):
                what = f"the producer setting '{given}' must be text"  # type: ignore[unreachable]
                raise ConfigError(what, what_to_do="write it in quotes")
            if name in PRODUCER_WITHOUT_MEANING:
                continue
            attribute, parse = _KNOWN[name]
            result = parse(name, value)
            if attribute:
                parsed[attribute] = result
        if guarantee is not DeliveryGuarantee.NONE and parsed.get("acks", Acks.ALL) is not Acks.ALL:
            what = "the producer setting 'acks' must be all: a record that only the leader has can be lost"
            raise ConfigError(what, what_to_do="leave it out")
        return cls(**parsed)


def _advise(unknown: str) -> str:
    if is_connection_option(unknown):
        return f"give it to options: options={{'{unknown}': ...}}"
    return closest(unknown, PRODUCER_SETTINGS) or f"leave it out; known are {', '.join(sorted(_KNOWN))}"


@dataclass(frozen=True, slots=True)
class SharedProducer:
    """A shared transaction as a task needs to know it to write into it."""

    #: Producer of the transaction, which the driver began.
    producer_id: int
    producer_epoch: int
    #: Topic -> next sequence number of each partition; all of them are in the transaction.
    next_sequences: Mapping[str, Sequence[int]]
    #: Transactional id from which the task's attempts take their tickets; no records are written with it.
    ticket: str

    def find_next_sequence(self, place: Place) -> int | None:
        topic, partition = place
        known = self.next_sequences.get(topic, ())
        return known[partition] if partition < len(known) else None


@dataclass(frozen=True, slots=True)
class TaskAttempt:
    partition: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingSettings:
    """Everything a task needs to write one transaction; safe to print and to pickle."""

    connection: KafkaConnection
    #: Id of this task attempt alone: two attempts that share one fence each other. None without transactions,
    #: that is under every guarantee but EXACTLY_ONCE.
    transactional_id: str | None
    #: How long the transaction may stay open until it is committed; at most the broker's
    #: transaction.max.timeout.ms.
    transaction_timeout_ms: int
    guarantee: DeliveryGuarantee = DeliveryGuarantee.EXACTLY_ONCE
    #: Uid of the sink, for its dead letters.
    uid: str = ""
    #: Largest record including its overhead; at most the topic's limit.
    max_record_bytes: int = DEFAULT_MAX_REQUEST_BYTES
    #: The same for dead letters; None: as for other records.
    max_dead_letter_bytes: int | None = None
    #: Allowed difference between now and the timestamps of records.
    times: TimeLimits = field(default_factory=TimeLimits)
    compacted: frozenset[str] = frozenset()
    #: Topic of records that name none.
    default_topic: str | None = None
    #: Topics that records may name; None: any.
    topics: frozenset[str] | None = None
    #: Number of partitions of each of `topics`, to check records that name one. None: ask Kafka, and fail the
    #: task if a record names another one.
    partitions: Mapping[str, int] | None = None
    #: Policy for larger records.
    oversize: OnRefusal = OnRefusal.FAIL
    #: Topic for ``OnRefusal.DEAD_LETTER``, in the same transaction.
    dead_letter_topic: str | None = None
    #: Policy and topic for records that cannot be written for another reason.
    bad_record: OnRefusal = OnRefusal.FAIL
    bad_record_topic: str | None = None
    producer: ProducerSettings = field(default_factory=ProducerSettings)
    #: The shared transaction, if there is one; then `transactional_id` is its id.
    shared: SharedProducer | None = None
    #: The task attempt: then `transactional_id` is a prefix, and the id is chosen when the transaction
    #: begins.
    attempt: TaskAttempt | None = None
    #: Number of transactions that the task has at a time; they share the memory of one.
    transactions_of_task: int = 1

    def __post_init__(self) -> None:
        assert (self.guarantee is DeliveryGuarantee.EXACTLY_ONCE) is bool(self.transactional_id)
        assert self.oversize is not OnRefusal.DEAD_LETTER or self.dead_letter_topic
        assert self.bad_record is not OnRefusal.DEAD_LETTER or self.bad_record_topic

    @property
    def dead_letter_limit_bytes(self) -> int:
        """Largest dead letter; larger records are truncated."""
        own = self.max_dead_letter_bytes
        return self.record_limit_bytes if own is None else min(own, self.request_limit_bytes)

    @property
    def record_limit_bytes(self) -> int:
        given = self.producer.max_request_bytes
        return self.max_record_bytes if given is None else min(given, self.max_record_bytes)

    @property
    def request_limit_bytes(self) -> int:
        """Largest total size of a request's batches, except for a single batch."""
        return self.producer.max_request_bytes or max(DEFAULT_MAX_REQUEST_BYTES, self.max_record_bytes)


#: Kafka's name -> attribute ("" for none) and parser of its value.
_KNOWN: dict[str, tuple[str, _Parse]] = {
    "acks": ("acks", _parse_word({"all": Acks.ALL, "-1": Acks.ALL, "1": Acks.LEADER, "0": Acks.NOBODY})),
    "batch.size": ("batch_bytes", _parse_whole(1)),
    "compression.type": ("codec", _parse_word({codec.name.lower(): codec for codec in Codec})),
    "delivery.timeout.ms": ("delivery_timeout_ms", _parse_whole(1)),
    # The sink checks it against its guarantee.
    "enable.idempotence": ("", _TRUTH),
    # No effect: records are sent when there are enough of them, or when the task ends.
    "linger.ms": ("", _parse_whole(0)),
    "max.request.size": ("max_request_bytes", _parse_whole(1)),
    "request.timeout.ms": ("request_timeout_ms", _parse_whole(1)),
}
#: Settings of the Java producer without a meaning here; accepted so that existing settings can be used.
PRODUCER_WITHOUT_MEANING = frozenset(
    {
        *("buffer.memory", "connections.max.idle.ms", "max.block.ms"),
        *("max.in.flight.requests.per.connection", "metadata.max.age.ms", "metadata.max.idle.ms"),
        *("metric.reporters", "metrics.num.samples", "metrics.recording.level"),
        *("metrics.sample.window.ms", "partitioner.adaptive.partitioning.enable"),
        *("partitioner.availability.timeout.ms", "receive.buffer.bytes", "reconnect.backoff.max.ms"),
        *("reconnect.backoff.ms", "retries", "retry.backoff.max.ms", "retry.backoff.ms"),
        *("send.buffer.bytes", "socket.connection.setup.timeout.max.ms"),
        "socket.connection.setup.timeout.ms",
    }
)
#: Producer settings that do not affect the guarantee of a sink.
PRODUCER_SETTINGS = frozenset(_KNOWN) | PRODUCER_WITHOUT_MEANING
