"""What accumulators hold behind each micro-batch, so that a checkpoint can say it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from flinkish_spark.protocol.accumulators import Accumulated, together
from flinkish_spark.protocol.ids import BatchId
from flinkish_spark.protocol.records import StagedBatch


class AccumulatorKeeper:
    """Of one start of the query. Told by the epoch writer's thread, asked by the coordinator's.

    Parameters
    ----------
    stored
        What the checkpoint held that the job goes on from.
    kept
        The micro-batches that are kept behind it, in order.
    """

    def __init__(self, stored: Accumulated, kept: Iterable[StagedBatch] = ()) -> None:
        self._lock = threading.Lock()
        self._now = stored
        self._behind: dict[BatchId, Accumulated] = {}
        for staged in kept:
            self.on_staged(staged)

    def on_staged(self, staged: StagedBatch) -> None:
        """Take note of a micro-batch whose staged file is durable."""
        with self._lock:
            if staged.accumulators:
                self._now = together([self._now, staged.accumulators])
            self._behind[staged.batch] = self._now

    def behind(self, batch: BatchId) -> Accumulated:
        """Return what they held behind a micro-batch that is about to be decided; forget older ones."""
        with self._lock:
            self._behind = {known: held for known, held in self._behind.items() if known >= batch}
            return self._behind.get(batch, self._now)


#: Of a part of a job without the whole: it is told of nothing.
NO_ACCUMULATORS = AccumulatorKeeper({})
