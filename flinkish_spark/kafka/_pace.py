"""How often something is tried again, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from flinkish_spark.clock import Clock

_FIRST_PAUSE_MS = 20
_LONGEST_PAUSE_MS = 500
#: A broker that just started may not know its topics or the end of its logs yet: so many answers in a
#: row, so far apart, are believed.
_LOSSES_BELIEVED, _LOSS_PAUSE_MS = 4, 500

_T = TypeVar("_T")


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


def seen_to_stay(look: Callable[[], _T], is_missing: Callable[[_T], bool], clock: Clock) -> _T:
    """Return what `look` sees; if something is missing, only after it was missing again and again."""
    for _ in range(_LOSSES_BELIEVED - 1):
        seen = look()
        if not is_missing(seen):
            return seen
        clock.sleep_ms(_LOSS_PAUSE_MS)
    return look()
