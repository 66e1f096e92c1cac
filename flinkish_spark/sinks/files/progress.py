"""Which partitions wait and which are complete at a checkpoint. Pure but for a user's watermark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flinkish_spark.bridge import said
from flinkish_spark.errors import EnvironmentFault
from flinkish_spark.sinks.base import CompletedCheckpoint
from flinkish_spark.sinks.files.buckets import BucketAssigner
from flinkish_spark.sinks.files.ledger import OpenPartition, State
from flinkish_spark.sinks.files.partitions import AtFinal, PartitionCommit, ProcessTime
from flinkish_spark.sinks.files.rolling import Chunk


class WatermarkFailed(EnvironmentFault):
    """A user's watermark raised or is no time; it is asked again."""

    restartable = True


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """The partitions at one checkpoint.

    Parameters
    ----------
    waiting
        Those that hold data that was not announced yet, the complete ones among them, in order.
    due
        The complete ones.
    seen_ms
        The greatest partition time so far; None before there was any.
    """

    waiting: tuple[OpenPartition, ...]
    due: tuple[OpenPartition, ...]
    seen_ms: int | None


def advance(
    state: State,
    fresh: Sequence[Chunk],
    completed: CompletedCheckpoint,
    setting: PartitionCommit | None,
    assigners: Sequence[BucketAssigner],
) -> PartitionProgress:
    """Return the partitions at `completed`, from those before it and what it brought.

    Parameters
    ----------
    fresh
        Chunks committed since `state`.
    setting
        None for a sink that commits no partitions; those that wait are kept for a later start.

    Raises
    ------
    WatermarkFailed
        There is no telling which partitions are complete.
    """
    now_ms = completed.decided_at_ms
    if setting is None:
        return PartitionProgress(state.partitions, (), state.seen_ms)
    known = {(partition.root, partition.bucket): partition for partition in state.partitions}
    for chunk in fresh:
        if chunk.bucket:
            at = (chunk.root, chunk.bucket)
            known.setdefault(at, OpenPartition(*at, now_ms))
    waiting = tuple(known.values())
    if isinstance(setting.trigger, ProcessTime):
        seen_ms = state.seen_ms
        due = tuple(p for p in waiting if now_ms >= p.since_ms + setting.trigger.delay_ms)
    else:
        trigger = setting.trigger
        times = {p: trigger.time_ms(p.bucket, assigners) for p in waiting}
        seen = [t for t in (state.seen_ms, *times.values()) if t is not None]
        seen_ms = max(seen) if seen else None
        watermark = seen_ms if trigger.watermark is None else _asked(trigger.watermark, completed)
        ends = {p: trigger.due_ms(p.bucket, assigners) for p in waiting}
        due = tuple(
            p
            for p, due_ms in ends.items()
            if due_ms is not None and watermark is not None and watermark >= due_ms
        )
    if completed.purpose.is_final and setting.at_final is AtFinal.COMMIT:
        due = waiting
    return PartitionProgress(waiting, due, seen_ms)


def _asked(
    watermark: Callable[[CompletedCheckpoint], int | None], completed: CompletedCheckpoint
) -> int | None:
    try:
        found = watermark(completed)
    except Exception as error:
        raise WatermarkFailed(f"the watermark of PartitionTime: {said(error)}") from error
    if found is None or (isinstance(found, int) and not isinstance(found, bool)):
        return found
    raise WatermarkFailed(
        f"the watermark of PartitionTime is {found!r}", what_to_do="return milliseconds since 1970, or None"
    )
