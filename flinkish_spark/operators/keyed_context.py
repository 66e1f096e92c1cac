"""What an operator's function is given: states, times, timers, side outputs of the current key."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable
from typing import Any

from flinkish_spark.arguments import unusable
from flinkish_spark.operators.elements import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    OutputTag,
    TimeDomain,
    Timer,
)
from flinkish_spark.operators.subtask import SubtaskFacts
from flinkish_spark.operators.timers import TimerQueue
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
from flinkish_spark.state.element_tables import ExpiringLists, ExpiringMaps
from flinkish_spark.state.expiring_containers import ExpiringListState, ExpiringMapState
from flinkish_spark.state.handed_out import HandedOut, as_fields, may_change, naming_of
from flinkish_spark.state.map_keys import MapKeys
from flinkish_spark.state.tables import ExpiringTable, KeyScope, StateTable
from flinkish_spark.state.values import TabledValueState

#: Looked up for each call about a timer.
_EVENT_TIME, _PROCESSING_TIME = TimeDomain.EVENT_TIME, TimeDomain.PROCESSING_TIME
_new = tuple.__new__


#: What returns the state of a descriptor.
_GET: dict[type, str] = {
    ValueStateDescriptor: "get_state",
    ListStateDescriptor: "get_list_state",
    MapStateDescriptor: "get_map_state",
    ReducingStateDescriptor: "get_reducing_state",
    AggregatingStateDescriptor: "get_aggregating_state",
}


class StateRedeclared(ValueError):
    """One name was given to two states of an operator that are not the same."""


class StateNotDeclared(ValueError):
    """A state was asked for that the operator's `open` has not asked for."""

    def __init__(self, uid: str, name: str) -> None:
        super().__init__(
            f"operator '{uid}' uses the state '{name}', for which its open() has not asked: states are asked "
            "for in open(), with context.get_state(...) or the like; keep what that returns"
        )


class _Declaring:
    """Whether states may still be declared; one object for all views of an operator's states."""

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False


