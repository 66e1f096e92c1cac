"""Partitions, starting offsets, ending offsets and consumer groups of a Kafka source.

A source asks the brokers for its starting and ending offsets once, at the first start, and keeps them in the
job directory, since a later question would have another answer. No reader can stop at an offset, so the
source drops records from the ending offset on.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from flinkish_spark.connectors.kafka.client.admin import (
    GroupCommit,
    KafkaAdmin,
    OffsetDirection,
    TopicPattern,
    list_places,
)
from flinkish_spark.connectors.kafka.client.client import Isolation, poll_until_confirmed
from flinkish_spark.connectors.kafka.offset_ranges import from_json
from flinkish_spark.core.clock import Clock, SystemClock
from flinkish_spark.core.errors import ConfigError, EnvironmentFault, GraphError, InputLostError
from flinkish_spark.core.fields import Range, check_fields
from flinkish_spark.core.validation import raise_config_errors, unusable
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.codec import Form, StoredObject, store_as
from flinkish_spark.protocol.ids import Place
from flinkish_spark.protocol.limits import check_whole

LOG = logging.getLogger(__name__)
#: How long checkpoints wait for a group's offsets to be stored after a passing error.
_GROUP_PATIENCE_MS = 30_000


def select_partitions(
    counts: Mapping[str, int], partitions: Mapping[str, tuple[int, ...]], to_correct: str
) -> list[Place]:
    """Return the partitions to read; raise GraphError if a topic lacks one of them."""
    if not partitions:
        return list_places(counts)
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
class TopicSelection:
    """The topics and partitions that a source reads: topics by name or pattern, or some partitions."""

    topics: tuple[str, ...] = ()
    #: Topic -> the partitions to read; empty for all partitions of all topics.
    partitions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    pattern: str = ""

    @classmethod
    def of(
        cls, topics: Sequence[str], pattern: str, partitions: Mapping[str, Sequence[int]] | None
    ) -> TopicSelection:
        if pattern:
            if topics or partitions:
                raise ConfigError("a pattern is given, and topics or partitions", what_to_do="leave one out")
            return cls(pattern=TopicPattern(pattern).text)
        if not topics or not all(topics):
            raise ConfigError(f"topics is {topics!r}", what_to_do=SOURCE_ADVICE["topics"])
        return cls(tuple(dict.fromkeys(topics)), _check_partitions(partitions, topics))

    def filter_topics(self, topics: Iterable[str]) -> list[str]:
        """Return those of `topics` that the source reads."""
        mine: Collection[str] | TopicPattern = TopicPattern(self.pattern) if self.pattern else self.topics
        return [topic for topic in topics if topic in mine]

    def places(self, admin: KafkaAdmin, clock: Clock) -> list[Place]:
        if self.pattern:
            return list_places(admin.find_matching_topics(TopicPattern(self.pattern)))
        found = poll_until_confirmed(
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
        return list_places(found)


def _check_partitions(
    partitions: Mapping[str, Sequence[int]] | None, topics: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    if partitions is None:
        return {}
    to_do = SOURCE_ADVICE["partitions"]
    if partitions.keys() != set(topics):
        raise unusable("partitions", partitions, wanted="numbers by each of the topics", what_to_do=to_do)
    found = {}
    for topic, numbers in partitions.items():
        if isinstance(numbers, str) or not isinstance(numbers, Sequence) or not numbers:  # type: ignore[unreachable]
            raise unusable(f"partitions[{topic!r}]", numbers, wanted="a list of numbers", what_to_do=to_do)
        with raise_config_errors(to_do):
            found[topic] = tuple(sorted({check_whole("a partition", one, least=0) for one in numbers}))
    return found


class StartingOffsets(Choice):
    """The position at which a job without a checkpoint begins to read."""

    EARLIEST = "earliest"
    LATEST = "latest"

    def offsets(self, admin: KafkaAdmin, places: Collection[Place]) -> dict[Place, int]:
        """Return the first offset of each partition that is read, before the first start."""
        is_first = self is StartingOffsets.EARLIEST
        return admin.beginning_offsets(places) if is_first else admin.end_offsets(places)


class KafkaStart(ABC):
    """Starting offsets of the partitions; one of the classes below."""

    @abstractmethod
    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        """Return the first offset of each partition that is read, before the first start."""


@dataclass(frozen=True)
class _TimestampBoundary:
    timestamp_ms: Annotated[int, Range(0, (1 << 63) - 1)]

    def __post_init__(self) -> None:
        check_fields(self, "give milliseconds since 1970")

    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        return find_offsets_by_time(
            dict.fromkeys(places, self.timestamp_ms), admin.offsets_at, admin.end_offsets
        )


@dataclass(frozen=True)
class StartAtTimestamp(_TimestampBoundary, KafkaStart):
    """Begins each partition at its first record with this timestamp or a later one, or else at its end.

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
        Topic -> partition -> the first offset to read, which must exist or be the end.
    otherwise
        Where all other partitions begin.

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
        check_fields(self)

    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        given = from_json(self.starts)
        unknown = sorted(given.keys() - set(places))
        if unknown:
            topic, partition = unknown[0]
            what = f"StartAtOffsets names the partition {topic}-{partition}, which the source does not read"
            raise ConfigError(what, what_to_do="correct starting_offsets=StartAtOffsets(...)")
        return _complete_offsets(admin, places, given, self.otherwise, "StartAtOffsets names")


