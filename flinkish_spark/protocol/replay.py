"""Replay: staging decided data again that can no longer be committed.

A decided checkpoint must be finished. If a sink's system has destroyed staged data, the lost committables are
a suffix: commits stop at the first lost one. The micro-batches of the epoch run again over their recorded
ranges, from the state of the checkpoint before, beside the job's own log and state. Only the lost data is
staged again; it replaces the lost committables and is committed under the same checkpoint id. The other
sinks, and the committed data of this one, stay as they are.

That is right only if the replay gives the same rows. So it is checked: every task of every sink acknowledged
the number of its rows and their digest when they were first staged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import BatchId, CheckpointId
from flinkish_spark.protocol.records import Committable, SinkAck, StagedBatch

#: Returns the Spark partition whose rows a committable holds; None if they are not those of one partition.
TaskOf = Callable[[Committable], int | None]


@dataclass(frozen=True, slots=True)
class CannotReplay:
    """Answer that the epoch cannot be staged again; `why` is for people."""

    why: str


@dataclass(frozen=True, slots=True)
class BatchReplay:
    #: The staged batch in the decision.
    original: StagedBatch
    #: Committables of the sink that are committed, and those that have to be staged again. Without lost ones
    #: the micro-batch runs only for the state after it.
    committed: tuple[Committable, ...]
    lost: tuple[Committable, ...]

    @property
    def batch(self) -> BatchId:
        return self.original.batch


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Micro-batches to replay for one sink, in order, up to the last one with lost data."""

    checkpoint: CheckpointId
    sink: str
    batches: tuple[BatchReplay, ...]

    @property
    def lost(self) -> tuple[Committable, ...]:
        return tuple(committable for batch in self.batches for committable in batch.lost)


def plan_replay(decision: Decision, sink: str, position: int, task_of: TaskOf) -> ReplayPlan | CannotReplay:
    planned: list[BatchReplay] = []
    seen = 0
    for batch in decision.batches:
        mine = tuple(c for c in batch.committables if c.sink == sink)
        committed = mine[: max(0, position - seen)]
        planned.append(BatchReplay(batch, committed, mine[len(committed) :]))
        seen += len(mine)
        if planned[-1].lost and any(task_of(one) is None for one in committed):
            return CannotReplay(
                f"a part of micro-batch {batch.batch} is committed, and its rows cannot be told apart"
            )
    while planned and not planned[-1].lost:
        planned.pop()
    if not planned:
        return CannotReplay(f"nothing of sink '{sink}' is lost")
    return ReplayPlan(decision.checkpoint, sink, tuple(planned))


@dataclass(frozen=True, slots=True)
class RestageResult:
    """Micro-batches after a replay, and its surplus committables."""

    #: All micro-batches of the decision; the lost committables are replaced.
    batches: tuple[StagedBatch, ...]
    #: Committables to abort, whose data is committed already: all tasks of a micro-batch stage again.
    surplus: tuple[Committable, ...]


def restage(
    decision: Decision, plan: ReplayPlan, staged: Mapping[BatchId, StagedBatch], task_of: TaskOf
) -> RestageResult | CannotReplay:
    """Replace the lost committables by those staged again, if their rows are the same."""
    kept: list[StagedBatch] = list(decision.batches)
    surplus: list[Committable] = []
    for position, part in enumerate(plan.batches):
        if not part.lost:
            continue
        again = staged[part.batch]
        if why := _why_other(plan.sink, part, again):
            return CannotReplay(why)
        done = {task_of(committable) for committable in part.committed}
        needed = [c for c in again.committables if task_of(c) is None or task_of(c) not in done]
        surplus += [c for c in again.committables if c not in needed]
        # At the position of the first lost one.
        before = part.original.committables.index(part.lost[0])
        committables = [c for c in part.original.committables if c not in part.lost]
        committables[before:before] = needed
        kept[position] = replace(part.original, committables=tuple(committables))
    return RestageResult(tuple(kept), tuple(surplus))


def _why_other(sink: str, part: BatchReplay, again: StagedBatch) -> str:
    """Return how the rows of a replayed micro-batch differ from the first ones; empty if they do not."""
    first, second = (
        next(ack for ack in staged.acks if ack.sink == sink) for staged in (part.original, again)
    )
    if (first.rows, first.digest) != (second.rows, second.digest):
        return (
            f"micro-batch {part.batch} gives sink '{sink}' {second.rows} rows now and gave it {first.rows} "
            "rows when it was decided, or other ones"
        )
    if part.committed and _summarize_tasks(first) != _summarize_tasks(second):
        return (
            f"a part of micro-batch {part.batch} is committed to sink '{sink}', and its rows are now in "
            "other tasks"
        )
    return ""


def _summarize_tasks(ack: SinkAck) -> dict[int, tuple[int, int]]:
    return {task.partition: (task.rows, task.digest) for task in ack.tasks if task.rows}
