"""What goes into one `execute`, and what may be asked while it runs."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flinkish_spark.clock import Clock
from flinkish_spark.config import CheckpointConfig
from flinkish_spark.job_dir import JobDir
from flinkish_spark.manifests.base import Manifest, ManifestContext
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, OwnerEpoch
from flinkish_spark.protocol.late_records import late_of
from flinkish_spark.protocol.limits import Limit
from flinkish_spark.protocol.restart import TRIES_WITHOUT_PROGRESS, RestartStrategy
from flinkish_spark.protocol.timeline import NO_TIMELINE, Timeline
from flinkish_spark.runtime.latency_tracking import LatencyTracker
from flinkish_spark.runtime.listeners import JobListener
from flinkish_spark.runtime.master_hooks import MasterHooks
from flinkish_spark.runtime.ownership import new_token
from flinkish_spark.runtime.steps import Observer
from flinkish_spark.runtime.threads import Threads
from flinkish_spark.runtime.watchdog import Wait
from flinkish_spark.savepoints.settings import RestoreSettings
from flinkish_spark.sinks.base import SinkContext

if TYPE_CHECKING:
    from pyspark.sql import types as T


class Standby(enum.Enum):
    """What a driver does while another one owns the job."""

    REFUSE = "REFUSE"
    #: Wait until the owner's process has ended, then take the job over.
    WAIT = "WAIT"


@dataclass(frozen=True)
class JobSettings:
    """All settings of one `execute`."""

    name: str
    root: Path
    checkpoint: CheckpointConfig
    restart: RestartStrategy
    trigger_ms: int
    shuffle_partitions: int
    clock: Clock
    threads: Threads
    observer: Observer
    tries_without_progress: Limit = TRIES_WITHOUT_PROGRESS
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


@dataclass
class JobProgress:
    """What a person or a program may ask about a running job; replaced piece by piece."""

    restarts: int = 0
    checkpoints: int = 0
    newest: CheckpointId = field(default_factory=lambda: CheckpointId(0))
    rows_by_sink: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    #: Late records that operators have dropped, by uid.
    late_dropped: dict[str, int] = field(default_factory=dict)
    last_error: str = ""
    is_running: bool = False
    #: Threads of the job that have waited for the same thing for a minute, the longest first.
    waits: tuple[Wait, ...] = ()

    def confirmed(self, decision: Decision) -> int:
        """Count a confirmed checkpoint; return how many records its sinks have dropped."""
        self.checkpoints += 1
        self.newest = decision.checkpoint
        for uid, count in late_of(decision.batches).items():
            self.late_dropped[uid] = self.late_dropped.get(uid, 0) + count
        acks = [ack for batch in decision.batches for ack in batch.acks]
        for ack in acks:
            self.rows_by_sink[ack.sink] = self.rows_by_sink.get(ack.sink, 0) + ack.rows
        return sum(task.dropped for ack in acks for task in ack.tasks)


def sink_context(
    uid: str,
    schema: T.StructType,
    job: JobUuid,
    epoch: OwnerEpoch,
    settings: JobSettings,
    timeline: Timeline = NO_TIMELINE,
) -> SinkContext:
    """Return who a sink of this `execute` works for."""
    folder = settings.root / "sinks" / uid
    checkpoint, name, clock = settings.checkpoint, settings.name, settings.clock
    return SinkContext(job, epoch, uid, schema, checkpoint, name, folder, clock, timeline)


def manifest_context(
    job: JobUuid,
    epoch: OwnerEpoch,
    settings: JobSettings,
    job_dir: JobDir,
    timeline: Timeline = NO_TIMELINE,
) -> ManifestContext:
    """Return who a manifest of this `execute` works for."""
    return ManifestContext(job, epoch, settings.name, job_dir.store, timeline)
