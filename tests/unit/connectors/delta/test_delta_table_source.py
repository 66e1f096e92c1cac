"""One version of a Delta table, by its log: what is plain is read, what is not is refused."""

from __future__ import annotations

import datetime
import json
import re
import shutil
from decimal import Decimal
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from flinkish_spark.connectors.delta import file_rows
from flinkish_spark.connectors.delta.log import DeltaCommit, DeltaSnapshot
from flinkish_spark.connectors.split_positions import SplitPosition
from flinkish_spark.connectors.splits import read_piece
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.sources import DeltaChanges, DeltaSource, DeltaTableSource
from tests.unit.connectors.files.test_file_source import damaged_parquet, reader_of
from tests.unit.connectors.test_split_source import step

PROTOCOL = {"minReaderVersion": 1, "minWriterVersion": 2}
OF_FILES = {
    "protocol": PROTOCOL,
    "add": {"size": 1, "modificationTime": 1, "dataChange": True, "partitionValues": {}},
    "remove": {"dataChange": True, "deletionTimestamp": 1},
    "cdc": {"size": 1, "dataChange": False, "partitionValues": {}},
}


def fields(**types):
    found = [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in types.items()]
    return json.dumps({"type": "struct", "fields": found})


class Table:
    """Writes a log as Delta does."""

    def __init__(self, path, partition=(), configuration=None, features=None, **types) -> None:
        self.path, self.version = path, 0
        (path / "_delta_log").mkdir(parents=True)
        both = {"readerFeatures": features, "writerFeatures": features}
        protocol = {"minReaderVersion": 3, "minWriterVersion": 7, **both} if features else PROTOCOL
        self.metadata = {"schemaString": fields(**types), "partitionColumns": list(partition)}
        self.metadata |= {"configuration": configuration or {}, "id": "t"}
        self.metadata["format"] = {"provider": "parquet", "options": {}}
        self.commit({"protocol": protocol}, {"metaData": self.metadata})

    def commit(self, *actions) -> None:
        whole = [{kind: {**OF_FILES.get(kind, {}), **body} for kind, body in one.items()} for one in actions]
        text = "".join(json.dumps(action) + "\n" for action in whole)
        (self.path / "_delta_log" / f"{self.version:020d}.json").write_text(text)
        self.version += 1

    def add(self, name, columns, **more):
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path)
        rows = len(next(iter(columns.values())))
        return {"add": {"path": quote(name), "stats": json.dumps({"numRecords": rows}), **more}}

    def checkpoint(self, *, has_sidecar=False) -> None:
        DeltaTable(str(self.path)).create_checkpoint()
        if has_sidecar:
            self._move_into_sidecar(self.path / "_delta_log" / f"{self.version - 1:020d}.checkpoint.parquet")

    def _move_into_sidecar(self, path) -> None:
        """Make a V2 checkpoint of one, under the name that it has."""
        content = pq.read_table(path)
        adds = content.select(["add"]).filter(pc.is_valid(content["add"]))
        (path.parent / "_sidecars").mkdir()
        pq.write_table(adds, path.parent / "_sidecars" / "s.parquet")
        kept = [name for name in content.column_names if name in ("protocol", "metaData")]
        rest = content.filter(pc.is_null(content["add"])).select(kept)
        size = (path.parent / "_sidecars" / "s.parquet").stat().st_size
        for name, body in (
            ("sidecar", {"path": "s.parquet", "sizeInBytes": size, "modificationTime": 1}),
            ("checkpointMetadata", {"version": self.version - 1}),
        ):
            kind = pa.struct([pa.field(one, pa.array([value]).type) for one, value in body.items()])
            rows = [*([None] * rest.num_rows), body]
            rest = pa.Table.from_pylist([*rest.to_pylist(), {}], schema=rest.schema)
            rest = rest.append_column(name, pa.array(rows, kind))
        pq.write_table(rest, path)
        (path.parent / "_last_checkpoint").unlink()


