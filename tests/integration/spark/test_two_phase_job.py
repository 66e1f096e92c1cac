"""A two-phase sink of the user's in a real job: kills, failing tasks, refused records, errors of its code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flinkish_spark import MemorySink, NoRestart, OnBadRecord, SinkWithDeadLetters
from flinkish_spark.core.errors import BadRecordError, UserFunctionError
from tests.support.jobs import environment, failure_of, rows
from tests.support.two_phase_app import check_each_once, crash_at, flaky, picky, run_for, totals_of
from tests.support.two_phase_page import Ledger, sqlite_sink_class

#: Longer than the usual limit, for machines with much else to do.
pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[3]
#: Totals that the sink of these tests refuses.
REFUSED = 35


def killed_app(root: Path, checkpoints: int, kill: str) -> None:
    """Run the job in a process of its own, which dies at a point."""
    with (root / "log.txt").open("a") as log:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.support.two_phase_app", str(root), str(checkpoints), kill],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            timeout=400,
        )
    assert ended.returncode == -signal.SIGKILL, (root / "log.txt").read_text()[-3000:]


def job(spark, root: Path, sink, **settings):
    """The job of the app, in this process."""
    env = environment(spark, root / "job", trigger_interval_ms=100, **settings)
    totals_of(env).sink_to(sink, uid="ledger")
    return env


@pytest.mark.nightly
def test_a_job_that_dies_around_its_commits_writes_each_row_once(spark, tmp_path) -> None:
    """Every task's first attempt fails too, behind its flush: what it staged is named by nobody.

    Kills at all other places are in the crash sweep.
    """
    ledger = Ledger(tmp_path)
    # Between the commit and the receipt: a fresh object in a new process commits again.
    killed_app(tmp_path, 9, "sink-commit:after:1:ledger")
    assert (first := check_each_once(ledger.rows())) > 0
    crash_at(job(spark, tmp_path, ledger.sink()), "decision:after:1")
    assert (before := check_each_once(ledger.rows())) >= first
    # Neither a mark nor a file is there: the sink proves that these rows were never visible.
    assert ledger.files()
    for file in ledger.files():
        (ledger.staging / file).unlink()
    run_for(job(spark, tmp_path, ledger.sink()), 1)
    assert list((tmp_path / "job" / "restaged").iterdir()), "nothing was replayed"
    assert check_each_once(ledger.rows()) > before
    assert not ledger.files(), "leftovers"


def by_batches(kind):
    """The class that writes whole batches."""

    def write_batch(self, handle, batch):
        columns = batch.to_pydict()
        pairs = zip(columns["user"], columns["total"], strict=True)
        handle[0].executemany("INSERT INTO totals VALUES (?, ?)", pairs)
        return {}

    return type("BatchSink", (kind,), {"write_batch": write_batch})


def test_sinks_of_one_job_keep_drop_and_put_aside_what_they_refuse(spark, tmp_path) -> None:
    """One drops, one writes whole batches, and one has dead letters and tasks that fail at first."""
    kind, roots = sqlite_sink_class(), [tmp_path / name for name in ("whole", "dropping", "letters")]
    for root in roots:
        root.mkdir()
    whole, dropping, kept = map(Ledger, roots)
    dead = MemorySink(str(tmp_path))
    env = environment(spark, tmp_path / "job", trigger_interval_ms=100)
    totals = totals_of(env)
    # Not the first: rows are kept for the others by the tasks of the first sink, and what a keyed operator
    # reports by an attempt that fails then does not count, so that the query would start again.
    totals.sink_to(dropping.sink(picky(kind, REFUSED, on_refused=OnBadRecord.DROP)), uid="dropping")
    totals.sink_to(whole.sink(by_batches(kind)), uid="whole")
    totals.sink_to(SinkWithDeadLetters(kept.sink(picky(flaky(kind), REFUSED)), dead), uid="ledger")
    client = run_for(env, 1)
    assert client.progress.restarts == 0 and not (whole.files() or dropping.files() or kept.files())
    assert check_each_once(whole.rows()) == rows(client, "whole") > 0

    accepted = sorted(row for row in whole.rows() if row[1] % REFUSED)
    assert client.progress.dropped == len(whole.rows()) - len(accepted) > 0
    assert sorted(dropping.rows()) == accepted == sorted(kept.rows())

    letters = [(letter, json.loads(letter.record)) for letter in dead.rows()]
    refused = [(record["user"], record["total"]) for _, record in letters]
    assert sorted([*kept.rows(), *refused]) == sorted(whole.rows())
    for letter, record in letters:
        assert (letter.uid, letter.reason) == ("ledger", f"{record['total']} is refused")
        assert letter.batch.startswith("0/")


def test_a_refused_record_ends_the_job_by_default(spark, tmp_path) -> None:
    ledger = Ledger(tmp_path)
    env = environment(spark, tmp_path / "job")
    totals_of(env).sink_to(ledger.sink(picky(sqlite_sink_class(), REFUSED)), uid="ledger")
    error = failure_of(env)
    assert isinstance(error, BadRecordError)
    assert "sink 'ledger' refuses it" in str(error) and "is refused" in str(error)
    check_each_once(ledger.rows())


def test_an_error_of_its_code_names_sink_and_method(spark, tmp_path) -> None:
    """In a task; what commits is told by itself, and in the unit tests."""

    def fail(self, *arguments):
        raise KeyError("total")

    env = environment(spark, tmp_path / "job", restart_strategy=NoRestart())
    kind = type("WrongSink", (sqlite_sink_class(),), {"flush": fail})
    totals_of(env).sink_to(Ledger(tmp_path).sink(kind), uid="ledger")
    error = failure_of(env)
    assert isinstance(error, UserFunctionError)
    assert "flush() of the sink 'ledger' failed" in str(error) and "KeyError: 'total'" in str(error)


def test_a_sink_that_cannot_travel_is_refused_before_anything_starts(spark, tmp_path) -> None:
    sink = Ledger(tmp_path).sink()
    sink.guard = threading.Lock()
    env = environment(spark, tmp_path / "job")
    totals_of(env).sink_to(sink, uid="ledger")
    error = failure_of(env)
    assert isinstance(error, UserFunctionError) and error.attribute == "guard"
    assert "attribute 'guard' (lock)" in str(error) and "begin()" in str(error)
    assert not (tmp_path / "job").exists()
