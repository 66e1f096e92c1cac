"""Channel numbers of the partitions of several topics in one stream."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from flinkish_spark.core.errors import ConfigError

#: Number of bits below the topic's number in a channel's number.
TOPIC_SHIFT = 32
#: Mask of a topic's number, so that a channel's number is not negative.
TOPIC_BITS = 0x7FFFFFFF


def channel_of(topics: Sequence[str], topic: str, partition: int) -> int:
    return partition if len(topics) == 1 else channel_by_name(topic, partition)


def channel_by_name(topic: str, partition: int) -> int:
    # State by channel, such as watermarks, outlives a start of the job, so a new topic or another order of
    # topics must not change the numbers.
    return (number_of_topic(topic) << TOPIC_SHIFT) + partition


def check_distinct_channels(topics: Iterable[str]) -> None:
    """Refuse topics of one source with colliding channel numbers."""
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
