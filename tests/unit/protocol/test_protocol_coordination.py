"""All checkpoints of a job at once, as literal sequences (`tests/support/coordination_script.py`)."""

from __future__ import annotations

import pytest

from flinkish_spark.protocol.checkpoint import FinishedParticipants, Participant, ParticipantKind
from flinkish_spark.protocol.coordination import Abort, Initialise
from flinkish_spark.protocol.ids import CheckpointId
from tests.support.coordination_script import Script


def play(events: str, **settings) -> str:
    return Script(**settings).play(events)


# -- trigger --------------------------------------------------------------------------------------------


def test_a_checkpoint_from_its_trigger_to_its_receipt() -> None:
    """Behaviour 1: each step asks for the next one once, and nothing is left."""
    script = Script()
    assert script.play("run @9") == ""
    assert script.play("@10") == "init1"
    assert script.open == "1:INITIALISING"
    assert script.play("ready1") == "offer1"
    assert script.open == "1:TRIGGERED"
    assert script.play("a1") == ""
    assert script.open == "1:TRIGGERED"
    assert script.play("b1") == ""
    assert script.open == "1:ACKNOWLEDGED"
    assert [int(one.checkpoint) for one in script.state.awaiting_log] == [1]
    assert script.play("log1") == "decide1@1"
    assert script.open == "1:DECIDING"
    assert script.play("won1") == ""
    assert script.open == "1:DECIDED"
    assert script.play("conf1") == "done1"
    assert (script.open, script.queued, script.state.awaiting_log) == ("", "", ())


def test_two_in_flight_take_only_their_own_acknowledgements_and_complete_in_order() -> None:
    """Behaviour 2."""
    script = Script(max_concurrent=2)
    assert script.play("run user? ready1 a1 user? a2") == "init1 offer1"
    assert (script.open, script.queued) == ("1:TRIGGERED", "user")
    assert script.play("b1 ready2 a1 a2 b2") == "init2 offer2"
    assert script.open == "1:ACKNOWLEDGED 2:ACKNOWLEDGED"
    assert script.play("log1 log2 won1 conf1 won2 conf2") == "decide1@2 done1 decide2@5 done2"


@pytest.mark.parametrize("events", ["user?", "savepoint?", "run -b user?", "run -b savepoint?"])
def test_a_request_is_refused_while_somebody_does_not_run(events) -> None:
    """Behaviour 3."""
    script = Script()
    purpose = "savepoint" if "savepoint" in events else "user"
    assert script.play(events) == f"refuse:PARTICIPANT_NOT_RUNNING({purpose})"
    assert (script.open, script.queued) == ("", "")


def test_a_request_is_refused_when_somebody_has_finished_and_that_is_not_allowed() -> None:
    """Behaviour 4."""
    script = Script(finished=FinishedParticipants.REFUSED)
    assert script.play("run b$ user? @10") == "refuse:PARTICIPANT_FINISHED(user)"
    assert (script.open, script.queued) == ("", "")


def test_who_has_finished_is_recorded_and_not_asked() -> None:
    """Behaviours 5, 42."""
    script = Script()
    assert script.play("run b$ user?") == "init1"
    assert script.state.open[0].finished == ("b",)
    assert script.play("ready1 b1 a1 log1") == "offer1 decide1@1"


def test_a_sink_that_finishes_after_the_trigger_leaves_its_checkpoint_to_the_timeout() -> None:
    """Behaviour 6: it may still acknowledge; if it does not, the next checkpoint does without it."""
    assert play("run user? ready1 a1 b$ b1 log1") == "init1 offer1 decide1@1"
    script = Script(timeout_ms=50)
    assert script.play("run off user? ready1 a1 b$ @50") == "init1 offer1 abort1:EXPIRED"
    assert script.play("user? ready2 a2 log2") == "init2 offer2 decide2@1"


def test_the_timer_waits_for_the_end_of_the_last_checkpoint_and_the_pause() -> None:
    """Behaviours 7, 30."""
    script = Script(min_pause_ms=30)
    assert script.play("run @29 @30") == "init1"
    assert script.play("ready1 ab1 log1 @45 won1 conf1") == "offer1 decide1@0 done1"
    assert script.play("@55 @74") == ""
    assert script.play("@75") == "init2"


def test_a_request_that_the_timer_queued_waits_for_the_pause_too() -> None:
    """Behaviours 7, 30: the interval was over while the checkpoint before it was in flight."""
    script = Script(min_pause_ms=20)
    assert script.play("run @20 ready1 @30 @45 ab1 log1 won1 conf1") == "init1 offer1 decide1@0 done1"
    assert script.play("@64") == ""
    assert script.play("@65") == "init2"


