"""The options of the sink `format("flinkish-kafka")`, parsed and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import types as T

from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.settings import ProducerSettings
from flinkish_spark.connectors.kafka.stream_options import (
    OptionReader,
    check_names,
    make_option_error,
    split_kafka_options,
)
from flinkish_spark.connectors.stream_writer import STORE, find_checkpoint_place
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.core.store_spec import StoreSpec

WRITE = ("topic", "checkpointLocation")
#: How long staged rows may wait for their commit, through the rest of the micro-batch or a restart. Shorter
#: than the broker's maximum, since a transaction left open by a dead driver holds readers back that long.
_DEFAULT_TRANSACTION_TIMEOUT_MS = 300_000

_TEXT = ("string", "binary")
#: Column of the sink -> its allowed types, as in Spark's own sink.
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "key": _TEXT,
    "value": _TEXT,
    "headers": ("array<struct<key:string,value:binary>>",),
    "topic": ("string",),
    "partition": ("int",),
}


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Everything a writer needs; safe to pickle into tasks, holds secrets inside `connection` only."""

    connection: KafkaConnection
    producer: ProducerSettings
    #: The option `topic`, which wins over a column `topic`; None if it is not set.
    topic: str | None
    #: The sink's columns that the query has.
    columns: tuple[str, ...]
    checkpoint_location: StoreSpec
    transaction_timeout_ms: int


def parse_sink(options: Mapping[str, str], schema: T.StructType) -> SinkOptions:
    check_names([name for name in options if not name.lower().startswith(STORE)], WRITE, "sink")
    given = OptionReader(options)
    servers, connection, producer = split_kafka_options(options)
    producer.pop("transaction.timeout.ms", None)
    asked_ms = given.match("kafka.transaction.timeout.ms", r"0*[1-9]\d*", "give milliseconds above 0")
    timeout_ms = _DEFAULT_TRANSACTION_TIMEOUT_MS if asked_ms is None else int(asked_ms)
    if producer.pop("enable.idempotence", "true").strip().lower() != "true":
        what = "the option 'kafka.enable.idempotence' cannot be false: its producers are idempotent"
        raise ConfigError(what, what_to_do="leave it out")
    topic = given.text("topic")
    if topic == "":
        raise make_option_error("topic", topic, "name a topic, or leave it out: an empty one is none")
    return SinkOptions(
        KafkaConnection(servers, connection),
        ProducerSettings.of(producer),
        topic,
        _check_columns(schema, topic),
        find_checkpoint_place(options),
        timeout_ms,
    )


def _check_columns(schema: T.StructType, topic: str | None) -> tuple[str, ...]:
    found = []
    for name, allowed in _COLUMNS.items():
        if name not in schema.names:
            continue
        kind = schema[name].dataType.simpleString()
        if kind not in allowed:
            what = f"the column '{name}' is {kind}, and the Kafka sink takes {' or '.join(allowed)}"
            to_do = f"cast it, for example CAST({name} AS {allowed[0].upper()})"
            raise SchemaError(what, what_to_do=to_do, column=name)
        found.append(name)
    if "value" not in found:
        what = f"the query has no column 'value', but {', '.join(schema.names)}"
        raise SchemaError(what, what_to_do="select one, for example to_json(struct(*)) AS value")
    if topic is None and "topic" not in found:
        what = "the Kafka sink has no topic: there is neither an option nor a column of that name"
        raise ConfigError(what, what_to_do='add .option("topic", "name")')
    return tuple(found)
