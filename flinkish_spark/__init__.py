"""flinkish_spark: exactly-once checkpoints for PySpark Structured Streaming.

The public API; everything else may change. Names are imported when they are first used: Spark's
Python workers import this package too, and need little of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flinkish_spark.answers import AnswerKind, CheckpointAnswer, PendingAnswer
    from flinkish_spark.chaining.upstream import UpstreamJob
    from flinkish_spark.config import CheckpointConfig, CheckpointingMode
    from flinkish_spark.datastream import DataStream
    from flinkish_spark.drop_in import register
    from flinkish_spark.environment import StreamExecutionEnvironment
    from flinkish_spark.errors import FlinkishError
    from flinkish_spark.formats import Avro, DeadLetter, Json, OnBadRecord, Raw
    from flinkish_spark.functions import (
        AggregateFunction,
        Context,
        FilterFunction,
        FlatMapFunction,
        KeyedProcessFunction,
        MapFunction,
        OnTimerContext,
        ReduceFunction,
        RichFunction,
        RuntimeContext,
        TimerService,
    )
    from flinkish_spark.hooks import MasterHook
    from flinkish_spark.job_client import JobClient
    from flinkish_spark.kafka.barrier_records import BarrierRecords
    from flinkish_spark.kafka.delivery import DeliveryGuarantee, RecordHeaders
    from flinkish_spark.keyed_stream import KeyedStream
    from flinkish_spark.manifests.delta import DeltaManifest
    from flinkish_spark.manifests.kafka import KafkaManifest
    from flinkish_spark.operators.elements import OutputTag, TimeDomain
    from flinkish_spark.operators.vectorized import BatchContext, VectorizedProcessFunction
    from flinkish_spark.protocol.failures import CheckpointFailureReason
    from flinkish_spark.protocol.gate_values import AlignmentMode
    from flinkish_spark.protocol.ids import CheckpointId
    from flinkish_spark.protocol.job_status import JobStatus, JobStatusChange, TaskState, TaskStateChange
    from flinkish_spark.protocol.limits import UNLIMITED
    from flinkish_spark.protocol.lineage import Tables
    from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome
    from flinkish_spark.protocol.purpose import CheckpointPurpose
    from flinkish_spark.protocol.restoring import NonRestoredState, UnpositionedSources
    from flinkish_spark.protocol.retention import CheckpointRetention
    from flinkish_spark.protocol.seeding import ClaimMode
    from flinkish_spark.protocol.statistics import (
        CheckpointDurations,
        CheckpointFailure,
        CheckpointStatistics,
        CheckpointStatus,
    )
    from flinkish_spark.protocol.statistics_history import (
        CheckpointCounts,
        RestoredCheckpoint,
        StatisticsHistory,
    )
    from flinkish_spark.protocol.statistics_participants import ChannelStatistics, ParticipantStatistics
    from flinkish_spark.protocol.statistics_summary import Quantity, Summary
    from flinkish_spark.protocol.trigger import FinishedParticipants
    from flinkish_spark.restart_strategies import ExponentialDelay, FailureRate, FixedDelay, NoRestart
    from flinkish_spark.runtime.listeners import JobListener, QuietListener
    from flinkish_spark.runtime.master_hooks import UnknownHookState
    from flinkish_spark.runtime.settings import JobProgress, Standby
    from flinkish_spark.savepoints.reading import read_state
    from flinkish_spark.savepoints.settings import RestoreSettings
    from flinkish_spark.session import (
        configure_spark_with_delta_jars,
        configure_spark_with_jars,
        configure_spark_with_packages,
    )
    from flinkish_spark.sinks.base import CompletedCheckpoint
    from flinkish_spark.sinks.dead_letters import WithDeadLetters
    from flinkish_spark.sinks.delta import DeltaSink
    from flinkish_spark.sinks.delta_modes import (
        Append,
        DeltaWriter,
        OverwritePartitions,
        SchemaEvolution,
        Upsert,
    )
    from flinkish_spark.sinks.files.buckets import (
        BucketAssigner,
        ColumnBuckets,
        DateTimeBuckets,
        ExpressionBuckets,
    )
    from flinkish_spark.sinks.files.formats import FileFormat
    from flinkish_spark.sinks.files.partitions import (
        AtFinal,
        MetastorePartition,
        PartitionCommit,
        PartitionPolicy,
        PartitionTime,
        ProcessTime,
        ReadyPartition,
        SuccessFile,
    )
    from flinkish_spark.sinks.files.rolling import Compaction, RollingPolicy, RollOnCheckpoint
    from flinkish_spark.sinks.files.sink import FileSink
    from flinkish_spark.sinks.foreach import ForeachCheckpointSink, ForeachSink, PrintSink
    from flinkish_spark.sinks.jdbc.refused import DeadLetterTable
    from flinkish_spark.sinks.jdbc.secrets import EnvironmentSecret, FileSecret
    from flinkish_spark.sinks.jdbc.sink import JdbcSink
    from flinkish_spark.sinks.kafka import KafkaSink
    from flinkish_spark.sinks.memory import MemorySink
    from flinkish_spark.sinks.two_phase import RecordRefused, SinkTransaction, TwoPhaseCommitSink
    from flinkish_spark.sources.kafka import KafkaSource, StartingOffsets
    from flinkish_spark.state import (
        AggregatingState,
        AggregatingStateDescriptor,
        ListState,
        ListStateDescriptor,
        MapState,
        MapStateDescriptor,
        ReducingState,
        ReducingStateDescriptor,
        StateTtl,
        TtlUpdate,
        ValueState,
        ValueStateDescriptor,
    )
    from flinkish_spark.watermark_strategy import WatermarkGenerator, WatermarkStrategy

__version__ = "0.1.0"

#: Module -> the names it gives to the public API.
_PUBLIC = {
    "answers": ("AnswerKind", "CheckpointAnswer", "PendingAnswer"),
    "chaining.upstream": ("UpstreamJob",),
    "config": ("CheckpointConfig", "CheckpointingMode"),
    "datastream": ("DataStream",),
    "keyed_stream": ("KeyedStream",),
    "drop_in": ("register",),
    "environment": ("StreamExecutionEnvironment",),
    "errors": ("FlinkishError",),
    "formats": ("Avro", "DeadLetter", "Json", "OnBadRecord", "Raw"),
    "functions": (
        "AggregateFunction",
        "Context",
        "FilterFunction",
        "FlatMapFunction",
        "KeyedProcessFunction",
        "MapFunction",
        "OnTimerContext",
        "ReduceFunction",
        "RichFunction",
        "RuntimeContext",
        "TimerService",
    ),
    "hooks": ("MasterHook",),
    "job_client": ("JobClient",),
    "kafka.barrier_records": ("BarrierRecords",),
    "manifests.delta": ("DeltaManifest",),
    "manifests.kafka": ("KafkaManifest",),
    "operators.elements": ("OutputTag", "TimeDomain"),
    "operators.vectorized": ("BatchContext", "VectorizedProcessFunction"),
    "kafka.delivery": ("DeliveryGuarantee", "RecordHeaders"),
    "protocol.failures": ("CheckpointFailureReason",),
    "protocol.gate_values": ("AlignmentMode",),
    "protocol.ids": ("CheckpointId",),
    "protocol.job_status": ("JobStatus", "JobStatusChange", "TaskState", "TaskStateChange"),
    "protocol.limits": ("UNLIMITED",),
    "protocol.lineage": ("Tables",),
    "protocol.outcomes": ("CommitAnswer", "Outcome"),
    "protocol.purpose": ("CheckpointPurpose",),
    "protocol.restoring": ("NonRestoredState", "UnpositionedSources"),
    "protocol.retention": ("CheckpointRetention",),
    "protocol.seeding": ("ClaimMode",),
    "protocol.statistics": (
        "CheckpointDurations",
        "CheckpointFailure",
        "CheckpointStatistics",
        "CheckpointStatus",
    ),
    "protocol.statistics_history": ("CheckpointCounts", "RestoredCheckpoint", "StatisticsHistory"),
    "protocol.statistics_participants": ("ChannelStatistics", "ParticipantStatistics"),
    "protocol.statistics_summary": ("Quantity", "Summary"),
    "protocol.trigger": ("FinishedParticipants",),
    "restart_strategies": ("ExponentialDelay", "FailureRate", "FixedDelay", "NoRestart"),
    "runtime.listeners": ("JobListener", "QuietListener"),
    "runtime.master_hooks": ("UnknownHookState",),
    "runtime.settings": ("JobProgress", "Standby"),
    "savepoints.reading": ("read_state",),
    "savepoints.settings": ("RestoreSettings",),
    "session": (
        "configure_spark_with_delta_jars",
        "configure_spark_with_jars",
        "configure_spark_with_packages",
    ),
    "sinks.base": ("CompletedCheckpoint",),
    "sinks.dead_letters": ("WithDeadLetters",),
    "sinks.delta": ("DeltaSink",),
    "sinks.delta_modes": ("Append", "DeltaWriter", "OverwritePartitions", "SchemaEvolution", "Upsert"),
    "sinks.foreach": ("ForeachCheckpointSink", "ForeachSink", "PrintSink"),
    "sinks.jdbc.refused": ("DeadLetterTable",),
    "sinks.jdbc.secrets": ("EnvironmentSecret", "FileSecret"),
    "sinks.jdbc.sink": ("JdbcSink",),
    "sinks.files.buckets": (
        "BucketAssigner",
        "ColumnBuckets",
        "DateTimeBuckets",
        "ExpressionBuckets",
    ),
    "sinks.files.formats": ("FileFormat",),
    "sinks.files.partitions": (
        "AtFinal",
        "MetastorePartition",
        "PartitionCommit",
        "PartitionPolicy",
        "PartitionTime",
        "ProcessTime",
        "ReadyPartition",
        "SuccessFile",
    ),
    "sinks.files.rolling": (
        "Compaction",
        "RollOnCheckpoint",
        "RollingPolicy",
    ),
    "sinks.files.sink": ("FileSink",),
    "sinks.kafka": ("KafkaSink",),
    "sinks.memory": ("MemorySink",),
    "sinks.two_phase": ("RecordRefused", "SinkTransaction", "TwoPhaseCommitSink"),
    "sources.kafka": ("KafkaSource", "StartingOffsets"),
    "state": (
        "AggregatingState",
        "AggregatingStateDescriptor",
        "ListState",
        "ListStateDescriptor",
        "MapState",
        "MapStateDescriptor",
        "ReducingState",
        "ReducingStateDescriptor",
        "StateTtl",
        "TtlUpdate",
        "ValueState",
        "ValueStateDescriptor",
    ),
    "watermark_strategy": ("WatermarkGenerator", "WatermarkStrategy"),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = [
    "UNLIMITED",
    "AggregateFunction",
    "AggregatingState",
    "AggregatingStateDescriptor",
    "AlignmentMode",
    "AnswerKind",
    "Append",
    "AtFinal",
    "Avro",
    "BarrierRecords",
    "BatchContext",
    "BucketAssigner",
    "ChannelStatistics",
    "CheckpointAnswer",
    "CheckpointConfig",
    "CheckpointCounts",
    "CheckpointDurations",
    "CheckpointFailure",
    "CheckpointFailureReason",
    "CheckpointId",
    "CheckpointPurpose",
    "CheckpointRetention",
    "CheckpointStatistics",
    "CheckpointStatus",
    "CheckpointingMode",
    "ClaimMode",
    "ColumnBuckets",
    "CommitAnswer",
    "Compaction",
    "CompletedCheckpoint",
    "Context",
    "DataStream",
    "DateTimeBuckets",
    "DeadLetter",
    "DeadLetterTable",
    "DeliveryGuarantee",
    "DeltaManifest",
    "DeltaSink",
    "DeltaWriter",
    "EnvironmentSecret",
    "ExponentialDelay",
    "ExpressionBuckets",
    "FailureRate",
    "FileFormat",
    "FileSecret",
    "FileSink",
    "FilterFunction",
    "FinishedParticipants",
    "FixedDelay",
    "FlatMapFunction",
    "FlinkishError",
    "ForeachCheckpointSink",
    "ForeachSink",
    "JdbcSink",
    "JobClient",
    "JobListener",
    "JobProgress",
    "JobStatus",
    "JobStatusChange",
    "Json",
    "KafkaManifest",
    "KafkaSink",
    "KafkaSource",
    "KeyedProcessFunction",
    "KeyedStream",
    "ListState",
    "ListStateDescriptor",
    "MapFunction",
    "MapState",
    "MapStateDescriptor",
    "MasterHook",
    "MemorySink",
    "MetastorePartition",
    "NoRestart",
    "NonRestoredState",
    "OnBadRecord",
    "OnTimerContext",
    "Outcome",
    "OutputTag",
    "OverwritePartitions",
    "ParticipantStatistics",
    "PartitionCommit",
    "PartitionPolicy",
    "PartitionTime",
    "PendingAnswer",
    "PrintSink",
    "ProcessTime",
    "Quantity",
    "QuietListener",
    "Raw",
    "ReadyPartition",
    "RecordHeaders",
    "RecordRefused",
    "ReduceFunction",
    "ReducingState",
    "ReducingStateDescriptor",
    "RestoreSettings",
    "RestoredCheckpoint",
    "RichFunction",
    "RollOnCheckpoint",
    "RollingPolicy",
    "RuntimeContext",
    "SchemaEvolution",
    "SinkTransaction",
    "Standby",
    "StartingOffsets",
    "StateTtl",
    "StatisticsHistory",
    "StreamExecutionEnvironment",
    "SuccessFile",
    "Summary",
    "Tables",
    "TaskState",
    "TaskStateChange",
    "TimeDomain",
    "TimerService",
    "TtlUpdate",
    "TwoPhaseCommitSink",
    "UnknownHookState",
    "UnpositionedSources",
    "Upsert",
    "UpstreamJob",
    "ValueState",
    "ValueStateDescriptor",
    "VectorizedProcessFunction",
    "WatermarkGenerator",
    "WatermarkStrategy",
    "WithDeadLetters",
    "configure_spark_with_delta_jars",
    "configure_spark_with_jars",
    "configure_spark_with_packages",
    "read_state",
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
