"""Commits of a plain Spark query's sinks: each micro-batch is a checkpoint, without barriers and coordinator.

Spark runs a micro-batch, its tasks stage, the driver commits, and Spark writes commits/N; after a crash in
between, Spark runs micro-batch N again over the same offsets. The sinks keep a job directory in Spark's
checkpoint, with these rules:

- Every attempt takes the next checkpoint id. At most one attempt of a micro-batch is decided COMMIT.
- A driver that does not directly continue its own confirmed attempt takes the sinks over: it gets a new owner
  epoch and seals all open ids with ABORT. A zombie can decide nothing, and has other transactional ids.
- A new attempt of a decided micro-batch finishes the recorded commit, and is then aborted.
- If data of a decided micro-batch is proven lost, the same data staged by a later attempt replaces it, as in
  a job's replay (:mod:`flinkish_spark.protocol.replay`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flinkish_spark.checkpoint.commit import FIRST_PAUSE_MS, LONGEST_PAUSE_MS
from flinkish_spark.checkpoint.decision_point import DeadCommittableError, decide
from flinkish_spark.checkpoint.failures import classify
from flinkish_spark.checkpoint.ownership import Ownership, take_over
from flinkish_spark.contracts.sink import Committer, CompletedCheckpoint, StageResult
from flinkish_spark.core.clock import SystemClock, backoff_ms
from flinkish_spark.core.errors import (
    AnotherTimelineError,
    BrokerUnavailableError,
    CommittableLostError,
    ConfigError,
    EnvironmentFault,
    FencedError,
    FlinkishError,
    JobDirError,
    SparkGoneError,
)
from flinkish_spark.core.job_dir import BY_MICRO_BATCH, JobDir, open_job_dir
from flinkish_spark.core.steps import Observer, Step
from flinkish_spark.core.store import CreateResult, ObjectMissing
from flinkish_spark.core.store_spec import StoreSpec, redact_url
from flinkish_spark.core.validation import instance_of
from flinkish_spark.protocol.decisions import Decision, Receipt, RestagedEpoch, TriggerRecord, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, JobUuid, OwnerEpoch
from flinkish_spark.protocol.lineage import FIRST_LINEAGE
from flinkish_spark.protocol.micro_batches import OFFSETS, SINKS
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome, SinkAck, StagedBatch
from flinkish_spark.protocol.replay import CannotReplay, RestageResult, plan_replay, restage
from flinkish_spark.protocol.retention import CheckpointPart

LOG = logging.getLogger(__name__)
#: Name of the job in its directory, for commands, and in what its sinks write.
NAME = "micro-batches"
#: Steps of a micro-batch in order; SINK_COMMIT happens once per sink.
STEPS = (Step.TRIGGER, Step.DECISION, Step.SINK_COMMIT, Step.RECEIPT)
#: Fact of a checkpoint that a full refresh replaced; note with the driver of an owner.
_GIVEN_UP, _DRIVER = "given-up", "driver"
#: Number of attempts whose files are kept, for people: Spark repeats only the newest micro-batch.
_KEPT = 20
_CLOCK = SystemClock()


def to_checkpoint_place(text: str, options: Mapping[str, str]) -> StoreSpec:
    """Return the place of a query's checkpointLocation, which is written as Spark takes it."""
    instance_of("checkpointLocation", text, str, what_to_do="give an absolute path, as a text")
    if not text:
        raise ConfigError(
            "the option 'checkpointLocation' is missing",
            why="the sink keeps its commits beside Spark's checkpoint and cannot see a location that comes "
            "from the session's settings",
            what_to_do='add .option("checkpointLocation", "/absolute/path") to this query',
            option="checkpointLocation",
        )
    scheme, _, rest = text.partition(":")
    if scheme == "dbfs" and Path("/dbfs").is_dir():
        return StoreSpec(str(Path("/dbfs") / rest.lstrip("/")))
    # Hadoop does not decode a path: %20 in it are three characters.
    path = re.sub("^//(?=/)", "", rest) if scheme == "file" else text
    if path.startswith("/") and not path.startswith("//") and not options:
        return StoreSpec(str(Path(path)))
    try:
        return StoreSpec.parse(re.sub("^s3[an]:", "s3:", text, flags=re.IGNORECASE), options)
    except ConfigError as error:
        raise ConfigError(
            f"the checkpointLocation {redact_url(text)!r} cannot be used",
            why=error.why or str(error),
            what_to_do=error.what_to_do,
            option="checkpointLocation",
        ) from None


