"""Assigners, triggers and evictors of a user: what they may do, and what is said if they do it wrong."""

from __future__ import annotations

import re

import pytest

from flinkish_spark.core.elements import OutputTag, TimeDomain
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.state import ReducingStateDescriptor
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.windows import (
    CountTrigger,
    DeltaEvictor,
    DynamicEventTimeSessionWindows,
    EventTimeSessionWindows,
    EventTimeTrigger,
    Evictor,
    GlobalWindows,
    ProcessWindowFunction,
    TimeWindow,
    TumblingEventTimeWindows,
    WindowAssigner,
    WindowBounds,
    WindowSpec,
)

INPUT = "user STRING, amount LONG"


class Amounts(ProcessWindowFunction):
    def process(self, key, context, elements):
        yield key, " ".join(str(element.amount) for element in elements)


def running(build) -> ProgramHarness:
    def program(orders):
        return build(orders.key_by("user")).process(
            Amounts(), output="user STRING, amounts STRING", uid="windows"
        )

    return ProgramHarness(program, INPUT)


def shown(run):
    return [tuple(row)[1:] for row in run.take().rows]


class Returning(WindowAssigner):
    clock = TimeDomain.EVENT_TIME

    def __init__(self, windows: object) -> None:
        self.windows = windows

    def assign_windows(self, value, timestamp_ms, processing_time_ms):
        return self.windows

    def default_trigger(self):
        return EventTimeTrigger()


@pytest.mark.parametrize(
    "windows", [None, TimeWindow(0, 10), [(0, 10)], [TimeWindow(0, 10.0)], [TimeWindow(None, 10)]], ids=str
)
def test_an_assigner_that_returns_no_windows_is_named(windows) -> None:
    run = running(lambda keyed: keyed.window(Returning(windows)))
    says = re.escape(f"assign_windows() of Returning has returned {windows!r}; it must return a list of")
    with pytest.raises(TypeError, match=says):
        run.push(("ann", 1), 0)


def test_an_own_assigner_may_give_several_windows_or_none() -> None:
    run = running(lambda keyed: keyed.window(Returning([TimeWindow(0, 10), TimeWindow(0, 100)])))
    run.push(("ann", 1), 5)
    run.watermark(9)
    run.push(("ann", 2), 5)
    run.watermark(99)
    assert shown(run) == [("1",), ("1 2",)]
    run = running(lambda keyed: keyed.window(Returning([])))
    run.push(("ann", 1), 5)
    run.end_of_input()
    output = run.take()
    assert not output.rows and not output.counts


class NotOfNegatives(EventTimeSessionWindows):
    def assign_windows(self, value, timestamp_ms, processing_time_ms):
        if value.amount < 0:
            return []
        return super().assign_windows(value, timestamp_ms, processing_time_ms)


def test_an_own_assigner_of_sessions_may_give_no_window() -> None:
    run = running(lambda keyed: keyed.window(NotOfNegatives(5)))
    run.push_all([(("ann", -1), 0), (("ann", 1), 3), (("ann", -2), 7), (("ann", 4), 8)])
    run.watermark(12)
    run.push(("ann", -4), 9)
    output = run.take()
    assert [tuple(row) for row in output.rows] == [("ann", "1 4")]
    # The last one has no window, and its time is over: it is late, as in windows that do not merge.
    assert output.counts == {"late_records_dropped": 1}


def test_an_assigner_without_a_clock_is_refused() -> None:
    class Timeless(Returning):
        clock = None  # type: ignore[assignment]

    with pytest.raises(ConfigError, match="clock is None"):
        WindowSpec(Timeless([]))


class WithoutFirst(Evictor):
    """As one writes it for Flink: elements are taken out of what was given."""

    def evict_before(self, elements, window, ctx):
        del elements[0]
        return elements


class Forgetful(WithoutFirst):
    def evict_before(self, elements, window, ctx):
        super().evict_before(elements, window, ctx)


class AllOnNegative(Evictor):
    def evict_before(self, elements, window, ctx):
        return [] if any(element.value.amount < 0 for element in elements) else elements


def test_an_evictor_may_change_the_list_and_what_is_gone_stays_away() -> None:
    run = running(
        lambda keyed: keyed.window(GlobalWindows()).trigger(CountTrigger(2)).evictor(WithoutFirst())
    )
    for amount in range(6):
        run.push(("ann", amount))
    assert shown(run) == [("1",), ("2 3",), ("3 4 5",)]


def test_an_evictor_that_returns_nothing_is_named() -> None:
    run = running(lambda keyed: keyed.window(GlobalWindows()).trigger(CountTrigger(1)).evictor(Forgetful()))
    with pytest.raises(TypeError, match="the evictor Forgetful has returned None"):
        run.push(("ann", 1))


