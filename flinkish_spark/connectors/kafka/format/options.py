"""The options of `format("kafka")`, parsed and checked."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlparse

from pyspark.sql import types as T

from flinkish_spark.connectors.kafka.chaining.upstream import UpstreamJob
from flinkish_spark.connectors.kafka.client.admin import TopicPattern
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection, is_connection_option
from flinkish_spark.connectors.kafka.client.settings import (
    INCLUDE_LEADER_EPOCH,
    ProducerSettings,
    ReaderSettings,
)
from flinkish_spark.connectors.rates import RateLimit
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.protocol.choices import closest
from flinkish_spark.protocol.ids import Place

_KAFKA = "kafka."

#: Of Spark's Kafka source.
READ = (
    *("assign", "subscribe", "subscribePattern", "startingOffsets", "startingTimestamp"),
    *("startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy", "failOnDataLoss"),
    *("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "minPartitions"),
    *("maxRecordsPerPartition", "includeHeaders"),
)
READ_BATCH_ONLY = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
#: Ours, for reading.
BARRIER_RECORDS = "flinkish.barrier.records"
PER_SECOND = "flinkish.max.offsets.per.second"
READ_OWN = ("flinkish.group.id", BARRIER_RECORDS, PER_SECOND, INCLUDE_LEADER_EPOCH)
#: Options about consumers that do not exist here: accepted, so that only one word has to change.
READ_WITHOUT_MEANING = (
    "groupIdPrefix",
    "kafkaConsumer.pollTimeoutMs",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "kafka.group.id",
)
WRITE = ("topic", "checkpointLocation")
#: What Spark itself puts among the options of any sink or source.
_OF_SPARK = ("path", "checkpointLocation", "queryName", "numPartitions", "__python_data_source_user_schema")

#: Set by this package inside an environment's job; not for users.
CONTROL_PATH = "flinkish.control.path"
#: The same: Spark gets what is to be read, and a pass of the job's own reads it.
PIECES = "flinkish.pieces"
#: The same: folder in which a job keeps where its source began.
FIRST_OFFSETS = "flinkish.first.offsets"
#: The same: uid of the source, and the control file beside which it is told what to hold back.
HELD_SOURCE, HELD_PATH = "flinkish.held.source", "flinkish.held.path"
#: The same: the upstream job whose checkpoints the source follows, see `UpstreamJob`.
UPSTREAM = "flinkish.upstream"
#: The same: the position that a seeded job begins with, and between which cuts that is.
UPSTREAM_START = "flinkish.upstream.start"

_REFUSED = {
    "kafka.auto.offset.reset": "set startingOffsets instead",
    "kafka.key.deserializer": "keys are always bytes; cast the column",
    "kafka.value.deserializer": "values are always bytes; cast the column",
    "kafka.key.serializer": "keys are bytes or strings; cast the column",
    "kafka.value.serializer": "values are bytes or strings; cast the column",
    "kafka.enable.auto.commit": "set flinkish.group.id to have offsets committed after the sink",
    "kafka.interceptor.classes": "there is no Java client here; leave it out",
    "kafka.transactional.id": "the sink leases transactional ids itself; leave it out",
}


def check_names(options: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse unknown options but those under ``kafka.``, which are left to the client they are for."""
    # Spark hands a data source its options with lower-case names.
    spelled = {name.lower(): name for name in (*known, *_OF_SPARK)}
    for name in sorted(options):
        if name.lower() in _REFUSED:
            what_to_do = _REFUSED[name.lower()]
            raise ConfigError(f"the option '{name}' cannot be set", what_to_do=what_to_do, option=name)
        if name.lower() in spelled or name.lower().startswith(_KAFKA):
            continue
        raise ConfigError(
            f"the Kafka {what} has no option '{name}'",
            what_to_do=closest(name, spelled.values())
            or f"choose from {', '.join(sorted(set(known)))}, and kafka.<client option>",
            option=name,
        )


