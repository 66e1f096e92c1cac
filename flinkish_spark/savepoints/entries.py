"""Conversion of stored entries to the columns and timestamps of readers and writers, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.core.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, TimeDomain
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.savepoints import StateFile
from flinkish_spark.savepoints.files import SavepointDamagedError
from flinkish_spark.state.base_files import BaseFiles, MappedBases
from flinkish_spark.state.codec import NAME, TIME, TOUCHED, TOUCHES, reader_name, value_fields
from flinkish_spark.state.evolution import (
    StateMismatch,
    common_type,
    evolve,
    flatten_types,
    is_single,
    read_value_types,
    types_text,
)
from flinkish_spark.state.group_values import describe_group, inline_base, read_tables
from flinkish_spark.state.key_group import TIMERS, infer_layout
from flinkish_spark.state.savepoint_files import state_in
from flinkish_spark.types.arrow_types import spark_type

Array = np.ndarray[Any, Any]

#: Readers' names of time columns, which are stored under short names in milliseconds.
TIMES = {"from": "window_start", "to": "window_end", TOUCHED: "touched_at"}
#: Readers' name for the access times of a list's elements and a map's entries.
EACH_TOUCHED_AT = "each_touched_at"
#: Timestamps for the beginning and the end of time, such as those of the global window: the limits of
#: Python's datetime in all time zones.
FIRST_MICROS, LAST_MICROS = -62_135_510_400_000_000, 253_402_128_000_000_000
_MILLISECOND_MICROS = 1_000


def to_micros(ms: pa.Array) -> pa.Array:
    """Convert times in ms to Spark's timestamps, clipped to :data:`FIRST_MICROS` and `LAST_MICROS`."""
    first, last = FIRST_MICROS // _MILLISECOND_MICROS, LAST_MICROS // _MILLISECOND_MICROS
    clipped = np.clip(ms.fill_null(0).to_numpy(), first, last) * _MILLISECOND_MICROS
    mask = ms.is_null().to_numpy(zero_copy_only=False)
    return pa.array(clipped, pa.int64(), mask=mask).cast(pa.timestamp("us", "UTC"))


def to_ms(timestamps: pa.Array) -> pa.Array:
    """Convert timestamps to stored times in ms; the inverse of :func:`to_micros`."""
    micros = timestamps.cast(pa.timestamp("us", timestamps.type.tz)).cast(pa.int64())
    plain = micros.fill_null(0).to_numpy()
    if (plain % _MILLISECOND_MICROS).any():
        raise ValueError("times of states are whole milliseconds")
    ms = plain // _MILLISECOND_MICROS
    ms[plain <= FIRST_MICROS] = MIN_WATERMARK_MS
    ms[plain >= LAST_MICROS] = MAX_WATERMARK_MS
    return pa.array(ms, pa.int64(), mask=micros.is_null().to_numpy(zero_copy_only=False))


def to_element_times(touched: pa.Array, touches: pa.Array, values: pa.Array) -> pa.Array:
    """Return the access times of all elements of lists or maps as timestamps, even if they are equal."""
    offsets = _offsets(values)
    counts = np.diff(offsets)
    found = np.repeat(touched.to_numpy(), counts)
    found[np.repeat(touches.is_valid().to_numpy(zero_copy_only=False), counts)] = touches.flatten().to_numpy()
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), to_micros(pa.array(found)))


def to_stored_times(touched: pa.Array, given: pa.Array, values: pa.Array) -> pa.Array:
    """Return access times of elements in their stored form; the inverse of :func:`to_element_times`."""
    offsets, counts = _offsets(given), np.diff(_offsets(values))
    known = given.is_valid().to_numpy(zero_copy_only=False)
    if (np.diff(offsets)[known] != counts[known]).any():
        raise ValueError("there must be as many times as elements")
    flat = given.flatten()
    if flat.null_count:
        raise ValueError("one is null; every element must have one")
    times_ms = to_ms(flat)
    latest = np.full(len(given), MIN_WATERMARK_MS)
    np.maximum.at(latest, np.repeat(np.arange(len(given))[known], counts[known]), times_ms.to_numpy())
    if (latest != touched.to_numpy())[known & (counts > 0)].any():
        raise ValueError(
            f"the latest one must be the entry's {TIMES[TOUCHED]}; leave {EACH_TOUCHED_AT} out, or give "
            "null, if all elements have that time"
        )
    lengths = np.append(0, np.cumsum(np.where(known, counts, 0)))
    return pa.ListArray.from_arrays(pa.array(lengths, pa.int32()), times_ms, mask=pa.array(~known))


def _offsets(lists: pa.Array) -> Array:
    offsets: Array = lists.offsets.to_numpy()
    counted: Array = offsets - offsets[0]
    return counted


