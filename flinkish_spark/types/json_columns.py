"""Exact parsing of JSON objects into Arrow columns: a value that does not fit its type makes its record bad.

Arrow parses a whole slice at once. Before that, the slice is searched for input that Arrow accepts and must
not; if there may be such input, the slice is parsed record by record with rules that are exact for all types.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as pa_json
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.core.errors import ConfigError
from flinkish_spark.types import text_values as texts
from flinkish_spark.types.arrow_columns import find_beyond_years, read_in_parts
from flinkish_spark.types.arrow_types import arrow_type
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.exact_text import quote_json
from flinkish_spark.types.hints import parts_of
from flinkish_spark.types.text_values import NoValue

#: Levels of objects and lists, as Jackson counts them.
_DEEPEST = 1_000
#: Longest part of a value, or of the name of its type, that a reason shows.
_MOST_SHOWN = 60
_OPEN, _CLOSE, _NEW_LINE, _RETURN, _BACKSLASH, _BY_NUMBER = b"{}\n\r\\u"
_BLANKS = [*b" \t"]
#: By byte, if it may follow an object in a record, or between two records.
_GOES_ON = np.isin(np.arange(256), [*b",]}\n", *_BLANKS])
_IS_LETTER = np.isin(np.arange(256) | 0x20, [*b"abcdefghijklmnopqrstuvwxyz"])
_IS_DIGIT = np.isin(np.arange(256), [*b"0123456789"])
_OF_NUMBERS = np.isin(np.arange(256), [*b"0123456789.+-"])
_BEFORE_NUMBERS = frozenset(b':,[" \t')
#: Zone offsets that Spark accepts; Arrow accepts up to a day.
_SMALL_OFFSET = "[+-](0[0-9]|1[0-7])(:?[0-5][0-9])?$"
_NOT_FOR_ARROW = (T.MapType, T.BinaryType, T.DayTimeIntervalType, T.YearMonthIntervalType, T.NullType)
#: Most digits of a decimal in Arrow; with fewer than 12 before the point, records are parsed one by one.
_ARROWS_DIGITS, _FEWEST_DIGITS = 38, 12
_Convert = Callable[[Any], Any]


class _Whole(str):
    """A JSON number without point and exponent, as it was written."""


class _Fraction(str):
    """Any other JSON number, NaN, or an infinity, as it was written."""


class JsonReader:
    """Parses JSON objects with the fields of `kind`; other fields are skipped, missing ones are null.

    Times without an offset or a zone are in `time_zone`.
    """

    def __init__(self, kind: T.StructType, time_zone: str = "UTC") -> None:
        try:
            texts.check_time_zone(time_zone)
        except NoValue:
            raise ConfigError(
                f"Python does not know the session's time zone '{time_zone}'",
                why="times without a zone are read in the session's time zone",
                what_to_do="set spark.sql.session.timeZone to a name of the IANA's database, such as "
                "Europe/Berlin, and install the package tzdata",
            ) from None
        #: With INT for year-month intervals, for which PySpark has no Arrow type.
        self.spark_type = replace_months(kind, T.IntegerType())
        self.type = arrow_type(self.spark_type)
        self._fields = [(field.name, _converter(field.dataType, time_zone)) for field in kind]
        self._kinds = [_shorten(field.dataType.simpleString()) for field in kind]
        self._convert = partial(_object_of, self._fields)
        self._columns = _Columns(kind) if all(map(_is_for_arrow, parts_of(kind))) else None

    def read(self, values: pa.Array) -> pa.Array:
        """Return a struct for each value; null for a null and for a value that is not exactly one object."""
        at_once = None if self._columns is None else self._columns.read
        return pa.concat_arrays([*read_in_parts(values.cast(pa.binary()), at_once, self._each)])

    def record(self, value: bytes) -> dict[str, Any] | None:
        """Return the fields of one value; None if it is bad."""
        try:
            made: dict[str, Any] = self._convert(_parse(value))
        except (ValueError, RecursionError):
            return None
        return made

    def why_bad(self, value: bytes) -> str:
        """Return why a value is bad, as a predicate that follows its name; empty if it is not."""
        is_object = value.lstrip()[:1] == b"{"
        try:
            found = _parse(value)
        except UnicodeDecodeError as error:
            return f"is no UTF-8: {error.reason}"
        except (ValueError, RecursionError) as error:
            is_more = is_object and isinstance(error, json.JSONDecodeError) and error.msg == "Extra data"
            more = "is more than one JSON object" if is_more else f"cannot be read: {error}"
            return more if is_object else "is no JSON object"
        try:
            _check_names(found, (name for name, _ in self._fields))
        except NoValue as error:
            return f"cannot be read: {error}"
        for (name, convert), kind in zip(self._fields, self._kinds, strict=True):
            try:
                _ = found.get(name) is None or convert(found[name])
            except (ValueError, RecursionError) as error:
                shown = _shorten(_to_text(found[name], is_whole=False))
                return f"cannot be read: its field '{name}' is {shown}, which is no {kind}: {error}"
        return ""

    def _each(self, values: pa.Array) -> pa.Array:
        found = (None if value is None else self.record(value) for value in values.to_pylist())
        return pa.array(found, self.type)


def restore_intervals(column: Column, kind: T.DataType) -> Column:
    return _cast_months(column, kind, None)


def replace_intervals(column: Column, kind: T.DataType) -> Column:
    return _cast_months(column, kind, T.IntegerType())


def _cast_months(column: Column, kind: T.DataType, by: T.DataType | None) -> Column:
    # Spark casts numbers only to intervals of a single unit.
    months = replace_months(kind, T.YearMonthIntervalType(1, 1))
    return column.cast(months).cast(replace_months(kind, by)) if has_intervals(kind) else column


def restore_frame_intervals(frame: DataFrame, fields: T.StructType) -> DataFrame:
    """Return a frame with numbers of months replaced by the year-month intervals of `fields`."""
    for one in fields:
        if has_intervals(one.dataType):
            frame = frame.withColumn(one.name, restore_intervals(F.col(quote_name(one.name)), one.dataType))
    return frame


def has_intervals(kind: T.DataType) -> bool:
    return bool(replace_months(kind, T.IntegerType()) != replace_months(kind, None))


def replace_months(kind: Any, by: T.DataType | None) -> Any:
    """Return a type, nullable at any depth, with year-month intervals replaced by `by`."""
    match kind:
        case T.StructType():
            return T.StructType([T.StructField(one.name, replace_months(one.dataType, by)) for one in kind])
        case T.ArrayType():
            return T.ArrayType(replace_months(kind.elementType, by))
        case T.MapType():
            return T.MapType(kind.keyType, replace_months(kind.valueType, by))
        case T.YearMonthIntervalType():
            return by or kind
    return kind


def _is_for_arrow(kind: T.DataType) -> bool:
    if isinstance(kind, T.DecimalType):
        return _ARROWS_DIGITS - kind.scale >= _FEWEST_DIGITS
    # Arrow's JSON reader skips fields without a name.
    has_names = not isinstance(kind, T.StructType) or all(kind.names)
    return has_names and not isinstance(kind, _NOT_FOR_ARROW)


class _Columns:
    """Parses a slice by Arrow, unless its records must be parsed one by one."""

    def __init__(self, kind: T.StructType) -> None:
        self._schema = pa.schema([pa.field(field.name, _read_as(field.dataType)) for field in kind])
        self._type = arrow_type(kind)
        #: If there is a DECIMAL, the most digits in a row that Arrow parses exactly.
        decimals = [one for one in parts_of(kind) if isinstance(one, T.DecimalType)]
        self._most_digits = min((_ARROWS_DIGITS - one.scale for one in decimals), default=None)

    def read(self, values: pa.Array) -> pa.Array | None:
        """Return the records; None if they must be parsed one by one."""
        lines = _lines(values)
        if lines is None:
            return None
        if self._most_digits and _may_overflow(np.frombuffer(lines, np.uint8), self._most_digits):
            return None
        try:
            # Arrow itself refuses two declared fields of one name.
            table = pa_json.read_json(
                pa.BufferReader(lines),
                read_options=pa_json.ReadOptions(use_threads=False, block_size=len(lines) + 1),
                parse_options=pa_json.ParseOptions(
                    explicit_schema=self._schema, unexpected_field_behavior="ignore"
                ),
            )
            if table.num_rows != len(values):
                return None
            columns = [
                _convert_column(table.column(field.name).combine_chunks(), field.type) for field in self._type
            ]
            table.validate(full=True)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, NoValue):
            return None
        return pa.StructArray.from_arrays(columns, fields=[*self._type])


def _lines(values: pa.Array) -> pa.Buffer | None:
    """Return the records joined as lines; None if they cannot be parsed that way."""
    if values.null_count:
        return None
    offsets = np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + len(values) + 1]
    data = values.buffers()[2]
    if data is None or (np.diff(offsets) < 2).any():
        return None
    letters = np.frombuffer(data, np.uint8)
    if (letters[offsets[:-1]] != _OPEN).any() or (letters[offsets[1:] - 1] != _CLOSE).any():
        return None
    if (np.diff(offsets) > 2 * _DEEPEST).any():
        opened = [pc.count_substring(values, pattern).to_numpy() for pattern in (b"{", b"[")]
        if (sum(opened) > _DEEPEST).any():
            return None
    try:
        values.cast(pa.string())  # Raises if anything is no UTF-8.
    except pa.ArrowInvalid:
        return None
    one = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    joined: pa.Buffer = pc.binary_join(one, b"\n")[0].as_buffer()
    return joined if _is_plain(np.frombuffer(joined, np.uint8), len(values)) else None


def _is_plain(lines: np.ndarray[Any, Any], count: int) -> bool:
    """Return if no record has a line break, an escape by number, or a value after its object.

    Arrow crashes the process at a value after an object, such as `{}[]`.
    """
    if np.count_nonzero(lines == _NEW_LINE) != count - 1 or (lines == _RETURN).any():
        return False
    if _has_numbers_of_arrow(lines):
        return False
    escapes = np.flatnonzero(lines == _BACKSLASH)
    if (lines[escapes + 1] == _BY_NUMBER).any():
        return False
    after = np.flatnonzero(lines[:-1] == _CLOSE) + 1
    while len(blank := after[np.isin(lines[after], _BLANKS)]):
        if not _GOES_ON[lines[after]].all():
            return False
        # The last byte closes an object, so a byte follows each blank.
        after = blank + 1
    return bool(_GOES_ON[lines[after]].all())


def _has_numbers_of_arrow(lines: np.ndarray[Any, Any]) -> bool:
    """Return if there may be `Inf` or `-NaN`, which only Arrow accepts as numbers."""
    # The first byte opens an object and the last one closes one, so indices beside a match are valid.
    at = np.flatnonzero(lines[:-3] == ord("I"))
    if ((lines[at + 1] == ord("n")) & (lines[at + 2] == ord("f")) & ~_IS_LETTER[lines[at + 3]]).any():
        return True
    at = np.flatnonzero(lines == ord("N"))
    return bool(((lines[at - 1] == ord("-")) & (lines[at + 1] == ord("a"))).any())


def _may_overflow(lines: np.ndarray[Any, Any], most_digits: int) -> bool:
    """Return if a number may have an exponent or too many digits for a DECIMAL.

    Arrow multiplies by a power of ten without an overflow check; a large exponent crashes the process.
    """
    others = np.flatnonzero(~_IS_DIGIT[lines])
    if (np.diff(others) > most_digits + 1).any():
        return True
    at = np.flatnonzero((lines | 0x20) == ord("e"))
    for begin in at[_OF_NUMBERS[lines[at - 1]] & _OF_NUMBERS[lines[at + 1]]].tolist():
        while _OF_NUMBERS[lines[begin - 1]]:
            begin -= 1
        if lines[begin - 1] in _BEFORE_NUMBERS:
            return True
    return False


def _read_as(kind: T.DataType) -> pa.DataType:
    """Return the type that Arrow parses: strings for times, and DOUBLE for FLOAT, as in Jackson."""
    match kind:
        case T.StructType():
            return pa.struct([pa.field(field.name, _read_as(field.dataType)) for field in kind])
        case T.ArrayType():
            return pa.list_(_read_as(kind.elementType))
        case T.DateType() | T.TimestampType() | T.TimestampNTZType():
            return pa.string()
        case T.FloatType():
            return pa.float64()
    return arrow_type(kind)


def _convert_column(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert a column to its final type; raise NoValue if records must be parsed one by one."""
    if pa.types.is_struct(kind):
        # `flatten` sets fields of null structs to null.
        inner = [_convert_column(one, field.type) for one, field in zip(column.flatten(), kind, strict=True)]
        return pa.StructArray.from_arrays(inner, fields=[*kind], mask=column.is_null())
    if pa.types.is_list(kind):
        inner_column = _convert_column(column.flatten(), kind.value_type)
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        return pa.ListArray.from_arrays(offsets, inner_column, type=kind, mask=column.is_null())
    if pa.types.is_floating(kind):
        number = column.fill_null(0).to_numpy(zero_copy_only=False)
        if not (np.abs(number) < (texts.FLOAT_OVERFLOWS if pa.types.is_float32(kind) else np.inf)).all():
            raise NoValue("it may be too large")
        return column.cast(kind, safe=False)
    if pa.types.is_temporal(kind):
        if pa.types.is_timestamp(kind) and kind.tz is not None and not _are_spark_s_times(column):
            raise NoValue("it may be of another zone, or no time for Spark")
        made = column.cast(kind)
        if find_beyond_years(made).any():
            raise NoValue("it is in no year from 1 to 9999")
        return made
    return column


