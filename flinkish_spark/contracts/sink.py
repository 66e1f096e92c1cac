"""The contract of a sink that commits exactly once.

Life of the data of one sink, in order. `W` is the writer, whose tasks run on executors; `C` the
committer, in the user's process:

1. **begin** (W): a task attempt opens something of its own, under a name that no other attempt has:
   owner epoch, block, task, attempt. Attempts that fail, and speculative ones, leave theirs behind.
2. **write** (W): records go in, durably or on their way, invisibly.
3. **flush** = pre-commit (W): everything is durable and still invisible; the **committable** says how
   any process can commit or abort it later. 1 to 3 are :meth:`SinkWriter.stage`, which may be
   called again for the same micro-batch after a crash, a failed attempt or a rewind; each call stages
   anew. Then the staged file names the committables, Spark writes commits/N, the checkpoint is decided.
4. **commit** (C): what a decided checkpoint names becomes visible. Any number of times, by any process,
   until there is a receipt; all but the first change nothing. The same call is **recover and commit**.
5. **checkpoint_complete** (C): every sink has committed. For what goes by checkpoints and not by records,
   and so called for those in which nothing was staged, too. Also repeated until there is a receipt.
6. **abort** (C): gives up committables that no decision contains. Idempotent. The same call is
   **recover and abort**; what no committable names (see 1) is found by :meth:`Committer.sweep`.
7. **close** (C): releases connections. Nothing is flushed or committed here.

Whoever has a new system derives from :class:`flinkish_spark.TwoPhaseCommitSink`, which has these steps as
methods of one object (`docs/two-phase-sinks.md`). What must hold of every sink is there to be run:
:mod:`flinkish_spark.testing.sink_contract`.

What must survive a crash is in the committable, a JSON value. A writer keeps nothing between calls that
matters. Nobody concludes LOST without evidence, and LOST that is proven is replayed, not lost.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.core.clock import Clock
from flinkish_spark.core.errors import AnotherTimelineError
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.validation import refuse_unknown_parameters
from flinkish_spark.protocol.ids import (
    BatchId,
    CheckpointId,
    CheckpointPurpose,
    JobUuid,
    Lineage,
    OwnerEpoch,
    Place,
)
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome, TaskAck
from flinkish_spark.protocol.timeline import NO_TIMELINE, Mark, Timeline

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql import types as T

    from flinkish_spark.core.config import CheckpointConfig


@dataclass(frozen=True, slots=True)
class SinkContext:
    """Who a sink works for; the same for the life of a process."""

    #: Part of every name that the sink leaves outside.
    job: JobUuid
    owner_epoch: OwnerEpoch
    uid: str
    #: Fields of the records it gets.
    schema: T.StructType
    checkpoint: CheckpointConfig
    job_name: str
    #: A place below the job directory that is this sink's alone. Nothing but the sink writes or deletes
    #: there; tasks can, where executors see the job directory (:attr:`.Sink.stages_in_job_dir`).
    place: StoreSpec
    clock: Clock
    #: Of the job directory: which marks outside are its own.
    timeline: Timeline = NO_TIMELINE

    @property
    def folder(self) -> Path:
        """The place as an absolute path, which need not exist."""
        return self.place.folder

    def is_left_over(self, owner_epoch: OwnerEpoch, block: int, running: frozenset[int]) -> bool:
        """Return whether nobody will decide about what an owner of the job staged in a block.

        What belongs to a newer owner is never touched, whatever this process believes.
        """
        return owner_epoch < self.owner_epoch or (owner_epoch == self.owner_epoch and block not in running)

    def require_ours(self, mark: Mark, upto: CheckpointId) -> None:
        """Raise AnotherTimelineError if a mark was not left by this job directory's own past."""
        why = self.timeline.why_not_ours(mark, upto)
        if why:
            raise another_timeline(f"sink '{self.uid}'", mark, upto, why)


