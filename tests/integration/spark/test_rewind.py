"""Going back on real Spark: to checkpoints whose log entries and state files Spark has purged."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from flinkish_spark import DeltaSink
from flinkish_spark.bridge.settings import REQUIRED_CONF
from flinkish_spark.checkpoint.retention import SparkPins
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.connectors.delta.committing import DeltaCommits
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.steps import SilentObserver, Step
from flinkish_spark.core.store import LocalStore
from flinkish_spark.job.rewind import Rewinder, RewindError, order_rewind
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.lineage import Tables
from tests.support.jobs import TOTAL, RunningTotal, await_that, environment, failure_of, read_delta, running
from tests.support.sinks import sink_context_of

USERS = 7
#: Micro-batches that Spark keeps here; by default it is 200.
KEPT_BY_SPARK = 6


@pytest.fixture(autouse=True)
def impatient_spark(spark, monkeypatch):
    """Spark cleans after every few micro-batches: it forgets what a job may want to go back to."""
    state = "spark.sql.streaming.stateStore."
    monkeypatch.setitem(REQUIRED_CONF, "spark.sql.streaming.minBatchesToRetain", str(KEPT_BY_SPARK))
    monkeypatch.setitem(REQUIRED_CONF, state + "maintenanceInterval", "500ms")
    monkeypatch.setitem(REQUIRED_CONF, state + "minDeltasForSnapshot", "4")
    # Its interval is read once per JVM, when the first query with state starts.
    stop_maintenance(spark)
    yield
    stop_maintenance(spark)


def stop_maintenance(spark):
    package = spark._jvm.org.apache.spark.sql.execution.streaming.state
    getattr(getattr(package, "StateStore$"), "MODULE$").stopMaintenanceTask()


class Job:
    """Running totals of an endless stream of numbers into a Delta table."""

    def __init__(self, spark, root: Path) -> None:
        self.spark, self.root, self.table = spark, root / "job", root / "table"
        self.job_dir = JobDir(LocalStore(self.root))

    def environment(self, observer=None):
        env = environment(self.spark, self.root, trigger_interval_ms=100)
        env.observe(observer or SilentObserver())
        rate = self.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
        frame = rate.selectExpr(f"CAST(value % {USERS} AS STRING) AS user", "value AS amount")
        totals = env.from_dataframe(frame, uid="rate").key_by("user")
        totals = totals.process(RunningTotal(), output=TOTAL, uid="totals")
        totals.sink_to(DeltaSink(str(self.table)), uid="table")
        return env

    def run(self, until=lambda: True) -> None:
        """Run until something holds and a few checkpoints have passed, then stop with one more."""
        with running(self.environment()) as client:
            await_that(lambda: client.progress.checkpoints >= 3 and until(), client, timeout_s=300)
            client.stop_with_checkpoint()
            assert client.wait(timeout_ms=120_000), "the job did not stop"

    @property
    def pins(self) -> SparkPins:
        folder = f"spark/{self.job_dir.newest_owner()}"
        return SparkPins(SparkLog(self.job_dir.store, folder, self.root / folder), self.root)

    def order(self, target: CheckpointId, tables: Tables):
        return order_rewind(self.job_dir, self.pins, SystemClock(), target, tables, "a test")

    def has_purged(self) -> bool:
        """Whether Spark itself could no longer go back to the oldest checkpoint."""
        commits = self.job_dir.live_commits()
        log = SparkLog(self.job_dir.store, self.folder, self.root / self.folder)
        versions = {int(p.name.split("_")[0]) for p in (self.root / self.folder).rglob("*_*.changelog")}
        oldest = commits[0].batch
        return oldest not in log.batches("commits") and min(versions) > int(oldest) + 1

    @property
    def folder(self) -> str:
        return f"spark/{self.job_dir.newest_owner()}"

    def rows_at(self, decision) -> int:
        """Return how many numbers a checkpoint covers: what the source logged."""
        (offset,) = [line for line in decision.offsets_text.splitlines() if '"offset"' in line]
        return int(offset.split('"offset":')[1].split(",")[0].strip(" }"))

    def found(self):
        return Counter((row["user"], row["total"]) for row in read_delta(self.table))


def expected(first: int, last: int):
    """The totals that the numbers from `first` to below `last` bring, after all those before."""
    totals, found = dict.fromkeys(map(str, range(USERS)), 0), Counter()
    for number in range(last):
        user = str(number % USERS)
        totals[user] += number
        if number >= first:
            found[user, totals[user]] += 1
    return found


@pytest.mark.nightly
def test_back_to_what_spark_has_purged(spark, tmp_path) -> None:
    """Behaviours 77 and 84. The table keeps what was committed after the target."""
    job = Job(spark, tmp_path)
    job.run(until=job.has_purged)
    target, newest = job.job_dir.live_commits()[0], job.job_dir.newest_commit()
    job.order(target.checkpoint, Tables.KEEP)
    job.run()
    live = job.job_dir.live_commits()
    assert live[0].checkpoint == target.checkpoint and live[1].checkpoint > newest.checkpoint
    twice = expected(job.rows_at(target), job.rows_at(newest))
    assert job.found() == expected(0, job.rows_at(live[-1])) + twice
    assert job.job_dir.history().live.value == 1 and job.job_dir.rewind_order() is None


class Crash(EnvironmentFault):
    """Ends a start for good, like a process that dies."""


class Crashing(SilentObserver):
    """Dies before or after a step."""

    def __init__(self, step: Step, when: str) -> None:
        self.step, self.when = step, when

    def on_step_start(self, step, subject):
        if (step, "before") == (self.step, self.when):
            raise Crash("a test")

    def on_step_end(self, step, subject):
        if (step, "after") == (self.step, self.when):
            raise Crash("a test")


def died(env):
    assert isinstance(failure_of(env), Crash)


def die_after(monkeypatch, owner, name):
    real = getattr(owner, name)

    def dying(*args, **kwargs):
        real(*args, **kwargs)
        raise Crash("a test")

    monkeypatch.setattr(owner, name, dying)


@pytest.mark.nightly
def test_a_rewind_that_is_cut_off_again_and_again(spark, tmp_path, monkeypatch) -> None:
    """Each start gets one step further; what is done outside is not done twice.

    Then once more, while the job runs: it goes on in the same process.
    """
    job = Job(spark, tmp_path)
    job.run(until=job.has_purged)
    job.order(job.job_dir.live_commits()[0].checkpoint, Tables.RESTORE)
    for when, step in [("before", Step.REWIND_INTENT), ("after", Step.REWIND_INTENT)]:
        died(job.environment(observer=Crashing(step, when)))
    for _ in range(2):
        died(job.environment(observer=Crashing(Step.REWIND_DELETE, "after")))
    for owner, name in [
        (SparkPins, "_put_back"),
        (SparkPins, "restore"),
        (DeltaCommits, "set_back"),
        (Rewinder, "_lower_offsets"),
    ]:
        with monkeypatch.context() as patched:
            die_after(patched, owner, name)
            died(job.environment())
        assert job.job_dir.open_rewind() is not None
    with running(job.environment()) as client:
        await_that(lambda: client.progress.checkpoints >= 3 and job.has_purged(), client, timeout_s=300)
        assert not job.found() - expected(0, job.rows_at(job.job_dir.newest_commit()) + 1_000)
        job.order(job.job_dir.live_commits()[0].checkpoint, Tables.RESTORE)
        await_that(lambda: job.job_dir.history().live.value == 2, client, timeout_s=300)
        seen = client.progress.checkpoints
        await_that(lambda: client.progress.checkpoints >= seen + 3, client, timeout_s=300)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=120_000), "the job did not stop"
    assert job.found() == expected(0, job.rows_at(job.job_dir.newest_commit()))
    history = spark.sql(f"DESCRIBE HISTORY delta.`{job.table}`").collect()
    assert [row.operation for row in history].count("RESTORE") == 2
    assert client.progress.restarts == 0


@pytest.mark.nightly
def test_rows_of_others_are_not_taken_back(spark, tmp_path) -> None:
    job = Job(spark, tmp_path)
    job.run()
    spark.sql(f"INSERT INTO delta.`{job.table}` VALUES ('stranger', 1)")
    before = job.found()
    job.order(job.job_dir.live_commits()[0].checkpoint, Tables.RESTORE)
    refused = failure_of(job.environment())
    assert isinstance(refused, RewindError) and "committed by somebody else" in str(refused)
    assert job.found() == before and job.job_dir.history().rewinds == ()
    # The order is closed: the next start goes on where the job was.
    job.run()
    stranger = Counter({("stranger", 1): 1})
    assert job.found() == expected(0, job.rows_at(job.job_dir.newest_commit())) + stranger


@pytest.mark.nightly(by_day="tests/integration/broker/test_cli.py")
def test_a_table_that_the_job_made_after_the_target_is_emptied(spark, tmp_path) -> None:
    job = Job(spark, tmp_path)
    job.run()
    everything = job.found()
    committer = DeltaSink(str(job.table)).create_committer(spark, context(spark, job))
    assert committer.why_not_superseded(CheckpointId(0)) == ""
    answers = [committer.supersede(CheckpointId(0), job.job_dir.lineage()) for _ in range(2)]
    assert [a.outcome.value for a in answers] == ["COMMITTED", "ALREADY_COMMITTED"]
    assert everything and not job.found()
    shutil.rmtree(job.table)
    assert committer.supersede(CheckpointId(0), job.job_dir.lineage()).outcome.is_done


def context(spark, job):
    from flinkish_spark import CheckpointConfig
    from flinkish_spark.protocol.ids import OwnerEpoch

    uuid = job.job_dir.find_uuid()
    schema = spark.read.format("delta").load(str(job.table)).schema
    return sink_context_of(uuid, OwnerEpoch(1), "table", schema, CheckpointConfig())
