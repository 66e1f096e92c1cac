"""Triggers that fire every so often while a window lasts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from flinkish_spark.operators.elements import MAX_WATERMARK_MS
from flinkish_spark.state import ReducingStateDescriptor, StateDescriptor
from flinkish_spark.windows.assigners import NoEventTime
from flinkish_spark.windows.checks import positive_ms
from flinkish_spark.windows.time_window import TimeWindow
from flinkish_spark.windows.triggers import Trigger, TriggerContext, TriggerResult


class _Least:
    def reduce(self, first: int, second: int) -> int:
        """Return the lesser."""
        return min(first, second)


class _Continuous(Trigger):
    """The next firing of a window is a state: at multiples of the interval, at the latest at its end."""

    def __init__(self, interval_ms: int) -> None:
        self._interval_ms = positive_ms("interval_ms", interval_ms)
        self._next_ms = ReducingStateDescriptor("next_ms", _Least(), "LONG")

    def states(self) -> Sequence[StateDescriptor]:
        """Return the time of the next firing."""
        return (self._next_ms,)

    def can_merge(self) -> bool:
        """Return True."""
        return True

    def on_merge(self, window: TimeWindow, ctx: TriggerContext) -> None:
        """Fire next when the first of the merged windows would have."""
        next_ms = ctx.get_partitioned_state(self._next_ms)
        for _ in ctx.merged_windows():
            if (merged_ms := next_ms.get()) is not None:
                self._delete(merged_ms, ctx)
        ctx.merge_partitioned_state(self._next_ms)
        if (first_ms := next_ms.get()) is not None:
            self._register(first_ms, ctx)

    def clear(self, window: TimeWindow, ctx: TriggerContext) -> None:
        """Delete timers and state."""
        next_ms = ctx.get_partitioned_state(self._next_ms)
        self._delete(window.max_timestamp_ms, ctx)
        if (time_ms := next_ms.get()) is not None:
            self._delete(time_ms, ctx)
            next_ms.clear()

    def _begin(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> None:
        if ctx.get_partitioned_state(self._next_ms).get() is None:
            first_ms = time_ms - time_ms % self._interval_ms + self._interval_ms
            # Not behind the end, where the window is cleared: an element may come in its last millisecond.
            self._set(min(first_ms, _limit_ms(time_ms, window)), ctx)

    def _at(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        next_ms = ctx.get_partitioned_state(self._next_ms)
        if next_ms.get() != time_ms:
            return TriggerResult.CONTINUE
        next_ms.clear()
        self._plan(time_ms, window, ctx)
        return TriggerResult.FIRE

    def _plan(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> None:
        """Plan the firing after one: also at the window's end, unless that is past."""
        limit_ms = _limit_ms(time_ms + 1, window)
        planned_ms = min(time_ms + self._interval_ms, limit_ms)
        if planned_ms > time_ms:
            self._set(planned_ms, ctx)

    def _set(self, planned_ms: int, ctx: TriggerContext) -> None:
        ctx.get_partitioned_state(self._next_ms).add(planned_ms)
        self._register(planned_ms, ctx)

    @abstractmethod
    def _register(self, time_ms: int, ctx: TriggerContext) -> None:
        """Register a timer of the trigger's clock."""

    @abstractmethod
    def _delete(self, time_ms: int, ctx: TriggerContext) -> None:
        """Delete a timer of the trigger's clock."""


def _limit_ms(time_ms: int, window: TimeWindow) -> int:
    """Return the latest that a window may fire from a time on: at its end, unless that is past.

    It is where windows go by event time and the trigger by the clock: records may be days old. Then there is
    no firing at the end, and above all none for each interval since.
    """
    end_ms = window.max_timestamp_ms
    return end_ms if time_ms <= end_ms else MAX_WATERMARK_MS


class ContinuousEventTimeTrigger(_Continuous):
    """Fires whenever the watermark passes a multiple of `interval_ms`, and at a window's end.

    A watermark that passes several of them at once fires for each. An element that comes when the
    watermark is past the window fires at once.

    Raises
    ------
    ConfigError
        The interval is not positive.
    """

    def on_element(
        self, value: Any, timestamp_ms: int | None, window: TimeWindow, ctx: TriggerContext
    ) -> TriggerResult:
        """Fire at once if the watermark is past the window; else plan."""
        if window.max_timestamp_ms <= ctx.current_watermark():
            return TriggerResult.FIRE
        if timestamp_ms is None:
            raise NoEventTime
        ctx.register_event_time_timer(window.max_timestamp_ms)
        self._begin(timestamp_ms, window, ctx)
        return TriggerResult.CONTINUE

    def on_event_time(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        """Fire at the window's end, and when it was planned."""
        end_ms = window.max_timestamp_ms
        next_ms = ctx.get_partitioned_state(self._next_ms)
        if time_ms == end_ms:
            next_ms.clear()
            return TriggerResult.FIRE
        if ctx.current_watermark() == end_ms == MAX_WATERMARK_MS:
            # A window without end at the end of the input: its last firing comes, and none in between.
            next_ms.clear()
            return TriggerResult.CONTINUE
        return self._at(time_ms, window, ctx)

    def on_processing_time(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        """Go on."""
        return TriggerResult.CONTINUE

    def _register(self, time_ms: int, ctx: TriggerContext) -> None:
        ctx.register_event_time_timer(time_ms)

    def _delete(self, time_ms: int, ctx: TriggerContext) -> None:
        ctx.delete_event_time_timer(time_ms)


class ContinuousProcessingTimeTrigger(_Continuous):
    """Fires whenever the processing time passes a multiple of `interval_ms` after an element came.

    Raises
    ------
    ConfigError
        The interval is not positive.
    """

    def on_element(
        self, value: Any, timestamp_ms: int | None, window: TimeWindow, ctx: TriggerContext
    ) -> TriggerResult:
        """Plan."""
        self._begin(ctx.current_processing_time(), window, ctx)
        return TriggerResult.CONTINUE

    def on_event_time(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        """Go on."""
        return TriggerResult.CONTINUE

    def on_processing_time(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        """Fire when it was planned."""
        return self._at(time_ms, window, ctx)

    def _register(self, time_ms: int, ctx: TriggerContext) -> None:
        ctx.register_processing_time_timer(time_ms)

    def _delete(self, time_ms: int, ctx: TriggerContext) -> None:
        ctx.delete_processing_time_timer(time_ms)
