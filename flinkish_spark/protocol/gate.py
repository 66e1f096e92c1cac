"""Alignment over several channels: the input gate of a job that is chained behind another one.

Rules of this file. The gate is a value: every event returns the next gate and the effects in the order
in which they are due. An event that the contract forbids raises :class:`GateContractError` and changes
nothing. Time comes in with the event, and an event is looked at before the time that came with it: a
timeout that is over when the last barrier arrives changes nothing.

* Ids rise along a channel and may skip. A barrier or cancellation of an id that is over, or that is
  lower than one the gate has met and not pending, is late and ignored. So the memory of aborted ids is
  one number.
* Every id that is not late when the gate meets it gets exactly one last word: AlignmentComplete or Aborted.
  TakeCheckpoint comes before AlignmentComplete; an unaligned checkpoint can be aborted after it was taken.
* A channel that goes past the barrier of a pending id makes that id impossible: it is aborted at once.
* Unless it only counts (at least once), the barrier of a newer id ends all older ones.
* A pending id always awaits at least one open channel. One whose last awaited channel came, ended or
  was announced is over in the same event. A single channel therefore never waits.

What the types cannot say: the caller delivers nothing from a blocked channel, and elements of one channel
in order. It keeps the gate beside the positions, so that after a crash both are as they were together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flinkish_spark.protocol.gate_pending import AlignmentPhase, PendingAlignment
from flinkish_spark.protocol.gate_values import (
    Aborted,
    AbortReason,
    AlignmentComplete,
    AlignmentMode,
    AlignmentSettings,
    Blocked,
    CheckpointBarrier,
    Effect,
    EndedChannels,
    NewChannel,
    Opened,
    PositionRange,
    TakeCheckpoint,
)
from flinkish_spark.protocol.ids import CheckpointId

_NONE_MET = CheckpointId(0)
#: With AlignmentMode.AT_LEAST_ONCE several ids can be pending; of more than this the oldest is aborted.
MAX_PENDING = 50


class GateContractError(ValueError):
    """An event that cannot be: unknown or blocked channel, position that goes back. Nothing changed."""


@dataclass(frozen=True, slots=True)
class InputGate:
    """The channels of one input and the checkpoints that are being aligned on them.

    Made by :meth:`of` or :meth:`from_json`. One caller, which delivers elements in the order of its
    events; for a Kafka source a channel is a partition, and `latestOffset` is the caller.

    Parameters
    ----------
    settings
        See :class:`~flinkish_spark.protocol.gate_values.AlignmentSettings`.
    channels
        Open channels, and the position of the next element of each.
    newest
        The highest id met so far; 0 before the first.
    pending
        Checkpoints between their first and last barrier, by rising id. More than one only if they count.

    Examples
    --------
    >>> gate = InputGate.of({"a": 0, "b": 0}, AlignmentSettings(AlignmentMode.ALIGNED))
    >>> barrier = CheckpointBarrier(CheckpointId(1), triggered_at_ms=0)
    >>> gate, effects = gate.on_barrier("a", barrier, position=5, now_ms=10)
    >>> effects, gate.is_blocked("a"), gate.is_blocked("b")
    ((Blocked(channel='a'),), True, False)
    >>> gate, effects = gate.on_barrier("b", barrier, position=3, now_ms=12)
    >>> [type(effect).__name__ for effect in effects], dict(gate.channels)
    (['TakeCheckpoint', 'AlignmentComplete', 'Opened'], {'a': 6, 'b': 4})
    """

    settings: AlignmentSettings
    channels: Mapping[str, int]
    newest: CheckpointId = _NONE_MET
    pending: tuple[PendingAlignment, ...] = ()

    def __post_init__(self) -> None:
        ids = [alignment.checkpoint for alignment in self.pending]
        if ids != sorted(set(ids)) or any(checkpoint > self.newest for checkpoint in ids):
            raise ValueError(f"pending ids rise up to {self.newest}, got {[int(i) for i in ids]}")
        if any(not a.awaited or a.awaited - self.channels.keys() for a in self.pending):
            raise ValueError("a pending checkpoint awaits open channels, at least one")

    @classmethod
    def of(cls, channels: Mapping[str, int], settings: AlignmentSettings) -> InputGate:
        """Return a gate that has met no barrier; `channels` says where each one begins."""
        return cls(settings, dict(channels))

    # -- what it knows --------------------------------------------------------------------------
    def is_blocked(self, channel: str) -> bool:
        """Whether an open channel must not deliver now; raises GateContractError if it is not open."""
        self._check_open(channel)
        return any(alignment.blocks(channel) for alignment in self.pending)

    @property
    def blocked(self) -> frozenset[str]:
        """All channels that must not deliver now."""
        behind = [a.awaited for a in self.pending if a.phase is AlignmentPhase.BLOCKING]
        return frozenset().union(*(self.channels.keys() - awaited for awaited in behind))

    @property
    def turns_unaligned_at_ms(self) -> int | None:
        """When :meth:`on_time` has something to do; None while no timeout runs."""
        times = map(self._turning_time_ms, self.pending)
        return min((at_ms for at_ms in times if at_ms is not None), default=None)

    # -- what happens to it ---------------------------------------------------------------------
    def on_records(self, channel: str, position: int, now_ms: int, size_bytes: int = 0) -> Step:
        """Note that `channel` delivered everything in front of `position`, `size_bytes` of it just now.

        Raises GateContractError, as all events do, for a channel that is not open, a position that goes
        back, and elements from a blocked channel.
        """
        step = _EventStep(self, now_ms)
        step.deliver(channel, position, size_bytes)
        return step.finished()

    def on_barrier(self, channel: str, barrier: CheckpointBarrier, position: int, now_ms: int) -> Step:
        """Note that `channel` has come to a barrier, its element at `position`.

        Elements in front of it count as delivered. Afterwards the channel stands behind the barrier,
        whatever became of it: counted, ignored as late or as a repetition.
        """
        step = _EventStep(self, now_ms)
        step.pass_marker(channel, position)
        step.go_past(channel, barrier.checkpoint)
        if barrier.checkpoint in step.pending:
            step.reach(channel, barrier.checkpoint)
        elif barrier.checkpoint > self.newest:
            step.begin(channel, barrier)
        return step.finished()

    def on_announcement(self, channel: str, checkpoint: CheckpointId, position: int, now_ms: int) -> Step:
        """Note that a barrier was seen ahead: the element at `position`, which `channel` has not come to.

        Only an unaligned checkpoint that was already taken can use it: the channel state up to there is
        known, and the barrier itself is late when it comes. In any other case nothing happens, so
        announce again after TakeCheckpoint.
        """
        step = _EventStep(self, now_ms)
        step.check_position(channel, position)
        alignment = step.pending.get(checkpoint)
        if alignment is not None and alignment.collects(channel):
            step.pending[checkpoint] = alignment.recorded_to(channel, position).reached_by(channel)
        return step.finished()

    def on_cancel(self, channel: str, checkpoint: CheckpointId, position: int, now_ms: int) -> Step:
        """Note that `channel` has come to a cancellation of `checkpoint`, its element at `position`."""
        step = _EventStep(self, now_ms)
        step.pass_marker(channel, position)
        step.go_past(channel, checkpoint)
        step.give_up(checkpoint, AbortReason.CANCELLED_UPSTREAM)
        return step.finished()

    def on_abort(self, checkpoint: CheckpointId, now_ms: int) -> Step:
        """Note that this job's coordinator gave the checkpoint up.

        Its late barriers are ignored, as are those of lower ids that no channel has shown yet.
        """
        step = _EventStep(self, now_ms)
        step.give_up(checkpoint, AbortReason.COORDINATOR)
        return step.finished()

    def on_end(self, channel: str, now_ms: int) -> Step:
        """Note that `channel`, blocked or not, is at its end; later checkpoints do not expect it."""
        self._check_open(channel)
        step = _EventStep(self, now_ms)
        for checkpoint in [c for c, alignment in step.pending.items() if channel in alignment.awaited]:
            if self.settings.ended is EndedChannels.ABORT:
                step.abort(checkpoint, AbortReason.CHANNEL_ENDED)
            else:
                step.reach(channel, checkpoint)
        del step.channels[channel]
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

    def on_close(self, now_ms: int) -> Step:
        """Close the input: what is pending is aborted, and no channel is open any more."""
        step = _EventStep(self, now_ms)
        for checkpoint in list(step.pending):
            step.abort(checkpoint, AbortReason.CLOSED)
        step.channels = {}
        return step.finished()

    # -- stored form ----------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        """Return the state without the settings; its size grows with channels and pending checkpoints."""
        return {
            "newest": int(self.newest),
            "channels": dict(sorted(self.channels.items())),
            "pending": [alignment.to_json() for alignment in self.pending],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], settings: AlignmentSettings) -> InputGate:
        """Read what :meth:`to_json` returned; what is pending goes on in the phase it was in."""
        return cls(
            settings,
            dict(value["channels"]),
            CheckpointId(value["newest"]),
            tuple(PendingAlignment.from_json(alignment) for alignment in value["pending"]),
        )

    def _turning_time_ms(self, alignment: PendingAlignment) -> int | None:
        after_ms = self.settings.unaligned_after_ms(alignment.kind)
        if after_ms is None or alignment.phase is not AlignmentPhase.BLOCKING:
            return None
        return alignment.first_barrier_ms + after_ms

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

    def deliver(self, channel: str, position: int, size_bytes: int) -> None:
        self.check_position(channel, position)
        elements = PositionRange(self.channels[channel], position)
        if elements.size and self._gate.is_blocked(channel):
            raise GateContractError(
                f"'{channel}' is blocked at {elements.start}, got elements up to {position}"
            )
        self.channels[channel] = position
        for checkpoint, alignment in self.pending.items():
            self.pending[checkpoint] = alignment.delivered(channel, elements, size_bytes)

    def pass_marker(self, channel: str, position: int) -> None:
        """Go behind a barrier or cancellation, which is the element at `position`."""
        self.deliver(channel, position, 0)
        if self._gate.is_blocked(channel):
            raise GateContractError(f"'{channel}' is blocked at {position}, got what stands there")
        self.channels[channel] = position + 1

    def go_past(self, channel: str, checkpoint: CheckpointId) -> None:
        """Abort lower ids that await `channel`: ids rise along it, so theirs cannot come any more."""
        for lower in [c for c, a in self.pending.items() if c < checkpoint and channel in a.awaited]:
            self.abort(lower, AbortReason.SUBSUMED)

    def begin(self, channel: str, barrier: CheckpointBarrier) -> None:
        counts = self._gate.settings.mode is AlignmentMode.AT_LEAST_ONCE
        phase = AlignmentPhase.COUNTING if counts else AlignmentPhase.BLOCKING
        for older in [] if counts else list(self.pending):
            self.abort(older, AbortReason.SUBSUMED)
        self._newest = barrier.checkpoint
        awaited = frozenset(self.channels) - {channel}
        self.pending[barrier.checkpoint] = PendingAlignment.at_first_barrier(
            barrier, phase, awaited, self._now_ms
        )
        if len(self.pending) > MAX_PENDING:
            self.abort(min(self.pending), AbortReason.TOO_MANY_PENDING)

    def reach(self, channel: str, checkpoint: CheckpointId) -> None:
        self.pending[checkpoint] = self.pending[checkpoint].reached_by(channel)

    def give_up(self, checkpoint: CheckpointId, reason: AbortReason) -> None:
        """Abort an id that is pending, or was never met; one that is over has had its last word."""
        if checkpoint in self.pending or checkpoint > self._newest:
            self.abort(checkpoint, reason)

    def abort(self, checkpoint: CheckpointId, reason: AbortReason) -> None:
        self.pending.pop(checkpoint, None)
        self._newest = max(self._newest, checkpoint)
        self._effects.append(Aborted(checkpoint, reason))

    def finished(self) -> Step:
        """Complete what awaits no channel, then turn what has waited too long, then open and block."""
        for alignment in list(self.pending.values()):
            if not alignment.awaited:
                self._complete(alignment)
        for alignment in list(self.pending.values()):
            turning_ms = self._gate._turning_time_ms(alignment)
            if turning_ms is not None and self._now_ms >= turning_ms:
                self._turn_unaligned(alignment)
        after = InputGate(self._gate.settings, self.channels, self._newest, tuple(self.pending.values()))
        before, blocked = self._gate.blocked & after.channels.keys(), after.blocked
        self._effects += [Opened(channel) for channel in sorted(before - blocked)]
        self._effects += [Blocked(channel) for channel in sorted(blocked - before)]
        return after, tuple(self._effects)

    def _complete(self, alignment: PendingAlignment) -> None:
        del self.pending[alignment.checkpoint]
        if alignment.phase is not AlignmentPhase.COLLECTING:
            self._effects.append(TakeCheckpoint(alignment.checkpoint, alignment.kind))
        filled = {c: elements for c, elements in alignment.channel_state.items() if elements.size}
        stats = alignment.stats(self._now_ms)
        self._effects.append(AlignmentComplete(alignment.checkpoint, alignment.kind, filled, stats))

    def _turn_unaligned(self, alignment: PendingAlignment) -> None:
        turned = self.pending[alignment.checkpoint] = alignment.turned_unaligned(self.channels)
        in_flight = {c: elements.start for c, elements in turned.channel_state.items()}
        self._effects.append(TakeCheckpoint(alignment.checkpoint, alignment.kind, in_flight))
