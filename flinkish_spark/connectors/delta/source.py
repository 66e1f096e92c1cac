"""Delta tables as sources: one version of a table, rows that are added to it, its change feed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pyspark.sql import types as T

from flinkish_spark.connectors.delta.file_rows import GONE_IN, THERE_IN, FileRows
from flinkish_spark.connectors.delta.files import StorePath, TablePath, table_path
from flinkish_spark.connectors.delta.log import (
    DELETE,
    INSERT,
    DeltaCommit,
    DeltaSnapshot,
    TableFile,
    check_feed,
    check_partitions,
    commit_path,
)
from flinkish_spark.connectors.delta.sink_settings import check_path
from flinkish_spark.connectors.delta.table import TableInfo, physical_name, rename_fields
from flinkish_spark.connectors.files.input_formats import ParquetFiles
from flinkish_spark.connectors.files.source import Discovery, FileList, FileSource, FoundFile
from flinkish_spark.connectors.rates import RateLimit
from flinkish_spark.connectors.splits import ask_once
from flinkish_spark.core.errors import ConfigError, InputLostError
from flinkish_spark.core.fields import Range, check_arguments
from flinkish_spark.core.validation import raise_config_errors, to_path
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.protocol.limits import UNLIMITED, Limit, check_whole

if TYPE_CHECKING:
    import pyarrow as pa


#: Types whose values a log holds as unambiguous texts.
_IN_TEXT = (T.StringType, T.BooleanType, T.IntegralType, T.FractionalType, T.DateType)


class _TableFileSource(FileSource):
    """A source that reads the files of a Delta table with the table's schema."""

    _rows_of: FileRows

    def _check_path(self, path: str | os.PathLike[str]) -> str:
        return str(path)

    @property
    def _table(self) -> TablePath:
        return self._rows_of.table

    def _place(self, name: str = "") -> TablePath:
        return self._table / name if name else self._table

    def _prepare_for_task(self, file: FoundFile) -> FoundFile:
        return self._rows_of.add_deleted_rows(file)

    def _records(self, file: FoundFile, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        return self._rows_of.read(file, path, schema)


class DeltaTableSource(_TableFileSource):
    """Reads a Delta table as it is when the job starts for the first time, and ends.

    Spark's own Delta source goes on with the changes and has no end; this one reads the history before a live
    source takes over. The version's files are listed at the first start and must stay until they are read: a
    VACUUM keeps them for a week by default.

    Parameters
    ----------
    path
        Absolute path or URI of the table.
    version
        Which version; None for the newest at the first start.
    store_options
        Of the table's store, as of a :class:`~flinkish_spark.DeltaSink`.
    splits, max_files_per_batch, max_bytes_per_batch, rate
        As for :class:`~flinkish_spark.connectors.files.source.FileSource`.

    Raises
    ------
    ConfigError
        There is no such table or version, or it needs a feature that is not read.
    """

    kind = "delta-table"

    @check_arguments()
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        version: Annotated[int, Range(0)] | None = None,
        store_options: Mapping[str, str] | None = None,
        splits: int = 1,
        max_files_per_batch: int = 1_000,
        max_bytes_per_batch: Limit = UNLIMITED,
        rate: RateLimit | None = None,
    ) -> None:
        snapshot = DeltaSnapshot.read(to_table_path(path, store_options), version)
        self._rows_of = FileRows(snapshot.table, snapshot.metadata)
        super().__init__(
            str(snapshot.table),
            ParquetFiles(),
            record_schema(snapshot),
            splits=splits,
            max_files_per_batch=max_files_per_batch,
            max_bytes_per_batch=max_bytes_per_batch,
            rate=rate,
        )
        self._version = version

    def _look(self, known: FileList) -> tuple[Sequence[FoundFile], bool]:
        snapshot = DeltaSnapshot.read(self._rows_of.table, self._version)
        return files_of(snapshot, self._rows_of), True

    def fingerprint(self) -> Mapping[str, Any]:
        """Return the settings that the list of files depends on."""
        return {**super().fingerprint(), "version": self._version}


def to_table_path(path: str | os.PathLike[str], options: Mapping[str, str] | None) -> TablePath:
    folder = to_path(path)
    check_path("the Delta path", folder, options or {})
    return table_path(folder, options or {})


