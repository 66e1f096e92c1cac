"""Accumulators and new base files that tasks report, summed up to each micro-batch for its checkpoint."""

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
class AccumulatorTotals:
    """Accumulators and base files since the job's first start."""

    accumulators: AccumulatorValues = field(default_factory=dict)
    #: Files of big key groups in a bucket that the state may name.
    bases: tuple[str, ...] = ()

    @classmethod
    def from_decision(cls, decision: Decision | None, log_began_in: Lineage) -> AccumulatorTotals:
        if decision is None:
            return cls()
        return cls(decision.accumulators, decision.bases if decision.lineage >= log_began_in else ())

    def add(self, staged: StagedBatch) -> AccumulatorTotals:
        if not staged.accumulators and not staged.bases:
            return self
        accumulators = merge_accumulators([self.accumulators, staged.accumulators])
        return AccumulatorTotals(accumulators, merge_bases(self.bases, staged.bases))


class AccumulatorKeeper:
    """Keeps the totals for one start of the query; one thread adds, the coordinator's reads."""

    def __init__(self, stored: AccumulatorTotals, kept: Iterable[StagedBatch] = ()) -> None:
        self._lock = threading.Lock()
        self._now = stored
        self._after_batch: dict[BatchId, AccumulatorTotals] = {}
        for staged in kept:
            self.on_staged(staged)

    def on_staged(self, staged: StagedBatch) -> None:
        with self._lock:
            self._now = self._now.add(staged)
            self._after_batch[staged.batch] = self._now

    def find_totals(self, batch: BatchId) -> AccumulatorTotals:
        with self._lock:
            self._after_batch = {known: one for known, one in self._after_batch.items() if known >= batch}
            return self._after_batch.get(batch, self._now)