CLOCK, TIME_MS = "clock", "time_ms"

#: Converts the rows that a task gets to whole state values.
Values = Callable[[Iterable[pa.RecordBatch]], Iterator["bytes | memoryview"]]
COPY = T.StructType([T.StructField("copy", T.BinaryType())])
FOUND = T.StructType([T.StructField("section", T.StringType()), T.StructField("schema", T.BinaryType())])


@dataclass(frozen=True)
class SavepointValues:
    """Reads the values of a savepoint's files; each row describes a file as JSON."""

    place: StoreSpec

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[bytes | memoryview]:
        for batch in batches:
            for text in batch.column(0).to_pylist():
                for _, value in file_values(self.place, StateFile.from_json(json.loads(text))):
                    yield value


def file_values(place: StoreSpec, file: StateFile) -> Iterator[tuple[int, memoryview]]:
    try:
        for batch in state_in(place, file):
            groups = batch.column(0).to_pylist()
            for group, value in zip(groups, batch.column(1), strict=True):
                yield group, memoryview(value.as_buffer())
    except (OSError, ValueError) as error:
        raise SavepointDamagedError(
            f"the file {file.path} of the savepoint {place.url} cannot be used",
            why=str(error),
            what_to_do="restore the savepoint from a backup, or use another one",
            file=file.path,
        ) from error


@dataclass(frozen=True)
class StoreValues:
    """Reads values of an operator from rows of Spark's state store, and merges their bases."""

    #: Folder with the operator's bases of big key groups.
    bases: StoreSpec
    operator: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[bytes | memoryview]:
        bases = BaseFiles(MappedBases(self.bases), 0, None)
        for batch in batches:
            for stored in batch.column(0).to_pylist():
                value = inline_base(stored, bases)
                describe_group(value, self.operator)
                yield value


@dataclass(frozen=True)
class FindSections:
    """Finds the sections that an operator has stored, each distinct schema once; runs in tasks."""

    values: Values

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found: dict[tuple[str, bytes], None] = {}
        for value in self.values(batches):
            for name, table in read_tables(value).items():
                found[name, table.schema.serialize().to_pybytes()] = None
        if found:
            sections, schemas = zip(*found, strict=True)
            yield pa.RecordBatch.from_pydict({"section": list(sections), "schema": list(schemas)})


