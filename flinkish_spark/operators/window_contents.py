"""The contents of windows: how elements are folded, and how the result is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flinkish_spark.core.iterators import NOT_RUN, refuse_not_run
from flinkish_spark.state.descriptors import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    ReducingStateDescriptor,
    state_type,
)
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.tables import may_change, owner_of
from flinkish_spark.types.rows import ElementType
from flinkish_spark.types.to_python import Copier, as_it_is, copy_if_mutable, copy_result
from flinkish_spark.windows.evictors import Evictor, EvictorContext, TimestampedValue
from flinkish_spark.windows.functions import ProcessWindowFunction
from flinkish_spark.windows.spec import AggregateWindow, ProcessWindow, ReduceWindow, WindowComputation
from flinkish_spark.windows.time_window import TimeWindow

#: State with an entry per key and open window: its content, stored with its next timer and its position in
#: the order of timers; the same for all kinds of windows. None is an empty window.
OPEN = "window/open"
#: Field with an element's event time, after the element's own fields.
_TIME_FIELD = "__time_ms LONG"

#: Takes a window's elements, calls the window function and emits its rows.
Fire = Callable[[Sequence[Any]], None]


def get_part_function(computation: WindowComputation) -> object:
    if isinstance(computation, ReduceWindow):
        return computation.reduce
    return computation.aggregate if isinstance(computation, AggregateWindow) else None


def get_window_function(computation: WindowComputation) -> ProcessWindowFunction | None:
    return computation.process if isinstance(computation, ProcessWindow) else computation.then


@dataclass(frozen=True)
class Folding:
    """Functions that fold a window's elements into an accumulator, and that into a result."""

    #: From the first element to the accumulator.
    begin: Callable[[Any], Any]
    #: From an element and the accumulator, which is not None, to the next accumulator.
    add: Callable[[Any, Any], Any]
    #: From the accumulators of two windows, the earlier one first, to the merged one.
    merge: Callable[[Any, Any], Any]
    #: From the accumulator to the result; None if there is no result.
    result: Callable[[Any], Any]
    #: From the result to the elements of a window function.
    elements: Callable[[Any], Sequence[Any]]
    #: Copies an element for each further window; None if elements cannot change.
    take: Copier | None = None


def make_folding(computation: WindowComputation, element_type: ElementType) -> Folding:
    if isinstance(computation, AggregateWindow):
        return _make_aggregating(computation, element_type)
    if isinstance(computation, ReduceWindow):
        return _make_reducing(computation, element_type)
    named = element_type.naming()
    return Folding(
        begin=lambda value: [value],
        add=_append,
        merge=lambda first, second: [*first, *second],
        result=lambda held: list(map(named, held)),
        elements=as_it_is,
        take=element_type.take,
    )


def make_contents_descriptor(
    computation: WindowComputation, element_type: ElementType
) -> AggregatingStateDescriptor | ReducingStateDescriptor | ListStateDescriptor:
    if isinstance(computation, AggregateWindow):
        return AggregatingStateDescriptor(OPEN, computation.aggregate, computation.accumulator_type)
    if isinstance(computation, ReduceWindow):
        return ReducingStateDescriptor(OPEN, computation.reduce, element_type.ddl)
    return ListStateDescriptor(OPEN, element_type.ddl)


def _make_aggregating(computation: AggregateWindow, element_type: ElementType) -> Folding:
    aggregate = computation.aggregate
    create, add = aggregate.create_accumulator, aggregate.add
    own = owner_of(state_type(OPEN, computation.accumulator_type))

    def begin(value: Any) -> Any:
        first = copy_if_mutable(create())
        return own(add(value, first), value, first)

    # Only merging windows need `merge`.
    return Folding(
        begin=begin,
        add=add if own is not copy_result else lambda value, before: own(add(value, before), value, before),
        merge=lambda first, second: own(aggregate.merge(first, second), first, second),
        result=aggregate.get_result,
        elements=_wrap,
        take=element_type.take,
    )


def _make_reducing(computation: ReduceWindow, element_type: ElementType) -> Folding:
    given: Any = computation.reduce
    reduce: Callable[[Any, Any], Any] = getattr(given, "reduce", given)
    named, take = element_type.naming(), element_type.take

    def apply_reduce(first: Any, second: Any) -> Any:
        first = named(first)
        made = reduce(first, second)
        if type(made) in NOT_RUN:
            refuse_not_run(made, "reduce()")
        return made if take is None else copy_result(made, first, second)

    return Folding(
        begin=lambda value: value,
        add=lambda value, before: apply_reduce(before, value),
        merge=lambda first, second: apply_reduce(first, named(second)),
        result=named,
        elements=_wrap,
        take=take,
    )


def _append(value: Any, held: list[Any]) -> list[Any]:
    held.append(value)
    return held