def another_timeline(
    who: str,
    mark: Mark,
    newest: CheckpointId,
    why: str,
    ahead: Mapping[str, CheckpointId] = MappingProxyType({}),
) -> AnotherTimelineError:
    """Return the error that says who holds what, and what can be done."""
    others = ", ".join(f"{one} ({checkpoint})" for one, checkpoint in ahead.items() if one != who)
    return AnotherTimelineError(
        f"{who} holds checkpoint {mark.checkpoint}, which this job directory has not committed; its newest "
        f"is {newest}" + (f"; so do {others}" if others else ""),
        why=f"{why}: the directory is an older copy of itself, or a copy of it runs elsewhere",
        what_to_do="put the newest job directory back, or stop the other job and use its directory. To go on "
        "from this directory all the same, run `flinkish timeline accept JOB_DIR` and start the job: sinks "
        f"keep what they have, and what was read behind checkpoint {newest} is read and written again",
        participant=who,
        ahead=dict(ahead) or {who: mark.checkpoint},
        found=mark.checkpoint,
        newest=newest,
    )


@dataclass(frozen=True)
class GroupOffsets:
    """Where a consumer group is to stand behind a checkpoint."""

    #: Of its brokers, as the source names them.
    servers: str
    group: str
    offsets: Mapping[Place, int]


@dataclass(frozen=True, slots=True)
class StageRequest:
    """One micro-batch to stage."""

    #: A batch DataFrame: the control columns kind, checkpoint, channel, hash in this order, then
    #: the stream's fields. Barriers are among the rows; every writer task reports those it saw.
    rows: DataFrame
    lineage: Lineage
    batch: BatchId
    #: A number that no other micro-batch in flight has, leased until the receipt.
    block: int
    #: The checkpoint that the rows are expected to become visible with. Another one, always a later one,
    #: if that is aborted: what is staged passes to the next.
    checkpoint: CheckpointId
    #: Counts the records, without the barriers; a Spark job, unless a sink of the same stream has
    #: counted them already. Only for writers that declare more than one pass.
    count_records: Callable[[], int]
    #: Returns where the groups of the sources are to stand behind the micro-batch, for a sink whose system
    #: commits that together with its records.
    input_offsets: Callable[[], Sequence[GroupOffsets]] = tuple
    #: For a :class:`JoiningWriter` that stages with others, the column of the rows for each of its names.
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a writer staged: one ack per task, and what can be committed later.

    `bytes` is the size of it, None where the system does not tell.
    """

    tasks: tuple[TaskAck, ...]
    payloads: tuple[Mapping[str, Any], ...]
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class CompletedCheckpoint:
    """A checkpoint that every sink has committed; equal in every repetition.

    Parameters
    ----------
    decided_at_ms
        Wall-clock time of its decision: the time to go by, since it is the same for all who ask.
    purpose
        What it was for. Behind one that is final the job ends.
    """

    checkpoint: CheckpointId
    decided_at_ms: int
    purpose: CheckpointPurpose


class SinkWriter(ABC):
    """Stages micro-batches. Lives in the user's process; its tasks run on executors."""

    #: How often it goes over the rows; above one in total, they are evaluated once and kept.
    passes = 1

    @abstractmethod
    def stage(self, request: StageRequest) -> StageResult:
        """Stage one micro-batch; everything is durable and invisible when this returns."""


class JoiningWriter(SinkWriter):
    """A writer that can stage a micro-batch in one pass over its rows with others of its class.

    A pass is a job of Spark's, which costs the same for few rows as for none.
    """

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, Column]:
        """Return what it reads of a record, by name: columns over the fields of the stream."""

    @classmethod
    @abstractmethod
    def stage_all(cls, staging: Sequence[tuple[Self, StageRequest]]) -> Sequence[StageResult]:
        """Stage the same micro-batch for several, as :meth:`stage` would for each of them."""


class ShownOrder(enum.Enum):
    """In which order readers of a sink's system see what two micro-batches hold of a key."""

    #: As it was staged: the place of a record is fixed by then, as in a topic. What is staged again comes
    #: behind what was staged meanwhile.
    OF_STAGING = "OF_STAGING"
    #: As it was committed, or in none.
    OF_COMMITS = "OF_COMMITS"


