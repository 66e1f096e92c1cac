"""What the owner of a job says about it for other processes, and who may say it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flinkish_spark.checkpoint.hooks import JobStates
from flinkish_spark.core.config import CheckpointConfig, FixedDelay
from flinkish_spark.core.errors import StoreError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.core.watchdog import Wait
from flinkish_spark.job.reporting import JobReporter, collect_reported_settings
from flinkish_spark.protocol.ids import OwnerEpoch
from flinkish_spark.protocol.job_report import MOST_FAILURES, JobReport, ReportedWait
from flinkish_spark.protocol.job_status import JobEvent, JobStatus, TaskState
from flinkish_spark.protocol.limits import UNLIMITED
from flinkish_spark.protocol.statistics import MOST_TEXT
from tests.support.clocks import ManualClock
from tests.support.rest_rig import GRAPH, TOTALS

SETTINGS = collect_reported_settings(CheckpointConfig(interval_ms=5_000), FixedDelay(), 100, 8)


class Failed(Exception):
    uid = "totals"


@pytest.fixture
def job_dir(tmp_path: Path) -> JobDir:
    return JobDir(LocalStore(tmp_path))


def states(job_dir: JobDir, epoch: int) -> JobStates:
    """The states of a job whose owner reports."""
    clock = ManualClock()
    reporter = JobReporter(job_dir, clock, GRAPH.vertices, SETTINGS)
    found = JobStates(GRAPH.vertices, [reporter], clock)
    found.on_taken_over(OwnerEpoch(epoch))
    return found


def report(job_dir: JobDir) -> JobReport:
    found = job_dir.newest_report()
    assert found is not None
    return found


def test_status_and_vertices_are_reported_when_they_have_settled(job_dir: JobDir) -> None:
    job = states(job_dir, 1)
    assert report(job_dir).status is JobStatus.CREATED
    job.on(JobEvent.STARTED)
    job.run_tasks()
    found = report(job_dir)
    assert found.status is JobStatus.RUNNING
    assert {one.state for one in found.vertices} == {TaskState.RUNNING}
    assert found.settings["interval_ms"] == 5_000 and found.settings["restart_strategy"] == "FixedDelay"
    job.on(JobEvent.FINISH)
    assert report(job_dir).status is JobStatus.FINISHED
    assert all(one.state.is_terminal for one in report(job_dir).vertices)


def test_a_restart_is_reported_with_its_cause_and_its_vertex(job_dir: JobDir) -> None:
    job = states(job_dir, 1)
    job.on(JobEvent.STARTED)
    job.run_tasks()
    job.on_failure(Failed("no room"))
    job.on(JobEvent.RESTART)
    job.on(JobEvent.STARTED)
    found = report(job_dir)
    assert (found.status, found.restarts) == (JobStatus.RUNNING, 1)
    assert [(one.cause, one.vertex, one.attempt) for one in found.failures] == [("no room", TOTALS, 1)]


def test_the_next_owner_carries_failures_on_and_an_older_one_overwrites_nothing(job_dir: JobDir) -> None:
    old = states(job_dir, 1)
    old.on(JobEvent.STARTED)
    old.on_failure(Failed("first"))
    old.on(JobEvent.RESTART)
    new = states(job_dir, 2)
    new.on(JobEvent.STARTED)
    assert job_dir.store.list("reports") == ("reports/2.json",)
    old.on(JobEvent.SUSPEND, "a newer owner has the job")
    found = report(job_dir)
    assert (found.owner_epoch, found.status) == (OwnerEpoch(2), JobStatus.RUNNING)
    assert (found.restarts, [one.cause for one in found.failures]) == (1, ["first"])


def test_nothing_is_written_before_the_directory_is_this_owner_s(job_dir: JobDir) -> None:
    clock = ManualClock()
    reporter = JobReporter(job_dir, clock, GRAPH.vertices, SETTINGS)
    JobStates(GRAPH.vertices, [reporter], clock).on_failure(Failed("refused"))
    assert job_dir.newest_report() is None


def test_a_report_has_a_bounded_size(job_dir: JobDir) -> None:
    job = states(job_dir, 1)
    for number in range(MOST_FAILURES + 3):
        job.on(JobEvent.STARTED)
        job.on_failure(Failed(f"{number} " + "x" * 2 * MOST_TEXT))
        job.on(JobEvent.RESTART)
    found = report(job_dir)
    assert (len(found.failures), found.restarts) == (MOST_FAILURES, MOST_FAILURES + 3)
    assert found.failures[0].cause.startswith("3 ") and len(found.failures[0].cause) == MOST_TEXT


def test_a_store_that_refuses_the_report_disturbs_no_job(
    job_dir: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: LocalStore, key: str, data: bytes) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(LocalStore, "put", refuse)
    job = states(job_dir, 1)
    job.on(JobEvent.STARTED)
    assert job.status is JobStatus.RUNNING and job_dir.newest_report() is None


def test_a_damaged_report_of_an_earlier_owner_begins_anew(job_dir: JobDir) -> None:
    job_dir.store.put("reports/1.json", b"{")
    states(job_dir, 2).on(JobEvent.STARTED)
    assert report(job_dir).status is JobStatus.RUNNING


def test_no_limit_is_no_number() -> None:
    settings = collect_reported_settings(CheckpointConfig(tolerable_failures=UNLIMITED), FixedDelay(), 0, 1)
    assert settings["tolerable_failures"] is None


def test_what_holds_the_job_back_is_reported_when_it_changes_and_not_too_often(job_dir: JobDir) -> None:
    clock = ManualClock(10_000)
    job = JobStates(GRAPH.vertices, [JobReporter(job_dir, clock, GRAPH.vertices, SETTINGS)], clock)
    wait = Wait("checkpoint 1", "its commit", 6_000, "no route")
    job.on_waits((wait,))  # Until the takeover the directory is somebody else's.
    job.on_taken_over(OwnerEpoch(1))
    job.on_waits(())
    assert report(job_dir).waits == ()
    job.on_waits((wait,))
    held = ReportedWait("checkpoint 1", "its commit", clock.wall_ms() - 6_000, "no route")
    assert report(job_dir).waits == (held,)
    clock.now_ms += 1_000
    job.on_waits((replace(wait, for_ms=7_000, error="no host"),))
    assert report(job_dir).waits == (held,)
    clock.now_ms += 1_000
    job.on_waits((replace(wait, for_ms=8_000, error="no host"),))
    assert report(job_dir).waits == (replace(held, error="no host"),)
    job.on(JobEvent.STARTED)
    assert report(job_dir).waits == (replace(held, error="no host"),)
    job.on(JobEvent.FINISH)
    assert report(job_dir).waits == ()