def _wrap(result: Any) -> Sequence[Any]:
    return (result,)


class WindowContents:
    def __init__(self, computation: WindowComputation, input_type: ElementType) -> None:
        self._computation, self._type = computation, input_type
        #: Whether a window function gets a copy of the result, since it might change the accumulator.
        self._copies = not isinstance(computation, ProcessWindow) and computation.then is not None

    def open(self, states: KeyedStates) -> None:
        kept = self._make_descriptor()
        states.any_state(kept)
        self._scope, self._table, self._named = states.scope, states.tables[OPEN], self._type.naming()
        self._folding = make_folding(self._computation, self._type)
        own = kept.accumulator_type if isinstance(kept, AggregatingStateDescriptor) else self._type.ddl
        # Emitted values that can change are compared again before they are stored.
        self._held = self._table.lend if may_change(own) else self._table.read

    def add(self, value: Any, timestamp_ms: int | None) -> None:
        slot, table, value = self._scope.slot, self._table, self._named(value)
        before = table.entries.get(slot)
        made = self._folding.begin(value) if before is None else self._folding.add(value, before)
        if type(made) in NOT_RUN:
            refuse_not_run(made, "add()")
        table.entries[slot] = made
        table.changed.add(slot)

    def fire(self, fire: Fire, window: TimeWindow, ctx: EvictorContext) -> None:
        held = self._held(self._scope)
        if held is not None:
            fire(self._elements(held))
        elif isinstance(self._computation, AggregateWindow):
            fire(())

    def clear(self) -> None:
        self._table.remove(self._scope)

    def merge(self, slot: Any, into: Any) -> None:
        entries = self._table.entries
        before, behind = entries.get(into), entries.pop(slot, None)
        if before is not None and behind is not None:
            behind = self._merge_two(before, behind)
        entries[into] = before if behind is None else behind
        self._table.changed |= {slot, into}

    def _make_descriptor(self) -> AggregatingStateDescriptor | ReducingStateDescriptor | ListStateDescriptor:
        return make_contents_descriptor(self._computation, self._type)

    def _merge_two(self, before: Any, behind: Any) -> Any:
        return self._folding.merge(before, behind)

    def _elements(self, held: Any) -> Sequence[Any]:
        result = self._folding.result(held)
        if result is None:
            return ()
        return self._folding.elements(copy_if_mutable(result) if self._copies else result)


class EvictedContents(WindowContents):
    """Elements with their times, for an evictor; folded when the window fires."""

    def __init__(self, computation: WindowComputation, input_type: ElementType, evictor: Evictor) -> None:
        super().__init__(computation, input_type)
        self._evictor, self._has_fields = evictor, input_type.has_fields

    def add(self, value: Any, timestamp_ms: int | None) -> None:
        entry = (*value, timestamp_ms) if self._has_fields else (value, timestamp_ms)
        held = self._table.read(self._scope) or []
        held.append(entry)
        self._table.write(self._scope, held)

    def fire(self, fire: Fire, window: TimeWindow, ctx: EvictorContext) -> None:
        elements = [self._element(entry) for entry in self._held(self._scope) or ()]
        if not elements:
            return
        # An evictor may remove elements of the list that it is given.
        count = len(elements)
        kept = self._check_kept(self._evictor.evict_before(elements, window, ctx))
        fire(self._compute([element.value for element in kept]) if kept else ())
        if kept:
            kept = self._check_kept(self._evictor.evict_after(kept, window, ctx))
        if len(kept) < count:
            self.clear()
            for element in kept:
                self.add(element.value, element.timestamp_ms)

    def _make_descriptor(self) -> ListStateDescriptor:
        fields = self._type.ddl if self._has_fields else f"value {self._type.ddl}"
        return ListStateDescriptor(OPEN, f"{fields}, {_TIME_FIELD}")

    def _merge_two(self, before: Any, behind: Any) -> Any:
        return [*before, *behind]

    def _check_kept(self, kept: Any) -> Sequence[TimestampedValue]:
        if not isinstance(kept, Sequence):
            raise TypeError(
                f"the evictor {type(self._evictor).__name__} has returned {kept!r}; its evict_before and "
                "evict_after must return the elements that stay, in a list"
            )
        return kept

    def _element(self, entry: tuple[Any, ...]) -> TimestampedValue:
        if self._has_fields:
            return TimestampedValue(self._named(entry[:-1]), entry[-1])
        return TimestampedValue(*entry)

    def _compute(self, values: list[Any]) -> Sequence[Any]:
        if isinstance(self._computation, ProcessWindow):
            return values
        held = None
        # Copies, since the elements stay in the window, which may fire again.
        for value in map(copy_if_mutable, values):
            held = self._folding.begin(value) if held is None else self._folding.add(value, held)
        return () if held is None else self._elements(held)
