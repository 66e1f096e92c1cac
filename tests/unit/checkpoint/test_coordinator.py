"""The real coordinator, driven by hand: from a request to its answer, and everything between."""

from __future__ import annotations

import itertools

import pytest

from flinkish_spark.checkpoint.control import AlignmentStatus
from flinkish_spark.checkpoint.coordinator import BACKLOG_LIMIT, BACKLOG_TRIGGER
from flinkish_spark.checkpoint.failures import is_outage
from flinkish_spark.checkpoint.hooks import HookError
from flinkish_spark.checkpoint.ownership import take_over
from flinkish_spark.core.config import CheckpointConfig, CheckpointingMode
from flinkish_spark.core.errors import FencedError, RetriableError, StoreError
from flinkish_spark.protocol.checkpoint import Schedule
from flinkish_spark.protocol.decisions import TriggerRecord, Verdict
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose, OwnerEpoch
from flinkish_spark.protocol.limits import UNLIMITED
from tests.support.clocks import ManualClock
from tests.support.coordinator_rig import Fault, RecordedHook, Rig, by_hand

P = CheckpointPurpose
TRIGGER_REFUSED = ("/trigger.json", Fault.REFUSED)
DECISION_REFUSED = ("/decision.json", Fault.REFUSED)


# -- trigger --------------------------------------------------------------------------------------------


def test_a_checkpoint_from_its_request_to_its_answer() -> None:
    """Behaviour 1: offered once, decided, confirmed, and everybody told once."""
    rig = Rig()
    rig.ask()
    assert (rig.control.offered, rig.objects(1)) == ([1], ["trigger.json"])
    batch = rig.stage(1)
    assert rig.open == "1:ACKNOWLEDGED"
    assert rig.verdict(1) is None
    rig.commit_log(batch)
    assert (rig.open, rig.confirmed, rig.answers) == ("", [1], ["user=COMPLETED"])
    assert (rig.verdict(1), rig.objects(1)) == (
        Verdict.COMMIT,
        ["decision.json", "receipt.json", "trigger.json"],
    )
    assert (rig.control.offered, rig.aborted, rig.statistics) == ([1], [], ["1:COMPLETED"])


def test_a_decision_holds_all_that_is_needed_to_finish_it_anywhere() -> None:
    """Behaviours 1, 41."""
    rig = Rig(hooks=[RecordedHook()])
    rig.run_batch()
    rig.take(P.SAVEPOINT, "/sp")
    decision = rig.job_dir.decision(CheckpointId(1))
    assert [int(batch.batch) for batch in decision.batches] == [0, 1]
    assert (decision.offsets_text, decision.commits_text) == ("v1\n{}\n-", "v1\n{}\n-")
    assert decision.uids == ("orders", "sum", "a", "b")
    assert (decision.purpose, decision.finished, decision.triggered_at_ms) == (P.SAVEPOINT, (), 1_000)
    assert decision.hook_states == {"catalog": {"version": 1}}


def test_the_id_is_written_down_before_hooks_are_called_and_the_barrier_goes_out() -> None:
    """Behaviours 11, 20: a newer owner seals what has a record."""
    hook, seen = RecordedHook(), []
    rig = Rig(hooks=[hook])
    hook.on_trigger = lambda: seen.append((rig.objects(1), list(rig.control.offered)))
    rig.ask()
    assert seen == [(["trigger.json"], [])]
    assert rig.control.offered == [1]


def test_two_in_flight_are_decided_in_the_order_of_ids() -> None:
    """Behaviour 2."""
    rig = Rig(by_hand(max_concurrent=2))
    rig.threads.held = ("complete",)
    rig.ask(name="one")
    rig.run_batch(1)
    rig.ask(name="two")
    rig.run_batch(2)
    assert (rig.open, rig.threads.names) == ("1:DECIDING 2:LOGGED", ["complete-1"])
    rig.threads.let("complete-1")
    rig.tick()
    assert (rig.answers, rig.threads.names) == (["one=COMPLETED"], ["complete-2"])
    rig.threads.let("complete-2")
    rig.tick()
    assert rig.answers == ["one=COMPLETED", "two=COMPLETED"]
    batches = [[int(b.batch) for b in rig.job_dir.decision(CheckpointId(n)).batches] for n in (1, 2)]
    assert batches == [[0], [1]]


