"""Windows of a keyed stream, element by element: contexts, results, what becomes of each element."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from flinkish_spark.core.elements import MAX_WATERMARK_MS, OutputTag, TimeDomain, Timer
from flinkish_spark.core.iterators import elements_of
from flinkish_spark.core.subtask import SubtaskFacts
from flinkish_spark.operators.context import FunctionContext, close_part, open_part, put_aside
from flinkish_spark.operators.process import KeyedStreamOperator, Processor
from flinkish_spark.operators.window_contents import (
    OPEN,
    EvictedContents,
    WindowContents,
    function_of,
    part_of,
)
from flinkish_spark.state.descriptors import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.states import AggregatingState, ListState, MapState, ReducingState, ValueState
from flinkish_spark.state.tables import KeyScope
from flinkish_spark.state.timers import Timers
from flinkish_spark.types.rows import ElementType, OutputError, as_row
from flinkish_spark.types.to_python import taken
from flinkish_spark.windows.assigners import assigning
from flinkish_spark.windows.spec import (
    WindowComputation,
    WindowSpec,
)
from flinkish_spark.windows.time_window import TimeWindow
from flinkish_spark.windows.triggers import EventTimeTrigger, Trigger, TriggerResult, check_result


class WindowStateRefused(ValueError):
    """A state of a window, or of a trigger, cannot be had that way."""


class TriggerScope:
    """What a trigger is given: one object, whose scope is the current key and window."""

    __slots__ = (
        "_merged",
        "_scope",
        "_states",
        "current_processing_time",
        "current_watermark",
        "delete_event_time_timer",
        "delete_processing_time_timer",
        "register_event_time_timer",
        "register_processing_time_timer",
    )

    def __init__(self, trigger: Trigger, states: KeyedStates, timers: Timers) -> None:
        self._scope = states.scope
        self._merged: Sequence[TimeWindow] = ()
        self._states: dict[str, Any] = {}
        states = states.of_function()
        for descriptor in elements_of(trigger.states()):
            own = dataclasses.replace(descriptor, name=f"trigger/{descriptor.name}")
            states.per_namespace(own.name)
            self._states[descriptor.name] = states.any_state(own)
        # The same calls, without one in between.
        self.current_watermark = timers.current_watermark
        self.current_processing_time = timers.current_processing_time
        self.register_event_time_timer = timers.register_event_time_timer
        self.register_processing_time_timer = timers.register_processing_time_timer
        self.delete_event_time_timer = timers.delete_event_time_timer
        self.delete_processing_time_timer = timers.delete_processing_time_timer

    def get_partitioned_state(self, descriptor: StateDescriptor) -> Any:
        try:
            return self._states[descriptor.name]
        except KeyError:
            raise WindowStateRefused(
                f"the trigger uses the state '{descriptor.name}', which its states() does not return"
            ) from None

    def merge_partitioned_state(self, descriptor: StateDescriptor) -> None:
        """Merge the state of the merged windows into the current one's."""
        state, key, into = self.get_partitioned_state(descriptor), self._scope.key, self._scope.slot
        if not hasattr(state, "merge"):
            raise WindowStateRefused(
                f"the trigger's state '{descriptor.name}' cannot be merged; "
                "a reducing, aggregating or list state can"
            )
        for window in self._merged:
            state.merge((key, window), into)

    def merged_windows(self) -> Iterator[TimeWindow]:
        """Make each of the merged windows the current one, and then again the one that is."""
        key, current = self._scope.key, self._scope.namespace
        try:
            for window in self._merged:
                self._scope.enter(key, window)
                yield window
        finally:
            self._scope.enter(key, current)

    def merging(self, windows: Sequence[TimeWindow]) -> None:
        self._merged = windows


