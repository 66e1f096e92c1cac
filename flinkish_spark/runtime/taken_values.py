"""Rows as they are when a function emits them, whatever becomes of their objects behind that.

Rows are written when all calls of a key group, or of a batch, are done. A function that goes on with what it
has emitted (an accumulator, a list in a state, a dict that it fills again) would change rows that are out. In
Flink they are copied or serialised on the way to the next operator.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import decimal
import enum
import uuid
from collections.abc import Callable
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.user_iterators import called

Take = Callable[[Any], Any]

_PLAIN: frozenset[type] = frozenset(
    {
        int, str, float, bool, bytes, type(None), complex, decimal.Decimal, uuid.UUID,
        datetime.datetime, datetime.date, datetime.time, datetime.timedelta,
    }
)  # fmt: skip


def taken(value: Any) -> Any:
    """Return a value that does not change with this one; it is the same object if nothing in it can change.

    Examples
    --------
    >>> row = ("ann", [1, 2])
    >>> out = taken(row)
    >>> row[1].append(3)
    >>> out
    ('ann', [1, 2])
    """
    how = _HOW.get(type(value))
    if how is None:
        how = _HOW[type(value)] = _how_to_take(type(value))
    return how(value)


def taking(fields: T.StructType) -> Take:
    """Return what takes rows with these fields, as fast as it can be."""
    return _flat_taken if is_flat(fields) else taken


def is_flat(fields: T.StructType) -> bool:
    """Return whether nothing in rows with these fields can change."""
    return not any(isinstance(one.dataType, T.ArrayType | T.MapType | T.StructType) for one in fields)


def _flat_taken(row: Any) -> Any:
    # Nothing in it can change, if it is as it was declared.
    return row if isinstance(row, tuple) else taken(row)


def _how_to_take(kind: type) -> Take:
    if kind in _PLAIN or issubclass(kind, (int, str, float, bytes, enum.Enum)):
        return _same
    if issubclass(kind, tuple):
        return _tuple
    if kind is list:
        return lambda value: list(map(taken, value))
    if kind is dict:
        return lambda value: {key: taken(one) for key, one in value.items()}
    # Copied by code of the user's, where the class has it; what takes rows goes through many at once.
    return called(_instance) if dataclasses.is_dataclass(kind) else _copy


def _same(value: Any) -> Any:
    return value


def _tuple(value: Any) -> Any:
    if _PLAIN.issuperset(map(type, value)):
        return value
    kind, parts = type(value), list(map(taken, value))
    if all(one is other for one, other in zip(parts, value, strict=True)):
        return value
    if kind is tuple:
        return tuple(parts)
    make = getattr(kind, "_make", None)
    return _copy(value) if make is None else make(parts)


def _instance(value: Any) -> Any:
    made = copy.copy(value)
    for field in dataclasses.fields(value):
        before = getattr(value, field.name, None)
        now = taken(before)
        if now is not before:
            # A frozen one lets nobody else do it.
            object.__setattr__(made, field.name, now)
    return made


def _copy(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:
        # What cannot be copied is no row; whoever writes it says so, and names it.
        return value


_HOW: dict[type, Take] = dict.fromkeys(_PLAIN, _same)
