"""sum, min, max, min_by and max_by of any windows: over columns or element by element, the same rows."""

from __future__ import annotations

import datetime as dt
import itertools
import math
import pickle
import random
from decimal import Decimal
from functools import cache

import pytest
from pyspark import cloudpickle

from flinkish_spark.core.elements import MAX_WATERMARK_MS, OutputTag
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.datastream.windowed_stream import WindowedStream
from flinkish_spark.functions.aggregates import AggregateColumn, ElementChoice, Fold, Ties
from flinkish_spark.operators.columnar_aggregates import AggregateOverflow
from flinkish_spark.operators.process import ElementError
from flinkish_spark.operators.windowing import WindowOperator
from flinkish_spark.planning.factories import FoldingWindows
from flinkish_spark.planning.sent_columns import plan_window_fold
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.windows import (
    CountEvictor,
    DynamicEventTimeSessionWindows,
    EventTimeSessionWindows,
    EventTimeTrigger,
    GlobalWindows,
    ProcessingTimeTrigger,
    PurgingTrigger,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    TumblingEventTimeWindows,
    WindowSpec,
    count_window,
    sliding_count_window,
)
from tests.support.effort import examples, sampled, seeds
from tests.support.operator_harness import FoldHarness, OperatorHarness
from tests.support.windows_support import TINY

INPUT = "k STRING, n LONG, at LONG"
TYPES = "k STRING, n LONG, small INT, price DECIMAL(10,2), share DOUBLE, name STRING, day DATE, new BOOLEAN"


class AsByDefault(EventTimeTrigger):
    """Fires when windows do by themselves; but of which columns do not know that."""


class AsByDefaultLater(ProcessingTimeTrigger):
    """The same by processing time."""


def folded(field, fold=Fold.SUM):
    return (AggregateColumn(field, fold, field),)


@cache
def sent_to_workers(spec, columns, input_type):
    """Return the operator that a job has for these windows, as it is sent, and its output's fields."""
    made = FoldHarness(
        WindowSpec(TumblingEventTimeWindows(1)), (AggregateColumn("c", Fold.COUNT),), input_type, "k"
    )
    sent = plan_window_fold(
        FoldingWindows(spec, columns), "sums", parse_ddl(input_type), ["k"], made.transport
    )
    assert isinstance(sent.folded.operator, WindowOperator)
    return cloudpickle.dumps(sent.folded.operator), sent.folded.output


def by_element(spec, columns, input_type=INPUT, **given):
    """Return a harness of the operator that a job has for these windows, and its output's fields."""
    operator, output = sent_to_workers(spec, columns, input_type)
    settings = {"key": lambda e: e[0], "key_type": "STRING", "max_parallelism": 2, "policy": TINY}
    return OperatorHarness(pickle.loads(operator), **settings, **given), output


def restored(run, spec, columns, input_type=INPUT):
    return by_element(spec, columns, input_type, restore=run.snapshot(), bases=run.bases)[0]


def plain(output):
    """Return rows with their times; NaN is equal to itself here."""
    rows = [(*row, time_ms) for row, time_ms in zip(output.rows, output.times_ms, strict=True)]
    return sorted((tuple("NaN" if is_nan(value) else value for value in row) for row in rows), key=repr)


def is_nan(value):
    return isinstance(value, float) and math.isnan(value)


def ms(time_ms):
    return dt.datetime.fromtimestamp(time_ms / 1000, dt.UTC)


# -- beside the folds over columns ------------------------------------------------------------------------
def drawn(rng):
    """Return an element of TYPES: nulls, numbers that are equal, NaN; sums of them are exact."""
    values = (
        rng.choice([None, -(1 << 40), 3, 5, 1 << 40]),
        rng.choice([None, -7, 0, 7]),
        rng.choice([None, Decimal("-1.25"), Decimal("3.50")]),
        rng.choice([None, 0.5, -0.25, 4.0, math.nan]),
        rng.choice([None, "a", "é", "z", "\U0001d4b5"]),
        rng.choice([None, dt.date(2026, 1, 2), dt.date(1969, 1, 2)]),
        rng.choice([None, False, True]),
    )
    return (rng.choice(["x", "y", None]), *values)


COMPUTED = [
    *(folded(field) for field in ("n", "small", "price", "share")),
    *(folded(field, Fold.MIN) for field in ("share", "name", "day")),
    *(folded(field, Fold.MAX) for field in ("n", "price", "share", "new")),
    *(ElementChoice(fold, "share") for fold in (Fold.MIN, Fold.MAX)),
    ElementChoice(Fold.MAX, "small", Ties.LAST),
]
WINDOWS = {
    "tumbling": (lambda: TumblingEventTimeWindows(10), AsByDefault),
    "sliding": (lambda: SlidingEventTimeWindows(12, 5), AsByDefault),
    "session": (lambda: EventTimeSessionWindows(5), AsByDefault),
    "by processing time": (lambda: SlidingProcessingTimeWindows(12, 5), AsByDefaultLater),
}


