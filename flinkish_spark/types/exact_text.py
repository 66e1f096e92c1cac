"""Values as texts that say all of them, the same in every session: in JSON, in keys, in lines of files.

Columns are written at once, by the forms that Spark's `to_json` and casts have, with two changes: times are
in UTC with their microseconds, and what has no such text is refused by name.
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

from flinkish_spark.types.arrow_columns import beyond_years

_PLAIN: tuple[type[T.DataType], ...] = (
    T.BooleanType,
    T.ByteType,
    T.ShortType,
    T.IntegerType,
    T.LongType,
    T.FloatType,
    T.DoubleType,
    T.DecimalType,
    T.BinaryType,
    T.DateType,
    T.TimestampType,
    T.TimestampNTZType,
    T.DayTimeIntervalType,
    T.YearMonthIntervalType,
    T.NullType,
)
#: Returns the texts of a column's values; null for a null.
Write = Callable[[pa.Array], pa.Array]


def unfit_for_json(kind: T.DataType) -> str | None:
    """Return why values of a type have no JSON that says exactly what they are; None if they have."""
    match kind:
        case T.StructType():
            return next((why for field in kind if (why := unfit_for_json(field.dataType))), None)
        case T.ArrayType():
            return unfit_for_json(kind.elementType)
        case T.MapType() if type(kind.keyType) is not T.StringType:
            return f"{kind.simpleString()}: names in JSON are texts, so the keys of a map must be STRING"
        case T.MapType():
            return unfit_for_json(kind.valueType)
        case _ if type(kind) in (T.StringType, *_PLAIN):
            return None
    return f"{kind.simpleString()}: JSON has no value that says exactly what it is"


def unfit_for_text(kind: T.DataType) -> str | None:
    is_plain = isinstance(kind, T.StringType | T.CharType | T.VarcharType)
    return None if is_plain else unfit_for_json(kind)


class JsonWriter:
    """Writes rows of these fields as JSON objects.

    Intervals of months come as their number, since PySpark has no Arrow type for them. Fields that are null
    are written as null, or left out.
    """

    def __init__(self, fields: T.StructType, *, null_fields: bool = True) -> None:
        self._object = _object_writer(fields, null_fields)

    def write(self, columns: Sequence[pa.Array], count: int) -> pa.Array:
        """Return an object for each of so many rows of the columns, which are in the order of the fields."""
        return self._object(columns) if columns else pa.repeat("{}", count)


def exact_text(kind: T.DataType) -> Write:
    """Return what writes values as texts: JSON of what is nested, times in UTC, others as Spark casts.

    In a text fields that are null are left out.
    """
    return _form_of(kind, null_fields=False).text


# ----------------------------------------------------------------------------------------------------------
# JSON.


@dataclass(frozen=True)
class _Form:
    text: Write
    #: If the text stands in quotes in JSON.
    is_quoted: bool = False
    #: Returns values in JSON, where the text alone is not what JSON has.
    json: Write | None = None

    def values(self, column: pa.Array) -> pa.Array:
        if self.json is not None:
            return self.json(column)
        text = self.text(column)
        return _joined('"', text, '"') if self.is_quoted else text


def _object_writer(fields: T.StructType, null_fields: bool) -> Callable[[Sequence[pa.Array]], pa.Array]:
    forms = [(f"{quote_json(one.name)}:", _form_of(one.dataType, null_fields=null_fields)) for one in fields]

    def write(columns: Sequence[pa.Array]) -> pa.Array:
        joined = _Joined("{")
        # Of a first field that may be left out the comma behind it cannot be known: each field has one in
        # front then, and the first of a row goes at the end.
        may_begin_with_comma = not null_fields and bool(columns[0].null_count)
        for at, ((label, form), column) in enumerate(zip(forms, columns, strict=True)):
            label = f",{label}" if at or may_begin_with_comma else label
            if not column.null_count and form.is_quoted and form.json is None:
                joined.add(f'{label}"', form.text(column), '"')
            elif not column.null_count:
                joined.add(label, form.values(column), "")
            elif null_fields:
                joined.add(label, form.values(column).fill_null("null"), "")
            else:
                joined.add("", _joined(label, form.values(column)).fill_null(""), "")
        made = joined.texts("}")
        if may_begin_with_comma:
            made = pc.replace_substring(made, "{,", "{", max_replacements=1)
        return made

    return write


class _Joined:
    """Texts one behind the other, row by row; what stands between two columns is one text."""

    def __init__(self, first: str) -> None:
        self._between, self._parts = first, list[Any]()

    def add(self, before: str, column: pa.Array, after: str) -> None:
        self._parts += [pa.scalar(self._between + before), column]
        self._between = after

    def texts(self, last: str) -> pa.Array:
        return _joined(*self._parts, pa.scalar(self._between + last))


def _joined(*parts: Any) -> pa.Array:
    return pc.binary_join_element_wise(*parts, "")


@functools.lru_cache(maxsize=256)
def _form_of_text(kind: str, null_fields: bool) -> _Form:
    return _form(T._parse_datatype_json_string(kind), null_fields)


def _form_of(kind: T.DataType, *, null_fields: bool) -> _Form:
    return _form_of_text(kind.json(), null_fields)


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
            return _Form(lambda column: column, is_quoted=True, json=_json_of_strings)
        case T.BinaryType():
            return _Form(_base64, is_quoted=True)
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
            return _Form(functools.partial(_each, _day_time_text(kind), pa.int64()), is_quoted=True)
        case T.YearMonthIntervalType():
            return _Form(functools.partial(_each, _year_month_text(kind), pa.int32()), is_quoted=True)
        case T.VariantType():
            return _Form(_variants)
        case T.TimeType():
            return _Form(_times_of_day, is_quoted=True)
    return _Form(lambda column: column.cast(pa.string()))


def _struct_writer(kind: T.StructType, null_fields: bool) -> Write:
    if not kind.fields:
        return lambda column: pc.if_else(column.is_valid(), "{}", pa.scalar(None, pa.string()))
    write = _object_writer(kind, null_fields)

    def written(column: pa.Array) -> pa.Array:
        return _where(column, write([column.field(at) for at in range(column.type.num_fields)]))

    return written


def _list_writer(form: _Form) -> Write:
    def written(column: pa.Array) -> pa.Array:
        first, offsets = _offsets(column)
        values = form.values(column.values.slice(first, offsets[-1])).fill_null("null")
        return _where(column, _joined("[", _of_lists(offsets, values), "]"))

    return written


def _map_writer(keys: _Form, values: _Form) -> Write:
    def written(column: pa.Array) -> pa.Array:
        first, offsets = _offsets(column)
        names, items = (part.slice(first, offsets[-1]) for part in (column.keys, column.items))
        # A name in JSON is a text, whatever type it has.
        named = _joined('"', _escaped(keys.text(names)), '":')
        entries = _joined(named, values.values(items).fill_null("null"))
        return _where(column, _joined("{", _of_lists(offsets, entries), "}"))

    return written


def _offsets(column: pa.Array) -> tuple[int, np.ndarray[Any, Any]]:
    """Return where the values of a list or map begin, and where each row's end, counted from there."""
    offsets = column.offsets.to_numpy()
    return int(offsets[0]), offsets - offsets[0]


