"""Alignment as literal sequences of elements; `tests/support/gate_script.py` says how to read them."""

import math

import pytest

from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.input_gate import (
    MAX_PENDING,
    AlignmentComplete,
    AlignmentMode,
    AlignmentPhase,
    AlignmentSettings,
    AlignmentStats,
    BarrierKind,
    CheckpointBarrier,
    InputGate,
    NewChannel,
    PositionRange,
    TakeCheckpoint,
)
from tests.support.gate_script import Player, gate

ALIGNED, UNALIGNED = AlignmentMode.ALIGNED, AlignmentMode.UNALIGNED
AT_LEAST_ONCE, TIMED = AlignmentMode.AT_LEAST_ONCE, AlignmentMode.ALIGNED_WITH_TIMEOUT


def aligned(channels: str) -> Player:
    return Player(gate(channels, ALIGNED))


def counting(channels: str) -> Player:
    return Player(gate(channels, AT_LEAST_ONCE))


def unaligned(channels: str) -> Player:
    return Player(gate(channels, UNALIGNED))


def timed(channels: str, timeout_ms: int = 50) -> Player:
    return Player(gate(channels, TIMED, timeout_ms=timeout_ms))


def pending_ids(player: Player) -> list[int]:
    return [int(alignment.checkpoint) for alignment in player.gate.pending]


# -- aligned ------------------------------------------------------------------------------------
@pytest.mark.parametrize("channels", ["a", "abc"])
def test_without_barriers_nothing_waits(channels):  # behaviour 94
    player = aligned(channels)
    assert player.play(" ".join(f"{c}. {c}. @9 {c}." for c in channels)) == ""
    assert not player.gate.blocked and not player.gate.pending


def test_one_channel_takes_the_checkpoint_at_its_barrier_and_ids_may_skip():  # behaviour 95
    player = aligned("a")
    assert player.play("a. a1 a. a. a2 a5 a. a9") == "take1 done1 take2 done2 take5 done5 take9 done9"
    assert player.last(AlignmentComplete).stats.alignment_duration_ms == 0
    assert dict(player.gate.channels) == {"a": 8}


def test_a_channel_waits_from_its_barrier_to_the_last_one():  # behaviour 96
    player = aligned("abc")
    assert player.play("a. b. a. c. b1") == "-b"
    assert player.play("a. c. a1") == "-a"
    assert player.gate.blocked == {"a", "b"} and not player.gate.is_blocked("c")
    assert player.play("c. c.") == ""
    assert player.play("c1") == "take1 done1 +a +b"
    assert not player.gate.blocked


def test_checkpoints_follow_each_other_without_records_between():  # behaviour 96
    player = aligned("ab")
    assert player.play("a1 b1 b2 a2 a3 b3") == "-a take1 done1 +a -b take2 done2 +b -a take3 done3 +a"


def test_a_newer_barrier_on_an_open_channel_ends_the_older_checkpoint():  # behaviours 97, 119
    player = aligned("abc")
    assert player.play("a1 b1") == "-a -b"
    assert player.play("c. c2") == "SUBSUMED1 +a +b -c"
    assert player.play("b. b2 a. a2") == "-b take2 done2 +b +c"


def test_the_channel_that_ends_an_older_checkpoint_may_have_been_its_last():  # behaviour 97
    player = aligned("ab")
    assert player.play("a3 b4 a. a4") == "-a SUBSUMED3 +a -b take4 done4 +b"


def test_late_barriers_of_a_subsumed_id_are_dropped_and_their_channel_stays_open():  # behaviours 97, 119
    player = aligned("abc")
    assert player.play("a10 b5 b. b7") == "-a"
    assert not player.gate.is_blocked("b")
    assert player.play("b10 c9 c. c10 c6") == "-b take10 done10 +a +b"


def test_what_was_completed_does_not_complete_again():  # behaviour 106
    player = aligned("ab")
    assert player.play("a1 b1 a1 b1 a. b.") == "-a take1 done1 +a"


