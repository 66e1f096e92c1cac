"""Dead letters of Kafka sources: what a second scan keeps, and the topic that takes it.

A dead letter is its record: key, value, timestamp, and the headers in their order. Behind these stand ours,
which say where it was read, and why it is there.

Each scan ends where its own logged offsets say: a record is good in the one or bad in the other, whichever
micro-batch brings it, so each comes out once. Both belong to the same checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from flinkish_spark.errors import GraphError
from flinkish_spark.formats import DeadLetter, Json, Raw
from flinkish_spark.kafka.delivery import DeliveryGuarantee
from flinkish_spark.runtime import columns as C
from flinkish_spark.sources.base import SideOutput
from flinkish_spark.sources.json_records import bad_records

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from pyspark.sql import Column, DataFrame

    from flinkish_spark.engines import Engine
    from flinkish_spark.kafka import KafkaConnection
    from flinkish_spark.sinks.base import Sink

#: The column of a scan with the headers of records.
HEADERS = "headers"
#: Its type, in Spark's words.
HEADERS_TYPE = "array<struct<key:string,value:binary>>"
_MOST_LETTER_BYTES = 32 * 1024 * 1024
_MOST_DETAIL = 1_000


def letter_topic(value: object) -> str:
    """Return where unreadable records go; empty where none go anywhere."""
    to = value.on_bad_record if isinstance(value, Json) else None
    return to.topic if isinstance(to, DeadLetter) else ""


def letters_uid(uid: str) -> str:
    """Return the uid of the sink that takes the dead letters of a source."""
    return f"{uid}-dead-letter"


def letters_of(
    raw: DataFrame,
    value: Json,
    uid: str,
    connection: KafkaConnection,
    writer: Engine,
    peers: Sequence[Sink],
) -> SideOutput:
    """Return the records of `raw` that cannot be read, with the sink that takes them as they came.

    Parameters
    ----------
    raw
        A scan of its own; has `key`, `value`, `topic`, `partition`, `offset`, `timestamp`, `headers`,
        channel and sequence.
    uid
        Of the source.
    writer
        Who writes them.
    peers
        The job's sinks; see :class:`~flinkish_spark.formats.DeadLetter`.
    """
    from flinkish_spark.sinks.kafka import KafkaSink

    topic = letter_topic(value)
    sink = KafkaSink(
        connection.servers,
        topic,
        key="key",
        value=Raw("value"),
        transaction_timeout_ms=letters_timeout_ms(value, peers),
        # What a topic holds fits another one that takes as much; where it takes less, its head is kept.
        on_oversize=DeadLetter(topic),
        options=connection.options,
        producer={"max.request.size": str(_MOST_LETTER_BYTES)},
        writer=writer,
        headers=HEADERS,
        timestamp="timestamp",
    )
    # Before 1970 no sink writes; it is how a log says that it has no time.
    time = F.when(F.col("timestamp") >= F.timestamp_seconds(F.lit(0)), F.col("timestamp"))
    bad = bad_records(raw, value).select(
        "key",
        "value",
        time.alias("timestamp"),
        _headers(value, uid).alias(HEADERS),
        C.CHANNEL,
        C.SEQUENCE,
    )
    return SideOutput(letters_uid(uid), bad, sink)


def letters_timeout_ms(value: Json, peers: Sequence[Sink]) -> int:
    """Return how long staged letters may wait: as long as what their job stages otherwise."""
    from flinkish_spark.sinks.kafka import DEFAULT_TRANSACTION_TIMEOUT_MS, KafkaSink

    policy = value.on_bad_record
    if isinstance(policy, DeadLetter) and policy.transaction_timeout_ms is not None:
        return policy.transaction_timeout_ms
    exact = DeliveryGuarantee.EXACTLY_ONCE
    found = [
        one.transaction_timeout_ms for one in peers if isinstance(one, KafkaSink) and one.delivery is exact
    ]
    return min(found, default=DEFAULT_TRANSACTION_TIMEOUT_MS)


def _headers(value: Json, uid: str) -> Column:
    """Return the record's headers, and behind them ours."""
    detail = (
        F.when(F.col("value").isNull(), F.lit("the record has no value"))
        .when(~F.is_valid_utf8(F.col("value").cast("string")), F.lit("the value is not UTF-8"))
        .otherwise(F.lit(f"the value is no JSON object of the fields {value.schema}"[:_MOST_DETAIL]))
    )
    ours = {
        "flinkish-error": F.lit("unreadable"),
        "flinkish-source": F.lit(uid),
        "flinkish-topic": F.col("topic"),
        "flinkish-partition": F.col("partition").cast("string"),
        "flinkish-offset": F.col("offset").cast("string"),
        "flinkish-detail": detail,
    }
    entries = [
        F.struct(F.lit(name).alias("key"), text.cast("binary").alias("value")) for name, text in ours.items()
    ]
    return F.concat(F.coalesce(F.col(HEADERS), F.array().cast(HEADERS_TYPE)), F.array(*entries))


def check_letter_topic(uid: str, topic: str, read: Container[str]) -> None:
    """Refuse a source that would read its own dead letters; called by the preflight."""
    if topic and topic in read:
        raise GraphError(
            f"source '{uid}' has its own topic as dead-letter topic",
            what_to_do="name another topic" + ("" if isinstance(read, tuple) else ", which does not match"),
        )
