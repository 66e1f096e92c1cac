"""Checks of partition columns, whose values are stored as text in a folder's name or in a table's log.

A value whose text is read back as another value is refused: two values would silently become one partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.types.ddl import quote_name

#: The name of the null partition.
NULL_BUCKET = "__HIVE_DEFAULT_PARTITION__"

#: Types whose text always reads back as the same value, and types whose values are checked one by one: the
#: text of a TIMESTAMP is in the session's zone. Other types are refused.
_WITH_SAME_TEXT = (T.StringType, T.BooleanType, T.IntegralType, T.DecimalType, T.DateType)
_WITH_ANOTHER_TEXT = (T.TimestampType, T.TimestampNTZType, T.FloatType, T.DoubleType)
#: Characters that Spark escapes in a folder's name, as three bytes each.
_ESCAPED = "".join(map(chr, (*range(1, 32), 127))) + "\"#%'*/:=?\\{[]^"
#: Longest name of a folder on disks and in HDFS; no store allows less.
_MOST_BYTES = 255


def why_no_partition(kind: T.DataType) -> str:
    if isinstance(kind, T.BinaryType):
        return "bytes are no text: different ones would be one partition"
    if isinstance(kind, T.StringType) and not kind.isUTF8BinaryCollation():
        return f"its collation {kind.collation} takes different texts for equal"
    if not isinstance(kind, (*_WITH_SAME_TEXT, *_WITH_ANOTHER_TEXT)):
        return f"a {kind.simpleString()} cannot be part of a folder's name"
    return ""


def partition_conditions(frame: DataFrame, names: Iterable[str]) -> Iterator[tuple[str, Column]]:
    """Yield conditions that each record must meet, each after its text in error messages."""
    for field in _fields(frame, names):
        column, what = F.col(quote_name(field.name)), f"the partition column {field.name}"
        if isinstance(field.dataType, T.StringType):
            is_kept = ~column.isin("", NULL_BUCKET)
            yield f"{what} NOT IN ('', '{NULL_BUCKET}'), which would become NULL,", column.isNull() | is_kept
        elif isinstance(field.dataType, _WITH_ANOTHER_TEXT):
            again = column.cast("string").cast(field.dataType)
            yield f"{what} being the value of its text", column.eqNullSafe(again)
    yield from folder_conditions(frame, names)


def folder_conditions(frame: DataFrame, names: Iterable[str]) -> Iterator[tuple[str, Column]]:
    """Yield conditions for a record's folder to be created, each after its text in error messages."""
    for field in _fields(frame, names):
        if not isinstance(field.dataType, T.StringType):
            continue
        column, what = F.col(quote_name(field.name)), f"the partition column {field.name}"
        is_text = F.is_valid_utf8(column) & ~column.contains("\0")
        yield f"{what} being UTF-8 without NUL", column.isNull() | is_text
        left = _MOST_BYTES - 1 - sum(3 if one in _ESCAPED else len(one.encode()) for one in field.name)
        bytes_of = F.octet_length(column)
        # First a cheap test: most texts are short enough even if all their characters were escaped.
        is_short = bytes_of * 3 <= left
        is_short |= bytes_of * 3 - F.octet_length(F.translate(column, _ESCAPED, "")) * 2 <= left
        yield f"{what} having at most {left} bytes in a folder's name", column.isNull() | is_short


def _fields(frame: DataFrame, names: Iterable[str]) -> Iterator[T.StructField]:
    fields = {field.name.lower(): field for field in frame.schema}
    return (fields[name.lower()] for name in names if name.lower() in fields)


def folder_of(name: str, value: str | None) -> str:
    """Return the folder name of a partition, as Hive and Spark write it."""
    text = "".join(f"%{ord(one):02X}" if one in _ESCAPED else one for one in value or NULL_BUCKET)
    return "".join(f"%{ord(one):02X}" if one in _ESCAPED else one for one in name) + "=" + text


def check_conditions(
    frame: DataFrame,
    conditions: Iterable[tuple[str, Column]],
    marker: str,
    shown: Sequence[str] | None = None,
) -> DataFrame:
    """Return a frame that fails at a record which violates a condition.

    The error shows the record's fields `shown`, or all fields.
    """
    row = F.to_json(F.struct(*[F.col(quote_name(name)) for name in shown or frame.columns]))
    for what, is_kept in conditions:
        text = F.concat(F.lit(f"{marker} {what} is violated by the record "), F.substring(row, 1, 1_000))
        frame = frame.where(F.when(is_kept, F.lit(True)).otherwise(F.raise_error(text).cast("boolean")))
    return frame
