"""From Python's type hints to the fields of a stream: what a function emits, where nobody says it as DDL."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import decimal
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.errors import SchemaError

_PLAIN: dict[Any, T.DataType] = {
    bool: T.BooleanType(),
    int: T.LongType(),
    float: T.DoubleType(),
    str: T.StringType(),
    bytes: T.BinaryType(),
    datetime.datetime: T.TimestampType(),
    datetime.date: T.DateType(),
    decimal.Decimal: T.DecimalType(38, 18),
}
_MANY = (collections.abc.Iterable, collections.abc.Iterator, collections.abc.Generator)
_LISTS = (list, collections.abc.Sequence)
_MAPS = (dict, collections.abc.Mapping)


class NoSuchType(TypeError):
    """A hint stands for no Spark type; says which."""


def fields_of(hint: Any) -> T.StructType:
    """Return the fields that a dataclass or a named tuple with hints stands for.

    Raises
    ------
    NoSuchType
        It is neither, or a field has a type without a counterpart.

    Examples
    --------
    >>> @dataclasses.dataclass
    ... class Total:
    ...     user: str
    ...     total: int | None
    >>> fields_of(Total).simpleString()
    'struct<user:string,total:bigint>'
    """
    is_named_tuple = isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")
    if not dataclasses.is_dataclass(hint) and not is_named_tuple:
        raise NoSuchType(f"{_named(hint)} is no dataclass and no NamedTuple")
    hints = typing.get_type_hints(hint)
    names = hint._fields if is_named_tuple else [field.name for field in dataclasses.fields(hint)]
    missing = [name for name in names if name not in hints]
    if missing:
        raise NoSuchType(f"the field {missing[0]!r} of {_named(hint)} has no type hint")
    return T.StructType([T.StructField(name, type_of(hints[name])) for name in names])


def type_of(hint: Any) -> T.DataType:
    """Return the Spark type that a hint stands for; every value may be null.

    Raises
    ------
    NoSuchType
        There is none.

    Examples
    --------
    >>> type_of(dict[str, list[int]]).simpleString()
    'map<string,array<bigint>>'
    """
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        others = [one for one in arguments if one is not type(None)]
        if len(others) == 1:
            return type_of(others[0])
    if origin in _LISTS and len(arguments) == 1:
        return T.ArrayType(type_of(arguments[0]))
    if origin in _MAPS and len(arguments) == 2:
        return T.MapType(type_of(arguments[0]), type_of(arguments[1]))
    try:
        return fields_of(hint)
    except NoSuchType:
        raise NoSuchType(f"{_named(hint)} stands for no type of Spark") from None


def inferred_output(function: Callable[..., Any], what: str, *, is_iterable: bool) -> T.StructType:
    """Return the fields of the rows that a function returns, by its hints.

    Parameters
    ----------
    what
        Names it in errors.
    is_iterable
        Whether it returns several rows, as a generator does.

    Raises
    ------
    SchemaError
        It has no hint for what it returns, or one that says no fields.
    """
    try:
        hint = typing.get_type_hints(function).get("return", inspect.Signature.empty)
        if hint is inspect.Signature.empty:
            raise NoSuchType("it has no hint for what it returns")
        return fields_of(_row_of(hint) if is_iterable else _without_none(hint))
    except (NoSuchType, NameError) as error:
        raise SchemaError(
            f"the output of {what} is not known",
            why=str(error),
            what_to_do='say output="user STRING, total LONG", or let the function\'s hint be a dataclass',
        ) from None


def _row_of(hint: Any) -> Any:
    """Return what an iterable holds."""
    plain = _without_none(hint)
    origin, arguments = typing.get_origin(plain), typing.get_args(plain)
    if origin in (*_MANY, *_LISTS) and arguments:
        return arguments[0]
    raise NoSuchType(f"{_named(hint)} does not say what it holds")


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        others = [one for one in typing.get_args(hint) if one is not type(None)]
        if len(others) == 1:
            return others[0]
    return hint


def _named(hint: Any) -> str:
    return getattr(hint, "__name__", None) or str(hint)
