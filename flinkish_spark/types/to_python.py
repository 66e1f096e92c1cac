"""Conversion of Arrow columns to Python values, and copying of values that functions may change."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import decimal
import enum
import math
import uuid
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.core.iterators import guard_call
from flinkish_spark.types.arrow_columns import has_type

_FIRST_MICROS, _LAST_MICROS = (
    (one - datetime.datetime(1970, 1, 1)) // datetime.timedelta(microseconds=1)
    for one in (datetime.datetime.min, datetime.datetime.max)
)


def to_values(column: pa.Array) -> list[Any]:
    kind, nulls = column.type, column.null_count
    if pa.types.is_timestamp(kind):
        return _timestamps(column)
    if (pa.types.is_integer(kind) or pa.types.is_floating(kind)) and not nulls:
        numbers: list[Any] = column.to_numpy().tolist()
        return numbers
    if not has_type(kind, pa.types.is_map):
        listed: list[Any] = column.to_pylist()
        return listed
    make = next(make for is_of, make in _NESTED if is_of(kind))
    return _set_nulls(make(column), column) if nulls else make(column)


def _set_nulls(values: list[Any], column: pa.Array) -> list[Any]:
    for at in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
        values[at] = None
    return values


def _timestamps(column: pa.Array) -> list[Any]:
    zone = None if column.type.tz is None else datetime.UTC
    micros = column.cast(pa.timestamp("us")) if column.type.unit != "us" else column
    numbers = micros.cast(pa.int64()).fill_null(0).to_numpy()
    if len(numbers) and not _FIRST_MICROS <= numbers.min() <= numbers.max() <= _LAST_MICROS:
        # numpy would return a number instead of a datetime.
        wrong = numbers[(numbers < _FIRST_MICROS) | (numbers > _LAST_MICROS)][0]
        raise OverflowError(f"{wrong} microseconds since 1970 are beyond the years from 1 to 9999")
    plain = numbers.astype("datetime64[us]").tolist()
    values: list[Any] = plain if zone is None else [value.replace(tzinfo=zone) for value in plain]
    return _set_nulls(values, column) if column.null_count else values


def _lists(column: pa.ListArray) -> list[Any]:
    first, bounds = _bounds(column)
    elements = to_values(column.values.slice(first, bounds[-1]))
    return [elements[begin:end] for begin, end in pairwise(bounds)]


def to_lists_of_rows(column: pa.ListArray, make: Callable[[tuple[Any, ...]], Any]) -> list[Any]:
    """Return lists of structs with `make` of each struct's values; None for a null."""
    first, bounds = _bounds(column)
    structs = column.values.slice(first, bounds[-1])
    fields = [to_values(structs.field(at)) for at in range(structs.type.num_fields)]
    rows = _set_nulls(list(map(make, zip(*fields, strict=True))), structs)
    return _set_nulls([rows[begin:end] for begin, end in pairwise(bounds)], column)


def _maps(column: pa.MapArray) -> list[Any]:
    first, bounds = _bounds(column)
    keys, items = (to_values(part.slice(first, bounds[-1])) for part in (column.keys, column.items))
    if pa.types.is_floating(column.type.key_type):
        keys = _unify_nans(keys, bounds)
    found = [dict(zip(keys[a:b], items[a:b], strict=True)) for a, b in pairwise(bounds)]
    if sum(map(len, found)) < len(keys):
        # A map has a key twice: Arrow raises the error.
        column.to_pylist(maps_as_pydicts="strict")
    return found


def _unify_nans(keys: list[Any], bounds: list[int]) -> list[Any]:
    """Replace the last NaN key of each map by `math.nan`, so that it can be looked up."""
    places = [at for at, key in enumerate(keys) if key != key]
    for at, after in pairwise([*places, len(keys)]):
        if bisect_right(bounds, at) != bisect_right(bounds, after):
            keys[at] = math.nan
    return keys


def _structs(column: pa.StructArray) -> list[Any]:
    names = [field.name for field in column.type]
    fields = [to_values(column.field(at)) for at in range(len(names))]
    return [dict(zip(names, row, strict=True)) for row in zip(*fields, strict=True)]


def _bounds(column: Any) -> tuple[int, list[int]]:
    offsets = column.offsets.to_numpy()
    first = int(offsets[0])
    return first, (offsets - first).tolist()


