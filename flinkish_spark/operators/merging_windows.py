"""Windows that may become one, element by element: sessions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from flinkish_spark.core.elements import MAX_WATERMARK_MS, TimeDomain, Timer
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.iterators import elements_of
from flinkish_spark.operators.windowing import WindowOperator, WindowResults, refuse_window_state
from flinkish_spark.state.descriptors import ListStateDescriptor, StateDescriptor
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.states import ListState
from flinkish_spark.types.rows import ElementType
from flinkish_spark.windows.assigners import MergingWindowAssigner
from flinkish_spark.windows.spec import WindowComputation, WindowSpec
from flinkish_spark.windows.time_window import TimeWindow
from flinkish_spark.windows.triggers import EventTimeTrigger

#: Entries: a window, and the window in whose place its content is: when windows merge, it stays in the place
#: of one of them, so a session that grows with each element does not carry its content along.
MERGING_WINDOWS = ListStateDescriptor(
    "window/merging", "start_ms LONG, end_ms LONG, state_start_ms LONG, state_end_ms LONG"
)

StoredWindow = tuple[int, int, int, int]


class Merge(NamedTuple):
    window: TimeWindow
    #: The windows that are gone; not the one whose coming caused the merge, which never had anything.
    merged: list[TimeWindow]
    #: Where the content is to be.
    state_window: TimeWindow
    #: Where the rest of it is.
    merged_state_windows: list[TimeWindow]


class MergingWindowSet:
    """The windows of one key that are not yet cleaned up; made anew for each element and timer."""

    __slots__ = ("_assigner", "_entries", "_is_changed")

    def __init__(self, assigner: MergingWindowAssigner, stored: Iterable[StoredWindow] = ()) -> None:
        self._assigner, self._entries, self._is_changed = assigner, list(stored), False

    def __len__(self) -> int:
        return len(self._entries)

    def state_window(self, window: TimeWindow) -> TimeWindow | None:
        """Return where a window's content is; None if the window is gone."""
        start_ms, end_ms = window
        for entry in self._entries:
            if entry[0] == start_ms and entry[1] == end_ms:
                return TimeWindow(entry[2], entry[3])
        return None

    def retire(self, window: TimeWindow) -> None:
        self._entries = [entry for entry in self._entries if entry[:2] != window]
        self._is_changed = True

    def add(self, window: TimeWindow) -> tuple[TimeWindow, list[Merge]]:
        """Add a window; return the one that it is part of now, and what had to merge for that."""
        near = self._entries
        if type(self._assigner).merge_windows is MergingWindowAssigner.merge_windows:
            # Those that neither overlap nor touch stay as they are.
            start_ms, end_ms = window
            near = [entry for entry in near if entry[0] <= end_ms and entry[1] >= start_ms]
            if not near:
                self._replace(near, [(*window, *window)])
                return window, []
            if len(near) == 1:
                return self._grow(near[0], window)
        places = {TimeWindow(entry[0], entry[1]): TimeWindow(entry[2], entry[3]) for entry in near}
        if window in places:
            return window, []
        actual, merges = self._merge(window, places)
        places.setdefault(actual, actual)
        self._replace(near, [(*one, *place) for one, place in places.items()])
        return actual, merges

    def _grow(self, entry: StoredWindow, window: TimeWindow) -> tuple[TimeWindow, list[Merge]]:
        """Make a window cover a new one: what happens to nearly all elements of sessions."""
        before, place = TimeWindow(entry[0], entry[1]), TimeWindow(entry[2], entry[3])
        actual = before.cover(window)
        if actual == before:
            return before, []
        self._replace([entry], [(*actual, *place)])
        return actual, [Merge(actual, [before], place, [])]

    def _replace(self, gone: list[StoredWindow], new: list[StoredWindow]) -> None:
        if gone:
            self._entries = [entry for entry in self._entries if entry not in gone]
        self._entries += new
        self._is_changed = True

    def _merge(
        self, window: TimeWindow, places: dict[TimeWindow, TimeWindow]
    ) -> tuple[TimeWindow, list[Merge]]:
        actual, merges = window, []
        for result, parts in elements_of(self._assigner.merge_windows([*places, window])) if places else ():
            merged = sorted(one for one in parts if one != window)
            if window in parts:
                actual = result
            # The earliest keeps its place: the order of a list's elements follows from it.
            merged_places = [places.pop(one) for one in merged]
            places[result] = merged_places[0]
            gone = [one for one in merged if one != result]
            if gone:
                merges.append(Merge(result, gone, merged_places[0], merged_places[1:]))
        return actual, merges

    def persist(self, state: ListState[StoredWindow]) -> None:
        if self._is_changed:
            state.update(self._entries)
            self._is_changed = False


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
            self._contents.add(self._own(value), time_ms)
            self._scope.enter(key, actual)
            if merges and self._ends_in_one_timer:
                # `on_merge` has registered it; the window is not over, so its end is still to come.
                continue
            result = self._trigger.on_element(self._own(value), time_ms, actual, self._trigger_context)
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
    """Windows of :func:`is_plain_session`: with the states, timers and results of its parent, for less."""

    # Such a window has one timer, which fires it and ends it. A trigger that only waits for it need not be
    # asked, and of a key's windows one is looked up in the stored list, and replaced there.

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
