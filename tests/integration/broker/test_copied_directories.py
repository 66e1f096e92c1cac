"""A job directory is copied while a checkpoint is open, and the copy is started elsewhere."""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import DeltaSink, FileFormat, FileSink, FixedDelay, JdbcSink, JobClient, KafkaSink
from flinkish_spark.core.errors import AnotherTimelineError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.steps import SilentObserver, Step
from flinkish_spark.core.store import LocalStore
from flinkish_spark.job import supervisor
from flinkish_spark.protocol.decisions import Verdict
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import StagedBatch
from tests.support.jobs import (
    PATIENCE_S,
    TOTAL,
    RunningTotal,
    end,
    environment,
    eventually,
    expected_totals,
    failure_of,
    order,
    orders_source,
    produce,
    read_delta,
    run_until,
    running,
    totals_in,
)
from tests.support.two_phase_page import Ledger

#: All that keep a mark of their own.
MARKED = ("kafka", "kafka-atomic", "delta", "files", "jdbc")


def by_night(*kinds: str) -> list[Any]:
    return [pytest.param(kind, marks=pytest.mark.nightly) for kind in kinds]


class Place:
    """One sink in the outside, the topic that is read, and the job directories that write there."""

    def __init__(self, kind: str, spark, broker, topic: Callable[[int], str], folder: Path) -> None:
        self.kind, self.spark, self.servers, self.folder = kind, spark, broker.bootstrap_servers, folder
        self.source, self.topic = topic(1), topic(1)
        self.here, self.elsewhere = folder / "job", folder / "copy"
        self.produced = 0
        self.ledger = Ledger(folder)
        self._two_phase: Any = None

    def produce_up_to(self, total: int) -> None:
        orders = [order("a", n) for n in range(self.produced, total)]
        produce(self.servers, self.source, orders, key=b"a")
        self.produced = total

    def env(self, job_dir: Path) -> Any:
        env = environment(self.spark, job_dir, restart_strategy=FixedDelay(attempts=20, delay_ms=100))
        totals = env.from_source(orders_source(self.servers, self.source), uid="orders")
        totals = totals.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
        totals.sink_to(self._sink(), uid="out")
        return env

    def _sink(self) -> Any:
        match self.kind:
            case "kafka" | "kafka-atomic":
                atomic = self.kind == "kafka-atomic"
                return KafkaSink(self.servers, self.topic, key="user", atomic=atomic)
            case "delta":
                return DeltaSink(str(self.folder / "table"))
            case "files":
                return FileSink(str(self.folder / "files"), FileFormat.JSON)
            case "jdbc":
                return JdbcSink(f"jdbc:sqlite:{self.folder / 'totals.db'}", "totals", create_table=True)
            case "two-phase":
                return self.ledger.sink()
        raise ValueError(self.kind)

    def seen(self) -> Counter[tuple[str | None, int]]:
        match self.kind:
            case "kafka" | "kafka-atomic":
                return totals_in(self.servers, self.topic)
            case "delta":
                path = self.folder / "table"
                lines = read_delta(path) if (path / "_delta_log").exists() else []
                return Counter((row["user"], row["total"]) for row in lines)
            case "files":
                return _in_files(self.folder / "files")
            case "jdbc":
                return _in_database(self.folder / "totals.db")
        return Counter((user, total) for user, total in self.ledger.rows())

    def expected(self) -> Counter[tuple[str | None, int]]:
        return expected_totals({"a": list(range(self.produced))})

    def run_until_all_show(self, job_dir: Path) -> None:
        run_until(self.env(job_dir), lambda client: self.seen().total() >= self.produced)
        assert self.seen() == self.expected()


def _in_files(folder: Path) -> Counter[tuple[str | None, int]]:
    lines = [
        json.loads(line)
        for file in folder.rglob("*.json")
        if not any(part.startswith(("_", ".")) for part in file.relative_to(folder).parts)
        for line in file.read_text().splitlines()
    ]
    return Counter((row["user"], row["total"]) for row in lines)


def _in_database(database: Path) -> Counter[tuple[str | None, int]]:
    with closing(sqlite3.connect(database)) as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        pairs = db.execute("SELECT user, total FROM totals").fetchall() if "totals" in tables else []
        return Counter(map(tuple, pairs))


