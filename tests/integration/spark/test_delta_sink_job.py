"""Delta sinks in a job: several tables at once, in all modes, and the way back."""

from __future__ import annotations

from collections import Counter

import pytest

from flinkish_spark import (
    Append,
    CheckpointConfig,
    DeltaSink,
    OverwritePartitions,
    Tables,
    Upsert,
)
from flinkish_spark.connectors.delta.table import app_id
from flinkish_spark.core.errors import BadRecordError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.protocol.ids import CheckpointId
from tests.support.jobs import await_that, environment, failure_of, running
from tests.support.sinks import sink_context_of

KEYS = 5


def numbers(spark, condition="true"):
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 7).load()
    day = "concat('d', CAST(value DIV 20 AS STRING)) AS day"
    return rate.where(condition).selectExpr(f"value % {KEYS} AS id", "value AS n", day)


class Job:
    """One stream of numbers into a table of each mode."""

    def __init__(self, spark, root) -> None:
        self.spark, self.root = spark, root
        self.sinks = {
            "all": DeltaSink(str(root / "all")),
            "newest": DeltaSink(str(root / "newest"), mode=Upsert(("id",), sequence_by="n")),
            "days": DeltaSink(str(root / "days"), mode=OverwritePartitions(), partition_by=("day",)),
        }
        self.job_dir = JobDir(LocalStore(root / "job"))

    def environment(self):
        checkpoint = CheckpointConfig(interval_ms=2_500)
        env = environment(self.spark, self.root / "job", trigger_interval_ms=100, checkpoint=checkpoint)
        stream = env.from_dataframe(numbers(self.spark), uid="numbers")
        for uid, sink in self.sinks.items():
            stream.sink_to(sink, uid=uid)
        return env

    def run(self, checkpoints=2) -> None:
        with running(self.environment()) as client:
            await_that(lambda: client.progress.checkpoints >= checkpoints, client, timeout_s=200)
            client.stop_with_checkpoint()
            assert client.wait(timeout_ms=120_000), "the job did not stop"

    def rows(self, uid):
        frame = self.spark.read.format("delta").load(self.sinks[uid].path)
        return Counter(tuple(row) for row in frame.select("id", "n").collect())

    def count_at(self, decision) -> int:
        """Return how many numbers a checkpoint covers: what the source logged."""
        (offset,) = [line for line in decision.offsets_text.splitlines() if '"offset"' in line]
        return int(offset.split('"offset":')[1].split(",")[0].strip(" }"))

    def check(self) -> None:
        """Compare the tables with the recomputation."""
        commits = self.job_dir.live_commits()
        ends = [self.count_at(decision) for decision in commits]
        last = ends[-1]
        assert self.rows("all") == Counter((n % KEYS, n) for n in range(last))
        assert self.rows("newest") == Counter((n % KEYS, n) for n in range(max(0, last - KEYS), last))
        # A partition holds what the last checkpoint that touched it brought of it.
        days, begin = {}, 0
        for end in ends:
            days.update({n // 20: [] for n in range(begin, end)})
            for n in range(begin, end):
                days[n // 20].append((n % KEYS, n))
            begin = end
        assert self.rows("days") == Counter(row for rows in days.values() for row in rows)


@pytest.mark.nightly
def test_three_tables_get_one_version_each_per_checkpoint(spark, tmp_path) -> None:
    job = Job(spark, tmp_path)
    job.run()
    job.check()
    commits = job.job_dir.live_commits()
    assert sum(len(decision.batches) for decision in commits) > len(commits)
    for uid, sink in job.sinks.items():
        history = spark.sql(f"DESCRIBE HISTORY delta.`{sink.path}`").collect()
        with_rows = [d for d in commits if any(c.sink == uid for b in d.batches for c in b.committables)]
        assert len(history) == len(with_rows)
        for version, decision in enumerate(with_rows):
            facts = job.job_dir.receipt(decision.checkpoint).facts[uid]
            assert facts["version"] == version and facts["rows"] > 0 and facts["files"] > 0
    # The folders of what is confirmed are gone.
    left = [p for p in tmp_path.glob("*/_flinkish/*/*") if list(p.rglob("*.parquet"))]
    assert not left
    finishes_without_a_receipt(job)
    goes_back(job)


def finishes_without_a_receipt(job) -> None:
    """A crash between commit and receipt: the history of each table tells the next start that it is done."""
    newest = job.job_dir.live_commits()[-1]
    known = job.job_dir.receipt(newest.checkpoint).facts
    job.job_dir.store.delete(f"checkpoints/{newest.checkpoint}/receipt.json")
    job.run(checkpoints=1)
    again = job.job_dir.receipt(newest.checkpoint).facts
    assert {uid: fact.get("version") for uid, fact in again.items()} == {
        uid: fact.get("version") for uid, fact in known.items()
    }
    job.check()


def goes_back(job) -> None:
    """Tables of all modes are restored to a checkpoint, once, and the job goes on from there."""
    commits = job.job_dir.live_commits()
    target, uuid = commits[1].checkpoint, job.job_dir.find_uuid()
    from flinkish_spark.checkpoint.retention import SparkPins
    from flinkish_spark.checkpoint.spark_log import SparkLog
    from flinkish_spark.core.clock import SystemClock
    from flinkish_spark.job.rewind import order_rewind

    folder = f"spark/{job.job_dir.newest_owner()}"
    root = job.root / "job"
    pins = SparkPins(SparkLog(job.job_dir.store, folder, root / folder), root)
    order_rewind(job.job_dir, pins, SystemClock(), target, Tables.RESTORE, "a test")
    job.run(checkpoints=1)
    assert job.job_dir.history().live.value == 1
    assert [d.checkpoint for d in job.job_dir.live_commits()][:2] == [c.checkpoint for c in commits[:2]]
    job.check()
    for uid, sink in job.sinks.items():
        history = job.spark.sql(f"DESCRIBE HISTORY delta.`{sink.path}`").collect()
        assert [row.operation for row in history].count("RESTORE") == 1
        assert app_id(uuid, uid)
        context = sink_context_of(uuid, job.job_dir.newest_owner(), uid, None, CheckpointConfig())
        committer = sink.create_committer(job.spark, context)
        assert committer.why_not_superseded(CheckpointId(int(target))) == ""


def test_a_job_ends_with_the_record_that_breaks_a_rule(spark, tmp_path) -> None:
    table = tmp_path / "table"
    spark.sql(f"CREATE TABLE delta.`{table}` (id BIGINT, n BIGINT, day STRING) USING delta")
    spark.sql(f"ALTER TABLE delta.`{table}` ADD CONSTRAINT small CHECK (n < 30)")
    env = environment(spark, tmp_path / "job", trigger_interval_ms=100)
    stream = env.from_dataframe(numbers(spark), uid="numbers")
    stream.sink_to(DeltaSink(str(table), mode=Append()), uid="table")
    error = failure_of(env)
    assert isinstance(error, BadRecordError) and "small" in str(error) and "'table'" in str(error)
    assert spark.read.format("delta").load(str(table)).where("n >= 30").count() == 0
