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
from flinkish_spark.protocol.lineage import PastRewind, RewindKind, Tables
from flinkish_spark.protocol.purpose import CheckpointPurpose
from flinkish_spark.protocol.records import Committable, Json, StagedBatch
from flinkish_spark.protocol.watermarks import EventTime


class Verdict(enum.Enum):
    """What was decided about a checkpoint id, once and for all."""

    COMMIT = "COMMIT"
    ABORT = "ABORT"


@dataclass(frozen=True, slots=True)
class Decision:
    """The one create-if-absent object per checkpoint id.

    A COMMIT carries all that is needed to finish it in any process: the batches with their
    committables, and byte copies of Spark's offsets/N and commits/N. An ABORT carries a reason.

    Parameters
    ----------
    uids
        Sources, operators and sinks of the job.
    purpose, triggered_at_ms
        What it was for, and the wall-clock time of its trigger.
    finished
        Uids that had finished before its trigger: a restore does not run them again.
    hook_states
        What the master hooks gave, by name.
    times
        Where time stood behind its last micro-batch; None in a job without event time and timers.
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
    purpose: CheckpointPurpose = CheckpointPurpose.PERIODIC
    triggered_at_ms: int = 0
    finished: tuple[str, ...] = ()
    hook_states: Mapping[str, Any] = field(default_factory=dict)
    times: EventTime | None = None

    @property
    def batch(self) -> BatchId:
        """The micro-batch that carried the barrier; only a COMMIT has one."""
        return self.batches[-1].batch

    def by_sink(self) -> dict[str, list[tuple[StagedBatch, Committable]]]:
        """Return the committables of all sinks in batch order, each with its batch."""
        found: dict[str, list[tuple[StagedBatch, Committable]]] = {}
        for batch in self.batches:
            for committable in batch.committables:
                found.setdefault(committable.sink, []).append((batch, committable))
        return found

    def committables_of(self, sink: str) -> tuple[tuple[StagedBatch, Committable], ...]:
        """Return the committables of `sink` in batch order, each with its batch."""
        return tuple((b, c) for b in self.batches for c in b.committables if c.sink == sink)

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        stored: dict[str, Any] = {
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
            "purpose": self.purpose.value,
            "triggered_at_ms": self.triggered_at_ms,
            "finished": list(self.finished),
            "hook_states": dict(self.hook_states),
        }
        if self.times is not None:
            stored["times"] = self.times.to_json()
        return stored

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
            # Written by versions before these existed.
            CheckpointPurpose(value.get("purpose", CheckpointPurpose.PERIODIC.value)),
            int(value.get("triggered_at_ms", 0)),
            tuple(str(u) for u in value.get("finished", ())),
            dict(value.get("hook_states", {})),
            None if value.get("times") is None else EventTime.from_json(value["times"]),
        )
        if decision.verdict is Verdict.COMMIT and not decision.batches:
            raise ValueError(f"the decision of checkpoint {decision.checkpoint} is COMMIT without a batch")
        return decision


@dataclass(frozen=True, slots=True)
class Receipt:
    """Written after every sink and the group offsets are committed: the checkpoint is confirmed.

    Parameters
    ----------
    answers
        Outcomes by sink uid, one per committable.
    group_offsets
        Committed offsets by group, topic and partition.
    facts
        What sinks said about what they committed, by sink uid, such as the version of a table.
    """

    checkpoint: CheckpointId
    owner_epoch: OwnerEpoch
    confirmed_at_ms: int
    answers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    group_offsets: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

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
            "facts": {sink: dict(facts) for sink, facts in self.facts.items()},
        }

    @classmethod
    def from_json(cls, value: Json) -> Receipt:
        """Read the stored form."""
        return cls(
            CheckpointId(value["checkpoint"]),
            OwnerEpoch(value["owner_epoch"]),
            int(value["confirmed_at_ms"]),
            {str(sink): [str(a) for a in answers] for sink, answers in value["answers"].items()},
            {
                str(group): {
                    str(topic): {str(partition): int(offset) for partition, offset in partitions.items()}
                    for topic, partitions in topics.items()
                }
                for group, topics in value["group_offsets"].items()
            },
            # Written by versions before these existed.
            {str(sink): dict(facts) for sink, facts in value.get("facts", {}).items()},
        )


@dataclass(frozen=True, slots=True)
class RewindIntent:
    """An unfinished rewind: written before the first delete, so that recovery can finish it.

    Written by the recovery; moved into the history when everything that it names is done.

    Parameters
    ----------
    first_removed
        The lowest micro-batch that leaves Spark's log.
    lineage
        The lineage that the rewind starts.
    reason
        For people.
    removed
        The log entries byte for byte by their key below Spark's checkpoint, for example
        ``"commits/17"``.
    kind
        What has to be done; see `protocol/lineage.py`.
    target
        The checkpoint that the job goes back to; None for the very beginning.
    tables
        What becomes of rows that later checkpoints committed to tables.
    order_id
        The order that is carried out; empty if there was none.
    """

    first_removed: BatchId
    lineage: Lineage
    reason: str
    removed: Mapping[str, str]
    kind: RewindKind = RewindKind.PLAIN
    target: CheckpointId | None = None
    tables: Tables = Tables.KEEP
    order_id: str = ""

    def past(self) -> PastRewind:
        """Return what the history says about it once it is finished."""
        return PastRewind(self.lineage, self.kind, self.target, self.first_removed)

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {
            "first_removed": int(self.first_removed),
            "lineage": int(self.lineage),
            "reason": self.reason,
            "removed": dict(self.removed),
            "kind": self.kind.value,
            "target": None if self.target is None else int(self.target),
            "tables": self.tables.value,
            "order_id": self.order_id,
        }

    @classmethod
    def from_json(cls, value: Json) -> RewindIntent:
        """Read the stored form."""
        # Versions before orders existed wrote plain rewinds only, without their target.
        target = value.get("target")
        return cls(
            BatchId(value["first_removed"]),
            Lineage(value["lineage"]),
            str(value["reason"]),
            {str(k): str(v) for k, v in value["removed"].items()},
            RewindKind(value.get("kind", RewindKind.PLAIN.value)),
            None if target is None else CheckpointId(target),
            Tables(value.get("tables", Tables.KEEP.value)),
            str(value.get("order_id", "")),
        )


@dataclass(frozen=True, slots=True)
class TriggerRecord:
    """An id that was given out, durable before its barrier goes out.

    Written once, by the coordinator. Proof that the id may be pending somewhere: a new owner
    seals every id that has this record and no decision.
    """

    checkpoint: CheckpointId
    owner_epoch: OwnerEpoch
    purpose: CheckpointPurpose
    triggered_at_ms: int

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {
            "checkpoint": int(self.checkpoint),
            "owner_epoch": int(self.owner_epoch),
            "purpose": self.purpose.value,
            "triggered_at_ms": self.triggered_at_ms,
        }

    @classmethod
    def from_json(cls, value: Json) -> TriggerRecord:
        """Read the stored form."""
        return cls(
            CheckpointId(value["checkpoint"]),
            OwnerEpoch(value["owner_epoch"]),
            CheckpointPurpose(value["purpose"]),
            int(value["triggered_at_ms"]),
        )
