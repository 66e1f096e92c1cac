"""Windows that may become one, element by element: sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flinkish_spark.errors import ConfigError
from flinkish_spark.operators.element_windows import WindowOperator
from flinkish_spark.operators.elements import MAX_WATERMARK_MS, TimeDomain, Timer
from flinkish_spark.operators.keyed_context import KeyedStates
from flinkish_spark.operators.merging_windows import MERGING_WINDOWS, Merge, MergingWindowSet, StoredWindow
from flinkish_spark.operators.stored_elements import ElementType
from flinkish_spark.operators.window_contexts import refuse_window_state
from flinkish_spark.operators.window_results import WindowResults
from flinkish_spark.state import StateDescriptor
from flinkish_spark.windows.assigners import MergingWindowAssigner
from flinkish_spark.windows.spec import WindowComputation, WindowSpec
from flinkish_spark.windows.time_window import TimeWindow
from flinkish_spark.windows.triggers import EventTimeTrigger


class MergingWindowOperator(WindowOperator):
    """Windows that may become one, whatever their trigger and lateness."""

    def __init__(
        self,
        spec: WindowSpec,
        computation: WindowComputation,
        input_type: ElementType,
        results: WindowResults,
    ) -> None:
        super().__init__(spec, computation, input_type, results)
        if not isinstance(spec.assigner, MergingWindowAssigner):
            raise ConfigError(f"{type(spec.assigner).__name__} has no windows that merge")
        self._merging = spec.assigner
        #: Whether the timer at which a window fires is also the one that cleans it up.
        self._ends_in_one_timer = self._only_waits and self._is_event_time and spec.allowed_lateness_ms == 0

    def _open_windows(self, of_key: KeyedStates) -> None:
        self._stored = of_key.get_list_state(MERGING_WINDOWS)

    def _can_have_window_state(self, descriptor: StateDescriptor) -> None:
        refuse_window_state(descriptor)

    def _add(self, value: Any, time_ms: int | None, windows: Sequence[TimeWindow]) -> bool:
        key, is_taken = self._scope.key, False
        in_flight = self._windows()
        for window in windows:
            actual, merges = in_flight.add(window)
            for merge in merges:
                self._merge(merge)
            if self._is_over(actual):
                in_flight.retire(actual)
                continue
            is_taken = True
            place = in_flight.state_window(actual) or actual
            self._scope.enter(key, place)
            self._contents.add(value, time_ms)
            self._scope.enter(key, actual)
            if merges and self._ends_in_one_timer:
                # `on_merge` has registered it; the window is not over, so its end is still to come.
                continue
            result = self._trigger.on_element(value, time_ms, actual, self._trigger_context)
            self._obey(result, actual, place)
            self._register_cleanup(actual)
        self._persist(in_flight)
        return is_taken

    def _place_of(self, window: TimeWindow) -> TimeWindow | None:
        self._in_flight = self._windows()
        return self._in_flight.state_window(window)

    def _clean_up(self, window: TimeWindow, place: TimeWindow) -> None:
        super()._clean_up(window, place)
        # Those of the timer's key, for which `_place_of` was asked just before.
        self._in_flight.retire(window)
        self._persist(self._in_flight)

    def _merge(self, merge: Merge) -> None:
        """Make one of windows: what their trigger has, their timers, their content."""
        self._refuse_past(merge.window)
        key = self._scope.key
        self._scope.enter(key, merge.window)
        self._trigger_context.merging(merge.merged)
        self._trigger.on_merge(merge.window, self._trigger_context)
        self._trigger_context.merging(())
        for window in merge.merged:
            if rows := self._results.withdrawn(key, window):
                self._context.emit(rows, window.max_timestamp_ms)
            self._scope.enter(key, window)
            self._trigger.clear(window, self._trigger_context)
            if not self._ends_in_one_timer:
                self._delete_cleanup(window)
        for place in merge.merged_state_windows:
            self._contents.merge((key, place), (key, merge.state_window))

    def _refuse_past(self, window: TimeWindow) -> None:
        now_ms = self._timers.watermark_ms if self._is_event_time else self._timers.processing_time_ms
        if self._cleanup_ms(window) <= now_ms:
            raise ValueError(
                f"{type(self._merging).__name__} merged windows to {window}, whose time is over at {now_ms}; "
                "a merged window must not end before the windows that it replaces"
            )

    def _windows(self) -> MergingWindowSet:
        self._enter_key()
        return MergingWindowSet(self._merging, self._stored)

    def _persist(self, in_flight: MergingWindowSet) -> None:
        self._enter_key()
        in_flight.persist(self._stored)


def is_plain_session(spec: WindowSpec) -> bool:
    """Return whether windows merge where they overlap, and fire once, at their end in event time."""
    assigner = spec.assigner
    return (
        isinstance(assigner, MergingWindowAssigner)
        and type(assigner).merge_windows is MergingWindowAssigner.merge_windows
        and assigner.clock is TimeDomain.EVENT_TIME
        and type(spec.actual_trigger) is EventTimeTrigger
        and spec.allowed_lateness_ms == 0
        and spec.retraction_field is None
    )


class SessionOperator(MergingWindowOperator):
    """Windows of :func:`is_plain_session`: with the states, timers and results of its parent, for less.

    Such a window has one timer, which fires it and ends it. A trigger that only waits for it need not be
    asked, and of a key's windows one is looked up in the stored list, and replaced there.
    """

    def _open_windows(self, of_key: KeyedStates) -> None:
        super()._open_windows(of_key)
        self._of_keys = of_key.tables[MERGING_WINDOWS.name]

    def _add(self, value: Any, time_ms: int | None, windows: Sequence[TimeWindow]) -> bool:
        scope, timers, watermark_ms = self._scope, self._timers, self._timers.watermark_ms
        if not windows:
            return False
        key, window = scope.key, windows[0]
        start_ms, end_ms = window
        known = self._of_keys.entries.get(key, ())
        # Most of a key's windows lie before the element: that is asked first.
        near = [entry for entry in known if entry[1] >= start_ms and entry[0] <= end_ms]
        if len(windows) > 1 or len(near) > 1 or end_ms == MAX_WATERMARK_MS:
            return super()._add(value, time_ms, windows)
        if not near:
            if end_ms <= watermark_ms + 1:
                return False
            self._set_windows(key, [*known, (start_ms, end_ms, start_ms, end_ms)])
            scope.enter(key, window)
            timers.register_event_time_timer(end_ms - 1)
            self._contents.add(value, time_ms)
            return True
        (entry,) = near
        before = TimeWindow(entry[0], entry[1])
        if before.end_ms <= watermark_ms + 1 or before.end_ms == MAX_WATERMARK_MS:
            # It was to wait longer by an earlier program.
            return super()._add(value, time_ms, windows)
        actual = before.cover(window)
        if actual != before:
            place = entry[2:]
            self._set_windows(key, [*(one for one in known if one is not entry), (*actual, *place)])
            scope.enter(key, actual)
            timers.register_event_time_timer(actual.end_ms - 1)
            scope.enter(key, before)
            timers.delete_event_time_timer(before.end_ms - 1)
        scope.enter(key, TimeWindow(entry[2], entry[3]))
        self._contents.add(value, time_ms)
        return True

    def on_timer(self, timer: Timer, domain: TimeDomain) -> None:
        """Fire the window and forget it."""
        key, window = timer.key, TimeWindow._make(timer.namespace)
        known = self._of_keys.entries.get(key, ())
        at = next((at for at, one in enumerate(known) if one[:2] == window), None)
        if at is None or timer.time_ms != window.end_ms - 1 or domain is not TimeDomain.EVENT_TIME:
            # A timer of an earlier program; its windows may have waited longer.
            super().on_timer(timer, domain)
            return
        self._firing.window = window
        self._scope.enter(key, TimeWindow._make(known[at][2:]))
        self._contents.fire(self._emit, window, self._trigger_context)
        self._contents.clear()
        if self._function is not None:
            self._enter_key()
            self._firing.window = window
            self._function.clear(self._firing)
        self._set_windows(key, [*known[:at], *known[at + 1 :]])

    def _set_windows(self, key: Any, entries: list[StoredWindow]) -> None:
        table = self._of_keys
        if entries:
            table.entries[key] = entries
        else:
            del table.entries[key]
        table.changed.add(key)
