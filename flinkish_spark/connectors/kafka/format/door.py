"""The half of `format("flinkish-kafka")` that no job uses, for `KafkaDoor` in `data_source`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from pyspark.sql import types as T

from flinkish_spark.connectors.kafka.format.options import parse_sink
from flinkish_spark.connectors.kafka.format.reader import KafkaBatchReader
from flinkish_spark.connectors.kafka.format.sink import make_output
from flinkish_spark.connectors.kafka.stream_options import parse_batch
from flinkish_spark.connectors.stream_writer import StreamWriter
from flinkish_spark.core.steps import Observer


def make_batch_reader(options: Mapping[str, str]) -> KafkaBatchReader:
    return KafkaBatchReader(parse_batch(options))


def make_stream_writer(
    options: Mapping[str, str], schema: T.StructType, observer: Callable[[], Observer]
) -> StreamWriter:
    key = json.dumps([sorted(options.items()), schema.json()])
    return StreamWriter(make_output(parse_sink(options, schema), schema, key), observer)
