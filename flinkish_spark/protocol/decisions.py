"""Stored records of a checkpoint's decision and completion: decisions, receipts, intents, manifests.

Each class says when it is written, and what it proves.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from flinkish_spark.protocol.accumulators import AccumulatorValue
from flinkish_spark.protocol.bases import Base
from flinkish_spark.protocol.codec import LEFT_OUT, Form, StoredObject, store_as
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, Lineage, OwnerEpoch, SinkUid
from flinkish_spark.protocol.lineage import FIRST_LINEAGE, FinishedRewind, RewindKind, Tables
from flinkish_spark.protocol.records import Committable, SinkAck, StagedBatch
from flinkish_spark.protocol.watermarks import EventTime


class Verdict(enum.Enum):
    COMMIT = "COMMIT"
    ABORT = "ABORT"


@dataclass(frozen=True, slots=True)
class Decision(StoredObject):
    """The one create-if-absent object per checkpoint id.

    A COMMIT carries all that is needed to finish it in any process: the batches with their
    committables, and byte copies of Spark's offsets/N and commits/N. An ABORT carries a reason.
    """

    checkpoint: CheckpointId
    verdict: Verdict
    owner_epoch: OwnerEpoch
    decided_at_ms: int
    reason: str = ""
    lineage: Lineage = field(default_factory=lambda: Lineage(0))
    batches: tuple[StagedBatch, ...] = ()
    offsets_text: str = ""
    commits_text: str = ""
    #: Sources, operators and sinks of the job.
    uids: tuple[str, ...] = ()
    #: Purpose, and wall-clock time of the trigger.
    purpose: CheckpointPurpose = CheckpointPurpose.PERIODIC
    triggered_at_ms: int = 0
    #: Uids that had finished before its trigger: a restore does not run them again.
    finished: tuple[str, ...] = ()
    hook_states: Mapping[str, Any] = field(default_factory=dict)
    #: Event time after its last micro-batch; None in a job without event time and timers.
    times: EventTime | None = field(default=None, metadata=LEFT_OUT)
    #: Accumulators after its last micro-batch, since the job began.
    accumulators: Mapping[str, AccumulatorValue] = field(default_factory=dict, metadata=LEFT_OUT)
    #: Files of big key groups in a bucket that its state may name.
    bases: tuple[Base, ...] = field(default=(), metadata=LEFT_OUT)

    def _check_read(self) -> None:
        if self.verdict is Verdict.COMMIT and not self.batches:
            raise ValueError(f"the decision of checkpoint {self.checkpoint} is COMMIT without a batch")

    @property
    def batch(self) -> BatchId:
        return self.batches[-1].batch

    def group_by_sink(self) -> dict[str, list[tuple[StagedBatch, Committable]]]:
        found: dict[str, list[tuple[StagedBatch, Committable]]] = {}
        for batch in self.batches:
            for committable in batch.committables:
                found.setdefault(committable.sink, []).append((batch, committable))
        return found


@dataclass(frozen=True, slots=True)
class Receipt(StoredObject):
    """Written after every sink and the group offsets are committed: the checkpoint is confirmed."""

    checkpoint: CheckpointId
    owner_epoch: OwnerEpoch
    confirmed_at_ms: int
    #: Outcomes by sink uid, one per committable.
    answers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: Committed offsets by group, topic and partition.
    group_offsets: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)
    #: Facts of the sinks about their commit, by sink uid, such as the version of a table.
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewindIntent(StoredObject):
    """An unfinished rewind: written before the first delete, so that recovery can finish it."""

    #: The lowest micro-batch that leaves Spark's log.
    first_removed: BatchId
    #: The lineage that the rewind starts.
    lineage: Lineage
    reason: str
    #: The log entries byte for byte by their key below Spark's checkpoint, for example
    #: ``"commits/17"``.
    removed: Mapping[str, str]
    kind: RewindKind = RewindKind.PLAIN
    #: The checkpoint that the job goes back to; None for the very beginning.
    target: CheckpointId | None = None
    tables: Tables = Tables.KEEP
    #: The order that is carried out; empty if there was none.
    order_id: str = ""

    def to_finished_rewind(self) -> FinishedRewind:
        return FinishedRewind(self.lineage, self.kind, self.target, self.first_removed)


@dataclass(frozen=True, slots=True)
class TriggerRecord(StoredObject):
    """Record of an assigned id, durable before its barrier goes out: a new owner seals it."""

    checkpoint: CheckpointId
    owner_epoch: OwnerEpoch
    purpose: CheckpointPurpose
    triggered_at_ms: int


#: Topic -> partition -> first offset that is not in the checkpoint.
Positions = Mapping[str, Mapping[Annotated[int, Form(str, int)], int]]


@dataclass(frozen=True, slots=True)
class SinkShare(StoredObject):
    #: Records that it received, including those that its policy dropped.
    rows: int
    #: Records that its policy dropped, or sent to the dead letters.
    dropped: int
    dead_lettered: int
    #: Facts about its commit, such as the version of a table.
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ManifestRecord(StoredObject):
    """A checkpoint that every sink has committed.

    Readers of whole checkpoints read up to the offsets of the newest record. After a rewind, a record of a
    higher lineage supersedes records of lower lineages from its first micro-batch on, among those with the
    same `log_began_in`.
    """

    checkpoint: CheckpointId
    #: The micro-batches that it consists of.
    lineage: Lineage
    first_batch: BatchId
    last_batch: BatchId
    decided_at_ms: int
    purpose: CheckpointPurpose
    #: By sink uid; sinks without records have a share of 0 rows.
    sinks: Mapping[str, SinkShare]
    offsets: Positions
    #: The lineage in which micro-batch 0 of the current log ran. A job with a new number of shuffle
    #: partitions counts from 0 again, which supersedes nothing.
    log_began_in: Lineage = field(default=FIRST_LINEAGE, metadata=store_as(at=2))

    @classmethod
    def of(
        cls,
        decision: Decision,
        facts: Mapping[str, Mapping[str, Any]],
        offsets: Positions,
        log_began_in: Lineage = FIRST_LINEAGE,
    ) -> ManifestRecord:
        acks = [ack for batch in decision.batches for ack in batch.acks]
        uids = dict.fromkeys(ack.sink for ack in acks)
        return cls(
            decision.checkpoint,
            decision.lineage,
            decision.batches[0].batch,
            decision.batch,
            decision.decided_at_ms,
            decision.purpose,
            {uid: _sum_share([a for a in acks if a.sink == uid], facts.get(uid, {})) for uid in uids},
            offsets,
            log_began_in,
        )


def _sum_share(acks: Sequence[SinkAck], facts: Mapping[str, Any]) -> SinkShare:
    tasks = [task for ack in acks for task in ack.tasks]
    return SinkShare(
        sum(task.rows for task in tasks),
        sum(task.dropped for task in tasks),
        sum(task.dead_lettered for task in tasks),
        facts,
    )


@dataclass(frozen=True, slots=True)
class RestagedEpoch(StoredObject):
    """Result of a finished replay: the new committables of a decided checkpoint. The newest one is valid."""

    checkpoint: CheckpointId
    #: 1 for the first replay of the checkpoint.
    number: int
    owner_epoch: OwnerEpoch
    restaged_at_ms: int
    #: For people: whose data was lost, and how.
    sink: SinkUid
    reason: str
    #: All micro-batches of the decision.
    batches: tuple[StagedBatch, ...]

    def _check_read(self) -> None:
        if not self.batches:
            raise ValueError(f"a replay of checkpoint {self.checkpoint} without a micro-batch")

    def apply(self, decision: Decision) -> Decision:
        return replace(decision, batches=self.batches)
