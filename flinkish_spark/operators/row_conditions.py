"""Conditions of row patterns over the columns of many rows: the same answers as row by row, or none.

What is computed here means what `flinkish_spark.cep.expressions` makes of it, that is Spark's ANSI mode.
Where an operation is not known here, or one row would be refused, nothing is answered: then each row that the
matcher asks about is looked at alone, and refused if it comes to that.
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

#: Of each row whether it meets a condition; None where nobody knows.
Answers = list[bool | None]
_WHOLES = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}
_ARITHMETIC: dict[str, str] = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
_COMPARED: dict[Any, str] = {V.is_equal: "equal", V.is_less: "less"}


class _NotInColumns(Exception):
    """It is not known here how to compute that over columns."""


def answered(search: RowSearch, columns: Sequence[pa.Array], begins: Array) -> dict[str, Answers]:
    """Return by variable which rows are it, as far as their own fields and those of rows before say so."""
    found: dict[str, Answers] = {}
    if not len(begins):
        return found
    for name, condition in search.defined.items():
        if not is_of_place(name, condition):
            continue
        over = _Over(columns, begins)
        try:
            holds = over.value(condition)
        except (_NotInColumns, pa.ArrowException):
            continue
        if isinstance(holds, pa.Array):
            own: Answers = pc.fill_null(holds, False).to_pylist()
            for at in over.unknown.tolist():
                own[at] = None
            found[name] = own
    return found


class _Over:
    """Evaluates over columns; null is no value, as for a single row."""

    def __init__(self, columns: Sequence[pa.Array], begins: Array) -> None:
        self._columns, self._begins = columns, begins
        #: Rows of which something is not known.
        self.unknown: Array = np.empty(0, dtype=np.int64)

    def value(self, made: E.Expression) -> Any:
        """Return it as an array, or a scalar where it is the same for all rows."""
        match made:
            case E.Column():
                return self._columns[made.field]
            case E.Literal():
                return _scalar(made.given)
            case E.Navigation():
                return self._before(self.value(made.of), -made.rows)
            case E.All():
                return functools.reduce(pc.and_kleene, map(self.value, made.of))
            case E.Negation():
                return pc.invert(self.value(made.of))
            case E.IsNull():
                return pc.is_null(self.value(made.of))
            case E.Coalesce():
                return pc.coalesce(*map(self.value, made.of))
            case E.CaseWhen():
                found = self.value(made.otherwise)
                for condition, value in reversed(made.cases):
                    holds = pc.fill_null(self.value(condition), False)
                    found = pc.if_else(holds, self.value(value), found)
                return found
            case E.FunctionCall():
                return _applied(made.function, [self.value(one) for one in made.of])
        raise _NotInColumns

    def _before(self, values: Any, rows: int) -> Any:
        """Return the values of rows so many places before."""
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
    """Return which earlier events an expression names, and whether it is their last one; else their first.

    None: it looks at more of them than that.
    """
    found: dict[tuple[str, bool], None] = {}
    for one in made.all_parts():
        if isinstance(one, E.Aggregate) or (isinstance(one, E.Navigation) and one.offset):
            return None
        for name in getattr(one, "variables", None) or ():
            found[name, not (isinstance(one, E.Navigation) and one.from_first)] = None
    return tuple(found)


class ComparedWithEarlier:
    """A condition of events beside earlier ones of their partial matches, over columns."""

    def __init__(self, made: E.Expression, named: Sequence[tuple[str, bool]]) -> None:
        self._made, self._named = made, tuple(named)
        self._is_known = True
        #: Fields of all events that there are.
        self.columns: Any = ()

    def __call__(self, events: Array, before: Sequence[Array]) -> Array | None:
        """Return of which pairs it holds; None where it is not known how to say that."""
        if not self._is_known:
            return None
        own = {name: pa.array(one, mask=one < 0) for name, one in zip(self._named, before, strict=True)}
        try:
            holds = _Beside(self.columns, pa.array(events), own).value(self._made)
        except _NotInColumns:
            self._is_known = False
            return None
        except pa.ArrowException:
            # A value is refused: only of those that are asked about one by one.
            return None
        if not isinstance(holds, pa.Array):
            return np.full(len(events), holds.as_py() is True)
        found: Array = pc.fill_null(holds, False).to_numpy(zero_copy_only=False)
        return found


def measured(
    made: E.Expression, columns: Sequence[Any], named: Mapping[tuple[str, bool], Array], count: int
) -> pa.Array | None:
    """Return an expression over the events of matches as a column; None where it is not known how."""
    own = {name: pa.array(one, mask=one < 0) for name, one in named.items()}
    try:
        found = _Beside(columns, pa.nulls(count, pa.int64()), own).value(made)
    except (_NotInColumns, pa.ArrowException):
        return None
    return found if isinstance(found, pa.Array) else pa.repeat(found, count)


class _Beside(_Over):
    """Evaluates pairs of an event and earlier ones."""

    def __init__(
        self, columns: Sequence[pa.Array], events: pa.Array, before: Mapping[tuple[str, bool], pa.Array]
    ) -> None:
        super().__init__(columns, np.empty(0, dtype=np.int64))
        self._events, self._before_of, self._from_first = events, before, False

    def value(self, made: E.Expression) -> Any:
        match made:
            case E.Column(field, variables):
                places = self._events
                if variables is not None:
                    places = self._before_of[next(iter(variables)), not self._from_first]
                return self._columns[field].take(places)
            case E.Navigation(of=of, from_first=from_first):
                self._from_first = from_first
                try:
                    return self.value(of)
                finally:
                    self._from_first = False
        return super().value(made)


def _scalar(given: Any) -> pa.Scalar:
    if given is not None and not isinstance(given, bool | int | float | str):
        raise _NotInColumns
    return pa.scalar(given)


def _applied(function: Callable[..., Any], values: Sequence[Any]) -> Any:
    if any(pa.types.is_null(one.type) for one in values):
        raise _NotInColumns
    if function in _COMPARED:
        return _compared(_COMPARED[function], *values)
    if isinstance(function, functools.partial):
        apply = _PARTIALS.get(function.func)
        if apply is not None:
            return apply(values, *function.args)
    apply = _PLAIN.get(function)
    if apply is None:
        raise _NotInColumns
    return apply(values)


def _compared(name: str, one: Any, other: Any) -> Any:
    kinds = one.type, other.type
    if all(map(pa.types.is_floating, kinds)):
        return _compared_floats(name, one, other)
    alike = (pa.types.is_integer, pa.types.is_boolean, _is_text, pa.types.is_timestamp, pa.types.is_date)
    if not any(all(map(is_kind, kinds)) for is_kind in alike):
        raise _NotInColumns
    return pc.call_function(name, [one, other])


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _compared_floats(name: str, one: Any, other: Any) -> Any:
    """NaN is equal to itself, and more than all else."""
    if name == "less":
        return pc.if_else(pc.is_nan(other), pc.invert(pc.is_nan(one)), pc.less(one, other))
    return pc.or_(pc.equal(one, other), pc.and_(pc.is_nan(one), pc.is_nan(other)))


def _of_wholes(values: Sequence[Any], name: str, bits: int) -> Any:
    if name not in ("+", "-", "*"):
        raise _NotInColumns
    own = [_to_whole([one], bits) for one in values]
    return pc.call_function(f"{_ARITHMETIC[name]}_checked", own)


def _of_doubles(values: Sequence[Any], name: str) -> Any:
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


def _signed(name: str) -> Callable[[Sequence[Any], int], Any]:
    return lambda values, bits: pc.call_function(f"{name}_checked", [_to_whole(values, bits)])


#: By function of `cep.values`, what does the same with columns; it gets what the function is given besides.
_PARTIALS: Mapping[Any, Callable[..., Any]] = {
    V.compute_wholes: _of_wholes,
    V.compute_doubles: _of_doubles,
    V.whole_of_number: _to_whole,
    V.negative_whole: _signed("negate"),
    V.absolute_whole: _signed("abs"),
}
_PLAIN: Mapping[Any, Callable[..., Any]] = {float: _to_double}
