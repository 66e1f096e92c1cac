"""May a checkpoint be asked for, and may the next one start? Pure functions with named answers."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from flinkish_spark.protocol.failures import CheckpointFailureReason as Reason
from flinkish_spark.protocol.purpose import CheckpointPurpose
from flinkish_spark.protocol.requests import CheckpointRequest, RequestQueue, Urgency


class JobPhase(enum.Enum):
    """What the job does, as far as triggering is concerned."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"


class Schedule(enum.Enum):
    """Whether the timer triggers."""

    ON = "ON"
    OFF = "OFF"


class ParticipantStatus(enum.Enum):
    """What an operator, a source or a sink does."""

    NOT_RUNNING = "NOT_RUNNING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"


class FinishedParticipants(enum.Enum):
    """What becomes of checkpoints once some participants have finished."""

    #: Only those that run are asked; the others are recorded as finished.
    ALLOWED = "ALLOWED"
    REFUSED = "REFUSED"


@dataclass(frozen=True, slots=True)
class TriggerFacts:
    """All that the answers depend on. Times are monotonic milliseconds.

    Parameters
    ----------
    in_flight
        Checkpoints triggered and neither confirmed nor aborted.
    barrier_on_its_way
        Whether one of them is being prepared or has not come through the job yet: barriers are
        offered one after the other, each to a micro-batch of its own.
    participants
        By uid.
    """

    now_ms: int
    phase: JobPhase
    schedule: Schedule
    in_flight: int
    barrier_on_its_way: bool
    last_trigger_ms: int
    last_end_ms: int
    interval_ms: int
    min_pause_ms: int
    max_concurrent: int
    participants: Mapping[str, ParticipantStatus]
    finished: FinishedParticipants = FinishedParticipants.ALLOWED


def why_refused(purpose: CheckpointPurpose, facts: TriggerFacts, queue: RequestQueue) -> Reason | None:
    """Return why a request is refused at once; None if it may wait for its turn.

    Asked for every request before it is queued. Limits are no reason to refuse: above them a
    request waits (RequestQueue says what happens when too many do).
    """
    if facts.phase is JobPhase.STOPPED:
        return Reason.SHUT_DOWN
    if purpose is CheckpointPurpose.PERIODIC and facts.schedule is Schedule.OFF:
        return Reason.PERIODIC_SCHEDULING_OFF
    if purpose in (CheckpointPurpose.PERIODIC, CheckpointPurpose.FOLLOW_UP) and queue.holds(purpose):
        # Nobody waits for these: one answers for all.
        return Reason.ALREADY_QUEUED
    if facts.phase is JobPhase.STARTING or ParticipantStatus.NOT_RUNNING in facts.participants.values():
        return Reason.PARTICIPANT_NOT_RUNNING
    if facts.finished is FinishedParticipants.REFUSED and (
        ParticipantStatus.FINISHED in facts.participants.values()
    ):
        return Reason.PARTICIPANT_FINISHED
    return None


def is_periodic_due(facts: TriggerFacts) -> bool:
    """Whether the timer asks for a checkpoint now.

    The interval counts from the last trigger, whatever it was for; the minimum pause from the end
    of the last checkpoint, so it can hold the timer back beyond the interval. Only the timer
    waits for the pause.
    """
    if facts.phase is not JobPhase.RUNNING or facts.schedule is Schedule.OFF:
        return False
    return (
        facts.now_ms - facts.last_trigger_ms >= facts.interval_ms
        and facts.now_ms - facts.last_end_ms >= facts.min_pause_ms
    )


def why_waiting(head: CheckpointRequest, facts: TriggerFacts) -> Reason | None:
    """Return why the first request of the queue has to wait; None if it starts now.

    A forced one ignores the number of checkpoints in flight, but no request goes before the
    barrier of the one before it has come through or has been given up.
    """
    if facts.barrier_on_its_way:
        return Reason.TOO_MANY_PENDING
    if head.urgency is Urgency.NORMAL and facts.in_flight >= facts.max_concurrent:
        return Reason.TOO_MANY_PENDING
    if head.purpose is CheckpointPurpose.PERIODIC and facts.now_ms - facts.last_end_ms < facts.min_pause_ms:
        # It was due when it was queued; since then another checkpoint has ended.
        return Reason.MINIMUM_PAUSE
    return None
