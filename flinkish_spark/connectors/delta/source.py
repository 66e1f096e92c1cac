"""Delta tables as sources: one version of a table, a table as it grows, its change feed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.errors import AnalysisException
from pyspark.sql import functions as F
from pyspark.sql import types as T

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
from flinkish_spark.connectors.files.input_formats import ParquetFiles
from flinkish_spark.connectors.files.source import Discovery, FileList, FileSource, FoundFile
from flinkish_spark.connectors.parquet_calendar import read_batches
from flinkish_spark.connectors.rates import RateLimit
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.contracts.source import JobPlace, Source
from flinkish_spark.core.errors import ConfigError, InputLostError
from flinkish_spark.core.foreign_errors import said
from flinkish_spark.core.formats import Engine
from flinkish_spark.core.store import SealedObjects
from flinkish_spark.core.validation import (
    hold_plain_values,
    instance_of,
    refused_as_config_errors,
    to_ms,
    to_path,
)
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.durations import Duration, PathText
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.limits import (
    UNLIMITED,
    Limit,
    Unlimited,
    checked_choice,
    checked_limit,
    checked_whole,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


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
        As for :class:`~flinkish_spark.connectors.files.source.FileSource`.

    Raises
    ------
    ConfigError
        There is no such table or version, or it needs more than plain files.
    """

    kind = "delta-table"

    def __init__(
        self,
        path: str | os.PathLike[str],
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
        return rows_in(file, path, schema)

    def fingerprint(self) -> Mapping[str, Any]:
        """Return what the list depends on."""
        return {**super().fingerprint(), "version": self._version}


def checked_folder(path: str | os.PathLike[str]) -> str:
    folder = instance_of("path", to_path(path), str, what_to_do='give a folder: "/data/orders"')
    folder = folder.removeprefix("file://")
    if not os.path.isabs(folder):
        raise ConfigError(f"path is {path!r}", what_to_do='give an absolute path: "/data/orders"')
    return folder


def record_schema(folder: str, snapshot: DeltaSnapshot) -> T.StructType:
    """Return the fields of a table's rows; refuse a partition column whose values its log cannot say."""
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
    """Refuse a version that has another type of a field; a field that it does not have is null there."""
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
    # A value that the log does not have is null, whatever the file says.
    said = {**dict.fromkeys(snapshot.metadata.get("partitionColumns") or ()), **(more or {})}
    found = [found_file(snapshot.table, file, said) for file in snapshot.files.values()]
    return sorted(found, key=lambda one: (one.modified_ns, one.path))


def found_file(table: Path, file: TableFile, more: Mapping[str, str | None]) -> FoundFile:
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
    return FoundFile(file.path, stat.st_size, stat.st_mtime_ns, file.rows, {**more, **file.partition})


def rows_in(file: FoundFile, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield a file's rows with what is not in it: values of its partition, columns that came later."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Spark writes times as INT96, of which Arrow makes nanoseconds, that end in 2262.
    with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as content:
        in_file = content.schema_arrow.names
        # The log's value of a partition counts, also where a file has a column of the name.
        there = [name for name in schema.names if name in in_file and name not in file.partition]
        _refuse_other_case(set(schema.names) - file.partition.keys(), in_file)
        for batch in read_batches(content, there, _ROWS_AT_ONCE):
            columns = [
                _completed(batch.column(one.name), one.type)
                if one.name in there
                else _same(file, one, batch.num_rows)
                for one in schema
            ]
            yield pa.RecordBatch.from_arrays(columns, names=schema.names)


def _refuse_other_case(names: set[str], in_file: Sequence[str]) -> None:
    """Raise ValueError if a column that would be taken for one added later is there under another case."""
    lowered = {name.lower(): name for name in in_file}
    for name in sorted(names.difference(in_file)):
        if name.lower() in lowered:
            raise ValueError(f"the column {name!r} of the table is {lowered[name.lower()]!r} in it")


def _completed(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column with null in fields of structs that were added later; of another type as it is."""
    from flinkish_spark.types.exact_columns import exact_cast, is_of_kind

    is_lacking = is_of_kind(column.type, kind, may_have_more=True, may_lack=True)
    return exact_cast(column, kind) if is_lacking else column


def _same(file: FoundFile, field: pa.Field, rows: int) -> pa.Array:
    """Return a column that is not in a file: the partition's value, or null."""
    import pyarrow as pa

    value = file.partition.get(field.name)
    if value is None or (value == "" and not pa.types.is_string(field.type)):
        return pa.nulls(rows, field.type)
    return pa.array([value] * rows, pa.string()).cast(field.type)


class DeltaChanges(Choice):
    """What of a table's changes is read."""

    #: Rows that are added. A commit that updates or deletes rows fails the job.
    ROWS = "ROWS"
    #: The change feed (`delta.enableChangeDataFeed`): rows with ``_change_type``, ``_commit_version`` and
    #: ``_commit_timestamp``.
    FEED = "FEED"


def check_versions(starting: int | None, ending: int | None) -> None:
    """Raise ValueError unless they are versions, and the last one is not before the first."""
    if starting is not None:
        checked_whole("starting_version", starting, least=0)
    if ending is not None:
        # One that ends before it begins would be read as an empty one.
        checked_whole("ending_version", ending, least=starting or 0)


_TYPE, _VERSION, _TIMESTAMP = "_change_type", "_commit_version", "_commit_timestamp"
_FEED_FIELDS = (
    T.StructField(_TYPE, T.StringType()),
    T.StructField(_VERSION, T.LongType()),
    T.StructField(_TIMESTAMP, T.TimestampType()),
)
#: What was done to a row that is not there any more. A version's others come behind these.
_GONE = ("delete", "update_preimage")
#: The version that a listed file is of, and which of a file of changes is read. No column has such a name.
_OF_VERSION, _IS_GONE = "flinkish:version", "flinkish:gone"
_BEGINNING, _KIND = "beginning.json", "delta-beginning"


class DeltaRecordsSource(FileSource):
    """Reads a Delta table and what comes, without Spark's own source.

    The log is followed commit by commit, and the files of each are listed durably before they are read, so
    a position is a number of files, as of a :class:`~flinkish_spark.connectors.files.source.FileSource`.

    Parameters
    ----------
    path
        Absolute local path of the table. It needs neither deletion vectors nor column mapping to be read.
    changes, starting_version, ending_version
        As for a :class:`~flinkish_spark.connectors.delta.source.DeltaSource`; rows may have an end, too.
    splits, discover_every_ms, max_files_per_batch, max_bytes_per_batch, rate
        As for a :class:`~flinkish_spark.sources.FileSource`. With several splits the changes of one row
        may be read in another order than they were made.

    Raises
    ------
    ConfigError
        There is no such table, it needs more than plain files, or an argument cannot be used.
    """

    kind = "delta-records"

    def __init__(
        self,
        path: str | os.PathLike[str],
        changes: DeltaChanges = DeltaChanges.ROWS,
        *,
        starting_version: int | None = None,
        ending_version: int | None = None,
        splits: int = 1,
        discover_every_ms: Duration = 1_000,
        max_files_per_batch: int = 1_000,
        max_bytes_per_batch: Limit = UNLIMITED,
        rate: RateLimit | None = None,
    ) -> None:
        discover_every_ms = to_ms("discover_every_ms", discover_every_ms)
        with refused_as_config_errors("see the documentation of DeltaRecordsSource"):
            checked_choice("changes", changes, DeltaChanges)
            check_versions(starting_version, ending_version)
        folder = checked_folder(path)
        snapshot = DeltaSnapshot.read(Path(folder))
        self._table_fields = record_schema(folder, snapshot)
        is_feed = changes is DeltaChanges.FEED
        if is_feed:
            check_feed(Path(folder), snapshot.metadata)
        super().__init__(
            folder,
            ParquetFiles(),
            T.StructType([*self._table_fields, *(_FEED_FIELDS if is_feed else ())]),
            discovery=Discovery.CONTINUOUS if ending_version is None else Discovery.ONCE,
            splits=splits,
            discover_every_ms=discover_every_ms,
            max_files_per_batch=max_files_per_batch,
            max_bytes_per_batch=max_bytes_per_batch,
            rate=rate,
        )
        self._changes, self._starting, self._ending = changes, starting_version, ending_version
        self._table_id = str(snapshot.metadata.get("id", ""))
        self._partitions = tuple(snapshot.metadata.get("partitionColumns") or ())
        #: Before this version there is nothing that is not listed; of this process, as the next one.
        self._next = 0
        self._is_looking = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_next": 0, "_is_looking": False}

    # Between micro-batches:
    def latest(self, split: str, start: int, limit: int | None) -> int:
        """Return up to which file a part can be read; not into a version that fits whole into the next."""
        end, found = super().latest(split, start, limit), self._files()

        def version(place: int) -> str | None:
            return found[self._index(split, place)].partition[_OF_VERSION]

        whole = end
        # Between what a version deletes and what it inserts, rows are missing.
        while start < whole < self._count(len(found), split) and version(whole) == version(whole - 1):
            whole -= 1
        return end if whole == start or self._changes is DeltaChanges.ROWS else whole

    def _look(self, known: FileList) -> tuple[Sequence[FoundFile], bool]:
        found, version = self._since(known)
        while not self._is_behind_end(version) and (commit := DeltaCommit.read(self._table, version)):
            found += self._files_in(commit)
            version += 1
        if not self._is_looking:
            self._check_gap(version)
            self._is_looking = True
        if not found:
            # What is found is known by the list, which may be another process's in the end.
            self._next = version
        return found, self._is_behind_end(version)

    def _may_come_again(self, path: str) -> bool:
        # The log names each file once.
        return False

    @property
    def _declared(self) -> T.StructType:
        return T.StructType(list(self._table_fields))

    @property
    def _table(self) -> Path:
        return Path(self.path)

    def _is_behind_end(self, version: int) -> bool:
        return self._ending is not None and version > self._ending

    def _since(self, known: FileList) -> tuple[list[FoundFile], int]:
        """Return what the job begins with if nothing is listed, and the first version to look at."""
        if len(known):
            listed = int(known[len(known) - 1].partition[_OF_VERSION] or 0) + 1
            # Versions without files of ours leave no trace in the list.
            return [], max(listed, self._next)
        whole = self._began_with()
        if whole is None:
            return [], max(self._starting or 0, self._next)
        if self._next > whole:
            return [], self._next
        commit = DeltaCommit.read(self._table, whole)
        # Null where the commit is in a checkpoint already.
        told = self._told(whole, "" if commit is None else commit.timestamp, {_TYPE: INSERT})
        snapshot = DeltaSnapshot.read(self._table, whole)
        # It may be newer than the one that the fields are of.
        check_fields(snapshot, self._declared)
        return files_of(snapshot, told), whole + 1

    def _began_with(self) -> int | None:
        """Return the version that is read whole; None if only changes are read. Fixed at the first look."""
        if self._starting is not None:
            return None
        store = self.job_store.open()
        objects = SealedObjects(store, self.job_store.url)
        if objects.optional(_BEGINNING, _KIND, dict) is None:
            newest = DeltaSnapshot.read(self._table).version
            first = newest if self._ending is None else min(newest, self._ending)
            store.create_if_absent(_BEGINNING, seal(_KIND, {"version": first}))
        return int(objects.read(_BEGINNING, _KIND, dict)["version"])

    def _files_in(self, commit: DeltaCommit) -> list[FoundFile]:
        self._check_metadata(commit)
        if self._changes is DeltaChanges.ROWS:
            if commit.removed:
                raise ConfigError(
                    f"version {commit.version} of the Delta table {self.path} updates or deletes rows",
                    why="a source of rows that are added cannot say that others are gone",
                    what_to_do="read the change feed (DeltaChanges.FEED), or begin behind that version in "
                    "a new job_dir",
                )
            kinds = [({_TYPE: INSERT}, commit.added)]
        elif commit.changes:
            # Read twice, since the kinds are mixed in them: all that is gone comes first.
            kinds = [({_IS_GONE: is_gone}, commit.changes) for is_gone in ("true", "false")]
        else:
            kinds = [({_TYPE: DELETE}, commit.removed), ({_TYPE: INSERT}, commit.added)]
        check_partitions(self._table, self._partitions, commit.removed)
        return [
            found_file(self._table, file, self._told(commit.version, commit.timestamp, kind))
            for kind, files in kinds
            for file in files
        ]

    def _told(self, version: int, timestamp: str, kind: Mapping[str, str]) -> dict[str, str]:
        told = {_OF_VERSION: str(version)}
        if self._changes is DeltaChanges.ROWS:
            return told
        return {**told, _VERSION: str(version), _TIMESTAMP: timestamp, **kind}

    def _check_metadata(self, commit: DeltaCommit) -> None:
        if commit.metadata is None:
            return
        if self._changes is DeltaChanges.FEED:
            check_feed(self._table, commit.metadata)
        # A field that the table got later is not in older versions; what is there must be the same.
        check_fields(DeltaSnapshot(self._table, commit.version, {}, commit.metadata), self._declared)

    def _check_gap(self, version: int) -> None:
        """Refuse to wait for a version that was there and is gone. Called once per process."""
        if self._is_behind_end(version) or commit_path(self._table, version).exists():
            return
        newest = DeltaSnapshot.read(self._table).version
        # Asked again: it, and the next one, may have been written in between. Versions come one by one.
        if newest > version and not commit_path(self._table, version).exists():
            raise InputLostError(
                f"version {version} of the Delta table {self.path} is gone from its log",
                why=f"the job has not read it, and the newest is {newest}: Delta deletes old log entries",
                what_to_do="raise delta.logRetentionDuration; begin at a newer version in a new job_dir",
            )

    # In a task:
    def _records(self, file: FoundFile, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        import pyarrow.compute as pc

        asked = file.partition.get(_IS_GONE)
        for batch in rows_in(file, path, schema):
            if asked is None:
                yield batch
                continue
            is_gone = pc.is_in(batch.column(_TYPE), pa.array(_GONE))
            yield batch.filter(is_gone if asked == "true" else pc.invert(is_gone))

    # On the driver:
    def fingerprint(self) -> Mapping[str, Any]:
        """Return what the list depends on, among it the table's id."""
        return {
            **super().fingerprint(),
            "table": self._table_id,
            "changes": self._changes.value,
            "starting_version": self._starting,
            "ending_version": self._ending,
        }


@dataclass(frozen=True)
class DeltaSource(Source):
    """Reads a Delta table, and goes on with what comes.

    Through Spark's own streaming source, which like a DataFrame cannot be told where to begin in a restore
    from a savepoint. With ``reader="python"`` the log is followed without Spark: then it can, and it can be
    limited by records and aligned; tables with deletion vectors or column mapping are refused. Of a feed,
    what a version deletes comes before what it inserts.

    Parameters
    ----------
    path
        Of the table.
    changes
        Rows that are added, or the change feed.
    starting_version
        The first version whose changes are read; None for the table as it is at the first start, as rows that
        are added (feed: inserted), and then what comes.
    ending_version
        The last version whose changes are read, which may lie in the future; the job ends behind it. None for
        no end. For the rows of one version see
        :class:`~flinkish_spark.connectors.delta.source.DeltaTableSource`.
    max_files_per_trigger, max_bytes_per_trigger
        Most files in one micro-batch, and about most bytes. Of a feed that the JVM reads, a version is never
        divided; the Python reader divides one that alone is more than that.
    reader
        ``"jvm"`` or ``"python"``: fixed for the life of a job_dir. By default Python's with an
        `ending_version`, which Spark's source does not have, else the JVM's.
    rate
        Most records, with the Python reader.

    Raises
    ------
    ConfigError
        An argument cannot be used.

    Examples
    --------
    >>> DeltaSource("/data/orders", DeltaChanges.FEED, starting_version=3, ending_version=9).is_bounded
    True
    """

    path: PathText
    changes: DeltaChanges = DeltaChanges.ROWS
    starting_version: int | None = None
    ending_version: int | None = None
    max_files_per_trigger: int = 1_000
    max_bytes_per_trigger: Limit = UNLIMITED
    reader: str | Engine | None = None
    rate: RateLimit = field(default_factory=RateLimit)

    kind = "delta"

    def __post_init__(self) -> None:
        hold_plain_values(self)
        if not instance_of("path", self.path, str, what_to_do='give a table: "/data/orders"'):
            raise ConfigError("path is empty", what_to_do='give a table: "/data/orders"')
        with refused_as_config_errors("see the documentation of DeltaSource"):
            checked_choice("changes", self.changes, DeltaChanges)
            checked_whole("max_files_per_trigger", self.max_files_per_trigger, least=1)
            checked_limit("max_bytes_per_trigger", self.max_bytes_per_trigger, least=1)
            check_versions(self.starting_version, self.ending_version)
        default = Engine.JVM if self.ending_version is None else Engine.PYTHON
        object.__setattr__(self, "reader", Engine.of(self.reader or default, "reader"))
        what_to_do = "give RateLimit(records_per_second=..., records_per_batch=...)"
        instance_of("rate", self.rate, RateLimit, what_to_do=what_to_do)
        if self.reader is Engine.PYTHON:
            return
        if self.rate != RateLimit():
            raise ConfigError(
                "a Delta source that Spark reads has a limit of records",
                why="Spark's source counts files and bytes",
                what_to_do='set max_files_per_trigger or max_bytes_per_trigger, or add reader="python"',
            )
        if self.ending_version is not None:
            raise ConfigError(
                "a Delta source that Spark reads has an ending_version",
                why="Spark's source does not say when it has read a version whole",
                what_to_do='leave reader out, or give reader="python"; or read one version of the table with '
                "DeltaTableSource",
            )

    def bound(self, uid: str) -> Source:
        """Return this source; of the Python reader, the source of splits that it stands for."""
        if self.reader is not Engine.PYTHON:
            return self
        return DeltaRecordsSource(
            self.path,
            self.changes,
            starting_version=self.starting_version,
            ending_version=self.ending_version,
            max_files_per_batch=self.max_files_per_trigger,
            max_bytes_per_batch=self.max_bytes_per_trigger,
            rate=self.rate,
        ).bound(uid)

    @property
    def plan_name(self) -> str:
        """Tell what is read apart."""
        return f"delta-{self.changes.value.lower()}"

    @property
    def needs_delta(self) -> bool:
        """Whether Spark's own source reads; the Python reader needs no JAR."""
        return self.reader is Engine.JVM

    @property
    def is_bounded(self) -> bool:
        """Whether it was given an end."""
        return self.ending_version is not None

    def datasets(self) -> tuple[Dataset, ...]:
        """Return the table."""
        return (Dataset.of_path(self.path),)

    def load(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        """Return the stream with positions in Spark's input partitions."""
        from flinkish_spark.transport.columns import with_position

        reader = spark.readStream.format("delta")
        reader = reader.option("maxFilesPerTrigger", str(self.max_files_per_trigger))
        if not isinstance(self.max_bytes_per_trigger, Unlimited):
            reader = reader.option("maxBytesPerTrigger", str(self.max_bytes_per_trigger))
        if self.changes is DeltaChanges.FEED:
            reader = reader.option("readChangeFeed", "true")
        if self.starting_version is not None:
            reader = reader.option("startingVersion", str(self.starting_version))
        try:
            frame = reader.load(self.path)
        except AnalysisException as error:
            raise ConfigError(
                f"the Delta table {self.path} cannot be read",
                why=said(error),
                what_to_do="create it first; for a feed, with delta.enableChangeDataFeed",
            ) from error
        if self.changes is DeltaChanges.FEED:
            # One task, or a row's insert could come before its delete: only within a task there is an order.
            frame = frame.coalesce(1).sortWithinPartitions(_VERSION, ~F.col(_TYPE).isin(*_GONE))
        return with_position(frame)
