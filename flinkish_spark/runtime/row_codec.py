"""Rows between the JVM and a Python operator, exact in both directions.

pandas has no nulls for integers (they become floats and lose digits above 2**53), reads null
strings as NaN and turns NaN back into null. So a null travels as a bit: the JVM sends each
nullable column with a stand-in value and one bit per column in a mask, and a NaN that a function
emits goes back as a bit too. Timestamps and dates travel as integers.
"""

from __future__ import annotations

import datetime
import math
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.runtime.arrow_values import ValueMismatch, strict_array

#: Columns that one null mask covers; a bit is left for the sign.
MASK_BITS = 63

Convert = Callable[[pd.Series], list[Any]]


def _plain(series: pd.Series) -> list[Any]:
    values: list[Any] = series.tolist()
    return values


def _timestamps(series: pd.Series) -> list[Any]:
    utc = datetime.UTC
    naive = series.to_numpy(dtype=np.int64).astype("datetime64[us]").tolist()
    return [t.replace(tzinfo=utc) for t in naive]


def _dates(series: pd.Series) -> list[Any]:
    days: list[Any] = series.to_numpy(dtype=np.int64).astype("datetime64[D]").tolist()
    return days


def _nested(value: Any) -> Any:
    if isinstance(value, np.ndarray | list):
        return [_nested(v) for v in value]
    if isinstance(value, dict):
        return {k: _nested(v) for k, v in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, pd.Timestamp):
        return value.to_pydatetime()
    return value


def _others(series: pd.Series) -> list[Any]:
    return [_nested(v) for v in series]


def _converter(kind: T.DataType) -> Convert:
    if isinstance(kind, T.TimestampType):
        return _timestamps
    if isinstance(kind, T.DateType):
        return _dates
    if isinstance(kind, T.IntegralType | T.FractionalType | T.StringType | T.BooleanType | T.BinaryType):
        return _plain
    return _others


class RowReader:
    """Turns the pandas columns of one key group into records and keys.

    Parameters
    ----------
    schema
        The stream's own fields, in order.
    field_columns
        The transport column of each field.
    key_columns, key_types
        The transport columns of the key; a key that is a field has that field's column.
    mask_columns
        The null masks: of the fields' columns and then of the key's own, 63 to a mask.
    """

    def __init__(
        self,
        schema: T.StructType,
        field_columns: Sequence[str],
        key_columns: Sequence[str],
        key_types: Sequence[T.DataType],
        mask_columns: Sequence[str],
    ) -> None:
        kinds = dict(zip(field_columns, (f.dataType for f in schema), strict=True))
        kinds.update(zip(key_columns, key_types, strict=True))
        self._converters = {name: _converter(kind) for name, kind in kinds.items()}
        self._fields, self._keys, self._masks = list(field_columns), list(key_columns), list(mask_columns)
        record: Any = namedtuple("Record", list(schema.names), rename=True)  # type: ignore[misc]
        self._make = record._make

    def read(self, frame: pd.DataFrame) -> tuple[list[Any], Iterator[Any]]:
        """Return the keys (scalars for one column, else tuples) and the records, in row order."""
        columns = {name: convert(frame[name]) for name, convert in self._converters.items()}
        for index, name in enumerate(self._masks):
            mask = frame[name].to_numpy(dtype=np.int64)
            if mask.any():
                self._put_nulls(list(columns.values()), mask, index * MASK_BITS)
        keys = [columns[name] for name in self._keys]
        records = map(self._make, zip(*[columns[name] for name in self._fields], strict=True))
        return keys[0] if len(keys) == 1 else list(zip(*keys, strict=True)), records

    @staticmethod
    def _put_nulls(columns: list[list[Any]], mask: np.ndarray[Any, Any], first: int) -> None:
        for bit, column in enumerate(columns[first : first + MASK_BITS]):
            for row in np.nonzero(mask & (1 << bit))[0].tolist():
                column[row] = None


class OutputError(ValueError):
    """A function emitted a row that does not fit its declared output type."""


class RowWriter:
    """Turns what a function emitted into pandas columns, checking every value's type.

    Parameters
    ----------
    schema
        The declared output.
    arrow_types
        Its Arrow types, by field.
    """

    def __init__(self, schema: T.StructType, arrow_types: Sequence[pa.DataType]) -> None:
        self._names = schema.names
        self._types = list(arrow_types)
        self._floats = [i for i, t in enumerate(arrow_types) if pa.types.is_floating(t)]

    def write(self, rows: list[Any]) -> tuple[dict[str, Any], Any]:
        """Return the columns by name and the NaN mask of each row.

        Raises
        ------
        OutputError
            Wrong number of fields, or a value of another type; names field and value.
        """
        width = len(self._names)
        rows = [self._as_tuple(row) if not isinstance(row, tuple) else row for row in rows]
        if rows and set(map(len, rows)) != {width}:
            wrong = next(row for row in rows if len(row) != width)
            raise OutputError(f"emitted {len(wrong)} fields, declared are {width}: {', '.join(self._names)}")
        columns = list(zip(*rows, strict=True)) if rows else [()] * width
        nans = np.zeros(len(rows), dtype=np.int64)
        for bit, index in enumerate(self._floats):
            is_nan = [isinstance(v, float) and math.isnan(v) for v in columns[index]]
            nans |= np.array(is_nan, dtype=np.int64) << bit
        return {
            name: self._series(name, column, kind)
            for name, column, kind in zip(self._names, columns, self._types, strict=True)
        }, nans

    def _as_tuple(self, row: Any) -> tuple[Any, ...]:
        if isinstance(row, dict):
            strange = sorted(set(row) - set(self._names))
            if strange:
                raise OutputError(f"emitted the field {strange[0]!r}, declared are {', '.join(self._names)}")
            return tuple(row.get(name) for name in self._names)
        if isinstance(row, list):
            return tuple(row)
        raise OutputError(f"emitted a {type(row).__name__}; emit a tuple, Row or dict per output row")

    def _series(self, name: str, column: Sequence[Any], kind: pa.DataType) -> Any:
        try:
            array = strict_array(column, kind)
        except ValueMismatch as error:
            raise OutputError(f"emitted a wrong value: field {name!r} of {error}") from error
        if pa.types.is_nested(kind):
            return pd.Series(list(column), dtype=object)
        return array.to_pandas(integer_object_nulls=True)
