"""Alignment over several channels: the input gate of a job that is chained behind another one.

The gate is a value: every event returns the next gate and the effects in the order in which they are due. An
event that the contract forbids raises :class:`GateContractError` and changes nothing. Time comes in with the
event, and an event is looked at before the time that came with it: a timeout that is over when the last
barrier arrives changes nothing. Positions count elements of one channel; in Kafka they are offsets, so a
difference of two positions is an upper bound of the records between them.

* Ids rise along a channel and may skip. A barrier of an id that is over, or that is lower than one the gate
  has met and not pending, is late and ignored. So the memory of aborted ids is one number.
* Every id that is not late when the gate meets it gets exactly one last word: AlignmentComplete or Aborted.
  TakeCheckpoint comes before AlignmentComplete; an unaligned checkpoint can be aborted after it was taken.
* A channel that goes past the barrier of a pending id makes that id impossible: it is aborted at once.
* Unless it only counts (at least once), the barrier of a newer id ends all older ones.
* A pending id always awaits at least one channel. One whose last awaited channel came or was announced is
  over in the same event. A single channel therefore never waits. Channels never end: those of Kafka do not.

What the types cannot say: the caller delivers nothing from a blocked channel, and elements of one channel
in order. It keeps the gate beside the positions, so that after a crash both are as they were together.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.codec import Form, Stored, StoredRow, read, write
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.limits import MOST_MS, checked_choice, checked_whole


class AlignmentMode(Choice):
    """When a checkpoint is taken, and what waits for it."""

    #: Exactly once: a channel is blocked from its barrier to the last one; then the checkpoint is taken.
    ALIGNED = "ALIGNED"
    #: Nothing waits; the checkpoint is taken at the last barrier and holds records from behind earlier ones.
    AT_LEAST_ONCE = "AT_LEAST_ONCE"
    #: Exactly once: taken at the first barrier; what other channels deliver up to theirs is channel state.
    UNALIGNED = "UNALIGNED"
    #: Begins as ALIGNED and goes on as UNALIGNED if the last barrier takes too long.
    ALIGNED_WITH_TIMEOUT = "ALIGNED_WITH_TIMEOUT"


class NewChannel(enum.Enum):
    """How a channel that appears while checkpoints are pending stands to their barriers."""

    #: Their barriers are still to come on it.
    AWAITS_BARRIERS = "AWAITS_BARRIERS"
    #: All of it lies behind them: it began after they were written.
    BEHIND_BARRIERS = "BEHIND_BARRIERS"


class BarrierKind(enum.Enum):
    """What kind of checkpoint a barrier belongs to."""

    CHECKPOINT = "CHECKPOINT"
    #: Never unaligned: a savepoint must not depend on the log of another system (behaviour 59).
    SAVEPOINT = "SAVEPOINT"


@dataclass(frozen=True, slots=True)
class AlignmentSettings:
    """A gate's alignment mode. Configuration, not state: a restart may change it."""

    mode: AlignmentMode
    #: Given with ALIGNED_WITH_TIMEOUT and only there: milliseconds from the first barrier on, from 0 to
    #: 365 days.
    alignment_timeout_ms: int | None = None

    def __post_init__(self) -> None:
        checked_choice("mode", self.mode, AlignmentMode)
        timed = self.mode is AlignmentMode.ALIGNED_WITH_TIMEOUT
        if timed is not (self.alignment_timeout_ms is not None):
            raise ValueError(
                "alignment_timeout_ms belongs to ALIGNED_WITH_TIMEOUT, and that mode needs it; "
                f"got {self.alignment_timeout_ms!r} with {self.mode.value}"
            )
        if self.alignment_timeout_ms is not None:
            checked_whole("alignment_timeout_ms", self.alignment_timeout_ms, least=0, most=MOST_MS)


@dataclass(frozen=True, slots=True)
class CheckpointBarrier:
    """A barrier as the upstream job wrote it."""

    #: The upstream checkpoint. Ids rise along a channel and may skip.
    checkpoint: CheckpointId
    #: When that checkpoint was triggered, wall clock; the start delay is counted from here.
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
    #: A newer barrier came first, or a channel went past it, so its last barrier can never come.
    SUBSUMED = "SUBSUMED"
    #: This job's own coordinator gave it up.
    COORDINATOR = "COORDINATOR"
    #: Too many are pending at once; the oldest goes.
    TOO_MANY_PENDING = "TOO_MANY_PENDING"


@dataclass(frozen=True, slots=True)
class AlignmentStats:
    """The cost of one alignment."""

    #: From the upstream trigger to the first barrier.
    start_delay_ms: int
    #: From the first barrier to the last; 0 with a single channel.
    alignment_duration_ms: int


