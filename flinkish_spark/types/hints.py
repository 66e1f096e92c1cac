"""Types as users declare them: DDL, Spark types, Python type hints, dataclasses, NamedTuples."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import decimal
import inspect
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.types.ddl import DdlError, ddl_of, parse_ddl

#: Types that rows of functions, and so states, cannot have, with the reason.
_NOT_IN_ROWS: tuple[tuple[type[T.DataType], str], ...] = (
    (T.VarcharType, "no DataFrame has it, and its length would not be checked: declare STRING"),
    (T.CharType, "no DataFrame has it, and its length would not be checked: declare STRING"),
    (T.YearMonthIntervalType, "it has no form in Arrow: declare a number of months as INT"),
    (T.CalendarIntervalType, "it has no form in Arrow: declare INTERVAL DAY TO SECOND, or a number as LONG"),
    (T.VariantType, "Spark does not hash it, and Python sees bytes: declare STRING with JSON, or the fields"),
    (T.GeometryType, "Python sees its bytes only: declare BINARY"),
    (T.GeographyType, "Python sees its bytes only: declare BINARY"),
)
#: Types that rows may have but states cannot, with the reason.
_NOT_IN_STATES: tuple[tuple[type[T.DataType], str], ...] = (
    (T.NullType, "it holds nothing: declare the type that a value will have"),
)


def unfit_for_rows(kind: T.DataType) -> str | None:
    """Return why rows of functions cannot have a type or a part of it; None if they can."""
    return _unfit(kind, _NOT_IN_ROWS)


def holds_nothing(kind: T.DataType) -> bool:
    return any(isinstance(part, T.NullType) for part in parts_of(kind))


def first_required(kind: T.DataType) -> str | None:
    structs = (part for part in parts_of(kind) if isinstance(part, T.StructType))
    return next((field.name for struct in structs for field in struct if not field.nullable), None)


def _unfit(kind: T.DataType, refused: tuple[tuple[type[T.DataType], str], ...]) -> str | None:
    found = ((part, why) for part in parts_of(kind) for wrong, why in refused if isinstance(part, wrong))
    return next((f"{part.simpleString()}: {why}" for part, why in found), None)


def same_names(kind: T.DataType) -> str | None:
    """Return an error text if a struct, at any depth, has two fields of one name; else None."""
    # A state of this type could be stored but not read again, and no Python function can read such a row.
    for part in parts_of(kind):
        for name, times in Counter(part.names if isinstance(part, T.StructType) else ()).items():
            if times > 1:
                return f"the field {name!r} is there {times} times, and fields are found by their names"
    return None


def parts_of(kind: T.DataType) -> Iterator[T.DataType]:
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


# A list of fields is the type of a tuple, a single type that of a scalar. Types are stored and sent as DDL.

#: Declarations of a state's type: a list of fields, or any single type.
StateType = str | T.DataType | type[Any] | types.GenericAlias | types.UnionType

#: Converts Arrow's Python value to an instance of the declared type.
Made = Callable[[Any], Any]

_PLAIN: dict[Any, T.DataType] = {
    bool: T.BooleanType(),
    int: T.LongType(),
    float: T.DoubleType(),
    str: T.StringType(),
    bytes: T.BinaryType(),
    datetime.datetime: T.TimestampType(),
    datetime.date: T.DateType(),
    datetime.timedelta: T.DayTimeIntervalType(),
    decimal.Decimal: T.DecimalType(38, 18),
}
_LISTS = (list, collections.abc.Sequence)
_MAPS = (dict, collections.abc.Mapping)


class NoSuchType(TypeError):
    """A type hint has no Spark type; the message names the hint."""


def is_record(hint: Any) -> bool:
    return isinstance(hint, type) and (
        dataclasses.is_dataclass(hint) or (issubclass(hint, tuple) and hasattr(hint, "_fields"))
    )


def fields_of(hint: Any) -> T.StructType:
    """Return the fields of a dataclass, a NamedTuple, or a tuple hint."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and arguments and Ellipsis not in arguments:
        # Fields without names get Spark's default names.
        return T.StructType([T.StructField(f"_{n}", type_of(one)) for n, one in enumerate(arguments, 1)])
    if not is_record(hint):
        raise NoSuchType(f"{hint_name(hint)} is no dataclass and no NamedTuple")
    hints, names = hints_of(hint), field_names(hint)
    missing = [name for name in names if name not in hints]
    if missing:
        raise NoSuchType(f"the field {missing[0]!r} of {hint_name(hint)} has no type hint")
    try:
        return T.StructType([T.StructField(name, type_of(hints[name])) for name in names])
    except RecursionError:
        raise NoSuchType(f"{hint_name(hint)} contains itself, and Spark has no recursive types") from None


