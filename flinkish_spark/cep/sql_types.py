"""Types of SQL expressions, with casts, arithmetic and aggregates by type, as in Spark's ANSI mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.cep import expressions as E
from flinkish_spark.cep import values as V
from flinkish_spark.cep.sql_text import refuse

#: An expression and its type.
Typed = tuple[E.Expression, T.DataType]
INT, LONG, DOUBLE = T.IntegerType(), T.LongType(), T.DoubleType()
TEXT, BOOLEAN = T.StringType(), T.BooleanType()
#: By integer type: its bits, and the digits of an equivalent decimal.
BITS: dict[type, int] = {T.ByteType: 8, T.ShortType: 16, T.IntegerType: 32, T.LongType: 64}
_DIGITS: dict[type, int] = {T.ByteType: 3, T.ShortType: 5, T.IntegerType: 10, T.LongType: 20}


def cast_alike(parts: Sequence[Typed], text: str) -> tuple[tuple[E.Expression, ...], T.DataType]:
    """Cast expressions to their common type, for comparisons and results."""
    kind: T.DataType = T.NullType()
    for _, own in parts:
        kind = _widen(kind, own, text)
    return tuple(cast(one, kind, text) for one in parts), kind


def _widen(one: T.DataType, other: T.DataType, text: str) -> T.DataType:
    if one == other or isinstance(other, T.NullType):
        return one
    if isinstance(one, T.NullType):
        return other
    if not isinstance(one, T.NumericType) or not isinstance(other, T.NumericType):
        says = f"a {one.simpleString()} and a {other.simpleString()} have no type in common"
        refuse(text, says, "cast one of them")
    if type(one) in BITS and type(other) in BITS:
        return max(one, other, key=lambda kind: BITS[type(kind)])
    first, second = _to_decimal_type(one), _to_decimal_type(other)
    if first is None or second is None:
        return DOUBLE
    scale = max(first.scale, second.scale)
    whole = max(first.precision - first.scale, second.precision - second.scale)
    # If the digits do not fit, those before the point are kept.
    return T.DecimalType(min(whole + scale, 38), scale if whole + scale <= 38 else max(38 - whole, 0))


def _to_decimal_type(kind: T.DataType) -> T.DecimalType | None:
    if isinstance(kind, T.DecimalType):
        return kind
    digits = _DIGITS.get(type(kind))
    return None if digits is None else T.DecimalType(digits, 0)


def compute(name: str, one: Typed, other: Typed, text: str) -> Typed:
    """Return a sum, difference, product, quotient or remainder."""
    for own in (one[1], other[1]):
        require_number(own, text, or_null=True)
    kind = _widen(one[1], other[1], text)
    if isinstance(kind, T.DecimalType):
        first, second = _to_decimal_operand(one), _to_decimal_operand(other)
        kind = _find_decimal_type(name, first, second)
        given = cast(one, first, text), cast(other, second, text)
        return E.FunctionCall(partial(V.compute_decimals, name, kind.precision, kind.scale), given), kind
    if name == "/" or isinstance(kind, T.NullType):
        kind = DOUBLE
    given = cast(one, kind, text), cast(other, kind, text)
    if type(kind) in BITS:
        return E.FunctionCall(partial(V.compute_wholes, name, BITS[type(kind)]), given), kind
    made = E.FunctionCall(partial(V.compute_doubles, name), given)
    return (E.FunctionCall(V.single, (made,)) if isinstance(kind, T.FloatType) else made), kind


def require_number(kind: T.DataType, text: str, *, or_null: bool = False) -> None:
    if not isinstance(kind, T.NumericType) and not (or_null and isinstance(kind, T.NullType)):
        refuse(text, f"a {kind.simpleString()} is no number", "cast it")


def _to_decimal_operand(given: Typed) -> T.DecimalType:
    """Return the decimal type of an operand; a literal whole number has as many digits as written."""
    made, kind = given
    if isinstance(made, E.Literal) and type(made.given) is int:
        return T.DecimalType(len(str(abs(made.given))), 0)
    found = _to_decimal_type(kind)
    return T.DecimalType(1, 0) if found is None else found


def _find_decimal_type(name: str, one: T.DecimalType, other: T.DecimalType) -> T.DecimalType:
    """Return the type of arithmetic; if it is too long, digits after the point are dropped, down to six."""
    most, least = max(one.scale, other.scale), min(one.precision - one.scale, other.precision - other.scale)
    whole = max(one.precision - one.scale, other.precision - other.scale)
    match name:
        case "*":
            digits, scale = one.precision + other.precision + 1, one.scale + other.scale
        case "/":
            scale = max(6, one.scale + other.precision + 1)
            digits = one.precision - one.scale + other.scale + scale
        case "%":
            digits, scale = least + most, most
        case _:
            digits, scale = whole + most + 1, most
    if digits <= 38:
        return T.DecimalType(digits, scale)
    return T.DecimalType(38, max(38 - (digits - scale), min(scale, 6)))


def cast(given: Typed, kind: T.DataType, text: str) -> E.Expression:
    made, own = given
    if own == kind or isinstance(own, T.NullType):
        return made
    function = _find_cast(own, kind)
    if function is None:
        says = f"a {own.simpleString()} is not cast to {kind.simpleString()} here"
        refuse(text, says, "leave the cast to a transform() after the match")
    found = E.FunctionCall(function, (made,))
    return E.FunctionCall(V.single, (found,)) if isinstance(kind, T.FloatType) else found


def _find_cast(own: T.DataType, kind: T.DataType) -> Callable[[Any], Any] | None:
    """Return the function of a cast, to DOUBLE for FLOAT; None if there is none."""
    is_text = isinstance(own, T.StringType)
    if not is_text and not isinstance(own, T.NumericType | T.BooleanType):
        return None
    match kind:
        case T.DecimalType():
            to_decimal = V.decimal_of_text if is_text else V.decimal_of_number
            return partial(to_decimal, kind.precision, kind.scale)
        case T.DoubleType() | T.FloatType():
            return V.double_of_text if is_text else float
        case T.BooleanType():
            return V.boolean_of_text if is_text else bool
        case T.StringType():
            # Java writes floats in a way of its own.
            return None if isinstance(own, T.StringType | T.DoubleType | T.FloatType) else V.text_of
    if type(kind) not in BITS:
        return None
    return partial(V.whole_of_text if is_text else V.whole_of_number, BITS[type(kind)])


def aggregate(name: str, kind: T.DataType, text: str) -> tuple[Callable[[list[Any]], Any] | None, T.DataType]:
    """Return the function of an aggregate (None for a count), and the result's type."""
    if name == "COUNT":
        return None, LONG
    if name in ("MIN", "MAX"):
        return partial(min if name == "MIN" else max, key=V.order), kind
    require_number(kind, text)
    if isinstance(kind, T.DecimalType):
        more, of = (10, V.sum_of_decimals) if name == "SUM" else (4, V.mean_of_decimals)
        digits = min(kind.precision + more, 38)
        scale = kind.scale if name == "SUM" else min(kind.scale + 4, 38)
        return partial(of, digits, scale), T.DecimalType(digits, scale)
    if name == "AVG":
        return V.mean_of_doubles, DOUBLE
    if type(kind) in BITS:
        return partial(reduce, partial(V.compute_wholes, "+", 64)), LONG
    return V.sum_of_doubles, DOUBLE
