"""What goes into an input gate and what comes out: settings, barriers, effects. See `gate.py`.

All of it is frozen. Positions count elements of one channel; in Kafka they are offsets, so a
difference of two positions is an upper bound of the records between them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.limits import MOST_MS, checked_choice, checked_whole


class AlignmentMode(enum.Enum):
    """When a checkpoint is taken, and what waits for it."""

    #: Exactly once: a channel is blocked from its barrier to the last one; then the checkpoint is taken.
    ALIGNED = "ALIGNED"
    #: Nothing waits; the checkpoint is taken at the last barrier and holds records from behind earlier ones.
    AT_LEAST_ONCE = "AT_LEAST_ONCE"
    #: Exactly once: taken at the first barrier; what other channels deliver up to theirs is channel state.
    UNALIGNED = "UNALIGNED"
    #: Begins as ALIGNED and goes on as UNALIGNED if the last barrier takes too long.
    ALIGNED_WITH_TIMEOUT = "ALIGNED_WITH_TIMEOUT"


class EndedChannels(enum.Enum):
    """What the end of a channel means to a checkpoint that still awaits its barrier."""

    COUNT_AS_BARRIER = "COUNT_AS_BARRIER"
    ABORT = "ABORT"


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
    """How a gate aligns. Configuration, not state: it is not in the gate's JSON and may change at a restart.

    Parameters
    ----------
    mode
        See :class:`AlignmentMode`.
    ended
        See :class:`EndedChannels`.
    alignment_timeout_ms
        Given with ALIGNED_WITH_TIMEOUT and only there: milliseconds from the first barrier on, from 0 to
        365 days.

    Raises
    ------
    ValueError
        A value is none of these.

    Examples
    --------
    >>> AlignmentSettings(AlignmentMode.ALIGNED_WITH_TIMEOUT, alignment_timeout_ms=500).unaligned_after_ms(
    ...     BarrierKind.CHECKPOINT)
    500
    """

    mode: AlignmentMode
    ended: EndedChannels = EndedChannels.COUNT_AS_BARRIER
    alignment_timeout_ms: int | None = None

    def __post_init__(self) -> None:
        checked_choice("mode", self.mode, AlignmentMode)
        checked_choice("ended", self.ended, EndedChannels)
        timed = self.mode is AlignmentMode.ALIGNED_WITH_TIMEOUT
        if timed is not (self.alignment_timeout_ms is not None):
            raise ValueError(
                "alignment_timeout_ms belongs to ALIGNED_WITH_TIMEOUT, and that mode needs it; "
                f"got {self.alignment_timeout_ms!r} with {self.mode.value}"
            )
        if self.alignment_timeout_ms is not None:
            checked_whole("alignment_timeout_ms", self.alignment_timeout_ms, least=0, most=MOST_MS)

    def unaligned_after_ms(self, kind: BarrierKind) -> int | None:
        """Return how long after its first barrier a checkpoint turns unaligned; None if it never does."""
        if kind is BarrierKind.SAVEPOINT:
            return None
        return 0 if self.mode is AlignmentMode.UNALIGNED else self.alignment_timeout_ms


@dataclass(frozen=True, slots=True)
class CheckpointBarrier:
    """A barrier as the upstream job wrote it.

    Parameters
    ----------
    checkpoint
        The upstream checkpoint. Ids rise along a channel and may skip.
    triggered_at_ms
        When that checkpoint was triggered, wall clock; the start delay is counted from here.
    kind
        See :class:`BarrierKind`.
    """

    checkpoint: CheckpointId
    triggered_at_ms: int
    kind: BarrierKind = BarrierKind.CHECKPOINT


@dataclass(frozen=True, slots=True, order=True)
class PositionRange:
    """The elements of one channel from `start` to `end`, without `end`."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"a range runs forward from 0 or above, got {self.start} to {self.end}")

    @property
    def size(self) -> int:
        """How many positions."""
        return self.end - self.start


class AbortReason(enum.Enum):
    """Why a gate gave up a checkpoint."""

    #: The upstream job cancelled it: a cancellation barrier came through a channel.
    CANCELLED_UPSTREAM = "CANCELLED_UPSTREAM"
    #: A newer barrier came first, or a channel went past it, so its last barrier can never come.
    SUBSUMED = "SUBSUMED"
    #: A channel ended before its barrier, and EndedChannels.ABORT is set.
    CHANNEL_ENDED = "CHANNEL_ENDED"
    #: This job's own coordinator gave it up.
    COORDINATOR = "COORDINATOR"
    #: Too many are pending at once; the oldest goes.
    TOO_MANY_PENDING = "TOO_MANY_PENDING"
    #: The gate was closed.
    CLOSED = "CLOSED"


@dataclass(frozen=True, slots=True)
class AlignmentStats:
    """What one alignment cost. Sizes are those that the caller reported; 0 if it does not know them.

    Parameters
    ----------
    start_delay_ms
        From the upstream trigger to the first barrier.
    alignment_duration_ms
        From the first barrier to the last; 0 with a single channel.
    processed_elements, processed_bytes
        Delivered on all channels in that time.
    persisted_elements, persisted_bytes
        Of these, channel state. Announced elements are counted before they are delivered, their bytes never.
    """

    start_delay_ms: int
    alignment_duration_ms: int
    processed_elements: int = 0
    processed_bytes: int = 0
    persisted_elements: int = 0
    persisted_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TakeCheckpoint:
    """Effect: draw the checkpoint now, between the elements delivered so far and the next ones.

    Parameters
    ----------
    in_flight
        By channel the position at which its channel state begins; empty if the checkpoint is aligned.
        Where it ends is in the :class:`AlignmentComplete` that follows, unless an :class:`Aborted` does.
    """

    checkpoint: CheckpointId
    kind: BarrierKind
    in_flight: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AlignmentComplete:
    """Effect: every channel has shown its barrier; nothing about this checkpoint follows.

    Parameters
    ----------
    channel_state
        What a restore replays before anything else, by channel: exactly the elements in front of the
        barrier that the checkpoint itself does not hold. Empty ranges are left out.
    """

    checkpoint: CheckpointId
    kind: BarrierKind
    channel_state: Mapping[str, PositionRange]
    stats: AlignmentStats


@dataclass(frozen=True, slots=True)
class Aborted:
    """Effect: the checkpoint will not complete; if it was taken already, discard it. Nothing follows."""

    checkpoint: CheckpointId
    reason: AbortReason


@dataclass(frozen=True, slots=True)
class Blocked:
    """Effect: deliver nothing more from this channel."""

    channel: str


@dataclass(frozen=True, slots=True)
class Opened:
    """Effect: this channel may deliver again."""

    channel: str


Effect = TakeCheckpoint | AlignmentComplete | Aborted | Blocked | Opened
