"""The steps of a recovery. Each may be cut off and repeated, and each changes the facts."""

from __future__ import annotations

from dataclasses import dataclass

from flinkish_spark.protocol.ids import BatchId, CheckpointId


@dataclass(frozen=True, slots=True)
class FinishRewind:
    """Carry out what the intent names, then close it."""


@dataclass(frozen=True, slots=True)
class RestoreLog:
    """Put offsets/N-1, offsets/N and commits/N of a decided checkpoint back from their copies."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Confirm:
    """Commit everything of a decided checkpoint again, then group offsets, then the receipt."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Replay:
    """Stage again, over the recorded ranges, what a decided checkpoint has lost of one sink."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep the state that a checkpoint needs from Spark's cleaning."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class RefuseOrder:
    """Close an order that cannot be carried out, and say so; nothing else is touched."""

    order_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AbortStaged:
    """Abort all that these staged files name, then delete the files."""

    attempts: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Rewind:
    """Write the intent to set Spark's logs back, so that `first_removed` is planned next.

    `target` is the checkpoint that stays the newest, None for the very beginning; `order_id` is
    empty unless a user ordered it.
    """

    first_removed: BatchId
    reason: str
    target: CheckpointId | None = None
    order_id: str = ""


@dataclass(frozen=True, slots=True)
class Reseed:
    """Export the state of `target`, then write the intent to begin Spark's checkpoint anew."""

    first_removed: BatchId
    target: CheckpointId | None


@dataclass(frozen=True, slots=True)
class TrimLog:
    """Remove offsets entries above the micro-batch that Spark runs next, the newest first."""

    entries: tuple[BatchId, ...]


@dataclass(frozen=True, slots=True)
class SweepLeftovers:
    """Abort every open transaction of this job that no kept staged file names."""


@dataclass(frozen=True, slots=True)
class StartSpark:
    """Recovery is done.

    Parameters
    ----------
    next_batch
        The micro-batch that Spark must run first; anything else is an error.
    kept
        Micro-batches staged and committed but not decided, in order; if there are any, a
        checkpoint is triggered at once, since their transactions' clocks kept running.
    """

    next_batch: BatchId
    kept: tuple[BatchId, ...]


Step = (
    FinishRewind
    | RestoreLog
    | Confirm
    | Replay
    | Pin
    | RefuseOrder
    | AbortStaged
    | Rewind
    | Reseed
    | TrimLog
    | SweepLeftovers
    | StartSpark
)
