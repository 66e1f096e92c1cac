"""Lineages: every rewind starts a new one and leaves later checkpoints behind as dead.

Rules:

1. A lineage is a number. Each finished rewind starts the next one; it is never used again.
2. A rewind to checkpoint T that starts lineage L supersedes every checkpoint with an id above T
   that was decided in a lineage below L: it is *dead*, for good. What is not dead is *live*.
3. Ids keep rising over all lineages, so a dead id is never given to another checkpoint.
4. Spark numbers micro-batches from 0 again when its checkpoint is begun anew (RESEED). The
   checkpoints of earlier lineages stay live, since their output counts, but Spark's log no longer
   knows their micro-batches: the job cannot go back to them.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.codec import Check, StoredObject
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, check_name

#: The lineage of a job that was never rewound.
FIRST_LINEAGE = Lineage(0)


class RewindKind(enum.Enum):
    #: To the last decided checkpoint, since data staged after it can no longer be committed. No reader has
    #: seen that data.
    PLAIN = "PLAIN"
    #: To a retained checkpoint, by order of a user. Later checkpoints are dead.
    TO_CHECKPOINT = "TO_CHECKPOINT"
    #: To an empty checkpoint of Spark's; a seed brings the state of the last decided one.
    RESEED = "RESEED"


class Tables(Choice):
    """Policy for the table rows that dead checkpoints committed, chosen with the order of a rewind."""

    #: They stay; rows committed after the rewind follow them.
    KEEP = "KEEP"
    #: The tables are restored to their versions at the target checkpoint.
    RESTORE = "RESTORE"


@dataclass(frozen=True, slots=True)
class RewindOrder(StoredObject):
    """A user's order to go back to a retained checkpoint, which the next start carries out."""

    #: Tells this order from later ones.
    order_id: Annotated[str, Check(partial(check_name, what="order id"))]
    #: The checkpoint to go back to.
    target: CheckpointId
    #: Policy for the table rows committed after it.
    tables: Tables
    reason: str
    ordered_at_ms: int


@dataclass(frozen=True, slots=True)
class FinishedRewind:
    #: The lineage that the rewind started.
    lineage: Lineage
    kind: RewindKind
    #: The checkpoint that the job went back to; None for the very beginning: then nothing was superseded.
    target: CheckpointId | None
    #: The lowest micro-batch that it removed from Spark's log.
    first_removed: BatchId

    def supersedes(self, checkpoint: CheckpointId, decided_in: Lineage) -> bool:
        return self.target is not None and checkpoint > self.target and decided_in < self.lineage


@dataclass(frozen=True, slots=True)
class LineageHistory:
    rewinds: tuple[FinishedRewind, ...] = ()

    @classmethod
    def of(cls, rewinds: Iterable[FinishedRewind]) -> LineageHistory:
        return cls(tuple(sorted(rewinds, key=lambda rewind: rewind.lineage)))

    @property
    def live(self) -> Lineage:
        return self.rewinds[-1].lineage if self.rewinds else FIRST_LINEAGE

    @property
    def log_began_in(self) -> Lineage:
        return max((r.lineage for r in self.rewinds if r.kind is RewindKind.RESEED), default=FIRST_LINEAGE)

    def find_superseding(self, checkpoint: CheckpointId, decided_in: Lineage) -> FinishedRewind | None:
        return next((r for r in self.rewinds if r.supersedes(checkpoint, decided_in)), None)


@dataclass(frozen=True, slots=True)
class RetainedCheckpoint:
    """State of a checkpoint that was decided COMMIT, as the job directory has it."""

    checkpoint: CheckpointId
    lineage: Lineage
    has_receipt: bool
    #: True if Spark's state and log entries at it are kept.
    is_pinned: bool


def why_not_rewindable(
    target: CheckpointId,
    known: Collection[CheckpointId],
    commits: Iterable[RetainedCheckpoint],
    history: LineageHistory,
) -> str:
    """Return why a job cannot go back to `target`; empty if it can."""
    one = next((one for one in commits if one.checkpoint == target), None)
    newest = max(known, default=None)
    if one is None and target in known:
        return "it was not completed"
    if one is None and newest is None:
        return "the job has no checkpoints"
    if one is None:
        exists = newest is not None and target <= newest
        return "it is not retained any more" if exists else f"it does not exist; the newest id is {newest}"
    dead = history.find_superseding(target, one.lineage)
    if dead is not None:
        return f"the rewind to checkpoint {dead.target}, which began lineage {dead.lineage}, left it behind"
    if one.lineage < history.log_began_in:
        return (
            f"it was taken in lineage {one.lineage}, and Spark's checkpoint was begun anew "
            f"in lineage {history.log_began_in}"
        )
    if not one.has_receipt:
        return "it is decided, but not every sink has confirmed it yet"
    if not one.is_pinned:
        return "the state that it needs is not kept any more"
    return ""
