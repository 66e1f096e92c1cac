"""The Iceberg source without a JVM: what a table has, what is appended, what is passed over or refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.manifest import DataFileContent
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.types import LongType, NestedField, StringType, UUIDType

from flinkish_spark import Upsert
from flinkish_spark.connectors.files import source as file_source
from flinkish_spark.connectors.iceberg.tables import IcebergTables
from flinkish_spark.connectors.split_positions import SplitPosition
from flinkish_spark.core.errors import ConfigError, InputLostError
from flinkish_spark.sources import Discovery, IcebergSource
from tests.support.iceberg_rig import IcebergRig, catalog_properties
from tests.unit.connectors.files.test_file_source import reader_of
from tests.unit.connectors.iceberg.test_iceberg_tables import ALL, ROW
from tests.unit.connectors.iceberg.test_iceberg_upserts import commit_deletes
from tests.unit.connectors.test_split_source import rows_of, step


@pytest.fixture(autouse=True)
def no_wait_after_a_slow_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does other work looks slowly, and then a source waits before it looks again."""
    monkeypatch.setattr(file_source, "_LONG_LOOK_S", 600.0)


@pytest.fixture
def rig(tmp_path: Path) -> IcebergRig:
    rig = IcebergRig(tmp_path)
    rig.create()
    return rig


def source_of(rig: IcebergRig, **settings: Any) -> IcebergSource:
    return IcebergSource("lake.shop.orders", catalog_properties(rig.root), discover_every_ms=1, **settings)


def append(rig: IcebergRig, *rows: tuple[Any, ...]) -> int:
    names = rig.table.schema().column_names
    rig.table.append(pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows]))
    snapshot = rig.table.current_snapshot()
    assert snapshot is not None
    return snapshot.snapshot_id


