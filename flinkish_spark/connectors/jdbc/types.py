"""What fits where: rules that databases share."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import types as T

from flinkish_spark.types.hints import parts_of

_TYPE = re.compile(r"([a-z][a-z0-9_ ]*?)\s*(?:\((\d+)(?:\s*,\s*(-?\d+))?\))?(\s+[a-z ]+)?")
#: Digits of the integers of Spark's types, and in bits.
INTEGER_BITS: dict[type[T.DataType], int] = {
    T.ByteType: 8,
    T.ShortType: 16,
    T.IntegerType: 32,
    T.LongType: 64,
}
_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}


@dataclass(frozen=True, slots=True)
class SqlType:
    """A type as a database writes it, taken apart: ``timestamp(3) with time zone``."""

    #: Without the numbers.
    name: str
    size: int | None = None
    scale: int | None = None

    @classmethod
    def parse(cls, text: str) -> SqlType:
        """Read a type in lower case; one of another form is only a name."""
        match = _TYPE.fullmatch(text)
        if match is None:
            return cls(text)
        base, size, scale, rest = match.groups()
        name = " ".join(f"{base}{rest or ''}".split())
        return cls(name, int(size) if size else None, int(scale) if scale else (0 if size else None))


def why_decimal_unfit(data_type: T.DecimalType, column: SqlType) -> str:
    """Return why a NUMERIC with digits would round or refuse values of a decimal; empty if it would not."""
    if column.size is None:
        return ""
    scale = column.scale or 0
    if scale < data_type.scale:
        return f"it would be rounded to {scale} digits behind the point"
    if column.size - scale < data_type.precision - data_type.scale:
        return f"it has {data_type.precision - data_type.scale} digits before the point"
    return ""


def why_integer_unfit(data_type: T.DataType, column: SqlType, bits: int | None) -> str:
    """Return why an integer or NUMERIC column cannot hold an integer type."""
    needed = INTEGER_BITS[type(data_type)]
    if bits is not None:
        return "" if bits >= needed else f"it has {needed} bits"
    return why_decimal_unfit(T.DecimalType(_DIGITS[needed], 0), column)


#: What a record may hold; the rest Spark does not hand to Python as values, or no database has it.
_SUPPORTED: tuple[type[T.DataType], ...] = (
    *(T.BooleanType, T.NumericType, T.StringType, T.BinaryType, T.DateType, T.TimestampType),
    *(T.TimestampNTZType, T.ArrayType, T.MapType, T.StructType),
)


def is_supported(data_type: T.DataType) -> bool:
    return all(isinstance(part, _SUPPORTED) for part in parts_of(data_type))


def cuts_blanks(limit: int, column_type: str, size: Callable[[str], int]) -> Callable[[str], str]:
    """Return a check that says why a text would lose blanks at its end; the database refuses a longer one."""

    def why(text: str) -> str:
        is_cut = text.endswith(" ") and size(text) > limit
        return f"the text is longer than {column_type}, which cuts blanks off" if is_cut else ""

    return why


TEXT_CAST = "a text would be cast: rounded or cut without a word, or made one with another text"
