"""Writing `format("flinkish-kafka")`: stage in the tasks, write ahead, commit each micro-batch.

For every micro-batch Spark makes a writer in a Python process on the driver and pickles it into the tasks;
behind them it makes a new one, in another call, and commits. The life of a micro-batch, in order:

1. *plan*, when the writer is pickled: earlier attempts are sealed, what they decided is finished, what they
   left open is aborted, and this attempt gets its number.
2. *stage*, in each task: one transaction, flushed and left open.
3. *commit*: the committables are written ahead (the decision), then committed, then confirmed by a receipt.
   Spark writes commits/N when this returns.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import os
import secrets
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.client import WIRES
from flinkish_spark.connectors.kafka.client.marks import KafkaMarks
from flinkish_spark.connectors.kafka.client.settings import (
    DEFAULT_MAX_REQUEST_BYTES,
    StagingSettings,
    TaskAttempt,
)
from flinkish_spark.connectors.kafka.client.transactions import (
    KafkaCommittable,
    Liveness,
    OpenTransaction,
    TransactionClient,
)
from flinkish_spark.connectors.kafka.format.options import SinkOptions, checkpoint_path
from flinkish_spark.core.errors import (
    AnotherTimelineError,
    BrokerUnavailableError,
    CommittableLostError,
    ConfigError,
    CorruptObjectError,
    EnvironmentFault,
    FencedError,
    FlinkishError,
    InternalError,
    JobDirError,
)
from flinkish_spark.core.steps import StepObserver
from flinkish_spark.core.store import CreateResult, LocalStore, ObjectMissing, SealedObjects
from flinkish_spark.protocol.decisions import Verdict
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, OwnerEpoch, TransactionalId
from flinkish_spark.protocol.micro_batches import (
    Attempt,
    AttemptDecision,
    AttemptNumber,
    DecidedBatch,
    StagedPart,
    decided_batches,
    next_attempt,
    why_not_replaceable,
)
from flinkish_spark.protocol.records import CommitAnswer, Outcome
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.worker.daemon import freeze_modules

if TYPE_CHECKING:
    import pyarrow as pa


FOLDER = "flinkish-kafka"
#: How many batches keep their files. Spark runs only the newest one again; the rest are for people.
_KEPT_BATCHES = 20


class EpochDir:
    """Typed access to the files of one drop-in sink, which live and die with Spark's checkpoint."""

    # Below <checkpointLocation>/flinkish-kafka:
    #
    #     sink.json               uuid, part of all transactional ids
    #     attempts/<n>.json       planned attempts
    #     decisions/<n>.json      COMMIT or ABORT of attempt n: the write-ahead
    #     receipts/<batch>.json   everything of the batch is committed

    def __init__(self, checkpoint_location: Path) -> None:
        self._spark_checkpoint = checkpoint_location
        self._store = LocalStore(checkpoint_location / FOLDER)
        self._objects = SealedObjects(self._store, str(self._store.root))

    def sink_uuid(self) -> JobUuid:
        """Return the uuid of this sink, made at the first call."""
        try:
            return JobUuid(self._objects.read("sink.json", "sink", dict)["uuid"])
        except ObjectMissing:
            self._store.create_if_absent("sink.json", seal("sink", {"uuid": uuid.uuid4().hex}))
            return JobUuid(self._objects.read("sink.json", "sink", dict)["uuid"])

    def newest_attempt(self) -> Attempt | None:
        numbers = self._objects.numbers("attempts")
        return (
            None
            if not numbers
            else self._objects.read(_attempt_key(max(numbers)), "attempt", Attempt.from_json)
        )

    def attempt(self, number: AttemptNumber) -> Attempt | None:
        return self._objects.optional(_attempt_key(int(number)), "attempt", Attempt.from_json)

    def create_attempt(self, attempt: Attempt) -> CreateResult:
        return self._store.create_if_absent(
            _attempt_key(int(attempt.number)), seal("attempt", attempt.to_json())
        )

    def undecided_attempts(self) -> tuple[AttemptNumber, ...]:
        open_numbers = self._objects.numbers("attempts") - self._objects.numbers("decisions")
        return tuple(AttemptNumber(n) for n in sorted(open_numbers))

    def create_decision(self, decision: AttemptDecision) -> CreateResult:
        """Decide an attempt once and for all; EXISTS means that it is decided otherwise."""
        key = f"decisions/{decision.attempt}.json"
        created = self._store.create_if_absent(key, seal("attempt-decision", decision.to_json()))
        # It counts only beside its attempt, which may be pruned, with the seal on it, while a zombie slept.
        if created is CreateResult.CREATED and self.attempt(decision.attempt) is None:
            self._store.delete(key)
            return CreateResult.EXISTS
        if created is CreateResult.EXISTS and self.decision(decision.attempt) == decision:
            # A file system over a network may do what it was asked and lose the answer.
            return CreateResult.CREATED
        return created

    def decision(self, attempt: AttemptNumber) -> AttemptDecision | None:
        try:
            return self._decision(int(attempt))
        except ObjectMissing:
            return None

    def decisions(self) -> tuple[AttemptDecision, ...]:
        numbers = self._objects.numbers("attempts") & self._objects.numbers("decisions")
        return tuple(self._decision(n) for n in sorted(numbers))

    def decided_batches(self) -> tuple[DecidedBatch, ...]:
        try:
            return decided_batches(self.decisions())
        except ValueError as error:
            raise CorruptObjectError(
                f"the decisions below {self._store.root} contradict each other",
                why=str(error),
                what_to_do="restore the checkpoint from a backup; nothing is guessed",
            ) from error

    def create_receipt(self, batch: BatchId, body: Mapping[str, Any]) -> CreateResult:
        """Confirm a batch. EXISTS is harmless: somebody finished the same work."""
        return self._store.create_if_absent(f"receipts/{batch}.json", seal("batch-receipt", body))

    def confirmed(self) -> frozenset[BatchId]:
        return frozenset(BatchId(number) for number in self._objects.numbers("receipts"))

    def offsets_sha256(self, batch: BatchId) -> str:
        """Return the digest of what Spark logged as the batch's offsets, without its metadata line."""
        entry = self._spark_checkpoint / "offsets" / str(batch)
        try:
            lines = entry.read_text(encoding="utf-8").strip().split("\n")
        except FileNotFoundError:
            raise JobDirError(
                f"Spark's checkpoint in {self._spark_checkpoint} has no offsets of batch {batch}",
                why="the option checkpointLocation of the sink is not where Spark keeps its checkpoint",
                what_to_do="give the same absolute path as the query's checkpointLocation; where Spark's "
                "default file system is no disk (fs.defaultFS), both with file:// in front",
            ) from None
        return hashlib.sha256("\n".join([lines[0], *lines[2:]]).encode()).hexdigest()

    def prune(self) -> None:
        """Delete what belongs to batches long confirmed; the newest attempt always stays."""
        receipts = self._objects.numbers("receipts")
        if len(receipts) <= _KEPT_BATCHES + _KEPT_BATCHES // 2:
            return
        oldest_kept = sorted(receipts)[-_KEPT_BATCHES]
        newest = max(self._objects.numbers("attempts"))
        kept_from = min(
            (
                int(d.attempt)
                for d in self.decisions()
                if d.batch is not None and d.batch.value >= oldest_kept
            ),
            default=newest,
        )
        for number in sorted(n for n in self._objects.numbers("attempts") if n < kept_from):
            # This order matters: an attempt without its decision would look open.
            self._store.delete(_attempt_key(number))
        for number in sorted(self._objects.numbers("decisions") - self._objects.numbers("attempts")):
            self._store.delete(f"decisions/{number}.json")
        for number in (n for n in receipts if n < oldest_kept):
            self._store.delete(f"receipts/{number}.json")

    def _decision(self, number: int) -> AttemptDecision:
        key = f"decisions/{number}.json"
        found = self._objects.read(key, "attempt-decision", AttemptDecision.from_json)
        if int(found.attempt) != number:
            raise CorruptObjectError(f"{key} is about attempt {found.attempt}", key=key)
        return found


