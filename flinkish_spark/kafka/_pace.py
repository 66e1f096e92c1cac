"""How often something is tried again, and for how long."""

from __future__ import annotations

from collections.abc import Iterator

from flinkish_spark.clock import Clock

_FIRST_PAUSE_MS = 20
_LONGEST_PAUSE_MS = 500


def pauses_ms(budget_ms: int, clock: Clock) -> Iterator[int]:
    """Yield the milliseconds left, once at once and then after growing pauses, until none are."""
    end_ms, pause_ms = clock.monotonic_ms() + budget_ms, _FIRST_PAUSE_MS
    yield budget_ms
    while (left_ms := end_ms - clock.monotonic_ms()) > 0:
        clock.sleep_ms(min(pause_ms, left_ms))
        pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)
        left_ms = end_ms - clock.monotonic_ms()
        if left_ms > 0:
            yield left_ms