@dataclass(frozen=True)
class StartAtCommittedOffsets(KafkaStart):
    """Begins at the committed offsets of a consumer group, to take over its work.

    Parameters
    ----------
    group_id
        The group; empty for the source's own.
    otherwise
        Where partitions begin for which the group has no offset.
    """

    group_id: str = ""
    otherwise: StartingOffsets = StartingOffsets.EARLIEST

    def __post_init__(self) -> None:
        check_fields(self)

    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        wanted = set(places)
        committed = admin.committed_offsets(self.group_id, Isolation.READ_COMMITTED)
        known = {at: offset for at, offset in committed.items() if at in wanted}
        return _complete_offsets(
            admin, places, known, self.otherwise, f"the group '{self.group_id}' stands at"
        )


def _check_offsets(which: str, given: object, to_do: str) -> None:
    if not isinstance(given, Mapping):
        raise unusable(f"{which}s", given, wanted="offsets by topic and partition", what_to_do=to_do)
    for topic, offsets in given.items():
        if not isinstance(offsets, Mapping):
            raise unusable(f"{which}s[{topic!r}]", offsets, wanted="offsets by partition", what_to_do=to_do)
        with raise_config_errors(to_do):
            for partition, offset in offsets.items():
                check_whole("a partition", partition, least=0)
                check_whole(f"the {which} of {topic}-{partition}", offset, least=0)


def find_offsets_by_time(
    timestamps_ms: Mapping[Place, int],
    offsets_at: Callable[[Mapping[Place, int]], Mapping[Place, int | None]],
    end_offsets: Callable[[Iterable[Place]], Mapping[Place, int]],
) -> dict[Place, int]:
    """Return the offset of each partition's first record at or after its timestamp, or else its end."""
    # This order matters: a record that is written between the two questions is found.
    ends = end_offsets(timestamps_ms)
    found = offsets_at(timestamps_ms)
    return {place: ends[place] if at is None else at for place, at in found.items()}


def name_group(start: StartingOffsets | KafkaStart, group_id: str) -> StartingOffsets | KafkaStart:
    """Return the user's `starting_offsets`, with the source's group if they are those of a group."""
    if not isinstance(start, StartAtCommittedOffsets):
        return start
    if not start.group_id and not group_id:
        what = "the source begins at the offsets of a consumer group, and no group is named"
        to_do = 'give the source a group_id, or name one: StartAtCommittedOffsets("orders-app")'
        raise ConfigError(what, what_to_do=to_do)
    return StartAtCommittedOffsets(start.group_id or group_id, start.otherwise)


#: What to do about topics, offsets and ends that are none.
SOURCE_ADVICE = {
    "topics": 'give a list of topic names: topics=["orders"]; or a pattern: pattern="orders-.*"',
    "pattern": 'give a pattern: "orders-.*"',
    "group_id": "give a name, or leave it out",
    "starting_offsets": "give StartingOffsets.EARLIEST or LATEST, StartAtTimestamp(...), StartAtOffsets(...) "
    "or StartAtCommittedOffsets(...)",
    "ending": "give EndAtLatest(), EndAtOffsets({...}) or EndAtTimestamp(...), or leave it out",
    "metadata": 'give it like metadata=["topic", "partition", "offset"], or leave it out',
    "partitions": 'name partitions of every topic: partitions={"orders": [0, 1]}; or leave it out',
}


