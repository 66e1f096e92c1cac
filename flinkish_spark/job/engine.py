"""The settings of one `execute`, and the system that runs its micro-batches: Spark, or the simulator."""

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
from flinkish_spark.checkpoint.retention import CheckpointPins
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.checkpoint.staging import OwnerLock, Staging, StagingContext
from flinkish_spark.checkpoint.statistics import UserMetricKeeper
from flinkish_spark.contracts.manifest import Manifest, ManifestWriter
from flinkish_spark.contracts.sink import Committer, SinkContext
from flinkish_spark.contracts.source import JobPlace, SourceNode
from flinkish_spark.core.accumulators import as_results
from flinkish_spark.core.clock import Clock, Threads
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.steps import Observer
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.watchdog import Wait
from flinkish_spark.job.recovery import Reseeding, RestoredSavepoint
from flinkish_spark.operators.async_wait import AsyncStatistics
from flinkish_spark.protocol.alignment import ExpectedChannels
from flinkish_spark.protocol.cancellation import CancellationRules
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.event_time import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, OwnerEpoch
from flinkish_spark.protocol.job_graph import JobVertex
from flinkish_spark.protocol.limits import Limit
from flinkish_spark.protocol.restart import TRIES_WITHOUT_PROGRESS, RestartStrategy
from flinkish_spark.protocol.time_plan import TimePlan, counts_of, late_of
from flinkish_spark.protocol.timeline import NO_TIMELINE, Timeline
from flinkish_spark.savepoints.files import RestoreSettings

if TYPE_CHECKING:
    from pyspark.sql import types as T


class RunningQuery(Protocol):
    @property
    def is_active(self) -> bool: ...

    def exception(self) -> BaseException | None:
        """Return why it ended; None if it runs or was stopped."""

    def stop(self) -> None:
        """End it; it has ended when this returns, or its process is gone."""

    def async_calls(self) -> Mapping[str, AsyncStatistics]: ...

    def count_dropped(self) -> int: ...

    def pending_records(self) -> Mapping[str, int]:
        """Return how many records wait in front of sources, by uid, as far as the last look has shown it."""


class QueryPlan(Protocol):
    @property
    def channels(self) -> Mapping[str, ExpectedChannels]:
        """Return, by sink uid, the channels whose barriers the sink must see."""

    @property
    def time(self) -> TimePlan: ...

    def staging(self, context: StagingContext) -> Staging: ...

    def start(self, log: SparkLog, write: Callable[[Any, int], None]) -> RunningQuery: ...

    def start_once(self, log: SparkLog, write: Callable[[Any, int], None]) -> RunningQuery:
        """Run the newest ``offsets/`` entry of `log`, which has no ``commits/`` one, and end."""


class QueryEngine(Protocol):
    """Runs one job's queries. Called by the supervisor, in its thread."""

    @property
    def sources(self) -> Sequence[SourceNode]: ...

    @property
    def uids(self) -> tuple[str, ...]: ...

    @property
    def operators(self) -> tuple[str, ...]:
        """Return the uids of the keyed operators."""

    @property
    def vertices(self) -> tuple[JobVertex, ...]: ...

    def check(self) -> None:
        """Refuse what cannot work, before anything starts or is written."""

    def lock(self) -> OwnerLock:
        """Return the lock of the job directory, not taken yet."""

    def record_job(self) -> JobUuid:
        """Record the job's settings at the first start, compare them later; holds the lock."""

    def fence_log(self, ownership: Ownership) -> SparkLog:
        """Keep every earlier owner's query from writing; return the logs."""

    def pins(self, log: SparkLog) -> CheckpointPins:
        """Return what keeps the state that retained checkpoints need."""

    def committers(self, job: JobUuid, ownership: Ownership) -> dict[str, Committer]:
        """Return the committers by sink uid, in the order in which sinks commit."""

    def manifest(self, job: JobUuid, ownership: Ownership) -> ManifestWriter:
        """Return what is told of complete checkpoints; NO_MANIFEST for a job without."""

    def plan(self, control: ControlFile) -> QueryPlan: ...

    def why_no_savepoint_at(self, target: str) -> str:
        """Return why no savepoint can be written to `target`; empty if one can. Raises nothing."""

    def write_savepoint(self, decision: Decision, target: str, log: SparkLog) -> None:
        """Export a confirmed checkpoint to `target`; called in a thread of its own."""

    def reseeding(self, log: SparkLog) -> Reseeding: ...

    def find_restored(self) -> RestoredSavepoint | None:
        """Return the savepoint that a lineage without checkpoints began with; None if it began with none."""

    def on_confirmed(self, decision: Decision) -> None:
        """Note that a checkpoint is confirmed; also told of the newest one before each start."""


