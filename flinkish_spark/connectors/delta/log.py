"""A Delta table's log: one version of a table by deltalake, and the changes of one commit.

deltalake gives a version's fields, files and deleted rows. It gives nothing of one commit, so the lines of
the log are read here. Why its readers of rows are not used: `docs/decisions.md`.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from flinkish_spark.connectors.delta.files import TablePath
from flinkish_spark.connectors.delta.table import TableInfo
from flinkish_spark.connectors.delta.tables import LOG, metadata_of
from flinkish_spark.connectors.files.source import naming
from flinkish_spark.core.errors import ConfigError, InputLostError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from deltalake import DeltaTable


#: Reader features that this package knows; the last one has no effect on rows.
_KNOWN_FEATURES = frozenset(
    {
        *("columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "v2Checkpoint"),
        "vacuumProtocolCheck",
    }
)
#: Newer reader versions may read rows by other rules.
_NEWEST_READER = 3
#: Known actions of a commit. Any other action is refused, as is any other field of a file that has a value.
_ACTIONS = frozenset({"add", "remove", "cdc", "protocol", "metaData", "txn", "commitInfo", "domainMetadata"})
_OF_FILES = frozenset(
    {
        *("path", "partitionValues", "size", "dataChange", "stats", "tags", "deletionVector", "baseRowId"),
        *("defaultRowCommitVersion", "modificationTime", "clusteringProvider", "deletionTimestamp"),
        "extendedFileMetadata",
    }
)
#: With this property, commits wait somewhere else until they are put into the log.
_COORDINATED = "delta.coordinatedCommits"
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?://[^/]*)?(?P<path>.*)", re.DOTALL)
_WIDTH = re.compile(r"char\((\d+)\)")
#: deltalake's error for a partition's value that Spark may be able to read.
_UNREAD_VALUE = re.compile(r"Failed to parse value ('.*') as '(.*)'")
_BY_SPARK = "read it with Spark: env.from_dataframe(spark.readStream.format('delta').load(...))"


@dataclass(frozen=True)
class TableFile:
    #: Within the table's folder, or absolute: a shallow clone has files of the other table.
    path: str
    rows: int | None
    #: Partition values as texts, by the columns' names in files; a missing one is null. None if the log has
    #: none at all.
    partition: Mapping[str, str | None] | None
    #: Whether a deletion vector marks some of its rows as deleted.
    has_deleted: bool = False


def metadata_in(table: TablePath, action: Mapping[str, Any]) -> TableInfo:
    """Parse a metaData action; raise ConfigError if the table's rows differ from those in its files."""
    provider = (action.get("format") or {}).get("provider") or "parquet"
    if provider != "parquet":
        raise _make_refusal(table, f"files in the format '{provider}'")
    found = TableInfo.from_log({"metaData": action})
    for name, kind in found.lengths.items():
        # The reader pads a whole column with blanks; Spark also pads CHAR within other types.
        if re.search(r"\bchar\(", kind) and not _WIDTH.fullmatch(kind):
            raise _make_refusal(table, f"CHAR within the column '{name}'")
    if coordinated := sorted(name for name in found.properties if name.startswith(_COORDINATED)):
        raise _make_refusal(table, f"the property '{coordinated[0]}'")
    return found


def widths_of(metadata: TableInfo) -> dict[str, int]:
    """Return the lengths to which values of CHAR columns are padded."""
    found = {name: _WIDTH.fullmatch(kind) for name, kind in metadata.lengths.items()}
    return {name: int(width[1]) for name, width in found.items() if width}


def number_of(field: Mapping[str, Any]) -> int | None:
    found: int | None = field["metadata"].get("delta.columnMapping.id")
    return found


