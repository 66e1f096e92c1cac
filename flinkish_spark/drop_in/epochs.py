"""Planning, committing and finishing the micro-batches of a drop-in sink.

Runs in Python processes that Spark starts on the driver: one call of :meth:`SinkEpochs.plan` per
micro-batch before its tasks, one of :meth:`SinkEpochs.commit` behind them. Neither keeps anything
in memory that matters; the rules are in `protocol/micro_batches.py`, the files in `epoch_dir.py`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flinkish_spark.drop_in.epoch_dir import EpochDir, committed
from flinkish_spark.drop_in.steps import EpochObserver, EpochStep
from flinkish_spark.drop_in.transactions import Transactions, handles_of
from flinkish_spark.errors import (
    AnotherTimelineError,
    BrokerUnavailableError,
    CommittableLostError,
    EnvironmentFault,
    FencedError,
    FlinkishError,
    JobDirError,
)
from flinkish_spark.kafka.marks import KafkaMarks
from flinkish_spark.protocol.decisions import Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid
from flinkish_spark.protocol.micro_batches import (
    Attempt,
    AttemptDecision,
    AttemptNumber,
    DecidedBatch,
    StagedPart,
    next_attempt,
    why_not_replaceable,
)
from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.store import CreateResult

LOG = logging.getLogger(__name__)


class StagedDataLostError(EnvironmentFault):
    """Staged data died before its batch was decided; Spark may run the batch again."""

    restartable = True


@dataclass(frozen=True, slots=True)
class Lease:
    """What the tasks of one attempt need to name their transactions."""

    sink: JobUuid
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class _Finished:
    """What became of the parts of a decided batch."""

    lost: tuple[StagedPart, ...]
    proven_aborted: frozenset[int]
    details: Mapping[int, str]


class SinkEpochs:
    """The protocol of one drop-in sink; see the module's head.

    Parameters
    ----------
    directory
        Beside Spark's checkpoint.
    transactions
        Connected to the sink's brokers.
    observer
        Told about steps; for crash tests.
    planner
        Names this driver, so that it gives up no attempt of another one.
    marks
        Says at the brokers which attempt was committed last; None for nothing.
    """

    def __init__(
        self,
        directory: EpochDir,
        transactions: Transactions,
        observer: EpochObserver,
        planner: str,
        marks: KafkaMarks | None = None,
    ) -> None:
        self._dir, self._transactions, self._observer = directory, transactions, observer
        self._planner, self._marks = planner, marks

    # -- before the tasks -----------------------------------------------------------------------
    def plan(self) -> Lease:
        """Fence earlier attempts, finish what they decided, and take the next attempt.

        Called on the driver for every micro-batch before Spark runs its tasks. A part that is
        LOST is left for :meth:`commit`, which may have a replacement for it.

        Raises
        ------
        FencedError
            Another driver plans over the same checkpoint at this moment.
        BrokerUnavailableError
            What was decided cannot be finished now.
        """
        self._observer.before(EpochStep.PLAN, "")
        sink = self._dir.sink_uuid()
        newest = self._dir.newest_attempt()
        if newest is None or newest.planner != self._planner:
            # A driver that goes on has the folder that it had before.
            self._require_ours(newest)
        is_confirmed = newest is not None and self._is_confirmed(newest.number)
        finished: list[DecidedBatch] = []
        if newest is not None and not is_confirmed:
            # This order matters: sealed first, nothing can be decided while leftovers are swept.
            self._seal_open_attempts(newest.number)
            unconfirmed = self._unconfirmed()
            finished = [batch for batch in unconfirmed if not self._finish(batch).lost]
            self._sweep(sink, newest.highest_block, unconfirmed)
        token = secrets.token_hex(8)
        attempt = next_attempt(newest, self._planner, newest_is_confirmed=is_confirmed, token=token)
        if self._dir.create_attempt(attempt) is CreateResult.EXISTS:
            raise FencedError(
                f"attempt {attempt.number} was taken by another driver",
                why="two queries use the same checkpointLocation at the same time",
                what_to_do="stop one of them",
            )
        # This order matters: with the receipt first, whoever plans if this process dies here would take
        # the block again, while the process that decided may still be sweeping it.
        for batch in finished:
            self._confirm(batch)
        self._observer.after(EpochStep.PLAN, str(attempt.number))
        return Lease(sink, attempt)

    def _is_confirmed(self, attempt: AttemptNumber) -> bool:
        decision = self._dir.decision(attempt)
        if decision is None or decision.verdict is not Verdict.COMMIT:
            return False
        assert decision.batch is not None
        return decision.batch in self._dir.confirmed()

    def _seal_open_attempts(self, newest: AttemptNumber) -> None:
        for attempt in self._dir.undecided_attempts():
            if attempt > newest:
                continue
            reason = "a later attempt was planned"
            # EXISTS: a zombie decided first. Then its COMMIT counts, and is finished below.
            self._dir.create_decision(AttemptDecision(attempt, Verdict.ABORT, reason=reason))

    def _unconfirmed(self) -> tuple[DecidedBatch, ...]:
        confirmed = self._dir.confirmed()
        return tuple(found for found in self._dir.decided_batches() if found.batch not in confirmed)

    # -- behind the tasks -----------------------------------------------------------------------
    def commit(self, attempt: AttemptNumber, batch: BatchId, parts: Sequence[StagedPart]) -> None:
        """Decide and commit a batch, or finish it if an earlier attempt decided it.

        Called on the driver when all tasks have staged; Spark writes commits/N when it returns.
        If it raises, Spark ends the query, and a restart runs the batch again.

        Parameters
        ----------
        attempt
            Whose tasks staged.
        batch
            Spark's id.
        parts
            One per task.

        Raises
        ------
        StagedDataLostError
            A transaction died before the decision; nothing is visible.
        CommittableLostError
            A decided part is gone and cannot be replaced.
        FencedError
            A later attempt was planned meanwhile.
        BrokerUnavailableError
            Decided, and not finished; the next attempt finishes it.
        """
        decided = {found.batch: found for found in self._dir.decided_batches()}.get(batch)
        if decided is None:
            decided = self._decide(attempt, batch, parts)
        else:
            self._check_offsets(decided)
            if batch in self._dir.confirmed():
                # Spark died right before commits/N. The handles are not asked again: their ids have
                # other transactions by now, and the log may no longer tell what became of the old ones.
                self.abort(attempt, parts)
                return
            decided = self._repeat(attempt, decided, parts)
        finished = self._finish(decided)
        if finished.lost:
            raise self._lost(decided, finished, "the query must run the batch again to replace it")
        # This order matters: once the receipt is there, a later attempt may use the same ids. Spark runs
        # a batch when those before it are in commits/, so no other one is unconfirmed.
        self._sweep_behind(attempt, [decided])
        self._confirm(decided)
        self._prune()

    def _decide(self, attempt: AttemptNumber, batch: BatchId, parts: Sequence[StagedPart]) -> DecidedBatch:
        newest = max(self._dir.confirmed(), default=None)
        if newest is not None and batch <= newest:
            raise JobDirError(
                f"Spark runs batch {batch}, although batch {newest} is confirmed",
                why="Spark's checkpoint was set back or replaced, and its rows would be written twice",
                what_to_do="use a new checkpointLocation, or restore the whole folder from one backup",
            )
        dead = self._why_dead(parts)
        if dead:
            self.abort(attempt, parts)
            raise StagedDataLostError(
                f"staged data of batch {batch} is gone before its decision: {dead}",
                what_to_do="start the query again, nothing is lost; if a micro-batch takes longer than "
                "kafka.transaction.timeout.ms, raise that or set maxOffsetsPerTrigger",
            )
        decision = AttemptDecision(
            attempt, Verdict.COMMIT, batch, tuple(parts), self._dir.offsets_sha256(batch)
        )
        self._observer.before(EpochStep.DECISION, str(batch))
        # THE DECISION POINT: from here on these parts are the content of the batch, whatever dies.
        self._create(decision)
        self._observer.after(EpochStep.DECISION, str(batch))
        return DecidedBatch(decision, ())

    def _repeat(
        self, attempt: AttemptNumber, decided: DecidedBatch, parts: Sequence[StagedPart]
    ) -> DecidedBatch:
        """Finish the recorded commit; give up this attempt but for what replaces lost parts."""
        finished = self._finish(decided)
        mine = {part.partition: part for part in parts}
        if finished.lost:
            why = why_not_replaceable(finished.lost, finished.proven_aborted, mine)
            replacing = [mine[part.partition] for part in finished.lost if part.partition in mine]
            why = why or self._why_dead(replacing)
            if why:
                self.abort(attempt, parts)
                raise self._lost(decided, finished, f"it cannot be replaced: {why}")
            mend = AttemptDecision(
                attempt,
                Verdict.COMMIT,
                decided.batch,
                tuple(replacing),
                decided.first.offsets_sha256,
                mends=True,
                reason="; ".join(finished.details[part.partition] for part in finished.lost),
            )
            # A second decision point: these parts stand for the lost ones from here on.
            self._create(mend)
            decided = DecidedBatch(decided.first, (*decided.mends, mend))
            self._abort_parts([part for part in parts if part not in replacing])
        else:
            self.abort(attempt, parts)
        return decided

    def _create(self, decision: AttemptDecision) -> None:
        if self._dir.create_decision(decision) is CreateResult.EXISTS:
            self._abort_parts(decision.parts)
            raise FencedError(
                f"attempt {decision.attempt} of batch {decision.batch} was given up by a later one",
                why="another driver runs the same query over the same checkpoint",
                what_to_do="let this one end; nothing of it is visible",
            )

    def abort(self, attempt: AttemptNumber | None, parts: Sequence[StagedPart]) -> None:
        """Give an attempt up, unless it is decided.

        Called when tasks or :meth:`commit` failed. Spark calls it behind a failed commit, too,
        which may have decided already: that stays as it is.

        Parameters
        ----------
        attempt
            None if no task lived to name it: then the newest is meant, if this driver planned it.
        parts
            What the tasks that succeeded staged.
        """
        if attempt is None:
            newest = self._dir.newest_attempt()
            if newest is None or newest.planner != self._planner:
                return
            attempt = newest.number
        self._dir.create_decision(AttemptDecision(attempt, Verdict.ABORT, reason="the attempt failed"))
        if committed(self._dir.decision(attempt)):
            return
        self._abort_parts(parts)
        self._sweep_behind(attempt, self._unconfirmed())

    def _abort_parts(self, parts: Sequence[StagedPart]) -> None:
        """End transactions with ABORT; what cannot be ended now is swept by the next attempt."""
        for handle in handles_of(parts):
            try:
                self._transactions.abort(handle)
            except FlinkishError as error:
                LOG.warning("%s is left to the next attempt: %s", handle.transactional_id, error)

    # -- marks ----------------------------------------------------------------------------------
    def _require_ours(self, newest: Attempt | None) -> None:
        """Raise AnotherTimelineError if the brokers know an attempt that this folder does not."""
        mark = None if self._marks is None else self._marks.newest()
        if mark is None:
            return
        number = int(mark.checkpoint)
        planned = self._dir.attempt(AttemptNumber(number)) if number else None
        decision = None if planned is None else self._dir.decision(planned.number)
        is_ahead = newest is None or number > int(newest.number)
        is_other = planned is not None and bool(mark.token and planned.token and mark.token != planned.token)
        is_given_up = decision is not None and decision.verdict is not Verdict.COMMIT
        if is_ahead or is_other or is_given_up:
            raise AnotherTimelineError(
                f"the topic holds attempt {number} of this query, which its checkpoint has not committed; "
                f"its newest is {newest.number if newest is not None else 'none'}",
                why="the checkpoint is an older copy of itself, or a copy of it runs elsewhere",
                what_to_do="put the newest checkpoint back, or stop the other query. To go on from this one "
                "all the same, delete the folder flinkish-kafka in it: what was written behind it is written "
                "again",
                participant="the topic",
                found=number,
            )

    def _mark(self, decided: DecidedBatch) -> None:
        """Leave the mark of a decided batch, before the first of its transactions ends."""
        if self._marks is None or not any(part.payload is not None for part in decided.first.parts):
            return
        attempt = self._dir.attempt(decided.first.attempt)
        self._require_ours(self._dir.newest_attempt())
        self._marks.leave(
            Mark(CheckpointId(int(decided.first.attempt)), (attempt.token or None) if attempt else None)
        )

    # -- finishing ------------------------------------------------------------------------------
    def _finish(self, decided: DecidedBatch) -> _Finished:
        """Commit every part of a decided batch; repeating it changes nothing."""
        self._mark(decided)
        lost: list[StagedPart] = []
        proven: set[int] = set()
        details: dict[int, str] = {}
        for part in decided.first.parts:
            answers = self._commit_one_of(decided.candidates(part))
            if answers and not answers[-1].outcome.is_done:
                lost.append(part)
                details[part.partition] = answers[-1].detail
                if all(answer.is_proven_aborted for answer in answers):
                    proven.add(part.partition)
        return _Finished(tuple(lost), frozenset(proven), details)

    def _commit_one_of(self, candidates: Sequence[StagedPart]) -> list[CommitAnswer]:
        """Commit the first candidate that can be; return the answers, none for a part without rows."""
        answers: list[CommitAnswer] = []
        for handle in handles_of(candidates):
            self._observer.before(EpochStep.END_TRANSACTION, handle.transactional_id)
            answers.append(self._transactions.commit(handle))
            self._observer.after(EpochStep.END_TRANSACTION, handle.transactional_id)
            if answers[-1].outcome is Outcome.RETRY:
                raise BrokerUnavailableError(
                    f"transaction {handle.transactional_id} cannot be committed now",
                    why=answers[-1].detail,
                    what_to_do="start the query again when the brokers answer; the commit is recorded "
                    "and will be finished",
                )
            if answers[-1].outcome is not Outcome.LOST:
                break
        return answers

    def _confirm(self, decided: DecidedBatch) -> None:
        rows = sum(part.rows for part in decided.first.parts)
        self._observer.before(EpochStep.RECEIPT, str(decided.batch))
        attempt = int(decided.first.attempt)
        self._dir.create_receipt(decided.batch, {"attempt": attempt, "rows": rows})
        self._observer.after(EpochStep.RECEIPT, str(decided.batch))

    def _lost(self, decided: DecidedBatch, finished: _Finished, what_now: str) -> CommittableLostError:
        first = finished.lost[0]
        return CommittableLostError(
            f"{len(finished.lost)} parts of batch {decided.batch} were decided and are lost; {what_now}",
            why=finished.details[first.partition],
            what_to_do="if it cannot be replaced, write the missing rows by hand: those of the offsets in "
            f"offsets/{decided.batch} of Spark's checkpoint; then call "
            f"flinkish_spark.drop_in.settle(checkpoint_location, {decided.batch})",
            batch=int(decided.batch),
            rows=sum(part.rows for part in finished.lost),
        )

    def _check_offsets(self, decided: DecidedBatch) -> None:
        if self._dir.offsets_sha256(decided.batch) != decided.first.offsets_sha256:
            raise JobDirError(
                f"batch {decided.batch} was committed with other offsets than Spark runs it with now",
                why="Spark's checkpoint was deleted or replaced, but not the folder flinkish-kafka in it",
                what_to_do="use a new checkpointLocation, or delete the whole checkpoint",
            )

    # -- leftovers ------------------------------------------------------------------------------
    def _why_dead(self, parts: Sequence[StagedPart]) -> str:
        handles = handles_of(parts)
        if not handles:
            return ""
        alive = self._transactions.is_alive(handles)
        dead = [f"{h.transactional_id}: {alive[h].reason}" for h in handles if not alive[h].alive]
        return dead[0] if dead else ""

    def _sweep(self, sink: JobUuid, highest_block: int, unconfirmed: Sequence[DecidedBatch]) -> None:
        """Abort what the sink left open and no unconfirmed batch names: it holds back every reader.

        Blocks above `highest_block` belong to attempts planned later, perhaps by another driver.
        """
        parts = [one for batch in unconfirmed for part in batch.first.parts for one in batch.candidates(part)]
        needed = {handle.transactional_id for handle in handles_of(parts)}
        for found in self._transactions.list_of_job(sink):
            is_later = found.transactional_id.block > highest_block
            if not is_later and str(found.transactional_id) not in needed:
                self._transactions.abort_open(found.transactional_id)

    def _sweep_behind(self, attempt: AttemptNumber, unconfirmed: Sequence[DecidedBatch]) -> None:
        """Abort what failed and speculative tasks of an attempt left; a failure costs time only."""
        try:
            planned = self._dir.attempt(attempt)
            if planned is not None:
                self._sweep(self._dir.sink_uuid(), planned.block, unconfirmed)
        except FlinkishError as error:
            LOG.warning("leftovers of attempt %s are swept by the next one: %s", attempt, error)

    def _prune(self) -> None:
        try:
            self._dir.prune()
        except FlinkishError as error:
            LOG.warning("old files of the sink are deleted by a later batch: %s", error)
