"""What a user says about state that is made of a batch DataFrame: which rows, by which key, what into.

Keys are hashed by Spark exactly as a job's `key_by` does, so every key finds its state in the key group where
the job will look for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import Column
from pyspark.sql import types as T

from flinkish_spark.arguments import refuse_if_never_run, unusable
from flinkish_spark.errors import ConfigError
from flinkish_spark.graph.declared import check_can_be_sent, check_field_names
from flinkish_spark.savepoints.bootstrap_function import KeyedStateBootstrapFunction
from flinkish_spark.savepoints.columns_function import ColumnsFunction, StateColumns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class KeyedRows:
    """Rows of a batch DataFrame by key; from :func:`keyed_by`."""

    frame: DataFrame
    keys: tuple[str | Column, ...]
    timestamp: str | None = None


def keyed_by(frame: DataFrame, *keys: str | Column, timestamp: str | None = None) -> KeyedRows:
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
    >>> keyed_by(spark.table("balances"), "account", timestamp="booked_ms")  # doctest: +SKIP
    """
    if frame.isStreaming:
        raise ConfigError(
            "state cannot be made of a streaming DataFrame",
            why="a savepoint is written once, from rows that are all there",
            what_to_do="use spark.read instead of spark.readStream",
        )
    if not keys:
        raise ConfigError(
            "keyed_by() has no key", what_to_do='name the columns, as in keyed_by(rows, "user")'
        )
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
    """Return the function that fills an operator's states, checked against the rows' schema.

    Raises
    ------
    ConfigError, SchemaError, UserFunctionError
        It is none, a column is missing or of another type than the state, or the function cannot be sent.
    """
    if isinstance(states, KeyedStateBootstrapFunction):
        name = type(states).__name__
        refuse_if_never_run(states.process_element, f"{name}.process_element()")
        check_can_be_sent(states, "that fills the state of", uid)
        return states
    if not isinstance(states, list | tuple) or not states or not all(map(_is_pair, states)):
        raise unusable(
            "states",
            states,
            wanted="a KeyedStateBootstrapFunction, or pairs of descriptor and columns",
            what_to_do='write [(ValueStateDescriptor("total", "LONG"), "total")]',
        )
    return ColumnsFunction.of(states, schema, uid)


def _is_pair(one: object) -> bool:
    if not isinstance(one, tuple) or len(one) != 2:
        return False
    return hasattr(one[0], "stored_type") and isinstance(one[1], str | list | tuple)
