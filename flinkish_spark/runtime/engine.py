"""What the supervisor needs of the system that runs micro-batches.

:mod:`flinkish_spark.runtime.spark_engine` is Spark; the simulator brings one that obeys the same
rules without a JVM. Everything with a rule of the protocol in it lies on the supervisor's side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flinkish_spark.clock import Clock
from flinkish_spark.errors import FlinkishError
from flinkish_spark.graph.stream_graph import SourceNode
from flinkish_spark.manifests.base import ManifestWriter
from flinkish_spark.protocol.alignment import ExpectedChannels
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.protocol.time_plan import TimePlan
from flinkish_spark.protocol.watermarks import EventTime
from flinkish_spark.runtime.blocks import BlockPool
from flinkish_spark.runtime.control_source import ControlFile
from flinkish_spark.runtime.inputs import Inputs
from flinkish_spark.runtime.ownership import Ownership
from flinkish_spark.runtime.pins import CheckpointPins
from flinkish_spark.runtime.recovery_parts import Reseeding
from flinkish_spark.runtime.spark_log import OFFSETS, LoggedOffsets, SparkLog
from flinkish_spark.sinks.base import Committer


class OwnerLock(Protocol):
    """Shows that the owner lives."""

    def acquire(self) -> None:
        """Take it, or raise OwnedElsewhereError at once."""

    def release(self) -> None:
        """Drop it; a second call does nothing."""


class RunningQuery(Protocol):
    """A query that was started."""

    @property
    def is_active(self) -> bool:
        """Whether it runs."""

    def exception(self) -> BaseException | None:
        """Return why it ended; None if it runs or was stopped."""

    def stop(self) -> None:
        """End it; it has ended when this returns, or its process is gone."""

    def dropped_records(self) -> int:
        """Return how many records the sources' policies have left out so far."""


@dataclass(frozen=True)
class StagingContext:
    """What staging one start's micro-batches needs beside the plan.

    Parameters
    ----------
    log
        Says which checkpoint a micro-batch is expected to become visible with.
    decided
        The one that shows all micro-batches, where it is decided already: in a replay.
    """

    job: JobUuid
    ownership: Ownership
    lineage: Lineage
    blocks: BlockPool
    clock: Clock
    log: SparkLog
    decided: CheckpointId | None = None

    def checkpoint_of(self, batch: BatchId) -> CheckpointId:
        """Return the checkpoint whose barrier `batch` carries, else the next one.

        It is the one that shows the micro-batch unless it is aborted; then a later one does.
        """
        if self.decided is not None:
            return self.decided
        newest = self._drawn(batch)
        before = CheckpointId(0) if batch == BatchId(0) else self._drawn(BatchId(batch.value - 1))
        return newest if newest > before else newest.next()

    def _drawn(self, batch: BatchId) -> CheckpointId:
        text = self.log.read(OFFSETS, batch)
        # Before the first micro-batch of a log, or in one that lost what it no longer needs.
        return CheckpointId(0) if text is None else LoggedOffsets.parse(text).checkpoint


@dataclass(frozen=True)
class RestoredFrom:
    """A savepoint: its checkpoint, what the hooks gave for it by name, its directory, where time stood."""

    checkpoint: CheckpointId
    hooks: Mapping[str, Any]
    path: str
    times: EventTime | None = None


class Staging(Protocol):
    """Stages micro-batches in every sink; one thread at a time."""

    def stage(self, frame: Any, batch: BatchId, attempt: int) -> StagedBatch:
        """Have every sink stage `frame`; return when all of it is flushed.

        Raises
        ------
        StagingMismatchError
            Two sinks of one stream saw other rows.
        """

    def stage_only(self, frame: Any, batch: BatchId, attempt: int, sinks: frozenset[str]) -> StagedBatch:
        """Have these sinks stage `frame`, and no others; run it for the state behind it if there are none."""


class QueryPlan(Protocol):
    """One start's plan; a restart plans anew."""

    @property
    def channels(self) -> Mapping[str, ExpectedChannels]:
        """Return, by sink uid, the channels whose barriers the sink must see."""

    @property
    def time(self) -> TimePlan:
        """Return who reports about time."""

    def staging(self, context: StagingContext) -> Staging:
        """Return what stages this plan's micro-batches."""

    def start(self, log: SparkLog, write: Callable[[Any, int], None]) -> RunningQuery:
        """Start the query over the folder of `log`; `write` is called with every micro-batch."""

    def start_once(self, log: SparkLog, write: Callable[[Any, int], None]) -> RunningQuery:
        """Start a query over the folder of `log` that runs its newest ``offsets/`` entry, and ends.

        Called by a replay, once per micro-batch, with an entry that has no ``commits/`` one.
        """


class QueryEngine(Protocol):
    """Runs one job's queries. Called by the supervisor, in its thread."""

    @property
    def sources(self) -> Sequence[SourceNode]:
        """Return the sources of the job."""

    @property
    def uids(self) -> tuple[str, ...]:
        """Return the uids of sources, operators and sinks."""

    @property
    def operators(self) -> tuple[str, ...]:
        """Return the uids of the keyed operators."""

    def check(self) -> None:
        """Refuse what cannot work, before anything starts or is written."""

    def lock(self) -> OwnerLock:
        """Return the lock of the job directory, not taken yet."""

    def record_job(self) -> JobUuid:
        """Record the job's settings at the first start, compare them later; holds the lock."""

    def fenced_log(self, ownership: Ownership) -> SparkLog:
        """Keep every earlier owner's query from writing; return the logs."""

    def pins(self, log: SparkLog) -> CheckpointPins:
        """Return what keeps the state that retained checkpoints need."""

    def committers(self, job: JobUuid, ownership: Ownership) -> dict[str, Committer]:
        """Return the committers by sink uid, in the order in which sinks commit."""

    def manifest(self, job: JobUuid, ownership: Ownership) -> ManifestWriter:
        """Return what is told of complete checkpoints; NO_MANIFEST for a job without."""

    def plan(self, control: ControlFile) -> QueryPlan:
        """Plan a query that gets its triggers through `control`."""

    def why_no_savepoint_at(self, target: str) -> str:
        """Return why no savepoint can be written to `target`, for people; empty if one can.

        Asked before the request for the savepoint gets a checkpoint id. Raises nothing, whatever
        `target` is; may make the directory.
        """

    def write_savepoint(self, decision: Decision, target: str, log: SparkLog) -> None:
        """Export a confirmed checkpoint to `target`; called in a thread of its own.

        Raises
        ------
        EnvironmentFault
            It could not be written; there is no savepoint at `target`.
        """

    def reseeding(self, log: SparkLog) -> Reseeding:
        """Return what the recovery asks whether the query's log has to begin anew."""

    def restored_from(self) -> RestoredFrom | None:
        """Return the savepoint that a lineage without checkpoints began with; None if it began with none."""

    def confirmed(self, decision: Decision) -> None:
        """Note that a checkpoint is confirmed; also told of the newest one before each start."""

    def place_of(self, error: FlinkishError, inputs: Inputs) -> FlinkishError:
        """Return the error with the place of the record that it is about, if that can be found."""
