"""Running aggregates of a keyed stream, element by element, with the results of `columnar_aggregates`."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Iterable
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.core.iterators import refuse_not_run
from flinkish_spark.functions.aggregates import ElementAggregate, ElementChoice, Fold, Ties
from flinkish_spark.functions.keyed import AggregateFunction, ReduceFunction
from flinkish_spark.operators.columnar_aggregates import AggregateOverflow, make_element_aggregation
from flinkish_spark.operators.context import FunctionContext, close_part, open_part
from flinkish_spark.operators.process import KeyedStreamOperator
from flinkish_spark.state.descriptors import AggregatingStateDescriptor, StateTtl, ValueStateDescriptor
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.timers import Timers
from flinkish_spark.types.arrow_types import arrow_type
from flinkish_spark.types.hints import StateType
from flinkish_spark.types.rows import ElementType
from flinkish_spark.types.to_python import copy_result

_REDUCED, _AGGREGATED = "reduced", "aggregated"


class ReduceOperator(KeyedStreamOperator):
    """Emits, for each element, the reduction of all elements of its key so far."""

    def __init__(
        self, reduce: ReduceFunction | Callable[[Any, Any], Any], input_type: str, ttl: StateTtl | None = None
    ) -> None:
        self._given: Any = reduce
        self._element = ElementType(input_type)
        self._descriptor = ValueStateDescriptor(_REDUCED, input_type, ttl=ttl)

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        open_part(self._given, states.uid, states.max_parallelism)
        self._state = states.get_state(self._descriptor)
        self._reduce = getattr(self._given, "reduce", self._given)
        self._named = self._element.naming()

    def process_element(self, value: Any, context: FunctionContext) -> Iterable[Any]:
        reduced, before = value, self._state.value()
        if before is not None:
            before = self._named(before)
            reduced = refuse_not_run(self._reduce(before, value), "reduce()")
            if self._element.take is not None:
                reduced = copy_result(reduced, before, value)
        self._state.update(reduced)
        return (reduced,)

    def close(self) -> None:
        close_part(self._given)


class AggregateOperator(KeyedStreamOperator):
    """Emits, for each element, the result of its key's accumulator, unless it is None."""

    def __init__(
        self, aggregate: AggregateFunction, accumulator_type: StateType, ttl: StateTtl | None = None
    ) -> None:
        self._descriptor = AggregatingStateDescriptor(_AGGREGATED, aggregate, accumulator_type, ttl)

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        open_part(self._descriptor.aggregate, states.uid, states.max_parallelism)
        self._state = states.get_aggregating_state(self._descriptor)

    def process_element(self, value: Any, context: FunctionContext) -> Iterable[Any] | None:
        self._state.add(value)
        result = self._state.get()
        return None if result is None else (result,)

    def close(self) -> None:
        close_part(self._descriptor.aggregate)


Reduce = Callable[[Any, Any], Any]

_BITS: dict[type[T.DataType], int] = {T.ByteType: 8, T.ShortType: 16, T.IntegerType: 32, T.LongType: 64}
#: Wide enough for the sum of two decimals of any declared type.
_EXACT = decimal.Context(prec=80)


def make_element_reduce(aggregate: ElementAggregate, input_type: str) -> Reduce:
    make_element_aggregation(aggregate, input_type)
    element = ElementType(input_type)
    at = [field.name for field in element.fields].index(aggregate.field)
    kind = element.fields[at].dataType
    if isinstance(aggregate, ElementChoice):
        is_better = _make_comparison(aggregate.fold)
        if aggregate.ties is Ties.FIRST:
            return lambda first, second: second if is_better(second[at], first[at]) else first
        return lambda first, second: first if is_better(first[at], second[at]) else second
    fold = make_value_fold(aggregate.fold, aggregate.field, kind)
    gather = element.gathering()

    def reduce(first: Any, second: Any) -> Any:
        return gather((*first[:at], fold(first[at], second[at]), *first[at + 1 :]))

    return reduce


def make_value_fold(fold: Fold, name: str, kind: T.DataType) -> Reduce:
    """Return a function for the sum, minimum or maximum of two values of a field; it skips nulls."""
    if fold is Fold.SUM:
        add = _make_adder(name, kind)

        def sum_of(first: Any, second: Any) -> Any:
            if first is None or second is None:
                return second if first is None else first
            return add(first, second)

        return sum_of
    is_better = _make_comparison(fold)
    return lambda first, second: second if is_better(second, first) else first


def _make_comparison(fold: Fold) -> Callable[[Any, Any], bool]:
    """Return a strict comparison in which null is the worst value and NaN the greatest number."""

    def is_less(one: Any, other: Any) -> bool:
        if isinstance(one, float) and math.isnan(one):
            return False
        if isinstance(other, float) and math.isnan(other):
            return True
        return bool(one < other)

    def is_better(one: Any, other: Any) -> bool:
        if one is None or other is None:
            return one is not None and other is None
        return is_less(one, other) if fold is Fold.MIN else is_less(other, one)

    return is_better


def _make_adder(name: str, kind: T.DataType) -> Reduce:
    if isinstance(kind, T.DecimalType):
        limit = decimal.Decimal(10) ** (kind.precision - kind.scale)

        def add_decimals(first: Any, second: Any) -> Any:
            total = _EXACT.add(first, second)
            # Not abs(), which rounds to the precision of the thread's decimal context.
            if total.copy_abs() >= limit:
                raise AggregateOverflow(name, arrow_type(kind))
            return total

        return add_decimals
    if type(kind) in _BITS:
        bound = 1 << (_BITS[type(kind)] - 1)

        def add_integers(first: Any, second: Any) -> Any:
            total = first + second
            if not -bound <= total < bound:
                raise AggregateOverflow(name, arrow_type(kind))
            return total

        return add_integers
    return lambda first, second: first + second
