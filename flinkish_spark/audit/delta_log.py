"""A Delta table's log and rows, read without Spark and without a JVM.

The audit shares no code with the sink that it looks at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pyarrow import parquet

from flinkish_spark.errors import EnvironmentFault

_LOG = "_delta_log"


class UnreadableTable(EnvironmentFault):
    """The table uses something that cannot be read without Delta's own code."""


@dataclass(frozen=True, slots=True)
class TableVersion:
    """One version of a table.

    `marks` are its SetTransaction actions: (app id, version). `rows` is how many its new files have.
    `replaces_rows` says whether it takes rows away: a MERGE that updates, an overwrite; not a compaction.
    """

    number: int
    marks: tuple[tuple[str, int], ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    rows: int
    replaces_rows: bool = False

    def mark_of(self, app_id: str) -> int | None:
        """Return the version that an app id recorded here, None if it did not."""
        return next((number for name, number in self.marks if name == app_id), None)


class DeltaLog:
    """Reads new versions as they come.

    Parameters
    ----------
    table
        Its directory; it need not exist yet.
    """

    def __init__(self, table: Path) -> None:
        self._table = table
        self._next = 0

    def new_versions(self) -> Iterator[TableVersion]:
        """Yield the versions that were written since the last call.

        Raises
        ------
        UnreadableTable
            Rows are not simply what the files hold, or the log does not begin at version 0 any more.
        """
        while True:
            try:
                text = (self._table / _LOG / f"{self._next:020}.json").read_text(encoding="utf-8")
            except FileNotFoundError:
                if self._next == 0 and any((self._table / _LOG).glob("*.json")):
                    raise UnreadableTable(
                        f"the log of the table {self._table} does not begin at version 0 any more",
                        why="Delta has cleaned it up (delta.logRetentionDuration)",
                        what_to_do="audit earlier, or raise delta.logRetentionDuration",
                    ) from None
                return
            yield self._version(text)
            self._next += 1

    def _version(self, text: str) -> TableVersion:
        actions = [json.loads(line) for line in text.split("\n") if line]
        for action in actions:
            self._check(action)
        adds = [action["add"] for action in actions if "add" in action]
        marks = [action["txn"] for action in actions if "txn" in action]
        return TableVersion(
            self._next,
            tuple((mark["appId"], int(mark["version"])) for mark in marks),
            tuple(unquote(add["path"]) for add in adds),
            tuple(unquote(action["remove"]["path"]) for action in actions if "remove" in action),
            sum(self._rows(add) for add in adds),
            any(action["remove"].get("dataChange", True) for action in actions if "remove" in action),
        )

    def _check(self, action: Mapping[str, Any]) -> None:
        mode = action.get("metaData", {}).get("configuration", {}).get("delta.columnMapping.mode", "none")
        unreadable = "column mapping" if mode != "none" else ""
        if action.get("add", {}).get("deletionVector"):
            unreadable = "deletion vectors"
        if unreadable:
            raise UnreadableTable(
                f"the table {self._table} has {unreadable}",
                why="its rows are not simply what its files hold",
                what_to_do="compare it by a query of Spark",
            )

    def _rows(self, add: Mapping[str, Any]) -> int:
        if add.get("stats"):
            return int(json.loads(add["stats"])["numRecords"])
        return int(parquet.read_metadata(self._table / unquote(add["path"])).num_rows)


@dataclass(frozen=True)
class Table:
    """A table as it is now.

    `files` are those of its rows, each with the version that added it. `orphans` are Parquet files below
    it that its log never named.
    """

    versions: tuple[TableVersion, ...]
    added_in: Mapping[Path, TableVersion]
    orphans: tuple[Path, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold its rows."""
        return tuple(self.added_in)

    @classmethod
    def read(cls, table: Path) -> Table:
        """Read a table; one that does not exist has no rows. Raises as :meth:`DeltaLog.new_versions`."""
        versions = tuple(DeltaLog(table).new_versions())
        active: dict[str, TableVersion] = {}
        ever = set()
        for version in versions:
            for path in version.removed:
                active.pop(path, None)
            active.update(dict.fromkeys(version.added, version))
            ever |= set(version.added)
        there = sorted(table.rglob("*.parquet")) if table.is_dir() else []
        data = [p for p in there if _LOG not in p.relative_to(table).parts]
        orphans = tuple(p for p in data if p.relative_to(table).as_posix() not in ever)
        return cls(versions, {table / path: version for path, version in active.items()}, orphans)

    def rows(self, *columns: str) -> Iterator[tuple[object, ...]]:
        """Yield the rows of all active files."""
        for path in self.files:
            content = parquet.ParquetFile(path).read(columns=list(columns))
            yield from zip(*(content.column(name).to_pylist() for name in columns), strict=True)
