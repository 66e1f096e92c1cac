"""The options of reading Kafka, parsed and checked; their names are those of Spark's `format("kafka")`."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from flinkish_spark.connectors.kafka.client.admin import TopicPattern
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection, is_connection_option
from flinkish_spark.connectors.kafka.client.settings import INCLUDE_LEADER_EPOCH, ReaderSettings
from flinkish_spark.connectors.rates import RateLimit
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.protocol.choices import closest
from flinkish_spark.protocol.ids import Place

_KAFKA = "kafka."

#: Options of Spark's Kafka source.
READ = (
    *("assign", "subscribe", "subscribePattern", "startingOffsets", "startingTimestamp"),
    *("startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy", "failOnDataLoss"),
    *("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "minPartitions"),
    *("maxRecordsPerPartition", "includeHeaders"),
)
READ_BATCH_ONLY = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
#: Further options for reading.
BARRIER_RECORDS = "flinkish.barrier.records"
PER_SECOND = "flinkish.max.offsets.per.second"
READ_OWN = ("flinkish.group.id", BARRIER_RECORDS, PER_SECOND, INCLUDE_LEADER_EPOCH)
#: Accepted and ignored: options of a Java consumer, so that only the format's name has to change.
READ_WITHOUT_MEANING = (
    "groupIdPrefix",
    "kafkaConsumer.pollTimeoutMs",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "kafka.group.id",
)
#: Options that Spark itself adds to any source or sink.
_OF_SPARK = ("path", "checkpointLocation", "queryName", "numPartitions", "__python_data_source_user_schema")

#: Internal, set in an environment's job: the control file.
CONTROL_PATH = "flinkish.control.path"
#: Internal: Spark plans ranges only, and a pass of the job reads them.
PIECES = "flinkish.pieces"
#: Internal: folder in which the job keeps its source's starting offsets.
FIRST_OFFSETS = "flinkish.first.offsets"
#: Internal: uid of the source, and the control file next to which its held partitions are listed.
HELD_SOURCE, HELD_PATH = "flinkish.held.source", "flinkish.held.path"
#: Internal: the upstream job to which the source aligns, see `UpstreamJob`.
UPSTREAM = "flinkish.upstream"
#: Internal: the starting position of a job that was restored, with its cut.
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
    # Spark passes option names in lower case.
    spelled = {name.lower(): name for name in (*known, *_OF_SPARK)}
    for name in sorted(options):
        if name.lower() in _REFUSED:
            what_to_do = _REFUSED[name.lower()]
            raise ConfigError(f"the option '{name}' cannot be set", what_to_do=what_to_do)
        if name.lower() in spelled or name.lower().startswith(_KAFKA):
            continue
        raise ConfigError(
            f"the Kafka {what} has no option '{name}'",
            what_to_do=closest(name, spelled.values())
            or f"choose from {', '.join(sorted(set(known)))}, and kafka.<client option>",
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
        what_to_do = 'add .option("kafka.bootstrap.servers", "host:port,host:port")'
        raise ConfigError("the option 'kafka.bootstrap.servers' is missing", what_to_do=what_to_do)
    connection = {name: value for name, value in under.items() if is_connection_option(name)}
    # The request timeout is a setting of both the connection and the client.
    client = {n: v for n, v in under.items() if n not in connection or n == "request.timeout.ms"}
    return servers, connection, client


def make_option_error(name: str, text: str, what_to_do: str) -> ConfigError:
    return ConfigError(f"the option '{name}' is {text!r}", what_to_do=what_to_do)


class OptionReader:
    """Parses options by Spark's names, which are case-insensitive."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._values = {name.lower(): value for name, value in options.items()}

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._values

    def text(self, name: str) -> str | None:
        value = self._values.get(name.lower())
        return None if value is None else value.strip()

    def match(self, name: str, pattern: str, what_to_do: str) -> str | None:
        """Return an option's text, in small letters; raise ConfigError if it is not of this pattern."""
        value = self.text(name)
        if value is None:
            return None
        if not re.fullmatch(pattern, value, re.IGNORECASE | re.ASCII):
            raise make_option_error(name, value, what_to_do)
        return value.lower()

    def flag(self, name: str, otherwise: bool) -> bool:
        text = self.match(name, "true|false", "set it to true or false")
        return otherwise if text is None else text == "true"

    def positive(self, name: str) -> int | None:
        text = self.match(name, r"0*[1-9]\d*", "set it to a whole number above 0")
        return None if text is None else int(text)