def split_kafka_options(options: Mapping[str, str]) -> tuple[str, dict[str, str], dict[str, str]]:
    """Return bootstrap servers, connection options and client settings, without the prefix."""
    under = {
        name.lower().removeprefix(_KAFKA): value
        for name, value in options.items()
        if name.lower().startswith(_KAFKA)
    }
    servers = under.pop("bootstrap.servers", "").strip()
    if not servers:
        raise ConfigError(
            "the option 'kafka.bootstrap.servers' is missing",
            what_to_do='add .option("kafka.bootstrap.servers", "host:port,host:port")',
            option="kafka.bootstrap.servers",
        )
    connection = {name: value for name, value in under.items() if is_connection_option(name)}
    # Both the connection and the client have a say in how long an answer may take.
    client = {n: v for n, v in under.items() if n not in connection or n == "request.timeout.ms"}
    return servers, connection, client


def _unusable(name: str, text: str, what_to_do: str) -> ConfigError:
    return ConfigError(f"the option '{name}' is {text!r}", what_to_do=what_to_do, option=name)


class Given:
    """The options as they were given, read by Spark's names in any case."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._values = {name.lower(): value for name, value in options.items()}

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._values

    def text(self, name: str) -> str | None:
        value = self._values.get(name.lower())
        return None if value is None else value.strip()

    def flag(self, name: str, otherwise: bool) -> bool:
        value = self.text(name)
        if value is None:
            return otherwise
        if value.lower() not in ("true", "false"):
            raise _unusable(name, value, "set it to true or false")
        return value.lower() == "true"

    def positive(self, name: str) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if not value.isdecimal() or int(value) == 0:
            raise _unusable(name, value, "set it to a whole number above 0")
        return int(value)


#: Stand for "the first" and "behind the last" in Spark's JSON of offsets.
EARLIEST, LATEST = -2, -1
_OF_JOBS = (CONTROL_PATH, PIECES, FIRST_OFFSETS, HELD_SOURCE, HELD_PATH, UPSTREAM, UPSTREAM_START)
_UNIT_MS = {"": 1, "ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+)\s*(ms|s|m|min|h|d|)", re.IGNORECASE)
_DEFAULT_TRIGGER_DELAY_MS = 900_000
_Choice = TypeVar("_Choice", bound=enum.Enum)


@dataclass(frozen=True, slots=True)
class Subscription:
    """Which partitions are read; exactly one of the three is set."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    assigned: tuple[Place, ...] = ()


class NoOffsetStrategy(enum.Enum):
    """What a timestamp means that no record of a partition reaches."""

    ERROR = "error"
    LATEST = "latest"


class BarrierRecordPolicy(enum.Enum):
    """What is done with the barrier records of another job that lie among the records."""

    #: They are records like any other, as to every other reader.
    DELIVER = "deliver"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of what is read, before the brokers were asked."""

    #: EARLIEST or LATEST for all partitions, or None.
    everywhere: int | None = None
    #: An offset, EARLIEST or LATEST by partition.
    offsets: Mapping[Place, int] | None = None
    #: For all partitions, or None.
    timestamp_ms: int | None = None
    timestamps_ms: Mapping[Place, int] | None = None


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Everything a reader needs; safe to pickle into tasks, holds secrets inside `connection` only."""

    connection: KafkaConnection
    reader: ReaderSettings
    subscription: Subscription
    starting: Bound
    ending: Bound
    when_no_offset: NoOffsetStrategy
    max_per_trigger: int | None
    min_per_trigger: int | None
    max_trigger_delay_ms: int
    min_partitions: int | None
    max_per_partition: int | None
    group_id: str
    control_path: str
    #: Whether Spark gets what is to be read, in place of records.
    gives_pieces: bool
    first_offsets: str
    barrier_records: BarrierRecordPolicy
    upstream: UpstreamJob | None
    upstream_start: str
    held_source: str = ""
    held_path: str = ""
    pace: RateLimit = field(default_factory=RateLimit)