def _are_spark_s_times(times: pa.Array) -> bool:
    """Return if Spark accepts these texts as times, too: with seconds, and with small offsets."""
    there = times.drop_null()
    if not len(there):
        return True
    begins = np.frombuffer(there.buffers()[1], np.int32)[there.offset : there.offset + len(there)]
    lengths = pc.binary_length(there).to_numpy()
    if lengths.min() < len("2026-01-31T12:00:00Z"):
        return False
    letters = np.frombuffer(there.buffers()[2], np.uint8)
    if (letters[begins + len("2026-01-31T12:00")] != ord(":")).any():
        return False
    others = there.filter(pa.array(letters[begins + lengths - 1] != ord("Z")))
    return bool(pc.all(pc.match_substring_regex(others, _SMALL_OFFSET), min_count=0).as_py())


class _Repeating(dict[str, Any]):
    names: frozenset[str] = frozenset()


def _check_names(value: dict[str, Any], read: Iterable[str]) -> None:
    if isinstance(value, _Repeating) and not value.names.isdisjoint(read):
        raise NoValue("two fields of an object have one name")


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(fields)
    if len(found) == len(fields):
        return found
    # Repeated names are an error only if one of them is declared.
    repeating = _Repeating(found)
    repeating.names = frozenset(name for name, times in Counter(n for n, _ in fields).items() if times > 1)
    return repeating


