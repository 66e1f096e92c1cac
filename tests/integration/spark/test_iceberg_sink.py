"""The Iceberg sink with Spark: the contract of sinks, a job that dies, a record that the table refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

from flinkish_spark import Append, FileFormat, FileSink, IcebergSink, OverwritePartitions, Upsert
from flinkish_spark.connectors.iceberg.tables import find_referenced
from flinkish_spark.core.errors import BadRecordError, SchemaError
from flinkish_spark.testing.sink_contract import SINK_CASES, SinkUnderTest
from tests.support.iceberg_rig import catalog_of, catalog_properties, rows_in
from tests.support.jobs import environment, failure_of
from tests.support.two_phase_app import check_each_once, crash_at, run_for, totals_of

TABLE = "lake.shop.orders"


class Lake:
    """A catalog, and what its readers see of one table."""

    def __init__(self, root: Path) -> None:
        self.root, self.catalog = root, catalog_of(root)

    def sink(self, **settings):
        return IcebergSink(TABLE, catalog_properties(self.root), **settings)

    @property
    def table(self):
        return self.catalog.load_table("shop.orders")

    def rows(self):
        try:
            return list(rows_in(self.table).elements())
        except NoSuchTableError:
            return []

    def count_leftovers(self) -> int:
        named = {path.rpartition("/")[2] for path in find_referenced(self.table, lambda _: True)}
        there = {path.name for path in (self.root / "warehouse").rglob("*.parquet")}
        return len(there - named) + len(list((self.root / "warehouse").rglob(".open/*")))


def rows_in_files(files: Path):
    for path in files.rglob("*"):
        hidden = any(part[0] in "._" for part in path.relative_to(files).parts)
        if path.is_file() and not hidden:
            for line in path.read_text().splitlines():
                row = json.loads(line)
                yield row["user"], row["total"]


MODES = {
    "append": (Append(), ("bucket(2, user)",)),
    "upsert": (Upsert(("user",), sequence_by="amount"), ("bucket(2, user)",)),
    # Each record of the cases has a name of its own.
    "overwrite": (OverwritePartitions(), ("user",)),
}


@pytest.mark.parametrize("case", SINK_CASES)
@pytest.mark.parametrize("mode", MODES)
def test_the_iceberg_sink(mode, case, spark, tmp_path) -> None:
    lake = Lake(tmp_path)

    def sink():
        given, partition_by = MODES[mode]
        return lake.sink(create_table=True, mode=given, partition_by=partition_by)

    case(SinkUnderTest(sink, lake.rows, spark, tmp_path / "folder", count_open=lake.count_leftovers))


def test_a_job_that_dies_behind_its_decision_writes_each_row_once(spark, tmp_path) -> None:
    lake, files = Lake(tmp_path), tmp_path / "files"

    def job():
        env = environment(spark, tmp_path / "job", trigger_interval_ms=100)
        totals = totals_of(env)
        totals.sink_to(lake.sink(create_table=True, partition_by=("user",)), uid="table")
        totals.sink_to(FileSink(str(files), FileFormat.JSON), uid="files")
        return env

    crash_at(job(), "decision:after:1")
    assert not lake.rows()
    # Between the commit and the receipt.
    crash_at(job(), "sink-commit:after:1:table")
    assert (first := check_each_once(lake.rows())) > 0
    run_for(job(), 1)
    assert check_each_once(lake.rows()) == check_each_once(rows_in_files(files)) > first
    marks = [
        value
        for one in lake.table.metadata.snapshots
        for name, value in one.summary.additional_properties.items()
        if name.startswith("flinkish-")
    ]
    assert len(marks) == len(set(marks)) == len(lake.table.metadata.snapshots)
    assert marks[-1] in lake.table.properties.values()
    assert lake.count_leftovers() == 0


def test_a_job_that_upserts_dies_behind_its_decision_and_keeps_the_last_row_of_each_key(
    spark, tmp_path
) -> None:
    lake, files = Lake(tmp_path), tmp_path / "files"

    def job():
        env = environment(spark, tmp_path / "job", trigger_interval_ms=100)
        totals = totals_of(env)
        totals.sink_to(lake.sink(create_table=True, mode=Upsert(("user",))), uid="table")
        totals.sink_to(FileSink(str(files), FileFormat.JSON), uid="files")
        return env

    def newest():
        found = {}
        for user, total in rows_in_files(files):
            found[user] = max(total, found.get(user, total))
        return sorted(found.items())

    crash_at(job(), "decision:after:1")
    assert not lake.rows()
    # Between the commit and the receipt.
    crash_at(job(), "sink-commit:after:1:table")
    first = sorted(lake.rows())
    assert first and len({user for user, _ in first}) == len(first)
    run_for(job(), 2)
    assert sorted(lake.rows()) == newest() != first
    assert lake.count_leftovers() == 0
    operations = [one.summary.operation.value for one in lake.table.metadata.snapshots]
    assert operations == ["append", *["overwrite"] * (len(operations) - 1)]


KINDS = "id LONG, op STRING, name STRING"


def test_a_changelog_deletes_rows_and_another_kind_or_no_key_ends_the_job_with_the_record(
    spark, tmp_path
) -> None:
    lake = Lake(tmp_path)
    mode = Upsert(("id",), row_kind="op")

    def run(name, rows):
        env = environment(spark, tmp_path / name, trigger_interval_ms=100)
        env.from_collection(rows, KINDS, uid="rows").sink_to(
            lake.sink(create_table=True, mode=mode), uid="table"
        )
        return env

    run("one", [(1, "+I", "a"), (2, "+I", "b"), (2, "-U", "b"), (2, "+U", "c"), (3, "+I", "x")]).execute()
    run("two", [(3, "-D", None), (1, "+U", "d")]).execute()
    assert sorted(lake.rows()) == [(1, "d"), (2, "c")]
    for name, row, why in (
        ("three", (4, "?", "a"), r"the row kind op IN \+I, -U, \+U, -D is violated by the record .*\"id\":4"),
        ("four", (None, "+I", "a"), r"the key id IS NOT NULL is violated by the record .*\"name\":\"a\""),
    ):
        error = failure_of(run(name, [row]))
        assert isinstance(error, BadRecordError), error
        assert re.search(why, str(error), re.IGNORECASE), error
    assert sorted(lake.rows()) == [(1, "d"), (2, "c")]


def test_a_condition_deletes_rows_and_its_columns_are_not_stored(spark, tmp_path) -> None:
    lake = Lake(tmp_path)
    mode = Upsert(("id",), sequence_by="at", delete_when="op = 'D'", not_stored=("op", "at"))
    rows = [(1, "I", 1, "a"), (2, "I", 1, "b"), (1, "D", 3, None), (1, "I", 2, "late"), (2, "I", 2, "c")]
    env = environment(spark, tmp_path / "job", trigger_interval_ms=100)
    stream = env.from_collection(rows, "id LONG, op STRING, at INT, name STRING", uid="rows")
    stream.sink_to(lake.sink(create_table=True, mode=mode), uid="table")
    env.execute()
    assert lake.rows() == [(2, "c")] and lake.table.schema().column_names == ["id", "name"]
    other = environment(spark, tmp_path / "other", trigger_interval_ms=100)
    stream = other.from_collection([(1, "I", 1, "a")], "id LONG, op STRING, at INT, name STRING", uid="rows")
    stream.sink_to(
        lake.sink(mode=Upsert(("id",), delete_when="nothing = 1", not_stored=("op", "at"))), uid="t"
    )
    with pytest.raises(SchemaError, match="delete_when of sink 't' is no condition on its records"):
        other.execute()


def test_a_null_that_the_table_does_not_take_ends_the_job_with_the_record(spark, tmp_path) -> None:
    lake = Lake(tmp_path)
    fields = (NestedField(1, "user", StringType(), required=True), NestedField(2, "total", LongType()))
    lake.catalog.create_table("shop.orders", Schema(*fields))
    env = environment(spark, tmp_path / "job", trigger_interval_ms=100)
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 20).load()
    frame = rate.selectExpr("IF(value = 7, NULL, CAST(value AS STRING)) AS user", "value AS total")
    env.from_dataframe(frame, uid="rate").sink_to(lake.sink(), uid="table")
    error = failure_of(env)
    assert isinstance(error, BadRecordError), error
    assert "the field user of the table is required, and null in" in str(error) and "7" in str(error)
    assert not lake.rows()


def test_a_stream_that_does_not_fit_is_refused_before_the_start(spark, tmp_path) -> None:
    lake = Lake(tmp_path)
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
    for column, why in (
        ("INTERVAL '1' YEAR AS many", "the field many is interval year, for which Iceberg has no type"),
        ("parse_json('1') AS any", "the field any is variant, for which Iceberg has no type"),
    ):
        env = environment(spark, tmp_path / why[:20], trigger_interval_ms=100)
        stream = env.from_dataframe(rate.selectExpr("value", column), uid="rate")
        stream.sink_to(lake.sink(create_table=True), uid="table")
        with pytest.raises(SchemaError, match=f"(?i){why}"):
            env.execute()
    with pytest.raises(NoSuchTableError):
        _ = lake.table