def record_schema(snapshot: DeltaSnapshot) -> T.StructType:
    """Return the fields of a table's rows; refuse a partition column whose values the log cannot hold."""
    # Delta's metadata of a field is not part of its type.
    plain = rename_fields(list(snapshot.metadata.fields), _name)
    schema = T.StructType.fromJson({"type": "struct", "fields": plain})
    for name in snapshot.metadata.partition_by:
        kind = schema[name].dataType
        if not isinstance(kind, _IN_TEXT):
            raise ConfigError(
                f"the Delta table {snapshot.table} is partitioned by '{name}', a {kind.simpleString()}",
                why="its log does not say in which time zone the values are, or cannot hold them",
                what_to_do="read it with Spark and env.from_dataframe",
            )
    return schema


def check_fields(table: TablePath, version: int, found: TableInfo, declared: TableInfo) -> None:
    """Refuse a version in which a declared field has another type, or its name another field.

    A field that the version lacks is null in its rows.
    """
    keys = (_name, physical_name)
    there = [{key(one): one for one in map(_as_spark_says, found.fields)} for key in keys]
    for one in map(_as_spark_says, declared.fields):
        same = [own for key, by in zip(keys, there, strict=True) if (own := by.get(key(one)))]
        if any(rename_fields(own, key) != rename_fields(one, key) for own in same for key in keys):
            raise ConfigError(
                f"version {version} of the Delta table {table} has another type or name of '{one['name']}'",
                why="the records of one source have one schema",
                what_to_do="begin after that version, in a new job_dir",
            )


def _as_spark_says(field: Mapping[str, Any]) -> dict[str, Any]:
    """Return a field with types in Spark's spelling: other writers' logs have ``decimal(10, 2)``."""
    return T.StructField.fromJson(dict(field)).jsonValue()


def _name(field: Mapping[str, Any]) -> str:
    return str(field["name"])


def files_of(
    snapshot: DeltaSnapshot, rows_of: FileRows, more: Mapping[str, str] | None = None
) -> list[FoundFile]:
    # The fields were read when the program was built, and the newest version may be another by now.
    check_fields(snapshot.table, snapshot.version, snapshot.metadata, rows_of.metadata)
    there, table = {THERE_IN: str(snapshot.version)}, snapshot.table
    stats = table.table.stats() if isinstance(table, StorePath) else {}
    found = [
        part
        for file in snapshot.files()
        for part in rows_of.find_parts(file, {**(more or {}), **(there if file.has_deleted else {})}, stats)
    ]
    return sorted(found, key=lambda one: (one.modified_ns, one.path))


class DeltaChanges(Choice):
    """Which changes of a table a source reads."""

    #: Rows that are added. A commit that updates or deletes rows fails the job.
    ROWS = "ROWS"
    #: The change feed (`delta.enableChangeDataFeed`): rows with ``_change_type``, ``_commit_version`` and
    #: ``_commit_timestamp``.
    FEED = "FEED"


_TYPE, _VERSION, _TIMESTAMP = "_change_type", "_commit_version", "_commit_timestamp"
_FEED_FIELDS = (
    T.StructField(_TYPE, T.StringType()),
    T.StructField(_VERSION, T.LongType()),
    T.StructField(_TIMESTAMP, T.TimestampType()),
)
#: Change types of rows that are gone. A version's other changes come after these.
_GONE = ("delete", "update_preimage")
#: The version of a listed file, and which rows of a change file are read. No column has such a name.
_OF_VERSION, _IS_GONE = "flinkish:version", "flinkish:gone"
_BEGINNING, _KIND = "beginning.json", "delta-beginning"