def _of_lists(offsets: np.ndarray[Any, Any], texts: pa.Array) -> pa.Array:
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), texts)
    return pc.binary_join(lists, ",")


def _where(column: pa.Array, texts: pa.Array) -> pa.Array:
    """Return texts with a null where the column has one."""
    return pc.if_else(column.is_valid(), texts, pa.scalar(None, texts.type)) if column.null_count else texts


#: As Jackson writes them.
_ESCAPES = {letter: f"\\u{letter:04X}" for letter in range(0x20)} | {
    ord('"'): '\\"',
    ord("\\"): "\\\\",
    **{ord(letter): f"\\{name}" for letter, name in zip("\b\t\n\f\r", "btnfr", strict=True)},
}
#: The one that the others are written with comes first.
_IN_ORDER = sorted(_ESCAPES, key=lambda letter: letter != ord("\\"))


def quote_json(text: str) -> str:
    return f'"{text.translate(_ESCAPES)}"'


def _json_of_strings(column: pa.Array) -> pa.Array:
    return _joined('"', _escaped(column), '"')


def _escaped(column: pa.Array) -> pa.Array:
    """Return texts as they stand between the quotes of JSON; what is no UTF-8 becomes U+FFFD."""
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
        # Spark keeps strings as bytes, and looks at them where it must.
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


# ----------------------------------------------------------------------------------------------------------
# Values of single types.


def _each(write: Callable[[int], str], kind: pa.DataType, column: pa.Array) -> pa.Array:
    values = column.cast(kind).to_pylist()
    return pa.array([None if one is None else write(one) for one in values], pa.string())


def _base64(column: pa.Array) -> pa.Array:
    values = column.to_pylist()
    return pa.array([None if one is None else base64.b64encode(one) for one in values], pa.binary()).cast(
        pa.string()
    )


def _variants(column: pa.Array) -> pa.Array:
    values = column.to_pylist()
    return pa.array(
        [None if one is None else T.VariantVal(one["value"], one["metadata"]).toJson() for one in values],
        pa.string(),
    )


