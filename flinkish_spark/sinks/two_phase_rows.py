"""Records as a sink of the user's sees them: rows of an Arrow batch, and one as JSON."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql import Row

if TYPE_CHECKING:
    import pyarrow as pa


def in_utc(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch whose points in time are in UTC instead of the session's time zone."""
    import pyarrow as pa

    columns = []
    for column in batch.columns:
        wanted = _in_utc(column.type)
        columns.append(column if wanted == column.type else column.cast(wanted))
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _in_utc(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_in_utc(f.type)) for f in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_utc(kind.value_type)))
    if pa.types.is_map(kind):
        item = kind.item_field.with_type(_in_utc(kind.item_type))
        return pa.map_(kind.key_field.with_type(_in_utc(kind.key_type)), item)
    return kind


def records_of(batch: pa.RecordBatch) -> Iterator[Row]:
    """Yield the records of a batch, in order."""
    from flinkish_spark.runtime.python_values import to_values

    # A Row of names makes rows with these fields; unlike Row(**fields) it takes any name.
    make = Row(*batch.schema.names)
    columns = [to_values(column) for column in batch.columns]
    for values in zip(*columns, strict=True):
        yield make(*values)


def record_as_json(record: Row) -> str:
    """Return a record as a JSON object, for people and for putting it right later.

    Decimals are strings, points in time and dates ISO 8601, binary values base64, NaN and infinities
    the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
    """
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
        return {_as_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _as_key(value: Any) -> str:
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain)
