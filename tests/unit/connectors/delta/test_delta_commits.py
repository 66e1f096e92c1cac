"""Files of a Delta sink and their commits by delta-rs, without a JVM: who wins, what is refused."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import types as T

from flinkish_spark import DeltaManifest, DeltaSink
from flinkish_spark.connectors.delta.files import TableFiles
from flinkish_spark.connectors.delta.table import (
    FEATURES_OF_DELTA_RS,
    Append,
    DeltaConflict,
    DeltaTableError,
    NotAsFiles,
    OverwritePartitions,
    TableInfo,
    Upsert,
    why_by_spark,
    why_no_table,
    why_not_made,
    why_not_merged,
)
from flinkish_spark.connectors.delta.tables import (
    DeltaTables,
    Marker,
    features_of,
    find_last_version,
    info_of,
)
from flinkish_spark.connectors.delta.writer import FilesToWrite, Statistics, partition_texts, stats_columns
from flinkish_spark.connectors.staged_rows import BATCH, DELETED, ORDER, newest_per_key
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.sources import DeltaSource, DeltaTableSource
from flinkish_spark.types.ddl import parse_ddl


def fields_of(text: str) -> T.StructType:
    found = parse_ddl(text)
    assert isinstance(found, T.StructType)
    return found


SCHEMA = fields_of("id BIGINT, p STRING")
BY_ID = Upsert(("id",), sequence_by="at")


def metadata(
    partition_by: tuple[str, ...] = ("p",), schema: T.StructType = SCHEMA, **more: str
) -> dict[str, Any]:
    return {"schemaString": schema.json(), "partitionColumns": list(partition_by), "configuration": more}


def marker(version: int, app: str = "me") -> Marker:
    return Marker(app, version, f"note of {app} {version}")


class Rig:
    def __init__(self, path: Path) -> None:
        self.path, self.tables = str(path), DeltaTables()

    def files(
        self, rows: list[dict[str, Any]], partition_by: tuple[str, ...] = ("p",)
    ) -> list[dict[str, Any]]:
        schema = pa.schema([("id", pa.int64()), ("p", pa.string())])
        target = FilesToWrite(self.tables.files(self.path), partition_by=("p",), with_stats=("id",))
        return target.write([pa.RecordBatch.from_pylist(rows, schema)], 0)

    def create(self, rows: list[dict[str, Any]], at: int = 1) -> None:
        self.tables.create(self.path, metadata(), self.files(rows), marker(at))

    def open(self) -> DeltaTable:
        found = self.tables.open(self.path)
        assert found is not None
        return found

    def rows(self) -> list[tuple[Any, ...]]:
        found = DeltaTable(self.path).to_pyarrow_table(columns=["id", "p"]).to_pylist()
        return sorted((row["id"], row["p"]) for row in found)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "a [t] {x} ä")


def row(number: int, partition: str | None = "x") -> dict[str, Any]:
    return {"id": number, "p": partition}


def test_a_commit_is_one_version_with_its_marker_and_its_note(rig: Rig) -> None:
    assert rig.tables.open(rig.path) is None and rig.tables.find_committed_version(rig.path, "me") == -1
    rig.create([row(1), row(2, None), row(3, "y/ä %:=")])
    assert rig.tables.append(rig.path, rig.open(), rig.files([row(4)]), marker(2)) == 1
    assert rig.tables.find_committed_version(rig.path, "me") == 2
    assert rig.rows() == [(1, "x"), (2, None), (3, "y/ä %:="), (4, "x")]
    newest, first = rig.tables.history(rig.path)
    assert (newest.version, newest.note) == (1, "note of me 2")
    assert first.note == "note of me 1"


def test_a_table_can_be_made_without_a_row(rig: Rig) -> None:
    """By an upsert whose records delete."""
    rig.tables.create(rig.path, metadata(), [], marker(1))
    assert rig.rows() == [] and rig.tables.find_committed_version(rig.path, "me") == 1
    rig.tables.append(rig.path, rig.open(), rig.files([row(1)]), marker(2))
    assert rig.rows() == [(1, "x")]


def test_a_table_that_is_made_twice_is_a_conflict_and_keeps_its_rows(rig: Rig) -> None:
    """delta-rs would put its second try behind the first version, without a look at the marker."""
    rig.create([row(1)])
    staged = rig.files([row(1)])
    with pytest.raises(DeltaConflict, match="at the same moment"):
        rig.tables.create(rig.path, metadata(), staged, marker(1))
    assert rig.rows() == [(1, "x")] and rig.open().version() == 0


def test_two_that_make_a_table_at_the_same_moment_make_one(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second looked before the first was there."""
    from deltalake import transaction

    staged, original = [rig.files([row(1)]) for _ in range(2)], transaction._create_table_with_add_actions

    def slow(**given: Any) -> None:
        monkeypatch.setattr(transaction, "_create_table_with_add_actions", original)
        rig.tables.create(rig.path, metadata(), staged[0], marker(1))
        original(**given)

    monkeypatch.setattr(transaction, "_create_table_with_add_actions", slow)
    with pytest.raises(DeltaConflict):
        rig.tables.create(rig.path, metadata(), staged[1], marker(1))
    assert rig.rows() == [(1, "x")] and rig.open().version() == 0


