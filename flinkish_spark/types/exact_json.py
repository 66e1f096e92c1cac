"""JSON texts whose values are what stands there: what else is bad, for sessions without our parser.

Spark's own parser reads the first value of a text and the last of fields of one name. It rounds decimals,
makes an infinity of 1e400, takes any number for a second since 1970, and cuts what is finer than a
microsecond. So a text is looked at here before Spark gets it. `QuickJsonParser` in jvm-shim keeps the same
rules; one table of cases holds both.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import zoneinfo
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.core.errors import ConfigError

#: What a text becomes that is bad: Spark calls it malformed in any mode.
MALFORMED = "{"

_NUMBER = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]{1,9}))?")
_DATE = re.compile(r"\s*([+-]?)([0-9]{4,7})(?:-[0-9]{1,2}){0,2}\s*")
_TIME = re.compile(r"\s*([+-]?)([0-9]{4,7})(?![0-9:]).*", re.DOTALL)
#: A time of the session's zone, or of one that is named behind it. Others have their offset with them.
_LOCAL = re.compile(
    r"\s*\+?(?P<year>[0-9]{4,6})(?:-(?P<month>[0-9]{1,2})(?:-(?P<day>[0-9]{1,2})"
    r"(?:[T ](?:(?P<hour>[0-9]{1,2})(?::(?P<minute>[0-9]{1,2})"
    r"(?::(?P<second>[0-9]{1,2})(?:\.[0-9]*)?)?)?)?)?)?)?"
    r"\s*(?P<zone>(?!T[0-9])[A-Za-z][\w/+:-]*)?\s*"
)
_PARTS = ("year", "month", "day", "hour", "minute", "second")
#: Zones of which the clocks are never set.
_FIXED = re.compile(r"(?:Z|UTC|GMT|UT)?(?:[+-][0-9:]+)?")
_FINER_THAN_MICROS = re.compile(r"\.[0-9]{6}[0-9]*[1-9]")
_INTERVAL = re.compile(r"(?i)\s*interval\s+[+-]?\s*'[^']*'\s+[a-z]+(?:\s+to\s+[a-z]+)?\s*")
_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799
_LAST_YEAR = 9999
#: From here on the nearest FLOAT is an infinity.
_FLOAT_OVERFLOWS = float(2**128 - 2**103)
_NOT_A_NUMBER = ("NaN", "Infinity", "-Infinity")
#: Levels of objects and lists, as Jackson counts them.
_DEEPEST = 1_000
#: Texts that Spark takes for such.
_TEXTS_OF_NUMBERS = {name: name for name in _NOT_A_NUMBER} | {
    "+Infinity": "Infinity",
    "+INF": "Infinity",
    "-INF": "-Infinity",
}
#: As Jackson writes them.
_ESCAPES = {letter: f"\\u{letter:04X}" for letter in range(0x20)} | {
    ord('"'): '\\"',
    ord("\\"): "\\\\",
    **{ord(letter): f"\\{name}" for letter, name in zip("\b\t\n\f\r", "btnfr", strict=True)},
}


class _Whole(str):
    """A number without point and exponent, as it was written."""


class _Fraction(str):
    """Any other number, or NaN, or an infinity."""


class _Object(dict[str, Any]):
    """The fields of an object."""


class _BadValue(ValueError):
    """A text does not say exactly what a type can hold."""


#: Takes a parsed value and returns it, or a text in its place; raises _BadValue.
_Check = Callable[[Any], Any]


def exact_text(kind: T.StructType, time_zone: str = "UTC") -> Callable[[bytes | None], str | None]:
    """Return a function that makes of a value a text that Spark reads exactly, or :data:`MALFORMED`."""
    if not _FIXED.fullmatch(time_zone) and _rules_of(time_zone) is None:
        raise ConfigError(
            f"Python does not know the session's time zone '{time_zone}'",
            why="texts of times are looked at before Spark reads them",
            what_to_do="set spark.sql.session.timeZone to a name of the IANA's database, such as "
            "Europe/Berlin, and install the package tzdata",
        )
    check = _fields(kind, time_zone)

    def look(value: bytes | None) -> str | None:
        if value is None:
            return None
        try:
            text = value.decode()
            found = _DECODER.decode(text)
            if not isinstance(found, _Object) or _is_too_deep(text, found):
                return MALFORMED
            fit = check(found)
            if "\\u" in text:
                # An escape may be half a letter, which is no text.
                json.dumps(found, ensure_ascii=False).encode()
            # Within the block: from Python 3.12 on JSON is read deeper than a function may call itself.
            return text if fit is found else _written(fit)
        except (ValueError, RecursionError):
            return MALFORMED

    return look


def _is_too_deep(text: str, found: Any) -> bool:
    """Whether Spark's own parser refuses the depth; Python before 3.12 has done so already."""
    if text.count("[") + text.count("{") <= _DEEPEST:
        return False
    level, depth = [found], 0
    while containers := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [each for one in containers for each in (one.values() if isinstance(one, dict) else one)]
    return depth > _DEEPEST


