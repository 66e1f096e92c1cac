"""Which timestamps of Kafka's records are times: any 64 bits can stand there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flinkish_spark.core.errors import BadRecordError

Int64s = npt.NDArray[np.int64]


#: Of the years 1 to 9999, which are those that a TIMESTAMP holds.
FIRST_MS, LAST_MS = -62_135_596_800_000, 253_402_300_799_999
#: Kafka's own word for a record that has none.
NO_TIME_MS = -1


def check_times(topic: str, partition: int, offsets: Int64s, timestamps_ms: Int64s) -> None:
    """Refuse a time that no TIMESTAMP holds: in microseconds it would be another one, without a word.

    Raises
    ------
    BadRecordError
        With the place of the first such record.
    """
    outside = (timestamps_ms < FIRST_MS) | (timestamps_ms > LAST_MS)
    if outside.any():
        at = int(outside.argmax())
        raise bad_time(topic, partition, int(offsets[at]), int(timestamps_ms[at]))


def bad_time(topic: str, partition: int, offset: int, timestamp_ms: int) -> BadRecordError:
    """Return the error of a record whose timestamp is in none of the years 1 to 9999."""
    place = f"topic {topic}, partition {partition}, offset {offset}"
    return BadRecordError(
        f"the record at {place} has the timestamp {timestamp_ms}",
        why="Kafka's timestamps are milliseconds since 1970, and this is in none of the years 1 to 9999",
        what_to_do="correct the producer; delete the records up to it, or read from behind it in a new job",
        topic=topic,
        partition=partition,
        offset=offset,
    )
