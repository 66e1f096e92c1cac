"""What a window keeps of its elements, and what its function is given of that."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from flinkish_spark.functions import AggregateFunction
from flinkish_spark.operators.keyed_context import KeyedStates
from flinkish_spark.operators.stored_elements import ElementType, Named
from flinkish_spark.state import AggregatingStateDescriptor, ListStateDescriptor, ReducingStateDescriptor
from flinkish_spark.windows.evictors import Evictor, EvictorContext, TimestampedValue
from flinkish_spark.windows.functions import ProcessWindowFunction
from flinkish_spark.windows.spec import AggregateWindow, ProcessWindow, ReduceWindow, WindowComputation
from flinkish_spark.windows.time_window import TimeWindow

CONTENTS = "window/contents"
#: Field behind those of an element, for its event time.
_TIME_FIELD = "__time_ms LONG"

Reduce = Callable[[Any, Any], Any]
#: Given a window's elements, calls its function and emits what that returns.
Fire = Callable[[Sequence[Any]], None]


class WindowContents(ABC):
    """The content of the current key's current window; the same slot as the states of its operator."""

    @abstractmethod
    def open(self, states: KeyedStates) -> None:
        """Declare the state."""

    @abstractmethod
    def add(self, value: Any, timestamp_ms: int | None) -> None:
        """Add an element."""

    @abstractmethod
    def fire(self, fire: Fire, window: TimeWindow, ctx: EvictorContext) -> None:
        """Fire with what is there; not if that is nothing."""

    @abstractmethod
    def clear(self) -> None:
        """Throw it away."""

    @abstractmethod
    def merge(self, slot: Any, into: Any) -> None:
        """Give one slot's content to another, behind what that has."""


def part_of(computation: WindowComputation) -> object:
    """Return what reduces or aggregates elements; None where all of them are kept."""
    if isinstance(computation, ReduceWindow):
        return computation.reduce
    return computation.aggregate if isinstance(computation, AggregateWindow) else None


def function_of(computation: WindowComputation) -> ProcessWindowFunction | None:
    """Return what is called when a window fires, if anything is."""
    return computation.process if isinstance(computation, ProcessWindow) else computation.then


def contents_of(
    computation: WindowComputation, input_type: ElementType, evictor: Evictor | None
) -> WindowContents:
    """Return the contents that a computation needs."""
    if evictor is not None:
        return _Evicted(input_type, evictor, computation)
    if isinstance(computation, ReduceWindow):
        return _Reduced(input_type, computation)
    if isinstance(computation, AggregateWindow):
        return _Aggregated(computation)
    return _Listed(input_type)


class _Reduced(WindowContents):
    def __init__(self, input_type: ElementType, computation: ReduceWindow) -> None:
        self._type, self._computation = input_type, computation

    def open(self, states: KeyedStates) -> None:
        self._named = self._type.naming()
        self._reduce = _named_reduce(self._computation, self._named)
        states.per_namespace(CONTENTS)
        self._state = states.get_reducing_state(ReducingStateDescriptor(CONTENTS, self, self._type.ddl))

    def reduce(self, first: Any, second: Any) -> Any:
        return self._reduce(first, second)

    def add(self, value: Any, timestamp_ms: int | None) -> None:
        self._state.add(value)

    def fire(self, fire: Fire, window: TimeWindow, ctx: EvictorContext) -> None:
        value = self._state.get()
        if value is not None:
            fire((self._named(value),))

    def clear(self) -> None:
        self._state.clear()

    def merge(self, slot: Any, into: Any) -> None:
        self._state.merge(slot, into)


class _Aggregated(WindowContents):
    def __init__(self, computation: AggregateWindow) -> None:
        self._descriptor = AggregatingStateDescriptor(
            CONTENTS, computation.aggregate, computation.accumulator_type
        )

    def open(self, states: KeyedStates) -> None:
        states.per_namespace(CONTENTS)
        self._state = states.get_aggregating_state(self._descriptor)

    def add(self, value: Any, timestamp_ms: int | None) -> None:
        self._state.add(value)

    def fire(self, fire: Fire, window: TimeWindow, ctx: EvictorContext) -> None:
        result = self._state.get()
        # Of a result of None nothing is emitted; what was emitted before does not stand any more, though.
        fire(() if result is None else (result,))

    def clear(self) -> None:
        self._state.clear()

    def merge(self, slot: Any, into: Any) -> None:
        self._state.merge(slot, into)