#: Spark's numbers for the earliest and the latest offset in JSON.
EARLIEST, LATEST = -2, -1
_OF_JOBS = (CONTROL_PATH, PIECES, FIRST_OFFSETS, HELD_SOURCE, HELD_PATH, UPSTREAM, UPSTREAM_START)
_UNIT_MS = {"": 1, "ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+)\s*(ms|s|m|min|h|d|)", re.IGNORECASE | re.ASCII)
_DEFAULT_TRIGGER_DELAY_MS = 900_000
_Choice = TypeVar("_Choice", bound=enum.Enum)


@dataclass(frozen=True, slots=True)
class Subscription:
    """The topics or partitions to read; exactly one of the three fields is set."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    assigned: tuple[Place, ...] = ()


class NoOffsetStrategy(enum.Enum):
    """Policy for a starting timestamp that is later than all records of a partition."""

    ERROR = "error"
    LATEST = "latest"


class BarrierRecordPolicy(enum.Enum):
    #: Deliver them like any other record.
    DELIVER = "deliver"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class OffsetRangeLimit:
    """Starting or ending offsets as the options give them, before the brokers are asked."""

    #: EARLIEST or LATEST for all partitions, or None.
    everywhere: int | None = None
    #: Partition -> an offset, EARLIEST or LATEST.
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
    starting: OffsetRangeLimit
    ending: OffsetRangeLimit
    when_no_offset: NoOffsetStrategy
    max_per_trigger: int | None
    min_per_trigger: int | None
    max_trigger_delay_ms: int
    min_partitions: int | None
    max_per_partition: int | None
    group_id: str
    control_path: str
    #: Whether Spark gets ranges in place of records.
    gives_pieces: bool
    first_offsets: str
    barrier_records: BarrierRecordPolicy
    #: The upstream job as JSON; empty for none.
    upstream: str
    upstream_start: str
    held_source: str = ""
    held_path: str = ""
    pace: RateLimit = field(default_factory=RateLimit)


def parse_batch(options: Mapping[str, str]) -> SourceOptions:
    return _parse(options, READ_BATCH_ONLY, otherwise=EARLIEST)


def parse_stream(options: Mapping[str, str]) -> SourceOptions:
    given = OptionReader(options)
    for name in READ_BATCH_ONLY:
        if (text := given.text(name)) is not None:
            raise make_option_error(name, text, "leave it out: it is for batch reads, a stream has no end")
    return _parse(options, (), otherwise=LATEST)


def parse_any(options: Mapping[str, str]) -> SourceOptions:
    """Parse options while Spark has not yet told whether the read is a batch or a stream."""
    return _parse(options, READ_BATCH_ONLY, otherwise=LATEST)


def _parse(options: Mapping[str, str], extra: tuple[str, ...], *, otherwise: int) -> SourceOptions:
    known = (*READ, *READ_OWN, *READ_WITHOUT_MEANING, *extra, *_OF_JOBS)
    check_names(options, known, "source")
    given = OptionReader(options)
    servers, connection, consumer = split_kafka_options(options)
    consumer.pop("group.id", None)
    least, most = given.positive("minOffsetsPerTrigger"), given.positive("maxOffsetsPerTrigger")
    if least is not None and most is not None and least > most:
        what = f"minOffsetsPerTrigger ({least}) is above maxOffsetsPerTrigger ({most})"
        raise ConfigError(what, what_to_do="lower the first or raise the second")
    return SourceOptions(
        connection=KafkaConnection(servers, connection),
        reader=ReaderSettings.from_options(
            consumer,
            fail_on_data_loss=given.flag("failOnDataLoss", True),
            include_headers=given.flag("includeHeaders", False),
            include_leader_epoch=given.flag(INCLUDE_LEADER_EPOCH, False),
        ),
        subscription=_parse_subscription(given),
        starting=_parse_limit(given, "starting", otherwise),
        ending=_parse_limit(given, "ending", LATEST),
        when_no_offset=_parse_choice(given, "startingOffsetsByTimestampStrategy", NoOffsetStrategy.ERROR),
        max_per_trigger=most,
        min_per_trigger=least,
        max_trigger_delay_ms=_parse_duration_ms(given, "maxTriggerDelay", _DEFAULT_TRIGGER_DELAY_MS),
        min_partitions=given.positive("minPartitions"),
        max_per_partition=given.positive("maxRecordsPerPartition"),
        group_id=given.text("flinkish.group.id") or "",
        control_path=given.text(CONTROL_PATH) or "",
        gives_pieces=given.text(PIECES) == "true",
        first_offsets=given.text(FIRST_OFFSETS) or "",
        barrier_records=_parse_choice(given, BARRIER_RECORDS, BarrierRecordPolicy.DELIVER),
        upstream=_parse_upstream(given),
        upstream_start=given.text(UPSTREAM_START) or "",
        held_source=given.text(HELD_SOURCE) or "",
        held_path=given.text(HELD_PATH) or "",
        pace=_parse_pace(given),
    )


def _parse_subscription(given: OptionReader) -> Subscription:
    chosen = [name for name in ("assign", "subscribe", "subscribePattern") if name in given]
    if len(chosen) != 1:
        what = f"{' and '.join(chosen) or 'none'} of assign, subscribe and subscribePattern is set"
        raise ConfigError(what, what_to_do="set exactly one of them")
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
        return Subscription(assigned=_parse_assign(text))
    raise make_option_error(chosen[0], text, "name at least one topic")


def _parse_assign(text: str) -> tuple[Place, ...]:
    example = '{"topicA":[0,1],"topicB":[2,4]}'
    found = _parse_json_object("assign", text, example)
    places = []
    for topic, partitions in found.items():
        if not isinstance(partitions, list) or not all(_is_whole(p) and p >= 0 for p in partitions):
            raise make_option_error("assign", text, f"write it like {example}")
        places += [(topic, p) for p in partitions]
    if not places:
        raise make_option_error("assign", text, f"write it like {example}")
    return tuple(sorted(set(places)))


def _parse_limit(given: OptionReader, side: str, otherwise: int) -> OffsetRangeLimit:
    """Parse one side; as in Spark one timestamp wins over timestamps by partition, these over offsets."""
    timestamp = given.match(f"{side}Timestamp", r"\d+", "give milliseconds since 1970")
    if timestamp is not None:
        return OffsetRangeLimit(timestamp_ms=int(timestamp))
    by_timestamp = given.text(f"{side}OffsetsByTimestamp")
    if by_timestamp is not None:
        return OffsetRangeLimit(
            timestamps_ms=_parse_places(f"{side}OffsetsByTimestamp", by_timestamp, lowest=0)
        )
    text = given.text(f"{side}Offsets")
    if text is None:
        return OffsetRangeLimit(everywhere=otherwise)
    word = {"earliest": EARLIEST, "latest": LATEST}.get(text.lower())
    if word is not None:
        if side == "ending" and word == EARLIEST:
            raise make_option_error("endingOffsets", text, "use latest or offsets as JSON")
        return OffsetRangeLimit(everywhere=word)
    return OffsetRangeLimit(
        offsets=_parse_places(f"{side}Offsets", text, lowest=LATEST if side == "ending" else EARLIEST)
    )


def _parse_places(name: str, text: str, *, lowest: int) -> dict[Place, int]:
    example = '{"topicA":{"0":23,"1":-1},"topicB":{"0":-2}}'
    found: dict[Place, int] = {}
    for topic, partitions in _parse_json_object(name, text, example).items():
        if not isinstance(partitions, dict):
            raise make_option_error(name, text, f"write it like {example}")
        for partition, value in partitions.items():
            if not partition.isdecimal() or not _is_whole(value) or value < lowest:
                raise make_option_error(f"{name} for {topic}-{partition}", value, f"write it like {example}")
            found[topic, int(partition)] = value
    return found


def _parse_json_object(name: str, text: str, example: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise make_option_error(name, text, f"write it like {example}")
    return found


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_choice(given: OptionReader, name: str, otherwise: _Choice) -> _Choice:
    words = [choice.value for choice in type(otherwise)]
    text = given.match(name, f"|{'|'.join(words)}", f"use {' or '.join(words)}")
    return type(otherwise)(text) if text else otherwise


def _parse_upstream(given: OptionReader) -> str:
    text = given.text(UPSTREAM)
    if not text:
        return ""
    for name in ("minOffsetsPerTrigger", PER_SECOND):
        if name in given:
            what = f"{name} and an upstream job are set, whose checkpoint ends a micro-batch"
            raise ConfigError(what, what_to_do=f"leave {name} out; maxOffsetsPerTrigger may be set")
    return text


def _parse_pace(given: OptionReader) -> RateLimit:
    text = given.text(PER_SECOND)
    if text is None:
        return RateLimit()
    try:
        return RateLimit(records_per_second=float(text))
    except ValueError:
        raise make_option_error(PER_SECOND, text, "set it to a number above 0") from None


def _parse_duration_ms(given: OptionReader, name: str, otherwise: int) -> int:
    text = given.text(name)
    if text is None:
        return otherwise
    match = _DURATION.fullmatch(text)
    if match is None:
        raise make_option_error(name, text, "write it like 15m or 30s")
    return int(match[1]) * _UNIT_MS[match[2].lower()]
