"""What a function says about a state when it asks for it in `open`.

Types are Spark types as DDL; one type (``"LONG"``) makes a value a scalar, fields (``"total LONG, orders
LONG"``) make it a tuple with those fields in order. A name is unique within the operator and part of the
stored format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pyspark.sql import types as T

from flinkish_spark.runtime.ddl import parse_ddl
from flinkish_spark.state.ttl import StateTtl

if TYPE_CHECKING:
    from flinkish_spark.functions import AggregateFunction


@dataclass(frozen=True, slots=True)
class ValueStateDescriptor:
    """Name and type of a :class:`~flinkish_spark.state.ValueState`.

    Parameters
    ----------
    name
        Unique within the operator.
    value_type
        DDL of the value.
    default
        What `value()` returns where there is none; never stored.
    ttl
        How long a value lives; None: for ever.

    Examples
    --------
    >>> ValueStateDescriptor("total", "total LONG, orders LONG").name
    'total'
    """

    name: str
    value_type: str
    default: Any = None
    ttl: StateTtl | None = None

    @property
    def stored_type(self) -> T.DataType:
        """Type of what is stored per key and namespace."""
        return parse_ddl(self.value_type)


@dataclass(frozen=True, slots=True)
class ListStateDescriptor:
    """Name and element type of a :class:`~flinkish_spark.state.ListState`.

    The list of a key expires as a whole, by its last change.

    Examples
    --------
    >>> ListStateDescriptor("seen", "STRING").stored_type.simpleString()
    'array<string>'
    """

    name: str
    element_type: str
    ttl: StateTtl | None = None

    @property
    def stored_type(self) -> T.DataType:
        """Type of what is stored per key and namespace."""
        return T.ArrayType(parse_ddl(self.element_type))


@dataclass(frozen=True, slots=True)
class MapStateDescriptor:
    """Name and types of a :class:`~flinkish_spark.state.MapState`.

    The map of a key expires as a whole, by its last change.

    Examples
    --------
    >>> MapStateDescriptor("counts", "STRING", "n LONG, at TIMESTAMP").stored_type.simpleString()
    'map<string,struct<n:bigint,at:timestamp>>'
    """

    name: str
    key_type: str
    value_type: str
    ttl: StateTtl | None = None

    @property
    def stored_type(self) -> T.DataType:
        """Type of what is stored per key and namespace."""
        return T.MapType(parse_ddl(self.key_type), parse_ddl(self.value_type))


class Reducer(Protocol):
    """What reduces: a :class:`~flinkish_spark.ReduceFunction`, or any object with this method."""

    def reduce(self, first: Any, second: Any) -> Any:
        """Return the value that stands for both."""


@dataclass(frozen=True, slots=True)
class ReducingStateDescriptor:
    """Name, function and type of a :class:`~flinkish_spark.state.ReducingState`.

    Parameters
    ----------
    reduce
        From two values to one; must be associative.
    """

    name: str
    reduce: Reducer
    value_type: str
    ttl: StateTtl | None = None

    @property
    def stored_type(self) -> T.DataType:
        """Type of what is stored per key and namespace."""
        return parse_ddl(self.value_type)


@dataclass(frozen=True, slots=True)
class AggregatingStateDescriptor:
    """Name, function and accumulator type of a :class:`~flinkish_spark.state.AggregatingState`."""

    name: str
    aggregate: AggregateFunction
    accumulator_type: str
    ttl: StateTtl | None = None

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


def is_list_of_fields(ddl: str) -> bool:
    """Return whether values of a type are tuples: it is written as fields, not as one type.

    Examples
    --------
    >>> is_list_of_fields("a LONG, b STRING"), is_list_of_fields("STRUCT<a: LONG>")
    (True, False)
    """
    return isinstance(parse_ddl(ddl), T.StructType) and not ddl.lstrip().upper().startswith("STRUCT")
