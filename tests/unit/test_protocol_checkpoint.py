import itertools

import pytest

from flinkish_spark.protocol.alignment import (
    Alignment,
    AlignmentReport,
    Announced,
    announced_channel,
    count_barriers,
)
from flinkish_spark.protocol.checkpoint import (
    TRANSITIONS,
    CheckpointEvent,
    CheckpointState,
    IllegalTransitionError,
    PendingCheckpoint,
    transition_table,
)
from flinkish_spark.protocol.ids import (
    BatchId,
    CheckpointId,
    JobUuid,
    OwnerEpoch,
    TransactionalId,
    checked_name,
)
from flinkish_spark.protocol.records import Barrier, SinkAck, TaskAck
from flinkish_spark.protocol.restart import (
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    GiveUp,
    NoRestart,
    RestartAfter,
    RestartHistory,
)
from flinkish_spark.protocol.trigger import JobPhase, TriggerFacts, TriggerReason, decide_trigger


@pytest.mark.parametrize("state,event", list(itertools.product(CheckpointState, CheckpointEvent)))
def test_every_state_takes_or_refuses_every_event(state, event):
    pending = PendingCheckpoint(CheckpointId(1), 0, state)
    following = TRANSITIONS[state].get(event)
    if following is None:
        with pytest.raises(IllegalTransitionError, match=f"is {state.value} and cannot take {event.value}"):
            pending.on(event)
    else:
        assert pending.on(event).state is following
    assert pending.state is state


def test_only_confirmed_and_aborted_are_final_and_all_states_are_reachable():
    assert {s for s, row in TRANSITIONS.items() if not row} == {
        CheckpointState.CONFIRMED,
        CheckpointState.ABORTED,
    }
    reached = {CheckpointState.TRIGGERED} | {t for row in TRANSITIONS.values() for t in row.values()}
    assert reached == set(CheckpointState) == TRANSITIONS.keys()
    assert transition_table().count("\n") == len(CheckpointState) + 1


def test_a_decided_checkpoint_never_expires():
    pending = PendingCheckpoint(CheckpointId(1), triggered_at_ms=0)
    assert not pending.is_expired(9, timeout_ms=10)
    assert pending.is_expired(10, timeout_ms=10)
    decided = (
        pending.acknowledged_by(BatchId(4))
        .on(CheckpointEvent.COMMIT_LOG_READ)
        .on(CheckpointEvent.DECISION_WON)
    )
    assert decided.batch == BatchId(4)
    assert not decided.is_expired(10_000, timeout_ms=10)


def ack(sink, *channels, checkpoint=7):
    barriers = [Barrier(CheckpointId(checkpoint), c) for c in channels]
    return SinkAck(sink, (TaskAck(0, 0, 0, tuple(barriers)),))


@pytest.mark.parametrize(
    "acks,alignment,detail",
    [
        ([ack("a", 0, 1), ack("b", 1, 0)], Alignment.ALIGNED, ""),
        ([ack("a", 0), ack("b", 0, 1)], Alignment.MISSING, "sink 'a' saw no barrier 7 on channel 1"),
        ([ack("a", 0, 1)], Alignment.MISSING, "sink 'b' did not acknowledge"),
        ([ack("a", 0, 1, 1), ack("b", 0, 1)], Alignment.DUPLICATE, "twice on channel 1"),
        ([ack("a", 0, 1, 2), ack("b", 0, 1)], Alignment.UNEXPECTED, "on channel 2"),
        ([ack("a", 0, 1, checkpoint=6), ack("b", 0, 1)], Alignment.MISSING, "no barrier 7"),
    ],
)
def test_each_channel_shows_its_barrier_exactly_once(acks, alignment, detail):
    expected = {"a": frozenset({0, 1}), "b": frozenset({0, 1})}
    report = count_barriers(CheckpointId(7), acks, expected)
    assert report.alignment is alignment
    assert detail in report.detail


