"""Micro-batches of the drop-in sink as checkpoints of a job without barriers and coordinator.

A plain Spark query commits per micro-batch. Spark plans an attempt, its tasks stage, the driver commits, and
Spark writes commits/N; after a crash in between, Spark runs micro-batch N again over the same offsets. So
the folder beside Spark's checkpoint is a job directory, with what jobs have in theirs, and these rules:

- Every attempt takes the next checkpoint id. At most one attempt of a micro-batch is decided COMMIT.
- Whoever does not go on right behind a confirmed attempt of its own driver takes the sink over: a new owner
  epoch, all open ids sealed with ABORT. A zombie can decide nothing, and its transactional ids are others.
- An attempt of a micro-batch that is decided already finishes the recorded commit and is given up.
- What is proven to be lost of a decided micro-batch is replaced by what a later attempt has staged, if it is
  the same, as in a job's replay (:mod:`flinkish_spark.protocol.replay`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pyspark.sql.types import StructType

from flinkish_spark.checkpoint.decision_point import DeadCommittableError, decide
from flinkish_spark.checkpoint.ownership import Ownership, take_over
from flinkish_spark.connectors.kafka.client.marks import KafkaMarks
from flinkish_spark.connectors.kafka.client.transactions import KafkaCommittable, TransactionClient
from flinkish_spark.connectors.kafka.writer import KafkaCommitter
from flinkish_spark.contracts.sink import SinkContext
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.errors import (
    AnotherTimelineError,
    BrokerUnavailableError,
    CommittableLostError,
    FencedError,
    FlinkishError,
    JobDirError,
)
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.steps import Observer, Step
from flinkish_spark.core.store import CreateResult, LocalStore
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.decisions import Decision, Receipt, TriggerRecord, Verdict
from flinkish_spark.protocol.ids import (
    BatchId,
    CheckpointId,
    CheckpointPurpose,
    JobUuid,
    OwnerEpoch,
    TransactionalId,
)
from flinkish_spark.protocol.lineage import FIRST_LINEAGE
from flinkish_spark.protocol.micro_batches import OFFSETS
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome, SinkAck, StagedBatch, TaskAck
from flinkish_spark.protocol.replay import CannotReplay, Restaged, RestagedEpoch, plan_replay, restage
from flinkish_spark.protocol.retention import Part

LOG = logging.getLogger(__name__)
FOLDER = "flinkish-kafka"
#: The only sink, as records and marks name it.
SINK = "micro-batches"
#: An owner has one micro-batch at a time, so its transactional ids have one block.
_BLOCK = 1
#: The steps of a micro-batch, in order; SINK_COMMIT is one transaction's.
STEPS = (Step.TRIGGER, Step.DECISION, Step.SINK_COMMIT, Step.RECEIPT)
#: A fact of a checkpoint that a full refresh has replaced, and the note of an owner's driver.
_GIVEN_UP, _DRIVER = "given-up", "driver"
#: How many attempts keep their files. Spark runs only the newest micro-batch again; the rest are for people.
_KEPT = 20
_CLOCK = SystemClock()


def sink_dir(checkpoint_location: Path) -> JobDir:
    return JobDir(LocalStore(checkpoint_location / FOLDER))


def uuid_of(sink: JobDir) -> JobUuid:
    """Return the uuid of a sink, made at the first call."""
    return sink.known_uuid() or sink.read_or_create_job({})[0]


@dataclass(frozen=True, slots=True)
class Lease:
    """An attempt that was planned: the checkpoint id is its number."""

    sink: JobUuid
    owner: OwnerEpoch
    attempt: CheckpointId

    @property
    def transactional_ids(self) -> str:
        """Return the prefix of the ids of its tasks."""
        return TransactionalId.prefix(self.sink, self.owner, _BLOCK)

    def staged(
        self, batch: BatchId, tasks: Sequence[TaskAck], payloads: Sequence[Mapping[str, Any]]
    ) -> StagedBatch:
        """Return what its tasks staged."""
        acks = (SinkAck(SINK, tuple(tasks)),)
        committables = tuple(Committable(SINK, payload) for payload in payloads)
        return StagedBatch(FIRST_LINEAGE, batch, self.owner, int(self.attempt), acks, committables, (_BLOCK,))


@dataclass(frozen=True, slots=True)
class _Loss:
    #: Of the first committable that cannot be committed; none behind it is.
    position: int
    answer: CommitAnswer


class _Watched:
    """The client of transactions, each of whose commits is a step."""

    def __init__(self, client: TransactionClient, observer: Observer) -> None:
        self._client, self._observer = client, observer

    def commit(self, committable: KafkaCommittable) -> CommitAnswer:
        self._observer.before(Step.SINK_COMMIT, committable.transactional_id)
        answer = self._client.commit(committable)
        self._observer.after(Step.SINK_COMMIT, committable.transactional_id)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class MicroBatchCommits:
    """The driver's side of one drop-in sink."""

    def __init__(
        self,
        checkpoint_location: Path,
        client: TransactionClient,
        observer: Observer,
        driver: str,
        marks: KafkaMarks | None = None,
    ) -> None:
        self._spark_checkpoint, self._dir = checkpoint_location, sink_dir(checkpoint_location)
        self._client = cast(TransactionClient, _Watched(client, observer))
        self._observer, self._driver, self._marks = observer, driver, marks

    def plan(self) -> Lease:
        """Take the next attempt; before that take the sink over, unless this driver just goes on."""
        self._observer.before(Step.TRIGGER, "")
        owner = self._dir.newest_owner()
        # The transactional ids of an attempt that was cut off are given up for ever, with its owner: its
        # tasks may still be alive, and would fence, or be fenced by, their successors.
        if not self._is_mine(owner) or self._dir.receipt(self._newest()) is None:
            owner = self._take_over().epoch
        if self._dir.recorded(_GIVEN_UP) is not None:
            raise FencedError(
                "this checkpoint was given up by a full refresh of its flow",
                why="a newer checkpoint of the flow is beside it, and has ended what was open here",
                what_to_do="let the pipeline use the newest one; if that was deleted, refresh the flow fully",
            )
        attempt = self._newest().next()
        trigger = TriggerRecord(attempt, owner, CheckpointPurpose.PERIODIC, _CLOCK.wall_ms())
        if self._dir.create_trigger(trigger) is CreateResult.EXISTS:
            raise FencedError(
                f"attempt {attempt} was taken by another driver",
                why="two queries use the same checkpointLocation at the same time",
                what_to_do="stop one of them",
            )
        self._observer.after(Step.TRIGGER, str(attempt))
        return Lease(uuid_of(self._dir), owner, attempt)

    def _newest(self) -> CheckpointId:
        return max(self._dir.decided_ids(), default=CheckpointId(0))

    def _is_mine(self, owner: OwnerEpoch) -> bool:
        return self._dir.owner_note(owner, _DRIVER).strip() == self._driver

    def _take_over(self) -> Ownership:
        """Fence earlier drivers, finish what they decided, abort all else."""
        ownership = take_over(self._dir, _CLOCK)
        committer, decided = self._committer(ownership), self._dir.newest_commit()
        self._require_ours(ownership, committer, decided)
        kept: Sequence[Committable] = ()
        if decided is not None and self._dir.receipt(decided.checkpoint) is None:
            if self._finish(ownership, committer, decided) is None:
                self._confirm(ownership, decided)
            else:
                kept = _committables(decided)
        committer.sweep(kept, frozenset)
        # This order matters: whoever finds this note goes on without all that is above.
        self._dir.note_owner(ownership.epoch, _DRIVER, self._driver)
        return ownership

    def give_up(self) -> None:
        """End this sink for good: finish what is decided, abort all else, let nobody plan here again."""
        if self._newest() == CheckpointId(0):
            return
        # This order matters: who takes over from now on finds it, and whoever did before is fenced.
        self._dir.recorded_once(_GIVEN_UP, {"why": "full refresh"})
        self._take_over()

    def commit(self, staged: StagedBatch) -> None:
        """Decide and commit a micro-batch, or finish it if an earlier attempt decided it."""
        ownership = Ownership(self._dir, staged.owner_epoch, self._dir.timeline())
        committer, newest = self._committer(ownership), self._dir.newest_commit()
        if newest is None or newest.batch < staged.batch:
            decided = self._decide(ownership, committer, staged, newest)
        elif newest.batch > staged.batch:
            raise JobDirError(
                f"Spark runs batch {staged.batch}, although batch {newest.batch} is confirmed",
                why="Spark's checkpoint was set back or replaced, and its rows would be written twice",
                what_to_do="use a new checkpointLocation, or restore the whole folder from one backup",
            )
        else:
            if _positions(self._offsets_of(newest.batch)) != _positions(newest.offsets_text):
                raise JobDirError(
                    f"batch {newest.batch} was committed with other offsets than Spark runs it with now",
                    why="Spark's checkpoint was deleted or replaced, but not the folder flinkish-kafka in it",
                    what_to_do="use a new checkpointLocation, or delete the whole checkpoint",
                )
            if self._dir.receipt(newest.checkpoint) is not None:
                # Spark died right before commits/N. The handles are not asked again: their ids have
                # other transactions by now, and the log may no longer tell what became of the old ones.
                self.abort(staged)
                return
            decided = self._repeat(ownership, committer, staged, newest)
        loss = self._finish(ownership, committer, decided)
        if loss is not None:
            raise _lost(decided, loss, "the query must run the batch again to replace it")
        # This order matters: once the receipt is there, the next attempt may use the same ids.
        self._sweep(committer, _committables(decided))
        self._confirm(ownership, decided)
        self._prune(committer, decided)

    def _decide(
        self, ownership: Ownership, committer: KafkaCommitter, staged: StagedBatch, newest: Decision | None
    ) -> Decision:
        self._require_ours(ownership, committer, newest)
        dead = committer.why_dead(staged.committables)
        if dead:
            self.abort(staged)
            raise DeadCommittableError(
                f"staged data of batch {staged.batch} is gone before its decision",
                why=next(iter(dead.values())),
                what_to_do="start the query again, nothing is lost; if a micro-batch takes longer than "
                "kafka.transaction.timeout.ms, raise that or set maxOffsetsPerTrigger",
            )
        decision = Decision(
            CheckpointId(staged.attempt),
            Verdict.COMMIT,
            ownership.epoch,
            _CLOCK.wall_ms(),
            batches=(staged,),
            offsets_text=self._offsets_of(staged.batch),
            uids=(SINK,),
        )
        again = "start the query again: what was staged is aborted, and the micro-batch runs anew"
        decide(decision, ownership, _CLOCK, self._observer, again)
        return decision

    def _repeat(
        self, ownership: Ownership, committer: KafkaCommitter, staged: StagedBatch, decided: Decision
    ) -> Decision:
        """Finish the recorded commit; give up this attempt but for what replaces what is lost."""
        loss = self._finish(ownership, committer, decided)
        if loss is None:
            self.abort(staged)
            return decided
        plan, found = _replacement(committer, decided, loss, staged)
        if isinstance(found, CannotReplay):
            self.abort(staged)
            raise _lost(decided, loss, f"it cannot be replaced: {found.why}")
        # This order matters: an earlier owner that wakes up now still holds the decision as it was. What is
        # aborted cannot be committed by it, so no row can become visible twice.
        for answer in committer.abort(plan):
            if not answer.outcome.is_done:
                raise _not_now(decided, answer)
        known = self._dir.restaged(decided.checkpoint)
        number, now_ms = 1 if known is None else known.number + 1, _CLOCK.wall_ms()
        restaged = RestagedEpoch(
            decided.checkpoint, number, ownership.epoch, now_ms, SINK, loss.answer.detail, found.batches
        )
        ownership.check()
        # A second decision point: what was staged now stands for what is lost from here on.
        if self._dir.create_restaged(restaged) is CreateResult.EXISTS:
            raise FencedError(
                f"batch {decided.batch} was staged again by another driver at the same time",
                what_to_do="let this one end; nothing of it is visible",
            )
        reason = f"it stands for what attempt {decided.checkpoint} has lost"
        self._seal(ownership.epoch, staged.attempt, reason)
        return restaged.apply(decided)

    def abort(self, staged: StagedBatch | None) -> None:
        """Give an attempt up, unless it is decided: Spark calls it behind a failed commit, too."""
        if staged is not None:
            owner, attempt = staged.owner_epoch, staged.attempt
        else:
            owner, attempt = self._dir.newest_owner(), int(self._newest())
            if not self._is_mine(owner) or not attempt:
                return
        if self._seal(owner, attempt, "the attempt failed") is Verdict.COMMIT:
            return
        newest = self._dir.newest_commit()
        is_open = newest is not None and self._dir.receipt(newest.checkpoint) is None
        # What this attempt has staged may stand for what was lost.
        kept = _committables(newest) if newest is not None and is_open else ()
        self._sweep(self._committer(Ownership(self._dir, owner)), kept)

    def _seal(self, owner: OwnerEpoch, attempt: int, reason: str) -> Verdict:
        """Decide that an attempt is given up; return what is decided."""
        abort = Decision(CheckpointId(attempt), Verdict.ABORT, owner, _CLOCK.wall_ms(), reason=reason)
        self._dir.create_decision(abort)
        found = self._dir.first_decision(abort.checkpoint)
        return abort.verdict if found is None else found.verdict

    def _committer(self, ownership: Ownership) -> KafkaCommitter:
        folder = StoreSpec(str(self._spark_checkpoint / FOLDER))
        whose = (uuid_of(self._dir), ownership.epoch, SINK, StructType(), CheckpointConfig(), SINK)
        context = SinkContext(*whose, folder, _CLOCK, ownership.timeline)
        return KafkaCommitter(self._client, context, self._marks)

    def _require_ours(self, ownership: Ownership, committer: KafkaCommitter, newest: Decision | None) -> None:
        """Raise AnotherTimelineError if the brokers know an attempt that is not committed here."""
        upto = CheckpointId(0) if newest is None else newest.checkpoint
        for mark in committer.newest_marks():
            if ownership.timeline.why_not_ours(mark, upto):
                raise _another_timeline(mark.checkpoint, upto)

    def _finish(self, ownership: Ownership, committer: KafkaCommitter, decided: Decision) -> _Loss | None:
        """Commit a decided micro-batch as a whole; repeating it changes nothing."""
        ownership.check()
        try:
            answers = committer.commit(decided.checkpoint, _committables(decided))
        except AnotherTimelineError as error:
            raise _another_timeline(error.facts["found"], decided.checkpoint) from error
        for position, answer in enumerate(answers):
            if answer.outcome is Outcome.LOST:
                return _Loss(position, answer)
            if not answer.outcome.is_done:
                raise _not_now(decided, answer)
        return None

    def _confirm(self, ownership: Ownership, decided: Decision) -> None:
        self._observer.before(Step.RECEIPT, str(decided.batch))
        self._dir.create_receipt(Receipt(decided.checkpoint, ownership.epoch, _CLOCK.wall_ms()))
        self._observer.after(Step.RECEIPT, str(decided.batch))

    def _offsets_of(self, batch: BatchId) -> str:
        try:
            return (self._spark_checkpoint / OFFSETS / str(batch)).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise JobDirError(
                f"Spark's checkpoint in {self._spark_checkpoint} has no offsets of batch {batch}",
                why="the option checkpointLocation of the sink is not where Spark keeps its checkpoint",
                what_to_do="give the same absolute path as the query's checkpointLocation; where Spark's "
                "default file system is no disk (fs.defaultFS), both with file:// in front",
            ) from None

    def _sweep(self, committer: KafkaCommitter, kept: Sequence[Committable]) -> None:
        """Abort all else that tasks of this owner and earlier ones left; a failure costs time only."""
        try:
            committer.sweep(kept, frozenset)
        except FlinkishError as error:
            LOG.warning("leftovers are swept by a later attempt: %s", error)

    def _prune(self, committer: KafkaCommitter, confirmed: Decision) -> None:
        """Delete what belongs to attempts long past."""
        ids = self._dir.decided_ids()
        if len(ids) <= _KEPT + _KEPT // 2:
            return
        # The newest commit may lie far below the newest id: many attempts may have died before one of them
        # finished it. Without its files its micro-batch would be decided anew, and without the seals above
        # it a zombie could decide one of those.
        oldest_kept = min(ids[-_KEPT], confirmed.checkpoint)
        gone = [one for one in ids if one < oldest_kept]
        try:
            for part in (Part.TRIGGER, Part.DECISION, Part.RECEIPT):
                self._dir.delete_all(f"checkpoints/{one}/{part.value}" for one in gone)
            self._dir.forget_restaged(gone)
            # The newest mark may be older, of a query that had no rows since.
            marked = (mark.checkpoint for mark in committer.newest_marks())
            self._dir.forget_stretches(min([oldest_kept, *marked]))
        except FlinkishError as error:
            LOG.warning("old files of the sink are deleted by a later batch: %s", error)


