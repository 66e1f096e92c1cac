"""The rows of one state, or of timers, as a user writes them back, and how they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from flinkish_spark.errors import ConfigError, SchemaError
from flinkish_spark.operators.elements import TimeDomain
from flinkish_spark.operators.group_state import STATE
from flinkish_spark.operators.state_evolution import spread_types, stored_values
from flinkish_spark.operators.stored_groups import stored_tables
from flinkish_spark.operators.table_codec import HASH, TOUCHED, Expiry, SlotForm, TableLayout, timer_layout
from flinkish_spark.protocol.savepoints import StateFile
from flinkish_spark.runtime.columns import quoted
from flinkish_spark.runtime.row_blocks import arrow_schema
from flinkish_spark.savepoints.entries import CLOCK, TIME_MS, file_values, value_columns
from flinkish_spark.savepoints.files import SavepointDir
from flinkish_spark.savepoints.group_edits import (
    Edit,
    EditedBroadcast,
    EditedItems,
    EditedState,
    EditedTimers,
    PartitionEdit,
)
from flinkish_spark.savepoints.times import EACH_TOUCHED_AT, TIMES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_WINDOW = (TIMES["from"], TIMES["to"])
_TOUCHED = TIMES[TOUCHED]
_NO_FIELDS: Mapping[str, str] = {}
_COLUMNS = "give the columns that read_timers gives"


@dataclass(frozen=True)
class EditRows:
    """All entries that a state is to have, or all timers of an operator.

    Parameters
    ----------
    frame
        The key's hash, then columns in the order that `edit` says.
    edit
        How they are stored.
    """

    frame: DataFrame
    edit: Edit


@dataclass(frozen=True)
class PartitionRows:
    """All entries that a broadcast state, or all items that an operator list state is to have.

    Parameters
    ----------
    frame
        Key and value, or item.
    """

    frame: DataFrame
    edit: PartitionEdit


def broadcast_rows(frame: DataFrame, uid: str, name: str) -> PartitionRows:
    """Return the entries of a broadcast state, checked as far as that is possible without reading them.

    Raises
    ------
    ConfigError, SchemaError
        As from :func:`state_rows`.
    """
    ordered = _exactly(frame, ("key", "value"), f"the broadcast state '{name}' of '{uid}'")
    return PartitionRows(ordered, EditedBroadcast(name, arrow_schema(ordered.schema)))


def item_rows(frame: DataFrame, uid: str, name: str) -> PartitionRows:
    """Return the items of an operator list state, checked as far as that is possible without reading them.

    Raises
    ------
    ConfigError, SchemaError
        As from :func:`state_rows`.
    """
    ordered = _exactly(frame, ("item",), f"the operator list state '{name}' of '{uid}'")
    return PartitionRows(ordered, EditedItems(name, arrow_schema(ordered.schema)))


def _exactly(frame: DataFrame, names: tuple[str, ...], what: str) -> DataFrame:
    if frame.isStreaming:
        raise ConfigError("state cannot be made of a streaming DataFrame", what_to_do="use spark.read")
    if set(frame.columns) != set(names):
        raise SchemaError(
            f"{what} is given as {', '.join(frame.columns)}",
            what_to_do=f"give the columns that reading it gives: {' and '.join(names)}",
        )
    return frame.select(*names)


def state_rows(
    frame: DataFrame, uid: str, name: str, key_types: Sequence[str], stored: pa.Schema | None
) -> EditRows:
    """Return the rows of a state, checked as far as that is possible without reading them.

    Parameters
    ----------
    frame
        Columns as `read_state` gives them, in any order.
    key_types
        Of the operator's key.
    stored
        Columns that the state has now; None for one that the operator has not stored yet.

    Raises
    ------
    ConfigError
        The DataFrame is a streaming one.
    SchemaError
        Columns are missing, of another type, or too many.
    """
    if frame.isStreaming:
        raise ConfigError("state cannot be made of a streaming DataFrame", what_to_do="use spark.read")
    fields = {} if stored is None else fields_by_column(stored)
    layout, columns = state_columns(frame.schema, uid, name, key_types, fields)
    _check_same_slots(layout.schema, stored, uid, name)
    if len(layout.values) == 1:
        # A null is what a state has that has nothing.
        frame = frame.where(F.col(quoted(columns[-1].name)).isNotNull())
    selected, schema = _hashed(frame, columns, len(key_types))
    return EditRows(selected, EditedState(STATE + name, schema, layout.schema))


def timer_rows(frame: DataFrame, uid: str, key_types: Sequence[str]) -> EditRows:
    """Return the timers of an operator, checked as far as that is possible without reading them.

    Parameters
    ----------
    frame
        Columns as `read_timers` gives them, in any order; timers of functions need no window.

    Raises
    ------
    ConfigError, SchemaError
        As from :func:`state_rows`.
    """
    if frame.isStreaming:
        raise ConfigError("timers cannot be made of a streaming DataFrame", what_to_do="use spark.read")
    for window in _WINDOW:
        if window not in frame.columns:
            frame = frame.withColumn(window, F.lit(None).cast("timestamp"))
    columns = timer_fields(frame.schema, uid, key_types)
    kinds = [one.dataType for one in columns[: len(key_types)]]
    selected, schema = _hashed(frame, columns, len(key_types))
    layouts = {domain: timer_layout(domain, kinds) for domain in TimeDomain}
    return EditRows(selected, EditedTimers(schema, layouts))


def timer_fields(schema: T.StructType, uid: str, key_types: Sequence[str]) -> list[T.StructField]:
    """Return the columns of timers in the order in which they travel."""
    what = f"the timers of '{uid}'"
    key_names = _key_names(schema, what, key_types)
    wanted = {CLOCK: "string", TIME_MS: "bigint", _WINDOW[0]: "timestamp", _WINDOW[1]: "timestamp"}
    given = {field.name: field for field in schema}
    for name, kind in wanted.items():
        found = given[name].dataType.simpleString() if name in given else "missing"
        if found != kind:
            raise SchemaError(f"'{name}' of {what} is a {kind}, and here {found}", what_to_do=_COLUMNS)
    strange = sorted(given.keys() - {*key_names, *wanted})
    if strange:
        raise SchemaError(f"{what} have no column '{strange[0]}'", what_to_do=_COLUMNS)
    return [given[name] for name in (*key_names, *wanted)]


def _hashed(frame: DataFrame, columns: Sequence[T.StructField], keys: int) -> tuple[DataFrame, pa.Schema]:
    """Return columns, the first of which are keys, behind their hash, and what they are in a block."""
    named = [F.col(quoted(one.name)) for one in columns]
    selected = frame.select(
        F.xxhash64(*named[:keys]).alias(HASH), *(one.alias(f"c{number}") for number, one in enumerate(named))
    )
    fields = [T.StructField(f"c{number}", one.dataType) for number, one in enumerate(columns)]
    return selected, arrow_schema([T.StructField(HASH, T.LongType()), *fields])


def _key_names(schema: T.StructType, what: str, key_types: Sequence[str]) -> list[str]:
    """Return the names of the key's columns; refuse others than the operator has."""
    names = ["key"] if len(key_types) == 1 else [f"key_{number}" for number in range(len(key_types))]
    given = {field.name: field for field in schema}
    for key, kind in zip(names, key_types, strict=True):
        found = given[key].dataType.simpleString() if key in given else "missing"
        if found != kind:
            raise SchemaError(
                f"the key of {what} is '{key}', a {kind}, which is {found}",
                what_to_do="give the columns that reading gives; cast the key to its type",
            )
    return names


