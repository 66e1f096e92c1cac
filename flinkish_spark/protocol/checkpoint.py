"""The life of one checkpoint: a table, and the record of who has acknowledged.

Rules of this file: a checkpoint moves only along :data:`TRANSITIONS`; an event that the table
does not list for a state raises and changes nothing; the two final states have no way out. What
the table cannot say: DECISION_WON may be sent only by whoever won the create-if-absent of
decision.json, and RECEIPT_WRITTEN only after every sink and the group offsets answered.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flinkish_spark.protocol.ids import BatchId, CheckpointId
from flinkish_spark.protocol.requests import CheckpointRequest


class CheckpointState(enum.Enum):
    """Where a checkpoint is."""

    #: It has an id; its storage is made and its hooks are called.
    INITIALISING = "INITIALISING"
    #: The id is in the control offset; no micro-batch has carried it through yet.
    TRIGGERED = "TRIGGERED"
    #: Every participant acknowledged and the staged file of the last micro-batch needed is durable.
    ACKNOWLEDGED = "ACKNOWLEDGED"
    #: commits/N was read: Spark will never run that batch again. It waits for its turn.
    LOGGED = "LOGGED"
    #: Its committables are looked at and the decision is written.
    DECIDING = "DECIDING"
    #: decision.json says COMMIT: it is complete, and everything in it must finish.
    DECIDED = "DECIDED"
    #: receipt.json is durable.
    CONFIRMED = "CONFIRMED"
    #: decision.json says ABORT; its committables pass to the next checkpoint.
    ABORTED = "ABORTED"


class CheckpointEvent(enum.Enum):
    """What can happen to a checkpoint."""

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
    # Whoever writes the decision owns the checkpoint: only it can still decline.
    S.DECIDING: {E.DECISION_WON: S.DECIDED, E.DECLINED: S.ABORTED},
    S.DECIDED: {E.RECEIPT_WRITTEN: S.CONFIRMED},
    S.CONFIRMED: {},
    S.ABORTED: {},
}


class IllegalTransitionError(ValueError):
    """The table has no such step; the checkpoint is unchanged."""


class ParticipantKind(enum.Enum):
    """Who has to acknowledge."""

    OPERATOR = "operator"
    SINK = "sink"
    HOOK = "hook"


@dataclass(frozen=True, slots=True)
class Participant:
    """One that has to acknowledge: an operator, a sink or a master hook."""

    kind: ParticipantKind
    uid: str

    def __hash__(self) -> int:
        # A thousand of them are looked up per checkpoint, and an enum hashes itself in Python.
        return hash(self.uid)


class AckResult(enum.Enum):
    """What became of an acknowledgement."""

    SUCCESS = "SUCCESS"
    #: It had come before; it counts once.
    DUPLICATE = "DUPLICATE"
    #: Nobody of that name takes part.
    UNKNOWN = "UNKNOWN"
    #: The checkpoint has ended, or does not wait for acknowledgements any more.
    DISCARDED = "DISCARDED"


class PendingCheckpoint:
    """A checkpoint from its id to its end. Owned by one thread.

    Parameters
    ----------
    checkpoint
        Its id.
    request
        What it is for.
    participants
        Who must acknowledge before it can be decided.
    started_at_ms
        Monotonic time at which it got its id; expiry is counted from here.
    finished
        Uids that had finished before; recorded, not asked.
    """

    __slots__ = ("_missing", "_participants", "batch", "checkpoint", "finished", "hook_states", "request",
                 "started_at_ms", "state")  # fmt: skip

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
        self._participants = frozenset(participants)
        self._missing = set(participants)
        self.state = CheckpointState.INITIALISING
        #: The last micro-batch that carried a barrier which was still needed.
        self.batch: BatchId | None = None
        #: What the master hooks gave for it, by name.
        self.hook_states: dict[str, Any] = {}

    @property
    def missing(self) -> frozenset[Participant]:
        """Who has not acknowledged yet."""
        return frozenset(self._missing)

    @property
    def is_open(self) -> bool:
        """Whether it has neither been confirmed nor aborted."""
        return bool(TRANSITIONS[self.state])

    @property
    def can_end(self) -> bool:
        """Whether it can still be aborted from outside: undecided, and nobody is deciding it."""
        return CheckpointEvent.EXPIRED in TRANSITIONS[self.state]

    def on(self, event: CheckpointEvent) -> None:
        """Move along the table; raise IllegalTransitionError if it has no such step."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise IllegalTransitionError(
                f"checkpoint {self.checkpoint} is {self.state.value} and cannot take {event.value}"
            )
        self.state = following

    def acknowledge(self, participant: Participant) -> AckResult:
        """Note that `participant` has acknowledged; empty state is an acknowledgement too."""
        if self.state not in (CheckpointState.INITIALISING, CheckpointState.TRIGGERED):
            return AckResult.DISCARDED
        if participant not in self._participants:
            return AckResult.UNKNOWN
        if participant not in self._missing:
            return AckResult.DUPLICATE
        self._missing.remove(participant)
        return AckResult.SUCCESS

    def acknowledge_in(self, batch: BatchId, participants: Iterable[Participant]) -> tuple[AckResult, ...]:
        """Note what came with a staged micro-batch; with the last one it is ACKNOWLEDGED.

        Before its barrier went out nobody can have seen it: what comes then is discarded.
        """
        if self.state is not CheckpointState.TRIGGERED:
            return tuple(AckResult.DISCARDED for _ in participants)
        results = tuple(self.acknowledge(one) for one in participants)
        if AckResult.SUCCESS in results:
            self.batch = batch
            if not self._missing:
                self.on(CheckpointEvent.ALL_ACKNOWLEDGED)
        return results

    def is_expired(self, now_ms: int, timeout_ms: int) -> bool:
        """Whether it is undecided and older than the timeout. Decided checkpoints never expire."""
        return self.can_end and now_ms - self.started_at_ms >= timeout_ms


def transition_table() -> str:
    """Return :data:`TRANSITIONS` as a Markdown table; `docs/protocol.md` quotes it."""
    events = list(CheckpointEvent)
    rows = ["| state | " + " | ".join(e.value for e in events) + " |", "|" + "---|" * (len(events) + 1)]
    for state in CheckpointState:
        cells = [TRANSITIONS[state][e].value if e in TRANSITIONS[state] else "-" for e in events]
        rows.append(f"| {state.value} | " + " | ".join(cells) + " |")
    return "\n".join(rows)
