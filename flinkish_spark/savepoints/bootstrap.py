"""Bootstrapping of state from a batch DataFrame: its rows, their key, and the states they fill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import types as T

from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.core.validation import check_methods, unusable
from flinkish_spark.functions.keyed import Context, RichFunction, RuntimeContext
from flinkish_spark.planning.declare import check_can_be_sent
from flinkish_spark.state.descriptors import (
    ListStateDescriptor,
    MapStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from flinkish_spark.types.ddl import is_field_list, parse_ddl
from flinkish_spark.types.schemas import check_field_names


class KeyedStateBootstrapFunction(RichFunction, ABC):
    """Fills the states and timers of keys from the rows of a DataFrame, one row at a time.

    Called once per row, in tasks, while a savepoint is written; a retried task calls it again for the same
    rows. States and timers are declared and used as in a :class:`~flinkish_spark.KeyedProcessFunction`, with
    the names and types of the job. It cannot emit, and no timer fires before the job runs.

    Examples
    --------
    >>> from flinkish_spark import ValueStateDescriptor
    >>> class Totals(KeyedStateBootstrapFunction):
    ...     def open(self, context):
    ...         self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))
    ...     def process_element(self, value, ctx):
    ...         self.total.update(self.total.value() + value.amount)
    ...         ctx.timer_service().register_processing_time_timer(1_900_000_000_000)
    """

    @abstractmethod
    def process_element(self, value: Any, ctx: Context) -> None:
        """Put one row into states and timers of its key.

        Parameters
        ----------
        value
            The row as a named tuple, as a job's functions get records.
        ctx
            The current key; the row's time, if the rows have one; the timer service. Its watermark is
            `MIN_WATERMARK_MS`, its processing time the wall clock when the savepoint was begun.
        """


#: A state, and the column or columns that fill it.
StateColumns = tuple[StateDescriptor, "str | Sequence[str]"]
_Row = tuple[Any, ...]
#: Puts a row's columns into a state of some key.
_Put = Callable[[Any, _Row, Any], None]


class ColumnsFunction(KeyedStateBootstrapFunction):
    """Puts columns into states; a null leaves its state unchanged."""

    def __init__(self, states: Sequence[StateColumns], schema: T.StructType, uid: str) -> None:
        #: For each state its descriptor, the places of its columns in a row, and the function that puts them.
        self._fills = [(descriptor, *_fill(descriptor, given, schema, uid)) for descriptor, given in states]

    def open(self, context: RuntimeContext) -> None:
        self._states = [_declare(context, descriptor) for descriptor, _, _ in self._fills]

    def process_element(self, value: Any, ctx: Context) -> None:
        for (_, places, put), state in zip(self._fills, self._states, strict=True):
            row = tuple(value[place] for place in places)
            if any(column is not None for column in row):
                put(state, row, ctx.get_current_key())


def _declare(context: RuntimeContext, descriptor: StateDescriptor) -> Any:
    if isinstance(descriptor, ListStateDescriptor):
        return context.get_list_state(descriptor)
    if isinstance(descriptor, MapStateDescriptor):
        return context.get_map_state(descriptor)
    assert isinstance(descriptor, ValueStateDescriptor)
    # Without its default, which would look like a value that was put.
    return context.get_state(replace(descriptor, default=None))


def _fill(
    descriptor: StateDescriptor, columns: str | Sequence[str], schema: T.StructType, uid: str
) -> tuple[tuple[int, ...], _Put]:
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    missing = [name for name in names if name not in schema.names]
    if missing or not names:
        raise SchemaError(
            f"state '{descriptor.name}' of '{uid}' cannot be filled from '{', '.join(missing)}'",
            why="the DataFrame has no such column",
            what_to_do=f"choose from: {', '.join(schema.names)}",
        )
    # As text, which ignores nullability.
    forms = {", ".join(one.simpleString() for one in kinds): put for kinds, put in _forms(descriptor, uid)}
    given = ", ".join(schema[name].dataType.simpleString() for name in names)
    if given not in forms:
        raise SchemaError(
            f"state '{descriptor.name}' of '{uid}' cannot be filled from {', '.join(names)}",
            why=f"they are {given}, and it takes {' or '.join(forms)}",
            what_to_do="cast the columns",
        )
    return tuple(schema.names.index(name) for name in names), forms[given]


def _forms(descriptor: StateDescriptor, uid: str) -> list[tuple[Sequence[T.DataType], _Put]]:
    """Return the accepted column types for a state, each with the function that puts such columns."""
    if isinstance(descriptor, ValueStateDescriptor):
        kinds, make = _fields(descriptor.value_type)
        return [(kinds, partial(_put_value, make))]
    if isinstance(descriptor, ListStateDescriptor):
        kinds, make = _fields(descriptor.element_type)
        whole: T.DataType = T.ArrayType(parse_ddl(descriptor.element_type))
        return [([whole], partial(_put_whole, make is tuple)), (kinds, partial(_add_element, make))]
    if isinstance(descriptor, MapStateDescriptor):
        key, (kinds, make) = parse_ddl(descriptor.key_type), _fields(descriptor.value_type)
        whole = T.MapType(key, parse_ddl(descriptor.value_type))
        return [([whole], partial(_put_whole, make is tuple)), ([key, *kinds], partial(_put_entry, make))]
    raise ConfigError(
        f"state '{descriptor.name}' of '{uid}' cannot be filled from columns",
        what_to_do="use a KeyedStateBootstrapFunction that adds to it",
    )


def _fields(ddl: str) -> tuple[list[T.DataType], Callable[[_Row], Any]]:
    kind = parse_ddl(ddl)
    if isinstance(kind, T.StructType) and is_field_list(ddl):
        return [field.dataType for field in kind], tuple
    return [kind], itemgetter(0)


def _put_value(make: Callable[[_Row], Any], state: Any, row: _Row, key: Any) -> None:
    _refuse_second(state.value() is not None, key)
    state.update(make(row))


def _add_element(make: Callable[[_Row], Any], state: Any, row: _Row, key: Any) -> None:
    state.add(make(row))


def _put_entry(make: Callable[[_Row], Any], state: Any, row: _Row, key: Any) -> None:
    if row[0] is None:
        raise ValueError(f"the key of a map entry is null; it is of the key {key!r}")
    _refuse_second(row[0] in state, key)
    state[row[0]] = make(row[1:])


def _put_whole(has_fields: bool, state: Any, row: _Row, key: Any) -> None:
    _refuse_second(len(state) > 0, key)
    # A null becomes None, which a list refuses with a reason.
    given = row[0]
    if has_fields and isinstance(given, dict):
        given = {one: value if value is None else tuple(value.values()) for one, value in given.items()}
    elif has_fields:
        given = [one if one is None else tuple(one.values()) for one in given]
    state.update(given)


def _refuse_second(is_there: bool, key: Any) -> None:
    if is_there:
        raise ValueError(
            f"several rows for the key {key!r}: a DataFrame has no order, so the result would be arbitrary; "
            "aggregate the rows first"
        )


@dataclass(frozen=True)
class KeyedRows:
    """A batch DataFrame with a key for its rows; returned by :func:`key_by`."""

    frame: DataFrame
    keys: tuple[str | Column, ...]
    timestamp: str | None = None


def key_by(frame: DataFrame, *keys: str | Column, timestamp: str | None = None) -> KeyedRows:
    """Key the rows of a batch DataFrame, as `DataStream.key_by` does in a job.

    Parameters
    ----------
    frame
        Any batch DataFrame.
    keys
        Column names or expressions, with the types and in the order of the job's `key_by`.
    timestamp
        A LONG column with milliseconds since 1970. `ctx.timestamp()` returns it, and the rows of a key come
        in its order. Without it they come in no order.

    Raises
    ------
    ConfigError
        The DataFrame is a streaming one, there is no key, or there is no such timestamp.
    SchemaError
        A name is reserved or used twice.

    Examples
    --------
    >>> key_by(spark.table("balances"), "account", timestamp="booked_ms")  # doctest: +SKIP
    """
    if frame.isStreaming:
        raise ConfigError(
            "state cannot be bootstrapped from a streaming DataFrame",
            why="a savepoint is written once, from complete rows",
            what_to_do="use spark.read instead of spark.readStream",
        )
    if not keys:
        raise ConfigError("key_by() has no key", what_to_do='name the columns, as in key_by(rows, "user")')
    for key in keys:
        if not isinstance(key, str | Column):
            raise unusable(
                "keys",
                key,
                wanted="names of columns or expressions",
                what_to_do='write "user" or F.col("user")',
            )
    check_field_names(frame.schema, "the DataFrame of a bootstrap")
    kinds = {field.name: field.dataType for field in frame.schema}
    if timestamp is not None and not isinstance(kinds.get(timestamp), T.LongType):
        raise ConfigError(
            f"there is no LONG column '{timestamp}'",
            what_to_do="give a column of milliseconds since 1970, such as unix_millis(time)",
        )
    return KeyedRows(frame, keys, timestamp)


def bootstrap_function(
    states: KeyedStateBootstrapFunction | Sequence[StateColumns], schema: T.StructType, uid: str
) -> KeyedStateBootstrapFunction:
    """Check the function, or the columns, that fill an operator's states; return the function."""
    if isinstance(states, KeyedStateBootstrapFunction):
        check_methods(states, KeyedStateBootstrapFunction, f"the {type(states).__name__}")
        check_can_be_sent(states, "that fills the state of", uid)
        return states
    pairs = states if isinstance(states, list | tuple) else ()
    are_pairs = (
        isinstance(one, tuple)
        and len(one) == 2
        and hasattr(one[0], "stored_type")
        and isinstance(one[1], str | list | tuple)
        for one in pairs
    )
    if not pairs or not all(are_pairs):
        raise unusable(
            "states",
            states,
            wanted="a KeyedStateBootstrapFunction, or pairs of descriptor and columns",
            what_to_do='write [(ValueStateDescriptor("total", "LONG"), "total")]',
        )
    return ColumnsFunction(pairs, schema, uid)
