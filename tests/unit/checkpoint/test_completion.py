"""From the look at what is staged over the decision to the receipt, and what each step may meet."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from py4j.protocol import Py4JNetworkError

from flinkish_spark.checkpoint.commit import JobInterruptedError
from flinkish_spark.checkpoint.completion import Completion
from flinkish_spark.checkpoint.decision_point import DeadCommittableError, DecisionError
from flinkish_spark.checkpoint.failures import QueryError
from flinkish_spark.checkpoint.ownership import take_over
from flinkish_spark.core.errors import (
    AuthorizationError,
    BrokerUnavailableError,
    CommittableLostError,
    FencedError,
    JobDirError,
    SparkGoneError,
    StoreError,
)
from flinkish_spark.core.store import CreateResult
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import Committable, Outcome, StagedBatch
from tests.support.clocks import ManualClock
from tests.support.coordinator_rig import Fault, Rig
from tests.support.jvm_errors import Throwables

REFUSED, LOST_ANSWER = ("1/decision.json", Fault.REFUSED), ("1/decision.json", Fault.ANSWER_LOST)


class Bench:
    """A completion with two staged micro-batches, outside of its coordinator."""

    def __init__(self) -> None:
        self.decided: list[int] = []
        self.receipts: list[Decision] = []
        self.kept: list[Decision] = []
        self.rig = Rig(on_decided=self.kept.append, on_receipt=self.receipts.append)
        self.batches = tuple(self.staged(batch) for batch in (0, 1))
        self.undecided = self.batches
        self.completion = Completion(
            self.rig.parts, lambda: self.undecided, lambda: self.rig.coordinator.is_stopping
        )
        self.a, self.b = self.rig.committers["a"], self.rig.committers["b"]

    def staged(self, batch: int, owner: OwnerEpoch | None = None) -> StagedBatch:
        committables = tuple(Committable(uid, {"batch": batch}) for uid in "ab")
        block = self.rig.blocks.lease()
        epoch = owner or self.rig.ownership.epoch
        staged = StagedBatch(Lineage(0), BatchId(batch), epoch, batch, (), committables, (block,))
        self.rig.job_dir.write_staged(staged)
        return staged

    def decision(self, *batches: StagedBatch, owner: OwnerEpoch | None = None) -> Decision:
        return Decision(
            CheckpointId(1),
            Verdict.COMMIT,
            owner or self.rig.ownership.epoch,
            5,
            batches=batches or self.batches,
            offsets_text="v1\n{}\n-",
        )

    def complete(self, *batches: StagedBatch):
        return self.completion.complete(
            self.decision(*batches), lambda: self.decided.append(len(self.rig.observer.steps))
        )

    @property
    def steps(self) -> list[str]:
        return [step for step in self.rig.observer.steps if step.startswith("+")]


@pytest.fixture
def bench() -> Bench:
    return Bench()


# -- the order ------------------------------------------------------------------------------------------


def test_the_state_of_a_checkpoint_is_kept_before_its_first_commit(bench) -> None:
    """Commits may take long, and Spark cleans up meanwhile."""
    kept = []
    bench.a.on_call = lambda call: kept.append(len(bench.kept)) if call == "commit" else None
    bench.complete()
    assert kept == [1] and bench.kept == bench.receipts


def test_the_steps_of_a_completion_have_one_order(bench) -> None:
    """Behaviours 1, 155: look, decide, commit in batch order, group offsets, receipt, clean up."""
    events = []
    for uid, committer in bench.rig.committers.items():
        committer.on_call = lambda call, uid=uid: events.append(f"{call} {uid}")
    receipt = bench.complete()
    assert bench.steps == [
        "+decision:1",
        "+sink-commit:a",
        "+sink-commit:b",
        "+sink-complete:a",
        "+sink-complete:b",
        "+group-offsets:1",
        "+receipt:1",
    ]
    looked, committed, swept = events[:2], events[2:4], events[4:]
    assert looked == ["why_dead a", "why_dead b"]
    assert (committed, swept) == (["commit a", "commit b"], ["sweep a", "sweep b"])
    assert bench.a.called("commit") == [(1, [0, 1])]
    # `on_decided` came behind the decision and before the first commit.
    assert [bench.rig.observer.steps[n - 1] for n in bench.decided] == ["+decision:1"]
    assert receipt.answers == {"a": ["COMMITTED"] * 2, "b": ["COMMITTED"] * 2}
    assert bench.receipts == [bench.decision()]


def test_nothing_is_committed_before_the_decision_is_durable(bench) -> None:
    """Behaviour 66."""
    for committer in bench.rig.committers.values():
        committer.on_call = lambda call: call != "commit" or bench.rig.verdict(1) is Verdict.COMMIT or 1 / 0
    bench.complete()
    assert bench.rig.objects(1) == ["decision.json", "receipt.json"]


def test_nothing_of_a_batch_goes_before_the_receipt(bench) -> None:
    def stored(call: str) -> None:
        assert call == "sweep" or len(bench.rig.store.list("staged/0")) == 2
        assert call == "sweep" or bench.rig.blocks.leased == {1, 2}

    for committer in bench.rig.committers.values():
        committer.on_call = stored
    bench.complete()
    assert (bench.rig.store.list("staged/0"), bench.rig.blocks.leased) == ((), frozenset())


# -- before the decision --------------------------------------------------------------------------------


def test_what_is_dead_is_never_decided(bench) -> None:
    bench.b.deaths = [{1: "transaction 9 has timed out"}]
    with pytest.raises(DeadCommittableError, match=r"declined before its decision.*Transaction 9") as caught:
        bench.complete()
    assert (caught.value.sink, caught.value.restartable) == ("b", True)
    assert (bench.rig.objects(1), bench.steps, bench.decided, bench.receipts) == ([], [], [], [])
    # Nothing is given up either: that is the business of the rewind.
    assert (bench.a.called("abort"), len(bench.rig.store.list("staged/0"))) == ([], 2)


def test_a_sink_that_cannot_be_asked_is_asked_again_ever_more_slowly(bench) -> None:
    bench.a.deaths = [BrokerUnavailableError("no broker")] * 8
    began_ms = bench.rig.clock.now_ms
    bench.complete()
    assert bench.rig.clock.now_ms - began_ms == 50 + 100 + 200 + 400 + 800 + 1_600 + 2_000 + 2_000
    assert bench.rig.verdict(1) is Verdict.COMMIT


def test_a_stopping_job_does_not_wait_for_a_sink(bench) -> None:
    bench.rig.coordinator.stop()
    bench.a.deaths = [BrokerUnavailableError("no broker")]
    with pytest.raises(JobInterruptedError, match="checkpoint 1"):
        bench.complete()
    assert bench.rig.objects(1) == []


def test_a_sink_that_will_never_answer_ends_the_query(bench) -> None:
    bench.a.deaths = [AuthorizationError("not allowed")]
    with pytest.raises(AuthorizationError):
        bench.complete()


def test_a_sink_without_committables_is_asked_nothing(bench) -> None:
    """Behaviours 40, 144."""
    empty = StagedBatch(Lineage(0), BatchId(0), OwnerEpoch(1), 0, (), ())
    receipt = bench.complete(empty)
    assert bench.a.called("why_dead") == bench.a.called("commit") == []
    assert receipt.answers == {"a": [], "b": []}


# -- the decision ---------------------------------------------------------------------------------------


def test_who_was_fenced_decides_nothing(bench) -> None:
    take_over(bench.rig.job_dir, ManualClock())
    with pytest.raises(FencedError, match="owner 2 has taken this job over"):
        bench.complete()
    assert bench.rig.objects(1) == []


def test_a_decision_of_somebody_else_stands(bench) -> None:
    """A newer owner has sealed the id between the look and the create."""
    bench.b.on_call = lambda call: bench.rig.job_dir.create_decision(
        Decision(CheckpointId(1), Verdict.ABORT, OwnerEpoch(2), 0)
    )
    with pytest.raises(FencedError, match="was decided by another owner"):
        bench.complete()
    assert (bench.decided, bench.a.called("commit")) == ([], [])


def test_a_store_that_refuses_the_decision_ends_the_checkpoint_for_good(bench) -> None:
    """Behaviours 66, 68: an ABORT is in its place, so no late write can complete it."""
    bench.rig.store.faults = [REFUSED]
    with pytest.raises(DecisionError, match="The disk is full") as caught:
        bench.complete()
    assert caught.value.restartable
    assert caught.value.what_to_do.endswith(
        "let the job run on: the staged data passes to the next checkpoint"
    )
    assert bench.rig.verdict(1) is Verdict.ABORT
    assert (bench.decided, bench.a.called("commit"), bench.receipts) == ([], [], [])
    assert len(bench.rig.store.list("staged/0")) == 2


def test_a_decision_whose_answer_was_lost_is_found_and_finished(bench) -> None:
    """Behaviour 66: an unknown outcome is made certain before anything follows from it."""
    bench.rig.store.faults = [LOST_ANSWER]
    bench.complete()
    assert bench.rig.verdict(1) is Verdict.COMMIT
    assert bench.rig.objects(1) == ["decision.json", "receipt.json"]


@pytest.mark.parametrize("verdict", Verdict)
def test_an_unknown_outcome_may_turn_out_to_be_somebody_elses_decision(bench, verdict) -> None:
    batches = bench.batches if verdict is Verdict.COMMIT else ()
    other = Decision(CheckpointId(1), verdict, OwnerEpoch(2), 0, batches=batches)
    bench.rig.job_dir.create_decision(other)
    bench.rig.store.faults = [REFUSED]
    with pytest.raises(FencedError, match="was decided by another owner"):
        bench.complete()
    assert bench.a.called("commit") == []


def test_an_unknown_outcome_may_turn_out_to_be_our_own_abort(bench) -> None:
    aborted = Decision(CheckpointId(1), Verdict.ABORT, bench.rig.ownership.epoch, 0)
    bench.rig.job_dir.create_decision(aborted)
    bench.rig.store.faults = [REFUSED]
    with pytest.raises(DecisionError):
        bench.complete()


def test_a_decision_that_vanishes_is_nobodys(bench) -> None:
    """The id's folder was deleted in between: only a newer owner does that."""
    create = bench.rig.job_dir.create_decision

    def exists(decision: Decision) -> CreateResult:
        if decision.verdict is Verdict.COMMIT:
            return create(decision)
        bench.rig.store.objects.pop("checkpoints/1/decision.json", None)
        return CreateResult.EXISTS

    bench.rig.job_dir.create_decision = exists  # type: ignore[method-assign]
    bench.rig.store.faults = [REFUSED]
    with pytest.raises(FencedError):
        bench.complete()


