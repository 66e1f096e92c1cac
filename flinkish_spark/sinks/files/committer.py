"""The committing half: what a checkpoint contains, when its files become visible, what is swept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flinkish_spark.bridge import is_gateway_gone, said
from flinkish_spark.errors import EnvironmentFault
from flinkish_spark.protocol.ids import CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome
from flinkish_spark.protocol.records import Committable
from flinkish_spark.protocol.timeline import NO_TIMELINE, Mark, Timeline
from flinkish_spark.sinks.base import Committer, CompletedCheckpoint, ShownOrder
from flinkish_spark.sinks.files.buckets import BucketAssigner, values_of
from flinkish_spark.sinks.files.disk import Disk
from flinkish_spark.sinks.files.ledger import Entry, Ledger, OpenPartition, Plan, State
from flinkish_spark.sinks.files.marks import FileMarks
from flinkish_spark.sinks.files.merging import Merger
from flinkish_spark.sinks.files.names import SinkFiles, StagedId
from flinkish_spark.sinks.files.partitions import PartitionCommit, ReadyPartition
from flinkish_spark.sinks.files.progress import PartitionProgress, advance
from flinkish_spark.sinks.files.publishing import FilesGone, Publisher
from flinkish_spark.sinks.files.rolling import Chunk, Compaction, RollAll, Rolling, RollOnCheckpoint, roll
from flinkish_spark.sinks.files.superseding import Superseder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CommitSettings:
    """When files become visible, and what happens to complete partitions."""

    rolling: Rolling = RollOnCheckpoint()  # noqa: RUF009
    compaction: Compaction | None = None
    partition_commit: PartitionCommit | None = None
    assigners: tuple[BucketAssigner, ...] = ()


@dataclass(frozen=True)
class CommitterParts:
    """What a committer works with; tests put faults into them."""

    files: SinkFiles
    owner_epoch: OwnerEpoch
    ledger: Ledger
    disk: Disk
    merger: Merger
    spark: SparkSession | None = None
    timeline: Timeline = NO_TIMELINE


class TargetUnavailable(EnvironmentFault):
    """The target's file system does not answer now; nothing is concluded."""

    restartable = True


class _Retry(Exception):
    """The system cannot do it now."""