def _floating(column: pa.Array) -> pa.Array:
    """Return numbers as Java writes them: with an exponent below a thousandth and from ten million on."""
    texts = column.cast(pa.string())
    values = column.fill_null(0).to_numpy(zero_copy_only=False)
    size = np.abs(values)
    is_plain = (size >= 1e-3) & (size < 1e7) | (size == 0)
    is_whole = is_plain & (np.trunc(values) == values)
    if is_whole.any():
        texts = pc.if_else(pa.array(is_whole), _joined(texts, ".0"), texts)
    if is_plain.all():
        return texts
    others = pa.array([_java_number(str(one)) for one in values[~is_plain]], pa.string())
    return pc.replace_with_mask(texts, pa.array(~is_plain), others)


def _plain_decimals(column: pa.Array) -> pa.Array:
    """Return numbers without an exponent; JSON has them with one, where they begin with many zeros."""
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
        else pc.if_else(is_number, texts, _joined('"', texts, '"'))
    )


def _dates(column: pa.Array) -> pa.Array:
    beyond = beyond_years(column)
    if not beyond.any():
        return column.cast(pa.string())
    days = column.cast(pa.int32())
    inside = pc.if_else(pa.array(beyond), pa.scalar(0, pa.int32()), days).cast(pa.date32()).cast(pa.string())
    others = [_date_text(one) for one in days.filter(pa.array(beyond)).to_pylist()]
    return pc.replace_with_mask(inside, pa.array(beyond), pa.array(others, pa.string()))


#: The Gregorian calendar repeats after so many years and days.
_CYCLE_YEARS, _CYCLE_DAYS = 400, 146_097


def _date_text(days: int) -> str:
    """Return a day of a year that Python has not, as Java writes it."""
    cycles, rest = divmod(days, _CYCLE_DAYS)
    day = np.datetime64(rest, "D").astype("datetime64[D]").item()
    year = day.year + cycles * _CYCLE_YEARS
    sign = "+" if year > 9_999 else "-" if year < 0 else ""
    return f"{sign}{abs(year):04d}-{day.month:02d}-{day.day:02d}"


_MICROS_PER_DAY = 86_400_000_000


def _times(column: pa.Array, zone: str) -> pa.Array:
    micros = column.view(pa.int64())
    beyond = beyond_years(column)
    if beyond.any():
        shifted = pc.if_else(pa.array(beyond), 0, micros)
    else:
        shifted = micros
    texts = pc.replace_substring(
        shifted.view(pa.timestamp("us")).cast(pa.string()), " ", "T", max_replacements=1
    )
    if beyond.any():
        others = [_time_text(one) for one in micros.filter(pa.array(beyond)).to_pylist()]
        texts = pc.replace_with_mask(texts, pa.array(beyond), pa.array(others, pa.string()))
    return _joined(texts, zone) if zone else texts


def _time_text(micros: int) -> str:
    days, rest = divmod(micros, _MICROS_PER_DAY)
    seconds, fraction = divmod(rest, 1_000_000)
    clock = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}.{fraction:06d}"
    return f"{_date_text(days)}T{clock}"


def _times_of_day(column: pa.Array) -> pa.Array:
    """Return clock times without the zeros at the end of a fraction."""
    texts = pc.replace_substring_regex(column.cast(pa.string()), r"(\.[0-9]*?)0+$", r"\1")
    return pc.replace_substring_regex(texts, r"\.$", "")


_UNITS = ("DAY", "HOUR", "MINUTE", "SECOND")
_MICROS_OF = (_MICROS_PER_DAY, 3_600_000_000, 60_000_000)


def _named_interval(sign: bool, value: str, units: Sequence[str]) -> str:
    return f"INTERVAL '{'-' if sign else ''}{value}' {' TO '.join(dict.fromkeys((units[0], units[-1])))}"


def _day_time_text(kind: T.DayTimeIntervalType) -> Callable[[int], str]:
    first, last = kind.startField, kind.endField
    assert first is not None and last is not None
    units = _UNITS[first : last + 1]

    def text(micros: int) -> str:
        rest, made = abs(micros), ""
        for unit in range(first, last + 1):
            if unit < len(_MICROS_OF):
                number, rest = divmod(rest, _MICROS_OF[unit])
                made += f"{'' if unit == first else ' ' if unit == 1 else ':'}{number:0{2 if unit else 1}d}"
            else:
                seconds, fraction = divmod(rest, 1_000_000)
                decimals = f".{fraction:06d}".rstrip("0") if fraction else ""
                made += f"{'' if unit == first else ':'}{seconds:02d}{decimals}"
        return _named_interval(micros < 0, made, units)

    return text


def _year_month_text(kind: T.YearMonthIntervalType) -> Callable[[int], str]:
    first, last = kind.startField, kind.endField
    assert first is not None and last is not None

    def text(months: int) -> str:
        size = abs(months)
        parts = (str(size // 12), str(size % 12 if first == 0 else size))
        return _named_interval(
            months < 0, "-".join(parts[first : last + 1]), ("YEAR", "MONTH")[first : last + 1]
        )

    return text