def test_a_store_that_is_gone_leaves_the_question_to_the_next_start(bench) -> None:
    bench.rig.store.faults = [REFUSED, REFUSED]
    with pytest.raises(StoreError):
        bench.complete()
    assert (bench.decided, bench.a.called("commit")) == ([], [])


# -- after it -------------------------------------------------------------------------------------------


def test_a_lost_committable_ends_the_job_without_a_receipt(bench) -> None:
    """Behaviours 128, 139."""
    bench.b.outcomes = [Outcome.LOST]
    with pytest.raises(CommittableLostError, match="sink 'b' in checkpoint 1"):
        bench.complete()
    assert bench.rig.objects(1) == ["decision.json"]
    assert (bench.receipts, len(bench.rig.store.list("staged/0"))) == ([], 2)


def test_a_sink_that_was_fenced_ends_the_process() -> None:
    bench = Bench()
    bench.b.outcomes = [Outcome.FENCED]
    with pytest.raises(FencedError, match="sink 'b' refused a committable of checkpoint 1"):
        bench.complete()
    assert bench.rig.objects(1) == ["decision.json"]
    owner = Bench()
    owner.b.outcomes = [Outcome.FENCED]
    owner.b.on_call = lambda call: call != "commit" or take_over(owner.rig.job_dir, ManualClock())
    with pytest.raises(FencedError, match="owner 2 has taken this job over"):
        owner.complete()


