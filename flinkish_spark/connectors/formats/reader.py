"""What a format gives Spark's tasks: a function from the bytes of a record to a row or to text, and back.

A reader is a value that is pickled into the plan. What it needs beside its settings (a parsed schema, the
registry's client) is made once in a process, by :meth:`Reader.make_converter`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.connectors.formats.plain_json import MOST_REASON
from flinkish_spark.connectors.formats.registry import (
    HEADER_BYTES,
    MAGIC,
    NoSuchSchema,
    RegistrySchema,
    SchemaChangedError,
    client_of,
)
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.core.formats import OnSchemaChange, SchemaRegistry
from flinkish_spark.types.arrow_columns import SMALLEST_PART, read_in_parts
from flinkish_spark.types.arrow_types import arrow_type

#: Names within what comes of a record: its row or its text, and why it has none.
READ, REASON = "read", "reason"
#: What Arrow raises of a value that is none of its type; not what it raises of memory.
_MISFITS = (OverflowError, TypeError, ValueError)


class Unreadable(ValueError):
    """The bytes of a record are not what its format says, or a row cannot be written; says why."""


@dataclass(frozen=True)
class Proven:
    """A slice that was read at once."""

    #: A row for each record.
    rows: pa.Array
    #: Of each record, if its row is what :meth:`Reader.make_converter` reads. The rows of others are not looked at.
    are_proven: pa.Array


#: Reads a slice of bytes, some of which may be null. Returns None if all of it is to be read by record: it
#: raises nothing about a record.
SliceConverter = Callable[[pa.Array], Proven | None]


class Reader(ABC):
    """Reads one part of records, their keys or their values. Compared and hashed by its settings."""

    #: What :meth:`opened` returns values of: the fields, or STRING for JSON text of these.
    kind: T.DataType

    @abstractmethod
    def make_converter(self) -> Callable[[bytes], Any]:
        """Return the function that reads; called once per process."""
        # It returns a tuple with a value for each field as Arrow takes it (a time is microseconds, a map a
        # list of pairs), or a text. It raises Unreadable with the reason; anything else that it raises ends
        # the task, and is about no record.

    def make_slice_converter(self) -> SliceConverter | None:
        """Return what reads slices; None if there is only :meth:`opened`. Called once per process."""
        return None


class Writer(ABC):
    """Writes one part of records. Compared and hashed by its settings."""

    @abstractmethod
    def make_converter(self) -> Callable[[Any], bytes]:
        """Return the function that writes a row, a dict as Arrow makes it; raises Unreadable, with why."""


def write_values(writer: Writer, rows: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return what was written of each row, and why it was not."""
    written, reasons = _each(_make_converter(writer), rows.to_pylist())
    return pa.array(written, pa.binary()), pa.array(reasons, pa.string())


@functools.lru_cache(maxsize=64)
def _make_converter(part: Reader | Writer) -> Callable[[Any], Any]:
    return part.make_converter()


@functools.lru_cache(maxsize=64)
def _make_slice_converter(reader: Reader) -> SliceConverter | None:
    return reader.make_slice_converter()


@functools.lru_cache(maxsize=64)
def _arrow_type_of(reader: Reader) -> pa.DataType:
    return arrow_type(reader.kind)


