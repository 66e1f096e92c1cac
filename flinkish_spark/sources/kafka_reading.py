"""What the Kafka source tells Spark's reader, and what a user cannot tell it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from flinkish_spark.drop_in.option_names import (
    CONTROL_PATH,
    FIRST_OFFSETS,
    HELD_PATH,
    HELD_SOURCE,
    PER_SECOND,
)
from flinkish_spark.kafka.channels import TOPIC_BITS, TOPIC_SHIFT
from flinkish_spark.kafka.record_times import FIRST_MS, LAST_MS, NO_TIME_MS
from flinkish_spark.runtime import columns as C

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: Kafka's consumer is made for long polls. A micro-batch reads a range that is there already, and
#: loses half a second to a fetch that waits for records behind the range; 100,000 records take
#: 0.2 s with these settings and 0.8 s without.
READER_DEFAULTS = {"kafka.fetch.max.wait.ms": "20", "kafka.max.poll.records": "5000"}

#: Opens the message of an error about a record's timestamp; its place and the time follow as JSON.
BAD_TIME_MARKER = "[FLINKISH_BAD_TIME]"
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


def subscription(
    topics: Sequence[str], partitions: Mapping[str, Sequence[int]], pattern: str = ""
) -> dict[str, str]:
    """Return the option that says what is read.

    Examples
    --------
    >>> subscription(["orders"], {}), subscription(["orders"], {"orders": (0, 1)})
    ({'subscribe': 'orders'}, {'assign': '{"orders": [0, 1]}'})
    """
    if pattern:
        return {"subscribePattern": pattern}
    if not partitions:
        return {"subscribe": ",".join(topics)}
    return {"assign": json.dumps({topic: list(numbers) for topic, numbers in partitions.items()})}


def for_jvm(pattern: str) -> str:
    """Return a pattern as Spark's own reader wants it, which looks for it anywhere in a topic's name.

    Examples
    --------
    >>> for_jvm("orders-[0-9]|clicks")
    '^(?:orders-[0-9]|clicks)$'
    """
    return f"^(?:{pattern})$" if pattern else ""


def ranges_between(
    starts: Mapping[str, Mapping[int, int]], ends: Mapping[str, Mapping[int, int]]
) -> dict[str, str] | None:
    """Return the options of a batch read of what a micro-batch has read; None if that was nothing.

    Parameters
    ----------
    starts
        By topic and partition; what is not in it is read from the first record there is.

    Examples
    --------
    >>> ranges_between({}, {"orders": {0: 7}})["startingOffsets"]
    '{"orders": {"0": -2}}'
    """
    if not ends:
        return None
    earliest = -2
    wanted = {t: {p: starts.get(t, {}).get(p, earliest) for p in ps} for t, ps in ends.items()}
    return {
        # Not the topics: they may have more partitions by now.
        "assign": json.dumps({topic: sorted(numbers) for topic, numbers in ends.items()}),
        "startingOffsets": json.dumps(wanted),
        "endingOffsets": json.dumps(ends),
    }


def with_checked_times(records: DataFrame) -> DataFrame:
    """Return records whose `timestamp` is one: a record without a time has -1 in Kafka, here it has null.

    Any other time in none of the years 1 to 9999 ends the query with an error that names the record.
    """
    ms = F.unix_millis("timestamp")
    is_time = ms.isNull() | ms.between(FIRST_MS, LAST_MS)
    place = F.to_json(F.struct("topic", "partition", "offset", ms.alias("timestamp_ms")))
    message = F.concat(F.lit(BAD_TIME_MARKER), place)
    checked = F.when(is_time, F.lit(True)).otherwise(F.raise_error(message).cast("boolean"))
    return with_known_times(records.where(checked))


def with_known_times(records: DataFrame) -> DataFrame:
    """Return records whose `timestamp` is null where they have none."""
    is_known = F.unix_millis("timestamp") != NO_TIME_MS
    return records.withColumn("timestamp", F.when(is_known, F.col("timestamp")))


def channel_column(topics: Sequence[str]) -> Column:
    """Return the number of each record's partition as a channel.

    Parameters
    ----------
    topics
        Of the source, as :func:`~.kafka.channels.channel_of` takes them.
    """
    channel = F.col("partition").cast("long")
    if len(topics) != 1:
        number = F.crc32(F.col("topic").cast("binary")).bitwiseAND(F.lit(TOPIC_BITS).cast("long"))
        channel = F.shiftleft(number, TOPIC_SHIFT) + channel
    return channel.alias(C.CHANNEL)
