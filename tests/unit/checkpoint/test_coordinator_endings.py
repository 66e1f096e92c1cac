"""How checkpoints end: decisions, savepoints, the last checkpoint of a job, and the coordinator's own end."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from flinkish_spark.checkpoint.answers import CheckpointAnswer, CheckpointTriggerRequest, PendingAnswer
from flinkish_spark.checkpoint.commit import JobInterruptedError
from flinkish_spark.checkpoint.coordinator import (
    FINAL_PAUSE_MS,
    CheckpointCoordinator,
    StopWithSavepointError,
    why_ended,
)
from flinkish_spark.checkpoint.decision_point import DeadCommittableError
from flinkish_spark.checkpoint.ownership import seal_open_ids, take_over
from flinkish_spark.core.clock import SystemClock, SystemThreads
from flinkish_spark.core.config import CheckpointingMode
from flinkish_spark.core.errors import (
    CommittableLostError,
    FencedError,
    InternalError,
    RetriableError,
    StoreError,
)
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose
from flinkish_spark.protocol.records import Outcome
from tests.support.clocks import ManualClock
from tests.support.coordinator_rig import Fault, Rig, by_hand

P = CheckpointPurpose


def end(rig: Rig) -> None:
    """What the loop does when it was stopped or has failed."""
    rig.coordinator.stop()
    rig.coordinator._end()


def is_held_back(rig: Rig) -> bool:
    """Whether the gate lets no micro-batch through."""
    real, rig.clock.wait = rig.clock.wait, lambda event, timeout_ms: rig.gate.stop()
    try:
        rig.gate.enter(lambda: False)
    except JobInterruptedError:
        return True
    finally:
        rig.clock.wait = real
    return False


# -- decisions ------------------------------------------------------------------------------------------


def test_a_decision_that_the_store_refuses_is_a_failure_and_its_rows_go_on() -> None:
    """Behaviours 66, 68: nobody hears complete(1); the next checkpoint decides the same rows."""
    rig = Rig()
    rig.ask()
    rig.store.faults = [("1/decision.json", Fault.REFUSED)]
    rig.run_batch(1)
    assert rig.answers == ["user=ABORTED:DECISION_FAILED"]
    assert (rig.confirmed, rig.aborted, rig.verdict(1)) == ([], [1], Verdict.ABORT)
    assert rig.coordinator.failures.consecutive == 1
    assert rig.control.offered == [1, 2]
    rig.run_batch(2)
    assert rig.confirmed == [2]
    assert rig.committers["a"].called("commit") == [(2, [0, 1])]


def test_staged_data_that_died_takes_the_job_back() -> None:
    """Behaviours 31, 57: declined before the decision, and no other checkpoint is begun for it."""
    rig = Rig()
    rig.committers["b"].deaths = [{0: "timed out"}]
    rig.ask()
    rig.run_batch(1)
    assert isinstance(rig.coordinator.failure, DeadCommittableError)
    assert rig.answers == ["user=ABORTED:STAGED_DATA_DEAD"]
    assert (rig.verdict(1), rig.control.offered, rig.open) == (Verdict.ABORT, [1], "")


def test_a_log_entry_that_is_gone_is_a_broken_rule() -> None:
    rig = Rig()
    rig.ask()
    batch = rig.stage(1)
    rig.store.put(f"spark/1/commits/{batch}", b"v1\n{}")
    with pytest.raises(InternalError, match="log entries of micro-batch 0 are gone"):
        rig.tick()


def test_who_was_fenced_aborts_nothing_for_the_newer_owner() -> None:
    rig = Rig(by_hand(timeout_ms=1_000))
    rig.ask()
    newer = take_over(rig.job_dir, ManualClock())
    rig.job_dir.create_decision(Decision(CheckpointId(1), Verdict.ABORT, newer.epoch, 0, "sealed"))
    with pytest.raises(FencedError):
        rig.tick(1_000)
    assert rig.job_dir.decision(CheckpointId(1)).reason.startswith("sealed")
    assert rig.aborted == []


# -- savepoints and the last checkpoint -----------------------------------------------------------------


def test_a_savepoint_is_written_when_its_checkpoint_is_confirmed() -> None:
    """Behaviours 58, 60: the answer comes when it is there; meanwhile nothing it needs may go."""
    rig = Rig()
    rig.threads.held = ("savepoint",)
    rig.take(P.SAVEPOINT, "/sp")
    assert (rig.confirmed, rig.answers) == ([1], [])
    assert rig.coordinator.exporting == {CheckpointId(1)}
    rig.take()
    rig.threads.let("savepoint-1")
    rig.tick()
    assert rig.answers == ["user=COMPLETED", "savepoint=COMPLETED"]
    assert (rig.savepoints, rig.coordinator.exporting) == ([(1, "/sp")], frozenset())


def test_a_savepoint_that_cannot_be_written_leaves_the_job_alone() -> None:
    """Behaviours 52, 62: the checkpoint is complete all the same."""
    rig = Rig(by_hand(tolerable_failures=0))
    rig.savepoint_error = StoreError("no room")
    rig.take(P.SAVEPOINT, "/sp")
    assert rig.answers == ["savepoint=SAVEPOINT_FAILED:SAVEPOINT_FAILED"]
    assert (rig.confirmed, rig.coordinator.failure, rig.coordinator.exporting) == ([1], None, frozenset())
    rig.take()
    assert rig.answers[-1] == "user=COMPLETED"


def test_the_job_has_ended_behind_its_last_checkpoint() -> None:
    """Behaviour 61: the gate knows it before the barrier can go out."""
    rig = Rig()
    order: list[str] = []
    rig.gate.close_after = lambda checkpoint: order.append(f"gate {checkpoint}")  # type: ignore[method-assign]
    rig.control.offer = lambda checkpoint, purpose: order.append(f"offer {checkpoint}")  # type: ignore[method-assign]
    rig.ask(P.FINAL)
    assert order == ["gate 1", "offer 1"]
    assert rig.coordinator.ended_with is None
    rig.run_batch(1)
    assert rig.coordinator.ended_with is not None
    assert rig.answers == ["final=COMPLETED"]


@pytest.mark.parametrize("purpose", [P.FINAL_SAVEPOINT, P.DRAINED_SAVEPOINT])
def test_a_last_savepoint_ends_the_job_when_it_is_written(purpose: P) -> None:
    """Behaviour 62."""
    rig = Rig()
    rig.threads.held = ("savepoint",)
    rig.take(purpose, "/sp")
    assert rig.coordinator.ended_with is None
    rig.threads.let("savepoint-1")
    rig.tick()
    assert rig.coordinator.ended_with is not None
    assert rig.answers == [f"{purpose.value.lower()}=COMPLETED"]


def test_a_last_checkpoint_that_fails_is_taken_again_and_the_gate_opens_for_it() -> None:
    """Behaviour 61: a pause lies between, or a hook that fails would be called without end."""
    rig = Rig()
    rig.ask(P.FINAL)
    rig.run_batch(1, sinks="a")
    assert rig.aborted == [1]
    rig.gate.enter(lambda: False)
    rig.tick(FINAL_PAUSE_MS - 1)
    assert rig.control.offered == [1]
    rig.tick(1)
    assert rig.control.offered == [1, 2]
    rig.run_batch(2)
    assert rig.coordinator.ended_with is not None


def test_at_least_once_the_last_checkpoint_waits_for_the_slowest_branch() -> None:
    """Behaviours 61, 110: micro-batches come through until every sink has shown the barrier."""
    rig = Rig(by_hand(mode=CheckpointingMode.AT_LEAST_ONCE))
    rig.ask(P.FINAL)
    rig.run_batch(1, sinks="a")
    assert not is_held_back(rig)
    rig.run_batch()
    rig.run_batch(1, sinks="b")
    assert rig.answers == ["final=COMPLETED"]
    assert is_held_back(rig)


def test_a_last_savepoint_that_fails_in_its_checkpoint_fails_the_job() -> None:
    """Behaviours 61, 62: it does not go on silently; the restart begins at the last checkpoint."""
    rig = Rig()
    rig.ask(P.FINAL_SAVEPOINT, "/sp")
    rig.run_batch(1, sinks="a")
    assert isinstance(rig.coordinator.failure, StopWithSavepointError)
    assert rig.coordinator.failure.restartable
    assert rig.answers == ["final_savepoint=ABORTED:BARRIERS_DO_NOT_ADD_UP"]
    assert rig.coordinator.ended_with is None


def test_a_last_savepoint_that_cannot_be_written_fails_the_job_behind_its_checkpoint() -> None:
    """Behaviour 62: nothing of the checkpoint is lost."""
    rig = Rig()
    rig.savepoint_error = StoreError("no room")
    rig.take(P.FINAL_SAVEPOINT, "/sp")
    assert isinstance(rig.coordinator.failure, StopWithSavepointError)
    assert "No room" in str(rig.coordinator.failure)
    end(rig)
    assert rig.answers == ["final_savepoint=SAVEPOINT_FAILED:SAVEPOINT_FAILED"]
    assert (rig.verdict(1), rig.coordinator.ended_with) == (Verdict.COMMIT, None)


# -- the end --------------------------------------------------------------------------------------------


def test_a_stopping_job_answers_everybody() -> None:
    """Behaviours 13, 57, 76: what is open, what waits, and who comes too late."""
    rig = Rig()
    rig.ask(name="open")
    rig.ask(name="waiting")
    end(rig)
    rig.ask(name="late")
    assert rig.answers == ["waiting=REFUSED:SHUT_DOWN", "open=ABORTED:JOB_STOPPED", "late=REFUSED:SHUT_DOWN"]
    assert rig.statistics == ["1:FAILED:JOB_STOPPED"]
    assert rig.aborted == [1]
    # Sealing the id is left to the next start, which may not be this process's.
    assert rig.verdict(1) is None
    assert seal_open_ids(rig.ownership, rig.clock) == (CheckpointId(1),)


def test_a_request_in_the_mailbox_of_a_stopping_job_is_refused() -> None:
    """Behaviour 13: it gets no id any more."""
    rig = Rig()
    rig.coordinator.ask(
        CheckpointTriggerRequest(P.USER, lambda answer: rig.answers.append(answer.reason.value))
    )
    end(rig)
    assert rig.answers == ["SHUT_DOWN"]
    assert rig.store.list("checkpoints") == ()


def test_what_is_being_prepared_is_cancelled() -> None:
    """Behaviours 13, 57: a hook may hang, so nobody waits for it."""
    rig = Rig()
    rig.threads.held = ("initialise",)
    rig.ask()
    end(rig)
    assert rig.answers == ["user=ABORTED:INITIALISATION_CANCELLED"]
    rig.threads.let("initialise-1")
    assert rig.control.offered == []


def test_what_is_being_decided_is_finished_and_told() -> None:
    """Behaviours 57, 61, 37."""
    rig = Rig()
    rig.threads.held = ("complete", "savepoint")
    rig.ask(P.SAVEPOINT, "/sp")
    rig.run_batch(1)
    end(rig)
    assert (rig.answers, rig.confirmed, rig.savepoints) == (["savepoint=COMPLETED"], [1], [(1, "/sp")])
    assert rig.statistics == ["1:COMPLETED"]


def test_nothing_begins_behind_the_end() -> None:
    """Behaviour 76: the next decision would be made beside the next start's recovery."""
    rig = Rig(by_hand(max_concurrent=2))
    rig.threads.held = ("complete",)
    rig.ask(name="one")
    rig.run_batch(1)
    rig.ask(name="two")
    rig.run_batch(2)
    end(rig)
    assert rig.answers == ["two=ABORTED:JOB_STOPPED", "one=COMPLETED"]
    assert [thread.name for thread in rig.threads.waiting if thread.is_alive()] == []
    assert (rig.verdict(1), rig.verdict(2)) == (Verdict.COMMIT, None)