def open_sinks_dir(checkpoint_location: StoreSpec) -> JobDir:
    return open_job_dir(checkpoint_location.to_child(SINKS))


def find_or_create_uuid(sinks: JobDir) -> JobUuid:
    """Return the uuid of a query's sinks; create it at the first call."""
    return sinks.find_uuid() or sinks.read_or_create_job({}, {"job": NAME, BY_MICRO_BATCH: True})[0]


@dataclass(frozen=True, slots=True)
class Lease:
    """A planned attempt; its number is the checkpoint id."""

    job: JobUuid
    owner: OwnerEpoch
    attempt: CheckpointId

    def to_staged_batch(self, batch: BatchId, results: Mapping[str, StageResult]) -> StagedBatch:
        """Return the micro-batch with everything that was staged, by sink; the first sink has block 1."""
        # An owner has one micro-batch at a time, so each of them has the same blocks.
        blocks = tuple(range(1, len(results) + 1))
        acks = tuple(SinkAck(uid, one.tasks) for uid, one in results.items())
        committables = tuple(
            Committable(uid, payload) for uid, one in results.items() for payload in one.payloads
        )
        return StagedBatch(FIRST_LINEAGE, batch, self.owner, int(self.attempt), acks, committables, blocks)


@dataclass(frozen=True, slots=True)
class _Loss:
    sink: str
    #: Index of the first lost committable among those of the sink; none after it was committed.
    position: int
    #: Number of rows from there on.
    rows: int
    answer: CommitAnswer


#: Returns the committers of an owner by sink uid, in the order in which they commit.
MakeCommitters = Callable[[Ownership], Mapping[str, Committer]]


