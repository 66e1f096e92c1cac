"""How partitions of several topics are numbered as channels of one stream."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from flinkish_spark.errors import ConfigError

#: Bits of a channel's number below those of its topic's place in the list.
TOPIC_SHIFT = 32
#: Bits of a topic's own number: a channel is not negative.
TOPIC_BITS = 0x7FFFFFFF


def channel_of(topics: Sequence[str], topic: str, partition: int) -> int:
    """Return the number that the records of a partition have in ``_fs_channel``.

    Parameters
    ----------
    topics
        Of the source, in its order.

    Raises
    ------
    ValueError
        The topic is not among them.

    Examples
    --------
    >>> channel_of(["orders"], "orders", 3), channel_of(["orders", "clicks"], "clicks", 3)
    (3, 4294967299)
    """
    return (topics.index(topic) << TOPIC_SHIFT) + partition


def channel_by_name(topic: str, partition: int) -> int:
    """Return the number that the records of a partition have where topics are read by a pattern.

    It goes by the topic's name alone: topics come while the job runs, and no channel may be renumbered.

    Examples
    --------
    >>> channel_by_name("orders-1", 3) == channel_by_name("orders-1", 0) + 3
    True
    """
    return (_number_of(topic) << TOPIC_SHIFT) + partition


def check_told_apart(topics: Iterable[str]) -> None:
    """Refuse topics of one pattern whose channels would have the same numbers.

    Raises
    ------
    ConfigError
        Two names have one checksum: of a thousand topics, once in some four thousand jobs.
    """
    found: dict[int, str] = {}
    for topic in sorted(topics):
        other = found.setdefault(_number_of(topic), topic)
        if other != topic:
            raise ConfigError(
                f"the topics '{other}' and '{topic}' cannot be read by one pattern",
                why="channels are numbered by a checksum of the topic's name, and theirs are equal",
                what_to_do="read one of them by its name, with a source of its own, or give it another name",
                topics=(other, topic),
            )


def _number_of(topic: str) -> int:
    return zlib.crc32(topic.encode()) & TOPIC_BITS
