"""Exact parsing of texts into values of Spark's types.

Dates, times, zones and intervals have the forms that Spark accepts in a cast. Spark rounds decimals, parses
1e400 as infinity, cuts fractions finer than a microsecond, and takes a time of day for one of today; here
such texts are refused.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import re
import zoneinfo
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from pyspark.sql import types as T

_EPOCH_DAY = dt.date(1970, 1, 1).toordinal()
_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799
_MICROS = 1_000_000
_LAST_YEAR = 9999
#: The period of the Gregorian calendar in years and days.
_CYCLE_YEARS, _CYCLE_DAYS = 400, 146_097

_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?")
#: Blanks and control characters, which Spark strips from both ends of a date or time.
_EDGE = "".join(map(chr, (*range(0x21), 0x7F)))
_DATE = re.compile(r"([+-]?)([0-9]{4,7})(?:-([0-9]{1,2})(?:-([0-9]{1,2}))?)?")
_TIME = re.compile(
    r"([+-]?)([0-9]{4,6})(?:-([0-9]{1,2})(?:-([0-9]{1,2})(?:[T ]"
    r"([0-9]{1,2})(?::([0-9]{1,2})(?::([0-9]{1,2})(?:\.([0-9]*))?([^0-9.].*)?)?)?)?)?)?",
    re.DOTALL,
)
#: With colons, or without them and two digits for each part.
_OFFSET = re.compile(
    r"([+-])(?:([0-9]{1,2})(?::([0-9]{2})(?::([0-9]{2}))?)?|([0-9]{2})([0-9]{2})([0-9]{2})?)"
)
_OFFSET_WITH_SHORT_MINUTE = re.compile(r"([+-][0-9]{1,2}):([0-9])")
_LARGEST_OFFSET = 18 * 3600
#: Zone names that Java knows and the IANA database does not.
_SHORT_NAMES = {
    **{"ACT": "Australia/Darwin", "AET": "Australia/Sydney", "AGT": "America/Argentina/Buenos_Aires"},
    **{"ART": "Africa/Cairo", "AST": "America/Anchorage", "BET": "America/Sao_Paulo", "BST": "Asia/Dhaka"},
    **{"CAT": "Africa/Harare", "CNT": "America/St_Johns", "CST": "America/Chicago", "CTT": "Asia/Shanghai"},
    **{"EAT": "Africa/Addis_Ababa", "ECT": "Europe/Paris", "IET": "America/Indiana/Indianapolis"},
    **{"IST": "Asia/Kolkata", "JST": "Asia/Tokyo", "MIT": "Pacific/Apia", "NET": "Asia/Yerevan"},
    **{"NST": "Pacific/Auckland", "PLT": "Asia/Karachi", "PNT": "America/Phoenix"},
    **{"PRT": "America/Puerto_Rico", "PST": "America/Los_Angeles", "SST": "Pacific/Guadalcanal"},
    **{"VST": "Asia/Ho_Chi_Minh", "EST": "-05:00", "MST": "-07:00", "HST": "-10:00"},
}
_INTERVAL = re.compile(r"(?i)\s*interval\s+([+-])?\s*'([^']*)'\s+([a-z]+)(?:\s+to\s+([a-z]+))?\s*")
UNITS = ("DAY", "HOUR", "MINUTE", "SECOND")
MICROS_OF = {"DAY": 86_400 * _MICROS, "HOUR": 3_600 * _MICROS, "MINUTE": 60 * _MICROS, "SECOND": _MICROS}
_MOST_OF = {"HOUR": 23, "MINUTE": 59, "SECOND": 59}
_PART = {unit: r"([0-9]+)" for unit in UNITS[:-1]} | {"SECOND": r"([0-9]+(?:\.[0-9]{1,9})?)"}
_MOST_MICROS, _MOST_MONTHS = 2**63 - 1, 2**31 - 1
#: A context for decimals with any number of digits.
_EXACTLY = decimal.Context(prec=100, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)


_BITS: dict[type[T.DataType], int] = {T.ByteType: 8, T.ShortType: 16, T.IntegerType: 32, T.LongType: 64}
#: Numbers from here on are rounded to infinity as FLOAT or DOUBLE.
FLOAT_OVERFLOWS, DOUBLE_OVERFLOWS = float(2**128 - 2**103), float("inf")
NAMED_NUMBERS = {name: float(name) for name in ("NaN", "Infinity", "-Infinity", "+Infinity")} | {
    "+INF": float("inf"),
    "-INF": float("-inf"),
}


class NoValue(ValueError):
    """A text is no exact value of a type; the message is the reason."""


def parser_of(kind: T.DataType, time_zone: str) -> Callable[[str], Any]:
    """Return a parser of a scalar type, which returns values as Arrow takes them."""
    match kind:
        case T.StringType():
            return str
        case T.DecimalType():
            return partial(parse_decimal, precision=kind.precision, scale=kind.scale)
        case T.FloatType():
            return partial(parse_floating, overflows=FLOAT_OVERFLOWS)
        case T.DoubleType():
            return partial(parse_floating, overflows=DOUBLE_OVERFLOWS)
        case T.BooleanType():
            return parse_boolean
        case T.BinaryType():
            return parse_base64
        case T.DateType():
            return parse_date
        case T.TimestampType():
            return partial(parse_timestamp, time_zone=time_zone)
        case T.TimestampNTZType():
            return parse_local_time
        case T.DayTimeIntervalType():
            return partial(parse_day_time, first=kind.startField, last=kind.endField)
        case T.YearMonthIntervalType():
            return partial(parse_year_month, first=kind.startField, last=kind.endField)
    return partial(parse_whole, bits=_BITS[type(kind)])


def parse_boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise NoValue("it is no boolean")
    return text == "true"


def parse_whole(text: str, bits: int) -> int:
    if not _WHOLE.fullmatch(text):
        raise NoValue("it is no whole number")
    number = int(text)
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise NoValue("it is too large")
    return number


def parse_floating(text: str, overflows: float) -> float:
    """Parse a floating-point number, rounded to the nearest; infinity only if it is named."""
    if text in NAMED_NUMBERS:
        return NAMED_NUMBERS[text]
    if not _NUMBER.fullmatch(text):
        raise NoValue("it is no number")
    number = float(text)
    if abs(number) >= overflows:
        raise NoValue("it is too large")
    return number


def parse_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # also of letters that are not ASCII
        raise NoValue(f"a BINARY is no base64: {error}") from None


def parse_decimal(text: str, precision: int, scale: int) -> decimal.Decimal:
    """Parse a decimal; trailing zeros do not count as digits."""
    if not _NUMBER.fullmatch(text):
        raise NoValue("it is no number")
    sign, digits, exponent = decimal.Decimal(text).as_tuple()
    all_digits = "".join(map(str, digits))
    bare = all_digits.strip("0")
    if not bare:
        return decimal.Decimal(0).scaleb(-scale)
    assert isinstance(exponent, int)
    # Digits are counted and the number is not scaled: scaling 1e999999999 would take all memory.
    exponent += len(all_digits) - len(all_digits.rstrip("0"))
    if len(bare) + exponent > precision - scale:
        raise NoValue("it has too many digits")
    if exponent < -scale:
        raise NoValue("it has more digits after the point")
    number = decimal.Decimal((sign, tuple(map(int, bare)), exponent))
    return number.quantize(decimal.Decimal(1).scaleb(-scale), context=_EXACTLY)


def parse_date(text: str) -> int:
    """Parse a date, also a year or a month alone, as days since 1970."""
    parts = _DATE.fullmatch(text.strip(_EDGE))
    if parts is None:
        raise NoValue("it is more than a date, or none")
    return _day(parts[1], parts[2], parts[3], parts[4])


def parse_timestamp(text: str, time_zone: str) -> int:
    """Parse a time as microseconds since 1970; without an offset or zone it is in `time_zone`."""
    local, zone = _local_time(text)
    seconds, micros = divmod(local, _MICROS)
    offset = _offset_of(zone.strip() if zone else time_zone)
    seconds -= _offset_at(seconds, zone or time_zone) if offset is None else offset
    check_years(seconds)
    return seconds * _MICROS + micros


def parse_local_time(text: str) -> int:
    """Parse a time without a zone as microseconds since 1970."""
    local, zone = _local_time(text)
    if zone:
        raise NoValue("it has a zone")
    return local


def check_years(seconds: int) -> None:
    """Raise NoValue unless a second since 1970 is in one of the years 1 to 9999, by UTC."""
    if not _FIRST_SECOND <= seconds <= _LAST_SECOND:
        raise NoValue("it is in no year from 1 to 9999")


def check_time_zone(name: str) -> None:
    if _offset_of(name) is None:
        _rules_of(name)


def parse_day_time(text: str, first: int, last: int) -> int:
    """Parse an interval with the units `first` to `last` of DAY to SECOND as microseconds."""
    units = UNITS[first : last + 1]
    sign, body = _interval(text, units)
    form = r"([+-])?" + _PART[units[0]]
    form += "".join((" " if unit == "HOUR" else ":") + _PART[unit] for unit in units[1:])
    parts = re.fullmatch(form, body)
    if parts is None:
        raise NoValue("it is no interval")
    micros = 0
    for at, unit in enumerate(units):
        whole, _, fraction = parts[at + 2].partition(".")
        if at and int(whole) > _MOST_OF[unit]:
            raise NoValue("it is no interval")
        if fraction[6:].strip("0"):
            raise NoValue("it is finer than a microsecond")
        micros += int(whole) * MICROS_OF[unit] + int(fraction[:6].ljust(6, "0"))
    micros *= sign * (-1 if parts[1] == "-" else 1)
    if not -_MOST_MICROS <= micros <= _MOST_MICROS:
        raise NoValue("it is too large")
    return micros


def parse_year_month(text: str, first: int, last: int) -> int:
    """Parse an interval with the units `first` to `last` of YEAR and MONTH as months."""
    units = ("YEAR", "MONTH")[first : last + 1]
    sign, body = _interval(text, units)
    parts = re.fullmatch(r"([+-])?([0-9]+)" + (r"-([0-9]+)" if len(units) == 2 else ""), body)
    if parts is None or (len(units) == 2 and int(parts[3]) > 11):
        raise NoValue("it is no interval")
    months = int(parts[2]) * (1 if units[0] == "MONTH" else 12) + (int(parts[3]) if len(units) == 2 else 0)
    months *= sign * (-1 if parts[1] == "-" else 1)
    if not -_MOST_MONTHS <= months <= _MOST_MONTHS:
        raise NoValue("it is too large")
    return months


def _interval(text: str, units: tuple[str, ...]) -> tuple[int, str]:
    parts = _INTERVAL.fullmatch(text)
    if parts is None:
        raise NoValue("it is no interval")
    named = tuple(one.upper() for one in (parts[3], parts[4]) if one)
    if named != ((units[0], units[-1]) if len(units) > 1 else units):
        raise NoValue("it has other units")
    return -1 if parts[1] == "-" else 1, parts[2]


def _day(sign: str, year: str, month: str | None, day: str | None) -> int:
    if sign == "-" or not 1 <= int(year) <= _LAST_YEAR:
        raise NoValue("it is in no year from 1 to 9999")
    try:
        return dt.date(int(year), int(month or 1), int(day or 1)).toordinal() - _EPOCH_DAY
    except ValueError as error:
        raise NoValue(str(error)) from None


def find_date(days: int) -> tuple[int, int, int]:
    """Return year, month and day of a day since 1970, in the proleptic Gregorian calendar."""
    cycles, rest = divmod(days, _CYCLE_DAYS)
    day = dt.date.fromordinal(_EPOCH_DAY + rest)
    return day.year + cycles * _CYCLE_YEARS, day.month, day.day


def write_number(number: int, least: int) -> str:
    """Return a number as Java's formatter writes it: padded to `least` digits, with a plus if longer."""
    digits = str(abs(number)).rjust(least, "0")
    if number < 0:
        return f"-{digits}"
    return f"+{digits}" if len(digits) > least else digits


