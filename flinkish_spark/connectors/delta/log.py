"""A Delta table's log, read without Spark and without a JVM: commit by commit, or as one version.

Only tables whose rows are simply what their files hold are read; everything else is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq

from flinkish_spark.connectors.files.source import naming
from flinkish_spark.core.errors import ConfigError

_LOG = "_delta_log"
_COMMIT = re.compile(r"(\d{20})\.json")
#: Whole checkpoints; those of format 2 have other names.
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet")
#: What a reader may have to know and this one does, or which does not matter if no file makes use of it.
_KNOWN_FEATURES = frozenset(
    {"columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}
)
#: Newer ones may mean rows by other rules.
_NEWEST_READER = 3
#: What says nothing of rows; and in a checkpoint, whose rows are all in what is added.
_NOT_OF_ROWS = frozenset({"txn", "commitInfo", "domainMetadata"})
_NOT_IN_CHECKPOINT = _NOT_OF_ROWS | {"remove", "cdc"}
_OF_FILES = {
    *("path", "partitionValues", "size", "dataChange", "stats", "tags", "deletionVector", "baseRowId"),
    *("defaultRowCommitVersion", "modificationTime", "clusteringProvider", "stats_parsed"),
    *("partitionValues_parsed", "deletionTimestamp", "extendedFileMetadata"),
}
#: All that can be read, by action. Any other action, and any other field that has a value, is refused.
_KNOWN = {
    "add": _OF_FILES,
    "remove": _OF_FILES,
    "cdc": _OF_FILES,
    "protocol": {"minReaderVersion", "minWriterVersion", "readerFeatures", "writerFeatures"},
    "metaData": {
        *("id", "name", "description", "format", "schemaString", "partitionColumns", "configuration"),
        "createdTime",
    },
}
#: With it, commits wait somewhere else until they are put into the log.
_COORDINATED = "delta.coordinatedCommits"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


@dataclass(frozen=True)
class TableFile:
    """A file with rows: its path within the table, how many rows, and the values that are not in it."""

    path: str
    rows: int | None
    partition: Mapping[str, str | None]


@dataclass
class DeltaSnapshot:
    table: Path
    version: int
    files: dict[str, TableFile] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    _has_protocol: bool = field(default=False, init=False, repr=False)

    @classmethod
    def read(cls, table: Path, version: int | None = None) -> DeltaSnapshot:
        """Read the log up to a version; None means the newest."""
        commits, checkpoints = _listed(table / _LOG)
        newest = max(commits, default=max(checkpoints, default=-1))
        wanted = newest if version is None else version
        usable = [number for number in checkpoints if number <= wanted]
        begin = max(usable, default=-1)
        missing = [number for number in range(begin + 1, wanted + 1) if number not in commits]
        if newest < 0 or wanted > newest or missing:
            what = (
                f"version {wanted} of the Delta table {table}" if newest >= 0 else f"the Delta table {table}"
            )
            if newest < 0:
                why = f"there is no Delta log ({table / _LOG}) with a version"
            else:
                why = f"its log has no version {missing[0]}" if missing else f"its newest version is {newest}"
            raise ConfigError(
                f"{what} cannot be read",
                why=why,
                what_to_do="create the table first, or name a version whose log is still there",
            )
        snapshot = cls(table, wanted)
        for path in checkpoints.get(begin, ()):
            with naming(str(path)):
                for action in _in_checkpoint(table, path):
                    snapshot._apply(action)
        for number in range(begin + 1, wanted + 1):
            with naming(str(commits[number])):
                text = commits[number].read_text(encoding="utf-8")
            for action in _actions_in(commits[number], text):
                snapshot._apply(action)
        if not snapshot.metadata or not snapshot._has_protocol:
            raise _refused(table, f"no schema or no protocol in its log up to version {wanted}")
        return snapshot

    @property
    def schema_json(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads(self.metadata["schemaString"])
        return found

    def _apply(self, action: Mapping[str, Any]) -> None:
        check_plain(self.table, action)
        self._has_protocol = self._has_protocol or bool(action.get("protocol"))
        if action.get("metaData"):
            self.metadata = action["metaData"]
        removed = action.get("remove")
        # One with a deletion vector is another file than that of the same path without.
        if removed and not removed.get("deletionVector"):
            self.files.pop(table_file(self.table, removed).path, None)
        if action.get("add"):
            file = table_file(self.table, action["add"])
            self.files[file.path] = file


def check_plain(table: Path, action: Mapping[str, Any]) -> None:
    """Raise ConfigError if an action is not known, or if behind it rows are not simply what files hold."""
    for kind, body in action.items():
        if body is None or kind in _NOT_OF_ROWS:
            continue
        if kind not in _KNOWN:
            is_v2 = kind in ("sidecar", "checkpointMetadata")
            raise _refused(table, f"{'a V2 checkpoint: ' * is_v2}the action '{kind}' in its log")
        unknown = sorted(name for name in body if name not in _KNOWN[kind] and body[name] is not None)
        if unknown:
            raise _refused(table, f"the field '{unknown[0]}' of the action '{kind}' in its log")
    metadata, protocol = action.get("metaData") or {}, action.get("protocol") or {}
    configuration = dict(metadata.get("configuration") or {})
    if configuration.get("delta.columnMapping.mode", "none") != "none":
        raise _refused(table, "column mapping")
    coordinated = sorted(name for name in configuration if name.startswith(_COORDINATED))
    if coordinated:
        raise _refused(table, f"the property '{coordinated[0]}'")
    provider = (metadata.get("format") or {}).get("provider") or "parquet"
    if provider != "parquet":
        raise _refused(table, f"files in the format '{provider}'")
    unknown = sorted(set(protocol.get("readerFeatures") or ()) - _KNOWN_FEATURES)
    if unknown:
        raise _refused(table, f"the feature '{unknown[0]}'")
    if (protocol.get("minReaderVersion") or 0) > _NEWEST_READER:
        raise _refused(table, f"a protocol for readers of version {protocol['minReaderVersion']}")


def check_partitions(table: Path, columns: Collection[str], removed: Iterable[TableFile]) -> None:
    """Raise ConfigError if a table has partitions, and the log does not say which one a file was of."""
    if columns and any(not file.partition for file in removed):
        raise _refused(table, "files without the values of their partitions in its log")


def table_file(table: Path, action: Mapping[str, Any]) -> TableFile:
    """Return the file of an `add`, `remove` or `cdc` action; raise ConfigError if it cannot be read."""
    if action.get("deletionVector"):
        raise _refused(table, "deletion vectors")
    path = unquote(action["path"])
    # A shallow clone names the files of the other table.
    if _SCHEME.match(action["path"]) or path.startswith("/") or ".." in path.split("/"):
        raise _refused(table, "files outside of its folder")
    rows = json.loads(action["stats"]).get("numRecords") if action.get("stats") else None
    # Out of Parquet a map comes as a list of pairs.
    return TableFile(path, rows, dict(action.get("partitionValues") or {}))


def _refused(table: Path, has: str) -> ConfigError:
    return ConfigError(
        f"the Delta table {table} has {has}",
        why="its rows are not simply what its files hold",
        what_to_do="read it by Spark: env.from_dataframe(spark.readStream.format('delta').load(...))",
    )


def _listed(log: Path) -> tuple[dict[int, Path], dict[int, list[Path]]]:
    """Return the commits, and the checkpoints of which all parts are there."""
    commits, parts = dict[int, Path](), dict[int, dict[int, list[Path]]]()
    for path in sorted(log.iterdir()) if log.is_dir() else ():
        if match := _COMMIT.fullmatch(path.name):
            commits[int(match[1])] = path
        elif match := _CHECKPOINT.fullmatch(path.name):
            parts.setdefault(int(match[1]), {}).setdefault(int(match[3] or 1), []).append(path)
    whole = {
        number: paths
        for number, by_count in parts.items()
        for count, paths in by_count.items()
        if len(paths) == count
    }
    return commits, whole


def _in_checkpoint(table: Path, path: Path) -> Iterator[Mapping[str, Any]]:
    with pq.ParquetFile(path) as file:
        there = [name for name in file.schema_arrow.names if name not in _NOT_IN_CHECKPOINT]
        missing = sorted(_KNOWN.keys() - _NOT_IN_CHECKPOINT - set(there))
        if missing:
            raise _refused(table, f"a checkpoint without the column '{missing[0]}'")
        for batch in file.iter_batches(columns=there):
            yield from batch.to_pylist()


#: How the feed calls what was done to a row.
INSERT, DELETE = "insert", "delete"
_FEED_SETTING = "delta.enableChangeDataFeed"


@dataclass(frozen=True)
class DeltaCommit:
    """One commit, as far as a reader of rows needs it."""

    version: int
    #: As a text in UTC: of the commit itself if it says one, else of its file.
    timestamp: str
    #: Files whose rows came or went; not those that were only written anew, as by OPTIMIZE.
    added: tuple[TableFile, ...] = ()
    removed: tuple[TableFile, ...] = ()
    #: Files with the rows of the change feed; without any, these are the rows that came and went.
    changes: tuple[TableFile, ...] = ()
    #: Of the table from here on; None where the commit does not change it.
    metadata: Mapping[str, Any] | None = field(default=None, repr=False)

    @classmethod
    def read(cls, table: Path, version: int) -> DeltaCommit | None:
        path = commit_path(table, version)
        try:
            text, written_s = path.read_text(encoding="utf-8"), path.stat().st_mtime
        except FileNotFoundError:
            return None
        kinds: dict[str, list[TableFile]] = {"add": [], "remove": [], "cdc": []}
        metadata, timestamp_ms = None, int(written_s * 1_000)
        for action in _actions_in(path, text):
            check_plain(table, action)
            metadata = action.get("metaData") or metadata
            timestamp_ms = (action.get("commitInfo") or {}).get("inCommitTimestamp") or timestamp_ms
            for kind, found in kinds.items():
                # Files of changes say that they change nothing: their rows are in others, too.
                if action.get(kind) and (kind == "cdc" or action[kind].get("dataChange", True)):
                    found.append(table_file(table, action[kind]))
        added, removed, changes = map(tuple, kinds.values())
        return cls(version, as_text(timestamp_ms), added, removed, changes, metadata)


def _actions_in(path: Path, text: str) -> list[Mapping[str, Any]]:
    with naming(str(path)):
        return [json.loads(line) for line in text.split("\n") if line]


def commit_path(table: Path, version: int) -> Path:
    return table / "_delta_log" / f"{version:020d}.json"


def as_text(timestamp_ms: int) -> str:
    return datetime.fromtimestamp(timestamp_ms / 1_000, UTC).isoformat(timespec="milliseconds")


def check_feed(table: Path, metadata: Mapping[str, Any]) -> None:
    configuration = dict(metadata.get("configuration") or {})
    if str(configuration.get(_FEED_SETTING, "false")).lower() != "true":
        raise ConfigError(
            f"the Delta table {table} has no change feed",
            why=f"{_FEED_SETTING} is not set, so its log does not say what updates changed",
            what_to_do=f"ALTER TABLE ... SET TBLPROPERTIES ({_FEED_SETTING} = true), or read its rows",
        )
