"""A Delta table's log and rows, read without Spark: the checker shares no code with what it checks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from pyarrow import parquet


@dataclass(frozen=True, slots=True)
class TableVersion:
    """One version of a table.

    `marks` are its SetTransaction actions by app id: (app id, version).
    """

    number: int
    marks: tuple[tuple[str, int], ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    rows: int


class DeltaLog:
    """Reads new versions as they come."""

    def __init__(self, table: Path) -> None:
        self._table = table
        self._next = 0

    def new_versions(self) -> Iterator[TableVersion]:
        """Yield the versions that were written since the last call."""
        while True:
            try:
                text = (self._table / "_delta_log" / f"{self._next:020}.json").read_text(encoding="utf-8")
            except FileNotFoundError:
                return
            yield self._version(text)
            self._next += 1

    def _version(self, text: str) -> TableVersion:
        actions = [json.loads(line) for line in text.splitlines() if line]
        adds = [action["add"] for action in actions if "add" in action]
        marks = [action["txn"] for action in actions if "txn" in action]
        return TableVersion(
            self._next,
            tuple((mark["appId"], int(mark["version"])) for mark in marks),
            tuple(unquote(add["path"]) for add in adds),
            tuple(unquote(action["remove"]["path"]) for action in actions if "remove" in action),
            sum(self._rows(add) for add in adds),
        )

    def _rows(self, add: dict[str, str]) -> int:
        if add.get("stats"):
            return int(json.loads(add["stats"])["numRecords"])
        return int(parquet.read_metadata(self._table / unquote(add["path"])).num_rows)


@dataclass(frozen=True)
class Table:
    """A table as it is now.

    `orphans` are Parquet files below it that its log never named.
    """

    versions: tuple[TableVersion, ...]
    files: tuple[Path, ...]
    orphans: tuple[Path, ...]

    @classmethod
    def read(cls, table: Path) -> Table:
        versions = tuple(DeltaLog(table).new_versions())
        active: dict[str, None] = {}
        ever = set()
        for version in versions:
            for path in version.removed:
                active.pop(path, None)
            active.update(dict.fromkeys(version.added))
            ever |= set(version.added)
        there = sorted(table.rglob("*.parquet")) if table.is_dir() else []
        data = [p for p in there if "_delta_log" not in p.relative_to(table).parts]
        orphans = tuple(p for p in data if p.relative_to(table).as_posix() not in ever)
        return cls(versions, tuple(table / path for path in active), orphans)

    def rows(self, *columns: str) -> Iterator[tuple[object, ...]]:
        """Yield the rows of all active files."""
        for path in self.files:
            content = parquet.ParquetFile(path).read(columns=list(columns))
            yield from zip(*(content.column(name).to_pylist() for name in columns), strict=True)