def test_a_request_before_the_query_runs_is_refused_and_leaves_nothing() -> None:
    """Behaviours 3, 10, 23: ticks do nothing either; the first one afterwards works."""
    rig = Rig(CheckpointConfig(interval_ms=100), begin=False)
    rig.ask()
    rig.tick(1_000)
    assert rig.answers == ["user=REFUSED:PARTICIPANT_NOT_RUNNING"]
    assert (rig.open, rig.store.list("checkpoints"), rig.tracker.history.counts.failed) == ("", (), 0)
    assert rig.tracker.history.counts.refused == 1
    rig.coordinator.begin()
    rig.tick()
    assert rig.control.offered == [1]


def test_the_timer_triggers_again_and_again() -> None:
    """Behaviours 7, 11: ids and times rise."""
    rig = Rig(CheckpointConfig(interval_ms=100, min_pause_ms=30))
    offered_at = []
    for _ in range(1_000):
        known = len(rig.control.offered)
        rig.tick(10)
        if len(rig.control.offered) > known:
            offered_at.append(rig.clock.now_ms)
            rig.clock.now_ms += 90
            rig.run_batch(rig.control.offered[-1])
        if len(offered_at) == 4:
            break
    assert rig.control.offered == [1, 2, 3, 4]
    # Each was confirmed 90 ms after its trigger; the next one came after the pause.
    assert [later - at for at, later in itertools.pairwise(offered_at)] == [120] * 3
    times = [rig.job_dir.decision(CheckpointId(n)).triggered_at_ms for n in rig.confirmed]
    assert times == offered_at


def test_the_next_start_goes_on_with_the_ids() -> None:
    """Behaviours 11, 78: behind what was decided, what is pending, and what no store knows of."""
    first = Rig()
    first.take()
    first.ask()
    first.tick(10)
    second = Rig(store=first.store)
    assert second.take() == 3
    second.store.faults = [TRIGGER_REFUSED, DECISION_REFUSED]
    with pytest.raises(StoreError):
        end_with_error(second)
    third = Rig(store=second.store, tracker=second.tracker, ownership=second.ownership)
    assert third.take() == 5


def end_with_error(rig: Rig) -> None:
    rig.ask()
    if rig.coordinator.failure is not None:
        raise rig.coordinator.failure


@pytest.mark.parametrize(
    ("ago_ms", "min_pause_ms", "waits_ms"),
    [(40, 0, 60), (100, 0, 0), (100_000, 0, 0), (-50_000, 0, 100), (100_000, 300, 0), (100, 300, 200)],
)
def test_the_interval_counts_over_restarts(ago_ms: int, min_pause_ms: int, waits_ms: int) -> None:
    """What is due when a start begins has its barrier in the first micro-batch, however the clock was set."""
    config = CheckpointConfig(interval_ms=100, min_pause_ms=min_pause_ms)
    rig = Rig(config, clock=ManualClock(200_000), decided_at_ms=200_000 - ago_ms)
    began_ms = rig.clock.now_ms
    while not rig.control.offered:
        rig.tick()
        rig.clock.now_ms += 10
    assert rig.clock.now_ms - 10 - began_ms == waits_ms


def test_switching_the_timer_off_leaves_requests_alone() -> None:
    """Behaviour 12."""
    rig = Rig(CheckpointConfig(interval_ms=100))
    rig.coordinator.schedule(Schedule.OFF)
    rig.tick(1_000)
    assert rig.control.offered == []
    rig.take(P.SAVEPOINT, "/sp")
    assert rig.savepoints == [(1, "/sp")]
    rig.coordinator.schedule(Schedule.ON)
    rig.tick(1_000)
    assert rig.control.offered == [1, 2]


def test_a_second_request_waits_while_the_first_is_initialised() -> None:
    """Behaviour 14."""
    rig = Rig()
    rig.threads.held = ("initialise",)
    rig.ask(name="one")
    rig.ask(name="two")
    assert (rig.open, rig.threads.names) == ("1:INITIALISING", ["initialise-1"])
    rig.threads.let("initialise-1")
    rig.tick()
    rig.run_batch(1)
    assert (rig.answers, rig.threads.names) == (["one=COMPLETED"], ["initialise-2"])


