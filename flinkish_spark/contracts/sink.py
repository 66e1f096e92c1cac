"""The contract of a sink that commits exactly once.

Life of the data of one sink, in order. `W` is the writer, whose tasks run on executors; `C` the
committer, in the user's process:

1. **begin** (W): a task attempt opens a transaction or file under a unique name: owner epoch, block, task,
   attempt. Failed and speculative attempts leave theirs behind.
2. **write** (W): records are written, but stay invisible and need not be durable yet.
3. **flush** = pre-commit (W): all records are durable and still invisible; with the **committable** any
   process can commit or abort them later. 1 to 3 are :meth:`SinkWriter.stage`, which may be
   called again for the same micro-batch after a crash, a failed attempt or a rewind; each call stages
   anew. Then the staged file names the committables, Spark writes commits/N, the checkpoint is decided.
4. **commit** (C): makes the committables of a decided checkpoint visible. It is repeated, by any process,
   until there is a receipt; all calls but the first change nothing. The same call is **recover and commit**.
5. **checkpoint_complete** (C): every sink has committed. For work per checkpoint instead of per record, so it
   is also called if nothing was staged. It is repeated until there is a receipt, too.
6. **abort** (C): gives up committables that no decision contains. Idempotent. The same call is
   **recover and abort**; :meth:`Committer.sweep` finds data without a committable (see 1).
7. **close** (C): releases connections. It neither flushes nor commits.

For a new system derive from :class:`flinkish_spark.TwoPhaseCommitSink`, which has these steps as methods of
one object (`docs/two-phase-sinks.md`), and test it with :mod:`flinkish_spark.testing.sink_contract`.

All that must survive a crash is in the committable, a JSON value; a writer keeps no state between calls. An
outcome is LOST only with evidence, and lost data is replayed.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    is_left_over,
)
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome, TaskAck
from flinkish_spark.protocol.timeline import NO_TIMELINE, Mark, Timeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql import types as T

    from flinkish_spark.core.arrow_pass import ArrowPass
    from flinkish_spark.core.config import CheckpointConfig


@dataclass(frozen=True, slots=True)
class SinkContext:
    """The job that a sink works for; the same for the life of a process."""

    #: Part of every name that the sink creates in its system.
    job: JobUuid
    owner_epoch: OwnerEpoch
    uid: str
    #: Fields of the records.
    schema: T.StructType
    checkpoint: CheckpointConfig
    job_name: str
    #: A folder below the job directory for this sink alone. Only the sink writes or deletes there; its tasks
    #: can if executors reach the job directory (:attr:`.Sink.stages_in_job_dir`).
    place: StoreSpec
    clock: Clock
    #: Timeline of the job directory, which tells its own marks from those of other copies.
    timeline: Timeline = NO_TIMELINE

    @property
    def folder(self) -> Path:
        """Return the place as an absolute path, which need not exist."""
        return self.place.folder

    def is_left_over(self, owner_epoch: OwnerEpoch, block: int, running: frozenset[int]) -> bool:
        """Return whether the data that an owner of the job staged in a block will never be decided."""
        return is_left_over(owner_epoch, block, self.owner_epoch, running)

    def require_ours(self, mark: Mark, upto: CheckpointId) -> None:
        """Raise AnotherTimelineError unless a mark was left by this job directory."""
        require_ours(self.timeline, f"sink '{self.uid}'", mark, upto)


def require_ours(timeline: Timeline, who: str, mark: Mark, upto: CheckpointId) -> None:
    if why := timeline.why_not_ours(mark, upto):
        raise another_timeline(who, mark, upto, why)


def another_timeline(
    who: str,
    mark: Mark,
    newest: CheckpointId,
    why: str,
    ahead: Mapping[str, CheckpointId] = MappingProxyType({}),
) -> AnotherTimelineError:
    """Return the error for a participant with a checkpoint that this job directory has not committed."""
    others = ", ".join(f"{one} ({checkpoint})" for one, checkpoint in ahead.items() if one != who)
    return AnotherTimelineError(
        f"{who} holds checkpoint {mark.checkpoint}, which this job directory has not committed; its newest "
        f"is {newest}" + (f"; so do {others}" if others else ""),
        why=f"{why}: the directory is an older copy of itself, or a copy of it runs elsewhere",
        what_to_do="put the newest job directory back, or stop the other job and use its directory. To go on "
        "from this directory all the same, run `flinkish timeline accept JOB_DIR` and start the job: sinks "
        f"keep their data, and all input after checkpoint {newest} is read and written again",
        participant=who,
        ahead=dict(ahead) or {who: mark.checkpoint},
        found=mark.checkpoint,
        newest=newest,
    )


@dataclass(frozen=True)
class GroupOffsets:
    """Offsets of a consumer group after a checkpoint."""

    #: Bootstrap servers, as in the source's settings.
    servers: str
    group: str
    offsets: Mapping[Place, int]


@dataclass(frozen=True, slots=True)
class StageRequest:
    #: What makes :attr:`rows`; a writer that applies one worker to them goes on with it in the same pass.
    #: A plan for a pass that several sinks share is made without.
    source: DataFrame | ArrowPass
    lineage: Lineage
    batch: BatchId
    #: A number unique among micro-batches in flight, leased until the receipt.
    block: int
    #: The checkpoint with which the rows are expected to become visible; a later one if that is aborted.
    checkpoint: CheckpointId
    #: Returns the offsets of the sources' consumer groups after the micro-batch, for a sink whose system
    #: commits them together with its records.
    input_offsets: Callable[[], Sequence[GroupOffsets]] = tuple
    #: The checkpoint is this micro-batch alone; there are no barriers among the rows.
    is_whole_checkpoint: bool = False

    @property
    def rows(self) -> DataFrame:
        """A batch DataFrame: the control columns kind, checkpoint, channel, hash, then the stream's fields.

        Barriers are among the rows; every writer task reports those it saw.
        """
        # Imported here, since commands know contracts and start without pyspark.
        from flinkish_spark.core.arrow_pass import frame_of

        return frame_of(self.source)

    def find_checkpoint(self, tasks: Sequence[TaskAck]) -> CheckpointId | None:
        """Return the checkpoint that ends with these rows; None if they have no barrier."""
        if self.is_whole_checkpoint:
            return self.checkpoint
        return max((barrier.checkpoint for task in tasks for barrier in task.barriers), default=None)


@dataclass(frozen=True, slots=True)
class StageResult:
    """The staged data of one micro-batch: one ack per task, and committables.

    `bytes` is its size, None if the system does not tell.
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
        Wall-clock time of its decision, the same in every repetition; use it instead of the clock.
    purpose
        Purpose of the checkpoint. After a final one the job ends.
    """

    checkpoint: CheckpointId
    decided_at_ms: int
    purpose: CheckpointPurpose


class SinkWriter(ABC):
    """Stages micro-batches. Lives in the user's process; its tasks run on executors."""

    #: Number of times it reads the rows; if the sinks' total is above one, the rows are cached.
    passes = 1

    @abstractmethod
    def stage(self, request: StageRequest) -> StageResult:
        """Stage one micro-batch; everything is durable and invisible when this returns."""