def read(source, tmp_path, name="job"):
    reader = reader_of(source, tmp_path / name)
    end, rows = step(reader, reader.initialOffset())
    assert SplitPosition.from_json(end).is_ended
    return sorted((row[:-2] for row in rows), key=str)


def test_the_files_of_a_version_and_no_others(tmp_path) -> None:
    table = Table(tmp_path / "t", n="long")
    table.commit(table.add("a b.parquet", {"n": [1, 2]}), table.add("c.parquet", {"n": [3]}))
    table.commit({"remove": {"path": quote("a b.parquet")}}, table.add("d.parquet", {"n": [4]}))
    (tmp_path / "t" / "stray.parquet").write_bytes(b"not of the table")
    assert read(DeltaTableSource(str(tmp_path / "t")), tmp_path) == [(3,), (4,)]
    assert read(DeltaTableSource(str(tmp_path / "t"), version=1), tmp_path, "1") == [(1,), (2,), (3,)]
    # The version is that of the first start, whatever comes.
    table.commit(table.add("e.parquet", {"n": [5]}))
    assert read(DeltaTableSource(str(tmp_path / "t")), tmp_path) == [(3,), (4,)]


def test_from_a_checkpoint_when_the_log_before_it_is_gone(tmp_path) -> None:
    table = Table(tmp_path / "t", n="long", p="integer", partition=["p"])
    added = [table.add(f"p={p}/x.parquet", {"n": [p]}, partitionValues={"p": str(p)}) for p in range(3)]
    table.commit(*added)
    table.checkpoint()
    for number in range(2):
        (tmp_path / "t" / "_delta_log" / f"{number:020d}.json").unlink()
    table.commit({"remove": {"path": quote("p=0/x.parquet")}})
    assert read(DeltaTableSource(str(tmp_path / "t")), tmp_path) == [(1, 1), (2, 2)]
    files = DeltaSnapshot.read(tmp_path / "t", 1).files()
    assert {file.path for file in files} == {f"p={p}/x.parquet" for p in range(3)}
    with pytest.raises(ConfigError, match=r"version 0 of the Delta table .* cannot be read"):
        DeltaTableSource(str(tmp_path / "t"), version=0)


def test_a_checkpoint_with_its_files_in_a_sidecar_is_read_whole(tmp_path) -> None:
    """A reader of V1 checkpoints finds no `add` where a V2 checkpoint under the same name has sidecars."""
    table = Table(tmp_path / "t", features=["v2Checkpoint"], n="long")
    table.commit(table.add("x.parquet", {"n": [1]}), table.add("y.parquet", {"n": [2]}))
    table.checkpoint(has_sidecar=True)
    for number in range(2):
        (tmp_path / "t" / "_delta_log" / f"{number:020d}.json").unlink()
    table.commit(table.add("z.parquet", {"n": [3]}))
    for name, source in (
        ("table", DeltaTableSource(str(tmp_path / "t"))),
        ("records", DeltaSource(str(tmp_path / "t"), ending_version=2)),
    ):
        assert read(source, tmp_path, name) == [(1,), (2,), (3,)]
    (tmp_path / "t" / "_delta_log" / "_sidecars" / "s.parquet").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        DeltaTableSource(str(tmp_path / "t"))._look([])


def test_a_file_whose_deletion_vector_was_taken_back_is_read(tmp_path) -> None:
    """RESTORE adds the file without it again; what is removed is the one of that path with a vector."""
    table = Table(tmp_path / "t", features=["deletionVectors"], n="long")
    vector = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "offset": 4}
    vector |= {"sizeInBytes": 40, "cardinality": 1}
    gone = {"remove": {"path": "x.parquet", "deletionVector": vector}}
    table.commit(table.add("x.parquet", {"n": [1]}))
    table.commit(gone)
    assert read(DeltaTableSource(str(tmp_path / "t")), tmp_path, "before") == [(1,)]
    table.checkpoint()
    table.commit(gone)
    assert read(DeltaTableSource(str(tmp_path / "t")), tmp_path) == [(1,)]