def test_what_an_evictor_leaves_nothing_of_is_retracted() -> None:
    minutes = TumblingEventTimeWindows(10)
    run = running(
        lambda keyed: (
            keyed.window(minutes).allowed_lateness(50).evictor(AllOnNegative()).emit_retractions("gone")
        )
    )
    run.push(("ann", 1), 3)
    run.watermark(9)
    run.push(("ann", -1), 4)
    run.push(("ann", 2), 5)
    assert shown(run) == [("1", False), ("1", True), ("2", False)]


def test_a_trigger_may_reduce_by_a_plain_function() -> None:
    class AtTen(CountTrigger):
        def __init__(self) -> None:
            super().__init__(10)
            self._seen = ReducingStateDescriptor("sum", lambda first, second: first + second, "LONG")

        def on_element(self, value, timestamp_ms, window, ctx):
            total = ctx.get_partitioned_state(self._seen)
            total.add(value.amount - 1)
            return super().on_element(value, timestamp_ms, window, ctx)

    run = running(lambda keyed: keyed.window(GlobalWindows()).trigger(AtTen()))
    for amount in (3, 4, 3, 5):
        run.push(("ann", amount))
    assert shown(run) == [("3 4 3",)]


# -- what is refused when it is said ------------------------------------------------------------------------
MINUTES = TumblingEventTimeWindows(60_000)


@pytest.mark.parametrize(
    ("say", "what"),
    [
        (lambda windows: windows.process(Amounts, uid="x"), "process is .* an instance of a subclass"),
        (lambda windows: windows.process(None, uid="x"), "process is None"),
        (lambda windows: windows.reduce("sum", uid="x"), "reduce is 'sum'"),
        (lambda windows: windows.reduce(lambda one: one, uid="x"), "reduce is .* called with 2 arguments"),
        (lambda windows: windows.reduce(max, WindowBounds, uid="x"), "then is .* an instance of a subclass"),
        (lambda windows: windows.aggregate(None, accumulator="LONG", uid="x"), "aggregate is None"),
        (lambda windows: windows.aggregate(max, accumulator="LONG", uid="x"), "aggregate is <built-in"),
        (lambda windows: DynamicEventTimeSessionWindows(5), "gap_ms_of is 5 .* called with one argument"),
        (lambda windows: DynamicEventTimeSessionWindows(lambda a, b: 5), "gap_ms_of is"),
        (lambda windows: DeltaEvictor(1, 5), "delta is 5"),
        (lambda windows: DeltaEvictor("x", max), "threshold is 'x'"),
        (lambda windows: DeltaEvictor(float("nan"), max), "threshold is nan"),
    ],
)
def test_functions_that_cannot_be_called_are_refused_when_they_are_said(say, what) -> None:
    def program(orders):
        return say(orders.key_by("user").window(MINUTES))

    with pytest.raises(ConfigError, match=what):
        ProgramHarness(program, INPUT)


@pytest.mark.parametrize("ddl", ["amount LONG", "user STRING, amount LONG, more LONG"])
@pytest.mark.parametrize(
    "program",
    [
        lambda late: (
            lambda orders, others: (
                orders.key_by("user")
                .window(MINUTES)
                .side_output_late_data(late)
                .reduce(lambda one, other: one, uid="x")
            )
        ),
        lambda late: (
            lambda orders, others: (
                orders.key_by("user")
                .join(others.key_by("user"))
                .interval(lower_ms=0, upper_ms=9, uid="x", right_late=late)
            )
        ),
        lambda late: (
            lambda orders, others: (
                orders.key_by("user").join(others.key_by("user")).window(MINUTES, uid="x", left_late=late)
            )
        ),
        lambda late: (
            lambda orders, others: (
                orders.key_by("user").join(others.key_by("user")).temporal(uid="x", late_output=late)
            )
        ),
    ],
    ids=["windows", "interval", "window-join", "temporal"],
)
def test_late_elements_that_their_tag_cannot_take_are_refused_before_one_comes(program, ddl) -> None:
    with pytest.raises(SchemaError, match=r"late elements of 'x' are \(user string, amount bigint\)"):
        ProgramHarness(program(OutputTag("late", ddl)), INPUT, INPUT)


def test_late_elements_of_both_sides_by_one_name_need_as_many_fields_as_are_read_by_it() -> None:
    left, right = OutputTag("late", INPUT), OutputTag("late", f"{INPUT}, note STRING")

    def program(orders, others):
        both = orders.key_by("user").join(others.key_by("user"))
        return both.interval(lower_ms=0, upper_ms=1, uid="x", left_late=left, right_late=right)

    for read in (left, right):
        with pytest.raises(SchemaError, match=r"late elements of 'x' are .* the OutputTag 'late' says"):
            ProgramHarness(program, INPUT, f"{INPUT}, note STRING", side_outputs=[read])