def test_a_savepoint_is_told_from_a_checkpoint():  # behaviour 59
    player = aligned("ab")
    player.play("a1S b1S")
    assert player.last(TakeCheckpoint).kind is player.last(AlignmentComplete).kind is BarrierKind.SAVEPOINT


# -- new channels ---------------------------------------------------------------------------
def test_a_new_channel_is_awaited_or_stands_behind_the_barriers():
    player = aligned("ab")
    assert player.play("a1 +c |d") == "-a -d"
    assert player.play("b1 c.") == "-b"
    assert player.play("c1 d.") == "take1 done1 +a +b +d"
    assert player.play("a2 b2 c2 d2") == "-a -b -c take2 done2 +a +b +c"


# -- ids that are given up -------------------------------------------------------------------------------
def test_late_barriers_of_an_aborted_id_do_not_disturb_the_next_alignment():  # behaviours 105, 106
    player = aligned("abc")
    assert player.play("a1 x1 c1") == "-a COORDINATOR1 +a"
    assert player.play("b2 c1 a1") == "-b"
    assert player.play("a2 c2") == "-a take2 done2 +a +b"


def test_an_id_that_is_given_up_before_any_barrier_is_reported_once():  # behaviours 104, 105
    player = aligned("abc")
    assert player.play("x4 b. x4 b4 c4") == "COORDINATOR4"
    assert player.play("a5 b5 c5") == "-a -b take5 done5 +a +b"


# -- measured -----------------------------------------------------------------------------------
def test_an_alignment_is_measured():  # behaviour 108
    player = aligned("abc")
    player.play("a. b. @100 a1 @109 b. c. b1 @150 c. c1")
    stats = player.last(AlignmentComplete).stats
    assert stats == AlignmentStats(start_delay_ms=101, alignment_duration_ms=51)


def test_a_running_alignment_can_be_looked_at():  # behaviour 108
    player = aligned("ab")
    player.play("@7 a1 b.")
    (alignment,) = player.gate.pending
    assert alignment.stats(now_ms=20) == AlignmentStats(8, 12)


def test_a_clock_that_was_set_back_counts_as_no_time():  # behaviour 108
    player = timed("ab")
    player.play("@100 a1 @20 b1")
    assert player.last(AlignmentComplete).stats == AlignmentStats(101, 0)


# -- at least once ------------------------------------------------------------------------------
def test_at_least_once_nothing_waits():  # behaviour 110
    player = counting("abc")
    assert player.play("a. a1 a. b. b1 a. b. c.") == ""
    assert player.play("c1 c. a2 c2") == "take1 done1"
    assert player.play("b2") == "take2 done2"


def test_at_least_once_a_savepoint_does_not_wait_either():  # behaviour 110
    assert counting("ab").play("a1S a. b1S") == "take1 done1"


def test_at_least_once_several_open_ids_take_only_their_own_barriers():  # behaviour 2
    player = counting("abc")
    player.play("a1 a2 b1 b2")
    assert [alignment.awaited for alignment in player.gate.pending] == [{"c"}, {"c"}]
    player.play("c1")
    assert pending_ids(player) == [2]


def test_at_least_once_late_barriers_complete():  # behaviour 112
    player = counting("abc")
    assert player.play("a2 b2 a3 a. b3 a4 b4 c.") == ""
    assert player.play("c2 c. c3 c. c4") == "take2 done2 take3 done3 take4 done4"


def test_at_least_once_an_id_that_a_channel_skips_is_subsumed_and_frees_its_place():  # behaviours 9, 112
    player = counting("abc")
    assert player.play("a1 a2 b1 b2 c2 c1") == "SUBSUMED1 take2 done2"
    assert pending_ids(player) == []


def test_at_least_once_an_older_barrier_after_a_newer_one_is_dropped():  # behaviour 119
    player = counting("ab")
    assert player.play("a5 b4 a4 b5") == "take5 done5"


def test_at_least_once_a_repeated_barrier_counts_once():
    assert counting("abc").play("a1 a1 b1 a1 b1 c1") == "take1 done1"


