"""Where a Kafka source begins, stands and ends: partitions, starts, ends, groups.

Starts that have to be asked for, and ends, are asked for once, at the first start, and kept in the job
directory: they are others a moment later. Neither reader can be told to stop at an offset, so records from
the end on are left out of the stream.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from flinkish_spark.connectors.kafka.chaining.alignment import from_json
from flinkish_spark.connectors.kafka.client.admin import (
    GroupCommit,
    KafkaAdmin,
    OffsetDirection,
    TopicPattern,
    places_of,
)
from flinkish_spark.connectors.kafka.client.client import Isolation, seen_to_stay
from flinkish_spark.core.clock import Clock, SystemClock
from flinkish_spark.core.errors import ConfigError, EnvironmentFault, GraphError, InputLostError
from flinkish_spark.core.validation import instance_of, raise_config_errors, unusable
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.codec import Form, Stored, stored
from flinkish_spark.protocol.ids import Place
from flinkish_spark.protocol.limits import checked_choice, checked_whole

LOG = logging.getLogger(__name__)
#: How long a group's offsets are waited for that could be stored later.
_GROUP_PATIENCE_MS = 30_000


def places_in(
    counts: Mapping[str, int], partitions: Mapping[str, tuple[int, ...]], to_correct: str
) -> list[Place]:
    """Return the partitions that are read; raise GraphError for one that its topic does not have."""
    if not partitions:
        return places_of(counts)
    for topic, numbers in partitions.items():
        missing = [number for number in numbers if number >= counts.get(topic, number + 1)]
        if missing:
            raise GraphError(
                f"the topic '{topic}' has no partition {missing[0]}",
                why=f"it has {counts[topic]} partitions",
                what_to_do=f"correct {to_correct}",
            )
    return [(topic, number) for topic, numbers in sorted(partitions.items()) for number in numbers]


@dataclass(frozen=True)
class Wanted:
    """What a Kafka source reads: topics by name, some of their partitions, or topics by a pattern."""

    topics: tuple[str, ...] = ()
    #: By topic, the partitions that are read; empty for all of all topics.
    partitions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    pattern: str = ""

    @classmethod
    def of(cls, topics: object, pattern: object, partitions: object) -> Wanted:
        if pattern:
            if topics or partitions:
                raise ConfigError(
                    "a pattern is given, and topics or partitions", what_to_do="leave one of them out"
                )
            text = instance_of("pattern", pattern, str, what_to_do='give a pattern: "orders-.*"')
            return cls(pattern=TopicPattern(text).text)
        names = topics if isinstance(topics, Sequence) and not isinstance(topics, str) else ()
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(
                f"topics is {topics!r}",
                what_to_do='give a list of topic names: topics=["orders"]; or a pattern: pattern="orders-.*"',
            )
        return cls(tuple(dict.fromkeys(names)), _checked_partitions(partitions, names))

    def among(self, topics: Iterable[str]) -> list[str]:
        """Return those of some topics that are read."""
        mine: Collection[str] | TopicPattern = TopicPattern(self.pattern) if self.pattern else self.topics
        return [topic for topic in topics if topic in mine]

    def places(self, admin: KafkaAdmin, clock: Clock) -> list[Place]:
        if self.pattern:
            return places_of(admin.matching(TopicPattern(self.pattern)))
        found = seen_to_stay(
            lambda: admin.partition_counts(self.topics), lambda one: len(one) < len(self.topics), clock
        )
        missing = [topic for topic in self.topics if topic not in found]
        if missing:
            raise InputLostError(
                f"the input topic '{missing[0]}' was deleted",
                why="the job has not read all of it, or cannot know that it has",
                what_to_do="restore the topic, or start a new job with a new job_dir",
            )
        if self.partitions:
            return [(topic, one) for topic, numbers in self.partitions.items() for one in numbers]
        return places_of(found)


def _checked_partitions(partitions: object, topics: Sequence[str]) -> dict[str, tuple[int, ...]]:
    to_do = 'name partitions of every topic: partitions={"orders": [0, 1]}; or leave it out'
    if partitions is None:
        return {}
    if not isinstance(partitions, Mapping) or partitions.keys() != set(topics):
        raise unusable("partitions", partitions, wanted="numbers by each of the topics", what_to_do=to_do)
    found = {}
    for topic, numbers in partitions.items():
        if isinstance(numbers, str) or not isinstance(numbers, Sequence) or not numbers:
            raise unusable(f"partitions[{topic!r}]", numbers, wanted="a list of numbers", what_to_do=to_do)
        with raise_config_errors(to_do):
            found[topic] = tuple(sorted({checked_whole("a partition", one, least=0) for one in numbers}))
    return found


class StartingOffsets(Choice):
    """Where a job that has no checkpoint yet begins to read."""

    EARLIEST = "earliest"
    LATEST = "latest"

    def offsets(self, admin: KafkaAdmin, places: Collection[Place]) -> dict[Place, int]:
        """Return the first offset of each partition that is read, before the first start."""
        is_first = self is StartingOffsets.EARLIEST
        return admin.beginning_offsets(places) if is_first else admin.end_offsets(places)


class KafkaStart(ABC):
    """Says where each partition begins; one of the classes below."""

    @abstractmethod
    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        """Return the first offset of each partition that is read, before the first start."""


@dataclass(frozen=True)
class _AtTimestamp:
    timestamp_ms: int

    def __post_init__(self) -> None:
        with raise_config_errors("give milliseconds since 1970"):
            checked_whole("timestamp_ms", self.timestamp_ms, least=0, most=(1 << 63) - 1)

    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        return first_at_least_as_late(
            dict.fromkeys(places, self.timestamp_ms), admin.offsets_at, admin.end_offsets
        )


@dataclass(frozen=True)
class StartAtTimestamp(_AtTimestamp, KafkaStart):
    """Begins each partition at its first record that is at least as late; without one, with what comes.

    Parameters
    ----------
    timestamp_ms
        Milliseconds since 1970.
    """


@dataclass(frozen=True)
class StartAtOffsets(KafkaStart):
    """Begins partitions at offsets.

    Parameters
    ----------
    starts
        Topic -> partition -> the first offset that is read. It must be there, or be the end.
    otherwise
        Where the partitions begin that are not named.

    Examples
    --------
    >>> StartAtOffsets({"orders": {0: 1_000}}, otherwise=StartingOffsets.LATEST).starts["orders"][0]
    1000
    """

    starts: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    otherwise: StartingOffsets = StartingOffsets.EARLIEST

    def __post_init__(self) -> None:
        to_do = 'give numbers by topic and partition: {"orders": {0: 1_000, 1: 1_200}}'
        _check_offsets("start", self.starts, to_do)
        with raise_config_errors("give StartingOffsets.EARLIEST or StartingOffsets.LATEST"):
            checked_choice("otherwise", self.otherwise, StartingOffsets)

    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        given = from_json(self.starts)
        unknown = sorted(given.keys() - set(places))
        if unknown:
            topic, partition = unknown[0]
            raise ConfigError(
                f"the source begins at an offset of {topic}-{partition}, which it does not read",
                what_to_do="correct starting_offsets=StartAtOffsets(...)",
            )
        return _held(admin, places, given, self.otherwise, "StartAtOffsets names")


@dataclass(frozen=True)
class StartAtCommitted(KafkaStart):
    """Begins where a consumer group stands, to take its work over.

    Parameters
    ----------
    group_id
        Of the group; empty for the source's own.
    otherwise
        Where the partitions begin for which the group has no offset.
    """

    group_id: str = ""
    otherwise: StartingOffsets = StartingOffsets.EARLIEST

    def __post_init__(self) -> None:
        instance_of("group_id", self.group_id, str, what_to_do="give a name, or leave it out")
        with raise_config_errors("give StartingOffsets.EARLIEST or StartingOffsets.LATEST"):
            checked_choice("otherwise", self.otherwise, StartingOffsets)

    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        wanted = set(places)
        committed = admin.committed_offsets(self.group_id, Isolation.READ_COMMITTED)
        known = {at: offset for at, offset in committed.items() if at in wanted}
        return _held(admin, places, known, self.otherwise, f"the group '{self.group_id}' stands at")


def _check_offsets(which: str, given: object, to_do: str) -> None:
    if not isinstance(given, Mapping):
        raise unusable(f"{which}s", given, wanted="offsets by topic and partition", what_to_do=to_do)
    for topic, offsets in given.items():
        if not isinstance(offsets, Mapping):
            raise unusable(f"{which}s[{topic!r}]", offsets, wanted="offsets by partition", what_to_do=to_do)
        with raise_config_errors(to_do):
            for partition, offset in offsets.items():
                checked_whole("a partition", partition, least=0)
                checked_whole(f"the {which} of {topic}-{partition}", offset, least=0)


def first_at_least_as_late(
    timestamps_ms: Mapping[Place, int],
    offsets_at: Callable[[Mapping[Place, int]], Mapping[Place, int | None]],
    end_offsets: Callable[[Iterable[Place]], Mapping[Place, int]],
) -> dict[Place, int]:
    """Return the offset of each partition's first record that is at least as late, or else its end."""
    # This order matters: a record that comes in between is found, and not taken for the end.
    ends = end_offsets(timestamps_ms)
    found = offsets_at(timestamps_ms)
    return {place: ends[place] if at is None else at for place, at in found.items()}


