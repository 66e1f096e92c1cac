"""Conversion of columns to exact texts, the same in every session: for JSON, keys, and lines of files.

The texts are those of Spark's `to_json` and casts, with two changes: times are in UTC with microseconds, and
types without an exact text are refused by name.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.types.arrow_columns import find_beyond_years
from flinkish_spark.types.hints import parts_of
from flinkish_spark.types.text_values import MICROS_OF, UNITS, write_day

#: Types that have an exact JSON form.
_IN_JSON: tuple[type[T.DataType], ...] = (
    *(T.StructType, T.ArrayType, T.MapType, T.StringType, T.BooleanType, T.BinaryType, T.NullType),
    *(T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.FloatType, T.DoubleType, T.DecimalType),
    *(T.DateType, T.TimestampType, T.TimestampNTZType, T.DayTimeIntervalType, T.YearMonthIntervalType),
)
#: Converts a column to texts; a null stays null.
Write = Callable[[pa.Array], pa.Array]


def unfit_for_json(kind: T.DataType) -> str | None:
    """Return why values of a type have no exact JSON form; None if they have."""
    for part in parts_of(kind):
        if isinstance(part, T.MapType) and type(part.keyType) is not T.StringType:
            return f"{part.simpleString()}: names in JSON are texts, so the keys of a map must be STRING"
        if type(part) not in _IN_JSON:
            return f"{part.simpleString()}: its values have no exact JSON form"
    return None


def unfit_for_text(kind: T.DataType) -> str | None:
    is_plain = isinstance(kind, T.StringType | T.CharType | T.VarcharType)
    return None if is_plain else unfit_for_json(kind)


class JsonWriter:
    """Writes rows of the given fields as JSON objects.

    Year-month intervals are passed as numbers of months, since PySpark has no Arrow type for them. Null
    fields are written as null, or left out.
    """

    def __init__(self, fields: T.StructType, *, null_fields: bool = True) -> None:
        self._forms = [(f"{quote_json(one.name)}:", _form(one.dataType, null_fields)) for one in fields]
        self._null_fields = null_fields

    def write(self, columns: Sequence[pa.Array], count: int) -> pa.Array:
        """Return an object for each of `count` rows; the columns are in the order of the fields."""
        if not columns:
            return pa.repeat("{}", count)
        # Columns are concatenated row by row, with one text between each two.
        between, parts = "{", list[Any]()
        # If the first field may be left out, each field begins with a comma, and the first comma of each row
        # is removed at the end.
        may_begin_with_comma = not self._null_fields and bool(columns[0].null_count)
        for at, ((label, form), column) in enumerate(zip(self._forms, columns, strict=True)):
            label = f",{label}" if at or may_begin_with_comma else label
            if not column.null_count and form.is_quoted and form.json is None:
                before, texts, after = f'{label}"', form.text(column), '"'
            else:
                before, texts, after = label, form.values(column), ""
                if column.null_count and self._null_fields:
                    texts = texts.fill_null("null")
                elif column.null_count:
                    before, texts = "", _join(label, texts).fill_null("")
            parts += [between + before, texts]
            between = after
        made = _join(*parts, between + "}")
        return pc.replace_substring(made, "{,", "{", max_replacements=1) if may_begin_with_comma else made


def exact_text(kind: T.DataType) -> Write:
    """Return a function from a column to texts: nested values as JSON, times in UTC, others as Spark casts.

    Null fields of nested values are left out.
    """
    return _form(kind, False).text


@dataclass(frozen=True)
class _Form:
    text: Write
    #: If the text is in quotes in JSON.
    is_quoted: bool = False
    #: Converts values to JSON, if JSON differs from the text.
    json: Write | None = None

    def values(self, column: pa.Array) -> pa.Array:
        if self.json is not None:
            return self.json(column)
        text = self.text(column)
        return _join('"', text, '"') if self.is_quoted else text


def _join(*parts: Any) -> pa.Array:
    return pc.binary_join_element_wise(*parts, "")


@functools.lru_cache(maxsize=256)
def _form(kind: T.DataType, null_fields: bool) -> _Form:
    match kind:
        case T.StructType():
            return _Form(_struct_writer(kind, null_fields))
        case T.ArrayType():
            return _Form(_list_writer(_form(kind.elementType, null_fields)))
        case T.MapType():
            keys, values = (_form(one, null_fields) for one in (kind.keyType, kind.valueType))
            return _Form(_map_writer(keys, values))
        case T.StringType() | T.CharType() | T.VarcharType():
            return _Form(
                lambda column: column, is_quoted=True, json=lambda column: _join('"', _escape(column), '"')
            )
        case T.BinaryType():
            return _Form(lambda column: _each(base64.b64encode, column), is_quoted=True)
        case T.FloatType() | T.DoubleType():
            return _Form(_floating, json=_json_of_floating)
        case T.DecimalType():
            return _Form(_plain_decimals, json=lambda column: column.cast(pa.string()))
        case T.DateType():
            return _Form(_dates, is_quoted=True)
        case T.TimestampType():
            return _Form(functools.partial(_times, zone="Z"), is_quoted=True)
        case T.TimestampNTZType():
            return _Form(functools.partial(_times, zone=""), is_quoted=True)
        case T.DayTimeIntervalType():
            return _Form(_intervals(_day_time_text(kind), pa.int64()), is_quoted=True)
        case T.YearMonthIntervalType():
            return _Form(_intervals(_year_month_text(kind), pa.int32()), is_quoted=True)
        case T.VariantType():
            return _Form(lambda column: _each(_variant, column))
        case T.TimeType():
            return _Form(_times_of_day, is_quoted=True)
    return _Form(lambda column: column.cast(pa.string()))


def _struct_writer(kind: T.StructType, null_fields: bool) -> Write:
    write = JsonWriter(kind, null_fields=null_fields).write

    def write_structs(column: pa.Array) -> pa.Array:
        return _where(column, write([column.field(at) for at in range(column.type.num_fields)], len(column)))

    return write_structs


def _list_writer(form: _Form) -> Write:
    def write_lists(column: pa.Array) -> pa.Array:
        first, offsets = _offsets(column)
        values = form.values(column.values.slice(first, offsets[-1])).fill_null("null")
        return _where(column, _join("[", _join_lists(offsets, values), "]"))

    return write_lists


def _map_writer(keys: _Form, values: _Form) -> Write:
    def write_maps(column: pa.Array) -> pa.Array:
        first, offsets = _offsets(column)
        names, items = (part.slice(first, offsets[-1]) for part in (column.keys, column.items))
        # Names in JSON are always texts.
        named = _join('"', _escape(keys.text(names)), '":')
        entries = _join(named, values.values(items).fill_null("null"))
        return _where(column, _join("{", _join_lists(offsets, entries), "}"))

    return write_maps


def _offsets(column: pa.Array) -> tuple[int, np.ndarray[Any, Any]]:
    """Return the start of a list or map column's values, and the offsets of its rows from there."""
    offsets = column.offsets.to_numpy()
    return int(offsets[0]), offsets - offsets[0]