@dataclass(frozen=True, slots=True)
class TakeCheckpoint:
    """Effect: draw the checkpoint now, between the elements delivered so far and the next ones."""

    checkpoint: CheckpointId
    kind: BarrierKind
    #: By channel the position at which its channel state begins; empty if the checkpoint is aligned.
    #: Where it ends is in the :class:`AlignmentComplete` that follows, unless an :class:`Aborted` does.
    in_flight: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AlignmentComplete:
    """Effect: every channel has shown its barrier; nothing about this checkpoint follows."""

    checkpoint: CheckpointId
    kind: BarrierKind
    #: What a restore replays before anything else, by channel: exactly the elements in front of the
    #: barrier that the checkpoint itself does not hold. Empty ranges are left out.
    channel_state: Mapping[str, PositionRange]
    stats: AlignmentStats


@dataclass(frozen=True, slots=True)
class Aborted:
    """Effect: the checkpoint will not complete; if it was taken already, discard it. Nothing follows."""

    checkpoint: CheckpointId
    reason: AbortReason


Effect = TakeCheckpoint | AlignmentComplete | Aborted


class AlignmentPhase(enum.Enum):
    """What a pending checkpoint does to the channels."""

    #: Aligned: channels that have shown the barrier wait.
    BLOCKING = "BLOCKING"
    #: At least once: barriers are counted, nothing waits.
    COUNTING = "COUNTING"
    #: Unaligned: the checkpoint is taken; what awaited channels deliver is recorded as channel state.
    COLLECTING = "COLLECTING"


_BY_CHANNEL = Mapping[str, PositionRange]
_SORTED = Form(lambda state: write(_BY_CHANNEL, dict(sorted(state.items()))), partial(read, _BY_CHANNEL))


@dataclass(frozen=True, slots=True)
class PendingAlignment(Stored):
    """A checkpoint whose last barrier has not come yet."""

    checkpoint: CheckpointId
    kind: BarrierKind
    triggered_at_ms: int
    phase: AlignmentPhase
    #: When its first barrier came; timeout and duration are counted from here.
    first_barrier_ms: int
    #: Channels that have not shown the barrier.
    awaited: frozenset[str]
    #: COLLECTING only: the recorded range of every channel that was awaited when the checkpoint was taken.
    channel_state: Annotated[Mapping[str, PositionRange], _SORTED] = field(default_factory=dict)

    def blocks(self, channel: str) -> bool:
        return self.phase is AlignmentPhase.BLOCKING and channel not in self.awaited

    def collects(self, channel: str) -> bool:
        return self.phase is AlignmentPhase.COLLECTING and channel in self.awaited

    def recorded_to(self, channel: str, end: int) -> PendingAlignment:
        extended = PositionRange(self.channel_state[channel].start, end)
        return replace(self, channel_state={**self.channel_state, channel: extended})

    def reached_by(self, channel: str) -> PendingAlignment:
        return replace(self, awaited=self.awaited - {channel})

    def joined_by(self, channel: str, position: int) -> PendingAlignment:
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


_NONE_MET = CheckpointId(0)
#: With AlignmentMode.AT_LEAST_ONCE several ids can be pending; of more than this the oldest is aborted.
MAX_PENDING = 50


class GateContractError(ValueError):
    """An event that cannot be: unknown or blocked channel, position that goes back. Nothing changed."""