class Standby(Choice):
    """What a driver does while another one owns the job."""

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
    #: A folder of this `execute` on the driver's disk, in which nothing is durable. It need not be there.
    scratch: Path
    tries_without_progress: Limit = TRIES_WITHOUT_PROGRESS
    cancellation: CancellationRules = field(default_factory=CancellationRules)
    hooks: MasterHooks = field(default_factory=MasterHooks)
    listeners: tuple[JobListener, ...] = ()
    restore: RestoreSettings | None = None
    random: Callable[[], float] = random.random
    token: Callable[[], str] = new_token
    standby: Standby = Standby.REFUSE
    standby_poll_ms: int = 200
    manifest: Manifest | None = None
    #: None where latency is not measured.
    latencies: LatencyTracker | None = None
    user_metrics: UserMetricKeeper = field(default_factory=UserMetricKeeper)
    #: Where tasks find registered files below Spark's own, by name.
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
        place = self.job_dir.below(f"sinks/{uid}")
        return SinkContext(job, epoch, uid, schema, self.checkpoint, self.name, place, self.clock, timeline)


@dataclass
class JobProgress:
    """What a person or a program may ask about a running job; replaced piece by piece."""

    restarts: int = 0
    #: Micro-batches that were staged in this process.
    batches: int = 0
    checkpoints: int = 0
    newest: CheckpointId = field(default_factory=lambda: CheckpointId(0))
    rows_by_sink: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    #: Late records that operators have dropped, by uid.
    late_dropped: dict[str, int] = field(default_factory=dict)
    #: What else operators have counted, by uid and name: matches of patterns, for example; and how much of
    #: something there is: partial matches that are open.
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    #: What async calls have cost since this process began, by operator; those of repeated tasks count.
    async_calls: Mapping[str, AsyncStatistics] = field(default_factory=dict)
    #: What accumulators held at the newest confirmed checkpoint, since the job began, by name.
    accumulators: dict[str, Any] = field(default_factory=dict)
    #: Up to where sources were read at that checkpoint, as Spark logs it; empty before the first.
    offsets_text: str = ""
    #: How far the job's watermark was behind the wall clock there; None where there is no event time.
    watermark_lag_ms: int | None = None
    last_error: str = ""
    is_running: bool = False
    #: Checkpoints that are held back, and threads that have waited for the same thing, for two intervals (or
    #: a minute, if that is shorter): who waits for what, and what went wrong last; the longest first.
    waits: tuple[Wait, ...] = ()
    #: What a query that does not run yet waits for, to be read behind "waits for".
    start_waits_for: str = ""

    def record_position(self, decision: Decision) -> None:
        """Note where the job stands at its newest confirmed checkpoint."""
        self.accumulators = as_results(decision.accumulators)
        self.offsets_text = decision.offsets_text
        watermark_ms = None if decision.times is None else decision.times.watermark_ms
        is_time = watermark_ms not in (None, MIN_WATERMARK_MS, MAX_WATERMARK_MS)
        self.watermark_lag_ms = max(0, decision.decided_at_ms - (watermark_ms or 0)) if is_time else None

    def add_checkpoint(self, decision: Decision) -> int:
        """Count a confirmed checkpoint; return how many records its sinks have dropped."""
        self.checkpoints += 1
        self.newest = decision.checkpoint
        self.record_position(decision)
        for uid, count in late_of(decision.batches).items():
            self.late_dropped[uid] = self.late_dropped.get(uid, 0) + count
        for uid, counts in counts_of(decision.batches).items():
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