# `to_pylist(maps_as_pydicts="strict")` gives the same, but PyArrow 26 creates an Arrow scalar for each value,
# which takes up to twenty times as long. So types with maps are converted here.
_NESTED: tuple[tuple[Callable[[pa.DataType], bool], Callable[[Any], list[Any]]], ...] = (
    (pa.types.is_list, _lists),
    (pa.types.is_large_list, _lists),
    (pa.types.is_map, _maps),
    (pa.types.is_struct, _structs),
)


# A function may change its arguments, and values that it has emitted or stored. So a value that goes to a
# second owner is copied: an element for each of its windows, a row for each of its pairs, an event for each
# condition and match. Immutable values are not copied.
Copier = Callable[[Any], Any]

#: Types with mutable values; a function may return a bytearray for BINARY.
_CHANGEABLE = (T.ArrayType, T.MapType, T.StructType, T.BinaryType)

_PLAIN: frozenset[type] = frozenset(
    {
        int, str, float, bool, bytes, type(None), complex, decimal.Decimal, uuid.UUID,
        datetime.datetime, datetime.date, datetime.time, datetime.timedelta,
    }
)  # fmt: skip


def copy_if_mutable(value: Any) -> Any:
    """Return a deep copy of a value; the value itself if nothing in it is mutable."""
    how = _COPIERS.get(type(value))
    if how is None:
        how = _COPIERS[type(value)] = _find_copier(type(value))
    return how(value)


def copier_of(fields: T.StructType) -> Copier:
    return _copy_unless_tuple if is_flat(fields) else copy_if_mutable


def is_flat(fields: T.StructType) -> bool:
    return not any(isinstance(one.dataType, _CHANGEABLE) for one in fields)


def copy_result(made: Any, *given: Any) -> Any:
    """Return a function's result, copied unless the result or its parts are those that it was given."""
    # What the function was given belongs to the result alone, so it is not copied.
    for one in given:
        if made is one:
            return made
    if not isinstance(made, tuple):
        return copy_if_mutable(made)
    own = {id(part) for one in given if isinstance(one, tuple) for part in one}
    return _replace_parts(made, [part if id(part) in own else copy_if_mutable(part) for part in made])


def _copy_unless_tuple(row: Any) -> Any:
    # A tuple of the declared types has only immutable values.
    return row if isinstance(row, tuple) else copy_if_mutable(row)


def _find_copier(kind: type) -> Copier:
    if kind in _PLAIN or issubclass(kind, (int, str, float, bytes, enum.Enum)):
        return as_it_is
    if issubclass(kind, tuple):
        return _tuple
    if kind is list:
        return lambda value: list(map(copy_if_mutable, value))
    if kind is dict:
        return lambda value: {key: copy_if_mutable(one) for key, one in value.items()}
    if not dataclasses.is_dataclass(kind):
        return _copy
    if _is_all_in_dict(kind):
        return _plain_instance
    # Runs the user's code if the class defines how it is copied, so a StopIteration must not end the caller's
    # loop.
    return guard_call(_instance)


def _is_all_in_dict(kind: type) -> bool:
    """Return if a class has only `__dict__` and Python's default way of copying."""
    own = ("__copy__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__", "__slots__")
    names = {name for base in kind.__mro__[:-1] for name in vars(base)}
    of_object = ("__reduce__", "__reduce_ex__", "__new__")
    return names.isdisjoint(own) and all(getattr(kind, one) is getattr(object, one) for one in of_object)


def _plain_instance(value: Any) -> Any:
    made = object.__new__(type(value))
    parts = made.__dict__
    parts.update(value.__dict__)
    if not _PLAIN.issuperset(map(type, parts.values())):
        for name, part in value.__dict__.items():
            parts[name] = copy_if_mutable(part)
    return made


def as_it_is(value: Any) -> Any:
    return value


def _tuple(value: Any) -> Any:
    if _PLAIN.issuperset(map(type, value)):
        return value
    return _replace_parts(value, list(map(copy_if_mutable, value)))


def _replace_parts(value: Any, parts: list[Any]) -> Any:
    kind = type(value)
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
        now = copy_if_mutable(before)
        if now is not before:
            # Also works for a frozen dataclass.
            object.__setattr__(made, field.name, now)
    return made


def _copy(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:
        # A value that cannot be copied is no valid row; writing it raises an error that names it.
        return value


_COPIERS: dict[type, Copier] = dict.fromkeys(_PLAIN, as_it_is)