def test_decided_data_of_a_sink_that_the_job_does_not_have_is_not_left_out(bench) -> None:
    strange = StagedBatch(Lineage(0), BatchId(2), OwnerEpoch(1), 0, (), (Committable("gone", {}),))
    with pytest.raises(JobDirError, match="decided data of sink 'gone'"):
        bench.complete(*bench.batches, strange)
    assert bench.a.called("commit") == []


class Group:
    """A source whose group's offsets are committed."""

    def __init__(self, *answers: Exception) -> None:
        self.answers, self.calls = list(answers), 0

    def commit_offsets(self, position: object, note: str = "") -> dict[str, dict[str, dict[str, int]]]:
        self.calls += 1
        if self.answers:
            raise self.answers.pop(0)
        return {"group": {"orders": {"0": 7}}}


def test_group_offsets_are_committed_behind_the_sinks_until_the_brokers_answer(bench) -> None:
    group = Group(BrokerUnavailableError("no broker"), BrokerUnavailableError("no broker"))
    bench.rig.confirmation._sources = (SimpleNamespace(source=group),)
    receipt = bench.complete()
    assert (group.calls, receipt.group_offsets) == (3, {"group": {"orders": {"0": 7}}})


def test_group_offsets_that_are_not_allowed_end_the_query_without_a_receipt(bench) -> None:
    bench.rig.confirmation._sources = (SimpleNamespace(source=Group(AuthorizationError("no"))),)
    with pytest.raises(AuthorizationError):
        bench.complete()
    assert bench.rig.objects(1) == ["decision.json"]


