"""What the Kafka source tells Spark's reader, and what a user cannot tell it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Column
from pyspark.sql import functions as F

from flinkish_spark.drop_in.option_names import (
    CONTROL_PATH,
    FIRST_OFFSETS,
    HELD_PATH,
    HELD_SOURCE,
    PER_SECOND,
)
from flinkish_spark.kafka.channels import TOPIC_SHIFT
from flinkish_spark.runtime import columns as C

if TYPE_CHECKING:
    from flinkish_spark.runtime.spark_log import LoggedOffsets

#: Kafka's consumer is made for long polls. A micro-batch reads a range that is there already, and
#: loses half a second to a fetch that waits for records behind the range; 100,000 records take
#: 0.2 s with these settings and 0.8 s without.
READER_DEFAULTS = {"kafka.fetch.max.wait.ms": "20", "kafka.max.poll.records": "5000"}

KAFKA_COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp")
#: Reader options that the source sets itself, in lower case.
RESERVED = frozenset(
    {
        "subscribe",
        "subscribepattern",
        "assign",
        "startingoffsets",
        "failondataloss",
        "kafka.isolation.level",
        "maxoffsetspertrigger",
        "kafka.bootstrap.servers",
        "kafka.group.id",
        "groupidprefix",
        "flinkish.group.id",
        CONTROL_PATH,
        FIRST_OFFSETS,
        HELD_PATH,
        HELD_SOURCE,
        PER_SECOND,
    }
)


def subscription(topics: Sequence[str], partitions: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the option that says what is read.

    Examples
    --------
    >>> subscription(["orders"], {}), subscription(["orders"], {"orders": (0, 1)})
    ({'subscribe': 'orders'}, {'assign': '{"orders": [0, 1]}'})
    """
    if not partitions:
        return {"subscribe": ",".join(topics)}
    return {"assign": json.dumps({topic: list(numbers) for topic, numbers in partitions.items()})}


def ranges_between(
    topics: frozenset[str], start: LoggedOffsets | None, end: LoggedOffsets
) -> dict[str, str] | None:
    """Return the options of a batch read of what a micro-batch has read; None if that was nothing of it.

    Parameters
    ----------
    start
        None for the first micro-batch, which is read from the first record there is.
    """
    ends = end.kafka(topics)
    if not ends:
        return None
    starts, earliest = start.kafka(topics) if start is not None else {}, -2
    wanted = {t: {p: starts.get(t, {}).get(p, earliest) for p in ps} for t, ps in ends.items()}
    return {"startingOffsets": json.dumps(wanted), "endingOffsets": json.dumps(ends)}


def channel_column(topics: Sequence[str]) -> Column:
    """Return the number of each record's partition as a channel; see :func:`~.kafka.channels.channel_of`."""
    channel = F.col("partition").cast("long")
    if len(topics) > 1:
        index = F.array_position(F.array(*[F.lit(topic) for topic in topics]), F.col("topic")) - 1
        channel = F.shiftleft(index, TOPIC_SHIFT) + channel
    return channel.alias(C.CHANNEL)