class KeyedStates(SubtaskFacts):
    """The states of an operator, made when it is opened; the tables behind them change per key group.

    Parameters
    ----------
    uid, max_parallelism
        Of the operator.
    """

    def __init__(self, uid: str, max_parallelism: int) -> None:
        self.uid, self.max_parallelism = uid, max_parallelism
        self.scope = KeyScope()
        self.descriptors: dict[str, StateDescriptor] = {}
        #: Whose slots have a namespace: states of windows.
        self.namespaced: set[str] = set()
        #: States that were stored once and are given up.
        self.dropped: set[str] = set()
        #: States of functions, whose fields are read by name; operators know the places of theirs.
        self.named: set[str] = set()
        self._is_of_function = False
        self.tables: dict[str, StateTable] = {}
        self._states: dict[str, Any] = {}
        self._declaring = _Declaring()

    def seal(self) -> None:
        """Refuse states that are not declared by now: the operator is open."""
        self._declaring.is_over = True

    def get_state(self, descriptor: ValueStateDescriptor) -> ValueState[Any]:
        """Return the value state of that name."""
        self._check_kind(descriptor, ValueStateDescriptor)
        handed = self._handed_out(as_fields(descriptor.value_type))

        def made(table: StateTable) -> ValueState[Any]:
            if descriptor.ttl is None and handed == (None, False):
                return ValueState(self.scope, table, descriptor.default)
            return TabledValueState(self.scope, table, descriptor.default, *handed)

        state: ValueState[Any] = self._declared(descriptor, made)
        return state

    def get_list_state(self, descriptor: ListStateDescriptor) -> ListState[Any]:
        """Return the list state of that name."""
        self._check_kind(descriptor, ListStateDescriptor)
        kind = ListState if descriptor.ttl is None else ExpiringListState
        handed = self._handed_out(descriptor.element_type)
        state: ListState[Any] = self._declared(descriptor, lambda table: kind(self.scope, table, *handed))
        return state

    def get_map_state(self, descriptor: MapStateDescriptor) -> MapState[Any, Any]:
        """Return the map state of that name."""
        self._check_kind(descriptor, MapStateDescriptor)
        kind = MapState if descriptor.ttl is None else ExpiringMapState
        handed = self._handed_out(descriptor.value_type)

        def made(table: StateTable) -> MapState[Any, Any]:
            keys = MapKeys(f"operator '{self.uid}'", descriptor.name, descriptor.key_type)
            return kind(self.scope, table, *handed, keys)

        state: MapState[Any, Any] = self._declared(descriptor, made)
        return state

    def get_reducing_state(self, descriptor: ReducingStateDescriptor) -> ReducingState[Any]:
        """Return the reducing state of that name."""
        self._check_kind(descriptor, ReducingStateDescriptor)
        handed = self._handed_out(as_fields(descriptor.value_type))
        state: ReducingState[Any] = self._declared(
            descriptor, lambda table: ReducingState(self.scope, table, descriptor.reduce, *handed)
        )
        return state

    def get_aggregating_state(self, descriptor: AggregatingStateDescriptor) -> AggregatingState:
        """Return the aggregating state of that name."""
        self._check_kind(descriptor, AggregatingStateDescriptor)
        handed = self._handed_out(as_fields(descriptor.accumulator_type))
        state: AggregatingState = self._declared(
            descriptor, lambda table: AggregatingState(self.scope, table, descriptor.aggregate, *handed)
        )
        return state

    def drop_state(self, name: str) -> None:
        """Give up what is stored of a state that is not declared any more."""
        if self._declaring.is_over:
            raise ValueError(f"operator '{self.uid}' drops the state '{name}' too late: call it in open()")
        self.dropped.add(name)

    def per_namespace(self, name: str) -> None:
        """Keep a state per key and namespace; said by operators with windows, when they are opened."""
        self.namespaced.add(name)

    def through(self, scope: KeyScope) -> KeyedStates:
        """Return these states as they are seen with another key or namespace being the current one.

        Both have the same tables; a state may be declared with either.
        """
        other = copy.copy(self)
        other.scope, other._states = scope, {}
        return other

    def of_function(self) -> KeyedStates:
        """Return these states as a function of the user's declares them: with the names of their fields."""
        other = copy.copy(self)
        other._states, other._is_of_function = {}, True
        return other

    def _check_kind(self, descriptor: object, kind: type) -> None:
        """Raise ConfigError for what describes no state of a kind."""
        if not isinstance(descriptor, kind):
            method = _GET.get(type(descriptor))
            raise unusable(
                "descriptor",
                descriptor,
                wanted=f"a {kind.__name__} in {_GET[kind]}() of operator '{self.uid}'",
                what_to_do="give one" if method is None else f"call {method}() with it",
            )

    def _handed_out(self, ddl: str) -> tuple[HandedOut | None, bool]:
        """Return what names the values that are handed out, and whether they may be changed in place."""
        return naming_of(ddl) if self._is_of_function else None, may_change(ddl)

    def _declared(self, descriptor: StateDescriptor, make: Callable[[StateTable], Any]) -> Any:
        if self._declaring.is_over and descriptor.name not in self.descriptors:
            raise StateNotDeclared(self.uid, descriptor.name)
        known = self.descriptors.setdefault(descriptor.name, descriptor)
        if known != descriptor:
            raise StateRedeclared(
                f"operator '{self.uid}' declares the state '{descriptor.name}' as {known} and as {descriptor}"
            )
        if self._is_of_function:
            self.named.add(descriptor.name)
        if descriptor.name not in self._states:
            if descriptor.name not in self.tables:
                self.tables[descriptor.name] = _table_of(descriptor)
            self._states[descriptor.name] = make(self.tables[descriptor.name])
        return self._states[descriptor.name]

    def begin_group(self) -> None:
        """Forget the entries of the last key group."""
        for table in self.tables.values():
            table.clear()


