"""flinkish_spark: exactly-once checkpoints for PySpark Structured Streaming.

The public API; everything else may change. Names are imported when they are first used: Spark's
Python workers import this package too, and need little of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

#: Module -> the names it gives to the public API.
_PUBLIC = {
    "config": ("CheckpointConfig",),
    "datastream": ("DataStream", "KeyedStream"),
    "drop_in": ("register",),
    "environment": ("JobClient", "StreamExecutionEnvironment"),
    "errors": ("FlinkishError",),
    "formats": ("DeadLetter", "Json", "OnBadRecord", "Raw"),
    "functions": ("Context", "KeyedProcessFunction", "RuntimeContext"),
    "protocol.restart": ("ExponentialDelay", "FailureRate", "FixedDelay", "NoRestart"),
    "session": (
        "configure_spark_with_delta_jars",
        "configure_spark_with_jars",
        "configure_spark_with_packages",
    ),
    "sinks.delta": ("DeltaSink",),
    "sinks.kafka": ("KafkaSink",),
    "sources.kafka": ("KafkaSource", "StartingOffsets"),
    "state": ("ValueState", "ValueStateDescriptor"),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}

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


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'flinkish_spark' has no attribute {name!r}")
    value = getattr(import_module(f"flinkish_spark.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
