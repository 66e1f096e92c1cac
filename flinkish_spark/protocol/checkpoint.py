"""The life of one checkpoint: its request, the conditions of its start, its acknowledgements."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.failures import CheckpointFailureReason as Reason
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    #: Rises with every request of a process; identifies requests and orders those of one rank.
    number: int
    purpose: CheckpointPurpose
    asked_at_ms: int
    #: Where a savepoint is to be written; empty for checkpoints.
    target: str = ""

    @property
    def order(self) -> tuple[int, bool, int]:
        return self.purpose.rank, not self.is_forced, self.number

    @property
    def is_forced(self) -> bool:
        """True if the request ignores the limits of checkpoints in flight and of the queue."""
        return self.purpose.is_savepoint


@dataclass(frozen=True, slots=True)
class RequestQueue:
    """Waiting requests, the most important first. A full queue rejects the newest of the least important."""

    limit: int = 1_000
    waiting: tuple[CheckpointRequest, ...] = ()

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ValueError(f"a queue of requests holds at least 1, not {self.limit}")

    @property
    def head(self) -> CheckpointRequest | None:
        return self.waiting[0] if self.waiting else None

    def holds(self, purpose: CheckpointPurpose) -> bool:
        return any(request.purpose is purpose for request in self.waiting)

    def offer(self, request: CheckpointRequest) -> tuple[RequestQueue, CheckpointRequest | None]:
        """Return the queue with `request` added in order, and the request that a full queue rejects."""
        ordered = tuple(sorted((*self.waiting, request), key=lambda one: one.order))
        if len(ordered) <= self.limit or request.is_forced:
            return RequestQueue(self.limit, ordered), None
        rejected = [one for one in ordered if not one.is_forced][-1]
        return RequestQueue(self.limit, tuple(one for one in ordered if one is not rejected)), rejected

    def remove(
        self, unwanted: Callable[[CheckpointRequest], bool]
    ) -> tuple[RequestQueue, tuple[CheckpointRequest, ...]]:
        gone = tuple(one for one in self.waiting if unwanted(one))
        return RequestQueue(self.limit, tuple(one for one in self.waiting if one not in gone)), gone


# A checkpoint moves only along TRANSITIONS; an event that they do not list raises and changes nothing. Two
# rules are not in the table: only the process that won the create-if-absent of decision.json may send
# DECISION_WON, and RECEIPT_WRITTEN may be sent only after every sink and the group offsets answered.
class CheckpointState(enum.Enum):
    #: It has an id; its folder is created and its hooks are called.
    INITIALISING = "INITIALISING"
    #: The id is in the control offset; no micro-batch has carried it through yet.
    TRIGGERED = "TRIGGERED"
    #: Every participant acknowledged and the staged file of the last micro-batch needed is durable.
    ACKNOWLEDGED = "ACKNOWLEDGED"
    #: commits/N was read: Spark will never run that batch again. It waits for its turn.
    LOGGED = "LOGGED"
    #: The coordinator checks its committables and writes the decision.
    DECIDING = "DECIDING"
    #: decision.json says COMMIT: it is complete, and everything in it must finish.
    DECIDED = "DECIDED"
    #: receipt.json is durable.
    CONFIRMED = "CONFIRMED"
    #: decision.json says ABORT; its committables pass to the next checkpoint.
    ABORTED = "ABORTED"


class CheckpointEvent(enum.Enum):
    INITIALISED = "INITIALISED"
    ALL_ACKNOWLEDGED = "ALL_ACKNOWLEDGED"
    COMMIT_LOG_READ = "COMMIT_LOG_READ"
    TURN_CAME = "TURN_CAME"
    DECISION_WON = "DECISION_WON"
    RECEIPT_WRITTEN = "RECEIPT_WRITTEN"
    DECLINED = "DECLINED"
    EXPIRED = "EXPIRED"
    SUBSUMED = "SUBSUMED"


S, E = CheckpointState, CheckpointEvent

_ENDS = {E.DECLINED: S.ABORTED, E.EXPIRED: S.ABORTED, E.SUBSUMED: S.ABORTED}

TRANSITIONS: Mapping[CheckpointState, Mapping[CheckpointEvent, CheckpointState]] = {
    S.INITIALISING: {E.INITIALISED: S.TRIGGERED, **_ENDS},
    S.TRIGGERED: {E.ALL_ACKNOWLEDGED: S.ACKNOWLEDGED, **_ENDS},
    S.ACKNOWLEDGED: {E.COMMIT_LOG_READ: S.LOGGED, **_ENDS},
    S.LOGGED: {E.TURN_CAME: S.DECIDING, **_ENDS},
    # Only the writer of the decision can still decline.
    S.DECIDING: {E.DECISION_WON: S.DECIDED, E.DECLINED: S.ABORTED},
    S.DECIDED: {E.RECEIPT_WRITTEN: S.CONFIRMED},
    S.CONFIRMED: {},
    S.ABORTED: {},
}


_MOST_NAMED = 5
_AWAITED: Mapping[CheckpointState, str] = {
    S.INITIALISING: "its record in the job directory and the master hooks",
    S.ACKNOWLEDGED: "Spark to log its micro-batch as done",
    S.LOGGED: "the checkpoints before it to be finished",
    S.DECIDING: "its decision: the sinks check the staged data, then the decision is written",
    S.DECIDED: "its commit: sinks, manifest, group offsets, receipt",
    S.CONFIRMED: "nothing",
    S.ABORTED: "nothing",
}


class IllegalTransitionError(ValueError):
    """The transition table has no such step; the checkpoint or job is unchanged."""


class ParticipantKind(enum.Enum):
    OPERATOR = "operator"
    SINK = "sink"
    HOOK = "hook"


@dataclass(frozen=True, slots=True)
class Participant:
    """An operator, a sink or a master hook that must acknowledge each checkpoint."""

    kind: ParticipantKind
    uid: str

    def __hash__(self) -> int:
        # A checkpoint looks up a thousand participants, and an enum computes its hash in Python.
        return hash(self.uid)


class PendingCheckpoint:
    """A checkpoint that has an id and has not ended. Owned by one thread."""

    __slots__ = ("_missing", "batch", "checkpoint", "finished", "hook_states", "request", "started_at_ms",
                 "state")  # fmt: skip

    def __init__(
        self,
        checkpoint: CheckpointId,
        request: CheckpointRequest,
        participants: Collection[Participant],
        started_at_ms: int,
        finished: tuple[str, ...] = (),
    ) -> None:
        self.checkpoint, self.request, self.started_at_ms = checkpoint, request, started_at_ms
        self.finished = finished
        self._missing = set(participants)
        self.state = CheckpointState.INITIALISING
        #: The last micro-batch that carried a barrier which was still needed.
        self.batch: BatchId | None = None
        self.hook_states: dict[str, Any] = {}

    @property
    def missing(self) -> frozenset[Participant]:
        return frozenset(self._missing)

    @property
    def is_open(self) -> bool:
        return bool(TRANSITIONS[self.state])

    @property
    def can_end(self) -> bool:
        return CheckpointEvent.EXPIRED in TRANSITIONS[self.state]

    @property
    def awaited(self) -> str:
        """End of the sentence "the checkpoint waits for ..."."""
        if self.state is CheckpointState.TRIGGERED:
            missing = sorted(f"{one.kind.value} '{one.uid}'" for one in self.missing)
            more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
            return f"its barrier to come through to {', '.join(missing[:_MOST_NAMED])}{more}"
        return _AWAITED[self.state]

    def on(self, event: CheckpointEvent) -> None:
        """Move along the table; raise IllegalTransitionError if it has no such step."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise IllegalTransitionError(
                f"checkpoint {self.checkpoint} is {self.state.value} and cannot take {event.value}"
            )
        self.state = following

    def acknowledge(self, participant: Participant) -> bool:
        """Note an acknowledgement, also of empty state; return False if the checkpoint did not await it."""
        is_early = self.state in (CheckpointState.INITIALISING, CheckpointState.TRIGGERED)
        is_new = is_early and participant in self._missing
        if is_new:
            self._missing.remove(participant)
        return is_new

    def acknowledge_in(self, batch: BatchId, participants: Iterable[Participant]) -> None:
        """Note the acknowledgements of a staged micro-batch; ignore those before the barrier went out."""
        if self.state is CheckpointState.TRIGGERED and any([self.acknowledge(one) for one in participants]):
            self.batch = batch
            if not self._missing:
                self.on(CheckpointEvent.ALL_ACKNOWLEDGED)

    def is_expired(self, now_ms: int, timeout_ms: int) -> bool:
        return self.can_end and now_ms - self.started_at_ms >= timeout_ms


