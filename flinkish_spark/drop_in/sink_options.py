"""The options and the columns of the Kafka sink, checked before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from pyspark.sql import types as T

from flinkish_spark.drop_in import option_names as names
from flinkish_spark.drop_in.option_names import Given
from flinkish_spark.errors import ConfigError, SchemaError
from flinkish_spark.kafka import KafkaConnection
from flinkish_spark.kafka.staging_settings import ProducerSettings

#: How long staged rows may wait for their commit: the rest of the micro-batch, or a restart. Shorter than
#: the broker's maximum, since what a dead driver left open holds readers back for so long.
_DEFAULT_TRANSACTION_TIMEOUT_MS = 300_000

_TEXT = ("string", "binary")
#: Columns of the sink and the types they may have, as in Spark's own.
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "key": _TEXT,
    "value": _TEXT,
    "headers": ("array<struct<key:string,value:binary>>",),
    "topic": ("string",),
    "partition": ("int",),
}


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Everything a writer needs; safe to pickle into tasks, holds secrets inside `connection` only.

    Parameters
    ----------
    topic
        Wins over a column `topic`; None if there is none.
    columns
        Which of the sink's columns the query has.
    """

    connection: KafkaConnection
    producer: ProducerSettings
    topic: str | None
    columns: tuple[str, ...]
    checkpoint_location: Path
    transaction_timeout_ms: int


def parse_sink(options: Mapping[str, str], schema: T.StructType) -> SinkOptions:
    """Return the options of a streaming write.

    Raises
    ------
    ConfigError
        An option is unknown, missing or cannot be used.
    SchemaError
        A column is missing or has another type than the sink takes.
    """
    names.check_names(options, names.WRITE, "sink")
    given = Given(options)
    servers, connection, producer = names.split_kafka_options(options)
    timeout = producer.pop("transaction.timeout.ms", str(_DEFAULT_TRANSACTION_TIMEOUT_MS)).strip()
    if not timeout.isdecimal() or int(timeout) == 0:
        raise ConfigError(
            f"kafka.transaction.timeout.ms is {timeout!r}", what_to_do="give milliseconds above 0"
        )
    topic = given.text("topic")
    if topic == "":
        raise ConfigError("the option 'topic' is empty", what_to_do="name a topic, or leave the option out")
    return SinkOptions(
        KafkaConnection(servers, connection),
        ProducerSettings.of(names.producer_settings(producer)),
        topic,
        _checked_columns(schema, topic),
        _local_path(given.text("checkpointLocation")),
        int(timeout),
    )


def _checked_columns(schema: T.StructType, topic: str | None) -> tuple[str, ...]:
    found = []
    for name, allowed in _COLUMNS.items():
        if name not in schema.names:
            continue
        kind = schema[name].dataType.simpleString()
        if kind not in allowed:
            raise SchemaError(
                f"the column '{name}' is {kind}",
                why=f"the Kafka sink takes {' or '.join(allowed)}",
                what_to_do=f"cast it, for example CAST({name} AS {allowed[0].upper()})",
                column=name,
            )
        found.append(name)
    if "value" not in found:
        raise SchemaError(
            "the query has no column 'value'",
            why=f"its columns are {', '.join(schema.names)}",
            what_to_do="select one, for example to_json(struct(*)) AS value",
        )
    if topic is None and "topic" not in found:
        raise ConfigError(
            "the Kafka sink has no topic",
            why="there is neither an option 'topic' nor a column of that name",
            what_to_do='add .option("topic", "name")',
        )
    return tuple(found)


def _local_path(text: str | None) -> Path:
    if not text:
        raise ConfigError(
            "the option 'checkpointLocation' is missing",
            why="the sink keeps its commits beside Spark's checkpoint and cannot see a location that comes "
            "from the session's settings",
            what_to_do='add .option("checkpointLocation", "/absolute/path") to this query',
            option="checkpointLocation",
        )
    url = urlparse(text)
    # Hadoop takes a path as it stands: %20 in it are three characters.
    path = Path(url.path if url.scheme == "file" else text)
    mounted = Path("/dbfs") / text.removeprefix("dbfs:").lstrip("/")
    if url.scheme == "dbfs" and Path("/dbfs").is_dir():
        path = mounted
    elif url.scheme not in ("", "file") or not path.is_absolute():
        raise ConfigError(
            f"the checkpointLocation {text!r} cannot be used",
            why="it must be an absolute path that Python on the driver can open: commits are files in it",
            what_to_do="use a local or mounted directory, such as /data/checkpoints/app",
            option="checkpointLocation",
        )
    return path
