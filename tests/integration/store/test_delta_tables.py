"""Delta tables in a bucket, on Azure and on HDFS hold what the contract of sinks says, in each mode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import TableNotFoundError

from flinkish_spark import Append, DeltaSink, OverwritePartitions, Upsert
from flinkish_spark.connectors.delta.table import DeltaConflict
from flinkish_spark.connectors.delta.tables import DeltaTables, Marker
from flinkish_spark.connectors.files import source as file_source
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.sources import DeltaChanges, DeltaSource, DeltaTableSource
from flinkish_spark.testing.sink_contract import SINK_CASES, SinkUnderTest, check_sink
from tests.support.buckets import LocalAzure, LocalS3
from tests.support.services import BUILD
from tests.unit.connectors.files.test_file_source import reader_of
from tests.unit.connectors.test_split_source import step


@pytest.fixture(autouse=True)
def no_wait_after_a_slow_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does other work lists slowly, and then a source waits before it looks again."""
    monkeypatch.setattr(file_source, "_LONG_LOOK_S", 600.0)


@pytest.fixture(scope="module")
def s3() -> Iterator[LocalS3]:
    with LocalS3() as found:
        yield found


@pytest.fixture(scope="module")
def azure() -> Iterator[LocalAzure]:
    if why := LocalAzure.why_not(BUILD / "azurite"):
        pytest.skip(why)
    with LocalAzure(BUILD / "azurite") as found:
        yield found


@pytest.fixture(params=["s3", "azure", "hdfs"])
def table(request: pytest.FixtureRequest) -> StoreSpec:
    found: StoreSpec = request.getfixturevalue(request.param).new_store()
    return found


@pytest.mark.parametrize(
    "mode", [Append(), Upsert(keys=("user",)), OverwritePartitions()], ids=lambda mode: type(mode).__name__
)
def test_the_cases_of_the_contract(spark: Any, tmp_path: Path, table: StoreSpec, mode: Any) -> None:
    def sink() -> DeltaSink:
        # Each record of the cases has a name of its own.
        partition_by = ("user",) if isinstance(mode, OverwritePartitions) else ()
        options = dict(table.options)
        return DeltaSink(table.url, mode=mode, partition_by=partition_by, store_options=options)

    def visible() -> list[tuple[Any, ...]]:
        try:
            found = DeltaTable(table.url, storage_options=table.resolve())
        except TableNotFoundError:
            return []
        rows = found.to_pyarrow_table(columns=["user", "amount"]).to_pylist()
        return [(row["user"], row["amount"]) for row in rows]

    check_sink(SinkUnderTest(sink, visible, spark, tmp_path / "folder"), SINK_CASES)


def test_a_version_is_written_once(table: StoreSpec) -> None:
    """Of two that look at one version, and commit behind it with one marker, the second is refused."""
    tables = DeltaTables(dict(table.options))
    schema = '{"type":"struct","fields":[{"name":"n","type":"long","nullable":true,"metadata":{}}]}'
    tables.create(table.url, {"schemaString": schema, "partitionColumns": []}, [], Marker("a", 1, "first"))
    one, two = tables.open(table.url), tables.open(table.url)
    assert one is not None and two is not None
    assert tables.append(table.url, one, [], Marker("a", 2, "one")) == 1
    with pytest.raises(DeltaConflict):
        tables.append(table.url, two, [], Marker("a", 2, "two"))
    assert [each.note for each in tables.history(table.url)] == ["one", "first"]


def test_sources_read_a_table_and_what_comes(tmp_path: Path, table: StoreSpec) -> None:
    """A reader looks again and again; a process that goes on later reads the same."""

    def written(*numbers: int) -> None:
        rows = pa.table({"n": numbers, "p": [f"p {number % 2}" for number in numbers]})
        options, feed = table.resolve(), {"delta.enableChangeDataFeed": "true"}
        how: dict[str, Any] = {"mode": "append", "partition_by": ["p"], "configuration": feed}
        write_deltalake(table.url, rows, storage_options=options, **how)

    options = dict(table.options)
    written(1, 2)
    live = DeltaSource(table.url, DeltaChanges.FEED, store_options=options, discover_every_ms=1)
    reader = reader_of(live, tmp_path / "live")
    first, rows = step(reader, reader.initialOffset())
    assert sorted(row[:3] for row in rows) == [(1, "p 1", "insert"), (2, "p 0", "insert")]
    written(3)
    DeltaTable(table.url, storage_options=table.resolve()).delete("n = 1")
    found = step(reader, first)[1]
    assert sorted(row[:4] for row in found) == [(1, "p 1", "delete", 2), (3, "p 1", "insert", 1)]
    assert step(reader_of(live, tmp_path / "live"), first)[1] == found
    whole = reader_of(DeltaTableSource(table.url, version=1, store_options=options), tmp_path / "whole")
    assert sorted(row[0] for row in step(whole, whole.initialOffset())[1]) == [1, 2, 3]
