"""Conditions of row patterns over columns: the same answers as row by row, or none.

Expressions have the meaning of `flinkish_spark.cep.expressions`, which is Spark's ANSI mode. If an operation
is not supported here, or a row would raise an error, there is no answer: the matcher then evaluates each row
by itself, and raises the error only for a row that it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.cep import expressions as E
from flinkish_spark.cep import values as V
from flinkish_spark.cep.rows import RowSearch, is_of_place
from flinkish_spark.state.layered import Array

#: By row, whether it meets a condition; None if that is unknown.
Answers = list[bool | None]
_WHOLES = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}
_ARITHMETIC: dict[str, str] = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}


class _NotInColumns(Exception):
    """An expression cannot be computed over columns."""


def answer_conditions(search: RowSearch, columns: Sequence[pa.Array], begins: Array) -> dict[str, Answers]:
    """Return by pattern variable which rows meet its condition, if that depends on preceding rows only."""
    found: dict[str, Answers] = {}
    if not len(begins):
        return found
    for name, condition in search.defined.items():
        if not is_of_place(name, condition):
            continue
        over = _ColumnEvaluator(columns, begins)
        try:
            holds = over.evaluate(condition)
        except (_NotInColumns, pa.ArrowException):
            continue
        if isinstance(holds, pa.Array):
            own: Answers = pc.fill_null(holds, False).to_pylist()
            for at in over.unknown.tolist():
                own[at] = None
            found[name] = own
    return found


class _ColumnEvaluator:
    """Evaluates an expression over columns, with SQL nulls."""

    def __init__(self, columns: Sequence[pa.Array], begins: Array) -> None:
        self._columns, self._begins = columns, begins
        #: Rows whose answer is unknown.
        self.unknown: Array = np.empty(0, dtype=np.int64)

    def evaluate(self, made: E.Expression) -> Any:
        """Return the value as an array, or as a scalar if it is the same for all rows."""
        match made:
            case E.Column():
                return self._columns[made.field]
            case E.Literal(None | bool() | int() | float() | str() as given):
                return pa.scalar(given)
            case E.Navigation():
                return self._shift(self.evaluate(made.of), -made.rows)
            case E.All():
                return functools.reduce(pc.and_kleene, map(self.evaluate, made.of))
            case E.Negation():
                return pc.invert(self.evaluate(made.of))
            case E.IsNull():
                return pc.is_null(self.evaluate(made.of))
            case E.Coalesce():
                return pc.coalesce(*map(self.evaluate, made.of))
            case E.CaseWhen():
                found = self.evaluate(made.otherwise)
                for condition, value in reversed(made.cases):
                    holds = pc.fill_null(self.evaluate(condition), False)
                    found = pc.if_else(holds, self.evaluate(value), found)
                return found
            case E.FunctionCall():
                return _apply(made.function, [self.evaluate(one) for one in made.of])
        raise _NotInColumns

    def _shift(self, values: Any, rows: int) -> Any:
        """Return the values of the rows a number of positions before."""
        if not isinstance(values, pa.Array):
            raise _NotInColumns
        count = len(values)
        if rows == 0:
            return values
        first = (self._begins[:, None] + np.arange(rows)).ravel()
        lengths = np.diff(np.append(self._begins, count)).repeat(rows)
        first = first[np.tile(np.arange(rows), len(self._begins)) < lengths]
        self.unknown = np.union1d(self.unknown, first)
        moved = np.arange(count) - rows
        return values.take(pa.array(moved, mask=moved < 0))


def earlier_events(made: E.Expression) -> tuple[tuple[str, bool], ...] | None:
    """Return the earlier events that an expression reads: names, and whether their last or first event.

    None if it reads other events.
    """
    found: dict[tuple[str, bool], None] = {}
    for one in made.all_parts():
        if isinstance(one, E.Aggregate) or (isinstance(one, E.Navigation) and one.offset):
            return None
        for name in getattr(one, "variables", None) or ():
            found[name, not (isinstance(one, E.Navigation) and one.from_first)] = None
    return tuple(found)


class ComparedWithEarlier:
    """A condition that compares events with earlier ones of their partial matches, over columns."""

    def __init__(self, made: E.Expression, named: Sequence[tuple[str, bool]]) -> None:
        self._made, self._named = made, tuple(named)
        self._is_known = True
        #: Fields of all events.
        self.columns: Any = ()

    def __call__(self, events: Array, before: Sequence[Array]) -> Array | None:
        """Return the mask of pairs that meet the condition; None if columns cannot tell."""
        if not self._is_known:
            return None
        own = dict(zip(self._named, before, strict=True))
        try:
            holds = _EventPairEvaluator(self.columns, pa.array(events), own).evaluate(self._made)
        except _NotInColumns:
            self._is_known = False
            return None
        except pa.ArrowException:
            # An error of one pair: evaluate pairs one by one.
            return None
        if not isinstance(holds, pa.Array):
            return np.full(len(events), holds.as_py() is True)
        found: Array = pc.fill_null(holds, False).to_numpy(zero_copy_only=False)
        return found


def compute_measure(
    made: E.Expression, columns: Sequence[Any], named: Mapping[tuple[str, bool], Array], count: int
) -> pa.Array | None:
    """Return the values of an expression over the events of matches; None if columns cannot tell."""
    try:
        found = _EventPairEvaluator(columns, pa.nulls(count, pa.int64()), named).evaluate(made)
    except (_NotInColumns, pa.ArrowException):
        return None
    return found if isinstance(found, pa.Array) else pa.repeat(found, count)


class _EventPairEvaluator(_ColumnEvaluator):
    def __init__(
        self, columns: Sequence[pa.Array], events: pa.Array, before: Mapping[tuple[str, bool], Array]
    ) -> None:
        super().__init__(columns, np.empty(0, dtype=np.int64))
        self._before_of = {name: pa.array(one, mask=one < 0) for name, one in before.items()}
        self._events, self._from_first = events, False

    def evaluate(self, made: E.Expression) -> Any:
        match made:
            case E.Column(field, variables):
                places = self._events
                if variables is not None:
                    places = self._before_of[next(iter(variables)), not self._from_first]
                return self._columns[field].take(places)
            case E.Navigation(of=of, from_first=from_first):
                self._from_first = from_first
                try:
                    return self.evaluate(of)
                finally:
                    self._from_first = False
        return super().evaluate(made)


def _apply(function: Callable[..., Any], values: Sequence[Any]) -> Any:
    if any(pa.types.is_null(one.type) for one in values):
        raise _NotInColumns
    bound = function.args if isinstance(function, functools.partial) else ()
    apply = _OVER_COLUMNS.get(getattr(function, "func", function))
    if apply is None:
        raise _NotInColumns
    return apply(values, *bound)


def _compare(name: str, values: Sequence[Any]) -> Any:
    one, other = values
    kinds = one.type, other.type
    if all(map(pa.types.is_floating, kinds)):
        return _compare_floats(name, one, other)
    alike = (pa.types.is_integer, pa.types.is_boolean, _is_text, pa.types.is_timestamp, pa.types.is_date)
    if not any(all(map(is_kind, kinds)) for is_kind in alike):
        raise _NotInColumns
    return pc.call_function(name, [one, other])


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _compare_floats(name: str, one: Any, other: Any) -> Any:
    """Compare with NaN equal to itself and greater than all numbers, as in Spark."""
    if name == "less":
        return pc.if_else(pc.is_nan(other), pc.invert(pc.is_nan(one)), pc.less(one, other))
    return pc.or_(pc.equal(one, other), pc.and_(pc.is_nan(one), pc.is_nan(other)))


def _apply_to_integers(values: Sequence[Any], name: str, bits: int) -> Any:
    if name not in ("+", "-", "*"):
        raise _NotInColumns
    own = [_to_whole([one], bits) for one in values]
    return pc.call_function(f"{_ARITHMETIC[name]}_checked", own)


def _apply_to_doubles(values: Sequence[Any], name: str) -> Any:
    if name not in _ARITHMETIC or not all(pa.types.is_float64(one.type) for one in values):
        raise _NotInColumns
    return pc.call_function("divide_checked" if name == "/" else _ARITHMETIC[name], list(values))


def _to_whole(values: Sequence[Any], bits: int) -> Any:
    (one,) = values
    if not (pa.types.is_integer(one.type) or pa.types.is_boolean(one.type)):
        raise _NotInColumns
    return pc.cast(one, _WHOLES[bits])


def _to_double(values: Sequence[Any]) -> Any:
    (one,) = values
    if not (pa.types.is_integer(one.type) or pa.types.is_float32(one.type)):
        raise _NotInColumns
    return pc.cast(one, pa.float64(), safe=False)


#: By function of `cep.values`, the function over columns; it gets the values and the bound arguments.
_OVER_COLUMNS: Mapping[Any, Callable[..., Any]] = {
    V.is_equal: functools.partial(_compare, "equal"),
    V.is_less: functools.partial(_compare, "less"),
    V.compute_wholes: _apply_to_integers,
    V.compute_doubles: _apply_to_doubles,
    V.whole_of_number: _to_whole,
    V.negative: lambda values: pc.negate_checked(*values),
    V.absolute: lambda values: pc.abs_checked(*values),
    float: _to_double,
}
