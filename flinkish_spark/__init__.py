"""flinkish_spark: exactly-once checkpoints for PySpark Structured Streaming.

The public API; everything else may change. Names are imported when they are first used: Spark's
Python workers import this package too, and need little of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flinkish_spark.answers import AnswerKind, CheckpointAnswer, PendingAnswer
    from flinkish_spark.config import CheckpointConfig, CheckpointingMode
    from flinkish_spark.datastream import DataStream, KeyedStream
    from flinkish_spark.drop_in import register
    from flinkish_spark.environment import StreamExecutionEnvironment
    from flinkish_spark.errors import FlinkishError
    from flinkish_spark.formats import DeadLetter, Json, OnBadRecord, Raw
    from flinkish_spark.functions import Context, KeyedProcessFunction, RuntimeContext
    from flinkish_spark.hooks import MasterHook
    from flinkish_spark.job_client import JobClient
    from flinkish_spark.protocol.job_status import JobStatus, TaskState
    from flinkish_spark.protocol.limits import UNLIMITED
    from flinkish_spark.protocol.restart import ExponentialDelay, FailureRate, FixedDelay, NoRestart
    from flinkish_spark.protocol.restoring import NonRestoredState, UnpositionedSources
    from flinkish_spark.protocol.retention import CheckpointRetention
    from flinkish_spark.protocol.seeding import ClaimMode
    from flinkish_spark.protocol.trigger import FinishedParticipants
    from flinkish_spark.runtime.listeners import JobListener, QuietListener
    from flinkish_spark.runtime.master_hooks import UnknownHookState
    from flinkish_spark.runtime.settings import Standby
    from flinkish_spark.savepoints.settings import RestoreSettings
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
    "answers": ("AnswerKind", "CheckpointAnswer", "PendingAnswer"),
    "config": ("CheckpointConfig", "CheckpointingMode"),
    "datastream": ("DataStream", "KeyedStream"),
    "drop_in": ("register",),
    "environment": ("StreamExecutionEnvironment",),
    "errors": ("FlinkishError",),
    "formats": ("DeadLetter", "Json", "OnBadRecord", "Raw"),
    "functions": ("Context", "KeyedProcessFunction", "RuntimeContext"),
    "hooks": ("MasterHook",),
    "job_client": ("JobClient",),
    "protocol.job_status": ("JobStatus", "TaskState"),
    "protocol.limits": ("UNLIMITED",),
    "protocol.restart": ("ExponentialDelay", "FailureRate", "FixedDelay", "NoRestart"),
    "protocol.retention": ("CheckpointRetention",),
    "protocol.trigger": ("FinishedParticipants",),
    "savepoints.settings": ("RestoreSettings",),
    "protocol.seeding": ("ClaimMode",),
    "protocol.restoring": ("NonRestoredState", "UnpositionedSources"),
    "runtime.listeners": ("JobListener", "QuietListener"),
    "runtime.master_hooks": ("UnknownHookState",),
    "runtime.settings": ("Standby",),
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
    "UNLIMITED",
    "AnswerKind",
    "CheckpointAnswer",
    "CheckpointConfig",
    "CheckpointRetention",
    "CheckpointingMode",
    "ClaimMode",
    "Context",
    "DataStream",
    "DeadLetter",
    "DeltaSink",
    "ExponentialDelay",
    "FailureRate",
    "FinishedParticipants",
    "FixedDelay",
    "FlinkishError",
    "JobClient",
    "JobListener",
    "JobStatus",
    "Json",
    "KafkaSink",
    "KafkaSource",
    "KeyedProcessFunction",
    "KeyedStream",
    "MasterHook",
    "NoRestart",
    "NonRestoredState",
    "OnBadRecord",
    "PendingAnswer",
    "QuietListener",
    "Raw",
    "RestoreSettings",
    "RuntimeContext",
    "Standby",
    "StartingOffsets",
    "StreamExecutionEnvironment",
    "TaskState",
    "UnknownHookState",
    "UnpositionedSources",
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