class DeltaSource(_TableFileSource):
    """Reads a Delta table, and goes on with its changes.

    The source follows the log commit by commit, and lists the files of each durably before it reads them, so
    a position is a number of files, as of a :class:`~flinkish_spark.connectors.files.source.FileSource`. In a
    feed, the rows that a version deletes come before those that it inserts.

    Parameters
    ----------
    path
        Absolute path or URI of the table.
    changes
        Rows that are added, or the change feed.
    starting_version
        The first version whose changes are read; None for the table as it is at the first start, as rows that
        are added (feed: inserted), and then its changes.
    ending_version
        The last version whose changes are read, which may lie in the future; the job ends after it. None for
        no end. For the rows of one version see
        :class:`~flinkish_spark.connectors.delta.source.DeltaTableSource`.
    max_files_per_trigger, max_bytes_per_trigger
        Most files of each split in one micro-batch, and about most bytes. A version of a feed is divided only
        if it is more than that.
    splits, discover_every_ms, rate
        As for a :class:`~flinkish_spark.sources.FileSource`. With several splits the changes of one row
        may be read in another order than they were made.
    reader
        ``"python"`` or None: this package reads. Spark's own source is one of `env.from_dataframe`.
    store_options
        Of the table's store, as of a :class:`~flinkish_spark.DeltaSink`.

    Raises
    ------
    ConfigError
        There is no such table, it needs a feature that is not read, or an argument cannot be used.
    """

    kind = "delta"

    @check_arguments(reader="leave it out; for Spark's own source use env.from_dataframe")
    def __init__(
        self,
        path: str | os.PathLike[str],
        changes: DeltaChanges = DeltaChanges.ROWS,
        *,
        starting_version: Annotated[int, Range(0)] | None = None,
        ending_version: Annotated[int, Range(0)] | None = None,
        max_files_per_trigger: Annotated[int, Range(1)] = 1_000,
        max_bytes_per_trigger: Annotated[Limit, Range(1)] = UNLIMITED,
        splits: int = 1,
        discover_every_ms: Milliseconds = 1_000,
        reader: Literal["python"] | None = None,
        store_options: Mapping[str, str] | None = None,
        rate: RateLimit | None = None,
    ) -> None:
        if ending_version is not None:
            # One that ends before it begins would be read as an empty one.
            with raise_config_errors("see the documentation of DeltaSource"):
                check_whole("ending_version", ending_version, least=starting_version or 0)
        snapshot = DeltaSnapshot.read(to_table_path(path, store_options))
        self._rows_of, fields = FileRows(snapshot.table, snapshot.metadata), record_schema(snapshot)
        is_feed = changes is DeltaChanges.FEED
        if is_feed:
            check_feed(snapshot.table, snapshot.metadata)
        super().__init__(
            str(snapshot.table),
            ParquetFiles(),
            T.StructType([*fields, *(_FEED_FIELDS if is_feed else ())]),
            discovery=Discovery.CONTINUOUS if ending_version is None else Discovery.ONCE,
            splits=splits,
            discover_every_ms=discover_every_ms,
            max_files_per_batch=max_files_per_trigger,
            max_bytes_per_batch=max_bytes_per_trigger,
            rate=rate,
        )
        self._changes, self._starting, self._ending = changes, starting_version, ending_version
        #: All versions before this one are listed; kept in this process only, as the next one.
        self._next = 0
        #: Identity of the file of the last commit that was read; kept in this process only.
        self._passed: tuple[int, ...] | None = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_next": 0, "_passed": ()}

    # Between micro-batches:
    def latest(self, split: str, start: int, limit: int | None) -> int:
        """Return the file up to which a split can be read; do not divide a version that fits whole later."""
        end, found = super().latest(split, start, limit), self._files()

        def version(place: int) -> str | None:
            return found[self._index(split, place)].partition[_OF_VERSION]

        whole = end
        # Between the rows that a version deletes and those it inserts, the table is incomplete.
        while start < whole < self._count(len(found), split) and version(whole) == version(whole - 1):
            whole -= 1
        return end if whole == start or self._changes is DeltaChanges.ROWS else whole

    def _look(self, known: FileList) -> tuple[Sequence[FoundFile], bool]:
        found, version = self._find_start(known)
        if _identity(commit_path(self._table, version - 1)) != self._passed:
            self._check_log(version)
        while not self._is_behind_end(version) and (commit := DeltaCommit.read(self._table, version)):
            found += self._files_in(commit)
            version += 1
        self._passed = _identity(commit_path(self._table, version - 1))
        if not found:
            # Found files are in the list, so `_find_start` continues after them.
            self._next = version
        return found, self._is_behind_end(version)

    def _may_come_again(self, path: str) -> bool:
        # The log names each file once.
        return False

    def _is_behind_end(self, version: int) -> bool:
        return self._ending is not None and version > self._ending

    def _find_start(self, known: FileList) -> tuple[list[FoundFile], int]:
        """Return the files to begin with if the list is empty, and the first version to read changes of."""
        if len(known):
            listed = int(known[len(known) - 1].partition[_OF_VERSION] or 0) + 1
            # Versions without files to read leave no trace in the list.
            return [], max(listed, self._next)
        whole = self._find_whole_version()
        if whole is None:
            return [], max(self._starting or 0, self._next)
        if self._next > whole:
            return [], self._next
        commit = DeltaCommit.read(self._table, whole)
        # The time is null if the commit's log entry was deleted after a checkpoint of the log.
        values = self._make_commit_values(whole, "" if commit is None else commit.timestamp, {_TYPE: INSERT})
        return files_of(DeltaSnapshot.read(self._table, whole), self._rows_of, values), whole + 1

    def _find_whole_version(self) -> int | None:
        """Return the version that is read whole; None if only changes are read. Fixed at the first look."""
        if self._starting is not None:
            return None

        def ask() -> dict[str, int]:
            newest = DeltaSnapshot.read(self._table).version
            return {"version": newest if self._ending is None else min(newest, self._ending)}

        return int(ask_once(self.job_store, _BEGINNING, _KIND, ask)["version"])

    def _files_in(self, commit: DeltaCommit) -> list[FoundFile]:
        if commit.metadata is not None:
            if self._changes is DeltaChanges.FEED:
                check_feed(self._table, commit.metadata)
            check_fields(self._table, commit.version, commit.metadata, self._rows_of.metadata)
        now, before = str(commit.version), str(commit.version - 1)
        added = _find_changes(commit.added, commit.removed, now, before)
        removed = _find_changes(commit.removed, commit.added, before, now)
        if self._changes is DeltaChanges.ROWS:
            if commit.removed:
                raise ConfigError(
                    f"version {commit.version} of the Delta table {self.path} updates or deletes rows",
                    why="a source of rows that are added cannot say that others are gone",
                    what_to_do="read the change feed (DeltaChanges.FEED), or begin after that version in "
                    "a new job_dir",
                )
            kinds = [({_TYPE: INSERT}, added)]
        elif commit.changes:
            # Change files are read twice, since kinds are mixed in them: first the rows that are gone.
            changes = [(file, dict[str, str]()) for file in commit.changes]
            kinds = [({_IS_GONE: is_gone}, changes) for is_gone in ("true", "false")]
        else:
            kinds = [({_TYPE: DELETE}, removed), ({_TYPE: INSERT}, added)]
        read = (*commit.removed, *commit.changes)
        check_partitions(self._table, self._rows_of.metadata.partition_by, read)
        return [
            part
            for kind, files in kinds
            for values in [self._make_commit_values(commit.version, commit.timestamp, kind)]
            for file, which in files
            for part in self._rows_of.find_parts(file, {**values, **which})
        ]

    def _make_commit_values(self, version: int, timestamp: str, kind: Mapping[str, str]) -> dict[str, str]:
        values = {_OF_VERSION: str(version)}
        if self._changes is DeltaChanges.ROWS:
            return values
        return {**values, _VERSION: str(version), _TIMESTAMP: timestamp, **kind}

    def _check_log(self, version: int) -> None:
        """Refuse a table that was dropped and created again, and a version that was deleted from the log.

        Called in a new process, and if the file of the commit before has changed.
        """
        newest = DeltaSnapshot.read(self._table)
        if newest.metadata.id != self._rows_of.metadata.id:
            raise InputLostError(
                f"the Delta table {self.path} is not the one that the job has read so far",
                why="it was dropped and created again",
                what_to_do="put the old table back, or start a new job with a new job_dir",
            )
        # This order matters: versions are committed one by one, so any before the newest existed already.
        if newest.version > version and not commit_path(self._table, version).exists():
            raise InputLostError(
                f"version {version} of the Delta table {self.path} is gone from its log",
                why=f"the job has not read it, and the newest is {newest.version}: Delta deletes old log "
                "entries",
                what_to_do="raise delta.logRetentionDuration; begin at a newer version in a new job_dir",
            )

    # In a task:
    def _records(self, file: FoundFile, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        import pyarrow.compute as pc

        asked = file.partition.get(_IS_GONE)
        for batch in super()._records(file, path, schema):
            if asked is not None:
                is_gone = pc.is_in(batch.column(_TYPE), pa.array(_GONE))
                batch = batch.filter(is_gone if asked == "true" else pc.invert(is_gone))
            yield batch

    # On the driver:
    def fingerprint(self) -> Mapping[str, Any]:
        """Return the settings that the list of files depends on, and the table's id."""
        return {
            **super().fingerprint(),
            "table": self._rows_of.metadata.id,
            "changes": self._changes.value,
            "starting_version": self._starting,
            "ending_version": self._ending,
        }


def _identity(path: TablePath) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _find_changes(
    files: Sequence[TableFile], others: Sequence[TableFile], there_in: str, gone_in: str
) -> list[tuple[TableFile, dict[str, str]]]:
    """Return files whose rows changed, with entries that select the rows if a file is on both sides."""
    also, found = {file.path: file for file in others}, []
    for file in files:
        which = {THERE_IN: there_in} if file.has_deleted else {}
        if (other := also.get(file.path)) is not None:
            if not other.has_deleted:
                continue  # The other side has all of its rows.
            which[GONE_IN] = gone_in
        found.append((file, which))
    return found
