"""The process of the driver's JVM, if this process started it."""

from __future__ import annotations

import subprocess

from pyspark import SparkContext
from pyspark.sql import SparkSession

from flinkish_spark.core.forks import close_in_children

#: Time limit for the end of a JVM whose connections are gone.
_ENDING_S = 1


def exit_code_of_jvm() -> int | None:
    """Return the exit code of the JVM that this process started, negative for a signal; None if it lives."""
    process = getattr(SparkContext._gateway, "proc", None)
    if process is None:
        return None
    try:
        return int(process.wait(_ENDING_S))
    except subprocess.TimeoutExpired:
        return None


def ends_with_this_process(spark: SparkSession) -> None:
    process = getattr(getattr(spark.sparkContext, "_gateway", None), "proc", None)
    if process is not None and process.stdin is not None:
        close_in_children(process.stdin)
