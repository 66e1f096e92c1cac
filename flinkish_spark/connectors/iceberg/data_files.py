"""Data files of an Iceberg table: tasks write them by pyiceberg; they travel to the commit as JSON."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs
from pyiceberg.io.fileformat import DataFileStatistics
from pyiceberg.io.pyarrow import (
    PYARROW_PARQUET_FIELD_ID_KEY,
    ParquetFormatWriter,
    PyArrowFileIO,
    schema_to_pyarrow,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.schema import Schema, sanitize_column_names
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil
from pyiceberg.types import IcebergType, ListType, MapType, StructType
from pyspark import TaskContext
from pyspark.sql import types as T

from flinkish_spark.connectors.iceberg.partitions import (
    bytes_to_text,
    find_overflow,
    find_values,
    partition_from_json,
    partition_to_json,
)
from flinkish_spark.connectors.iceberg.schemas import find_null
from flinkish_spark.connectors.staged_rows import BATCH, DELETED, ORDER, add_places
from flinkish_spark.connectors.task_staging import TaskStage
from flinkish_spark.connectors.two_phase import to_bad_record_error
from flinkish_spark.core.store import sync_directory
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import TaskAck
from flinkish_spark.types.arrow_types import arrow_schema, as_schema

#: Size in memory of the rows that a task collects before it writes a file for each of their partitions.
_BUFFER_BYTES = 128 * 1024 * 1024
#: Longest part of a record that an error message shows.
_MOST_SHOWN = 1_000
#: Statistics of a file by field id: numbers, and values as bytes.
_COUNTS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")
_BOUNDS = ("lower_bounds", "upper_bounds")
#: Column of staged rows with the sequence of a record, if the table does not get it; and all such columns.
SEQUENCE = "_fs_sequence"
CONTROL = (BATCH, ORDER, DELETED, SEQUENCE)

_DECIDED = "decided"


def metadata_for_tasks(table: TableMetadata) -> str:
    """Return a table's metadata as JSON, without its history, by which tasks write files."""
    told: dict[str, Any] = {"refs": {}, "current_snapshot_id": None}
    history = ("snapshots", "snapshot_log", "metadata_log", "statistics", "partition_statistics")
    told |= {name: [] for name in history}
    return table.model_copy(update=told).model_dump_json()


@dataclass(frozen=True)
class FilesWork:
    """Writes the records of a task into files, which its report names."""

    uid: str
    fields: T.StructType
    #: From :func:`metadata_for_tasks`.
    metadata: str
    folder: str
    #: Properties of the table's store, maybe with secrets.
    store: Mapping[str, str] = field(repr=False)
    #: The micro-batch, if rows are staged that the commit merges; None for data files.
    batch: int | None = None

    def begin(self, task: TaskContext, sinks: int) -> TaskStage:
        return _FilesStage(self, task.partitionId())


class _FilesStage(TaskStage):
    def __init__(self, work: FilesWork, task: int) -> None:
        self._work, self._given, self._place = work, arrow_schema(work.fields), task << 33
        self._table, io = TableMetadataUtil.parse_raw(work.metadata), PyArrowFileIO(dict(work.store))
        kind = DataFileWriter if work.batch is None else RowFileWriter
        self._writer: DataFileWriter | RowFileWriter = kind(self._table, work.folder, io)

    def write(self, records: pa.RecordBatch) -> None:
        work = self._work
        rows = as_schema(records.select(work.fields.names), self._given)
        self._check(rows)
        if work.batch is not None:
            rows = add_places(rows, work.batch, self._place)
            self._place += rows.num_rows
        self._writer.add(rows)

    def finish(self, ack: TaskAck) -> Mapping[str, Any]:
        return {**ack.to_json(), "files": self._writer.finish()}

    def _check(self, rows: pa.RecordBatch) -> None:
        if DELETED in rows.schema.names:
            rows = rows.filter(pc.invert(rows.column(DELETED)))
        if (found := find_null(rows, self._table.schema())) is not None:
            path, row = found
            why = f"the field {path} of the table is required, and null in {show_record(rows, row)}"
            raise to_bad_record_error(self._work.uid, why)
        if (found := find_overflow(rows, self._table.spec(), self._table.schema())) is not None:
            why, row = found
            why = f"the table has no partition for it: {why}, in {show_record(rows, row)}"
            raise to_bad_record_error(self._work.uid, why)


