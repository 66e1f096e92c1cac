"""What a job's owner says about it: status, vertices, and the newest failures of all owners."""

from __future__ import annotations

from dataclasses import replace

from flinkish_spark.protocol.ids import OwnerEpoch
from flinkish_spark.protocol.job_graph import JobOperator, JobVertex, OperatorKind, RunsIn
from flinkish_spark.protocol.job_report import MOST_FAILURES, JobReport, ReportedFailure, ReportedWait
from flinkish_spark.protocol.job_status import (
    JobEvent,
    JobStatus,
    JobStatusChange,
    TaskState,
    TaskStateChange,
)
from flinkish_spark.protocol.statistics import MOST_TEXT

VERTICES = tuple(
    JobVertex(name, (JobOperator(name, name, "", "", OperatorKind.SOURCE, RunsIn.JVM),), ())
    for name in ("orders", "totals")
)
CREATED, RUNNING, FAILING = JobStatus.CREATED, JobStatus.RUNNING, JobStatus.FAILING


def begun(earlier: JobReport | None = None) -> JobReport:
    return JobReport.begin(OwnerEpoch(1), 1_000, VERTICES, {"interval_ms": 5}, earlier)


def failed(report: JobReport, cause: str, at_ms: int) -> JobReport:
    return report.apply(JobStatusChange(RUNNING, FAILING, JobEvent.FAILURE, cause, at_ms))


def moved(report: JobReport, vertex: str, state: TaskState, attempt: int = 1) -> JobReport:
    return report.apply(TaskStateChange(vertex, vertex, attempt, TaskState.CREATED, state, "", 7))


def test_an_owner_begins_with_what_others_have_seen() -> None:
    first = begun()
    assert (first.status, first.restarts, first.failures) == (CREATED, 0, ())
    assert first.since_ms == {"CREATED": 1_000} and first.settings == {"interval_ms": 5}
    assert [one.state for one in first.vertices] == [TaskState.CREATED] * 2
    first = first.apply(JobStatusChange(CREATED, RUNNING, JobEvent.STARTED, "", 1_500))
    assert first.status is RUNNING and first.since_ms == {"CREATED": 1_000, "RUNNING": 1_500}
    first = failed(first, "no broker", 2_000)
    first = first.apply(JobStatusChange(FAILING, JobStatus.RESTARTING, JobEvent.RESTART, "", 2_001))
    second = begun(first)
    assert second.restarts == 1 and second.failures == (ReportedFailure(2_000, "no broker"),)
    assert JobReport.from_json(second.to_json()) == second


def test_a_job_that_has_ended_waits_for_nothing() -> None:
    waiting = replace(begun(), waits=(ReportedWait("out", "a commit", 900),))
    running = waiting.apply(JobStatusChange(CREATED, RUNNING, JobEvent.STARTED, "", 1_500))
    assert len(running.waits) == 1
    ended = running.apply(JobStatusChange(RUNNING, JobStatus.FINISHED, JobEvent.FINISH, "", 1_600))
    assert ended.waits == () and ended.status is JobStatus.FINISHED


def test_vertices_have_settled_when_all_are_alike_or_at_their_end() -> None:
    report = moved(begun(), "orders", TaskState.RUNNING)
    assert not report.is_settled
    report = moved(report, "totals", TaskState.RUNNING)
    assert report.is_settled
    report = moved(report, "totals", TaskState.FAILED, attempt=3)
    assert not report.is_settled
    report = moved(report, "orders", TaskState.CANCELED)
    assert report.is_settled
    # The job is told of behind the vertex with which it fails.
    (failure,) = failed(report, "it raised", 9_000).failures
    assert (failure.vertex, failure.attempt, failure.at_ms) == ("totals", 3, 9_000)


def test_what_is_kept_of_failures_is_bounded() -> None:
    report = begun()
    for number in range(MOST_FAILURES + 3):
        report = failed(report, f"{number}" * (MOST_TEXT + 1), number)
    assert [one.at_ms for one in report.failures] == list(range(3, MOST_FAILURES + 3))
    assert all(len(one.cause) == MOST_TEXT and one.cause.endswith("...") for one in report.failures)
    assert failed(begun(), "short", 1).failures[0].cause == "short"
