"""Edges of time in a job: the last millisecond of processing time, the end of draining, times of timers."""

from __future__ import annotations

from collections import Counter

import pytest

from flinkish_spark import KeyedProcessFunction
from flinkish_spark.core.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, Progress, TimeDomain
from flinkish_spark.core.micro_batch import MicroBatch
from flinkish_spark.functions.aggregates import AggregateColumn, Fold
from flinkish_spark.operators.process import Elements, GroupRun
from flinkish_spark.operators.windowing import window_operator
from flinkish_spark.protocol.event_time import Watermarks
from flinkish_spark.state.key_group import GroupState
from flinkish_spark.state.timers import TimerQueue
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.transport.blocks import BEHIND, sort_blocks
from flinkish_spark.types.rows import arrow_schema
from flinkish_spark.windows import (
    EventTimeSessionWindows,
    ProcessWindow,
    ProcessWindowFunction,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WindowSpec,
)
from tests.support.operator_harness import FoldHarness
from tests.support.windows_support import TINY

INPUT = "user STRING, amount LONG"
SECONDS = WindowSpec(TumblingProcessingTimeWindows(1_000))


def in_a_job(processing_time_ms: int) -> Progress:
    """Where time stands for an operator of a job without watermarks."""
    return MicroBatch(Watermarks(), Watermarks(), processing_time_ms).progress("any")


