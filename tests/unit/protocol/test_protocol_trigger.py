"""May a checkpoint be asked for, and may the next one start: one fact changed at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flinkish_spark.protocol.checkpoint import (
    CheckpointRequest,
    FinishedParticipants,
    JobPhase,
    ParticipantStatus,
    RequestQueue,
    Schedule,
    TriggerFacts,
    is_periodic_due,
    why_refused,
    why_waiting,
)
from flinkish_spark.protocol.failures import CheckpointFailureReason, FailurePhase
from flinkish_spark.protocol.ids import CheckpointPurpose

P, R, S = CheckpointPurpose, CheckpointFailureReason, ParticipantStatus
EMPTY = RequestQueue()

#: A running job whose interval of 100 ms is just over and whose last checkpoint ended long ago.
FACTS = TriggerFacts(
    now_ms=1_000,
    phase=JobPhase.RUNNING,
    schedule=Schedule.ON,
    in_flight=0,
    barrier_on_its_way=False,
    last_trigger_ms=900,
    last_end_ms=900,
    interval_ms=100,
    min_pause_ms=50,
    max_concurrent=2,
    participants={"orders": S.RUNNING, "sum": S.RUNNING},
)


def waiting(*purposes) -> RequestQueue:
    queue = EMPTY
    for number, purpose in enumerate(purposes):
        queue, _ = queue.offer(CheckpointRequest(number, purpose, 0))
    return queue


@pytest.mark.parametrize(
    "purpose,change,queue,reason",
    [
        (P.PERIODIC, {}, EMPTY, None),
        (P.USER, {"phase": JobPhase.STOPPED}, EMPTY, R.SHUT_DOWN),
        (P.SAVEPOINT, {"phase": JobPhase.STOPPED}, EMPTY, R.SHUT_DOWN),
        (P.PERIODIC, {"schedule": Schedule.OFF}, EMPTY, R.PERIODIC_SCHEDULING_OFF),
        (P.USER, {"schedule": Schedule.OFF}, EMPTY, None),
        (P.SAVEPOINT, {"schedule": Schedule.OFF}, EMPTY, None),
        (P.PERIODIC, {}, waiting(P.PERIODIC), R.ALREADY_QUEUED),
        (P.PERIODIC, {}, waiting(P.USER), None),
        (P.USER, {}, waiting(P.USER, P.PERIODIC), None),
        # Nobody waits for the answer of a follow-up: one is enough.
        (P.FOLLOW_UP, {}, waiting(P.FOLLOW_UP), R.ALREADY_QUEUED),
        (P.FOLLOW_UP, {}, waiting(P.PERIODIC), None),
        (P.USER, {"phase": JobPhase.STARTING}, EMPTY, R.PARTICIPANT_NOT_RUNNING),
        (P.SAVEPOINT, {"participants": {"a": S.NOT_RUNNING}}, EMPTY, R.PARTICIPANT_NOT_RUNNING),
        (P.USER, {"participants": {"a": S.RUNNING, "b": S.FINISHED}}, EMPTY, None),
        # Limits are no reason to refuse: above them a request waits.
        (P.PERIODIC, {"in_flight": 9, "barrier_on_its_way": True, "last_end_ms": 999}, EMPTY, None),
    ],
)  # fmt: skip
def test_why_a_request_is_refused(purpose, change, queue, reason) -> None:
    """Behaviours 3, 5, 10, 12, 13, 24."""
    assert why_refused(purpose, replace(FACTS, **change), queue) is reason


def test_finished_participants_may_be_a_reason_to_refuse() -> None:
    """Behaviours 4, 5."""
    finished = replace(FACTS, participants={"a": S.RUNNING, "b": S.FINISHED})
    assert why_refused(P.USER, finished, EMPTY) is None
    strict = replace(finished, finished=FinishedParticipants.REFUSED)
    assert why_refused(P.USER, strict, EMPTY) is R.PARTICIPANT_FINISHED
    assert why_refused(P.USER, replace(FACTS, finished=FinishedParticipants.REFUSED), EMPTY) is None


def test_every_reason_to_refuse_is_one_of_before_the_start() -> None:
    """Behaviour 52: so none of them counts as a failure."""
    for phase in JobPhase:
        for schedule in Schedule:
            for status in S:
                facts = replace(
                    FACTS,
                    phase=phase,
                    schedule=schedule,
                    participants={"a": status},
                    finished=FinishedParticipants.REFUSED,
                )
                for purpose in P:
                    reason = why_refused(purpose, facts, waiting(P.PERIODIC))
                    assert reason is None or reason.phase is FailurePhase.PRE_CHECK


@pytest.mark.parametrize(
    "change,is_due",
    [
        ({}, True),
        ({"now_ms": 999}, False),
        ({"last_end_ms": 951}, False),
        ({"last_end_ms": 950}, True),
        ({"schedule": Schedule.OFF}, False),
        ({"phase": JobPhase.STARTING}, False),
        ({"phase": JobPhase.STOPPED}, False),
        # Waiting for its turn is the queue's business.
        ({"in_flight": 2, "barrier_on_its_way": True}, True),
    ],
)
def test_when_the_timer_asks(change, is_due) -> None:
    """Behaviours 7, 10, 12, 30."""
    assert is_periodic_due(replace(FACTS, **change)) is is_due


@pytest.mark.parametrize(
    "head,change,reason",
    [
        (waiting(P.PERIODIC), {}, None),
        (waiting(P.PERIODIC), {"in_flight": 1}, None),
        (waiting(P.PERIODIC), {"in_flight": 2}, R.TOO_MANY_PENDING),
        (waiting(P.FINAL), {"in_flight": 2}, R.TOO_MANY_PENDING),
        (waiting(P.SAVEPOINT), {"in_flight": 2}, None),
        (waiting(P.USER), {"barrier_on_its_way": True}, R.TOO_MANY_PENDING),
        # Even a forced one: barriers are offered to one micro-batch each.
        (waiting(P.SAVEPOINT), {"barrier_on_its_way": True}, R.TOO_MANY_PENDING),
        # The pause may have begun while the timer's request waited; only that one is held back.
        (waiting(P.PERIODIC), {"last_end_ms": 951}, R.MINIMUM_PAUSE),
        (waiting(P.PERIODIC), {"last_end_ms": 950}, None),
        (waiting(P.USER), {"last_end_ms": 1_000}, None),
        (waiting(P.SAVEPOINT, P.PERIODIC), {"last_end_ms": 1_000}, None),
    ],
)
def test_why_the_first_request_waits(head, change, reason) -> None:
    """Behaviours 7, 8, 24, 26, 30, 58."""
    assert head.head is not None
    assert why_waiting(head.head, replace(FACTS, **change)) is reason
