"""Partitions of an Iceberg table: their values for rows, and as JSON."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.conversions import from_bytes, to_bytes
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import TruncateTransform
from pyiceberg.typedef import Record
from pyiceberg.types import BinaryType, DecimalType, PrimitiveType, StringType, StructType


def find_values(rows: pa.Table | pa.RecordBatch, field: PartitionField, schema: Schema) -> pa.Array:
    """Return the values of a partition field; dates and times as numbers, as Iceberg holds them."""
    values = _transform(_find_source(rows, field, schema), field, schema)
    if isinstance(values, pa.ExtensionArray):
        # UUIDs, which Arrow does not group.
        return values.storage
    if pa.types.is_date(values.type):
        return values.cast(pa.int32())
    return values.cast(pa.int64()) if pa.types.is_timestamp(values.type) else values


def _find_source(rows: pa.Table | pa.RecordBatch, field: PartitionField, schema: Schema) -> pa.Array:
    path = schema.find_column_name(field.source_id) or ""
    first, *inner = [path] if path in rows.schema.names else path.split(".")
    wanted = schema_to_pyarrow(schema.find_field(field.source_id).field_type)
    nothing = pa.nulls(rows.num_rows, wanted)
    column = rows.column(first) if first in rows.schema.names else nothing
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    for name in inner:
        position = column.type.get_field_index(name) if pa.types.is_struct(column.type) else -1
        # Flattened, a field of a null struct is null.
        column = column.flatten()[position] if position >= 0 else nothing
    return column.cast(wanted)


def _transform(column: pa.Array, field: PartitionField, schema: Schema) -> pa.Array:
    kind, transform = schema.find_field(field.source_id).field_type, field.transform
    if isinstance(kind, BinaryType) and isinstance(transform, TruncateTransform):
        # pyiceberg's own does not take bytes.
        return pc.binary_slice(column, 0, transform.width)
    return transform.pyarrow_transform(kind)(column)


def find_overflow(
    rows: pa.Table | pa.RecordBatch, spec: PartitionSpec, schema: Schema
) -> tuple[str, int] | None:
    """Return why a partition has no value for a row, and the row; None if all have one.

    A number is truncated downwards, which may lead below the least one of its type. An integer would become
    a large one then, and a reader that looks for the row would pass over its file.
    """
    for field in spec.fields:
        kind = schema.find_field(field.source_id).field_type
        if not isinstance(field.transform, TruncateTransform) or isinstance(kind, StringType | BinaryType):
            continue
        column = _find_source(rows, field, schema)
        values = _transform(column, field, schema)
        if isinstance(kind, DecimalType):
            # Not by arithmetic, which rounds to 28 digits.
            least = Decimal((1, (9,) * kind.precision, -kind.scale))
            is_over = pc.less(values, pa.scalar(least, values.type))
        else:
            is_over = pc.greater(values, column)
        row = pc.index(is_over, True).as_py()
        if row >= 0:
            name = schema.find_column_name(field.source_id)
            return f"{field.transform} of the field {name} is less than every {kind}", row
    return None


def partition_to_json(kind: StructType, values: Iterable[Any]) -> list[str | None]:
    """Return the values of a partition, equal for equal partitions."""
    return [
        None if one is None else bytes_to_text(to_bytes(of, one))
        for of, one in zip(_kinds_of(kind), values, strict=True)
    ]


def partition_from_json(kind: StructType, stored: Iterable[str | None]) -> Record:
    return Record(
        *(
            None if text is None else from_bytes(of, base64.b64decode(text))
            for of, text in zip(_kinds_of(kind), stored, strict=True)
        )
    )


def _kinds_of(partition: StructType) -> list[PrimitiveType]:
    return [cast(PrimitiveType, one.field_type) for one in partition.fields]


def bytes_to_text(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")
