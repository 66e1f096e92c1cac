"""What triggers and window functions are given of the current key and window."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flinkish_spark.operators.declaring import declared_state
from flinkish_spark.operators.elements import OutputTag
from flinkish_spark.operators.keyed_context import FunctionContext, KeyedStates, Timers
from flinkish_spark.operators.subtask import SubtaskFacts
from flinkish_spark.state import (
    AggregatingState,
    AggregatingStateDescriptor,
    ListState,
    ListStateDescriptor,
    MapState,
    MapStateDescriptor,
    ReducingState,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueState,
    ValueStateDescriptor,
)
from flinkish_spark.user_iterators import elements_of
from flinkish_spark.windows.time_window import TimeWindow
from flinkish_spark.windows.triggers import Trigger


class WindowStateRefused(ValueError):
    """A state of a window, or of a trigger, cannot be had that way."""


class TriggerScope:
    """What a trigger is given: one object, whose scope is the current key and window.

    Its states are stored as `trigger/<name>`.
    """

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
            self._states[descriptor.name] = declared_state(states, own)
        # The same calls, without one in between.
        self.current_watermark = timers.current_watermark
        self.current_processing_time = timers.current_processing_time
        self.register_event_time_timer = timers.register_event_time_timer
        self.register_processing_time_timer = timers.register_processing_time_timer
        self.delete_event_time_timer = timers.delete_event_time_timer
        self.delete_processing_time_timer = timers.delete_processing_time_timer

    def get_partitioned_state(self, descriptor: StateDescriptor) -> Any:
        """Return a state of the current key and window."""
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
        """Say which windows merge, before `on_merge`."""
        self._merged = windows


class DeclaredStates:
    """States by name; those that `open` asked for.

    Parameters
    ----------
    states
        Of the operator, in the scope that these states have.
    admit
        Called with a descriptor before its state is returned; may refuse.
    """

    def __init__(self, states: KeyedStates, admit: Callable[[StateDescriptor], None]) -> None:
        self._states, self.admit = states, admit

    def get_state(self, descriptor: ValueStateDescriptor) -> ValueState[Any]:
        """Return the value state of that name."""
        self.admit(descriptor)
        return self._states.get_state(descriptor)

    def get_list_state(self, descriptor: ListStateDescriptor) -> ListState[Any]:
        """Return the list state of that name."""
        self.admit(descriptor)
        return self._states.get_list_state(descriptor)

    def get_map_state(self, descriptor: MapStateDescriptor) -> MapState[Any, Any]:
        """Return the map state of that name."""
        self.admit(descriptor)
        return self._states.get_map_state(descriptor)

    def get_reducing_state(self, descriptor: ReducingStateDescriptor) -> ReducingState[Any]:
        """Return the reducing state of that name."""
        self.admit(descriptor)
        return self._states.get_reducing_state(descriptor)

    def get_aggregating_state(self, descriptor: AggregatingStateDescriptor) -> AggregatingState:
        """Return the aggregating state of that name."""
        self.admit(descriptor)
        return self._states.get_aggregating_state(descriptor)


class FunctionStates(DeclaredStates, SubtaskFacts):
    """The states of a window function: per key (itself), and per key and window.

    Given to the function's `open`; after :meth:`seal` nothing new can be declared.

    Parameters
    ----------
    of_key, of_window
        The operator's states in the scopes of a key, and of a key's window.
    can_have_window_state
        Says no, by raising, where windows merge.
    """

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
        """Refuse what was not declared yet."""
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
    """Refuse a state per window, which windows that merge cannot have."""
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
        """Return the watermark."""
        return self._timers.watermark_ms

    def current_processing_time(self) -> int:
        """Return the micro-batch's processing time."""
        return self._timers.processing_time_ms

    def output(self, tag: OutputTag, value: Any) -> None:
        """Emit a row to a side output."""
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
