"""Windows in one loop give what the operator with states and timers gives: rows, times, order, calls."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from flinkish_spark.core.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, Progress
from flinkish_spark.functions.keyed import AggregateFunction
from flinkish_spark.state.key_group import BasePolicy
from flinkish_spark.windows import (
    AggregateWindow,
    EventTimeSessionWindows,
    KeyAndWindowBounds,
    ProcessingTimeSessionWindows,
    ProcessWindow,
    ProcessWindowFunction,
    ReduceWindow,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WindowBounds,
    WindowSpec,
)
from tests.support.effort import examples
from tests.support.windows_looped_support import BOUNDS, FIELDS, LATE, both, rows_of, shape_of


class Noting(AggregateFunction):
    """Notes each call; its accumulators change in place, are None at times, and so are its results."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def create_accumulator(self) -> Any:
        self.calls.append("create")
        return []

    def add(self, order: Any, total: Any) -> Any:
        self.calls.append(("add", order.user, order.n, list(total)))
        total.append(order.n)
        return None if order.n == 3 else total

    def get_result(self, total: Any) -> Any:
        self.calls.append(("result", list(total)))
        return None if len(total) % 5 == 4 else sum(total)

    def merge(self, one: Any, other: Any) -> Any:
        self.calls.append(("merge", one, other))
        one.extend(other or [100])
        return one


class Pairs(Noting):
    """Accumulators are rows."""

    def create_accumulator(self) -> Any:
        self.calls.append("create")
        return 0, "-"

    def add(self, order: Any, total: Any) -> Any:
        self.calls.append(("add", order, total, type(total).__name__))
        return total[0] + order.n, total[1] + str(order.n)

    def get_result(self, total: Any) -> Any:
        self.calls.append(("result", total))
        return None if total[0] % 7 == 6 else total[0]

    def merge(self, one: Any, other: Any) -> Any:
        self.calls.append(("merge", one, other))
        return one[0] + other[0], one[1] + "/" + other[1]


def noted_reduce(calls: list[Any]) -> Any:
    def reduce(first: Any, second: Any) -> Any:
        calls.append((first.user, first.n, second.user, second.n))
        return first.user, first.n * 2 + second.n

    return reduce


class Called(ProcessWindowFunction):
    """Emits to the side output of late elements, too."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def process(self, key: Any, context: Any, elements: Any) -> Any:
        times = context.current_watermark(), context.current_processing_time()
        self.calls.append((key, context.window, times, str(elements)))
        if len(str(elements)) % 3 == 0:
            return None
        return self.rows(key, context, elements)

    def rows(self, key: Any, context: Any, elements: Any) -> Any:
        for number, element in enumerate(elements):
            context.output(LATE, (key, -number))
            yield key, getattr(element, "n", 0), context.window.start, context.window.end

    def clear(self, context: Any) -> None:
        self.calls.append(("clear", context.window))


ASSIGNERS: list[Any] = [
    EventTimeSessionWindows(7),
    EventTimeSessionWindows(1),
    TumblingEventTimeWindows(10, -3),
    SlidingEventTimeWindows(20, 7, 3),
    SlidingEventTimeWindows(21, 7),
    SlidingEventTimeWindows(3, 8, -2),
    ProcessingTimeSessionWindows(7),
    TumblingProcessingTimeWindows(10, 1),
    SlidingProcessingTimeWindows(20, 7),
]


def computed(number: int, calls: list[Any]) -> tuple[Any, str]:
    """Return a computation and the fields that come out."""
    return [
        (
            AggregateWindow(Noting(calls), "ARRAY<LONG>", KeyAndWindowBounds()),
            f"user STRING, total LONG, {BOUNDS}",
        ),
        (AggregateWindow(Pairs(calls), "total LONG, path STRING", WindowBounds()), f"total LONG, {BOUNDS}"),
        (ReduceWindow(noted_reduce(calls)), FIELDS),
        (ReduceWindow(noted_reduce(calls), WindowBounds()), f"{FIELDS}, {BOUNDS}"),
        (AggregateWindow(Noting(calls), "ARRAY<LONG>", Called(calls)), f"{FIELDS}, {BOUNDS}"),
        (ProcessWindow(Called(calls)), f"{FIELDS}, {BOUNDS}"),
    ][number]


def compare(assigner: Any, kind: int, seed: int) -> None:
    rng = random.Random(seed)
    spec = WindowSpec(assigner, late_output=LATE if rng.random() < 0.5 else None)
    policy = BasePolicy(0, 0.3, 2) if rng.random() < 0.5 else BasePolicy(1 << 60)
    calls: list[list[Any]] = [[], []]
    (one, output), (other, _) = (computed(kind, own) for own in calls)
    groups = both(spec, (one, other), output, policy)
    shape = shape_of(output, late=spec.late_output is not None)
    watermark_ms, now_ms = MIN_WATERMARK_MS if rng.random() < 0.3 else 0, 0
    users = "abcd"[: rng.randint(1, 4)]
    for number in range(12):
        spread = rng.choice([5, 20, 60])
        middle = max(watermark_ms, 0)

        def some(middle: int = middle, spread: int = spread) -> Any:
            count = rng.choice([0, 1, 8])
            found = [
                (rng.random() < 0.4, rng.choice(users), rng.randrange(9), middle + rng.randrange(-20, spread))
                for _ in range(count)
            ]
            # An element emitted before the watermark has a time that this watermark reaches.
            return rows_of(sorted(found, key=lambda one: not one[0]), shape)

        inputs = [some(), some()]
        before_ms, watermark_ms = watermark_ms, max(watermark_ms, middle + rng.choice([0, 3, 15, 80]) - 10)
        now_ms += rng.choice([0, 1, 6, 20])
        drained = rng.choice([watermark_ms + 30, MAX_WATERMARK_MS]) if number == 11 else MIN_WATERMARK_MS
        progress = Progress(before_ms, watermark_ms, now_ms, drained, now_ms - rng.choice([0, 1]))
        found = [group.step(inputs, progress) for group in groups]
        assert found[0] == found[1]
        assert calls[0] == calls[1]
        assert groups[0].due(assigner.clock) == groups[1].due(assigner.clock)
        if rng.random() < 0.15:
            # What states and timers have stored goes on in the loop, and the other way round.
            held = [(group.value, copy.deepcopy(group.bases)) for group in groups]
            for group, (value, bases) in zip(groups, reversed(held), strict=True):
                group.value, group.bases = value, bases
            assert groups[0].due(assigner.clock) == groups[1].due(assigner.clock)


@pytest.mark.parametrize("kind", range(6))
@pytest.mark.parametrize("assigner", ASSIGNERS, ids=lambda one: f"{type(one).__name__}")
def test_one_loop_gives_what_states_and_timers_give(assigner: Any, kind: int) -> None:
    for seed in range(examples(3)):
        compare(assigner, kind, seed)
