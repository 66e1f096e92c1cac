"""What a checkpoint does to transactions, over several starts: coordinator, committer and recovery are real.

Only Kafka is not: `Transactions` keeps one state for each id and epoch, as a broker does. That the real
client answers like this is shown in tests/integration/broker/test_kafka_transactions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark import KafkaSink
from flinkish_spark.checkpoint.commit import Confirmation
from flinkish_spark.checkpoint.ownership import Ownership, take_over
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.connectors.kafka.client.transactions import (
    Evidence,
    KafkaCommittable,
    Liveness,
    OpenTransaction,
)
from flinkish_spark.connectors.kafka.writer import KafkaSinkCommittable
from flinkish_spark.contracts.sink import Committer
from flinkish_spark.core.steps import SilentObserver
from flinkish_spark.job.recovery import Recovery
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage, OwnerEpoch, TransactionalId
from flinkish_spark.protocol.micro_batches import OFFSETS
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome, StagedBatch
from flinkish_spark.protocol.recovery import StartSpark
from tests.support.coordinator_rig import Fault, Rig, ack, by_hand, context_of
from tests.support.recoveries import NoReplaying, NoReseeding
from tests.support.sinks import sink_context_of

JOB = JobUuid("a" * 32)
OPEN, COMMITTED, ABORTED = "open", "committed", "aborted"


@dataclass
class Transactions:
    """In the place of `TransactionClient`: transactions by id, the newest epoch last."""

    #: Where a job directory could be.
    root: Path
    states: dict[str, list[str]] = field(default_factory=dict)
    is_away: bool = False
    #: Raised by the next commits.
    failing: list[Exception] = field(default_factory=list)
    #: Called before every commit.
    on_commit: Callable[[], object] = lambda: None
    #: Every end that changed something.
    ends: list[str] = field(default_factory=list)

    def begin(self, name: TransactionalId) -> KafkaCommittable:
        epochs = self.states.setdefault(str(name), [])
        if epochs and epochs[-1] == OPEN:
            epochs[-1] = ABORTED
        epochs.append(OPEN)
        return KafkaCommittable(str(name), 7, len(epochs) - 1, Evidence("out", 0, 0), 1)

    def state(self, one: KafkaCommittable) -> str:
        return self.states[one.transactional_id][one.producer_epoch]

    @property
    def open_ids(self) -> list[str]:
        return sorted(name for name, epochs in self.states.items() if epochs[-1] == OPEN)

    # -- the client's -----------------------------------------------------------------------------
    def commit(self, one: KafkaCommittable) -> CommitAnswer:
        self.on_commit()
        if self.failing:
            raise self.failing.pop(0)
        return self._end(one, COMMITTED, Outcome.LOST)

    def abort(self, one: KafkaCommittable) -> CommitAnswer:
        return self._end(one, ABORTED, Outcome.FENCED)

    def _end(self, one: KafkaCommittable, wanted: str, contrary: Outcome) -> CommitAnswer:
        if self.is_away:
            return CommitAnswer(Outcome.RETRY, "nobody answers")
        found = self.state(one)
        if found == OPEN:
            self.states[one.transactional_id][one.producer_epoch] = wanted
            self.ends.append(f"{wanted} {one.transactional_id}")
            return CommitAnswer(Outcome.COMMITTED, found)
        return CommitAnswer(Outcome.ALREADY_COMMITTED if found == wanted else contrary, found)

    def is_alive(self, ones: Iterable[KafkaCommittable]) -> dict[KafkaCommittable, Liveness]:
        return {one: Liveness(self.state(one) == OPEN, self.state(one)) for one in ones}

    def list_open_transactions(self, job: JobUuid) -> list[OpenTransaction]:
        found = [TransactionalId.parse(name) for name in self.open_ids]
        return [OpenTransaction(one, 7, "Ongoing") for one in found if one is not None and one.job == job]

    def abort_open(self, name: TransactionalId) -> CommitAnswer:
        epochs = self.states[str(name)]
        if epochs[-1] == OPEN:
            epochs[-1] = ABORTED
            self.ends.append(f"{ABORTED} {name}")
        return CommitAnswer(Outcome.COMMITTED)

    def close(self) -> None:
        pass


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Transactions:
    made = Transactions(tmp_path)
    monkeypatch.setattr(
        "flinkish_spark.connectors.kafka.client.transactions.TransactionClient.from_wire", lambda wire: made
    )
    monkeypatch.setattr("flinkish_spark.connectors.kafka.sink.KafkaMarks", lambda *args: None)
    return made


def committer_of(ownership: Ownership) -> Committer:
    """The product's own committer of a Kafka sink."""
    context = sink_context_of(JOB, ownership.epoch, "a", None, by_hand())
    return KafkaSink("broker:9092", "out").create_committer(None, context)  # type: ignore[arg-type]


