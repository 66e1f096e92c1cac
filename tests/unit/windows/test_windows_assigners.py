"""Which windows an element gets, what merges, and what is refused."""

from __future__ import annotations

import datetime

import pytest

from flinkish_spark.core.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.operators.windowing import Merge, MergingWindowSet
from flinkish_spark.windows import (
    GLOBAL_WINDOW,
    ContinuousEventTimeTrigger,
    CountEvictor,
    CountTrigger,
    DynamicEventTimeSessionWindows,
    EventTimeSessionWindows,
    GlobalWindows,
    MergingWindowAssigner,
    NoEventTime,
    PurgingTrigger,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    TimeEvictor,
    TimeWindow,
    Trigger,
    TriggerResult,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WindowSpec,
)


@pytest.mark.parametrize(
    ("assigner", "time_ms", "windows"),
    [
        (TumblingEventTimeWindows(5000), 0, [(0, 5000)]),
        (TumblingEventTimeWindows(5000), 4999, [(0, 5000)]),
        (TumblingEventTimeWindows(5000), 5000, [(5000, 10000)]),
        (TumblingEventTimeWindows(5000), -1, [(-5000, 0)]),
        (TumblingEventTimeWindows(5000, 100), 5099, [(100, 5100)]),
        (TumblingEventTimeWindows(5000, -100), 4899, [(-100, 4900)]),
        (SlidingEventTimeWindows(5000, 1000), 4999, [(s, s + 5000) for s in range(4000, -1, -1000)]),
        (SlidingEventTimeWindows(5000, 1000), 5000, [(s, s + 5000) for s in range(5000, 999, -1000)]),
        (SlidingEventTimeWindows(5000, 1000, 100), 5100, [(s, s + 5000) for s in range(5100, 1099, -1000)]),
        (SlidingEventTimeWindows(2, 5), 6, [(5, 7)]),
        (SlidingEventTimeWindows(2, 5), 7, []),
        (EventTimeSessionWindows(5000), 4999, [(4999, 9999)]),
        (DynamicEventTimeSessionWindows(len), 10, [(10, 13)]),
        (GlobalWindows(), None, [GLOBAL_WINDOW]),
    ],
)  # fmt: skip
def test_an_element_gets_the_windows_around_its_time(assigner, time_ms, windows) -> None:
    assert list(assigner.assign_windows("abc", time_ms, 77)) == windows


def test_processing_time_windows_go_by_the_processing_time() -> None:
    assert list(TumblingProcessingTimeWindows(10, 3).assign_windows("e", 500, 12)) == [(3, 13)]
    assert list(SlidingProcessingTimeWindows(10, 5).assign_windows("e", None, 12)) == [(10, 20), (5, 15)]


@pytest.mark.parametrize("time_ms", [MAX_WATERMARK_MS, MAX_WATERMARK_MS - 3, MIN_WATERMARK_MS])
@pytest.mark.parametrize(
    "assigner", [TumblingEventTimeWindows(10), SlidingEventTimeWindows(10, 5), EventTimeSessionWindows(10)]
)
def test_windows_at_the_ends_of_time_fit_into_64_bits(assigner, time_ms) -> None:
    for window in assigner.assign_windows("e", time_ms, 0):
        assert MIN_WATERMARK_MS <= window.start_ms <= window.end_ms <= MAX_WATERMARK_MS
        assert window.max_timestamp_ms <= MAX_WATERMARK_MS


def test_an_element_without_a_timestamp_is_refused_by_event_time_windows() -> None:
    for assigner in (TumblingEventTimeWindows(5), SlidingEventTimeWindows(5, 1), EventTimeSessionWindows(5)):
        with pytest.raises(NoEventTime, match="assign timestamps and watermarks"):
            assigner.assign_windows("e", None, 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TumblingEventTimeWindows(0),
        lambda: TumblingEventTimeWindows(-1),
        lambda: TumblingEventTimeWindows(10, 10),
        lambda: TumblingEventTimeWindows(10, -10),
        lambda: SlidingEventTimeWindows(10, 0),
        lambda: SlidingEventTimeWindows(0, 10),
        lambda: SlidingEventTimeWindows(10, 5, 5),
        lambda: EventTimeSessionWindows(0),
        lambda: EventTimeSessionWindows(True),
        lambda: CountTrigger(0),
        lambda: CountEvictor(-1),
        lambda: TimeEvictor(0),
        lambda: CountEvictor(1, "AFTER"),
        lambda: ContinuousEventTimeTrigger(0.5),
        lambda: PurgingTrigger(CountTrigger),
        lambda: WindowSpec(GlobalWindows),
        lambda: WindowSpec(GlobalWindows(), CountTrigger),
        lambda: WindowSpec(GlobalWindows(), late_output="late"),
        lambda: WindowSpec(GlobalWindows(), allowed_lateness_ms=-1),
    ],
)
def test_settings_that_are_out_of_range_are_refused(make) -> None:
    with pytest.raises(ConfigError, match=r"It must be .*To do: "):
        make()