def _committables(decided: Decision) -> tuple[Committable, ...]:
    return decided.batches[0].committables


def _positions(offsets_text: str) -> list[str]:
    """Return an entry of Spark's offset log without its metadata, which another start may change."""
    version, _, *positions = offsets_text.strip().split("\n")
    return [version, *positions]


def _lost(decided: Decision, loss: _Loss, what_now: str) -> CommittableLostError:
    batch = decided.batches[0]
    rows = sum(KafkaCommittable.from_json(one.payload).records for one in batch.committables[loss.position :])
    return CommittableLostError(
        f"batch {batch.batch} was decided, and {rows} of its {batch.acks[0].rows} rows are lost; {what_now}",
        why=loss.answer.detail,
        what_to_do="if it cannot be replaced, write the missing rows by hand: those of the offsets in "
        f"offsets/{batch.batch} of Spark's checkpoint; then call "
        f"flinkish_spark.connectors.kafka.format.writer.settle(checkpoint_location, {batch.batch})",
        batch=int(batch.batch),
        rows=rows,
    )


def _replacement(
    committer: KafkaCommitter, decided: Decision, loss: _Loss, again: StagedBatch
) -> tuple[Sequence[Committable], Restaged | CannotReplay]:
    """Return what is lost, and the micro-batch with what was staged again in its place."""
    if not loss.answer.is_proven_aborted:
        why = "the proof of what became of it is gone, so its rows may have been visible already"
        return (), CannotReplay(why)
    plan = plan_replay(decided, SINK, loss.position, committer.task_of)
    if isinstance(plan, CannotReplay):
        return (), plan
    found = restage(decided, plan, {decided.batch: again}, committer.task_of)
    if isinstance(found, Restaged):
        dead = committer.why_dead([one for one in again.committables if one not in found.surplus])
        if dead:
            return (), CannotReplay(next(iter(dead.values())))
    return plan.lost, found


def _not_now(decided: Decision, answer: CommitAnswer) -> FlinkishError:
    if answer.outcome is Outcome.FENCED:
        return FencedError(f"batch {decided.batch} is being committed by another driver", why=answer.detail)
    return BrokerUnavailableError(
        f"batch {decided.batch} cannot be committed now",
        why=answer.detail,
        what_to_do="start the query again when the brokers answer; the commit is recorded and "
        "will be finished",
    )


def _another_timeline(found: object, newest: CheckpointId) -> AnotherTimelineError:
    return AnotherTimelineError(
        f"the topic holds attempt {found} of this query, which its checkpoint has not committed; "
        f"its newest is {newest if newest.value else 'none'}",
        why="the checkpoint is an older copy of itself, or a copy of it runs elsewhere",
        what_to_do="put the newest checkpoint back, or stop the other query. To go on from this one "
        "all the same, delete the folder flinkish-kafka in it: what was written behind it is written again",
        participant="the topic",
        found=found,
    )