def test_aborted_ids_are_remembered_as_one_number():  # behaviour 116
    player = counting("ab")
    reports = player.play(" ".join(f"a{i} x{i} b{i}" for i in range(1, 200)))
    assert reports == " ".join(f"COORDINATOR{i}" for i in range(1, 200))
    assert player.gate.to_json() == {"newest": 199, "channels": {"a": 199, "b": 199}, "pending": []}


def test_of_too_many_open_ids_the_oldest_is_aborted():  # behaviour 116
    player = counting("ab")
    assert player.play(" ".join(f"a{i}" for i in range(1, MAX_PENDING + 1))) == ""
    assert player.play(f"a{MAX_PENDING + 1}") == "TOO_MANY_PENDING1"
    assert len(player.gate.pending) == MAX_PENDING
    assert player.play("b1 b2") == "take2 done2"


def test_two_last_barriers_one_by_one_complete_one_checkpoint_each():  # behaviour 117
    player = counting("ab")
    assert player.play("a1 a2") == ""
    assert player.play("b1") == "take1 done1"
    assert player.play("b2") == "take2 done2"


# -- unaligned ----------------------------------------------------------------------------------
def test_unaligned_the_records_in_front_of_each_barrier_are_channel_state():  # behaviour 121
    player = unaligned("abc")
    assert player.play("a. b. b. c. a1") == "take1(b:2,c:1)"
    assert player.play("a. a. b. c. c. c1") == ""
    assert player.play("c. a. b. b.") == ""
    assert player.play("b1") == "done1(b:2-5,c:1-3)"
    assert player.last(AlignmentComplete).stats == AlignmentStats(5, 11)


def test_unaligned_a_channel_without_records_before_its_barrier_has_no_state():  # behaviour 121
    assert unaligned("abc").play("b. a1 b1 c. c1") == "take1(b:1,c:0) done1(c:0-1)"
    assert unaligned("ab").play("a1 b1 b2 a2") == "take1(b:0) done1 take2(a:1) done2"


def test_unaligned_one_channel_has_no_channel_state():  # behaviours 95, 121
    assert unaligned("a").play("a. a1 a. a3") == "take1 done1 take3 done3"


def test_unaligned_a_repeated_barrier_adds_nothing():  # behaviour 121
    assert unaligned("ab").play("a1 a1 b. a1 b1") == "take1(b:0) done1(b:0-1)"


def test_unaligned_an_announced_barrier_ends_the_channel_state_before_it_is_met():  # behaviour 121
    player = unaligned("abc")
    assert player.play("b. b?1:7 a1") == "take1(b:1,c:0)"
    assert player.play("b?1:7 b. c?2:9 a?1:9") == ""
    assert player.play("c?1:3") == "done1(b:1-7,c:0-3)"
    assert player.play("b. b. b. b. b. b1 c. c. c. c1") == ""
    assert dict(player.gate.channels) == {"a": 1, "b": 8, "c": 4}


def test_an_announcement_changes_nothing_while_channels_wait():
    player = aligned("ab")
    assert player.play("b?1:3 a1 b?1:3 b. b?1:3") == "-a"
    assert pending_ids(player) == [1]


def test_unaligned_a_new_channel_is_recorded_from_its_beginning_unless_it_stands_behind():  # behaviour 121
    player = unaligned("ab")
    assert player.play("a1 b. +c |d d. c. b1 c. c1") == "take1(b:0) done1(b:0-1,c:0-2)"


def test_unaligned_a_new_channel_is_recorded_from_where_it_begins():  # behaviour 121
    player = unaligned("ab")
    player.play("a1")
    player.gate, _ = player.gate.on_new_channel("c", 70, NewChannel.AWAITS_BARRIERS, player.now_ms)
    assert player.play("c. c. c1 b1") == "done1(c:70-72)"


def test_unaligned_a_newer_barrier_ends_the_older_checkpoint():  # behaviours 97, 119
    player = unaligned("abc")
    assert player.play("a1 b. a. a2") == "take1(b:0,c:0) SUBSUMED1 take2(b:1,c:0)"
    assert player.play("b1 b. b2 c1 c2") == "done2(b:1-3,c:0-1)"