class DeclaredStates:
    """States by name; those that `open` asked for."""

    def __init__(self, states: KeyedStates, admit: Callable[[StateDescriptor], None]) -> None:
        self._states, self.admit = states, admit

    def get_state(self, descriptor: ValueStateDescriptor) -> ValueState[Any]:
        self.admit(descriptor)
        return self._states.get_state(descriptor)

    def get_list_state(self, descriptor: ListStateDescriptor) -> ListState[Any]:
        self.admit(descriptor)
        return self._states.get_list_state(descriptor)

    def get_map_state(self, descriptor: MapStateDescriptor) -> MapState[Any, Any]:
        self.admit(descriptor)
        return self._states.get_map_state(descriptor)

    def get_reducing_state(self, descriptor: ReducingStateDescriptor) -> ReducingState[Any]:
        self.admit(descriptor)
        return self._states.get_reducing_state(descriptor)

    def get_aggregating_state(self, descriptor: AggregatingStateDescriptor) -> AggregatingState:
        self.admit(descriptor)
        return self._states.get_aggregating_state(descriptor)


class FunctionStates(DeclaredStates, SubtaskFacts):
    """The states of a window function: per key (itself), and per key and window; given to its `open`."""

    def __init__(
        self,
        of_key: KeyedStates,
        of_window: KeyedStates,
        can_have_window_state: Callable[[StateDescriptor], None],
    ) -> None:
        super().__init__(of_key, self._declare_of_key)
        self._can_have_window_state = can_have_window_state
        self._of_key: set[str] = set()
        self._of_window: set[str] = set()
        self.uid, self.max_parallelism = of_key.uid, of_key.max_parallelism
        self.drop_state = of_key.drop_state
        self.global_state = self
        self.window_state = DeclaredStates(of_window, self._declare_of_window)

    def seal(self) -> None:
        self.admit = lambda descriptor: _known(descriptor, self._of_key)
        self.window_state.admit = self._known_of_window

    def _declare_of_key(self, descriptor: StateDescriptor) -> None:
        _distinct(descriptor, self._of_window)
        self._of_key.add(descriptor.name)

    def _declare_of_window(self, descriptor: StateDescriptor) -> None:
        self._can_have_window_state(descriptor)
        _distinct(descriptor, self._of_key)
        self._of_window.add(descriptor.name)
        self.window_state._states.per_namespace(descriptor.name)

    def _known_of_window(self, descriptor: StateDescriptor) -> None:
        self._can_have_window_state(descriptor)
        _known(descriptor, self._of_window)


def refuse_window_state(descriptor: StateDescriptor) -> None:
    raise WindowStateRefused(
        f"the window function asks for the state '{descriptor.name}' per window, which windows that "
        "merge cannot have; use global_state"
    )


class FiringContext:
    """What a window function is given for one firing; one object, whose window changes."""

    __slots__ = ("_context", "_timers", "global_state", "window", "window_state")

    def __init__(self, states: FunctionStates, context: FunctionContext, timers: Timers) -> None:
        self._context, self._timers = context, timers
        self.global_state, self.window_state = states.global_state, states.window_state
        self.window = TimeWindow(0, 0)

    def current_watermark(self) -> int:
        return self._timers.watermark_ms

    def current_processing_time(self) -> int:
        return self._timers.processing_time_ms

    def output(self, tag: OutputTag, value: Any) -> None:
        self._context.emit_to(tag, value, self.window.max_timestamp_ms)


def _distinct(descriptor: StateDescriptor, others: set[str]) -> None:
    if descriptor.name in others:
        raise WindowStateRefused(
            f"the window function declares '{descriptor.name}' both as a state of the key and of the window"
        )


def _known(descriptor: StateDescriptor, names: set[str]) -> None:
    if descriptor.name not in names:
        raise WindowStateRefused(
            f"the window function uses the state '{descriptor.name}', for which its open() did not ask"
        )


#: The results that a window has emitted last.
FIRED = "window/fired"


class WindowResults(ABC):
    """What becomes of results, window by window of a key.

    A window that fires again, or becomes part of another one, has emitted what does not stand any more. With
    retractions it emits that once more, marked, in front of what stands instead.
    """

    @abstractmethod
    def open(self, states: KeyedStates) -> None: ...

    @abstractmethod
    def fired(self, key: Any, window: TimeWindow, rows: Iterable[Any]) -> Iterable[Any]:
        """Return what is emitted when a window fires with these rows."""

    @abstractmethod
    def withdrawn(self, key: Any, window: TimeWindow) -> Sequence[Any]:
        """Return what is emitted of a window that is part of another one now."""

    @abstractmethod
    def settle(self, key: Any, window: TimeWindow) -> None:
        """Let a window's results stand: nothing replaces them any more."""


