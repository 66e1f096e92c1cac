"""The parts of records that a Kafka sink makes of a frame's rows."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from flinkish_spark.connectors.kafka.record_encoder import EncodeRecords, RecordEncoder
from flinkish_spark.core.arrow_pass import map_in_arrow
from flinkish_spark.transport import columns as C


def encoded_records(sink: Any, frame: DataFrame) -> DataFrame:
    encoder = RecordEncoder.of(sink, frame.schema)
    given = encoder.spark_columns()
    control = [F.lit(0).cast("int" if name == C.KIND else "long").alias(name) for name in C.SINK_CONTROL]
    rows = frame.select(*control, *(column.alias(name) for name, column in given.items()))
    encode = EncodeRecords(encoder, tuple(given))
    return map_in_arrow(rows, encode, encode.columns()).drop(*C.SINK_CONTROL)