class MicroBatchCommits:
    """Plans, decides and commits the micro-batches of a query's sinks, on the driver.

    `driver` is an id of this driver that no other has. An answer that asks for patience is asked for again
    until `patience_ms` have passed.
    """

    def __init__(
        self,
        checkpoint_location: StoreSpec,
        make_committers: MakeCommitters,
        observer: Observer,
        driver: str,
        patience_ms: int = 0,
    ) -> None:
        self._spark_checkpoint, self._dir = checkpoint_location, open_sinks_dir(checkpoint_location)
        self._make_committers, self._patience_ms = make_committers, patience_ms
        self._observer, self._driver = observer, driver

    def is_confirmed(self, batch: BatchId) -> bool:
        """Return whether a micro-batch is committed in every sink."""
        newest = self._dir.newest_commit()
        if newest is None or newest.batch < batch:
            return False
        _require_not_older(batch, newest)
        self._require_same_offsets(newest)
        return self._dir.receipt(newest.checkpoint) is not None

    def find_running(self) -> BatchId:
        """Return the micro-batch that Spark runs: the newest that has offsets."""
        names = (key.rpartition("/")[2] for key in self._spark_checkpoint.open().list(OFFSETS))
        found = [int(name) for name in names if name.isdecimal()]
        if not found:
            raise self._make_place_error("no offsets")
        return BatchId(max(found))

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
        committers, decided = self._make_committers(ownership), self._dir.newest_commit()
        kept: Sequence[Committable] = ()
        if decided is not None and self._dir.receipt(decided.checkpoint) is None:
            if self._finish(ownership, committers, decided):
                kept = decided.batches[0].committables
            else:
                self._confirm(ownership, decided)
        self._require_ours(ownership, committers, decided)
        # This order matters: a driver that finds its own note skips all of the above.
        if self._sweep(committers, kept):
            self._dir.note_owner(ownership.epoch, _DRIVER, self._driver)
        return ownership

    def give_up(self) -> None:
        """Close the sinks for good: finish the decided micro-batch, abort all else, refuse further plans."""
        if self._newest() == CheckpointId(0):
            return
        # This order matters: later owners find the fact, and earlier ones are fenced.
        self._dir.record_fact(_GIVEN_UP, {"why": "full refresh"})
        self._take_over()

    def commit(self, staged: StagedBatch) -> None:
        """Decide and commit a micro-batch, or finish it if an earlier attempt decided it."""
        ownership = Ownership(self._dir, staged.owner_epoch, self._dir.timeline())
        # First: to a driver that was replaced the commits of its successor look like another checkpoint.
        ownership.check()
        committers, newest = self._make_committers(ownership), self._dir.newest_commit()
        if newest is None or newest.batch < staged.batch:
            decided = self._decide(ownership, committers, staged, newest)
        else:
            _require_not_older(staged.batch, newest)
            self._require_same_offsets(newest)
            if self._dir.receipt(newest.checkpoint) is not None:
                # Spark died right before commits/N. The handles cannot be asked again: their ids have other
                # transactions by now, and the log may no longer prove the outcome of the old ones.
                self.abort(staged)
                return
            decided = self._repeat(ownership, committers, staged, newest)
        losses = self._finish(ownership, committers, decided)
        if losses:
            raise _make_lost_error(decided, losses, "the query must run the batch again to replace them")
        # This order matters: once the receipt is there, the next attempt may use the same ids. Leftovers that
        # are not swept have such ids, so then the next attempt takes over and gets others.
        if not self._sweep(committers, decided.batches[0].committables):
            self._dir.note_owner(ownership.epoch, _DRIVER, "")
        self._confirm(ownership, decided)
        self._prune(committers, decided)

    def _decide(
        self,
        ownership: Ownership,
        committers: Mapping[str, Committer],
        staged: StagedBatch,
        newest: Decision | None,
    ) -> Decision:
        self._require_ours(ownership, committers, newest)
        for uid, committer in committers.items():
            dead = committer.why_dead([one for one in staged.committables if one.sink == uid])
            if dead:
                self.abort(staged)
                raise DeadCommittableError(
                    f"staged data of batch {staged.batch} is gone before its decision",
                    why=next(iter(dead.values())),
                    what_to_do="start the query again, nothing is lost; if a micro-batch takes longer than "
                    "Kafka's transaction timeout, raise that or set maxOffsetsPerTrigger",
                )
        decision = Decision(
            CheckpointId(staged.attempt),
            Verdict.COMMIT,
            ownership.epoch,
            _CLOCK.wall_ms(),
            batches=(staged,),
            offsets_text=self._offsets_of(staged.batch),
            uids=tuple(committers),
        )
        again = "start the query again: what was staged is aborted, and the micro-batch runs anew"
        decide(decision, ownership, _CLOCK, self._observer, again)
        return decision

    def _repeat(
        self,
        ownership: Ownership,
        committers: Mapping[str, Committer],
        staged: StagedBatch,
        decided: Decision,
    ) -> Decision:
        """Finish the recorded commit; abort this attempt, except for data that replaces lost data."""
        losses = self._finish(ownership, committers, decided)
        if not losses:
            self.abort(staged)
            return decided
        for loss in losses:
            _, found = _plan_replacement(committers[loss.sink], decided, loss, staged)
            if isinstance(found, CannotReplay):
                self.abort(staged)
                raise _make_lost_error(decided, losses, f"they cannot be replaced: {found.why}")
        for loss in losses:
            decided = self._replace(ownership, committers[loss.sink], staged, decided, loss)
        reason = f"it replaces what attempt {decided.checkpoint} has lost"
        self._seal(ownership.epoch, staged.attempt, reason)
        return decided

    def _replace(
        self,
        ownership: Ownership,
        committer: Committer,
        staged: StagedBatch,
        decided: Decision,
        loss: _Loss,
    ) -> Decision:
        """Return the decision in which data staged now stands for the lost data of one sink."""
        lost, found = _plan_replacement(committer, decided, loss, staged)
        if isinstance(found, CannotReplay):
            raise _make_lost_error(decided, [loss], f"they cannot be replaced: {found.why}")
        # This order matters: an earlier owner that wakes up now still has the old decision. It cannot commit
        # aborted data, so no row can become visible twice.
        for answer in committer.abort(lost):
            if not answer.outcome.is_done:
                raise _make_retry_error(decided, loss.sink, answer)
        known = self._dir.find_restaged(decided.checkpoint)
        number, now_ms = 1 if known is None else known.number + 1, _CLOCK.wall_ms()
        restaged = RestagedEpoch(
            decided.checkpoint, number, ownership.epoch, now_ms, loss.sink, loss.answer.detail, found.batches
        )
        ownership.check()
        # A second decision point: from here on the data staged now replaces the lost data.
        if self._dir.create_restaged(restaged) is CreateResult.EXISTS:
            raise FencedError(
                f"batch {decided.batch} was staged again by another driver at the same time",
                what_to_do="let this driver end; none of its data is visible",
            )
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
        kept = newest.batches[0].committables if newest is not None and is_open else ()
        self._sweep(self._make_committers(Ownership(self._dir, owner, self._dir.timeline())), kept)

    def _seal(self, owner: OwnerEpoch, attempt: int, reason: str) -> Verdict:
        """Decide ABORT for an attempt; return the decision that holds."""
        abort = Decision(CheckpointId(attempt), Verdict.ABORT, owner, _CLOCK.wall_ms(), reason=reason)
        self._dir.create_decision(abort)
        found = self._dir.first_decision(abort.checkpoint)
        return abort.verdict if found is None else found.verdict

    def _require_same_offsets(self, decided: Decision) -> None:
        if _strip_metadata(self._offsets_of(decided.batch)) != _strip_metadata(decided.offsets_text):
            raise JobDirError(
                f"batch {decided.batch} was committed with other offsets than Spark runs it with now",
                why=f"Spark's checkpoint was deleted or replaced, but not the folder {SINKS} in it",
                what_to_do="use a new checkpointLocation, or delete the whole checkpoint",
            )

    def _require_ours(
        self, ownership: Ownership, committers: Mapping[str, Committer], newest: Decision | None
    ) -> None:
        """Raise AnotherTimelineError if a sink knows an attempt that this directory has not committed."""
        upto = CheckpointId(0) if newest is None else newest.checkpoint
        for uid, committer in committers.items():
            for mark in committer.newest_marks():
                if ownership.timeline.why_not_ours(mark, upto):
                    raise _make_timeline_error(uid, mark.checkpoint, upto)

    def _finish(
        self, ownership: Ownership, committers: Mapping[str, Committer], decided: Decision
    ) -> Sequence[_Loss]:
        """Commit a decided micro-batch; repeating it changes nothing. Return what is lost, by sink."""
        ownership.check()
        staged = decided.batches[0].committables
        unknown = sorted({one.sink for one in staged} - committers.keys())
        if unknown:
            raise JobDirError(
                f"batch {decided.batch} holds decided data of sink '{unknown[0]}', which this query has not",
                what_to_do="start the query once with that sink, then remove it",
                uid=unknown[0],
            )
        losses, waiting = list[_Loss](), list[FlinkishError]()
        # Sinks whose data expires come first, and each sink is tried whatever has become of others: one that
        # is away for long, or has lost its data, must not cost another one its own.
        for uid, committer in sorted(committers.items(), key=_is_patient):
            own = [one for one in staged if one.sink == uid]
            try:
                loss = self._commit_sink(ownership, committer, decided, uid, own) if own else None
            except (FencedError, AnotherTimelineError):
                # Another driver commits, or another copy of the checkpoint: this one touches no further sink.
                raise
            except EnvironmentFault as error:
                waiting.append(error)
                continue
            losses += [] if loss is None else [loss]
        if waiting:
            raise waiting[0]
        if losses:
            return losses
        # This order matters: readers may see what a sink does for a complete checkpoint, so that comes after
        # the last sink's commit.
        completed = CompletedCheckpoint(decided.checkpoint, decided.decided_at_ms, decided.purpose)
        for uid, committer in committers.items():
            (answer,) = self._ask(decided, uid, partial(_complete, committer, completed))
            if answer.outcome is Outcome.LOST:
                raise CommittableLostError(
                    f"sink '{uid}' cannot complete batch {decided.batch}, since its data is lost",
                    why=answer.detail,
                    what_to_do="put the data back, or write it by hand and call "
                    f"flinkish_spark.settle(checkpoint_location, {decided.batch})",
                    sink=uid,
                )
        return ()

    def _commit_sink(
        self,
        ownership: Ownership,
        committer: Committer,
        decided: Decision,
        uid: str,
        own: Sequence[Committable],
    ) -> _Loss | None:
        self._require_ours(ownership, {uid: committer}, decided)
        self._observer.on_step_start(Step.SINK_COMMIT, uid)
        try:
            answers = self._ask(decided, uid, lambda: committer.commit(decided.checkpoint, own))
        except AnotherTimelineError as error:
            # To a driver that was replaced the commits of its successor look like another timeline.
            ownership.check()
            raise _make_timeline_error(uid, error.facts["found"], decided.checkpoint) from error
        self._observer.on_step_end(Step.SINK_COMMIT, uid)
        if answers[-1].outcome is not Outcome.LOST:
            return None
        position, batch = len(answers) - 1, decided.batches[0]
        tasks = {committer.task_of(one) for one in own[position:]}
        ack = next(one for one in batch.acks if one.sink == uid)
        rows = sum(task.rows for task in ack.tasks if None in tasks or task.partition in tasks)
        return _Loss(uid, position, rows, answers[-1])

    def _ask(
        self, decided: Decision, uid: str, ask: Callable[[], Sequence[CommitAnswer]]
    ) -> Sequence[CommitAnswer]:
        """Repeat a call until all answers are done, one is LOST, or the patience is at its end."""
        began_ms, pauses_ms = _CLOCK.monotonic_ms(), backoff_ms(FIRST_PAUSE_MS, LONGEST_PAUSE_MS)
        while True:
            answers = ask()
            open_ = next((one for one in answers if not one.outcome.is_done), None)
            if open_ is None or open_.outcome is Outcome.LOST:
                return answers
            is_over = _CLOCK.monotonic_ms() - began_ms >= self._patience_ms
            if is_over or open_.outcome is Outcome.FENCED:
                raise _make_retry_error(decided, uid, open_)
            LOG.warning("committing batch %s to sink '%s' has to wait: %s", decided.batch, uid, open_.detail)
            _CLOCK.sleep_ms(next(pauses_ms))

    def _confirm(self, ownership: Ownership, decided: Decision) -> None:
        self._observer.on_step_start(Step.RECEIPT, str(decided.batch))
        self._dir.create_receipt(Receipt(decided.checkpoint, ownership.epoch, _CLOCK.wall_ms()))
        self._observer.on_step_end(Step.RECEIPT, str(decided.batch))

    def _offsets_of(self, batch: BatchId) -> str:
        try:
            return self._spark_checkpoint.open().read(f"{OFFSETS}/{batch}").decode()
        except ObjectMissing:
            raise self._make_place_error(f"no offsets of batch {batch}") from None

    def _make_place_error(self, lacks: str) -> JobDirError:
        return JobDirError(
            f"Spark's checkpoint in {self._spark_checkpoint.url} has {lacks}",
            why="the checkpointLocation of the sinks is not where Spark keeps its checkpoint",
            what_to_do="give the same absolute path as the query's checkpointLocation; where Spark's "
            "default file system is no disk (fs.defaultFS), both with file:// in front",
        )

    def _sweep(self, committers: Mapping[str, Committer], kept: Sequence[Committable]) -> bool:
        """Abort data that tasks of this and earlier owners left open; return whether all of it is gone."""
        is_swept = True
        for uid, committer in committers.items():
            try:
                # Kafka's sinks list the transactions of all sinks, so each gets everything that is kept.
                committer.sweep(kept, frozenset)
            except Exception as error:
                # A failed sweep does no harm: only a JVM that is gone ends the query.
                meant = classify(error)
                if isinstance(meant, SparkGoneError) or not isinstance(meant, FlinkishError | OSError):
                    raise
                LOG.warning("leftovers of sink '%s' are swept by a later attempt: %s", uid, meant)
                is_swept = False
        return is_swept

    def _prune(self, committers: Mapping[str, Committer], confirmed: Decision) -> None:
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
            # The newest mark may be older if a sink has had no rows since.
            marks = (mark.checkpoint for one in committers.values() for mark in one.newest_marks())
            self._dir.forget_stretches(min([oldest_kept, *marks]))
        except FlinkishError as error:
            LOG.warning("old files of the sinks are deleted by a later batch: %s", error)