def checked_start(start: Any, group_id: str) -> StartingOffsets | KafkaStart:
    """Return what a user gave as `starting_offsets`, or raise ConfigError."""
    if isinstance(start, StartAtCommitted):
        if not start.group_id and not group_id:
            raise ConfigError(
                "the source begins at the offsets of a consumer group, and no group is named",
                what_to_do='give the source a group_id, or name one: StartAtCommitted("orders-consumers")',
            )
        return StartAtCommitted(start.group_id or group_id, start.otherwise)
    if isinstance(start, KafkaStart):
        return start
    try:
        return StartingOffsets(start)
    except ValueError:
        raise unusable(
            "starting_offsets",
            start,
            wanted="a place to begin at",
            what_to_do="give StartingOffsets.EARLIEST or LATEST, StartAtTimestamp(...), StartAtOffsets(...) "
            "or StartAtCommitted(...)",
        ) from None


def _held(
    admin: KafkaAdmin,
    places: Sequence[Place],
    given: Mapping[Place, int],
    otherwise: StartingOffsets,
    who: str,
) -> dict[Place, int]:
    """Return the offsets of all partitions, or raise ConfigError if one of the given ones is not there."""
    first, last = admin.beginning_offsets(given), admin.end_offsets(given)
    for (topic, partition), offset in sorted(given.items()):
        place = topic, partition
        if not first[place] <= offset <= last[place]:
            raise ConfigError(
                f"{who} the offset {offset} of {topic}-{partition}, "
                f"which holds {first[place]} to {last[place]}",
                why="records from there on are gone, or have not come yet",
                what_to_do="begin at an offset that is there, or at StartingOffsets.EARLIEST",
                topic=topic,
            )
    return {**otherwise.offsets(admin, [place for place in places if place not in given]), **given}


