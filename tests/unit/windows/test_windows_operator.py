"""Window functions, triggers and evictors in the operator: states, side outputs, names, times, failures."""

from __future__ import annotations

import datetime

import pytest

from flinkish_spark.core.elements import LATE_RECORDS_DROPPED, MAX_WATERMARK_MS, OutputTag, TimeDomain
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.operators.process import ElementError
from flinkish_spark.operators.windowing import window_operator
from flinkish_spark.state import ListStateDescriptor, ReducingStateDescriptor, ValueStateDescriptor
from flinkish_spark.state.evolution import StateMismatch
from flinkish_spark.windows import (
    AggregateWindow,
    ContinuousEventTimeTrigger,
    ContinuousProcessingTimeTrigger,
    CountSlidingWindowAssigner,
    CountTrigger,
    DeltaEvictor,
    EventTimeSessionWindows,
    EventTimeTrigger,
    Evict,
    Evictor,
    GlobalWindows,
    KeyAndWindowBounds,
    MergingWindowAssigner,
    ProcessingTimeTrigger,
    ProcessWindow,
    ProcessWindowFunction,
    PurgingTrigger,
    ReduceWindow,
    SlidingEventTimeWindows,
    TimeWindow,
    Trigger,
    TriggerResult,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WindowBounds,
    WindowSpec,
    count_window,
    sliding_count_window,
)
from tests.support.operator_harness import OperatorHarness
from tests.support.windows_rig import Restoring
from tests.support.windows_support import INPUT, LATE, Numbers, Sum, left

TOTAL = ReduceWindow(lambda a, b: (a.k, a.n + b.n))
AT = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def test_each_late_element_in_time_gives_an_updated_row_for_the_same_window() -> None:
    spec = WindowSpec(TumblingEventTimeWindows(10), allowed_lateness_ms=5, late_output=LATE)
    one = Restoring(spec, ReduceWindow(TOTAL.reduce, WindowBounds()))
    one.push((1, 1), (2, 9))
    bounds = (AT, AT + datetime.timedelta(milliseconds=10))
    assert one.watermark(8).rows == []
    on_time = one.watermark(9)
    assert (on_time.rows, on_time.times_ms) == ([("a", 3, *bounds)], [9])
    updated = one.push((4, 3), (8, 0))
    assert (updated.rows, updated.times_ms) == ([("a", 7, *bounds), ("a", 15, *bounds)], [9, 9])
    one.watermark(13)
    assert one.push((16, 2)).rows == [("a", 31, *bounds)]
    one.watermark(14)
    too_late = one.push((32, 2))
    assert (too_late.rows, too_late.side) == ([], {"late": [("a", 32)]})
    assert (left(one), one.timer_count()) == ({}, 0)


def test_late_elements_without_a_side_output_are_counted() -> None:
    one = Restoring(WindowSpec(SlidingEventTimeWindows(10, 5)), TOTAL)
    one.watermark(11)
    assert one.push((1, 2), (2, 7), (3, 1)).counts == {LATE_RECORDS_DROPPED: 2}
    assert one.watermark(MAX_WATERMARK_MS).rows == [("a", 2)]


def test_an_element_that_has_no_window_is_late_only_if_its_time_is_over() -> None:
    one = Restoring(WindowSpec(SlidingEventTimeWindows(2, 5), late_output=LATE), TOTAL)
    one.watermark(8)
    output = one.push((1, 9), (2, 8), (3, 4))
    assert (output.side, output.counts) == ({"late": [("a", 2), ("a", 3)]}, {})


class Visits(ProcessWindowFunction):
    """Counts firings per window and per key, and tells of what is cleared."""

    SIDE = OutputTag("cleared", "k STRING, start LONG")

    def open(self, context):
        self.firings = ValueStateDescriptor("firings", "LONG", default=0)
        self.seen = ListStateDescriptor("seen", "LONG")
        context.window_state.get_state(self.firings)
        self.all_seen = context.get_list_state(self.seen)
        assert context.uid == "operator"

    def process(self, key, context, elements):
        firings = context.window_state.get_state(self.firings)
        firings.update(firings.value() + 1)
        context.global_state.get_list_state(self.seen).add(context.window.start_ms)
        yield key, sum(e.n for e in elements), firings.value()
        yield "seen", tuple(self.all_seen), context.current_watermark()

    def clear(self, context):
        context.window_state.get_state(self.firings).clear()
        context.output(self.SIDE, ("k", context.window.start_ms))


