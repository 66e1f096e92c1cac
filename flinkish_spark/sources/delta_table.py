"""The rows of one version of a Delta table: bounded history."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import types as T

from flinkish_spark.arguments import instance_of, refused_as_config_errors
from flinkish_spark.errors import ConfigError, InputLostError
from flinkish_spark.protocol.limits import UNLIMITED, Limit, checked_whole
from flinkish_spark.sources.delta_snapshot import DeltaSnapshot, TableFile
from flinkish_spark.sources.file_formats import ParquetFiles
from flinkish_spark.sources.file_list import FileList, FoundFile
from flinkish_spark.sources.files import FileSource
from flinkish_spark.sources.rates import RateLimit

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_ONCE = 10_000
#: Types whose values a log holds as texts that mean one value.
_IN_TEXT = (T.StringType, T.BooleanType, T.IntegralType, T.FractionalType, T.DateType)


class DeltaTableSource(FileSource):
    """Reads a Delta table as it is when the job starts for the first time, and ends.

    Spark's own Delta source goes on with the changes and has no end; this one is the history in front of
    something live. The version's files are listed at the first start and must stay until they are read:
    a VACUUM keeps them for a week by default.

    Parameters
    ----------
    path
        Absolute local path of the table. It needs neither deletion vectors nor column mapping to be read.
    version
        Which version; None for the newest at the first start.
    splits, max_files_per_batch, max_bytes_per_batch, rate
        As for :class:`~flinkish_spark.sources.files.FileSource`.

    Raises
    ------
    ConfigError
        There is no such table or version, or it needs more than plain files.
    """

    kind = "delta-table"

    def __init__(
        self,
        path: str,
        *,
        version: int | None = None,
        splits: int = 1,
        max_files_per_batch: int = 1_000,
        max_bytes_per_batch: Limit = UNLIMITED,
        rate: RateLimit | None = None,
    ) -> None:
        with refused_as_config_errors("give the number of a version, or leave it out"):
            if version is not None:
                checked_whole("version", version, least=0)
        folder = checked_folder(path)
        snapshot = DeltaSnapshot.read(Path(folder), version)
        schema = record_schema(folder, snapshot)
        super().__init__(
            folder,
            ParquetFiles(),
            schema,
            splits=splits,
            max_files_per_batch=max_files_per_batch,
            max_bytes_per_batch=max_bytes_per_batch,
            rate=rate,
        )
        self._version = version

    def _look(self, known: FileList) -> tuple[Sequence[FoundFile], bool]:
        snapshot = DeltaSnapshot.read(Path(self.path), self._version)
        # The fields were asked for when the program was made, and the newest version may be another by now.
        check_fields(snapshot, self.record_type)
        return files_of(snapshot), True

    def _records(self, file: FoundFile, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield a file's rows with what is not in it: values of its partition, columns that came later."""
        return rows_in(file, path, schema)

    def fingerprint(self) -> Mapping[str, Any]:
        """Return what the list depends on."""
        return {**super().fingerprint(), "version": self._version}


# -- for both sources of Delta tables ------------------------------------------------------------------


def checked_folder(path: object) -> str:
    """Return a table's absolute path, or raise ConfigError."""
    folder = instance_of("path", path, str, what_to_do='give a folder: "/data/orders"')
    folder = folder.removeprefix("file://")
    if not os.path.isabs(folder):
        raise ConfigError(f"path is {path!r}", what_to_do='give an absolute path: "/data/orders"')
    return folder


def record_schema(folder: str, snapshot: DeltaSnapshot) -> T.StructType:
    """Return the fields of a table's rows; raise ConfigError if its log cannot say values of a partition."""
    schema = T.StructType.fromJson(dict(snapshot.schema_json))
    for name in snapshot.metadata.get("partitionColumns") or ():
        kind = schema[name].dataType
        if not isinstance(kind, _IN_TEXT):
            raise ConfigError(
                f"the Delta table {folder} is partitioned by '{name}', a {kind.simpleString()}",
                why="its log does not say in which time zone the values are, or cannot hold them",
                what_to_do="read it by Spark and env.from_dataframe",
            )
    return schema


def check_fields(snapshot: DeltaSnapshot, declared: T.StructType) -> None:
    """Raise ConfigError if a version has another type of a field; one that it does not have is null there."""
    types = {one.name: one.dataType for one in T.StructType.fromJson(dict(snapshot.schema_json))}
    other = [one.name for one in declared if types.get(one.name, one.dataType) != one.dataType]
    if other:
        raise ConfigError(
            f"version {snapshot.version} of the Delta table {snapshot.table} has another type of "
            f"'{other[0]}'",
            why="the records of one source have one schema",
            what_to_do="begin behind that version, in a new job_dir",
        )


def files_of(snapshot: DeltaSnapshot, more: Mapping[str, str] | None = None) -> list[FoundFile]:
    """Return the files of a version, the oldest first.

    Parameters
    ----------
    more
        What is said of each beside the values of its partition.
    """
    found = [found_file(snapshot.table, file, more or {}) for file in snapshot.files.values()]
    return sorted(found, key=lambda one: (one.modified_ns, one.path))


def found_file(table: Path, file: TableFile, more: Mapping[str, str]) -> FoundFile:
    """Return a file as a source lists it; raise InputLostError if it is gone."""
    path = table / file.path
    try:
        stat = path.stat()
    except FileNotFoundError:
        raise InputLostError(
            f"the file {path} of the Delta table is gone",
            why="VACUUM removed it before the job had come to read it",
            what_to_do="restore the file, or begin at a newer version in a new job_dir",
        ) from None
    return FoundFile(file.path, stat.st_size, stat.st_mtime_ns, file.rows, {**file.partition, **more})


def rows_in(file: FoundFile, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield a file's rows with what is not in it: values of its partition, columns that came later."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Spark writes times as INT96, of which Arrow makes nanoseconds, that end in 2262.
    with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as content:
        there = [name for name in schema.names if name in content.schema_arrow.names]
        for batch in content.iter_batches(batch_size=_ROWS_AT_ONCE, columns=there):
            columns = [
                batch.column(one.name) if one.name in there else _same(file, one, batch.num_rows)
                for one in schema
            ]
            yield pa.RecordBatch.from_arrays(columns, names=schema.names)


def _same(file: FoundFile, field: pa.Field, rows: int) -> pa.Array:
    """Return a column that is not in a file: the partition's value, or null for one that was added later."""
    import pyarrow as pa

    value = file.partition.get(field.name)
    if value is None or (value == "" and not pa.types.is_string(field.type)):
        return pa.nulls(rows, field.type)
    return pa.array([value] * rows, pa.string()).cast(field.type)
