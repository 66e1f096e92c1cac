"""The sources of this package in one job, which ends when all of them have; and over failures."""

from __future__ import annotations

import socket
import threading
from collections import Counter

import pytest

from flinkish_spark import JobStatus, MemorySink
from flinkish_spark.core.steps import Step
from flinkish_spark.sources import (
    CollectionSource,
    Counting,
    DataGeneratorSource,
    DeltaChanges,
    DeltaSource,
    DeltaTableSource,
    FileSource,
    HybridSource,
    ParquetFiles,
    RandomChoice,
    RateLimit,
    SocketTextSource,
)
from tests.integration.spark.test_split_source import Stumbling
from tests.support.jobs import environment, running

pytestmark = pytest.mark.timeout(600)


def serve(lines: list[str]) -> int:
    """Send some lines to whoever comes, once, in two pieces; return the port."""
    listening = socket.create_server(("127.0.0.1", 0))

    def send() -> None:
        connection, _ = listening.accept()
        with connection:
            half = len(lines) // 2
            for some in (lines[:half], lines[half:]):
                connection.sendall("\n".join([*some, ""]).encode())
        listening.close()

    threading.Thread(target=send, daemon=True).start()
    return listening.getsockname()[1]


class StumblingOnce(Stumbling):
    """Fails behind a staged file and behind the sinks."""

    def __init__(self) -> None:
        super().__init__()
        self.left = {("after", Step.STAGED_FILE), ("before", Step.GROUP_OFFSETS)}


@pytest.mark.nightly(by_day="tests/contracts/test_sources.py")
def test_a_job_over_all_of_them_ends_when_all_have_ended(spark, tmp_path) -> None:
    lines, sinks = [f"line {n}" for n in range(100)], {}
    fields = {"id": Counting(), "color": RandomChoice(["red", "green"])}
    made = DataGeneratorSource(fields, records=5_000, seed=1, splits=3)
    made = made.limit_rate(RateLimit(records_per_batch=2_000))
    batches = list(DataGeneratorSource(fields, records=5_000, seed=1).read("0", 0, 5_000))
    wanted = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
    (tmp_path / "in").mkdir()
    frame = spark.createDataFrame(wanted[:500], "id LONG, color STRING").coalesce(1)
    frame.write.parquet(str(tmp_path / "in"), mode="overwrite")
    history = FileSource(str(tmp_path / "in"), ParquetFiles(), "id LONG, color STRING")
    both = HybridSource(history, CollectionSource(wanted[500:600], "id LONG, color STRING"))
    env = environment(spark, tmp_path / "job")
    env.observe(StumblingOnce())
    sources = {"made": made, "both": both, "lines": SocketTextSource("127.0.0.1", serve(lines))}
    for uid, source in sources.items():
        sinks[uid] = MemorySink(f"{tmp_path}-{uid}")
        env.from_source(source, uid=uid).sink_to(sinks[uid], uid=f"{uid}-out")
    with running(env) as client:
        assert client.wait(timeout_ms=300_000), f"the job did not end; {client.progress}"
        assert client.status is JobStatus.FINISHED and client.progress.restarts == 2
    assert sorted(map(tuple, sinks["made"].rows())) == wanted
    assert sorted(map(tuple, sinks["both"].rows())) == wanted[:600]
    assert sorted(row.value for row in sinks["lines"].rows()) == sorted(lines)


@pytest.mark.nightly
def test_the_rows_and_the_changes_of_a_delta_table_up_to_a_version(spark, tmp_path) -> None:
    """Spark's own reading of the same versions is what must come out."""
    path = str(tmp_path / "table")
    properties = "'delta.enableChangeDataFeed'='true', 'delta.enableDeletionVectors'='true'"
    fields = "(n LONG, p INT) USING delta PARTITIONED BY (p)"
    spark.sql(f"CREATE TABLE delta.`{path}` {fields} TBLPROPERTIES ({properties})")
    for n in range(3):
        spark.sql(f"INSERT INTO delta.`{path}` SELECT id + {n * 10}, id % 2 FROM range(10)")
    spark.sql(f"DELETE FROM delta.`{path}` WHERE n = 3")
    spark.sql(f"OPTIMIZE delta.`{path}`")
    newest = spark.sql(f"DESCRIBE HISTORY delta.`{path}`").first()["version"]
    wanted = {
        "rows": spark.read.format("delta").load(path).collect(),
        "feed": spark.read.option("readChangeFeed", "true")
        .option("startingVersion", "0")
        .format("delta")
        .load(path)
        .drop("_commit_timestamp")
        .collect(),
    }
    sinks = {name: MemorySink(f"{tmp_path}-{name}") for name in wanted}

    def job():
        env = environment(spark, tmp_path / "job")
        feed = DeltaSource(path, DeltaChanges.FEED, starting_version=0, ending_version=newest)
        env.from_source(DeltaTableSource(path), uid="rows").sink_to(sinks["rows"], uid="rows-out")
        changes = env.from_source(feed, uid="feed")
        changes = changes.transform(lambda frame: frame.drop("_commit_timestamp"))
        changes.sink_to(sinks["feed"], uid="feed-out")
        return env

    for _ in range(2):
        with running(job()) as client:
            assert client.wait(timeout_ms=250_000), f"the job did not end; {client.progress}"
            assert client.status is JobStatus.FINISHED
        for name, sink in sinks.items():
            assert Counter(map(tuple, sink.rows())) == Counter(map(tuple, wanted[name])), name
        # What comes now lies behind the end.
        spark.sql(f"INSERT INTO delta.`{path}` SELECT id + 900, id % 2 FROM range(10)")
