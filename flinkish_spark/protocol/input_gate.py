"""Alignment over several channels: the input gate of a chained job.

The gate is a value: every event returns the next gate and the effects in the order in which they are due. An
event that violates the contract raises ValueError and changes nothing. Events carry the time,
and an event is handled before its time: a timeout that has passed when the last barrier arrives changes
nothing. Positions count elements of one channel; in Kafka they are offsets, so the difference of two
positions is an upper bound of the records between them.

* Ids rise along a channel and may skip. A barrier is late, and ignored, if its id has ended, or if its id is
  not pending and lower than the highest id that the gate has seen. So one number is enough to remember
  aborted ids.
* Every id whose first barrier is not late ends with exactly one effect: AlignmentComplete or AbortAlignment.
  TakeCheckpoint comes before AlignmentComplete; an unaligned checkpoint can be aborted after it was taken.
* If a channel skips the barrier of a pending id, the id can never complete: it is aborted at once.
* Unless the mode only counts (at least once), the barrier of a newer id ends all older ones.
* A pending id always awaits at least one channel. It ends in the event in which the last awaited channel
  shows or announces its barrier. A single channel therefore never waits. Channels never end, as in Kafka.

Rules that the types cannot express: the caller delivers nothing from a blocked channel, and elements of one
channel in order. It stores the gate together with the positions, so that both survive a crash together.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.codec import Form, StoredObject, StoredRow, read, write
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.limits import MOST_MS, check_choice, check_whole


class AlignmentMode(Choice):
    """When a checkpoint is taken, and which channels wait for it."""

    #: Exactly once: a channel is blocked from its barrier to the last one; then the checkpoint is taken.
    ALIGNED = "ALIGNED"
    #: Nothing waits; the checkpoint is taken at the last barrier and includes records after earlier barriers.
    AT_LEAST_ONCE = "AT_LEAST_ONCE"
    #: Exactly once: taken at the first barrier; elements of other channels up to their barriers are channel
    #: state.
    UNALIGNED = "UNALIGNED"
    #: Begins as ALIGNED and goes on as UNALIGNED if the last barrier takes too long.
    ALIGNED_WITH_TIMEOUT = "ALIGNED_WITH_TIMEOUT"


class NewChannel(enum.Enum):
    """Position of a new channel relative to the barriers of pending checkpoints."""

    #: The barriers are still to come on it.
    AWAITS_BARRIERS = "AWAITS_BARRIERS"
    #: All of its elements come after the barriers: it began after they were written.
    BEHIND_BARRIERS = "BEHIND_BARRIERS"


class BarrierKind(enum.Enum):
    CHECKPOINT = "CHECKPOINT"
    #: Never unaligned: a savepoint must not depend on the log of another system (behaviour 59).
    SAVEPOINT = "SAVEPOINT"


@dataclass(frozen=True, slots=True)
class AlignmentSettings:
    """A gate's alignment mode. Configuration, not state: a restart may change it."""

    mode: AlignmentMode
    #: Only with ALIGNED_WITH_TIMEOUT: milliseconds after the first barrier, up to 365 days.
    alignment_timeout_ms: int | None = None

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, AlignmentMode)
        timed = self.mode is AlignmentMode.ALIGNED_WITH_TIMEOUT
        if timed is not (self.alignment_timeout_ms is not None):
            raise ValueError(
                "alignment_timeout_ms belongs to ALIGNED_WITH_TIMEOUT, and that mode needs it; "
                f"got {self.alignment_timeout_ms!r} with {self.mode.value}"
            )
        if self.alignment_timeout_ms is not None:
            check_whole("alignment_timeout_ms", self.alignment_timeout_ms, least=0, most=MOST_MS)


@dataclass(frozen=True, slots=True)
class CheckpointBarrier:
    """A barrier that the upstream job wrote."""

    #: The upstream checkpoint. Ids rise along a channel and may skip.
    checkpoint: CheckpointId
    #: Wall clock time of that checkpoint's trigger; the start delay is counted from here.
    triggered_at_ms: int
    kind: BarrierKind = BarrierKind.CHECKPOINT