def rows(found: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Without the control columns."""
    return sorted(row[:-2] for row in found)


def test_a_table_is_read_as_it_is_and_then_what_is_appended_each_once(
    rig: IcebergRig, tmp_path: Path
) -> None:
    append(rig, (1, "a"), (2, "b"))
    append(rig, (3, "c"))
    reader = reader_of(source_of(rig), tmp_path)
    start = reader.initialOffset()
    end, found = step(reader, start)
    assert rows(found) == [(1, "a"), (2, "b"), (3, "c")]
    assert step(reader, end) == (end, [])
    append(rig, (4, "d"))
    append(rig, (5, "e"))
    later, found = step(reader, end)
    assert rows(found) == [(4, "d"), (5, "e")]
    # In another process, which knows what the job directory has.
    other = reader_of(source_of(rig), tmp_path)
    assert rows(rows_of(other, start, end)) == [(1, "a"), (2, "b"), (3, "c")]
    assert rows(rows_of(other, end, later)) == [(4, "d"), (5, "e")]
    append(rig, (6, "f"))
    assert rows(step(other, later)[1]) == [(6, "f")]


def test_a_table_that_is_empty_at_the_first_look_is_read_from_its_first_snapshot(
    rig: IcebergRig, tmp_path: Path
) -> None:
    reader = reader_of(source_of(rig), tmp_path)
    start = reader.initialOffset()
    end, found = step(reader, start)
    assert not found
    append(rig, (1, "a"))
    other = reader_of(source_of(rig), tmp_path)
    assert rows(step(other, end)[1]) == rows(step(reader, end)[1]) == [(1, "a")]


def test_rows_of_a_table_that_is_empty_at_first_are_read_also_if_their_snapshots_expire(
    rig: IcebergRig, tmp_path: Path
) -> None:
    reader = reader_of(source_of(rig), tmp_path)
    start, found = step(reader, reader.initialOffset())
    assert not found
    first = append(rig, (1, "a"))
    append(rig, (2, "b"))
    # pyiceberg removes the name of the one before from the second.
    rig.table.maintenance.expire_snapshots().by_id(first).commit()
    assert rows(step(reader, start)[1]) == [(1, "a"), (2, "b")]


@pytest.mark.parametrize("version", ["1", "2"])
def test_rows_are_read_in_the_order_in_which_they_came_into_the_table(tmp_path: Path, version: str) -> None:
    rig = IcebergRig(tmp_path, table_properties={"format-version": version})
    rig.create()
    for key in (3, 1, 2):
        append(rig, (key, "a"))
        time.sleep(0.002)
    reader = reader_of(source_of(rig), tmp_path)
    end, found = step(reader, reader.initialOffset())
    assert [row[0] for row in found] == [3, 1, 2]
    for key in (7, 5, 6):
        append(rig, (key, "a"))
    assert [row[0] for row in step(reader, end)[1]] == [7, 5, 6]


def mark_as_compactions(monkeypatch: pytest.MonkeyPatch, ids: set[int]) -> None:
    """Let a source see snapshots as those of a compaction, which pyiceberg does not make."""
    find = IcebergTables.find

    def find_compacted(self: IcebergTables, name: Any) -> Table | None:
        table = find(self, name)
        if table is not None:
            snapshots = [
                one.model_copy(update={"summary": Summary(Operation.REPLACE)})
                if one.snapshot_id in ids
                else one
                for one in table.metadata.snapshots
            ]
            table.metadata = table.metadata.model_copy(update={"snapshots": snapshots})
        return table

    monkeypatch.setattr(IcebergTables, "find", find_compacted)


def test_a_compaction_has_no_new_rows_and_the_job_goes_on_after_it_when_the_ones_before_have_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = IcebergRig(tmp_path, mode=Upsert(("id",)))
    rig.create()
    ids = [append(rig, (1, "a"), (2, "b"))]
    reader = reader_of(source_of(rig), tmp_path)
    end, found = step(reader, reader.initialOffset())
    assert rows(found) == [(1, "a"), (2, "b")]
    for checkpoint in (1, 2):
        rig.commit(checkpoint, rig.stage([(1, "a")]))
        ids.append(rig.table.metadata.current_snapshot_id or 0)
    mark_as_compactions(monkeypatch, set(ids[1:]))
    end, found = step(reader, end)
    assert not found
    rig.table.maintenance.expire_snapshots().by_ids(ids[:2]).commit()
    append(rig, (3, "c"))
    for one in (reader_of(source_of(rig), tmp_path), reader):
        later, found = step(one, end)
        assert rows(found) == [(3, "c")]
        assert step(one, later) == (later, [])


def test_a_bounded_source_ends_with_the_snapshot_of_its_first_look(rig: IcebergRig, tmp_path: Path) -> None:
    append(rig, (1, "a"))
    reader = reader_of(source_of(rig, discovery=Discovery.ONCE), tmp_path)
    start = reader.initialOffset()
    end, found = step(reader, start)
    append(rig, (2, "b"))
    assert rows(found) == [(1, "a")] and SplitPosition.from_json(end).is_ended
    assert rows(rows_of(reader_of(source_of(rig, discovery=Discovery.ONCE), tmp_path), start, end)) == [
        (1, "a")
    ]
    with pytest.raises(ConfigError, match="starting_snapshot is given"):
        source_of(rig, discovery=Discovery.ONCE, starting_snapshot=1)


def test_a_snapshot_to_begin_with_is_the_first_that_is_read(rig: IcebergRig, tmp_path: Path) -> None:
    append(rig, (1, "a"))
    second = append(rig, (2, "b"))
    append(rig, (3, "c"))
    reader = reader_of(source_of(rig, starting_snapshot=second), tmp_path)
    assert rows(step(reader, reader.initialOffset())[1]) == [(2, "b"), (3, "c")]
    unknown = reader_of(source_of(rig, starting_snapshot=7), tmp_path / "other")
    with pytest.raises(InputLostError, match="Snapshot 7 is not in its history"):
        step(unknown, unknown.initialOffset())


def test_what_the_sink_appends_is_read_also_from_merged_manifests(tmp_path: Path) -> None:
    properties = {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"}
    rig = IcebergRig(tmp_path, table_properties=properties, partition_by=("name",))
    rig.create()
    reader = reader_of(source_of(rig), tmp_path)
    end, _ = step(reader, reader.initialOffset())
    for checkpoint in range(1, 5):
        rig.commit(checkpoint, rig.stage([(checkpoint, "a"), (checkpoint, "b")]))
        end, found = step(reader, end)
        assert rows(found) == [(checkpoint, "a"), (checkpoint, "b")]


@pytest.mark.parametrize("skips", [False, True])
def test_rows_that_are_changed_fail_the_job_unless_they_are_passed_over(tmp_path: Path, skips: bool) -> None:
    rig = IcebergRig(tmp_path, mode=Upsert(("id",)))
    rig.create()
    append(rig, (1, "a"))
    reader = reader_of(source_of(rig, skip_overwrites=skips), tmp_path)
    end, found = step(reader, reader.initialOffset())
    assert rows(found) == [(1, "a")]
    rig.commit(1, rig.stage([(1, "x")]))
    append(rig, (2, "b"))
    if skips:
        assert rows(step(reader, end)[1]) == [(2, "b")]
        return
    with pytest.raises(ConfigError, match="is of the kind overwrite"):
        step(reader, end)


def test_deleted_rows_of_the_first_snapshot_are_not_read(rig: IcebergRig, tmp_path: Path) -> None:
    append(rig, (1, "a"), (2, "b"), (3, "c"))
    [task] = rig.table.scan().plan_files()
    commit_deletes(rig, DataFileContent.POSITION_DELETES, task.file.file_path, [1])
    reader = reader_of(source_of(rig), tmp_path)
    assert rows(step(reader, reader.initialOffset())[1]) == [(1, "a"), (3, "c")]
    commit_deletes(rig, DataFileContent.EQUALITY_DELETES, task.file.file_path, [0])
    other = reader_of(source_of(rig), tmp_path / "other")
    with pytest.raises(ConfigError, match="equality deletes"):
        step(other, other.initialOffset())


def test_deletes_that_are_gone_are_lost_input(rig: IcebergRig, tmp_path: Path) -> None:
    append(rig, (1, "a"), (2, "b"))
    [task] = rig.table.scan().plan_files()
    commit_deletes(rig, DataFileContent.POSITION_DELETES, task.file.file_path, [1])
    [deletes] = [path for path in rig.files() if "delete" in path]
    reader = reader_of(source_of(rig), tmp_path)
    [path] = (rig.root / "warehouse").rglob(deletes)
    path.rename(path.with_suffix(".gone"))
    with pytest.raises(InputLostError, match="a file with deleted rows of"):
        step(reader, reader.initialOffset())


def test_a_snapshot_that_appends_and_deletes_is_refused(rig: IcebergRig, tmp_path: Path) -> None:
    append(rig, (1, "a"), (2, "b"))
    reader = reader_of(source_of(rig), tmp_path)
    end, _ = step(reader, reader.initialOffset())
    [task] = rig.table.scan().plan_files()
    commit_deletes(rig, DataFileContent.POSITION_DELETES, task.file.file_path, [1])
    with pytest.raises(ConfigError, match="appends and deletes rows"):
        step(reader, end)


def test_values_of_every_type_are_read_as_they_were_written(tmp_path: Path) -> None:
    wider = ALL.replace("b TINYINT, s SMALLINT", "b INT, s INT").replace("q: SMALLINT", "q: INT")
    rig = IcebergRig(tmp_path, wider)
    rig.create()
    nothing = (None,) * len(ROW)
    given = [ROW, nothing, (*ROW[:-3], None, [], [])]
    rig.commit(1, rig.stage(given))
    source = source_of(rig)
    assert source.schema.simpleString() == rig.fields.simpleString()
    reader = reader_of(source, tmp_path)
    found = step(reader, reader.initialOffset())[1]
    assert [row[:-2] for row in found] == given


def test_fields_are_found_by_their_ids(rig: IcebergRig, tmp_path: Path) -> None:
    append(rig, (1, "a"))
    with rig.table.update_schema() as schema:
        schema.rename_column("name", "title")
    with rig.table.update_schema() as schema:
        schema.add_column("name", LongType())
    append(rig, (2, "b", 7))
    reader = reader_of(source_of(rig), tmp_path)
    assert rows(step(reader, reader.initialOffset())[1]) == [(1, "a", None), (2, "b", 7)]


def test_history_that_is_gone_is_lost_input_and_another_table_too(rig: IcebergRig, tmp_path: Path) -> None:
    first = append(rig, (1, "a"))
    reader = reader_of(source_of(rig), tmp_path)
    end, _ = step(reader, reader.initialOffset())
    append(rig, (2, "b"))
    append(rig, (3, "c"))
    kept, found = step(reader, end)
    assert rows(found) == [(2, "b"), (3, "c")]
    # What was read before the last snapshot may expire, and what was not read may not.
    rig.table.maintenance.expire_snapshots().by_id(first).commit()
    assert step(reader, kept) == (kept, [])
    fourth = append(rig, (4, "d"))
    append(rig, (5, "e"))
    rig.table.maintenance.expire_snapshots().by_id(fourth).commit()
    with pytest.raises(InputLostError, match="has lost snapshots that the job has not read"):
        step(reader, kept)
    rig.catalog.drop_table("shop.orders")
    rig.create()
    with pytest.raises(InputLostError, match="dropped and created again"):
        step(reader, kept)


def test_a_table_or_a_type_that_cannot_be_read_is_refused_by_name(
    rig: IcebergRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.catalog.drop_table("shop.orders")
    with pytest.raises(ConfigError, match=r"there is no Iceberg table lake\.shop\.orders"):
        source_of(rig)
    fields = (
        NestedField(1, "id", LongType()),
        NestedField(2, "u", UUIDType()),
        NestedField(3, "n", StringType()),
    )
    rig.catalog.create_table("shop.orders", Schema(*fields))
    with pytest.raises(ConfigError, match="Its field u is uuid, for which Spark has no type"):
        source_of(rig)
    with pytest.raises(ConfigError, match="table"):
        IcebergSource("orders")
    rig.catalog.drop_table("shop.orders")
    rig.create()
    with pytest.raises(ConfigError, match="It has no branch 'staging'"):
        source_of(rig, branch="staging")
    find = IcebergTables.find

    def find_newer(self: IcebergTables, name: Any) -> Table | None:
        table = find(self, name)
        assert table is not None
        table.metadata = table.metadata.model_copy(update={"format_version": 3})
        return table

    monkeypatch.setattr(IcebergTables, "find", find_newer)
    with pytest.raises(ConfigError, match="Its format version is 3"):
        source_of(rig)


def test_a_source_that_is_sent_somewhere_has_no_open_catalog(rig: IcebergRig) -> None:
    from pyspark import cloudpickle

    append(rig, (1, "a"))
    source = source_of(rig)
    sent = cloudpickle.loads(cloudpickle.dumps(source))
    assert sent._tables is None and sent.fingerprint() == source.fingerprint()
    assert sent.datasets()[0].name == "shop.orders"