@dataclass(frozen=True)
class DeltaSnapshot:
    table: TablePath
    version: int
    metadata: TableInfo
    _opened: DeltaTable = field(repr=False)

    @classmethod
    def read(cls, table: TablePath, version: int | None = None) -> DeltaSnapshot:
        """Read the log up to a version; None means the newest."""
        from deltalake import DeltaTable

        if isinstance(table, Path) and re.search("%[0-9A-Fa-f]{2}", os.path.realpath(table)):
            raise ConfigError(
                f"the path of the Delta table {table} has a % followed by two digits",
                why="deltalake would read the table of another folder, with one character in their place",
                what_to_do="rename the folder",
            )
        what = f"the Delta table {table}"
        if version is not None:
            what = f"version {version} of {what}"
        with _as_refusal(table, what):
            options = None if isinstance(table, Path) else table.table.store_options()
            found = DeltaTable(str(table), version, storage_options=options)
        protocol, said = found.protocol(), found.metadata()
        _check_protocol(table, protocol.min_reader_version, protocol.reader_features or ())
        metadata = metadata_in(table, {**metadata_of(found), "id": said.id})
        return cls(table, found.version(), metadata, found)

    def files(self) -> list[TableFile]:
        import pyarrow as pa
        import pyarrow.compute as pc

        found, deleted = pa.table(self._opened.get_add_actions()), self.find_deleted_rows()
        partitions = [dict[str, str | None]()] * len(found)
        if names := self.metadata.partition_by:
            values = found.column("partition").combine_chunks()
            as_texts = [pc.struct_field(values, name).cast(pa.string()) for name in names]
            in_files = [self.metadata.physical_name(name) for name in names]
            partitions = pa.Table.from_arrays(as_texts, names=in_files).to_pylist()
        columns = (found.column(name).to_pylist() for name in ("path", "num_records"))
        files = [
            TableFile(path, rows, partition, path in deleted)
            for given, rows, partition in zip(*columns, partitions, strict=True)
            for path in [local_path(self.table, given)]
        ]
        if sum(file.has_deleted for file in files) < len(deleted):
            # Otherwise deleted rows would come back.
            raise _make_refusal(self.table, "deletion vectors of files that are not found among its own")
        return files

    def find_deleted_rows(self) -> dict[str, npt.NDArray[np.uint8]]:
        """Return a bitmap of the deleted rows of each file with a deletion vector, by the file's path."""
        import numpy as np
        import pyarrow as pa

        if "deletionVectors" not in (self._opened.protocol().reader_features or ()):
            return {}
        real = Path(os.path.realpath(self.table)) if isinstance(self.table, Path) else self.table
        found = {}
        with _as_refusal(self.table, f"the deletion vectors of version {self.version} of {self.table}"):
            for batch in map(pa.record_batch, self._opened.deletion_vectors()):
                for path, kept in zip(batch.column(0), batch.column(1), strict=True):
                    # deltalake has followed links in the table's path.
                    there = local_path(real, path.as_py())
                    found[there] = np.packbits(~kept.values.to_numpy(zero_copy_only=False))
        return found


@functools.lru_cache(maxsize=2)
def find_deleted_rows(table: TablePath, table_id: str, version: int) -> Mapping[str, npt.NDArray[np.uint8]]:
    """Return :meth:`DeltaSnapshot.find_deleted_rows` of a version; cached, as many files share a version."""
    try:
        return DeltaSnapshot.read(table, version).find_deleted_rows()
    except ConfigError as error:
        raise InputLostError(
            error.what,
            why=f"{error.why}; the job has to know which rows of its files were deleted",
            what_to_do="raise delta.logRetentionDuration; begin at a newer version in a new job_dir",
        ) from error


@contextmanager
def _as_refusal(table: TablePath, what: str) -> Iterator[None]:
    from deltalake.exceptions import DeltaError

    log = table / LOG
    if isinstance(log, Path) and not (log.is_dir() and os.listdir(log)):
        raise ConfigError(
            f"{what} cannot be read",
            why=f"there is no Delta log ({log}) with a version",
            what_to_do="create the table first",
        )
    try:
        yield
    except DeltaError as error:
        # The other lines tell where in deltalake it happened.
        why = str(error).partition("\n")[0]
        if re.search(r"\(os error (?!2\))|Generic (?!DeltaTable)\w+ error", why):
            # The system's or the store's, which may pass; that there is no such file, or that deltalake finds
            # something wrong, does not.
            raise OSError(f"{what} cannot be read: {why}") from error
        if unread := _UNREAD_VALUE.search(why):
            raise ConfigError(
                f"{what} has the partition value {unread[1]} of the type {unread[2]}",
                why="deltalake cannot read it"
                + (": it needs all digits after the point" if unread[2].startswith("decimal") else ""),
                what_to_do=_BY_SPARK,
            ) from error
        raise ConfigError(
            f"{what} cannot be read",
            why=why,
            what_to_do="name a version whose log still exists; restore damaged files",
        ) from error


def _check_protocol(table: TablePath, version: int, features: Iterable[str]) -> None:
    unknown = sorted(set(features) - _KNOWN_FEATURES)
    if unknown:
        raise _make_refusal(table, f"the feature '{unknown[0]}'")
    if version > _NEWEST_READER:
        raise _make_refusal(table, f"a protocol for readers of version {version}")