def read_values(reader: Reader, values: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return what was read of each value, and why it was not; both are null for a null."""
    found = SliceReader(reader).read(values)
    return found.field(0), found.field(1)


@dataclass(frozen=True)
class SliceReader:
    """Reads values a slice at once, and those that are not proven one by one."""

    reader: Reader

    def read(self, values: pa.Array) -> pa.Array:
        """Return a struct for each value: what was read, and why it was not."""
        at_once = _make_slice_converter(self.reader)

        def complete(part: pa.Array) -> pa.Array | None:
            found = None if at_once is None else at_once(part)
            return None if found is None else self._complete(found, part)

        tried = None if at_once is None else complete
        parts = [*read_in_parts(values.cast(pa.binary()), tried, self._read_by_record)]
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)

    def _complete(self, found: Proven, values: pa.Array) -> pa.Array:
        proven = found.are_proven.to_numpy(zero_copy_only=False)
        reasons = pa.nulls(len(values), pa.string())
        made = pa.StructArray.from_arrays([_mask_nulls(values, found.rows), reasons], [READ, REASON])
        others = np.flatnonzero(~proven)
        if not len(others):
            return made
        left = values.take(pa.array(others))
        # Records with something else in front of them: of the next kind there may be many. Only while much
        # is proven, so that a slice is not read again and again.
        many = 4 * len(others) <= 3 * len(values) and len(others) > SMALLEST_PART
        exact = self.read(left) if many else self._read_by_record(left)
        places = np.arange(len(values))
        places[others] = np.arange(len(others)) + len(values)
        return pa.concat_arrays([made, exact]).take(pa.array(places))

    def _read_by_record(self, values: pa.Array) -> pa.Array:
        found, reasons = _each(_make_converter(self.reader), values.to_pylist())
        kind = _arrow_type_of(self.reader)
        try:
            rows = pa.array(found, kind)
        except _MISFITS:
            for at, row in enumerate(found):
                try:
                    pa.array([row], kind)
                except _MISFITS as misfit:
                    reasons[at] = f"a value is none of its column's type: {misfit}"[:MOST_REASON]
                    found[at] = None
            rows = pa.array(found, kind)
        return pa.StructArray.from_arrays([rows, pa.array(reasons, pa.string())], [READ, REASON])


def _mask_nulls(values: pa.Array, rows: pa.Array) -> pa.Array:
    """Return rows that are null where there are no bytes."""
    if not values.null_count:
        return rows
    parts = [rows.field(at) for at in range(rows.type.num_fields)]
    return pa.StructArray.from_arrays(parts, fields=rows.type.fields, mask=values.is_null())


def _each(do: Callable[[Any], Any], values: list[Any]) -> tuple[list[Any], list[str | None]]:
    found: list[Any] = []
    reasons: list[str | None] = []
    for value in values:
        made = reason = None
        if value is not None:
            try:
                made = do(value)
            except Unreadable as error:
                reason = str(error)[:MOST_REASON]
        found.append(made)
        reasons.append(reason)
    return found, reasons


@dataclass
class Difference:
    """Fields of a schema that another one does not read, by path; found by :func:`differences`."""

    #: Fields that a reader would leave out.
    left_out: list[str] = field(default_factory=list)
    #: Values that a reader would take for others.
    other: list[str] = field(default_factory=list)


def check_difference(writer: RegistrySchema, found: Difference, policy: OnSchemaChange) -> None:
    """Raise what the policy says about a writer's schema."""
    if found.other:
        raise SchemaError(
            f"records were written with {writer.name}, whose values the schema of the source reads as others",
            why="; ".join(found.other[:5]),
            what_to_do="give the source a schema with the same types",
            schema_id=writer.schema_id,
        )
    if not found.left_out or policy is OnSchemaChange.LEAVE_OUT:
        return
    names = ", ".join(f"'{name}'" for name in found.left_out[:10])
    if policy is OnSchemaChange.EVOLVE:
        raise SchemaChangedError(
            f"records were written with {writer.name}, which has the new fields {names}",
            why="the job starts again and reads them",
            schema_id=writer.schema_id,
        )
    raise SchemaError(
        f"records were written with {writer.name}, which has fields that the source does not read: {names}",
        why="on_schema_change is OnSchemaChange.FAIL",
        what_to_do="choose OnSchemaChange.EVOLVE for new columns, OnSchemaChange.LEAVE_OUT to do without, or "
        "give a schema with them",
        schema_id=writer.schema_id,
    )


def to_mismatch_error(writer: RegistrySchema, what: str, policy: OnSchemaChange) -> SchemaError | SchemaChangedError:
    """Return the error about values that have no place in the schema that is read with."""
    if policy is OnSchemaChange.EVOLVE:
        return SchemaChangedError(
            f"records were written with {writer.name}, which cannot be read with the schema of the source",
            why=f"{what}; the job starts again and reads with the newest schema",
            schema_id=writer.schema_id,
        )
    return SchemaError(
        f"records were written with {writer.name}, which cannot be read with the schema of the source",
        why=what,
        what_to_do="give the source a schema that the registry calls compatible with both, or choose "
        "OnSchemaChange.EVOLVE for the newest one",
        schema_id=writer.schema_id,
    )


def fetch_schema(registry: SchemaRegistry, schema_id: int, kind: str) -> RegistrySchema:
    try:
        found = client_of(registry).find_by_id(schema_id)
    except NoSuchSchema:
        raise Unreadable(f"the registry has no schema {schema_id}") from None
    if found.kind != kind:
        raise Unreadable(f"its schema {schema_id} is {found.kind}, and not {kind}")
    return found


def schema_id_of(data: bytes) -> int:
    """Return the number of a schema that begins the wire format of a record."""
    if len(data) < HEADER_BYTES or data[0] != MAGIC:
        raise Unreadable("it does not begin with a zero byte and the number of a schema")
    return int.from_bytes(data[1:HEADER_BYTES], "big")


@dataclass
class WriterSchemas:
    """The schemas that records name, each asked for and looked at once in a process."""

    registry: SchemaRegistry
    #: What the registry calls the format.
    kind: str
    #: Makes of a schema what its records are read by; raises what is wrong with it.
    prepare: Callable[[RegistrySchema], Any]
    _known: dict[int, Any] = field(default_factory=dict)

    def of(self, data: bytes) -> Any:
        schema_id = schema_id_of(data)
        if schema_id not in self._known:
            self._known[schema_id] = self.prepare(fetch_schema(self.registry, schema_id, self.kind))
        return self._known[schema_id]