@pytest.mark.parametrize(("kind", "columns"), sampled(itertools.product(WINDOWS, COMPUTED), one_in=3))
def test_rows_and_fields_are_those_of_the_fold_over_columns(kind, columns) -> None:
    assigner, trigger = WINDOWS[kind]
    own = WindowSpec(assigner(), trigger())
    fast = FoldHarness(WindowSpec(assigner()), columns, TYPES, "k", max_parallelism=2)
    slow, output = by_element(own, columns, TYPES)
    assert output == fast.sent.folded.output
    rng, now_ms, found = random.Random(f"{kind}-{columns}"), 0, 0
    # Sessions grow and give few results.
    steps = examples(15, least=15 if kind == "session" else 10)
    for number in range(steps):
        now_ms += rng.choice([0, 3, 12])
        # In sessions the order of ties is told otherwise: in the order of time all is the same.
        given = [(drawn(rng), now_ms + ahead) for ahead in range(rng.choice([1, 2, 5]))]
        watermark_ms = MAX_WATERMARK_MS if number == steps - 1 else now_ms - 10
        for run in (fast, slow):
            run.push_all(given)
            run.processing_time(now_ms if number < steps - 1 else now_ms + 100)
            run.watermark(watermark_ms)
        expected = plain(fast.take())
        assert plain(slow.take()) == expected
        found += len(expected)
        slow = restored(slow, own, columns, TYPES)
    assert found > 5


# -- beside what is there by brute force ------------------------------------------------------------------
def numbers(seed, count=40):
    """Return ((key, number, time), time), with nulls, and every key's times rising."""
    rng = random.Random(seed)
    return [((rng.choice("ab"), rng.choice([None, 1, 2, 4, 8]), 3 * at), 3 * at) for at in range(count)]


def least(values):
    return min((value for value in values if value is not None), default=None)


def total(values):
    there = [value for value in values if value is not None]
    return sum(there) if there else None


def chunks(elements, key):
    """Return the elements of each firing of windows of 3, and of windows over 3 at each 2."""
    own = [value for value, _ in elements if value[0] == key]
    tumbling = [own[at - 3 : at] for at in range(3, len(own) + 1, 3)]
    return tumbling, [own[max(0, at - 3) : at] for at in range(2, len(own) + 1, 2)]


def run_through(spec, columns, elements, end=()):
    """Return all rows of elements that come one by one, each to an operator that was just restored."""
    run, rows = by_element(spec, columns)[0], []
    for element in elements:
        run.push(*element)
        rows += map(tuple, run.take().rows)
        run = restored(run, spec, columns)
    for watermark_ms in end:
        run.watermark(watermark_ms)
        rows += map(tuple, run.take().rows)
    return rows


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("which", [0, 1], ids=["tumbling", "sliding"])
def test_count_windows_fold_what_is_in_them_and_have_no_bounds(which, seed) -> None:
    given, spec = numbers(seed), (count_window(3), sliding_count_window(3, 2))[which]
    sums, mins = (run_through(spec, folded("n", fold), given) for fold in (Fold.SUM, Fold.MIN))
    first = run_through(spec, ElementChoice(Fold.MAX, "n"), given)
    last = run_through(spec, ElementChoice(Fold.MAX, "n", Ties.LAST), given)
    for key in "ab":
        windows = chunks(given, key)[which]
        values = [[number for _, number, _ in window] for window in windows]
        assert [row for row in sums if row[0] == key] == [(key, total(one), None, None) for one in values]
        assert [row for row in mins if row[0] == key] == [(key, least(one), None, None) for one in values]
        ranked = [[(-1 if n is None else n) for n in one] for one in values]
        places = [[at for at, n in enumerate(one) if n == max(one)] for one in ranked]
        best = [(*window[at[0]], None, None) for window, at in zip(windows, places, strict=True)]
        assert [row for row in first if row[0] == key] == best
        best = [(*window[at[-1]], None, None) for window, at in zip(windows, places, strict=True)]
        assert [row for row in last if row[0] == key] == best


def test_the_global_window_ends_with_the_input() -> None:
    given = numbers(1)
    rows = run_through(
        WindowSpec(GlobalWindows(), EventTimeTrigger()), folded("n"), given, [MAX_WATERMARK_MS]
    )
    own = {key: [value[1] for value, _ in given if value[0] == key] for key in "ab"}
    assert sorted(rows) == [(key, total(own[key]), None, None) for key in "ab"]


def test_an_evictor_leaves_what_is_folded() -> None:
    given = numbers(2)
    spec = WindowSpec(TumblingEventTimeWindows(30), evictor=CountEvictor(2))
    rows = run_through(spec, folded("n"), given, [MAX_WATERMARK_MS])
    expected = []
    for start in range(0, 120, 30):
        for key in "ab":
            own = [value[1] for value, at in given if value[0] == key and start <= at < start + 30]
            if own:
                expected.append((key, total(own[-2:]), ms(start), ms(start + 30)))
    assert sorted(rows, key=repr) == sorted(expected, key=repr) and len(rows) > 5


