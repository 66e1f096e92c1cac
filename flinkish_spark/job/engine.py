"""The settings of one `execute`, and the interface to its engine: Spark, or the simulator."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flinkish_spark.checkpoint.control import ControlFile
from flinkish_spark.checkpoint.event_time import LatencyTracker
from flinkish_spark.checkpoint.hooks import JobListener, MasterHooks
from flinkish_spark.checkpoint.ownership import Ownership, new_token
from flinkish_spark.checkpoint.pins import CheckpointPins
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.checkpoint.staging import OwnerLock, Staging, StagingContext
from flinkish_spark.checkpoint.statistics import PendingRecords, UserMetricKeeper
from flinkish_spark.contracts.calls import AsyncStatistics
from flinkish_spark.contracts.manifest import Manifest, ManifestWriter
from flinkish_spark.contracts.sink import Committer, SinkContext
from flinkish_spark.contracts.source import JobPlace, SourceNode
from flinkish_spark.core.accumulators import as_results
from flinkish_spark.core.clock import Clock, Threads
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.steps import Observer
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.watchdog import Wait
from flinkish_spark.job.catch_up import CaughtUp
from flinkish_spark.job.recovery import Reseeding, RestoredSavepoint
from flinkish_spark.protocol.alignment import ExpectedChannels
from flinkish_spark.protocol.cancellation import CancellationRules
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.event_time import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, OwnerEpoch
from flinkish_spark.protocol.job_graph import JobVertex
from flinkish_spark.protocol.limits import Limit
from flinkish_spark.protocol.restart import TRIES_WITHOUT_PROGRESS, RestartStrategy
from flinkish_spark.protocol.time_plan import TimePlan, sum_counts, sum_late_records
from flinkish_spark.protocol.timeline import NO_TIMELINE, Timeline
from flinkish_spark.savepoints.files import RestoreSettings

if TYPE_CHECKING:
    from pyspark.sql import types as T


class RunningQuery(Protocol):
    @property
    def is_active(self) -> bool: ...

    def exception(self) -> BaseException | None:
        """Return why the query ended; None if it runs or was stopped."""

    def stop(self) -> None:
        """Stop the query; when this returns, it has ended, or its process is gone."""

    def async_calls(self) -> Mapping[str, AsyncStatistics]: ...

    def count_dropped(self) -> int: ...

    def pending_records(self) -> PendingRecords:
        """Return the unread records of sources, as of the last progress report."""


class QueryPlan(Protocol):
    @property
    def channels(self) -> Mapping[str, ExpectedChannels]:
        """Return, by sink uid, the channels whose barriers the sink must receive."""

    @property
    def time(self) -> TimePlan: ...

    def staging(self, context: StagingContext) -> Staging: ...

    def start(self, log: SparkLog, write: Callable[[Any, int], None]) -> RunningQuery: ...

    def start_once(self, log: SparkLog, write: Callable[[Any, int], None]) -> RunningQuery:
        """Run the newest ``offsets/`` entry of `log`, which has no ``commits/`` entry, and stop."""


class QueryEngine(Protocol):
    """The interface to what runs a job's queries; called by the supervisor, in its thread."""

    @property
    def sources(self) -> Sequence[SourceNode]: ...

    @property
    def uids(self) -> tuple[str, ...]: ...

    @property
    def operators(self) -> tuple[str, ...]: ...

    @property
    def vertices(self) -> tuple[JobVertex, ...]: ...

    def check(self) -> None:
        """Raise an error for a job that cannot work, before anything starts or is written."""

    def lock(self) -> OwnerLock: ...

    def record_job(self) -> JobUuid:
        """Record the job's settings at the first start, compare them later; the caller holds the lock."""

    def fence_log(self, ownership: Ownership) -> SparkLog:
        """Fence off the queries of earlier owners; return Spark's log."""

    def pins(self, log: SparkLog) -> CheckpointPins:
        """Return the pins, which keep the state that retained checkpoints need."""

    def committers(self, job: JobUuid, ownership: Ownership) -> dict[str, Committer]: ...

    def manifest(self, job: JobUuid, ownership: Ownership) -> ManifestWriter:
        """Return the writer of the manifest of complete checkpoints; NO_MANIFEST if the job has none."""

    def plan(self, control: ControlFile) -> QueryPlan: ...

    def why_no_savepoint_at(self, target: str) -> str:
        """Return why no savepoint can be written to `target`; empty if one can. Raises nothing."""

    def write_savepoint(self, decision: Decision, target: str, log: SparkLog) -> None:
        """Export a confirmed checkpoint to `target`; called in a separate thread."""

    def reseeding(self, log: SparkLog) -> Reseeding: ...

    def find_restored(self) -> RestoredSavepoint | None:
        """Return the savepoint that a lineage without checkpoints began with; None if there is none."""

    def on_confirmed(self, decision: Decision) -> None:
        """Clean up after a confirmed checkpoint; also called with the newest one before each start."""


