"""The contracts of what runs micro-batches: Spark (:mod:`flinkish_spark.job.spark_engine`), or a simulator.

Everything with a rule of the protocol in it lies on the supervisor's side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from flinkish_spark.checkpoint.ownership import Ownership
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.checkpoint.transactional_ids import BlockPool
from flinkish_spark.core.clock import Clock
from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.micro_batch import MicroBatch
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.micro_batches import OFFSETS
from flinkish_spark.protocol.records import StagedBatch


class OwnerLock(Protocol):
    """Shows that the owner lives."""

    def acquire(self) -> None:
        """Take it, or raise OwnedElsewhereError at once; LivenessUnknown to be asked again."""

    def took_over(self, epoch: OwnerEpoch) -> None:
        """Be told of the epoch that its holder has taken, each time."""

    def release(self) -> None:
        """Drop it; a second call does nothing."""


def micro_batch_in(log: SparkLog, batch: BatchId) -> MicroBatch:
    """Return what tasks are told of a micro-batch that Spark has logged."""
    earlier = None if batch == BatchId(0) else _read_offsets(log, BatchId(batch.value - 1))
    return MicroBatch.logged(batch.value, _position(log, batch), earlier)


def _position(log: SparkLog, batch: BatchId) -> LoggedOffsets:
    logged = _read_offsets(log, batch)
    if logged is None:
        raise CorruptObjectError(
            f"Spark runs micro-batch {batch}, and its log has no entry {log.folder}/{OFFSETS}/{batch}",
            what_to_do="make sure that only this job uses the job directory",
        )
    return logged


def _read_offsets(log: SparkLog, batch: BatchId) -> LoggedOffsets | None:
    text = log.read(OFFSETS, batch)
    return None if text is None else LoggedOffsets.parse(text)


@dataclass(frozen=True)
class StagingContext:
    job: JobUuid
    ownership: Ownership
    lineage: Lineage
    blocks: BlockPool
    clock: Clock
    #: Says which checkpoint a micro-batch is expected to become visible with.
    log: SparkLog
    #: The one that shows all micro-batches, where it is decided already: in a replay.
    decided: CheckpointId | None = None

    def checkpoint_of(self, batch: BatchId) -> CheckpointId:
        """Return the checkpoint that shows `batch` unless it is aborted: its barrier, else the next one."""
        if self.decided is not None:
            return self.decided
        newest = self._find_drawn(batch)
        before = CheckpointId(0) if batch == BatchId(0) else self._find_drawn(BatchId(batch.value - 1))
        drawn = newest if newest > before else newest.next()
        # An earlier owner's micro-batch may have a barrier that was given up when this one took over.
        return max(drawn, self.ownership.timeline.newest.next())

    def find_position_after(self, batch: BatchId) -> LoggedOffsets:
        """Return up to where the sources are read once `batch` is; of a micro-batch that runs."""
        return _position(self.log, batch)

    def _find_drawn(self, batch: BatchId) -> CheckpointId:
        logged = _read_offsets(self.log, batch)
        # Before the first micro-batch of a log, or in one that lost what it no longer needs.
        return CheckpointId(0) if logged is None else logged.checkpoint


class Staging(Protocol):
    """Stages micro-batches in every sink; one thread at a time."""

    def stage(self, frame: Any, batch: BatchId, attempt: int) -> StagedBatch:
        """Have every sink stage `frame`; return when all of it is flushed."""

    def stage_only(self, frame: Any, batch: BatchId, attempt: int, sinks: frozenset[str]) -> StagedBatch:
        """Have these sinks stage `frame`, and no others; run it for the state behind it if there are none."""
