"""Values of an operator that belong to no key: a checked frame of Arrow tables, and whose it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from flinkish_spark.operators.decoded_values import StateValueError
from flinkish_spark.operators.frames import pack_frame, unpack_frame
from flinkish_spark.operators.payloads import OWNER, owner_in, read_table, table_bytes
from flinkish_spark.operators.state_evolution import misfit
from flinkish_spark.runtime.arrow_values import ValueMismatch, strict_array
from flinkish_spark.runtime.ddl import is_field_list
from flinkish_spark.runtime.python_values import to_values
from flinkish_spark.state.descriptors import made_by
from flinkish_spark.state.handed_out import naming_of


class OperatorValueMismatch(ValueError):
    """What is stored belongs to another operator or declaration."""


def pack_tables(uid: str, kind: str, tables: Mapping[str, pa.RecordBatch]) -> bytes:
    """Return tables as bytes, those without rows left out.

    Parameters
    ----------
    uid
        Of the operator.
    kind
        What sort of state it is, as in "broadcast state"; one value has one sort.
    """
    sections: dict[str, bytes | memoryview] = {OWNER: json.dumps({"uid": uid, "kind": kind}).encode()}
    for name, batch in tables.items():
        if batch.num_rows:
            sections[f"state/{name}"] = table_bytes(batch)
    return pack_frame(sections)


def unpack_tables(
    uid: str, kind: str, schemas: Mapping[str, pa.Schema], value: bytes | memoryview | None
) -> dict[str, pa.RecordBatch]:
    """Return the tables that have rows; none where nothing was stored.

    Raises
    ------
    FrameError
        The value is damaged.
    OperatorValueMismatch
        It is another operator's, of another kind, or not as it is declared.
    """
    stored = {} if value is None else unpack_frame(value)
    owner = owner_in(stored)
    stored.pop(OWNER, None)
    for fact, declared in (("uid", uid), ("kind", kind)):
        if owner.get(fact, declared) != declared:
            raise OperatorValueMismatch(
                f"the {kind} belongs to operator {owner.get('uid')!r} as {owner.get('kind')!r}, "
                f"not to {uid!r}"
            )
    unknown = sorted(stored.keys() - {f"state/{name}" for name in schemas})
    if unknown:
        raise OperatorValueMismatch(f"the stored {kind} {unknown[0][6:]!r} is no longer declared, or damaged")
    return {
        name: _read(f"{kind} {name!r}", schema, stored[f"state/{name}"])
        for name, schema in schemas.items()
        if f"state/{name}" in stored
    }


def table_of(what: str, schema: pa.Schema, columns: Sequence[Sequence[Any]]) -> pa.RecordBatch:
    """Return columns as a table.

    Raises
    ------
    StateValueError
        A value does not fit its declared type.
    """
    try:
        arrays = [strict_array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    except ValueMismatch as error:
        raise StateValueError(f"{what} got a wrong value: {error}") from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def values_of(column: pa.Array, *, has_fields: bool) -> list[Any]:
    """Return a column's values; tuples where the type is written as a list of fields."""
    values = to_values(column)
    return [tuple(value.values()) for value in values] if has_fields else values


def declared_values(column: pa.Array, ddl: str) -> list[Any]:
    """Return a column's values as they are declared: named tuples for fields, or instances of classes."""
    made, naming = made_by(ddl), naming_of(ddl)
    if made is not None:
        return [made(value) for value in values_of(column, has_fields=False)]
    values = values_of(column, has_fields=is_field_list(ddl))
    return values if naming is None else list(map(naming, values))


def _read(what: str, schema: pa.Schema, payload: memoryview) -> pa.RecordBatch:
    table = read_table(what, payload)
    if table.schema.equals(schema):
        return table
    if table.schema.names != schema.names:
        raise OperatorValueMismatch(f"{what} has the columns {', '.join(table.schema.names)}; it is damaged")
    arrays = [_as_declared(what, field, table.column(field.name)) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _as_declared(what: str, field: pa.Field, column: pa.Array) -> pa.Array:
    """Return a column as its declaration has it now: other fields, or wider types, as of keyed state."""
    wrong = misfit(column.type, field.type, (field.name,))
    if wrong is not None:
        raise OperatorValueMismatch(
            f"{what}: {'.'.join(wrong.path)!r} is stored as {wrong.stored} but declared as {wrong.declared}, "
            "which does not hold all of its values"
        )
    return column if column.type.equals(field.type) else column.cast(field.type)