def common_schema(what: str, schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return columns for the entries of all key groups, which may be stored under several declarations."""
    # Lists and maps to which a savepoint writer gave one time have no times of elements.
    first = max(schemas, key=lambda schema: TOUCHES in schema.names)
    slots = [field for field in first if not _is_value(field)]
    values: dict[str, pa.DataType] = {}
    given = [read_value_types(schema) for schema in schemas]
    if not all(map(is_single, given)):
        # A single field is stored as a struct; if some declaration has several fields, it gets a column of
        # its own.
        given = list(map(flatten_types, given))
    for schema, kinds in zip(schemas, given, strict=True):
        if _find_slot_fields(schema) != _find_slot_fields(first):
            raise StateMismatch(
                f"state {what!r} is stored as {types_text(first)} and as {types_text(schema)}: "
                "its key groups do not have the same keys, windows or times"
            )
        for name, kind in kinds.items():
            values[name] = _find_common_type(what, name, values.get(name, kind), kind)
    at = first.names.index("value_0")
    fields = [
        pa.field(f"value_{number}", kind, metadata={NAME: name})
        for number, (name, kind) in enumerate(values.items())
    ]
    return pa.schema([*slots[:at], *fields, *slots[at:]])


def _find_slot_fields(schema: pa.Schema) -> list[pa.Field]:
    return [field.remove_metadata() for field in schema if not _is_value(field) and field.name != TOUCHES]


def reader_columns(schema: pa.Schema) -> T.StructType:
    keys = [field for field in schema if _is_key(field)]
    of_field = value_columns(schema, map(reader_name, value_fields(schema)))
    found = T.StructType()
    for field in schema:
        if _is_key(field):
            found.add(_key_name(field, keys), spark_type(field.type))
        elif _is_value(field):
            found.add(of_field[reader_name(field)], spark_type(field.type))
        elif field.name in TIMES:
            found.add(TIMES[field.name], T.TimestampType())
        elif field.name == TOUCHES:
            found.add(EACH_TOUCHED_AT, T.ArrayType(T.TimestampType()))
    return found


def value_columns(schema: pa.Schema, fields: Iterable[str]) -> dict[str, str]:
    """Return the column names of value fields; a field `key` becomes `value_key`."""
    keys, times = [field for field in schema if _is_key(field)], {**TIMES, TOUCHES: EACH_TOUCHED_AT}
    taken = {_key_name(field, keys) for field in keys} | {times.get(name, "") for name in schema.names}
    # Keys and times keep their names.
    return {name: f"value_{name}" if name in taken else name for name in fields}


def timer_columns(schema: pa.Schema) -> T.StructType:
    """Return the readers' columns of timers, from a table with the operator's keys."""
    keys = [field for field in schema if _is_key(field)]
    found = T.StructType()
    for field in keys:
        found.add(_key_name(field, keys), spark_type(field.type))
    found.add(CLOCK, T.StringType()).add(TIME_MS, T.LongType())
    return found.add(TIMES["from"], T.TimestampType()).add(TIMES["to"], T.TimestampType())


@dataclass(frozen=True)
class ReadEntries:
    """Reads the entries of a state; runs in tasks."""

    values: Values
    section: str
    #: From :func:`common_schema`.
    schema: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        layout, names = infer_layout(self.schema), reader_columns(self.schema).names
        for value in self.values(batches):
            stored = read_tables(value).get(self.section)
            if stored is not None and stored.num_rows:
                yield pa.RecordBatch.from_arrays(self._columns(evolve(layout, stored)), names=names)

    def _columns(self, table: pa.RecordBatch) -> list[pa.Array]:
        arrays = []
        for field, column in zip(table.schema, table.columns, strict=True):
            if field.name in TIMES:
                arrays.append(to_micros(column))
            elif field.name == TOUCHES:
                arrays.append(to_element_times(table.column(TOUCHED), column, table.column("value_0")))
            elif _is_key(field) or _is_value(field):
                arrays.append(column)
        return arrays


@dataclass(frozen=True)
class FirstCopy:
    """Finds one copy of a broadcast state among the values of a task; runs in tasks."""

    values: Values
    section: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found: bytes | None = None
        for value in self.values(batches):
            if found is None and self.section in read_tables(value):
                found = bytes(value)
        if found is not None:
            yield pa.RecordBatch.from_pydict({"copy": [found]})


@dataclass(frozen=True)
class CopyValues:
    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[bytes | memoryview]:
        for batch in batches:
            yield from batch.column(0).to_pylist()


@dataclass(frozen=True)
class ReadSection:
    """Reads a state without keys from all values that have it; runs in tasks."""

    values: Values
    section: str
    #: From :func:`common_columns`; None for the stored columns.
    columns: pa.Schema | None = None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for value in self.values(batches):
            table = read_tables(value).get(self.section)
            if table is not None:
                yield table if self.columns is None else table.cast(self.columns)


def common_columns(what: str, schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return columns for a state without keys in all partitions; see `common_schema`."""
    first = schemas[0]
    kinds = {field.name: field.type for field in first}
    for schema in schemas[1:]:
        kinds = {
            name: _find_common_type(what, name, kind, schema.field(name).type) for name, kind in kinds.items()
        }
    return pa.schema(list(kinds.items()))


@dataclass(frozen=True)
class ReadTimers:
    """Reads the timers of an operator; runs in tasks."""

    values: Values
    columns: T.StructType

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for value in self.values(batches):
            tables = read_tables(value)
            for domain in TimeDomain:
                table = tables.get(TIMERS + domain.value)
                if table is not None and table.num_rows:
                    yield self._timers(domain, table)

    def _timers(self, domain: TimeDomain, table: pa.RecordBatch) -> pa.RecordBatch:
        keys = [column for field, column in zip(table.schema, table.columns, strict=True) if _is_key(field)]
        clock = pa.array([domain.value] * table.num_rows, pa.string())
        windows = [to_micros(table.column(name)) for name in ("from", "to")]
        arrays = [*keys, clock, table.column(TIME), *windows]
        return pa.RecordBatch.from_arrays(arrays, names=self.columns.names)


def sections_of(rows: Iterable[tuple[str, bytes]]) -> Mapping[str, list[pa.Schema]]:
    found: dict[str, list[pa.Schema]] = {}
    for name, schema in sorted(set(rows)):
        found.setdefault(name, []).append(pa.ipc.read_schema(pa.py_buffer(schema)))
    return found


def _is_value(field: pa.Field) -> bool:
    return bool(field.name.startswith("value_"))


def _is_key(field: pa.Field) -> bool:
    return bool(field.name.startswith("key_"))


def _key_name(field: pa.Field, keys: Sequence[pa.Field]) -> str:
    return "key" if len(keys) == 1 else str(field.name)


def _find_common_type(what: str, name: str, one: pa.DataType, other: pa.DataType) -> pa.DataType:
    found = common_type(one, other)
    if found is None:
        raise StateMismatch(f"state {what!r}: {name!r} is stored as {one} and as {other}")
    return found
