"""All checkpoints of one start of a query: the requested ones, those in flight, and the next one due.

The coordinator tells this object what happened and carries out the effects that it returns, in
their order. It has no clock and does no I/O; the same calls give the same effects.

Rules:

1. Ids rise by one and are never used again, whatever becomes of the checkpoint.
2. At most one checkpoint is being initialised or has its barrier on the way; several may wait for
   their commit log, for their turn and for their receipt, up to `max_concurrent`.
3. Decisions are made one after the other, in the order of ids: the next is not begun before the
   receipt of the one before it is durable.
4. A decision of n covers all micro-batches up to its own, so it subsumes older undecided
   checkpoints. A savepoint is not subsumed: a younger checkpoint waits for it.
5. The data that an aborted checkpoint staged is not lost: it passes to the next one, which is
   requested at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flinkish_spark.protocol.checkpoint import (
    CheckpointEvent,
    CheckpointRequest,
    CheckpointState,
    FinishedParticipants,
    JobPhase,
    Participant,
    ParticipantStatus,
    PendingCheckpoint,
    RequestQueue,
    Schedule,
    TriggerFacts,
    is_periodic_due,
    why_refused,
    why_waiting,
)
from flinkish_spark.protocol.failures import CheckpointFailureReason as Reason
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose


@dataclass(frozen=True, slots=True)
class CoordinationRules:
    """Settings of `CheckpointConfig` for the rules; times in milliseconds."""

    interval_ms: int
    min_pause_ms: int
    timeout_ms: int
    max_concurrent: int = 1
    queue_limit: int = 1_000
    finished: FinishedParticipants = FinishedParticipants.ALLOWED


@dataclass(frozen=True, slots=True)
class Initialise:
    """Effect: create the storage of a checkpoint, call its hooks, and report the result."""

    checkpoint: CheckpointId
    request: CheckpointRequest


@dataclass(frozen=True, slots=True)
class Offer:
    """Effect: let the next micro-batch carry its barrier."""

    checkpoint: CheckpointId
    request: CheckpointRequest


@dataclass(frozen=True, slots=True)
class Decide:
    """Effect: check its staged data, write its decision, commit, write its receipt, and report the result."""

    checkpoint: CheckpointId
    batch: BatchId


@dataclass(frozen=True, slots=True)
class Abort:
    """Effect: write ABORT for its id, durably, and notify requesters and listeners."""

    checkpoint: CheckpointId
    request: CheckpointRequest
    reason: Reason
    text: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Effect: tell the requester that there will be no checkpoint; the request has no id yet."""

    request: CheckpointRequest
    reason: Reason


@dataclass(frozen=True, slots=True)
class NotifyCompletion:
    """Effect: tell the requester and all listeners that the checkpoint is confirmed."""

    checkpoint: CheckpointId
    request: CheckpointRequest


Effect = Initialise | Offer | Decide | Abort | Refuse | NotifyCompletion
_EARLY = (CheckpointState.INITIALISING, CheckpointState.TRIGGERED)