@pytest.mark.parametrize("kind", [DeltaTableSource, DeltaSource])
def test_a_task_is_told_which_rows_of_its_files_are_deleted_and_reads_no_vectors(
    tmp_path, monkeypatch, kind
) -> None:
    """deltalake has those of a whole version only."""
    table = Table(tmp_path / "t", features=["deletionVectors"], n="long")
    # The example of Delta's protocol: rows 3, 4, 7, 11, 18 and 29.
    letters = "^Bg9^0rr910000000000iXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L"
    vector = {"storageType": "i", "pathOrInlineDv": letters, "sizeInBytes": 44, "cardinality": 6}
    with_vector = table.add("x.parquet", {"n": list(range(40))}, deletionVector=vector)
    table.commit(with_vector, table.add("y.parquet", {"n": [100]}))
    reader = reader_of(kind(str(tmp_path / "t")), tmp_path)
    start = reader.initialOffset()
    pieces = reader.partitions(start, reader.latestOffset(start, None))
    shutil.rmtree(tmp_path / "t" / "_delta_log")
    monkeypatch.setattr(file_rows, "find_deleted_rows", None)
    batches = [batch for piece in pieces for batch in read_piece(reader.source, piece)]
    found = sorted(row["n"] for batch in batches for row in batch.to_pylist())
    assert found == sorted({*range(40), 100} - {3, 4, 7, 11, 18, 29})


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ({"sidecar": {"path": "s.parquet"}}, "the action 'sidecar'"),
        ({"later": {"rule": 1}}, "the action 'later'"),
        ({"add": {"path": "x.parquet", "rule": 1}}, "the field 'rule' of the action 'add'"),
        ({"remove": {"path": "x.parquet", "rule": False}}, "the field 'rule' of the action 'remove'"),
        ({"cdc": {"path": "x.parquet", "rule": {}}}, "the field 'rule' of the action 'cdc'"),
        ({"protocol": {"minReaderVersion": 4}}, "a protocol for readers of version 4"),
        ({"protocol": {"readerFeatures": ["catalogManaged"]}}, "the feature 'catalogManaged'"),
        ({"metaData": {"format": {"provider": "orc"}}}, "files in the format 'orc'"),
        (
            {"metaData": {"configuration": {"delta.coordinatedCommits.commitCoordinator-preview": "x"}}},
            "the property 'delta.coordinatedCommits",
        ),
        ({"add": {"path": "../x.parquet"}}, "outside of its folder"),
        ({"add": {"path": "s3a://of/another/x.parquet"}}, "outside of its folder"),
        ({"remove": {"path": "s3a://of/another/x.parquet"}}, "outside of its folder"),
    ],
)
def test_what_a_commit_says_is_known_or_refused_by_name(tmp_path, action, message) -> None:
    table = Table(tmp_path / "t", n="long")
    known = table.add("x.parquet", {"n": [1]}, baseRowId=0, defaultRowCommitVersion=1, tags={}, later=None)
    table.commit(known, {"txn": {"appId": "a", "version": 1}}, {"domainMetadata": {"domain": "delta.x"}})
    assert DeltaCommit.read(tmp_path / "t", 1).added[0].path == "x.parquet"
    if "metaData" in action:
        action = {"metaData": {**table.metadata, **action["metaData"]}}
    table.commit(action)
    with pytest.raises(ConfigError, match=message):
        DeltaCommit.read(tmp_path / "t", 2)


