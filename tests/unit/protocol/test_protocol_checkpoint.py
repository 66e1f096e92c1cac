"""The life of one checkpoint, the barriers that are counted for it, and the ids it is named by."""

from __future__ import annotations

import itertools

import pytest

from flinkish_spark.protocol.alignment import (
    AnnouncedChannels,
    encode_announced_channel,
    find_misalignment,
    find_reached_sinks,
)
from flinkish_spark.protocol.checkpoint import (
    TRANSITIONS,
    CheckpointEvent,
    CheckpointRequest,
    CheckpointState,
    IllegalTransitionError,
    Participant,
    ParticipantKind,
    PendingCheckpoint,
)
from flinkish_spark.protocol.ids import (
    BatchId,
    CheckpointId,
    CheckpointPurpose,
    JobUuid,
    OwnerEpoch,
    TransactionalId,
    check_name,
)
from flinkish_spark.protocol.records import Barrier, SinkAck, TaskAck
from tools.tables import transition_table

E, S = CheckpointEvent, CheckpointState
TOTALS, AUDIT = (Participant(ParticipantKind.SINK, uid) for uid in ("totals", "audit"))
SUM = Participant(ParticipantKind.OPERATOR, "sum")
HOOK = Participant(ParticipantKind.HOOK, "catalog")

#: The events that lead from the beginning into each state.
WAYS = {
    S.INITIALISING: (),
    S.TRIGGERED: (E.INITIALISED,),
    S.ACKNOWLEDGED: (E.INITIALISED, E.ALL_ACKNOWLEDGED),
    S.LOGGED: (E.INITIALISED, E.ALL_ACKNOWLEDGED, E.COMMIT_LOG_READ),
    S.DECIDING: (E.INITIALISED, E.ALL_ACKNOWLEDGED, E.COMMIT_LOG_READ, E.TURN_CAME),
    S.DECIDED: (E.INITIALISED, E.ALL_ACKNOWLEDGED, E.COMMIT_LOG_READ, E.TURN_CAME, E.DECISION_WON),
    S.CONFIRMED: (
        E.INITIALISED,
        E.ALL_ACKNOWLEDGED,
        E.COMMIT_LOG_READ,
        E.TURN_CAME,
        E.DECISION_WON,
        E.RECEIPT_WRITTEN,
    ),
    S.ABORTED: (E.EXPIRED,),
}


def pending(state=S.INITIALISING, *participants, started_at_ms=0) -> PendingCheckpoint:
    """Return checkpoint 7, taken along the table into `state`."""
    request = CheckpointRequest(1, CheckpointPurpose.PERIODIC, 0)
    checkpoint = PendingCheckpoint(CheckpointId(7), request, participants or (TOTALS,), started_at_ms)
    for event in WAYS[state]:
        checkpoint.on(event)
    return checkpoint


# -- the table ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state,event", list(itertools.product(S, E)))
def test_every_state_takes_or_refuses_every_event(state, event) -> None:
    checkpoint = pending(state)
    following = TRANSITIONS[state].get(event)
    if following is None:
        with pytest.raises(IllegalTransitionError, match=f"7 is {state.value} and cannot take {event.value}"):
            checkpoint.on(event)
    else:
        checkpoint.on(event)
    assert checkpoint.state is (following or state)


def test_only_confirmed_and_aborted_are_final_and_all_states_are_reachable() -> None:
    assert {s for s, row in TRANSITIONS.items() if not row} == {S.CONFIRMED, S.ABORTED}
    reached = {S.INITIALISING} | {t for row in TRANSITIONS.values() for t in row.values()}
    assert reached == set(S) == TRANSITIONS.keys()


def test_every_state_has_a_way_to_an_end() -> None:
    ends = {S.CONFIRMED, S.ABORTED}
    while more := {s for s, row in TRANSITIONS.items() if ends & set(row.values())} - ends:
        ends |= more
    assert ends == set(S)


def test_nothing_decided_is_aborted() -> None:
    assert S.ABORTED not in TRANSITIONS[S.DECIDED].values()
    assert TRANSITIONS[S.DECIDING].keys() == {E.DECISION_WON, E.DECLINED}


def test_the_table_is_printed_with_a_row_per_state() -> None:
    lines = transition_table().splitlines()
    assert len(lines) == 2 + len(S)
    assert {line.count("|") for line in lines} == {2 + len(E)}
    assert lines[-1] == "| ABORTED |" + " - |" * len(E)


