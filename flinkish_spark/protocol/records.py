"""What tasks acknowledge and what one micro-batch staged.

Each type says who writes it, when, and what it proves. All are immutable; `to_json` and
`from_json` are exact inverses and use JSON values only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch, checked_name
from flinkish_spark.protocol.limits import checked_whole
from flinkish_spark.protocol.time_facts import BatchTimes

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Barrier:
    """A barrier as a sink writer saw it: the checkpoint's id and the channel it came through."""

    checkpoint: CheckpointId
    channel: int


@dataclass(frozen=True, slots=True)
class TimeReport:
    """What a source's scan or a keyed operator said about time in one task; travels like a barrier.

    Parameters
    ----------
    reporter
        Its number in the plan; see `protocol/time_plan.py`, also for the two numbers.
    place
        Channel or key group.
    first, second
        Two numbers of 64 bits.
    """

    reporter: int
    place: int
    first: int
    second: int


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
    reports
        Every report about time that passed through this task.
    """

    partition: int
    rows: int
    digest: int
    barriers: tuple[Barrier, ...] = ()
    dropped: int = 0
    dead_lettered: int = 0
    reports: tuple[TimeReport, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        stored: dict[str, Any] = {
            "partition": self.partition,
            "rows": self.rows,
            "digest": str(self.digest),
            "barriers": [[int(b.checkpoint), b.channel] for b in self.barriers],
            "dropped": self.dropped,
            "dead_lettered": self.dead_lettered,
        }
        if self.reports:
            stored["reports"] = [[r.reporter, r.place, r.first, r.second] for r in self.reports]
        return stored

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
            tuple(TimeReport(*map(int, report)) for report in value.get("reports", ())),
        )


@dataclass(frozen=True, slots=True)
class SinkAck:
    """The acknowledgement of one sink for one micro-batch.

    Parameters
    ----------
    sink, tasks
        Its uid, and what each of its tasks saw.
    sync_ms
        How long it took to stage, in milliseconds; None where it was not measured.
    bytes
        Size of what it staged; None where the system does not tell.
    """

    sink: str
    tasks: tuple[TaskAck, ...]
    sync_ms: int | None = None
    bytes: int | None = None

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
        stored: dict[str, Any] = {"sink": self.sink, "tasks": [task.to_json() for task in self.tasks]}
        if self.sync_ms is not None:
            stored["sync_ms"] = self.sync_ms
        if self.bytes is not None:
            stored["bytes"] = self.bytes
        return stored

    @classmethod
    def from_json(cls, value: Json) -> SinkAck:
        """Read the stored form."""
        return cls(
            checked_name(value["sink"], "sink uid"),
            tuple(TaskAck.from_json(t) for t in value["tasks"]),
            value.get("sync_ms"),
            value.get("bytes"),
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

    `began_at_ms` is the wall-clock time at which its staging began, for warnings; None where an older
    version staged it. `times` is what it says about time; None in a job without any. `late_dropped` is
    how many late records operators have dropped, by uid, without those that dropped none.
    """

    lineage: Lineage
    batch: BatchId
    owner_epoch: OwnerEpoch
    attempt: int
    acks: tuple[SinkAck, ...]
    committables: tuple[Committable, ...]
    blocks: tuple[int, ...] = ()
    began_at_ms: int | None = None
    times: BatchTimes | None = None
    late_dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def checkpoints(self) -> frozenset[CheckpointId]:
        """Ids of the barriers that any sink saw in this batch."""
        return frozenset(barrier.checkpoint for ack in self.acks for barrier in ack.barriers)

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        stored: dict[str, Any] = {
            "lineage": int(self.lineage),
            "batch": int(self.batch),
            "owner_epoch": int(self.owner_epoch),
            "attempt": self.attempt,
            "acks": [ack.to_json() for ack in self.acks],
            "committables": [c.to_json() for c in self.committables],
            "blocks": list(self.blocks),
        }
        if self.began_at_ms is not None:
            stored["began_at_ms"] = self.began_at_ms
        if self.times is not None:
            stored["times"] = self.times.to_json()
        if self.late_dropped:
            stored["late_dropped"] = dict(self.late_dropped)
        return stored

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
            value.get("began_at_ms"),
            None if value.get("times") is None else BatchTimes.from_json(value["times"]),
            _counts(value.get("late_dropped", {})),
        )


def _counts(value: Json) -> dict[str, int]:
    return {checked_name(uid, "uid"): checked_whole("late_dropped", n, least=1) for uid, n in value.items()}