def _object(fields: list[tuple[str, Any]]) -> _Object:
    found = _Object(fields)
    if len(found) != len(fields):
        raise _BadValue("two fields of an object have one name")
    return found


_DECODER = json.JSONDecoder(
    parse_int=_Whole, parse_float=_Fraction, parse_constant=_Fraction, object_pairs_hook=_object
)


def _written(value: Any) -> str:
    """Return a value as text without blanks, with every number as it was."""
    match value:
        case _Whole() | _Fraction():
            return str.__str__(value)
        case str():
            return f'"{value.translate(_ESCAPES)}"'
        case dict():
            return "{" + ",".join(f"{_written(name)}:{_written(one)}" for name, one in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _check_of(kind: T.DataType, time_zone: str) -> _Check | None:
    match kind:
        case T.StructType():
            return _fields(kind, time_zone)
        case T.TimestampType():
            return partial(_timestamp, time_zone=time_zone)
        case T.ArrayType():
            inner = _check_of(kind.elementType, time_zone)
            return None if inner is None else _elements(inner)
        case T.MapType():
            inner = _check_of(kind.valueType, time_zone)
            return None if inner is None else _entries(inner)
        case T.DecimalType():
            return partial(_decimal, precision=kind.precision, scale=kind.scale)
    return _SIMPLE.get(type(kind))


def _fields(kind: T.StructType, time_zone: str) -> _Check:
    found = [(field.name, _check_of(field.dataType, time_zone)) for field in kind]
    checks = [(name, one) for name, one in found if one is not None]

    def check(value: Any) -> Any:
        if not isinstance(value, _Object):
            return value
        new = {
            name: fit
            for name, one in checks
            if (old := value.get(name)) is not None and (fit := one(old)) is not old
        }
        return _Object({**value, **new}) if new else value

    return check


def _elements(inner: _Check) -> _Check:
    def check(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        new = [None if one is None else inner(one) for one in value]
        return value if all(a is b for a, b in zip(new, value, strict=True)) else new

    return check


def _entries(inner: _Check) -> _Check:
    def check(value: Any) -> Any:
        if not isinstance(value, _Object):
            return value
        new = {name: None if one is None else inner(one) for name, one in value.items()}
        return value if all(new[name] is one for name, one in value.items()) else _Object(new)

    return check


def _string(value: Any) -> Any:
    return value if _is_text(value) else _written(value)


def _tinyint(value: Any) -> Any:
    if isinstance(value, _Whole) and not -128 <= int(value) <= 127:
        raise _BadValue("it is no TINYINT")
    return value


def _finite(value: Any, overflows: float) -> Any:
    if _is_text(value):
        if value not in _TEXTS_OF_NUMBERS:
            raise _BadValue("it is no number")
        # Without quotes, which readers other than Spark's want.
        return _Fraction(_TEXTS_OF_NUMBERS[value])
    is_number = isinstance(value, _Whole | _Fraction) and value not in _NOT_A_NUMBER
    if is_number and abs(float(value)) >= overflows:
        raise _BadValue("it is too large")
    return value


def _decimal(value: Any, precision: int, scale: int) -> Any:
    """Refuse what has more digits than fit, but for zeros at the end; without ever scaling it."""
    if not isinstance(value, str):
        return value
    parts = _NUMBER.fullmatch(value)
    if parts is None or not (parts[2] or parts[3]):
        raise _BadValue("it is no number")
    behind = parts[3] or ""
    digits = (parts[2] + behind).lstrip("0")
    if not digits.rstrip("0"):
        # Of a zero Spark would count the digits of its exponent.
        return _Whole("0") if parts[4] else value
    exponent = int(parts[4] or "0") - len(behind)
    if len(digits) + exponent > precision - scale:
        raise _BadValue("it has too many digits")
    if exponent + len(digits) - len(digits.rstrip("0")) < -scale:
        raise _BadValue("it has more digits behind the point")
    return value


def _timestamp(value: Any, time_zone: str) -> Any:
    if isinstance(value, _Whole):
        if not _FIRST_SECOND <= int(value) <= _LAST_SECOND:
            raise _BadValue("its seconds are in no year from 1 to 9999")
        return value
    if _is_text(_time(value)):
        _check_clock(value, time_zone)
    return value


def _check_clock(text: str, time_zone: str) -> None:
    """Refuse a time that no clock of its zone has shown: Spark would read one an hour later."""
    parts = _LOCAL.fullmatch(text)
    zone = time_zone if parts is None else parts["zone"] or time_zone
    if parts is None or _FIXED.fullmatch(zone):
        return
    rules = _rules_of(zone)
    if rules is None:
        raise _BadValue("its time zone is not known")
    numbers = [int(parts[name] or (at in (1, 2))) for at, name in enumerate(_PARTS)]
    try:
        local = dt.datetime(*numbers)  # type: ignore[arg-type]
        shown = local.replace(tzinfo=rules).astimezone(dt.UTC).astimezone(rules).replace(tzinfo=None)
    except (ValueError, OverflowError):
        # Spark says so itself.
        return
    if shown != local:
        raise _BadValue("no clock of its time zone has shown it")


@lru_cache(maxsize=256)
def _rules_of(zone: str) -> zoneinfo.ZoneInfo | None:
    try:
        return zoneinfo.ZoneInfo(zone)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        return None


def _time(value: Any) -> Any:
    if not _is_text(value):
        return value
    parts = _TIME.fullmatch(value)
    if parts is None:
        # Of a time of day alone Spark makes one of today, which is another one tomorrow.
        raise _BadValue("it has no date")
    if _FINER_THAN_MICROS.search(value):
        raise _BadValue("it is finer than a microsecond")
    year = _year(parts)
    if year in (1, _LAST_YEAR):
        _check_moment(value)
    return value


def _check_moment(text: str) -> None:
    """Refuse a time that is in another year by UTC."""
    try:
        moment = dt.datetime.fromisoformat(text.strip())
    except ValueError:
        return
    if moment.tzinfo is not None:
        try:
            moment.astimezone(dt.UTC)
        except OverflowError:
            raise _BadValue("it is in no year from 1 to 9999") from None


def _date(value: Any) -> Any:
    if not _is_text(value):
        return value
    parts = _DATE.fullmatch(value)
    if parts is None:
        raise _BadValue("it is more than a date, or none")
    _year(parts)
    return value


def _year(parts: re.Match[str]) -> int:
    year = int(parts[2])
    if parts[1] == "-" or not 1 <= year <= _LAST_YEAR:
        raise _BadValue("it is in no year from 1 to 9999")
    return year


def _interval(value: Any) -> Any:
    if _is_text(value) and (_INTERVAL.fullmatch(value) is None or _FINER_THAN_MICROS.search(value)):
        # Spark makes a null of what is none, or nothing at all.
        raise _BadValue("it is no interval")
    return value


_SIMPLE: dict[type[T.DataType], _Check] = {
    T.StringType: _string,
    T.ByteType: _tinyint,
    T.FloatType: partial(_finite, overflows=_FLOAT_OVERFLOWS),
    T.DoubleType: partial(_finite, overflows=float("inf")),
    T.TimestampNTZType: _time,
    T.DateType: _date,
    T.DayTimeIntervalType: _interval,
    T.YearMonthIntervalType: _interval,
}
