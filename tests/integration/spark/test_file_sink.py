"""The file sink in real jobs, read back with Spark."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import functions as F

from flinkish_spark import (
    ColumnBuckets,
    Compaction,
    DateTimeBuckets,
    ExpressionBuckets,
    FileFormat,
    FileSink,
    FinalPartitionAction,
    MetastorePartition,
    PartitionCommit,
    PartitionTime,
    RollingPolicy,
    SuccessFile,
    Tables,
)
from flinkish_spark.checkpoint.retention import SparkPins
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.contracts.sink import CompletedCheckpoint
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.steps import SilentObserver, Step
from flinkish_spark.core.store import LocalStore
from flinkish_spark.job.rewind import order_rewind
from flinkish_spark.protocol.ids import CheckpointPurpose
from flinkish_spark.testing.sink_contract import SinkUnderTest
from tests.support.jobs import await_that, environment, failure_of, run_until, running

FIELDS = (
    "value",
    "CAST(value % 3 AS STRING) AS country",
    "timestamp_seconds(1772348400 + value * 60) AS at",
    "concat('line ', value) AS line",
)


def numbers(spark, per_batch: int = 40, fields=FIELDS):
    return (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", per_batch)
        .load()
        .selectExpr(*fields)
    )


def job(spark, tmp_path: Path, sinks, observer=None, source=None, **settings):
    """An environment with one stream of numbers into some sinks: uid -> (sink, transform or None)."""
    env = environment(spark, tmp_path / "job", trigger_interval_ms=100, **settings)
    if observer is not None:
        env.observe(observer)
    stream = env.from_dataframe(source if source is not None else numbers(spark), uid="numbers")
    for uid, (sink, transform) in sinks.items():
        (stream if transform is None else stream.transform(transform)).sink_to(sink, uid=uid)
    return env


def values(spark, sink: FileSink, column: str = "value", schema: str | None = None) -> list[int]:
    reader = spark.read.format(sink.format.value).options(**sink.options)
    frame = (reader.schema(schema) if schema else reader).load(sink.path)
    return sorted(
        int(row[0]) for row in frame.select(F.regexp_extract(F.col(column), r"(\d+)$", 1)).collect()
    )


def finished(sink: FileSink) -> list[Path]:
    found = sorted(p for p in Path(sink.path).rglob("part-*") if "_flinkish" not in p.parts)
    assert not [p for p in found if p.name.startswith(".")]
    return found


def pending(sink: FileSink) -> list[Path]:
    """Return what readers do not see, but for the sink's mark."""
    hidden = (Path(sink.path) / "_flinkish").rglob("*")
    return [p for p in hidden if p.is_file() and p.parent.name != "timeline"]


@pytest.mark.nightly
def test_all_formats_commit_together(spark, tmp_path) -> None:
    sinks = {
        "parquet": (FileSink(f"{tmp_path}/parquet", bucket_by=ColumnBuckets("country")), None),
        "json": (FileSink(f"{tmp_path}/json", FileFormat.JSON, {"compression": "gzip"}), None),
        "csv": (
            FileSink(f"{tmp_path}/csv", FileFormat.CSV, {"header": "true"}, compaction=Compaction()),
            None,
        ),
        "text": (FileSink(f"{tmp_path}/text", FileFormat.TEXT), lambda df: df.select("line")),
        "avro": (FileSink(f"{tmp_path}/avro", FileFormat.AVRO, compaction=Compaction()), None),
    }
    run_until(job(spark, tmp_path, sinks), lambda client: client.progress.checkpoints >= 2)
    expected = list(range(len(values(spark, sinks["parquet"][0]))))
    assert len(expected) >= 40
    for uid, (sink, _) in sinks.items():
        text = uid == "text"
        column = "value" if not text else "line"
        assert values(spark, sink, column, "line STRING" if text else None) == expected, uid
        assert not pending(sink), uid
    assert {p.name for p in Path(sinks["parquet"][0].path).iterdir()} == {
        "_flinkish",
        *(f"country={n}" for n in range(3)),
    }
    job_dir = JobDir(LocalStore(tmp_path / "job"))
    receipt = job_dir.receipt(job_dir.newest_commit().checkpoint)
    assert set(receipt.facts) <= set(sinks)
    # Small files of a checkpoint were merged: one file per checkpoint.
    for uid in ("csv", "avro"):
        checkpoints = [p.name.split("-")[3] for p in finished(sinks[uid][0])]
        assert len(checkpoints) == len(set(checkpoints)), uid


