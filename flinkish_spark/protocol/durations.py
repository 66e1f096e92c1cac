"""Durations as a user gives them: milliseconds, a timedelta, or a text such as "10 seconds"."""

from __future__ import annotations

import re
from datetime import timedelta
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from flinkish_spark.protocol.choices import closest
from flinkish_spark.protocol.limits import UnusableValueError

#: A duration; a whole number is milliseconds.
Duration = int | timedelta | str

if TYPE_CHECKING:
    #: The type of a field that takes a Duration and holds milliseconds.
    Milliseconds = int | Any
    #: The type of a field that takes any path and holds it as text.
    PathText = str | Any
else:
    Milliseconds, PathText = int, str

_UNITS_MS = {
    **dict.fromkeys(("ms", "milli", "millis", "millisecond", "milliseconds"), 1),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1_000),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60_000),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3_600_000),
    **dict.fromkeys(("d", "day", "days"), 86_400_000),
}
_PART = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([a-z]+)\s*", re.IGNORECASE | re.ASCII)
_TEXT = re.compile(rf"\s*(-?)\s*((?:{_PART.pattern.replace('(', '(?:', 1)})+)", re.IGNORECASE | re.ASCII)
_WANTED = 'a whole number of milliseconds, a timedelta, or a text like "10 seconds", "5 min" or "500 ms"'


def milliseconds(name: str, value: Any) -> Any:
    """Convert a timedelta or a text to whole milliseconds; return any other value unchanged."""
    if isinstance(value, timedelta):
        exact = Fraction(value // timedelta(microseconds=1), 1_000)
    elif isinstance(value, str):
        exact = _parse_text(name, value)
    else:
        return value
    if exact.denominator != 1:
        raise UnusableValueError(name, value, "a length of whole milliseconds")
    return exact.numerator


def _parse_text(name: str, text: str) -> Fraction:
    found = _TEXT.fullmatch(text)
    if found is None:
        raise UnusableValueError(name, text, _WANTED)
    total = Fraction(0)
    for number, unit in _PART.findall(found[2]):
        if unit.lower() not in _UNITS_MS:
            meant = closest(unit, _UNITS_MS)
            raise UnusableValueError(name, text, _WANTED + (f". {meant}" if meant else ""))
        total += Fraction(number) * _UNITS_MS[unit.lower()]
    return -total if found[1] else total