def show_record(rows: pa.RecordBatch, row: int) -> str:
    # The driver searches the message for markers, so a record must not contain one.
    return str(rows.slice(row, 1).to_pylist()[0])[:_MOST_SHOWN].replace("[FLINKISH", "[ FLINKISH")


class DataFileWriter:
    """Writes the rows of a task: they are collected, and each partition of them becomes a file."""

    def __init__(self, table: TableMetadata, folder: str, io: PyArrowFileIO) -> None:
        self._table, self._folder, self._io, self.schema = table, folder, io, table.schema()
        # Names of fields in files are those that Avro has, too; readers go by field ids.
        self._file_schema = sanitize_column_names(self.schema)
        self._spec, self._uuid = table.spec(), uuid.uuid4()
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._files: list[dict[str, Any]] = []

    def add(self, rows: pa.RecordBatch) -> None:
        self._held.append(rows)
        self._held_bytes += rows.nbytes
        if self._held_bytes >= _BUFFER_BYTES:
            self._flush()

    def finish(self) -> list[dict[str, Any]]:
        """Return the files, durable, as JSON."""
        self._flush()
        sync_files(str(one["path"]) for one in self._files)
        return self._files

    def _flush(self) -> None:
        if self._held:
            rows = pa.Table.from_batches(self._held).combine_chunks()
            for values, part in self._split(rows):
                self._write(values, part)
        self._held, self._held_bytes = [], 0

    def _write(self, values: Sequence[Any], rows: pa.Table) -> None:
        # Partitions are in manifests only, so that no value has to be a folder's name.
        location = f"{self._folder}/{len(self._files):05d}-{self._uuid}.parquet"
        output = self._io.new_output(location)
        wanted = arrow_fields(self._file_schema)
        [batch] = rows.to_batches()
        found = project(batch.to_struct_array(), self.schema.as_struct(), pa.struct(list(wanted)))
        with ParquetFormatWriter(output, self._file_schema, self._table.properties) as writer:
            writer.write(pa.Table.from_arrays(found.flatten(), schema=wanted))
        partition = partition_to_json(self._spec.partition_type(self.schema), values)
        statistics = writer.result()
        _drop_impossible_bounds(statistics)
        known = statistics.to_serialized_dict()
        file = {"path": location, "bytes": len(output), "partition": partition}
        file |= {"rows": known["record_count"], "split_offsets": known["split_offsets"]}
        file |= {name: {str(at): count for at, count in known[name].items()} for name in _COUNTS}
        file |= {
            name: {str(at): bytes_to_text(bound) for at, bound in known[name].items()} for name in _BOUNDS
        }
        self._files.append(file)

    def _split(self, rows: pa.Table) -> Iterator[tuple[list[Any], pa.Table]]:
        """Yield the rows of each partition, in their order, after its values."""
        fields, place = self._spec.fields, pa.array(range(rows.num_rows), pa.int64())
        if not fields:
            yield [], rows.take(place)
            return
        keys = {f"k{at}": find_values(rows, one, self.schema) for at, one in enumerate(fields)}
        grouped = pa.table({**keys, "place": place}).group_by(list(keys), use_threads=False)
        found = grouped.aggregate([("place", "list")]).to_pydict()
        for *values, places in zip(*(found[name] for name in (*keys, "place_list")), strict=True):
            yield values, rows.take(pa.array(places, pa.int64()))


def _drop_impossible_bounds(found: DataFileStatistics) -> None:
    """Leave out bounds that pyiceberg cannot make: what follows U+D7FF is no character."""
    for one in found.column_aggregates.values():
        try:
            one.max_as_bytes()
        except UnicodeEncodeError:
            one.current_max = None