@dataclass(frozen=True, slots=True)
class InputGate:
    """The channels of one input and the checkpoints that are being aligned on them."""

    settings: AlignmentSettings
    #: Open channels, and the position of the next element of each.
    channels: Mapping[str, int]
    #: The highest id met so far; 0 before the first.
    newest: CheckpointId = _NONE_MET
    #: Checkpoints between their first and last barrier, by rising id. More than one only if they count.
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
        """Whether an open channel must not deliver now; raises GateContractError if it is not open."""
        self._check_open(channel)
        return any(alignment.blocks(channel) for alignment in self.pending)

    @property
    def blocked(self) -> frozenset[str]:
        behind = [a.awaited for a in self.pending if a.phase is AlignmentPhase.BLOCKING]
        return frozenset().union(*(self.channels.keys() - awaited for awaited in behind))

    @property
    def turns_unaligned_at_ms(self) -> int | None:
        """When :meth:`on_time` has something to do; None while no timeout runs."""
        times = map(self._turning_time_ms, self.pending)
        return min((at_ms for at_ms in times if at_ms is not None), default=None)

    def on_records(self, channel: str, position: int, now_ms: int) -> Step:
        """Note that `channel` delivered everything before `position`."""
        step = _EventStep(self, now_ms)
        step.deliver(channel, position)
        return step.finished()

    def on_barrier(self, channel: str, barrier: CheckpointBarrier, position: int, now_ms: int) -> Step:
        """Note that `channel` has come to a barrier, its element at `position`, and stands behind it now."""
        step = _EventStep(self, now_ms)
        step.deliver(channel, position)
        if self.is_blocked(channel):
            raise GateContractError(f"'{channel}' is blocked at {position}, got what stands there")
        step.channels[channel] = position + 1
        # Ids rise along a channel, so the barriers of lower ids that await it cannot come any more.
        for lower in [c for c, a in step.pending.items() if c < barrier.checkpoint and channel in a.awaited]:
            step.abort(lower, AbortReason.SUBSUMED)
        if barrier.checkpoint in step.pending:
            step.pending[barrier.checkpoint] = step.pending[barrier.checkpoint].reached_by(channel)
        elif barrier.checkpoint > self.newest:
            step.begin(channel, barrier)
        return step.finished()

    def on_announcement(self, channel: str, checkpoint: CheckpointId, position: int, now_ms: int) -> Step:
        """Note a barrier ahead; only an unaligned checkpoint that was taken can use it."""
        step = _EventStep(self, now_ms)
        step.check_position(channel, position)
        alignment = step.pending.get(checkpoint)
        if alignment is not None and alignment.collects(channel):
            step.pending[checkpoint] = alignment.recorded_to(channel, position).reached_by(channel)
        return step.finished()

    def on_abort(self, checkpoint: CheckpointId, now_ms: int) -> Step:
        """Note that this job's coordinator gave the checkpoint up: late barriers up to it are ignored."""
        step = _EventStep(self, now_ms)
        # One that is over has had its last word.
        if checkpoint in step.pending or checkpoint > self.newest:
            step.abort(checkpoint, AbortReason.COORDINATOR)
        return step.finished()

    def on_new_channel(self, channel: str, position: int, stands: NewChannel, now_ms: int) -> Step:
        """Note a new channel, whose first element is at `position`; an open one raises GateContractError."""
        if channel in self.channels:
            raise GateContractError(f"'{channel}' is already a channel of this gate")
        step = _EventStep(self, now_ms)
        step.channels[channel] = position
        if stands is NewChannel.AWAITS_BARRIERS:
            for checkpoint, alignment in step.pending.items():
                step.pending[checkpoint] = alignment.joined_by(channel, position)
        return step.finished()

    def on_time(self, now_ms: int) -> Step:
        """Turn checkpoints unaligned whose alignment timeout is over by `now_ms`, and take them."""
        return _EventStep(self, now_ms).finished()

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

    def _turning_time_ms(self, alignment: PendingAlignment) -> int | None:
        is_unaligned = self.settings.mode is AlignmentMode.UNALIGNED
        after_ms = 0 if is_unaligned else self.settings.alignment_timeout_ms
        is_waiting = alignment.phase is AlignmentPhase.BLOCKING and alignment.kind is BarrierKind.CHECKPOINT
        return None if after_ms is None or not is_waiting else alignment.first_barrier_ms + after_ms

    def _check_open(self, channel: str) -> None:
        if channel not in self.channels:
            raise GateContractError(f"'{channel}' is not an open channel of this gate")


#: What every event answers: the next gate, and what is due, in this order.
Step = tuple[InputGate, tuple[Effect, ...]]


class _EventStep:
    """One event on its way through a gate: a copy that changes, and the effects so far."""

    def __init__(self, gate: InputGate, now_ms: int) -> None:
        self._gate, self._now_ms = gate, now_ms
        self.channels = dict(gate.channels)
        self.pending = {alignment.checkpoint: alignment for alignment in gate.pending}
        self._newest = gate.newest
        self._effects: list[Effect] = []

    def check_position(self, channel: str, position: int) -> None:
        self._gate._check_open(channel)
        if position < self.channels[channel]:
            raise GateContractError(
                f"'{channel}' stands at {self.channels[channel]} and cannot go back to {position}"
            )

    def deliver(self, channel: str, position: int) -> None:
        self.check_position(channel, position)
        here = self.channels[channel]
        if position > here and self._gate.is_blocked(channel):
            raise GateContractError(f"'{channel}' is blocked at {here}, got elements up to {position}")
        self.channels[channel] = position
        for checkpoint, alignment in self.pending.items():
            if alignment.collects(channel):
                self.pending[checkpoint] = alignment.recorded_to(channel, position)

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
        self._effects.append(Aborted(checkpoint, reason))

    def finished(self) -> Step:
        """Complete what awaits no channel, then turn what has waited too long."""
        for alignment in list(self.pending.values()):
            if not alignment.awaited:
                self._complete(alignment)
        for alignment in list(self.pending.values()):
            turning_ms = self._gate._turning_time_ms(alignment)
            if turning_ms is not None and self._now_ms >= turning_ms:
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
