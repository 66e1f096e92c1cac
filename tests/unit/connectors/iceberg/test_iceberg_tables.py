"""Tables of an Iceberg sink without a JVM: what fits, how files are written, what settings may be."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Collection
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.expressions import EqualTo
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import (
    DoubleType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    UUIDType,
)
from pyspark.sql import types as T

from flinkish_spark import IcebergSink
from flinkish_spark.connectors.iceberg import tables as iceberg_tables
from flinkish_spark.connectors.iceberg.data_files import FilesWork, metadata_for_tasks
from flinkish_spark.connectors.iceberg.schemas import find_null, why_no_match, why_no_type, why_not_written
from flinkish_spark.connectors.iceberg.sink import check_table
from flinkish_spark.connectors.iceberg.tables import IcebergTables
from flinkish_spark.connectors.staged_rows import DELETED
from flinkish_spark.connectors.write_modes import Append, Upsert, WriteMode
from flinkish_spark.core.errors import BadRecordError, ConfigError, EnvironmentFault, SchemaError
from flinkish_spark.protocol.records import Outcome
from flinkish_spark.types.arrow_types import arrow_schema
from flinkish_spark.types.ddl import parse_ddl
from tests.support.iceberg_rig import IcebergRig

ALL = (
    "yes BOOLEAN, b TINYINT, s SMALLINT, i INT, l BIGINT, f FLOAT, d DOUBLE, n DECIMAL(20, 3), day DATE, "
    "at TIMESTAMP, local TIMESTAMP_NTZ, name STRING, raw BINARY, st STRUCT<x: INT, y: ARRAY<STRING>>, "
    "m MAP<STRING, BIGINT>, many ARRAY<STRUCT<q: SMALLINT>>"
)
ROW = (
    *(True, 1, 2, 3, 4, 1.5, math.inf, Decimal("1.234"), date(1969, 1, 2)),
    *(datetime(1960, 1, 1, 5, tzinfo=UTC), datetime(1, 1, 1), "x/ü" * 9, b"\0a"),
    *({"x": 1, "y": ["a", None]}, [("k", 1)], [{"q": 1}, None]),
)


def fields_of(text: str) -> T.StructType:
    found = parse_ddl(text)
    assert isinstance(found, T.StructType)
    return found


def test_values_of_every_type_are_read_as_they_were_written(tmp_path: Path) -> None:
    rig = IcebergRig(tmp_path, ALL)
    rig.create()
    nothing = (None,) * len(ROW)
    staged = rig.stage([ROW, nothing, (*ROW[:-3], None, [], [])])
    rig.commit(1, staged)
    # Not by pyiceberg, which reads a null map, and a null list of structs, as an empty one.
    [file] = staged.payload["files"]
    found = pq.read_table(file["path"].removeprefix("file://"))
    rows = [tuple(row.values()) for row in found.to_pylist()]
    assert rows == [ROW, nothing, (*ROW[:-3], None, [], [])]
    ids = [int(field.metadata[b"PARQUET:field_id"]) for field in found.schema]
    assert ids == [field.field_id for field in rig.table.schema().fields]
    assert rig.table.scan().to_arrow().num_rows == 3


@pytest.mark.parametrize(
    "transform",
    [
        *("b", "n", "day", "at", "local", "name", "raw", "yes", "d", "bucket(4, b)", "bucket(3, n)"),
        *("bucket(8, name)", "truncate(2, name)", "truncate(10, n)", "truncate(10, s)", "year(day)"),
        *("bucket(8, raw)", "bucket(3, day)"),
        *("month(local)", "day(at)", "hour(at)", "st.x", "bucket(2, st.x)"),
    ],
)
def test_rows_are_partitioned_by_every_transform_as_pyiceberg_does_it(tmp_path: Path, transform: str) -> None:
    rig = IcebergRig(tmp_path, ALL, partition_by=(transform,))
    rig.create()
    rows = [ROW, (None,) * len(ROW), (*ROW[:-3], None, [], [])]
    staged = rig.stage(rows)
    rig.commit(1, staged)
    table = rig.table
    assert Counter(map(str, table.scan().to_arrow().to_pylist())).total() == 3
    assert all("=" not in one["path"] for one in staged.payload["files"])
    ours = {file.file.partition for file in table.scan().plan_files()}
    there = table.scan().to_arrow()
    table.append(there)
    theirs = [task.file.partition for task in rig.table.scan().plan_files()]
    assert Counter(map(str, theirs)) == Counter({str(one): 2 for one in ours})


def test_bytes_are_truncated_which_pyiceberg_itself_does_not(tmp_path: Path) -> None:
    rig = IcebergRig(tmp_path, "raw BINARY", partition_by=("truncate(2, raw)",))
    rig.create()
    rows = [(b"\xff\0a",), (b"\xff\0b",), (b"a",), (b"",), (None,)]
    rig.commit(1, rig.stage(rows))
    assert rig.rows() == Counter(rows)
    found = {task.file.partition[0] for task in rig.table.scan().plan_files()}
    assert found == {b"\xff\0", b"a", b"", None}
    chosen = rig.table.scan(row_filter=EqualTo("raw", b"\xff\0b"))
    assert len([*chosen.plan_files()]) == 1 and chosen.to_arrow().to_pylist() == [{"raw": b"\xff\0b"}]


@pytest.mark.parametrize("dropped", [False, True])
def test_a_table_may_be_partitioned_by_a_uuid_that_the_stream_lacks(tmp_path: Path, dropped: bool) -> None:
    rig = IcebergRig(tmp_path, "id LONG", create_table=False)
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "u", UUIDType()))
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "u"))
    properties = {"format-version": "1"}
    rig.catalog.create_table("shop.orders", schema, partition_spec=spec, properties=properties)
    if dropped:
        # A dropped partition field of the first format stays, and is always null.
        with rig.table.update_spec() as change:
            change.remove_field("u")
    assert rig.commit(1, rig.stage([(1,), (2,)])).outcome is Outcome.COMMITTED
    assert rig.rows() == Counter([(1, None), (2, None)])
    assert [task.file.partition[0] for task in rig.table.scan().plan_files()] == [None]


@pytest.mark.parametrize(
    ("kind", "least", "value"),
    [
        ("DECIMAL(4, 1)", Decimal("-999.0"), Decimal("-999.1")),
        ("DECIMAL(38, 0)", Decimal("-" + "9" * 37 + "0"), Decimal("-" + "9" * 37 + "1")),
        ("INT", -(2**31) + 8, -(2**31) + 7),
        ("LONG", -(2**63) + 8, -(2**63) + 7),
    ],
)
@pytest.mark.parametrize("mode", [Append(), Upsert(("id",))])
def test_a_record_whose_partition_has_no_value_is_named(
    tmp_path: Path, mode: WriteMode, kind: str, least: Any, value: Any
) -> None:
    rig = IcebergRig(tmp_path, f"id LONG, x {kind}", partition_by=("truncate(10, x)",), mode=mode)
    rig.create()
    rows = [(1, None), (2, least), (3, value)]
    with pytest.raises(BadRecordError) as found:
        write_as_task(rig, rows)
    text = str(found.value)
    assert "truncate[10] of the field x is less than every" in text
    assert f"'id': 3, 'x': {value!r}" in text
    write_as_task(rig, rows[:2])
    if isinstance(mode, Upsert):
        # What is deleted has no partition.
        write_as_task(rig, rows, deleted=[2])


def write_as_task(rig: IcebergRig, rows: list[tuple[Any, ...]], deleted: Collection[int] = ()) -> None:
    is_merged = isinstance(rig.sink.mode, Upsert)
    fields = T.StructType([*rig.fields, *([T.StructField(DELETED, T.BooleanType())] if is_merged else [])])
    given = [(*row, at in deleted) if is_merged else row for at, row in enumerate(rows)]
    batch = pa.RecordBatch.from_pylist(
        [dict(zip(fields.names, row, strict=True)) for row in given], arrow_schema(fields)
    )
    told = metadata_for_tasks(rig.table.metadata)
    work = FilesWork("table", fields, told, f"file://{rig.root}/staged", {}, 7 if is_merged else None)
    task = work.begin(cast(Any, SimpleNamespace(partitionId=lambda: 0)), 1)
    task.write(batch)


def test_a_bound_that_cannot_be_made_is_left_out(tmp_path: Path) -> None:
    rig = IcebergRig(tmp_path, "name STRING, raw BINARY")
    rig.create()
    longest = "x" * 15 + "\ud7ff" + "y"
    rows = [("a", b"\xff" * 17), (longest, b"")]
    rig.commit(1, rig.stage(rows))
    [task] = rig.table.scan().plan_files()
    assert task.file.lower_bounds == {1: b"a", 2: b""} and not task.file.upper_bounds
    assert rig.rows() == Counter(rows)
    assert rig.table.scan(row_filter=EqualTo("name", longest)).to_arrow().num_rows == 1


def test_values_that_equal_nothing_have_partitions_too(tmp_path: Path) -> None:
    rig = IcebergRig(tmp_path, "d DOUBLE", partition_by=("d",))
    rig.create()
    rig.commit(1, rig.stage([(math.nan,), (1.0,), (math.nan,), (None,)]))
    found = [row["d"] for row in rig.table.scan().to_arrow().to_pylist()]
    assert len(found) == 4 and sum(value is not None and math.isnan(value) for value in found) == 2


def test_two_partition_fields_may_be_of_one_column(tmp_path: Path) -> None:
    rig = IcebergRig(tmp_path, "id LONG, name STRING", partition_by=("bucket(4, id)", "id"))
    rig.create()
    rig.commit(1, rig.stage([(n, "x") for n in range(9)]))
    assert rig.rows() == Counter((n, "x") for n in range(9))
    assert len(rig.files()) == 9


def test_a_stream_may_be_narrower_than_the_table_and_in_another_order(tmp_path: Path) -> None:
    rig = IcebergRig(tmp_path, "st STRUCT<b: SMALLINT, a: FLOAT>, n DECIMAL(9, 2), id INT")
    nested = StructType(
        NestedField(6, "a", DoubleType(), required=False),
        NestedField(7, "more", StringType(), required=False),
        NestedField(8, "b", LongType(), required=False),
    )
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("n", pa.decimal128(20, 2)),
            ("other", pa.string()),
            ("st", pa.struct([("a", pa.float64()), ("more", pa.string()), ("b", pa.int64())])),
        ]
    )
    assert nested.fields
    rig.catalog.create_table("shop.orders", schema)
    rig.commit(1, rig.stage([({"b": 7, "a": 0.5}, Decimal("1.25"), 3), (None, None, None)]))
    assert rig.table.scan().to_arrow().to_pylist() == [
        {"id": 3, "n": Decimal("1.25"), "other": None, "st": {"a": 0.5, "more": None, "b": 7}},
        {"id": None, "n": None, "other": None, "st": None},
    ]


TABLE = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "name", StringType(), required=False),
    NestedField(3, "at", TimestampType(), required=False),
    NestedField(4, "st", StructType(NestedField(5, "x", IntegerType(), required=True)), required=False),
    NestedField(6, "l", ListType(7, LongType(), element_required=True), required=False),
    NestedField(8, "m", MapType(9, StringType(), 10, LongType(), value_required=True), required=False),
)


@pytest.mark.parametrize(
    ("ddl", "why"),
    [
        ("id INT, name STRING", ""),
        ("name STRING", "its field id is required, and the stream has none of that name"),
        ("id LONG, Name STRING", "it has no field Name; name is another name"),
        ("id LONG, more INT", "it has no field more"),
        ("id STRING", "its field id is Iceberg's long, the stream's is Spark's string"),
        ("id LONG, at TIMESTAMP", "its field at is Iceberg's timestamp, the stream's is Spark's timestamp"),
        ("id LONG, st STRUCT<y: INT>", "it has no field st.y"),
        ("id LONG, st STRUCT<x: LONG>", "its field st.x is Iceberg's int, the stream's is Spark's bigint"),
        ("id LONG, l ARRAY<DOUBLE>", "its field l.element is Iceberg's long, the stream's is Spark's double"),
        ("id LONG, m MAP<STRING, INT>", ""),
        ("id LONG, m MAP<INT, INT>", "its field m.key is Iceberg's string, the stream's is Spark's int"),
        ("id LONG, v VARIANT", "the field v is variant, for which Iceberg has no type"),
    ],
)
def test_what_does_not_fit_is_named(ddl: str, why: str) -> None:
    assert why_no_match(fields_of(ddl), TABLE) == why


@pytest.mark.parametrize("kind", ["INTERVAL YEAR", "INTERVAL DAY TO SECOND", "VARIANT", "VOID", "TIME"])
def test_types_that_iceberg_has_not_are_named_wherever_they_are(kind: str) -> None:
    for ddl, path in (("x {}", "x"), ("x ARRAY<{}>", "x.element"), ("x STRUCT<y: {}>", "x.y")):
        (field,) = fields_of(ddl.format(kind)).fields
        assert why_no_type(field.name, field.dataType).startswith(f"the field {path} is ")
    (collated,) = fields_of("x STRING COLLATE UNICODE_CI").fields
    assert "collation UNICODE_CI" in why_no_type("x", collated.dataType)


@pytest.mark.parametrize(
    ("bad", "path"),
    [
        ({"id": None}, "id"),
        ({"st": {"x": None}}, "st.x"),
        ({"l": [1, None]}, "l.element"),
        ({"m": [("a", None)]}, "m.value"),
        ({"st": None, "l": None, "m": None, "name": None}, ""),
        ({"l": [], "m": []}, ""),
    ],
)
def test_a_null_that_the_table_does_not_take_is_found_with_its_row(bad: dict[str, Any], path: str) -> None:
    good = {"id": 1, "name": "n", "st": {"x": 1}, "l": [1], "m": [("a", 1)]}
    kinds = pa.schema(
        [
            ("id", pa.int64()),
            ("name", pa.string()),
            ("st", pa.struct([("x", pa.int32())])),
            ("l", pa.list_(pa.int64())),
            ("m", pa.map_(pa.string(), pa.int64())),
        ]
    )
    for at in (0, 3, 6):
        rows = [{**good, **bad} if row == at else good for row in range(7)]
        batch = pa.RecordBatch.from_pylist([good, *rows], kinds).slice(1)
        assert find_null(batch, TABLE) == ((path, at) if path else None)


def test_a_table_that_pyiceberg_cannot_write_is_refused_by_name(tmp_path: Path) -> None:
    rig = IcebergRig(tmp_path, branch="other")
    table = rig.create()
    given = rig.fields

    def why() -> str:
        with pytest.raises(SchemaError) as found:
            check_table(rig.sink, "sink", rig.table, given)
        return found.value.why

    assert "it has no branch 'other'" in why()
    with table.transaction() as change:
        change.set_properties({"write.format.default": "orc"})
    assert "write.format.default is orc" in why()
    with table.transaction() as change:
        change.set_properties({"write.format.default": "parquet", "encryption.key-id": "k"})
    assert "encrypted" in why()
    newer = table.metadata.model_copy(update={"format_version": 3})
    assert why_not_written(newer, "main") == "its format version is 3, and pyiceberg writes 1 and 2"
    with pytest.raises(SchemaError, match=r"there is no Iceberg table lake\.shop\.orders for sink 'sink'"):
        check_table(rig.sink, "sink", None, given)


def test_a_table_of_the_first_format_and_one_that_merges_manifests_are_written(tmp_path: Path) -> None:
    properties = {
        "format-version": "1",
        "commit.manifest-merge.enabled": "true",
        "commit.manifest.min-count-to-merge": "2",
        "write.object-storage.enabled": "true",
    }
    rig = IcebergRig(tmp_path, table_properties=properties)
    rig.create()
    for number in range(1, 5):
        assert rig.commit(number, rig.stage([(number, "x")])).outcome is Outcome.COMMITTED
    table = rig.table
    snapshot = table.current_snapshot()
    assert table.metadata.format_version == 1 and snapshot is not None
    assert len(snapshot.manifests(table.io)) < 4
    assert rig.rows() == Counter((number, "x") for number in range(1, 5))


def test_settings_are_checked_and_secrets_are_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = IcebergSink("lake.shop.orders", {"token": "hidden", "uri": "env:CATALOG"})
    assert "hidden" not in repr(sink) and "properties" not in repr(sink).replace("table_properties", "")
    for table in ("orders", "shop.orders", "lake..orders", "lake.shop."):
        with pytest.raises(ConfigError, match="table"):
            IcebergSink(table)
    with pytest.raises(ConfigError, match="no transform of one"):
        IcebergSink("a.b.c", create_table=True, partition_by=("week(at)",))
    with pytest.raises(ConfigError, match="is not created"):
        IcebergSink("a.b.c", partition_by=("at",))
    with pytest.raises(ConfigError, match="no texts by name") as found:
        IcebergSink("a.b.c", {"token": 7})  # type: ignore[dict-item]
    assert "7" not in str(found.value)


def test_no_text_of_an_error_has_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {
        "credential": "client-7:hidden/1 ",
        "adls.connection-string": "AccountName=me;AccountKey=hidden2==",
        "auth": {"type": "oauth2", "oauth2": {"client_id": "me", "client_secret": "hidden3"}},
        "header.Authorization": "Basic hidden4",
    }
    config = SimpleNamespace(get_catalog_config=lambda name: own if name == "lake" else None)
    monkeypatch.setattr(iceberg_tables, "_ENV_CONFIG", config)
    monkeypatch.setenv("HIDDEN", "hidden5")
    rig = IcebergRig(tmp_path)
    rig.create()
    properties = {**rig.sink.properties, "user": "env:HIDDEN", "s3.session-token": "hidden6"}
    tables = IcebergTables(rig.sink.name, properties)
    table = tables.find(rig.sink.name)
    assert table is not None
    tables._catalog.properties["token"] = "hidden7"
    table.io.properties["s3.secret-access-key"] = "hidden8"
    monkeypatch.setattr(type(tables._catalog), "load_table", lambda *_: table)
    tables.find(rig.sink.name)
    shown = (
        "type sql, me: client-7 hidden/1  hidden%2F1+ hidden2== hidden3 Basic hidden4 hidden5 hidden6 "
        "hidden7 hidden8 https://x/y?sig=hidden9&a=b //u:p@hidden10@host/db?password=hidden11"
    )
    with pytest.raises(EnvironmentFault) as found, tables.translate_errors("nothing works"):
        raise OSError(shown)
    assert found.value.why == (
        "OSError: type sql, me: *** *** *** *** *** *** *** *** *** *** "
        "https://x/y?sig=***&a=b //***@host/db?password=***"
    )
    assert found.value.__cause__ is None


def test_a_catalog_that_is_not_configured_or_a_namespace_that_is_missing_is_said(tmp_path: Path) -> None:
    rig = IcebergRig(tmp_path)
    rig.catalog.drop_namespace("shop")
    with pytest.raises(ConfigError, match="There is no namespace shop in the catalog"):
        rig.create()
    other = IcebergRig(tmp_path, partition_by=("day(name)",))
    with pytest.raises(ConfigError, match="cannot be created"):
        other.create()
    sink = IcebergSink("nobody.shop.orders")
    with pytest.raises(ConfigError, match="catalog 'nobody' is not configured"):
        IcebergTables(sink.name, sink.properties).find(sink.name)


def test_what_tasks_are_sent_has_no_history_and_shows_no_secret(tmp_path: Path) -> None:
    rig = IcebergRig(tmp_path)
    rig.create()
    rig.commit(1, rig.stage([(1, "a")]))
    told = metadata_for_tasks(rig.table.metadata)
    assert json.loads(told)["snapshots"] == []
    work = FilesWork("uid", rig.fields, told, "/folder", {"s3.secret-access-key": "hidden"})
    assert "hidden" not in repr(work)
    assert PyArrowFileIO(dict(work.store)).properties == {"s3.secret-access-key": "hidden"}


def test_a_machine_without_pyiceberg_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = IcebergRig(tmp_path)
    monkeypatch.setitem(sys.modules, "pyiceberg_core", None)
    with pytest.raises(EnvironmentFault, match=r"needs the package pyiceberg_core.*pip install 'pyiceberg\["):
        rig.sink.preflight(cast(Any, None), rig.committer._context)
    monkeypatch.undo()
    rig.sink.preflight(cast(Any, None), rig.committer._context)
    assert rig.table.schema().column_names == ["id", "name"]
    with pytest.raises(ConfigError, match="mode"):
        IcebergSink("lake.shop.orders", mode="upsert")  # type: ignore[arg-type]