class RowFileWriter:
    """Writes the records of a task as the commit merges them: the table's fields, then control columns."""

    def __init__(self, table: TableMetadata, folder: str, io: PyArrowFileIO) -> None:
        self.schema, self._io, self._stack = table.schema(), io, ExitStack()
        self._location = f"{folder}/{uuid.uuid4()}.parquet"
        # What deletes a row needs its key only.
        self._fields = [one.with_nullable(True) for one in arrow_fields(self.schema)]
        self._writer: pq.ParquetWriter | None = None
        self._rows = 0

    def add(self, rows: pa.RecordBatch) -> None:
        control = [one for one in rows.schema if one.name in CONTROL]
        wanted = pa.schema([*self._fields, *control])
        if self._writer is None:
            stream = self._io.new_output(self._location).create(overwrite=True)
            self._writer = pq.ParquetWriter(self._stack.enter_context(stream), wanted)
        # A copy, since parts of a slice are whole.
        rows = rows.take(pa.array(range(rows.num_rows)))
        found = project(rows.to_struct_array(), self.schema.as_struct(), pa.struct(self._fields))
        columns = [*found.flatten(), *(rows.column(one.name) for one in control)]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=wanted))
        self._rows += rows.num_rows

    def finish(self) -> list[dict[str, Any]]:
        """Return the file, durable, as JSON."""
        if self._writer is None:
            return []
        with self._stack:
            self._writer.close()
        sync_files([self._location])
        size = len(self._io.new_input(self._location))
        return [{"path": self._location, "bytes": size, "rows": self._rows}]


def arrow_fields(schema: Schema) -> pa.Schema:
    """Return a table's fields in Arrow's types, as its files have them."""
    return pa.schema([_allow_null_within(one) for one in schema_to_pyarrow(schema)])


def _allow_null_within(field: pa.Field) -> pa.Field:
    """Return a field whose parts may be null: below a struct that is null, a required part is, too."""
    kind = field.type
    if pa.types.is_struct(kind):
        parts = [_allow_null_within(one).with_nullable(True) for one in kind]
        return field.with_type(pa.struct(parts))
    if pa.types.is_large_list(kind):
        part = _allow_null_within(kind.value_field).with_nullable(True)
        return field.with_type(pa.large_list(part))
    if pa.types.is_map(kind):
        item = _allow_null_within(kind.item_field).with_nullable(True)
        return field.with_type(pa.map_(_allow_null_within(kind.key_field), item))
    return field


def project(values: pa.Array, kind: IcebergType, wanted: pa.DataType, *, by_id: bool = False) -> pa.Array:
    """Return values as a file holds them: the table's fields by name or id, in its order, of its types.

    pyiceberg's own projection makes a null map, and a null list of structs, empty ones.
    """
    if isinstance(kind, StructType):
        known = [find_id(one) if by_id else one.name for one in values.type]
        parts: dict[Any, pa.Array] = dict(zip(known, values.flatten(), strict=True))
        found = [
            project(parts[at], one.field_type, field.type, by_id=by_id)
            if (at := one.field_id if by_id else one.name) in parts
            else pa.nulls(len(values), field.type)
            for one, field in zip(kind.fields, wanted, strict=True)
        ]
        return pa.StructArray.from_arrays(found, fields=list(wanted), mask=values.is_null())
    if isinstance(kind, ListType):
        inner = project(values.values, kind.element_type, wanted.value_type, by_id=by_id)
        offsets = values.offsets.cast(pa.int64())
        return pa.LargeListArray.from_arrays(offsets, inner, type=wanted, mask=values.is_null())
    if isinstance(kind, MapType):
        keys = project(values.keys, kind.key_type, wanted.key_type, by_id=by_id)
        items = project(values.items, kind.value_type, wanted.item_type, by_id=by_id)
        return pa.MapArray.from_arrays(values.offsets, keys, items, type=wanted, mask=values.is_null())
    return values.cast(wanted)


def find_id(field: pa.Field) -> int | None:
    """Return the id of the table's field that a field of a file is; None if the file does not say it."""
    found = (field.metadata or {}).get(PYARROW_PARQUET_FIELD_ID_KEY)
    return None if found is None else int(found)


def file_from_json(stored: Mapping[str, Any], partition: StructType, spec_id: int) -> DataFile:
    known: dict[str, Any] = {}
    known |= {name: {int(at): count for at, count in stored[name].items()} for name in _COUNTS}
    known |= {name: {int(at): base64.b64decode(b) for at, b in stored[name].items()} for name in _BOUNDS}
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=stored["path"],
        file_format=FileFormat.PARQUET,
        partition=partition_from_json(partition, stored["partition"]),
        record_count=stored["rows"],
        file_size_in_bytes=stored["bytes"],
        split_offsets=stored["split_offsets"],
        sort_order_id=None,
        spec_id=spec_id,
        equality_ids=None,
        key_metadata=None,
        **known,
    )


