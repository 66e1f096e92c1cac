"""Folds of windows over columns give what the element-wise window operator gives, whatever comes."""

from __future__ import annotations

import itertools
import random

import pytest

from flinkish_spark.core.elements import LATE_RECORDS_DROPPED, MAX_WATERMARK_MS, TimeDomain
from flinkish_spark.functions.aggregates import AggregateColumn, Fold
from flinkish_spark.functions.keyed import AggregateFunction
from flinkish_spark.operators.window_contents import OPEN
from flinkish_spark.operators.windowing import window_operator
from flinkish_spark.windows import (
    AggregateWindow,
    EventTimeSessionWindows,
    KeyAndWindowBounds,
    ProcessingTimeSessionWindows,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WindowSpec,
)
from tests.support.effort import examples, sampled
from tests.support.operator_harness import FoldHarness, OperatorHarness
from tests.support.windows_support import INPUT, LATE, TINY

KINDS = {
    "tumbling": lambda: TumblingEventTimeWindows(10),
    "tumbling with offset": lambda: TumblingEventTimeWindows(10, -3),
    "sliding": lambda: SlidingEventTimeWindows(12, 4),
    "sliding, not a multiple": lambda: SlidingEventTimeWindows(12, 5, 2),
    "sliding with holes": lambda: SlidingEventTimeWindows(4, 6, 1),
    "session": lambda: EventTimeSessionWindows(5),
    "tumbling by processing time": lambda: TumblingProcessingTimeWindows(10, 3),
    "sliding by processing time": lambda: SlidingProcessingTimeWindows(12, 5),
    "session by processing time": lambda: ProcessingTimeSessionWindows(5),
}
FOLDS = (
    AggregateColumn("total", Fold.SUM, "n"),
    AggregateColumn("rows", Fold.COUNT),
    AggregateColumn("least", Fold.MIN, "n"),
    AggregateColumn("greatest", Fold.MAX, "n"),
)


class Same(AggregateFunction):
    """The same folds, element by element."""

    def create_accumulator(self):
        return None, 0, None, None

    def add(self, element, acc):
        n = element[1]
        return self.merge(acc, (n, 1, n, n))

    def get_result(self, acc):
        return acc

    def merge(self, one, other):
        def both(fold, at):
            there = [acc[at] for acc in (one, other) if acc[at] is not None]
            return fold(there) if there else None

        return both(sum, 0), one[1] + other[1], both(min, 2), both(max, 3)


class Elementwise:
    """The window operator, of whose firings the last of each window and phase stays."""

    def __init__(self, spec, is_session):
        computation = AggregateWindow(
            Same(), "total LONG, rows LONG, least LONG, greatest LONG", KeyAndWindowBounds()
        )
        self.harness = OperatorHarness(
            window_operator(spec, computation, INPUT),
            key=lambda e: e[0],
            key_type="STRING",
            max_parallelism=2,
        )
        self._is_session = is_session
        self._by_event_time = spec.assigner.clock is TimeDomain.EVENT_TIME
        self.rows, self.late, self.dropped = [], [], 0

    def step(self, now_ms, before, watermark_ms, behind):
        self.harness.processing_time(now_ms)
        self._taken()
        if not self._by_event_time:
            return self._push([*before, *behind])
        self._push(before)
        self.harness.watermark(watermark_ms)
        self._taken()
        return self._push(behind)

    def _push(self, elements):
        if self._is_session:
            # Over columns sessions of a micro-batch are put together before it is asked what is late.
            elements = sorted(elements, key=lambda e: -e[1])
        self.harness.push_all(elements)
        self._taken(is_pushed=True)

    def _taken(self, is_pushed=False):
        output = self.harness.take()
        rows = [(tuple(row), at) for row, at in zip(output.rows, output.times_ms, strict=True)]
        if is_pushed:
            last = {(row[0], *row[-2:]): (row, at) for row, at in rows}
            rows = [last[window] for window in last if not any(map(lambda w: _covers(w, window), last))]
        self.rows += rows
        self.late += output.side.get("late", [])
        self.dropped += output.counts.get(LATE_RECORDS_DROPPED, 0)


def _covers(other, window):
    """Whether a session became another one behind its firing."""
    return other != window and other[0] == window[0] and other[1] <= window[1] and other[2] >= window[2]


class Folding:
    """The same over columns; restored from its snapshot every now and then."""

    def __init__(self, spec, policy, rng):
        self._make = lambda **given: FoldHarness(
            spec, FOLDS, INPUT, "k", max_parallelism=2, policy=policy, **given
        )
        self.harness, self._rng = self._make(), rng
        self.rows, self.late, self.dropped = [], [], 0

    def step(self, now_ms, before, watermark_ms, behind):
        self.harness.processing_time(now_ms)
        self.harness.micro_batch(behind, before, watermark_ms)
        output = self.harness.take()
        self.rows += zip(output.rows, output.times_ms, strict=True)
        self.late += output.side.get("late", [])
        self.dropped += output.counts.get(LATE_RECORDS_DROPPED, 0)
        if self._rng.random() < 0.3:
            self.harness = self._make(restore=self.harness.snapshot(), bases=self.harness.bases)


def elements(rng, now_ms):
    """Out of order, some of them far too late; several with the same time."""
    return [
        ((rng.choice("abc"), rng.choice([None, 1, 2, 3, 5, 8])), now_ms + rng.randint(-25, 12))
        for _ in range(rng.choice([0, 1, 3, 8]))
    ]


def plain(emitted):
    (*row, start, end), time_ms = emitted
    return *row, start.timestamp(), end.timestamp(), time_ms


@pytest.mark.parametrize(
    ("kind", "lateness_ms", "policy"), sampled(itertools.product(KINDS, [0, 7], [None, TINY]), one_in=3)
)
def test_folds_are_those_of_the_elementwise_operator(kind, lateness_ms, policy) -> None:
    steps = examples(15, least=7)
    for seed in range(examples(3, least=2)):
        rng = random.Random(f"{kind}-{lateness_ms}-{seed}")
        spec = WindowSpec(KINDS[kind](), None, None, lateness_ms, LATE if seed % 2 else None)
        model, folding = Elementwise(spec, "session" in kind), Folding(spec, policy, rng)
        now_ms = 0
        for number in range(steps):
            now_ms += rng.choice([0, 1, 4, 9, 30])
            watermark_ms = MAX_WATERMARK_MS if number == steps - 1 else now_ms - rng.randint(0, 12)
            step = 1_000 + now_ms, elements(rng, now_ms), watermark_ms, elements(rng, now_ms)
            for one in (model, folding):
                one.step(*step)
                one.rows = sorted(map(plain, one.rows), key=repr)
            told = f"seed {seed}, step {number}"
            assert folding.rows == model.rows, told
            assert sorted(folding.late, key=repr) == sorted(map(tuple, model.late), key=repr), told
            assert folding.dropped == model.dropped, told
            model.rows, folding.rows = [], []
        for one in (model, folding):
            one.harness.processing_time(10_000)
        assert folding.harness.entries(OPEN) == {}
        assert [folding.harness.next_due_ms(clock) for clock in TimeDomain] == [None, None]
