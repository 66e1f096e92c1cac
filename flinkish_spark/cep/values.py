"""SQL values: arithmetic, comparisons and casts as in Spark's ANSI mode.

A value of an integer type is an int, of FLOAT and DOUBLE a float, of DECIMAL a decimal with the scale of its
type. No function gets null. Errors are the same as Spark's: overflow, division by zero, a text that is no
number.
"""

from __future__ import annotations

import ctypes
import decimal
import math
import operator
import re
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

from flinkish_spark.core.errors import PatternError

#: Exact for every operation on two decimals of 38 digits, except division.
_EXACT = decimal.Context(prec=160, rounding=decimal.ROUND_HALF_UP)
#: Number of decimal places with which Spark divides, before it rounds to the scale of the result.
_DIVIDED_TO = decimal.Decimal(1).scaleb(-38)
_TEXT_OF_WHOLE = re.compile(r"[+-]?[0-9]+")
#: Its group is a number that DECIMAL can have, too. DECIMAL takes the digits of every script, as Java's does.
_TEXT_OF_DOUBLE = re.compile(
    r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)[fd]?|[+-]?inf(?:inity)?|nan", re.IGNORECASE
)
#: Characters that Spark ignores at both ends of a number, and of a whole number or a boolean.
_BLANKS = "".join(map(chr, range(0x21)))
_CONTROLS = f"{_BLANKS}\x7f"
_TRUE, _FALSE = frozenset(("t", "true", "y", "yes", "1")), frozenset(("f", "false", "n", "no", "0"))
_SIZES = {8: "TINYINT", 16: "SMALLINT", 32: "INT", 64: "BIGINT"}


def _make_error(value: str, why: str) -> PatternError:
    """Return the error of an expression that has no value; Spark raises one in ANSI mode."""
    what_to_do = "cast to a wider type, or leave such rows out by a CASE"
    return PatternError(value, why=why, what_to_do=what_to_do)


def whole(bits: int, value: int) -> int:
    if -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        return value
    raise _make_error(f"{value} is computed", f"it does not fit into {_SIZES[bits]}")


def single(value: float) -> float:
    return ctypes.c_float(value).value


def exact(digits: int, scale: int, value: decimal.Decimal) -> decimal.Decimal:
    """Round a number half up to DECIMAL(digits, scale)."""
    # A number with too many digits cannot be rounded even by this context.
    fits = value.adjusted() < digits
    rounded = value.quantize(decimal.Decimal(1).scaleb(-scale), context=_EXACT) if fits else value
    if rounded and rounded.adjusted() >= digits - scale:
        raise _make_error(f"{value} is computed", f"it does not fit into DECIMAL({digits},{scale})")
    # Decimals have no negative zero.
    return rounded if rounded else rounded.copy_abs()