def test_a_function_has_states_per_window_and_per_key_and_clears_the_first() -> None:
    one = Restoring(WindowSpec(TumblingEventTimeWindows(10), allowed_lateness_ms=5), ProcessWindow(Visits()))
    one.push((1, 1), (2, 12))
    assert one.watermark(9).rows == [("a", 1, 1), ("seen", (0,), 9)]
    assert one.push((4, 1)).rows == [("a", 5, 2), ("seen", (0, 0), 9)]
    assert one.entries("firings") == {("a", (0, 10)): 2}
    last = one.watermark(19)
    assert last.rows == [("a", 2, 1), ("seen", (0, 0, 10), 19)]
    assert last.side == {"cleared": [("k", 0)]}
    assert one.entries("firings") == {("a", (10, 20)): 1}
    assert one.watermark(24).side == {"cleared": [("k", 10)]}
    assert left(one) == {"seen": {"a": [0, 0, 10]}}
    assert one.timer_count() == 0


def test_states_that_cannot_be_are_refused() -> None:
    class Undeclared(Numbers):
        def process(self, key, context, elements):
            context.global_state.get_state(ValueStateDescriptor("unknown", "LONG"))

    class Twice(Numbers):
        def open(self, context):
            context.get_state(ValueStateDescriptor("both", "LONG"))
            context.window_state.get_state(ValueStateDescriptor("both", "LONG"))

    one = Restoring(WindowSpec(GlobalWindows(), CountTrigger(1)), ProcessWindow(Undeclared()))
    with pytest.raises(ElementError, match=r"'unknown', which its open\(\) did not declare"):
        one.push((1, 1))
    with pytest.raises(ValueError, match="as a state of the key and of the window"):
        Restoring(WindowSpec(GlobalWindows()), ProcessWindow(Twice()))
    with pytest.raises(ValueError, match="use global_state"):
        Restoring(WindowSpec(EventTimeSessionWindows(5)), ProcessWindow(Visits()))


def test_the_key_and_the_window_can_be_put_around_an_aggregate() -> None:
    computation = AggregateWindow(Sum(), "total LONG, n LONG", KeyAndWindowBounds())
    one = Restoring(WindowSpec(EventTimeSessionWindows(5)), computation)
    one.push((1, 0), (2, 8), (4, 4))
    bounds = (AT, AT + datetime.timedelta(milliseconds=13))
    output = one.watermark(12)
    assert (output.rows, output.times_ms) == ([("a", 7, 3, *bounds)], [12])


def test_scalar_elements_can_be_windowed_with_and_without_an_evictor() -> None:
    class Listing(ProcessWindowFunction):
        def process(self, key, context, elements):
            return [tuple(elements)]

    for evictor in (None, Evictor()):
        spec = WindowSpec(TumblingEventTimeWindows(10), evictor=evictor)
        one = Restoring(spec, ProcessWindow(Listing()), "LONG", key=lambda e: "k")
        for number in (5, 3, 4):
            one._last.push(number, number)
            one._done()
        assert one.watermark(9).rows == [(5, 3, 4)]


# -- count windows ----------------------------------------------------------------------------------
def test_tumbling_count_windows_start_anew() -> None:
    one = Restoring(count_window(3), ProcessWindow(Numbers()))
    rows = [row[3] for n in range(7) for row in one.push((n, None)).rows]
    assert rows == [(0, 1, 2), (3, 4, 5)]
    assert one.watermark(MAX_WATERMARK_MS).rows == []


