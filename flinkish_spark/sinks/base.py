"""The contract of a sink that commits exactly once (DESIGN 9).

Life of the data of one sink, in order:

1. **stage** (writer, foreachBatch): write the micro-batch durably but invisibly, flush, return
   the committables. May be called again for the same batch after a crash or a failed attempt;
   each call stages anew, and what the earlier one staged is aborted.
2. The staged file names the committables; Spark writes commits/N; the coordinator decides.
3. **commit** (committer, driver): make the committables of one decided checkpoint visible. May
   be called any number of times, by any process, for as long as there is no receipt.
4. **abort** (committer): give up committables that no decision contains. Idempotent.

What must survive a crash is in the committable, a JSON value. A writer keeps nothing between
calls that matters. Nobody concludes LOST without evidence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome
from flinkish_spark.protocol.records import Committable, TaskAck

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql import types as T

    from flinkish_spark.config import CheckpointConfig


@dataclass(frozen=True, slots=True)
class SinkContext:
    """Who a sink works for; the same for the life of a process.

    Parameters
    ----------
    job, owner_epoch
        Part of every name that the sink leaves outside.
    uid
        The sink's stable name.
    schema
        Fields of the records it gets.
    checkpoint
        Intervals, for guards.
    """

    job: JobUuid
    owner_epoch: OwnerEpoch
    uid: str
    schema: T.StructType
    checkpoint: CheckpointConfig


@dataclass(frozen=True, slots=True)
class StageRequest:
    """One micro-batch to stage.

    Parameters
    ----------
    rows
        A batch DataFrame: the control columns kind, checkpoint, channel, hash in this order, then
        the stream's fields. Barriers are among the rows; every writer task reports those it saw.
    lineage, batch
        Which micro-batch.
    block
        A number that no other micro-batch in flight has, leased until the receipt.
    count_records
        Counts the records, without the barriers; a Spark job, unless a sink of the same stream has
        counted them already. Only for writers that declare more than one pass.
    """

    rows: DataFrame
    lineage: Lineage
    batch: BatchId
    block: int
    count_records: Callable[[], int]


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a writer staged: one ack per task, and what can be committed later.

    `bytes` is the size of it, None where the system does not tell.
    """

    tasks: tuple[TaskAck, ...]
    payloads: tuple[Mapping[str, Any], ...]
    bytes: int | None = None


class SinkWriter(ABC):
    """Stages micro-batches. Lives in the user's process; its tasks run on executors."""

    #: How often it goes over the rows; above one in total, they are evaluated once and kept.
    passes = 1

    @abstractmethod
    def stage(self, request: StageRequest) -> StageResult:
        """Stage one micro-batch; everything is durable and invisible when this returns.

        Raises
        ------
        Exception
            Nothing of this attempt will be committed; the supervisor restarts or stops the job.
        """


class Committer(ABC):
    """Ends what was staged. Called only by the coordinator or the recovery, one at a time."""

    @abstractmethod
    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Commit all committables of a decided checkpoint, in the given (batch) order.

        Returns
        -------
        sequence of CommitAnswer
            One per committable. The caller repeats the call while any says RETRY.
        """

    @abstractmethod
    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Abort committables that no decision contains."""

    @abstractmethod
    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        """Return the reason for each committable, by position, that cannot be committed any more.

        Raises
        ------
        EnvironmentFault
            The system cannot be asked now; nothing is concluded.
        """

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        """Abort what this job left open and neither `kept` nor a running micro-batch names.

        Parameters
        ----------
        kept
            Committables of all sinks that are still to be decided.
        running_blocks
            Asked after the leftovers were listed: what was leased since then is not among them.

        Returns
        -------
        int
            How many leftovers were aborted.
        """
        return 0

    def why_not_superseded(self, target: CheckpointId) -> str:
        """Return why what was committed after `target` cannot be taken back; empty if it can.

        Asked before a rewind under ``Tables.RESTORE`` touches anything. The default takes nothing
        back: readers tell dead records from live ones by themselves.

        Raises
        ------
        EnvironmentFault
            The system cannot be asked now; nothing is concluded.
        """
        return ""

    def supersede(self, target: CheckpointId, lineage: Lineage) -> CommitAnswer:
        """Take back what was committed after `target`, with everything of this job in the table.

        Called only under ``Tables.RESTORE``, after the intent of the rewind that starts `lineage` is
        durable and before it is closed; so again after a crash in between. Must be idempotent per
        lineage.

        Returns
        -------
        CommitAnswer
            COMMITTED, ALREADY_COMMITTED for a repeat, RETRY to be called again, or LOST if it has
            become impossible.
        """
        return CommitAnswer(Outcome.ALREADY_COMMITTED, "nothing to take back")

    def close(self) -> None:
        """Release connections."""


class Sink(ABC):
    """What a user gives to `sink_to`: settings only, usable for several starts."""

    @property
    def topics(self) -> tuple[str, ...]:
        """Kafka topics it writes; empty for others."""
        return ()

    @property
    def needs_shim(self) -> bool:
        """Whether it writes through the JAR of this package."""
        return False

    @abstractmethod
    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Refuse what cannot work, with one clear error, before anything starts."""

    @abstractmethod
    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        """Return the staging half."""

    @abstractmethod
    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Return the committing half."""
