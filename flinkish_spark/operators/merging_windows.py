"""Windows that may become one, element by element: sessions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from flinkish_spark.core.elements import TimeDomain, Timer
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.iterators import elements_of
from flinkish_spark.operators.windowing import WindowOperator, WindowResults, refuse_window_state
from flinkish_spark.state.descriptors import StateDescriptor
from flinkish_spark.types.rows import ElementType
from flinkish_spark.windows.assigners import MergingWindowAssigner
from flinkish_spark.windows.spec import WindowComputation, WindowSpec
from flinkish_spark.windows.time_window import TimeWindow


class Merge(NamedTuple):
    window: TimeWindow
    #: The windows that are gone; not the one whose coming caused the merge, which never had anything.
    merged: list[TimeWindow]
    #: Those whose contents the window has, in this order: that of a list's elements follows from it.
    contents: list[TimeWindow]


class MergingWindowSet:
    """The windows of one key that are not yet cleaned up."""

    __slots__ = ("_assigner", "windows")

    def __init__(self, assigner: MergingWindowAssigner, windows: Iterable[TimeWindow] = ()) -> None:
        self._assigner, self.windows = assigner, list(windows)

    def add(self, window: TimeWindow) -> tuple[TimeWindow, list[Merge]]:
        """Add a window; return the one that it is part of now, and what had to merge for that."""
        near = self.windows
        if type(self._assigner).merge_windows is MergingWindowAssigner.merge_windows:
            # Those that neither overlap nor touch stay as they are.
            start_ms, end_ms = window
            near = [one for one in near if one[0] <= end_ms and one[1] >= start_ms]
            if not near:
                self.windows.append(window)
                return window, []
            if len(near) == 1:
                return self._grow(near[0], window)
        if window in near:
            return window, []
        return self._merge(window, near)

    def _grow(self, before: TimeWindow, window: TimeWindow) -> tuple[TimeWindow, list[Merge]]:
        """Make a window cover a new one: what happens to nearly all elements of sessions."""
        actual = before.cover(window)
        if actual == before:
            return before, []
        self.windows[self.windows.index(before)] = actual
        return actual, [Merge(actual, [before], [before])]

    def _merge(self, window: TimeWindow, near: Sequence[TimeWindow]) -> tuple[TimeWindow, list[Merge]]:
        known, actual, merges = sorted(near), window, []
        results = elements_of(self._assigner.merge_windows([*known, window])) if known else ()
        for result, parts in results:
            merged = sorted(one for one in parts if one != window)
            if window in parts:
                actual = result
            for one in merged:
                self.windows.remove(one)
            self.windows.append(result)
            gone = [one for one in merged if one != result]
            if gone:
                merges.append(Merge(result, gone, merged))
        if actual not in self.windows:
            self.windows.append(actual)
        return actual, merges


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
            raise ConfigError(
                f"{type(spec.assigner).__name__} has no windows that merge",
                what_to_do="take EventTimeSessionWindows or ProcessingTimeSessionWindows",
            )
        self._merging = spec.assigner
        #: Whether the timer at which a window fires is also the one that cleans it up.
        self._ends_in_one_timer = self._only_waits and self._is_event_time and spec.allowed_lateness_ms == 0
        #: The windows of each key, and the timers of the call of the key group in which they are known.
        self._of_keys: dict[Any, MergingWindowSet] = {}
        self._known_with: object = None

    def on_timer(self, timer: Timer, domain: TimeDomain) -> None:
        # A trigger may have left a timer behind of a window that was merged or is over.
        if (timer.key, timer.namespace) in self._table.entries:
            super().on_timer(timer, domain)

    def _can_have_window_state(self, descriptor: StateDescriptor) -> None:
        refuse_window_state(descriptor)

    def _add(self, value: Any, time_ms: int | None, windows: Sequence[TimeWindow]) -> bool:
        key, is_taken = self._scope.key, False
        known = self._windows_of(key)
        for window in windows:
            actual, merges = known.add(window)
            for merge in merges:
                self._merge(merge)
            if self._is_over(actual):
                if (key, actual) not in self._table.entries:
                    known.windows.remove(actual)
                continue
            is_taken = True
            self._scope.enter(key, actual)
            self._contents.add(self._own(value), time_ms)
            if merges and self._ends_in_one_timer:
                # `on_merge` has registered it; the window is not over, so its end is still to come.
                continue
            result = self._trigger.on_element(self._own(value), time_ms, actual, self._trigger_context)
            self._obey(result, actual)
            self._register_cleanup(actual)
        return is_taken

    def _stays_empty(self, window: TimeWindow) -> bool:
        # The entries say which windows of a key there are, for the next ones to merge with.
        return True

    def _clean_up(self, window: TimeWindow) -> None:
        known = self._windows_of(self._scope.key).windows
        super()._clean_up(window)
        known.remove(window)

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
        self._gather([(key, window) for window in merge.contents], (key, merge.window))

    def _gather(self, slots: Sequence[Any], into: Any) -> None:
        """Put the contents of windows into one, in their order; nothing may be in some."""
        first, *others = slots
        for slot in others:
            self._contents.merge(slot, first)
        if first != into:
            self._contents.merge(first, into)

    def _refuse_past(self, window: TimeWindow) -> None:
        now_ms = self._timers.watermark_ms if self._is_event_time else self._timers.processing_time_ms
        if self._cleanup_ms(window) <= now_ms:
            raise ValueError(
                f"{type(self._merging).__name__} merged windows to {window}, whose time is over at {now_ms}; "
                "a merged window must not end before the windows that it replaces"
            )

    def _windows_of(self, key: Any) -> MergingWindowSet:
        if self._known_with is not self._timers.queues:
            # The key group has been loaded.
            self._known_with, self._of_keys = self._timers.queues, {}
            for own, window in self._table.entries:
                self._windows_of(own).windows.append(TimeWindow._make(window))
        found = self._of_keys.get(key)
        if found is None:
            found = self._of_keys[key] = MergingWindowSet(self._merging)
        return found
