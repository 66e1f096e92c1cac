"""What a chained source sees when it plans: where it is, what lies ahead, and what is on offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flinkish_spark.kafka.answers import Place
from flinkish_spark.kafka.barrier_scan import Scanned, SeenBarrier
from flinkish_spark.protocol.gate import InputGate
from flinkish_spark.protocol.gate_values import BarrierKind
from flinkish_spark.protocol.ids import CheckpointId


@dataclass(frozen=True, slots=True)
class Offer:
    """The newest checkpoint that this job's coordinator offers."""

    checkpoint: CheckpointId
    kind: BarrierKind = BarrierKind.CHECKPOINT


@dataclass(frozen=True, slots=True)
class View:
    """What a plan is made from, beside the state.

    Parameters
    ----------
    begin
        Where each partition is; with partitions that were added at their first offset.
    ahead
        What lies ahead of that.
    drawn
        This job's newest checkpoint whose barrier is in a micro-batch.
    offer
        The newest one that is offered.
    most
        Offsets that a micro-batch reads at most; None for no limit.
    held
        Partitions that must not be read now, for the caller's own reasons.
    now_ms
        Wall clock.
    """

    begin: Mapping[Place, int]
    ahead: Mapping[Place, Scanned]
    drawn: CheckpointId
    offer: Offer
    now_ms: int
    most: int | None = None
    held: frozenset[Place] = frozenset()

    @property
    def is_offered(self) -> bool:
        """Whether a checkpoint waits to be drawn."""
        return self.offer.checkpoint > self.drawn

    def partitions(self, topic: str) -> int:
        """Return how many partitions of a topic are known."""
        return sum(name == topic for name, _ in self.begin)


def next_barrier(gate: InputGate, ahead: Scanned) -> SeenBarrier | None:
    """Return the next barrier that means something to the gate; late ones are passed over."""
    pending = {alignment.checkpoint for alignment in gate.pending}
    wanted = (s for s in ahead.barriers if s.mark.checkpoint in pending or s.mark.checkpoint > gate.newest)
    return next(wanted, None)


def covered(checkpoint: CheckpointId, topic: str, view: View) -> int:
    """Return how many partitions of a topic have a barrier of the checkpoint, 0 if that is not known."""
    barriers = (s.mark for (name, _), ahead in view.ahead.items() if name == topic for s in ahead.barriers)
    return max((mark.partitions for mark in barriers if mark.checkpoint == checkpoint), default=0)
