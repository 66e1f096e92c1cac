"""flinkish_spark: exactly-once checkpoints for PySpark Structured Streaming.

The public API, beside that of `flinkish_spark.sources`, `.windows`, `.joins` and `.testing`; everything else
may change. Names are imported when they are first used: Spark's Python workers import this package too, and
need little of it.
"""

from importlib import import_module

__version__ = "0.1.0"

#: Module -> the names it gives to the public API; `__init__.pyi` says the same to type checkers.
_PUBLIC = {
    "aggregates": ("AggregateColumn", "Emit", "Fold", "Ties"),
    "answers": ("AnswerKind", "CheckpointAnswer", "PendingAnswer"),
    "broadcast_stream": ("BroadcastConnectedStream", "BroadcastStream"),
    "chaining.upstream": ("UpstreamJob",),
    "config": ("CheckpointConfig", "CheckpointingMode"),
    "connected_streams": ("ConnectedStreams", "KeyedConnectedStreams"),
    "datastream": ("DataStream",),
    "drop_in": ("register",),
    "environment": ("StreamExecutionEnvironment",),
    "errors": ("FlinkishError",),
    "formats": ("Avro", "DeadLetter", "Json", "OnBadRecord", "Raw"),
    "functions": (
        "AggregateFunction",
        "BroadcastProcessFunction",
        "Context",
        "FilterFunction",
        "FlatMapFunction",
        "KeyedBroadcastProcessFunction",
        "KeyedCoProcessFunction",
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
    "joined_streams": ("JoinedStreams",),
    "kafka.barrier_records": ("BarrierRecords",),
    "kafka.delivery": ("DeliveryGuarantee", "RecordHeaders"),
    "keyed_stream": ("KeyedStream",),
    "manifests.delta": ("DeltaManifest",),
    "manifests.kafka": ("KafkaManifest",),
    "operators.elements": ("OutputTag", "TimeDomain"),
    "operators.vectorized": ("BatchContext", "VectorizedProcessFunction"),
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
    "runtime.outside_requests": ("StopMode",),
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
    "sinks.files.buckets": ("BucketAssigner", "ColumnBuckets", "DateTimeBuckets", "ExpressionBuckets"),
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
    "sinks.files.rolling": ("Compaction", "RollOnCheckpoint", "RollingPolicy"),
    "sinks.files.sink": ("FileSink",),
    "sinks.foreach": ("ForeachCheckpointSink", "ForeachSink", "PrintSink"),
    "sinks.jdbc.refused": ("DeadLetterTable",),
    "sinks.jdbc.secrets": ("EnvironmentSecret", "FileSecret"),
    "sinks.jdbc.sink": ("JdbcSink",),
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
    "stream_functions": (
        "CoFlatMapFunction",
        "CoMapFunction",
        "CoProcessFunction",
        "KeySelector",
        "Partitioner",
        "ProcessContext",
        "ProcessFunction",
    ),
    "watermark_strategy": ("WatermarkGenerator", "WatermarkStrategy"),
    "windowed_stream": ("WindowedStream",),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'flinkish_spark' has no attribute {name!r}")
    value = getattr(import_module(f"flinkish_spark.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