def test_a_session_gap_of_an_element_that_is_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="gap must be a positive number of milliseconds, not 0"):
        DynamicEventTimeSessionWindows(lambda e: 0).assign_windows("e", 1, 1)


def test_a_window_knows_its_last_instant_and_its_bounds_as_timestamps() -> None:
    window = TimeWindow(1_000, 2_000)
    assert (window.max_timestamp_ms, window) == (1_999, (1_000, 2_000))
    assert window.start == datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=datetime.UTC)
    assert window.end == datetime.datetime(1970, 1, 1, 0, 0, 2, tzinfo=datetime.UTC)
    assert (GLOBAL_WINDOW.start, GLOBAL_WINDOW.end) == (None, None)
    assert GLOBAL_WINDOW.max_timestamp_ms == MAX_WATERMARK_MS


class NoMerging(Trigger):
    def on_element(self, value, timestamp_ms, window, ctx):
        return TriggerResult.FIRE

    def on_event_time(self, time_ms, window, ctx):
        return TriggerResult.CONTINUE

    def on_processing_time(self, time_ms, window, ctx):
        return TriggerResult.CONTINUE

    def clear(self, window, ctx):
        pass


def test_windows_that_merge_need_a_trigger_that_can() -> None:
    WindowSpec(TumblingEventTimeWindows(5), NoMerging())
    with pytest.raises(ConfigError, match=r"EventTimeSessionWindows cannot have the trigger NoMerging"):
        WindowSpec(EventTimeSessionWindows(5), NoMerging())


# -- the set of merging windows ---------------------------------------------------------------------
def merging(*windows: tuple[int, int]) -> MergingWindowSet:
    found = MergingWindowSet(EventTimeSessionWindows(3))
    for window in windows:
        found.add(TimeWindow(*window))
    return found


def test_a_growing_window_takes_its_content_along() -> None:
    windows = merging((0, 4))
    assert windows.add(TimeWindow(0, 4)) == ((0, 4), [])
    assert windows.add(TimeWindow(3, 5)) == ((0, 5), [Merge((0, 5), [(0, 4)], [(0, 4)])])
    assert windows.add(TimeWindow(4, 6)) == ((0, 6), [Merge((0, 6), [(0, 5)], [(0, 5)])])
    for inside in ((1, 4), (0, 4), (3, 5), (4, 6), (0, 6)):
        assert windows.add(TimeWindow(*inside)) == ((0, 6), [])
        assert windows.windows == [(0, 6)]
    assert windows.add(TimeWindow(11, 14)) == ((11, 14), [])
    assert windows.add(TimeWindow(10, 13)) == ((10, 14), [Merge((10, 14), [(11, 14)], [(11, 14)])])
    assert windows.windows == [(0, 6), (10, 14)]


def test_a_late_window_bridges_others_and_touching_ones_are_one() -> None:
    windows = merging((0, 3), (5, 8), (10, 13))
    bridged = [(5, 8), (10, 13)]
    assert windows.add(TimeWindow(8, 10)) == ((5, 13), [Merge((5, 13), bridged, bridged)])
    for inside in ((5, 8), (8, 10), (10, 13)):
        assert windows.add(TimeWindow(*inside)) == ((5, 13), [])
    bridged = [(0, 3), (5, 13)]
    assert windows.add(TimeWindow(3, 5)) == ((0, 13), [Merge((0, 13), bridged, bridged)])
    assert windows.windows == [(0, 13)]


def test_a_window_that_covers_others_has_their_contents_in_the_order_of_their_times() -> None:
    windows = merging((1, 2))
    assert windows.add(TimeWindow(0, 3)) == ((0, 3), [Merge((0, 3), [(1, 2)], [(1, 2)])])
    covered = [(1, 3), (5, 8), (10, 13)]
    windows = merging(*reversed(covered))
    assert windows.add(TimeWindow(0, 13)) == ((0, 13), [Merge((0, 13), covered, covered)])
    assert windows.windows == [(0, 13)]


def test_a_window_that_was_there_and_covers_an_earlier_one_has_both_contents() -> None:
    windows = MergingWindowSet(Lazy(3), [TimeWindow(0, 4), TimeWindow(0, 9)])
    actual, merges = windows.add(TimeWindow(8, 9))
    assert (actual, merges) == ((0, 9), [Merge((0, 9), [(0, 4)], [(0, 4), (0, 9)])])
    assert windows.windows == [(0, 9)]


class Lazy(EventTimeSessionWindows):
    """Merges only when there are three windows, and then others than the new one."""

    def merge_windows(self, windows):
        known = sorted(windows)
        return super().merge_windows(known) if len(known) >= 3 else []


def test_windows_that_merge_without_the_new_one_are_all_still_there() -> None:
    assert isinstance(Lazy(3), MergingWindowAssigner)
    windows = MergingWindowSet(Lazy(3))
    for window in ((0, 2), (2, 5), (1, 2), (10, 12)):
        actual, _ = windows.add(TimeWindow(*window))
        assert actual in windows.windows
