"""Metrics in Spark's own metric system, for all of its metric sinks."""

from __future__ import annotations

import re

from pyspark.sql import SparkSession

from flinkish_spark.bridge.session import has_shim, show_metrics
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.job.face import ReportedJob, Reporter
from flinkish_spark.job.snapshot import JobSnapshot
from flinkish_spark.reporters.metrics import Measurement, Number, measurements

_NO_LETTER = re.compile(r"[^a-zA-Z0-9_-]+")


class SparkMetricsReporter(Reporter):
    """A reporter to the metric system of Spark's driver, for `env.add_reporter`.

    Metrics are gauges of the source ``flinkish.JOB``: in JMX, Spark's Prometheus page, Graphite, or any other
    sink in ``metrics.properties``. Needs the JAR of this package.

    Parameters
    ----------
    spark
        The session of the job.

    Examples
    --------
    >>> env.add_reporter(SparkMetricsReporter(spark))  # doctest: +SKIP
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark, self._job = spark, ""

    def open(self, job: ReportedJob) -> None:
        """Check that the JAR is present."""
        if not has_shim(self._spark):
            raise ConfigError(
                "Spark's metric system cannot show the job's metrics",
                why="the JAR of this package is not on the class path of Spark's driver",
                what_to_do="make the session with configure_spark_with_jars()",
            )

    def report(self, snapshot: JobSnapshot) -> None:
        """Update the metrics."""
        self._job = snapshot.job.name
        found: dict[str, Number] = {}
        for one in measurements(snapshot):
            found.setdefault(name_of(one), one.value)
        show_metrics(self._spark, self._job, found)

    def close(self) -> None:
        """Remove the metrics."""
        if self._job:
            show_metrics(self._spark, self._job, {})


def name_of(one: Measurement) -> str:
    about = one.operator if one.task is None else one.task.name
    parts = (one.metric.scope.value, _NO_LETTER.sub("_", about), one.metric.name)
    return ".".join(part for part in parts if part)
