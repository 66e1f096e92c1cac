"""Where a Kafka source begins, stands and ends: partitions, starts, ends, groups.

Starts that have to be asked for, and ends, are asked for once, at the first start, and kept in the job
directory: they are others a moment later. Neither reader can be told to stop at an offset, so records from
the end on are left out of the stream.
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from flinkish_spark.connectors.formats.decoding import schema_facts
from flinkish_spark.connectors.kafka.checks import InputChecks, raise_if_it_stays
from flinkish_spark.connectors.kafka.client.admin import (
    PREFLIGHT_TIMEOUT_MS,
    GroupCommit,
    KafkaAdmin,
    OffsetDirection,
    TopicPattern,
    places_of,
)
from flinkish_spark.connectors.kafka.client.client import Isolation, seen_to_stay
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.marks import newest_of
from flinkish_spark.connectors.kafka.metadata import OWN_TIME
from flinkish_spark.contracts.source import Extent, JobPlace, Source, SourceStart
from flinkish_spark.core.clock import Clock, SystemClock
from flinkish_spark.core.errors import (
    ConfigError,
    EnvironmentFault,
    GraphError,
    InputLostError,
    JobDirError,
)
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.validation import instance_of, refused_as_config_errors, unusable
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.codec import Form, Stored, stored
from flinkish_spark.protocol.ids import JobUuid, Place
from flinkish_spark.protocol.limits import checked_choice, checked_whole
from flinkish_spark.protocol.plan_layout import offsets_in
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.transport.channels import channel_of, check_told_apart

if TYPE_CHECKING:
    from flinkish_spark.connectors.kafka.chaining.upstream import UpstreamJob
    from flinkish_spark.protocol.plan_layout import Position


LOG = logging.getLogger(__name__)
#: How long a group's offsets are waited for that could be stored later.
_GROUP_PATIENCE_MS = 30_000


#: By topic, the partitions that are read; empty for all of all topics.
Partitions = Mapping[str, tuple[int, ...]]


def checked_topics(topics: object) -> tuple[str, ...]:
    """Return the names that a user gave, each once, or raise ConfigError."""
    names = topics if isinstance(topics, Sequence) and not isinstance(topics, str) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"topics is {topics!r}",
            what_to_do='give a list of topic names: topics=["orders"]; or a pattern: pattern="orders-.*"',
        )
    return tuple(dict.fromkeys(names))


def checked_partitions(partitions: object, topics: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the partitions that a user named, or raise ConfigError."""
    to_do = 'name partitions of every topic: partitions={"orders": [0, 1]}; or leave it out'
    if partitions is None:
        return {}
    if not isinstance(partitions, Mapping) or partitions.keys() != set(topics):
        raise unusable("partitions", partitions, wanted="numbers by each of the topics", what_to_do=to_do)
    found = {}
    for topic, numbers in partitions.items():
        if isinstance(numbers, str) or not isinstance(numbers, Sequence) or not numbers:
            raise unusable(f"partitions[{topic!r}]", numbers, wanted="a list of numbers", what_to_do=to_do)
        with refused_as_config_errors(to_do):
            found[topic] = tuple(sorted({checked_whole("a partition", one, least=0) for one in numbers}))
    return found


def places_in(counts: Mapping[str, int], partitions: Partitions, to_correct: str) -> list[Place]:
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


def by_topic(offsets: Mapping[Place, int]) -> dict[str, dict[str, int]]:
    """Return offsets as they are stored, and as Spark's options have them."""
    found: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        found.setdefault(topic, {})[str(partition)] = offset
    return found


