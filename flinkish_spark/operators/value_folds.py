"""The folds of `flinkish_spark/operators/column_folds.py` on single values: the same results, one by one."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from typing import Any

from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from flinkish_spark.aggregates import ElementAggregate, ElementChoice, Fold, Ties
from flinkish_spark.operators.column_folds import AggregateOverflow
from flinkish_spark.operators.stored_elements import ElementType
from flinkish_spark.operators.vectorized_aggregates import element_aggregation

Reduce = Callable[[Any, Any], Any]

_BITS: dict[type[T.DataType], int] = {T.ByteType: 8, T.ShortType: 16, T.IntegerType: 32, T.LongType: 64}
#: Wide enough for the sum of two decimals of any declared type.
_EXACT = decimal.Context(prec=80)


def element_reduce(aggregate: ElementAggregate, input_type: str) -> Reduce:
    """Return the reduction of two elements of a running aggregate.

    Raises
    ------
    ConfigError
        Elements have no fields, or none of that name, or its type has no such fold.

    Examples
    --------
    >>> from flinkish_spark.aggregates import FieldAggregate
    >>> total = element_reduce(FieldAggregate(Fold.SUM, "amount"), "user STRING, amount LONG")
    >>> total(("ann", 1), ("ann", 2))
    Record(user='ann', amount=3)
    """
    element_aggregation(aggregate, input_type)
    element = ElementType(input_type)
    at = [field.name for field in element.fields].index(aggregate.field)
    kind = element.fields[at].dataType
    if isinstance(aggregate, ElementChoice):
        return _choosing(aggregate, at)
    fold = value_fold(aggregate.fold, aggregate.field, kind)
    gather = element.gathering()

    def reduce(first: Any, second: Any) -> Any:
        return gather((*first[:at], fold(first[at], second[at]), *first[at + 1 :]))

    return reduce


def value_fold(fold: Fold, name: str, kind: T.DataType) -> Reduce:
    """Return the sum, least or greatest of two values of a field; null is nothing.

    Parameters
    ----------
    fold
        SUM, MIN or MAX.
    name, kind
        Of the field; a sum that leaves its type raises AggregateOverflow.
    """
    return _adding(name, kind) if fold is Fold.SUM else _choosing_value(fold)


def _choosing(choice: ElementChoice, at: int) -> Reduce:
    is_better = _comparing(choice.fold)
    if choice.ties is Ties.FIRST:
        return lambda first, second: second if is_better(second[at], first[at]) else first
    return lambda first, second: first if is_better(first[at], second[at]) else second


def _choosing_value(fold: Fold) -> Reduce:
    is_better = _comparing(fold)
    return lambda first, second: second if is_better(second, first) else first


def _comparing(fold: Fold) -> Callable[[Any, Any], bool]:
    """Return whether a value is strictly better than another; null is the worst, NaN the greatest number."""

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


def _adding(name: str, kind: T.DataType) -> Reduce:
    def add(first: Any, second: Any) -> Any:
        if first is None or second is None:
            return second if first is None else first
        return checked(first, second)

    checked = _adding_numbers(name, kind)
    return add


def _adding_numbers(name: str, kind: T.DataType) -> Reduce:
    if isinstance(kind, T.DecimalType):
        limit = decimal.Decimal(10) ** (kind.precision - kind.scale)

        def add_decimals(first: Any, second: Any) -> Any:
            total = _EXACT.add(first, second)
            # Not abs(): that rounds to the precision of the thread.
            if total.copy_abs() >= limit:
                raise AggregateOverflow(name, to_arrow_type(kind))
            return total

        return add_decimals
    if type(kind) in _BITS:
        bound = 1 << (_BITS[type(kind)] - 1)

        def add_integers(first: Any, second: Any) -> Any:
            total = first + second
            if not -bound <= total < bound:
                raise AggregateOverflow(name, to_arrow_type(kind))
            return total

        return add_integers
    return lambda first, second: first + second
