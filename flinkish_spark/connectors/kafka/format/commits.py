"""Commits of the drop-in sink: each micro-batch is a checkpoint, without barriers and coordinator.

A plain Spark query commits per micro-batch. Spark plans an attempt, its tasks stage, the driver commits, and
Spark writes commits/N; after a crash in between, Spark runs micro-batch N again over the same offsets. The
sink keeps a job directory in Spark's checkpoint, with these rules:

- Every attempt takes the next checkpoint id. At most one attempt of a micro-batch is decided COMMIT.
- A driver that does not directly continue its own confirmed attempt takes the sink over: it gets a new owner
  epoch and seals all open ids with ABORT. A zombie can decide nothing, and has other transactional ids.
- A new attempt of a decided micro-batch finishes the recorded commit, and is then aborted.
- If data of a decided micro-batch is proven lost, the same data staged by a later attempt replaces it, as in
  a job's replay (:mod:`flinkish_spark.protocol.replay`).
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
from flinkish_spark.protocol.replay import CannotReplay, RestagedEpoch, RestageResult, plan_replay, restage
from flinkish_spark.protocol.retention import CheckpointPart

LOG = logging.getLogger(__name__)
FOLDER = "flinkish-kafka"
#: Uid of the only sink in records and marks.
SINK = "micro-batches"
#: Block of all transactional ids: an owner has one micro-batch at a time.
_BLOCK = 1
#: Steps of a micro-batch in order; SINK_COMMIT happens once per transaction.
STEPS = (Step.TRIGGER, Step.DECISION, Step.SINK_COMMIT, Step.RECEIPT)
#: Fact of a checkpoint that a full refresh replaced; note with the driver of an owner.
_GIVEN_UP, _DRIVER = "given-up", "driver"
#: Number of attempts whose files are kept, for people: Spark repeats only the newest micro-batch.
_KEPT = 20
_CLOCK = SystemClock()


def open_sink_dir(checkpoint_location: Path) -> JobDir:
    return JobDir(LocalStore(checkpoint_location / FOLDER))


def find_or_create_uuid(sink: JobDir) -> JobUuid:
    """Return the uuid of a sink; create it at the first call."""
    return sink.find_uuid() or sink.read_or_create_job({})[0]


@dataclass(frozen=True, slots=True)
class Lease:
    """A planned attempt; its number is the checkpoint id."""

    sink: JobUuid
    owner: OwnerEpoch
    attempt: CheckpointId

    @property
    def transactional_ids(self) -> str:
        """Prefix of its tasks' transactional ids."""
        return TransactionalId.prefix(self.sink, self.owner, _BLOCK)

    def to_staged_batch(
        self, batch: BatchId, tasks: Sequence[TaskAck], payloads: Sequence[Mapping[str, Any]]
    ) -> StagedBatch:
        """Return the micro-batch with everything that its tasks staged."""
        acks = (SinkAck(SINK, tuple(tasks)),)
        committables = tuple(Committable(SINK, payload) for payload in payloads)
        return StagedBatch(FIRST_LINEAGE, batch, self.owner, int(self.attempt), acks, committables, (_BLOCK,))


@dataclass(frozen=True, slots=True)
class _Loss:
    #: Index of the first lost committable; none after it was committed.
    position: int
    answer: CommitAnswer