@pytest.mark.parametrize(
    ("size", "slide", "amounts", "expected"),
    [
        # PyFlink's test: (1, hi), (2, hello), (3, hi), (4, hello), of each key one pair.
        (2, 1, [1, 3], [4]),
        (2, 1, [1, 3, 5, 7], [4, 8, 12]),
        (3, 2, [1, 2, 4, 8, 16, 32], [7, 28]),
        (2, 3, [1, 2, 4, 8, 16, 32, 64], [3, 24]),
        (4, 4, [1, 2, 4, 8, 16], [15]),
        (2, 1, [1], []),
    ],
)
def test_pyflinks_sliding_count_windows_fire_when_they_are_full(
    size: int, slide: int, amounts: list[int], expected: list[int]
) -> None:
    one = Restoring(WindowSpec(CountSlidingWindowAssigner(size, slide)), TOTAL)
    found = [row for number, amount in enumerate(amounts) for row in one.push((amount, number)).rows]
    assert found == [("a", total) for total in expected]


def test_a_count_with_a_first_one_of_its_own_does_not_merge() -> None:
    with pytest.raises(ConfigError, match="EventTimeSessionWindows cannot have the trigger CountTrigger"):
        WindowSpec(EventTimeSessionWindows(5), CountTrigger(1, first=2))
    with pytest.raises(ConfigError, match="first"):
        CountTrigger(1, first=0)


def test_sliding_count_windows_have_the_last_elements() -> None:
    one = Restoring(sliding_count_window(4, 2), ProcessWindow(Numbers()))
    rows = [row[3] for n in range(7) for row in one.push((n, None)).rows]
    assert rows == [(0, 1), (0, 1, 2, 3), (2, 3, 4, 5)]


# -- evictors ---------------------------------------------------------------------------------------
class Far(DeltaEvictor):
    def __init__(self, when):
        super().__init__(10, lambda element, last: abs(element.n - last.n), when)


@pytest.mark.parametrize(
    ("when", "firings"),
    [(Evict.BEFORE, [(1, 9), (50, 55)]), (Evict.AFTER, [(1, 9), (1, 9, 50, 55)])],
)
def test_a_delta_evictor_before_or_after_the_function(when, firings) -> None:
    one = Restoring(WindowSpec(GlobalWindows(), CountTrigger(2), Far(when)), ProcessWindow(Numbers()))
    rows = [row[3] for n in (1, 9, 50, 55) for row in one.push((n, 0)).rows]
    assert rows == firings
    ((_, _, kept),) = one.entries("window/open").values()
    assert [entry[1] for entry in kept] == [50, 55]


def test_a_window_of_which_nothing_is_left_does_not_fire() -> None:
    class Everything(Evictor):
        def evict_before(self, elements, window, ctx):
            assert ctx.current_watermark() == 9
            return []

    for computation in (TOTAL, AggregateWindow(Sum(), "total LONG, n LONG"), ProcessWindow(Numbers())):
        one = Restoring(WindowSpec(TumblingEventTimeWindows(10), evictor=Everything()), computation)
        one.push((1, 1))
        assert one.watermark(9).rows == []
        assert (left(one), one.timer_count()) == ({}, 0)


# -- own triggers and assigners ---------------------------------------------------------------------
class Early(Trigger):
    """Fires at an element above 100, purges at 0, and at the end; sums what it has seen."""

    def __init__(self):
        self.seen = ReducingStateDescriptor("seen", Add(), "LONG")
        self.elements = ListStateDescriptor("elements", "LONG")

    def states(self):
        return self.seen, self.elements

    def on_element(self, value, timestamp_ms, window, ctx):
        ctx.register_event_time_timer(window.max_timestamp_ms)
        ctx.get_partitioned_state(self.seen).add(value.n if hasattr(value, "n") else value[1])
        ctx.get_partitioned_state(self.elements).add(timestamp_ms)
        if value[1] == 0:
            return TriggerResult.PURGE
        return (
            TriggerResult.FIRE if ctx.get_partitioned_state(self.seen).get() > 100 else TriggerResult.CONTINUE
        )

    def on_event_time(self, time_ms, window, ctx):
        return TriggerResult.FIRE if time_ms == window.max_timestamp_ms else TriggerResult.CONTINUE

    def on_processing_time(self, time_ms, window, ctx):
        return TriggerResult.CONTINUE

    def can_merge(self):
        return True

    def on_merge(self, window, ctx):
        ctx.merge_partitioned_state(self.seen)
        ctx.merge_partitioned_state(self.elements)

    def clear(self, window, ctx):
        ctx.get_partitioned_state(self.seen).clear()
        ctx.get_partitioned_state(self.elements).clear()
        ctx.delete_event_time_timer(window.max_timestamp_ms)