def test_a_record_that_cannot_be_written_ends_the_attempt_and_only_it() -> None:
    """Behaviours 15, 17: counted, and the coordinator goes on."""
    rig = Rig(by_hand(tolerable_failures=1))
    rig.store.faults = [TRIGGER_REFUSED]
    rig.threads.held = ("initialise",)
    rig.ask(name="one")
    rig.ask(name="two")
    rig.threads.held = ()
    rig.threads.let("initialise-1")
    rig.tick()
    assert rig.answers == ["one=ABORTED:INITIALISATION_FAILED"]
    assert (rig.control.offered, rig.verdict(1), rig.coordinator.failures.consecutive) == (
        [2],
        Verdict.ABORT,
        1,
    )
    rig.run_batch(2)
    assert rig.answers[-1] == "two=COMPLETED"


def test_an_id_that_is_taken_already_is_given_up() -> None:
    """Behaviour 18: this attempt only; the next one gets a fresh id."""
    rig = Rig()
    rig.job_dir.create_trigger(TriggerRecord(CheckpointId(1), OwnerEpoch(1), P.PERIODIC, 0))
    rig.ask()
    assert rig.answers == ["user=ABORTED:ID_COUNTER_FAILED"]
    assert rig.take() == 2


def test_an_id_that_a_newer_owner_has_ends_the_query() -> None:
    """Behaviour 18."""
    rig = Rig()
    newer = take_over(rig.job_dir, ManualClock())
    rig.job_dir.create_trigger(TriggerRecord(CheckpointId(1), newer.epoch, P.PERIODIC, 0))
    rig.ask()
    assert isinstance(rig.coordinator.failure, FencedError)
    assert rig.control.offered == []


def test_a_hook_that_fails_ends_the_attempt_before_anybody_is_asked() -> None:
    """Behaviours 20, 81."""
    hook = RecordedHook()
    hook.failing = [RuntimeError("no answer")]
    rig = Rig(hooks=[hook])
    rig.run_batch()
    rig.ask()
    assert (rig.answers, rig.control.offered, rig.verdict(1)) == (
        ["user=ABORTED:HOOK_FAILED"],
        [],
        Verdict.ABORT,
    )
    # It is left in peace until somebody asks again.
    rig.tick(60_000)
    assert hook.calls == [("trigger", 1)]
    assert rig.take() == 2


def test_giving_up_the_one_that_is_triggered_starts_the_next() -> None:
    """Behaviours 21, 56: what its initialisation says later changes nothing."""
    rig = Rig(by_hand(timeout_ms=1_000))
    rig.threads.held = ("initialise",)
    rig.ask(name="one")
    rig.clock.now_ms += 500
    rig.ask(name="two")
    rig.tick(500)
    assert rig.answers == ["one=ABORTED:EXPIRED"]
    assert rig.threads.names == ["initialise-1", "initialise-2"]
    rig.threads.let("initialise-1")
    rig.tick()
    assert (rig.control.offered, rig.open) == ([], "2:INITIALISING")
    rig.threads.let("initialise-2")
    rig.tick()
    rig.run_batch(2)
    assert rig.answers[-1] == "two=COMPLETED"


def test_any_number_of_savepoints_at_once() -> None:
    """Behaviour 58: they take no notice of the limit and the pause."""
    rig = Rig(by_hand(min_pause_ms=10**6))
    rig.threads.held = ("complete",)
    for checkpoint in (1, 2, 3):
        rig.ask(P.SAVEPOINT, f"/sp{checkpoint}", f"sp{checkpoint}")
        rig.run_batch(checkpoint)
    assert rig.open == "1:DECIDING 2:LOGGED 3:LOGGED"
    for checkpoint in (1, 2, 3):
        rig.threads.let(f"complete-{checkpoint}")
        rig.tick()
    assert rig.savepoints == [(1, "/sp1"), (2, "/sp2"), (3, "/sp3")]
    assert rig.answers == ["sp1=COMPLETED", "sp2=COMPLETED", "sp3=COMPLETED"]


