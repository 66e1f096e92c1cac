"""What the Kafka source tells Spark's reader, and what a user cannot tell it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from flinkish_spark.drop_in.option_names import CONTROL_PATH, FIRST_OFFSETS, HELD_PATH, HELD_SOURCE

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
