"""Metrics and spans at a collector: a real receiver of OTLP, by HTTP on loopback."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from flinkish_spark import OpenTelemetryReporter
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.face import ReportedJob
from flinkish_spark.job.snapshot import JobSnapshot
from flinkish_spark.job.stored_job import StoredJob
from tests.support.rest_rig import ShownJob, shown_job

JOB = ReportedJob("orders")


class Collector:
    """What was exported to it."""

    def __init__(self) -> None:
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.traces: list[ExportTraceServiceRequest] = []
        self.headers: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.headers.append(self.headers)
                if self.path == "/v1/metrics":
                    collector.metrics.append(ExportMetricsServiceRequest.FromString(body))
                if self.path == "/v1/traces":
                    collector.traces.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def values(self) -> dict[str, dict[str, float]]:
        """Return the newest values, by name and by operator or vertex."""
        (of_resource,) = self.metrics[-1].resource_metrics
        found: dict[str, dict[str, float]] = {}
        for scope in of_resource.scope_metrics:
            for metric in scope.metrics:
                data = metric.sum if metric.HasField("sum") else metric.gauge
                for point in data.data_points:
                    labels = {one.key: one.value.string_value for one in point.attributes}
                    about = labels.get("operator_name", labels.get("task_id", ""))
                    value = point.as_int if point.HasField("as_int") else point.as_double
                    found.setdefault(metric.name, {})[about] = value
        return found


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    found = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{found.server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret-of-the-collector")
    yield found
    found.server.shutdown()
    found.server.server_close()


def snapshot_of(job: ShownJob) -> JobSnapshot:
    return JobSnapshot(str(job.uuid), StoredJob.read(StoreSpec(str(job.root))))


def test_a_collector_gets_metrics_and_a_span_for_each_checkpoint(
    tmp_path: Path, collector: Collector
) -> None:
    reporter = OpenTelemetryReporter()
    reporter.open(JOB)
    reporter._ended._since_ms = 0
    job = shown_job(tmp_path / "orders")
    reporter.report(snapshot_of(job))
    reporter.report(snapshot_of(job))
    reporter.close()
    values = collector.values
    assert values["flink.jobmanager.job.numberOfCompletedCheckpoints"] == {"": 5}
    assert values["flink.taskmanager.job.task.operator.pendingCommittables"] == {"table": 1, "topic": 1}
    spans = [
        span
        for request in collector.traces
        for of_resource in request.resource_spans
        for scope in of_resource.scope_spans
        for span in scope.spans
    ]
    roots = [span for span in spans if not span.parent_span_id]
    ids = [one.value.int_value for span in roots for one in span.attributes if one.key == "checkpointId"]
    assert ids == [1, 2, 3, 4, 5, 6], "each once"
    failed, done = roots[3], roots[5]
    assert failed.status.message == "TASK_FAILED" and failed.status.code == 2
    took_ms = (done.end_time_unix_nano - done.start_time_unix_nano) // 1_000_000
    assert (done.name, took_ms, done.start_time_unix_nano) == ("Checkpoint", 6_000, job.at_ms(6) * 1_000_000)
    below = [span for span in spans if span.parent_span_id == done.span_id]
    assert sorted(span.name for span in below) == ["Acknowledge"] * 3 + ["Commit"] * 2
    commits = sorted((s.start_time_unix_nano, s.end_time_unix_nano) for s in below if s.name == "Commit")
    assert [(end - begin) // 1_000_000 for begin, end in commits] == [250, 120]
    assert commits[0][1] == commits[1][0], "one behind the other"
    everything = str(collector.metrics) + str(collector.traces)
    assert "secret" not in everything and "no broker answered" not in everything
    resource = {
        one.key: one.value.string_value for one in collector.traces[0].resource_spans[0].resource.attributes
    }
    assert resource["service.name"] == "flinkish-spark"


def test_checkpoints_of_earlier_processes_are_none_of_this_reporters(tmp_path: Path) -> None:
    spans = InMemorySpanExporter()
    reporter = OpenTelemetryReporter(_NoMetrics(), spans)
    reporter.open(JOB)
    reporter.report(snapshot_of(shown_job(tmp_path / "orders")))
    reporter.close()
    assert spans.get_finished_spans() == ()


def test_a_collector_that_is_not_there_hurts_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    reporter = OpenTelemetryReporter()
    reporter.open(JOB)
    reporter.report(snapshot_of(shown_job(tmp_path / "orders")))
    reporter.close()


def _NoMetrics() -> Any:
    from opentelemetry.sdk.metrics.export import ConsoleMetricExporter

    return ConsoleMetricExporter(formatter=lambda data: "")


def test_a_reader_of_the_programs_own_is_left_alone() -> None:
    """The program's own meters and ours do not know each other."""
    from opentelemetry import metrics

    before = metrics.get_meter_provider()
    reporter = OpenTelemetryReporter(_NoMetrics(), InMemorySpanExporter())
    reporter.open(JOB)
    assert metrics.get_meter_provider() is before
    reporter.close()