def store_of(table: Table) -> PyArrowFileIO:
    return PyArrowFileIO(dict(table.io.properties))


def path_on_disk(location: str) -> Path | None:
    """Return the path of a file on a disk; None for a store."""
    scheme, _, path = PyArrowFileIO.parse_location(location)
    return Path(path) if scheme == "file" else None


def sync_files(locations: Iterable[str], known: set[str] | None = None) -> None:
    """Make files on a disk durable, and their names; stores do that themselves.

    Files in `known` are durable already; those that are synced are added to it.
    """
    new = [one for one in locations if known is None or one not in known]
    paths = [path for one in new if (path := path_on_disk(one)) is not None]
    folders = {above for path in paths for above in path.parents}
    for path in (*paths, *sorted(folders, reverse=True)):
        # What was cleaned up meanwhile is not needed any more; a folder that we may not read has nothing new.
        with suppress(FileNotFoundError, PermissionError):
            sync_directory(path)
    if known is not None:
        known.update(new)


class StagedFolders:
    """Folders of one sink's staged micro-batches below a table's data, and which of them are open.

    Beside them lies a small file for each that is neither committed nor swept: committed data stays where it
    was staged, so the folders alone do not tell what is left over.
    """

    def __init__(self, root: str, io: PyArrowFileIO) -> None:
        self._root = root
        scheme, host, self._path = PyArrowFileIO.parse_location(self._root, io.properties)
        self._system = io.fs_by_scheme(scheme, host)

    def open(self, name: str) -> str:
        """Note a folder durably, before a file is written into it; return it."""
        self._note(name, "staged")
        return f"{self._root}/{name}"

    def note_decided(self, name: str, checkpoint: CheckpointId, branch: str) -> None:
        """Note durably that a commit of a folder's files may have been asked for."""
        self._note(name, f"{_DECIDED} {checkpoint} {branch}")

    def _note(self, name: str, text: str) -> None:
        with self._system.open_output_stream(f"{self._path}/.open/{name}") as file:
            file.write(f"{text}\n".encode())
        sync_files([f"{self._root}/.open/{name}"])

    def find_decided(self, name: str) -> tuple[CheckpointId, str] | None:
        """Return the checkpoint whose commit of a folder's files may have been asked for, and its branch."""
        with (
            suppress(FileNotFoundError),
            self._system.open_input_stream(f"{self._path}/.open/{name}") as file,
        ):
            match file.read().decode().split():
                case [text, checkpoint, branch] if text == _DECIDED:
                    return CheckpointId(int(checkpoint)), branch
        return None

    def list_open(self) -> list[str]:
        wanted = fs.FileSelector(f"{self._path}/.open", allow_not_found=True)
        return [one.base_name for one in self._system.get_file_info(wanted)]

    def close(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._system.delete_file(f"{self._path}/.open/{name}")

    def delete(self, name: str, kept: Sequence[str] = ()) -> None:
        """Delete the files in a folder but those that are kept: what attempts left that nobody waits for."""
        wanted = fs.FileSelector(f"{self._path}/{name}", allow_not_found=True, recursive=True)
        names = {one.rpartition("/")[2] for one in kept}
        for one in self._system.get_file_info(wanted):
            if one.is_file and one.base_name not in names:
                self._system.delete_file(one.path)
        if not kept:
            with suppress(FileNotFoundError):
                self._system.delete_dir(f"{self._path}/{name}")


def find_missing(files: Sequence[Mapping[str, Any]], io: PyArrowFileIO) -> str:
    """Return a file of one staged micro-batch that is not there with its size; empty if all are."""
    # All are in one folder.
    scheme, host, _ = PyArrowFileIO.parse_location(files[0]["path"], io.properties)
    paths = [PyArrowFileIO.parse_location(one["path"], io.properties)[2] for one in files]
    infos = io.fs_by_scheme(scheme, host).get_file_info(paths)
    found = zip(files, infos, strict=True)
    return next((one["path"] for one, info in found if not info.is_file or info.size != one["bytes"]), "")