def field_names(record: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(record):
        return tuple(field.name for field in dataclasses.fields(record))
    return tuple(record._fields)


def hints_of(record: type[Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(record)
    except RecursionError:
        raise
    except Exception as error:
        says = f"{type(error).__name__}: {error}"
        raise NoSuchType(f"the hints of {hint_name(record)} cannot be read: {says}") from None


def type_of(hint: Any) -> T.DataType:
    """Return the Spark type of a hint; every value may be null."""
    if isinstance(hint, collections.abc.Hashable) and hint in _PLAIN:
        return _PLAIN[hint]
    plain = strip_none(hint)
    if plain is not hint:
        return type_of(plain)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in _LISTS and len(arguments) == 1:
        return T.ArrayType(type_of(arguments[0]))
    if origin in _MAPS and len(arguments) == 2:
        return T.MapType(type_of(arguments[0]), type_of(arguments[1]))
    if is_record(hint) or origin is tuple:
        return fields_of(hint)
    raise NoSuchType(f"{hint_name(hint)} has no Spark type")


def to_data_type(given: Any) -> T.DataType:
    if isinstance(given, type) and issubclass(given, T.DataType):
        raise NoSuchType(f"{given.__name__} is a class; write {given.__name__}()")
    if not isinstance(given, str | T.DataType):
        return type_of(given)
    try:
        kind = parse_ddl(given) if isinstance(given, str) else given
    except DdlError as error:
        raise NoSuchType(str(error)) from None
    if (why := unfit_for_rows(kind)) is not None:
        raise NoSuchType(why)
    return kind


def to_ddl(given: Any) -> str:
    """Return a declared type as DDL; DDL is returned unchanged."""
    kind = to_data_type(given)
    if (why := _unfit(kind, _NOT_IN_ROWS + _NOT_IN_STATES) or same_names(kind)) is not None:
        raise NoSuchType(why)
    for part in parts_of(kind):
        if isinstance(part, T.MapType):
            # Arrow converts nested keys to values that cannot be keys of a dict.
            refuse_as_key(part.keyType)
    if isinstance(given, str):
        # A Spark type mostly has NOT NULL because a DataFrame had it, so there it is ignored.
        if (name := first_required(kind)) is not None:
            raise NoSuchType(
                f"{name!r} is NOT NULL, but a field that is declared later is null in values stored "
                "before: leave NOT NULL out"
            )
        return given
    if isinstance(kind, T.StructType) and not kind.fields:
        raise NoSuchType("a StructType without fields holds nothing")
    return ddl_of(kind)


def refuse_as_key(kind: T.DataType) -> None:
    if isinstance(kind, T.StructType | T.ArrayType | T.MapType):
        raise NoSuchType(f"a key of a map is a scalar, as int or STRING, not {kind.simpleString()}")


def maker_of(hint: Any) -> Made | None:
    """Return a function from tuples or dicts to instances of the declared classes; None if there are none."""
    hint = strip_none(hint)
    if is_record(hint):
        return _record_maker(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in _LISTS and len(arguments) == 1:
        return each_of_list(maker_of(arguments[0]))
    if origin in _MAPS and len(arguments) == 2:
        return each_of_map(maker_of(arguments[1]))
    if origin is tuple and arguments and Ellipsis not in arguments:
        return _tuple_maker([maker_of(one) for one in arguments])
    return None


def _tuple_maker(makers: Sequence[Made | None]) -> Made:
    def make(value: Any) -> Any:
        if value is None:
            return None
        parts = value.values() if isinstance(value, dict) else value
        pairs = zip(makers, parts, strict=True)
        return tuple(part if made is None else made(part) for made, part in pairs)

    return make


def _record_maker(record: Any) -> Made:
    names, hints = field_names(record), hints_of(record)
    _refuse_unmakeable(record, names)
    makers = {name: made for name in names if (made := maker_of(hints[name])) is not None}

    def make(value: Any) -> Any:
        if value is None or isinstance(value, record):
            return value
        fields = value if isinstance(value, dict) else dict(zip(names, value, strict=True))
        for name, made in makers.items():
            fields[name] = made(fields[name])
        return record(**fields)

    return make


def _refuse_unmakeable(record: Any, names: Sequence[str]) -> None:
    """Raise NoSuchType for a class that cannot be instantiated from its fields alone."""
    try:
        taken = inspect.signature(record)
        taken.bind(**dict.fromkeys(names))
    except ValueError:
        # The class has no readable signature.
        return
    except TypeError as error:
        fields = ", ".join(names)
        raise NoSuchType(f"{hint_name(record)} cannot be made of what is stored, {fields}: {error}") from None
    # A constructor argument that is no field: an InitVar, which instances do not have.
    others = getattr(record, "__dataclass_fields__", {}).keys() - set(names)
    lost = [name for name in taken.parameters if name in others]
    if lost:
        raise NoSuchType(f"{hint_name(record)} is made with {lost[0]!r}, an InitVar, which is not stored")


def each_of_list(made: Made | None) -> Made | None:
    if made is None:
        return None
    return lambda values: None if values is None else [made(value) for value in values]


def each_of_map(made: Made | None) -> Made | None:
    if made is None:
        return None
    return lambda values: None if values is None else {key: made(value) for key, value in values.items()}


def strip_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        others = [one for one in typing.get_args(hint) if one is not type(None)]
        if len(others) == 1:
            return others[0]
    return hint


def hint_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
