"""The metrics of a job out of its directory, and what Prometheus reads of them."""

from __future__ import annotations

import json
import urllib.request
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flinkish_spark import PrometheusReporter
from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.face import ReportedJob
from flinkish_spark.job.snapshot import JobSnapshot
from flinkish_spark.job.stored_job import StoredJob
from flinkish_spark.protocol.user_metrics import UserMetric, UserMetricKind
from flinkish_spark.reporters import metrics, prometheus
from flinkish_spark.reporters.metrics import CATALOGUE, Kind, Scope, measurements
from tests.support.rest_rig import ORDERS, TABLE, TOTALS, ShownJob, asked, serving, shown_job

TOTAL = {
    "orders": {"numRecordsIn": 6_000, "pendingRecords": 41},
    "totals": {"numLateRecordsDropped": 7},
    "table": {
        "numRecordsOut": 5_000,
        "numBytesOut": 100_000,
        "totalCommittables": 5,
        "successfulCommittables": 5,
    },
    "topic": {"numRecordsOut": 5_000, "totalCommittables": 6, "retriedCommittables": 2},
    "gone": {"numRecordsOut": 1},
}
USER = {
    "parse it": {
        "broken lines": UserMetric(UserMetricKind.COUNTER, 3),
        "broken_lines": UserMetric(UserMetricKind.COUNTER, 99),
        "sizes": UserMetric(UserMetricKind.DISTRIBUTION, 4, 10.0, 1.0, 4.0),
    },
    "topic": {"numRecordsOut": UserMetric(UserMetricKind.COUNTER, 123)},
}


@pytest.fixture
def job(tmp_path: Path) -> ShownJob:
    job = shown_job(tmp_path / "jobs" / "orders")
    from dataclasses import replace

    job.history = replace(job.history, totals=TOTAL, user_metrics=USER)
    job.job_dir.put_statistics(job.history)
    return job


def snapshot_of(job: ShownJob) -> JobSnapshot:
    return JobSnapshot(str(job.uuid), StoredJob.read(StoreSpec(str(job.root))))