class Coordination:
    """State of all checkpoints of one start; see the module's docstring. Owned by one thread."""

    def __init__(
        self,
        rules: CoordinationRules,
        participants: Iterable[Participant],
        next_id: CheckpointId,
        last_ms: int,
    ) -> None:
        self._rules, self._participants = rules, tuple(participants)
        self._next_id = next_id
        self._queue = RequestQueue(rules.queue_limit)
        self._open: dict[CheckpointId, PendingCheckpoint] = {}
        self._phase, self._schedule = JobPhase.STARTING, Schedule.ON
        self._statuses: Mapping[str, ParticipantStatus] = {}
        self._last_trigger_ms = self._last_end_ms = last_ms
        self._numbers = 0
        #: The final checkpoint, after whose barrier the job ends: no checkpoint starts after it.
        self._final: CheckpointId | None = None

    @property
    def open(self) -> tuple[PendingCheckpoint, ...]:
        return tuple(self._open.values())

    @property
    def queue(self) -> RequestQueue:
        return self._queue

    @property
    def barrier_on_its_way(self) -> bool:
        """True while a checkpoint is being initialised or its barrier is still in the job."""
        return any(one.state in _EARLY for one in self._open.values())

    @property
    def needs_micro_batches(self) -> bool:
        """True if every checkpoint in flight needs another micro-batch to complete."""
        return bool(self._open) and all(one.state in _EARLY for one in self._open.values())

    @property
    def awaiting_log(self) -> tuple[PendingCheckpoint, ...]:
        return tuple(one for one in self._open.values() if one.state is CheckpointState.ACKNOWLEDGED)

    def awaits(self, checkpoint: CheckpointId) -> bool:
        pending = self._open.get(checkpoint)
        return pending is not None and pending.state is CheckpointState.TRIGGERED

    def on_phase(self, phase: JobPhase, statuses: Mapping[str, ParticipantStatus]) -> None:
        self._phase, self._statuses = phase, dict(statuses)

    def on_schedule(self, schedule: Schedule) -> tuple[Effect, ...]:
        """Switch periodic checkpoints on or off; switching them off refuses the queued ones."""
        self._schedule = schedule
        if schedule is Schedule.ON:
            return ()
        return self._refuse_queued(
            lambda one: one.purpose is CheckpointPurpose.PERIODIC, Reason.PERIODIC_SCHEDULING_OFF
        )

    def on_stop(self, reason: Reason, text: str) -> tuple[Effect, ...]:
        """End every checkpoint that can end: the query is over. One that is being decided is finished."""
        self._phase = JobPhase.STOPPED
        effects: list[Effect] = [*self._refuse_queued(lambda one: True, Reason.SHUT_DOWN)]
        for one in self.open:
            if one.can_end:
                early = one.state is CheckpointState.INITIALISING
                why = Reason.INITIALISATION_CANCELLED if early else reason
                effects.append(self._end(one, CheckpointEvent.DECLINED, why, text))
        return tuple(effects)

    def new_request(self, purpose: CheckpointPurpose, now_ms: int, target: str = "") -> CheckpointRequest:
        self._numbers += 1
        return CheckpointRequest(self._numbers, purpose, now_ms, target)

    def on_request(self, request: CheckpointRequest, now_ms: int) -> tuple[Effect, ...]:
        reason = why_refused(request.purpose, self._get_facts(now_ms), self._queue)
        if reason is not None:
            return (Refuse(request, reason),)
        self._queue, rejected = self._queue.offer(request)
        refused = () if rejected is None else (Refuse(rejected, Reason.QUEUE_FULL),)
        return (*refused, *self._start(now_ms))

    def on_time(self, now_ms: int) -> tuple[Effect, ...]:
        """Expire old checkpoints, request the periodic one, start the next one if it may start."""
        effects: list[Effect] = []
        for pending in self.open:
            if pending.is_expired(now_ms, self._rules.timeout_ms):
                missing = sorted(f"{one.kind.value} '{one.uid}'" for one in pending.missing)
                progress = ", still waiting for ".join([pending.state.value, *missing[:1]])
                text = f"not decided within {self._rules.timeout_ms} ms ({progress})"
                effects.append(self._end(pending, CheckpointEvent.EXPIRED, Reason.EXPIRED, text))
                self._last_end_ms = now_ms
        effects += self._decide_next()
        if is_periodic_due(self._get_facts(now_ms)) and not self._queue.holds(CheckpointPurpose.PERIODIC):
            request = self.new_request(CheckpointPurpose.PERIODIC, now_ms)
            if why_refused(request.purpose, self._get_facts(now_ms), self._queue) is None:
                # A full queue rejects this request itself.
                self._queue, _ = self._queue.offer(request)
        return (*effects, *self._start(now_ms))

    def _start(self, now_ms: int) -> tuple[Effect, ...]:
        head = self._queue.head
        if self._final is not None or head is None or why_waiting(head, self._get_facts(now_ms)) is not None:
            return ()
        self._queue = replace(self._queue, waiting=self._queue.waiting[1:])
        checkpoint, self._next_id = self._next_id, self._next_id.next()
        self._last_trigger_ms = now_ms
        finished = tuple(u for u, s in self._statuses.items() if s is ParticipantStatus.FINISHED)
        asked = [one for one in self._participants if one.uid not in finished]
        self._open[checkpoint] = PendingCheckpoint(checkpoint, head, asked, now_ms, finished)
        if head.purpose.is_final:
            self._final = checkpoint
        return (Initialise(checkpoint, head),)

    def on_initialised(
        self, checkpoint: CheckpointId, hooks: Mapping[Participant, Any]
    ) -> tuple[Effect, ...]:
        """Let the barrier go out: the storage exists and every hook has answered."""
        pending = self._open.get(checkpoint)
        if pending is None:
            return ()
        for hook, state in hooks.items():
            if pending.acknowledge(hook):
                pending.hook_states[hook.uid] = state
        pending.on(CheckpointEvent.INITIALISED)
        return (Offer(checkpoint, pending.request),)

    def on_declined(
        self, checkpoint: CheckpointId, reason: Reason, text: str, now_ms: int
    ) -> tuple[Effect, ...]:
        pending = self._open.get(checkpoint)
        if pending is None or CheckpointState.DECIDED is pending.state:
            return ()
        self._last_end_ms = now_ms
        ended = self._end(pending, CheckpointEvent.DECLINED, reason, text)
        return (ended, *self._decide_next(), *self._start(now_ms))

    def on_barriers(
        self, checkpoint: CheckpointId, batch: BatchId, participants: Iterable[Participant], now_ms: int
    ) -> tuple[Effect, ...]:
        pending = self._open.get(checkpoint)
        if pending is None:
            return ()
        pending.acknowledge_in(batch, participants)
        return self._start(now_ms)

    def on_commit_log(self, checkpoint: CheckpointId) -> tuple[Effect, ...]:
        self._open[checkpoint].on(CheckpointEvent.COMMIT_LOG_READ)
        return self._decide_next()

    def on_decided(self, checkpoint: CheckpointId) -> None:
        self._open[checkpoint].on(CheckpointEvent.DECISION_WON)

    def on_confirmed(self, checkpoint: CheckpointId, now_ms: int) -> tuple[Effect, ...]:
        pending = self._open.pop(checkpoint)
        pending.on(CheckpointEvent.RECEIPT_WRITTEN)
        self._last_end_ms = now_ms
        return (NotifyCompletion(checkpoint, pending.request), *self._decide_next(), *self._start(now_ms))

    def _decide_next(self) -> tuple[Effect, ...]:
        """Begin the next decision unless one is being made."""
        deciding = (CheckpointState.DECIDING, CheckpointState.DECIDED)
        if any(one.state in deciding for one in self._open.values()):
            return ()
        effects: list[Effect] = []
        older: list[PendingCheckpoint] = []
        for pending in self.open:
            if pending.state is not CheckpointState.LOGGED:
                if pending.request.purpose.is_savepoint:
                    return ()
                older.append(pending)
                continue
            for one in older:
                text = f"checkpoint {pending.checkpoint} completed before it"
                effects.append(self._end(one, CheckpointEvent.SUBSUMED, Reason.SUBSUMED, text))
            pending.on(CheckpointEvent.TURN_CAME)
            assert pending.batch is not None
            effects.append(Decide(pending.checkpoint, pending.batch))
            break
        return tuple(effects)

    def _end(self, pending: PendingCheckpoint, event: CheckpointEvent, reason: Reason, text: str) -> Abort:
        pending.on(event)
        del self._open[pending.checkpoint]
        if pending.checkpoint == self._final:
            self._final = None
        return Abort(pending.checkpoint, pending.request, reason, text)

    def _refuse_queued(
        self, unwanted: Callable[[CheckpointRequest], bool], reason: Reason
    ) -> tuple[Refuse, ...]:
        self._queue, gone = self._queue.remove(unwanted)
        return tuple(Refuse(request, reason) for request in gone)

    def _get_facts(self, now_ms: int) -> TriggerFacts:
        rules = self._rules
        return TriggerFacts(
            now_ms=now_ms,
            phase=self._phase,
            schedule=self._schedule,
            in_flight=len(self._open),
            barrier_on_its_way=self.barrier_on_its_way,
            last_trigger_ms=self._last_trigger_ms,
            last_end_ms=self._last_end_ms,
            interval_ms=rules.interval_ms,
            min_pause_ms=rules.min_pause_ms,
            max_concurrent=rules.max_concurrent,
            participants=self._statuses,
            finished=rules.finished,
        )
