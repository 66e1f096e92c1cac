"""The trigger of most windows only waits; the operator does not ask it again for each element.

So a trigger that is the same in all but its class must give the same: results, order, timers, state.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from flinkish_spark.core.elements import MAX_WATERMARK_MS
from flinkish_spark.operators.windowing import window_operator
from flinkish_spark.windows import (
    AggregateWindow,
    EventTimeSessionWindows,
    EventTimeTrigger,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    WindowSpec,
)
from tests.support.effort import seeds
from tests.support.operator_harness import OperatorHarness, Snapshot
from tests.support.windows_support import INPUT, Sum


class AskedEachTime(EventTimeTrigger):
    """Fires as its base does, but is not known to."""


def harness(spec: WindowSpec, restore: Snapshot | None, other: OperatorHarness | None) -> OperatorHarness:
    operator = window_operator(spec, AggregateWindow(Sum(), "total LONG, count LONG"), INPUT)
    bases = None if other is None else other.bases
    return OperatorHarness(
        operator, key=lambda e: e[0], key_type="STRING", max_parallelism=2, restore=restore, bases=bases
    )


def known(one: OperatorHarness) -> dict[Any, Any]:
    """Return when each window is due, and what is in it."""
    return {slot: (due_ms, held) for slot, (due_ms, _, held) in one.entries("window/open").items()}


@pytest.mark.parametrize("lateness_ms", [0, 7])
@pytest.mark.parametrize(
    "assigner",
    [TumblingEventTimeWindows(10), SlidingEventTimeWindows(30, 10), EventTimeSessionWindows(6)],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.parametrize("seed", seeds(6))
def test_a_trigger_that_only_waits_is_as_one_that_is_asked(
    assigner: Any, lateness_ms: int, seed: int
) -> None:
    rng = random.Random(seed)
    specs = [
        WindowSpec(assigner, trigger=trigger, allowed_lateness_ms=lateness_ms)
        for trigger in (EventTimeTrigger(), AskedEachTime())
    ]
    both = [harness(spec, None, None) for spec in specs]
    watermark_ms = 0
    for _ in range(20):
        elements = [
            ((rng.choice("abc"), rng.randrange(9)), max(0, watermark_ms + rng.randrange(-20, 60)))
            for _ in range(rng.randrange(8))
        ]
        watermark_ms += rng.randrange(12)
        for one in both:
            one.push_all(elements)
            one.watermark(watermark_ms)
        assert both[0].take() == both[1].take()
        assert known(both[0]) == known(both[1])
        # One that is asked registers the end of a window's time at once, and the other with its end.
        assert both[0].timer_count() <= both[1].timer_count()
        if rng.random() < 0.3:
            both = [harness(spec, one.snapshot(), one) for spec, one in zip(specs, both, strict=True)]
    for one in both:
        one.watermark(MAX_WATERMARK_MS)
    assert both[0].take() == both[1].take()
    assert both[0].timer_count() == both[1].timer_count() == 0
