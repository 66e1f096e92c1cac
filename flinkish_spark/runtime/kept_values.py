"""What Arrow would store as another value than it was given, without a word, at any depth of a type.

It cuts 1.5 down to 1 within a list, and a Decimal everywhere, takes a text for a list of its characters, a
number for microseconds, pandas' NaT for the first day of all, and what no float of four bytes can hold for
infinity.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import functools
import numbers
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from flinkish_spark.runtime.silent_changes import BEYOND_FLOAT

_FIRST_AND_LAST_YEAR = (datetime.MINYEAR, datetime.MAXYEAR)
#: The greatest number of FLOAT; what is rounded down to it stays.
_GREATEST_FLOAT = float(np.finfo(np.float32).max)
_FLOATS = (float, np.floating)
#: Numbers that may have a fraction without being floats, which Arrow cuts off at any depth.
_EXACT = (decimal.Decimal, fractions.Fraction)
#: By its class it is a date.
_NAT = type(pd.NaT)


@dataclass(frozen=True, slots=True)
class Changed:
    """A value that would be another one, and why."""

    value: Any
    reason: str


Check = Callable[[Sequence[Any]], Changed | None]


@functools.lru_cache(maxsize=256)
def check_of(kind: pa.DataType) -> Check | None:
    """Return what finds the first value of a column that a type would change; None if it changes none.

    Structs are tuples by then. None stands for nothing everywhere.

    Examples
    --------
    >>> check_of(pa.list_(pa.int64()))([[1, 2], None, [1.5]])
    Changed(value=1.5, reason='it is a float')
    >>> check_of(pa.string()) is None
    True
    """
    kinds = pa.types
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        return functools.partial(_in_lists, _within(kind.value_type))
    if kinds.is_map(kind):
        return functools.partial(_in_maps, _within(kind.key_type), _within(kind.item_type))
    if kinds.is_struct(kind):
        own = tuple((at, check) for at, one in enumerate(kind) if (check := _within(one.type)) is not None)
        return functools.partial(_in_structs, kind.num_fields, own) if own else None
    return _check_of_plain(kind)


def _within(kind: pa.DataType) -> Check | None:
    """Return the check of a part; whole numbers among nulls come as floats out of pandas' frames there."""
    return _cut_for_integer if pa.types.is_integer(kind) else check_of(kind)


def _check_of_plain(kind: pa.DataType) -> Check | None:
    kinds = pa.types
    if kinds.is_integer(kind):
        return _float_for_integer
    if kinds.is_float32(kind):
        return _beyond_float
    if kinds.is_timestamp(kind) and kind.tz is None:
        return _no_local_time
    if kinds.is_timestamp(kind):
        return _no_instant
    return _no_time if kinds.is_temporal(kind) else None


def _in_lists(check: Check | None, values: Sequence[Any]) -> Changed | None:
    if (text := _first(values, (str, bytes, bytearray))) is not None:
        return Changed(text, "a text is no list; each of its letters would be an element")
    # Whatever else Arrow takes or refuses can be looked at once only.
    return None if check is None else check(list(chain.from_iterable(_sized(values))))


def _in_maps(keys: Check | None, items: Check | None, values: Sequence[Any]) -> Changed | None:
    if keys is items is None:
        return None
    pairs = [(one.items() if isinstance(one, dict) else one) for one in _sized(values)]
    found = [pair for pair in chain.from_iterable(pairs) if isinstance(pair, tuple) and len(pair) == 2]
    for at, check in enumerate((keys, items)):
        if check is not None and (changed := check([pair[at] for pair in found])) is not None:
            return changed
    return None


def _in_structs(width: int, checks: tuple[tuple[int, Check], ...], values: Sequence[Any]) -> Changed | None:
    # Rows of another width are refused with a reason of their own.
    rows = [row for row in values if isinstance(row, tuple) and len(row) == width]
    for at, check in checks:
        if (changed := check([row[at] for row in rows])) is not None:
            return changed
    return None


def _float_for_integer(values: Sequence[Any]) -> Changed | None:
    wrong = _first(values, _FLOATS)
    return _cut_for_integer(values) if wrong is None else Changed(wrong, "it is a float")


def _cut_for_integer(values: Sequence[Any]) -> Changed | None:
    if _first(values, _FLOATS + _EXACT) is None:
        return None
    for value in values:
        if isinstance(value, _FLOATS) and not value.is_integer():
            return Changed(value, "it is a float")
        if isinstance(value, _EXACT) and _has_fraction(value):
            return Changed(value, "it is no whole number")
    return None


def _has_fraction(value: decimal.Decimal | fractions.Fraction) -> bool:
    if isinstance(value, fractions.Fraction):
        return value.denominator != 1
    # What is not finite is refused by Arrow.
    return value.is_finite() and value != value.to_integral_value()


def _beyond_float(values: Sequence[Any]) -> Changed | None:
    for value in values:
        if isinstance(value, int | float) and _GREATEST_FLOAT < abs(value) < float("inf"):
            return Changed(value, BEYOND_FLOAT)
    return None


def _no_time(values: Sequence[Any]) -> Changed | None:
    # It would be microseconds, or days; what people have at hand is seconds or milliseconds.
    wrong = _first(values, (numbers.Number, _NAT))
    if wrong is None:
        return None
    return Changed(wrong, "it is no time: give None" if wrong is pd.NaT else "it is a number, and no time")


def _no_instant(values: Sequence[Any]) -> Changed | None:
    if (number := _no_time(values)) is not None:
        return number
    for value in values:
        # The end of time in one zone, as in `datetime.max.replace(tzinfo=...)`, may be past it in UTC.
        if (
            getattr(value, "year", None) in _FIRST_AND_LAST_YEAR
            and getattr(value, "tzinfo", None) is not None
        ):
            try:
                value.astimezone(datetime.UTC)
            except (OverflowError, ValueError):
                return Changed(value, "in UTC it is beyond the years from 1 to 9999")
    return None


def _no_local_time(values: Sequence[Any]) -> Changed | None:
    if (number := _no_time(values)) is not None:
        return number
    for value in values:
        if getattr(value, "tzinfo", None) is not None:
            return Changed(
                value, "it has a time zone: take it away with replace(tzinfo=None), or declare TIMESTAMP"
            )
    return None


def _first(values: Sequence[Any], classes: tuple[type, ...]) -> Any:
    """Return the first value of some classes; None without any."""
    # Mostly there is one class in a column: its classes are looked at before its values.
    if not any(issubclass(one, classes) for one in set(map(type, values))):
        return None
    return next(value for value in values if isinstance(value, classes))


def _sized(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, Sized)]
