"""The window operator of a keyed stream, element by element, with or without merging windows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from flinkish_spark.core.elements import MAX_WATERMARK_MS, OutputTag, TimeDomain, Timer
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.iterators import elements_of
from flinkish_spark.core.subtask import SubtaskFacts
from flinkish_spark.operators.context import FunctionContext, close_part, move_timer, open_part, put_aside
from flinkish_spark.operators.process import KeyedStreamOperator
from flinkish_spark.operators.window_contents import (
    OPEN,
    EvictedContents,
    WindowContents,
    get_part_function,
    get_window_function,
)
from flinkish_spark.state.descriptors import ListStateDescriptor, StateDescriptor
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.tables import KeyScope
from flinkish_spark.state.timers import Timers
from flinkish_spark.types.rows import ElementType, OutputError, as_row
from flinkish_spark.types.to_python import copy_if_mutable
from flinkish_spark.windows.assigners import MergingWindowAssigner, make_assign
from flinkish_spark.windows.spec import ReduceWindow, WindowComputation, WindowSpec
from flinkish_spark.windows.time_window import TimeWindow
from flinkish_spark.windows.triggers import EventTimeTrigger, Trigger, TriggerResult, check_result


class TriggerScope:
    """Context of a trigger; one object, scoped to the current key and window."""

    def __init__(self, trigger: Trigger, states: KeyedStates, timers: Timers) -> None:
        self._scope = states.scope
        #: Windows merged into the current one, while the trigger's `on_merge` runs.
        self.merged: Sequence[TimeWindow] = ()
        self._states: dict[str, Any] = {}
        states = states.view_for_function()
        for descriptor in elements_of(trigger.states()):
            own = dataclasses.replace(descriptor, name=f"trigger/{descriptor.name}")
            states.declare_namespaced(own.name)
            self._states[descriptor.name] = states.any_state(own)
        # Bound methods, to save a call.
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
            raise ValueError(
                f"the trigger uses '{descriptor.name}', which its states() does not return"
            ) from None

    def merge_partitioned_state(self, descriptor: StateDescriptor) -> None:
        state, key, into = self.get_partitioned_state(descriptor), self._scope.key, self._scope.slot
        if not hasattr(state, "merge"):
            raise ValueError(
                f"the trigger's state '{descriptor.name}' cannot be merged; "
                "a reducing, aggregating or list state can"
            )
        for window in self.merged:
            state.merge((key, window), into)

    def visit_merged_windows(self) -> Iterator[TimeWindow]:
        """Yield the merged windows, each of them as the current one; then restore the current window."""
        key, current = self._scope.key, self._scope.namespace
        try:
            for window in self.merged:
                self._scope.enter(key, window)
                yield window
        finally:
            self._scope.enter(key, current)


def _make_getter(method: str) -> Callable[..., Any]:
    def get(self: DeclaredStates, descriptor: StateDescriptor) -> Any:
        self.admit(descriptor)
        return getattr(self.states, method)(descriptor)

    return get


class DeclaredStates:
    """States of a window function; after sealing only those that its `open` has declared."""

    is_sealed = False
    #: The states per key for those per window, and vice versa.
    others: DeclaredStates

    def __init__(self, states: KeyedStates) -> None:
        self.states = states
        self.names: set[str] = set()

    get_state = _make_getter("get_state")
    get_list_state = _make_getter("get_list_state")
    get_map_state = _make_getter("get_map_state")
    get_reducing_state = _make_getter("get_reducing_state")
    get_aggregating_state = _make_getter("get_aggregating_state")

    def admit(self, descriptor: StateDescriptor) -> None:
        name = descriptor.name
        if not self.is_sealed and name in self.others.names:
            raise ValueError(f"the window function declares '{name}' as a state of the key and of the window")
        if not self.is_sealed:
            self.names.add(name)
        elif name not in self.names:
            raise ValueError(f"the window function uses the state '{name}', which its open() did not declare")


class _WindowStates(DeclaredStates):
    def __init__(self, states: KeyedStates, can_have_any: bool) -> None:
        super().__init__(states)
        self._can_have_any = can_have_any

    def admit(self, descriptor: StateDescriptor) -> None:
        if not self._can_have_any:
            raise ValueError(
                f"the window function asks for the state '{descriptor.name}' per window, which windows that "
                "merge cannot have; use global_state"
            )
        super().admit(descriptor)
        self.states.declare_namespaced(descriptor.name)


class FunctionStates(DeclaredStates, SubtaskFacts):
    """Runtime context of a window function: its states per key (itself), and per key and window."""

    def __init__(self, of_key: KeyedStates, of_window: KeyedStates, *, merges: bool) -> None:
        super().__init__(of_key)
        self.uid, self.max_parallelism = of_key.uid, of_key.max_parallelism
        self.drop_state = of_key.drop_state
        self.global_state, self.window_state = self, _WindowStates(of_window, can_have_any=not merges)
        self.others, self.window_state.others = self.window_state, self

    def seal(self) -> None:
        self.is_sealed = self.window_state.is_sealed = True


class FiringContext:
    """Context of a window function; one object, whose window changes with each firing."""

    def __init__(
        self, states: FunctionStates, emit_to: Callable[[OutputTag, Any, int], None], timers: Timers
    ) -> None:
        self._emit_to = emit_to
        self.current_watermark = timers.current_watermark
        self.current_processing_time = timers.current_processing_time
        self.global_state, self.window_state = states, states.window_state
        self.window = TimeWindow(0, 0)

    def output(self, tag: OutputTag, value: Any) -> None:
        self._emit_to(tag, value, self.window.max_timestamp_ms)


#: State with the last emitted results of each window.
FIRED = "window/fired"


class RetractedResults:
    """Results with a boolean last field, which is true for a retraction.

    When a window fires again or is merged into another one, its former results are emitted again as
    retractions, before the new results.
    """

    def __init__(self, result_type: ElementType) -> None:
        self._type, self._names = result_type, tuple(field.name for field in result_type.fields)

    def open(self, states: KeyedStates) -> None:
        # A scope of its own: a merged window's content may be stored under another window.
        self._scope = KeyScope()
        own = states.bind(self._scope)
        own.declare_namespaced(FIRED)
        self._last = own.get_list_state(ListStateDescriptor(FIRED, self._type.stored_fields))

    def replace(self, key: Any, window: TimeWindow, rows: Iterable[Any]) -> Iterable[Any]:
        # A generator runs here, while the window is still current.
        now = [copy_if_mutable(self._to_row(row)) for row in elements_of(rows)]
        retracted = self.withdraw(key, window)
        self._last.update(now)
        return [*retracted, *((*row, False) for row in now)]

    def withdraw(self, key: Any, window: TimeWindow) -> Sequence[Any]:
        self._scope.enter(key, window)
        last = [(*row, True) for row in self._last.get()]
        self._last.clear()
        return last

    def settle(self, key: Any, window: TimeWindow) -> None:
        """Delete a window's last results, which will not be retracted any more."""
        self._scope.enter(key, window)
        self._last.clear()

    def _to_row(self, row: Any) -> tuple[Any, ...]:
        found = as_row(row, self._names)
        if len(found) != len(self._names):
            declared = ", ".join(self._names)
            raise OutputError(f"emitted {len(found)} fields, but {len(self._names)} are declared: {declared}")
        return tuple(found)