class KafkaRig(Rig):
    """A start of a job with one Kafka sink, whose micro-batches have one task each."""

    def __init__(self, kafka: Transactions, *, config: dict[str, Any] | None = None, **more: Any) -> None:
        self.kafka = kafka
        #: The transaction of each micro-batch.
        self.staged: dict[int, KafkaCommittable] = {}
        super().__init__(by_hand(**(config or {})), sinks="a", operators=(), begin=False, **more)
        self.committers["a"] = committer_of(self.ownership)  # type: ignore[assignment]
        self.coordinator.begin()

    def begin_writing(self, block: int | None = None, task: int = 0) -> KafkaCommittable:
        """Open a transaction of a task that has reported nothing yet."""
        block = self.blocks.lease() if block is None else block
        return self.kafka.begin(TransactionalId(JOB, self.ownership.epoch, block, task, 0))

    def stage(self, *checkpoints: int, sinks: str | None = None, committables: bool = True) -> int:
        number, self.next_batch = self.next_batch, self.next_batch + 1
        self.attempt += 1
        block, payloads = self.blocks.lease(), []
        if committables:
            self.staged[number] = self.begin_writing(block)
            payloads.append(Committable("a", KafkaSinkCommittable(self.staged[number]).to_payload()))
        staged = StagedBatch(
            Lineage(0),
            BatchId(number),
            self.ownership.epoch,
            self.attempt,
            (ack("a", *checkpoints),),
            tuple(payloads),
            (block,),
        )
        self.job_dir.write_staged(staged)
        self.coordinator.on_staged(staged, sync_ms=1)
        self.tick()
        return number

    @property
    def states(self) -> dict[int, str]:
        """What became of the transaction of each micro-batch."""
        return {batch: self.kafka.state(one) for batch, one in self.staged.items()}

    def recover(self) -> tuple[Ownership, StartSpark, list[StagedBatch]]:
        """Let another process take the job over and recover it."""
        ownership = take_over(self.job_dir, self.clock)
        job = context_of(
            job_dir=self.job_dir,
            ownership=ownership,
            log=SparkLog(self.store, "spark/1", self.kafka.root / "spark" / "1"),
            pins=NoPins(),
            committers={"a": committer_of(ownership)},
            clock=self.clock,
            observer=SilentObserver(),
        )
        inputs: Any = SimpleNamespace(lower=lambda position: None, why_lost=lambda position: "")
        recovery = Recovery(job, Confirmation(job), inputs, reseeding=NoReseeding(), replaying=NoReplaying())
        return ownership, *recovery.run()


class NoPins:
    """Spark's state is not what is looked at here."""

    def list_pinned(self) -> frozenset[CheckpointId]:
        return frozenset(CheckpointId(n) for n in range(1, 20))

    def pin(self, decision: Decision) -> None:
        pass


def two_in_flight(kafka: Transactions) -> KafkaRig:
    """Checkpoint 1 up to micro-batch 1 is being decided; 2 is open, and staged up to micro-batch 3."""
    rig = KafkaRig(kafka, config={"max_concurrent": 2})
    rig.threads.held = ("complete",)
    rig.run_batch()
    rig.ask(name="one")
    rig.run_batch(1)
    rig.run_batch()
    rig.ask(name="two")
    rig.run_batch(2)
    assert rig.open == "1:DECIDING 2:LOGGED"
    return rig


