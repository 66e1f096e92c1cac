"""The committing half of the Kafka sink: transactions are ended in order, whole micro-batches at a time.

What :meth:`KafkaCommitter.commit` answers, and what a replay may rely on:

- Answers come in the order of the committables and end at the first that is not done. So what is
  committed is always a beginning of the committables, in this call and in all earlier ones, and
  nothing behind the last answer has ever been committed.
- Before the first transaction of a micro-batch is committed the coordinators are asked about all of
  them. If one is lost and none was committed before, none is: LOST stands at the first committable of
  the micro-batch, which may itself still be open. That micro-batch can be staged again as a whole.
- If some were committed before (by a process that died, or by this one before a time limit struck),
  LOST stands at the first lost one, and everything before it is done. Then only the tasks from there
  on can be staged again, by :meth:`KafkaCommitter.task_of`.
- `is_proven_aborted` of LOST is about every lost transaction of the micro-batch, and false if
  somebody committed one behind the last answer, which no process of this package does.
- RETRY says that nothing is known, or that a time limit struck between the look and the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from flinkish_spark.errors import BrokerUnavailableError
from flinkish_spark.kafka import KafkaCommittable, TransactionClient
from flinkish_spark.kafka.marks import KafkaMarks
from flinkish_spark.kafka.transactions import Liveness
from flinkish_spark.protocol.ids import CheckpointId, TransactionalId
from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome
from flinkish_spark.protocol.records import Committable
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.sinks.base import Committer, SinkContext
from flinkish_spark.sinks.kafka_barriers import KafkaStaged, bound, committed, staged_in

MicroBatch = Sequence[KafkaStaged]


class KafkaCommitter(Committer):
    """Ends what tasks staged; see the module's head.

    Parameters
    ----------
    client
        Asks the coordinators; closed with the committer.
    marks
        Says at the brokers which checkpoint was committed; None for nothing.
    """

    def __init__(
        self, client: TransactionClient, context: SinkContext, marks: KafkaMarks | None = None
    ) -> None:
        self._client, self._context, self._marks = client, context, marks

    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Commit whole micro-batches in the given order, stopping at what is not done.

        The barrier records of a checkpoint that was aborted are aborted here.
        """
        micro_batches = list(_micro_batches(staged_in(committables)))
        try:
            if micro_batches:
                self._mark(checkpoint)
            alive = self._looked_at(micro_batches)
        except BrokerUnavailableError as unanswered:
            return [CommitAnswer(Outcome.RETRY, str(unanswered))]
        answers: list[CommitAnswer] = []
        for micro_batch in micro_batches:
            answers += self._committed(checkpoint, micro_batch, alive)
            if not answers[-1].outcome.is_done:
                break
        return answers

    def newest_marks(self) -> Sequence[Mark]:
        """Ask the brokers."""
        mark = None if self._marks is None else self._marks.newest()
        return () if mark is None else (mark,)

    def _mark(self, checkpoint: CheckpointId) -> None:
        """Leave the mark of a checkpoint; raise AnotherTimelineError if that of another timeline is there.

        This order matters: before the first transaction ends, since readers may see its records from then on,
        and a directory of before must not write them again.
        """
        if self._marks is None:
            return
        found, ours = self._marks.newest(), self._context.timeline.mark_of(checkpoint)
        if found is not None:
            self._context.require_ours(found, checkpoint)
        if found != ours:
            self._marks.leave(ours)

    def _looked_at(self, micro_batches: Sequence[MicroBatch]) -> Mapping[KafkaCommittable, Liveness]:
        """Ask about every micro-batch that could be committed halfway: one request to a coordinator."""
        data = [[one.handle for one in batch if one.barrier_of is None] for batch in micro_batches]
        handles = [handle for of_one in data if len(of_one) > 1 for handle in of_one]
        return self._client.is_alive(handles) if handles else {}

    def _committed(
        self, checkpoint: CheckpointId, micro_batch: MicroBatch, alive: Mapping[KafkaCommittable, Liveness]
    ) -> list[CommitAnswer]:
        """Commit one micro-batch; all answers are done but the last one."""
        # A transaction that is not open under its own epoch never is again, so that asking for its commit
        # changes nothing and tells what became of it: committed before, or lost.
        settled = {
            position: self._client.commit(one.handle)
            for position, one in enumerate(micro_batch)
            if one.handle in alive and not alive[one.handle].alive
        }
        lost = {position: answer for position, answer in settled.items() if _is(answer, Outcome.LOST)}
        is_touched = any(answer.outcome.is_done for answer in settled.values())
        unknown = next((answer for answer in settled.values() if _is(answer, Outcome.RETRY)), None)
        if lost and not is_touched and unknown is None:
            return [_lost(lost, micro_batch, settled)]
        answers: list[CommitAnswer] = []
        for position, one in enumerate(micro_batch):
            known = settled.get(position)
            if unknown is not None and (known is None or not known.outcome.is_done):
                # What became of the rest of the micro-batch is to be known first.
                answers.append(unknown)
            elif position in lost:
                answers.append(_lost(lost, micro_batch, settled))
            else:
                answers.append(known or self._ended(checkpoint, one, alive))
            if not answers[-1].outcome.is_done:
                break
        return answers

    def _ended(
        self, checkpoint: CheckpointId, one: KafkaStaged, alive: Mapping[KafkaCommittable, Liveness]
    ) -> CommitAnswer:
        answer = committed(self._client, checkpoint, one)
        if one.handle in alive and _is(answer, Outcome.LOST):
            # It was open at the look. The next call looks again and sees the micro-batch as a whole.
            return CommitAnswer(Outcome.RETRY, f"lost since it was looked at: {answer.detail}")
        return answer

    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """End each transaction with ABORT."""
        return [self._client.abort(staged.handle) for staged in staged_in(committables)]

    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        """Ask the transaction coordinators."""
        handles = {index: one.handle for index, one in bound(staged_in(committables)).items()}
        alive = self._client.is_alive(handles.values())
        who = f"sink '{self._context.uid}', transaction"
        return {
            index: f"{who} {handle.transactional_id}: {alive[handle].reason}"
            for index, handle in handles.items()
            if not alive[handle].alive
        }

    def task_of(self, committable: Committable) -> int | None:
        """Return the Spark partition that a transaction's id names; None for barrier records."""
        staged = KafkaStaged.of(committable.payload)
        name = TransactionalId.parse(staged.handle.transactional_id)
        return None if name is None or staged.barrier_of is not None else name.task

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        """Abort open transactions of this job that nobody will decide."""
        names = {str(c.payload.get("transactional_id", "")) for c in kept}
        aborted = 0
        listed = self._client.list_of_job(self._context.job)
        # This order matters: a block that is leased after the listing has nothing in it.
        leased = running_blocks()
        for found in listed:
            mine = found.transactional_id.owner_epoch == self._context.owner_epoch
            newer = found.transactional_id.owner_epoch > self._context.owner_epoch
            running = mine and found.transactional_id.block in leased
            if newer or running or str(found.transactional_id) in names:
                continue
            self._client.abort_open(found.transactional_id)
            aborted += 1
        return aborted

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _micro_batches(staged: Sequence[KafkaStaged]) -> Iterator[MicroBatch]:
    """Yield what belongs to one micro-batch: it has a block of its own until the receipt."""

    def block_of(one: KafkaStaged) -> tuple[object, ...]:
        name = TransactionalId.parse(one.handle.transactional_id)
        # A name that is not ours stands for itself.
        return (one.handle,) if name is None else (name.owner_epoch, name.block)

    for _, of_one_block in groupby(staged, block_of):
        yield list(of_one_block)


def _lost(
    lost: Mapping[int, CommitAnswer], micro_batch: MicroBatch, settled: Mapping[int, CommitAnswer]
) -> CommitAnswer:
    """Return the answer about a micro-batch that has lost transactions."""
    first = min(lost)
    is_proven = all(answer.is_proven_aborted for answer in lost.values())
    detail = lost[first].detail
    if len(micro_batch) > 1:
        detail += f" ({len(lost)} of the {len(micro_batch)} transactions of its micro-batch are lost)"
    behind = [p for p, answer in settled.items() if p > first and answer.outcome.is_done]
    if behind:
        name = micro_batch[behind[0]].handle.transactional_id
        detail += f"; {name} behind it was committed, by nobody of this package"
    return replace(lost[first], detail=detail, is_proven_aborted=is_proven and not behind)


def _is(answer: CommitAnswer, outcome: Outcome) -> bool:
    return answer.outcome is outcome