@pytest.mark.parametrize("state", S)
def test_what_is_open_and_what_can_be_ended_from_outside(state) -> None:
    checkpoint = pending(state)
    assert checkpoint.is_open is (state not in (S.CONFIRMED, S.ABORTED))
    undecided = (S.INITIALISING, S.TRIGGERED, S.ACKNOWLEDGED, S.LOGGED)
    assert checkpoint.can_end is (state in undecided)
    # Behaviours 39, 46: the timeout has no hold on what is being decided or has ended.
    assert checkpoint.is_expired(1_010, timeout_ms=10) is (state in undecided)


def test_the_timeout_counts_from_the_id() -> None:
    """Behaviour 46."""
    checkpoint = pending(started_at_ms=100)
    assert not checkpoint.is_expired(109, timeout_ms=10)
    assert checkpoint.is_expired(110, timeout_ms=10)


# -- acknowledgements -----------------------------------------------------------------------------------


def test_an_acknowledgement_counts_once_and_only_of_whoever_takes_part() -> None:
    """Behaviour 36."""
    checkpoint = pending(S.TRIGGERED, TOTALS, AUDIT)
    stranger = Participant(ParticipantKind.SINK, "stranger")
    assert [checkpoint.acknowledge(one) for one in (TOTALS, TOTALS, stranger)] == [True, False, False]
    assert (checkpoint.state, checkpoint.missing) == (S.TRIGGERED, {AUDIT})
    checkpoint.acknowledge_in(BatchId(3), [TOTALS, stranger])
    assert checkpoint.batch is None
    checkpoint.acknowledge_in(BatchId(4), [AUDIT])
    checkpoint.acknowledge_in(BatchId(5), [AUDIT, stranger])
    assert (checkpoint.state, checkpoint.batch) == (S.ACKNOWLEDGED, BatchId(4))


def test_a_name_is_known_together_with_its_kind() -> None:
    """Behaviour 36."""
    checkpoint = pending(S.TRIGGERED, TOTALS)
    assert not checkpoint.acknowledge(Participant(ParticipantKind.HOOK, "totals"))


@pytest.mark.parametrize("state", [s for s in S if s not in (S.INITIALISING, S.TRIGGERED)])
def test_a_late_acknowledgement_is_discarded(state) -> None:
    """Behaviours 36, 44, 46."""
    checkpoint = pending(state)
    assert not checkpoint.acknowledge(TOTALS)
    checkpoint.acknowledge_in(BatchId(9), [TOTALS])
    assert (checkpoint.state, checkpoint.batch) == (state, None)


def test_duplicates_do_not_move_the_micro_batch() -> None:
    """Behaviour 36: what is decided reaches up to the last barrier that was needed."""
    checkpoint = pending(S.TRIGGERED, TOTALS, AUDIT)
    checkpoint.acknowledge_in(BatchId(3), [TOTALS])
    checkpoint.acknowledge_in(BatchId(4), [TOTALS])
    assert checkpoint.batch == BatchId(3)


def test_operators_sinks_and_hooks_must_all_acknowledge() -> None:
    """Behaviour 41."""
    everybody = (SUM, TOTALS, HOOK)
    for last in everybody:
        checkpoint = pending(S.INITIALISING, *everybody)
        # Hooks answer before the barrier goes out.
        if last is not HOOK:
            assert checkpoint.acknowledge(HOOK)
        checkpoint.on(E.INITIALISED)
        checkpoint.acknowledge_in(BatchId(1), [one for one in everybody if one is not last])
        assert (checkpoint.state, checkpoint.missing) == (S.TRIGGERED, {last})
        checkpoint.acknowledge_in(BatchId(2), [last])
        assert (checkpoint.state, checkpoint.missing) == (S.ACKNOWLEDGED, frozenset())


# -- barriers -------------------------------------------------------------------------------------------


def ack(sink, *channels, checkpoint=7) -> SinkAck:
    barriers = [Barrier(CheckpointId(checkpoint), c) for c in channels]
    return SinkAck(sink, (TaskAck(0, 0, 0, tuple(barriers)),))


TWO_EACH = {"a": frozenset({0, 1}), "b": frozenset({0, 1})}


@pytest.mark.parametrize(
    "acks,why,reached",
    [
        ([ack("a", 0, 1), ack("b", 1, 0)], "", "ab"),
        ([ack("a", 0), ack("b", 0, 1)], "sink 'a' saw no barrier 7 on channel 1", "b"),
        ([ack("a", 0, 1)], "sink 'b' did not acknowledge", "a"),
        ([ack("a", 0, 1, 1), ack("b", 0, 1)], "sink 'a' saw barrier 7 twice on channel 1", "ab"),
        ([ack("a", 0, 1, 2), ack("b", 0, 1)], "sink 'a' saw barrier 7 on channel 2", "ab"),
        ([ack("a", 0, 1, checkpoint=6), ack("b", 0, 1)], "sink 'a' saw no barrier 7 on channel 0", "b"),
        ([], "sink 'a' did not acknowledge", ""),
    ],
)
def test_each_channel_shows_its_barrier_exactly_once(acks, why, reached) -> None:
    """Behaviours 96, 110: exactly once a channel must not repeat it; at least once it may."""
    assert find_misalignment(CheckpointId(7), acks, TWO_EACH) == why
    assert find_reached_sinks(CheckpointId(7), acks, TWO_EACH) == set(reached)


