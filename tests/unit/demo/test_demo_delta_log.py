"""The table is read from its log: what is not in the log is not in the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from demo.delta_log import DeltaLog, Table


def write_file(table: Path, name: str, users: list[str]) -> dict[str, Any]:
    table.mkdir(exist_ok=True)
    parquet.write_table(pa.table({"user": users, "total": range(len(users))}), table / name)
    return {"add": {"path": name.replace(" ", "%20"), "stats": json.dumps({"numRecords": len(users)})}}


def write_version(table: Path, number: int, *actions: dict[str, Any]) -> None:
    log = table / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    (log / f"{number:020}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))


def mark(app_id: str, version: int) -> dict[str, Any]:
    return {"txn": {"appId": app_id, "version": version, "lastUpdated": 0}}


def test_versions_come_once_each(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t")
    assert list(log.new_versions()) == []
    write_version(tmp_path / "t", 0, mark("job", 3), write_file(tmp_path / "t", "a.parquet", ["u", "v"]))
    (version,) = log.new_versions()
    assert (version.number, version.marks, version.rows) == (0, (("job", 3),), 2)
    assert list(log.new_versions()) == []
    write_version(tmp_path / "t", 1, {"commitInfo": {}})
    assert [v.number for v in log.new_versions()] == [1]


def test_rows_are_counted_without_statistics_too(tmp_path: Path) -> None:
    add = write_file(tmp_path / "t", "a.parquet", ["u", "v", "w"])
    del add["add"]["stats"]
    write_version(tmp_path / "t", 0, add)
    assert next(DeltaLog(tmp_path / "t").new_versions()).rows == 3


def test_a_compaction_adds_no_rows(tmp_path: Path) -> None:
    """Else a reader beside OPTIMIZE would see rows that no decision covers."""
    table = tmp_path / "t"
    write_version(table, 0, mark("job", 1), write_file(table, "a.parquet", ["u"]))
    compacted = write_file(table, "b.parquet", ["u"])
    compacted["add"]["dataChange"] = False
    write_version(table, 1, {"remove": {"path": "a.parquet", "dataChange": False}}, compacted)
    assert [version.rows for version in DeltaLog(table).new_versions()] == [1, 0]
    assert list(Table.read(table).rows("user")) == [("u",)]


def test_removed_files_are_not_rows_and_unnamed_files_are_orphans(tmp_path: Path) -> None:
    table = tmp_path / "t"
    kept, gone = (write_file(table, name, [name]) for name in ("kept file.parquet", "gone.parquet"))
    write_file(table, "never.parquet", ["x"])
    write_version(table, 0, kept, gone)
    write_version(table, 1, {"remove": {"path": "gone.parquet"}})
    found = Table.read(table)
    assert list(found.rows("user", "total")) == [("kept file.parquet", 0)]
    assert [path.name for path in found.orphans] == ["never.parquet"]


def test_a_table_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    found = Table.read(tmp_path / "t")
    assert (found.versions, list(found.rows("user")), found.orphans) == ((), [], ())
