"""What a function says about a state when it asks for it in `open`.

A type is DDL, a type of Spark's, a type of Python's, a dataclass or a NamedTuple class. One type (``"LONG"``,
``LongType()``, ``int``) makes a value a scalar, fields (``"total LONG, orders LONG"``, a StructType) make it
a tuple with those fields in order, and a class makes it an instance. A name is unique within the operator;
name and types are part of the stored format, which knows DDL only and nothing of classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pyspark.sql import types as T

from flinkish_spark.arguments import check_aggregate, instance_of, reducer
from flinkish_spark.errors import SchemaError
from flinkish_spark.runtime.ddl import parse_ddl
from flinkish_spark.runtime.hinted_types import (
    Made,
    NoSuchType,
    StateType,
    declared_ddl,
    maker_of,
    refuse_as_key,
)
from flinkish_spark.state.ttl import StateTtl, check_ttl


@dataclass(frozen=True, slots=True, init=False)
class ValueStateDescriptor:
    """Name and type of a :class:`~flinkish_spark.state.ValueState`.

    Parameters
    ----------
    name
        Unique within the operator.
    value_type
        Of the value; the attribute is its DDL.
    default
        What `value()` returns where there is none; never stored.
    ttl
        How long a value lives; None: for ever.

    Raises
    ------
    SchemaError
        It is no type that a state can have; of every descriptor.
    ConfigError
        The name is no text, the time to live no :class:`StateTtl`; or what a state reduces or aggregates with
        cannot do that.

    Examples
    --------
    >>> ValueStateDescriptor("total", "total LONG, orders LONG").name
    'total'
    >>> ValueStateDescriptor("total", int).value_type
    'bigint'
    """

    name: str
    value_type: str
    default: Any = None
    ttl: StateTtl | None = None

    def __init__(
        self,
        name: str,
        value_type: StateType,
        default: Any = None,
        ttl: StateTtl | None = None,
    ) -> None:
        set_fields(self, name=name, value_type=state_type(name, value_type), default=default, ttl=ttl)

    @property
    def stored_type(self) -> T.DataType:
        """Type of what is stored per key and namespace."""
        return parse_ddl(self.value_type)


@dataclass(frozen=True, slots=True, init=False)
class ListStateDescriptor:
    """Name and element type of a :class:`~flinkish_spark.state.ListState`.

    Its elements expire one by one.

    Examples
    --------
    >>> ListStateDescriptor("seen", "STRING").stored_type.simpleString()
    'array<string>'
    """

    name: str
    element_type: str
    ttl: StateTtl | None = None

    def __init__(self, name: str, element_type: StateType, ttl: StateTtl | None = None) -> None:
        set_fields(self, name=name, element_type=state_type(name, element_type), ttl=ttl)

    @property
    def stored_type(self) -> T.DataType:
        """Type of what is stored per key and namespace."""
        return T.ArrayType(parse_ddl(self.element_type))


@dataclass(frozen=True, slots=True, init=False)
class MapStateDescriptor:
    """Name and types of a :class:`~flinkish_spark.state.MapState`.

    Its entries expire one by one. A key is no instance of a class.

    Examples
    --------
    >>> MapStateDescriptor("counts", "STRING", "n LONG, at TIMESTAMP").stored_type.simpleString()
    'map<string,struct<n:bigint,at:timestamp>>'
    """

    name: str
    key_type: str
    value_type: str
    ttl: StateTtl | None = None

    def __init__(
        self,
        name: str,
        key_type: StateType,
        value_type: StateType,
        ttl: StateTtl | None = None,
    ) -> None:
        key_ddl = state_type(name, key_type)
        try:
            refuse_as_key(parse_ddl(key_ddl))
        except NoSuchType as error:
            raise _unusable(name, key_type, str(error)) from None
        set_fields(self, name=name, key_type=key_ddl, value_type=state_type(name, value_type), ttl=ttl)

    @property
    def stored_type(self) -> T.DataType:
        """Type of what is stored per key and namespace."""
        return T.MapType(parse_ddl(self.key_type), parse_ddl(self.value_type))


class Reducer(Protocol):
    """What reduces: a :class:`~flinkish_spark.ReduceFunction`, or any object with this method."""

    def reduce(self, first: Any, second: Any) -> Any:
        """Return the value that stands for both."""


@dataclass(frozen=True, slots=True, init=False)
class ReducingStateDescriptor:
    """Name, function and type of a :class:`~flinkish_spark.state.ReducingState`.

    Parameters
    ----------
    reduce
        From two values to one: an object with `reduce`, or a callable. Must be associative.
    """

    name: str
    reduce: Reducer | Callable[[Any, Any], Any]
    value_type: str
    ttl: StateTtl | None = None

    def __init__(
        self,
        name: str,
        reduce: Reducer | Callable[[Any, Any], Any],
        value_type: StateType,
        ttl: StateTtl | None = None,
    ) -> None:
        kind = state_type(name, value_type)
        set_fields(self, name=name, reduce=reducer("reduce", reduce), value_type=kind, ttl=ttl)

    @property
    def stored_type(self) -> T.DataType:
        """Type of what is stored per key and namespace."""
        return parse_ddl(self.value_type)


class Aggregate(Protocol):
    """What aggregates: an :class:`~flinkish_spark.AggregateFunction`, or any object with these methods."""

    def create_accumulator(self) -> Any:
        """Return an accumulator to which nothing was added."""

    def add(self, value: Any, accumulator: Any) -> Any:
        """Return the accumulator with a value added."""

    def get_result(self, accumulator: Any) -> Any:
        """Return the result of an accumulator."""

    def merge(self, first: Any, second: Any) -> Any:
        """Return one accumulator for two."""


@dataclass(frozen=True, slots=True, init=False)
class AggregatingStateDescriptor:
    """Name, function and accumulator type of a :class:`~flinkish_spark.state.AggregatingState`."""

    name: str
    aggregate: Aggregate
    accumulator_type: str
    ttl: StateTtl | None = None

    def __init__(
        self,
        name: str,
        aggregate: Aggregate,
        accumulator_type: StateType,
        ttl: StateTtl | None = None,
    ) -> None:
        kind = state_type(name, accumulator_type)
        check_aggregate(aggregate)
        set_fields(self, name=name, aggregate=aggregate, accumulator_type=kind, ttl=ttl)

    @property
    def stored_type(self) -> T.DataType:
        """Type of what is stored per key and namespace."""
        return parse_ddl(self.accumulator_type)


StateDescriptor = (
    ValueStateDescriptor
    | ListStateDescriptor
    | MapStateDescriptor
    | ReducingStateDescriptor
    | AggregatingStateDescriptor
)


class TypeText(str):
    """The DDL of a declared type that remembers the hint with its classes; compared as text.

    Parameters
    ----------
    hint
        What instances are made by again.
    """

    hint: Any

    def __new__(cls, ddl: str, hint: Any) -> TypeText:
        """Return the text."""
        made = super().__new__(cls, ddl)
        made.hint = hint
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what a copy is made of."""
        return TypeText, (str(self), self.hint)