class Committer(ABC):
    """Ends what was staged. Called only by the coordinator or the recovery, one at a time."""

    #: Under OF_STAGING a replay of what this sink has lost gives up what it staged behind it: that would
    #: come before. Right for every system, if not the cheapest for some.
    shown_order = ShownOrder.OF_STAGING
    #: How long after its staging data can be committed, in milliseconds; None for as long as one likes.
    #: The job warns when half of it has passed.
    staged_lifetime_ms: int | None = None
    #: Whether all that a checkpoint shows of this sink was staged as one. Then nothing is handed on: what an
    #: earlier start of the query staged and no decision contains counts as dead, and the job goes back.
    shows_whole = False

    @abstractmethod
    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Commit all committables of a decided checkpoint, in the given (batch) order."""

    def checkpoint_complete(self, completed: CompletedCheckpoint) -> CommitAnswer:
        """Do what goes by checkpoints: roll files by their age, finish partitions.

        Called for every checkpoint, in order, also for those in which this sink staged nothing; after all
        sinks have committed, before the group offsets and the receipt; again after a crash in between.
        """
        return CommitAnswer(Outcome.ALREADY_COMMITTED, "nothing goes by checkpoints")

    @abstractmethod
    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Abort committables that no decision contains."""

    @abstractmethod
    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        """Return the reason for each committable, by position, that cannot be committed any more."""

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        """Abort what this job left open and neither `kept` nor a running micro-batch names."""
        return 0

    def why_not_superseded(self, target: CheckpointId) -> str:
        """Return why what was committed after `target` cannot be taken back; empty if it can.

        Asked before a rewind under ``Tables.RESTORE`` touches anything. The default takes nothing
        back: readers tell dead records from live ones by themselves.
        """
        return ""

    def supersede(self, target: CheckpointId, lineage: Lineage) -> CommitAnswer:
        """Take back what was committed after `target`, with everything of this job in the table.

        Called only under ``Tables.RESTORE``, after the intent of the rewind that starts `lineage` is
        durable and before it is closed; so again after a crash in between. Must be idempotent per
        lineage.
        """
        return CommitAnswer(Outcome.ALREADY_COMMITTED, "nothing to take back")

    def newest_marks(self) -> Sequence[Mark]:
        """Return what the sink's system says about the last checkpoint that was committed to it by this job.

        Asked once behind every takeover, before anything is committed, aborted or started. Empty if nothing
        was committed, or the system keeps no such record: then a directory that is an older copy is not
        noticed by this sink.
        """
        return ()

    def task_of(self, committable: Committable) -> int | None:
        """Return the Spark partition whose rows, and no others, a committable holds; None if it is not one.

        Asked when some of a micro-batch's committables are lost and others are committed: only then
        can the lost ones be staged again alone.
        """
        return None

    def interrupt(self) -> None:
        """Let a call that another thread is in fail soon, where that can be done: the job is cancelled.

        Perhaps several times. What the call did or did not do by then is found out by the next start.
        """

    def close(self) -> None:
        """Release connections."""


class Sink(ABC):
    """What a user gives to `sink_to`: settings only, usable for several starts."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Refuse a parameter that is misspelt."""
        refuse_unknown_parameters(cls, settings)
        return super().__new__(cls)

    @property
    def topics(self) -> tuple[str, ...]:
        """Kafka topics it writes; empty for others."""
        return ()

    def datasets(self) -> tuple[Dataset, ...]:
        """Return what it writes, for who follows data through systems; empty where nobody else knows it."""
        return ()

    @property
    def stages_in_job_dir(self) -> bool:
        """Whether its tasks write into the job directory, from which the driver commits."""
        return False

    def parts(self, uid: str) -> tuple[tuple[str, Sink], ...]:
        """Return the sinks that write, each with its uid: this one, unless it is made of others."""
        return ((uid, self),)

    @abstractmethod
    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Refuse what cannot work, with one clear error, before anything starts."""

    @abstractmethod
    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        """Return the staging half."""

    @abstractmethod
    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Return the committing half."""
