"""Interfaces of the engine that runs micro-batches: Spark (`job.spark_engine`) or the simulator.

All rules of the protocol are on the supervisor's side.
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
    """A lock, or heartbeat, that shows other processes that the owner lives."""

    def acquire(self) -> None:
        """Take the lock, or raise OwnedElsewhereError at once; after LivenessUnknown, try again."""

    def on_taken_over(self, epoch: OwnerEpoch) -> None: ...

    def release(self) -> None:
        """Release the lock; a second call does nothing."""


def micro_batch_in(log: SparkLog, batch: BatchId) -> MicroBatch:
    earlier = None if batch == BatchId(0) else _read_offsets(log, BatchId(batch.value - 1))
    return MicroBatch.from_log(batch.value, _read_position(log, batch), earlier)


def _read_position(log: SparkLog, batch: BatchId) -> LoggedOffsets:
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
    #: Shows with which checkpoint a micro-batch is expected to become visible.
    log: SparkLog
    #: In a replay, the decided checkpoint of its micro-batches.
    decided: CheckpointId | None = None

    def checkpoint_of(self, batch: BatchId) -> CheckpointId:
        """Return the checkpoint that shows `batch` unless it is aborted: that of its barrier, or the next."""
        if self.decided is not None:
            return self.decided
        newest = self._find_drawn(batch)
        before = CheckpointId(0) if batch == BatchId(0) else self._find_drawn(BatchId(batch.value - 1))
        drawn = newest if newest > before else newest.next()
        # A micro-batch of an earlier owner may have a barrier whose id was sealed in the takeover.
        return max(drawn, self.ownership.timeline.newest.next())

    def find_position_after(self, batch: BatchId) -> LoggedOffsets:
        return _read_position(self.log, batch)

    def _find_drawn(self, batch: BatchId) -> CheckpointId:
        logged = _read_offsets(self.log, batch)
        # No entry before the first micro-batch of a log, or in a log that was purged.
        return CheckpointId(0) if logged is None else logged.checkpoint


class Staging(Protocol):
    """Stages micro-batches in every sink; one thread at a time."""

    def stage(self, frame: Any, batch: BatchId, attempt: int) -> StagedBatch:
        """Have every sink stage `frame`; return when all of it is flushed."""

    def stage_only(self, frame: Any, batch: BatchId, attempt: int, sinks: frozenset[str]) -> StagedBatch:
        """Have only these sinks stage `frame`; without sinks, run it for the state alone."""
