"""A two-phase sink of the user's in a real job: kills, failing tasks, refused records, errors of its code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flinkish_spark import MemorySink, NoRestart, OnBadRecord, RecordRefused, WithDeadLetters
from flinkish_spark.errors import BadRecordError, UserFunctionError
from tests.support import environment, failure_of, rows
from tests.two_phase_app import check_each_once, flaky, run_for, totals_of
from tests.two_phase_page import Ledger, sqlite_sink_class

#: Longer than the usual limit, for machines with much else to do.
pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]
#: Totals that the sink of these tests refuses.
REFUSED = 35


def run_app(root: Path, checkpoints: int, kill: str = "") -> int:
    command = [sys.executable, "-m", "tests.two_phase_app", str(root), str(checkpoints)]
    log = (root / "log.txt").open("a")
    with log:
        ended = subprocess.run(
            [*command, *([kill] if kill else [])],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            timeout=400,
        )
    return ended.returncode


def run_with(spark, root: Path, sink, checkpoints: int = 3, **settings):
    env = environment(spark, root / "job", trigger_interval_ms=100, **settings)
    totals_of(env).sink_to(sink, uid="ledger")
    return run_for(env, checkpoints)


@pytest.mark.timeout(1200)
def test_a_job_that_is_killed_around_its_commits_writes_each_row_once(tmp_path) -> None:
    """Every task's first attempt fails too, behind its flush: what it staged is named by nobody."""
    ledger = Ledger(tmp_path)
    # Between the commit and the receipt: a fresh object in a new process commits again.
    assert run_app(tmp_path, 9, "sink-commit:after:2:ledger") == -signal.SIGKILL
    first = check_each_once(ledger.rows())
    # Staged, and no staged file names it; before the decision; decided, and nothing is committed.
    assert run_app(tmp_path, 9, "staged-file:before:3") == -signal.SIGKILL
    assert ledger.files()
    assert run_app(tmp_path, 9, "decision:before:2") == -signal.SIGKILL
    assert run_app(tmp_path, 9, "decision:after:1") == -signal.SIGKILL
    assert check_each_once(ledger.rows()) > first > 0
    assert run_app(tmp_path, 2) == 0, (tmp_path / "log.txt").read_text()[-3000:]
    assert check_each_once(ledger.rows()) > first
    assert not ledger.files(), "leftovers"


def test_decided_rows_whose_files_are_deleted_are_staged_again(tmp_path) -> None:
    """The sink proves that they were never visible: neither a mark nor a file is there."""
    ledger = Ledger(tmp_path)
    assert run_app(tmp_path, 9, "decision:after:2") == -signal.SIGKILL
    before = check_each_once(ledger.rows())
    assert ledger.files() and before
    for file in ledger.files():
        (ledger.staging / file).unlink()
    assert run_app(tmp_path, 2) == 0, (tmp_path / "log.txt").read_text()[-3000:]
    assert check_each_once(ledger.rows()) > before and not ledger.files()
    assert "LOST" in (tmp_path / "log.txt").read_text() or list((tmp_path / "job" / "restaged").iterdir())


def test_tasks_that_fail_at_first_write_each_row_once(spark, tmp_path) -> None:
    ledger = Ledger(tmp_path)
    client = run_with(spark, tmp_path, ledger.sink(flaky(sqlite_sink_class())))
    assert check_each_once(ledger.rows()) == rows(client, "ledger") > 0
    assert client.progress.restarts == 0 and not ledger.files()


def picky(kind, **more):
    """The class that refuses some totals."""

    def write(self, handle, record):
        if record.total % REFUSED == 0:
            raise RecordRefused(f"{record.total} is refused")
        kind.write(self, handle, record)

    return type("PickySink", (kind,), {"write": write, **more})


def test_refused_records_are_dropped_and_counted(spark, tmp_path) -> None:
    ledger = Ledger(tmp_path)
    sink = ledger.sink(picky(sqlite_sink_class(), on_refused=OnBadRecord.DROP))
    client = run_with(spark, tmp_path, sink)
    assert client.progress.dropped > 0
    assert len(ledger.rows()) == rows(client, "ledger") - client.progress.dropped
    assert not [total for _, total in ledger.rows() if total % REFUSED == 0]


def test_refused_records_go_to_another_sink_with_the_same_checkpoint(spark, tmp_path) -> None:
    ledger, dead = Ledger(tmp_path), MemorySink(str(tmp_path))
    sink = WithDeadLetters(ledger.sink(picky(flaky(sqlite_sink_class()))), dead)
    client = run_with(spark, tmp_path, sink)
    letters = [(letter, json.loads(letter.record)) for letter in dead.rows()]
    assert letters and client.progress.restarts == 0 and client.progress.dropped == 0
    refused = [(record["user"], record["total"]) for _, record in letters]
    assert not [total for _, total in ledger.rows() if total % REFUSED == 0]
    assert check_each_once([*ledger.rows(), *refused]) == rows(client, "ledger")
    for letter, record in letters:
        assert (letter.uid, letter.reason) == ("ledger", f"{record['total']} is refused")
        assert letter.batch.startswith("0/")
    assert not ledger.files()


def test_a_refused_record_ends_the_job_by_default(spark, tmp_path) -> None:
    ledger = Ledger(tmp_path)
    env = environment(spark, tmp_path / "job")
    totals_of(env).sink_to(ledger.sink(picky(sqlite_sink_class())), uid="ledger")
    error = failure_of(env)
    assert isinstance(error, BadRecordError)
    assert "sink 'ledger' refuses it" in str(error) and "is refused" in str(error)
    check_each_once(ledger.rows())


@pytest.mark.parametrize("method", ["begin", "write", "flush", "commit"])
def test_an_error_of_its_code_names_sink_and_method(method, spark, tmp_path) -> None:
    def fail(self, *arguments):
        raise KeyError("total")

    env = environment(spark, tmp_path / "job", restart_strategy=NoRestart())
    kind = type("WrongSink", (sqlite_sink_class(),), {method: fail})
    totals_of(env).sink_to(Ledger(tmp_path).sink(kind), uid="ledger")
    error = failure_of(env)
    assert isinstance(error, UserFunctionError)
    assert f"{method}() of the sink 'ledger' failed" in str(error) and "KeyError: 'total'" in str(error)


def test_a_sink_that_cannot_travel_is_refused_before_anything_starts(spark, tmp_path) -> None:
    sink = Ledger(tmp_path).sink()
    sink.guard = threading.Lock()
    env = environment(spark, tmp_path / "job")
    totals_of(env).sink_to(sink, uid="ledger")
    error = failure_of(env)
    assert isinstance(error, UserFunctionError) and error.attribute == "guard"
    assert "attribute 'guard' (lock)" in str(error) and "begin()" in str(error)
    assert not (tmp_path / "job").exists()


def test_it_can_be_fast_by_whole_batches(spark, tmp_path) -> None:
    def write_batch(self, handle, batch):
        columns = batch.to_pydict()
        pairs = zip(columns["user"], columns["total"], strict=True)
        handle[0].executemany("INSERT INTO totals VALUES (?, ?)", pairs)
        return {}

    ledger = Ledger(tmp_path)
    kind = type("BatchSink", (sqlite_sink_class(),), {"write_batch": write_batch})
    client = run_with(spark, tmp_path, ledger.sink(kind), checkpoints=2)
    assert check_each_once(ledger.rows()) == rows(client, "ledger") > 0