_DECODER = json.JSONDecoder(
    parse_int=_Whole, parse_float=_Fraction, parse_constant=_Fraction, object_pairs_hook=_object
)


def _parse(value: bytes) -> dict[str, Any]:
    text = value.decode()
    found = _DECODER.decode(text)
    if not isinstance(found, dict) or _is_too_deep(text, found):
        raise NoValue("it is no object, or too deep")
    if "\\u" in text:
        # An escape may be a lone surrogate, which is no valid text.
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _is_too_deep(text: str, found: Any) -> bool:
    """Return if Spark's own parser would refuse the nesting depth; Python before 3.12 refuses it too."""
    if text.count("[") + text.count("{") <= _DEEPEST:
        return False
    level, depth = [found], 0
    while containers := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [each for one in containers for each in (one.values() if isinstance(one, dict) else one)]
    return depth > _DEEPEST


def _to_text(value: Any, *, is_whole: bool = True) -> str:
    """Return a value as JSON text without blanks, with numbers as they were written."""
    written: list[str] = []
    # Not recursive: Python's stack allows half of Jackson's depth. Values are in tuples, finished text is
    # not.
    left: list[Any] = [(value,)]
    while left:
        one = left.pop()
        match one:
            case str():
                written.append(one)
            case (_Whole() | _Fraction(),):
                written.append(str.__str__(one[0]))
            case (str(),):
                written.append(quote_json(one[0]))
            case (dict() as members,):
                if is_whole:
                    _check_names(members, members)
                named = ((f"{quote_json(name)}:", (own,)) for name, own in members.items())
                parts = [part for name, own in named for part in (",", name, own)]
                left += reversed(["{", *parts[1:], "}"])
            case (list() as elements,):
                parts = [part for own in elements for part in (",", (own,))]
                left += reversed(["[", *parts[1:], "]"])
            case _:
                written.append(json.dumps(one[0]))
    return "".join(written)