def test_of_two_commits_of_one_marker_the_second_is_a_conflict(rig: Rig) -> None:
    rig.create([row(1)])
    old = rig.open()
    rig.tables.append(rig.path, rig.open(), rig.files([row(2)]), marker(2))
    with pytest.raises(DeltaConflict, match="Concurrent transaction"):
        rig.tables.append(rig.path, old, rig.files([row(2)]), marker(2))
    # A stranger's is none: rows go beside its own.
    rig.tables.append(rig.path, old, rig.files([row(3)]), marker(9, "stranger"))
    assert [one for one, _ in rig.rows()] == [1, 2, 3]
    assert find_last_version(rig.open(), "me") == 2 and find_last_version(rig.open(), "stranger") == 9


@pytest.mark.parametrize("write", ["append", "replace"])
def test_a_call_that_is_made_twice_with_one_open_table_commits_once(rig, write) -> None:
    """The first call moves the open table on, so the second meets no conflict of delta-rs's."""
    rig.create([row(1)])
    table, files = rig.open(), rig.files([row(2)])
    getattr(rig.tables, write)(rig.path, table, files, marker(2))
    version = table.version()
    with pytest.raises(DeltaConflict, match="checkpoint 2 is in version"):
        getattr(rig.tables, write)(rig.path, table, files, marker(2))
    assert rig.open().version() == version


def test_a_table_that_is_changed_meanwhile_is_a_conflict(rig: Rig) -> None:
    rig.create([row(1)])
    old = rig.open()
    DeltaTable(rig.path).alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
    with pytest.raises(DeltaConflict):
        rig.tables.append(rig.path, old, rig.files([row(2)]), marker(2))
    rig.tables.append(rig.path, rig.open(), rig.files([row(2)]), marker(2))
    assert [one for one, _ in rig.rows()] == [1, 2]


def test_optimize_and_vacuum_disturb_no_append(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "t")
    rig.create([row(1)])
    rig.tables.append(rig.path, rig.open(), rig.files([row(2)]), marker(2))
    old, staged = rig.open(), rig.files([row(3)])
    DeltaTable(rig.path).optimize.compact()
    DeltaTable(rig.path).vacuum(168, dry_run=False)
    rig.tables.append(rig.path, old, staged, marker(3))
    assert [one for one, _ in rig.rows()] == [1, 2, 3]


@pytest.mark.parametrize("other", ["append", "optimize"])
def test_partitions_are_replaced_as_they_are_seen_or_not_at_all(tmp_path: Path, other: str) -> None:
    rig = Rig(tmp_path / "t")
    rig.create([row(1), row(2, "y"), row(3, None)])
    rig.tables.append(rig.path, rig.open(), rig.files([row(4)]), marker(2))
    old = rig.open()
    if other == "append":
        rig.tables.append(rig.path, rig.open(), rig.files([row(5)]), marker(1, "stranger"))
    else:
        DeltaTable(rig.path).optimize.compact()
    with pytest.raises(DeltaConflict):
        rig.tables.replace(rig.path, old, rig.files([row(9), row(8, None)]), marker(3))
    rig.tables.replace(rig.path, rig.open(), rig.files([row(9), row(8, None)]), marker(3))
    assert sorted(rig.rows(), key=str) == [(2, "y"), (8, None), (9, "x")]


