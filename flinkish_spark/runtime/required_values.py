"""Nulls where a declared type says that there are none, at any depth of a column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Missing:
    """A null that must not be.

    Parameters
    ----------
    path
        The way to it: names of fields, `element` of a list, `value` of a map.
    row
        Of the column.
    """

    path: str
    row: int

    def __str__(self) -> str:
        return f"field {self.path!r} is None and must not be null"


def first_missing(field: T.StructField, column: pa.Array) -> Missing | None:
    """Return a null of a field that must have none, or of a part of it; None if there is none.

    Examples
    --------
    >>> place = T.StructField("place", T.StructType([T.StructField("x", T.LongType(), nullable=False)]))
    >>> first_missing(place, pa.array([None, {"x": 1}, {"x": None}]))
    Missing(path='place.x', row=2)
    """
    if field.nullable and not has_required(field.dataType):
        return None
    return _missing(field.dataType, column, np.arange(len(column)), field.name, may_be_null=field.nullable)


def has_required(kind: T.DataType) -> bool:
    """Return whether a type has a part somewhere that must not be null."""
    match kind:
        case T.StructType():
            return any(not field.nullable or has_required(field.dataType) for field in kind)
        case T.ArrayType():
            return not kind.containsNull or has_required(kind.elementType)
        case T.MapType():
            return not kind.valueContainsNull or has_required(kind.valueType)
    return False


def _missing(
    kind: T.DataType, column: pa.Array, rows: Array, path: str, *, may_be_null: bool
) -> Missing | None:
    """Return the first null; `rows` says which row of the whole each value is in."""
    there = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    if not may_be_null and len(there) < len(column):
        gap = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        return Missing(path, int(rows[gap]))
    if not has_required(kind) or pa.types.is_null(column.type):
        return None
    # What is taken begins at 0, and has none of the values below a null.
    column, rows = column.take(pa.array(there)), rows[there]
    match kind:
        case T.StructType():
            parts = enumerate(kind)
            found = (
                _missing(
                    field.dataType,
                    pc.struct_field(column, [at]),
                    rows,
                    f"{path}.{field.name}",
                    may_be_null=field.nullable,
                )
                for at, field in parts
            )
            return next((one for one in found if one is not None), None)
        case T.ArrayType():
            inner = np.repeat(rows, pc.list_value_length(column).to_numpy(zero_copy_only=False))
            elements = column.flatten()
            return _missing(
                kind.elementType, elements, inner, f"{path}.element", may_be_null=kind.containsNull
            )
        case T.MapType():
            inner = np.repeat(rows, np.diff(column.offsets.to_numpy()))
            return _missing(
                kind.valueType, column.items, inner, f"{path}.value", may_be_null=kind.valueContainsNull
            )
    raise AssertionError(f"{kind} has no parts")
