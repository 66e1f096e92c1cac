"""Whole jobs into databases: exactly once over restarts, refused records, a server that restarts."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from flinkish_spark.connectors.jdbc.settings import DeadLetterTable
from flinkish_spark.core.errors import BadRecordError
from flinkish_spark.core.formats import OnBadRecord
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.steps import SilentObserver, Step
from flinkish_spark.core.store import LocalStore
from tests.support.jobs import TOTAL, RunningTotal, await_that, environment, failure_of, running

USERS = 7
CREATE = "CREATE TABLE t ({0} VARCHAR(20){1}, total BIGINT)"


class Job:
    """Running totals of an endless stream of numbers: all of them into one table, the newest into another."""

    def __init__(self, spark, root: Path, database, **settings) -> None:
        self.spark, self.root, self.database, self.settings = spark, root, database, settings
        self.job_dir = JobDir(LocalStore(root))

    def environment(self, observer=None):
        env = environment(self.spark, self.root, trigger_interval_ms=100)
        env.observe(observer or SilentObserver())
        # Fewer rows than users: within a micro-batch the order of a user's rows would be the source's affair.
        rate = self.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
        frame = rate.selectExpr(f"CAST(value % {USERS} AS STRING) AS user", "value AS amount")
        totals = env.from_dataframe(frame, uid="rate").key_by("user")
        totals = totals.process(RunningTotal(), output=TOTAL, uid="totals")
        totals.sink_to(self.database.sink("all_totals", create_table=True, **self.settings), uid="all")
        upsert = {"key": ("user",), "mode": "upsert"}
        totals.sink_to(self.database.sink("newest", create_table=True, **upsert), uid="newest")
        return env

    def run(self, checkpoints: int = 2) -> None:
        with running(self.environment()) as client:
            await_that(lambda: client.progress.checkpoints >= checkpoints, client, timeout_s=200)
            client.stop_with_checkpoint()
            assert client.wait(timeout_ms=120_000), "the job did not stop"

    def covered(self) -> int:
        """Return how many numbers the newest checkpoint covers: what the source logged."""
        text = self.job_dir.newest_commit().offsets_text
        (offset,) = [line for line in text.splitlines() if '"offset"' in line]
        return int(offset.split('"offset":')[1].split(",")[0].strip(" }"))

    def check(self, without=()) -> None:
        """Compare both tables with what the numbers up to the newest checkpoint bring."""
        totals, found = dict.fromkeys(map(str, range(USERS)), 0), Counter()
        for number in range(self.covered()):
            totals[str(number % USERS)] += number
            found[str(number % USERS), totals[str(number % USERS)]] += 1
        for row in without:
            del found[row]
        assert Counter(self.database.table("all_totals")) == found
        assert self.database.table("newest") == sorted(totals.items())

    def buffered(self) -> list[Path]:
        return list(self.root.rglob("*.arrow"))


@pytest.mark.nightly
@pytest.mark.parametrize("database", ["sqlite", "mariadb", "postgres"], indirect=True)
def test_each_record_once_over_restarts(spark, tmp_path, database) -> None:
    job = Job(spark, tmp_path / "job", database)
    job.run()
    job.check()
    job.run()
    job.check()
    assert not job.buffered(), "files of confirmed checkpoints are left"
    facts = [job.job_dir.receipt(d.checkpoint).facts for d in job.job_dir.live_commits()]
    assert any(fact.get("all", {}).get("rows") for fact in facts)
    text = "".join(p.read_text(errors="replace") for p in (tmp_path / "job").rglob("*") if p.is_file())
    assert not database.password or database.password not in text


class Died(Exception):
    pass


MOMENTS = [
    ("before", Step.SINK_COMMIT, "all"),
    ("after", Step.SINK_COMMIT, "all"),
    ("after", Step.SINK_COMMIT, "newest"),
    ("after", Step.RECEIPT, ""),
]


class DiesAtEach(SilentObserver):
    """Raises before or behind steps of checkpoints, once at each, as if the process had ended there."""

    def __init__(self, moments) -> None:
        self.moments = list(moments)

    def on_step_start(self, step, detail=""):
        self._maybe("before", step, detail)

    def on_step_end(self, step, detail=""):
        self._maybe("after", step, detail)

    def _maybe(self, when, step, detail):
        if self.moments and self.moments[0] in ((when, step, ""), (when, step, detail)):
            raise Died(f"{self.moments.pop(0)}")


@pytest.mark.nightly
def test_ends_between_decision_and_receipt(spark, tmp_path, postgres_database) -> None:
    """The query ends there and is started again: a recovery commits the checkpoint once more."""
    job, observer = Job(spark, tmp_path / "job", postgres_database), DiesAtEach(MOMENTS)
    with running(job.environment(observer)) as client:
        await_that(lambda: not observer.moments, client)
        reached = client.progress.checkpoints
        await_that(lambda: client.progress.checkpoints > reached, client)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=120_000), "the job did not stop"
    job.check()
    assert not job.buffered()


@pytest.mark.nightly
def test_a_refused_record_stops_the_job_and_nothing_is_visible(spark, tmp_path, postgres_database) -> None:
    """Behind the mend a restart commits the checkpoint that was decided."""
    postgres_database.run(
        'CREATE TABLE all_totals ("user" TEXT, total BIGINT, CONSTRAINT small CHECK (total < 50))'
    )
    job = Job(spark, tmp_path / "job", postgres_database)
    for _ in range(2):
        error = failure_of(job.environment())
        assert isinstance(error, BadRecordError), error
        assert "all_totals refuses a record of sink 'all'" in str(error) and '"small"' in str(error)
        assert all(total < 50 for _, total in postgres_database.table("all_totals"))
    decided = job.job_dir.newest_commit()
    assert job.job_dir.receipt(decided.checkpoint) is None
    postgres_database.run("ALTER TABLE all_totals DROP CONSTRAINT small")
    job.run()
    job.check()


def test_what_a_record_alone_decides_stops_the_job_before_the_decision(
    spark, tmp_path, sqlite_database, monkeypatch
) -> None:
    """No decided checkpoint waits for a commit; behind a change of the policy the job goes on.

    A lock that somebody else has then holds its checkpoint back: that is seen here and in other processes.
    """
    monkeypatch.setattr("flinkish_spark.connectors.jdbc.sqlite._LOCK_WAIT_S", 0.1)
    sqlite_database.run("CREATE TABLE t (k BIGINT PRIMARY KEY, v REAL NOT NULL)")
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
    frame = rate.selectExpr("IF(value = 7, NULL, value) AS k", "CAST(value AS DOUBLE) AS v")

    def made(policy):
        env = environment(spark, tmp_path / "job", trigger_interval_ms=100)
        sink = sqlite_database.sink(key=("k",), mode="upsert", on_refused=policy)
        env.from_dataframe(frame, uid="rate").sink_to(sink, uid="out")
        return env

    job_dir = JobDir(LocalStore(tmp_path / "job"))
    for _ in range(2):
        error = failure_of(made(OnBadRecord.FAIL))
        assert isinstance(error, BadRecordError), error
        assert "the sink 'out' refuses it: the key column k is null" in str(error)
        assert '{"k": null}' in str(error) and "choose another policy" in str(error)
        newest = job_dir.newest_commit()
        assert newest is None or job_dir.receipt(newest.checkpoint) is not None
        assert len(sqlite_database.table()) in (0, 5)
    with running(made(OnBadRecord.DROP)) as client:
        await_that(lambda: len(sqlite_database.table()) >= 14, client, timeout_s=200)
        sqlite_database.run("BEGIN IMMEDIATE")

        def why_held(waits):
            told = [one for one in waits if "to sink 'out'" in one.what and "is locked" in one.error]
            return bool(told) and any(one.who.startswith("checkpoint ") for one in waits)

        await_that(lambda: why_held(client.progress.waits), client, timeout_s=60)
        await_that(lambda: why_held(job_dir.newest_report().waits), client, timeout_s=60)
        sqlite_database.run("ROLLBACK")
        await_that(lambda: not why_held(client.progress.waits), client, timeout_s=60)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=120_000), "the job did not stop"
    keys = [k for k, _ in sqlite_database.table()]
    assert keys == [k for k in range(len(keys) + 1) if k != 7]


def test_refused_records_of_a_job_become_dead_letters(spark, tmp_path, postgres_database) -> None:
    postgres_database.run('CREATE TABLE all_totals ("user" TEXT, total BIGINT CHECK (total <> 7))')
    job = Job(spark, tmp_path / "job", postgres_database, on_refused=DeadLetterTable("letters"))
    job.run(checkpoints=3)
    # The number 7 is user 0's second one.
    assert job.covered() > 7
    job.check(without=[("0", 7)])
    assert postgres_database.query("SELECT record FROM letters") == [('{"user": "0", "total": 7}',)]


def test_a_server_is_gone_with_its_children_when_it_is_killed(monkeypatch) -> None:
    """The next one does not start over the data of processes that live."""
    from tests.support import local_server
    from tests.support.postgres import LocalPostgres, unpack_postgres
    from tests.support.services import BUILD

    def slowly(parent, children=local_server._children):
        # A dead server's children are nobody's that could be named.
        time.sleep(0.1)
        return children(parent)

    monkeypatch.setattr(local_server, "_children", slowly)
    with LocalPostgres(unpack_postgres(BUILD / "postgres")) as server:
        open_ones = [server.connect() for _ in range(10)]
        pids = [server.pid, *(one.info.backend_pid for one in open_ones)]
        assert all(map(local_server._is_running, pids))
        # Others see that their server is gone, and end by themselves.
        os.kill(pids[-1], signal.SIGSTOP)
        server.kill()
        assert not any(map(local_server._is_running, pids))
        server.start()


@pytest.mark.nightly
def test_a_server_that_restarts_under_a_job(spark, tmp_path, postgres) -> None:
    """The job waits; it neither fails nor writes anything twice."""
    from tests.support.databases import TestDatabase
    from tests.support.postgres import LocalPostgres, unpack_postgres
    from tests.support.services import BUILD

    with LocalPostgres(unpack_postgres(BUILD / "postgres")) as server:
        database = TestDatabase(server.url, server.user, server.password)
        job = Job(spark, tmp_path / "job", database)
        over = threading.Event()

        def harm():
            while not over.wait(2):
                server.kill()
                server.start()

        thread = threading.Thread(target=harm)
        with running(job.environment()) as client:
            await_that(lambda: client.progress.checkpoints >= 1, client, timeout_s=200)
            thread.start()
            try:
                await_that(lambda: client.progress.checkpoints >= 6, client, timeout_s=200)
            finally:
                over.set()
                thread.join(60)
            client.stop_with_checkpoint()
            assert client.wait(timeout_ms=120_000)
        job.check()
        database.close()