class Add:
    def reduce(self, first, second):
        return first + second


def test_an_own_trigger_s_states_merge_with_its_windows() -> None:
    one = Restoring(WindowSpec(EventTimeSessionWindows(5), Early()), TOTAL)
    assert one.push((60, 0)).rows == []
    assert one.push((30, 8)).rows == []
    assert one.entries("trigger/seen") == {("a", (0, 5)): 60, ("a", (8, 13)): 30}
    assert one.push((20, 4)).rows == [("a", 110)]
    assert one.entries("trigger/seen") == {("a", (0, 13)): 110}
    assert one.entries("trigger/elements") == {("a", (0, 13)): [0, 8, 4]}
    assert one.push((0, 4)).rows == []
    ((slot, (due_ms, _, contents)),) = one.entries("window/open").items()
    assert (slot, due_ms, contents) == (("a", (0, 13)), 12, None)
    assert one.watermark(12).rows == []
    assert (left(one), one.timer_count()) == ({}, 0)


def test_a_trigger_s_state_that_is_not_named_or_cannot_merge_is_refused() -> None:
    class Forgetful(Early):
        def states(self):
            return (self.seen,)

    class Unmergeable(Early):
        def __init__(self):
            self.seen = ReducingStateDescriptor("seen", Add(), "LONG")
            self.elements = ValueStateDescriptor("elements", "LONG")

        def on_element(self, value, timestamp_ms, window, ctx):
            return TriggerResult.CONTINUE

    one = Restoring(WindowSpec(TumblingEventTimeWindows(5), Forgetful()), TOTAL)
    with pytest.raises(ElementError, match=r"'elements', which its states\(\) does not return"):
        one.push((1, 1))
    one = Restoring(WindowSpec(EventTimeSessionWindows(5), Unmergeable()), TOTAL)
    with pytest.raises(ElementError, match="'elements' cannot be merged"):
        one.push((1, 1), (1, 3))


def test_an_assigner_that_merges_windows_into_the_past_is_refused() -> None:
    class Shrinking(MergingWindowAssigner):
        clock = TumblingEventTimeWindows.clock

        def assign_windows(self, value, timestamp_ms, processing_time_ms):
            return [TimeWindow(timestamp_ms, timestamp_ms + 10)]

        def default_trigger(self):
            return EventTimeTrigger()

        def merge_windows(self, windows):
            known = sorted(windows)
            return [(TimeWindow(0, 3), known)] if len(known) > 1 else []

    one = Restoring(WindowSpec(Shrinking()), TOTAL)
    one.watermark(5)
    one.push((1, 4))
    with pytest.raises(ElementError, match="must not end before the windows"):
        one.push((2, 5))


# -- the end of time --------------------------------------------------------------------------------
def test_a_lateness_beyond_the_end_of_time_does_not_overflow() -> None:
    spec = WindowSpec(TumblingEventTimeWindows(10), allowed_lateness_ms=MAX_WATERMARK_MS)
    one = Restoring(spec, TOTAL)
    one.push((1, 5), (2, MAX_WATERMARK_MS))
    output = one.watermark(MAX_WATERMARK_MS - 1)
    assert (output.rows, output.times_ms) == ([("a", 1)], [9])
    assert one.push((4, 3)).rows == [("a", 5)]
    assert one.watermark(MAX_WATERMARK_MS).rows == [("a", 2)]
    assert one.timer_count() == 0