class FileCommitter(Committer):
    """Commits files; see :mod:`flinkish_spark.sinks.files.publishing` for the order of the steps.

    Parameters
    ----------
    parts
        With names, records and disk.
    """

    shown_order = ShownOrder.OF_COMMITS

    def __init__(self, settings: CommitSettings, parts: CommitterParts) -> None:
        self._settings, self._parts = settings, parts
        self._ledger, self._disk = parts.ledger, parts.disk
        self._publisher = Publisher(parts.files, parts.ledger, parts.disk, parts.merger)
        self._marks = FileMarks(parts.files, parts.timeline)

    def newest_marks(self) -> Sequence[Mark]:
        """Look beside the files."""
        mark = self._marks.newest()
        return () if mark is None else (mark,)

    # -- commit ---------------------------------------------------------------------------------
    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Take the checkpoint's files over, all or none; make them visible unless parts stay open.

        One file that is gone makes all of them lost, as long as none has been visible: what was staged is
        then staged anew as a whole.
        """
        if not committables:
            return ()
        try:
            with _retrying():
                answer = self._commit(int(checkpoint), committables)
        except FilesGone as gone:
            return [CommitAnswer(Outcome.LOST, str(gone))]
        except _Retry as retry:
            answer = CommitAnswer(Outcome.RETRY, str(retry))
        return [answer] if answer.outcome is Outcome.LOST else [answer] * len(committables)

    def _commit(self, checkpoint: int, committables: Sequence[Committable]) -> CommitAnswer:
        if self._ledger.newest_done() >= checkpoint:
            plan = self._ledger.plan(checkpoint)
            return CommitAnswer(Outcome.ALREADY_COMMITTED, facts={} if plan is None else plan.facts)
        # This order matters: what follows makes files visible.
        self._marks.leave(checkpoint)
        self._catch_up(checkpoint)
        chunks = [chunk for c in committables for chunk in chunks_of(c, checkpoint)]
        recorded = self._ledger.committed(checkpoint)
        if recorded is not None and {c.staged for c in recorded} != {c.staged for c in chunks}:
            detail = f"checkpoint {checkpoint} was committed with other files by somebody else"
            return CommitAnswer(Outcome.FENCED, detail)
        if not self._ledger.has(checkpoint, Entry.BUILT):
            missing = self._missing(chunks)
            if missing:
                # Nothing was renamed without BUILT, so no reader has seen a file of this checkpoint.
                self._ledger.forget(checkpoint)
                detail = f"{len(missing)} pending files are gone, first {missing[0]}"
                return CommitAnswer(Outcome.LOST, detail, is_proven_aborted=True)
        self._ledger.record_committed(checkpoint, chunks)
        is_new = recorded is None
        facts: Mapping[str, int] = {}
        if isinstance(self._settings.rolling, RollOnCheckpoint):
            plan = self._planned(checkpoint)
            is_new = self._publisher.publish(checkpoint, plan) or is_new
            facts = plan.facts
        return CommitAnswer(Outcome.COMMITTED if is_new else Outcome.ALREADY_COMMITTED, facts=facts)

    def _planned(self, checkpoint: int) -> Plan:
        """Return the plan of a checkpoint that makes everything visible; record it if there is none."""
        plan = self._ledger.plan(checkpoint)
        if plan is not None:
            return plan
        chunks = (*self._ledger.state_before(checkpoint).open, *self._ledger.unseen(checkpoint))
        rolled = roll(chunks, self._settings.rolling, self._settings.compaction, 0)
        return self._ledger.record_plan(checkpoint, self._publisher.plan_of(checkpoint, rolled))

    # -- complete -------------------------------------------------------------------------------
    def checkpoint_complete(self, completed: CompletedCheckpoint) -> CommitAnswer:
        """Finish the parts whose time has come, then commit complete partitions."""
        try:
            with _retrying():
                return self._complete(completed)
        except FilesGone as gone:
            return CommitAnswer(Outcome.LOST, str(gone))
        except _Retry as retry:
            return CommitAnswer(Outcome.RETRY, str(retry))

    def _complete(self, completed: CompletedCheckpoint) -> CommitAnswer:
        checkpoint = int(completed.checkpoint)
        if self._ledger.newest_done() >= checkpoint:
            return self._finish(checkpoint, Outcome.ALREADY_COMMITTED)
        self._catch_up(checkpoint)
        before = self._ledger.state_before(checkpoint)
        unseen = self._ledger.unseen(checkpoint)
        fresh = tuple(replace(chunk, decided_at_ms=completed.decided_at_ms) for chunk in unseen)
        progress = advance(
            before, fresh, completed, self._settings.partition_commit, self._settings.assigners
        )
        plan = self._ledger.plan(checkpoint) or self._roll((*before.open, *fresh), progress, completed)
        if plan.parts:
            self._marks.leave(checkpoint)
            plan = self._ledger.record_plan(checkpoint, plan)
            self._publisher.publish(checkpoint, plan)
        is_open = {(chunk.root, chunk.bucket) for chunk in plan.open}
        ready = [p for p in progress.due if (p.root, p.bucket) not in is_open]
        for partition in ready:
            self._announce(partition, checkpoint)
        waiting = tuple(p for p in progress.waiting if p not in ready)
        after = State(checkpoint, plan.open, waiting, progress.seen_ms)
        if not fresh and not plan.parts and replace(after, checkpoint=before.checkpoint) == before:
            return CommitAnswer(Outcome.ALREADY_COMMITTED, "nothing was due")
        self._ledger.record_done(after)
        return self._finish(checkpoint, Outcome.COMMITTED)

    def _catch_up(self, checkpoint: int) -> None:
        """Finish what older checkpoints left that were committed here and never completed.

        A rewind leaves a checkpoint behind that another sink has lost. Its records stay, unless the
        rewind takes them back.
        """
        for older in self._ledger.checkpoints():
            if not self._ledger.newest_done() < older < checkpoint:
                continue
            before, plan = self._ledger.state_before(older), self._ledger.plan(older)
            chunks = self._ledger.committed(older) or ()
            is_open = (*before.open, *chunks)
            if plan is not None:
                self._publisher.publish(older, plan)
                is_open = plan.open
            known = {(p.root, p.bucket): p for p in before.partitions}
            if self._settings.partition_commit is not None:
                for chunk in chunks:
                    known.setdefault((chunk.root, chunk.bucket), OpenPartition(chunk.root, chunk.bucket, 0))
            self._ledger.record_done(State(older, is_open, tuple(known.values()), before.seen_ms))
            if plan is not None:
                self._publisher.clear(older, plan)

    def _roll(
        self, chunks: Sequence[Chunk], progress: PartitionProgress, completed: CompletedCheckpoint
    ) -> Plan:
        purpose = completed.purpose
        everything = RollAll.ALL if purpose.is_final or purpose.is_savepoint else RollAll.BY_LIMITS
        due = frozenset((p.root, p.bucket) for p in progress.due)
        rolled = roll(
            chunks,
            self._settings.rolling,
            self._settings.compaction,
            completed.decided_at_ms,
            due,
            everything,
        )
        return self._publisher.plan_of(int(completed.checkpoint), rolled)

    def _announce(self, partition: OpenPartition, checkpoint: int) -> None:
        path = Path(partition.root) / partition.bucket
        ready = ReadyPartition(path, values_of(partition.bucket), checkpoint)
        setting = self._settings.partition_commit
        for policy in () if setting is None else setting.policies:
            try:
                policy.commit(ready, self._parts.spark)
            except Exception as error:
                if is_gateway_gone(error):
                    raise
                raise _Retry(
                    f"{type(policy).__name__} of partition {partition.bucket}: {said(error)}"
                ) from error

    def _finish(self, checkpoint: int, outcome: Outcome) -> CommitAnswer:
        """Remove what is used up; the records of the newest checkpoint stay for repetitions."""
        plan = self._ledger.plan(checkpoint)
        if plan is not None:
            self._publisher.clear(checkpoint, plan)
        for older in self._ledger.checkpoints():
            if older < checkpoint:
                self._ledger.forget(older)
        return CommitAnswer(outcome, facts={} if plan is None else plan.facts)

    # -- abort ----------------------------------------------------------------------------------
    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Remove the pending files of committables that no decision contains."""
        answers = []
        for committable in committables:
            staged = str(committable.payload["staged"])
            try:
                with _retrying():
                    answers.append(self._abort(Path(committable.payload["root"]), staged))
            except _Retry as retry:
                answers.append(CommitAnswer(Outcome.RETRY, str(retry)))
        return answers

    def _abort(self, root: Path, staged: str) -> CommitAnswer:
        if staged in self._ledger.staged_in_use():
            return CommitAnswer(Outcome.FENCED, f"the files of {staged} were committed by somebody else")
        files = replace(self._parts.files, root=root)
        if not self._disk.exists(files.pending / staged):
            return CommitAnswer(Outcome.ALREADY_COMMITTED)
        self._disk.remove_tree(files.pending / staged)
        return CommitAnswer(Outcome.COMMITTED)

    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        """Find committables of which a file is gone."""
        dead = {}
        with _unavailable("looking for pending files"):
            for index, committable in enumerate(committables):
                missing = self._missing(chunks_of(committable, 0))
                if missing:
                    dead[index] = f"sink '{self._parts.files.uid}': the pending file {missing[0]} is gone"
        return dead

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        """Remove folders of micro-batches that nobody will commit."""
        files = self._parts.files
        with _unavailable("looking for leftovers"):
            listed = [
                (folder, staged)
                for folder in (files.in_progress, files.pending)
                for name in self._disk.folders(folder)
                if (staged := StagedId.parse(name)) is not None
            ]
        # This order matters: a block that is leased after the listing has nothing in it.
        running = running_blocks()
        in_use = {str(c.payload.get("staged", "")) for c in kept} | self._ledger.staged_in_use()
        removed = 0
        for folder, staged in listed:
            mine = staged.owner_epoch == self._parts.owner_epoch
            newer = staged.owner_epoch > self._parts.owner_epoch
            if newer or (mine and staged.block in running) or str(staged) in in_use:
                continue
            try:
                self._disk.remove_tree(folder / str(staged))
            except OSError as error:
                # A task that was given up may still write into it.
                LOG.warning("%s is removed later: %s", folder / str(staged), error)
                continue
            removed += 1
        return removed

    # -- rewind ---------------------------------------------------------------------------------
    def why_not_superseded(self, target: CheckpointId) -> str:
        """Look for files that hold records from before and after the target."""
        with _unavailable("looking for finished files"):
            return self._superseder().why_not(int(target))

    def supersede(self, target: CheckpointId, lineage: Lineage) -> CommitAnswer:
        """Delete the files that were finished after the target, and forget what is still open of it."""
        try:
            with _retrying():
                return self._superseder().supersede(int(target))
        except _Retry as retry:
            return CommitAnswer(Outcome.RETRY, str(retry))

    def _superseder(self) -> Superseder:
        return Superseder(self._parts.files, self._ledger, self._disk, self._settings)

    def _missing(self, chunks: Sequence[Chunk]) -> list[Path]:
        paths = (self._publisher.path_of(chunk) for chunk in chunks)
        return [path for path in paths if not self._disk.exists(path)]


def chunks_of(committable: Committable, checkpoint: int) -> list[Chunk]:
    """Return the files that a committable names."""
    payload = committable.payload
    return [
        Chunk(payload["root"], payload["staged"], f["name"], int(f["bytes"]), f["rows"], checkpoint)
        for f in payload["files"]
    ]


@contextmanager
def _unavailable(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what_to_do = "see to the disk; the job asks again"
        raise TargetUnavailable.of_system(error, f"{what} failed", what_to_do=what_to_do) from error


@contextmanager
def _retrying() -> Iterator[None]:
    """Turn what may pass into :class:`_Retry`: a full disk, a Spark job that failed."""
    from pyspark.errors import PySparkException

    try:
        yield
    except FileNotFoundError as error:
        raise _Retry(f"a folder changed meanwhile: {error}") from error
    except OSError as error:
        if is_gateway_gone(error):
            raise
        raise _Retry(str(error)) from error
    except PySparkException as error:
        if is_gateway_gone(error):
            raise
        raise _Retry(said(error)) from error
    except EnvironmentFault as fault:
        if not (fault.restartable or isinstance(fault.__cause__, OSError)):
            raise
        raise _Retry(str(fault)) from fault