def _complete(committer: Committer, completed: CompletedCheckpoint) -> list[CommitAnswer]:
    return [committer.checkpoint_complete(completed)]


def _strip_metadata(offsets_text: str) -> list[str]:
    """Return an entry of Spark's offset log without its metadata, which a restart may change."""
    version, _, *positions = offsets_text.strip().split("\n")
    return [version, *positions]


def settle_micro_batch(checkpoint_location: StoreSpec, batch: int) -> None:
    """Declare a micro-batch done, whose lost rows a person has written or given up.

    Every start of the query has committed all other sinks: the error came after them.
    """
    sinks = open_sinks_dir(checkpoint_location)
    decided = next((one for one in reversed(sinks.live_commits()) if one.batch.value == batch), None)
    if decided is None:
        raise ConfigError(
            f"micro-batch {batch} was not decided by the sinks of {checkpoint_location.url}",
            what_to_do="take the number from the error, and the path from the query",
        )
    if sinks.receipt(decided.checkpoint) is not None:
        raise ConfigError(
            f"micro-batch {batch} is confirmed already; there is nothing to settle",
            what_to_do="start the query again",
        )
    facts = {uid: {"settled_by_hand": True} for uid in decided.uids}
    sinks.create_receipt(Receipt(decided.checkpoint, sinks.newest_owner(), _CLOCK.wall_ms(), facts=facts))


