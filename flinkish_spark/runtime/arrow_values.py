"""Python values to Arrow columns, strictly: nothing is rounded, cut or converted silently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa


class ValueMismatch(ValueError):
    """A value does not fit the declared type; `value` is the first that does not."""

    def __init__(self, value: Any, kind: pa.DataType, reason: str) -> None:
        super().__init__(f"type {kind} cannot hold {value!r}: {reason}")
        self.value = value


_REFUSALS = (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError, OverflowError)


def strict_array(column: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return `column` as an Arrow array of `kind`.

    Raises
    ------
    ValueMismatch
        A value does not fit. Arrow itself would cut 1.5 down to 1 for an integer column.
    """
    if pa.types.is_integer(kind) and float in set(map(type, column)):
        wrong: Any = next(v for v in column if isinstance(v, float))
        raise ValueMismatch(wrong, kind, "it is a float")
    try:
        return pa.array(column, type=kind)
    except _REFUSALS as error:
        wrong = next((v for v in column if not _fits(v, kind)), None)
        raise ValueMismatch(wrong, kind, str(error)) from error


def _fits(value: Any, kind: pa.DataType) -> bool:
    try:
        pa.array([value], type=kind)
    except _REFUSALS:
        return False
    return True