@dataclass(frozen=True, slots=True, order=True)
class PositionRange(StoredRow):
    """The elements of one channel from `start` to `end`, without `end`."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"a range runs forward from 0 or above, got {self.start} to {self.end}")

    @property
    def size(self) -> int:
        return self.end - self.start


class AbortReason(enum.Enum):
    #: A newer barrier came first, or a channel skipped its barrier, so the last barrier can never come.
    SUBSUMED = "SUBSUMED"
    #: This job's own coordinator aborted it.
    COORDINATOR = "COORDINATOR"
    #: Too many checkpoints are pending; the oldest is aborted.
    TOO_MANY_PENDING = "TOO_MANY_PENDING"


@dataclass(frozen=True, slots=True)
class AlignmentStats:
    #: From the upstream trigger to the first barrier.
    start_delay_ms: int
    #: From the first barrier to the last; 0 with a single channel.
    alignment_duration_ms: int


@dataclass(frozen=True, slots=True)
class TakeCheckpoint:
    """Effect: take the checkpoint now, between the elements delivered so far and the next ones."""

    checkpoint: CheckpointId
    kind: BarrierKind
    #: By channel the position at which its channel state begins; empty if the checkpoint is aligned.
    #: The end of the channel state is in the :class:`AlignmentComplete` that follows.
    in_flight: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AlignmentComplete:
    """Last effect of a checkpoint: every channel has shown its barrier."""

    checkpoint: CheckpointId
    kind: BarrierKind
    #: By channel, the elements before the barrier that the checkpoint itself does not hold; a restore
    #: replays them first. Empty ranges are left out.
    channel_state: Mapping[str, PositionRange]
    stats: AlignmentStats


@dataclass(frozen=True, slots=True)
class AbortAlignment:
    """Last effect of a checkpoint that will not complete; if it was taken already, discard it."""

    checkpoint: CheckpointId
    reason: AbortReason


Effect = TakeCheckpoint | AlignmentComplete | AbortAlignment


class AlignmentPhase(enum.Enum):
    """Effect of a pending checkpoint on the channels."""

    #: Aligned: channels that have shown the barrier wait.
    BLOCKING = "BLOCKING"
    #: At least once: barriers are counted, nothing waits.
    COUNTING = "COUNTING"
    #: Unaligned: the checkpoint is taken; elements of awaited channels are recorded as channel state.
    COLLECTING = "COLLECTING"


_BY_CHANNEL = Mapping[str, PositionRange]
_SORTED = Form(lambda state: write(_BY_CHANNEL, dict(sorted(state.items()))), partial(read, _BY_CHANNEL))


@dataclass(frozen=True, slots=True)
class PendingAlignment(StoredObject):
    """A checkpoint between its first barrier and its last."""

    checkpoint: CheckpointId
    kind: BarrierKind
    triggered_at_ms: int
    phase: AlignmentPhase
    #: Time of its first barrier; timeout and duration are counted from here.
    first_barrier_ms: int
    #: Channels that have not shown the barrier.
    awaited: frozenset[str]
    #: COLLECTING only: the recorded range of every channel that was awaited when the checkpoint was taken.
    channel_state: Annotated[Mapping[str, PositionRange], _SORTED] = field(default_factory=dict)

    def blocks(self, channel: str) -> bool:
        return self.phase is AlignmentPhase.BLOCKING and channel not in self.awaited

    def collects(self, channel: str) -> bool:
        return self.phase is AlignmentPhase.COLLECTING and channel in self.awaited

    def record_to(self, channel: str, end: int) -> PendingAlignment:
        extended = PositionRange(self.channel_state[channel].start, end)
        return replace(self, channel_state={**self.channel_state, channel: extended})

    def on_barrier(self, channel: str) -> PendingAlignment:
        return replace(self, awaited=self.awaited - {channel})

    def add_channel(self, channel: str, position: int) -> PendingAlignment:
        awaiting = replace(self, awaited=self.awaited | {channel})
        if not awaiting.collects(channel):
            return awaiting
        empty = PositionRange(position, position)
        return replace(awaiting, channel_state={**self.channel_state, channel: empty})

    def stats(self, now_ms: int) -> AlignmentStats:
        return AlignmentStats(
            start_delay_ms=max(0, self.first_barrier_ms - self.triggered_at_ms),
            alignment_duration_ms=max(0, now_ms - self.first_barrier_ms),
        )


_NO_ID = CheckpointId(0)
#: The most pending ids with AlignmentMode.AT_LEAST_ONCE; if there are more, the oldest is aborted.
MAX_PENDING = 50


@dataclass(frozen=True, slots=True)
class InputGate:
    settings: AlignmentSettings
    #: Open channels, and the position of the next element of each.
    channels: Mapping[str, int]
    #: The highest id seen so far; 0 before the first.
    newest: CheckpointId = _NO_ID
    #: Checkpoints between their first and last barrier, by rising id. More than one only if the mode counts.
    pending: tuple[PendingAlignment, ...] = ()

    def __post_init__(self) -> None:
        ids = [alignment.checkpoint for alignment in self.pending]
        if ids != sorted(set(ids)) or any(checkpoint > self.newest for checkpoint in ids):
            raise ValueError(f"pending ids rise up to {self.newest}, got {[int(i) for i in ids]}")
        if any(not a.awaited or a.awaited - self.channels.keys() for a in self.pending):
            raise ValueError("a pending checkpoint awaits open channels, at least one")

    @classmethod
    def of(cls, channels: Mapping[str, int], settings: AlignmentSettings) -> InputGate:
        return cls(settings, dict(channels))

    def is_blocked(self, channel: str) -> bool:
        """Return if an open channel must not deliver now; raise ValueError if it is not open."""
        self._check_open(channel)
        return any(alignment.blocks(channel) for alignment in self.pending)

    @property
    def blocked(self) -> frozenset[str]:
        behind = [a.awaited for a in self.pending if a.phase is AlignmentPhase.BLOCKING]
        return frozenset().union(*(self.channels.keys() - awaited for awaited in behind))

    @property
    def turns_unaligned_at_ms(self) -> int | None:
        """Time at which :meth:`on_time` must be called; None while no timeout runs."""
        times = map(self._find_timeout_ms, self.pending)
        return min((at_ms for at_ms in times if at_ms is not None), default=None)

    def on_records(self, channel: str, position: int, now_ms: int) -> Step:
        """Note that `channel` delivered all elements before `position`."""
        step = _EventStep(self, now_ms)
        step.deliver(channel, position)
        return step.finish()

    def on_barrier(self, channel: str, barrier: CheckpointBarrier, position: int, now_ms: int) -> Step:
        """Note that `channel` has delivered a barrier, its element at `position`."""
        step = _EventStep(self, now_ms)
        step.deliver(channel, position)
        if self.is_blocked(channel):
            raise ValueError(f"'{channel}' is blocked at {position}, got its element there")
        step.channels[channel] = position + 1
        # Ids rise along a channel, so barriers of lower ids cannot come on it any more.
        for lower in [c for c, a in step.pending.items() if c < barrier.checkpoint and channel in a.awaited]:
            step.abort(lower, AbortReason.SUBSUMED)
        if barrier.checkpoint in step.pending:
            step.pending[barrier.checkpoint] = step.pending[barrier.checkpoint].on_barrier(channel)
        elif barrier.checkpoint > self.newest:
            step.begin(channel, barrier)
        return step.finish()

    def on_announcement(self, channel: str, checkpoint: CheckpointId, position: int, now_ms: int) -> Step:
        """Note the position of a coming barrier; only an unaligned checkpoint that was taken uses it."""
        step = _EventStep(self, now_ms)
        step.check_position(channel, position)
        alignment = step.pending.get(checkpoint)
        if alignment is not None and alignment.collects(channel):
            step.pending[checkpoint] = alignment.record_to(channel, position).on_barrier(channel)
        return step.finish()

    def on_abort(self, checkpoint: CheckpointId, now_ms: int) -> Step:
        """Note that this job's coordinator aborted the checkpoint: late barriers up to it are ignored."""
        step = _EventStep(self, now_ms)
        # An id that has ended has had its last effect.
        if checkpoint in step.pending or checkpoint > self.newest:
            step.abort(checkpoint, AbortReason.COORDINATOR)
        return step.finish()

    def on_new_channel(self, channel: str, position: int, stands: NewChannel, now_ms: int) -> Step:
        """Note a new channel, whose first element is at `position`; an open one raises ValueError."""
        if channel in self.channels:
            raise ValueError(f"'{channel}' is already a channel of this gate")
        step = _EventStep(self, now_ms)
        step.channels[channel] = position
        if stands is NewChannel.AWAITS_BARRIERS:
            for checkpoint, alignment in step.pending.items():
                step.pending[checkpoint] = alignment.add_channel(channel, position)
        return step.finish()

    def on_time(self, now_ms: int) -> Step:
        """Make checkpoints whose alignment timeout has passed unaligned, and take them."""
        return _EventStep(self, now_ms).finish()

    def to_json(self) -> dict[str, Any]:
        return {
            "newest": int(self.newest),
            "channels": dict(sorted(self.channels.items())),
            "pending": [alignment.to_json() for alignment in self.pending],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], settings: AlignmentSettings) -> InputGate:
        return cls(
            settings,
            dict(value["channels"]),
            CheckpointId(value["newest"]),
            tuple(PendingAlignment.from_json(alignment) for alignment in value["pending"]),
        )

    def _find_timeout_ms(self, alignment: PendingAlignment) -> int | None:
        is_unaligned = self.settings.mode is AlignmentMode.UNALIGNED
        after_ms = 0 if is_unaligned else self.settings.alignment_timeout_ms
        is_waiting = alignment.phase is AlignmentPhase.BLOCKING and alignment.kind is BarrierKind.CHECKPOINT
        return None if after_ms is None or not is_waiting else alignment.first_barrier_ms + after_ms

    def _check_open(self, channel: str) -> None:
        if channel not in self.channels:
            raise ValueError(f"'{channel}' is not an open channel of this gate")