def parse_batch(options: Mapping[str, str]) -> SourceOptions:
    return _parse(options, READ_BATCH_ONLY, otherwise=EARLIEST)


def parse_stream(options: Mapping[str, str]) -> SourceOptions:
    given = Given(options)
    for name in READ_BATCH_ONLY:
        if (text := given.text(name)) is not None:
            raise _unusable(name, text, "leave it out: it is for batch reads, a stream has no end")
    return _parse(options, (), otherwise=LATEST)


def parse_any(options: Mapping[str, str]) -> SourceOptions:
    """Return the options of a read of which Spark has not said yet whether it is a stream."""
    return _parse(options, READ_BATCH_ONLY, otherwise=LATEST)


def _parse(options: Mapping[str, str], extra: tuple[str, ...], *, otherwise: int) -> SourceOptions:
    known = (*READ, *READ_OWN, *READ_WITHOUT_MEANING, *extra, *_OF_JOBS)
    check_names(options, known, "source")
    given = Given(options)
    servers, connection, consumer = split_kafka_options(options)
    consumer.pop("group.id", None)
    least, most = given.positive("minOffsetsPerTrigger"), given.positive("maxOffsetsPerTrigger")
    if least is not None and most is not None and least > most:
        raise ConfigError(
            f"minOffsetsPerTrigger ({least}) is above maxOffsetsPerTrigger ({most})",
            what_to_do="lower the first or raise the second",
        )
    return SourceOptions(
        connection=KafkaConnection(servers, connection),
        reader=ReaderSettings.from_options(
            consumer,
            fail_on_data_loss=given.flag("failOnDataLoss", True),
            include_headers=given.flag("includeHeaders", False),
            include_leader_epoch=given.flag(INCLUDE_LEADER_EPOCH, False),
        ),
        subscription=_subscription(given),
        starting=_bound(given, "starting", otherwise),
        ending=_bound(given, "ending", LATEST),
        when_no_offset=_one_of(given, "startingOffsetsByTimestampStrategy", NoOffsetStrategy.ERROR),
        max_per_trigger=most,
        min_per_trigger=least,
        max_trigger_delay_ms=_duration_ms(given, "maxTriggerDelay", _DEFAULT_TRIGGER_DELAY_MS),
        min_partitions=given.positive("minPartitions"),
        max_per_partition=given.positive("maxRecordsPerPartition"),
        group_id=given.text("flinkish.group.id") or "",
        control_path=given.text(CONTROL_PATH) or "",
        gives_pieces=given.text(PIECES) == "true",
        first_offsets=given.text(FIRST_OFFSETS) or "",
        barrier_records=_one_of(given, BARRIER_RECORDS, BarrierRecordPolicy.DELIVER),
        upstream=_upstream(given),
        upstream_start=given.text(UPSTREAM_START) or "",
        held_source=given.text(HELD_SOURCE) or "",
        held_path=given.text(HELD_PATH) or "",
        pace=_pace(given),
    )


def _subscription(given: Given) -> Subscription:
    chosen = [name for name in ("assign", "subscribe", "subscribePattern") if name in given]
    if len(chosen) != 1:
        raise ConfigError(
            f"{' and '.join(chosen) or 'none'} of assign, subscribe and subscribePattern is set",
            what_to_do="set exactly one of them",
        )
    text = given.text(chosen[0]) or ""
    if chosen[0] == "subscribePattern":
        TopicPattern(text)
        if text:
            return Subscription(pattern=text)
    elif chosen[0] == "subscribe":
        topics = tuple(dict.fromkeys(t.strip() for t in text.split(",") if t.strip()))
        if topics:
            return Subscription(topics=topics)
    else:
        return Subscription(assigned=_assigned(text))
    raise _unusable(chosen[0], text, "name at least one topic")