def test_partitions_by_time_reach_the_catalog_when_they_are_complete(spark, tmp_path) -> None:
    spark.sql("DROP TABLE IF EXISTS file_sink_hours")
    spark.sql(
        "CREATE TABLE file_sink_hours (value BIGINT, country STRING, at TIMESTAMP, line STRING, dt STRING) "
        f"USING parquet PARTITIONED BY (dt) LOCATION '{tmp_path}/hours'"
    )
    commit = PartitionCommit(
        PartitionTime(delay_ms=3_600_000),
        (SuccessFile(), MetastorePartition("file_sink_hours")),
        FinalPartitionAction.WAIT,
    )
    hours = DateTimeBuckets("yyyy-MM-dd--HH", column="at", zone="Europe/Berlin")
    sink = FileSink(f"{tmp_path}/hours", bucket_by=hours, compaction=Compaction(), partition_commit=commit)

    def announced():
        return [row.partition for row in spark.sql("SHOW PARTITIONS file_sink_hours").collect()]

    with running(job(spark, tmp_path, {"hours": (sink, None)})) as client:
        await_that(lambda: len(announced()) >= 2, client)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=60_000)
    found = values(spark, sink)
    assert found == list(range(len(found)))
    folders = sorted(p.name for p in Path(sink.path).glob("dt=*"))
    # 07:00 in UTC, which is 08:00 there; the newest hour may get more, the one before is complete.
    assert folders[0] == "dt=2026-03-01--08"
    assert sorted(announced()) == folders[:-1]
    assert [(Path(sink.path) / name / "_SUCCESS").exists() for name in folders] == [True] * (
        len(folders) - 1
    ) + [False]
    assert spark.table("file_sink_hours").count() == 60 * (len(folders) - 1)
    spark.sql("DROP TABLE file_sink_hours")


class Crash(EnvironmentFault):
    """Ends a start for good, like a process that dies."""


class Crashing(SilentObserver):
    """Dies before or after the n-th time of a step."""

    def __init__(self, step: Step, when: str, time: int = 1) -> None:
        self.step, self.when, self.left = step, when, time

    def on_step_start(self, step, subject):
        self._count(step, "before")

    def on_step_end(self, step, subject):
        self._count(step, "after")

    def _count(self, step, when):
        if (step, when) == (self.step, self.when):
            self.left -= 1
            if self.left <= 0:
                raise Crash("a test")


@pytest.mark.nightly
def test_rolled_parts_over_crashes(spark, tmp_path) -> None:
    """Parts stay hidden over checkpoints and processes, and are merged when they are large enough."""
    policy = RollingPolicy(part_bytes=6_000, rollover_ms=3_600_000, inactivity_ms=3_600_000)
    first = ExpressionBuckets("parity", "value % 2")
    sinks = {
        "parquet": (FileSink(f"{tmp_path}/parquet", rolling=policy, bucket_by=first), None),
        "json": (FileSink(f"{tmp_path}/json", FileFormat.JSON, rolling=policy), None),
    }
    # Every file operation is a crash point in the unit tests, and every call in the crash sweep.
    for step, when in [(Step.SINK_COMMIT, "after"), (Step.SINK_COMPLETE, "after")]:
        crashed = failure_of(job(spark, tmp_path, sinks, Crashing(step, when, 3)))
        assert isinstance(crashed, Crash), crashed
    run_until(job(spark, tmp_path, sinks), lambda client: client.progress.checkpoints >= 1)
    expected = list(range(len(values(spark, sinks["json"][0]))))
    assert len(expected) >= 120
    for sink, _ in sinks.values():
        assert values(spark, sink) == expected
        assert not pending(sink)
        spans = [tuple(map(int, p.name.split("-")[3:5])) for p in finished(sink)]
        assert any(last > first for first, last in spans)
    assert max(p.stat().st_size for p in finished(sinks["json"][0])) <= 9_000