def test_completing_one_checkpoint_commits_all_up_to_it_and_nothing_later(kafka: Transactions) -> None:
    """Behaviour 125: what belongs to the next one and what is being written stay open."""
    rig = two_in_flight(kafka)
    running = rig.begin_writing()
    assert set(rig.states.values()) == {OPEN}
    rig.threads.let("complete-1")
    rig.tick()
    assert rig.answers == ["one=COMPLETED"]
    assert rig.states == {0: COMMITTED, 1: COMMITTED, 2: OPEN, 3: OPEN}
    assert kafka.state(running) == OPEN
    rig.threads.let("complete-2")
    rig.tick()
    assert set(rig.states.values()) == {COMMITTED}
    assert kafka.open_ids == [running.transactional_id]


def test_after_a_crash_what_is_decided_is_committed_what_may_be_is_kept_and_the_rest_is_aborted(
    kafka: Transactions,
) -> None:
    """Behaviours 127, 142, 143, 146, 148: one checkpoint is decided, another open, and tasks write."""
    rig = two_in_flight(kafka)
    rig.log.restore(OFFSETS, BatchId(4), "v1\n{}\n-")
    rig.stage()
    leftovers = [rig.begin_writing(), rig.begin_writing(task=3)]
    # The process dies between the decision and the first commit.
    kafka.is_away = True
    rig.coordinator.stop()
    rig.threads.let("complete-1")
    rig.tick()
    assert (rig.verdict(1), rig.objects(1)) == (Verdict.COMMIT, ["decision.json", "trigger.json"])
    assert set(rig.states.values()) == {OPEN}
    kafka.is_away = False

    ownership, start, kept = rig.recover()
    assert (start.next_batch, [int(batch.batch) for batch in kept]) == (BatchId(4), [2, 3])
    assert rig.states == {0: COMMITTED, 1: COMMITTED, 2: OPEN, 3: OPEN, 4: ABORTED}
    assert [kafka.state(one) for one in leftovers] == [ABORTED, ABORTED]
    assert [key.rpartition("/")[2] for key in rig.store.list("staged/0")] == ["2-1.3.json", "3-1.4.json"]
    assert (rig.objects(1)[1], rig.verdict(2)) == ("receipt.json", Verdict.ABORT)

    # The kept ones are decided at once by the next start, under an id of its own.
    second = KafkaRig(kafka, store=rig.store, ownership=ownership, kept=kept)
    second.tick()
    second.run_batch(3)
    assert second.confirmed == [3]
    assert rig.states == {0: COMMITTED, 1: COMMITTED, 2: COMMITTED, 3: COMMITTED, 4: ABORTED}
    assert second.states == {4: COMMITTED}
    # So no reader waits for anything of the start that crashed.
    assert kafka.open_ids == []


@pytest.mark.parametrize("lost", ["1/decision.json", "1/receipt.json"], ids=["decision", "receipt"])
def test_a_crash_before_and_behind_the_commits_ends_alike(kafka: Transactions, lost: str) -> None:
    """Behaviours 127, 133: what was committed before is committed again, which changes nothing."""
    rig = KafkaRig(kafka)
    rig.run_batch()
    rig.ask()
    if lost.endswith("decision.json"):
        # It is there, its writer is told that it is not, and then cannot ask any more.
        rig.store.faults = [(lost, Fault.ANSWER_LOST), (lost, Fault.REFUSED)]
    else:
        rig.store.faults = [(lost, Fault.REFUSED)]
    rig.run_batch(1)
    assert rig.coordinator.failure is not None
    was_committed = list(kafka.ends)
    assert bool(was_committed) is lost.endswith("receipt.json")

    rig.recover()
    receipt = rig.job_dir.receipt(CheckpointId(1))
    assert receipt is not None
    assert receipt.answers == {"a": ["ALREADY_COMMITTED" if was_committed else "COMMITTED"] * 2}
    assert rig.states == {0: COMMITTED, 1: COMMITTED}
    assert len(kafka.ends) == 2
    # Nor does one more recovery find anything to do.
    rig.recover()
    assert (len(kafka.ends), rig.store.list("staged/0")) == (2, ())


