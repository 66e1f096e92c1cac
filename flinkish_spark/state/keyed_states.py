"""What an operator's function is given: states, times, timers, side outputs of the current key."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from flinkish_spark.core.elements import TimeDomain
from flinkish_spark.core.subtask import SubtaskFacts
from flinkish_spark.core.validation import unusable
from flinkish_spark.state.descriptors import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from flinkish_spark.state.states import (
    AggregatingState,
    ExpiringListState,
    ExpiringMapState,
    ListState,
    MapKeys,
    MapState,
    ReducingState,
    TabledValueState,
    ValueState,
)
from flinkish_spark.state.tables import (
    ExpiringLists,
    ExpiringMaps,
    ExpiringTable,
    HandedOut,
    KeyScope,
    PutValues,
    StateTable,
    as_fields,
    may_change,
    naming_of,
)

_S = TypeVar("_S")

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
    """The states of an operator, made when it is opened; the tables behind them change per key group."""

    def __init__(self, uid: str, max_parallelism: int) -> None:
        self.uid, self.max_parallelism = uid, max_parallelism
        self.scope = KeyScope()
        self.descriptors: dict[str, StateDescriptor] = {}
        #: Whose slots have a namespace: states of windows.
        self.namespaced: set[str] = set()
        #: Those of them whose entries are due some time, and by which clock; the timers of such an entry are
        #: stored with it.
        self.due: dict[str, TimeDomain] = {}
        #: States that were stored once and are given up.
        self.dropped: set[str] = set()
        #: States of functions, whose fields are read by name; operators know the places of theirs.
        self.named: set[str] = set()
        self._is_of_function = False
        self.tables: dict[str, StateTable] = {}
        self._states: dict[str, Any] = {}
        self._declaring = _Declaring()
        #: What the functions of the operator put into states; whoever calls them settles it behind each call.
        self.puts = PutValues()

    def seal(self) -> None:
        """Refuse states that are not declared by now: the operator is open."""
        self._declaring.is_over = True

    def get_state(self, descriptor: ValueStateDescriptor) -> ValueState[Any]:
        self._check_kind(descriptor, ValueStateDescriptor)
        handed = self._handed_out(as_fields(descriptor.value_type))

        def made(table: StateTable) -> ValueState[Any]:
            if descriptor.ttl is None and handed == (None, False):
                return ValueState(self.scope, table, descriptor.default)
            return TabledValueState(self.scope, table, descriptor.default, *handed)

        return self._declared(descriptor, made, lends=handed[1])

    def get_list_state(self, descriptor: ListStateDescriptor) -> ListState[Any]:
        self._check_kind(descriptor, ListStateDescriptor)
        kind = ListState if descriptor.ttl is None else ExpiringListState
        handed = self._handed_out(descriptor.element_type)
        return self._declared(descriptor, lambda table: kind(self.scope, table, *handed), lends=handed[1])

    def get_map_state(self, descriptor: MapStateDescriptor) -> MapState[Any, Any]:
        self._check_kind(descriptor, MapStateDescriptor)
        kind = MapState if descriptor.ttl is None else ExpiringMapState
        handed = self._handed_out(descriptor.value_type)

        def made(table: StateTable) -> MapState[Any, Any]:
            keys = MapKeys(f"operator '{self.uid}'", descriptor.name, descriptor.key_type)
            return kind(self.scope, table, *handed, keys)

        return self._declared(descriptor, made, lends=handed[1])

    def get_reducing_state(self, descriptor: ReducingStateDescriptor) -> ReducingState[Any]:
        self._check_kind(descriptor, ReducingStateDescriptor)
        handed = self._handed_out(as_fields(descriptor.value_type))
        return self._declared(
            descriptor,
            lambda table: ReducingState(self.scope, table, descriptor.reduce, *handed),
            lends=handed[1],
        )

    def get_aggregating_state(self, descriptor: AggregatingStateDescriptor) -> AggregatingState:
        self._check_kind(descriptor, AggregatingStateDescriptor)
        handed = self._handed_out(as_fields(descriptor.accumulator_type))
        return self._declared(
            descriptor,
            lambda table: AggregatingState(self.scope, table, descriptor.aggregate, *handed),
            lends=handed[1],
        )

    def any_state(self, descriptor: StateDescriptor) -> Any:
        get = next(method for kind, method in _GET.items() if isinstance(descriptor, kind))
        return getattr(self, get)(descriptor)

    def drop_state(self, name: str) -> None:
        """Give up what is stored of a state that is not declared any more."""
        if self._declaring.is_over:
            raise ValueError(f"operator '{self.uid}' drops the state '{name}' too late: call it in open()")
        self.dropped.add(name)

    def per_namespace(self, name: str, due: TimeDomain | None = None) -> None:
        self.namespaced.add(name)
        if due is not None:
            self.due[name] = due

    def through(self, scope: KeyScope) -> KeyedStates:
        """Return these states, with the same tables, as they are seen by another scope."""
        other = copy.copy(self)
        other.scope, other._states = scope, {}
        return other

    def of_function(self) -> KeyedStates:
        other = copy.copy(self)
        other._states, other._is_of_function = {}, True
        return other

    def _check_kind(self, descriptor: object, kind: type) -> None:
        if not isinstance(descriptor, kind):
            method = _GET.get(type(descriptor))
            raise unusable(
                "descriptor",
                descriptor,
                wanted=f"a {kind.__name__} in {_GET[kind]}() of operator '{self.uid}'",
                what_to_do="give one" if method is None else f"call {method}() with it",
            )

    def _handed_out(self, ddl: str) -> tuple[HandedOut | None, bool]:
        return naming_of(ddl) if self._is_of_function else None, may_change(ddl)

    def _declared(self, descriptor: StateDescriptor, make: Callable[[StateTable], _S], *, lends: bool) -> _S:
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
            if lends and self._is_of_function:
                self.tables[descriptor.name].puts, self.puts.is_used = self.puts, True
            self._states[descriptor.name] = make(self.tables[descriptor.name])
        found: _S = self._states[descriptor.name]
        return found

    def begin_group(self) -> None:
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
