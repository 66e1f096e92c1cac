"""Records of a source as Arrow batches of its declared types."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.transport import columns as C
from flinkish_spark.types.arrow_types import arrow_schema
from flinkish_spark.types.rows import OutputError, RowWriter
from flinkish_spark.types.to_arrow import first_missing, has_required

PLACE = (T.StructField(C.CHANNEL, T.LongType()), T.StructField(C.SEQUENCE, T.LongType()))

#: Not None: if a source yields None by mistake, the piece must not end there.
NO_MORE: Any = object()
#: Rows of one batch.
_HELD_ROWS = 1024


class PieceRows:
    """Converts a source's rows or batches of one piece to Arrow batches with channel and sequence."""

    # Spark's own conversion of rows cuts 1.5 to 1, makes a text of any value, and its errors name neither
    # field nor source.
    def __init__(self, fields: T.StructType, channel: int, place: int) -> None:
        self._writer, self._types = RowWriter.of(fields), T.StructType([*fields, *PLACE])
        self._required = [field for field in fields if not field.nullable or has_required(field.dataType)]
        self._channel, self._place = channel, place
        self._held: list[Any] = []

    def of(self, one: Any) -> list[pa.RecordBatch]:
        """Take a record, a batch, or the end marker; return the batches that are complete."""
        if isinstance(one, pa.RecordBatch):
            before, made = self._flush(), self._add_control_columns(one)
            # For rows the row writer checks this.
            for batch, required in itertools.product(made, self._required):
                if missing := first_missing(required, batch.column(required.name)):
                    raise ValueError(f"it yielded a wrong value: {missing}, in row {missing.row} of a batch")
            return [*before, *made]
        if one is NO_MORE:
            return self._flush()
        self._held.append(one)
        return self._flush() if len(self._held) == _HELD_ROWS else []

    def _flush(self) -> list[pa.RecordBatch]:
        held, self._held = self._held, []
        if not held:
            return []
        try:
            columns = self._writer.write(held)
        except OutputError as error:
            raise ValueError(f"it {str(error).replace('emitted', 'yielded', 1)}") from None
        return self._add_control_columns(
            pa.RecordBatch.from_arrays(columns, names=self._types.names[: -len(PLACE)])
        )

    def _add_control_columns(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Return a batch cast to the schema's types, followed by the control columns."""
        first, self._place = self._place, self._place + batch.num_rows
        if not batch.num_rows:
            return []
        schema = arrow_schema(self._types)
        own = [cast_to_field(batch.column(one.name), one) for one in list(schema)[: -len(PLACE)]]
        channel = np.full(batch.num_rows, self._channel, np.int64)
        control = [channel, np.arange(first, self._place, dtype=np.int64)]
        return [pa.RecordBatch.from_arrays([*own, *map(pa.array, control)], schema=schema)]


def cast_to_field(column: pa.Array, field: pa.Field) -> pa.Array:
    from flinkish_spark.types.exact_columns import exact_cast, is_of_kind

    # Only widths may change. Arrow's own cast would also make numbers of texts, times or texts of numbers,
    # and true of 2. Structs may have more fields than declared, as the batch may.
    if not is_of_kind(column.type, field.type, may_have_more=True):
        there = column.drop_null()
        value = f": {there[0].as_py()!r:.200}" if len(there) else ""
        missing = _missing_field(column.type, field.type, field.name)
        why = f"has no field {missing!r} (names are case-sensitive)" if missing else f"is {column.type}"
        raise ValueError(f"the column {field.name!r} {why}, but the declared type is {field.type}{value}")
    try:
        return exact_cast(column, field.type)
    except pa.ArrowException as error:
        raise ValueError(f"the column {field.name!r} does not fit {field.type}: {error}") from error


def _missing_field(given: pa.DataType, wanted: pa.DataType, path: str) -> str | None:
    if pa.types.is_struct(given) and pa.types.is_struct(wanted):
        names = [field.name for field in given]
        for field in wanted:
            within = f"{path}.{field.name}"
            if field.name not in names:
                return within
            found = names.count(field.name) == 1 and _missing_field(
                given.field(field.name).type, field.type, within
            )
            if found:
                return found
        return None
    if pa.types.is_map(given) and pa.types.is_map(wanted):
        keys = _missing_field(given.key_type, wanted.key_type, f"{path}.key")
        return keys or _missing_field(given.item_type, wanted.item_type, f"{path}.value")
    if pa.types.is_list(wanted) and given.num_fields == 1:
        return _missing_field(given.field(0).type, wanted.value_type, f"{path}.element")
    return None