def state_columns(
    schema: T.StructType,
    uid: str,
    name: str,
    key_types: Sequence[str],
    fields: Mapping[str, str] = _NO_FIELDS,
) -> tuple[TableLayout, list[T.StructField]]:
    """Return how a state with these columns is stored, and the columns in stored order.

    Parameters
    ----------
    fields
        Of the values that are stored now, by their columns: a state may have fields of its own by the names
        of times, or by that of the key.
    """
    what = f"the state '{name}' of '{uid}'"
    key_names = _key_names(schema, what, key_types)
    given = {field.name: field for field in schema}
    ours = given.keys() - set(fields)
    has_window = [window in ours for window in _WINDOW]
    if any(has_window) and not all(has_window):
        raise SchemaError(f"{what} has one of {' and '.join(_WINDOW)}", what_to_do="give both, or none")
    times = [time for time in (*_WINDOW, _TOUCHED) if time in ours]
    for time in times:
        if not isinstance(given[time].dataType, T.TimestampType):
            raise SchemaError(
                f"'{time}' of {what} is a {given[time].dataType.simpleString()}",
                what_to_do="cast it to TIMESTAMP",
            )
    values = [field for field in schema if field.name not in (*key_names, *times)]
    expiry = Expiry.WHOLE if _TOUCHED in times else Expiry.NOTHING
    if EACH_TOUCHED_AT in ours and len(values) == 2:
        values = [field for field in values if field.name != EACH_TOUCHED_AT]
        _check_elements(given, values[0], what)
        times.append(EACH_TOUCHED_AT)
        expiry = Expiry.ELEMENTS
    if not values or (len(values) == 1 and values[0].name != "value"):
        raise SchemaError(
            f"{what} has {'no value' if not values else f'the only value {values[0].name!r}'}",
            what_to_do="call a single value 'value'; several columns are the fields of one",
        )
    layout = TableLayout(
        name,
        tuple(to_arrow_type(given[key].dataType, timezone="UTC") for key in key_names),
        tuple(to_arrow_type(field.dataType, timezone="UTC") for field in values),
        SlotForm.KEY_AND_WINDOW if all(has_window) else SlotForm.KEY,
        expiry,
        None,
        tuple(fields.get(field.name, field.name) for field in values) if len(values) > 1 else (),
    )
    return layout, [*(given[one] for one in (*key_names, *times)), *values]