def parsed(text: str) -> dict[tuple[str, ...], float]:
    """Return values by name, and by the labels that tell them apart."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type == "gauge"
        for sample in family.samples:
            assert sample.labels.pop("job_name") == "orders" and len(sample.labels.pop("job_id")) == 32
            sample.labels.pop("task_name", None)
            series = (sample.name, *sample.labels.values())
            assert series not in found, "Prometheus refuses a page that has a series twice"
            found[series] = sample.value
    return found


def test_every_metric_has_its_place_in_the_catalogue_once() -> None:
    names = [(one.scope, one.name) for one in CATALOGUE]
    assert len(set(names)) == len(names)
    wanted = {
        *("numRecordsIn", "numRecordsOut", "currentInputWatermark", "watermarkLag", "numLateRecordsDropped"),
        *("lastCheckpointDuration", "lastCheckpointSize", "numberOfFailedCheckpoints", "numRestarts"),
        *("pendingRecords", "busyTimeMsPerSecond", "backPressuredTimeMsPerSecond", "pendingCommittables"),
        *("totalCommittables", "successfulCommittables", "alreadyCommittedCommittables"),
        *("retriedCommittables", "failedCommittables"),
    }
    assert wanted <= {one.name for one in CATALOGUE}
    assert all(one.unit and one.meaning for one in CATALOGUE)


def test_a_job_has_flinks_metrics(job: ShownJob) -> None:
    found = {
        (one.metric.scope, one.metric.name, one.task.id if one.task else one.operator): one.value
        for one in measurements(snapshot_of(job))
    }
    of_job = {name: value for (scope, name, _), value in found.items() if scope is Scope.JOB}
    assert (of_job["numRestarts"], of_job["numberOfFailedCheckpoints"]) == (1, 1)
    assert (of_job["lastCompletedCheckpointId"], of_job["lastCheckpointSize"]) == (6, 40_000)
    assert of_job["lastCheckpointDuration"] == 6_000 and of_job["uptime"] > 200_000
    task, operator = Scope.TASK, Scope.OPERATOR
    assert found[task, "numRecordsIn", ORDERS] == 6_000 and found[task, "numRecordsIn", TABLE] == 5_000
    assert found[task, "busyTimeMsPerSecond", TOTALS] == 400
    assert found[operator, "pendingRecords", "orders"] == 41
    assert found[operator, "numLateRecordsDropped", "totals"] == 7
    assert found[operator, "watermarkLag", "totals"] == 7_000
    # Checkpoint 7 is decided, and confirmed nowhere.
    assert found[operator, "pendingCommittables", "table"] == 1
    assert found[operator, "retriedCommittables", "topic"] == 2
    assert not [uid for _, _, uid in found if uid == "gone"], "the program has that sink no more"
    assert found[operator, "sizes.mean", "parse it"] == 2.5


def test_a_counter_of_the_catalogue_never_goes_back(job: ShownJob) -> None:
    def counters() -> dict[Any, Any]:
        return {
            (one.metric.scope, one.metric.name, one.operator, one.task and one.task.id): one.value
            for one in measurements(snapshot_of(job))
            if one.metric.kind is Kind.COUNTER
        }

    before = counters()
    job.failed_and_restarted("again")
    job.completed(8)
    after = counters()
    assert all(after[name] >= value for name, value in before.items() if name in after)


def test_prometheus_reads_all_jobs_of_a_server(job: ShownJob) -> None:
    (job.root.parent / "damaged").mkdir()
    (job.root.parent / "damaged" / "job.json").write_text("no job")
    with serving(job.root.parent) as server:
        with urllib.request.urlopen(f"{server.url}metrics", timeout=20) as answer:
            kind, text = answer.headers["content-type"], answer.read().decode()
        found = parsed(text)
        assert kind.startswith("text/plain; version=0.0.4")
        assert found["flink_jobmanager_job_numRestarts",] == 1
        assert found["flink_taskmanager_job_task_backPressuredTimeMsPerSecond", TOTALS] == 100
        assert found["flink_taskmanager_job_task_operator_numRecordsOut", "topic"] == 5_000
        # Of two names that Prometheus cannot tell apart the first is shown.
        assert found["flink_taskmanager_job_task_operator_broken_lines", "parse it"] == 3
        # REST says the same by the same names.
        path = f"/jobs/{job.uuid}/vertices/{ORDERS}/metrics?get=0.numRecordsIn,0.orders.pendingRecords"
        assert asked(server, path)[1] == [
            {"id": "0.numRecordsIn", "value": "6000"},
            {"id": "0.orders.pendingRecords", "value": "41"},
        ]


def test_a_port_of_the_jobs_own(job: ShownJob) -> None:
    reporter = PrometheusReporter(port=0)
    reporter.open(ReportedJob("orders"))
    try:
        taken = PrometheusReporter(port=reporter.port)
        with pytest.raises(EnvironmentFault, match=f"port {reporter.port}"):
            taken.open(ReportedJob("orders"))
        url = f"http://127.0.0.1:{reporter.port}/metrics"
        assert urllib.request.urlopen(url, timeout=20).read() == b""
        reporter.report(snapshot_of(job))
        text = urllib.request.urlopen(url, timeout=20).read().decode()
        assert parsed(text)["flink_jobmanager_job_lastCompletedCheckpointId",] == 6
    finally:
        reporter.close()
        reporter.close()
    for port in (-1, 70_000, True, "9249"):
        with pytest.raises(ConfigError, match="port is"):
            PrometheusReporter(port=port)  # type: ignore[arg-type]


def test_nothing_secret_is_in_a_metric(job: ShownJob) -> None:
    text = prometheus.text_of([snapshot_of(job)]).decode()
    assert "secret" not in text and str(job.root) not in text and "transaction 6" not in text


def test_the_board_reads_only_metrics_that_there_are() -> None:
    from grafana_foundation_sdk.models.dashboard import Dashboard

    text = files("flinkish_spark.reporters").joinpath("grafana_board.json").read_text(encoding="utf-8")
    board = json.loads(text)
    read = Dashboard.from_json(board)
    assert read.title == "flinkish_spark" and len(read.panels or []) == len(board["panels"]) > 15
    known = {prometheus.name_of(metrics.Measurement(one, 0)) for one in CATALOGUE}
    asked_for = {
        word
        for panel in board["panels"]
        for target in panel.get("targets", ())
        for word in target["expr"].replace("(", " ").replace("{", " ").split()
        if word.startswith("flink_")
    }
    assert asked_for <= known and len(asked_for) > 15
    places = [one["gridPos"] for one in board["panels"]]
    for one in places:
        for other in places:
            apart = (
                one["x"] + one["w"] <= other["x"]
                or other["x"] + other["w"] <= one["x"]
                or one["y"] + one["h"] <= other["y"]
                or other["y"] + other["h"] <= one["y"]
            )
            assert one is other or apart, (one, other)