def _assigned(text: str) -> tuple[Place, ...]:
    example = '{"topicA":[0,1],"topicB":[2,4]}'
    found = _json_object("assign", text, example)
    places = []
    for topic, partitions in found.items():
        if not isinstance(partitions, list) or not all(_is_whole(p) and p >= 0 for p in partitions):
            raise _unusable("assign", text, f"write it like {example}")
        places += [(topic, p) for p in partitions]
    if not places:
        raise _unusable("assign", text, f"write it like {example}")
    return tuple(sorted(set(places)))


def _bound(given: Given, side: str, otherwise: int) -> Bound:
    """Return one end; as in Spark a timestamp for all wins over timestamps, and these over offsets."""
    timestamp = given.text(f"{side}Timestamp")
    if timestamp is not None:
        if not timestamp.isdecimal():
            raise _unusable(f"{side}Timestamp", timestamp, "give milliseconds since 1970")
        return Bound(timestamp_ms=int(timestamp))
    by_timestamp = given.text(f"{side}OffsetsByTimestamp")
    if by_timestamp is not None:
        return Bound(timestamps_ms=_places(f"{side}OffsetsByTimestamp", by_timestamp, lowest=0))
    text = given.text(f"{side}Offsets")
    if text is None:
        return Bound(everywhere=otherwise)
    word = {"earliest": EARLIEST, "latest": LATEST}.get(text.lower())
    if word is not None:
        if side == "ending" and word == EARLIEST:
            raise _unusable("endingOffsets", text, "use latest or offsets as JSON")
        return Bound(everywhere=word)
    return Bound(offsets=_places(f"{side}Offsets", text, lowest=LATEST if side == "ending" else EARLIEST))


def _places(name: str, text: str, *, lowest: int) -> dict[Place, int]:
    example = '{"topicA":{"0":23,"1":-1},"topicB":{"0":-2}}'
    found: dict[Place, int] = {}
    for topic, partitions in _json_object(name, text, example).items():
        if not isinstance(partitions, dict):
            raise _unusable(name, text, f"write it like {example}")
        for partition, value in partitions.items():
            if not partition.isdecimal() or not _is_whole(value) or value < lowest:
                raise _unusable(f"{name} for {topic}-{partition}", value, f"write it like {example}")
            found[topic, int(partition)] = value
    return found


