"""Base classes of readers and writers of formats, which convert bytes of records to rows or text and back.

A reader is pickled into the plan with its settings only. :meth:`Reader.make_converter` creates everything
else (a parsed schema, the registry's client) once per process.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.connectors.bad_records import MOST_REASON
from flinkish_spark.connectors.formats.registry import (
    HEADER_BYTES,
    MAGIC,
    NoSuchSchema,
    RegistrySchema,
    SchemaRegistry,
    client_of,
)
from flinkish_spark.contracts.format import EncodedColumn, PartReader, PartWriter
from flinkish_spark.core.errors import RetriableError, SchemaError
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.types.arrow_columns import SMALLEST_PART, read_in_parts
from flinkish_spark.types.arrow_types import arrow_type

#: Fields of a decoded record: its row or text, and the reason why it is bad.
READ, REASON = "read", "reason"
#: Errors that Arrow raises for a value of a wrong type; no memory errors.
_MISFITS = (OverflowError, TypeError, ValueError)


class OnSchemaChange(Choice):
    """Policy for records whose writer's schema has more than the source's own schema.

    A field that the writer's schema lacks is no such change: it is null, or has the default of the source's
    schema.
    """

    #: Stop the job, with the names of the fields, so that no field is left out by accident.
    FAIL = "fail"
    #: Start again with the newest schema of the subject: new columns, null in records from before. In Avro
    #: also for a value that the source's schema cannot hold; the column's type may be another one then.
    EVOLVE = "evolve"
    #: Read the fields of the source's schema, and leave out all others.
    LEAVE_OUT = "leave_out"


class CodecError(ValueError):
    """A record cannot be decoded, or a row cannot be encoded; the message is the reason."""


@dataclass(frozen=True)
class SliceResult:
    rows: pa.Array
    #: For each record, if its row is proven to be right. The other rows are ignored.
    are_proven: pa.Array


#: Reads a slice of binary values, some of which may be null. Returns None if its records must be read one by
#: one; raises no error about a record.
SliceConverter = Callable[[pa.Array], SliceResult | None]


class Reader(ABC):
    """Reads the keys or the values of records. Compared and hashed by its settings."""

    #: The type of a read value: the fields, or STRING for JSON text of them.
    kind: T.DataType

    @abstractmethod
    def make_converter(self) -> Callable[[bytes], Any]:
        """Return the function that reads a record; called once per process."""
        # The function returns a text, or a tuple with a value for each field as Arrow takes it (a time as
        # microseconds, a map as a list of pairs). It raises CodecError for a bad record; any other exception
        # ends the task.

    def make_slice_converter(self) -> SliceConverter | None:
        """Return a function that reads slices, if the reader has one; called once per process."""
        return None

    def read(self, values: pa.Array, time_zone: str) -> tuple[pa.Array, pa.Array]:
        """Return a struct for each value, and the reasons of bad values; both are null for a null."""
        return read_values(self, values)


class Writer(ABC):
    """Writes the keys or the values of records. Compared and hashed by its settings."""

    @abstractmethod
    def make_converter(self) -> Callable[[Any], bytes]:
        """Return the function that writes a row, given as Arrow's dict; it raises CodecError."""


def write_values(writer: Writer, rows: pa.Array) -> tuple[pa.Array, pa.Array]:
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
    """Return what was read of each value, and the reasons of bad values; both are null for a null."""
    found = SliceReader(reader).read(values)
    return found.field(0), found.field(1)


@dataclass(frozen=True)
class SliceReader:
    """Reads a slice of values at once, and the values that are not proven one by one."""

    reader: Reader

    def read(self, values: pa.Array) -> pa.Array:
        at_once = _make_slice_converter(self.reader)

        def complete(part: pa.Array) -> pa.Array | None:
            found = None if at_once is None else at_once(part)
            return None if found is None else self._complete(found, part)

        tried = None if at_once is None else complete
        parts = [*read_in_parts(values.cast(pa.binary()), tried, self._read_by_record)]
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)

    def _complete(self, found: SliceResult, values: pa.Array) -> pa.Array:
        proven = found.are_proven.to_numpy(zero_copy_only=False)
        reasons = pa.nulls(len(values), pa.string())
        made = pa.StructArray.from_arrays([_mask_nulls(values, found.rows), reasons], [READ, REASON])
        others = np.flatnonzero(~proven)
        if not len(others):
            return made
        left = values.take(pa.array(others))
        # The other records may have another prefix, and many of them the same one, so they are read as a
        # slice again. Only if at least a quarter was proven, so that a slice is not read many times.
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
                    reasons[at] = f"a value does not fit its column's type: {misfit}"[:MOST_REASON]
                    found[at] = None
            rows = pa.array(found, kind)
        return pa.StructArray.from_arrays([rows, pa.array(reasons, pa.string())], [READ, REASON])


