"""The options of the Kafka source, parsed: which topics, from where to where, in what portions."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from flinkish_spark.chaining.upstream import UpstreamJob
from flinkish_spark.drop_in import option_names as names
from flinkish_spark.drop_in.option_names import Given
from flinkish_spark.errors import ConfigError
from flinkish_spark.kafka import KafkaConnection
from flinkish_spark.kafka.answers import Place
from flinkish_spark.kafka.positions import TopicPattern
from flinkish_spark.kafka.reader_settings import ReaderSettings
from flinkish_spark.sources.rates import RateLimit

#: Stand for "the first" and "behind the last" in Spark's JSON of offsets.
EARLIEST, LATEST = -2, -1
_OF_JOBS = (
    names.CONTROL_PATH,
    names.FIRST_OFFSETS,
    names.HELD_SOURCE,
    names.HELD_PATH,
    names.UPSTREAM,
    names.UPSTREAM_START,
)
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
    """One end of what is read, before the brokers were asked.

    Parameters
    ----------
    everywhere
        EARLIEST or LATEST for all partitions, or None.
    offsets
        An offset, EARLIEST or LATEST by partition.
    timestamp_ms
        For all partitions, or None.
    timestamps_ms
        By partition.
    """

    everywhere: int | None = None
    offsets: Mapping[Place, int] | None = None
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
    first_offsets: str
    barrier_records: BarrierRecordPolicy
    upstream: UpstreamJob | None
    upstream_start: str
    held_source: str = ""
    held_path: str = ""
    pace: RateLimit = field(default_factory=RateLimit)


def parse_batch(options: Mapping[str, str]) -> SourceOptions:
    """Return the options of a batch read.

    Raises
    ------
    ConfigError
        An option is unknown, missing or contradicts another.
    """
    return _parse(options, names.READ_BATCH_ONLY, otherwise=EARLIEST)


def parse_stream(options: Mapping[str, str]) -> SourceOptions:
    """Return the options of a streaming read; see :func:`parse_batch`."""
    given = Given(options)
    for name in names.READ_BATCH_ONLY:
        if name in given:
            raise ConfigError(
                f"the option '{name}' is for batch reads", what_to_do="leave it out: a stream has no end"
            )
    return _parse(options, (), otherwise=LATEST)


def parse_any(options: Mapping[str, str]) -> SourceOptions:
    """Return the options of a read of which Spark has not said yet whether it is a stream."""
    return _parse(options, names.READ_BATCH_ONLY, otherwise=LATEST)


def _parse(options: Mapping[str, str], extra: tuple[str, ...], *, otherwise: int) -> SourceOptions:
    known = (*names.READ, *names.READ_OWN, *names.READ_WITHOUT_MEANING, *extra, *_OF_JOBS)
    names.check_names(options, known, "source")
    given = Given(options)
    servers, connection, consumer = names.split_kafka_options(options)
    consumer.pop("group.id", None)
    least, most = given.positive("minOffsetsPerTrigger"), given.positive("maxOffsetsPerTrigger")
    if least is not None and most is not None and least > most:
        raise ConfigError(f"minOffsetsPerTrigger ({least}) is above maxOffsetsPerTrigger ({most})")
    return SourceOptions(
        connection=KafkaConnection(servers, connection),
        reader=ReaderSettings.from_options(
            consumer,
            fail_on_data_loss=given.flag("failOnDataLoss", True),
            include_headers=given.flag("includeHeaders", False),
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
        control_path=given.text(names.CONTROL_PATH) or "",
        first_offsets=given.text(names.FIRST_OFFSETS) or "",
        barrier_records=_one_of(given, names.BARRIER_RECORDS, BarrierRecordPolicy.DELIVER),
        upstream=_upstream(given),
        upstream_start=given.text(names.UPSTREAM_START) or "",
        held_source=given.text(names.HELD_SOURCE) or "",
        held_path=given.text(names.HELD_PATH) or "",
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
    raise ConfigError(f"the option '{chosen[0]}' is empty", what_to_do="name at least one topic")


def _assigned(text: str) -> tuple[Place, ...]:
    example = '{"topicA":[0,1],"topicB":[2,4]}'
    found = _json_object("assign", text, example)
    places = []
    for topic, partitions in found.items():
        if not isinstance(partitions, list) or not all(_is_whole(p) and p >= 0 for p in partitions):
            raise ConfigError(f"the option 'assign' is {text!r}", what_to_do=f"write it like {example}")
        places += [(topic, p) for p in partitions]
    if not places:
        raise ConfigError("the option 'assign' names no partition", what_to_do=f"write it like {example}")
    return tuple(sorted(set(places)))


def _bound(given: Given, side: str, otherwise: int) -> Bound:
    """Return one end; as in Spark a timestamp for all wins over timestamps, and these over offsets."""
    timestamp = given.text(f"{side}Timestamp")
    if timestamp is not None:
        if not timestamp.isdecimal():
            raise ConfigError(
                f"the option '{side}Timestamp' is {timestamp!r}", what_to_do="give milliseconds since 1970"
            )
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
            raise ConfigError("endingOffsets is 'earliest'", what_to_do="use latest or offsets as JSON")
        return Bound(everywhere=word)
    return Bound(offsets=_places(f"{side}Offsets", text, lowest=LATEST if side == "ending" else EARLIEST))


def _places(name: str, text: str, *, lowest: int) -> dict[Place, int]:
    example = '{"topicA":{"0":23,"1":-1},"topicB":{"0":-2}}'
    found: dict[Place, int] = {}
    for topic, partitions in _json_object(name, text, example).items():
        if not isinstance(partitions, dict):
            raise ConfigError(f"the option '{name}' is {text!r}", what_to_do=f"write it like {example}")
        for partition, value in partitions.items():
            if not partition.isdecimal() or not _is_whole(value) or value < lowest:
                raise ConfigError(
                    f"the option '{name}' has {value!r} for {topic}-{partition}",
                    what_to_do=f"write it like {example}",
                )
            found[topic, int(partition)] = value
    return found


def _json_object(name: str, text: str, example: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f"the option '{name}' is {text!r}", what_to_do=f"write it like {example}", option=name
        )
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
        raise ConfigError(f"{name} is {text!r}", what_to_do=f"use {words}") from None


def _upstream(given: Given) -> UpstreamJob | None:
    text = given.text(names.UPSTREAM)
    if not text:
        return None
    if "minOffsetsPerTrigger" in given:
        raise ConfigError(
            "minOffsetsPerTrigger and an upstream job are set",
            why="a micro-batch ends where the upstream job's checkpoint does, however little that is",
            what_to_do="leave minOffsetsPerTrigger out",
        )
    if names.PER_SECOND in given:
        raise ConfigError(
            f"{names.PER_SECOND} and an upstream job are set",
            why="a micro-batch ends where the upstream job's checkpoint does",
            what_to_do="set maxOffsetsPerTrigger",
        )
    return UpstreamJob.from_option(text)


def _pace(given: Given) -> RateLimit:
    text = given.text(names.PER_SECOND)
    if text is None:
        return RateLimit()
    try:
        return RateLimit(records_per_second=float(text))
    except ValueError:
        raise ConfigError(
            f"the option '{names.PER_SECOND}' is {text!r}", what_to_do="set it to a number above 0"
        ) from None


def _duration_ms(given: Given, name: str, otherwise: int) -> int:
    text = given.text(name)
    if text is None:
        return otherwise
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(f"the option '{name}' is {text!r}", what_to_do="write it like 15m or 30s")
    return int(match[1]) * _UNIT_MS[match[2].lower()]
