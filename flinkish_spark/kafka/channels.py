"""How partitions of several topics are numbered as channels of one stream."""

from __future__ import annotations

from collections.abc import Sequence

#: Bits of a channel's number below those of its topic's place in the list.
TOPIC_SHIFT = 32


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