@pytest.mark.parametrize("ending", ["no{0}", "@{1}", "a{0} log{0} won{0} conf{0}"])
def test_the_pause_counts_from_every_kind_of_end(ending) -> None:
    """Behaviour 7: declined, expired, completed."""
    script = Script(min_pause_ms=30, timeout_ms=20)
    script.play("run b$ @30 ready1 @40 " + ending.format(1, 50))
    end_ms = script.now_ms
    assert script.play(f"@{end_ms + 29}") == ""
    assert script.play(f"@{end_ms + 30}") == "init2"


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_no_more_in_flight_than_allowed_and_each_end_admits_one(limit) -> None:
    """Behaviours 8, 24."""
    script = Script(max_concurrent=limit, timeout_ms=10**6)
    script.play("run off" + " user?" * 10)
    for checkpoint in range(1, limit + 1):
        script.play(f"ready{checkpoint} ab{checkpoint}")
    assert len(script.state.open) == limit
    assert len(script.state.queue.waiting) == 10 - limit
    for ended in range(1, 5):
        begun = limit + ended
        assert script.play(f"log{ended} won{ended} conf{ended}").endswith(f"done{ended} init{begun}")
        assert len(script.state.open) == limit
        script.play(f"ready{begun} ab{begun}")


def test_a_forced_request_ignores_the_number_in_flight_but_waits_for_the_barrier() -> None:
    """Behaviour 26."""
    script = Script()
    assert script.play("run user? ready1 user? savepoint? ab1") == "init1 offer1 init2"
    assert (script.open, script.queued) == ("1:ACKNOWLEDGED 2:INITIALISING", "user")


def test_a_subsumed_checkpoint_frees_its_place() -> None:
    """Behaviours 9, 44: the first one's log entry is not seen before the second one's."""
    script = Script(max_concurrent=2)
    script.play("run off user? ready1 ab1 user? ready2 ab2 user?")
    assert script.queued == "user"
    assert script.play("log2") == "abort1:SUBSUMED decide2@1"
    # Nothing more has begun: what starts the waiting request is the next event of any kind.
    assert script.play("@1") == "init3"
    assert script.open == "2:DECIDING 3:INITIALISING"


def test_ticks_before_the_job_runs_do_nothing() -> None:
    """Behaviour 10."""
    script = Script()
    assert script.play("@10 @200 @201") == ""
    assert script.play("run @202") == "init1"
    assert Script().play("run -a @10 @20 +a @21") == "init1"


def test_ids_and_times_rise_also_behind_failures() -> None:
    """Behaviour 11."""
    script = Script(timeout_ms=30)
    assert script.play("run @10 ready1 no1 @20 @50 ready3") == (
        "init1 offer1 abort1:DECLINED init2 abort2:EXPIRED init3 offer3"
    )
    begun = [one for one in script.effects if isinstance(one, Initialise)]
    assert [int(one.checkpoint) for one in begun] == [1, 2, 3]
    assert [one.request.asked_at_ms for one in begun] == [10, 20, 50]
    numbers = [one.request.number for one in begun]
    assert numbers == sorted(set(numbers))


def test_a_start_goes_on_with_the_ids_of_the_one_before() -> None:
    """Behaviour 11."""
    assert play("run user? no7 user?", next_id=7) == "init7 abort7:DECLINED init8"


def test_switching_the_timer_off_drops_its_request_and_no_other() -> None:
    """Behaviour 12."""
    script = Script()
    assert script.play("run savepoint? user? @10") == "init1"
    assert script.queued == "user periodic"
    assert script.play("off") == "refuse:PERIODIC_SCHEDULING_OFF(periodic)"
    assert script.play("@100 periodic? savepoint?") == "refuse:PERIODIC_SCHEDULING_OFF(periodic)"
    assert script.queued == "savepoint user"
    assert script.play("on") == ""
    script.play("@200")
    assert script.queued == "savepoint user periodic"


def test_nothing_starts_once_the_job_has_stopped() -> None:
    """Behaviours 13, 76."""
    script = Script()
    script.play("run stop")
    assert script.play("@10 @1000") == ""
    requests = "user? savepoint? final? periodic?"
    assert script.play(requests) == " ".join(
        f"refuse:SHUT_DOWN({purpose})" for purpose in ("user", "savepoint", "final", "periodic")
    )
    assert script.queued == ""