def test_a_decided_checkpoint_that_has_to_wait_is_left_to_the_next_start() -> None:
    """Behaviour 61."""
    rig = Rig()
    rig.threads.held = ("complete",)
    rig.ask()
    rig.run_batch(1)
    rig.committers["a"].outcomes = [Outcome.RETRY]
    end(rig)
    assert (rig.verdict(1), rig.objects(1)) == (Verdict.COMMIT, ["decision.json", "trigger.json"])
    assert rig.answers == ["user=LEFT_TO_NEXT_START:SHUT_DOWN"]


def test_an_error_ends_what_is_open_as_a_failed_task_does() -> None:
    """Behaviours 33, 57: also what is queued, and nothing stays in progress."""
    rig = Rig(by_hand(timeout_ms=1_000, tolerable_failures=0, max_concurrent=2))
    rig.ask(name="old")
    rig.stage(1)
    rig.clock.now_ms += 500
    rig.ask(name="young")
    rig.ask(name="waiting")
    rig.clock.now_ms += 500
    rig.coordinator.run()
    assert isinstance(rig.coordinator.failure, RetriableError)
    assert rig.answers == ["old=ABORTED:EXPIRED", "waiting=REFUSED:SHUT_DOWN", "young=ABORTED:TASK_FAILED"]
    assert rig.statistics == ["1:FAILED:EXPIRED", "2:FAILED:TASK_FAILED"]
    assert rig.aborted == [1, 2]


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (FencedError("a newer owner has the job"), "OWNER_LOST"),
        (CommittableLostError("a transaction expired"), "COMMITTABLE_LOST"),
        (RuntimeError("anything else"), "TASK_FAILED"),
        (None, "JOB_STOPPED"),
    ],
)
def test_a_checkpoint_that_ends_with_its_coordinator_says_why(failure, reason: str) -> None:
    """Behaviour 57."""
    assert why_ended(failure)[0].value == reason
    assert str(failure or "stopped") in why_ended(failure)[1]