def _mask_nulls(values: pa.Array, rows: pa.Array) -> pa.Array:
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
            except CodecError as error:
                reason = str(error)[:MOST_REASON]
        found.append(made)
        reasons.append(reason)
    return found, reasons


@dataclass(frozen=True)
class ConvertingReader(PartReader):
    reader: Reader

    def read(self, values: pa.Array, time_zone: str) -> tuple[pa.Array, pa.Array]:
        rows, reasons = self.reader.read(values, time_zone)
        if self.name != "value" and reasons.null_count < len(reasons):
            reasons = pc.binary_join_element_wise(f"its {self.name}: ", reasons, "")
        return rows, reasons


@dataclass(frozen=True)
class ConvertingWriter(PartWriter):
    writer: Writer

    @property
    def may_misfit(self) -> bool:
        return True

    @abstractmethod
    def _rows(self, records: pa.RecordBatch) -> pa.Array:
        """Return what the converter writes."""

    def write(self, records: pa.RecordBatch) -> EncodedColumn:
        return EncodedColumn(*write_values(self.writer, self._rows(records)))


@dataclass
class SchemaDifference:
    #: Fields that the reader's schema lacks.
    left_out: list[str] = field(default_factory=list)
    #: Fields whose values the reader would read as other values.
    other: list[str] = field(default_factory=list)


def check_difference(writer: RegistrySchema, found: SchemaDifference, policy: OnSchemaChange) -> None:
    if found.other:
        raise SchemaError(
            f"records were written with {writer.name}, whose types differ from those of the source's schema",
            why="; ".join(found.other[:5]),
            what_to_do="give the source a schema with the same types",
        )
    if not found.left_out or policy is OnSchemaChange.LEAVE_OUT:
        return
    names = ", ".join(f"'{name}'" for name in found.left_out[:10])
    if policy is OnSchemaChange.EVOLVE:
        raise to_mismatch_error(writer, f"it has the new fields {names}", policy)
    raise SchemaError(
        f"records were written with {writer.name}, which has fields that the source does not read: {names}",
        what_to_do="choose OnSchemaChange.EVOLVE for new columns, OnSchemaChange.LEAVE_OUT to do without, or "
        "give a schema with them",
    )


def to_mismatch_error(
    writer: RegistrySchema, what: str, policy: OnSchemaChange
) -> SchemaError | RetriableError:
    """Return the error about values that have no place in the reader's schema."""
    if policy is OnSchemaChange.EVOLVE:
        return RetriableError(
            f"records were written with {writer.name}, which does not fit the schema of the source",
            why=f"{what}; the job starts again and reads with the newest schema",
            what_to_do="wait: the job starts again by itself",
            schema_id=writer.schema_id,
        )
    return SchemaError(
        f"records were written with {writer.name}, which cannot be read with the schema of the source",
        why=what,
        what_to_do="give the source a schema that the registry calls compatible with both, or choose "
        "OnSchemaChange.EVOLVE for the newest one",
    )


def fetch_schema(registry: SchemaRegistry, schema_id: int, kind: str) -> RegistrySchema:
    try:
        found = client_of(registry).find_by_id(schema_id)
    except NoSuchSchema:
        raise CodecError(f"the registry has no schema {schema_id}") from None
    if found.kind != kind:
        raise CodecError(f"its schema {schema_id} is {found.kind}, and not {kind}")
    return found


def schema_id_of(data: bytes) -> int:
    """Return the schema id at the beginning of a record in the registry's wire format."""
    if len(data) < HEADER_BYTES or data[0] != MAGIC:
        raise CodecError("it does not begin with a zero byte and a schema id")
    return int.from_bytes(data[1:HEADER_BYTES], "big")


def prepare_by_id(
    registry: SchemaRegistry, kind: str, prepare: Callable[[RegistrySchema], Any]
) -> Callable[[bytes], Any]:
    """Return a function from a record to what was prepared of its writer's schema, once per process."""

    @functools.cache
    def find(schema_id: int) -> Any:
        return prepare(fetch_schema(registry, schema_id, kind))

    return lambda data: find(schema_id_of(data))