# -- what was kept, and the backlog ---------------------------------------------------------------------


def test_kept_micro_batches_are_decided_at_once() -> None:
    first = Rig()
    first.run_batch()
    kept = tuple(first.job_dir.list_staged(first.job_dir.lineage()).values())
    rig = Rig(store=first.store, kept=kept)
    rig.tick()
    assert rig.control.offered == [1]
    rig.run_batch(1)
    assert [int(b.batch) for b in rig.job_dir.decision(CheckpointId(1)).batches] == [0, 1]


def test_a_long_backlog_asks_for_a_checkpoint_and_then_holds_back() -> None:
    rig = Rig()
    rig.threads.held = ("initialise",)
    for _ in range(BACKLOG_TRIGGER - 1):
        rig.stage()
    assert rig.open == ""
    rig.stage()
    assert rig.open == "1:INITIALISING"
    for _ in range(BACKLOG_LIMIT - BACKLOG_TRIGGER):
        assert not rig.coordinator.must_wait()
        rig.stage()
    # A micro-batch must come through, or the barrier that clears the backlog never does.
    assert not rig.coordinator.must_wait()
    rig.threads.held = ()
    rig.threads.let("initialise-1")
    rig.tick()
    rig.run_batch(1)
    assert (rig.confirmed, rig.coordinator.must_wait()) == ([1], False)


def test_nothing_is_admitted_while_a_long_backlog_waits_for_its_receipt() -> None:
    rig = Rig()
    rig.threads.held = ("complete",)
    for _ in range(BACKLOG_TRIGGER):
        rig.stage()
    rig.run_batch(1)
    for _ in range(BACKLOG_LIMIT - BACKLOG_TRIGGER):
        rig.stage()
    assert rig.coordinator.must_wait()
    rig.threads.held = ()
    rig.threads.let("complete-1")
    rig.tick()
    assert not rig.coordinator.must_wait()


# -- acknowledge, decline, late messages ----------------------------------------------------------------


def test_a_missing_barrier_declines_and_its_rows_pass_to_the_next_checkpoint() -> None:
    """Behaviours 31, 38: the checkpoint's verdict is ABORT; what was staged for it is not given up."""
    rig = Rig()
    rig.ask()
    rig.run_batch(1, sinks="a")
    assert rig.answers == ["user=ABORTED:BARRIERS_DO_NOT_ADD_UP"]
    assert (rig.verdict(1), rig.aborted) == (Verdict.ABORT, [1])
    assert "sink 'b' saw no barrier 1 on channel 0" in rig.job_dir.decision(CheckpointId(1)).reason
    # Somebody has to decide it soon: the job asks by itself.
    assert rig.control.offered == [1, 2]
    rig.run_batch(2)
    assert rig.committers["a"].called("commit") == [(2, [0, 1])]
    assert rig.committers["a"].called("abort") == []
    assert rig.statistics == ["1:FAILED:BARRIERS_DO_NOT_ADD_UP", "2:COMPLETED"]


def test_late_doubled_and_unknown_barriers_change_nothing() -> None:
    """Behaviours 36, 44, 46, 106."""
    rig = Rig(by_hand(timeout_ms=1_000))
    rig.ask()
    rig.tick(1_000)
    assert rig.answers == ["user=ABORTED:EXPIRED"]
    rig.run_batch(1)
    rig.run_batch(77)
    rig.ask()
    rig.run_batch(1, 2, 77)
    assert (rig.confirmed, rig.aborted) == ([2], [1])
    rig.run_batch(2)
    assert rig.control.offered == [1, 2]
    assert rig.open == ""


def test_declining_one_of_two_leaves_the_other() -> None:
    """Behaviour 32."""
    rig = Rig(by_hand(max_concurrent=2))
    rig.threads.held = ("complete",)
    rig.ask(name="one")
    rig.run_batch(1)
    rig.ask(name="two")
    rig.run_batch(2, sinks="b")
    assert rig.answers == ["two=ABORTED:BARRIERS_DO_NOT_ADD_UP"]
    assert rig.open.startswith("1:DECIDING")
    rig.threads.let("complete-1")
    rig.tick()
    assert rig.answers[-1] == "one=COMPLETED"


