"""Casts of Arrow columns to declared types that keep each value or refuse it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.types.arrow_columns import find_gaps, has_type
from flinkish_spark.types.to_arrow import BEYOND_FLOAT

_IsKind = Callable[[pa.DataType], bool]


def _any_of(*names: str) -> _IsKind:
    tests = [getattr(pa.types, f"is_{name}") for name in names]
    return lambda kind: any(test(kind) for test in tests)


_is_integer, _is_float, _is_decimal = _any_of("integer"), _any_of("floating"), _any_of("decimal")
_is_text = _any_of("string", "large_string", "string_view")
_is_bytes = _any_of("binary", "large_binary", "binary_view", "fixed_size_binary")
_is_list = _any_of("list", "large_list", "fixed_size_list", "list_view", "large_list_view")

#: Declared types, and the types that may be cast to them. Arrow casts far more: it rounds floats to DECIMAL
#: and decimals to DOUBLE, and casts numbers to texts and times to numbers.
_EXACT: tuple[tuple[_IsKind, tuple[_IsKind, ...]], ...] = (
    # In pandas, integers with nulls are floats.
    (_is_integer, (_is_integer, _is_float, _is_decimal)),
    (_is_float, (_is_integer, _is_float)),
    (_is_decimal, (_is_integer, _is_decimal)),
    (_any_of("boolean"), (_any_of("boolean"),)),
    # Arrow checks that bytes are UTF-8.
    (_is_text, (_is_text, _is_bytes)),
    (_is_bytes, (_is_bytes,)),
    (_any_of("date"), (_any_of("date"),)),
    (_any_of("duration"), (_any_of("duration"),)),
    (_any_of("time64"), (_any_of("time"),)),
)


def is_of_kind(
    given: pa.DataType, wanted: pa.DataType, *, may_have_more: bool = False, may_lack: bool = False
) -> bool:
    """Return if a cast to a declared type is known to keep each value or to refuse it."""
    within = functools.partial(is_of_kind, may_have_more=may_have_more, may_lack=may_lack)
    if pa.types.is_dictionary(given):
        given = given.value_type
    if given == wanted or pa.types.is_null(given):
        return True
    if pa.types.is_struct(given) and pa.types.is_struct(wanted):
        own, declared = [field.name for field in given], [field.name for field in wanted]
        if not may_have_more and not set(own) <= set(declared):
            return False
        missing = [name for name in declared if own.count(name) != 1]
        if missing and (not may_lack or {name.lower() for name in missing} & {name.lower() for name in own}):
            return False
        there = [field for field in wanted if field.name in own]
        return all(within(given.field(field.name).type, field.type) for field in there)
    if pa.types.is_map(given) and pa.types.is_map(wanted):
        return within(given.key_type, wanted.key_type) and within(given.item_type, wanted.item_type)
    if _is_list(given) and _is_list(wanted):
        return within(given.value_type, wanted.value_type)
    if pa.types.is_timestamp(given) and pa.types.is_timestamp(wanted):
        # A time without a zone may become one in UTC, but a time with a zone would lose it.
        return given.tz is None or wanted.tz is not None
    known = next((sources for is_one, sources in _EXACT if is_one(wanted)), ())
    return any(is_source(given) for is_source in known)


def exact_cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast a column to another type of its kind; see :func:`is_of_kind`."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.type == kind and not has_type(kind, pa.types.is_time64):
        return column
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), kind)
    if pa.types.is_struct(kind):
        parts = dict(zip([field.name for field in column.type], column.flatten(), strict=True))
        nothing = pa.nulls(len(column))
        own = [exact_cast(parts.get(field.name, nothing), field.type) for field in kind]
        return pa.StructArray.from_arrays(own, fields=list(kind), mask=column.is_null())
    if pa.types.is_map(kind):
        offsets, (keys, items) = _flat(column, lambda there: (there.keys, there.items))
        keys, items = exact_cast(keys, kind.key_type), exact_cast(items, kind.item_type)
        return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=find_gaps(column))
    if _is_list(kind):
        lists = column.cast(pa.list_(column.type.value_field))
        offsets, (values,) = _flat(lists, lambda there: (there.values,))
        return type(pa.array([], kind)).from_arrays(
            offsets, exact_cast(values, kind.value_type), type=kind, mask=find_gaps(column)
        )
    return _cast_plain(column, kind)


def _flat(column: pa.Array, parts: Callable[[Any], Sequence[pa.Array]]) -> tuple[pa.Array, list[pa.Array]]:
    """Return the offsets and values of lists or maps, without values below a null."""
    there = column.drop_null()
    bounds = there.offsets.to_numpy()
    counts = np.zeros(len(column), np.int64)
    counts[column.is_valid().to_numpy(zero_copy_only=False)] = np.diff(bounds)
    first, length = int(bounds[0]), int(bounds[-1] - bounds[0])
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    return offsets, [part.slice(first, length) for part in parts(there)]


#: By bits of a float: all whole numbers below this are exact.
_WHOLE_UP_TO = {16: 1 << 11, 32: 1 << 24, 64: 1 << 53}
#: Digits of the greatest whole number of 64 bits.
_MOST_DIGITS = 20
#: TIME has microseconds, Arrow's type for it nanoseconds.
_NANOS_PER_MICRO = 1_000


def _cast_plain(column: pa.Array, kind: pa.DataType) -> pa.Array:
    given = column.type
    if _is_float(given) and _is_integer(kind):
        numbers = np.abs(column.drop_null().to_numpy(zero_copy_only=False))
        if (numbers >= _WHOLE_UP_TO[given.bit_width]).any():
            raise pa.ArrowInvalid("it is a float so great that it may stand for several whole numbers")
    if _is_integer(given) and _is_decimal(kind):
        # Arrow casts integers only if the greatest value of their type fits.
        column = column.cast(pa.decimal256(_MOST_DIGITS + kind.scale, kind.scale))
    made = column.cast(kind)
    # Arrow's cast refuses values that are cut or do not fit, except in these cases.
    if given == pa.float64() and kind == pa.float32() and _infinite(made) > _infinite(column):
        raise pa.ArrowInvalid(BEYOND_FLOAT)
    if pa.types.is_time64(kind) and (np.asarray(made.drop_null().cast(pa.int64())) % _NANOS_PER_MICRO).any():
        raise pa.ArrowInvalid("a TIME has no nanoseconds")
    return made


def _infinite(column: pa.Array) -> int:
    return int(pc.sum(pc.is_inf(column)).as_py() or 0)
