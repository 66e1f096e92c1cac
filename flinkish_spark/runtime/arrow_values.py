"""Python values to Arrow columns, strictly: nothing is rounded, cut or converted silently."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from flinkish_spark.runtime.silent_changes import BEYOND_FLOAT, NO_LIST, is_beyond_float, texts_as_lists
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
    given = column
    if pa.types.is_integer(kind) and float in set(map(type, column)):
        wrong: Any = next(v for v in column if isinstance(v, float))
        raise ValueMismatch(wrong, kind, "it is a float")
    if pa.types.is_temporal(kind):
        _check_times(column, kind)
    if pa.types.is_nested(kind):
        column = _plain(column, kind)
        _refuse_texts(column, kind, given)
    try:
        made = pa.array(column, type=kind)
    except _REFUSALS as error:
        wrong = next((v for v in column if not _fits(v, kind)), None)
        raise ValueMismatch(wrong, kind, str(error)) from error
    if is_beyond_float(column, made):
        at = next(at for at, v in enumerate(column) if is_beyond_float([v], pa.array([v], type=kind)))
        raise ValueMismatch(given[at], kind, BEYOND_FLOAT)
    return made


def _check_times(column: Sequence[Any], kind: pa.DataType) -> None:
    """Refuse what Arrow would take for another time than Spark does, or than was meant."""
    if any(issubclass(one, numbers.Number) for one in set(map(type, column))):
        # It would be microseconds, or days; what people have at hand is seconds or milliseconds.
        wrong: Any = next(value for value in column if isinstance(value, numbers.Number))
        raise ValueMismatch(wrong, kind, "it is a number, and no time")
    if pa.types.is_timestamp(kind) and kind.tz is None:
        for value in column:
            if getattr(value, "tzinfo", None) is not None:
                reason = "it has a time zone: take it away with replace(tzinfo=None), or declare TIMESTAMP"
                raise ValueMismatch(value, kind, reason)


def _refuse_texts(column: Sequence[Any], kind: pa.DataType, given: Sequence[Any]) -> None:
    """Refuse texts in the places of lists, at any depth; other wrong values are left to Arrow.

    Parameters
    ----------
    column, given
        The values with tuples for structs, and as they were.
    """
    has_text = texts_as_lists(kind)
    if has_text is None:
        return
    try:
        if not has_text(column):
            return
        at = next(at for at, value in enumerate(column) if has_text([value]))
    except (TypeError, LookupError, ValueError):
        return
    raise ValueMismatch(given[at], kind, NO_LIST)


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