def test_a_second_request_waits_while_the_first_is_initialised() -> None:
    """Behaviour 14."""
    script = Script(max_concurrent=5)
    assert script.play("run user? user?") == "init1"
    assert (script.open, script.queued) == ("1:INITIALISING", "user")
    assert script.play("ready1 a1") == "offer1"
    assert script.play("b1") == "init2"


def test_a_request_that_fails_does_not_hold_up_those_behind_it() -> None:
    """Behaviours 15, 17, 20."""
    assert play("run user? user? user? no1 no2 ready3") == (
        "init1 abort1:DECLINED init2 abort2:DECLINED init3 offer3"
    )


def test_giving_up_the_one_that_is_triggered_starts_the_next() -> None:
    """Behaviour 21; what its initialisation says later changes nothing."""
    script = Script(timeout_ms=50)
    assert script.play("run off user? user? no1") == "init1 abort1:DECLINED init2"
    assert script.play("ready1 no1 ab1") == ""
    assert script.play("user? @50") == "abort2:EXPIRED init3"
    assert script.play("ready2") == ""
    assert script.open == "3:INITIALISING"


def test_savepoints_go_first_and_the_timer_last() -> None:
    """Behaviours 27, 28, 30."""
    script = Script(min_pause_ms=10**6)
    script.play("run user? periodic? user? savepoint? final?")
    assert script.queued == "savepoint final user periodic"
    # The pause holds back the timer only: a savepoint starts although a checkpoint has just ended.
    assert script.play("no1 no2 no3 no4") == (
        "abort1:DECLINED init2 abort2:DECLINED init3 abort3:DECLINED init4 abort4:DECLINED"
    )


def test_a_full_queue_says_so_to_the_least_important() -> None:
    """Behaviour 29."""
    script = Script(queue_limit=2)
    assert script.play("run user? user? user? user?") == "init1 refuse:QUEUE_FULL(user)"
    assert script.play("final?") == "refuse:QUEUE_FULL(user)"
    assert script.queued == "final user"
    # The timer does not answer to anybody: it comes again.
    assert script.play("@10") == ""
    assert script.queued == "final user"
    assert script.play("savepoint?") == ""
    assert len(script.state.queue.waiting) == 3


def test_the_timer_may_take_the_place_of_nobody() -> None:
    """Behaviour 29: of equals the newest goes, and the timer's request is the newest."""
    script = Script(queue_limit=1)
    assert script.play("run user? periodic? @10") == "init1"
    assert script.play("user?") == "refuse:QUEUE_FULL(periodic)"


def test_one_request_of_the_timer_at_a_time() -> None:
    script = Script()
    assert script.play("run user? @10 @20 @30 periodic?") == "init1 refuse:ALREADY_QUEUED(periodic)"
    assert script.queued == "periodic"


def test_any_number_of_savepoints_can_be_asked_for_at_once() -> None:
    """Behaviour 58: forced ones are all in flight together; each is decided on its own."""
    script = Script()
    script.play("run off savepoint? savepoint? savepoint?")
    assert script.play("ready1 ab1 ready2 ab2 ready3 ab3") == "offer1 init2 offer2 init3 offer3"
    assert len(script.state.open) == 3
    rest = " ".join(f"log{n} won{n} conf{n}" for n in (1, 2, 3))
    assert script.play(rest) == "decide1@0 done1 decide2@1 done2 decide3@2 done3"


# -- acknowledge, decline, late messages ----------------------------------------------------------------


def test_one_decline_ends_it() -> None:
    """Behaviour 31: with its reason, once, whatever comes later."""
    script = Script()
    assert script.play("run off user? ready1 a1 no1") == "init1 offer1 abort1:DECLINED"
    assert script.play("b1 no1 a1 ready1") == ""
    assert script.open == ""
    abort = script.effects[-1]
    assert isinstance(abort, Abort)
    assert (abort.text, abort.request.purpose.value) == ("declined", "USER")


def test_declining_the_older_of_two_drops_only_it() -> None:
    """Behaviour 32."""
    script = Script(max_concurrent=2)
    script.play("run off user? ready1 ab1 user? ready2 a2")
    assert script.play("no1") == "abort1:DECLINED"
    assert script.open == "2:TRIGGERED"
    assert script.play("b2 log2") == "decide2@2"


@pytest.mark.parametrize("events", ["", "ready1", "ready1 a1", "ready1 ab1", "ready1 ab1 log1"])
def test_a_checkpoint_can_be_declined_until_it_is_decided(events) -> None:
    """Behaviour 31."""
    script = Script()
    script.play("run off user? " + events)
    assert script.play("no1") == "abort1:DECLINED"
    assert script.open == ""


