"""Calls into the JAR of this package: the metrics of a job.

And calls out of it: the control source asks the driver what the next micro-batch carries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceStreamReader

from flinkish_spark.bridge.session import CONTROL_SOURCE, has_class, jvm
from flinkish_spark.core.stream_readers import ReadAllAvailable


def show_metrics(spark: SparkSession, job: str, values: Mapping[str, int | float]) -> None:
    """Show these values of a job in Spark's metric system, and no others of it."""
    jvm(spark).io.github.flinkishspark.shim.JobMetrics.show(job, json.dumps(dict(values)))


class _Controls:
    """The control source's driver's side, which Py4J gives to the JVM; threads of queries call it."""

    def __init__(self, reader_of: Callable[[str], DataSourceStreamReader]) -> None:
        self._reader_of = reader_of

    def initial(self, path: str) -> str:
        return json.dumps(self._reader_of(path).initialOffset())

    def latest(self, path: str, start: str) -> str:
        return json.dumps(self._reader_of(path).latestOffset(json.loads(start), ReadAllAvailable()))

    def rows(self, path: str, start: str, end: str) -> str:
        reader = self._reader_of(path)
        partitions = reader.partitions(json.loads(start), json.loads(end))
        return json.dumps([row for partition in partitions for row in reader.read(partition)])

    class Java:
        implements = (f"{CONTROL_SOURCE}$Controls",)


def connect_controls(spark: SparkSession, reader_of: Callable[[str], DataSourceStreamReader]) -> bool:
    """Let the JAR's control source ask a reader in this process; return False if there is no such source."""
    if getattr(spark, "_jvm", None) is None or not has_class(spark, CONTROL_SOURCE):
        return False
    source = jvm(spark).io.github.flinkishspark.shim.ControlSource
    if not source.isConnected():
        ensure_callback_server_started(spark.sparkContext._gateway)  # type: ignore[no-untyped-call]
        source.connect(_Controls(reader_of))
    return True
