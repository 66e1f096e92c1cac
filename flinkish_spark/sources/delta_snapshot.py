"""One version of a Delta table, read from its log without Spark and without a JVM.

Only tables whose rows are simply what their files hold, and those alone are read; everything else is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq

from flinkish_spark.errors import ConfigError
from flinkish_spark.sources.files import naming

_LOG = "_delta_log"
_COMMIT = re.compile(r"(\d{20})\.json")
#: Whole checkpoints; those of format 2 have other names.
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet")
#: What a reader may have to know and this one does, or which does not matter if no file makes use of it.
_KNOWN_FEATURES = frozenset(
    {"columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}
)
_ACTIONS = ("add", "remove", "metaData", "protocol")


@dataclass(frozen=True)
class TableFile:
    """A file with rows: its path, relative to the table; its rows if known; values that are not in it."""

    path: str
    rows: int | None
    partition: Mapping[str, str | None]


@dataclass
class DeltaSnapshot:
    """A table as it was at one version.

    Parameters
    ----------
    version
        Its number.
    """

    table: Path
    version: int
    files: dict[str, TableFile] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, table: Path, version: int | None = None) -> DeltaSnapshot:
        """Read the log; of the newest version if none is given.

        Raises
        ------
        ConfigError
            There is no such table or version, or it needs more than plain files.
        """
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
                for action in _in_checkpoint(path):
                    snapshot._apply(action)
        for number in range(begin + 1, wanted + 1):
            with naming(str(commits[number])):
                for line in commits[number].read_text(encoding="utf-8").split("\n"):
                    if line:
                        snapshot._apply(json.loads(line))
        return snapshot

    @property
    def schema_json(self) -> Mapping[str, Any]:
        """The table's schema as Spark writes types down."""
        found: Mapping[str, Any] = json.loads(self.metadata["schemaString"])
        return found

    def _apply(self, action: Mapping[str, Any]) -> None:
        check_plain(self.table, action)
        if action.get("metaData"):
            self.metadata = action["metaData"]
        if action.get("remove"):
            self.files.pop(unquote(action["remove"]["path"]), None)
        if action.get("add"):
            file = table_file(self.table, action["add"])
            self.files[file.path] = file


def check_plain(table: Path, action: Mapping[str, Any]) -> None:
    """Raise ConfigError if behind an action rows are not simply what files hold."""
    if action.get("metaData"):
        configuration = dict(action["metaData"].get("configuration") or {})
        if configuration.get("delta.columnMapping.mode", "none") != "none":
            raise _refused(table, "column mapping")
    if action.get("protocol"):
        unknown = sorted(set(action["protocol"].get("readerFeatures") or ()) - _KNOWN_FEATURES)
        if unknown:
            raise _refused(table, f"the feature '{unknown[0]}'")


def table_file(table: Path, action: Mapping[str, Any]) -> TableFile:
    """Return the file of an action that adds, removes or is a file of changes; raise ConfigError."""
    if action.get("deletionVector"):
        raise _refused(table, "deletion vectors")
    path = unquote(action["path"])
    if "://" in path or path.startswith("/") or ".." in path.split("/"):
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


def _in_checkpoint(path: Path) -> Iterator[Mapping[str, Any]]:
    with pq.ParquetFile(path) as file:
        there = [name for name in _ACTIONS if name in file.schema_arrow.names]
        for batch in file.iter_batches(columns=there):
            yield from batch.to_pylist()