def test_a_file_that_delta_rs_would_not_find_is_not_replaced_by_it(tmp_path: Path) -> None:
    """It wrote a `remove` of another name, and the old rows stayed beside the new ones."""
    rig = Rig(tmp_path / "t")
    write_deltalake(rig.path, pa.table({"id": [1, 2], "p": ["a b", "x"]}), partition_by=["p"])
    with pytest.raises(NotAsFiles, match="escape its name twice"):
        rig.tables.replace(rig.path, rig.open(), rig.files([row(3, "a b")]), marker(1))
    rig.tables.replace(rig.path, rig.open(), rig.files([row(4)]), marker(1))
    assert rig.rows() == [(1, "a b"), (4, "x")]


def upserts(*rows: tuple[Any, ...]) -> pa.Table:
    names = ["id", "at", "v", BATCH, ORDER, DELETED]
    kinds = [pa.int64(), pa.int32(), pa.string(), pa.int64(), pa.int64(), pa.bool_()]
    return pa.Table.from_pylist(
        [dict(zip(names, one, strict=True)) for one in rows], pa.schema(zip(names, kinds, strict=True))
    )


def test_the_last_record_of_a_key_counts() -> None:
    found = newest_per_key(
        upserts(
            (1, 5, "new", 0, 0, False),
            (1, 3, "old", 1, 0, False),
            (2, None, "null", 1, 9, False),
            (2, 0, "more", 0, 0, False),
            (3, 1, "first", 0, 8, False),
            (3, 1, "later", 1, 0, True),
        ),
        BY_ID,
    )
    assert sorted(found.column("v").to_pylist()) == ["later", "more", "new"]
    in_stream = newest_per_key(upserts((1, 9, "a", 0, 1, False), (1, 1, "b", 0, 2, False)), Upsert(("id",)))
    assert in_stream.column("v").to_pylist() == ["b"]
    zeros = pa.table({"id": [0.0, -0.0, math.nan, -math.nan], BATCH: [0] * 4, ORDER: [0, 1, 2, 3]})
    assert newest_per_key(zeros, Upsert(("id",))).column(ORDER).to_pylist() == [1, 3]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.bool_(), [False, True]),
        (pa.binary(), [b"", b"\xff"]),
        (pa.string(), ["", "b\0"]),
        (pa.decimal128(38, 18), [Decimal(-1), Decimal(1)]),
        (pa.timestamp("us", "UTC"), [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)]),
        (pa.timestamp("us"), [datetime(1, 1, 1), datetime(9999, 1, 1)]),
        (pa.date32(), [date(1, 1, 1), date(9999, 1, 1)]),
        (pa.duration("us"), [timedelta(-1), timedelta(1)]),
        (pa.float32(), [math.inf, math.nan]),
        (pa.int8(), [-1, 1]),
    ],
)
def test_keys_and_sequences_of_every_type_are_compared(kind: pa.DataType, values: list[Any]) -> None:
    least, greatest = values
    columns = {"k": [least, greatest, least, None], "at": [greatest, least, None, least]}
    arrays = {name: pa.array(one, kind) for name, one in columns.items()}
    rows = pa.table({**arrays, BATCH: [0] * 4, ORDER: [0, 1, 2, 3]})
    found = newest_per_key(rows, Upsert(("k",), sequence_by="at"))
    assert sorted(found.column(ORDER).to_pylist()) == [0, 1, 3]