class Standby(Choice):
    """The behaviour of a driver while another driver owns the job."""

    REFUSE = "REFUSE"
    #: Wait until the owner's process has ended, then take the job over.
    WAIT = "WAIT"


@dataclass(frozen=True)
class JobSettings:
    name: str
    job_dir: StoreSpec
    checkpoint: CheckpointConfig
    restart: RestartStrategy
    trigger_ms: int
    shuffle_partitions: int
    clock: Clock
    threads: Threads
    observer: Observer
    #: A temporary folder of this `execute` on the driver's disk; it need not exist.
    scratch: Path
    tries_without_progress: Limit = TRIES_WITHOUT_PROGRESS
    cancellation: CancellationRules = field(default_factory=CancellationRules)
    hooks: MasterHooks = field(default_factory=MasterHooks)
    listeners: tuple[JobListener, ...] = ()
    restore: RestoreSettings | None = None
    #: When the run ends; None: when it is told to, or its input does.
    until: CaughtUp | None = None
    random: Callable[[], float] = random.random
    token: Callable[[], str] = new_token
    standby: Standby = Standby.REFUSE
    standby_poll_ms: int = 200
    manifest: Manifest | None = None
    #: None where latency is not measured.
    latencies: LatencyTracker | None = None
    user_metrics: UserMetricKeeper = field(default_factory=UserMetricKeeper)
    #: Paths of registered files by name, relative to the directory of Spark's files in a task.
    cached_files: Mapping[str, str] = field(default_factory=dict)

    def place(self, control: Path) -> JobPlace:
        return JobPlace(self.job_dir, str(control))

    def sink_context(
        self,
        uid: str,
        schema: T.StructType,
        job: JobUuid,
        epoch: OwnerEpoch,
        timeline: Timeline = NO_TIMELINE,
    ) -> SinkContext:
        place = self.job_dir.to_child(f"sinks/{uid}")
        return SinkContext(job, epoch, uid, schema, self.checkpoint, self.name, place, self.clock, timeline)


@dataclass
class JobProgress:
    """Figures of a running job for users and programs; fields are replaced one at a time."""

    restarts: int = 0
    #: Micro-batches that were staged in this process.
    batches: int = 0
    checkpoints: int = 0
    newest: CheckpointId = field(default_factory=lambda: CheckpointId(0))
    rows_by_sink: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    #: Late records that operators have dropped, by uid.
    late_dropped: dict[str, int] = field(default_factory=dict)
    #: Other counters of operators by uid and name, such as matches of patterns; and levels, such as open
    #: partial matches.
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    #: Statistics of async calls since this process began, by operator; calls of repeated tasks count, too.
    async_calls: Mapping[str, AsyncStatistics] = field(default_factory=dict)
    #: Values of accumulators by name at the newest confirmed checkpoint, since the first start.
    accumulators: dict[str, Any] = field(default_factory=dict)
    #: Source offsets at that checkpoint, as Spark logs them; empty before the first checkpoint.
    offsets_text: str = ""
    #: Lag of the job's watermark behind the wall clock at that checkpoint; None without event time.
    watermark_lag_ms: int | None = None
    last_error: str = ""
    is_running: bool = False
    #: Checkpoints and threads that have waited for the same thing for two checkpoint intervals (at most a
    #: minute): who waits, for what, and the last error; the longest wait first.
    waits: tuple[Wait, ...] = ()
    #: The current wait of a query that has not started yet, as a phrase to follow "waits for".
    start_waits_for: str = ""

    def record_position(self, decision: Decision) -> None:
        """Take accumulators, offsets and watermark lag from the newest confirmed checkpoint."""
        self.accumulators = as_results(decision.accumulators)
        self.offsets_text = decision.offsets_text
        watermark_ms = None if decision.times is None else decision.times.watermark_ms
        is_time = watermark_ms not in (None, MIN_WATERMARK_MS, MAX_WATERMARK_MS)
        self.watermark_lag_ms = max(0, decision.decided_at_ms - (watermark_ms or 0)) if is_time else None

    def add_checkpoint(self, decision: Decision) -> int:
        """Count a confirmed checkpoint; return the number of records that its sinks dropped."""
        self.checkpoints += 1
        self.newest = decision.checkpoint
        self.record_position(decision)
        for uid, count in sum_late_records(decision.batches).items():
            self.late_dropped[uid] = self.late_dropped.get(uid, 0) + count
        for uid, counts in sum_counts(decision.batches).items():
            own = self.counts.setdefault(uid, {})
            for name, count in counts.items():
                own[name] = own.get(name, 0) + count
        if decision.times is not None:
            for uid, levels in decision.times.levels.items():
                self.counts.setdefault(uid, {}).update(levels)
        acks = [ack for batch in decision.batches for ack in batch.acks]
        for ack in acks:
            self.rows_by_sink[ack.sink] = self.rows_by_sink.get(ack.sink, 0) + ack.rows
        return sum(task.dropped for ack in acks for task in ack.tasks)