class ShownOrder(enum.Enum):
    """The order in which readers of a sink's system see a key's records of two micro-batches."""

    #: The order of staging, which fixes a record's position, as in a topic. Data that is staged again comes
    #: after data that was staged meanwhile.
    OF_STAGING = "OF_STAGING"
    #: The order of commits, or none.
    OF_COMMITS = "OF_COMMITS"


class Committer(ABC):
    """Commits or aborts staged data. Called by the coordinator or the recovery, never concurrently."""

    #: Under OF_STAGING a replay of lost data also gives up data that was staged after it, which would
    #: otherwise become visible first. Right for every system, but not the cheapest for some.
    shown_order = ShownOrder.OF_STAGING
    #: How long staged data can be committed, in milliseconds; None for no limit. The job warns when half of
    #: it has passed.
    staged_lifetime_ms: int | None = None
    #: Whether a checkpoint's data must be staged by one start of the query. Then undecided data of an earlier
    #: start counts as dead, and the job goes back to the last checkpoint.
    shows_whole = False

    @abstractmethod
    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Commit all committables of a decided checkpoint, in the given (batch) order."""

    def checkpoint_complete(self, completed: CompletedCheckpoint) -> CommitAnswer:
        """Do the work per checkpoint: roll files by age, finish partitions.

        Called for every checkpoint in order, also if this sink staged nothing; after all sinks have committed
        and before the group offsets and the receipt; again after a crash in between.
        """
        return CommitAnswer(Outcome.ALREADY_COMMITTED, "no work per checkpoint")

    @abstractmethod
    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Abort committables that no decision contains."""

    @abstractmethod
    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        """Return, by position, the reasons of committables that cannot be committed any more."""

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        """Abort data that this job left open and that is neither in `kept` nor in a running block."""
        return 0

    def why_not_superseded(self, target: CheckpointId) -> str:
        """Return why data committed after `target` cannot be taken back; empty if it can.

        Called before a rewind under ``Tables.RESTORE`` changes anything. The default takes nothing
        back: readers distinguish dead records from live ones themselves.
        """
        return ""

    def supersede(self, target: CheckpointId, lineage: Lineage) -> CommitAnswer:
        """Take back all data that this job committed to the table after `target`.

        Called only under ``Tables.RESTORE``, after the intent of the rewind that starts `lineage` is
        durable and before it is closed; so again after a crash in between. Must be idempotent per
        lineage.
        """
        return CommitAnswer(Outcome.ALREADY_COMMITTED, "nothing to take back")

    def newest_marks(self) -> Sequence[Mark]:
        """Return the marks of the last checkpoint that this job committed to the sink's system.

        Called once after every takeover, before any commit, abort or start. Empty if nothing was committed or
        the system stores no marks; then this sink cannot detect an older copy of the job directory.
        """
        return ()

    def task_of(self, committable: Committable) -> int | None:
        """Return the Spark partition whose rows make up a committable; None if it is not exactly one.

        Called when some committables of a micro-batch are lost and others committed: only with a partition
        can the lost ones be staged again alone.
        """
        return None

    def interrupt(self) -> None:
        """Let a call in another thread fail soon, if possible, since the job is cancelled.

        May be called several times. The next start finds out what the interrupted call has done.
        """

    def close(self) -> None:
        """Release connections."""


class Sink(ABC):
    """Settings of a sink, which a user passes to `sink_to`; reusable for several starts."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Refuse misspelt parameters."""
        refuse_unknown_parameters(cls, settings)
        return super().__new__(cls)

    @property
    def topics(self) -> tuple[str, ...]:
        """Return the Kafka topics it writes; empty for other systems."""
        return ()

    def datasets(self) -> tuple[Dataset, ...]:
        """Return the data sets it writes, for lineage tools; empty if other systems do not know them."""
        return ()

    @property
    def stages_in_job_dir(self) -> bool:
        """Return whether its tasks write into the job directory, from which the driver commits."""
        return False

    def why_needs_session(self) -> str:
        """Return why the query's session is needed to stage or commit; empty if tasks and a process do it.

        Then its writer stages fields as they are, and neither half uses its session for more than settings.
        """
        return "it stages a DataFrame"

    def parts(self, uid: str) -> tuple[tuple[str, Sink], ...]:
        """Return the sinks that write, with their uids: this one, unless it consists of others."""
        return ((uid, self),)

    @abstractmethod
    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Check the settings before anything starts and raise one clear error."""

    @abstractmethod
    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        """Return the writer, which stages."""

    @abstractmethod
    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Return the committer."""
