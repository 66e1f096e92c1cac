"""Reports the inputs and outputs of a job to catalogs with OpenLineage, at each complete checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flinkish_spark.bridge.plans import origins_of
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.extras import how_to_install
from flinkish_spark.core.secrets import hide_secrets
from flinkish_spark.core.version import __version__
from flinkish_spark.job.face import ReportedJob, Reporter
from flinkish_spark.job.snapshot import JobSnapshot
from flinkish_spark.planning.sink_rows import PlannedJob, PlannedSink, select_sink_rows
from flinkish_spark.protocol.job_status import JobStatus
from flinkish_spark.protocol.plan_layout import source_of
from flinkish_spark.protocol.statistics import CheckpointStatistics, CheckpointStatus
from flinkish_spark.reporters.reporter import EndedCheckpoints

if TYPE_CHECKING:
    from openlineage.client import OpenLineageClient
    from pyspark.sql import types as T

LOG = logging.getLogger(__name__)
#: The producer of events, as a URI.
_PRODUCER = f"urn:flinkish-spark:{__version__}"
#: Maximum length of a failure's cause in an event.
_MOST_TEXT = 500


@dataclass(frozen=True)
class _Output:
    uid: str
    dataset: Dataset
    fields: tuple[tuple[str, str], ...]
    origins: dict[str, tuple[tuple[Dataset, str], ...]]


class OpenLineageReporter(Reporter):
    """A reporter of OpenLineage events, for `env.add_reporter`.

    An execution is a run: START at its begin, RUNNING at each complete checkpoint, and COMPLETE, ABORT or
    FAIL at its end. Configure the destination as for OpenLineage: ``OPENLINEAGE_URL``, ``openlineage.yml``;
    ``OPENLINEAGE_NAMESPACE`` is the namespace of the job.

    Parameters
    ----------
    client
        A client of openlineage-python; None for one configured by the environment.

    Examples
    --------
    >>> env.add_reporter(OpenLineageReporter())  # doctest: +SKIP
    """

    def __init__(self, client: OpenLineageClient | None = None) -> None:
        try:
            import openlineage.client.event_v2
            import openlineage.client.facet_v2  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"OpenLineage needs the package {error.name}", what_to_do=how_to_install("openlineage")
            ) from None
        self._given = client

    def open(self, job: ReportedJob) -> None:
        """Begin a run."""
        from openlineage.client import OpenLineageClient
        from openlineage.client.uuid import generate_new_uuid

        self._client = OpenLineageClient() if self._given is None else self._given
        self._job, self._run_id = job, str(generate_new_uuid())
        self._namespace = os.environ.get("OPENLINEAGE_NAMESPACE", "default")
        self._ended = EndedCheckpoints()
        self._newest: JobSnapshot | None = None
        self._has_started = False
        self._inputs: dict[Dataset, tuple[tuple[str, str], ...]] = {}
        self._outputs: list[_Output] = []

    def report(self, snapshot: JobSnapshot) -> None:
        """Send an event for each checkpoint completed since the last call."""
        self._newest = snapshot
        planned = self._job.planned()
        if planned is not None and not self._has_started:
            self._look(planned)
            self._has_started = True
            self._emit("START", SystemClock().wall_ms(), {})
        for ended in self._ended.new_in(snapshot.history):
            if ended.status is CheckpointStatus.COMPLETED:
                self._running(snapshot, ended)

    def close(self) -> None:
        """Send the final event, if the run has begun."""
        if self._has_started and self._newest is not None:
            # The last report may be older than the last change.
            self._report_end(JobSnapshot(self._newest.id, self._newest.job))
        if self._given is None:
            self._client.close()

    def _running(self, snapshot: JobSnapshot, ended: CheckpointStatistics) -> None:
        rows = {one.uid: (one.rows, one.bytes) for one in ended.participants}
        at_ms = ended.trigger_at_ms + (ended.durations.end_to_end_ms or 0)
        counts = snapshot.history.counts
        facets = {
            "flinkish_checkpoint": {
                "checkpoint": int(ended.checkpoint),
                "purpose": ended.purpose.value,
                "lineage": snapshot.lineage,
                "durationMs": ended.durations.end_to_end_ms,
                "rows": ended.rows,
            },
            # As in OpenLineage's own integration for Flink.
            "checkpoints": {
                "completed": counts.completed,
                "failed": counts.failed,
                "in_progress": counts.in_progress,
                "restored": counts.restored,
                "total": counts.triggered,
            },
        }
        self._emit("RUNNING", at_ms, facets, rows)

    def _report_end(self, snapshot: JobSnapshot) -> None:
        from openlineage.client.facet_v2 import error_message_run

        status = snapshot.status
        state = {JobStatus.FAILED: "FAIL", JobStatus.CANCELED: "ABORT"}.get(status, "COMPLETE")
        failures = () if snapshot.report is None else snapshot.report.failures
        facets: dict[str, Any] = {"flinkish_lineage": {"lineage": snapshot.lineage, "status": status.value}}
        if status is JobStatus.FAILED and failures:
            cause = hide_secrets(failures[-1].cause)[:_MOST_TEXT]
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(cause, "PYTHON")
        self._emit(state, SystemClock().wall_ms(), facets)

    def _emit(
        self,
        state: str,
        at_ms: int,
        facets: dict[str, Any],
        rows: dict[str, tuple[int | None, int | None]] | None = None,
    ) -> None:
        from openlineage.client.event_v2 import InputDataset, Job, Run, RunEvent, RunState
        from openlineage.client.facet_v2 import RunFacet, job_type_job, processing_engine_run

        def make_run_facet(given: Any) -> Any:
            if not isinstance(given, dict):
                return given
            known = {name: value for name, value in given.items() if value is not None}
            return RunFacet(producer=_PRODUCER).with_additional_properties(**known)

        run_facets = {name: make_run_facet(given) for name, given in facets.items()}
        run_facets["processing_engine"] = processing_engine_run.ProcessingEngineRunFacet(
            __version__, "flinkish_spark", producer=_PRODUCER
        )
        kind = job_type_job.JobTypeJobFacet("STREAMING", "FLINKISH_SPARK", "JOB", producer=_PRODUCER)
        event = RunEvent(
            eventTime=datetime.fromtimestamp(at_ms / 1_000, UTC).isoformat(timespec="milliseconds"),
            producer=_PRODUCER,
            eventType=RunState(state),
            run=Run(self._run_id, run_facets),
            job=Job(self._namespace, self._job.name, {"jobType": kind}),
            inputs=[
                InputDataset(dataset.namespace, dataset.name, facets=_schema(fields))
                for dataset, fields in self._inputs.items()
            ],
            outputs=[_output(one, (rows or {}).get(one.uid)) for one in self._outputs],
        )
        self._client.emit(event)

    def _look(self, planned: PlannedJob) -> None:
        """Determine inputs and outputs once, since sources and Catalyst may have to be called."""
        datasets = {node.uid: node.source.datasets() for node in self._job.sources}
        for uid, found in datasets.items():
            for dataset in found:
                self._inputs.setdefault(dataset, _fields(planned.read.get(uid, ())))
        self._outputs = list(self._find_outputs(planned, datasets))

    @staticmethod
    def _find_outputs(planned: PlannedJob, datasets: Mapping[str, tuple[Dataset, ...]]) -> Iterable[_Output]:
        streams = len({stream for sink in planned.sinks for stream in sink.streams})
        for sink in planned.sinks:
            fields = _fields(sink.schema)
            origins = {
                name: tuple((dataset, column) for uid, column in found for dataset in datasets.get(uid, ()))
                for name, found in _origins(planned, sink, streams).items()
            }
            for dataset in sink.sink.datasets():
                yield _Output(sink.uid, dataset, fields, {name: of for name, of in origins.items() if of})


def _fields(schema: Iterable[T.StructField]) -> tuple[tuple[str, str], ...]:
    return tuple((one.name, one.dataType.simpleString()) for one in schema)


def _origins(planned: PlannedJob, sink: PlannedSink, streams: int) -> dict[str, list[tuple[str, str]]]:
    """Return the source columns of a sink's fields, as far as Catalyst knows them."""
    try:
        found = origins_of(select_sink_rows(planned.frame, sink, streams))
    except Exception as error:
        # Another version of Spark may have other plans; then columns are left out.
        LOG.info("the origins of the columns of sink '%s' are not reported: %s", sink.uid, error)
        return {}
    return {
        name: sorted((source_of(uid), column) for uid, column in found[name])
        for name in sink.schema.names
        if found.get(name)
    }


