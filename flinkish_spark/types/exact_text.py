"""Values as texts that say all of them, the same in every session: in JSON, in keys, in lines of files.

By itself Spark writes milliseconds of a time, in the zone of the session, and the keys of a map as what
they are within Spark. Here times are in UTC with their microseconds, and what has no such text is refused
by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

#: For to_json and for files: ``2026-01-31T12:00:00.000000Z``; without the Z if a time has no zone.
TIME_OPTIONS: Mapping[str, str] = {
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
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


def json_of(column: Column, *, null_fields: bool) -> Column:
    return F.to_json(column, {**TIME_OPTIONS, "ignoreNullFields": "false" if null_fields else "true"})


def exact_text(column: Column, kind: T.DataType) -> Column:
    """Return values as texts: JSON of what is nested, times in UTC, all else as Spark writes it."""
    match kind:
        case T.ArrayType() | T.MapType() | T.StructType():
            return json_of(column, null_fields=False)
        case T.TimestampType() | T.TimestampNTZType():
            # As in JSON: a cast, and date_format too, would take the session's zone.
            return F.get_json_object(json_of(F.struct(column.alias("t")), null_fields=False), "$.t")
    return column.cast("string")
