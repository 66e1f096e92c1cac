"""Windows of a keyed stream, element by element.

A window's content, its trigger's states and its timers are kept per key and window, until the window's time
and the allowed lateness are over. What a window emits has the time of its last instant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flinkish_spark.operators.elements import MAX_WATERMARK_MS, TimeDomain, Timer
from flinkish_spark.operators.keyed_context import FunctionContext, KeyedStates, Timers
from flinkish_spark.operators.keyed_operators import KeyedStreamOperator, Processor
from flinkish_spark.operators.rich_parts import close_part, open_part
from flinkish_spark.operators.stored_elements import ElementType
from flinkish_spark.operators.window_contents import CONTENTS, contents_of, function_of, part_of
from flinkish_spark.operators.window_contexts import (
    FiringContext,
    FunctionStates,
    TriggerScope,
)
from flinkish_spark.operators.window_results import WindowResults
from flinkish_spark.state import StateDescriptor
from flinkish_spark.state.tables import KeyScope
from flinkish_spark.windows.assigners import assigning
from flinkish_spark.windows.spec import WindowComputation, WindowSpec
from flinkish_spark.windows.time_window import TimeWindow
from flinkish_spark.windows.triggers import EventTimeTrigger, TriggerResult, check_result

#: Counts elements that came too late for all their windows and went nowhere.
LATE_RECORDS_DROPPED = "late_records_dropped"


class WindowOperator(KeyedStreamOperator):
    """Windows that stay what they are."""

    def __init__(
        self,
        spec: WindowSpec,
        computation: WindowComputation,
        input_type: ElementType,
        results: WindowResults,
    ) -> None:
        self._spec, self._assigner, self._results = spec, spec.assigner, results
        self._trigger = spec.actual_trigger
        self._contents = contents_of(computation, input_type, spec.evictor)
        self._function = function_of(computation)
        self._part = part_of(computation)
        #: What the windows go by.
        self.clock = spec.assigner.clock
        self._is_event_time = self.clock is TimeDomain.EVENT_TIME
        #: Whether all that the trigger does with an element, before its window's end, is wait for that end.
        self._only_waits = type(self._trigger) is EventTimeTrigger
        #: The timers of the current call, and the slots whose trigger waits among them.
        self._queues: object = None
        self._waiting: set[Any] = set()

    # -- the operator's side ------------------------------------------------------------------------
    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        """Declare the states of windows, trigger and function."""
        self._scope, self._context, self._timers = states.scope, context, timers
        self._assign = assigning(self._assigner)
        #: The current key without a window, for states that its windows share.
        self._key_scope = KeyScope()
        of_key = states.through(self._key_scope)
        open_part(self._part, states.uid, states.max_parallelism)
        self._contents.open(states)
        self._results.open(states)
        self._kept = states.tables[CONTENTS]
        self._trigger_context = TriggerScope(self._trigger, states, timers)
        function_states = FunctionStates(
            of_key.of_function(), states.of_function(), self._can_have_window_state
        )
        if self._function is not None:
            self._function.open(function_states)
        function_states.seal()
        self._firing = FiringContext(function_states, context, timers)
        self._open_windows(of_key)

    def processors(self) -> tuple[Processor, ...]:
        """Return what handles an element."""
        return (self.process_element,)

    def process_element(self, value: Any, context: FunctionContext) -> None:
        """Add an element to its windows, and fire those whose triggers say so."""
        time_ms = context.timestamp_ms
        windows = self._assign(value, time_ms, self._timers.processing_time_ms)
        if not self._add(value, time_ms, windows) and self._is_late(time_ms):
            if self._spec.late_output is None:
                context.count(LATE_RECORDS_DROPPED)
            else:
                context.output(self._spec.late_output, value)

    def on_timer(self, timer: Timer, domain: TimeDomain) -> None:
        """Ask the trigger, and clean up if it is time to."""
        window = TimeWindow._make(timer.namespace)
        place = self._place_of(window)
        if place is None:
            # A trigger has left a timer behind of a window that was merged or is over.
            return
        if domain is TimeDomain.EVENT_TIME:
            result = self._trigger.on_event_time(timer.time_ms, window, self._trigger_context)
        else:
            result = self._trigger.on_processing_time(timer.time_ms, window, self._trigger_context)
        self._obey(result, window, place)
        if domain is not self._assigner.clock:
            return
        if timer.time_ms >= self._cleanup_ms(window):
            self._clean_up(window, place)
        else:
            # It is there already, unless the program was changed to wait longer.
            self._register_cleanup(window)

    def close(self) -> None:
        """Close the functions."""
        close_part(self._part)
        if self._function is not None:
            self._function.close()

    # -- windows ------------------------------------------------------------------------------------
    def _open_windows(self, of_key: KeyedStates) -> None:
        """Declare what is kept of a key's windows."""

    def _can_have_window_state(self, descriptor: StateDescriptor) -> None:
        """Refuse a state per window if there cannot be one."""

    def _add(self, value: Any, time_ms: int | None, windows: Sequence[TimeWindow]) -> bool:
        """Add an element to those windows that still take it; return whether there was one."""
        scope, contents, trigger, ctx = self._scope, self._contents, self._trigger, self._trigger_context
        key, kept, is_taken = scope.key, self._kept.entries, False
        watermark_ms = self._timers.watermark_ms
        waiting = self._slots_waiting()
        # What ends after this is not over: most windows, which need no closer look.
        over_ms = watermark_ms + 1 - self._spec.allowed_lateness_ms
        if watermark_ms == MAX_WATERMARK_MS:
            over_ms = watermark_ms
        for window in windows:
            if window.end_ms <= over_ms and self._is_over(window):
                continue
            is_taken = True
            scope.namespace = window
            scope.slot = slot = (key, window)
            is_new = slot not in kept
            contents.add(value, time_ms)
            if slot in waiting and window.end_ms > watermark_ms + 1:
                continue
            result = trigger.on_element(value, time_ms, window, ctx)
            if result is not TriggerResult.CONTINUE:
                self._obey(result, window, window)
            elif self._only_waits:
                waiting.add(slot)
            if is_new:
                self._register_cleanup(window)
        return is_taken

    def _slots_waiting(self) -> set[Any]:
        """Return the slots whose trigger has registered its timer in this call of the key group.

        Only there: what was registered in an earlier one may have been by another program.
        """
        if self._queues is not self._timers.queues:
            self._queues, self._waiting = self._timers.queues, set()
        return self._waiting

    def _place_of(self, window: TimeWindow) -> TimeWindow | None:
        """Return in which window's place the content of a window is; None if the window is gone."""
        return window

    def _obey(self, result: TriggerResult, window: TimeWindow, place: TimeWindow) -> None:
        """Do what a trigger said; the window is the current one before and after."""
        if result is TriggerResult.CONTINUE:
            return
        check_result(self._trigger, result)
        key = self._scope.key
        self._scope.enter(key, place)
        if result.is_fire:
            self._firing.window = window
            self._contents.fire(self._emit, window, self._trigger_context)
        if result.is_purge:
            self._contents.clear()
            # The next result does not contain this one, so it does not replace it.
            self._results.settle(key, window)
        self._scope.enter(key, window)

    def _emit(self, elements: Sequence[Any]) -> None:
        """Emit what the function makes of a window's elements; of none, that its results do not stand."""
        rows: Iterable[Any] | None = elements
        if elements and self._function is not None:
            self._enter_key()
            rows = self._function.process(self._scope.key, self._firing, elements)
        if rows is not None:
            # A generator runs here, with the window still the current one.
            window = self._firing.window
            rows = self._results.fired(self._scope.key, window, rows)
            self._context.emit(rows, window.max_timestamp_ms)

    def _clean_up(self, window: TimeWindow, place: TimeWindow) -> None:
        """Remove all that is kept of a window, which is the current one."""
        key = self._scope.key
        self._scope.enter(key, place)
        self._contents.clear()
        self._results.settle(key, window)
        self._scope.enter(key, window)
        self._trigger.clear(window, self._trigger_context)
        if self._function is not None:
            self._enter_key()
            self._firing.window = window
            self._function.clear(self._firing)

    def _enter_key(self) -> None:
        self._key_scope.enter(self._scope.key)
        self._key_scope.now_ms = self._scope.now_ms

    # -- lateness -----------------------------------------------------------------------------------
    def _cleanup_ms(self, window: TimeWindow) -> int:
        """Return when nothing is kept of a window any more, by the windows' clock."""
        end_ms = window.max_timestamp_ms
        if not self._is_event_time:
            return end_ms
        return min(end_ms + self._spec.allowed_lateness_ms, MAX_WATERMARK_MS)

    def _is_over(self, window: TimeWindow) -> bool:
        """Return whether a window does not take elements any more."""
        return self._is_event_time and self._cleanup_ms(window) <= self._timers.watermark_ms

    def _register_cleanup(self, window: TimeWindow) -> None:
        """Register the timer that cleans the current window up; at the end of all time nobody has to."""
        time_ms = self._cleanup_ms(window)
        if time_ms == MAX_WATERMARK_MS:
            return
        if self._is_event_time:
            self._timers.register_event_time_timer(time_ms)
        else:
            self._timers.register_processing_time_timer(time_ms)

    def _delete_cleanup(self, window: TimeWindow) -> None:
        if self._is_event_time:
            self._timers.delete_event_time_timer(self._cleanup_ms(window))
        else:
            self._timers.delete_processing_time_timer(self._cleanup_ms(window))

    def _is_late(self, time_ms: int | None) -> bool:
        return (
            self._is_event_time
            and time_ms is not None
            and time_ms + self._spec.allowed_lateness_ms <= self._timers.watermark_ms
        )