def _is_patient(sink: tuple[str, Committer]) -> bool:
    return sink[1].staged_lifetime_ms is None


def _require_not_older(batch: BatchId, newest: Decision) -> None:
    if batch < newest.batch:
        raise JobDirError(
            f"Spark runs batch {batch}, although batch {newest.batch} is confirmed",
            why="Spark's checkpoint was set back or replaced, and its rows would be written twice",
            what_to_do="use a new checkpointLocation, or restore the whole folder from one backup",
        )


def _make_lost_error(decided: Decision, losses: Sequence[_Loss], what_now: str) -> CommittableLostError:
    batch = decided.batches[0]
    all_rows = {one.sink: one.rows for one in batch.acks}
    parts = [f"{one.rows} of its {all_rows[one.sink]} rows for sink '{one.sink}'" for one in losses]
    return CommittableLostError(
        f"batch {batch.batch} was decided, and {', '.join(parts)} are lost; {what_now}",
        why=losses[0].answer.detail,
        what_to_do="if it cannot be replaced, write the missing rows by hand: those of the offsets in "
        f"offsets/{batch.batch} of Spark's checkpoint; then call "
        f"flinkish_spark.settle(checkpoint_location, {batch.batch})",
        batch=int(batch.batch),
        sink=losses[0].sink,
        rows=sum(one.rows for one in losses),
    )


