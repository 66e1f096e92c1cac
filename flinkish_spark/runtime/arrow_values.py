"""Python values to Arrow columns, strictly: nothing is rounded, cut or converted silently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from flinkish_spark.runtime.kept_values import Changed, Check, check_of
from flinkish_spark.runtime.repeated_keys import first_repeated
from flinkish_spark.runtime.struct_values import Nested, nested_of


class ValueMismatch(ValueError):
    """A value does not fit the declared type; `value` is the first that does not."""

    def __init__(self, value: Any, kind: pa.DataType, reason: str) -> None:
        super().__init__(f"type {kind} cannot hold {value!r}: {reason}")
        self.value = value


_REFUSALS = (pa.ArrowException, TypeError, ValueError, OverflowError)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_number(kind: pa.DataType) -> bool:
    # What would be cut or does not fit is refused by a cast; pandas makes floats of integers with gaps.
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


_KINDS = (
    _is_text,
    _is_number,
    pa.types.is_boolean,
    pa.types.is_timestamp,
    pa.types.is_date,
    pa.types.is_duration,
    lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind),
)


def is_of_kind(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether a column may be cast to a declared type: both are text, numbers, and so on.

    Examples
    --------
    >>> is_of_kind(pa.int32(), pa.int64()), is_of_kind(pa.string(), pa.int64())
    (True, False)
    """
    if pa.types.is_dictionary(given):
        given = given.value_type
    if given == wanted or pa.types.is_null(given):
        return True
    if pa.types.is_map(given) and pa.types.is_map(wanted):
        return is_of_kind(given.key_type, wanted.key_type) and is_of_kind(given.item_type, wanted.item_type)
    if _is_list(given) and _is_list(wanted):
        return is_of_kind(given.value_type, wanted.value_type)
    if pa.types.is_struct(given) and pa.types.is_struct(wanted):
        return [field.name for field in given] == [field.name for field in wanted] and all(
            is_of_kind(one.type, other.type) for one, other in zip(given, wanted, strict=True)
        )
    return any(is_one(given) and is_one(wanted) for is_one in _KINDS)


def strict_array(column: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return `column` as an Arrow array of `kind`.

    Raises
    ------
    ValueMismatch
        A value does not fit. Arrow itself would cut 1.5 down to 1 for an integer column.
    """
    plain = _plain(column, kind) if pa.types.is_nested(kind) else column
    check = check_of(kind)
    if check is not None and (changed := check(plain)) is not None:
        raise _changed(column, plain, kind, check, changed)
    try:
        array = pa.array(plain, type=kind)
    except _REFUSALS as error:
        wrong = next((v for v in plain if not _fits(v, kind)), None)
        raise ValueMismatch(wrong, kind, str(error)) from error
    if (found := first_repeated(array)) is not None:
        at, key = found
        raise ValueMismatch(column[at], kind, f"a map has the key {key!r} twice there")
    return array


def _changed(
    column: Sequence[Any], plain: Sequence[Any], kind: pa.DataType, check: Check, changed: Changed
) -> ValueMismatch:
    if not pa.types.is_nested(kind):
        return ValueMismatch(changed.value, kind, changed.reason)
    # As it was given, so that whoever has the column finds its row.
    whole = next(given for given, one in zip(column, plain, strict=True) if check([one]) is not None)
    return ValueMismatch(whole, kind, f"{changed.value!r} in it: {changed.reason}")


def _plain(column: Sequence[Any], kind: pa.DataType) -> Sequence[Any]:
    """Return values with tuples in the places of structs."""
    nested = nested_of(kind)
    if nested is None or nested.is_plain(column):
        return column
    try:
        return nested.plain_all(column)
    except _REFUSALS:
        raise _first_refused(column, kind, nested) from None


def _first_refused(column: Sequence[Any], kind: pa.DataType, nested: Nested) -> ValueMismatch:
    for value in column:
        try:
            nested.plain_all([value])
        except _REFUSALS as error:
            return ValueMismatch(value, kind, str(error))
    raise AssertionError("a value was refused, and none is")


def _fits(value: Any, kind: pa.DataType) -> bool:
    try:
        pa.array([value], type=kind)
    except _REFUSALS:
        return False
    return True