#: Below it a pipeline of Spark's keeps the checkpoints of its flows: <sink>/<flow>/<how often refreshed>.
_PIPELINE_CHECKPOINTS = "_checkpoints"


def before_full_refresh(checkpoint_location: Path) -> list[Path]:
    """Return the checkpoints that a pipeline's flow had before its full refreshes and that a sink used."""
    flow, number = checkpoint_location.parent, checkpoint_location.name
    if _PIPELINE_CHECKPOINTS not in flow.parts or not number.isdecimal():
        return []
    used = [found.parent.parent for found in flow.glob(f"*/{FOLDER}/sink.json")]
    earlier = [one for one in used if one.name.isdecimal() and int(one.name) < int(number)]
    return sorted(earlier, key=lambda one: int(one.name))


def _attempt_key(number: int) -> str:
    return f"attempts/{number}.json"


def settle(checkpoint_location: str, batch: int) -> None:
    """Declare a micro-batch done whose lost rows you have written, or given up, yourself.

    Called by a person while the query is stopped, after it ended with CommittableLostError. The
    query goes on behind that micro-batch; what the repetition of it stages is aborted.
    """
    directory = EpochDir(checkpoint_path(checkpoint_location))
    wanted = BatchId(batch)
    if wanted not in {found.batch for found in directory.decided_batches()}:
        raise ConfigError(
            f"micro-batch {batch} was not decided by the sink in {checkpoint_location}",
            what_to_do="take the number from the error, and the path from the query",
        )
    if wanted in directory.confirmed():
        raise ConfigError(
            f"micro-batch {batch} is confirmed already; there is nothing to settle",
            what_to_do="start the query again",
        )
    directory.create_receipt(wanted, {"settled_by_hand": True})


