"""From Arrow to parameters and to JSON, nothing rounded."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from flinkish_spark.sources.batch_columns import beyond_years, leaves

if TYPE_CHECKING:
    import pyarrow as pa

    from flinkish_spark.sinks.jdbc.dialect import Dialect


class Unfit(str):
    """Stands where a value cannot be given to the database; says why."""

    __slots__ = ()


def python_values(column: pa.Array) -> list[Any]:
    """Return a column's values; an :class:`Unfit` for what Python cannot hold, as the year 10000."""
    import pyarrow as pa

    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        # As in any other zone the instant is the same, and an hour that a clock shows twice is told apart.
        column = column.cast(pa.timestamp("us", tz="UTC"))
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):
        return [_python_value(scalar) for scalar in column]


def _python_value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        import pyarrow as pa

        if pa.types.is_timestamp(scalar.type):
            return Unfit(f"the value {scalar.cast('int64').as_py()} is out of range: {error}")
        return Unfit(f"the value cannot be read: {error}")


def has_zero_byte(column: pa.Array) -> bool:
    """Whether a text of a column, or within its values, has a zero byte."""
    import pyarrow.compute as pc

    texts = (leaf for leaf in leaves(column) if is_text(leaf.type))
    return any(pc.any(pc.match_substring(text, "\0")).as_py() for text in texts)


def may_be_unfit(column: pa.Array) -> bool:
    """Whether a value may be one that cannot be given to a database; quick, since it makes no values."""
    import pyarrow as pa

    try:
        column.validate(full=True)
    except pa.ArrowInvalid:  # bytes that are no text
        return True
    return any(_is_suspect(leaf, is_in_json=leaf is not column) for leaf in leaves(column))


def _is_suspect(leaf: pa.Array, *, is_in_json: bool) -> bool:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(leaf.type):
        return not is_in_json and pc.all(pc.is_finite(leaf)).as_py() is False
    if pa.types.is_date32(leaf.type) or (pa.types.is_timestamp(leaf.type) and leaf.type.unit == "us"):
        return bool(beyond_years(leaf).any())
    return bool(pa.types.is_temporal(leaf.type))


def is_text(arrow_type: pa.DataType) -> bool:
    """Whether values are texts."""
    import pyarrow as pa

    return bool(pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type))


def parameters(batch: pa.RecordBatch, columns: Sequence[str], dialect: Dialect) -> list[tuple[Any, ...]]:
    """Return the rows of a batch as parameters in the order of `columns`."""
    if not columns:
        return [()] * batch.num_rows
    encoded = []
    for name in columns:
        column = batch.column(batch.schema.get_field_index(name))
        values, encode = python_values(column), dialect.encoder(column.type)
        if encode is not None:
            values = [v if v is None or isinstance(v, Unfit) else encode(v) for v in values]
        encoded.append(values)
    return list(zip(*encoded, strict=True))


def is_nested(arrow_type: pa.DataType) -> bool:
    """Whether values have parts: arrays, maps, structs."""
    import pyarrow as pa

    return bool(pa.types.is_nested(arrow_type))


def json_encoder(arrow_type: pa.DataType) -> Callable[[Any], str]:
    """Return what turns values of a type into JSON text."""
    return lambda value: json.dumps(json_value(value, arrow_type), ensure_ascii=False)


def record_json(batch: pa.RecordBatch, row: int, columns: Sequence[str] | None = None) -> str:
    """Return one row as a JSON object: all of it, or some columns."""
    record = {}
    for name in batch.schema.names if columns is None else columns:
        column = batch.column(batch.schema.get_field_index(name))
        (value,) = python_values(column.slice(row, 1))
        record[name] = str(value) if isinstance(value, Unfit) else json_value(value, column.type)
    return json.dumps(record, ensure_ascii=False)


def json_value(value: Any, arrow_type: pa.DataType) -> Any:
    """Return a value as JSON has it. What JSON has no exact form for is a string.

    Those are decimals, dates, times, binary (base64), NaN and infinities. A map with keys that are no
    strings is an array of pairs.
    """
    import pyarrow as pa

    if value is None:
        return None
    if pa.types.is_map(arrow_type):
        pairs = [[json_value(k, arrow_type.key_type), json_value(v, arrow_type.item_type)] for k, v in value]
        return dict(pairs) if is_text(arrow_type.key_type) else pairs
    if pa.types.is_struct(arrow_type):
        return {field.name: json_value(value[field.name], field.type) for field in arrow_type}
    if is_nested(arrow_type):
        return [json_value(item, arrow_type.value_type) for item in value]
    return _json_scalar(value)


def _json_scalar(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case Decimal():
            return format(value, "f")
        case bytes():
            return base64.b64encode(value).decode()
        case dt.datetime() | dt.date():
            return value.isoformat()
        case dt.timedelta():
            return str(value)
    return value