FACTS = dict(
    now_ms=1_000,
    phase=JobPhase.RUNNING,
    pending=0,
    requested=0,
    last_trigger_ms=0,
    last_end_ms=0,
    interval_ms=1_000,
    min_pause_ms=0,
)


@pytest.mark.parametrize(
    "change,reason",
    [
        ({}, TriggerReason.PERIODIC),
        ({"now_ms": 999}, TriggerReason.INTERVAL_NOT_OVER),
        ({"phase": JobPhase.STOPPED}, TriggerReason.SHUT_DOWN),
        ({"phase": JobPhase.STARTING, "requested": 1}, TriggerReason.NOT_RUNNING),
        ({"pending": 1, "requested": 1}, TriggerReason.TOO_MANY_PENDING),
        ({"now_ms": 1, "requested": 1}, TriggerReason.REQUESTED),
        ({"min_pause_ms": 500, "last_end_ms": 600}, TriggerReason.MINIMUM_PAUSE),
    ],
)
def test_why_a_checkpoint_starts_or_not(change, reason):
    assert decide_trigger(TriggerFacts(**{**FACTS, **change})) is reason
    assert reason.starts == (reason in (TriggerReason.PERIODIC, TriggerReason.REQUESTED))


def history(*failures_ms):
    result = RestartHistory()
    for now_ms in failures_ms:
        result = result.failed(now_ms)
    return result


def test_restart_strategies():
    assert isinstance(NoRestart().decide(history(0)), GiveUp)
    assert FixedDelay(2, 10).decide(history(0, 1)) == RestartAfter(10)
    assert isinstance(FixedDelay(2, 10).decide(history(0, 1, 2)), GiveUp)
    delays = [ExponentialDelay(100, 1_000).decide(history(*range(n))).delay_ms for n in range(1, 7)]
    assert delays == [100, 200, 400, 800, 1_000, 1_000]
    assert ExponentialDelay().decide(history(*range(5_000))).delay_ms == 30_000
    assert FailureRate(2, 100, 5).decide(history(0, 1_000, 1_001)) == RestartAfter(5)
    assert isinstance(FailureRate(2, 100, 5).decide(history(1_000, 1_001, 1_002)), GiveUp)
    assert history(1, 2).ran_well() == RestartHistory((1, 2), attempts=0)


def test_ids_refuse_what_they_are_not():
    for wrong in (-1, True, "1", 1.0, None):
        with pytest.raises(ValueError, match="CheckpointId must be"):
            CheckpointId(wrong)
    for wrong in ("", "a/b", "..", "a..b", ".hidden", "x" * 129, "ä"):
        with pytest.raises(ValueError, match="not usable"):
            checked_name(wrong, "uid")
    with pytest.raises(ValueError, match="32 lower-case"):
        JobUuid("ABC")


def test_transactional_ids_are_parsed_exactly():
    one = TransactionalId(JobUuid("0" * 31 + "a"), OwnerEpoch(3), 4, 5, 6)
    assert TransactionalId.parse(str(one)) == one
    for text in (str(one) + "-7", "x" + str(one), str(one)[:-2], str(one).replace("flinkish", "flink")):
        assert TransactionalId.parse(text) is None


def test_announced_channels_must_all_show_their_barrier() -> None:
    three = [announced_channel(i, 3) for i in range(3)]

    def report(channels: list[int]) -> AlignmentReport:
        barriers = tuple(Barrier(CheckpointId(7), channel) for channel in channels)
        ack = SinkAck("out", (TaskAck(0, 0, 0, barriers),))
        return count_barriers(CheckpointId(7), [ack], {"out": Announced.ANNOUNCED})

    assert report(three).alignment is Alignment.ALIGNED
    assert report(three[:2]).alignment is Alignment.MISSING
    assert report([]).alignment is Alignment.MISSING
    assert report([*three, three[1]]).alignment is Alignment.DUPLICATE
    # Channels that do not agree on how many they are.
    assert report([announced_channel(0, 1), announced_channel(0, 2)]).alignment is Alignment.MISSING
    for index, total in ((3, 3), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="there is no channel"):
            announced_channel(index, total)