class EpochStep(enum.Enum):
    """Every durable or outward step of the driver's side, in order."""

    #: Before a micro-batch's tasks, and right behind Spark's commit of the one before it.
    PLAN = "plan"
    #: The write-ahead: which transactions make up the batch.
    DECISION = "decision"
    END_TRANSACTION = "end-transaction"
    RECEIPT = "receipt"


EpochObserver = StepObserver[EpochStep]


class Transactions(Protocol):
    """What is needed of :class:`.TransactionClient`."""

    def commit(self, committable: KafkaCommittable) -> CommitAnswer:
        """Make a prepared transaction visible."""

    def abort(self, committable: KafkaCommittable) -> CommitAnswer:
        """Drop a prepared transaction."""

    def is_alive(self, committables: Sequence[KafkaCommittable]) -> Mapping[KafkaCommittable, Liveness]:
        """Tell which can still be committed."""

    def list_of_job(self, job: JobUuid) -> list[OpenTransaction]:
        """Return the open transactions of a sink."""

    def abort_open(self, transactional_id: TransactionalId) -> CommitAnswer:
        """Abort whatever is open under an id."""


def handles_of(parts: Sequence[StagedPart]) -> list[KafkaCommittable]:
    return [KafkaCommittable.from_json(part.payload) for part in parts if part.payload is not None]


LOG = logging.getLogger(__name__)


#: In place of a driver, of the last attempt in a checkpoint that a full refresh has replaced.
_FULL_REFRESH = "full refresh"


class StagedDataLostError(EnvironmentFault):
    """Staged data died before its batch was decided; Spark may run the batch again."""

    restartable = True


@dataclass(frozen=True, slots=True)
class Lease:
    sink: JobUuid
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class _Finished:
    lost: tuple[StagedPart, ...]
    proven_aborted: frozenset[int]
    details: Mapping[int, str]


