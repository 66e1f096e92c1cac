"""What the protocol stores: staged batches, decisions, receipts and rewind intents.

Each type says who writes it, when, and what it proves. All are immutable; `to_json` and
`from_json` are exact inverses and use JSON values only.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch, checked_name

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Barrier:
    """A barrier as a sink writer saw it: the checkpoint's id and the channel it came through."""

    checkpoint: CheckpointId
    channel: int


@dataclass(frozen=True, slots=True)
class TaskAck:
    """What one task of a sink writer saw, reported after its flush.

    Parameters
    ----------
    partition
        Spark partition index of the task.
    rows, digest
        Records seen, and the wrapping 64-bit sum of their hashes; equal for all sinks of a stream.
    barriers
        Every barrier row that passed through this task.
    dropped, dead_lettered
        Records the sink's policy kept out of the topic.
    """

    partition: int
    rows: int
    digest: int
    barriers: tuple[Barrier, ...] = ()
    dropped: int = 0
    dead_lettered: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {
            "partition": self.partition,
            "rows": self.rows,
            "digest": str(self.digest),
            "barriers": [[int(b.checkpoint), b.channel] for b in self.barriers],
            "dropped": self.dropped,
            "dead_lettered": self.dead_lettered,
        }

    @classmethod
    def from_json(cls, value: Json) -> TaskAck:
        """Read what a writer reported or :meth:`to_json` stored."""
        return cls(
            int(value["partition"]),
            int(value["rows"]),
            int(value["digest"]),
            tuple(Barrier(CheckpointId(int(c)), int(channel)) for c, channel in value["barriers"]),
            int(value.get("dropped", 0)),
            int(value.get("dead_lettered", 0)),
        )


@dataclass(frozen=True, slots=True)
class SinkAck:
    """The acknowledgement of one sink for one micro-batch."""

    sink: str
    tasks: tuple[TaskAck, ...]

    @property
    def rows(self) -> int:
        """Records seen by all tasks."""
        return sum(task.rows for task in self.tasks)

    @property
    def digest(self) -> int:
        """Order-independent digest of all records: the sum modulo 2**64."""
        return sum(task.digest for task in self.tasks) % (1 << 64)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """All barrier rows, in task order."""
        return tuple(barrier for task in self.tasks for barrier in task.barriers)

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {"sink": self.sink, "tasks": [task.to_json() for task in self.tasks]}

    @classmethod
    def from_json(cls, value: Json) -> SinkAck:
        """Read the stored form."""
        return cls(
            checked_name(value["sink"], "sink uid"), tuple(TaskAck.from_json(t) for t in value["tasks"])
        )


@dataclass(frozen=True, slots=True)
class Committable:
    """Something staged by a sink that any process can later commit or abort.

    `payload` belongs to the sink; the protocol carries it and never looks inside.
    """

    sink: str
    payload: Json

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {"sink": self.sink, "payload": dict(self.payload)}

    @classmethod
    def from_json(cls, value: Json) -> Committable:
        """Read the stored form."""
        return cls(checked_name(value["sink"], "sink uid"), dict(value["payload"]))


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """Everything that one attempt of a micro-batch staged.

    Written once by the epoch writer, after every sink flushed and before Spark writes commits/N;
    also for an empty batch, since a committed batch without one is an error. Proof that the
    committables exist, not that the batch counts: that is commits/N.
    """

    lineage: Lineage
    batch: BatchId
    owner_epoch: OwnerEpoch
    attempt: int
    acks: tuple[SinkAck, ...]
    committables: tuple[Committable, ...]
    blocks: tuple[int, ...] = ()

    @property
    def checkpoints(self) -> frozenset[CheckpointId]:
        """Ids of the barriers that any sink saw in this batch."""
        return frozenset(barrier.checkpoint for ack in self.acks for barrier in ack.barriers)

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {
            "lineage": int(self.lineage),
            "batch": int(self.batch),
            "owner_epoch": int(self.owner_epoch),
            "attempt": self.attempt,
            "acks": [ack.to_json() for ack in self.acks],
            "committables": [c.to_json() for c in self.committables],
            "blocks": list(self.blocks),
        }

    @classmethod
    def from_json(cls, value: Json) -> StagedBatch:
        """Read the stored form."""
        return cls(
            Lineage(value["lineage"]),
            BatchId(value["batch"]),
            OwnerEpoch(value["owner_epoch"]),
            int(value["attempt"]),
            tuple(SinkAck.from_json(a) for a in value["acks"]),
            tuple(Committable.from_json(c) for c in value["committables"]),
            tuple(int(b) for b in value["blocks"]),
        )


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
