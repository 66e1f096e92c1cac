"""Files of an Iceberg table as one snapshot has them, and their rows by field ids."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import PyArrowFileIO, _read_all_delete_files
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestFile,
)
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.delete_file_index import DeleteFileIndex
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import NestedField, StructType
from pyiceberg.utils.concurrent import ExecutorFactory

from flinkish_spark.connectors.iceberg.data_files import arrow_fields, find_id, project

#: Rows that are read at once.
_ROWS = 1 << 16
EQUALITY_DELETES = "it has equality deletes, which pyiceberg does not read: compact it"


class TableRefusal(Exception):
    """A table cannot be changed or read as it is now; the message says why."""


@dataclass(frozen=True)
class LiveFiles:
    #: Each manifest with its entries that are not deleted.
    manifests: Sequence[tuple[ManifestFile, Sequence[ManifestEntry]]] = ()

    @classmethod
    def read(cls, table: Table, snapshot: Snapshot | None) -> LiveFiles:
        found = [] if snapshot is None else snapshot.manifests(table.io)
        entries = ExecutorFactory.get_or_create().map(lambda one: one.fetch_manifest_entry(table.io), found)
        return cls(tuple(zip(found, entries, strict=True)))

    def data(self) -> Iterator[ManifestEntry]:
        return self._entries(ManifestContent.DATA)

    def _entries(self, content: ManifestContent) -> Iterator[ManifestEntry]:
        for manifest, entries in self.manifests:
            if manifest.content == content:
                yield from entries

    @cached_property
    def _deletes(self) -> DeleteFileIndex:
        index = DeleteFileIndex()
        for entry in self._entries(ManifestContent.DELETES):
            if entry.data_file.content == DataFileContent.EQUALITY_DELETES:
                raise TableRefusal(EQUALITY_DELETES)
            index.add_delete_file(entry, partition_key=entry.data_file.partition)
        return index

    def deletes_of(self, entry: ManifestEntry) -> Collection[DataFile]:
        file = entry.data_file
        return self._deletes.for_data_file(entry.sequence_number or 0, file, partition_key=file.partition)


@dataclass(frozen=True)
class TableChange:
    """Data files that a commit adds to a branch, and paths of those that it removes from its live files."""

    added: Sequence[DataFile]
    removed: frozenset[str] = frozenset()
    live: LiveFiles = field(default_factory=LiveFiles)


def find_deleted(io: PyArrowFileIO, path: str, deletes: Collection[DataFile]) -> np.ndarray[Any, Any]:
    task = FileScanTask(DataFile.from_args(file_path=path), set(deletes))
    found = _read_all_delete_files(io, [task]).get(path, [])
    return np.concatenate([np.empty(0, np.int64), *(one.to_numpy() for one in found)])


def check_readable(table: Table, file: DataFile) -> frozenset[int]:
    """Return the ids of fields that a file must have; refuse a file that is no Parquet."""
    if file.file_format != FileFormat.PARQUET:
        raise TableRefusal(f"its file {file.file_path} is no Parquet")
    spec, top = table.specs()[file.spec_id], {one.field_id for one in table.schema().fields}
    # Files that were made without Iceberg may have them in their folders' names only.
    plain = {one.source_id for one in spec.fields if isinstance(one.transform, IdentityTransform)}
    return frozenset(plain & top)


def read_rows(
    io: PyArrowFileIO,
    location: str,
    fields: Sequence[NestedField],
    control: Sequence[str] = (),
    needed: Collection[int] = (),
) -> Iterator[pa.RecordBatch]:
    """Yield rows of a Parquet file: fields of the table by their ids, null if it lacks them, and columns.

    pyiceberg's own reader makes a null map, and a null list of structs, empty ones.
    """
    wanted = [one.with_nullable(True) for one in arrow_fields(Schema(*fields))]
    with io.new_input(location).open() as source:
        file = pq.ParquetFile(source, coerce_int96_timestamp_unit="us", pre_buffer=True)
        there = {find_id(one): one.name for one in file.schema_arrow if one.name not in control}
        if None in there or not there.keys() >= set(needed):
            raise TableRefusal(f"its file {location} has no field ids, or lacks fields: write it anew")
        names = [there[one.field_id] for one in fields if one.field_id in there]
        if not names:
            nothing = [pa.nulls(file.metadata.num_rows, one.type) for one in wanted]
            yield pa.RecordBatch.from_arrays(nothing, schema=pa.schema(wanted))
            return
        for batch in file.iter_batches(_ROWS, columns=[*names, *control]):
            schema = pa.schema([*wanted, *(batch.schema.field(name) for name in control)])
            found = project(batch.to_struct_array(), StructType(*fields), pa.struct(wanted), by_id=True)
            columns = [*found.flatten(), *(batch.column(name) for name in control)]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)
