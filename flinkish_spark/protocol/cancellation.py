"""Cancellation of a micro-batch that does not end: interrupt its tasks again, in the end kill their process.

Names, rules and defaults are those of Flink's `task.cancellation.interval` and `task.cancellation.timeout`.
Both times start when Spark has interrupted the tasks for the first time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.protocol.limits import MOST_MS, NoLimit, check_limit, check_whole, exceeds


class CancellationStep(enum.Enum):
    WAIT = "WAIT"
    #: Interrupt the running tasks once more, and log their stacks.
    INTERRUPT = "INTERRUPT"
    #: End the process in which they run.
    END_PROCESS = "END_PROCESS"


@dataclass(frozen=True, slots=True)
class CancellationRules:
    """Time limits for a cancelled micro-batch to end."""

    interval_ms: Milliseconds = 30_000
    timeout_ms: Milliseconds | NoLimit = 180_000

    def __post_init__(self) -> None:
        check_whole("interval_ms", self.interval_ms, least=1, most=MOST_MS)
        check_limit("timeout_ms", self.timeout_ms, least=1)

    def step(self, for_ms: int, interrupts: int) -> CancellationStep:
        """Return the next step, `for_ms` after the cancellation began and after `interrupts` interrupts."""
        if exceeds(for_ms, self.timeout_ms):
            return CancellationStep.END_PROCESS
        is_due = for_ms >= self.interval_ms * (interrupts + 1)
        return CancellationStep.INTERRUPT if is_due else CancellationStep.WAIT