def test_at_least_once_a_barrier_may_come_in_several_micro_batches() -> None:
    """Behaviour 110."""
    rig = Rig(by_hand(mode=CheckpointingMode.AT_LEAST_ONCE))
    rig.ask()
    rig.run_batch(1, sinks="b")
    rig.run_batch()
    assert rig.open == "1:TRIGGERED"
    rig.run_batch(1, sinks="a")
    assert rig.answers == ["user=COMPLETED"]
    assert [int(b.batch) for b in rig.job_dir.decision(CheckpointId(1)).batches] == [0, 1, 2]


def test_a_completed_checkpoint_ends_the_older() -> None:
    """Behaviours 9, 44: its log entry was never seen; what it staged is decided with the younger."""
    rig = Rig(by_hand(max_concurrent=2))
    rig.ask(name="one")
    rig.stage(1)
    rig.ask(name="two")
    rig.run_batch(2)
    assert rig.answers == ["one=ABORTED:SUBSUMED", "two=COMPLETED"]
    assert [int(b.batch) for b in rig.job_dir.decision(CheckpointId(2)).batches] == [0, 1]
    # Nothing is left that somebody would have to decide.
    assert rig.control.offered == [1, 2]
    assert rig.coordinator.failures.consecutive == 0


def test_a_savepoint_is_not_ended_by_a_younger_checkpoint() -> None:
    """Behaviour 45."""
    rig = Rig(by_hand(max_concurrent=2))
    rig.ask(P.SAVEPOINT, "/sp", "savepoint")
    batch = rig.stage(1)
    rig.ask()
    rig.run_batch(2)
    assert rig.open == "1:ACKNOWLEDGED 2:LOGGED"
    rig.commit_log(batch)
    assert (rig.confirmed, rig.aborted) == ([1, 2], [])


def test_expiry_ends_only_the_one_that_is_too_old() -> None:
    """Behaviours 39, 46: nothing is heard of the timeout once a checkpoint is decided."""
    rig = Rig(by_hand(timeout_ms=1_000, max_concurrent=3))
    rig.threads.held = ("complete",)
    rig.ask(name="decided")
    rig.run_batch(1)
    rig.ask(name="old")
    rig.stage(2)
    rig.clock.now_ms += 500
    rig.ask(name="young")
    rig.tick(500)
    assert rig.answers == ["old=ABORTED:EXPIRED"]
    assert rig.open.split() == ["1:DECIDING", "3:TRIGGERED"]
    rig.tick(10_000)
    assert "1:DECIDING" in rig.open


@pytest.mark.parametrize("tolerable", [0, 2])
def test_too_many_failures_in_a_row_end_the_query(tolerable) -> None:
    """Behaviours 47, 48: with an error that says so; a restart may mend it."""
    rig = Rig(by_hand(timeout_ms=1_000, tolerable_failures=tolerable))
    for _ in range(tolerable):
        rig.ask()
        rig.tick(1_000)
    rig.ask()
    rig.clock.now_ms += 1_000
    with pytest.raises(RetriableError, match="not decided within its timeout") as caught:
        rig.coordinator.tick()
    assert caught.value.restartable
    # Behaviour 33: nothing of it is left, and it is sealed.
    last = tolerable + 1
    assert (rig.open, rig.verdict(last), rig.answers[-1]) == ("", Verdict.ABORT, "user=ABORTED:EXPIRED")


def test_the_error_of_too_many_failures_knows_whether_an_outage_is_behind_it() -> None:
    """Who was too late may have waited for a system that does not answer; a hook's error says what it was."""
    rig = Rig(by_hand(timeout_ms=1_000, tolerable_failures=0))
    rig.ask()
    with pytest.raises(RetriableError) as late:
        rig.tick(1_000)
    assert is_outage(late.value)
    for error, is_away in ((OSError("the catalog is down"), True), (KeyError("version"), False)):
        hook = RecordedHook()
        hook.failing = [error]
        rig = Rig(by_hand(tolerable_failures=0), hooks=[hook])
        rig.ask()
        failure = rig.coordinator.failure
        assert isinstance(failure, RetriableError) and isinstance(failure.__cause__, HookError)
        assert is_outage(failure) is is_away


