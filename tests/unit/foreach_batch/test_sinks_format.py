"""`format("flinkish")` without Spark: plan, tasks and commit, each in a process of its own, as pickles."""

from __future__ import annotations

import pickle
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyspark import cloudpickle
from pyspark.sql import types as T

from flinkish_spark import (
    ColumnBuckets,
    DeltaSink,
    FileFormat,
    FileSink,
    ForeachSink,
    IcebergSink,
    JdbcSink,
    KafkaSink,
    Upsert,
    commit_together,
)
from flinkish_spark.checkpoint.micro_batch_commits import to_checkpoint_place
from flinkish_spark.connectors import stream_writer, task_staging
from flinkish_spark.connectors.query_sinks import QuerySinks
from flinkish_spark.connectors.stream_writer import QueryOutput, StagedMessage, StreamWriter
from flinkish_spark.contracts.sink import Sink
from flinkish_spark.core.errors import ConfigError, JobDirError, SchemaError
from flinkish_spark.foreach_batch.sinks_format import Flinkish
from flinkish_spark.protocol.ids import BatchId
from flinkish_spark.types.ddl import parse_ddl
from tests.support.door_files import confirmed

SCHEMA = parse_ddl("user STRING, amount LONG, is_large BOOLEAN")
Rows = Sequence[tuple[str, int]]


@pytest.fixture(autouse=True)
def _no_process_keeps_what_another_opened() -> Iterator[None]:
    yield
    stream_writer._SINKS.clear()