def _table_of(descriptor: StateDescriptor) -> StateTable:
    if descriptor.ttl is None:
        return StateTable()
    match descriptor:
        case ListStateDescriptor():
            return ExpiringLists(descriptor.ttl)
        case MapStateDescriptor():
            return ExpiringMaps(descriptor.ttl)
    return ExpiringTable(descriptor.ttl)


class Timers:
    """Times and timers, as functions see them: those of the current key and namespace."""

    __slots__ = ("_scope", "processing_time_ms", "queues", "watermark_ms")

    def __init__(self, scope: KeyScope) -> None:
        self._scope = scope
        self.queues: dict[TimeDomain, TimerQueue] = {domain: TimerQueue() for domain in TimeDomain}
        self.watermark_ms = MIN_WATERMARK_MS
        self.processing_time_ms = 0

    def current_watermark(self) -> int:
        """Return the watermark."""
        return self.watermark_ms

    def current_processing_time(self) -> int:
        """Return the micro-batch's processing time."""
        return self.processing_time_ms

    def register_event_time_timer(self, time_ms: int) -> None:
        """Register a timer of the current key and namespace."""
        self.queues[_EVENT_TIME].register(self._timer(time_ms))

    def register_processing_time_timer(self, time_ms: int) -> None:
        """Register a timer of the current key and namespace."""
        self.queues[_PROCESSING_TIME].register(self._timer(time_ms))

    def delete_event_time_timer(self, time_ms: int) -> None:
        """Delete a timer of the current key and namespace."""
        self.queues[_EVENT_TIME].delete(self._timer(time_ms))

    def delete_processing_time_timer(self, time_ms: int) -> None:
        """Delete a timer of the current key and namespace."""
        self.queues[_PROCESSING_TIME].delete(self._timer(time_ms))

    def _timer(self, time_ms: int) -> Timer:
        if type(time_ms) is not int or not MIN_WATERMARK_MS <= time_ms <= MAX_WATERMARK_MS:
            time_ms = _whole_ms(time_ms)
        scope = self._scope
        # What `Timer(...)` does, in half of the time: most calls of timers come here.
        return _new(Timer, (time_ms, scope.key, scope.namespace))


class FunctionContext:
    """What `process_element` and `on_timer` are given; one object, whose facts change."""

    __slots__ = ("_scope", "_timers", "count", "domain", "emit", "emit_to", "timestamp_ms")

    def __init__(
        self,
        scope: KeyScope,
        timers: Timers,
        emit_to: Callable[[OutputTag, Any, int | None], None],
        emit: Callable[[Iterable[Any], int | None], None],
        count: Callable[[str], None],
    ) -> None:
        self._scope, self._timers = scope, timers
        #: For operators whose rows have another time than the element or timer: takes rows, and their time.
        #: Not from inside a generator that also yields.
        self.emit = emit
        #: The same for a side output: takes a tag, a row, its time.
        self.emit_to = emit_to
        #: Adds one to a number of the operator; takes its name.
        self.count = count
        self.timestamp_ms: int | None = None
        self.domain = TimeDomain.EVENT_TIME

    def get_current_key(self) -> Any:
        """Return the current key."""
        return self._scope.key

    def timestamp(self) -> int | None:
        """Return the time of the element or timer."""
        return self.timestamp_ms

    def timer_service(self) -> Timers:
        """Return times and timers."""
        return self._timers

    def time_domain(self) -> TimeDomain:
        """Return which clock fired; for timers."""
        return self.domain

    def output(self, tag: OutputTag, value: Any) -> None:
        """Emit a row to a side output."""
        self.emit_to(tag, value, self.timestamp_ms)


def _whole_ms(time_ms: Any) -> int:
    """Return a timer's time as an int, which other kinds of whole numbers can be; raise ValueError else."""
    try:
        found = operator.index(time_ms)
    except TypeError:
        found = None
    if found is None or isinstance(time_ms, bool) or not MIN_WATERMARK_MS <= found <= MAX_WATERMARK_MS:
        raise ValueError(
            f"a timer's time is {time_ms!r} ({type(time_ms).__name__}); it must be a whole number of "
            "milliseconds since 1970, which 64 bits can hold"
        )
    return found