def test_sessions_with_a_gap_of_the_element_s_fold_what_merges() -> None:
    rng = random.Random(3)
    given = [(("a", rng.choice([None, 1, 2, 5]), at), at) for at in rng.sample(range(200), 40)]

    def gap_ms(element):
        return 2 + (element[1] or 0)

    rows = run_through(
        WindowSpec(DynamicEventTimeSessionWindows(gap_ms)), folded("n"), given, [MAX_WATERMARK_MS]
    )
    sessions = []
    for value, at in sorted(given, key=lambda one: one[1]):
        if sessions and at <= sessions[-1][1]:
            start, end, own = sessions.pop()
            sessions.append((start, max(end, at + gap_ms(value)), [*own, value[1]]))
        else:
            sessions.append((at, at + gap_ms(value), [value[1]]))
    expected = [("a", total(own), ms(start), ms(end)) for start, end, own in sessions]
    assert sorted(rows, key=repr) == sorted(expected, key=repr) and 3 < len(rows) < 35


# -- late elements, retractions ---------------------------------------------------------------------------
def test_each_late_element_fires_once_more_and_those_too_late_go_to_the_side() -> None:
    late = OutputTag("late", INPUT)
    spec = WindowSpec(TumblingEventTimeWindows(10), AsByDefault(), allowed_lateness_ms=5, late_output=late)
    run, _ = by_element(spec, folded("n"))
    run.push_all([(("a", 1, 3), 3)])
    run.watermark(11)
    run.push_all([(("a", 2, 4), 4), (("a", None, 5), 5)])
    output = run.take()
    assert [row[1] for row in output.rows] == [1, 3, 3] and output.times_ms == [9, 9, 9]
    run.watermark(14)
    run.push(("a", 8, 6), 6)
    output = run.take()
    assert (output.rows, [tuple(row) for row in output.side["late"]]) == ([], [("a", 8, 6)])


def test_with_retractions_a_result_is_taken_back() -> None:
    spec = WindowSpec(EventTimeSessionWindows(5), allowed_lateness_ms=100, retraction_field="gone")
    run, output = by_element(spec, folded("n"))
    assert output.names == ["k", "n", "window_start", "window_end", "gone"]
    run.push_all([(("a", 1, 0), 0), (("a", None, 8), 8)])
    run.watermark(12)
    run.push(("a", 4, 4), 4)
    assert [(*row[:2], row[-1]) for row in run.take().rows] == [
        ("a", 1, False),
        ("a", None, False),
        ("a", 1, True),
        ("a", None, True),
        ("a", 5, False),
    ]
    _, output = by_element(spec, ElementChoice(Fold.MAX, "n"))
    assert output.names == ["k", "n", "at", "window_start", "window_end", "gone"]


# -- what is an error -------------------------------------------------------------------------------------
def test_a_sum_that_leaves_its_type_is_an_error() -> None:
    run, _ = by_element(WindowSpec(TumblingEventTimeWindows(10), AsByDefault()), folded("small"), TYPES)
    element = ("x", None, (1 << 31) - 1, *[None] * 5)
    with pytest.raises(ElementError) as failed:
        run.push_all([(element, 0), (element, 0)])
    assert isinstance(failed.value.__cause__, AggregateOverflow) and "'small'" in str(failed.value.__cause__)


def test_what_cannot_be_computed_is_refused_on_both_ways() -> None:
    for spec in (WindowSpec(TumblingEventTimeWindows(10)), count_window(3)):
        for columns, says in (
            (folded("gone"), "'gone'"),
            (folded("name"), "which is string"),
            (ElementChoice(Fold.MIN, "gone"), "'gone'"),
        ):
            with pytest.raises(ConfigError, match=says):
                by_element(spec, columns, TYPES)
        for columns in (folded("k", Fold.MIN), ElementChoice(Fold.MIN, "window_end")):
            with pytest.raises(SchemaError, match="twice"):
                by_element(spec, columns, "k STRING, window_end TIMESTAMP")
        wrong = WindowSpec(spec.assigner, spec.trigger, late_output=OutputTag("late", "k STRING"))
        with pytest.raises(SchemaError, match="late"):
            by_element(wrong, folded("n"), TYPES)
    with pytest.raises(ConfigError, match="ties"):
        WindowedStream(None, count_window(3)).min_by("n", ties="FIRST", uid="best")


def test_a_purging_trigger_folds_what_is_new() -> None:
    rows = run_through(
        WindowSpec(TumblingEventTimeWindows(10), PurgingTrigger(EventTimeTrigger()), allowed_lateness_ms=20),
        folded("n", Fold.MAX),
        [(("a", 8, 1), 1)],
        [9],
    )
    assert rows == [("a", 8, ms(0), ms(10))]