class KafkaEnd(Stored, ABC):
    """Says where each partition ends; one of the classes below."""

    @abstractmethod
    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        """Return the first offset of each partition that is not read. Called at the first start."""


@dataclass(frozen=True)
class EndAtLatest(KafkaEnd):
    """Reads what there is when the job starts for the first time."""

    TAG: ClassVar = ("end", "latest")

    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        return admin.end_offsets(places)


@dataclass(frozen=True)
class EndAtTimestamp(_AtTimestamp, KafkaEnd):
    """Reads each partition up to its first record that is at least as late.

    Where there is none when the job starts for the first time, up to what there is then.

    Parameters
    ----------
    timestamp_ms
        Milliseconds since 1970.
    """

    TAG: ClassVar = ("end", "timestamp")


@dataclass(frozen=True)
class EndAtOffsets(KafkaEnd):
    """Reads each partition up to an offset, which may lie in the future.

    Parameters
    ----------
    ends
        Topic -> partition -> the first offset that is not read. Every partition is named.

    Examples
    --------
    >>> EndAtOffsets({"orders": {0: 1_000, 1: 1_200}}).to_json()["offsets"]
    {'orders': {'0': 1000, '1': 1200}}
    """

    TAG: ClassVar = ("end", "offsets")

    ends: Mapping[str, Mapping[Annotated[int, Form(str, int)], int]] = field(
        default_factory=dict, metadata=stored("offsets")
    )

    def __post_init__(self) -> None:
        to_do = 'give a number for every partition: {"orders": {0: 1_000, 1: 1_200}}'
        _check_offsets("end", self.ends, to_do)

    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        given = from_json(self.ends)
        different = sorted(set(given) ^ set(places))
        if different:
            topic, partition = different[0]
            raise ConfigError(
                f"the ends of the source do not fit its topics at partition {partition} of '{topic}'",
                why="an end is needed for every partition, and for no other",
                what_to_do="name all partitions of all topics in ending=EndAtOffsets(...)",
            )
        return given