def test_the_id_of_a_commit_that_failed_for_a_strange_reason_is_not_given_out_again(
    kafka: Transactions,
) -> None:
    """Behaviour 138: the query fails over, and its next micro-batches write under other ids."""
    rig = KafkaRig(kafka)
    kafka.failing = [RuntimeError("an answer that nobody knows")]
    rig.take()
    assert isinstance(rig.coordinator.failure, RuntimeError)
    assert (rig.verdict(1), rig.objects(1)) == (Verdict.COMMIT, ["decision.json", "trigger.json"])
    used = rig.staged[0].transactional_id
    # As the supervisor does before it starts the query again.
    rig.blocks.forget()
    again = rig.begin_writing()
    assert again.transactional_id != used
    kafka.abort(again)
    # A new owner has other ids anyway, and finishes what was decided.
    ownership, _, _ = rig.recover()
    assert rig.states == {0: COMMITTED}
    later = KafkaRig(kafka, store=rig.store, ownership=ownership)
    assert later.begin_writing().transactional_id not in (used, again.transactional_id)


def test_an_id_is_used_again_behind_the_receipt_and_under_a_higher_epoch(kafka: Transactions) -> None:
    """Behaviour 141: not a moment earlier, since its handle may have to be committed once more."""
    rig, next_ones = KafkaRig(kafka), []
    kafka.on_commit = lambda: next_ones.append(rig.begin_writing())
    rig.take()
    first, (meanwhile,) = rig.staged[0], next_ones
    assert meanwhile.transactional_id != first.transactional_id
    rig.stage()
    again = rig.staged[1]
    assert again.transactional_id == first.transactional_id
    assert again.producer_epoch > first.producer_epoch
    kafka.on_commit = lambda: None
    assert kafka.commit(first).outcome is Outcome.ALREADY_COMMITTED
    assert [kafka.state(one) for one in (first, meanwhile, again)] == [COMMITTED, OPEN, OPEN]


def test_a_micro_batch_without_records_completes_a_checkpoint_and_gives_its_id_back(
    kafka: Transactions,
) -> None:
    """Behaviours 40, 144: nothing to commit is an acknowledgement too."""
    rig = KafkaRig(kafka)
    rig.ask()
    rig.commit_log(rig.stage(1, committables=False))
    assert (rig.answers, rig.confirmed, kafka.states) == (["user=COMPLETED"], [1], {})
    receipt = rig.job_dir.receipt(CheckpointId(1))
    assert receipt is not None and receipt.answers == {"a": []}
    assert (rig.blocks.leased, rig.blocks.lease()) == (frozenset(), 1)


@pytest.mark.parametrize("tasks", [1, 7])
def test_leftovers_are_found_however_many_tasks_wrote_them_and_newer_owners_are_left_alone(
    kafka: Transactions, tasks: int
) -> None:
    """Behaviours 142, 149, 150: the id says whose a transaction is; nobody has to guess."""
    rig = KafkaRig(kafka)
    mine = int(rig.ownership.epoch) + 1
    handles = {
        (owner, task): kafka.begin(TransactionalId(JOB, OwnerEpoch(owner), 5, task, 0))
        for owner in (mine - 1, mine, mine + 1)
        for task in range(tasks)
    }
    kept = kafka.begin(TransactionalId(JOB, OwnerEpoch(mine - 1), 6, 0, 0))
    running = kafka.begin(TransactionalId(JOB, OwnerEpoch(mine), 8, 0, 0))
    stranger = kafka.begin(TransactionalId(JobUuid("b" * 32), OwnerEpoch(mine), 5, 0, 0))
    sweeping = committer_of(Ownership(rig.job_dir, OwnerEpoch(mine)))
    pending = [Committable("a", KafkaSinkCommittable(kept).to_payload())]
    assert sweeping.sweep(pending, lambda: frozenset({8})) == 2 * tasks
    found = {owner: {kafka.state(handles[owner, task]) for task in range(tasks)} for owner, _ in handles}
    assert found == {mine - 1: {ABORTED}, mine: {ABORTED}, mine + 1: {OPEN}}
    assert [kafka.state(one) for one in (kept, running, stranger)] == [OPEN] * 3
