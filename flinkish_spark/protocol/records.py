"""Acknowledgements of tasks, the staged data of a micro-batch, and the answers of committers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from flinkish_spark.protocol.accumulators import AccumulatorValue
from flinkish_spark.protocol.bases import Base
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.codec import LEFT_OUT, Form, StoredObject, StoredRow, whole
from flinkish_spark.protocol.event_time import BatchTimes
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch, SinkUid, Uid

Json = Mapping[str, Any]


def _parse_digest(value: Any) -> int:
    if not isinstance(value, str):
        raise ValueError(f"a digest is a text, got {value!r}")
    return int(value)


#: 64 bits as text: a JSON reader that maps numbers to doubles would lose the low ones.
Digest = Annotated[int, Form(str, _parse_digest)]


@dataclass(frozen=True, slots=True)
class Barrier(StoredRow):
    """A barrier that a sink writer saw: the checkpoint's id and the barrier's channel."""

    checkpoint: CheckpointId
    channel: int


@dataclass(frozen=True, slots=True)
class TimeReport(StoredRow):
    """Report of a source's scan or a keyed operator about time in one task; it travels like a barrier."""

    #: Number of the reporter in the plan; see `protocol/time_plan.py`, also for the two values.
    reporter: int
    place: int
    #: Two numbers of 64 bits.
    first: int
    second: int


@dataclass(frozen=True, slots=True)
class TaskAck(StoredObject):
    """Acknowledgement of one task of a sink writer, sent after its flush."""

    #: Spark partition index of the task.
    partition: int
    #: Records seen, and the wrapping 64-bit sum of their hashes; equal for all sinks of a stream.
    rows: int
    digest: Digest
    #: Every barrier row in this task.
    barriers: tuple[Barrier, ...] = ()
    #: Records that the sink's policy dropped.
    dropped: int = 0
    dead_lettered: int = 0
    #: Every report about time in this task.
    reports: tuple[TimeReport, ...] = field(default=(), metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class SinkAck(StoredObject):
    #: Uid of the sink, and the acknowledgements of its tasks.
    sink: SinkUid
    tasks: tuple[TaskAck, ...]
    #: Duration of staging in milliseconds; None if it was not measured.
    sync_ms: int | None = field(default=None, metadata=LEFT_OUT)
    #: Size of the staged data; None if the system does not tell.
    bytes: int | None = field(default=None, metadata=LEFT_OUT)

    @property
    def rows(self) -> int:
        return sum(task.rows for task in self.tasks)

    @property
    def digest(self) -> int:
        """Order-independent digest of all records: the sum modulo 2**64."""
        return sum(task.digest for task in self.tasks) % (1 << 64)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return tuple(barrier for task in self.tasks for barrier in task.barriers)


def iterate_reports(acks: Iterable[SinkAck]) -> Iterator[tuple[str, TimeReport]]:
    return ((ack.sink, report) for ack in acks for task in ack.tasks for report in task.reports)


def keep_reports(acks: Sequence[SinkAck], is_kept: Callable[[TimeReport], bool]) -> tuple[SinkAck, ...]:
    def filter_task(task: TaskAck) -> TaskAck:
        return replace(task, reports=tuple(one for one in task.reports if is_kept(one)))

    return tuple(replace(ack, tasks=tuple(map(filter_task, ack.tasks))) for ack in acks)


@dataclass(frozen=True, slots=True)
class Committable(StoredObject):
    """Staged data of a sink that any process can later commit or abort."""

    sink: SinkUid
    payload: Json


_Counted = Annotated[int, whole(1)]


@dataclass(frozen=True, slots=True)
class StagedBatch(StoredObject):
    """All data that one attempt of a micro-batch staged.

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
    #: Wall-clock time at which its staging began, for warnings.
    began_at_ms: int | None = field(default=None, metadata=LEFT_OUT)
    times: BatchTimes | None = field(default=None, metadata=LEFT_OUT)
    #: Late records that operators dropped, without zeros; and their other counts.
    late_dropped: Mapping[Uid, _Counted] = field(default_factory=dict, metadata=LEFT_OUT)
    counts: Mapping[Uid, Mapping[str, _Counted]] = field(default_factory=dict, metadata=LEFT_OUT)
    accumulators: Mapping[str, AccumulatorValue] = field(default_factory=dict, metadata=LEFT_OUT)
    #: Files of big key groups that its tasks have written in a bucket.
    bases: tuple[Base, ...] = field(default=(), metadata=LEFT_OUT)
    #: How long it waited because too many micro-batches were undecided; and how long its staging took.
    held_ms: int | None = field(default=None, metadata=LEFT_OUT)
    staging_ms: int | None = field(default=None, metadata=LEFT_OUT)

    @property
    def checkpoints(self) -> frozenset[CheckpointId]:
        return frozenset(barrier.checkpoint for ack in self.acks for barrier in ack.barriers)


class Outcome(Choice):
    """Answer of a committer for one committable."""

    #: The data became visible (or, for an abort, went away) through this call.
    COMMITTED = "COMMITTED"
    #: An earlier call has done it; the repeat changed nothing.
    ALREADY_COMMITTED = "ALREADY_COMMITTED"
    #: The system cannot tell or cannot do it now; call again.
    RETRY = "RETRY"
    #: The staged data is proven to be gone and can never be committed.
    LOST = "LOST"
    #: A newer owner has acted on it; this process must re-read the owner record and stop.
    FENCED = "FENCED"

    @property
    def is_done(self) -> bool:
        """True if the committable needs no further call."""
        return self in (Outcome.COMMITTED, Outcome.ALREADY_COMMITTED)


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    """An outcome with its reason, for logs, receipts and error messages.

    `is_proven_aborted` goes with LOST only: the system's own log says that the data was rolled
    back. Without it the proof itself is gone (expired, deleted), so the data may have been
    visible once, and nobody may write it a second time.

    `facts` are JSON values about what was committed, such as the version of a table. They go into the
    receipt and the manifest; a repeated commit gives those that it can still find out.
    """

    outcome: Outcome
    detail: str = ""
    is_proven_aborted: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
