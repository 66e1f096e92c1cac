"""Dead letters of Kafka sources: what a second scan keeps, and the topic that takes it.

Each scan ends where its own logged offsets say: a record is good in the one or bad in the other, whichever
micro-batch brings it, so each comes out once. Both belong to the same checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flinkish_spark.errors import GraphError
from flinkish_spark.formats import DeadLetter, Json, Raw
from flinkish_spark.runtime import columns as C
from flinkish_spark.sources.base import SideOutput
from flinkish_spark.sources.json_records import bad_records

if TYPE_CHECKING:
    from collections.abc import Container

    from pyspark.sql import DataFrame

    from flinkish_spark.engines import Engine
    from flinkish_spark.kafka import KafkaConnection


def letter_topic(value: object) -> str:
    """Return where unreadable records go; empty where none go anywhere."""
    to = value.on_bad_record if isinstance(value, Json) else None
    return to.topic if isinstance(to, DeadLetter) else ""


def letters_uid(uid: str) -> str:
    """Return the uid of the sink that takes the dead letters of a source."""
    return f"{uid}-dead-letter"


def letters_of(
    raw: DataFrame, value: Json, uid: str, connection: KafkaConnection, writer: Engine
) -> SideOutput:
    """Return the records of `raw` that cannot be read, with the sink that takes them as they came.

    Parameters
    ----------
    raw
        A scan of its own; has `key`, `value`, `topic`, `partition`, `offset`, channel and sequence.
    uid
        Of the source.
    writer
        Who writes them.
    """
    from flinkish_spark.sinks.kafka import KafkaSink

    sink = KafkaSink(
        connection.servers,
        letter_topic(value),
        key="key",
        value=Raw("value"),
        options=connection.options,
        writer=writer,
    )
    bad = bad_records(raw, value).select("key", "value", C.CHANNEL, C.SEQUENCE)
    return SideOutput(letters_uid(uid), bad, sink)


def check_letter_topic(uid: str, topic: str, read: Container[str]) -> None:
    """Refuse a source that would read its own dead letters; called by the preflight."""
    if topic and topic in read:
        raise GraphError(
            f"source '{uid}' has its own topic as dead-letter topic",
            what_to_do="name another topic" + ("" if isinstance(read, tuple) else ", which does not match"),
        )
