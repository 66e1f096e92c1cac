"""The keyed states of an operator: declared by its functions in `open`, bound to the current key."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from flinkish_spark.core.elements import TimeDomain
from flinkish_spark.core.subtask import SubtaskFacts
from flinkish_spark.core.validation import unusable
from flinkish_spark.state import descriptors, tables
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

#: The method that returns the state of a descriptor.
_GET: dict[type, str] = {
    descriptors.ValueStateDescriptor: "get_state",
    descriptors.ListStateDescriptor: "get_list_state",
    descriptors.MapStateDescriptor: "get_map_state",
    descriptors.ReducingStateDescriptor: "get_reducing_state",
    descriptors.AggregatingStateDescriptor: "get_aggregating_state",
}


def to_undeclared_error(uid: str, name: str) -> ValueError:
    return ValueError(
        f"operator '{uid}' uses the state '{name}', which its open() has not declared: call "
        "context.get_state(...) or the like in open() and keep the returned state"
    )


class KeyedStates(SubtaskFacts):
    """The states of an operator, made when it opens; their tables are filled anew for each key group."""

    def __init__(self, uid: str, max_parallelism: int) -> None:
        self.uid, self.max_parallelism = uid, max_parallelism
        self.scope = tables.KeyScope()
        self.descriptors: dict[str, descriptors.StateDescriptor] = {}
        #: Names of states with a namespace in their slots: states of windows.
        self.namespaced: set[str] = set()
        #: Those of them whose entries have a due time, and by which clock; the timers of such an entry are
        #: stored in it.
        self.due: dict[str, TimeDomain] = {}
        #: Names of stored states that the program drops.
        self.dropped: set[str] = set()
        #: States of user functions, which read fields by name; operators use the places of fields.
        self.named: set[str] = set()
        self._is_of_function = False
        self.tables: dict[str, tables.StateTable] = {}
        self._states: dict[str, Any] = {}
        #: Shared by all views of these states: whether their declaration is over.
        self._declaring = SimpleNamespace(is_over=False)
        #: Values that the operator's functions put into states; the operator settles them after each call.
        self.puts = tables.PutValues()

    def seal(self) -> None:
        self._declaring.is_over = True

    def get_state(self, descriptor: descriptors.ValueStateDescriptor) -> ValueState[Any]:
        return cast("ValueState[Any]", self._state(descriptor, descriptors.ValueStateDescriptor))

    def get_list_state(self, descriptor: descriptors.ListStateDescriptor) -> ListState[Any]:
        return cast("ListState[Any]", self._state(descriptor, descriptors.ListStateDescriptor))

    def get_map_state(self, descriptor: descriptors.MapStateDescriptor) -> MapState[Any, Any]:
        return cast("MapState[Any, Any]", self._state(descriptor, descriptors.MapStateDescriptor))

    def get_reducing_state(self, descriptor: descriptors.ReducingStateDescriptor) -> ReducingState[Any]:
        return cast("ReducingState[Any]", self._state(descriptor, descriptors.ReducingStateDescriptor))

    def get_aggregating_state(self, descriptor: descriptors.AggregatingStateDescriptor) -> AggregatingState:
        return cast("AggregatingState", self._state(descriptor, descriptors.AggregatingStateDescriptor))

    def any_state(self, descriptor: descriptors.StateDescriptor) -> Any:
        return self._state(descriptor, type(descriptor))

    def drop_state(self, name: str) -> None:
        """Drop the stored entries of a state that is not declared any more."""
        if self._declaring.is_over:
            raise ValueError(f"operator '{self.uid}' drops the state '{name}' too late: call it in open()")
        self.dropped.add(name)

    def declare_namespaced(self, name: str, due: TimeDomain | None = None) -> None:
        self.namespaced.add(name)
        if due is not None:
            self.due[name] = due

    def bind(self, scope: tables.KeyScope) -> KeyedStates:
        other = copy.copy(self)
        other.scope, other._states = scope, {}
        return other

    def view_for_function(self) -> KeyedStates:
        other = copy.copy(self)
        other._states, other._is_of_function = {}, True
        return other

    def _state(self, descriptor: descriptors.StateDescriptor, kind: type) -> Any:
        given: object = descriptor
        if not isinstance(given, kind):
            method = _GET.get(type(descriptor))
            raise unusable(
                "descriptor",
                descriptor,
                wanted=f"a {kind.__name__} in {_GET[kind]}() of operator '{self.uid}'",
                what_to_do="give one" if method is None else f"call {method}() with it",
            )
        name = descriptor.name
        if self._declaring.is_over and name not in self.descriptors:
            raise to_undeclared_error(self.uid, name)
        known = self.descriptors.setdefault(name, descriptor)
        if known != descriptor:
            raise ValueError(
                f"operator '{self.uid}' declares the state '{name}' as {known} and as {descriptor}"
            )
        if self._is_of_function:
            self.named.add(name)
        if name not in self._states:
            self._states[name] = self._make(descriptor)
        return self._states[name]

    def _make(self, descriptor: descriptors.StateDescriptor) -> Any:
        """Make a state, and its table if it has none yet."""
        name, ttl = descriptor.name, descriptor.ttl
        table_of: Callable[[descriptors.StateTtl], tables.StateTable] = tables.ExpiringTable
        match descriptor:
            case descriptors.ListStateDescriptor():
                ddl, table_of = descriptor.element_type, tables.ExpiringLists
            case descriptors.MapStateDescriptor():
                ddl, table_of = descriptor.value_type, tables.ExpiringMaps
            case descriptors.AggregatingStateDescriptor():
                ddl = tables.as_fields(descriptor.accumulator_type)
            case _:
                ddl = tables.as_fields(descriptor.value_type)
        if name not in self.tables:
            self.tables[name] = tables.StateTable() if ttl is None else table_of(ttl)
        scope, table, lends = self.scope, self.tables[name], tables.may_change(ddl)
        if lends and self._is_of_function:
            table.puts, self.puts.is_used = self.puts, True
        handed = tables.naming_of(ddl) if self._is_of_function else None, lends
        match descriptor:
            case descriptors.ValueStateDescriptor(default=default):
                if ttl is None and handed == (None, False):
                    return ValueState(scope, table, default)
                return TabledValueState(scope, table, default, *handed)
            case descriptors.ListStateDescriptor():
                return (ListState if ttl is None else ExpiringListState)(scope, table, *handed)
            case descriptors.MapStateDescriptor():
                keys = MapKeys(f"operator '{self.uid}'", name, descriptor.key_type)
                return (MapState if ttl is None else ExpiringMapState)(scope, table, *handed, keys)
            case descriptors.ReducingStateDescriptor():
                return ReducingState(scope, table, descriptor.reduce, *handed)
        return AggregatingState(scope, table, descriptor.aggregate, *handed)