def write_day(days: int) -> str:
    """Return a day as Java writes it, also in years that Python's date lacks."""
    year, month, day = find_date(days)
    return f"{write_number(year, 4)}-{month:02d}-{day:02d}"


def _local_time(text: str) -> tuple[int, str | None]:
    """Return the local time as microseconds since 1970, and the text of the zone if there is one."""
    parts = _TIME.fullmatch(text.strip(_EDGE))
    if parts is None:
        raise NoValue("it is no time with a date")
    days = _day(parts[1], parts[2], parts[3], parts[4])
    hour, minute, second = (int(parts[at] or 0) for at in (5, 6, 7))
    if hour > 23 or minute > 59 or second > 59:
        raise NoValue("it has no such hour, minute or second")
    fraction = parts[8] or ""
    if fraction[6:].strip("0"):
        raise NoValue("it is finer than a microsecond")
    seconds = ((days * 24 + hour) * 60 + minute) * 60 + second
    return seconds * _MICROS + int(fraction[:6].ljust(6, "0")), parts[9]


@lru_cache(maxsize=256)
def _offset_of(zone: str) -> int | None:
    """Return the offset of a fixed-offset zone in seconds; None if the zone has rules."""
    name = _SHORT_NAMES.get(zone, zone)
    if name == "Z":
        return 0
    for prefix in ("UTC", "GMT", "UT"):
        if name.startswith(prefix):
            if name == prefix:
                return 0
            name = name.removeprefix(prefix)
            break
    short = _OFFSET_WITH_SHORT_MINUTE.fullmatch(name)
    parts = _OFFSET.fullmatch(f"{short[1]}:0{short[2]}" if short else name)
    if parts is None:
        return None
    hours, minutes, seconds = (int(parts[at] or parts[at + 3] or 0) for at in (2, 3, 4))
    offset = (hours * 60 + minutes) * 60 + seconds
    if minutes > 59 or seconds > 59 or offset > _LARGEST_OFFSET:
        raise NoValue("its time zone is not known")
    return -offset if parts[1] == "-" else offset


@lru_cache(maxsize=256)
def _rules_of(zone: str) -> zoneinfo.ZoneInfo:
    name = _SHORT_NAMES.get(zone, zone)
    try:
        return zoneinfo.ZoneInfo(name)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        raise NoValue("its time zone is not known") from None


def _offset_at(local_seconds: int, zone: str) -> int:
    """Return a zone's offset at a local time in seconds; the earlier one of an ambiguous time."""
    rules = _rules_of(zone.strip())
    local = dt.datetime(1970, 1, 1) + dt.timedelta(seconds=local_seconds)
    offset = local.replace(tzinfo=rules).utcoffset()
    assert offset is not None
    try:
        shown = (local - offset).replace(tzinfo=dt.UTC).astimezone(rules).replace(tzinfo=None)
    except OverflowError:
        raise NoValue("it is in no year from 1 to 9999") from None
    if shown != local:
        # Spark would shift it by the length of the gap.
        raise NoValue("its time zone skips this time")
    return int(offset.total_seconds())
