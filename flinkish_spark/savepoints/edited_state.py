"""The rows of one state as a user writes them back: as `read_state` gives them, and how they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from flinkish_spark.errors import ConfigError, SchemaError
from flinkish_spark.operators.group_state import STATE
from flinkish_spark.operators.table_codec import HASH, TOUCHED, SlotForm, TableLayout
from flinkish_spark.runtime.columns import quoted
from flinkish_spark.runtime.row_blocks import arrow_schema
from flinkish_spark.savepoints.entries import TIMES
from flinkish_spark.savepoints.group_edits import EditedState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_WINDOW = (TIMES["from"], TIMES["to"])
_TOUCHED = TIMES[TOUCHED]


@dataclass(frozen=True)
class StateRows:
    """All entries that a state is to have.

    Parameters
    ----------
    name
        Of the state.
    frame
        The key's hash, then columns in stored order.
    edited
        How they are stored.
    """

    name: str
    frame: DataFrame
    edited: EditedState


def state_rows(
    frame: DataFrame, uid: str, name: str, key_types: Sequence[str], stored: pa.Schema | None
) -> StateRows:
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
    layout, columns = state_columns(frame.schema, uid, name, key_types)
    _check_same_slots(layout.schema, stored, uid, name)
    keys = [F.col(quoted(one.name)) for one in columns[: len(key_types)]]
    rows = frame
    if len(layout.values) == 1:
        # A null is what a state has that has nothing.
        rows = frame.where(F.col(quoted(columns[-1].name)).isNotNull())
    selected = rows.select(
        F.xxhash64(*keys).alias(HASH),
        *(F.col(quoted(one.name)).alias(f"c{number}") for number, one in enumerate(columns)),
    )
    fields = [T.StructField(f"c{number}", one.dataType) for number, one in enumerate(columns)]
    schema = arrow_schema([T.StructField(HASH, T.LongType()), *fields])
    return StateRows(name, selected, EditedState(STATE + name, schema, layout.schema))


def state_columns(
    schema: T.StructType, uid: str, name: str, key_types: Sequence[str]
) -> tuple[TableLayout, list[T.StructField]]:
    """Return how a state with these columns is stored, and the columns in stored order."""
    what = f"the state '{name}' of '{uid}'"
    key_names = ["key"] if len(key_types) == 1 else [f"key_{number}" for number in range(len(key_types))]
    given = {field.name: field for field in schema}
    for key, kind in zip(key_names, key_types, strict=True):
        found = given[key].dataType.simpleString() if key in given else "missing"
        if found != kind:
            raise SchemaError(
                f"{what} is keyed by '{key}', a {kind}, which is {found}",
                what_to_do="give the columns that read_state gives; cast the key to its type",
            )
    has_window = [window in given for window in _WINDOW]
    if any(has_window) and not all(has_window):
        raise SchemaError(f"{what} has one of {' and '.join(_WINDOW)}", what_to_do="give both, or none")
    times = [time for time in (*_WINDOW, _TOUCHED) if time in given]
    for time in times:
        if not isinstance(given[time].dataType, T.TimestampType):
            raise SchemaError(
                f"'{time}' of {what} is a {given[time].dataType.simpleString()}",
                what_to_do="cast it to TIMESTAMP",
            )
    values = [field for field in schema if field.name not in (*key_names, *times)]
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
        _TOUCHED in times,
        None,
        tuple(field.name for field in values) if len(values) > 1 else (),
    )
    return layout, [*(given[one] for one in (*key_names, *times)), *values]


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
