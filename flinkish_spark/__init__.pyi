"""What type checkers see of the public API: the same names as in `__init__.py`."""

from flinkish_spark.aggregates import (
    AggregateColumn as AggregateColumn,
)
from flinkish_spark.aggregates import (
    Emit as Emit,
)
from flinkish_spark.aggregates import (
    Fold as Fold,
)
from flinkish_spark.aggregates import (
    Ties as Ties,
)
from flinkish_spark.answers import (
    AnswerKind as AnswerKind,
)
from flinkish_spark.answers import (
    CheckpointAnswer as CheckpointAnswer,
)
from flinkish_spark.answers import (
    PendingAnswer as PendingAnswer,
)
from flinkish_spark.broadcast_stream import (
    BroadcastConnectedStream as BroadcastConnectedStream,
)
from flinkish_spark.broadcast_stream import (
    BroadcastStream as BroadcastStream,
)
from flinkish_spark.chaining.upstream import (
    UpstreamJob as UpstreamJob,
)
from flinkish_spark.config import (
    CheckpointConfig as CheckpointConfig,
)
from flinkish_spark.config import (
    CheckpointingMode as CheckpointingMode,
)
from flinkish_spark.connected_streams import (
    ConnectedStreams as ConnectedStreams,
)
from flinkish_spark.connected_streams import (
    KeyedConnectedStreams as KeyedConnectedStreams,
)
from flinkish_spark.datastream import (
    DataStream as DataStream,
)
from flinkish_spark.drop_in import (
    register as register,
)
from flinkish_spark.environment import (
    StreamExecutionEnvironment as StreamExecutionEnvironment,
)
from flinkish_spark.errors import (
    FlinkishError as FlinkishError,
)
from flinkish_spark.formats import (
    Avro as Avro,
)
from flinkish_spark.formats import (
    DeadLetter as DeadLetter,
)
from flinkish_spark.formats import (
    Json as Json,
)
from flinkish_spark.formats import (
    OnBadRecord as OnBadRecord,
)
from flinkish_spark.formats import (
    Raw as Raw,
)
from flinkish_spark.functions import (
    AggregateFunction as AggregateFunction,
)
from flinkish_spark.functions import (
    BroadcastProcessFunction as BroadcastProcessFunction,
)
from flinkish_spark.functions import (
    Context as Context,
)
from flinkish_spark.functions import (
    FilterFunction as FilterFunction,
)
from flinkish_spark.functions import (
    FlatMapFunction as FlatMapFunction,
)
from flinkish_spark.functions import (
    KeyedBroadcastProcessFunction as KeyedBroadcastProcessFunction,
)
from flinkish_spark.functions import (
    KeyedCoProcessFunction as KeyedCoProcessFunction,
)
from flinkish_spark.functions import (
    KeyedProcessFunction as KeyedProcessFunction,
)
from flinkish_spark.functions import (
    MapFunction as MapFunction,
)
from flinkish_spark.functions import (
    OnTimerContext as OnTimerContext,
)
from flinkish_spark.functions import (
    ReduceFunction as ReduceFunction,
)
from flinkish_spark.functions import (
    RichFunction as RichFunction,
)
from flinkish_spark.functions import (
    RuntimeContext as RuntimeContext,
)
from flinkish_spark.functions import (
    TimerService as TimerService,
)
from flinkish_spark.hooks import (
    MasterHook as MasterHook,
)
from flinkish_spark.job_client import (
    JobClient as JobClient,
)
from flinkish_spark.joined_streams import (
    JoinedStreams as JoinedStreams,
)
from flinkish_spark.kafka.barrier_records import (
    BarrierRecords as BarrierRecords,
)
from flinkish_spark.kafka.delivery import (
    DeliveryGuarantee as DeliveryGuarantee,
)
from flinkish_spark.kafka.delivery import (
    RecordHeaders as RecordHeaders,
)
from flinkish_spark.keyed_stream import (
    KeyedStream as KeyedStream,
)
from flinkish_spark.manifests.delta import (
    DeltaManifest as DeltaManifest,
)
from flinkish_spark.manifests.kafka import (
    KafkaManifest as KafkaManifest,
)
from flinkish_spark.operators.elements import (
    OutputTag as OutputTag,
)
from flinkish_spark.operators.elements import (
    TimeDomain as TimeDomain,
)
from flinkish_spark.operators.vectorized import (
    BatchContext as BatchContext,
)
from flinkish_spark.operators.vectorized import (
    VectorizedProcessFunction as VectorizedProcessFunction,
)
from flinkish_spark.protocol.failures import (
    CheckpointFailureReason as CheckpointFailureReason,
)
from flinkish_spark.protocol.gate_values import (
    AlignmentMode as AlignmentMode,
)
from flinkish_spark.protocol.ids import (
    CheckpointId as CheckpointId,
)
from flinkish_spark.protocol.job_status import (
    JobStatus as JobStatus,
)
from flinkish_spark.protocol.job_status import (
    JobStatusChange as JobStatusChange,
)
from flinkish_spark.protocol.job_status import (
    TaskState as TaskState,
)
from flinkish_spark.protocol.job_status import (
    TaskStateChange as TaskStateChange,
)
from flinkish_spark.protocol.limits import (
    UNLIMITED as UNLIMITED,
)
from flinkish_spark.protocol.lineage import (
    Tables as Tables,
)
from flinkish_spark.protocol.outcomes import (
    CommitAnswer as CommitAnswer,
)
from flinkish_spark.protocol.outcomes import (
    Outcome as Outcome,
)
from flinkish_spark.protocol.purpose import (
    CheckpointPurpose as CheckpointPurpose,
)
from flinkish_spark.protocol.restoring import (
    NonRestoredState as NonRestoredState,
)
from flinkish_spark.protocol.restoring import (
    UnpositionedSources as UnpositionedSources,
)
from flinkish_spark.protocol.retention import (
    CheckpointRetention as CheckpointRetention,
)
from flinkish_spark.protocol.seeding import (
    ClaimMode as ClaimMode,
)
from flinkish_spark.protocol.statistics import (
    CheckpointDurations as CheckpointDurations,
)
from flinkish_spark.protocol.statistics import (
    CheckpointFailure as CheckpointFailure,
)
from flinkish_spark.protocol.statistics import (
    CheckpointStatistics as CheckpointStatistics,
)
from flinkish_spark.protocol.statistics import (
    CheckpointStatus as CheckpointStatus,
)
from flinkish_spark.protocol.statistics_history import (
    CheckpointCounts as CheckpointCounts,
)
from flinkish_spark.protocol.statistics_history import (
    RestoredCheckpoint as RestoredCheckpoint,
)
from flinkish_spark.protocol.statistics_history import (
    StatisticsHistory as StatisticsHistory,
)
from flinkish_spark.protocol.statistics_participants import (
    ChannelStatistics as ChannelStatistics,
)
from flinkish_spark.protocol.statistics_participants import (
    ParticipantStatistics as ParticipantStatistics,
)
from flinkish_spark.protocol.statistics_summary import (
    Quantity as Quantity,
)
from flinkish_spark.protocol.statistics_summary import (
    Summary as Summary,
)
from flinkish_spark.protocol.trigger import (
    FinishedParticipants as FinishedParticipants,
)
from flinkish_spark.restart_strategies import (
    ExponentialDelay as ExponentialDelay,
)
from flinkish_spark.restart_strategies import (
    FailureRate as FailureRate,
)
from flinkish_spark.restart_strategies import (
    FixedDelay as FixedDelay,
)
from flinkish_spark.restart_strategies import (
    NoRestart as NoRestart,
)
from flinkish_spark.runtime.listeners import (
    JobListener as JobListener,
)
from flinkish_spark.runtime.listeners import (
    QuietListener as QuietListener,
)
from flinkish_spark.runtime.master_hooks import (
    UnknownHookState as UnknownHookState,
)
from flinkish_spark.runtime.outside_requests import (
    StopMode as StopMode,
)
from flinkish_spark.runtime.settings import (
    JobProgress as JobProgress,
)
from flinkish_spark.runtime.settings import (
    Standby as Standby,
)
from flinkish_spark.savepoints.reading import (
    read_state as read_state,
)
from flinkish_spark.savepoints.settings import (
    RestoreSettings as RestoreSettings,
)
from flinkish_spark.session import (
    configure_spark_with_delta_jars as configure_spark_with_delta_jars,
)
from flinkish_spark.session import (
    configure_spark_with_jars as configure_spark_with_jars,
)
from flinkish_spark.session import (
    configure_spark_with_packages as configure_spark_with_packages,
)
from flinkish_spark.sinks.base import (
    CompletedCheckpoint as CompletedCheckpoint,
)
from flinkish_spark.sinks.dead_letters import (
    WithDeadLetters as WithDeadLetters,
)
from flinkish_spark.sinks.delta import (
    DeltaSink as DeltaSink,
)
from flinkish_spark.sinks.delta_modes import (
    Append as Append,
)
from flinkish_spark.sinks.delta_modes import (
    DeltaWriter as DeltaWriter,
)
from flinkish_spark.sinks.delta_modes import (
    OverwritePartitions as OverwritePartitions,
)
from flinkish_spark.sinks.delta_modes import (
    SchemaEvolution as SchemaEvolution,
)
from flinkish_spark.sinks.delta_modes import (
    Upsert as Upsert,
)
from flinkish_spark.sinks.files.buckets import (
    BucketAssigner as BucketAssigner,
)
from flinkish_spark.sinks.files.buckets import (
    ColumnBuckets as ColumnBuckets,
)
from flinkish_spark.sinks.files.buckets import (
    DateTimeBuckets as DateTimeBuckets,
)
from flinkish_spark.sinks.files.buckets import (
    ExpressionBuckets as ExpressionBuckets,
)
from flinkish_spark.sinks.files.formats import (
    FileFormat as FileFormat,
)
from flinkish_spark.sinks.files.partitions import (
    AtFinal as AtFinal,
)
from flinkish_spark.sinks.files.partitions import (
    MetastorePartition as MetastorePartition,
)
from flinkish_spark.sinks.files.partitions import (
    PartitionCommit as PartitionCommit,
)
from flinkish_spark.sinks.files.partitions import (
    PartitionPolicy as PartitionPolicy,
)
from flinkish_spark.sinks.files.partitions import (
    PartitionTime as PartitionTime,
)
from flinkish_spark.sinks.files.partitions import (
    ProcessTime as ProcessTime,
)
from flinkish_spark.sinks.files.partitions import (
    ReadyPartition as ReadyPartition,
)
from flinkish_spark.sinks.files.partitions import (
    SuccessFile as SuccessFile,
)
from flinkish_spark.sinks.files.rolling import (
    Compaction as Compaction,
)
from flinkish_spark.sinks.files.rolling import (
    RollingPolicy as RollingPolicy,
)
from flinkish_spark.sinks.files.rolling import (
    RollOnCheckpoint as RollOnCheckpoint,
)
from flinkish_spark.sinks.files.sink import (
    FileSink as FileSink,
)
from flinkish_spark.sinks.foreach import (
    ForeachCheckpointSink as ForeachCheckpointSink,
)
from flinkish_spark.sinks.foreach import (
    ForeachSink as ForeachSink,
)
from flinkish_spark.sinks.foreach import (
    PrintSink as PrintSink,
)
from flinkish_spark.sinks.jdbc.refused import (
    DeadLetterTable as DeadLetterTable,
)
from flinkish_spark.sinks.jdbc.secrets import (
    EnvironmentSecret as EnvironmentSecret,
)
from flinkish_spark.sinks.jdbc.secrets import (
    FileSecret as FileSecret,
)
from flinkish_spark.sinks.jdbc.sink import (
    JdbcSink as JdbcSink,
)
from flinkish_spark.sinks.kafka import (
    KafkaSink as KafkaSink,
)
from flinkish_spark.sinks.memory import (
    MemorySink as MemorySink,
)
from flinkish_spark.sinks.two_phase import (
    RecordRefused as RecordRefused,
)
from flinkish_spark.sinks.two_phase import (
    SinkTransaction as SinkTransaction,
)
from flinkish_spark.sinks.two_phase import (
    TwoPhaseCommitSink as TwoPhaseCommitSink,
)
from flinkish_spark.sources.kafka import (
    KafkaSource as KafkaSource,
)
from flinkish_spark.sources.kafka import (
    StartingOffsets as StartingOffsets,
)
from flinkish_spark.state import (
    AggregatingState as AggregatingState,
)
from flinkish_spark.state import (
    AggregatingStateDescriptor as AggregatingStateDescriptor,
)
from flinkish_spark.state import (
    ListState as ListState,
)
from flinkish_spark.state import (
    ListStateDescriptor as ListStateDescriptor,
)
from flinkish_spark.state import (
    MapState as MapState,
)
from flinkish_spark.state import (
    MapStateDescriptor as MapStateDescriptor,
)
from flinkish_spark.state import (
    ReducingState as ReducingState,
)
from flinkish_spark.state import (
    ReducingStateDescriptor as ReducingStateDescriptor,
)
from flinkish_spark.state import (
    StateTtl as StateTtl,
)
from flinkish_spark.state import (
    TtlUpdate as TtlUpdate,
)
from flinkish_spark.state import (
    ValueState as ValueState,
)
from flinkish_spark.state import (
    ValueStateDescriptor as ValueStateDescriptor,
)
from flinkish_spark.stream_functions import (
    CoFlatMapFunction as CoFlatMapFunction,
)
from flinkish_spark.stream_functions import (
    CoMapFunction as CoMapFunction,
)
from flinkish_spark.stream_functions import (
    CoProcessFunction as CoProcessFunction,
)
from flinkish_spark.stream_functions import (
    KeySelector as KeySelector,
)
from flinkish_spark.stream_functions import (
    Partitioner as Partitioner,
)
from flinkish_spark.stream_functions import (
    ProcessContext as ProcessContext,
)
from flinkish_spark.stream_functions import (
    ProcessFunction as ProcessFunction,
)
from flinkish_spark.watermark_strategy import (
    WatermarkGenerator as WatermarkGenerator,
)
from flinkish_spark.watermark_strategy import (
    WatermarkStrategy as WatermarkStrategy,
)
from flinkish_spark.windowed_stream import (
    WindowedStream as WindowedStream,
)

__version__: str