def _plan_replacement(
    committer: Committer, decided: Decision, loss: _Loss, again: StagedBatch
) -> tuple[Sequence[Committable], RestageResult | CannotReplay]:
    """Return the lost committables, and the micro-batch in which `again` replaces them."""
    if not loss.answer.is_proven_aborted:
        why = "the proof of what became of it is gone, so its rows may have been visible already"
        return (), CannotReplay(why)
    plan = plan_replay(decided, loss.sink, loss.position, committer.task_of)
    if isinstance(plan, CannotReplay):
        return (), plan
    own = tuple(one for one in again.committables if one.sink == loss.sink)
    found = restage(decided, plan, {decided.batch: replace(again, committables=own)}, committer.task_of)
    if isinstance(found, RestageResult):
        dead = committer.why_dead([one for one in own if one not in found.surplus])
        if dead:
            return (), CannotReplay(next(iter(dead.values())))
    return plan.lost, found


def _make_retry_error(decided: Decision, uid: str, answer: CommitAnswer) -> FlinkishError:
    if answer.outcome is Outcome.FENCED:
        return FencedError(f"batch {decided.batch} is being committed by another driver", why=answer.detail)
    return BrokerUnavailableError(
        f"batch {decided.batch} cannot be committed to sink '{uid}' now",
        why=answer.detail,
        what_to_do="start the query again when its system answers; the commit is recorded and "
        "will be finished",
    )


def _make_timeline_error(uid: str, found: object, newest: CheckpointId) -> AnotherTimelineError:
    return AnotherTimelineError(
        f"the system of sink '{uid}' holds attempt {found} of this query, which its checkpoint has not "
        f"committed; its newest is {newest if newest.value else 'none'}",
        why="the checkpoint is an older copy of itself, or a copy of it runs elsewhere",
        what_to_do="put the newest checkpoint back, or stop the other query. To go on from this one "
        f"all the same, delete the folder {SINKS} in it: newer records are then written again",
        participant=f"sink '{uid}'",
        found=found,
    )
