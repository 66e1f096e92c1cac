"""Metrics and traces with OpenTelemetry, with the names of Flink's OpenTelemetry reporters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.extras import how_to_install
from flinkish_spark.core.version import __version__
from flinkish_spark.job.face import ReportedJob, Reporter
from flinkish_spark.job.snapshot import JobSnapshot
from flinkish_spark.protocol.statistics import CheckpointStatistics, ParticipantStatistics
from flinkish_spark.reporters.metrics import CATALOGUE, Kind, Measurement, Scope, measurements
from flinkish_spark.reporters.prometheus import labels_of
from flinkish_spark.reporters.reporter import EndedCheckpoints

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.trace.export import SpanExporter

_PREFIX = {
    Scope.JOB: "flink.jobmanager.job.",
    Scope.TASK: "flink.taskmanager.job.task.",
    Scope.OPERATOR: "flink.taskmanager.job.task.operator.",
}
_SCOPE = "flinkish_spark"
_NS_PER_MS = 1_000_000


class OpenTelemetryReporter(Reporter):
    """A reporter of metrics and checkpoint spans to an OpenTelemetry collector, for `env.add_reporter`.

    Configure destination and interval with OpenTelemetry's variables: ``OTEL_EXPORTER_OTLP_ENDPOINT``,
    ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_METRIC_EXPORT_INTERVAL``, ``OTEL_SERVICE_NAME``. The default is
    OTLP over HTTP to port 4318 of this machine.

    Parameters
    ----------
    metric_exporter, span_exporter
        Exporters of the OpenTelemetry SDK; None for OTLP over HTTP.

    Examples
    --------
    >>> env.add_reporter(OpenTelemetryReporter())  # doctest: +SKIP
    """

    def __init__(
        self, metric_exporter: MetricExporter | None = None, span_exporter: SpanExporter | None = None
    ) -> None:
        try:
            import opentelemetry.sdk.metrics
            import opentelemetry.sdk.trace

            if metric_exporter is None or span_exporter is None:
                import opentelemetry.exporter.otlp.proto.http  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"OpenTelemetry needs the package {error.name}", what_to_do=how_to_install("opentelemetry")
            ) from None
        self._metric_exporter, self._span_exporter = metric_exporter, span_exporter
        self._newest: tuple[tuple[JobSnapshot, Measurement], ...] = ()

    def open(self, job: ReportedJob) -> None:
        """Create this reporter's own meter and tracer, separate from those of the program."""
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.metrics.view import View
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = _resource()
        reader = PeriodicExportingMetricReader(self._metric_exporter or _otlp_metrics())
        # The SDK converts names to lower case; a view restores Flink's.
        names = (f"{_PREFIX[one.scope]}{one.name}" for one in CATALOGUE)
        views = [View(instrument_name=name.lower(), name=name) for name in names]
        self._meters = MeterProvider([reader], resource=resource, views=views)
        self._meter = self._meters.get_meter(_SCOPE, __version__)
        self._traces = TracerProvider(resource=resource)
        self._traces.add_span_processor(BatchSpanProcessor(self._span_exporter or _otlp_spans()))
        self._tracer = self._traces.get_tracer(_SCOPE, __version__)
        self._instruments: set[str] = set()
        self._ended = EndedCheckpoints()

    def report(self, snapshot: JobSnapshot) -> None:
        """Update the metrics, and create spans of ended checkpoints."""
        found = list(measurements(snapshot))
        self._newest = tuple((snapshot, one) for one in found)
        for one in found:
            self._show(one)
        for ended in self._ended.new_in(snapshot.history):
            self._trace(snapshot, ended)

    def close(self) -> None:
        """Flush and shut down."""
        self._meters.shutdown()
        self._traces.shutdown()

    def _show(self, one: Measurement) -> None:
        """Create the instrument of a metric, if missing."""
        name = _PREFIX[one.metric.scope] + one.metric.name
        if name in self._instruments:
            return
        self._instruments.add(name)
        is_counter = one.metric.kind is Kind.COUNTER
        make = self._meter.create_observable_counter if is_counter else self._meter.create_observable_gauge
        make(name, [self._observing(name)], one.metric.unit, one.metric.meaning)

    def _observing(self, name: str) -> Callable[[Any], Iterable[Any]]:
        from opentelemetry.metrics import Observation

        def observe(options: Any) -> Iterable[Any]:
            return [
                Observation(one.value, labels_of(snapshot, one))
                for snapshot, one in self._newest
                if _PREFIX[one.metric.scope] + one.metric.name == name
            ]

        return observe

    def _trace(self, snapshot: JobSnapshot, ended: CheckpointStatistics) -> None:
        """Create the span of a checkpoint, with child spans for each participant and each commit."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        begin_ms, took_ms = ended.trigger_at_ms, ended.durations.end_to_end_ms or 0
        phases = ended.durations.to_json()
        attributes = {
            "jobId": snapshot.id,
            "jobName": snapshot.job.name,
            "lineage": snapshot.lineage,
            "checkpointId": int(ended.checkpoint),
            "checkpointStatus": ended.status.value,
            "checkpointType": ended.purpose.value,
            "checkpointedSize": ended.bytes_staged,
            "rows": ended.rows,
            **{name: took for name, took in phases.items() if name != "end_to_end_ms"},
        }
        span = self._tracer.start_span(
            "Checkpoint", start_time=begin_ms * _NS_PER_MS, attributes=_drop_nulls(attributes)
        )
        if ended.failure is not None:
            # Only the reason, since an exception's text may quote a record.
            span.set_status(Status(StatusCode.ERROR, ended.failure.reason.value))
        context = set_span_in_context(span)
        for name, one, since_ms, until_ms in _list_parts(ended):
            child = self._tracer.start_span(
                name,
                context,
                start_time=(begin_ms + since_ms) * _NS_PER_MS,
                attributes=_drop_nulls(
                    {
                        "uid": one.uid,
                        "kind": one.kind.value,
                        "isAcknowledged": one.is_acknowledged,
                        "rows": one.rows,
                        "bytes": one.bytes,
                        "sync_ms": one.sync_ms,
                    }
                ),
            )
            child.end((begin_ms + until_ms) * _NS_PER_MS)
        span.end((begin_ms + took_ms) * _NS_PER_MS)


def _list_parts(ended: CheckpointStatistics) -> Iterable[tuple[str, ParticipantStatistics, int, int]]:
    """Yield the parts of a checkpoint: name, participant, begin and end relative to its request."""
    took_ms = ended.durations.end_to_end_ms or 0
    # After the decision sinks commit one after another, in this order.
    at_ms = max(0, took_ms - (ended.durations.commit_ms or 0))
    for one in ended.participants:
        yield "Acknowledge", one, 0, took_ms if one.ack_ms is None else one.ack_ms
        if one.commit_ms is not None:
            yield "Commit", one, at_ms, at_ms + one.commit_ms
            at_ms += one.commit_ms


def _drop_nulls(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _resource() -> Any:
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    found = Resource.create()
    if str(found.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        return found.merge(Resource({SERVICE_NAME: "flinkish-spark"}))
    return found


def _otlp_metrics() -> Any:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()


def _otlp_spans() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()
