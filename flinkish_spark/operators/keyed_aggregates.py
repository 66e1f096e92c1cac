"""Running aggregates of a keyed stream, element by element: each element gives a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flinkish_spark.functions import AggregateFunction, ReduceFunction
from flinkish_spark.operators.elements import TimeDomain, Timer
from flinkish_spark.operators.keyed_context import FunctionContext, KeyedStates, Timers
from flinkish_spark.operators.keyed_operators import KeyedStreamOperator, Processor
from flinkish_spark.operators.rich_parts import close_part, open_part
from flinkish_spark.operators.stored_elements import ElementType
from flinkish_spark.runtime.hinted_types import StateType
from flinkish_spark.state import AggregatingStateDescriptor, StateTtl, ValueStateDescriptor

_REDUCED, _AGGREGATED = "reduced", "aggregated"


class _WithoutTimers(KeyedStreamOperator):
    def on_timer(self, timer: Timer, domain: TimeDomain) -> None:
        """Do nothing: nobody registers one."""


class ReduceOperator(_WithoutTimers):
    """Emits, for each element, what all elements of its key so far are reduced to.

    Parameters
    ----------
    reduce
        From two elements to one of the same type: an object with `reduce`, or a callable. The first one of a
        key comes out as it is.
    input_type
        DDL of the elements.
    ttl
        How long a key's value lives since it was touched; None: for ever.
    """

    def __init__(
        self, reduce: ReduceFunction | Callable[[Any, Any], Any], input_type: str, ttl: StateTtl | None = None
    ) -> None:
        self._given: Any = reduce
        self._element = ElementType(input_type)
        self._descriptor = ValueStateDescriptor(_REDUCED, input_type, ttl=ttl)

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        """Declare the state, and open the function."""
        open_part(self._given, states.uid, states.max_parallelism)
        self._state = states.get_state(self._descriptor)
        self._reduce = getattr(self._given, "reduce", self._given)
        self._named = self._element.naming()

    def processors(self) -> tuple[Processor, ...]:
        """Return what handles an element."""
        return (self._process,)

    def _process(self, value: Any, _: FunctionContext) -> Iterable[Any]:
        before = self._state.value()
        reduced = value if before is None else self._reduce(self._named(before), value)
        self._state.update(reduced)
        return (reduced,)

    def close(self) -> None:
        """Close the function."""
        close_part(self._given)


class AggregateOperator(_WithoutTimers):
    """Emits, for each element, the result of its key's accumulator; not if that is None.

    Parameters
    ----------
    aggregate
        The function.
    accumulator_type
        As of a state: one type, or fields for a tuple.
    ttl
        How long an accumulator lives since it was touched; None: for ever.
    """

    def __init__(
        self, aggregate: AggregateFunction, accumulator_type: StateType, ttl: StateTtl | None = None
    ) -> None:
        self._descriptor = AggregatingStateDescriptor(_AGGREGATED, aggregate, accumulator_type, ttl)

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        """Declare the state, and open the function."""
        open_part(self._descriptor.aggregate, states.uid, states.max_parallelism)
        self._state = states.get_aggregating_state(self._descriptor)

    def processors(self) -> tuple[Processor, ...]:
        """Return what handles an element."""
        return (self._process,)

    def _process(self, value: Any, _: FunctionContext) -> Iterable[Any] | None:
        self._state.add(value)
        result = self._state.get()
        return None if result is None else (result,)

    def close(self) -> None:
        """Close the function."""
        close_part(self._descriptor.aggregate)
