"""Results that do not stand any more come once more, marked; the operator is restored after every step."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from flinkish_spark.core.elements import MAX_WATERMARK_MS
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.functions.keyed import AggregateFunction
from flinkish_spark.joins.spec import WindowJoin
from flinkish_spark.operators.columnar_windows import require_column_windows
from flinkish_spark.operators.process import ElementError
from flinkish_spark.operators.windowing import window_operator
from flinkish_spark.windows import (
    AggregateWindow,
    ContinuousEventTimeTrigger,
    CountEvictor,
    CountTrigger,
    EventTimeSessionWindows,
    ProcessWindow,
    ProcessWindowFunction,
    PurgingTrigger,
    ReduceWindow,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    WindowSpec,
)
from tests.support.effort import examples, seeds
from tests.support.operator_harness import OperatorHarness
from tests.support.windows_rig import Restoring
from tests.support.windows_support import INPUT

RESULT = "k STRING, start LONG, end LONG, n LONG"


class Bounds(ProcessWindowFunction):
    """A row per firing, or two: for odd sums one more."""

    def process(self, key, context, elements):
        total = sum(element.n for element in elements)
        yield key, context.window.start_ms, context.window.end_ms, total
        if total % 2:
            yield {"k": key, "start": -context.window.start_ms, "end": -context.window.end_ms, "n": total}


class One(ProcessWindowFunction):
    def process(self, key, context, elements):
        yield key, context.window.start_ms, context.window.end_ms, sum(element.n for element in elements)


@dataclass
class Found:
    k: str
    n: int


def sessions(computation=None, lateness_ms=100, **spec):
    given = WindowSpec(
        EventTimeSessionWindows(5), allowed_lateness_ms=lateness_ms, retraction_field="gone", **spec
    )
    return Restoring(given, computation or ProcessWindow(One()), result_type=RESULT)


def result(start_ms, end_ms, total, is_gone=False):
    return ("a", start_ms, end_ms, total, is_gone)


class Small(AggregateFunction):
    """The sum, unless it has grown too large."""

    def create_accumulator(self):
        return 0

    def add(self, value, accumulator):
        return accumulator + value[1]

    def get_result(self, accumulator):
        return (accumulator,) if accumulator < 10 else None

    def merge(self, first, second):
        return first + second


class Told(ProcessWindowFunction):
    def process(self, key, context, elements):
        (row,) = elements
        yield row


@pytest.mark.parametrize("then", [None, Told()], ids=["alone", "with a function"])
def test_a_result_of_none_takes_the_last_one_back(then):
    """It is no result, so it is not emitted, and a function is not called for it."""
    spec = WindowSpec(TumblingEventTimeWindows(10), allowed_lateness_ms=50, retraction_field="gone")
    run = Restoring(spec, AggregateWindow(Small(), "LONG", then), result_type="n LONG")
    run.push((4, 1))
    assert run.watermark(9).rows == [(4, False)]
    assert run.push((9, 2)).rows == [(4, True)]
    assert run.push((1, 3)).rows == []
    assert run.push((-9, 4)).rows == [(5, False)]


def test_a_window_that_fires_again_takes_its_last_result_back():
    spec = WindowSpec(TumblingEventTimeWindows(10), allowed_lateness_ms=5, retraction_field="gone")
    run = Restoring(spec, ReduceWindow(lambda a, b: (a.k, a.n + b.n)))
    run.push((1, 3))
    assert run.watermark(9).rows == [("a", 1, False)]
    output = run.push((2, 4))
    assert (output.rows, output.times_ms) == ([("a", 1, True), ("a", 3, False)], [9, 9])
    assert run.push((4, 5)).rows == [("a", 3, True), ("a", 7, False)]


def test_sessions_that_become_one_are_taken_back():
    run = sessions()
    run.push((1, 0), (2, 8))
    assert run.watermark(12).rows == [result(0, 5, 1), result(8, 13, 2)]
    output = run.push((4, 4))
    assert output.rows == [result(0, 5, 1, True), result(8, 13, 2, True), result(0, 13, 7)]
    assert output.times_ms == [4, 12, 12]


def test_a_session_that_grows_into_the_future_is_taken_back_when_it_does():
    """What stands instead comes when its time has come."""
    run = sessions()
    run.push((1, 0))
    assert run.watermark(6).rows == [result(0, 5, 1)]
    assert run.push((2, 4)).rows == [result(0, 5, 1, True)]
    assert run.watermark(8).rows == [result(0, 9, 3)]


def test_a_session_that_has_not_fired_grows_in_silence():
    run = sessions()
    assert run.push((1, 0), (2, 8), (4, 4)).rows == []
    assert run.watermark(50).rows == [result(0, 13, 7)]


def test_all_rows_of_a_firing_are_taken_back():
    run = sessions(ProcessWindow(Bounds()))
    run.push((1, 10))
    assert run.watermark(14).rows == [("a", 10, 15, 1, False), ("a", -10, -15, 1, False)]
    assert run.push((1, 11)).rows == [("a", 10, 15, 1, True), ("a", -10, -15, 1, True)]
    assert run.watermark(20).rows == [("a", 10, 16, 2, False)]


def test_early_results_are_taken_back_too():
    run = sessions(trigger=ContinuousEventTimeTrigger(4))
    run.push((1, 0))
    assert run.watermark(4).rows == [result(0, 5, 1)]
    assert run.push((2, 3)).rows == [result(0, 5, 1, True)]
    # Once for the interval and once for the end.
    assert run.watermark(7).rows == [result(0, 8, 3), result(0, 8, 3, True), result(0, 8, 3)]


def test_what_was_purged_stands():
    """The next result has only what is new."""
    run = sessions(trigger=PurgingTrigger(CountTrigger(2)))
    assert run.push((1, 0), (2, 1)).rows == [result(0, 6, 3)]
    assert run.push((4, 2), (8, 3)).rows == [result(0, 8, 12)]


def test_an_evictor_s_windows_take_back_as_others_do():
    run = sessions(evictor=CountEvictor(2))
    run.push((1, 0), (2, 1))
    assert run.watermark(6).rows == [result(0, 6, 3)]
    assert run.push((4, 0)).rows == [result(0, 6, 3, True), result(0, 6, 6)]


def test_nothing_is_kept_of_a_window_that_is_over():
    run = sessions(lateness_ms=3)
    run.push((1, 0))
    run.watermark(4)
    assert run.entries("window/fired") == {("a", (0, 5)): [("a", 0, 5, 1)]}
    run.watermark(7)
    assert run.entries("window/fired") == {} and run.timer_count() == 0


def test_who_goes_over_to_retractions_takes_back_what_fires_from_then_on():
    """And who goes back from them is not held up by what they kept."""
    plain = WindowSpec(EventTimeSessionWindows(5), allowed_lateness_ms=100)
    marked = WindowSpec(EventTimeSessionWindows(5), allowed_lateness_ms=100, retraction_field="gone")

    def harness(spec, **given):
        operator = window_operator(spec, ProcessWindow(One()), INPUT, RESULT)
        return OperatorHarness(operator, key=lambda e: e[0], key_type="STRING", **given)

    run = harness(plain)
    run.push(("a", 1), 0)
    run.watermark(4)
    run = harness(marked, restore=run.snapshot())
    run.push(("a", 2), 0)
    run.push(("a", 4), 0)
    assert run.take().rows == [result(0, 5, 3), result(0, 5, 3, True), result(0, 5, 7)]
    run = harness(plain, restore=run.snapshot())
    run.push(("a", 8), 0)
    assert run.take().rows == [("a", 0, 5, 15)]


@pytest.mark.parametrize("seed", seeds(12))
def test_what_is_not_taken_back_is_what_all_elements_make(seed):
    """Whatever the order, late or not: results less those taken back are the sessions of all elements."""
    rng = random.Random(seed)
    run, net, elements, watermark_ms = sessions(lateness_ms=10_000), Counter(), [], 0

    def count(rows):
        for row in rows:
            net[row[:4]] += -1 if row[4] else 1
            # After every row: nothing is taken back that did not come before, nothing stands twice.
            assert net[row[:4]] in (0, 1), row

    for number in range(examples(60, least=40)):
        if rng.random() < 0.3:
            watermark_ms += rng.randrange(15)
            count(run.watermark(watermark_ms).rows)
        time_ms = max(0, watermark_ms + rng.randrange(-40, 20))
        elements.append((time_ms, number))
        count(run.push((number, time_ms)).rows)
    count(run.watermark(MAX_WATERMARK_MS).rows)
    assert +net == Counter(brute_force(elements))


def brute_force(elements):
    """Return the sessions of all elements."""
    found = []
    for time_ms, number in sorted(elements):
        if found and time_ms <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], time_ms + 5), found[-1][2] + number)
        else:
            found.append((time_ms, time_ms + 5, number))
    return [("a", *one) for one in found]


@pytest.mark.parametrize("seed", seeds(6))
def test_of_each_window_the_last_result_stands(seed):
    """Where windows do not merge: that of the same program without retractions."""
    rng = random.Random(seed)
    assigner, trigger = SlidingEventTimeWindows(20, 10), ContinuousEventTimeTrigger(7)
    spec = {"trigger": trigger, "allowed_lateness_ms": 30}
    marked = Restoring(
        WindowSpec(assigner, retraction_field="gone", **spec), ProcessWindow(One()), result_type=RESULT
    )
    plain = Restoring(WindowSpec(assigner, **spec), ProcessWindow(One()))
    last, net, watermark_ms = {}, Counter(), 0
    for number in range(examples(60, least=40)):
        watermark_ms += rng.randrange(8)
        time_ms = max(0, watermark_ms + rng.randrange(-60, 30))
        for step in (("push", (number, time_ms)), ("watermark", watermark_ms)):
            for row in done(plain, *step):
                last[row[:3]] = row
            for row in done(marked, *step):
                net[row[:4]] += -1 if row[4] else 1
            assert +net == Counter(last.values())


def done(run, step, argument):
    return getattr(run, step)(argument).rows


def test_a_row_with_other_fields_is_refused_by_name():
    class Short(ProcessWindowFunction):
        def process(self, key, context, elements):
            yield key, 1

    run = sessions(ProcessWindow(Short()), trigger=CountTrigger(1))
    with pytest.raises(ElementError, match="emitted 2 fields, but 4 are declared: k, start, end, n"):
        run.push((1, 0))


def test_rows_may_be_dataclasses():
    class Whole(ProcessWindowFunction):
        def process(self, key, context, elements):
            yield Found(key, len(elements))

    spec = WindowSpec(TumblingEventTimeWindows(10), CountTrigger(1), retraction_field="gone")
    run = Restoring(spec, ProcessWindow(Whole()), result_type="k STRING, n LONG")
    assert run.push((5, 0), (5, 1)).rows == [("a", 1, False), ("a", 1, True), ("a", 2, False)]


def test_what_cannot_be_is_refused():
    spec = WindowSpec(EventTimeSessionWindows(5), retraction_field="gone")
    with pytest.raises(ConfigError, match="fields of these are not known"):
        window_operator(spec, ProcessWindow(One()), INPUT)
    with pytest.raises(ConfigError, match="do not store their results"):
        require_column_windows(spec, "sums")
    with pytest.raises(ConfigError, match="a join cannot have retractions"):
        WindowJoin("k STRING", "k STRING", spec)
    with pytest.raises(ConfigError, match="retraction_field"):
        WindowSpec(EventTimeSessionWindows(5), retraction_field=True)