def test_unaligned_what_was_recorded_is_dropped_with_its_checkpoint():  # behaviour 122
    player = unaligned("abc")
    fresh = player.gate.to_json()
    player.play("a1 b. c. c1 x1")
    assert player.gate.to_json() == {**fresh, "newest": 1, "channels": {"a": 1, "b": 1, "c": 2}}
    player.play("a2 c2 b. b2")
    assert player.gate.to_json()["pending"] == []


def test_unaligned_an_abort_by_the_coordinator_before_during_and_after():  # behaviour 123
    player = unaligned("ab")
    assert player.play("x1 a1 b1") == "COORDINATOR1"
    assert player.play("a2 x2 b2 x2") == "take2(b:1) COORDINATOR2"
    assert player.play("a3 b3 x3") == "take3(b:2) done3"


def test_an_abort_by_the_coordinator_opens_the_channels():  # behaviour 123
    assert aligned("ab").play("a1 x1 b1 a. a2 b2") == "-a COORDINATOR1 +a -a take2 done2 +a"


def test_a_savepoint_is_aligned_in_every_mode_that_is_exactly_once():  # behaviour 59
    assert unaligned("ab").play("a1S b. @900 b1S") == "-a take1 done1 +a"
    assert timed("ab").play("a1S b. @900 b1S") == "-a take1 done1 +a"


# -- alignment timeout --------------------------------------------------------------------------
def test_a_last_barrier_in_time_stays_aligned():  # behaviour 118
    player = timed("ab")
    assert player.play("@100 a1 b. @150") == "-a"
    assert player.play("b1 @900") == "take1 done1 +a"


def test_an_alignment_turns_unaligned_when_its_timeout_is_over():  # behaviour 118
    player = timed("abc")
    assert player.play("@100 b. a1 b. @152 @153") == "-a take1(b:2,c:0) +a"
    assert player.play("a. b. b1 c1") == "done1(b:2-3)"


def test_the_gate_says_when_the_timeout_is_over():  # behaviour 118
    player = timed("ab")
    assert player.gate.turns_unaligned_at_ms is None
    player.play("@100 a1")
    assert player.gate.turns_unaligned_at_ms == 151
    player.play("@151")
    assert player.gate.turns_unaligned_at_ms is None
    assert aligned("ab").gate.turns_unaligned_at_ms is None


@pytest.mark.parametrize(
    "event, reports",
    [
        ("b1", "take1(c:1) +a"),  # the element first, then the time: b waits for no moment
        ("b.", "take1(b:1,c:1) +a"),
        ("x1", "COORDINATOR1 +a"),
        ("b2", "SUBSUMED1 +a -b"),
        ("b?1:5", "take1(b:0,c:1) +a"),
    ],
)
def test_any_event_notices_a_timeout_that_is_over(event, reports):  # behaviour 118
    player = timed("abc")
    player.play("a1 c.")
    player.now_ms = 900
    assert player.play(event) == reports


def test_a_last_barrier_after_the_timeout_that_nobody_noticed_stays_aligned():  # behaviour 118
    player = timed("ab")
    player.play("a1 b.")
    player.now_ms = 900
    assert player.play("b1") == "take1 done1 +a"


@pytest.mark.parametrize("over", ["b1", "x1"])
def test_nothing_turns_unaligned_after_last_barrier_or_abort(over):  # behaviour 118
    player = timed("ab")
    player.play(f"a1 {over}")
    assert player.play("@900") == ""


def test_each_checkpoint_has_a_timeout_of_its_own():  # behaviour 118
    player = timed("ab")
    assert player.play("@10 a1 @60 b2 @70") == "-a SUBSUMED1 +a -b"
    assert player.play("@110 @111") == "take2(a:1) +b"


def test_without_patience_a_checkpoint_is_unaligned_from_its_first_barrier():  # behaviour 118
    assert timed("ab", timeout_ms=0).play("a1 b. b1") == "take1(b:0) done1(b:0-1)"