def test_large_micro_batches_are_split_near_the_size(spark, tmp_path) -> None:
    """A task looks at the size of its file while it writes."""
    sink = FileSink(f"{tmp_path}/json", FileFormat.JSON, rolling=RollingPolicy(part_bytes=20_000))
    subject = SinkUnderTest(lambda: sink, lambda: (), spark, tmp_path / "folder")
    process, checkpoint = subject.start(), subject.next_checkpoint()
    rows = [[(f"user-{n}", n) for n in range(part * 2_000, (part + 1) * 2_000)] for part in range(3)]
    process.commit(checkpoint, *(process.stage(part, checkpoint=checkpoint) for part in rows))
    completed = CompletedCheckpoint(subject.next_checkpoint(), 1, CheckpointPurpose.FINAL)
    assert process.committer.checkpoint_complete(completed).outcome.is_done
    assert values(spark, sink, "amount") == list(range(6_000))
    sizes = [p.stat().st_size for p in finished(sink)]
    assert max(sizes) <= 30_000 and sum(sizes) / len(sizes) >= 8_000


@pytest.mark.nightly
def test_back_to_a_checkpoint_deletes_the_files_of_later_ones(spark, tmp_path) -> None:
    sink = FileSink(f"{tmp_path}/a b+c%20#x/out", bucket_by=ColumnBuckets("country"))
    run_until(job(spark, tmp_path, {"out": (sink, None)}), lambda client: client.progress.checkpoints >= 2)
    before = values(spark, sink)
    job_dir = JobDir(LocalStore(tmp_path / "job"))
    folder = f"spark/{job_dir.newest_owner()}"
    pins = SparkPins(SparkLog(job_dir.store, folder, tmp_path / "job" / folder), tmp_path / "job")
    target = job_dir.live_commits()[0].checkpoint
    order_rewind(job_dir, pins, SystemClock(), target, Tables.RESTORE, "a test")
    run_until(job(spark, tmp_path, {"out": (sink, None)}), lambda client: client.progress.checkpoints >= 1)
    after = values(spark, sink)
    assert before == list(range(len(before))) and after == list(range(len(after)))
    assert job_dir.history().live.value == 1


def test_time_buckets_are_those_of_their_zone_whatever_the_session_s(spark) -> None:
    """02:30 in UTC on that day is a wall clock that Berlin's clocks skip."""
    times = spark.sql(
        "SELECT timestamp'2026-03-29 02:30:00Z' AS at, timestamp_ntz'2026-03-29 02:30:00' AS clock, "
        "date'2026-03-29' AS day UNION ALL SELECT timestamp'2026-10-25 00:30:00Z', NULL, NULL "
        "UNION ALL SELECT timestamp'2026-10-25 01:30:00Z', NULL, NULL"
    ).orderBy("at")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:

        def found(column, zone="UTC"):
            bucket = DateTimeBuckets("yyyyMMdd-HH.mm.ss", column=column, zone=zone).columns(0)["dt"]
            return [row[0] for row in times.select(bucket).collect()]

        assert found("at") == ["20260329-02.30.00", "20261025-00.30.00", "20261025-01.30.00"]
        assert found("at", "Europe/Berlin") == ["20260329-04.30.00", "20261025-02.30.00", "20261025-02.30.00"]
        assert found("clock", "Asia/Tokyo") == ["20260329-02.30.00", None, None]
        assert found("day", "Asia/Tokyo") == ["20260329-00.00.00", None, None]
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
