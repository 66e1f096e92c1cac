"""May a checkpoint start now? One pure function with a named reason for every answer."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class TriggerReason(enum.Enum):
    """Why a checkpoint starts, or does not."""

    PERIODIC = "PERIODIC"
    #: Asked for: final checkpoint, kept micro-batches after a recovery, backlog too long.
    REQUESTED = "REQUESTED"
    SHUT_DOWN = "SHUT_DOWN"
    NOT_RUNNING = "NOT_RUNNING"
    TOO_MANY_PENDING = "TOO_MANY_PENDING"
    MINIMUM_PAUSE = "MINIMUM_PAUSE"
    INTERVAL_NOT_OVER = "INTERVAL_NOT_OVER"

    @property
    def starts(self) -> bool:
        """Whether this reason starts a checkpoint."""
        return self in (TriggerReason.PERIODIC, TriggerReason.REQUESTED)


class JobPhase(enum.Enum):
    """What the job does, as far as triggering is concerned."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"


@dataclass(frozen=True, slots=True)
class TriggerFacts:
    """All that the answer depends on. Times are monotonic milliseconds."""

    now_ms: int
    phase: JobPhase
    pending: int
    requested: int
    last_trigger_ms: int
    last_end_ms: int
    interval_ms: int
    min_pause_ms: int


def decide_trigger(facts: TriggerFacts) -> TriggerReason:
    """Return why a checkpoint starts now, or why not.

    A requested checkpoint ignores interval and pause but not the one in flight: at most one
    checkpoint is undecided or unconfirmed at a time (DESIGN 8).
    """
    if facts.phase is JobPhase.STOPPED:
        return TriggerReason.SHUT_DOWN
    if facts.phase is JobPhase.STARTING:
        return TriggerReason.NOT_RUNNING
    if facts.pending > 0:
        return TriggerReason.TOO_MANY_PENDING
    if facts.requested > 0:
        return TriggerReason.REQUESTED
    if facts.now_ms - facts.last_end_ms < facts.min_pause_ms:
        return TriggerReason.MINIMUM_PAUSE
    if facts.now_ms - facts.last_trigger_ms < facts.interval_ms:
        return TriggerReason.INTERVAL_NOT_OVER
    return TriggerReason.PERIODIC