# -- what cannot be -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "event, message",
    [
        ("a.", "'a' is blocked at 1, got elements up to 2"),
        ("a2", "'a' is blocked at 1, got its element there"),
        ("z.", "'z' is not an open channel"),
        ("+a", "'a' is already a channel"),
        ("b?1:0", "'b' stands at 1 and cannot go back to 0"),
    ],
)
def test_an_event_that_cannot_be_changes_nothing(event, message):
    player = aligned("ab")
    player.play("b. a1")
    before = player.gate
    with pytest.raises(ValueError, match=message):
        player.play(event)
    assert player.gate == before and pending_ids(player) == [1]


def test_a_blocked_channel_may_repeat_where_it_stands():
    player = aligned("ab")
    player.play("a1")
    assert player.gate.on_records("a", 1, now_ms=9) == (player.gate, ())


def test_a_barrier_brings_the_elements_in_front_of_it():
    behind, _ = gate("ab").on_barrier("a", CheckpointBarrier(CheckpointId(1), 0), position=7, now_ms=0)
    assert dict(behind.channels) == {"a": 8, "b": 0}
    with pytest.raises(ValueError, match="stands at 8 and cannot go back to 7"):
        behind.on_barrier("a", CheckpointBarrier(CheckpointId(2), 0), position=7, now_ms=0)


@pytest.mark.parametrize(
    "mode, timeout_ms, message",
    [
        (TIMED, None, "belongs to ALIGNED_WITH_TIMEOUT"),
        (ALIGNED, 5, "got 5 with ALIGNED"),
        (UNALIGNED, 0, "got 0 with UNALIGNED"),
        *(
            (TIMED, wrong, "alignment_timeout_ms must be a whole number from 0 to 31536000000, got")
            for wrong in (-1, 1.5, math.nan, True, "5", 10**30)
        ),
    ],
)
def test_settings_that_contradict_themselves_are_refused(mode, timeout_ms, message):
    with pytest.raises(ValueError, match=message):
        AlignmentSettings(mode, alignment_timeout_ms=timeout_ms)


@pytest.mark.parametrize("wrong", ["ALIGNED", None, True, BarrierKind.SAVEPOINT])
def test_a_mode_is_no_word(wrong):
    with pytest.raises(ValueError, match=r"mode must be one of AlignmentMode\.ALIGNED, "):
        AlignmentSettings(wrong)


def test_a_range_runs_forward():
    assert PositionRange(2, 5).size == 3
    for start, end in ((3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="runs forward"):
            PositionRange(start, end)


# -- stored form --------------------------------------------------------------------------------
def test_a_stored_gate_goes_on_in_the_phase_it_was_in_when_the_mode_changes():
    player = aligned("ab")
    player.play("a1 b.")
    player.gate = InputGate.from_json(player.gate.to_json(), AlignmentSettings(UNALIGNED))
    assert player.gate.pending[0].phase is AlignmentPhase.BLOCKING
    assert player.play("@5 b. b1") == "take1(b:1) +a done1(b:1-2)"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"newest": 0}, "rise up to 0, got"),
        ({"channels": {"a": 1}}, "awaits open channels"),
    ],
)
def test_a_stored_gate_that_contradicts_itself_is_refused(change, message):
    player = aligned("ab")
    player.play("a1")
    with pytest.raises(ValueError, match=message):
        InputGate.from_json({**player.gate.to_json(), **change}, player.gate.settings)


def test_a_stored_gate_with_a_checkpoint_that_awaits_nothing_is_refused():
    player = counting("ab")
    player.play("a1 a2")
    stored = player.gate.to_json()
    stored["pending"][0]["awaited"] = []
    with pytest.raises(ValueError, match="at least one"):
        InputGate.from_json(stored, player.gate.settings)
    stored["pending"].reverse()
    with pytest.raises(ValueError, match="pending ids rise"):
        InputGate.from_json(stored, player.gate.settings)
