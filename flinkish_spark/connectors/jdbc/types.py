"""SQL types, and rules common to all databases on which Spark types fit them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import types as T

from flinkish_spark.types.hints import parts_of

_TYPE = re.compile(r"([a-z][a-z0-9_ ]*?)\s*(?:\((\d+)(?:\s*,\s*(-?\d+))?\))?(\s+[a-z ]+)?")
INTEGER_BITS: dict[type[T.DataType], int] = {
    T.ByteType: 8,
    T.ShortType: 16,
    T.IntegerType: 32,
    T.LongType: 64,
}
_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}


@dataclass(frozen=True, slots=True)
class SqlType:
    """A parsed type of a database, such as ``timestamp(3) with time zone``."""

    #: The name without the numbers.
    name: str
    size: int | None = None
    scale: int | None = None

    @classmethod
    def parse(cls, text: str) -> SqlType:
        """Parse a type in lower case; text of another form becomes the name."""
        match = _TYPE.fullmatch(text)
        if match is None:
            return cls(text)
        base, size, scale, rest = match.groups()
        name = " ".join(f"{base}{rest or ''}".split())
        return cls(name, int(size) if size else None, int(scale) if scale else (0 if size else None))


def why_decimal_unfit(data_type: T.DecimalType, column: SqlType) -> str:
    """Return why a NUMERIC column would round or refuse values of a decimal type; empty if it would not."""
    if column.size is None:
        return ""
    scale = column.scale or 0
    if scale < data_type.scale:
        return f"it would be rounded to {scale} digits after the point"
    if column.size - scale < data_type.precision - data_type.scale:
        return f"it has {data_type.precision - data_type.scale} digits before the point"
    return ""


def why_integer_unfit(data_type: T.DataType, column: SqlType, bits: int | None) -> str:
    needed = INTEGER_BITS[type(data_type)]
    if bits is not None:
        return "" if bits >= needed else f"it has {needed} bits"
    return why_decimal_unfit(T.DecimalType(_DIGITS[needed], 0), column)


#: Types of fields that the sink can write; Spark cannot convert others to Python values, or no database has
#: them.
_SUPPORTED: tuple[type[T.DataType], ...] = (
    *(T.BooleanType, T.NumericType, T.StringType, T.BinaryType, T.DateType, T.TimestampType),
    *(T.TimestampNTZType, T.ArrayType, T.MapType, T.StructType),
)


def is_supported(data_type: T.DataType) -> bool:
    return all(isinstance(part, _SUPPORTED) for part in parts_of(data_type))


def make_blank_check(limit: int, column_type: str, size: Callable[[str], int]) -> Callable[[str], str]:
    """Return a check for trailing blanks beyond the limit; the database refuses other long texts."""

    def why(text: str) -> str:
        is_cut = text.endswith(" ") and size(text) > limit
        return f"the text is longer than {column_type}, which cuts blanks off" if is_cut else ""

    return why


TEXT_CAST = "a text would be cast: silently rounded or cut, or made equal to another text"