def checked_end(ending: object) -> KafkaEnd | None:
    if ending is None:
        return None
    what_to_do = "give EndAtLatest(), EndAtOffsets({...}) or EndAtTimestamp(...), or leave it out"
    return instance_of("ending", ending, KafkaEnd, what_to_do=what_to_do)  # type: ignore[type-abstract]


class GroupPatience:
    """Gives up a group's offsets where they would hold back a checkpoint: they are for lag tools."""

    def __init__(self, clock: Clock = SystemClock()) -> None:  # noqa: B008 - a value without state
        self._clock = clock
        self._failing_since_ms: int | None = None
        self.given_up = 0

    def tries(self, group: str, store: Callable[[], None]) -> bool:
        """Store, and return whether that was done; raise what is worth another attempt."""
        try:
            store()
        except EnvironmentFault as fault:
            now_ms = self._clock.monotonic_ms()
            if self._failing_since_ms is None:
                self._failing_since_ms = now_ms
            # What comes back by itself is waited for once; any other refusal is not.
            if fault.restartable and now_ms - self._failing_since_ms < _GROUP_PATIENCE_MS:
                raise
            self.given_up += 1
            log = LOG.warning if self.given_up == 1 else LOG.debug
            log(
                "the offsets of the consumer group '%s' are not stored, %d checkpoint(s) so far; the job "
                "goes on without them, and lag tools show an old position: %s",
                group,
                self.given_up,
                fault,
            )
            return False
        if self.given_up:
            LOG.warning(
                "the offsets of the consumer group '%s' are stored again, behind %d checkpoint(s) without",
                group,
                self.given_up,
            )
        self._failing_since_ms, self.given_up = None, 0
        return True


def store_offsets(
    admin: KafkaAdmin, group: str, offsets: Mapping[Place, int], direction: OffsetDirection, note: str
) -> None:
    """Set a group's offsets; may be repeated."""
    try:
        answer = admin.commit_offsets(group, offsets, direction, note)
    except InputLostError:
        return
    if answer is GroupCommit.ACTIVE_MEMBERS:
        raise EnvironmentFault(
            f"the consumer group '{group}' has active members",
            why="Kafka then takes offsets from those members only",
            what_to_do="stop the consumers, or give the job a group of its own",
            group=group,
        )
