"""Which types of Spark's rows of Python functions can have, and which states can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pyspark.sql import types as T

#: Why rows of functions, and so states, have none of a type.
_NOT_IN_ROWS: tuple[tuple[type[T.DataType], str], ...] = (
    (T.VarcharType, "no DataFrame has it, and nobody would look at the length: declare STRING"),
    (T.CharType, "no DataFrame has it, and nobody would look at the length: declare STRING"),
    (T.YearMonthIntervalType, "it has no form in Arrow: declare a number of months as INT"),
    (T.CalendarIntervalType, "it has no form in Arrow: declare INTERVAL DAY TO SECOND, or a number as LONG"),
    (T.VariantType, "Spark does not hash it, and Python sees bytes: declare STRING with JSON, or the fields"),
    (T.GeometryType, "Python sees its bytes only: declare BINARY"),
    (T.GeographyType, "Python sees its bytes only: declare BINARY"),
)
#: Why states have none of a type that rows may have.
_NOT_IN_STATES: tuple[tuple[type[T.DataType], str], ...] = (
    (T.NullType, "it holds nothing: declare the type that a value will have"),
)


def unfit_for_rows(kind: T.DataType) -> str | None:
    """Return why rows of functions cannot have a type, at any depth; None if they can.

    Examples
    --------
    >>> unfit_for_rows(T.StructType().add("a", T.VarcharType(3)))
    'varchar(3): no DataFrame has it, and nobody would look at the length: declare STRING'
    """
    return _unfit(kind, _NOT_IN_ROWS)


def unfit_for_states(kind: T.DataType) -> str | None:
    """Return why states cannot have a type, at any depth; None if they can.

    Examples
    --------
    >>> unfit_for_states(T.ArrayType(T.NullType()))
    'void: it holds nothing: declare the type that a value will have'
    """
    return _unfit(kind, _NOT_IN_ROWS + _NOT_IN_STATES) or same_names(kind)


def holds_nothing(kind: T.DataType) -> bool:
    """Whether a type is VOID, at any depth."""
    return any(isinstance(part, T.NullType) for part in parts_of(kind))


def first_required(kind: T.DataType) -> str | None:
    """Return the name of a field that must not be null, at any depth; None if there is none.

    Examples
    --------
    >>> first_required(T.ArrayType(T.StructType().add("a", "long", nullable=False)))
    'a'
    """
    for part in parts_of(kind):
        if isinstance(part, T.StructType):
            for field in part:
                if not field.nullable:
                    return str(field.name)
    return None


def _unfit(kind: T.DataType, refused: tuple[tuple[type[T.DataType], str], ...]) -> str | None:
    for part in parts_of(kind):
        for wrong, why in refused:
            if isinstance(part, wrong):
                return f"{part.simpleString()}: {why}"
    return None


def same_names(kind: T.DataType) -> str | None:
    """Return that there are fields of one name side by side, at any depth; None if there are none.

    A state would be stored and never read again, and no function in Python can read such a row.
    """
    for part in parts_of(kind):
        for name, times in Counter(part.names if isinstance(part, T.StructType) else ()).items():
            if times > 1:
                return f"the field {name!r} is there {times} times, and fields are found by their names"
    return None


def parts_of(kind: T.DataType) -> Iterator[T.DataType]:
    """Return a type and all that it is made of."""
    yield kind
    match kind:
        case T.StructType():
            for field in kind:
                yield from parts_of(field.dataType)
        case T.ArrayType():
            yield from parts_of(kind.elementType)
        case T.MapType():
            yield from parts_of(kind.keyType)
            yield from parts_of(kind.valueType)
