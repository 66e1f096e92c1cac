"""The half of `format("flinkish-kafka")` that no job uses, for `KafkaDoor` in `data_source`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyspark.sql import types as T

from flinkish_spark.connectors.kafka.format.options import parse_sink
from flinkish_spark.connectors.kafka.format.reader import KafkaBatchReader
from flinkish_spark.connectors.kafka.format.writer import KafkaStreamWriter
from flinkish_spark.connectors.kafka.stream_options import parse_batch
from flinkish_spark.core.steps import Observer


def make_batch_reader(options: Mapping[str, str]) -> KafkaBatchReader:
    return KafkaBatchReader(parse_batch(options))


def make_stream_writer(
    options: Mapping[str, str], schema: T.StructType, observer: Callable[[], Observer]
) -> KafkaStreamWriter:
    return KafkaStreamWriter(parse_sink(options, schema), observer)