def test_global_windows_fire_once_at_the_end_of_a_bounded_input() -> None:
    for trigger in (EventTimeTrigger(), ContinuousEventTimeTrigger(10)):
        one = Restoring(WindowSpec(GlobalWindows(), trigger), TOTAL)
        one.push((1, 5), (2, 7))
        assert one.watermark(MAX_WATERMARK_MS).rows == [("a", 3)]
        assert one.timer_count() == 0


@pytest.mark.parametrize(("first_ms", "interval_ms"), [(9, 3), (9, 4), (9, 9), (5, 5), (0, 100)])
def test_a_continuous_trigger_fires_at_the_end_whenever_the_first_element_comes(
    first_ms, interval_ms
) -> None:
    """Also for one in the window's last millisecond, where a firing behind that never came."""
    trigger = ContinuousProcessingTimeTrigger(interval_ms)
    one = Restoring(WindowSpec(TumblingProcessingTimeWindows(10), trigger), TOTAL)
    one.processing_time(first_ms)
    one.push((1, 0))
    assert one.processing_time(100).rows[-1] == ("a", 1)
    assert (left(one), one.timer_count()) == ({}, 0)


def test_a_continuous_trigger_does_not_make_up_for_intervals_since_an_old_window_ended() -> None:
    one = Restoring(WindowSpec(TumblingEventTimeWindows(10), ContinuousProcessingTimeTrigger(100)), TOTAL)
    one.processing_time(100_050)
    one.push((1, 3))
    assert one.processing_time(100_099).rows == []
    assert one.processing_time(100_100).rows == [("a", 1)]
    assert one.processing_time(100_200).rows == [("a", 1)]
    one.watermark(9)
    assert (left(one), one.timer_count()) == ({}, 0)


def test_a_continuous_trigger_leaves_no_timers_of_merged_windows_behind() -> None:
    one = Restoring(WindowSpec(EventTimeSessionWindows(50), ContinuousEventTimeTrigger(10)), TOTAL)
    for time_ms in range(0, 40):
        one.push((1, time_ms))
    assert one.timer_count() == 2
    assert one.watermark(MAX_WATERMARK_MS).rows == [("a", 40)] * 9
    assert (left(one), one.timer_count()) == ({}, 0)


def test_a_growing_session_takes_its_timers_along() -> None:
    one = Restoring(WindowSpec(EventTimeSessionWindows(5), allowed_lateness_ms=3), TOTAL)
    one.push(*((1, time_ms) for time_ms in range(9)))
    assert one.timer_count() == 1
    one.watermark(13)
    assert one.timer_count() == 1
    assert one.next_timer_ms(TimeDomain.EVENT_TIME) == 15


def test_processing_time_windows_do_not_wait_for_watermarks() -> None:
    one = Restoring(WindowSpec(TumblingProcessingTimeWindows(10)), TOTAL)
    one.processing_time(3)
    one.push((1, None), (2, None))
    assert one.watermark(MAX_WATERMARK_MS).rows == []
    output = one.processing_time(9)
    assert (output.rows, output.times_ms) == ([("a", 3)], [9])
    assert (left(one), one.timer_count()) == ({}, 0)


class Nothing(Evictor):
    """Leaves nothing behind a firing."""

    def evict_after(self, elements, window, ctx):
        return []


@pytest.mark.parametrize(
    "spec",
    [
        count_window(2),
        WindowSpec(GlobalWindows(), PurgingTrigger(CountTrigger(2))),
        WindowSpec(GlobalWindows(), CountTrigger(2), Nothing()),
        WindowSpec(GlobalWindows(), PurgingTrigger(CountTrigger(2)), Evictor()),
    ],
)
def test_of_a_window_without_end_nothing_stays_when_nothing_is_in_it(spec) -> None:
    operator = window_operator(spec, TOTAL, INPUT)
    keys = [f"k{number}" for number in range(50)]
    one = OperatorHarness(operator, key=lambda e: e[0], key_type="STRING")
    for n in (1, 2, 4, 8):
        one.push_all([((key, n), 0) for key in keys])
    assert sorted(one.take().rows) == sorted((key, n) for key in keys for n in (3, 12))
    assert (left(one), one.timer_count()) == ({}, 0)