class Query:
    """A query of Spark's, as its data source sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoint = folder, folder / "checkpoint"
        (self.checkpoint / "offsets").mkdir(parents=True)
        self.catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"{folder}/lake"}
        load_catalog("lake", **self.catalog).create_namespace("shop")
        #: Whether Spark uses one process for all calls, as it may, and not a new one for each.
        self.is_one_process = False

    def sinks(self) -> dict[str, Sink]:
        return {
            "files": FileSink(f"{self.folder}/files"),
            "table": DeltaSink(f"{self.folder}/table"),
            "newest": DeltaSink(f"{self.folder}/newest", mode=Upsert(("user",), sequence_by="amount")),
            "ice": IcebergSink("lake.shop.orders", properties=self.catalog, create_table=True),
            "rows": JdbcSink(f"jdbc:sqlite:{self.folder}/rows.db", "copies", create_table=True),
        }

    def make_writer(self, options: dict[str, str]) -> StreamWriter:
        if not self.is_one_process:
            stream_writer._SINKS.clear()
        given = {**options, "checkpointLocation": str(self.checkpoint)}
        writer = Flinkish(given).streamWriter(SCHEMA, False)
        assert isinstance(writer, StreamWriter)
        return writer

    def stage(
        self, options: dict[str, str], batch: int, tasks: Sequence[Rows], monkeypatch: pytest.MonkeyPatch
    ) -> list[Any]:
        (self.checkpoint / "offsets" / str(batch)).write_text(f'v1\n{{}}\n{{"at":{batch}}}')
        pickled: bytes = cloudpickle.dumps(self.make_writer(options))
        messages = []
        for number, rows in enumerate(tasks):
            context = SimpleNamespace(partitionId=lambda at=number: at, attemptNumber=lambda: 0)
            monkeypatch.setattr(task_staging, "begin_staging", lambda found=context: found)
            users, amounts = zip(*rows, strict=True) if rows else ((), ())
            large = [amount > 4 for amount in amounts]
            arrays = [
                pa.array(users, pa.string()),
                pa.array(amounts, pa.int64()),
                pa.array(large, pa.bool_()),
            ]
            given = pa.RecordBatch.from_arrays(arrays, names=SCHEMA.names)
            message = pickle.loads(pickled).write(iter([given, given.slice(0, 0)]))
            messages.append(pickle.loads(cloudpickle.dumps(message)))
        return messages

    def seen(self) -> dict[str, list[tuple[str, int]]]:
        def rows_of(table: pa.Table) -> list[tuple[str, int]]:
            return sorted((row["user"], row["amount"]) for row in table.to_pylist())

        files = [pq.read_table(one) for one in (self.folder / "files").glob("part-*")]
        with sqlite3.connect(self.folder / "rows.db") as db:
            copies = sorted(db.execute('SELECT "user", amount FROM copies'))
        return {
            "files": sorted(row for one in files for row in rows_of(one)),
            "table": rows_of(DeltaTable(self.folder / "table").to_pyarrow_table()),
            "newest": rows_of(DeltaTable(self.folder / "newest").to_pyarrow_table()),
            "ice": rows_of(load_catalog("lake", **self.catalog).load_table("shop.orders").scan().to_arrow()),
            "rows": copies,
        }


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path)


def test_a_micro_batch_is_planned_staged_and_committed_in_processes_without_a_session(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = commit_together(query.sinks(), where={"rows": "is_large"})
    first = query.stage(options, 0, [[("ann", 1), ("bob", 7)], [("ann", 9)], []], monkeypatch)
    assert [bool(one.finishes) for one in first] == [True, False, False]
    query.make_writer(options).commit(first, 0)
    everything = [("ann", 1), ("ann", 9), ("bob", 7)]
    whole = dict.fromkeys(("files", "table", "ice"), everything)
    large = [("ann", 9), ("bob", 7)]
    assert query.seen() == {**whole, "newest": large, "rows": large}
    # Spark died before it noted the commit, and runs the micro-batch again.
    again = query.stage(options, 0, [[("ann", 1), ("bob", 7)], [("ann", 9)], []], monkeypatch)
    query.make_writer(options).commit(again, 0)
    # A task fails: what the others staged is given up.
    failed = query.stage(options, 1, [[("cat", 5)], [("dan", 5)]], monkeypatch)
    query.make_writer(options).abort([None, failed[1]], 1)
    assert query.seen() == {**whole, "newest": large, "rows": large}
    query.make_writer(options).commit(query.stage(options, 1, [[("cat", 2)]], monkeypatch), 1)
    assert query.seen()["ice"] == [*everything, ("cat", 2)] and query.seen()["rows"] == large
    assert confirmed(query.checkpoint) == {BatchId(0), BatchId(1)}


def test_a_query_that_begins_anew_in_a_process_that_spark_uses_again_has_sinks_of_its_own(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = commit_together({"files": FileSink(f"{query.folder}/files")})
    query.is_one_process = True
    for _ in range(2):
        for batch in (0, 1):
            messages = query.stage(options, batch, [[("ann", batch)]], monkeypatch)
            query.make_writer(options).commit(messages, batch)
        assert confirmed(query.checkpoint) == {BatchId(0), BatchId(1)}
        for folder in (query.checkpoint, query.folder / "files"):
            shutil.rmtree(folder)
        (query.checkpoint / "offsets").mkdir(parents=True)


def test_a_driver_with_many_queries_closes_the_sinks_of_those_that_wait_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[QuerySinks] = []
    monkeypatch.setattr(QuerySinks, "close", lambda self: closed.append(self))
    monkeypatch.setattr(stream_writer, "_MOST_OPEN", 2)
    outputs = [
        QueryOutput({}, {}, to_checkpoint_place(f"{tmp_path}/{name}", {}), name) for name in ("a", "b", "c")
    ]
    opened = [stream_writer._open(one, one.checkpoint_location) for one in (*outputs[:2], outputs[0])]
    assert opened[0] is opened[2] and not closed
    stream_writer._open(outputs[2], outputs[2].checkpoint_location)
    assert closed == [opened[1]]


@pytest.mark.parametrize("fields, why", [("_fs_sink INT", "control columns"), ("a INT, A INT", "twice")])
def test_columns_that_would_be_taken_for_ours_or_for_each_other_are_refused(
    tmp_path: Path, fields: str, why: str
) -> None:
    given = {**commit_together({"out": FileSink(f"{tmp_path}/out")}), "checkpointLocation": "/data/c"}
    with pytest.raises(SchemaError, match=why):
        Flinkish(given).streamWriter(parse_ddl(fields), False)


def test_a_table_without_a_scheme_is_refused_beside_a_checkpoint_in_a_store() -> None:
    given = {**commit_together({"out": DeltaSink("/lake/out")}), "checkpointLocation": "s3a://bucket/c"}
    with pytest.raises(ConfigError, match="has no scheme"):
        Flinkish(given).streamWriter(SCHEMA, False)


def test_a_micro_batch_that_the_checkpoint_does_not_run_is_refused(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = commit_together({"files": FileSink(f"{query.folder}/files")})
    messages = query.stage(options, 3, [[("ann", 1)]], monkeypatch)
    assert isinstance(messages[0], StagedMessage)
    with pytest.raises(JobDirError, match=r"commits batch 4, .* are of 3"):
        query.make_writer(options).commit(messages, 4)
    (query.checkpoint / "offsets" / "3").unlink()
    with pytest.raises(JobDirError, match="has no offsets"):
        cloudpickle.dumps(query.make_writer(options))


def test_a_partitioned_table_is_refused_before_anything_is_staged(query: Query) -> None:
    fields = T.StructType([T.StructField("user", T.StringType()), T.StructField("amount", T.LongType())])
    path = f"{query.folder}/table"
    empty = pa.table({"user": pa.array([], pa.string()), "amount": pa.array([], pa.int64())})
    from deltalake import write_deltalake

    write_deltalake(path, empty, partition_by=["user"])
    options = commit_together({"table": DeltaSink(path)}, columns={"table": fields.names})
    (query.checkpoint / "offsets" / "0").write_text("v1\n{}\n{}")
    with pytest.raises(ConfigError, match="cannot stage in the tasks") as refused:
        cloudpickle.dumps(query.make_writer(options))
    assert "SinkGroup" in str(refused.value)


@pytest.mark.parametrize(
    "options, settings, why",
    [
        ({}, {"columns": {"out": ["nothing"]}}, "no column 'nothing'"),
        ({}, {"where": {"out": "amount"}}, "is bigint"),
        ({"topic": "t"}, {}, "no option 'topic'"),
        ({"checkpointLocation": "relative"}, {}, "cannot be used"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: Any, settings: Any, why: str) -> None:
    given = commit_together({"out": FileSink(f"{tmp_path}/out")}, **settings)
    with pytest.raises((ConfigError, SchemaError), match=why):
        Flinkish({"checkpointLocation": "/data/c", **given, **options}).streamWriter(SCHEMA, False)


def test_what_is_no_stream_of_new_rows_is_refused(tmp_path: Path) -> None:
    source = Flinkish(commit_together({"out": FileSink(f"{tmp_path}/out")}))
    with pytest.raises(ConfigError, match="complete"):
        source.streamWriter(SCHEMA, True)
    with pytest.raises(ConfigError, match="has no sinks"):
        Flinkish({"checkpointLocation": "/data/c"}).streamWriter(SCHEMA, False)


@pytest.mark.parametrize(
    "sink, why",
    [
        (FileSink("/out", FileFormat.JSON, bucket_by=ColumnBuckets("user")), "Spark makes its folders"),
        (FileSink("/out", FileFormat.AVRO), "Spark makes its avro"),
        (KafkaSink("h:1", "t", atomic=True), "share one transaction"),
        (DeltaSink("/table", mode=Upsert(("id",), delete_when="gone")), "delete_when is SQL"),
        (IcebergSink("lake.shop.users", mode=Upsert(("id",))), "prepares the rows of an upsert"),
        (ForeachSink(print), "it stages a DataFrame"),
    ],
)
def test_a_sink_that_needs_the_session_is_refused_at_once(sink: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        commit_together({"out": sink})
    assert "foreachBatch(SinkGroup" in str(refused.value)


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"columns": {"b": ["x"]}}, "which is no sink"),
        ({"where": {"b": "x"}}, "which is no sink"),
        ({"columns": {"a": "user"}}, "names of columns"),
        ({"columns": {"a": []}}, "names of columns"),
        ({"columns": ["a"]}, "a mapping"),
        ({"where": {"a": 5}}, "names of columns"),
        ({"commit_timeout": "soon"}, "commit_timeout"),
    ],
)
def test_wrong_settings_are_refused_at_once(settings: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        commit_together({"a": KafkaSink("h:1", "t")}, **settings)