class PlainResults(WindowResults):
    """Results as the function made them."""

    def open(self, states: KeyedStates) -> None:
        states.drop_state(FIRED)

    def fired(self, key: Any, window: TimeWindow, rows: Iterable[Any]) -> Iterable[Any]:
        return rows

    def withdrawn(self, key: Any, window: TimeWindow) -> Sequence[Any]:
        return ()

    def settle(self, key: Any, window: TimeWindow) -> None:
        """Do nothing."""


class RetractedResults(WindowResults):
    """Results with a last field that is true in one that does not stand any more."""

    def __init__(self, result_type: ElementType) -> None:
        self._type, self._names = result_type, tuple(field.name for field in result_type.fields)

    def open(self, states: KeyedStates) -> None:
        # A scope of its own: a window's content may be in the place of another window.
        self._scope = KeyScope()
        own = states.through(self._scope)
        own.per_namespace(FIRED)
        self._last = own.get_list_state(ListStateDescriptor(FIRED, self._type.stored_fields))

    def fired(self, key: Any, window: TimeWindow, rows: Iterable[Any]) -> Iterable[Any]:
        """Return the last results, retracted, and then the rows."""
        # A generator runs here, with the window still the current one.
        now = [taken(self._row(row)) for row in elements_of(rows)]
        retracted = self.withdrawn(key, window)
        self._last.update(now)
        return [*retracted, *((*row, False) for row in now)]

    def withdrawn(self, key: Any, window: TimeWindow) -> Sequence[Any]:
        """Return the last results, retracted; they are not kept any more."""
        self._scope.enter(key, window)
        last = [(*row, True) for row in self._last.get()]
        self._last.clear()
        return last

    def settle(self, key: Any, window: TimeWindow) -> None:
        self._scope.enter(key, window)
        self._last.clear()

    def _row(self, row: Any) -> tuple[Any, ...]:
        found = as_row(row, self._names)
        if len(found) != len(self._names):
            declared = ", ".join(self._names)
            raise OutputError(f"emitted {len(found)} fields, declared are {len(self._names)}: {declared}")
        return tuple(found)


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
        self._contents = WindowContents(computation, input_type)
        if spec.evictor is not None:
            self._contents = EvictedContents(computation, input_type, spec.evictor)
        #: What makes a window's own copy of an element; a trigger and an assigner get one, too.
        self._take = input_type.take
        self._function = function_of(computation)
        self._part = part_of(computation)
        self.clock = spec.assigner.clock
        self._is_event_time = self.clock is TimeDomain.EVENT_TIME
        #: Whether all that the trigger does with an element, before its window's end, is wait for that end.
        self._only_waits = type(self._trigger) is EventTimeTrigger
        #: The timers of the current call, and the slots whose trigger waits among them.
        self._queues: object = None
        self._waiting: set[Any] = set()

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        self._scope, self._context, self._timers = states.scope, context, timers
        self._assign = assigning(self._assigner)
        #: The current key without a window, for states that its windows share.
        self._key_scope = KeyScope()
        of_key = states.through(self._key_scope)
        open_part(self._part, states.uid, states.max_parallelism)
        states.per_namespace(OPEN, due=self.clock)
        self._contents.open(states)
        self._results.open(states)
        self._table = states.tables[OPEN]
        self._trigger_context = TriggerScope(self._trigger, states, timers)
        function_states = FunctionStates(
            of_key.of_function(), states.of_function(), self._can_have_window_state
        )
        if self._function is not None:
            self._function.open(function_states)
        function_states.seal()
        self._firing = FiringContext(function_states, context, timers)

    def processors(self) -> tuple[Processor, ...]:
        return (self.process_element,)

    def process_element(self, value: Any, context: FunctionContext) -> None:
        time_ms = context.timestamp_ms
        windows = self._assign(self._own(value), time_ms, self._timers.processing_time_ms)
        if not self._add(value, time_ms, windows) and self._is_late(time_ms):
            put_aside(context, self._spec.late_output, value)

    def on_timer(self, timer: Timer, domain: TimeDomain) -> None:
        window = TimeWindow._make(timer.namespace)
        if domain is TimeDomain.EVENT_TIME:
            result = self._trigger.on_event_time(timer.time_ms, window, self._trigger_context)
        else:
            result = self._trigger.on_processing_time(timer.time_ms, window, self._trigger_context)
        self._obey(result, window)
        if domain is not self._assigner.clock:
            return
        if timer.time_ms >= self._cleanup_ms(window):
            self._clean_up(window)
        else:
            # It is there already, unless the trigger only waited, or the program was changed to wait longer.
            self._register_cleanup(window)

    def close(self) -> None:
        close_part(self._part)
        if self._function is not None:
            self._function.close()

    def _can_have_window_state(self, descriptor: StateDescriptor) -> None:
        """Refuse a state per window if there cannot be one."""

    def _add(self, value: Any, time_ms: int | None, windows: Sequence[TimeWindow]) -> bool:
        scope, contents, trigger, ctx = self._scope, self._contents, self._trigger, self._trigger_context
        key, kept, is_taken, take = scope.key, self._table.entries, False, self._take
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
            contents.add(value if take is None else take(value), time_ms)
            if slot in waiting and window.end_ms > watermark_ms + 1:
                continue
            result = trigger.on_element(self._own(value), time_ms, window, ctx)
            if result is not TriggerResult.CONTINUE:
                self._obey(result, window)
            elif self._only_waits:
                waiting.add(slot)
            if is_new:
                self._register_cleanup(window)
        return is_taken

    def _own(self, value: Any) -> Any:
        return value if self._take is None else self._take(value)

    def _slots_waiting(self) -> set[Any]:
        """Return the slots whose trigger has registered its timer in this call of the key group."""
        # Only in this call: what was registered in an earlier one may have been by another program.
        if self._queues is not self._timers.queues:
            self._queues, self._waiting = self._timers.queues, set()
        return self._waiting

    def _obey(self, result: TriggerResult, window: TimeWindow) -> None:
        """Do what a trigger said; the window is the current one before and after."""
        if result is TriggerResult.CONTINUE:
            return
        check_result(self._trigger, result)
        key, entries = self._scope.key, self._table.entries
        slot = self._scope.slot
        is_open = slot in entries
        if result.is_fire:
            self._firing.window = window
            self._contents.fire(self._emit, window, self._trigger_context)
        if result.is_purge:
            self._contents.clear()
            # The next result does not contain this one, so it does not replace it.
            self._results.settle(key, window)
        if is_open and slot not in entries and self._stays_empty(window):
            # Nothing is in it any more, and it is there until its time is over.
            entries[slot] = None
            self._table.changed.add(slot)

    def _stays_empty(self, window: TimeWindow) -> bool:
        """Return whether a window is still known when nothing is in it."""
        # Without end, nobody would clean it up: there would be a row of each key that ever was. What a
        # trigger has of it, timers and states, is stored without it, too.
        return self._cleanup_ms(window) < MAX_WATERMARK_MS

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

    def _clean_up(self, window: TimeWindow) -> None:
        self._contents.clear()
        self._results.settle(self._scope.key, window)
        self._trigger.clear(window, self._trigger_context)
        if self._function is not None:
            self._enter_key()
            self._firing.window = window
            self._function.clear(self._firing)

    def _enter_key(self) -> None:
        self._key_scope.enter(self._scope.key)
        self._key_scope.now_ms = self._scope.now_ms

    def _cleanup_ms(self, window: TimeWindow) -> int:
        """Return when nothing is kept of a window any more, by the windows' clock."""
        end_ms = window.max_timestamp_ms
        if not self._is_event_time:
            return end_ms
        return min(end_ms + self._spec.allowed_lateness_ms, MAX_WATERMARK_MS)

    def _is_over(self, window: TimeWindow) -> bool:
        return self._is_event_time and self._cleanup_ms(window) <= self._timers.watermark_ms

    def _register_cleanup(self, window: TimeWindow) -> None:
        """Register the timer that cleans the current window up; at the end of all time nobody has to."""
        time_ms = self._cleanup_ms(window)
        if time_ms == MAX_WATERMARK_MS:
            return
        if self._is_event_time:
            if self._only_waits and window.max_timestamp_ms > self._timers.watermark_ms:
                # The trigger's timer is there, and when it fires, this is called again.
                return
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