def test_a_file_elsewhere_is_read_if_it_is_on_this_file_system(tmp_path) -> None:
    """A shallow clone names the files of the other table."""
    table, other = (Table(tmp_path / name, n="long") for name in ("t", "other table"))
    other.add("x.parquet", {"n": [1]})
    table.commit({"add": {"path": (tmp_path / "other table" / "x.parquet").as_uri()}})
    assert read(DeltaTableSource(str(tmp_path / "t")), tmp_path) == [(1,)]
    table.commit({"add": {"path": "s3a://of/another/x.parquet"}})
    with pytest.raises(ConfigError, match=r"a file outside of its folder: s3a://of/another/x.parquet"):
        DeltaTableSource(str(tmp_path / "t"))._look([])


def test_the_log_says_the_values_of_a_partition_also_if_files_do(tmp_path) -> None:
    """As of tables made by CONVERT TO DELTA, or with delta.feature.materializePartitionColumns."""
    table = Table(tmp_path / "t", partition=["p"], n="long", p="long")
    table.commit(table.add("p=1/x.parquet", {"n": [5], "p": [7]}, partitionValues={"p": "1"}))
    table.commit(table.add("y.parquet", {"n": [6], "p": [7]}, partitionValues={"p": None}))
    table.commit(table.add("z.parquet", {"n": [7], "p": [7]}))
    assert read(DeltaTableSource(str(tmp_path / "t")), tmp_path) == [(5, 1), (6, None), (7, None)]


def test_a_column_under_another_case_is_none_that_was_added_later(tmp_path) -> None:
    table = Table(tmp_path / "t", n="long", later="long")
    table.commit(table.add("x.parquet", {"N": [1]}))
    reader = reader_of(DeltaTableSource(str(tmp_path / "t")), tmp_path)
    with pytest.raises(RuntimeError, match="the column 'n' of the table is 'N' in it"):
        step(reader, reader.initialOffset())


def test_old_dates_of_the_old_calendar_are_refused(tmp_path) -> None:
    table = Table(tmp_path / "t", configuration={"delta.enableChangeDataFeed": "true"}, day="date")
    table.commit(table.add("x.parquet", {"day": pa.array([datetime.date(1000, 1, 1)], pa.date32())}))
    content = pq.read_table(tmp_path / "t" / "x.parquet")
    assert read(DeltaTableSource(str(tmp_path / "t")), tmp_path) == [(datetime.date(1000, 1, 1),)]
    said = {"org.apache.spark.version": "4.2.0", "org.apache.spark.legacyDateTime": ""}
    pq.write_table(content.replace_schema_metadata(said), tmp_path / "t" / "x.parquet")
    for number, source in enumerate(
        [
            DeltaTableSource(str(tmp_path / "t")),
            DeltaSource(str(tmp_path / "t")),
            DeltaSource(str(tmp_path / "t"), DeltaChanges.FEED, starting_version=0),
        ]
    ):
        reader = reader_of(source, tmp_path / str(number))
        with pytest.raises(RuntimeError, match="the column 'day' has a date before 1582-10-15"):
            step(reader, reader.initialOffset())


def test_a_line_of_the_log_ends_where_json_lines_end(tmp_path) -> None:
    """Delta writes U+2028 and its like as they are, in values of partitions and in statistics."""
    name = "a\u2028b\u0085c\u2029"
    table = Table(tmp_path / "t", n="long", p="string", partition=["p"])
    added = table.add("x.parquet", {"n": [1]}, partitionValues={"p": name})
    log = tmp_path / "t" / "_delta_log" / "00000000000000000001.json"
    table.commit(added)
    log.write_text(log.read_text().replace(json.dumps(name), f'"{name}"'), encoding="utf-8")
    assert read(DeltaTableSource(str(tmp_path / "t")), tmp_path) == [(1, name)]
    records = DeltaSource(str(tmp_path / "t"), starting_version=1, ending_version=1)
    assert read(records, tmp_path, "records") == [(1, name)]


