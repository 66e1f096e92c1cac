"""flinkish_spark: exactly-once checkpoints for PySpark Structured Streaming.

The public API; everything else may change.
"""

from flinkish_spark.config import CheckpointConfig
from flinkish_spark.datastream import DataStream, KeyedStream
from flinkish_spark.drop_in import register
from flinkish_spark.environment import JobClient, StreamExecutionEnvironment
from flinkish_spark.errors import FlinkishError
from flinkish_spark.formats import DeadLetter, Json, OnBadRecord, Raw
from flinkish_spark.functions import Context, KeyedProcessFunction, RuntimeContext
from flinkish_spark.protocol.restart import ExponentialDelay, FailureRate, FixedDelay, NoRestart
from flinkish_spark.session import (
    configure_spark_with_delta_jars,
    configure_spark_with_jars,
    configure_spark_with_packages,
)
from flinkish_spark.sinks.delta import DeltaSink
from flinkish_spark.sinks.kafka import KafkaSink
from flinkish_spark.sources.kafka import KafkaSource, StartingOffsets
from flinkish_spark.state import ValueState, ValueStateDescriptor

__version__ = "0.1.0"

__all__ = [
    "CheckpointConfig",
    "Context",
    "DataStream",
    "DeadLetter",
    "DeltaSink",
    "ExponentialDelay",
    "FailureRate",
    "FixedDelay",
    "FlinkishError",
    "JobClient",
    "Json",
    "KafkaSink",
    "KafkaSource",
    "KeyedProcessFunction",
    "KeyedStream",
    "NoRestart",
    "OnBadRecord",
    "Raw",
    "RuntimeContext",
    "StartingOffsets",
    "StreamExecutionEnvironment",
    "ValueState",
    "ValueStateDescriptor",
    "configure_spark_with_delta_jars",
    "configure_spark_with_jars",
    "configure_spark_with_packages",
    "register",
]
