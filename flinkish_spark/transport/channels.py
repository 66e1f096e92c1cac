"""How partitions of several topics are numbered as channels of one stream."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from flinkish_spark.core.errors import ConfigError

#: Bits of a channel's number below those of its topic's.
TOPIC_SHIFT = 32
#: Bits of a topic's own number: a channel is not negative.
TOPIC_BITS = 0x7FFFFFFF


def channel_of(topics: Sequence[str], topic: str, partition: int) -> int:
    return partition if len(topics) == 1 else channel_by_name(topic, partition)


def channel_by_name(topic: str, partition: int) -> int:
    """Return the number that the records of a partition have where a source reads several topics."""
    # What is kept by channel, such as watermarks, outlives the job's start: a topic that comes, or another
    # order of them, must not renumber the others.
    return (number_of_topic(topic) << TOPIC_SHIFT) + partition


def check_told_apart(topics: Iterable[str]) -> None:
    """Refuse topics of one source whose channels would have the same numbers."""
    found: dict[int, str] = {}
    for topic in sorted(topics):
        other = found.setdefault(number_of_topic(topic), topic)
        if other != topic:
            raise ConfigError(
                f"the topics '{other}' and '{topic}' cannot be read by one source",
                why="channels are numbered by a checksum of the topic's name, and theirs are equal",
                what_to_do="read one of them with a source of its own, or give it another name",
                topics=(other, topic),
            )


def number_of_topic(topic: str) -> int:
    return zlib.crc32(topic.encode()) & TOPIC_BITS