class _Listed(WindowContents):
    def __init__(self, input_type: ElementType) -> None:
        self._type = input_type

    def open(self, states: KeyedStates) -> None:
        self._named = self._type.naming()
        states.per_namespace(CONTENTS)
        self._state = states.get_list_state(ListStateDescriptor(CONTENTS, self._type.ddl))

    def add(self, value: Any, timestamp_ms: int | None) -> None:
        self._state.add(value)

    def fire(self, fire: Fire, window: TimeWindow, ctx: EvictorContext) -> None:
        values = self._state.get()
        if values:
            fire([self._named(value) for value in values])

    def clear(self) -> None:
        self._state.clear()

    def merge(self, slot: Any, into: Any) -> None:
        self._state.merge(slot, into)


class _Evicted(WindowContents):
    """Elements with their times, so that an evictor can choose; computed when the window fires."""

    def __init__(self, input_type: ElementType, evictor: Evictor, computation: WindowComputation) -> None:
        self._type, self._evictor, self._computation = input_type, evictor, computation

    def open(self, states: KeyedStates) -> None:
        self._named = self._type.naming()
        self._at_once = _at_once(self._computation, self._named)
        self._has_fields = self._type.has_fields
        fields = self._type.ddl if self._has_fields else f"value {self._type.ddl}"
        states.per_namespace(CONTENTS)
        self._state = states.get_list_state(ListStateDescriptor(CONTENTS, f"{fields}, {_TIME_FIELD}"))

    def add(self, value: Any, timestamp_ms: int | None) -> None:
        self._state.add((*value, timestamp_ms) if self._has_fields else (value, timestamp_ms))

    def fire(self, fire: Fire, window: TimeWindow, ctx: EvictorContext) -> None:
        elements = self._elements()
        if not elements:
            return
        # An evictor may remove elements of the list that it is given.
        count = len(elements)
        kept = self._left(self._evictor.evict_before(elements, window, ctx))
        fire(self._at_once([element.value for element in kept]) if kept else ())
        if kept:
            kept = self._left(self._evictor.evict_after(kept, window, ctx))
        if len(kept) < count:
            self._state.clear()
            for element in kept:
                self.add(element.value, element.timestamp_ms)

    def clear(self) -> None:
        self._state.clear()

    def merge(self, slot: Any, into: Any) -> None:
        self._state.merge(slot, into)

    def _left(self, kept: Any) -> Sequence[TimestampedValue]:
        """Return what an evictor has left; raise TypeError if it did not say."""
        if not isinstance(kept, Sequence):
            raise TypeError(
                f"the evictor {type(self._evictor).__name__} has returned {kept!r}; its evict_before and "
                "evict_after must return the elements that stay, in a list"
            )
        return kept

    def _elements(self) -> list[TimestampedValue]:
        entries = self._state.get()
        if self._has_fields:
            return [TimestampedValue(self._named(entry[:-1]), entry[-1]) for entry in entries]
        return [TimestampedValue(*entry) for entry in entries]


def _named_reduce(computation: ReduceWindow, named: Named) -> Reduce:
    """Return the reduction of elements that have the names of their fields."""
    given: Any = computation.reduce
    reduce: Reduce = getattr(given, "reduce", given)
    return lambda first, second: reduce(named(first), named(second))


def _at_once(computation: WindowComputation, named: Named) -> Callable[[list[Any]], Sequence[Any]]:
    """Return what does a computation over elements that were kept."""
    if isinstance(computation, ReduceWindow):
        reduce = _named_reduce(computation, named)
        return lambda values: (named(functools.reduce(reduce, values)),)
    if isinstance(computation, AggregateWindow):
        return functools.partial(_aggregate, computation.aggregate)
    return lambda values: values


def _aggregate(aggregate: AggregateFunction, values: list[Any]) -> Sequence[Any]:
    accumulator = aggregate.create_accumulator()
    for value in values:
        accumulator = aggregate.add(value, accumulator)
    result = aggregate.get_result(accumulator)
    return () if result is None else (result,)
