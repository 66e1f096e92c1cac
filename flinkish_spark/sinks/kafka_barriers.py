"""Barrier records as committables of a Kafka sink.

A barrier record is staged, decided, committed, aborted and swept like data, with one difference: it
belongs to one checkpoint for ever. When that checkpoint is aborted its committables pass to the next
one; the data becomes visible with that, the barrier record must never. Whoever commits tells the two
apart by what the committable itself says, so every process, and every repetition, decides alike.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flinkish_spark.errors import CorruptObjectError
from flinkish_spark.kafka import KafkaCommittable, TransactionClient
from flinkish_spark.protocol.ids import CheckpointId, TransactionalId
from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome
from flinkish_spark.protocol.records import Committable, TaskAck

if TYPE_CHECKING:
    from flinkish_spark.kafka.barrier_writer import BarrierWriter
    from flinkish_spark.sinks.base import SinkContext, StageRequest

LOG = logging.getLogger(__name__)
#: The task number in the transactional id of barrier records; Spark numbers no partition so high.
BARRIER_TASK = 999_999_999
_BARRIER = "barrier_of"


@dataclass(frozen=True, slots=True)
class KafkaStaged:
    """A committable of a Kafka sink: the records of a task, or the barrier records of a checkpoint.

    Parameters
    ----------
    handle
        Of the transaction.
    barrier_of
        The checkpoint; None for data.
    """

    handle: KafkaCommittable
    barrier_of: CheckpointId | None = None

    def to_payload(self) -> dict[str, Any]:
        """Return the stored form; data is stored as its handle alone."""
        more = {} if self.barrier_of is None else {_BARRIER: int(self.barrier_of)}
        return {**self.handle.to_json(), **more}

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> KafkaStaged:
        """Read the stored form.

        Raises
        ------
        CorruptObjectError
            A field is missing, unknown or out of range.
        """
        fields = dict(payload)
        barrier_of = fields.pop(_BARRIER, None)
        try:
            checkpoint = None if barrier_of is None else CheckpointId(barrier_of)
        except ValueError as wrong:
            raise CorruptObjectError("a stored Kafka committable cannot be read", why=str(wrong)) from wrong
        return cls(KafkaCommittable.from_json(fields), checkpoint)

    def belongs_to(self, checkpoint: CheckpointId) -> bool:
        """Whether committing `checkpoint` makes this visible."""
        return self.barrier_of in (None, checkpoint)


def checkpoint_in(tasks: Iterable[TaskAck]) -> CheckpointId | None:
    """Return the checkpoint whose barrier the tasks of a micro-batch saw, the newest if several."""
    return max((barrier.checkpoint for task in tasks for barrier in task.barriers), default=None)


def stage_barrier(
    writer: BarrierWriter, checkpoint: CheckpointId, request: StageRequest, context: SinkContext
) -> KafkaStaged:
    """Stage the barrier records behind the data of a micro-batch, all of which is flushed."""
    # The block is this micro-batch's alone, so no other transaction can have this id.
    name = TransactionalId(context.job, context.owner_epoch, request.block, BARRIER_TASK, 0)
    return KafkaStaged(writer.stage(checkpoint, request.lineage, str(name)), checkpoint)


def committed(client: TransactionClient, checkpoint: CheckpointId, staged: KafkaStaged) -> CommitAnswer:
    """Commit what belongs to a decided checkpoint, abort the barrier records of another one."""
    if not staged.belongs_to(checkpoint):
        return client.abort(staged.handle)
    answer = client.commit(staged.handle)
    if staged.barrier_of is None or answer.outcome is not Outcome.LOST:
        return answer
    # No record of anybody is missing: readers that follow this job's checkpoints wait for the next.
    LOG.warning("the barrier records of checkpoint %s are lost, no data is: %s", checkpoint, answer.detail)
    return CommitAnswer(Outcome.ALREADY_COMMITTED, f"barrier records only, given up: {answer.detail}")


def bound(staged: Sequence[KafkaStaged]) -> dict[int, KafkaStaged]:
    """Return by position what must be alive for a decision: data, and the newest barrier records."""
    newest = max((one.barrier_of for one in staged if one.barrier_of is not None), default=None)
    return {i: one for i, one in enumerate(staged) if one.barrier_of in (None, newest)}


def staged_in(committables: Sequence[Committable]) -> list[KafkaStaged]:
    """Return what the committables of one sink stand for."""
    return [KafkaStaged.of(committable.payload) for committable in committables]