def test_what_is_decided_is_not_declined_expired_or_stopped() -> None:
    """Behaviour 39."""
    script = Script(timeout_ms=50)
    script.play("run off user? ready1 ab1 log1 won1")
    assert script.play("no1 @50 @10000 stop conf1") == "done1"


def test_hooks_acknowledge_before_the_barrier_goes_out() -> None:
    """Behaviour 41."""
    script = Script(hooks=("catalog",))
    script.play("run user?")
    assert Participant(ParticipantKind.HOOK, "catalog") in script.state.open[0].missing
    assert script.play("ready1") == "offer1"
    assert script.state.open[0].hook_states == {"catalog": "given"}
    assert script.play("ab1 log1") == "decide1@0"


def test_a_hook_that_does_not_answer_keeps_the_checkpoint_from_completing() -> None:
    """Behaviours 41, 55."""
    script = Script(hooks=("catalog",), timeout_ms=50)
    script.play("run off user?")
    script.state.on_initialised(CheckpointId(1), {})
    assert script.play("ab1") == ""
    assert script.play("@50") == "abort1:EXPIRED"
    abort = script.effects[-1]
    assert isinstance(abort, Abort)
    assert abort.text == "not decided within 50 ms (TRIGGERED, still waiting for hook 'catalog')"


def test_a_hook_is_counted_once() -> None:
    """Behaviours 36, 41."""
    hook = Participant(ParticipantKind.HOOK, "catalog")
    stranger = Participant(ParticipantKind.HOOK, "stranger")
    script = Script(hooks=("catalog",))
    script.play("run user?")
    script.state.open[0].acknowledge(hook)
    script.state.on_initialised(CheckpointId(1), {hook: 2, stranger: 3})
    assert script.state.open[0].hook_states == {}


def test_barriers_are_awaited_from_the_offer_to_the_last_acknowledgement() -> None:
    script, one = Script(), CheckpointId(1)
    awaited = []
    for event in ("run", "user?", "ready1", "a1", "b1", "log1"):
        script.play(event)
        awaited.append(script.state.awaits(one))
    assert awaited == [False, False, True, True, False, False]
    assert [script.state.barrier_on_its_way, Script().state.barrier_on_its_way] == [False, False]


def test_barriers_that_come_before_the_offer_count_for_nothing() -> None:
    """Behaviour 36: nobody was asked for them."""
    script = Script()
    assert script.play("run user? ab1 ready1") == "init1 offer1"
    assert script.open == "1:TRIGGERED"


# -- subsume, expire ------------------------------------------------------------------------------------


def test_completing_one_ends_all_that_are_older() -> None:
    """Behaviour 44; their late messages find nothing."""
    script = Script(max_concurrent=3)
    script.play("run off user? ready1 ab1 user? ready2 ab2 user? ready3 ab3")
    assert script.play("log3") == "abort1:SUBSUMED abort2:SUBSUMED decide3@2"
    assert script.play("a1 b2 no1 no2 ready1") == ""
    assert script.open == "3:DECIDING"
    assert [one.text for one in script.effects if isinstance(one, Abort)] == [
        "checkpoint 3 completed before it"
    ] * 2


def test_completing_one_leaves_the_younger() -> None:
    """Behaviour 44."""
    script = Script(max_concurrent=2)
    script.play("run off user? ready1 ab1 user? ready2")
    assert script.play("log1 won1 conf1") == "decide1@0 done1"
    assert script.open == "2:TRIGGERED"


def test_a_savepoint_is_never_subsumed() -> None:
    """Behaviour 45: a younger checkpoint waits for it, whatever becomes of it."""
    for ending, effects in (("log1", "decide1@0"), ("no1", "abort1:DECLINED decide2@1")):
        script = Script(max_concurrent=2)
        script.play("run off savepoint? ready1 ab1 user? ready2 ab2")
        assert script.play("log2") == ""
        assert script.open == "1:ACKNOWLEDGED 2:LOGGED"
        assert script.play(ending) == effects


def test_what_is_older_than_a_savepoint_in_waiting_is_left_alone() -> None:
    """Behaviour 45."""
    script = Script(max_concurrent=3)
    script.play("run off user? ready1 ab1 savepoint? ready2 ab2 user? ready3 ab3")
    assert script.play("log3") == ""
    assert script.open == "1:ACKNOWLEDGED 2:ACKNOWLEDGED 3:LOGGED"
    # The savepoint itself subsumes what is older.
    assert script.play("log2") == "abort1:SUBSUMED decide2@1"
    assert script.play("won2 conf2") == "done2 decide3@2"


