"""State that is made of a batch DataFrame, as a user says it: which rows, by which key, what into."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column
from pyspark.sql import types as T

from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.core.validation import check_methods, unusable
from flinkish_spark.functions.keyed import RichFunction
from flinkish_spark.planning.declare import check_can_be_sent
from flinkish_spark.state.descriptors import (
    ListStateDescriptor,
    MapStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from flinkish_spark.types.ddl import is_field_list, parse_ddl
from flinkish_spark.types.schemas import check_field_names

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from flinkish_spark.functions.keyed import Context, RuntimeContext


class KeyedStateBootstrapFunction(RichFunction, ABC):
    """Fills the states and timers of keys from the rows of a DataFrame, one at a time.

    Called once per row, in tasks, while a savepoint is written; a task that is run again calls it again for
    the same rows. States and timers are declared and used as in a
    :class:`~flinkish_spark.KeyedProcessFunction`, by the same names and types as in the job. Nothing is
    emitted, and no timer fires: those that are due fire in the job.

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
        """Take one row.

        Parameters
        ----------
        value
            The row as a named tuple, as a job's functions get records.
        ctx
            The current key; the row's time, if the rows have one; the timer service. Its watermark is
            `MIN_WATERMARK_MS`, its processing time the wall clock when the savepoint was begun.
        """


#: A state, and the column or columns that it is made of.
StateColumns = tuple[StateDescriptor, "str | Sequence[str]"]
_Row = tuple[Any, ...]
#: Puts a row's columns into a state of some key.
_Put = Callable[[Any, _Row, Any], None]


class ColumnsFunction(KeyedStateBootstrapFunction):
    """Puts columns into states; a null leaves its state as it is."""

    def __init__(self, states: Sequence[StateColumns], schema: T.StructType, uid: str) -> None:
        #: Of each state the places of its columns in a row, and what puts them there.
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
    # What a function sees where there is no value is not to be taken for one that was put.
    return context.get_state(replace(descriptor, default=None))


def _fill(
    descriptor: StateDescriptor, columns: str | Sequence[str], schema: T.StructType, uid: str
) -> tuple[tuple[int, ...], _Put]:
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    missing = [name for name in names if name not in schema.names]
    if missing or not names:
        raise SchemaError(
            f"state '{descriptor.name}' of '{uid}' is to be made of '{', '.join(missing)}'",
            why="the DataFrame has no such column",
            what_to_do=f"choose from: {', '.join(schema.names)}",
        )
    # As texts: whether there may be nulls does not matter.
    forms = {", ".join(one.simpleString() for one in kinds): put for kinds, put in _forms(descriptor, uid)}
    given = ", ".join(schema[name].dataType.simpleString() for name in names)
    if given not in forms:
        raise SchemaError(
            f"state '{descriptor.name}' of '{uid}' cannot be made of {', '.join(names)}",
            why=f"they are {given}, and it takes {' or '.join(forms)}",
            what_to_do="cast the columns",
        )
    return tuple(schema.names.index(name) for name in names), forms[given]


def _forms(descriptor: StateDescriptor, uid: str) -> list[tuple[Sequence[T.DataType], _Put]]:
    """Return the ways to make a state of columns: their types, and what puts them into the state."""
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
        f"state '{descriptor.name}' of '{uid}' cannot be made of columns",
        why=f"a {type(descriptor).__name__} has a function of its own",
        what_to_do="use a KeyedStateBootstrapFunction that adds to it",
    )


def _fields(ddl: str) -> tuple[list[T.DataType], Callable[[_Row], Any]]:
    """Return the columns that make one value of a type, and how."""
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
        raise ValueError(f"a map has no null as its key; one came for the key {key!r}")
    _refuse_second(row[0] in state, key)
    state[row[0]] = make(row[1:])


def _put_whole(has_fields: bool, state: Any, row: _Row, key: Any) -> None:
    _refuse_second(len(state) > 0, key)
    # A null goes on as None: a list refuses it, with a reason.
    given = row[0]
    if has_fields and isinstance(given, dict):
        given = {one: value if value is None else tuple(value.values()) for one, value in given.items()}
    elif has_fields:
        given = [one if one is None else tuple(one.values()) for one in given]
    state.update(given)


def _refuse_second(is_there: bool, key: Any) -> None:
    if is_there:
        raise ValueError(
            f"several rows for the key {key!r}: a DataFrame has no order, so none of them is the right one; "
            "aggregate them first"
        )


@dataclass(frozen=True)
class KeyedRows:
    """Rows of a batch DataFrame by key; from :func:`key_by`."""

    frame: DataFrame
    keys: tuple[str | Column, ...]
    timestamp: str | None = None


def key_by(frame: DataFrame, *keys: str | Column, timestamp: str | None = None) -> KeyedRows:
    """Return the rows of a batch DataFrame by key.

    Parameters
    ----------
    frame
        Any batch DataFrame.
    keys
        Column names or expressions, as in the job's `key_by`: of the same types, in the same order.
    timestamp
        A LONG column with milliseconds since 1970: what `ctx.timestamp()` returns, and in which order the
        rows of a key come. Without it they come in no order, as the rows of a DataFrame do.

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
            "state cannot be made of a streaming DataFrame",
            why="a savepoint is written once, from rows that are all there",
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
    """Return the function that fills an operator's states, checked against the rows' schema."""
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
