"""Values of one type in the form in which they come back from what is stored.

A FLOAT rounds, a TIMESTAMP without a zone is in UTC, a DATE has no time of day. A state that handed out a
value as it was put would hand out another one in the next micro-batch; no function knows when that begins.
"""

from __future__ import annotations

import datetime
import decimal
import math
import struct
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from flinkish_spark.runtime.arrow_values import ValueMismatch, strict_array
from flinkish_spark.runtime.python_values import to_values

#: From a value to what will be read; None: that is not for a short way to say.
Quick = Callable[[Any], Any]

_SINGLE = struct.Struct("<f")


def quick_of(kind: T.DataType) -> Quick | None:
    """Return the short way for the commonest values of a type; None if there is none.

    Examples
    --------
    >>> quick_of(T.FloatType())(0.1), quick_of(T.FloatType())("0.1"), quick_of(T.LongType())
    (0.10000000149011612, None, None)
    """
    return _decimal_of(kind.scale) if isinstance(kind, T.DecimalType) else _QUICK.get(type(kind))


class StoredForm:
    """Makes of a value what will be read of it; leaves what is refused where it is stored as it is.

    Parameters
    ----------
    kind
        Declared type.

    Examples
    --------
    >>> kept = StoredForm(T.TimestampType())
    >>> kept(datetime.datetime(2024, 5, 6)), kept("today"), kept(None)
    (datetime.datetime(2024, 5, 6, 0, 0, tzinfo=datetime.timezone.utc), 'today', None)
    """

    __slots__ = ("_arrow", "_quick", "kind")

    def __init__(self, kind: T.DataType) -> None:
        #: The class of values that are read.
        self.kind: Any = next(own for one, own in _CHANGING.items() if isinstance(kind, one))
        self._quick = _QUICK[type(kind)]
        self._arrow: pa.DataType = to_arrow_type(kind, timezone="UTC")

    def __call__(self, value: Any) -> Any:
        """Return what will be read of a value."""
        found = self._quick(value)
        if found is not None or value is None:
            return found
        try:
            return to_values(strict_array([value], self._arrow))[0]
        except (ValueMismatch, pa.ArrowException, TypeError, ValueError, OverflowError):
            # Said there with operator, field and key.
            return value


def changes(kind: T.DataType) -> bool:
    """Return whether a type makes another value of one that Python has for it.

    Others may be of another class there and are equal: 1 in a DOUBLE, a decimal of fewer digits.
    """
    return isinstance(kind, tuple(_CHANGING))


def _double(value: Any) -> float | None:
    if type(value) is not float:
        return None
    # NaN is one key, as in Spark and Java: this object, which readers put in the place of others.
    return value if value == value else math.nan


def _float(value: Any) -> float | None:
    if type(value) is not float:
        return None
    try:
        single: float = _SINGLE.unpack(_SINGLE.pack(value))[0]
    except OverflowError:
        # Said in full by who comes next.
        return None
    return single if single == single else math.nan


def _utc(value: Any) -> datetime.datetime | None:
    if type(value) is not datetime.datetime:
        return None
    if value.tzinfo is None:
        return value.replace(tzinfo=datetime.UTC, fold=0)
    return value if value.tzinfo is datetime.UTC else None


def _local(value: Any) -> datetime.datetime | None:
    return value if type(value) is datetime.datetime and value.tzinfo is None and not value.fold else None


def _date(value: Any) -> datetime.date | None:
    if type(value) is datetime.date:
        return value
    return value.date() if type(value) is datetime.datetime else None


def _decimal_of(scale: int) -> Quick:
    def decimal_of(value: Any) -> decimal.Decimal | None:
        if type(value) is not decimal.Decimal:
            return None
        # Equal to what is read, which may have more zeros.
        exponent = value.as_tuple().exponent
        return value if isinstance(exponent, int) and exponent >= -scale else None

    return decimal_of


_QUICK: dict[type[T.DataType], Quick] = {
    T.DoubleType: _double,
    T.FloatType: _float,
    T.TimestampType: _utc,
    T.TimestampNTZType: _local,
    T.DateType: _date,
}
_CHANGING: dict[type[T.DataType], type] = {
    T.FloatType: float,
    T.TimestampType: datetime.datetime,
    T.DateType: datetime.date,
}