#: Result of every event: the next gate, and the effects in their order.
Step = tuple[InputGate, tuple[Effect, ...]]


class _EventStep:
    """Working state of one event: a mutable copy of the gate, and the effects so far."""

    def __init__(self, gate: InputGate, now_ms: int) -> None:
        self._gate, self._now_ms = gate, now_ms
        self.channels = dict(gate.channels)
        self.pending = {alignment.checkpoint: alignment for alignment in gate.pending}
        self._newest = gate.newest
        self._effects: list[Effect] = []

    def check_position(self, channel: str, position: int) -> None:
        self._gate._check_open(channel)
        if position < self.channels[channel]:
            raise ValueError(
                f"'{channel}' stands at {self.channels[channel]} and cannot go back to {position}"
            )

    def deliver(self, channel: str, position: int) -> None:
        self.check_position(channel, position)
        here = self.channels[channel]
        if position > here and self._gate.is_blocked(channel):
            raise ValueError(f"'{channel}' is blocked at {here}, got elements up to {position}")
        self.channels[channel] = position
        for checkpoint, alignment in self.pending.items():
            if alignment.collects(channel):
                self.pending[checkpoint] = alignment.record_to(channel, position)

    def begin(self, channel: str, barrier: CheckpointBarrier) -> None:
        counts = self._gate.settings.mode is AlignmentMode.AT_LEAST_ONCE
        phase = AlignmentPhase.COUNTING if counts else AlignmentPhase.BLOCKING
        for older in [] if counts else list(self.pending):
            self.abort(older, AbortReason.SUBSUMED)
        self._newest = barrier.checkpoint
        awaited = frozenset(self.channels) - {channel}
        self.pending[barrier.checkpoint] = PendingAlignment(
            barrier.checkpoint, barrier.kind, barrier.triggered_at_ms, phase, self._now_ms, awaited
        )
        if len(self.pending) > MAX_PENDING:
            self.abort(min(self.pending), AbortReason.TOO_MANY_PENDING)

    def abort(self, checkpoint: CheckpointId, reason: AbortReason) -> None:
        self.pending.pop(checkpoint, None)
        self._newest = max(self._newest, checkpoint)
        self._effects.append(AbortAlignment(checkpoint, reason))

    def finish(self) -> Step:
        """Complete the checkpoints that await no channel, then make those unaligned that waited too long."""
        for alignment in list(self.pending.values()):
            if not alignment.awaited:
                self._complete(alignment)
        for alignment in list(self.pending.values()):
            timeout_ms = self._gate._find_timeout_ms(alignment)
            if timeout_ms is not None and self._now_ms >= timeout_ms:
                at = {channel: self.channels[channel] for channel in sorted(alignment.awaited)}
                empty = {channel: PositionRange(start, start) for channel, start in at.items()}
                self.pending[alignment.checkpoint] = replace(
                    alignment, phase=AlignmentPhase.COLLECTING, channel_state=empty
                )
                self._effects.append(TakeCheckpoint(alignment.checkpoint, alignment.kind, at))
        after = InputGate(self._gate.settings, self.channels, self._newest, tuple(self.pending.values()))
        return after, tuple(self._effects)

    def _complete(self, alignment: PendingAlignment) -> None:
        del self.pending[alignment.checkpoint]
        if alignment.phase is not AlignmentPhase.COLLECTING:
            self._effects.append(TakeCheckpoint(alignment.checkpoint, alignment.kind))
        filled = {c: elements for c, elements in alignment.channel_state.items() if elements.size}
        stats = alignment.stats(self._now_ms)
        self._effects.append(AlignmentComplete(alignment.checkpoint, alignment.kind, filled, stats))
