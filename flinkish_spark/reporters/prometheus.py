"""Metrics for Prometheus, with the names of Flink's reporter, so that its dashboards work."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from flinkish_spark.core.errors import ConfigError, EnvironmentFault, FlinkishError
from flinkish_spark.core.extras import how_to_install
from flinkish_spark.core.fields import Range, check_arguments
from flinkish_spark.job.face import ReportedJob, Reporter
from flinkish_spark.job.snapshot import JobSnapshot
from flinkish_spark.reporters.metrics import Measurement, Scope, measurements

LOG = logging.getLogger(__name__)
#: Flink's prefixes of names, by scope.
_PREFIX = {
    Scope.JOB: "flink_jobmanager_job_",
    Scope.TASK: "flink_taskmanager_job_task_",
    Scope.OPERATOR: "flink_taskmanager_job_task_operator_",
}
_NO_LETTER = re.compile(r"[^a-zA-Z0-9_]")
#: The first port that Flink's reporter tries.
FLINK_PORT = 9249
_MOST_PORT = 65_535
#: The content type of the classic text format, which every Prometheus reads.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


#: A job and its measurements.
_MeasuredJob = tuple[JobSnapshot, Sequence[Measurement]]


def text_of(snapshots: Iterable[JobSnapshot]) -> bytes:
    """Return the metrics of jobs in Prometheus's text format; unreadable jobs are left out."""
    client = _client()
    registry = client.CollectorRegistry(auto_describe=False)
    registry.register(_Collector(lambda: _measure_jobs(snapshots)))
    text: bytes = client.generate_latest(registry)
    return text


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError:
        raise ConfigError(
            "metrics for Prometheus need the package prometheus_client",
            what_to_do=how_to_install("prometheus"),
        ) from None
    return prometheus_client


def _measure_jobs(snapshots: Iterable[JobSnapshot]) -> Iterator[_MeasuredJob]:
    for snapshot in snapshots:
        try:
            # All metrics of a job or none: a part would look like a change.
            yield snapshot, list(measurements(snapshot))
        except FlinkishError as error:
            LOG.warning("the job '%s' has no metrics: %s", snapshot.job.name, error)


@dataclass(frozen=True)
class _Collector:
    known: Callable[[], Iterable[_MeasuredJob]]

    def collect(self) -> Iterator[Any]:
        core, families = _client().core, dict[str, Any]()
        shown: set[tuple[str, ...]] = set()
        for snapshot, found in self.known():
            for one in found:
                name, labels = name_of(one), labels_of(snapshot, one)
                if name not in families:
                    # As in Flink's reporter, counters are exported as gauges, since their names would else
                    # end in `_total`.
                    families[name] = core.GaugeMetricFamily(name, one.metric.meaning, labels=tuple(labels))
                series = (name, *labels.values())
                if series not in shown:
                    # Names of two metrics may differ only in characters that Prometheus does not allow.
                    shown.add(series)
                    families[name].add_metric(series[1:], one.value)
        yield from families.values()


def name_of(one: Measurement) -> str:
    return _PREFIX[one.metric.scope] + _NO_LETTER.sub("_", one.metric.name)


def labels_of(snapshot: JobSnapshot, one: Measurement) -> Mapping[str, str]:
    """Return the labels of a value: the job, and the vertex or the uid."""
    found = {"job_id": snapshot.id, "job_name": snapshot.job.name}
    if one.task is not None:
        found |= {"task_id": one.task.id, "task_name": one.task.name}
    if one.metric.scope is Scope.OPERATOR:
        found["operator_name"] = one.operator
    return found


class PrometheusReporter(Reporter):
    """A reporter that serves a job's metrics at `/metrics` in the job's process, for `env.add_reporter`.

    The server of `ui=True` also serves them, and so does `flinkish ui` for a folder of jobs.

    Parameters
    ----------
    port
        The port; 0 picks a free one.
    host
        The address; by default loopback. For a Prometheus on another machine set it, or use a proxy.

    Examples
    --------
    >>> env.add_reporter(PrometheusReporter(port=9249))  # doctest: +SKIP
    """

    @check_arguments(host='give an address like "127.0.0.1"')
    def __init__(
        self, port: Annotated[int, Range(0, _MOST_PORT)] = FLINK_PORT, host: str = "127.0.0.1"
    ) -> None:
        _client()
        self._host, self._wanted = host, port
        self._server: tuple[Any, Any] | None = None
        self._newest: tuple[_MeasuredJob, ...] = ()

    @property
    def port(self) -> int:
        """The port on which it listens while a job runs."""
        return self._wanted if self._server is None else int(self._server[0].server_port)

    def open(self, job: ReportedJob) -> None:
        """Start the server."""
        client = _client()
        registry = client.CollectorRegistry(auto_describe=False)
        registry.register(_Collector(lambda: self._newest))
        try:
            self._server = client.start_http_server(self._wanted, self._host, registry)
        except OSError as error:
            raise EnvironmentFault(
                f"the reporter cannot listen on port {self._wanted} of {self._host}",
                why=str(error),
                what_to_do="choose another port for the PrometheusReporter, or 0 for one that is free",
            ) from None

    def report(self, snapshot: JobSnapshot) -> None:
        """Update the metrics."""
        self._newest = tuple(_measure_jobs([snapshot]))

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join(5)