def test_an_upsert_changes_deletes_and_adds(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "a {x} ä #?")
    write_deltalake(
        rig.path, upserts(*[(n, 5, "old", 0, 0, False) for n in range(5)]).select(["id", "at", "v"])
    )
    given = upserts(
        (0, 4, "late", 0, 0, False),
        (1, 5, "equal", 0, 1, False),
        (2, None, "none", 0, 2, False),
        (3, 6, None, 0, 3, True),
        (7, 1, "added", 0, 4, False),
        (8, 1, None, 0, 5, True),
    )
    before = rig.open()
    rig.tables.merge(rig.path, rig.open(), given, BY_ID, marker(1))
    with pytest.raises(DeltaConflict):
        rig.tables.merge(rig.path, before, given, BY_ID, marker(1))
    found = DeltaTable(rig.path).to_pyarrow_table().to_pylist()
    assert sorted((one["id"], one["v"]) for one in found) == [
        (0, "old"),
        (1, "equal"),
        (2, "old"),
        (4, "old"),
        (7, "added"),
    ]
    assert find_last_version(rig.open(), "me") == 1


def test_a_table_is_set_back_and_emptied(rig: Rig) -> None:
    rig.create([row(1), row(2, "a b")])
    rig.tables.append(rig.path, rig.open(), rig.files([row(3)]), marker(2))
    assert rig.tables.missing_at(rig.path, 0) == []
    rig.tables.restore(rig.path, rig.open(), 0, "back")
    assert [one for one, _ in rig.rows()] == [1, 2]
    rig.tables.delete_rows(rig.path, rig.open(), "empty")
    assert rig.rows() == [] and rig.tables.history(rig.path, 1)[0].note == "empty"
    # Its marker stays: what was committed is not committed again.
    assert rig.tables.find_committed_version(rig.path, "me") == 2


def test_a_path_that_delta_rs_reads_in_another_way_is_refused(tmp_path: Path) -> None:
    for name, why in (("a%20b", "% followed by two digits"), ("a\\b", "reads as /")):
        with pytest.raises(DeltaTableError, match=why):
            DeltaTables().open(str(tmp_path / name))


@pytest.mark.parametrize("make", [DeltaSink, DeltaManifest])
def test_a_uri_of_a_file_is_the_folder_that_it_names_or_is_refused(make: Any, tmp_path: Path) -> None:
    for start in ("file:", "file://", "file:///"):
        assert make(f"{start}{tmp_path}").path == f"{start}{tmp_path}"
        assert TableFiles.of(f"{start}{tmp_path}", {}).root == tmp_path
    for path, why in (
        ("file:///lake/a%20b", "% followed by two digits"),
        ("file:/lake/a%20b", "% followed by two digits"),
        ("/lake/a%20b", "% followed by two digits"),
        ("/lake/a\\b", "reads as /"),
        ("file://localhost/tmp/x", "host, or a relative path"),
        ("file://lake/x", "host, or a relative path"),
        ("file:lake/x", "host, or a relative path"),
    ):
        with pytest.raises(ConfigError, match=why):
            make(path)
        with pytest.raises(DeltaTableError, match=why):
            DeltaTables().open(path)