def test_a_sink_that_asks_for_patience_gets_it(bench) -> None:
    """Behaviour 137."""
    bench.a.outcomes = [Outcome.RETRY, Outcome.RETRY, Outcome.ALREADY_COMMITTED]
    assert bench.complete().answers["a"] == ["ALREADY_COMMITTED"] * 2
    assert len(bench.a.called("commit")) == 3


def test_a_stopping_job_leaves_the_rest_to_the_next_start(bench) -> None:
    """Behaviour 61: it is decided, so nothing of it is given up."""
    bench.rig.coordinator.stop()
    bench.a.outcomes = [Outcome.RETRY]
    with pytest.raises(JobInterruptedError):
        bench.complete()
    assert (bench.rig.verdict(1), bench.rig.objects(1)) == (Verdict.COMMIT, ["decision.json"])


def test_blocks_of_another_owner_are_not_given_out_again() -> None:
    bench = Bench()
    foreign = bench.staged(2, OwnerEpoch(7))
    bench.complete(*bench.batches, foreign)
    assert bench.rig.blocks.leased == {3}


def test_what_cannot_be_deleted_is_deleted_later(bench, caplog) -> None:
    bench.rig.store.faults = [("staged/0/0-1.0.json", Fault.REFUSED)]
    bench.complete()
    assert "staged files that are not needed any more are deleted later" in caplog.text
    assert bench.rig.objects(1) == ["decision.json", "receipt.json"]
    assert len(bench.rig.store.list("staged/0")) == 2


def test_a_sweep_spares_what_is_staged_later_and_what_is_being_written(bench) -> None:
    """Behaviour 38 turned round: committables outlive every checkpoint but their own."""
    later = bench.staged(2)
    running = bench.rig.blocks.lease()
    bench.undecided = (*bench.batches, later)
    bench.complete()
    assert bench.a.called("sweep") == [([2, 2], [running])]


def test_leftovers_that_cannot_be_swept_now_are_swept_later(bench, caplog) -> None:
    bench.a.sweeping = [BrokerUnavailableError("no broker")]
    bench.complete()
    assert "leftovers are swept later" in caplog.text
    assert len(bench.b.called("sweep")) == 1


def test_a_sweep_that_is_not_allowed_ends_the_query(bench) -> None:
    bench.a.sweeping = [AuthorizationError("not allowed")]
    with pytest.raises(AuthorizationError):
        bench.complete()
    assert bench.rig.objects(1) == ["decision.json", "receipt.json"]


def of_the_jvm(name: str, says: str) -> Exception:
    return Throwables([("org.apache.spark.SparkException", "Job aborted"), (name, says)]).raised()


def test_leftovers_that_the_jvm_does_not_sweep_end_no_job(bench, caplog) -> None:
    """Not even of a kind that no restart mends: it is mere cleaning."""
    bench.a.sweeping = [of_the_jvm("java.lang.ClassNotFoundException", "io.delta.Gone")]
    bench.complete()
    assert "leftovers are swept later: ClassNotFoundException: io.delta.Gone" in caplog.text
    assert len(bench.b.called("sweep")) == 1 and bench.rig.blocks.leased == {1, 2}


def test_a_jvm_that_is_gone_ends_the_job_also_while_it_sweeps(bench) -> None:
    bench.a.sweeping = [Py4JNetworkError("Answer from Java side is empty")]
    with pytest.raises(SparkGoneError):
        bench.complete()


def test_an_outage_that_the_jvm_tells_of_is_waited_for(bench) -> None:
    bench.a.deaths = [of_the_jvm("java.net.ConnectException", "Connection refused") for _ in range(5)]
    began_ms = bench.rig.clock.now_ms
    bench.complete()
    # 50 + 100 + 200 + 400 + 800.
    assert bench.rig.clock.now_ms == began_ms + 1_550 and bench.rig.verdict(1) is Verdict.COMMIT


def test_what_the_jvm_says_three_times_of_what_is_staged_ends_the_query(bench) -> None:
    bench.a.deaths = [of_the_jvm("java.lang.IllegalStateException", "no such protocol") for _ in range(5)]
    with pytest.raises(QueryError, match=r"^IllegalStateException: no such protocol"):
        bench.complete()
    assert len(bench.a.called("why_dead")) == 3 and bench.decided == []