def _output(one: _Output, staged: tuple[int | None, int | None] | None) -> Any:
    from openlineage.client.event_v2 import OutputDataset
    from openlineage.client.facet_v2 import column_lineage_dataset as lineage
    from openlineage.client.facet_v2 import output_statistics_output_dataset as statistics

    facets = _schema(one.fields)
    if one.origins:
        facets["columnLineage"] = lineage.ColumnLineageDatasetFacet(
            {
                name: lineage.Fields(
                    [lineage.InputField(of.namespace, of.name, column) for of, column in found]
                )
                for name, found in one.origins.items()
            },
            producer=_PRODUCER,
        )
    of_run: dict[str, Any] = {}
    if staged is not None:
        rows, size = staged
        of_run["outputStatistics"] = statistics.OutputStatisticsOutputDatasetFacet(
            rowCount=rows, size=size, producer=_PRODUCER
        )
    return OutputDataset(one.dataset.namespace, one.dataset.name, facets=facets, outputFacets=of_run)


def _schema(fields: Iterable[tuple[str, str]]) -> dict[str, Any]:
    from openlineage.client.facet_v2 import schema_dataset as schema

    found = [schema.SchemaDatasetFacetFields(name, kind) for name, kind in fields]
    return {"schema": schema.SchemaDatasetFacet(found, producer=_PRODUCER)} if found else {}