class JobPhase(enum.Enum):
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"


class Schedule(enum.Enum):
    ON = "ON"
    OFF = "OFF"


class ParticipantStatus(enum.Enum):
    NOT_RUNNING = "NOT_RUNNING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"


class FinishedParticipants(Choice):
    """Policy for checkpoints after some participants have finished."""

    #: Only running participants must acknowledge; the others are recorded as finished.
    ALLOWED = "ALLOWED"
    REFUSED = "REFUSED"


@dataclass(frozen=True, slots=True)
class TriggerFacts:
    """Facts that decide if a checkpoint may start. Times are monotonic milliseconds."""

    now_ms: int
    phase: JobPhase
    schedule: Schedule
    #: Checkpoints triggered and neither confirmed nor aborted.
    in_flight: int
    #: True while one of them is being initialised or its barrier is still in the job: barriers are offered
    #: one after the other, each to a micro-batch of its own.
    barrier_on_its_way: bool
    last_trigger_ms: int
    last_end_ms: int
    interval_ms: int
    min_pause_ms: int
    max_concurrent: int
    participants: Mapping[str, ParticipantStatus]
    finished: FinishedParticipants = FinishedParticipants.ALLOWED


def why_refused(purpose: CheckpointPurpose, facts: TriggerFacts, queue: RequestQueue) -> Reason | None:
    """Return the reason to refuse a request before it is queued; None to queue it."""
    if facts.phase is JobPhase.STOPPED:
        return Reason.SHUT_DOWN
    if purpose is CheckpointPurpose.PERIODIC and facts.schedule is Schedule.OFF:
        return Reason.PERIODIC_SCHEDULING_OFF
    if purpose in (CheckpointPurpose.PERIODIC, CheckpointPurpose.FOLLOW_UP) and queue.holds(purpose):
        # Nobody waits for a periodic or follow-up checkpoint, so one request serves all.
        return Reason.ALREADY_QUEUED
    if facts.phase is JobPhase.STARTING or ParticipantStatus.NOT_RUNNING in facts.participants.values():
        return Reason.PARTICIPANT_NOT_RUNNING
    has_finished = ParticipantStatus.FINISHED in facts.participants.values()
    is_refused = has_finished and facts.finished is FinishedParticipants.REFUSED
    return Reason.PARTICIPANT_FINISHED if is_refused else None


def is_periodic_due(facts: TriggerFacts) -> bool:
    is_on = facts.phase is JobPhase.RUNNING and facts.schedule is Schedule.ON
    since_end_ms, since_trigger_ms = facts.now_ms - facts.last_end_ms, facts.now_ms - facts.last_trigger_ms
    return is_on and since_trigger_ms >= facts.interval_ms and since_end_ms >= facts.min_pause_ms


def why_waiting(head: CheckpointRequest, facts: TriggerFacts) -> Reason | None:
    """Return the reason for which the first request of the queue must wait; None to start it now."""
    is_full = not head.is_forced and facts.in_flight >= facts.max_concurrent
    if facts.barrier_on_its_way or is_full:
        return Reason.TOO_MANY_PENDING
    if head.purpose is CheckpointPurpose.PERIODIC and facts.now_ms - facts.last_end_ms < facts.min_pause_ms:
        # The request was due when it was queued; since then another checkpoint has ended.
        return Reason.MINIMUM_PAUSE
    return None
