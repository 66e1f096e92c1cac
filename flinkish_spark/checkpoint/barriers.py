"""Counting the barriers of checkpoints in flight, and the checkpoints that chained sources wait for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from flinkish_spark.checkpoint.control import ControlFile
from flinkish_spark.core.clock import Clock
from flinkish_spark.core.config import CheckpointingMode
from flinkish_spark.protocol.alignment import ExpectedChannels, find_misalignment, find_reached_sinks
from flinkish_spark.protocol.checkpoint import (
    CheckpointState,
    Participant,
    ParticipantKind,
    PendingCheckpoint,
)
from flinkish_spark.protocol.coordination import Abort, Coordination
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose
from flinkish_spark.protocol.records import StagedBatch


class BarrierCounter:
    """Counts the barriers of the checkpoints in flight; owned by the coordinator's thread."""

    def __init__(
        self, channels: Mapping[str, ExpectedChannels], operators: Iterable[str], mode: CheckpointingMode
    ) -> None:
        self._channels, self._mode = channels, mode
        self._operators = tuple(Participant(ParticipantKind.OPERATOR, uid) for uid in operators)
        self._reached: dict[CheckpointId, set[str]] = {}

    @property
    def participants(self) -> tuple[Participant, ...]:
        return (*(Participant(ParticipantKind.SINK, uid) for uid in self._channels), *self._operators)

    def count(self, checkpoint: CheckpointId, staged: StagedBatch) -> tuple[tuple[Participant, ...], str]:
        """Return the participants that acknowledge `checkpoint`, or none and which barrier is wrong."""
        why = find_misalignment(checkpoint, staged.acks, self._channels)
        if why and self._mode is CheckpointingMode.EXACTLY_ONCE:
            return (), why
        reached = find_reached_sinks(checkpoint, staged.acks, self._channels) if why else set(self._channels)
        seen = self._reached.setdefault(checkpoint, set())
        seen |= reached
        sinks = tuple(Participant(ParticipantKind.SINK, uid) for uid in sorted(reached))
        return ((*sinks, *self._operators) if seen == set(self._channels) else sinks), ""

    def forget(self, up_to: CheckpointId) -> None:
        """Forget the checkpoints up to one that has ended; late barriers are not counted."""
        self._reached = {one: seen for one, seen in self._reached.items() if one > up_to}


#: Shortest time between two checkpoints that are requested at one cut, or after a failure.
_LEAST_PAUSE_MS = 1_000


class SourceWaits:
    """Decides when to request a checkpoint for a chained source that stands still at a cut.

    After an aborted checkpoint, or a request without result, it waits for one checkpoint interval: retries do
    not come faster than the timer.
    """

    def __init__(self, control: ControlFile, state: Coordination, clock: Clock, interval_ms: int) -> None:
        self._control, self._state, self._clock = control, state, clock
        self._pause_ms = max(interval_ms, _LEAST_PAUSE_MS)
        #: When a checkpoint was last requested, and at which upstream checkpoint the source stood.
        self._asked_at_ms: int | None = None
        self._cut: int | None = None
        self._aborted_at_ms: int | None = None

    def must_ask(self) -> bool:
        """Return whether to request a checkpoint now; True counts as a request."""
        state = self._state
        if state.barrier_on_its_way or state.queue.holds(CheckpointPurpose.FOLLOW_UP):
            return False
        status = self._control.source_status()
        if status is None or not status.wants_checkpoint:
            return False
        now_ms = self._clock.monotonic_ms()
        for at_ms in (self._asked_at_ms if self._cut == status.cut else None, self._aborted_at_ms):
            if at_ms is not None and now_ms - at_ms < self._pause_ms:
                return False
        self._asked_at_ms, self._cut = now_ms, status.cut
        return True

    def describe_wait(self, pending: PendingCheckpoint) -> str:
        """Describe what a checkpoint waits for; called by any thread."""
        status = self._control.source_status()
        if pending.state is not CheckpointState.TRIGGERED or status is None:
            return pending.awaited
        is_drawn = status.drawn >= int(pending.checkpoint)
        return pending.awaited if is_drawn else f"{pending.awaited}; the source {status.text}"

    def on_aborted(self, effect: Abort) -> Abort:
        """Withdraw an aborted checkpoint, which would use up a cut; return the effect with a fuller text."""
        self._aborted_at_ms = self._clock.monotonic_ms()
        was_offered, status = self._control.withdraw(effect.checkpoint), self._control.source_status()
        if effect.reason is not CheckpointFailureReason.EXPIRED or not was_offered:
            return effect
        if status is None or status.drawn >= int(effect.checkpoint):
            # Its barrier is in a micro-batch: the effect says already what is missing.
            return effect
        waited = status.text
        if status.wants_checkpoint:
            # The source wrote this status before it saw the offer.
            waited += ", and was not asked for input since it is on offer: a micro-batch has not ended"
        return replace(effect, text=f"{effect.text}; the source {waited}")