def test_an_expired_savepoint_lets_the_younger_go() -> None:
    """Behaviours 45, 46."""
    script = Script(max_concurrent=2, timeout_ms=50)
    script.play("run off savepoint? ready1 ab1 @10 user? ready2 ab2 log2")
    assert script.play("@50") == "abort1:EXPIRED decide2@1"


def test_expiry_ends_only_the_one_that_is_too_old() -> None:
    """Behaviour 46; late acknowledgements find nothing."""
    script = Script(max_concurrent=2, timeout_ms=50)
    script.play("run off user? ready1 ab1 @10 user? ready2")
    assert script.play("@49") == ""
    assert script.play("@50") == "abort1:EXPIRED"
    assert script.play("a1 b1 no1") == ""
    assert script.open == "2:TRIGGERED"
    assert script.play("ab2 log2") == "decide2@3"


def test_the_text_of_an_expiry_says_what_it_waited_for() -> None:
    """Behaviour 46."""
    texts = []
    for events in ("ready1 a1", "ready1 ab1"):
        script = Script(timeout_ms=50)
        script.play(f"run off user? {events} @50")
        texts.append(script.effects[-1].text)
    assert texts == [
        "not decided within 50 ms (TRIGGERED, still waiting for sink 'b')",
        "not decided within 50 ms (ACKNOWLEDGED)",
    ]


# -- decisions ------------------------------------------------------------------------------------------


def test_one_decision_at_a_time_in_the_order_of_ids() -> None:
    """Behaviour 2: the next one is not begun before the receipt of the one before."""
    script = Script(max_concurrent=3)
    script.play("run off user? ready1 ab1 user? ready2 ab2 user? ready3 ab3")
    assert script.play("log1 log2 log3 won1 @5") == "decide1@0"
    assert script.open == "1:DECIDED 2:LOGGED 3:LOGGED"
    assert script.play("conf1 won2") == "done1 decide2@1"
    assert script.play("conf2") == "done2 decide3@2"


def test_a_decision_that_the_store_refused_frees_the_next_one() -> None:
    """Behaviour 66."""
    script = Script(max_concurrent=2)
    script.play("run off user? ready1 ab1 user? ready2 ab2 log1 log2")
    assert script.play("no1") == "abort1:DECLINED decide2@1"


# -- the end --------------------------------------------------------------------------------------------


def test_a_failing_or_stopping_job_ends_what_is_open_and_refuses_what_waits() -> None:
    """Behaviour 57."""
    script = Script(max_concurrent=3)
    script.play("run user? ready1 ab1 user? ready2 ab2 savepoint? ready3 @10 user?")
    assert script.open == "1:ACKNOWLEDGED 2:ACKNOWLEDGED 3:TRIGGERED"
    assert script.queued == "user periodic"
    assert script.play("stop") == (
        "refuse:SHUT_DOWN(user) refuse:SHUT_DOWN(periodic) "
        "abort1:JOB_STOPPED abort2:JOB_STOPPED abort3:JOB_STOPPED"
    )
    assert (script.open, script.queued) == ("", "")
    assert script.play("stop") == ""


@pytest.mark.parametrize("events,left", [("", "1:DECIDING"), ("won1", "1:DECIDED")])
def test_what_is_being_decided_is_left_to_who_decides_it(events, left) -> None:
    """Behaviours 57, 61."""
    script = Script(max_concurrent=2)
    script.play(f"run off user? ready1 ab1 user? ready2 log1 {events}")
    assert script.play("stop") == "abort2:JOB_STOPPED"
    assert script.open == left


@pytest.mark.parametrize("purpose", ["final", "final_savepoint"])
def test_nothing_starts_behind_the_last_checkpoint(purpose) -> None:
    """Behaviour 61: its turn comes as for any other, and behind its barrier there is no micro-batch."""
    script = Script(max_concurrent=9)
    assert script.play(f"run user? user? {purpose}? ready1 ab1") == "init1 offer1 init2"
    rest = "@10 savepoint? ready2 ab2 savepoint? log1 won1 conf1 log2 won2 conf2 @20 user?"
    assert script.play(rest) == "offer2 decide1@0 done1 decide2@1 done2"
    assert script.queued == "savepoint savepoint user user periodic"
    assert script.play("stop").count("SHUT_DOWN") == 5


def test_a_last_checkpoint_that_ends_lets_the_others_go_on() -> None:
    """Behaviour 61."""
    assert play("run off final? user? ready1 a1 no1") == "init1 offer1 abort1:DECLINED init2"
    assert play("run off final? user? @100", timeout_ms=100) == "init1 abort1:EXPIRED init2"
