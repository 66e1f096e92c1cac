"""Records of a batch as Python objects and as JSON, for sinks that users write."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import Row


def to_utc(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with timestamps in UTC instead of the session's time zone."""
    columns = []
    for column in batch.columns:
        wanted = _to_utc_type(column.type)
        columns.append(column if wanted == column.type else column.cast(wanted))
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _to_utc_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_to_utc_type(f.type)) for f in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_to_utc_type(kind.value_type)))
    if pa.types.is_map(kind):
        item = kind.item_field.with_type(_to_utc_type(kind.item_type))
        return pa.map_(kind.key_field.with_type(_to_utc_type(kind.key_type)), item)
    return kind


def records_of(batch: pa.RecordBatch) -> Iterator[Row]:
    from flinkish_spark.types.to_python import to_values

    # A Row of names makes rows with these fields; unlike Row(**fields) it takes any name.
    make = Row(*batch.schema.names)
    columns = [to_values(column) for column in batch.columns]
    for values in zip(*columns, strict=True):
        yield make(*values)


def record_as_json(record: Row) -> str:
    """Return a record as a JSON object, so that it can be read and repaired."""
    # Decimals, NaN and infinities are strings, timestamps and dates ISO 8601, binary values base64.
    fields = zip(record.__fields__, record, strict=True)
    return json.dumps({name: _plain(value) for name, value in fields}, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, Mapping):
        keys = (key if isinstance(key, str) else json.dumps(key) for key in map(_plain, value))
        return {key: _plain(item) for key, item in zip(keys, value.values(), strict=True)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
