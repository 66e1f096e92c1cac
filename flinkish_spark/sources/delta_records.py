"""A Delta table as it grows, or its change feed, by its log: positions in savepoints, limits, alignment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import types as T

from flinkish_spark.arguments import refused_as_config_errors
from flinkish_spark.errors import ConfigError, InputLostError
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.limits import UNLIMITED, Limit, checked_choice
from flinkish_spark.sealed_objects import SealedObjects
from flinkish_spark.sources.delta_kinds import DeltaChanges, check_versions
from flinkish_spark.sources.delta_log import DELETE, INSERT, DeltaCommit, check_feed, commit_path
from flinkish_spark.sources.delta_snapshot import DeltaSnapshot
from flinkish_spark.sources.delta_table import (
    check_fields,
    checked_folder,
    files_of,
    found_file,
    record_schema,
    rows_in,
)
from flinkish_spark.sources.file_formats import ParquetFiles
from flinkish_spark.sources.file_list import FileList, FoundFile
from flinkish_spark.sources.files import Discovery, FileSource
from flinkish_spark.sources.rates import RateLimit
from flinkish_spark.store import LocalStore

if TYPE_CHECKING:
    import pyarrow as pa

_TYPE, _VERSION, _TIMESTAMP = "_change_type", "_commit_version", "_commit_timestamp"
_FEED_FIELDS = (
    T.StructField(_TYPE, T.StringType()),
    T.StructField(_VERSION, T.LongType()),
    T.StructField(_TIMESTAMP, T.TimestampType()),
)
#: The version that a listed file is of. No column can have the name.
_OF_VERSION = "flinkish:version"
_BEGINNING, _KIND = "beginning.json", "delta-beginning"


class DeltaRecordsSource(FileSource):
    """Reads a Delta table and what comes, without Spark's own source.

    The log is followed commit by commit, and the files of each are listed durably before they are read, so
    a position is a number of files, as of a :class:`~flinkish_spark.sources.files.FileSource`.

    Parameters
    ----------
    path
        Absolute local path of the table. It needs neither deletion vectors nor column mapping to be read.
    changes, starting_version, ending_version
        As for a :class:`~flinkish_spark.sources.delta_changes.DeltaSource`; rows may have an end, too.
    splits, discover_every_ms, max_files_per_batch, max_bytes_per_batch, rate
        As for a :class:`~flinkish_spark.sources.files.FileSource`. With several splits the changes of one row
        may be read in another order than they were made.

    Raises
    ------
    ConfigError
        There is no such table, it needs more than plain files, or an argument cannot be used.
    """

    kind = "delta-records"

    def __init__(
        self,
        path: str,
        changes: DeltaChanges = DeltaChanges.ROWS,
        *,
        starting_version: int | None = None,
        ending_version: int | None = None,
        splits: int = 1,
        discover_every_ms: int = 1_000,
        max_files_per_batch: int = 1_000,
        max_bytes_per_batch: Limit = UNLIMITED,
        rate: RateLimit | None = None,
    ) -> None:
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
        #: Before this version there is nothing that is not listed; of this process, as the next one.
        self._next = 0
        self._is_looking = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_next": 0, "_is_looking": False}

    # -- between micro-batches ------------------------------------------------------------------
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
        told = self._told(whole, "" if commit is None else commit.timestamp, INSERT)
        snapshot = DeltaSnapshot.read(self._table, whole)
        # It may be newer than the one that the fields are of.
        check_fields(snapshot, self._declared)
        return files_of(snapshot, told), whole + 1

    def _began_with(self) -> int | None:
        """Return the version that is read whole; None if only changes are read. Fixed at the first look."""
        if self._starting is not None:
            return None
        store = LocalStore(self.job_folder)
        objects = SealedObjects(store, str(store.root))
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
            kinds = [(INSERT, commit.added)]
        elif commit.changes:
            kinds = [("", commit.changes)]
        else:
            kinds = [(DELETE, commit.removed), (INSERT, commit.added)]
        return [
            found_file(self._table, file, self._told(commit.version, commit.timestamp, kind))
            for kind, files in kinds
            for file in files
        ]

    def _told(self, version: int, timestamp: str, kind: str) -> dict[str, str]:
        """Return what the list says of a file of a version; a file of changes says itself what they are."""
        told = {_OF_VERSION: str(version)}
        if self._changes is DeltaChanges.ROWS:
            return told
        feed = {_VERSION: str(version), _TIMESTAMP: timestamp} | ({_TYPE: kind} if kind else {})
        return {**told, **feed}

    def _check_metadata(self, commit: DeltaCommit) -> None:
        """Refuse a commit from which on the declared fields are others."""
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

    # -- in a task ------------------------------------------------------------------------------
    def _records(self, file: FoundFile, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        return rows_in(file, path, schema)

    # -- on the driver --------------------------------------------------------------------------
    def fingerprint(self) -> Mapping[str, Any]:
        """Return what the list depends on, among it the table's id."""
        return {
            **super().fingerprint(),
            "table": self._table_id,
            "changes": self._changes.value,
            "starting_version": self._starting,
            "ending_version": self._ending,
        }