def test_one_success_clears_the_count_and_a_limit_can_be_none() -> None:
    """Behaviours 49, 52."""
    rig = Rig(by_hand(timeout_ms=1_000, tolerable_failures=1))
    for _ in range(3):
        rig.ask()
        rig.tick(1_000)
        rig.take()
    assert rig.coordinator.failures.consecutive == 0
    patient = Rig(by_hand(timeout_ms=1_000, tolerable_failures=UNLIMITED))
    for _ in range(30):
        patient.ask()
        patient.tick(1_000)
    assert len(patient.aborted) == 30


def test_everybody_hears_of_an_abort_once() -> None:
    """Behaviour 54: whatever the cause, and however late messages come."""
    rig = Rig(by_hand(timeout_ms=1_000))
    rig.ask()
    rig.run_batch(1, sinks="a")
    rig.tick(1_000)
    assert rig.aborted == [1, 2]
    rig.run_batch(1)
    assert rig.aborted == [1, 2]


def test_a_hook_that_never_answers_expires_like_anybody_else() -> None:
    """Behaviours 55, 56: and the others are not called while it hangs."""
    hanging, other = RecordedHook("hanging"), RecordedHook("other")
    rig = Rig(by_hand(timeout_ms=1_000), hooks=[hanging, other])
    rig.threads.held = ("initialise",)
    later: list[str] = []

    def hang() -> None:
        """Time goes on, the checkpoint expires, and the next one is tried while the first call hangs."""
        hanging.on_trigger = lambda: None
        rig.tick(1_000)
        rig.ask()
        rig.threads.let("initialise-2")
        rig.tick()
        later.extend(rig.answers)

    hanging.on_trigger = hang
    rig.ask()
    rig.threads.let("initialise-1")
    assert later == ["user=ABORTED:EXPIRED", "user=ABORTED:HOOK_FAILED"]
    rig.tick()
    rig.threads.held = ()
    assert rig.take() == 3
    assert hanging.calls == [("trigger", 1), ("trigger", 3)]


# -- a chained source -----------------------------------------------------------------------------------


def test_a_source_that_stands_at_a_cut_gets_a_checkpoint_at_once() -> None:
    """Asked for once, however often the coordinator looks; the interval is far away."""
    rig = Rig()
    rig.tick()
    assert rig.control.offered == []
    rig.control.status = AlignmentStatus(wants_checkpoint=True, text="stands at upstream checkpoint 3")
    for _ in range(5):
        rig.tick(1)
    assert (rig.control.offered, rig.control.purposes) == ([1], [P.FOLLOW_UP])
    rig.control.status = AlignmentStatus(wants_checkpoint=False, text="reads on")
    rig.commit_log(rig.stage(1))
    rig.tick(1)
    assert (rig.confirmed, rig.control.offered) == ([1], [1])


def test_a_failing_hook_is_left_in_peace_while_the_source_stands_at_a_cut() -> None:
    """Once at the cut, and again only when the interval is over: not with every tick."""
    hook = RecordedHook()
    hook.failing = [OSError("the catalog is down") for _ in range(9)]
    rig = Rig(by_hand(interval_ms=10_000, tolerable_failures=10), hooks=[hook])
    rig.control.status = AlignmentStatus(wants_checkpoint=True, text="stands at 3", cut=3)
    for _ in range(495):
        rig.tick(20)
    assert len(rig.aborted) == 1
    for _ in range(500):
        rig.tick(20)
    assert len(rig.aborted) == 2


def test_a_checkpoint_that_expires_says_what_its_source_waited_for() -> None:
    """Behaviours 46, 55: the source is a participant that never answers."""
    rig = Rig()
    rig.control.status = AlignmentStatus(wants_checkpoint=False, text="has seen no barrier record yet")
    rig.ask(P.SAVEPOINT)
    assert rig.control.purposes == [P.SAVEPOINT]
    rig.tick(5_000)
    decision = rig.job_dir.decision(CheckpointId(1))
    assert decision.verdict is Verdict.ABORT
    assert decision.reason.endswith("; the source has seen no barrier record yet")
