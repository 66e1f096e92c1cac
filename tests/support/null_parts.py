"""Parts of a job that do nothing, for tests of the other parts."""

from __future__ import annotations

from typing import Any

from flinkish_spark.checkpoint.accumulators import AccumulatorKeeper, AccumulatorTotals
from flinkish_spark.protocol.accumulators import AccumulatorValues
from flinkish_spark.protocol.ids import BatchId, CheckpointPurpose
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.protocol.user_metrics import UserMetrics
from flinkish_spark.protocol.watermarks import EventTime


class NoTime:
    """A :class:`~flinkish_spark.checkpoint.event_time.TimeKeeper` that keeps no time."""

    can_end = has_ended = is_due_at_once = False

    def add_times(self, staged: StagedBatch) -> StagedBatch:
        return staged

    def on_staged(self, staged: StagedBatch) -> None: ...

    def wake(self) -> None: ...

    def on_offer(self, purpose: CheckpointPurpose) -> None: ...

    def find_event_time(self, batch: BatchId) -> EventTime | None:
        return None


NO_TIME: Any = NoTime()


class NoTallies:
    """A :class:`~flinkish_spark.bridge.accumulators.TaskTallies` without Spark."""

    def begin(self) -> None: ...

    def collect(self) -> AccumulatorValues:
        return {}

    def bases(self) -> tuple[str, ...]:
        return ()

    def metrics(self) -> UserMetrics:
        return {}


NO_TALLIES: Any = NoTallies()
NO_ACCUMULATORS = AccumulatorKeeper(AccumulatorTotals())