def _json_object(name: str, text: str, example: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _unusable(name, text, f"write it like {example}")
    return found


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _one_of(given: Given, name: str, otherwise: _Choice) -> _Choice:
    text = given.text(name)
    if not text:
        return otherwise
    kind = type(otherwise)
    try:
        return kind(text.lower())
    except ValueError:
        words = " or ".join(choice.value for choice in kind)
        raise _unusable(name, text, f"use {words}") from None


def _upstream(given: Given) -> UpstreamJob | None:
    text = given.text(UPSTREAM)
    if not text:
        return None
    for name in ("minOffsetsPerTrigger", PER_SECOND):
        if name in given:
            raise ConfigError(
                f"{name} and an upstream job are set",
                why="a micro-batch ends where the upstream job's checkpoint does, however little that is",
                what_to_do=f"leave {name} out; maxOffsetsPerTrigger may be set",
            )
    return UpstreamJob.from_option(text)


def _pace(given: Given) -> RateLimit:
    text = given.text(PER_SECOND)
    if text is None:
        return RateLimit()
    try:
        return RateLimit(records_per_second=float(text))
    except ValueError:
        raise _unusable(PER_SECOND, text, "set it to a number above 0") from None


def _duration_ms(given: Given, name: str, otherwise: int) -> int:
    text = given.text(name)
    if text is None:
        return otherwise
    match = _DURATION.fullmatch(text)
    if match is None:
        raise _unusable(name, text, "write it like 15m or 30s")
    return int(match[1]) * _UNIT_MS[match[2].lower()]


#: How long staged rows may wait for their commit: the rest of the micro-batch, or a restart. Shorter than
#: the broker's maximum, since what a dead driver left open holds readers back for so long.
_DEFAULT_TRANSACTION_TIMEOUT_MS = 300_000

_TEXT = ("string", "binary")
#: Columns of the sink and the types they may have, as in Spark's own.
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "key": _TEXT,
    "value": _TEXT,
    "headers": ("array<struct<key:string,value:binary>>",),
    "topic": ("string",),
    "partition": ("int",),
}


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Everything a writer needs; safe to pickle into tasks, holds secrets inside `connection` only."""

    connection: KafkaConnection
    producer: ProducerSettings
    #: Wins over a column `topic`; None if there is none.
    topic: str | None
    #: Which of the sink's columns the query has.
    columns: tuple[str, ...]
    checkpoint_location: Path
    transaction_timeout_ms: int


def parse_sink(options: Mapping[str, str], schema: T.StructType) -> SinkOptions:
    check_names(options, WRITE, "sink")
    given = Given(options)
    servers, connection, producer = split_kafka_options(options)
    timeout = producer.pop("transaction.timeout.ms", str(_DEFAULT_TRANSACTION_TIMEOUT_MS)).strip()
    if not timeout.isdecimal() or int(timeout) == 0:
        raise _unusable("kafka.transaction.timeout.ms", timeout, "give milliseconds above 0")
    if producer.pop("enable.idempotence", "true").strip().lower() != "true":
        raise ConfigError(
            "the option 'kafka.enable.idempotence' cannot be false",
            what_to_do="leave it out: every producer of the sink is idempotent",
        )
    topic = given.text("topic")
    if topic == "":
        raise _unusable("topic", topic, "name a topic, or leave it out: an empty one is none")
    return SinkOptions(
        KafkaConnection(servers, connection),
        ProducerSettings.of(producer),
        topic,
        _checked_columns(schema, topic),
        checkpoint_path(given.text("checkpointLocation")),
        int(timeout),
    )


def _checked_columns(schema: T.StructType, topic: str | None) -> tuple[str, ...]:
    found = []
    for name, allowed in _COLUMNS.items():
        if name not in schema.names:
            continue
        kind = schema[name].dataType.simpleString()
        if kind not in allowed:
            raise SchemaError(
                f"the column '{name}' is {kind}",
                why=f"the Kafka sink takes {' or '.join(allowed)}",
                what_to_do=f"cast it, for example CAST({name} AS {allowed[0].upper()})",
                column=name,
            )
        found.append(name)
    if "value" not in found:
        raise SchemaError(
            "the query has no column 'value'",
            why=f"its columns are {', '.join(schema.names)}",
            what_to_do="select one, for example to_json(struct(*)) AS value",
        )
    if topic is None and "topic" not in found:
        raise ConfigError(
            "the Kafka sink has no topic",
            why="there is neither an option 'topic' nor a column of that name",
            what_to_do='add .option("topic", "name")',
        )
    return tuple(found)


def checkpoint_path(text: str | None) -> Path:
    """Return where Python finds a checkpointLocation, which is a path or a ``file:`` URL."""
    if not text:
        raise ConfigError(
            "the option 'checkpointLocation' is missing",
            why="the sink keeps its commits beside Spark's checkpoint and cannot see a location that comes "
            "from the session's settings",
            what_to_do='add .option("checkpointLocation", "/absolute/path") to this query',
            option="checkpointLocation",
        )
    url = urlparse(text)
    # Hadoop takes a path as it stands: %20 in it are three characters.
    path = Path(url.path if url.scheme == "file" else text)
    mounted = Path("/dbfs") / text.removeprefix("dbfs:").lstrip("/")
    if url.scheme == "dbfs" and Path("/dbfs").is_dir():
        path = mounted
    elif url.scheme not in ("", "file") or not path.is_absolute():
        raise ConfigError(
            f"the checkpointLocation {text!r} cannot be used",
            why="it must be an absolute path that Python on the driver can open: commits are files in it",
            what_to_do="use a local or mounted directory, such as /data/checkpoints/app",
            option="checkpointLocation",
        )
    return path
