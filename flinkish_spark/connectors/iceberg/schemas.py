"""Schemas of a stream and of an Iceberg table: what fits, and what a table must not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import UnknownTransform, VoidTransform
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)
from pyspark.sql import types as T

from flinkish_spark.core.errors import ConfigError
from flinkish_spark.types.arrow_types import arrow_schema, nullable_within

#: Types of Spark, and those of Iceberg that hold all their values.
_HOLDERS: dict[type[T.DataType], tuple[type[IcebergType], ...]] = {
    T.BooleanType: (BooleanType,),
    T.ByteType: (IntegerType, LongType),
    T.ShortType: (IntegerType, LongType),
    T.IntegerType: (IntegerType, LongType),
    T.LongType: (LongType,),
    T.FloatType: (FloatType, DoubleType),
    T.DoubleType: (DoubleType,),
    T.DecimalType: (DecimalType,),
    T.DateType: (DateType,),
    T.TimestampType: (TimestamptzType,),
    T.TimestampNTZType: (TimestampType,),
    T.StringType: (StringType,),
    T.BinaryType: (BinaryType,),
}
#: The newest version of Iceberg's format that pyiceberg writes.
NEWEST_FORMAT = 2


def why_no_type(path: str, kind: T.DataType) -> str:
    if isinstance(kind, T.StructType):
        return next(filter(None, (why_no_type(f"{path}.{one.name}", one.dataType) for one in kind)), "")
    if isinstance(kind, T.ArrayType):
        return why_no_type(f"{path}.element", kind.elementType)
    if isinstance(kind, T.MapType):
        return why_no_type(f"{path}.key", kind.keyType) or why_no_type(f"{path}.value", kind.valueType)
    if isinstance(kind, T.StringType) and not kind.isUTF8BinaryCollation():
        return f"the field {path} has the collation {kind.collation}, which Iceberg does not keep"
    if type(kind) not in _HOLDERS:
        return f"the field {path} is {kind.simpleString()}, for which Iceberg has no type"
    return ""


def why_no_match(stream: T.StructType, table: Schema) -> str:
    found = (why_no_type(one.name, one.dataType) for one in stream)
    return next(filter(None, found), "") or _why_no_struct("", stream, table.as_struct())


def _why_no_struct(path: str, have: T.StructType, want: StructType) -> str:
    fields = {one.name: one for one in want.fields}
    for one in have:
        name = f"{path}{one.name}"
        if one.name not in fields:
            similar = next((field for field in fields if field.lower() == one.name.lower()), "")
            return f"it has no field {name}" + (f"; {path}{similar} is another name" if similar else "")
        if why := _why_no_field(name, one.dataType, fields[one.name].field_type):
            return why
    for field in want.fields:
        if field.required and field.name not in have.names:
            return f"its field {path}{field.name} is required, and the stream has none of that name"
    return ""


def _why_no_field(path: str, have: T.DataType, want: IcebergType) -> str:
    if isinstance(have, T.StructType) and isinstance(want, StructType):
        return _why_no_struct(f"{path}.", have, want)
    if isinstance(have, T.ArrayType) and isinstance(want, ListType):
        return _why_no_field(f"{path}.element", have.elementType, want.element_type)
    if isinstance(have, T.MapType) and isinstance(want, MapType):
        key = _why_no_field(f"{path}.key", have.keyType, want.key_type)
        return key or _why_no_field(f"{path}.value", have.valueType, want.value_type)
    if isinstance(have, T.DecimalType) and isinstance(want, DecimalType):
        fits = have.scale == want.scale and have.precision <= want.precision
    else:
        fits = isinstance(want, _HOLDERS.get(type(have), ()))
    return (
        "" if fits else f"its field {path} is Iceberg's {want}, the stream's is Spark's {have.simpleString()}"
    )


def why_not_written(table: TableMetadata, branch: str) -> str:
    """Return why pyiceberg cannot add files to a table; empty if it can."""
    properties = table.properties
    if table.format_version > NEWEST_FORMAT:
        return f"its format version is {table.format_version}, and pyiceberg writes 1 and 2"
    kind = properties.get("write.format.default", "parquet").lower()
    if kind != "parquet":
        return f"its property write.format.default is {kind}, and pyiceberg writes parquet"
    if properties.get("encryption.key-id"):
        return "its files are encrypted (encryption.key-id)"
    unknown = [str(one) for one in table.spec().fields if isinstance(one.transform, UnknownTransform)]
    if unknown:
        return f"it is partitioned by a transform that pyiceberg does not know: {unknown[0]}"
    if branch != "main" and branch not in table.refs:
        return f"it has no branch '{branch}'"
    if branch in table.refs and table.refs[branch].snapshot_ref_type != "branch":
        return f"its '{branch}' is a tag"
    return ""


def is_partitioned(spec: PartitionSpec) -> bool:
    return not all(isinstance(one.transform, VoidTransform) for one in spec.fields)


def why_stale(table: TableMetadata, schema_id: int, spec_id: int, columns: Sequence[int]) -> str:
    """Return why files that were staged for an older schema do not belong into a table now."""
    if spec_id != table.default_spec_id:
        return "it was partitioned anew since the rows were staged"
    if schema_id == table.current_schema_id:
        return ""
    old, new = table.schema_by_id(schema_id), table.schema()
    if old is None:
        return "the schema that the rows were staged for is gone"
    dropped = [column for column in columns if column not in new.field_ids]
    if dropped:
        return f"its field {old.find_column_name(dropped[0])} was dropped since the rows were staged"
    for one in map(new.find_field, new.field_ids):
        is_new = one.field_id not in old.field_ids
        if one.required and (is_new or old.find_field(one.field_id).optional):
            return (
                f"its field {new.find_column_name(one.field_id)} became required since the rows were staged"
            )
    return ""


def list_field_ids(stream: T.DataType, table: IcebergType) -> Iterator[int]:
    if isinstance(stream, T.StructType) and isinstance(table, StructType):
        for one in table.fields:
            if one.name in stream.names:
                yield one.field_id
                yield from list_field_ids(stream[one.name].dataType, one.field_type)
    if isinstance(stream, T.ArrayType) and isinstance(table, ListType):
        yield from list_field_ids(stream.elementType, table.element_type)
    if isinstance(stream, T.MapType) and isinstance(table, MapType):
        yield from list_field_ids(stream.keyType, table.key_type)
        yield from list_field_ids(stream.valueType, table.value_type)


def new_schema(stream: T.StructType) -> pa.Schema:
    """Return the schema of a new table: all fields may be null."""
    return pa.schema([pa.field(one.name, nullable_within(one.type)) for one in arrow_schema(stream)])


def find_null(rows: pa.Table | pa.RecordBatch, schema: Schema) -> tuple[str, int] | None:
    for one in schema.fields:
        position = rows.schema.get_field_index(one.name)
        if position < 0:
            continue
        column = rows.column(position)
        path = _null_path(column, one)
        if not path:
            continue
        # Only now, since most batches have none: the half with the null, until it is one row.
        first, size = 0, len(column)
        while size > 1:
            half = size // 2
            if _null_path(column.slice(first, half), one):
                size = half
            else:
                first, size = first + half, size - half
        return _null_path(column.slice(first, 1), one), first
    return None


def _null_path(column: Any, field: NestedField) -> str:
    if field.required and column.null_count:
        return field.name
    chunks: Iterable[pa.Array] = column.chunks if isinstance(column, pa.ChunkedArray) else (column,)
    inner = _INNER.get(type(field.field_type))
    found = (path for chunk in chunks if inner for path in inner(chunk.drop_null(), field.field_type))
    return next((f"{field.name}.{path}" for path in found), "")


def _nulls_in_struct(values: pa.Array, kind: Any) -> Iterator[str]:
    for one in kind.fields:
        position = values.type.get_field_index(one.name)
        if position >= 0 and (path := _null_path(values.flatten()[position], one)):
            yield path


def _nulls_in_list(values: pa.Array, kind: Any) -> Iterator[str]:
    if path := _null_path(values.flatten(), kind.element_field):
        yield path


def _nulls_in_map(values: pa.Array, kind: Any) -> Iterator[str]:
    # Those of the rows themselves: the children of a slice are whole.
    first, end = values.offsets[0].as_py(), values.offsets[-1].as_py()
    keys, items = (part.slice(first, end - first) for part in (values.keys, values.items))
    for part, field in ((keys, kind.key_field), (items, kind.value_field)):
        if path := _null_path(part, field):
            yield path


_INNER: dict[type[IcebergType], Callable[[pa.Array, Any], Iterator[str]]] = {
    StructType: _nulls_in_struct,
    ListType: _nulls_in_list,
    MapType: _nulls_in_map,
}


#: Types of Iceberg, and those of Spark that hold all their values.
_SPARK_TYPES: dict[type[IcebergType], T.DataType] = {
    BooleanType: T.BooleanType(),
    IntegerType: T.IntegerType(),
    LongType: T.LongType(),
    FloatType: T.FloatType(),
    DoubleType: T.DoubleType(),
    DateType: T.DateType(),
    TimestamptzType: T.TimestampType(),
    TimestampType: T.TimestampNTZType(),
    StringType: T.StringType(),
    BinaryType: T.BinaryType(),
}


def spark_schema(schema: Schema, table: str) -> T.StructType:
    return T.StructType([_spark_field(table, one.name, one) for one in schema.fields])


def _spark_field(table: str, path: str, field: NestedField) -> T.StructField:
    return T.StructField(field.name, _spark_type(table, path, field.field_type))


def _spark_type(table: str, path: str, kind: IcebergType) -> T.DataType:
    if isinstance(kind, StructType):
        return T.StructType([_spark_field(table, f"{path}.{one.name}", one) for one in kind.fields])
    if isinstance(kind, ListType):
        return T.ArrayType(_spark_type(table, f"{path}.element", kind.element_type))
    if isinstance(kind, MapType):
        key = _spark_type(table, f"{path}.key", kind.key_type)
        return T.MapType(key, _spark_type(table, f"{path}.value", kind.value_type))
    if isinstance(kind, DecimalType):
        return T.DecimalType(kind.precision, kind.scale)
    if type(kind) not in _SPARK_TYPES:
        raise ConfigError(
            f"the Iceberg table {table} cannot be read",
            why=f"its field {path} is {kind}, for which Spark has no type",
            what_to_do="read it with Spark and env.from_dataframe, or another table without this field",
        )
    return _SPARK_TYPES[type(kind)]