class Folds(FoldHarness):
    """Folds of windows in one key group, with what a task says about time."""

    def __init__(self, spec: WindowSpec) -> None:
        super().__init__(spec, [AggregateColumn("total", Fold.SUM, "amount")], INPUT, "user")
        self._kept: bytes | None = None

    def totals(self, progress: Progress, *elements: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the totals of a micro-batch, each with its place."""
        schema = arrow_schema(self.sent.transport.schema)
        blocks = self._blocks([(("ann", amount), time_ms) for amount, time_ms in elements], [])
        rows = sort_blocks([one for own in blocks.values() for one in own], schema) if blocks else None
        state = GroupState(self._runner.layout, self._kept, self.bases)
        out = list(self._runner.process([rows], state, progress))
        if state.is_changed:
            self._kept = state.dump(0, self._policy, progress.processing_time_ms)
        found = []
        for one in out:
            found += [(one.first + at, total) for at, total in enumerate(one.rows["total"].to_pylist())]
        return found


class Amounts(ProcessWindowFunction):
    def process(self, key, context, elements):
        yield tuple(element[1] for element in elements)


def test_a_processing_time_window_takes_the_elements_of_its_last_millisecond_before_it_fires() -> None:
    run = GroupRun(window_operator(SECONDS, ProcessWindow(Amounts()), INPUT), "windows", 16)
    run.timers.queues = {clock: TimerQueue() for clock in TimeDomain}
    assert not run.run([], in_a_job(300), [Elements(["ann"], [("ann", 1)])]).rows
    assert not run.run([], in_a_job(999), [Elements(["ann"], [("ann", 2)])]).rows
    assert run.run([], in_a_job(1_000), [Elements(["ann"], [("ann", 4)])]).rows == [(1, 2)]


def test_so_do_windows_that_are_folded_over_columns() -> None:
    run = Folds(SECONDS)
    assert run.totals(in_a_job(300), (1, 0)) == []
    assert run.totals(in_a_job(999), (2, 0)) == []
    assert run.totals(in_a_job(1_000), (4, 0)) == [(0, 3)]


@pytest.mark.parametrize(
    "assigner",
    [TumblingEventTimeWindows(10), SlidingEventTimeWindows(10, 10), EventTimeSessionWindows(5)],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.parametrize("lateness_ms", [0, 7])
def test_folds_over_columns_fire_their_windows_when_a_job_is_drained(assigner, lateness_ms) -> None:
    """Behind the records of the last micro-batch, whose windows fire too."""
    run = Folds(WindowSpec(assigner, allowed_lateness_ms=lateness_ms))
    begin = Progress(MIN_WATERMARK_MS, MIN_WATERMARK_MS, 0)
    assert run.totals(begin, (1, 1), (2, 12)) == []
    drained = Progress(MIN_WATERMARK_MS, 9, 0, drained_to_ms=MAX_WATERMARK_MS)
    assert run.totals(drained, (4, 13), (8, 25)) == [(0, 1), (BEHIND, 6), (BEHIND + 1, 8)]
    assert run.totals(Progress(MAX_WATERMARK_MS, MAX_WATERMARK_MS, 0)) == []


@pytest.mark.parametrize("policy", [None, TINY], ids=["rows", "bases"])
@pytest.mark.parametrize(
    "assigner",
    [TumblingEventTimeWindows(10), SlidingEventTimeWindows(10, 4), EventTimeSessionWindows(5)],
    ids=lambda one: type(one).__name__,
)
def test_folds_of_what_stands_at_the_end_of_time_come_out_with_the_end_of_the_input(assigner, policy) -> None:
    """So do results of count windows, which have no other time."""
    total = AggregateColumn("total", Fold.SUM, "amount")
    run = FoldHarness(WindowSpec(assigner), [total], INPUT, "user", policy=policy)
    run.push_all([(("ann", 1), MAX_WATERMARK_MS), (("ben", 2), MAX_WATERMARK_MS), (("ann", 4), 3)])
    run.push_all([(("ann", 8), MAX_WATERMARK_MS)])
    run.watermark(100)
    by_user = Counter(row[0] for row in run.take().rows)
    assert by_user.keys() == {"ann"} and run.next_due_ms(TimeDomain.EVENT_TIME) == MAX_WATERMARK_MS
    run.watermark(MAX_WATERMARK_MS)
    assert {tuple(row)[:2] for row in run.take().rows} == {("ann", 9), ("ben", 2)}
    assert run.next_due_ms(TimeDomain.EVENT_TIME) is None


def test_windows_behind_count_windows_give_their_results_over_columns_too() -> None:
    def program(orders):
        pairs = orders.key_by("user").count_window(2).sum("amount", uid="pairs")
        return pairs.key_by("user").window(TumblingEventTimeWindows(10)).sum("amount", uid="totals")

    run = ProgramHarness(program, INPUT)
    run.push_all([(("ann", 2**n), n) for n in range(5)])
    run.end_of_input()
    assert [tuple(row)[:2] for row in run.take().rows] == [("ann", 15)]


# -- timers' times ------------------------------------------------------------------------------------------
class AtAmount(KeyedProcessFunction):
    """Registers a timer at whatever time the element says."""

    def __init__(self, register: str, time_ms: object) -> None:
        self.register, self.time_ms = register, time_ms

    def process_element(self, value, ctx):
        getattr(ctx.timer_service(), self.register)(self.time_ms)

    def on_timer(self, time_ms, ctx):
        yield (time_ms,)


@pytest.mark.parametrize("time_ms", [None, 1.5, "7", True, 1 << 63, -(1 << 63) - 1], ids=str)
@pytest.mark.parametrize(
    "call", ["register_event_time_timer", "register_processing_time_timer", "delete_event_time_timer"]
)
def test_what_is_no_time_is_refused_by_the_call(call, time_ms) -> None:
    run = ProgramHarness.of(AtAmount(call, time_ms), INPUT, key="user", output="at LONG")
    with pytest.raises(ValueError, match=r"a timer's time is .* whole number of milliseconds") as raised:
        run.push(("ann", 1), 0)
    assert raised.value.__notes__ == ["in the operator 'operator'"]


def test_other_kinds_of_whole_numbers_are_times() -> None:
    import numpy as np

    run = ProgramHarness.of(
        AtAmount("register_event_time_timer", np.int64(7)), INPUT, key="user", output="at LONG"
    )
    run.push(("ann", 1), 0)
    run.watermark(7)
    assert run.take().rows == [(7,)]
