"""The life of one checkpoint, as a table.

Rules of this file: a checkpoint moves only along :data:`TRANSITIONS`; an event that the table
does not list for a state raises and changes nothing; the two final states have no way out. What
the table cannot say: DECISION_WON may be sent only by whoever won the create-if-absent of
decision.json, and RECEIPT_WRITTEN only after every sink and the group offsets answered.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flinkish_spark.protocol.ids import BatchId, CheckpointId


class CheckpointState(enum.Enum):
    """Where a checkpoint is."""

    #: The id is in the control offset; no micro-batch has carried it through yet.
    TRIGGERED = "TRIGGERED"
    #: Every sink acknowledged its barriers and the staged file of the batch is durable.
    ACKNOWLEDGED = "ACKNOWLEDGED"
    #: commits/N was read: Spark will never run that batch again.
    LOGGED = "LOGGED"
    #: decision.json says COMMIT: it is complete, and everything in it must finish.
    DECIDED = "DECIDED"
    #: receipt.json is durable.
    CONFIRMED = "CONFIRMED"
    #: decision.json says ABORT; its committables pass to the next checkpoint.
    ABORTED = "ABORTED"


class CheckpointEvent(enum.Enum):
    """What can happen to a checkpoint."""

    ALL_ACKNOWLEDGED = "ALL_ACKNOWLEDGED"
    COMMIT_LOG_READ = "COMMIT_LOG_READ"
    DECISION_WON = "DECISION_WON"
    RECEIPT_WRITTEN = "RECEIPT_WRITTEN"
    DECLINED = "DECLINED"
    EXPIRED = "EXPIRED"


S, E = CheckpointState, CheckpointEvent

TRANSITIONS: Mapping[CheckpointState, Mapping[CheckpointEvent, CheckpointState]] = {
    S.TRIGGERED: {E.ALL_ACKNOWLEDGED: S.ACKNOWLEDGED, E.DECLINED: S.ABORTED, E.EXPIRED: S.ABORTED},
    S.ACKNOWLEDGED: {E.COMMIT_LOG_READ: S.LOGGED, E.DECLINED: S.ABORTED, E.EXPIRED: S.ABORTED},
    S.LOGGED: {E.DECISION_WON: S.DECIDED, E.DECLINED: S.ABORTED, E.EXPIRED: S.ABORTED},
    S.DECIDED: {E.RECEIPT_WRITTEN: S.CONFIRMED},
    S.CONFIRMED: {},
    S.ABORTED: {},
}


class IllegalTransitionError(ValueError):
    """The table has no such step; the checkpoint is unchanged."""


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A checkpoint from its trigger to its receipt.

    Parameters
    ----------
    checkpoint
        Its id.
    triggered_at_ms
        Monotonic time of the trigger; expiry is counted from here.
    state
        See :class:`CheckpointState`.
    batch
        The micro-batch that carried the barrier, once acknowledged.
    """

    checkpoint: CheckpointId
    triggered_at_ms: int
    state: CheckpointState = CheckpointState.TRIGGERED
    batch: BatchId | None = None

    def on(self, event: CheckpointEvent) -> PendingCheckpoint:
        """Return the checkpoint after `event`; raise IllegalTransitionError if there is none."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise IllegalTransitionError(
                f"checkpoint {self.checkpoint} is {self.state.value} and cannot take {event.value}"
            )
        return replace(self, state=following)

    def acknowledged_by(self, batch: BatchId) -> PendingCheckpoint:
        """Return the checkpoint acknowledged by all sinks in `batch`."""
        return replace(self.on(CheckpointEvent.ALL_ACKNOWLEDGED), batch=batch)

    def is_expired(self, now_ms: int, timeout_ms: int) -> bool:
        """Whether it is undecided and older than the timeout. Decided checkpoints never expire."""
        undecided = CheckpointEvent.EXPIRED in TRANSITIONS[self.state]
        return undecided and now_ms - self.triggered_at_ms >= timeout_ms


def transition_table() -> str:
    """Return :data:`TRANSITIONS` as a Markdown table; `docs/architecture.md` quotes it."""
    events = list(CheckpointEvent)
    rows = ["| state | " + " | ".join(e.value for e in events) + " |", "|" + "---|" * (len(events) + 1)]
    for state in CheckpointState:
        cells = [TRANSITIONS[state][e].value if e in TRANSITIONS[state] else "-" for e in events]
        rows.append(f"| {state.value} | " + " | ".join(cells) + " |")
    return "\n".join(rows)
