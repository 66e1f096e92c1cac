"""The committer of the file sink: makes files visible at a checkpoint, and deletes them at a rewind.

The order of these steps makes it exact.

1. COMMITTED: every file exists, and the record names them all.
2. PLAN: the files that readers will see, and their names. A repeated step takes the names from the plan, so
   it finds the work of the first try.
3. Small files are merged under hidden names; files that a reader or a later try needs are not touched.
4. BUILT: from here on there are only renames.
5. Renames, in the plan's order.
6. MOVED: every file has been visible. From here on the sink does not look for them again, because readers
   may take them away.
7. DONE, written by the committer; then files that are not needed any more are removed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flinkish_spark.connectors.files.buckets import BucketAssigner, values_of
from flinkish_spark.connectors.files.disk import HIDDEN, Disk, PartName, SinkFiles
from flinkish_spark.connectors.files.ledger import (
    CommittedChunks,
    Entry,
    Ledger,
    OpenPartition,
    Part,
    Plan,
    State,
)
from flinkish_spark.connectors.files.partitions import (
    FinalPartitionAction,
    PartitionCommit,
    PartitionTime,
    ProcessTime,
    ReadyPartition,
    SuccessFile,
)
from flinkish_spark.connectors.files.rolling import Chunk, Compaction, Merger, Rolling, RollOnCheckpoint, roll
from flinkish_spark.connectors.staged_ids import StagedId
from flinkish_spark.contracts.sink import Committer, CompletedCheckpoint, ShownOrder, require_ours
from flinkish_spark.core.errors import EnvironmentFault, InternalError, UnavailableError
from flinkish_spark.core.foreign_errors import describe_error, is_gateway_gone
from flinkish_spark.core.store import LocalStore, SealedObjects
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome
from flinkish_spark.protocol.timeline import NO_TIMELINE, Mark, Timeline, find_token

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


LOG = logging.getLogger(__name__)


class FilesMissingError(Exception):
    """Pending files of a decided checkpoint were deleted, probably before readers could see them."""


@dataclass(frozen=True)
class Publisher:
    """Carries out plans; any process may repeat it."""

    files: SinkFiles
    ledger: Ledger
    merger: Merger

    @property
    def disk(self) -> Disk:
        return self.merger.disk

    def publish(self, checkpoint: int, plan: Plan) -> bool:
        """Make the parts of a recorded plan visible; return False if all of them were visible before."""
        if self.ledger.has(checkpoint, Entry.MOVED):
            return False
        if not self.ledger.has(checkpoint, Entry.BUILT):
            # Nothing of the plan has been renamed yet.
            for path in (self.path_of(chunk) for part in plan.parts for chunk in part.chunks):
                if not self.disk.exists(path):
                    raise FilesMissingError(f"the pending file {path} is gone")
            self._build(checkpoint, plan)
            self.ledger.record(checkpoint, Entry.BUILT)
        self._move(plan)
        self.ledger.record(checkpoint, Entry.MOVED)
        return True

    def clear(self, checkpoint: int, plan: Plan) -> None:
        """Remove the files that a plan has merged or moved, after DONE."""
        kept = {(chunk.root, chunk.staged) for chunk in plan.open}
        for part in plan.parts:
            if part.is_merged:
                for chunk in part.chunks:
                    if (chunk.root, chunk.staged) in kept:
                        self.disk.remove(self.path_of(chunk))
        for root, staged in sorted({(c.root, c.staged) for p in plan.parts for c in p.chunks} - kept):
            self.disk.remove_tree(self._files(root).pending / staged)
        for root in sorted({c.root for p in plan.parts if p.is_merged for c in p.chunks}):
            self.disk.remove_tree(self._files(root).merged / str(checkpoint))

    def path_of(self, chunk: Chunk) -> Path:
        return self._files(chunk.root).pending / chunk.staged / chunk.name

    def _files(self, root: str) -> SinkFiles:
        return SinkFiles(Path(root), self.files.job, self.files.uid)

    def part(self, checkpoint: int, index: int, chunks: Sequence[Chunk]) -> Part:
        files = self._files(chunks[0].root)
        extension = chunks[0].extension
        name = PartName(min(chunk.checkpoint for chunk in chunks), checkpoint, index, extension)
        target = files.root / chunks[0].bucket / files.make_finished_name(name)
        merged = files.merged / str(checkpoint) / f"{index}{extension}"
        source = merged if len(chunks) > 1 else self.path_of(chunks[0])
        return Part(str(target), str(source), tuple(chunks))

    def _build(self, checkpoint: int, plan: Plan) -> None:
        merged = [part for part in plan.parts if part.is_merged]
        for root in sorted({part.chunks[0].root for part in merged}):
            folder = self._files(root).merged / str(checkpoint)
            mine = [part for part in merged if part.chunks[0].root == root]
            self.disk.make_folder(folder)
            scratch = folder / "scratch"
            merges = {Path(part.source): [*map(self.path_of, part.chunks)] for part in mine}
            self.merger.merge(merges, scratch)
            self.disk.remove_tree(scratch)

    def _move(self, plan: Plan) -> None:
        touched: set[Path] = set()
        for part in plan.parts:
            source, target = Path(part.source), Path(part.target)
            self.disk.make_folder(target.parent)
            touched |= {target.parent, source.parent}
            try:
                self.disk.rename(source, target)
            except FileNotFoundError:
                if self.disk.exists(target):
                    continue
                # The folder stays until MOVED, so its absence means that somebody removed it. If it exists
                # and the file has neither name, the rename was done before a crash, and a reader of finished
                # files has taken this one away.
                if not self.disk.exists(source.parent):
                    raise FilesMissingError(f"the folder {source.parent} of pending files is gone") from None
                LOG.warning("%s was finished before and has been taken away since, so it is left so", target)
        self.disk.sync_folders(sorted(path for path in touched if self.disk.exists(path)))


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    #: Partitions with data that is not committed yet, in order, and the complete ones among them.
    waiting: tuple[OpenPartition, ...]
    due: tuple[OpenPartition, ...]
    #: The greatest partition time so far; None before the first.
    seen_ms: int | None


def advance(
    state: State,
    fresh: Sequence[Chunk],
    completed: CompletedCheckpoint,
    setting: PartitionCommit | None,
    assigners: Sequence[BucketAssigner],
) -> PartitionProgress:
    now_ms = completed.decided_at_ms
    if setting is None:
        # Waiting partitions are kept for a later start that commits partitions again.
        return PartitionProgress(state.partitions, (), state.seen_ms)
    known = {(partition.root, partition.bucket): partition for partition in state.partitions}
    for chunk in fresh:
        if chunk.bucket:
            at = (chunk.root, chunk.bucket)
            known.setdefault(at, OpenPartition(*at, now_ms))
    waiting = tuple(known.values())
    if isinstance(setting.trigger, ProcessTime):
        seen_ms = state.seen_ms
        due = tuple(p for p in waiting if now_ms >= p.since_ms + setting.trigger.delay_ms)
    else:
        trigger = setting.trigger
        times = {p: trigger.time_ms(p.bucket, assigners) for p in waiting}
        seen = [t for t in (state.seen_ms, *times.values()) if t is not None]
        seen_ms = max(seen) if seen else None
        watermark = seen_ms if trigger.watermark is None else _ask_watermark(trigger.watermark, completed)
        ends = {p: trigger.due_ms(p.bucket, assigners) for p in waiting}
        due = tuple(
            p
            for p, due_ms in ends.items()
            if due_ms is not None and watermark is not None and watermark >= due_ms
        )
    if completed.purpose.is_final and setting.at_final is FinalPartitionAction.COMMIT:
        due = waiting
    return PartitionProgress(waiting, due, seen_ms)


def _ask_watermark(
    watermark: Callable[[CompletedCheckpoint], int | None], completed: CompletedCheckpoint
) -> int | None:
    try:
        found = watermark(completed)
    except Exception as error:
        raise UnavailableError(
            f"the watermark of PartitionTime: {describe_error(error)}",
            what_to_do="correct the function; it is called again at the next checkpoint",
        ) from error
    if found is None or (isinstance(found, int) and not isinstance(found, bool)):
        return found
    raise UnavailableError(
        f"the watermark of PartitionTime is {found!r}", what_to_do="return milliseconds since 1970, or None"
    )


_FOLDER, _KIND = "timeline", "file-sink-mark"


class FileMarks:
    """Reads and writes marks of checkpoints in the target; has no state between calls."""

    # Beside the files and not in the job directory: a mark tells whether that directory is an older copy. One
    # object per checkpoint, created if absent: if two processes commit the same id, the second finds out.

    def __init__(self, files: SinkFiles, timeline: Timeline = NO_TIMELINE) -> None:
        self._uid, self._timeline, self._store = files.uid, timeline, LocalStore(files.hidden)
        self._objects = SealedObjects(self._store, "the target of a file sink")

    def newest(self) -> Mark | None:
        newest = max(self._objects.numbers(_FOLDER), default=None)
        return None if newest is None else self._read(newest)

    def leave(self, checkpoint: int) -> None:
        """Write the mark of a checkpoint before the first of its files is visible. May be repeated."""
        ours = self._timeline.mark_of(CheckpointId(checkpoint))
        found, who = self.newest(), f"sink '{self._uid}'"
        if found is None or found.checkpoint < ours.checkpoint:
            if found is not None:
                require_ours(self._timeline, who, found, ours.checkpoint)
            value = {"checkpoint": checkpoint, "token": ours.token or ""}
            self._store.create_if_absent(f"{_FOLDER}/{checkpoint}.json", seal(_KIND, value))
            # The first mark stands, and may be another process's.
            found = self._read(checkpoint)
            if found is None:
                raise InternalError(f"the mark of checkpoint {checkpoint} of {who} is gone")
        require_ours(self._timeline, who, found, ours.checkpoint)
        for older in self._objects.numbers(_FOLDER):
            if older < checkpoint:
                self._store.delete(f"{_FOLDER}/{older}.json")

    def _read(self, checkpoint: int) -> Mark | None:
        found = self._objects.optional(f"{_FOLDER}/{checkpoint}.json", _KIND, dict)
        if found is None:
            return None
        return Mark(CheckpointId(found["checkpoint"]), find_token([str(found["token"])]))


@dataclass(frozen=True)
class CommitSettings:
    rolling: Rolling = RollOnCheckpoint()  # noqa: RUF009
    compaction: Compaction | None = None
    partition_commit: PartitionCommit | None = None
    assigners: tuple[BucketAssigner, ...] = ()


class FileCommitter(Committer):
    shown_order = ShownOrder.OF_COMMITS

    def __init__(
        self,
        settings: CommitSettings,
        files: SinkFiles,
        owner_epoch: OwnerEpoch,
        ledger: Ledger,
        merger: Merger,
        spark: SparkSession | None = None,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self._settings, self._files, self._owner_epoch, self._spark = settings, files, owner_epoch, spark
        self._ledger, self._disk = ledger, merger.disk
        self._publisher = Publisher(files, ledger, merger)
        self._marks = FileMarks(files, timeline)

    def newest_marks(self) -> Sequence[Mark]:
        mark = self._marks.newest()
        return () if mark is None else (mark,)

    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Take the checkpoint's files over, all or none; make them visible unless parts stay open."""
        # One missing file makes all of them lost, as long as none has been visible: all are then staged anew.
        if not committables:
            return ()
        answer = _answer_of(lambda: self._commit(int(checkpoint), committables))
        return [answer] if answer.outcome is Outcome.LOST else [answer] * len(committables)

    def _commit(self, checkpoint: int, committables: Sequence[Committable]) -> CommitAnswer:
        if self._ledger.newest_done() >= checkpoint:
            plan = self._ledger.plan(checkpoint)
            return CommitAnswer(Outcome.ALREADY_COMMITTED, facts={} if plan is None else plan.facts)
        # This order matters: the steps after it make files visible.
        self._marks.leave(checkpoint)
        self._catch_up(checkpoint)
        chunks = [chunk for c in committables for chunk in chunks_of(c, checkpoint)]
        recorded = self._ledger.find_committed(checkpoint)
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
        self._ledger.record(checkpoint, Entry.COMMITTED, CommittedChunks(tuple(chunks)))
        is_new = recorded is None
        if not isinstance(self._settings.rolling, RollOnCheckpoint):
            return CommitAnswer(Outcome.COMMITTED if is_new else Outcome.ALREADY_COMMITTED)
        plan = self._ledger.plan(checkpoint)
        if plan is None:
            chunks = [*self._ledger.state_before(checkpoint).open, *self._ledger.unseen(checkpoint)]
            plan = self._ledger.record_plan(checkpoint, self._roll(checkpoint, chunks, 0))
        is_new = self._publisher.publish(checkpoint, plan) or is_new
        return CommitAnswer(Outcome.COMMITTED if is_new else Outcome.ALREADY_COMMITTED, facts=plan.facts)

    def checkpoint_complete(self, completed: CompletedCheckpoint) -> CommitAnswer:
        return _answer_of(lambda: self._complete(completed))

    def _complete(self, completed: CompletedCheckpoint) -> CommitAnswer:
        checkpoint = int(completed.checkpoint)
        if self._ledger.newest_done() >= checkpoint:
            return self._finish(checkpoint, Outcome.ALREADY_COMMITTED)
        self._catch_up(checkpoint)
        before = self._ledger.state_before(checkpoint)
        unseen = self._ledger.unseen(checkpoint)
        fresh = tuple(replace(chunk, decided_at_ms=completed.decided_at_ms) for chunk in unseen)
        partition_commit, purpose = self._settings.partition_commit, completed.purpose
        progress = advance(before, fresh, completed, partition_commit, self._settings.assigners)
        plan = self._ledger.plan(checkpoint)
        if plan is None:
            due = frozenset((p.root, p.bucket) for p in progress.due)
            is_last = purpose.is_final or purpose.is_savepoint
            chunks = (*before.open, *fresh)
            plan = self._roll(checkpoint, chunks, completed.decided_at_ms, due, rolls_all=is_last)
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
        self._ledger.record(checkpoint, Entry.DONE, after)
        return self._finish(checkpoint, Outcome.COMMITTED)

    def _catch_up(self, checkpoint: int) -> None:
        """Finish older checkpoints that were committed here and never completed."""
        # After a rewind because another sink lost a checkpoint, its records here stay, unless the rewind
        # deletes them.
        for older in self._ledger.checkpoints():
            if not self._ledger.newest_done() < older < checkpoint:
                continue
            before, plan = self._ledger.state_before(older), self._ledger.plan(older)
            chunks = self._ledger.find_committed(older) or ()
            is_open = (*before.open, *chunks)
            if plan is not None:
                self._publisher.publish(older, plan)
                is_open = plan.open
            known = {(p.root, p.bucket): p for p in before.partitions}
            if self._settings.partition_commit is not None:
                for chunk in chunks:
                    known.setdefault((chunk.root, chunk.bucket), OpenPartition(chunk.root, chunk.bucket, 0))
            state = State(older, is_open, tuple(known.values()), before.seen_ms)
            self._ledger.record(older, Entry.DONE, state)
            if plan is not None:
                self._publisher.clear(older, plan)

    def _roll(
        self,
        checkpoint: int,
        chunks: Sequence[Chunk],
        now_ms: int,
        due: frozenset[tuple[str, str]] = frozenset(),
        *,
        rolls_all: bool = False,
    ) -> Plan:
        policies = self._settings.rolling, self._settings.compaction
        rolled = roll(chunks, *policies, now_ms, due, rolls_all=rolls_all)
        parts = [self._publisher.part(checkpoint, at, chunks) for at, chunks in enumerate(rolled.parts)]
        return Plan(tuple(parts), rolled.open)

    def _announce(self, partition: OpenPartition, checkpoint: int) -> None:
        path = Path(partition.root) / partition.bucket
        ready = ReadyPartition(path, values_of(partition.bucket), checkpoint)
        setting = self._settings.partition_commit
        for policy in () if setting is None else setting.policies:
            try:
                policy.commit(ready, self._spark)
            except Exception as error:
                if is_gateway_gone(error):
                    raise
                raise UnavailableError(
                    f"{type(policy).__name__} of partition {partition.bucket}: {describe_error(error)}",
                    what_to_do="correct the policy; it is called again",
                ) from error

    def _finish(self, checkpoint: int, outcome: Outcome) -> CommitAnswer:
        """Remove used files; the records of the newest checkpoint stay for repetitions."""
        plan = self._ledger.plan(checkpoint)
        if plan is not None:
            self._publisher.clear(checkpoint, plan)
        for older in self._ledger.checkpoints():
            if older < checkpoint:
                self._ledger.forget(older)
        return CommitAnswer(outcome, facts={} if plan is None else plan.facts)

    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Remove the pending files of committables that no decision contains."""
        places = [(one.payload["root"], one.payload["staged"]) for one in committables]
        return [_answer_of(partial(self._abort, *place)) for place in places]

    def _abort(self, root: str, staged: str) -> CommitAnswer:
        if staged in self._ledger.find_staged_in_use():
            return CommitAnswer(Outcome.FENCED, f"the files of {staged} were committed by somebody else")
        folder = replace(self._files, root=Path(root)).pending / staged
        if not self._disk.exists(folder):
            return CommitAnswer(Outcome.ALREADY_COMMITTED)
        self._disk.remove_tree(folder)
        return CommitAnswer(Outcome.COMMITTED)

    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        dead = {}
        with _unavailable("looking for pending files"):
            for index, committable in enumerate(committables):
                missing = self._missing(chunks_of(committable, 0))
                if missing:
                    dead[index] = f"sink '{self._files.uid}': the pending file {missing[0]} is gone"
        return dead

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        files = self._files
        with _unavailable("looking for leftovers"):
            listed = [
                folder / name
                for folder in (files.in_progress, files.pending)
                for name in self._disk.folders(folder)
            ]
        # This order matters: a block that is leased after the listing has no folder in it.
        running = running_blocks()
        in_use = {str(c.payload.get("staged", "")) for c in kept} | self._ledger.find_staged_in_use()
        removed = 0
        for folder in listed:
            staged = StagedId.parse(folder.name)
            is_ours = staged is not None and staged.is_leftover(self._owner_epoch, running)
            if not is_ours or folder.name in in_use:
                continue
            try:
                self._disk.remove_tree(folder)
            except OSError as error:
                # An abandoned task may still write into it.
                LOG.warning("%s is removed later: %s", folder, error)
                continue
            removed += 1
        return removed

    def why_not_superseded(self, target: CheckpointId) -> str:
        with _unavailable("looking for finished files"):
            for path, part in self._list_finished():
                if part.first <= int(target) < part.last:
                    return (
                        f"the file {path} of sink '{self._files.uid}' holds records from before and after "
                        f"checkpoint {target}, because parts were rolled over checkpoints"
                    )
        return ""

    def supersede(self, target: CheckpointId, lineage: Lineage) -> CommitAnswer:
        return _answer_of(lambda: self._supersede(target))

    def _supersede(self, target: CheckpointId) -> CommitAnswer:
        """Delete the finished files of superseded checkpoints, which are known by their names."""
        if why := self.why_not_superseded(target):
            return CommitAnswer(Outcome.LOST, why)
        at, finished = int(target), list(self._list_finished())
        doomed = [path for path, part in finished if part.first > at]
        touched = sorted({path.parent for path in doomed})
        # This order matters: the records go first. A crash in between then leaves files whose names say that
        # they must be deleted, and no record that would finish others.
        self._set_back(at, touched, [path for path, part in finished if part.last <= at])
        setting = self._settings.partition_commit
        policies = () if setting is None else setting.policies
        names = [policy.name for policy in policies if isinstance(policy, SuccessFile)]
        for path in (*(folder / name for folder in touched for name in names), *doomed):
            self._disk.remove(path)
        self._disk.sync_folders(touched)
        return CommitAnswer(Outcome.COMMITTED if doomed else Outcome.ALREADY_COMMITTED)

    def _set_back(self, target: int, touched: list[Path], left: list[Path]) -> None:
        """Write the state at the target under the newest checkpoint's number, then delete other records."""
        checkpoints, root = self._ledger.checkpoints(), self._files.root
        if not checkpoints:
            return
        newest = checkpoints[-1]
        state = self._ledger.state_before(newest + 1)
        # If a checkpoint was not completed, its committed chunks are in no state.
        unseen = tuple(c for c in self._ledger.unseen(newest) if c not in state.open)
        kept = tuple(chunk for chunk in (*state.open, *unseen) if chunk.checkpoint <= target)
        waiting = {(p.root, p.bucket): p for p in state.partitions}
        for bucket in (str(folder.relative_to(root)) for folder in touched if folder != root):
            waiting.setdefault((str(root), bucket), OpenPartition(str(root), bucket, 0))
        seen_ms, setting = None, self._settings.partition_commit
        if setting is not None and isinstance(setting.trigger, PartitionTime):
            buckets = {str(path.parent.relative_to(root)) for path in left}
            times = [setting.trigger.time_ms(bucket, self._settings.assigners) for bucket in buckets]
            seen_ms = max((time_ms for time_ms in times if time_ms is not None), default=None)
        self._ledger.replace_state(State(newest, kept, tuple(waiting.values()), seen_ms))
        for checkpoint in checkpoints:
            self._ledger.forget(checkpoint, keeps_state=checkpoint == newest)

    def _list_finished(self) -> Iterator[tuple[Path, PartName]]:
        for path in self._disk.files_below(self._files.root):
            part = self._files.parse_finished(path.name)
            if part is not None and HIDDEN not in path.relative_to(self._files.root).parts:
                yield path, part

    def _missing(self, chunks: Sequence[Chunk]) -> list[Path]:
        paths = (self._publisher.path_of(chunk) for chunk in chunks)
        return [path for path in paths if not self._disk.exists(path)]


def chunks_of(committable: Committable, checkpoint: int) -> list[Chunk]:
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
        what_to_do = "check the disk; the job tries again"
        raise UnavailableError.from_os_error(error, f"{what} failed", what_to_do=what_to_do) from error


def _answer_of(act: Callable[[], CommitAnswer]) -> CommitAnswer:
    """Return the answer of a call; RETRY for an error that may pass: a full disk, a failed Spark job."""
    from pyspark.errors import PySparkException

    try:
        return act()
    except FilesMissingError as gone:
        return CommitAnswer(Outcome.LOST, str(gone))
    except FileNotFoundError as error:
        return CommitAnswer(Outcome.RETRY, f"a folder changed meanwhile: {error}")
    except (OSError, PySparkException) as error:
        if is_gateway_gone(error):
            raise
        return CommitAnswer(
            Outcome.RETRY, str(error) if isinstance(error, OSError) else describe_error(error)
        )
    except EnvironmentFault as fault:
        if not (fault.restartable or isinstance(fault.__cause__, OSError)):
            raise
        return CommitAnswer(Outcome.RETRY, str(fault))