def test_times_in_the_form_of_spark_are_exact_from_the_first_year_to_the_last(tmp_path) -> None:
    utc = datetime.UTC
    times = [
        datetime.datetime(1, 1, 1, tzinfo=utc),
        datetime.datetime(1677, 9, 21, 0, 12, 43, 145223, tzinfo=utc),
        datetime.datetime(2262, 4, 11, 23, 47, 16, 854776, tzinfo=utc),
        datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=utc),
    ]
    table = Table(tmp_path / "t", at="timestamp")
    added = table.add("x.parquet", {"at": times})
    content = pa.table({"at": pa.array(times, pa.timestamp("us", "UTC"))})
    pq.write_table(content, tmp_path / "t" / "x.parquet", use_deprecated_int96_timestamps=True)
    table.commit(added)
    assert [at for (at,) in read(DeltaTableSource(str(tmp_path / "t")), tmp_path)] == times


def test_values_of_partitions_and_columns_that_came_later(tmp_path) -> None:
    types = {"n": "long", "name": "string", "day": "date", "flag": "boolean", "price": "decimal(5,2)"}
    table = Table(tmp_path / "t", partition=["name", "day", "flag", "price"], **types)
    some = {"name": "ä b", "day": "2026-01-02", "flag": "true", "price": "1.50"}
    table.commit(
        table.add("x.parquet", {"n": pa.array([1], pa.int32())}, partitionValues=some),
        table.add("y.parquet", {"n": [2]}, partitionValues=dict.fromkeys(some)),
    )
    table.metadata = {**table.metadata, "schemaString": fields(**types, more="double")}
    table.commit({"metaData": table.metadata}, table.add("z.parquet", {"n": [3], "more": [0.5]}))
    day = datetime.date(2026, 1, 2)
    assert read(DeltaTableSource(str(tmp_path / "t")), tmp_path) == [
        (1, "ä b", day, True, Decimal("1.50"), None),
        (2, None, None, None, None, None),
        (3, None, None, None, None, 0.5),
    ]


@pytest.mark.parametrize("kind", ["string", "integer", "decimal(5,2)"])
def test_a_partition_value_that_is_an_empty_text_is_null_however_it_is_read(tmp_path, kind) -> None:
    table = Table(tmp_path / "t", partition=["p"], n="long", p=kind)
    table.commit(table.add("x.parquet", {"n": [1]}, partitionValues={"p": ""}))
    path = str(tmp_path / "t")
    for name, source in (
        ("table", DeltaTableSource(path)),
        ("first version, whole", DeltaSource(path, ending_version=1)),
        ("commit", DeltaSource(path, starting_version=1, ending_version=1)),
    ):
        assert read(source, tmp_path, name) == [(1, None)], name


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [("decimal(10,2)", "1.5", "all digits after the point"), ("long", "1.0", "cannot read it")],
)
def test_a_partition_value_that_deltalake_cannot_read_is_no_damage(tmp_path, kind, value, why) -> None:
    table = Table(tmp_path / "t", partition=["p"], n="long", p=kind)
    table.commit(table.add("x.parquet", {"n": [1]}, partitionValues={"p": value}))
    with pytest.raises(
        ConfigError, match=re.escape(f"the partition value '{value}' of the type {kind}")
    ) as e:
        DeltaTableSource(str(tmp_path / "t"))
    assert why in str(e.value) and "from_dataframe" in e.value.what_to_do


