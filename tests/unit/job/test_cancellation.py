"""Ending a query whose micro-batch does not end, over a query and threads that do as they are told."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from flinkish_spark.bridge import query_threads
from flinkish_spark.core.clock import SystemClock, SystemThreads
from flinkish_spark.core.errors import CancellationTimedOut, SparkGoneError
from flinkish_spark.job import cancellation
from flinkish_spark.job.cancellation import QueryCancellation
from flinkish_spark.protocol.cancellation import CancellationRules
from flinkish_spark.protocol.process_loss import JobProcess

RULES = CancellationRules(interval_ms=150, timeout_ms=500)


class Query:
    """Stops when it is let go, or fails."""

    runId = "run"  # noqa: N815

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.may_end = error, threading.Event()

    def stop(self) -> None:
        self.may_end.wait(20)
        if self.error is not None:
            raise self.error


class Threads:
    """The threads of a query; each interrupt ends a task, if interrupts help."""

    def __init__(self, tasks: int, helps: bool = True) -> None:
        self.left, self.helps, self.interrupts = tasks, helps, 0

    def tasks(self) -> tuple[str, ...]:
        return tuple(f"task {number}" for number in range(self.left))

    def stacks(self) -> tuple[str, ...]:
        return tuple(f"{task}: java.util.regex" for task in self.tasks())

    def interrupt(self) -> None:
        self.interrupts += 1
        self.left -= self.helps


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(cancellation, "end_jvm", lambda spark: found.append("the JVM") or True)
    return found


def cancelling(monkeypatch: pytest.MonkeyPatch, query: Query, threads: Threads) -> QueryCancellation:
    monkeypatch.setattr(cancellation, "QueryThreads", lambda spark, run_id: threads)
    given: Any = query
    return QueryCancellation(None, given, RULES, SystemClock(), SystemThreads())  # type: ignore[arg-type]


def test_what_ends_by_itself_is_not_interrupted(monkeypatch: pytest.MonkeyPatch, ended: list[str]) -> None:
    query, threads = Query(), Threads(0)
    query.may_end.set()
    cancelling(monkeypatch, query, threads).run()
    assert threads.interrupts == 0 and not ended


def test_what_the_stop_raises_comes_through(monkeypatch: pytest.MonkeyPatch, ended: list[str]) -> None:
    query = Query(RuntimeError("no"))
    query.may_end.set()
    with pytest.raises(RuntimeError, match="no"):
        cancelling(monkeypatch, query, Threads(0)).run()
    assert not ended


def test_a_task_that_goes_on_is_interrupted_and_told(
    monkeypatch: pytest.MonkeyPatch, ended: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    query, threads = Query(), Threads(2)
    query.may_end.set()
    with caplog.at_level(logging.WARNING, logger="flinkish_spark"):
        cancelling(monkeypatch, query, threads).run()
    assert (threads.interrupts, threads.left, ended) == (2, 0, [])
    assert "interrupted again, it is in task 0: java.util.regex; task 1: java.util.regex" in caplog.text


@pytest.mark.parametrize("can_be_ended", [True, False])
def test_behind_the_timeout_the_process_is_ended(
    monkeypatch: pytest.MonkeyPatch, ended: list[str], can_be_ended: bool
) -> None:
    if not can_be_ended:
        monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "18.0")
        monkeypatch.setattr(cancellation, "end_jvm", query_threads.end_jvm)
    threads = Threads(1, helps=False)
    with pytest.raises(
        CancellationTimedOut, match="could not be" if not can_be_ended else "was ended"
    ) as caught:
        cancelling(monkeypatch, Query(), threads).run()
    error = caught.value
    assert isinstance(error, SparkGoneError) and not error.restartable
    facts = error.facts
    assert facts["process"] is JobProcess.DRIVER and facts["hangs_in"] == "task 0: java.util.regex"
    assert 500 <= int(str(facts["for_ms"])) < 5_000
    assert ended == (["the JVM"] if can_be_ended else [])
    assert threads.interrupts >= 3