class Original(SilentObserver):
    """Copies the directory while a micro-batch with rows is staged and its checkpoint is open.

    Spark has not committed the micro-batch by then, so the copy runs it again. The original waits at its
    decision until it is told to go on.
    """

    def __init__(self, place: Place, *, is_staged_known: bool = True) -> None:
        self._place, self._is_staged_known = place, is_staged_known
        self.copied, self.may_decide = threading.Event(), threading.Event()
        self.confirmed = threading.Event()
        self.open: CheckpointId | None = None
        self._triggered: CheckpointId | None = None
        #: It is cancelled right behind the copy, if it is given.
        self.client: JobClient | None = None

    def on_step_end(self, step: Any, subject: str) -> None:
        if step is Step.TRIGGER and self.open is None:
            self._triggered = CheckpointId(int(subject))
        if step is Step.RECEIPT and self.open is not None and subject == str(self.open):
            self.confirmed.set()

        if step is Step.STAGED_FILE and self._triggered is not None and self.open is None:
            self._copy(self._triggered)

    def _copy(self, checkpoint: CheckpointId) -> None:
        folder = JobDir(LocalStore(self._place.here))
        known = folder.list_staged(folder.lineage()).values()
        staged = [one for one in known if _has_rows_up_to(one, checkpoint)]
        if not staged or folder.decision(checkpoint) is not None:
            return
        shutil.copytree(self._place.here, self._place.elsewhere, symlinks=True)
        if not self._is_staged_known:
            # As a copy of a moment before has it.
            for one in staged:
                (self._place.elsewhere / folder.make_staged_key(one)).unlink()
        self.open = checkpoint
        self.copied.set()
        if self.client is not None:
            self.client.cancel()

    def on_step_start(self, step: Any, subject: str) -> None:
        if step is Step.DECISION and self.open is not None and subject == str(self.open):
            assert self.may_decide.wait(PATIENCE_S)


def _has_rows_up_to(staged: StagedBatch, checkpoint: CheckpointId) -> bool:
    tasks = [task for ack in staged.acks for task in ack.tasks]
    barriers = [barrier for task in tasks for barrier in task.barriers]
    return bool(staged.committables) and any(one.checkpoint == checkpoint for one in barriers)


@pytest.fixture
def at(request, spark, broker, topic, tmp_path) -> Place:
    place = Place(request.param, spark, broker, topic, tmp_path)
    place.produce_up_to(10)
    place.run_until_all_show(place.here)
    return place


@pytest.mark.parametrize("is_staged_known", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("at", ["kafka", *by_night(*MARKED[1:])], indirect=True)
def test_what_the_original_commits_is_not_written_again_by_a_copy_that_gave_it_up(
    at, is_staged_known, monkeypatch
) -> None:
    """The copy has looked at what is outside before the original commits the checkpoint that was open."""
    first = Original(at, is_staged_known=is_staged_known)
    copy_looked, copy_may_go_on = threading.Event(), threading.Event()
    settle = supervisor.settle_timeline

    def settled(job: Any) -> bool:
        found = settle(job)
        if job.ownership.job_dir.place.folder == at.elsewhere:
            copy_looked.set()
            assert copy_may_go_on.wait(PATIENCE_S)
        return found

    env = at.env(at.here)
    env.observe(first)
    with running(env) as client:
        at.produce_up_to(20)
        assert first.copied.wait(PATIENCE_S)
        monkeypatch.setattr(supervisor, "settle_timeline", settled)
        copy = at.env(at.elsewhere).execute_async()
        try:
            assert copy_looked.wait(PATIENCE_S)
            given_up = JobDir(LocalStore(at.elsewhere)).decision(first.open)
            assert given_up is not None and given_up.verdict is Verdict.ABORT
            first.may_decide.set()
            assert first.confirmed.wait(PATIENCE_S)
            client.cancel()
            client._thread.join(PATIENCE_S)
            monkeypatch.setattr(supervisor, "settle_timeline", settle)
            at.produce_up_to(30)
            shown = at.seen()
            copy_may_go_on.set()
            assert eventually(lambda: not copy._thread.is_alive() or at.seen() != shown, PATIENCE_S)
            assert at.seen() == shown
            with pytest.raises(AnotherTimelineError, match="given up here, and committed elsewhere"):
                copy.wait(1_000)
        finally:
            copy_may_go_on.set()
            end(copy)
    assert at.seen() == shown
    # The start says it, too; and the directory that is ahead goes on.
    refused = failure_of(at.env(at.elsewhere))
    assert isinstance(refused, AnotherTimelineError)
    at.run_until_all_show(at.here)


@pytest.mark.parametrize("at", by_night(*MARKED), indirect=True)
def test_what_a_copy_has_shown_is_not_committed_by_the_original(at) -> None:
    first = Original(at, is_staged_known=False)
    env = at.env(at.here)
    env.observe(first)
    with running(env) as client:
        at.produce_up_to(20)
        assert first.copied.wait(PATIENCE_S)
        at.run_until_all_show(at.elsewhere)
        first.may_decide.set()
        with pytest.raises(AnotherTimelineError, match="sink 'out' holds checkpoint"):
            client.wait(240_000)
    assert at.seen() == at.expected()
    at.produce_up_to(30)
    at.run_until_all_show(at.elsewhere)


@pytest.mark.parametrize("at", ["kafka", *by_night(*MARKED[1:], "two-phase")], indirect=True)
def test_a_copy_goes_on_exactly_once_when_its_original_has_died(at) -> None:
    first = Original(at)
    env = at.env(at.here)
    env.observe(first)
    with running(env) as client:
        first.client = client
        at.produce_up_to(20)
        assert first.copied.wait(PATIENCE_S)
    decision = JobDir(LocalStore(at.here)).decision(first.open)
    assert decision is None or decision.verdict is Verdict.ABORT
    assert at.seen().total() == 10
    at.produce_up_to(30)
    at.run_until_all_show(at.elsewhere)