@pytest.mark.parametrize("make", [DeltaSink, DeltaManifest, DeltaTableSource, DeltaSource])
@pytest.mark.parametrize(
    "url,why",
    [
        ("s3://bkt/t#1", "characters that stores and Spark read"),
        ("s3://bkt/t?x=1", "characters that stores and Spark read"),
        ("S3A://bkt/t#1", "characters that stores and Spark read"),
        ("s3://bkt/a/../b", "a part that is empty, . or .."),
        ("s3://bkt/a//b", "a part that is empty, . or .."),
        ("s3a://KEY:SIGNATURE@bkt/t", "login in a URL"),
        ("abfss://box@a.dfs.core.windows.net/t?sv=1&sig=SIGNATURE", "characters that stores and Spark read"),
        ("abfs://KEY:SIGNATURE@c/t", "does not say container@account"),
        ("gs://bkt/t?x=SIGNATURE%2F", "characters that stores and Spark read"),
        ("lakefs://repo/main/t?x=SIGNATURE%2F", "after \\? or #"),
        ("lakefs://repo/main/t#1", "after \\? or #"),
        ("lakefs://repo/main/../t", "part .. leads"),
        ("lakefs://KEY:SIGNATURE@repo/t", "login in a URL"),
        ("lakefs://repo/t/%20", "% followed by two digits"),
        ("lakefs:repo?sig=SIGNATURE", "is relative"),
    ],
)
def test_a_url_that_is_another_place_or_holds_a_secret_is_refused(make: Any, url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        make(url)
    assert "SIGNATURE" not in f"{caught.value} {caught.value.facts}"


@pytest.mark.parametrize("make", [DeltaSink, DeltaManifest])
def test_a_url_of_a_table_stays_as_it_is_given(make: Any) -> None:
    for url in (
        "s3://bkt/a=1/t/",
        "s3a://bkt/t",
        "gs://bkt/t",
        "abfs://box@a.dfs.core.windows.net/t",
        "az://box/t",
        "hdfs://namenode:8020/t",
        "lakefs://repo/main/t..",
    ):
        assert make(url).path == url


def test_files_of_partitions_of_a_size_with_their_statistics(tmp_path: Path) -> None:
    tables = DeltaTables()
    target = FilesToWrite(
        tables.files(str(tmp_path)),
        partition_by=("p", "q"),
        max_rows=2,
        with_stats=("id",),
        compression="zstd",
    )
    rows = [{"id": n, "p": None if n % 2 else "a\nb", "q": n == 6} for n in range(7)]
    adds = target.write([pa.RecordBatch.from_pylist(rows)], 3)
    found = {}
    for add in adds:
        table = pq.read_table(tmp_path / add["path"], partitioning=None)
        assert table.column_names == ["id"] and add["size"] == (tmp_path / add["path"]).stat().st_size
        assert add["path"].startswith("part-00003-") and "zstd" in add["path"]
        ids, stats = table.column("id").to_pylist(), json.loads(add["stats"])
        assert stats == {
            "numRecords": len(ids),
            "minValues": {"id": min(ids)},
            "maxValues": {"id": max(ids)},
            "nullCount": {"id": 0},
        }
        found.setdefault(tuple(add["partitionValues"].values()), []).append(ids)
    assert found == {
        ("a\nb", "false"): [[0, 2], [4]],
        (None, "false"): [[1, 3], [5]],
        ("a\nb", "true"): [[6]],
    }


def test_one_file_at_a_time_is_open_however_many_partitions_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of any size, if the rows of a partition come together."""
    now_open, most = set(), 0
    output, finish = TableFiles.output, TableFiles.finish

    def opened(files: TableFiles, name: str) -> Any:
        nonlocal most
        now_open.add(name)
        most = max(most, len(now_open))
        return output(files, name)

    def finished(files: TableFiles, name: str, file: Any) -> None:
        now_open.remove(name)
        finish(files, name, file)

    monkeypatch.setattr(TableFiles, "output", opened)
    monkeypatch.setattr(TableFiles, "finish", finished)
    rows = pa.table({"id": range(1_000), "p": [str(n // 4) if n > 3 else None for n in range(1_000)]})
    target = FilesToWrite(DeltaTables().files(str(tmp_path)), partition_by=("p",))
    for batches in (rows.to_batches(max_chunksize=7), rows.take(list(range(0, 1_000, 4)) * 4).to_batches()):
        adds = target.write(batches, 0)
        assert {add["partitionValues"]["p"]: json.loads(add["stats"])["numRecords"] for add in adds} == {
            str(n) if n else None: 4 for n in range(250)
        }
        assert len(adds) == 250 and most == 1 and not now_open


def test_partition_values_are_texts_that_mean_one_value() -> None:
    at = datetime(2026, 10, 25, 0, 30, 0, 1, tzinfo=UTC)
    for values, kind, texts in (
        ([at, None], pa.timestamp("us", "Europe/Berlin"), ["2026-10-25T00:30:00.000001Z", None]),
        ([at.replace(tzinfo=None)], pa.timestamp("us"), ["2026-10-25 00:30:00.000001"]),
        (
            [1e-7, math.inf, -math.inf, 0.1 + 0.2],
            pa.float64(),
            ["1e-07", "Infinity", "-Infinity", "0.30000000000000004"],
        ),
        ([Decimal("-0.01"), Decimal("1.50")], pa.decimal128(10, 2), ["-0.01", "1.50"]),
        ([date(1, 1, 1), date(9999, 12, 31)], pa.date32(), ["0001-01-01", "9999-12-31"]),
        ([True, False], pa.bool_(), ["true", "false"]),
        ([-128], pa.int8(), ["-128"]),
    ):
        assert partition_texts(pa.array(values, kind)).to_pylist() == texts


def test_statistics_hold_of_every_value() -> None:
    kinds = pa.schema(
        [
            ("t", pa.string()),
            ("f", pa.float64()),
            ("nan", pa.float64()),
            ("d", pa.decimal128(38, 18)),
            ("at", pa.timestamp("us", "UTC")),
            ("ntz", pa.timestamp("us")),
            ("s", pa.struct([("a", pa.int32())])),
            ("b", pa.binary()),
            ("far", pa.date32()),
        ]
    )
    far = pa.array([10_000_000, 0, None], pa.int32()).cast(pa.date32())
    at = datetime(2020, 1, 1, 0, 0, 0, 1_500)
    columns = [
        ["a" * 40, "b", None],
        [-0.0, 0.0, None],
        [1.0, math.nan, None],
        [Decimal("12345678901234567890.123456789012345678"), None, None],
        [at.replace(tzinfo=UTC), None, None],
        [at, None, None],
        [{"a": 1}, {"a": None}, None],
        [b"x", None, None],
    ]
    table = pa.table(
        [*(pa.array(c, k.type) for c, k in zip(columns, kinds, strict=False)), far], schema=kinds
    )
    stats = Statistics(("t", "f", "nan", "d", "at", "ntz", "s\0a", "b", "far", "gone"))
    stats.add(table)
    text = stats.to_text()
    assert '"d":12345678901234567890.123456789012345678' in text
    found = json.loads(text)
    found["minValues"].pop("d"), found["maxValues"].pop("d")
    ms = "2020-01-01T00:00:00.00"
    assert found == {
        "numRecords": 3,
        "minValues": {"t": "a" * 32, "f": -0.0, "at": f"{ms}1Z", "ntz": f"{ms}1", "s": {"a": 1}},
        "maxValues": {"t": "b", "f": 0.0, "at": f"{ms}2Z", "ntz": f"{ms}2", "s": {"a": 1}},
        "nullCount": {"t": 1, "f": 1, "nan": 1, "d": 2, "at": 2, "ntz": 2, "s": {"a": 2}, "b": 2, "far": 1},
    }
    assert math.copysign(1, found["minValues"]["f"]) == -1
    long = Statistics(("t",))
    long.add(pa.table({"t": ["z" * 33]}))
    assert json.loads(long.to_text())["maxValues"] == {"t": "z" * 32 + "\U0010ffff"}


def test_which_columns_have_statistics() -> None:
    fields = fields_of("a INT, s STRUCT<b: INT, c: STRUCT<d: INT>>, e INT").jsonValue()["fields"]
    assert stats_columns(fields, {}) == ("a", "s\0b", "s\0c\0d", "e")
    assert stats_columns(fields, {"delta.dataSkippingNumIndexedCols": "2"}) == ("a", "s\0b")
    assert stats_columns(fields, {"delta.dataSkippingStatsColumns": "E, s.c"}) == ("s\0c\0d", "e")


def test_what_delta_rs_does_not_know_is_said_by_its_name(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "t")
    rig.create([row(1)])
    assert features_of(rig.open()) == {"appendOnly", "invariants"} and not why_by_spark(
        info_of(rig.open()), Append()
    )

    def why(mode: Any, *features: str, changes: tuple[str, ...] = (), **properties: str) -> str:
        return why_by_spark(TableInfo((), (), properties, frozenset(features)), mode, changes)

    assert not why(OverwritePartitions(), *(FEATURES_OF_DELTA_RS - {"deletionVectors"}))
    assert why(Append(), "rowTracking", "invariants") == "the table feature rowTracking"
    assert "deletionVectors" in why(OverwritePartitions(), "deletionVectors")
    assert "deletionVectors" in why(None, "deletionVectors")
    assert not why(Append(), "deletionVectors") and not why(BY_ID, "deletionVectors")
    checked = {"delta.constraints.c": "a > 0"}
    assert "checkConstraints" in why(BY_ID, **checked) and not why(Append(), **checked)
    assert why(Append(), changes=("n",)) == "a change of its schema (n)"


def test_what_delta_rs_would_make_or_write_wrongly_is_not_given_to_it(tmp_path: Path) -> None:
    """A negative decimal as "-1.-5"; a table with TIMESTAMP_NTZ in a MAP and without its feature."""

    def table(ddl: str, *partition_by: str, **properties: str) -> TableInfo:
        return TableInfo(tuple(fields_of(ddl).jsonValue()["fields"]), partition_by, properties)

    by_decimal = table("id INT, p DECIMAL(10,2)", "p")
    assert "partitions by a DECIMAL, as p is" in why_by_spark(by_decimal, BY_ID)
    assert "partitions by a DECIMAL" in why_not_made(by_decimal, BY_ID)
    assert not why_by_spark(by_decimal, Append()) and not why_by_spark(by_decimal, OverwritePartitions())
    strict = table("id INT, s STRUCT<a: INT NOT NULL>")
    assert "NOT NULL within the column s" in why_by_spark(strict, BY_ID) and not why_by_spark(
        strict, Append()
    )
    have = table("id INT, s STRUCT<a: INT, b: ARRAY<INT>>, n BIGINT")
    for stream, other in (
        ("id INT, s STRUCT<a: INT, b: ARRAY<INT>>", ""),
        ("id INT, n INT", "n"),
        ("ID INT", "ID"),
        ("s STRUCT<a: INT>", "s"),
        ("s STRUCT<a: INT, B: ARRAY<INT>>", "s"),
        ("s STRUCT<b: ARRAY<INT>, a: INT>", "s"),
        ("id INT, x INT", "x"),
    ):
        why = why_not_merged(have, fields_of(stream).jsonValue()["fields"])
        assert (f"a merge of {other}, " in why) if other else not why
    deep = table("id INT, m ARRAY<MAP<STRING, STRUCT<a: TIMESTAMP_NTZ>>>")
    assert "timestampNtz of a new table" in why_not_made(deep, Append()) and not why_by_spark(deep, Append())
    assert not why_not_made(table("t TIMESTAMP_NTZ, m MAP<STRING, INT>, a ARRAY<TIMESTAMP_NTZ>"), Append())
    assert "delta.foo of new tables" in why_not_made(table("a INT", **{"delta.foo": "1"}), Append())
    rig = Rig(tmp_path / "t")
    fields = fields_of("id INT, p DECIMAL(10,2)")
    made = {"schemaString": fields.json(), "partitionColumns": ["p"], "configuration": {}}
    schema = pa.schema([("id", pa.int32()), ("p", pa.decimal128(10, 2))])
    target = FilesToWrite(rig.tables.files(rig.path), partition_by=("p",))

    def files(*rows: tuple[int, str]) -> list[dict[str, Any]]:
        found = [{"id": number, "p": Decimal(text)} for number, text in rows]
        return target.write([pa.RecordBatch.from_pylist(found, schema)], 0)

    rig.tables.create(rig.path, made, files((1, "-1.50"), (2, "0.05")), marker(1))
    rig.tables.replace(rig.path, rig.open(), files((3, "-1.50")), marker(2))
    left = pa.table(rig.open().get_add_actions()).column("partition").to_pylist()
    assert sorted(one["p"] for one in left) == [Decimal("-1.50"), Decimal("0.05")]


@pytest.mark.parametrize(
    ("schema", "partition_by", "why"),
    [
        ("a INT, b STRUCT<c: ARRAY<MAP<STRING, DECIMAL(38,18)>>>, v VARIANT, t TIMESTAMP_NTZ", (), ""),
        ("a INT, A INT", (), "two columns A"),
        ("`a b` INT", (), "cannot be called 'a b'"),
        ("s STRUCT<`a=` INT>", (), "cannot be called 'a='"),
        ("a INT", ("a",), "every column"),
        ("a INTERVAL DAY TO SECOND", (), "interval day to second"),
        ("a ARRAY<INTERVAL YEAR>", (), "interval year"),
        ("a STRING COLLATE UTF8_LCASE", (), "collat"),
    ],
)
def test_what_delta_makes_no_table_of(schema: str, partition_by: tuple[str, ...], why: str) -> None:
    found = why_no_table(fields_of(schema).fields, partition_by)
    assert (why in found) if why else not found
