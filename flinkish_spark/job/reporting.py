"""The owner's reports in the job directory: the status of the job, and the reasons for its restarts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from flinkish_spark.checkpoint.hooks import QuietListener
from flinkish_spark.core.clock import Clock
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.errors import FlinkishError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.watchdog import Wait
from flinkish_spark.protocol.ids import OwnerEpoch
from flinkish_spark.protocol.job_graph import JobVertex
from flinkish_spark.protocol.job_report import JobReport, ReportedWait
from flinkish_spark.protocol.job_status import Change, JobStatusChange

LOG = logging.getLogger(__name__)
#: Minimum time between two reports of waits: in a bucket each costs a request.
_LEAST_PAUSE_MS = 2_000


class JobReporter(QuietListener):
    """A listener that stores a report of this owner; errors of the store are only logged."""

    def __init__(
        self, job_dir: JobDir, clock: Clock, vertices: Iterable[JobVertex], settings: Mapping[str, Any]
    ) -> None:
        self._job_dir, self._clock = job_dir, clock
        self._vertices, self._settings = tuple(vertices), settings
        #: None before the takeover: until then another owner has the directory.
        self._report: JobReport | None = None
        #: One thread notifies of changes, another one of waits.
        self._lock = threading.Lock()
        self._told_waits: list[tuple[str, str, str]] = []
        self._told_at_ms = -_LEAST_PAUSE_MS

    def on_taken_over(self, epoch: OwnerEpoch) -> None:
        """Begin a report that continues those of earlier owners, and delete theirs."""
        try:
            earlier = self._job_dir.newest_report()
        except FlinkishError as error:
            LOG.warning("the reports start over: %s", error)
            earlier = None
        now_ms = self._clock.wall_ms()
        self._report = JobReport.begin(epoch, now_ms, self._vertices, self._settings, earlier)
        self._store(self._report)
        self._job_dir.forget_reports_before(epoch)

    def on_change(self, change: Change) -> None:
        """Record a change, and store the report unless further changes follow at once."""
        with self._lock:
            if self._report is None:
                return
            self._report = self._report.apply(change)
            if isinstance(change, JobStatusChange) or self._report.is_settled:
                self._store(self._report)

    def on_waits(self, waits: tuple[Wait, ...]) -> None:
        """Record the job's waits; store the report if they changed, but not too often."""
        told, now_ms = [(one.who, one.what, one.error) for one in waits], self._clock.monotonic_ms()
        if told == self._told_waits or now_ms - self._told_at_ms < _LEAST_PAUSE_MS:
            return
        wall_ms = self._clock.wall_ms()
        found = tuple(
            ReportedWait(one.who, one.what, max(0, wall_ms - one.for_ms), one.error) for one in waits
        )
        with self._lock:
            if self._report is None:
                return
            self._told_waits, self._told_at_ms = told, now_ms
            self._report = replace(self._report, waits=found)
            self._store(self._report)

    def _store(self, report: JobReport) -> None:
        try:
            self._job_dir.put_report(report)
        except FlinkishError as error:
            LOG.warning("the job's report is not stored: %s", error)


def collect_reported_settings(
    checkpoint: CheckpointConfig,
    restart: object,
    trigger_ms: int,
    shuffle_partitions: int,
    spark_ui: str | None = None,
) -> dict[str, Any]:
    """Return the settings that other processes may see: names and numbers, no data of the user."""
    tolerable = checkpoint.tolerable_failures
    return {
        "interval_ms": checkpoint.interval_ms,
        "timeout_ms": checkpoint.timeout_ms,
        "min_pause_ms": checkpoint.min_pause_ms,
        "max_concurrent": checkpoint.max_concurrent,
        # None means no limit.
        "tolerable_failures": tolerable if isinstance(tolerable, int) else None,
        "retained": checkpoint.retained,
        "mode": checkpoint.mode.value,
        "retention": checkpoint.retention.value,
        "restart_strategy": type(restart).__name__,
        "trigger_ms": trigger_ms,
        "shuffle_partitions": shuffle_partitions,
        "spark_ui": spark_ui,
    }