@dataclass(frozen=True)
class Wanted:
    """What a Kafka source reads: topics by name, some of their partitions, or topics by a pattern."""

    topics: tuple[str, ...] = ()
    partitions: Partitions = field(default_factory=dict)
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
        names = checked_topics(topics)
        return cls(names, checked_partitions(partitions, names))

    def topics_now(self, connection: KafkaConnection) -> Sequence[str]:
        """Return the topics that are named; of a pattern, those that there are now. In any thread."""
        if not self.pattern:
            return self.topics
        # A connection belongs to one thread, so each call has its own.
        with KafkaAdmin(connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            return sorted(admin.matching(TopicPattern(self.pattern)))

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


class StartingOffsets(Choice):
    """Where a job that has no checkpoint yet begins to read."""

    EARLIEST = "earliest"
    LATEST = "latest"


class KafkaStart(ABC):
    """Says where each partition begins; one of the classes below."""

    @abstractmethod
    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        """Return the first offset of each partition that is read, before the first start."""

    @property
    def needs_group(self) -> bool:
        """Whether it goes by the group of the source, and so cannot do without."""
        return False

    def of_group(self, group_id: str) -> KafkaStart:
        """Return the start of a source that has this group."""
        return self


@dataclass(frozen=True)
class StartAtTimestamp(KafkaStart):
    """Begins each partition at its first record that is at least as late; without one, with what comes.

    Parameters
    ----------
    timestamp_ms
        Milliseconds since 1970.
    """

    timestamp_ms: int

    def __post_init__(self) -> None:
        with refused_as_config_errors("give milliseconds since 1970"):
            checked_whole("timestamp_ms", self.timestamp_ms, least=0, most=(1 << 63) - 1)

    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        return first_at_least_as_late(
            dict.fromkeys(places, self.timestamp_ms), admin.offsets_at, admin.end_offsets
        )


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
        with refused_as_config_errors("give StartingOffsets.EARLIEST or StartingOffsets.LATEST"):
            checked_choice("otherwise", self.otherwise, StartingOffsets)

    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        given = {(topic, number): at for topic, all_ in self.starts.items() for number, at in all_.items()}
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
        with refused_as_config_errors("give StartingOffsets.EARLIEST or StartingOffsets.LATEST"):
            checked_choice("otherwise", self.otherwise, StartingOffsets)

    @property
    def needs_group(self) -> bool:
        return not self.group_id

    def of_group(self, group_id: str) -> KafkaStart:
        return StartAtCommitted(self.group_id or group_id, self.otherwise)

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
        with refused_as_config_errors(to_do):
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


def start_offsets(
    start: StartingOffsets | KafkaStart, admin: KafkaAdmin, places: Sequence[Place]
) -> dict[Place, int]:
    return start.offsets(admin, places) if isinstance(start, KafkaStart) else _ends(admin, places, start)


def checked_start(start: Any, group_id: str) -> StartingOffsets | KafkaStart:
    """Return what a user gave as `starting_offsets`, or raise ConfigError."""
    what_to_do = (
        "give StartingOffsets.EARLIEST or LATEST, StartAtTimestamp(...), StartAtOffsets(...) "
        "or StartAtCommitted(...)"
    )
    if isinstance(start, KafkaStart):
        if start.needs_group and not group_id:
            raise ConfigError(
                "the source begins at the offsets of a consumer group, and no group is named",
                what_to_do='give the source a group_id, or name one: StartAtCommitted("orders-consumers")',
            )
        return start.of_group(group_id)
    try:
        return StartingOffsets(start)
    except ValueError:
        raise unusable(
            "starting_offsets", start, wanted="a place to begin at", what_to_do=what_to_do
        ) from None


def _ends(admin: KafkaAdmin, places: Iterable[Place], which: StartingOffsets) -> dict[Place, int]:
    return admin.beginning_offsets(places) if which is StartingOffsets.EARLIEST else admin.end_offsets(places)


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
    return {**_ends(admin, [place for place in places if place not in given], otherwise), **given}


#: Spark's number for "the first offset there is".
_EARLIEST = -2


class StartsAtOffsets(Source):
    kind = "kafka"
    metadata: tuple[str, ...] = ()
    #: By topic; empty for all.
    partitions: Partitions = {}  # noqa: RUF012 - never changed
    pattern: str = ""
    starting_offsets: StartingOffsets | KafkaStart
    _start: SourceStart | None
    #: Under which its job knows it.
    _uid: str = ""

    @property
    def connection(self) -> KafkaConnection:
        raise NotImplementedError

    def bound(self, uid: str) -> Self:
        known = copy(self)
        known.__dict__["_uid"] = uid
        return known

    @property
    def topic_pattern(self) -> str:  # type: ignore[override]
        return self.pattern

    @property
    def is_positionable(self) -> bool:
        return True

    def starting_at(self, start: SourceStart) -> Self:
        moved = copy(self)
        moved.__dict__["_start"] = start
        # A connection belongs to one thread, and so to one source.
        for name in ("_admin", "_watch_admin"):
            moved.__dict__.pop(name, None)
        return moved

    def with_own_time(self) -> Self:
        timed = copy(self)
        timed.__dict__["metadata"] = (*self.metadata, OWN_TIME)
        return timed

    def channels_in(self, position: LoggedOffsets) -> frozenset[int]:
        return self.channels_of(self.offsets_in(position))

    def offsets_in(self, position: LoggedOffsets) -> dict[str, dict[int, int]]:
        """Return topic -> partition -> next offset of what this source has read."""
        return position.kafka(frozenset(self._of_mine(position.topics())))

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.topics, self.partitions, self.pattern)

    def topics_now(self) -> Sequence[str]:
        """Return the topics that are named; of a pattern, those that there are now. In any thread."""
        found = self.wanted.topics_now(self.connection)
        check_told_apart(found)
        return found

    def topics_at(self, position: LoggedOffsets | None) -> Sequence[str]:
        """Return :meth:`topics_now`; of a pattern, also those that were read and may be gone."""
        if not self.pattern or position is None:
            return self.topics_now()
        return sorted({*self.topics_now(), *self._of_mine(position.topics())})

    def _of_mine(self, topics: Iterable[str]) -> list[str]:
        mine: Collection[str] | TopicPattern = TopicPattern(self.pattern) if self.pattern else self.topics
        return [topic for topic in topics if topic in mine]

    def channels_of(self, partitions: Mapping[str, Iterable[int]]) -> frozenset[int]:
        return frozenset(
            channel_of(self.topics, topic, partition)
            for topic in self._of_mine(partitions)
            for partition in partitions[topic]
        )

    def places(self, admin: KafkaAdmin) -> list[Place]:
        counts = admin.partition_counts(self.topics_now())
        return places_in(counts, self.partitions, "the source's partitions")

    def starting_option(self, place: JobPlace) -> str:
        """Return the option `startingOffsets`: Spark wants every partition named."""
        # Partitions and topics that are not in what is known were added since, and are read whole.
        known = self._known_offsets(place)
        if isinstance(known, StartingOffsets):
            return known.value
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            places = self.places(admin)
        return json.dumps(by_topic({(t, p): known.get(t, {}).get(str(p), _EARLIEST) for t, p in places}))

    def _known_offsets(self, place: JobPlace) -> StartingOffsets | Mapping[str, Mapping[str, int]]:
        if self._start is not None:
            return offsets_in(self._start.position)
        name = self.fact("start")
        # Of these each scan keeps what it found.
        if isinstance(self.starting_offsets, StartingOffsets):
            return self.starting_offsets
        if place.job_dir is None:
            return self._asked_offsets()
        job_dir = JobDir(place.job_dir.open())
        if job_dir.known_uuid() is None:
            # A plan that is only looked at, before the first start.
            return StartingOffsets.EARLIEST
        recorded = job_dir.recorded(name)
        if recorded is None:
            recorded = job_dir.recorded_once(name, {"offsets": self._asked_offsets()})
        offsets: Mapping[str, Mapping[str, int]] = recorded["offsets"]
        return offsets

    def _asked_offsets(self) -> dict[str, dict[str, int]]:
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            return by_topic(start_offsets(self.starting_offsets, admin, self.places(admin)))

    def check_start(self, uid: str, position: Position) -> None:
        logged = LoggedOffsets((offsets_in(position),))
        topics = self.topics_at(logged)
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            checks = InputChecks(admin, topics)
            raise_if_it_stays(lambda: checks.gone(uid, logged))

    def identity(self, job_dir: JobDir, uid: str) -> Mapping[str, Mapping[str, str]]:
        """Return ids of topics, and schemas, as the job recorded them at its first start, by fact."""
        names = [*(f"topic-{uid}-{topic}" for topic in self.topics_now()), *schema_facts(uid)]
        facts = {name: job_dir.recorded(name) for name in names}
        return {name: fact for name, fact in facts.items() if fact is not None}

    def fact(self, what: str) -> str:
        """Return the name under which the job keeps `what` of this source."""
        # No two sources of a job read one topic. No topic has a blank in its name.
        read = self.topics or (f"pattern {self.pattern}",)
        return f"kafka-{what}-{hashlib.sha256(repr(read).encode()).hexdigest()[:16]}"


