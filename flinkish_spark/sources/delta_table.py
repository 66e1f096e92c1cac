"""The rows of one version of a Delta table: bounded history."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import types as T

from flinkish_spark.arguments import instance_of, refused_as_config_errors
from flinkish_spark.errors import ConfigError
from flinkish_spark.protocol.limits import checked_whole
from flinkish_spark.sources.delta_snapshot import DeltaSnapshot
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
    splits, max_files_per_batch, rate
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
        rate: RateLimit | None = None,
    ) -> None:
        with refused_as_config_errors("give the number of a version, or leave it out"):
            if version is not None:
                checked_whole("version", version, least=0)
        folder = instance_of("path", path, str, what_to_do='give a folder: "/data/orders"')
        folder = folder.removeprefix("file://")
        if not os.path.isabs(folder):
            raise ConfigError(f"path is {path!r}", what_to_do='give an absolute path: "/data/orders"')
        snapshot = DeltaSnapshot.read(Path(folder), version)
        schema = T.StructType.fromJson(dict(snapshot.schema_json))
        for name in snapshot.metadata.get("partitionColumns") or ():
            kind = schema[name].dataType
            if not isinstance(kind, _IN_TEXT):
                raise ConfigError(
                    f"the Delta table {folder} is partitioned by '{name}', a {kind.simpleString()}",
                    why="its log does not say in which time zone the values are, or cannot hold them",
                    what_to_do="read it by Spark and env.from_dataframe",
                )
        super().__init__(
            folder,
            ParquetFiles(),
            schema,
            splits=splits,
            max_files_per_batch=max_files_per_batch,
            rate=rate,
        )
        self._version = version

    def _look(self, known: FileList) -> Sequence[FoundFile]:
        snapshot = DeltaSnapshot.read(Path(self.path), self._version)
        found = []
        for file in snapshot.files.values():
            stat = os.stat(os.path.join(self.path, file.path))
            found.append(FoundFile(file.path, stat.st_size, stat.st_mtime_ns, file.rows, file.partition))
        return sorted(found, key=lambda one: (one.modified_ns, one.path))

    def _records(self, file: FoundFile, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield a file's rows with what is not in it: values of its partition, columns that came later."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as content:
            there = [name for name in schema.names if name in content.schema_arrow.names]
            for batch in content.iter_batches(batch_size=_ROWS_AT_ONCE, columns=there):
                columns = [
                    batch.column(one.name) if one.name in there else _same(file, one, batch.num_rows)
                    for one in schema
                ]
                yield pa.RecordBatch.from_arrays(columns, names=schema.names)

    def fingerprint(self) -> Mapping[str, Any]:
        """Return what the list depends on."""
        return {**super().fingerprint(), "version": self._version}


def _same(file: FoundFile, field: pa.Field, rows: int) -> pa.Array:
    """Return a column that is not in a file: the partition's value, or null for one that was added later."""
    import pyarrow as pa

    value = file.partition.get(field.name)
    if value is None or (value == "" and not pa.types.is_string(field.type)):
        return pa.nulls(rows, field.type)
    return pa.array([value] * rows, pa.string()).cast(field.type)