def fields_by_column(stored: pa.Schema) -> dict[str, str]:
    """Return the fields of stored values by the names that readers' columns of them have."""
    fields = spread_types(stored_values(stored))
    return {column: field for field, column in value_columns(stored, fields).items()}


def _check_elements(given: Mapping[str, T.StructField], value: T.StructField, what: str) -> None:
    """Refuse times of elements that say nothing: there are no elements, or it is no array of times."""
    kind = given[EACH_TOUCHED_AT].dataType.simpleString()
    if kind != "array<timestamp>":
        raise SchemaError(
            f"'{EACH_TOUCHED_AT}' of {what} is a {kind}", what_to_do="cast it to ARRAY<TIMESTAMP>"
        )
    if _TOUCHED not in given or not isinstance(value.dataType, T.ArrayType | T.MapType):
        raise SchemaError(
            f"{what} has the column {EACH_TOUCHED_AT}",
            why=f"that is for lists and maps with a time to live, beside {_TOUCHED}",
            what_to_do="give the columns that read_state gives",
        )


def _check_same_slots(schema: pa.Schema, stored: pa.Schema | None, uid: str, name: str) -> None:
    """Refuse other windows and times than the state has: its operator could not read them."""
    if stored is None:
        return
    own, before = (
        {TIMES[field.name] for field in columns if field.name in TIMES} for columns in (schema, stored)
    )
    if own != before:
        raise SchemaError(
            f"the state '{name}' of '{uid}' has {_listed(before)}, and the DataFrame has {_listed(own)}",
            what_to_do="give the columns that read_state gives",
        )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "no times"


def stored_columns(place: SavepointDir | None, files: Sequence[StateFile], name: str) -> pa.Schema | None:
    """Return the stored columns of a state, of the first key group that has it; None if none has.

    Parameters
    ----------
    place
        The savepoint that has the files; None where there are none.
    """
    for file in files:
        assert place is not None
        for _, value in file_values(place.path, file):
            table = stored_tables(value).get(STATE + name)
            if table is not None:
                return table.schema
    return None