#: Topic -> partition -> the first offset that is not read.
Ends = Mapping[str, Mapping[str, int]]


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
class EndAtTimestamp(KafkaEnd):
    """Reads each partition up to its first record that is at least as late.

    Where there is none when the job starts for the first time, up to what there is then.

    Parameters
    ----------
    timestamp_ms
        Milliseconds since 1970.
    """

    TAG: ClassVar = ("end", "timestamp")

    timestamp_ms: int

    def __post_init__(self) -> None:
        with refused_as_config_errors("give milliseconds since 1970"):
            checked_whole("timestamp_ms", self.timestamp_ms, least=0, most=(1 << 63) - 1)

    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        return first_at_least_as_late(
            dict.fromkeys(places, self.timestamp_ms), admin.offsets_at, admin.end_offsets
        )


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
        given = {
            (topic, partition): at for topic, ends in self.ends.items() for partition, at in ends.items()
        }
        different = sorted(set(given) ^ set(places))
        if different:
            topic, partition = different[0]
            raise ConfigError(
                f"the ends of the source do not fit its topics at partition {partition} of '{topic}'",
                why="an end is needed for every partition, and for no other",
                what_to_do="name all partitions of all topics in ending=EndAtOffsets(...)",
            )
        return given


class EndsAtOffsets(StartsAtOffsets):
    topics: tuple[str, ...]
    ending: KafkaEnd | None

    @property
    def is_bounded(self) -> bool:
        return self.ending is not None

    def has_ended(self, position: LoggedOffsets) -> bool:
        ends, read = self._known_ends, self.offsets_in(position)
        return ends is not None and all(
            read.get(topic, {}).get(int(partition), -1) >= end
            for topic, partitions in ends.items()
            for partition, end in partitions.items()
        )

    def channels_in(self, position: LoggedOffsets) -> frozenset[int]:
        """Return the partitions that are not at their end: the others bring nothing any more."""
        ends, read = self._known_ends, self.offsets_in(position)
        if ends is None:
            return self.channels_of(read)
        return self.channels_of(
            {
                topic: [p for p, at in found.items() if at < ends.get(topic, {}).get(str(p), 0)]
                for topic, found in read.items()
            }
        )

    def extent(self, position: LoggedOffsets | None) -> Extent | None:
        """Return the sum of the offsets of a position; where topics began, brokers would have to be asked."""
        read = {} if position is None else self.offsets_in(position)
        if not read:
            return None
        return Extent(sum(at for found in read.values() for at in found.values()))

    def check_end(self, admin: KafkaAdmin) -> None:
        if self.ending is not None:
            self.ending.offsets(admin, self.places(admin))

    def fix_end(self, admin: KafkaAdmin, job_dir: JobDir) -> None:
        """Record the end at the first start; called before each start of the query."""
        if self.ending is None or self._known_ends is not None:
            return
        wanted, name = self.ending.to_json(), self.fact("end")
        recorded = job_dir.recorded(name)
        if recorded is None:
            none: dict[str, dict[str, int]] = {topic: {} for topic in self.topics}
            offsets = {**none, **by_topic(self.ending.offsets(admin, self.places(admin)))}
            recorded = job_dir.recorded_once(name, {"ending": wanted, "offsets": offsets})
        if recorded["ending"] != wanted:
            read = ", ".join(self.topics) or self.pattern
            raise JobDirError(
                f"the source of {read} has the end {recorded['ending']}, not {wanted}",
                why="the end is fixed at the first start",
                what_to_do="give that end again, or start a new job with a new job_dir",
            )
        self.__dict__["_ends"] = recorded["offsets"]

    def ends_in(self, place: JobPlace) -> Ends | None:
        """Return the ends as they were recorded; None without any, and before the first start."""
        if self.ending is None or self._known_ends is not None or place.job_dir is None:
            return self._known_ends
        recorded = JobDir(place.job_dir.open()).recorded(self.fact("end"))
        return None if recorded is None else recorded["offsets"]

    @property
    def _known_ends(self) -> Ends | None:
        ends: Ends | None = self.__dict__.get("_ends")
        return ends

    def before_end(self, offsets: Mapping[str, Mapping[int, int]]) -> dict[str, dict[int, int]]:
        """Return offsets, not beyond the ends; topics and partitions that were added later are left out."""
        ends = self._known_ends
        if ends is None:
            return {topic: dict(found) for topic, found in offsets.items()}
        return {
            topic: {p: min(at, ends[topic][str(p)]) for p, at in found.items() if str(p) in ends[topic]}
            for topic, found in offsets.items()
            if topic in ends
        }


