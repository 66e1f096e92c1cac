"""Descriptors, by which functions declare states in `open`, and the time to live of entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pyspark.sql import types as T

from flinkish_spark.core.errors import SchemaError
from flinkish_spark.core.fields import Range, check_fields
from flinkish_spark.core.validation import (
    check_aggregate,
    instance_of,
    reducer,
)
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.hints import Made, NoSuchType, StateType, maker_of, refuse_as_key, to_ddl

#: Longest time to live: added to a time of today it does not overflow 64 bits.
_MOST_MS = 1 << 53


class TtlUpdate(Choice):
    """The accesses that restart an entry's time to live (Flink's `StateTtlConfig.UpdateType`)."""

    ON_CREATE_AND_WRITE = "ON_CREATE_AND_WRITE"
    ON_READ_AND_WRITE = "ON_READ_AND_WRITE"


@dataclass(frozen=True, slots=True)
class StateTtl:
    """Time to live of a state's entries, by processing time; in lists and maps each element has its own.

    The clock is the micro-batch's processing time, which stays the same when a micro-batch runs again.
    Expired entries are never returned. They are removed when a record or timer of their key is processed, and
    when their key group is stored: a small group (up to 128 KiB) drops them at once, a larger one when most
    of its older entries have expired, or when enough entries have changed that it is rewritten. A key group
    without new records is cleaned when all entries of a state in it have expired, at the next full quarter of
    the time to live.

    Parameters
    ----------
    ttl_ms
        Milliseconds, 1 or more, after the last access at which an entry, or element, expires.
    update
        Which accesses restart the time.

    Examples
    --------
    >>> StateTtl(ttl_ms=3_600_000).update
    <TtlUpdate.ON_CREATE_AND_WRITE: 'ON_CREATE_AND_WRITE'>
    """

    ttl_ms: Annotated[Milliseconds, Range(1, _MOST_MS)]
    update: TtlUpdate = TtlUpdate.ON_CREATE_AND_WRITE

    def __post_init__(self) -> None:
        check_fields(self, ttl_ms="set ttl_ms to a number of milliseconds, 1 or more")

    def is_expired(self, touched_ms: int, now_ms: int) -> bool:
        """Return whether an entry that was last accessed at `touched_ms` is expired at `now_ms`."""
        return touched_ms + self.ttl_ms <= now_ms


# A type is DDL, a type of Spark's, a type of Python's, a dataclass or a NamedTuple class. Values of one type
# are scalars, of a list of fields tuples, of a class its instances. A name is unique within the operator;
# name and types are part of the stored format, which knows DDL only, no classes.
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
        Returned by `value()` if the key has no value; never stored.
    ttl
        How long a value lives; None for ever.

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
        self, name: str, value_type: StateType, default: Any = None, ttl: StateTtl | None = None
    ) -> None:
        set_fields(self, name=name, value_type=state_type(name, value_type), default=default, ttl=ttl)

    @property
    def stored_type(self) -> T.DataType:
        """Type of the value that is stored per key and namespace."""
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
        """Type of the value that is stored per key and namespace."""
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
        self, name: str, key_type: StateType, value_type: StateType, ttl: StateTtl | None = None
    ) -> None:
        key_ddl = state_type(name, key_type)
        try:
            refuse_as_key(parse_ddl(key_ddl))
        except NoSuchType as error:
            raise _unusable(name, key_type, str(error)) from None
        set_fields(self, name=name, key_type=key_ddl, value_type=state_type(name, value_type), ttl=ttl)

    @property
    def stored_type(self) -> T.DataType:
        """Type of the value that is stored per key and namespace."""
        return T.MapType(parse_ddl(self.key_type), parse_ddl(self.value_type))


class Reducer(Protocol):
    """A :class:`~flinkish_spark.ReduceFunction`, or any object with this method."""

    def reduce(self, first: Any, second: Any) -> Any:
        """Combine two values to one."""


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
        """Type of the value that is stored per key and namespace."""
        return parse_ddl(self.value_type)


class Aggregate(Protocol):
    """An :class:`~flinkish_spark.AggregateFunction`, or any object with these methods."""

    def create_accumulator(self) -> Any:
        """Return an empty accumulator."""

    def add(self, value: Any, accumulator: Any) -> Any:
        """Return the accumulator with a value added."""

    def get_result(self, accumulator: Any) -> Any:
        """Return the result of an accumulator."""

    def merge(self, first: Any, second: Any) -> Any:
        """Merge two accumulators to one."""


@dataclass(frozen=True, slots=True, init=False)
class AggregatingStateDescriptor:
    """Name, function and accumulator type of a :class:`~flinkish_spark.state.AggregatingState`."""

    name: str
    aggregate: Aggregate
    accumulator_type: str
    ttl: StateTtl | None = None

    def __init__(
        self, name: str, aggregate: Aggregate, accumulator_type: StateType, ttl: StateTtl | None = None
    ) -> None:
        kind = state_type(name, accumulator_type)
        check_aggregate(aggregate)
        set_fields(self, name=name, aggregate=aggregate, accumulator_type=kind, ttl=ttl)

    @property
    def stored_type(self) -> T.DataType:
        """Type of the value that is stored per key and namespace."""
        return parse_ddl(self.accumulator_type)


StateDescriptor = (
    ValueStateDescriptor
    | ListStateDescriptor
    | MapStateDescriptor
    | ReducingStateDescriptor
    | AggregatingStateDescriptor
)


class TypeText(str):
    """The DDL of a declared type, with the type hint that names its classes; compared as text."""

    #: The type hint, by which stored values become instances again.
    hint: Any

    def __new__(cls, ddl: str, hint: Any) -> TypeText:
        made = super().__new__(cls, ddl)
        made.hint = hint
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return TypeText, (str(self), self.hint)


def state_type(name: str, given: StateType) -> str:
    """Return the DDL of a declared type; a :class:`TypeText` if its values are instances of classes."""
    try:
        ddl = to_ddl(given)
        if isinstance(given, str | T.DataType) or maker_of(given) is None:
            return ddl
        return TypeText(ddl, given)
    except NoSuchType as error:
        raise _unusable(name, given, str(error)) from None


def find_maker(ddl: str) -> Made | None:
    return maker_of(ddl.hint) if isinstance(ddl, TypeText) else None


def set_fields(descriptor: Any, **facts: Any) -> None:
    """Check and set the attributes of a frozen descriptor, in its constructor."""
    instance_of("name", facts["name"], str, what_to_do='give the state a name: "total"')
    if (ttl := facts.get("ttl")) is not None:
        instance_of("ttl", ttl, StateTtl, what_to_do="give a StateTtl(3_600_000), or leave it out")
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
