"""What is decided about checkpoints, and what came of it: decisions, receipts, rewind intents.

Each type says who writes it, when, and what it proves. All are immutable; `to_json` and
`from_json` are exact inverses and use JSON values only.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import Committable, Json, StagedBatch


class Verdict(enum.Enum):
    """What was decided about a checkpoint id, once and for all."""

    COMMIT = "COMMIT"
    ABORT = "ABORT"


@dataclass(frozen=True, slots=True)
class Decision:
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
    uids: tuple[str, ...] = ()

    @property
    def batch(self) -> BatchId:
        """The micro-batch that carried the barrier; only a COMMIT has one."""
        return self.batches[-1].batch

    def committables_of(self, sink: str) -> tuple[tuple[StagedBatch, Committable], ...]:
        """Return the committables of `sink` in batch order, each with its batch."""
        return tuple((b, c) for b in self.batches for c in b.committables if c.sink == sink)

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {
            "checkpoint": int(self.checkpoint),
            "verdict": self.verdict.value,
            "owner_epoch": int(self.owner_epoch),
            "decided_at_ms": self.decided_at_ms,
            "reason": self.reason,
            "lineage": int(self.lineage),
            "batches": [b.to_json() for b in self.batches],
            "offsets_text": self.offsets_text,
            "commits_text": self.commits_text,
            "uids": list(self.uids),
        }

    @classmethod
    def from_json(cls, value: Json) -> Decision:
        """Read the stored form."""
        decision = cls(
            CheckpointId(value["checkpoint"]),
            Verdict(value["verdict"]),
            OwnerEpoch(value["owner_epoch"]),
            int(value["decided_at_ms"]),
            str(value["reason"]),
            Lineage(value["lineage"]),
            tuple(StagedBatch.from_json(b) for b in value["batches"]),
            str(value["offsets_text"]),
            str(value["commits_text"]),
            tuple(str(u) for u in value["uids"]),
        )
        if decision.verdict is Verdict.COMMIT and not decision.batches:
            raise ValueError(f"the decision of checkpoint {decision.checkpoint} is COMMIT without a batch")
        return decision


@dataclass(frozen=True, slots=True)
class Receipt:
    """Written after every sink and the group offsets are committed: the checkpoint is confirmed."""

    checkpoint: CheckpointId
    owner_epoch: OwnerEpoch
    confirmed_at_ms: int
    answers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    group_offsets: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {
            "checkpoint": int(self.checkpoint),
            "owner_epoch": int(self.owner_epoch),
            "confirmed_at_ms": self.confirmed_at_ms,
            "answers": {sink: list(answers) for sink, answers in self.answers.items()},
            "group_offsets": {
                g: {t: dict(ps) for t, ps in topics.items()} for g, topics in self.group_offsets.items()
            },
        }

    @classmethod
    def from_json(cls, value: Json) -> Receipt:
        """Read the stored form."""
        return cls(
            CheckpointId(value["checkpoint"]),
            OwnerEpoch(value["owner_epoch"]),
            int(value["confirmed_at_ms"]),
            value["answers"],
            value["group_offsets"],
        )


@dataclass(frozen=True, slots=True)
class RewindIntent:
    """An unfinished rewind: written before the first delete, so that recovery can finish it.

    `removed` holds the log entries byte for byte by their key below Spark's checkpoint, for
    example ``"commits/17"``: a later replay puts them back one by one.
    """

    first_removed: BatchId
    lineage: Lineage
    reason: str
    removed: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {
            "first_removed": int(self.first_removed),
            "lineage": int(self.lineage),
            "reason": self.reason,
            "removed": dict(self.removed),
        }

    @classmethod
    def from_json(cls, value: Json) -> RewindIntent:
        """Read the stored form."""
        return cls(
            BatchId(value["first_removed"]),
            Lineage(value["lineage"]),
            str(value["reason"]),
            {str(k): str(v) for k, v in value["removed"].items()},
        )