def test_a_store_that_is_gone_leaves_nobody_without_an_answer() -> None:
    """Behaviours 33, 37: the id is sealed by the next start."""
    rig = Rig()
    rig.ask()
    rig.store.faults = [("1/decision.json", Fault.REFUSED)]
    rig.stage(1, sinks="a")
    assert isinstance(rig.coordinator.failure, StoreError)
    end(rig)
    assert rig.answers == ["user=REFUSED:SHUT_DOWN"]
    assert seal_open_ids(rig.ownership, rig.clock) == (CheckpointId(1),)


def test_an_answer_is_given_once_whatever_the_asker_does_with_it() -> None:
    """Behaviours 33, 37: an error in it ends the query and leaves nothing pending."""
    rig = Rig()
    seen: list[CheckpointAnswer] = []

    def on_answer(answer: CheckpointAnswer) -> None:
        seen.append(answer)
        raise ValueError("a bug of the asker's")

    rig.coordinator.ask(CheckpointTriggerRequest(P.USER, on_answer))
    rig.tick()
    rig.run_batch(1, sinks="a")
    assert isinstance(rig.coordinator.failure, ValueError)
    end(rig)
    assert (len(seen), rig.open) == (1, "")


def test_a_pending_answer_resolves_once() -> None:
    """Behaviour 37."""
    pending = PendingAnswer()
    assert pending.wait(timeout_ms=0) is None
    first = CheckpointAnswer.make_completed(CheckpointId(3), "/sp")
    pending.resolve(first)
    pending.resolve(CheckpointAnswer.make_completed(CheckpointId(4)))
    assert pending.wait() is first
    assert (first.is_completed, first.text) == (True, "/sp")


def test_the_loop_and_what_it_begins_run_in_threads_of_their_own() -> None:
    rig = Rig(by_hand(), clock=SystemClock())
    parts = replace(rig.parts, job=replace(rig.job, threads=SystemThreads()))
    coordinator = rig.coordinator = CheckpointCoordinator(parts, ())
    rig.tick = lambda after_ms=0: None  # type: ignore[method-assign]
    pending = PendingAnswer()
    coordinator.start()
    coordinator.ask(CheckpointTriggerRequest(P.SAVEPOINT, pending.resolve, target="/sp"))
    deadline = time.monotonic() + 20
    while not rig.control.offered:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rig.run_batch(1)
    answer = pending.wait(timeout_ms=20_000)
    coordinator.stop()
    coordinator.join()
    assert answer is not None
    assert (answer.checkpoint, answer.text, rig.savepoints) == (CheckpointId(1), "/sp", [(1, "/sp")])
    assert (coordinator.failure, rig.statistics) == (None, ["1:COMPLETED"])