class _ObservedClient:
    """A transaction client that reports each commit to an observer."""

    def __init__(self, client: TransactionClient, observer: Observer) -> None:
        self._client, self._observer = client, observer

    def commit(self, committable: KafkaCommittable) -> CommitAnswer:
        self._observer.on_step_start(Step.SINK_COMMIT, committable.transactional_id)
        answer = self._client.commit(committable)
        self._observer.on_step_end(Step.SINK_COMMIT, committable.transactional_id)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class MicroBatchCommits:
    """Plans, decides and commits the micro-batches of one drop-in sink, on the driver."""

    def __init__(
        self,
        checkpoint_location: Path,
        client: TransactionClient,
        observer: Observer,
        driver: str,
        marks: KafkaMarks | None = None,
    ) -> None:
        self._spark_checkpoint, self._dir = checkpoint_location, open_sink_dir(checkpoint_location)
        self._client = cast(TransactionClient, _ObservedClient(client, observer))
        self._observer, self._driver, self._marks = observer, driver, marks

    def plan(self) -> Lease:
        """Plan the next attempt; first take the sink over, unless this driver continues its own attempt."""
        self._observer.on_step_start(Step.TRIGGER, "")
        owner = self._dir.newest_owner()
        # The transactional ids of an interrupted attempt are never used again: its tasks may still run, and
        # would fence, or be fenced by, their successors.
        if not self._is_mine(owner) or self._dir.receipt(self._newest()) is None:
            owner = self._take_over().epoch
        if self._dir.find_fact(_GIVEN_UP) is not None:
            raise FencedError(
                "this checkpoint was given up by a full refresh of its flow",
                why="the flow has a newer checkpoint, which has ended the open transactions of this one",
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
        self._observer.on_step_end(Step.TRIGGER, str(attempt))
        return Lease(find_or_create_uuid(self._dir), owner, attempt)

    def _newest(self) -> CheckpointId:
        return max(self._dir.list_checkpoint_ids(), default=CheckpointId(0))

    def _is_mine(self, owner: OwnerEpoch) -> bool:
        return self._dir.owner_note(owner, _DRIVER).strip() == self._driver

    def _take_over(self) -> Ownership:
        """Fence earlier drivers, finish their decided micro-batch, abort all other transactions."""
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
        # This order matters: a driver that finds its own note skips all of the above.
        self._dir.note_owner(ownership.epoch, _DRIVER, self._driver)
        return ownership

    def give_up(self) -> None:
        """Close this sink for good: finish the decided micro-batch, abort all else, refuse further plans."""
        if self._newest() == CheckpointId(0):
            return
        # This order matters: later owners find the fact, and earlier ones are fenced.
        self._dir.record_fact(_GIVEN_UP, {"why": "full refresh"})
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
            if _strip_metadata(self._offsets_of(newest.batch)) != _strip_metadata(newest.offsets_text):
                raise JobDirError(
                    f"batch {newest.batch} was committed with other offsets than Spark runs it with now",
                    why="Spark's checkpoint was deleted or replaced, but not the folder flinkish-kafka in it",
                    what_to_do="use a new checkpointLocation, or delete the whole checkpoint",
                )
            if self._dir.receipt(newest.checkpoint) is not None:
                # Spark died right before commits/N. The handles cannot be asked again: their ids have other
                # transactions by now, and the log may no longer prove the outcome of the old ones.
                self.abort(staged)
                return
            decided = self._repeat(ownership, committer, staged, newest)
        loss = self._finish(ownership, committer, decided)
        if loss is not None:
            raise _make_lost_error(decided, loss, "the query must run the batch again to replace it")
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
        """Finish the recorded commit; abort this attempt, except for data that replaces lost data."""
        loss = self._finish(ownership, committer, decided)
        if loss is None:
            self.abort(staged)
            return decided
        plan, found = _plan_replacement(committer, decided, loss, staged)
        if isinstance(found, CannotReplay):
            self.abort(staged)
            raise _make_lost_error(decided, loss, f"it cannot be replaced: {found.why}")
        # This order matters: an earlier owner that wakes up now still has the old decision. It cannot commit
        # aborted transactions, so no row can become visible twice.
        for answer in committer.abort(plan):
            if not answer.outcome.is_done:
                raise _make_retry_error(decided, answer)
        known = self._dir.find_restaged(decided.checkpoint)
        number, now_ms = 1 if known is None else known.number + 1, _CLOCK.wall_ms()
        restaged = RestagedEpoch(
            decided.checkpoint, number, ownership.epoch, now_ms, SINK, loss.answer.detail, found.batches
        )
        ownership.check()
        # A second decision point: from here on the data staged now replaces the lost data.
        if self._dir.create_restaged(restaged) is CreateResult.EXISTS:
            raise FencedError(
                f"batch {decided.batch} was staged again by another driver at the same time",
                what_to_do="let this driver end; none of its data is visible",
            )
        reason = f"it replaces what attempt {decided.checkpoint} has lost"
        self._seal(ownership.epoch, staged.attempt, reason)
        return restaged.apply(decided)

    def abort(self, staged: StagedBatch | None) -> None:
        """Abort an attempt unless it is decided COMMIT; Spark also calls this after a failed commit."""
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
        # Data of this attempt may replace lost data.
        kept = _committables(newest) if newest is not None and is_open else ()
        self._sweep(self._committer(Ownership(self._dir, owner)), kept)

    def _seal(self, owner: OwnerEpoch, attempt: int, reason: str) -> Verdict:
        """Decide ABORT for an attempt; return the decision that holds."""
        abort = Decision(CheckpointId(attempt), Verdict.ABORT, owner, _CLOCK.wall_ms(), reason=reason)
        self._dir.create_decision(abort)
        found = self._dir.first_decision(abort.checkpoint)
        return abort.verdict if found is None else found.verdict

    def _committer(self, ownership: Ownership) -> KafkaCommitter:
        folder = StoreSpec(str(self._spark_checkpoint / FOLDER))
        whose = (
            find_or_create_uuid(self._dir),
            ownership.epoch,
            SINK,
            StructType(),
            CheckpointConfig(),
            SINK,
        )
        context = SinkContext(*whose, folder, _CLOCK, ownership.timeline)
        return KafkaCommitter(self._client, context, self._marks)

    def _require_ours(self, ownership: Ownership, committer: KafkaCommitter, newest: Decision | None) -> None:
        """Raise AnotherTimelineError if the brokers know an attempt that this directory has not committed."""
        upto = CheckpointId(0) if newest is None else newest.checkpoint
        for mark in committer.newest_marks():
            if ownership.timeline.why_not_ours(mark, upto):
                raise _make_timeline_error(mark.checkpoint, upto)

    def _finish(self, ownership: Ownership, committer: KafkaCommitter, decided: Decision) -> _Loss | None:
        """Commit a decided micro-batch; repeating it changes nothing. Return the loss if there is one."""
        ownership.check()
        try:
            answers = committer.commit(decided.checkpoint, _committables(decided))
        except AnotherTimelineError as error:
            raise _make_timeline_error(error.facts["found"], decided.checkpoint) from error
        for position, answer in enumerate(answers):
            if answer.outcome is Outcome.LOST:
                return _Loss(position, answer)
            if not answer.outcome.is_done:
                raise _make_retry_error(decided, answer)
        return None

    def _confirm(self, ownership: Ownership, decided: Decision) -> None:
        self._observer.on_step_start(Step.RECEIPT, str(decided.batch))
        self._dir.create_receipt(Receipt(decided.checkpoint, ownership.epoch, _CLOCK.wall_ms()))
        self._observer.on_step_end(Step.RECEIPT, str(decided.batch))

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
        """Abort transactions that tasks of this and earlier owners left open; a failure is only logged."""
        try:
            committer.sweep(kept, frozenset)
        except FlinkishError as error:
            LOG.warning("leftovers are swept by a later attempt: %s", error)

    def _prune(self, committer: KafkaCommitter, confirmed: Decision) -> None:
        """Delete the files of old attempts."""
        ids = self._dir.list_checkpoint_ids()
        if len(ids) <= _KEPT + _KEPT // 2:
            return
        # The newest commit may be far below the newest id, if many attempts died before one finished it.
        # Without its files its micro-batch would be decided again, and without the seals above it a zombie
        # could decide one of those ids.
        oldest_kept = min(ids[-_KEPT], confirmed.checkpoint)
        gone = [one for one in ids if one < oldest_kept]
        try:
            for part in (CheckpointPart.TRIGGER, CheckpointPart.DECISION, CheckpointPart.RECEIPT):
                self._dir.delete_all(f"checkpoints/{one}/{part.value}" for one in gone)
            self._dir.forget_restaged(gone)
            # The newest mark may be older if the query has had no rows since.
            marked = (mark.checkpoint for mark in committer.newest_marks())
            self._dir.forget_stretches(min([oldest_kept, *marked]))
        except FlinkishError as error:
            LOG.warning("old files of the sink are deleted by a later batch: %s", error)


def _committables(decided: Decision) -> tuple[Committable, ...]:
    return decided.batches[0].committables


def _strip_metadata(offsets_text: str) -> list[str]:
    """Return an entry of Spark's offset log without its metadata, which a restart may change."""
    version, _, *positions = offsets_text.strip().split("\n")
    return [version, *positions]


def _make_lost_error(decided: Decision, loss: _Loss, what_now: str) -> CommittableLostError:
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


def _plan_replacement(
    committer: KafkaCommitter, decided: Decision, loss: _Loss, again: StagedBatch
) -> tuple[Sequence[Committable], RestageResult | CannotReplay]:
    """Return the lost committables, and the micro-batch in which `again` replaces them."""
    if not loss.answer.is_proven_aborted:
        why = "the proof of what became of it is gone, so its rows may have been visible already"
        return (), CannotReplay(why)
    plan = plan_replay(decided, SINK, loss.position, committer.task_of)
    if isinstance(plan, CannotReplay):
        return (), plan
    found = restage(decided, plan, {decided.batch: again}, committer.task_of)
    if isinstance(found, RestageResult):
        dead = committer.why_dead([one for one in again.committables if one not in found.surplus])
        if dead:
            return (), CannotReplay(next(iter(dead.values())))
    return plan.lost, found


def _make_retry_error(decided: Decision, answer: CommitAnswer) -> FlinkishError:
    if answer.outcome is Outcome.FENCED:
        return FencedError(f"batch {decided.batch} is being committed by another driver", why=answer.detail)
    return BrokerUnavailableError(
        f"batch {decided.batch} cannot be committed now",
        why=answer.detail,
        what_to_do="start the query again when the brokers answer; the commit is recorded and "
        "will be finished",
    )


def _make_timeline_error(found: object, newest: CheckpointId) -> AnotherTimelineError:
    return AnotherTimelineError(
        f"the topic holds attempt {found} of this query, which its checkpoint has not committed; "
        f"its newest is {newest if newest.value else 'none'}",
        why="the checkpoint is an older copy of itself, or a copy of it runs elsewhere",
        what_to_do="put the newest checkpoint back, or stop the other query. To go on from this one "
        "all the same, delete the folder flinkish-kafka in it: newer records are then written again",
        participant="the topic",
        found=found,
    )