def _complete_offsets(
    admin: KafkaAdmin,
    places: Sequence[Place],
    given: Mapping[Place, int],
    otherwise: StartingOffsets,
    who: str,
) -> dict[Place, int]:
    """Add `otherwise` for partitions without an offset; raise ConfigError if an offset does not exist."""
    first, last = admin.beginning_offsets(given), admin.end_offsets(given)
    for (topic, partition), offset in sorted(given.items()):
        place = topic, partition
        if not first[place] <= offset <= last[place]:
            raise ConfigError(
                f"{who} the offset {offset} of {topic}-{partition}, "
                f"which holds {first[place]} to {last[place]}",
                why="Kafka has removed the records at this offset, or nobody has written them yet",
                what_to_do="begin at an offset that is there, or at StartingOffsets.EARLIEST",
            )
    return {**otherwise.offsets(admin, [place for place in places if place not in given]), **given}


class KafkaEnd(StoredObject, ABC):
    """Ending offsets of the partitions; one of the classes below."""

    @abstractmethod
    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        """Return each partition's ending offset, the first that is not read. Called at the first start."""


@dataclass(frozen=True)
class EndAtLatest(KafkaEnd):
    """Ends each partition where it ends when the job starts for the first time."""

    TAG: ClassVar = ("end", "latest")

    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        return admin.end_offsets(places)


@dataclass(frozen=True)
class EndAtTimestamp(_TimestampBoundary, KafkaEnd):
    """Ends each partition before its first record with this timestamp or a later one.

    A partition without such a record ends where it ends when the job starts for the first time.

    Parameters
    ----------
    timestamp_ms
        Milliseconds since 1970.
    """

    TAG: ClassVar = ("end", "timestamp")


@dataclass(frozen=True)
class EndAtOffsets(KafkaEnd):
    """Ends each partition before an offset, which may lie in the future.

    Parameters
    ----------
    ends
        Topic -> partition -> the first offset that is not read, for every partition.

    Examples
    --------
    >>> EndAtOffsets({"orders": {0: 1_000, 1: 1_200}}).to_json()["offsets"]
    {'orders': {'0': 1000, '1': 1200}}
    """

    TAG: ClassVar = ("end", "offsets")

    ends: Mapping[str, Mapping[Annotated[int, Form(str, int)], int]] = field(
        default_factory=dict, metadata=store_as("offsets")
    )

    def __post_init__(self) -> None:
        to_do = 'give a number for every partition: {"orders": {0: 1_000, 1: 1_200}}'
        _check_offsets("end", self.ends, to_do)

    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        given = from_json(self.ends)
        different = sorted(set(given) ^ set(places))
        if different:
            topic, partition = different[0]
            what = f"the ends of the source do not fit its topics at partition {partition} of '{topic}'"
            raise ConfigError(
                what, what_to_do="name all partitions of all topics in ending=EndAtOffsets(...)"
            )
        return given


class GroupPatience:
    """Skips storing a group's offsets rather than delay a checkpoint: only lag tools need them."""

    def __init__(self, clock: Clock = SystemClock()) -> None:  # noqa: B008 - a value without state
        self._clock = clock
        self._failing_since_ms: int | None = None
        self.given_up = 0

    def try_store(self, group: str, store: Callable[[], None]) -> bool:
        """Call `store`; return True if it succeeded, raise if the caller should try again."""
        try:
            store()
        except EnvironmentFault as fault:
            now_ms = self._clock.monotonic_ms()
            if self._failing_since_ms is None:
                self._failing_since_ms = now_ms
            # Wait once for an error that passes by itself; skip on any other.
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
    admin: KafkaAdmin,
    group: str,
    offsets: Mapping[Place, int],
    direction: OffsetDirection = OffsetDirection.FORWARD_ONLY,
    note: str = "",
) -> None:
    """Set the offsets of a group; repeating it is harmless."""
    try:
        answer = admin.commit_offsets(group, offsets, direction, note)
    except InputLostError:
        return
    if answer is GroupCommit.ACTIVE_MEMBERS:
        raise EnvironmentFault(
            f"the consumer group '{group}' has active members",
            why="Kafka then takes offsets from those members only",
            what_to_do="stop the consumers, or give the job a group of its own",
        )
