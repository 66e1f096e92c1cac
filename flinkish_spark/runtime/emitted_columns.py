"""What vectorised functions emit, as columns of their declared types: batches, or frames of pandas."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.runtime.arrow_rows import OutputError
from flinkish_spark.runtime.arrow_values import ValueMismatch, is_of_kind, strict_array
from flinkish_spark.runtime.required_values import first_missing
from flinkish_spark.runtime.silent_changes import exact_cast

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
        made = _from_pandas(series)
        # Whole numbers with gaps are floats in pandas.
        is_gappy = kind is None and pa.types.is_floating(made.type) and made.null_count
        return made.cast(pa.int64()) if is_gappy else made
    except ValueMismatch as error:
        wrong = next((at for at, value in enumerate(values) if value is error.value), None)
        raise OutputError(f"emitted a wrong value: field {name!r} of {error}", wrong) from error
    except _REFUSALS as error:
        wrong = first_refused(len(series), lambda count: _from_pandas(series.iloc[:count]))
        value = f" of {series.iloc[wrong]!r:.200}" if wrong is not None else ""
        raise OutputError(f"emitted a wrong column: field {name!r}{value}: {error}", wrong) from error


def _from_pandas(series: pd.Series) -> pa.Array:
    made = pa.Array.from_pandas(series)
    return made.combine_chunks() if isinstance(made, pa.ChunkedArray) else made


def first_refused(count: int, make: Callable[[int], object]) -> int | None:
    """Return the first row that is refused when the rows up to it are converted; None if none is.

    Parameters
    ----------
    make
        Converts as many rows from the beginning, or raises.
    """
    fits, fails = 0, count + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        try:
            make(middle)
            fits = middle
        except _REFUSALS:
            fails = middle
    return fails - 1 if fails <= count else None


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
        says = f"emitted a wrong event time: {name!r} is {column.type}, not LONG or TIMESTAMP"
        raise OutputError(says + first_of(column), first_valid(column))
    return column.cast(pa.int64())


def declared_column(field: T.StructField, column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column with its declared type: another width of the same, never a number out of text.

    Raises
    ------
    OutputError
        It is of another type, or has a null where there must be none; says in which row.
    """
    wrong = f"emitted a wrong column: field {field.name!r}"
    if not is_of_kind(column.type, kind):
        says = f"{wrong} has the type {column.type}, declared is {kind}"
        raise OutputError(says + first_of(column), first_valid(column))
    missing = first_missing(field, column)
    if missing is not None:
        raise OutputError(f"emitted a wrong value: {missing}", missing.row)
    try:
        return column if column.type == kind else exact_cast(column, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        at = first_refused(len(column), lambda count: exact_cast(column.slice(0, count), kind))
        value = f" of {column[at].as_py()!r:.200}" if at is not None else ""
        raise OutputError(f"{wrong}{value}: {error}", at) from error


def first_valid(column: pa.Array) -> int | None:
    """Return the first row that is not null."""
    there = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    return int(there[0]) if len(there) else None


def first_of(column: pa.Array) -> str:
    """Return how the first value that is not null is shown behind an error; nothing if all are."""
    at = first_valid(column)
    return "" if at is None else f": {column[at].as_py()!r:.200}"