class WindowOperator(KeyedStreamOperator):
    """The operator for windows that do not merge; base class of :class:`MergingWindowOperator`."""

    #: Whether windows can merge.
    merges = False

    def __init__(
        self,
        spec: WindowSpec,
        computation: WindowComputation,
        input_type: ElementType,
        results: RetractedResults | None,
    ) -> None:
        self._spec, self._assigner, self._results = spec, spec.assigner, results
        self._trigger = spec.actual_trigger
        self._contents = WindowContents(computation, input_type)
        if spec.evictor is not None:
            self._contents = EvictedContents(computation, input_type, spec.evictor)
        #: Copies an element for each window, the trigger and the assigner; None if elements cannot change.
        self._take = input_type.take
        self._function = get_window_function(computation)
        self._part = get_part_function(computation)
        self.clock = spec.assigner.clock
        self._is_event_time = self.clock is TimeDomain.EVENT_TIME
        #: Whether the trigger only registers a timer for the end of the window.
        self._only_waits = type(self._trigger) is EventTimeTrigger
        #: The timers of the current call, and the slots whose trigger has registered one of them.
        self._queues: object = None
        self._waiting: set[Any] = set()

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        self._scope, self._context, self._timers = states.scope, context, timers
        #: Handles a late element.
        self.put_late: Callable[[Any], None] = partial(put_aside, context, self._spec.late_output)
        self._assign = make_assign(self._assigner)
        #: Scope of the current key without a window, for states that its windows share.
        self._key_scope = KeyScope()
        of_key = states.bind(self._key_scope)
        open_part(self._part, states.uid, states.max_parallelism)
        states.declare_namespaced(OPEN, due=self.clock)
        self._contents.open(states)
        if self._results is None:
            states.drop_state(FIRED)
        else:
            self._results.open(states)
        self._table = states.tables[OPEN]
        self._trigger_context = TriggerScope(self._trigger, states, timers)
        function_states = FunctionStates(
            of_key.view_for_function(), states.view_for_function(), merges=self.merges
        )
        if self._function is not None:
            self._function.open(function_states)
        function_states.seal()
        self._firing = FiringContext(function_states, context.emit_to, timers)

    def process_element(self, value: Any, context: FunctionContext) -> None:
        time_ms = context.timestamp_ms
        windows = self._assign(self._copy(value), time_ms, self._timers.processing_time_ms)
        if not self._add(value, time_ms, windows) and self._is_late(time_ms):
            self.put_late(value)

    def on_timer(self, timer: Timer, domain: TimeDomain) -> None:
        window = TimeWindow._make(timer.namespace)
        if domain is TimeDomain.EVENT_TIME:
            result = self._trigger.on_event_time(timer.time_ms, window, self._trigger_context)
        else:
            result = self._trigger.on_processing_time(timer.time_ms, window, self._trigger_context)
        self._apply_result(result, window)
        if domain is not self._assigner.clock:
            return
        if timer.time_ms >= self._cleanup_ms(window):
            self._clean_up(window)
        else:
            # It exists already, unless the trigger only waited, or the allowed lateness was increased.
            self._register_cleanup(window)

    def close(self) -> None:
        close_part(self._part)
        if self._function is not None:
            self._function.close()

    def _add(self, value: Any, time_ms: int | None, windows: Sequence[TimeWindow]) -> bool:
        scope, contents, trigger, ctx = self._scope, self._contents, self._trigger, self._trigger_context
        key, kept, is_taken, take = scope.key, self._table.entries, False, self._take
        watermark_ms = self._timers.watermark_ms
        waiting = self._slots_waiting()
        # Windows that end after this are not over; this check is cheap and true for most.
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
            result = trigger.on_element(self._copy(value), time_ms, window, ctx)
            if result is not TriggerResult.CONTINUE:
                self._apply_result(result, window)
            elif self._only_waits:
                waiting.add(slot)
            if is_new:
                self._register_cleanup(window)
        return is_taken

    def _copy(self, value: Any) -> Any:
        return value if self._take is None else self._take(value)

    def _slots_waiting(self) -> set[Any]:
        """Return the slots whose trigger has registered its timer in this call for the key group."""
        # Only in this call: timers of earlier calls may be those of a former program.
        if self._queues is not self._timers.queues:
            self._queues, self._waiting = self._timers.queues, set()
        return self._waiting

    def _apply_result(self, result: TriggerResult, window: TimeWindow) -> None:
        """Apply a trigger's result to the current window."""
        if result is TriggerResult.CONTINUE:
            return
        check_result(self._trigger, result)
        key, slot, entries = self._scope.key, self._scope.slot, self._table.entries
        is_open = slot in entries
        if result.is_fire:
            self._firing.window = window
            self._contents.fire(self._emit, window, self._trigger_context)
        if result.is_purge:
            self._contents.clear()
            if self._results is not None:
                # The next result does not include this one, so it must not retract it.
                self._results.settle(key, window)
        if is_open and slot not in entries and self._stays_empty(window):
            # Keep the empty window until it is cleaned up.
            entries[slot] = None
            self._table.changed.add(slot)

    def _stays_empty(self, window: TimeWindow) -> bool:
        # A window without end is never cleaned up, so each key would keep a row for ever. The trigger's
        # timers and states do not need it.
        return self._cleanup_ms(window) < MAX_WATERMARK_MS

    def _emit(self, elements: Sequence[Any]) -> None:
        """Emit the rows that the window function returns; without elements only retractions."""
        rows: Iterable[Any] | None = elements
        if elements and self._function is not None:
            self._enter_key()
            rows = self._function.process(self._scope.key, self._firing, elements)
        if rows is not None:
            # A generator runs here, while the window is still current.
            window = self._firing.window
            if self._results is not None:
                rows = self._results.replace(self._scope.key, window, rows)
            self._context.emit(rows, window.max_timestamp_ms)

    def _clean_up(self, window: TimeWindow) -> None:
        self._contents.clear()
        if self._results is not None:
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
        end_ms = window.max_timestamp_ms
        if not self._is_event_time:
            return end_ms
        return min(end_ms + self._spec.allowed_lateness_ms, MAX_WATERMARK_MS)

    def _is_over(self, window: TimeWindow) -> bool:
        return self._is_event_time and self._cleanup_ms(window) <= self._timers.watermark_ms

    def _register_cleanup(self, window: TimeWindow) -> None:
        """Register the cleanup timer of the current window, unless it never ends."""
        time_ms = self._cleanup_ms(window)
        if time_ms == MAX_WATERMARK_MS:
            return
        if self._is_event_time:
            if self._only_waits and window.max_timestamp_ms > self._timers.watermark_ms:
                # The trigger has registered a timer; when it fires, this is called again.
                return
            self._timers.register_event_time_timer(time_ms)
        else:
            self._timers.register_processing_time_timer(time_ms)

    def _is_late(self, time_ms: int | None) -> bool:
        return (
            self._is_event_time
            and time_ms is not None
            and time_ms + self._spec.allowed_lateness_ms <= self._timers.watermark_ms
        )


