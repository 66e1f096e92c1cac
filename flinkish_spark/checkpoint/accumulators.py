"""Tasks say things beside their rows: kept up to each micro-batch, so that a checkpoint can say them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from flinkish_spark.protocol.accumulators import AccumulatorValues, merge_accumulators
from flinkish_spark.protocol.bases import merge_bases
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import BatchId, Lineage
from flinkish_spark.protocol.records import StagedBatch


@dataclass(frozen=True, slots=True)
class Told:
    """All that has come together since the job began."""

    accumulators: AccumulatorValues = field(default_factory=dict)
    #: Files of big key groups in a bucket that the state may name.
    bases: tuple[str, ...] = ()

    @classmethod
    def at(cls, decision: Decision | None, log_began_in: Lineage) -> Told:
        if decision is None:
            return cls()
        return cls(decision.accumulators, decision.bases if decision.lineage >= log_began_in else ())

    def after(self, staged: StagedBatch) -> Told:
        if not staged.accumulators and not staged.bases:
            return self
        accumulators = merge_accumulators([self.accumulators, staged.accumulators])
        return Told(accumulators, merge_bases(self.bases, staged.bases))


class AccumulatorKeeper:
    """Keeps it for one start of the query; told by the epoch writer's thread, asked by the coordinator's."""

    def __init__(self, stored: Told, kept: Iterable[StagedBatch] = ()) -> None:
        self._lock = threading.Lock()
        self._now = stored
        self._behind: dict[BatchId, Told] = {}
        for staged in kept:
            self.on_staged(staged)

    def on_staged(self, staged: StagedBatch) -> None:
        with self._lock:
            self._now = self._now.after(staged)
            self._behind[staged.batch] = self._now

    def behind(self, batch: BatchId) -> Told:
        with self._lock:
            self._behind = {known: held for known, held in self._behind.items() if known >= batch}
            return self._behind.get(batch, self._now)


#: Of a part of a job without the whole: it is told of nothing.
NO_ACCUMULATORS = AccumulatorKeeper(Told())