def checked_end(ending: KafkaEnd | None, aligned_with: UpstreamJob | None) -> KafkaEnd | None:
    if ending is None:
        return None
    if aligned_with is not None:
        raise ConfigError(
            "a source with an end cannot be aligned with an upstream job",
            why="its last checkpoint would wait for a barrier of that job's, which may lie behind the end",
            what_to_do="leave out ending or aligned_with",
        )
    what_to_do = "give EndAtLatest(), EndAtOffsets({...}) or EndAtTimestamp(...), or leave it out"
    return instance_of("ending", ending, KafkaEnd, what_to_do=what_to_do)  # type: ignore[type-abstract]


class GroupIsActive(EnvironmentFault):
    """Consumers are members of the job's group, and Kafka takes offsets from them alone."""


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
            self._failing_since_ms = since_ms = (
                now_ms if self._failing_since_ms is None else self._failing_since_ms
            )
            # What comes back by itself is waited for once; any other refusal is not.
            if fault.restartable and now_ms - since_ms < _GROUP_PATIENCE_MS:
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
    offsets: Mapping[str, Mapping[int, int]],
    direction: OffsetDirection,
    note: str = "",
) -> dict[str, Mapping[str, Mapping[str, int]]]:
    """Set a group's offsets; return them as a receipt has them. May be repeated."""
    if not group:
        return {}
    flat = {(t, p): o for t, ps in offsets.items() for p, o in ps.items()}
    try:
        answer = admin.commit_offsets(group, flat, direction, note)
    except InputLostError:
        answer = GroupCommit.UNCHANGED
    check_committed(answer, group)
    return {group: {t: {str(p): o for p, o in ps.items()} for t, ps in offsets.items()}}


def group_marks(admin: KafkaAdmin, group: str, job: JobUuid) -> Sequence[Mark]:
    mark = newest_of(admin.committed_notes(group).values(), job) if group else None
    return () if mark is None else (mark,)


def commit_places(admin: KafkaAdmin, group: str, offsets: Mapping[Place, int], note: str) -> None:
    """Commit a group's offsets, forward only, with a note beside them; of a source of splits."""
    check_committed(admin.commit_offsets(group, offsets, note=note), group)


def check_committed(answer: GroupCommit, group: str) -> None:
    if answer is GroupCommit.ACTIVE_MEMBERS:
        raise GroupIsActive(
            f"the consumer group '{group}' has active members",
            why="Kafka then takes offsets from those members only",
            what_to_do="stop the consumers, or give the job a group of its own",
            group=group,
        )
