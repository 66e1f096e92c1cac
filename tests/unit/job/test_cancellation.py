"""Ending what does not end: a query, over threads that do as they are told; a job; a stop by a signal."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.bridge import query_threads
from flinkish_spark.checkpoint.failures import QueryError
from flinkish_spark.checkpoint.ownership import take_over
from flinkish_spark.core import watchdog
from flinkish_spark.core.clock import Clock, RunningThread, SystemClock, SystemThreads
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.errors import CancellationTimedOut, FencedError, SparkGoneError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job import cancellation
from flinkish_spark.job.cancellation import QueryCancellation, SignalledStop
from flinkish_spark.job.client import JobClient
from flinkish_spark.job.engine import JobProgress, JobSettings
from flinkish_spark.job.supervisor import Supervisor
from flinkish_spark.protocol.cancellation import CancellationRules
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.job_status import JobStatus
from flinkish_spark.protocol.limits import UNLIMITED, Limit
from flinkish_spark.protocol.process_loss import JobProcess
from flinkish_spark.protocol.restart import NoRestart
from tests.support.clocks import ManualClock
from tests.support.vertices import vertices_of

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
        self.left = max(0, self.left - self.helps)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(cancellation, "end_jvm", lambda spark: found.append("the JVM") or True)
    return found


class InterruptsAtOnce(SystemThreads):
    """Interrupts in the thread that asks for it, so that each has happened before the clock moves on."""

    def start(self, name: str, target: Callable[[], None]) -> RunningThread:
        if name != "flinkish-interrupter":
            return super().start(name, target)
        target()
        return threading.current_thread()


def cancelling(
    monkeypatch: pytest.MonkeyPatch,
    query: Query,
    threads: Threads,
    clock: Clock = SystemClock(),  # noqa: B008 - it has no state
    starter: SystemThreads = SystemThreads(),  # noqa: B008 - it has no state
) -> QueryCancellation:
    monkeypatch.setattr(cancellation, "QueryThreads", lambda spark, run_id: threads)
    given: Any = query
    return QueryCancellation(None, given, RULES, clock, starter)  # type: ignore[arg-type]


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
    # On a busy machine a third interrupt may come before the stop has seen that no task is left.
    assert threads.interrupts >= 2 and (threads.left, ended) == (0, [])
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
        cancelling(monkeypatch, Query(), threads, ManualClock(), InterruptsAtOnce()).run()
    error = caught.value
    assert isinstance(error, SparkGoneError) and not error.restartable
    facts = error.facts
    assert facts["process"] is JobProcess.DRIVER and facts["hangs_in"] == "task 0: java.util.regex"
    assert 500 <= int(str(facts["for_ms"])) < 5_000
    assert ended == (["the JVM"] if can_be_ended else [])
    assert threads.interrupts == 4


class Job:
    """What a signal does to a job, noted."""

    def __init__(self) -> None:
        self.progress, self.calls = JobProgress(), list[str]()

    def stop_with_checkpoint(self) -> None:
        self.calls.append("stop")

    def cancel(self) -> None:
        self.calls.append("cancel")


def test_a_second_signal_cancels() -> None:
    job = Job()
    stop = SignalledStop(job, CancellationRules(timeout_ms=UNLIMITED), ManualClock())
    stop.look()
    for _ in range(3):
        stop.on_signal()
    stop.look()
    assert job.calls == ["stop", "cancel", "cancel"]


def test_each_signal_is_said_by_who_waits_and_not_by_the_handler() -> None:
    told: list[str] = []
    stop = SignalledStop(Job(), CancellationRules(timeout_ms=UNLIMITED), ManualClock(), told.append)
    stop.look()
    stop.on_signal()
    assert told == []
    stop.look()
    stop.look()
    stopping = (
        "stopping the job with a last checkpoint; "
        "Ctrl-C, or SIGTERM, once more cancels it without a checkpoint"
    )
    assert told == [stopping]
    stop.on_signal()
    stop.on_signal()
    stop.look()
    assert told == [stopping, "cancelling the job; its next start continues from its last checkpoint"]


def test_a_stop_by_a_signal_is_cancelled_when_nothing_ends(caplog: pytest.LogCaptureFixture) -> None:
    clock, job = ManualClock(), Job()
    stop = SignalledStop(job, CancellationRules(timeout_ms=5_000), clock)
    clock.now_ms = 60_000
    stop.on_signal()
    for _ in range(3):
        clock.now_ms += 4_000
        stop.look()
        # What ends shows that it gets on: a micro-batch, a checkpoint, a start.
        job.progress.batches += 1
    stop.look()
    assert job.calls == ["stop"]
    clock.now_ms += 5_001
    stop.look()
    stop.look()
    assert job.calls == ["stop", "cancel"]
    assert "neither a micro-batch nor a checkpoint has ended for 5 s" in caplog.text


class Hanging:
    """An engine whose first call hangs until it is let go."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.vertices, self.why_no_savepoint_at = vertices_of(["in"]), None

    def check(self) -> None:
        self.may_go_on.wait(30)
        raise RuntimeError("it went on")


def hanging(tmp_path: Path, timeout_ms: Limit) -> tuple[Hanging, JobClient]:
    engine: Any = Hanging()
    job: dict[str, Any] = dict(clock=SystemClock(), threads=SystemThreads(), observer=None, scratch=tmp_path)
    rules = CancellationRules(interval_ms=100, timeout_ms=timeout_ms)
    place = StoreSpec(str(tmp_path))
    settings = JobSettings("job", place, CheckpointConfig(), NoRestart(), 0, 1, cancellation=rules, **job)
    return engine, JobClient(Supervisor(engine, settings, JobDir(LocalStore(tmp_path))))


def test_a_cancelled_job_whose_thread_hangs_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "HURRIED_MS", 200)
    engine, client = hanging(tmp_path, 500)
    began = time.monotonic()
    client.cancel()
    with pytest.raises(CancellationTimedOut, match="waits for the checks before the start to end") as caught:
        client.wait(timeout_ms=20_000)
    assert time.monotonic() - began < 10
    assert "test_cancellation.py" in caught.value.hangs_in and "in check" in caught.value.hangs_in
    assert client.has_ended() and not client.is_running and client.status is JobStatus.CANCELED
    answer = client.trigger_checkpoint()
    refused = answer.wait(timeout_ms=1_000)
    assert refused is not None and refused.reason is CheckpointFailureReason.SHUT_DOWN
    # What its thread comes to later is nobody's end.
    engine.may_go_on.set()
    client._thread.join(10)
    assert not client._thread.is_alive()
    with pytest.raises(CancellationTimedOut):
        client.wait()


def test_without_a_limit_a_cancelled_job_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(watchdog, "HURRIED_MS", 200)
    engine, client = hanging(tmp_path, UNLIMITED)
    client.cancel()
    assert not client.wait(timeout_ms=3_000)
    engine.may_go_on.set()
    with pytest.raises(QueryError, match="it went on"):
        client.wait(timeout_ms=10_000)


def test_an_owner_that_was_left_is_fenced(tmp_path: Path) -> None:
    ownership = take_over(JobDir(LocalStore(tmp_path)), ManualClock())
    ownership.check()
    ownership.leave()
    with pytest.raises(FencedError, match="has given this job up"):
        ownership.check()
    take_over(JobDir(LocalStore(tmp_path)), ManualClock()).check()
