"""One checkpoint between its first barrier and its last, as an input gate sees it. See `gate.py`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flinkish_spark.protocol.gate_values import (
    AlignmentStats,
    BarrierKind,
    CheckpointBarrier,
    PositionRange,
)
from flinkish_spark.protocol.ids import CheckpointId


class AlignmentPhase(enum.Enum):
    """What a pending checkpoint does to the channels."""

    #: Aligned: channels that have shown the barrier wait.
    BLOCKING = "BLOCKING"
    #: At least once: barriers are counted, nothing waits.
    COUNTING = "COUNTING"
    #: Unaligned: the checkpoint is taken; what awaited channels deliver is recorded as channel state.
    COLLECTING = "COLLECTING"


@dataclass(frozen=True, slots=True)
class PendingAlignment:
    """A checkpoint whose last barrier has not come yet.

    Parameters
    ----------
    checkpoint, kind, triggered_at_ms
        As on its barriers.
    phase
        See :class:`AlignmentPhase`.
    first_barrier_ms
        When its first barrier came; timeout and duration are counted from here.
    awaited
        Channels that have not shown the barrier.
    channel_state
        COLLECTING only: the recorded range of every channel that was awaited when the checkpoint was taken.
    processed_elements, processed_bytes, persisted_bytes
        See :class:`~flinkish_spark.protocol.gate_values.AlignmentStats`.
    """

    checkpoint: CheckpointId
    kind: BarrierKind
    triggered_at_ms: int
    phase: AlignmentPhase
    first_barrier_ms: int
    awaited: frozenset[str]
    channel_state: Mapping[str, PositionRange] = field(default_factory=dict)
    processed_elements: int = 0
    processed_bytes: int = 0
    persisted_bytes: int = 0

    @classmethod
    def at_first_barrier(
        cls, barrier: CheckpointBarrier, phase: AlignmentPhase, awaited: frozenset[str], now_ms: int
    ) -> PendingAlignment:
        """Return the alignment that `barrier` begins."""
        return cls(barrier.checkpoint, barrier.kind, barrier.triggered_at_ms, phase, now_ms, awaited)

    def blocks(self, channel: str) -> bool:
        """Whether `channel`, one of the gate's, must wait for this checkpoint."""
        return self.phase is AlignmentPhase.BLOCKING and channel not in self.awaited

    def collects(self, channel: str) -> bool:
        """Whether what `channel` delivers now is channel state of this checkpoint."""
        return self.phase is AlignmentPhase.COLLECTING and channel in self.awaited

    def delivered(self, channel: str, elements: PositionRange, size_bytes: int) -> PendingAlignment:
        """Return the alignment after `channel` delivered elements."""
        moved = replace(
            self,
            processed_elements=self.processed_elements + elements.size,
            processed_bytes=self.processed_bytes + size_bytes,
        )
        if not self.collects(channel):
            return moved
        return replace(
            moved.recorded_to(channel, elements.end), persisted_bytes=self.persisted_bytes + size_bytes
        )

    def recorded_to(self, channel: str, end: int) -> PendingAlignment:
        """Return the alignment with the channel state of `channel` ending at `end`."""
        extended = PositionRange(self.channel_state[channel].start, end)
        return replace(self, channel_state={**self.channel_state, channel: extended})

    def reached_by(self, channel: str) -> PendingAlignment:
        """Return the alignment that awaits `channel` no more."""
        return replace(self, awaited=self.awaited - {channel})

    def joined_by(self, channel: str, position: int) -> PendingAlignment:
        """Return the alignment that also awaits a new channel."""
        awaiting = replace(self, awaited=self.awaited | {channel})
        if not awaiting.collects(channel):
            return awaiting
        empty = PositionRange(position, position)
        return replace(awaiting, channel_state={**self.channel_state, channel: empty})

    def turned_unaligned(self, positions: Mapping[str, int]) -> PendingAlignment:
        """Return the alignment taken at `positions`: awaited channels record from there on."""
        empty = {c: PositionRange(positions[c], positions[c]) for c in sorted(self.awaited)}
        return replace(self, phase=AlignmentPhase.COLLECTING, channel_state=empty)

    def stats(self, now_ms: int) -> AlignmentStats:
        """Return what the alignment cost up to `now_ms`. A clock that was set back counts as no time."""
        return AlignmentStats(
            start_delay_ms=max(0, self.first_barrier_ms - self.triggered_at_ms),
            alignment_duration_ms=max(0, now_ms - self.first_barrier_ms),
            processed_elements=self.processed_elements,
            processed_bytes=self.processed_bytes,
            persisted_elements=sum(elements.size for elements in self.channel_state.values()),
            persisted_bytes=self.persisted_bytes,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {
            "checkpoint": int(self.checkpoint),
            "kind": self.kind.value,
            "triggered_at_ms": self.triggered_at_ms,
            "phase": self.phase.value,
            "first_barrier_ms": self.first_barrier_ms,
            "awaited": sorted(self.awaited),
            "channel_state": {c: [r.start, r.end] for c, r in sorted(self.channel_state.items())},
            "processed": [self.processed_elements, self.processed_bytes],
            "persisted_bytes": self.persisted_bytes,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PendingAlignment:
        """Read what :meth:`to_json` returned."""
        elements, size_bytes = value["processed"]
        return cls(
            CheckpointId(value["checkpoint"]),
            BarrierKind(value["kind"]),
            value["triggered_at_ms"],
            AlignmentPhase(value["phase"]),
            value["first_barrier_ms"],
            frozenset(value["awaited"]),
            {c: PositionRange(start, end) for c, (start, end) in value["channel_state"].items()},
            elements,
            size_bytes,
            value["persisted_bytes"],
        )