def _join_lists(offsets: np.ndarray[Any, Any], texts: pa.Array) -> pa.Array:
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), texts)
    return pc.binary_join(lists, ",")


def _where(column: pa.Array, texts: pa.Array) -> pa.Array:
    return pc.if_else(column.is_valid(), texts, pa.scalar(None, texts.type)) if column.null_count else texts


#: Escapes as Jackson writes them.
_ESCAPES = {letter: f"\\u{letter:04X}" for letter in range(0x20)} | {
    ord('"'): '\\"',
    ord("\\"): "\\\\",
    **{ord(letter): f"\\{name}" for letter, name in zip("\b\t\n\f\r", "btnfr", strict=True)},
}
#: The backslash comes first, since the other escapes contain it.
_IN_ORDER = sorted(_ESCAPES, key=lambda letter: letter != ord("\\"))


def quote_json(text: str) -> str:
    return f'"{text.translate(_ESCAPES)}"'


def _escape(column: pa.Array) -> pa.Array:
    """Escape texts for JSON; invalid UTF-8 becomes U+FFFD."""
    column = _as_utf8(column)
    found = np.bincount(_bytes_of(column), minlength=256) > 0
    letters = [letter for letter in _IN_ORDER if found[letter]]
    if not letters:
        return column
    is_any = pc.match_substring_regex(column, '[\\x00-\\x1f"\\\\]').fill_null(False)
    texts = column.filter(is_any)
    for letter in letters:
        texts = pc.replace_substring(texts, chr(letter), _ESCAPES[letter])
    return pc.replace_with_mask(column, is_any, texts)


def _as_utf8(column: pa.Array) -> pa.Array:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        # Spark stores strings as bytes, and does not check that they are UTF-8.
        values = column.cast(pa.binary()).to_pylist()
        return pa.array(
            [None if one is None else one.decode(errors="replace") for one in values], pa.string()
        )
    return column


def _bytes_of(column: pa.Array) -> np.ndarray[Any, Any]:
    _, offsets, data = column.buffers()
    if data is None or not len(column):
        return np.zeros(0, np.uint8)
    ends = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4)
    return np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]


def _each(write: Callable[[Any], str | bytes], column: pa.Array) -> pa.Array:
    return pa.array([None if one is None else write(one) for one in column.to_pylist()], pa.string())


def _intervals(write: Callable[[int], str], kind: pa.DataType) -> Write:
    return lambda column: _each(write, column.cast(kind))


def _variant(value: Any) -> str:
    return T.VariantVal(value["value"], value["metadata"]).toJson()


