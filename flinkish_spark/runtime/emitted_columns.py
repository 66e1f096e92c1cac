"""What vectorised functions emit, as columns of their declared types: batches, or frames of pandas."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.runtime.arrow_rows import OutputError
from flinkish_spark.runtime.arrow_values import ValueMismatch, is_of_kind, strict_array

_REFUSALS = (pa.ArrowException, TypeError, ValueError, OverflowError)


def batch_of(frame: pd.DataFrame, kinds: Mapping[str, pa.DataType]) -> pa.RecordBatch:
    """Return a frame's columns as a batch; its index is none of them. NaN, NaT and None are null.

    Parameters
    ----------
    kinds
        Declared types by name. A column whose name is not among them has the type that Arrow gives it.

    Raises
    ------
    OutputError
        A column has values of another type, or a name is there twice.
    """
    names = [str(name) for name in frame.columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise OutputError(f"emitted a frame with the column {twice[0]!r} twice")
    lost = [name for name in kinds if name not in names and name in frame.index.names]
    if lost:
        raise OutputError(f"emitted a frame with {lost[0]!r} in its index; call reset_index()")
    columns = [_column(name, frame.iloc[:, at], kinds.get(name)) for at, name in enumerate(names)]
    return pa.RecordBatch.from_arrays(columns, names=names)


def _column(name: str, series: pd.Series, kind: pa.DataType | None) -> pa.Array:
    is_null = series.isna().to_numpy(dtype=bool)
    if is_null.all():
        # Such a column, and one without rows, has any type in pandas.
        return pa.nulls(len(series), pa.int64() if kind is None else kind)
    try:
        if kind is not None and series.dtype == object:
            values = series.tolist()
            for at in np.flatnonzero(is_null).tolist():
                values[at] = None
            return strict_array(values, kind)
        made = pa.Array.from_pandas(series)
        column = made.combine_chunks() if isinstance(made, pa.ChunkedArray) else made
        # Whole numbers with gaps are floats in pandas.
        is_gappy = kind is None and pa.types.is_floating(column.type) and column.null_count
        return column.cast(pa.int64()) if is_gappy else column
    except ValueMismatch as error:
        raise OutputError(f"emitted a wrong value: field {name!r} of {error}") from error
    except _REFUSALS as error:
        raise OutputError(f"emitted a wrong column: field {name!r}: {error}") from error


def event_times(given: dict[str, pa.Array], name: str | None, count: int) -> pa.Array:
    """Return the event times of rows; null where they have none."""
    column = None if name is None else given.get(name)
    if column is None:
        return pa.nulls(count, pa.int64())
    if pa.types.is_timestamp(column.type):
        micros = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
        is_null = column.is_null().to_numpy(zero_copy_only=False)
        return pa.array(micros.fill_null(0).to_numpy() // 1000, mask=is_null)
    if not pa.types.is_integer(column.type):
        raise OutputError(f"emitted a wrong event time: {name!r} is {column.type}, not LONG or TIMESTAMP")
    return column.cast(pa.int64())


def declared_column(field: T.StructField, column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column with its declared type: another width of the same, never a number out of text.

    Raises
    ------
    OutputError
        It is of another type, or has a null where there must be none.
    """
    wrong = f"emitted a wrong column: field {field.name!r}"
    if not is_of_kind(column.type, kind):
        raise OutputError(f"{wrong} has the type {column.type}, declared is {kind}")
    _refuse_nulls(field, column, field.name)
    try:
        return column if column.type == kind else column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise OutputError(f"{wrong}: {error}") from error


def _refuse_nulls(field: T.StructField, column: pa.Array, path: str) -> None:
    """Raise OutputError for a null in a field that must have none, at any depth."""
    if not field.nullable and column.null_count:
        at = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        where = f" (row {at} of the batch)" if path == field.name else ""
        raise OutputError(f"emitted a wrong value: field {path!r} is None and must not be null{where}")
    if _has_required(field.dataType) and not pa.types.is_null(column.type):
        _refuse_nulls_within(field.dataType, column, path)


def _refuse_nulls_within(kind: T.DataType, column: pa.Array, path: str) -> None:
    # What is taken begins at 0, and has none of the values below a null.
    there = column.take(pa.array(np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))))
    match kind:
        case T.StructType():
            for at, field in enumerate(kind):
                _refuse_nulls(field, pc.struct_field(there, [at]), f"{path}.{field.name}")
        case T.ArrayType():
            _refuse_nulls_within(kind.elementType, there.flatten(), f"{path}.element")
        case T.MapType():
            _refuse_nulls_within(kind.valueType, there.items, f"{path}.value")


def _has_required(kind: T.DataType) -> bool:
    """Whether a type has a field somewhere that must not be null."""
    match kind:
        case T.StructType():
            return any(not field.nullable or _has_required(field.dataType) for field in kind)
        case T.ArrayType():
            return _has_required(kind.elementType)
        case T.MapType():
            return _has_required(kind.valueType)
    return False