def test_fields_within_columns_that_came_later_are_null_and_those_in_other_letters_refused(tmp_path) -> None:
    one = {"name": "a", "type": "long", "nullable": True, "metadata": {}}
    inner = {"type": "struct", "fields": [one, {**one, "name": "b", "type": "string"}]}
    table = Table(tmp_path / "t", s=inner)
    table.commit(
        table.add("x.parquet", {"s": [{"a": 1}]}), table.add("y.parquet", {"s": [{"b": "y", "a": 2}]})
    )
    rows = read(DeltaTableSource(str(tmp_path / "t")), tmp_path)
    assert rows == [({"a": 1, "b": None},), ({"a": 2, "b": "y"},)]
    for name, columns in (("upper", {"s": [{"a": 1, "B": "x"}]}), ("whole", {"S": [{"a": 1}]})):
        other = Table(tmp_path / name, s=inner)
        other.commit(other.add("x.parquet", columns))
        with pytest.raises(RuntimeError, match=r"has no field 's.b'|'s' of the table is 'S' in it"):
            read(DeltaTableSource(str(tmp_path / name)), tmp_path / f"job-{name}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"features": ["rowsFromTheMoon"]}, "rowsFromTheMoon"),
        ({"features": ["variantType"]}, "the feature 'variantType'"),
        ({"configuration": {"delta.coordinatedCommits.x": "y"}}, "the property 'delta.coordinatedCommits.x'"),
        ({"partition": ["at"], "at": "timestamp"}, "is partitioned by 'at', a timestamp"),
    ],
)
def test_tables_that_are_not_read_are_refused_by_the_name_of_what_they_have(
    tmp_path, settings, message
) -> None:
    Table(tmp_path / "t", n="long", **settings)
    with pytest.raises(ConfigError, match=message):
        DeltaTableSource(str(tmp_path / "t"))


def test_what_is_not_there_is_refused(tmp_path) -> None:
    Table(tmp_path / "t", n="long")
    for path, version in [(tmp_path / "none", None), (tmp_path / "t", 7), ("relative", None), (tmp_path, -1)]:
        with pytest.raises(ConfigError):
            DeltaTableSource(str(path), version=version)
    with pytest.raises(ConfigError, match="There is no Delta log"):
        DeltaTableSource(str(tmp_path / "none"))


def test_a_path_that_deltalake_would_take_for_another_is_refused(tmp_path) -> None:
    """It would read `a table`."""
    for name in ("a table", "a%20table"):
        Table(tmp_path / name, n="long")
    with pytest.raises(ConfigError, match=r"followed by two digits.*name a folder"):
        DeltaTableSource(str(tmp_path / "a%20table"))
    (tmp_path / "link").symlink_to(tmp_path / "a%20table")
    with pytest.raises(ConfigError, match=r"followed by two digits.*rename the folder"):
        DeltaTableSource(str(tmp_path / "link"))


def test_a_range_of_versions_that_ends_before_it_begins_is_refused(tmp_path) -> None:
    Table(tmp_path / "t", n="long")
    with pytest.raises(ConfigError, match=r"ending_version is 4 .* >= 5"):
        DeltaSource("/t", DeltaChanges.FEED, starting_version=5, ending_version=4)
    with pytest.raises(ConfigError, match=r"ending_version is 4 .* >= 5"):
        DeltaSource(str(tmp_path / "t"), starting_version=5, ending_version=4)


@pytest.mark.parametrize("kind", [DeltaTableSource, DeltaSource])
def test_a_damaged_file_of_a_table_is_named(tmp_path, kind) -> None:
    table = Table(tmp_path / "t", n="long")
    table.commit(table.add("x.parquet", {"n": [1]}))
    damaged_parquet(tmp_path / "t" / "x.parquet")
    reader = reader_of(kind(str(tmp_path / "t")), tmp_path)
    with pytest.raises(RuntimeError, match=rf"the file {tmp_path}/t/x.parquet cannot be read: .*snappy"):
        step(reader, reader.initialOffset())


def test_a_damaged_log_of_a_table_is_named(tmp_path) -> None:
    table = Table(tmp_path / "t", n="long")
    table.commit(table.add("x.parquet", {"n": [1]}))
    newest = tmp_path / "t" / "_delta_log" / f"{1:020d}.json"
    newest.write_text(newest.read_text()[:-9])
    with pytest.raises(ConfigError, match=rf"the Delta table {tmp_path}/t cannot be read. .*Json error"):
        DeltaTableSource(str(tmp_path / "t"))
    with pytest.raises(ValueError, match=rf"the file {newest} cannot be read"):
        DeltaCommit.read(tmp_path / "t", 1)