class SinkEpochs:
    """The protocol of one drop-in sink; its rules are in `protocol/micro_batches.py`."""

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

    def plan(self) -> Lease:
        """Fence earlier attempts, finish what they decided, and take the next attempt."""
        self._observer.before(EpochStep.PLAN, "")
        sink = self._dir.sink_uuid()
        newest = self._dir.newest_attempt()
        if newest is not None and newest.planner == _FULL_REFRESH:
            raise FencedError(
                "this checkpoint was given up by a full refresh of its flow",
                why="a newer checkpoint of the flow is beside it, and has ended what was open here",
                what_to_do="let the pipeline use the newest one; if that was deleted, refresh the flow fully",
            )
        if newest is None or newest.planner != self._planner:
            # A driver that goes on has the folder that it had before.
            self._require_ours(newest)
        is_confirmed = newest is not None and self._is_confirmed(newest.number)
        finished: list[DecidedBatch] = []
        if newest is not None and not is_confirmed:
            finished = self._end_earlier(newest)
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

    def give_up(self) -> None:
        """End this sink for good: finish what is decided, abort all else, let nobody plan here again."""
        # By an attempt that is never staged: whoever lives on finds it, or cannot take its number.
        while (newest := self._dir.newest_attempt()) is not None and newest.planner != _FULL_REFRESH:
            self._dir.create_attempt(next_attempt(newest, _FULL_REFRESH, newest_is_confirmed=False))
        if newest is not None:
            for batch in self._end_earlier(newest):
                self._confirm(batch)

    def _end_earlier(self, newest: Attempt) -> list[DecidedBatch]:
        """Seal attempts up to `newest`, finish what they decided and abort the rest; return the finished."""
        # This order matters: sealed first, nothing can be decided while leftovers are swept.
        self._seal_open_attempts(newest.number)
        unconfirmed = self._unconfirmed()
        finished = [batch for batch in unconfirmed if not self._finish(batch).lost]
        self._sweep(self._dir.sink_uuid(), newest.highest_block, unconfirmed)
        return finished

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

    def commit(self, attempt: AttemptNumber, batch: BatchId, parts: Sequence[StagedPart]) -> None:
        """Decide and commit a batch, or finish it if an earlier attempt decided it."""
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
        """Give an attempt up, unless it is decided: Spark calls it behind a failed commit, too."""
        if attempt is None:
            newest = self._dir.newest_attempt()
            if newest is None or newest.planner != self._planner:
                return
            attempt = newest.number
        self._dir.create_decision(AttemptDecision(attempt, Verdict.ABORT, reason="the attempt failed"))
        decision = self._dir.decision(attempt)
        if decision is not None and decision.verdict is Verdict.COMMIT:
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
            f"flinkish_spark.connectors.kafka.format.writer.settle(checkpoint_location, {decided.batch})",
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

    def _why_dead(self, parts: Sequence[StagedPart]) -> str:
        handles = handles_of(parts)
        if not handles:
            return ""
        alive = self._transactions.is_alive(handles)
        dead = [f"{h.transactional_id}: {alive[h].reason}" for h in handles if not alive[h].alive]
        return dead[0] if dead else ""

    def _sweep(self, sink: JobUuid, highest_block: int, unconfirmed: Sequence[DecidedBatch]) -> None:
        """Abort what the sink left open and no unconfirmed batch names: it holds back every reader."""
        parts = [one for batch in unconfirmed for part in batch.first.parts for one in batch.candidates(part)]
        needed = {handle.transactional_id for handle in handles_of(parts)}
        for found in self._transactions.list_of_job(sink):
            # Of attempts planned later, perhaps by another driver.
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


#: The drop-in sink has attempts in place of owners.
_NO_OWNER = OwnerEpoch(0)


@dataclass
class StagedMessage(WriterCommitMessage):
    attempt: int
    part: dict[str, Any]


class KafkaStreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches exactly once."""

    def __init__(self, options: SinkOptions, make_observer: Callable[[], EpochObserver]) -> None:
        self._options, self._make_observer = options, make_observer
        self._lease: Lease | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Spark pickles a writer exactly when it is about to run a micro-batch's tasks with it. There is
        # no other moment before the tasks in which this code runs on the driver.
        if self._lease is None:
            location = self._options.checkpoint_location
            if EpochDir(location).newest_attempt() is None:
                for earlier in before_full_refresh(location):
                    self._give_up(earlier)
            with self._epochs(location) as epochs:
                self._lease = epochs.plan()
        return {"_options": self._options, "_lease": self._lease}

    @contextmanager
    def _epochs(self, checkpoint_location: Path) -> Iterator[SinkEpochs]:
        freeze_modules()
        # Planning and committing are different processes, forked by the same daemon of the same JVM.
        planner = f"{socket.gethostname()}-{os.getppid()}"
        directory = EpochDir(checkpoint_location)
        # The process serves the next micro-batch too, and a connection costs as much as a small one.
        with WIRES.wire(self._options.connection) as wire:
            marks, topic = None, self._options.topic
            if topic is not None:
                marks = KafkaMarks(KafkaAdmin.over(wire), directory.sink_uuid(), "micro-batches", topic)
            client = TransactionClient.over(wire)
            yield SinkEpochs(directory, client, self._make_observer(), planner, marks)

    def _give_up(self, earlier: Path) -> None:
        try:
            with self._epochs(earlier) as epochs:
                epochs.give_up()
        except BrokerUnavailableError:
            raise
        except FlinkishError as error:
            # A full refresh is what mends a checkpoint that is damaged or is another one's copy.
            LOG.warning("what %s has left open ends by its timeout: %s", earlier, error)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        """Stage one task's rows; everything is acknowledged and invisible when this returns."""
        import pyarrow as pa

        from flinkish_spark.connectors.kafka.client.admission import row_digest
        from flinkish_spark.connectors.kafka.client.producer import StagedTransaction

        freeze_modules()
        lease, task = self._lease, TaskContext.get()
        if lease is None or task is None:
            raise InternalError("a task of the Kafka sink runs without a lease")
        rows = digest = 0
        with StagedTransaction(self._settings(lease, task)) as transaction:
            for batch in iterator:
                if not batch.num_rows:
                    continue
                columns = {name: batch.column(name) for name in self._options.columns}
                if self._options.topic is not None:
                    columns.pop("topic", None)
                transaction.write(
                    columns.get("key", pa.nulls(batch.num_rows, pa.binary())),
                    columns["value"],
                    columns.get("headers"),
                    topics=columns.get("topic", self._options.topic),
                    partitions=columns.get("partition"),
                )
                rows += batch.num_rows
                digest += row_digest(list(columns.values()))
            prepared = transaction.prepare()
        payload = None if prepared is None else prepared.to_json()
        part = StagedPart(task.partitionId(), rows, digest % (1 << 64), payload)
        return StagedMessage(int(lease.attempt.number), part.to_json())

    def _settings(self, lease: Lease, task: TaskContext) -> StagingSettings:
        connection = self._options.connection
        prefix = TransactionalId.prefix(lease.sink, _NO_OWNER, lease.attempt.block)
        return StagingSettings(
            connection=connection,
            transactional_id=prefix,
            attempt=TaskAttempt(task.partitionId(), task.attemptNumber()),
            transaction_timeout_ms=self._options.transaction_timeout_ms,
            max_record_bytes=self._options.producer.max_request_bytes or DEFAULT_MAX_REQUEST_BYTES,
            producer=self._options.producer,
        )

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Commit a micro-batch, or finish the commit of an earlier attempt of it."""
        attempts, parts = _read(messages)
        if len(parts) != len(messages):
            raise InternalError("Spark commits a micro-batch of which a task reported nothing")
        if not attempts:
            # A micro-batch without tasks has nothing to commit, and no attempt to name.
            return
        with self._epochs(self._options.checkpoint_location) as epochs:
            epochs.commit(_common_attempt(attempts), BatchId(batchId), parts)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        attempts, parts = _read(messages)
        with self._epochs(self._options.checkpoint_location) as epochs:
            epochs.abort(_common_attempt(attempts) if attempts else None, parts)


def _read(messages: list[WriterCommitMessage | None]) -> tuple[list[AttemptNumber], list[StagedPart]]:
    staged = [message for message in messages if isinstance(message, StagedMessage)]
    return [AttemptNumber(m.attempt) for m in staged], [StagedPart.from_json(m.part) for m in staged]


def _common_attempt(attempts: Sequence[AttemptNumber]) -> AttemptNumber:
    if len(set(attempts)) != 1:
        names = ", ".join(str(a) for a in sorted(set(attempts))) or "none"
        raise InternalError(f"the tasks of one micro-batch belong to the attempts {names}")
    return attempts[0]
