"""A Delta table as it grows, by its log: what is read once, in order, over processes and savepoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flinkish_spark.connectors.files import source as file_source
from flinkish_spark.connectors.split_positions import SplitPosition
from flinkish_spark.contracts.source import SourceStart
from flinkish_spark.core.errors import ConfigError, InputLostError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.sources import DeltaChanges, DeltaSource, RateLimit
from tests.unit.connectors.delta.test_delta_table_source import Table
from tests.unit.connectors.files.test_file_source import reader_of
from tests.unit.connectors.test_split_source import step

FEED = {"delta.enableChangeDataFeed": "true"}


def path_of(table: Table) -> str:
    return str(table.path)


def source_of(table: Table, changes: DeltaChanges = DeltaChanges.ROWS, **more: Any) -> DeltaSource:
    return DeltaSource(path_of(table), changes, discover_every_ms=1, **more)


def cdc(table: Table, name: str, columns: dict[str, list[Any]]) -> dict[str, Any]:
    (table.path / "_change_data").mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), table.path / "_change_data" / name)
    return {"cdc": {"path": f"_change_data/{name}", "dataChange": False, "partitionValues": {}}}


def removed(name: str, **more: Any) -> dict[str, Any]:
    return {"remove": {"path": name, "dataChange": True, **more}}


def values(rows: list[Any]) -> list[Any]:
    return [row[:-2] if len(row) > 3 else row[0] for row in rows]


def feed_rows(rows: list[Any]) -> list[tuple[Any, str, int]]:
    return [(row[0], row[1], row[2]) for row in rows]


def test_a_table_is_read_and_then_what_comes(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", n="long")
    table.commit(table.add("a.parquet", {"n": [1, 2]}))
    reader = reader_of(source_of(table), tmp_path)
    end, rows = step(reader, reader.initialOffset())
    assert values(rows) == [1, 2]
    # An OPTIMIZE says nothing new, a commit without files neither.
    table.commit(
        removed("a.parquet", dataChange=False), table.add("z.parquet", {"n": [1, 2]}, dataChange=False)
    )
    table.commit({"commitInfo": {"operation": "SET TBLPROPERTIES"}})
    assert step(reader, end) == (end, [])
    table.commit(table.add("b.parquet", {"n": [3]}), table.add("c.parquet", {"n": [4]}))
    table.commit(table.add("d.parquet", {"n": [5]}))
    later, rows = step(reader, end)
    assert values(rows) == [3, 4, 5]
    # In another process nothing is found a second time.
    again = reader_of(source_of(table), tmp_path)
    assert step(again, later) == (later, [])
    table.commit(table.add("e.parquet", {"n": [6]}))
    assert values(step(again, later)[1]) == values(step(reader, later)[1]) == [6]


def test_two_scans_agree_on_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Behind a look that takes long, as on a machine that has other work, the next ones are left out.
    monkeypatch.setattr(file_source, "_LONG_LOOK_S", 600.0)
    table = Table(tmp_path / "t", n="long")
    one, two = (reader_of(source_of(table), tmp_path) for _ in range(2))
    ends = [reader.latestOffset(reader.initialOffset(), None) for reader in (one, two)]
    for number in range(12):
        table.commit(table.add(f"{number}.parquet", {"n": [number]}))
        # Sometimes one looks, sometimes the other, and what both have listed is one list.
        ends[number % 2] = [one, two][number % 2].latestOffset(ends[number % 2], None)
    read = []
    for reader in (one, two):
        found = step(reader, reader.initialOffset())[1]
        read.append(values(found))
    assert read == [list(range(12))] * 2


def test_a_micro_batch_takes_files_records_and_bytes(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", n="long")
    for number in range(6):
        table.commit(table.add(f"{number}.parquet", {"n": [number] * 10}))
    size = (tmp_path / "t" / "0.parquet").stat().st_size

    def first(**more: Any) -> int:
        folder = tmp_path / f"job-{len(list(tmp_path.iterdir()))}"
        reader = reader_of(source_of(table, **more), folder)
        return len(step(reader, reader.initialOffset())[1])

    assert first() == 60
    assert first(max_files_per_trigger=2) == 20
    assert first(max_bytes_per_trigger=3 * size) == 30
    assert first(max_bytes_per_trigger=1) == 10, "a file that is too big is a micro-batch of its own"
    assert first(rate=RateLimit(records_per_batch=15)) == 20


def test_changes_from_a_version_on_up_to_one(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", n="long")
    for number in range(1, 6):
        table.commit(table.add(f"{number}.parquet", {"n": [number]}))
    source = source_of(table, starting_version=2, ending_version=4)
    assert source.is_bounded
    reader = reader_of(source, tmp_path)
    end, rows = step(reader, reader.initialOffset())
    assert values(rows) == [2, 3, 4] and SplitPosition.from_json(end).is_ended
    # An end that is still to come.
    later = reader_of(source_of(table, starting_version=5, ending_version=6), tmp_path / "later")
    end, rows = step(later, later.initialOffset())
    assert values(rows) == [5] and not SplitPosition.from_json(end).is_ended
    table.commit({"commitInfo": {}})
    assert SplitPosition.from_json(step(later, end)[0]).is_ended
    # The whole table, with an end that lies before its newest version.
    whole = reader_of(source_of(table, ending_version=1), tmp_path / "whole")
    end, rows = step(whole, whole.initialOffset())
    assert values(rows) == [1] and SplitPosition.from_json(end).is_ended


def test_the_table_is_that_of_the_first_look_also_if_it_was_empty(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", configuration=FEED, n="long")
    reader = reader_of(source_of(table, DeltaChanges.FEED), tmp_path)
    end, rows = step(reader, reader.initialOffset())
    assert rows == []
    table.commit(table.add("a.parquet", {"n": [1]}))
    table.commit(removed("a.parquet"))
    # By another process: the row came and went, and both is read.
    again = reader_of(source_of(table, DeltaChanges.FEED), tmp_path)
    assert feed_rows(step(again, end)[1]) == [(1, "insert", 1), (1, "delete", 2)]


def test_the_change_feed_is_that_of_its_files_or_of_what_came_and_went(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", configuration=FEED, n="long")
    table.commit(
        {"commitInfo": {"inCommitTimestamp": 1_767_225_600_123}}, table.add("a.parquet", {"n": [1, 2]})
    )
    changed = {"n": [2, 3], "_change_type": ["update_preimage", "update_postimage"]}
    table.commit(
        removed("a.parquet"), table.add("b.parquet", {"n": [1, 3]}), cdc(table, "c.parquet", changed)
    )
    reader = reader_of(source_of(table, DeltaChanges.FEED, starting_version=0), tmp_path)
    _, rows = step(reader, reader.initialOffset())
    wanted = [(1, "insert", 1), (2, "insert", 1), (2, "update_preimage", 2), (3, "update_postimage", 2)]
    assert feed_rows(rows) == wanted
    assert rows[0][3].isoformat() == "2026-01-01T00:00:00.123000+00:00"
    # From the table as it is: everything counts as inserted.
    whole = reader_of(source_of(table, DeltaChanges.FEED), tmp_path / "whole")
    assert feed_rows(step(whole, whole.initialOffset())[1]) == [(1, "insert", 2), (3, "insert", 2)]


PRE, POST = "update_preimage", "update_postimage"


def test_what_a_version_deletes_comes_before_what_it_inserts(tmp_path: Path) -> None:
    """UPDATE ... SET n = n + 1 of 1 and 2 in one version; INSERT OVERWRITE, whose new rows have old keys."""
    table = Table(tmp_path / "t", configuration=FEED, n="long")
    table.commit(table.add("a.parquet", {"n": [1, 2]}))
    files = [cdc(table, f"{n}.parquet", {"n": [n, n + 1], "_change_type": [PRE, POST]}) for n in (1, 2)]
    table.commit(removed("a.parquet"), table.add("b.parquet", {"n": [2, 3]}), *files)
    table.commit(table.add("c.parquet", {"n": [2, 3, 4]}), removed("b.parquet"))
    mixed = {"n": [9, 2, 9, 2], "_change_type": ["insert", "delete", "later", None]}
    table.commit(cdc(table, "d.parquet", mixed))
    # Of a feed that has come to the end of a version, nothing is missing: four files are two versions.
    source = source_of(
        table, DeltaChanges.FEED, starting_version=1, ending_version=4, max_files_per_trigger=4
    )
    reader = reader_of(source, tmp_path)
    end, rows = step(reader, reader.initialOffset())
    assert feed_rows(rows) == [(1, "insert", 1), (2, "insert", 1)]
    end, rows = step(reader, end)
    assert feed_rows(rows) == [(1, PRE, 2), (2, PRE, 2), (2, POST, 2), (3, POST, 2)]
    end, rows = step(reader, end)
    gone, come = [(n, "delete", 3) for n in (2, 3)], [(n, "insert", 3) for n in (2, 3, 4)]
    last = [(2, "delete", 4), (9, "insert", 4), (9, "later", 4), (2, None, 4)]
    assert feed_rows(rows) == gone + come + last
    assert SplitPosition.from_json(end).is_ended
    # A version that alone is more than a micro-batch takes is divided, in the same order.
    small = reader_of(
        source_of(table, DeltaChanges.FEED, starting_version=2, ending_version=2, max_files_per_trigger=3),
        tmp_path / "small",
    )
    end, rows = step(small, small.initialOffset())
    assert feed_rows(rows) == [(1, PRE, 2), (2, PRE, 2), (2, POST, 2)]
    end, rows = step(small, end)
    assert feed_rows(rows) == [(3, POST, 2)] and SplitPosition.from_json(end).is_ended


@pytest.mark.parametrize("last", ["nothing", "metadata", "optimize", "delete"])
def test_a_feed_ends_whatever_its_last_version_is(tmp_path: Path, last: str) -> None:
    table = Table(tmp_path / "t", configuration=FEED, n="long")
    table.commit(table.add("a.parquet", {"n": [1]}))
    again = [removed("a.parquet", dataChange=False), table.add("b.parquet", {"n": [1]}, dataChange=False)]
    actions = {
        "nothing": [{"commitInfo": {"operation": "SET TBLPROPERTIES"}}],
        "metadata": [{"metaData": table.metadata}],
        "optimize": again,
        "delete": [removed("a.parquet")],
    }
    table.commit(*actions[last])
    for number, first in enumerate((1, 2)):
        source = DeltaSource(path_of(table), DeltaChanges.FEED, starting_version=first, ending_version=2)
        reader = reader_of(source.bind("in"), tmp_path / str(number))
        end, rows = step(reader, reader.initialOffset())
        wanted = [(1, "insert", 1)] * (first == 1) + [(1, "delete", 2)] * (last == "delete")
        assert feed_rows(rows) == wanted and SplitPosition.from_json(end).is_ended


def test_a_removed_file_of_a_partition_that_the_log_does_not_say_is_refused(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", partition=["p"], configuration=FEED, n="long", p="string")
    table.commit(table.add("p=x/a.parquet", {"n": [1]}, partitionValues={"p": "x"}))
    table.commit(removed("p=x/a.parquet"))
    reader = reader_of(source_of(table, DeltaChanges.FEED, starting_version=0), tmp_path)
    with pytest.raises(ConfigError, match="files without the values of their partitions"):
        step(reader, reader.initialOffset())


@pytest.mark.parametrize("values", [{}, {"p": ""}])
def test_a_removed_file_of_the_partition_null_is_read(tmp_path: Path, values: dict[str, str]) -> None:
    """Delta leaves values that are null out; others write an empty text."""
    table = Table(tmp_path / "t", partition=["p"], configuration=FEED, n="long", p="string")
    table.commit(table.add("a.parquet", {"n": [1]}, partitionValues={"p": None}))
    table.commit(removed("a.parquet", partitionValues=values))
    reader = reader_of(source_of(table, DeltaChanges.FEED, starting_version=0), tmp_path)
    rows = step(reader, reader.initialOffset())[1]
    assert [row[:4] for row in rows] == [(1, None, "insert", 1), (1, None, "delete", 2)]


def test_partitions_and_later_columns_of_changes(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", partition=["p"], configuration=FEED, n="long", p="string", late="long")
    table.commit(table.add("p=x/a.parquet", {"n": [1]}, partitionValues={"p": "x"}))
    table.commit(removed("p=x/a.parquet", partitionValues={"p": "x"}))
    reader = reader_of(source_of(table, DeltaChanges.FEED, starting_version=0), tmp_path)
    rows = step(reader, reader.initialOffset())[1]
    assert [row[:5] for row in rows] == [(1, "x", None, "insert", 1), (1, "x", None, "delete", 2)]


def test_a_savepoint_goes_on_where_it_stood_in_another_job(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", n="long")
    for number in range(3):
        table.commit(table.add(f"{number}.parquet", {"n": [number]}))
    source = source_of(table, max_files_per_trigger=2)
    reader = reader_of(source, tmp_path)
    end, rows = step(reader, reader.initialOffset())
    assert values(rows) == [0, 1]
    old = source.bind("in")._replace("_fs_folder", str(tmp_path / "job" / "sources" / "in"))
    job_dir = JobDir(LocalStore(tmp_path / "job"))
    old.check_input(job_dir, "in", None)
    facts = old.identity(job_dir, "in")
    # What the table was like when it was read first is gone meanwhile.
    table.commit(table.add("new.parquet", {"n": [9]}))
    other = JobDir(LocalStore(tmp_path / "other"))
    for name, fact in json.loads(json.dumps(facts)).items():
        other.record_fact(name, fact)
    begun = source_of(table).bind("in")._replace("_fs_folder", str(tmp_path / "other" / "sources" / "in"))
    assert begun.is_positionable
    begun.check_input(other, "in", None)
    moved = begun.starting_at(SourceStart(end, str(tmp_path / "other" / "begin"), "x"))
    from flinkish_spark.connectors.splits import SplitStreamReader

    restored = SplitStreamReader(moved, str(tmp_path / "other" / "begin"))
    assert values(step(restored, restored.initialOffset())[1]) == [2, 9]


def schema_of(table: Table, old: str, new: str, metadata: str = "{}") -> dict[str, Any]:
    """Return the action by which the only field is another one."""
    changed = table.metadata["schemaString"].replace(old, new, 1) if old else table.metadata["schemaString"]
    configuration = {"delta.columnMapping.mode": "name"} if metadata != "{}" else {}
    changed = changed.replace('"metadata": {}', f'"metadata": {metadata}')
    return {"metaData": {**table.metadata, "schemaString": changed, "configuration": configuration}}


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (lambda t: [removed("a.parquet")], "updates or deletes rows"),
        (lambda t: [{"add": {"path": "../x"}}], "outside of its folder"),
        (lambda t: [{"protocol": {"readerFeatures": ["variantType"]}}], "'variantType'"),
        (lambda t: [schema_of(t, '"long"', '"string"')], "another type or name of 'n'"),
        (lambda t: [schema_of(t, '"n"', '"m"', '{"delta.columnMapping.physicalName": "n"}')], "name of 'n'"),
        (lambda t: [schema_of(t, "", "", '{"delta.columnMapping.physicalName": "c-1"}')], "name of 'n'"),
    ],
)
def test_a_commit_that_cannot_be_read_is_refused(tmp_path: Path, actions, message: str) -> None:
    table = Table(tmp_path / "t", n="long")
    table.commit(table.add("a.parquet", {"n": [1]}))
    reader = reader_of(source_of(table), tmp_path)
    end, _ = step(reader, reader.initialOffset())
    table.commit(*actions(table))
    with pytest.raises(ConfigError, match=message):
        step(reader, end)


def test_what_is_gone_is_noticed(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", n="long")
    added = [table.add(f"{number}.parquet", {"n": [number]}) for number in range(4)]
    table.commit(added[0])
    reader = reader_of(source_of(table), tmp_path)
    end, _ = step(reader, reader.initialOffset())
    for one in added[1:]:
        table.commit(one)
    table.checkpoint()
    (tmp_path / "t" / "_delta_log" / f"{2:020d}.json").unlink()
    with pytest.raises(InputLostError, match=r"version 2 of the Delta table .* is gone from its log"):
        step(reader_of(source_of(table), tmp_path), end)
    (tmp_path / "t" / "3.parquet").unlink()
    with pytest.raises(InputLostError, match=r"3.parquet of the Delta table is gone"):
        fresh = reader_of(source_of(table, starting_version=4), tmp_path / "fresh")
        step(fresh, fresh.initialOffset())


def test_another_table_in_its_place_is_noticed(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", n="long")
    table.metadata["id"] = "one"
    table.commit({"metaData": table.metadata})
    first = source_of(table).fingerprint()
    assert first["table"] == "one" and first == source_of(table).fingerprint()
    assert first != source_of(table, starting_version=1).fingerprint()


@pytest.mark.parametrize("is_known", [True, False])
def test_a_table_that_is_created_again_while_the_job_runs_is_noticed(tmp_path: Path, is_known: bool) -> None:
    """In the process that has read it, and in another one of the same job; whatever versions it has."""
    table = Table(tmp_path / "t", n="long")
    table.commit(table.add("a.parquet", {"n": [1]}))
    source = source_of(table)
    reader = reader_of(source, tmp_path)
    end, _ = step(reader, reader.initialOffset())
    assert step(reader, end) == (end, [])
    shutil.rmtree(table.path)
    again = Table(tmp_path / "t", n="long")
    again.metadata["id"] = "another"
    again.version = 0
    again.commit({"protocol": {}}, {"metaData": again.metadata})
    for number in range(3):
        again.commit(again.add(f"{number}.parquet", {"n": [number]}))
    with pytest.raises(InputLostError, match=r"is not the one that the job has read so far"):
        step(reader if is_known else reader_of(source, tmp_path), end)


def test_a_delta_source_is_a_source_of_splits(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", n="long")
    given = DeltaSource(
        path_of(table), reader="python", ending_version=3, rate=RateLimit(records_per_batch=7)
    )
    bound = given.bind("in")
    assert bound.is_positionable and bound.is_bounded and bound.plan_name == "delta"
    assert bound.rate == RateLimit(records_per_batch=7)
    assert not DeltaSource(path_of(table)).is_bounded


@pytest.mark.parametrize(
    "make",
    [
        lambda path: DeltaSource(path, reader="rust"),
        lambda path: DeltaSource(path, reader="jvm"),
        lambda path: DeltaSource(path, rate=7),
        lambda path: DeltaSource(path, max_bytes_per_trigger=0),
        lambda path: DeltaSource(path, max_files_per_trigger=0),
        lambda path: DeltaSource(path, DeltaChanges.FEED),
        lambda path: DeltaSource(path, "ROWS"),
        lambda path: DeltaSource(path, starting_version=-1),
        lambda path: DeltaSource(path + "-nowhere"),
        lambda path: DeltaSource("relative"),
        lambda path: DeltaSource("s3://bucket/table", store_options={"secret_access_key": "plain"}),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, make) -> None:
    table = Table(tmp_path / "t", n="long")
    with pytest.raises(ConfigError):
        make(path_of(table))
