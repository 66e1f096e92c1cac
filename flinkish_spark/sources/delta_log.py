"""The commits of a Delta table, one after the other, read from its log without Spark and without a JVM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flinkish_spark.errors import ConfigError
from flinkish_spark.sources.delta_snapshot import TableFile, check_plain, table_file
from flinkish_spark.sources.files import naming

#: How the feed calls what was done to a row.
INSERT, DELETE = "insert", "delete"
_FEED_SETTING = "delta.enableChangeDataFeed"


@dataclass(frozen=True)
class DeltaCommit:
    """One commit, as far as a reader of rows needs it.

    Parameters
    ----------
    version
        Its number.
    timestamp
        As a text in UTC: of the commit itself if it says one, else of its file.
    added, removed
        Files whose rows came or went; not those that were only written anew, as by OPTIMIZE.
    changes
        Files with the rows of the change feed; without any, these are the rows that came and went.
    metadata
        Of the table from here on; None where the commit does not change it.
    """

    version: int
    timestamp: str
    added: tuple[TableFile, ...] = ()
    removed: tuple[TableFile, ...] = ()
    changes: tuple[TableFile, ...] = ()
    metadata: Mapping[str, Any] | None = field(default=None, repr=False)

    @classmethod
    def read(cls, table: Path, version: int) -> DeltaCommit | None:
        """Read a commit; None if there is none of that number.

        Raises
        ------
        ConfigError
            It makes the table one whose rows are not simply what its files hold.
        """
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
    """Return where a commit is, or would be."""
    return table / "_delta_log" / f"{version:020d}.json"


def as_text(timestamp_ms: int) -> str:
    """Return a commit's time as a list of files has it.

    Examples
    --------
    >>> as_text(1_767_225_600_123)
    '2026-01-01T00:00:00.123+00:00'
    """
    return datetime.fromtimestamp(timestamp_ms / 1_000, UTC).isoformat(timespec="milliseconds")


def check_feed(table: Path, metadata: Mapping[str, Any]) -> None:
    """Raise ConfigError if a table's metadata says that no change feed is written."""
    configuration = dict(metadata.get("configuration") or {})
    if str(configuration.get(_FEED_SETTING, "false")).lower() != "true":
        raise ConfigError(
            f"the Delta table {table} has no change feed",
            why=f"{_FEED_SETTING} is not set, so its log does not say what updates changed",
            what_to_do=f"ALTER TABLE ... SET TBLPROPERTIES ({_FEED_SETTING} = true), or read its rows",
        )
