"""Conversion between Arrow's and Spark's types, the same in all versions of PySpark.

TIMESTAMP becomes an Arrow timestamp in UTC, TIMESTAMP_NTZ one without a zone. Versions of PySpark differ in
their arguments and defaults for this.
"""

from __future__ import annotations

import inspect
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema, to_arrow_type

# Up to 4.1 there is no such argument, and TIMESTAMP is always in UTC.
_IN_UTC: dict[str, Any] = (
    {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_type).parameters else {}
)


def arrow_type(kind: T.DataType) -> pa.DataType:
    return to_arrow_type(kind, **_IN_UTC)


def arrow_schema(fields: T.StructType) -> pa.Schema:
    return to_arrow_schema(fields, **_IN_UTC)


def spark_type(kind: pa.DataType) -> T.DataType:
    return from_arrow_type(kind, prefer_timestamp_ntz=True)


def nullable_within(kind: pa.DataType) -> pa.DataType:
    """Return a type whose fields, elements and values may be null."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(one.name, nullable_within(one.type)) for one in kind])
    if pa.types.is_map(kind):
        return pa.map_(nullable_within(kind.key_type), nullable_within(kind.item_type))
    return pa.list_(nullable_within(kind.value_type)) if pa.types.is_list(kind) else kind


def as_schema(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Cast rows to a schema's types: rows from Spark have the session's zone, and maybe large strings."""
    if rows.schema.equals(schema):
        return rows
    arrays = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(rows.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
