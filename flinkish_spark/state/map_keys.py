"""Keys of map states in the form in which they come back from what is stored.

A FLOAT rounds, a TIMESTAMP without a zone is in UTC, bytes become text. A map that had a key as it was put
would have another one in the next micro-batch, and soon both. So what is put and what is looked for is
brought into that form first. Most keys are of the one type whose values are what they will be; looking at
that costs less than a call.
"""

from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from flinkish_spark.errors import SchemaError
from flinkish_spark.runtime.arrow_values import ValueMismatch, strict_array
from flinkish_spark.runtime.ddl import parse_ddl
from flinkish_spark.runtime.python_values import to_values
from flinkish_spark.state.stored_forms import quick_of

#: Types of Python's of which each value is what it will be; one that the declared type is too narrow for is
#: refused where it is stored.
_KEPT: tuple[tuple[tuple[type[T.DataType], ...], type], ...] = (
    ((T.ByteType, T.ShortType, T.IntegerType, T.LongType), int),
    ((T.StringType,), str),
    ((T.BinaryType,), bytes),
    ((T.BooleanType,), bool),
    ((T.DateType,), datetime.date),
    ((T.DayTimeIntervalType,), datetime.timedelta),
)


class MapKeys:
    """What a map state makes of the keys that it is given.

    Parameters
    ----------
    owner
        Whose state it is, for errors: ``operator 'totals'``.
    state
        Name of the state.
    ddl
        Declared type of its keys.

    Examples
    --------
    >>> keys = MapKeys("operator 'totals'", "prices", "FLOAT")
    >>> keys.put(0.5), keys.put(0.1)
    (0.5, 0.10000000149011612)
    """

    __slots__ = ("_arrow", "_ddl", "_owner", "_quick", "_state", "kept")

    def __init__(self, owner: str, state: str, ddl: str) -> None:
        kind = parse_ddl(ddl)
        self._owner, self._state, self._ddl = owner, state, ddl
        self._arrow: pa.DataType = to_arrow_type(kind, timezone="UTC")
        #: The type of which each value stays what it is; whoever meets another one calls `put` or `sought`.
        self.kept: type | None = next((own for kinds, own in _KEPT if isinstance(kind, kinds)), None)
        self._quick = quick_of(kind)

    def put(self, key: Any) -> Any:
        """Return a key as it will be read again.

        Raises
        ------
        SchemaError
            It can be no key of the declared type.
        """
        if type(key) is self.kept:
            return key
        quick = self._quick
        if quick is not None and (found := quick(key)) is not None:
            return _one_zero(found)
        if key is None:
            raise self._refused(key, "a key is never null")
        try:
            [kept] = to_values(strict_array([key], self._arrow))
        except (ValueMismatch, pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise self._refused(key, str(error)) from error
        if kept is None:
            raise self._refused(key, "it would be null")
        if quick is not None and (found := quick(kept)) is not None:
            return _one_zero(found)
        return kept

    def sought(self, key: Any) -> Any:
        """Return a key that is looked for; None, which no map has, is looked for in vain.

        Raises
        ------
        SchemaError
            As of :meth:`put`.
        """
        return None if key is None else self.put(key)

    def _refused(self, key: Any, why: str) -> SchemaError:
        return SchemaError(
            f"the state '{self._state}' of {self._owner} cannot have the key {key!r:.200} "
            f"({type(key).__name__})",
            why=why,
            what_to_do=f"use keys of the declared type, {self._ddl}, or declare another one",
            state=self._state,
        )


def _one_zero(key: Any) -> Any:
    """Return 0.0 for -0.0, which is the same key: else which of them a map has would be a matter of order."""
    return 0.0 if type(key) is float and key == 0 else key


class AnyKeys:
    """Takes each key as it is: for maps that are not stored."""

    kept: type | None = None

    @staticmethod
    def put(key: Any) -> Any:
        """Return the key."""
        return key

    sought = put


ANY_KEYS = AnyKeys()