def _floating(column: pa.Array) -> pa.Array:
    """Return floats as Java writes them: with an exponent below 0.001 and from ten million on."""
    texts = column.cast(pa.string())
    values = column.fill_null(0).to_numpy(zero_copy_only=False)
    size = np.abs(values)
    is_plain = (size >= 1e-3) & (size < 1e7) | (size == 0)
    is_whole = is_plain & (np.trunc(values) == values)
    if is_whole.any():
        texts = pc.if_else(pa.array(is_whole), _join(texts, ".0"), texts)
    if is_plain.all():
        return texts
    others = pa.array([_java_number(str(one)) for one in values[~is_plain]], pa.string())
    return pc.replace_with_mask(texts, pa.array(~is_plain), others)


def _plain_decimals(column: pa.Array) -> pa.Array:
    """Return decimals without an exponent, which Arrow writes for numbers with many leading zeros."""
    texts = column.cast(pa.string())
    is_scientific = pc.match_substring(texts, "E").fill_null(False)
    others = [f"{one:f}" for one in column.filter(is_scientific).to_pylist()]
    return pc.replace_with_mask(texts, is_scientific, pa.array(others, pa.string())) if others else texts


_NO_NUMBERS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _java_number(text: str) -> str:
    if text in _NO_NUMBERS:
        return _NO_NUMBERS[text]
    sign, digits, exponent = Decimal(text).normalize().as_tuple()
    assert isinstance(exponent, int)
    first, *others = map(str, digits)
    return f"{'-' if sign else ''}{first}.{''.join(others) or '0'}E{exponent + len(others)}"


def _json_of_floating(column: pa.Array) -> pa.Array:
    texts = _floating(column)
    is_number = pc.is_finite(column)
    return (
        texts
        if pc.all(is_number).as_py() in (True, None)
        else pc.if_else(is_number, texts, _join('"', texts, '"'))
    )


def _write_times(
    numbers: pa.Array, beyond: np.ndarray[Any, Any], plain: Write, text: Callable[[int], str]
) -> pa.Array:
    """Return the texts of times: by Arrow, or by `text` for those outside the years 1 to 9999."""
    if not beyond.any():
        return plain(numbers)
    mask = pa.array(beyond)
    inside = plain(pc.if_else(mask, pa.scalar(0, numbers.type), numbers))
    return pc.replace_with_mask(inside, mask, _each(text, numbers.filter(mask)))


def _dates(column: pa.Array) -> pa.Array:
    days, beyond = column.cast(pa.int32()), find_beyond_years(column)
    return _write_times(days, beyond, lambda one: one.cast(pa.date32()).cast(pa.string()), write_day)


def _times(column: pa.Array, zone: str) -> pa.Array:
    def plain(micros: pa.Array) -> pa.Array:
        texts = micros.view(pa.timestamp("us")).cast(pa.string())
        return pc.replace_substring(texts, " ", "T", max_replacements=1)

    texts = _write_times(column.view(pa.int64()), find_beyond_years(column), plain, _time_text)
    return _join(texts, zone) if zone else texts


def _time_text(micros: int) -> str:
    days, rest = divmod(micros, MICROS_OF["DAY"])
    seconds, fraction = divmod(rest, 1_000_000)
    clock = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}.{fraction:06d}"
    return f"{write_day(days)}T{clock}"


def _times_of_day(column: pa.Array) -> pa.Array:
    """Return times of day without trailing zeros of the fraction."""
    texts = pc.replace_substring_regex(column.cast(pa.string()), r"(\.[0-9]*?)0+$", r"\1")
    return pc.replace_substring_regex(texts, r"\.$", "")


def _interval_text(sign: bool, value: str, units: Sequence[str]) -> str:
    return f"INTERVAL '{'-' if sign else ''}{value}' {' TO '.join(dict.fromkeys((units[0], units[-1])))}"


def _day_time_text(kind: T.DayTimeIntervalType) -> Callable[[int], str]:
    first, last = kind.startField, kind.endField
    assert first is not None and last is not None
    units = UNITS[first : last + 1]

    def text(micros: int) -> str:
        rest, made = abs(micros), ""
        for unit in units:
            number, rest = divmod(rest, MICROS_OF[unit])
            between = "" if unit == units[0] else " " if unit == "HOUR" else ":"
            made += f"{between}{number:0{1 if unit == 'DAY' else 2}d}"
        decimals = f".{rest:06d}".rstrip("0") if rest and units[-1] == "SECOND" else ""
        return _interval_text(micros < 0, made + decimals, units)

    return text


def _year_month_text(kind: T.YearMonthIntervalType) -> Callable[[int], str]:
    first, last = kind.startField, kind.endField
    assert first is not None and last is not None

    def text(months: int) -> str:
        size = abs(months)
        parts = (str(size // 12), str(size % 12 if first == 0 else size))
        return _interval_text(
            months < 0, "-".join(parts[first : last + 1]), ("YEAR", "MONTH")[first : last + 1]
        )

    return text
