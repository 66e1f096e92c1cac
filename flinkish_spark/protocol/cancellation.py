"""What is done while a micro-batch that is to end does not: interrupt it again, in the end kill its process.

Names, rules and defaults are those of Flink's `task.cancellation.interval` and `task.cancellation.timeout`.
Spark has interrupted the tasks once when the time begins that is counted here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.protocol.limits import MOST_MS, Unlimited, checked_limit, checked_whole, exceeds


class CancellationStep(enum.Enum):
    WAIT = "WAIT"
    #: Interrupt what still runs once more, and say where it stands.
    INTERRUPT = "INTERRUPT"
    #: End the process in which it runs.
    END_PROCESS = "END_PROCESS"


@dataclass(frozen=True, slots=True)
class CancellationRules:
    """How long a micro-batch that is cancelled may take to end."""

    interval_ms: Milliseconds = 30_000
    timeout_ms: Milliseconds | Unlimited = 180_000

    def __post_init__(self) -> None:
        checked_whole("interval_ms", self.interval_ms, least=1, most=MOST_MS)
        checked_limit("timeout_ms", self.timeout_ms, least=1)

    def step(self, for_ms: int, interrupts: int) -> CancellationStep:
        """Return what to do now, so long after it was told to end, and after so many interrupts."""
        if exceeds(for_ms, self.timeout_ms):
            return CancellationStep.END_PROCESS
        is_due = for_ms >= self.interval_ms * (interrupts + 1)
        return CancellationStep.INTERRUPT if is_due else CancellationStep.WAIT