def _shorten(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _converter(kind: T.DataType, time_zone: str) -> _Convert:
    """Return a function from parsed JSON, not null, to a value of a type."""
    match kind:
        case T.StructType():
            return partial(_object_of, [(one.name, _converter(one.dataType, time_zone)) for one in kind])
        case T.ArrayType():
            return partial(_elements, _converter(kind.elementType, time_zone))
        case T.MapType():
            return partial(_entries, _converter(kind.valueType, time_zone))
        case T.BooleanType():
            return partial(_parse_checked, (bool,), "it is no boolean", bool)
        case T.StringType():
            return lambda value: value if type(value) is str else _to_text(value)
    parse = texts.parser_of(kind, time_zone)
    match kind:
        case T.DecimalType():
            return partial(_parse_checked, (str, _Whole, _Fraction), "it is no number", parse)
        case T.TimestampType():
            return partial(_timestamp, parse)
        case T.FloatType() | T.DoubleType():
            return partial(_floating, parse)
        case T.IntegralType():
            return partial(_parse_checked, (_Whole,), "it is no whole number", parse)
    return partial(_parse_checked, (str,), "it is no text", parse)


def _object_of(fields: Sequence[tuple[str, _Convert]], value: Any) -> Any:
    if not isinstance(value, dict):
        raise NoValue("it is no object")
    _check_names(value, (name for name, _ in fields))
    return {name: None if (one := value.get(name)) is None else convert(one) for name, convert in fields}


def _elements(inner: _Convert, value: Any) -> Any:
    if not isinstance(value, list):
        raise NoValue("it is no list")
    return [None if one is None else inner(one) for one in value]


def _entries(inner: _Convert, value: Any) -> Any:
    if not isinstance(value, dict):
        raise NoValue("it is no object")
    _check_names(value, value)
    return [(name, None if one is None else inner(one)) for name, one in value.items()]


def _parse_checked(classes: tuple[type, ...], why_none: str, parse: _Convert, value: Any) -> Any:
    if type(value) not in classes:
        raise NoValue(why_none)
    return parse(value)


def _floating(parse: _Convert, value: Any) -> Any:
    is_named = type(value) is str and value in texts.NAMED_NUMBERS
    if not is_named and type(value) not in (_Whole, _Fraction):
        raise NoValue("it is no number")
    return parse(value)


def _timestamp(parse: _Convert, value: Any) -> Any:
    if not isinstance(value, _Whole):
        return _parse_checked((str,), "it is no text", parse, value)
    seconds = int(value)
    texts.check_years(seconds)
    return seconds * 1_000_000