def test_a_purged_window_without_end_goes_on_with_its_timers() -> None:
    one = Restoring(WindowSpec(GlobalWindows(), PurgingTrigger(ContinuousEventTimeTrigger(4))), TOTAL)
    assert one.push((1, 1)).rows == []
    assert one.watermark(4).rows == [("a", 1)]
    assert "window/open" not in left(one)
    assert one.push((2, 5)).rows == []
    assert one.watermark(7).rows == []
    assert one.watermark(8).rows == [("a", 2)]
    assert one.watermark(12).rows == []
    assert one.push((4, 13)).rows == []
    assert one.watermark(MAX_WATERMARK_MS).rows == [("a", 4)]
    assert (left(one), one.timer_count()) == ({}, 0)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (TumblingEventTimeWindows(10), TumblingProcessingTimeWindows(10), ("event time", "processing time")),
        (TumblingProcessingTimeWindows(10), TumblingEventTimeWindows(10), ("processing time", "event time")),
    ],
)
def test_windows_that_are_due_by_the_other_clock_are_refused(before, after, says) -> None:
    def made(assigner, **given):
        operator = window_operator(WindowSpec(assigner), TOTAL, INPUT)
        return OperatorHarness(operator, key=lambda e: e[0], key_type="STRING", **given)

    one = made(before)
    one.push(("a", 1), 0)
    was, now = (f"due by {clock}" for clock in says)
    with pytest.raises(StateMismatch, match=f"'window/open' is stored .*{was} and declared .*{now}"):
        made(after, restore=one.snapshot(), bases=one.bases).push(("a", 2), 0)


def test_a_purged_session_lasts_until_its_end() -> None:
    one = Restoring(WindowSpec(EventTimeSessionWindows(5), PurgingTrigger(CountTrigger(2))), TOTAL)
    assert one.push((1, 0), (2, 3)).rows == [("a", 3)]
    ((slot, (due_ms, _, contents)),) = one.entries("window/open").items()
    assert (slot, due_ms, contents) == (("a", (0, 8)), 7, None)
    assert one.push((4, 7), (8, 9)).rows == [("a", 12)]
    assert one.watermark(13).rows == []
    assert (left(one), one.timer_count()) == ({}, 0)


def test_event_time_windows_may_fire_by_processing_time() -> None:
    spec = WindowSpec(TumblingEventTimeWindows(10), PurgingTrigger(ProcessingTimeTrigger()))
    one = Restoring(spec, TOTAL)
    one.push((1, 5), (2, 6))
    assert one.watermark(8).rows == []
    assert one.processing_time(9).rows == [("a", 3)]
    assert one.watermark(9).rows == []
    assert (left(one), one.timer_count()) == ({}, 0)


@pytest.mark.parametrize("assigner", [TumblingEventTimeWindows(10), EventTimeSessionWindows(10)])
@pytest.mark.parametrize(("before_ms", "after_ms"), [(2, 20), (20, 2)])
def test_a_program_may_be_changed_to_wait_longer_or_shorter(assigner, before_ms, after_ms) -> None:
    def made(lateness_ms, **given):
        operator = window_operator(WindowSpec(assigner, allowed_lateness_ms=lateness_ms), TOTAL, INPUT)
        return OperatorHarness(operator, key=lambda e: e[0], key_type="STRING", **given)

    before = made(before_ms)
    before.push(("a", 1), 0)
    before.watermark(9)
    after = made(after_ms, restore=before.snapshot())
    after.push(("a", 2), 0)
    assert after.take().rows == [("a", 3)]
    after.watermark(9 + min(before_ms, after_ms))
    after.push(("a", 4), 0)
    assert after.take().rows == ([("a", 7)] if after_ms > before_ms else [])
    after.watermark(9 + max(before_ms, after_ms))
    assert (left(after), after.timer_count()) == ({}, 0)
