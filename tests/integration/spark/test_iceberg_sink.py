"""The Iceberg sink with Spark: the contract of sinks, a job that dies, a record that the table refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

from flinkish_spark import FileFormat, FileSink, IcebergSink
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
        named = {task.file.file_path.rpartition("/")[2] for task in self.table.scan().plan_files()}
        there = {path.name for path in (self.root / "warehouse").rglob("*.parquet")}
        return len(there - named) + len(list((self.root / "warehouse").rglob(".open/*")))


@pytest.mark.parametrize("case", SINK_CASES)
def test_the_iceberg_sink(case, spark, tmp_path) -> None:
    lake = Lake(tmp_path)

    def sink():
        return lake.sink(create_table=True, partition_by=("bucket(2, user)",))

    case(SinkUnderTest(sink, lake.rows, spark, tmp_path / "folder", count_open=lake.count_leftovers))


def test_a_job_that_dies_behind_its_decision_writes_each_row_once(spark, tmp_path) -> None:
    lake, files = Lake(tmp_path), tmp_path / "files"

    def job():
        env = environment(spark, tmp_path / "job", trigger_interval_ms=100)
        totals = totals_of(env)
        totals.sink_to(lake.sink(create_table=True, partition_by=("user",)), uid="table")
        totals.sink_to(FileSink(str(files), FileFormat.JSON), uid="files")
        return env

    def rows_in_files():
        for path in files.rglob("*"):
            hidden = any(part[0] in "._" for part in path.relative_to(files).parts)
            if path.is_file() and not hidden:
                for line in path.read_text().splitlines():
                    row = json.loads(line)
                    yield row["user"], row["total"]

    crash_at(job(), "decision:after:1")
    assert not lake.rows()
    # Between the commit and the receipt.
    crash_at(job(), "sink-commit:after:1:table")
    assert (first := check_each_once(lake.rows())) > 0
    run_for(job(), 1)
    assert check_each_once(lake.rows()) == check_each_once(rows_in_files()) > first
    marks = [
        value
        for one in lake.table.metadata.snapshots
        for name, value in one.summary.additional_properties.items()
        if name.startswith("flinkish-")
    ]
    assert len(marks) == len(set(marks)) == len(lake.table.metadata.snapshots)
    assert marks[-1] in lake.table.properties.values()
    assert lake.count_leftovers() == 0


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