class Merge(NamedTuple):
    """A merged window, and the windows that it replaces."""

    window: TimeWindow
    #: The windows that were replaced, without the new window that caused the merge.
    merged: list[TimeWindow]
    #: Windows whose contents it takes over, in this order, which is also that of a list's elements.
    contents: list[TimeWindow]


class MergingWindowSet:
    """The windows of one key that are not yet cleaned up."""

    __slots__ = ("_assigner", "windows")

    def __init__(self, assigner: MergingWindowAssigner, windows: Iterable[TimeWindow] = ()) -> None:
        self._assigner, self.windows = assigner, list(windows)

    def add(self, window: TimeWindow) -> tuple[TimeWindow, list[Merge]]:
        """Add a window; return the window that contains it now, and the merges that were necessary."""
        near = self.windows
        if type(self._assigner).merge_windows is MergingWindowAssigner.merge_windows:
            # Only windows that overlap or touch can merge.
            start_ms, end_ms = window
            near = [one for one in near if one[0] <= end_ms and one[1] >= start_ms]
            if not near:
                self.windows.append(window)
                return window, []
            if len(near) == 1:
                # The usual case for sessions: one window grows.
                before, actual = near[0], near[0].cover(window)
                if actual == before:
                    return before, []
                self.windows[self.windows.index(before)] = actual
                return actual, [Merge(actual, [before], [before])]
        if window in near:
            return window, []
        return self._merge(window, near)

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
    merges = True

    def __init__(
        self,
        spec: WindowSpec,
        computation: WindowComputation,
        input_type: ElementType,
        results: RetractedResults | None,
    ) -> None:
        super().__init__(spec, computation, input_type, results)
        assert isinstance(spec.assigner, MergingWindowAssigner)
        self._merging = spec.assigner
        #: Whether one timer both fires a window and cleans it up.
        self._ends_in_one_timer = self._only_waits and self._is_event_time and spec.allowed_lateness_ms == 0
        #: The windows of each key, and the timers of the call for the key group that loaded them.
        self._of_keys: dict[Any, MergingWindowSet] = {}
        self._known_with: object = None

    def on_timer(self, timer: Timer, domain: TimeDomain) -> None:
        # A trigger may have left a timer of a window that was merged or is over.
        if (timer.key, timer.namespace) in self._table.entries:
            super().on_timer(timer, domain)

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
            self._contents.add(self._copy(value), time_ms)
            if merges and self._ends_in_one_timer:
                # `on_merge` has registered the timer for the end of the window.
                continue
            result = self._trigger.on_element(self._copy(value), time_ms, actual, self._trigger_context)
            self._apply_result(result, actual)
            self._register_cleanup(actual)
        return is_taken

    def _stays_empty(self, window: TimeWindow) -> bool:
        # The entries are the windows of a key that a new window can merge with.
        return True

    def _clean_up(self, window: TimeWindow) -> None:
        known = self._windows_of(self._scope.key).windows
        super()._clean_up(window)
        known.remove(window)

    def _merge(self, merge: Merge) -> None:
        """Merge windows: their trigger states, timers and contents."""
        now_ms = self._timers.watermark_ms if self._is_event_time else self._timers.processing_time_ms
        if self._cleanup_ms(merge.window) <= now_ms:
            raise ValueError(
                f"{type(self._merging).__name__} merged windows to {merge.window}, whose time is over at "
                f"{now_ms}; a merged window must not end before the windows that it replaces"
            )
        key = self._scope.key
        self._scope.enter(key, merge.window)
        self._trigger_context.merged = merge.merged
        self._trigger.on_merge(merge.window, self._trigger_context)
        self._trigger_context.merged = ()
        for window in merge.merged:
            if self._results is not None and (rows := self._results.withdraw(key, window)):
                self._context.emit(rows, window.max_timestamp_ms)
            self._scope.enter(key, window)
            self._trigger.clear(window, self._trigger_context)
            if not self._ends_in_one_timer:
                move_timer(self._timers, self.clock, self._cleanup_ms(window), None)
        # Merge contents in order; some may be empty.
        first, *others = ((key, window) for window in merge.contents)
        for slot in others:
            self._contents.merge(slot, first)
        if first != (key, merge.window):
            self._contents.merge(first, (key, merge.window))

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


def window_operator(
    spec: WindowSpec,
    computation: WindowComputation,
    input_type: str | ElementType,
    result_type: str | None = None,
) -> WindowOperator:
    if isinstance(input_type, str):
        input_type = ElementType(input_type)
    results = None
    if spec.retraction_field is not None:
        if result_type is not None:
            results = RetractedResults(ElementType(result_type))
        elif isinstance(computation, ReduceWindow) and computation.then is None:
            results = RetractedResults(input_type)
        else:
            raise ConfigError(
                "windows with retractions store their results, and the fields of these are not known",
                what_to_do="declare them: result_type='user STRING, total LONG'",
            )
    kind = MergingWindowOperator if isinstance(spec.assigner, MergingWindowAssigner) else WindowOperator
    return kind(spec, computation, input_type, results)
