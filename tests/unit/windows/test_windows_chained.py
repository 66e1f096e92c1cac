"""Windows behind windows in one micro-batch, and operators that travel to workers."""

from __future__ import annotations

import pickle

import pytest
from pyspark import cloudpickle

from flinkish_spark.core.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, Progress, TimeDomain
from flinkish_spark.operators.process import Elements, GroupRun, TimerError
from flinkish_spark.operators.windowing import window_operator
from flinkish_spark.state.timers import TimerQueue
from flinkish_spark.windows import (
    EventTimeSessionWindows,
    ProcessWindow,
    ProcessWindowFunction,
    ReduceWindow,
    TumblingEventTimeWindows,
    WindowSpec,
)
from tests.support.operator_harness import OperatorHarness
from tests.support.windows_support import INPUT, TABLE, apply, taken

TOTAL = ReduceWindow(lambda a, b: (a.k, a.n + b.n))


def opened(spec) -> GroupRun:
    run = GroupRun(window_operator(spec, TOTAL, INPUT), "o", 1)
    run.timers.queues = {domain: TimerQueue() for domain in TimeDomain}
    return run


def test_a_window_takes_the_results_of_another_in_the_same_micro_batch() -> None:
    first, second = (opened(WindowSpec(TumblingEventTimeWindows(10))) for _ in range(2))
    start = Progress(MIN_WATERMARK_MS, MIN_WATERMARK_MS, 0)
    first.run([], start, [Elements(["a", "b", "a"], [("a", 1), ("b", 2), ("a", 4)], [1, 9, 11])])
    ahead = Progress(MIN_WATERMARK_MS, 9, 0)
    emitted = first.run([], ahead, [Elements(["b"], [("b", 8)], [12])])
    assert (emitted.rows, emitted.times_ms, emitted.before) == ([("a", 1), ("b", 2)], [9, 9], 2)
    results = Elements(["all", "all"], emitted.rows, emitted.times_ms)
    emitted = second.run([results], ahead, [])
    assert (emitted.rows, emitted.times_ms, emitted.before) == ([("a", 3)], [9], 1)


def test_a_job_that_is_drained_loses_none_of_its_last_records_and_fires_every_window() -> None:
    """The records of the last micro-batch come before the end of event time, in the second window, too."""
    first, second = (opened(WindowSpec(TumblingEventTimeWindows(10))) for _ in range(2))
    last = Progress(MIN_WATERMARK_MS, 9, 0, drained_to_ms=MAX_WATERMARK_MS)
    start = Progress(MIN_WATERMARK_MS, MIN_WATERMARK_MS, 0)
    first.run([], start, [Elements(["a", "a"], [("a", 1), ("a", 2)], [1, 15])])
    emitted = first.run([], last, [Elements(["a", "b"], [("a", 4), ("b", 8)], [12, 25])])
    assert emitted.rows == [("a", 1), ("a", 6), ("b", 8)]
    assert (emitted.times_ms, emitted.before) == ([9, 19, 29], 1)
    before = Elements(["all"], emitted.rows[:1], emitted.times_ms[:1])
    behind = Elements(["all", "all"], emitted.rows[1:], emitted.times_ms[1:])
    emitted = second.run([before], last, [behind])
    assert [row[1] for row in emitted.rows] == [1, 6, 8] and emitted.before == 1
    assert not emitted.counts, "nothing was late"
    assert not any(list(queue.due(MAX_WATERMARK_MS)) for queue in first.timers.queues.values())


@pytest.mark.parametrize("combination", TABLE[::15], ids=str)
def test_an_operator_travels_before_it_is_opened(combination) -> None:
    there = pickle.loads(cloudpickle.dumps(combination.operator()))
    one = OperatorHarness(there, key=lambda e: e[0], key_type="STRING", max_parallelism=1)
    other = combination.run()
    for step in (("push", [("a", 1, 3), ("a", 2, 4), ("b", 3, 12)]), ("watermark", 30), ("time", 90)):
        apply(one, step)
        apply(other, step)
        assert taken(one) == taken(other)


def test_a_window_function_that_fails_at_a_timer_names_the_window() -> None:
    class Failing(ProcessWindowFunction):
        def process(self, key, context, elements):
            yield 1 // 0

    operator = window_operator(WindowSpec(EventTimeSessionWindows(5)), ProcessWindow(Failing()), INPUT)
    one = OperatorHarness(operator, key=lambda e: e[0], key_type="STRING")
    one.push(("a", 1), 3)
    with pytest.raises(TimerError, match="ZeroDivisionError") as caught:
        one.watermark(7)
    assert caught.value.timer == (7, "a", (3, 8))
    assert one.timer_count() == 1