_PLAIN: dict[str, Callable[[Any, Any], Any]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_OF_DECIMALS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide", "%": "remainder"}


def _make_division_error(one: Any, name: str) -> PatternError:
    return _make_error(f"{one} {name} 0 is computed", "it is divided by zero")


def compute_wholes(name: str, bits: int, one: int, other: int) -> int:
    """Return a sum, difference, product or remainder; a remainder has the sign of the dividend."""
    if name != "%":
        return whole(bits, _PLAIN[name](one, other))
    if other == 0:
        raise _make_division_error(one, name)
    found = abs(one) % abs(other)
    return -found if one < 0 else found


def compute_doubles(name: str, one: float, other: float) -> Any:
    """Return a sum, difference, product, quotient or remainder."""
    if name in ("/", "%") and other == 0:
        raise _make_division_error(one, name)
    if name == "/":
        return one / other
    if name != "%":
        return _PLAIN[name](one, other)
    return math.nan if math.isinf(one) else math.fmod(one, other)


def compute_decimals(
    name: str, digits: int, scale: int, one: decimal.Decimal, other: decimal.Decimal
) -> decimal.Decimal:
    """Return a sum, difference, product, quotient or remainder as DECIMAL(digits, scale)."""
    if name in ("/", "%") and not other:
        raise _make_division_error(one, name)
    found = getattr(_EXACT, _OF_DECIMALS[name])(one, other)
    if name == "/":
        found = found.quantize(_DIVIDED_TO, context=_EXACT)
    return exact(digits, scale, found)


# As in Spark, NaN is equal to NaN and greater than all numbers.
def is_equal(one: Any, other: Any) -> bool:
    return bool(one == other) or (one != one and other != other)


def is_like(pattern: re.Pattern[str], text: str) -> bool:
    return pattern.fullmatch(text) is not None


def translate_like(pattern: str, escape: str | None) -> str:
    parts, letters = list[str](), iter(pattern)
    for letter in letters:
        if letter == escape:
            escaped = next(letters, "")
            if escaped not in ("%", "_", escape):
                raise ValueError(f"the escape {escape!r} stands before {escaped!r}")
            parts.append(re.escape(escaped))
        else:
            parts.append({"%": ".*", "_": "."}.get(letter) or re.escape(letter))
    return "".join(parts)


def is_less(one: Any, other: Any) -> bool:
    if other != other:
        return bool(one == one)
    return bool(one < other)


def whole_of_number(bits: int, value: Any) -> int:
    if isinstance(value, float) and not math.isfinite(value):
        raise _make_error(f"{value} is cast", f"it does not fit into {_SIZES[bits]}")
    return whole(bits, int(value))


def whole_of_text(bits: int, text: str) -> int:
    digits = text.strip(_CONTROLS)
    if not _TEXT_OF_WHOLE.fullmatch(digits):
        raise _make_error(f"{text!r} is cast to {_SIZES[bits]}", "it is no whole number")
    return whole(bits, int(digits))


def double_of_text(text: str) -> float:
    found = _TEXT_OF_DOUBLE.fullmatch(text.strip(_BLANKS))
    if found is None or not text.isascii():
        raise _make_error(f"{text!r} is cast to DOUBLE", "it is no number")
    return float(found[1] or found[0])


def decimal_of_number(digits: int, scale: int, value: Any) -> decimal.Decimal | None:
    """Convert a number or boolean to DECIMAL: a DOUBLE by its printed digits, NaN to null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    given = decimal.Decimal(repr(value)) if isinstance(value, float) else decimal.Decimal(value)
    return exact(digits, scale, given)


def decimal_of_text(digits: int, scale: int, text: str) -> decimal.Decimal:
    found = _TEXT_OF_DOUBLE.fullmatch(text.strip(_BLANKS))
    if found is None or found[1] != found[0]:
        raise _make_error(f"{text!r} is cast to DECIMAL({digits},{scale})", "it is no number")
    return exact(digits, scale, decimal.Decimal(found[0]))


def boolean_of_text(text: str) -> bool:
    word = text.strip(_CONTROLS).lower()
    if word not in _TRUE | _FALSE:
        raise _make_error(f"{text!r} is cast to BOOLEAN", "it is neither true nor false")
    return word in _TRUE


def text_of(value: Any) -> str:
    if isinstance(value, decimal.Decimal):
        return f"{value:f}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def negative(value: Any) -> Any:
    # The operator would round to the precision of the thread's context.
    return _EXACT.minus(value) if isinstance(value, decimal.Decimal) else -value


def absolute(value: Any) -> Any:
    return value.copy_abs() if isinstance(value, decimal.Decimal) else abs(value)


def sum_of_doubles(values: Iterable[float]) -> float:
    return reduce(operator.add, values, 0.0)


def sum_of_decimals(digits: int, scale: int, values: Iterable[decimal.Decimal]) -> decimal.Decimal:
    return exact(digits, scale, reduce(_EXACT.add, values))


def mean_of_doubles(values: list[float]) -> float:
    return sum_of_doubles(map(float, values)) / len(values)


def mean_of_decimals(digits: int, scale: int, values: list[decimal.Decimal]) -> decimal.Decimal:
    return exact(digits, scale, _EXACT.divide(reduce(_EXACT.add, values), decimal.Decimal(len(values))))


def order(value: Any) -> tuple[bool, Any]:
    """Return what values are ordered by: NaN is the greatest."""
    return value != value, value