def local_path(table: TablePath, given: str) -> str:
    """Return the path of a file that a log names; raise ConfigError if it is elsewhere."""
    # A URL has no blanks and only ASCII letters; the path of a table may have others, unescaped.
    if not isinstance(table, Path) and unquote(given).startswith(own := f"{table}/"):
        given = quote(unquote(given).removeprefix(own))
    match = _SCHEME.fullmatch(given)
    scheme, path = (match["scheme"], unquote(match["path"])) if match else ("", unquote(given))
    if scheme not in ("", "file") or ".." in path.split("/"):
        raise _make_refusal(table, f"a file outside of its folder: {given}")
    if path.startswith("/") and not isinstance(table, Path):
        raise _make_refusal(table, f"a file outside of its store: {given}")
    return path.removeprefix(f"{table}/")


def _make_refusal(table: TablePath, has: str) -> ConfigError:
    return ConfigError(
        f"the Delta table {table} has {has}",
        why="this package and Spark would read different rows",
        what_to_do=_BY_SPARK,
    )


#: The change feed's names for changes of a row.
INSERT, DELETE = "insert", "delete"
_FEED_SETTING = "delta.enableChangeDataFeed"


@dataclass(frozen=True)
class DeltaCommit:
    version: int
    #: As a text in UTC: that in the commit if it has one, else that of its file.
    timestamp: str
    #: Files whose rows were added or removed; not those that were only rewritten, as by OPTIMIZE.
    added: tuple[TableFile, ...] = ()
    removed: tuple[TableFile, ...] = ()
    #: Files with the rows of the change feed; without any, these are the rows that were added and removed.
    changes: tuple[TableFile, ...] = ()
    #: New metadata of the table; None if the commit does not change it.
    metadata: TableInfo | None = field(default=None, repr=False)

    @classmethod
    def read(cls, table: TablePath, version: int) -> DeltaCommit | None:
        path = commit_path(table, version)
        try:
            text, written_ns = path.read_text(encoding="utf-8"), path.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        kinds: dict[str, list[TableFile]] = {"add": [], "remove": [], "cdc": []}
        metadata, timestamp_ms = None, written_ns // 1_000_000
        with naming(str(path)):
            # Split at "\n" only: a text may hold other line ends that Python knows.
            actions = [one for line in text.split("\n") if line for one in json.loads(line).items()]
        for kind, body in actions:
            if body is None:
                continue
            if kind not in _ACTIONS:
                raise _make_refusal(table, f"the action '{kind}' in its log")
            if kind == "metaData":
                metadata = metadata_in(table, body)
            elif kind == "protocol":
                _check_protocol(table, body.get("minReaderVersion") or 0, body.get("readerFeatures") or ())
            elif kind == "commitInfo":
                timestamp_ms = body.get("inCommitTimestamp") or timestamp_ms
            # Change files have dataChange = false: their rows are in other files, too.
            elif kind in kinds and (kind == "cdc" or body.get("dataChange", True)):
                kinds[kind].append(_file_of(table, kind, body))
        added, removed, changes = map(tuple, kinds.values())
        timestamp = datetime.fromtimestamp(timestamp_ms / 1_000, UTC).isoformat(timespec="milliseconds")
        return cls(version, timestamp, added, removed, changes, metadata)


def _file_of(table: TablePath, kind: str, action: Mapping[str, Any]) -> TableFile:
    unknown = sorted(name for name in action if name not in _OF_FILES and action[name] is not None)
    if unknown:
        raise _make_refusal(table, f"the field '{unknown[0]}' of the action '{kind}' in its log")
    rows = json.loads(action["stats"]).get("numRecords") if action.get("stats") else None
    partition = action.get("partitionValues", {} if kind == "add" else None)
    return TableFile(local_path(table, action["path"]), rows, partition, bool(action.get("deletionVector")))


def commit_path(table: TablePath, version: int) -> TablePath:
    return table / LOG / f"{version:020d}.json"


def check_partitions(table: TablePath, columns: Collection[str], files: Iterable[TableFile]) -> None:
    if columns and any(file.partition is None for file in files):
        raise _make_refusal(table, "files without the values of their partitions in its log")


def check_feed(table: TablePath, metadata: TableInfo) -> None:
    if metadata.properties.get(_FEED_SETTING, "false").lower() != "true":
        raise ConfigError(
            f"the Delta table {table} has no change feed",
            why=f"{_FEED_SETTING} is not set, so its log does not say what updates changed",
            what_to_do=f"ALTER TABLE ... SET TBLPROPERTIES ({_FEED_SETTING} = true), or read its rows",
        )