def state_type(name: str, given: StateType) -> str:
    """Return the DDL of a declared type; a :class:`TypeText` if values are to be instances of classes.

    Parameters
    ----------
    name
        Of the state.

    Raises
    ------
    SchemaError
        It is no type that a state can have.
    """
    try:
        ddl = declared_ddl(given)
        if isinstance(given, str | T.DataType) or maker_of(given) is None:
            return ddl
        return TypeText(ddl, given)
    except NoSuchType as error:
        raise _unusable(name, given, str(error)) from None


def made_by(ddl: str) -> Made | None:
    """Return what makes instances of declared classes of what Arrow gives; None where there are none."""
    return maker_of(ddl.hint) if isinstance(ddl, TypeText) else None


def set_fields(descriptor: Any, **facts: Any) -> None:
    """Set the attributes of a frozen descriptor; for its constructor, with the checks that all have."""
    instance_of("name", facts["name"], str, what_to_do='give the state a name: "total"')
    check_ttl("ttl", facts.get("ttl"))
    for name, value in facts.items():
        object.__setattr__(descriptor, name, value)


def _unusable(name: str, given: object, why: str) -> SchemaError:
    return SchemaError(
        f"the state '{name}' cannot have the type {given!r}",
        why=why,
        what_to_do='write it as DDL, as "LONG" or "total LONG, orders LONG", or give a type of Spark\'s or '
        "Python's, as LongType(), int or a dataclass",
        state=name,
    )