def test_barriers_of_other_ids_do_not_disturb() -> None:
    """Behaviour 106: a late barrier of an aborted checkpoint comes with those of the next one."""
    both = SinkAck("a", tuple(ack("a", 0, checkpoint=c).tasks[0] for c in (6, 7)))
    expected = {"a": frozenset({0})}
    for checkpoint in (6, 7):
        assert find_misalignment(CheckpointId(checkpoint), [both], expected) == ""
        assert find_reached_sinks(CheckpointId(checkpoint), [both], expected) == {"a"}
    assert find_misalignment(CheckpointId(8), [both], expected) == "sink 'a' saw no barrier 8 on channel 0"


def test_announced_channels_must_all_show_their_barrier() -> None:
    """Behaviour 96, while partitions are added."""
    three = [encode_announced_channel(i, 3) for i in range(3)]
    expected = {"out": AnnouncedChannels.ANNOUNCED}

    def why(channels: list[int]) -> str:
        return find_misalignment(CheckpointId(7), [ack("out", *channels)], expected)

    assert why(three) == ""
    assert "saw no barrier 7 on channel" in why(three[:2])
    assert why([]) == "sink 'out' saw no barrier 7 at all"
    assert "saw barrier 7 twice on channel" in why([*three, three[1]])
    # Channels that do not agree on how many they are.
    assert "saw no barrier 7 on channel" in why(
        [encode_announced_channel(0, 1), encode_announced_channel(0, 2)]
    )
    for channels, reached in ((three, {"out"}), (three[:2], set()), ([], set())):
        assert find_reached_sinks(CheckpointId(7), [ack("out", *channels)], expected) == reached
    for index, total in ((3, 3), (-1, 2), (0, 0), (0, 1 << 31)):
        with pytest.raises(ValueError, match="there is no channel"):
            encode_announced_channel(index, total)


# -- ids ------------------------------------------------------------------------------------------------


def test_ids_refuse_what_they_are_not() -> None:
    """Behaviour 78: never negative."""
    for wrong in (-1, True, "1", 1.0, None):
        with pytest.raises(ValueError, match="CheckpointId must be"):
            CheckpointId(wrong)
    for wrong in ("", "a/b", "..", "a..b", ".hidden", "x" * 129, "ä", 7):
        with pytest.raises(ValueError, match="not usable"):
            check_name(wrong, "uid")
    with pytest.raises(ValueError, match="32 lower-case"):
        JobUuid("ABC")


def test_ids_follow_each_other() -> None:
    """Behaviour 78."""
    assert (CheckpointId(9).next(), BatchId(0).next()) == (CheckpointId(10), BatchId(1))
    assert CheckpointId(9) < CheckpointId(10)
    assert (str(CheckpointId(9)), int(BatchId(3)), str(JobUuid("a" * 32))) == ("9", 3, "a" * 32)


def test_transactional_ids_are_parsed_exactly() -> None:
    one = TransactionalId(JobUuid("0" * 31 + "a"), OwnerEpoch(3), 4, 5, 6)
    assert TransactionalId.parse(str(one)) == one
    for text in (str(one) + "-7", "x" + str(one), str(one)[:-2], str(one).replace("flinkish", "flink")):
        assert TransactionalId.parse(text) is None


def test_every_state_says_what_the_checkpoint_waits_for() -> None:
    assert {state.value: pending(state).awaited for state in WAYS} == {
        "INITIALISING": "its record in the job directory and the master hooks",
        "TRIGGERED": "its barrier to come through to sink 'totals'",
        "ACKNOWLEDGED": "Spark to log its micro-batch as done",
        "LOGGED": "the checkpoints before it to be finished",
        "DECIDING": "its decision: the sinks check the staged data, then the decision is written",
        "DECIDED": "its commit: sinks, manifest, group offsets, receipt",
        "CONFIRMED": "nothing",
        "ABORTED": "nothing",
    }
    sinks = [Participant(ParticipantKind.SINK, name) for name in "abcdefg"]
    assert pending(S.TRIGGERED, *sinks).awaited == (
        "its barrier to come through to sink 'a', sink 'b', sink 'c', sink 'd', sink 'e' and 2 more"
    )
