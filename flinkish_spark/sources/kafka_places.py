"""Which partitions a Kafka source reads: all of its topics', or some that were named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flinkish_spark.arguments import instance_of, refused_as_config_errors, unusable
from flinkish_spark.clock import Clock
from flinkish_spark.errors import ConfigError, GraphError, InputLostError
from flinkish_spark.kafka import KafkaAdmin
from flinkish_spark.kafka._pace import seen_to_stay
from flinkish_spark.kafka.answers import Place
from flinkish_spark.kafka.positions import Positions, TopicPattern
from flinkish_spark.protocol.limits import checked_whole

#: By topic, the partitions that are read; empty for all of all topics.
Partitions = Mapping[str, tuple[int, ...]]
#: The control file of a plan that belongs to no job (`graph/planner.py`).
NO_CONTROL = "no-control"


def checked_topics(topics: object) -> tuple[str, ...]:
    """Return the names that a user gave, each once, or raise ConfigError."""
    if isinstance(topics, str) or not topics or not isinstance(topics, Sequence):
        raise _no_topics(topics)
    if not all(isinstance(name, str) and name for name in topics):
        raise _no_topics(topics)
    return tuple(dict.fromkeys(topics))


def _no_topics(topics: object) -> ConfigError:
    return ConfigError(
        f"topics is {topics!r}",
        what_to_do='give a list of topic names: topics=["orders"]; or a pattern: pattern="orders-.*"',
    )


def checked_partitions(partitions: object, topics: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the partitions that a user named, or raise ConfigError.

    Examples
    --------
    >>> checked_partitions({"orders": [1, 0, 1]}, ["orders"])
    {'orders': (0, 1)}
    """
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


def places_in(admin: KafkaAdmin, topics: Sequence[str], partitions: Partitions) -> list[Place]:
    """Return the partitions that are read now.

    Raises
    ------
    GraphError
        One that was named does not exist.
    """
    there = {name: found.partitions for name, found in sorted(admin.topics(topics).items())}
    if not partitions:
        return [(name, number) for name, count in there.items() for number in range(count)]
    for topic, numbers in partitions.items():
        if topic in there and numbers[-1] >= there[topic]:
            raise GraphError(
                f"the topic '{topic}' has no partition {numbers[-1]}",
                why=f"it has {there[topic]} partitions",
                what_to_do="correct the source's partitions",
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
        """Return what a user asked for, or raise ConfigError."""
        if pattern:
            if topics or partitions:
                raise ConfigError(
                    "a pattern is given, and topics or partitions", what_to_do="leave one of them out"
                )
            text = instance_of("pattern", pattern, str, what_to_do='give a pattern: "orders-.*"')
            return cls(pattern=TopicPattern(text).text)
        names = checked_topics(topics)
        return cls(names, checked_partitions(partitions, names))

    def places(self, positions: Positions, clock: Clock) -> list[Place]:
        """Return the partitions that there are now.

        Raises
        ------
        InputLostError
            A topic that is named is gone, and stays so.
        """
        if self.pattern:
            return sorted(Positions.places(positions.matching(TopicPattern(self.pattern))))
        found = seen_to_stay(
            lambda: positions.topics(self.topics), lambda one: len(one) < len(self.topics), clock
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
        return list(Positions.places(found))
