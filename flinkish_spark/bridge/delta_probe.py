"""Which Delta a session has."""

from __future__ import annotations

from pyspark.sql import SparkSession

from flinkish_spark.bridge.delta_errors import FROM_THE_JVM
from flinkish_spark.bridge.session import jvm

_INTERNALS = (
    "org.apache.spark.sql.delta.DeltaLog",
    "org.apache.spark.sql.delta.commands.WriteIntoDelta",
    "org.apache.spark.sql.delta.actions.SetTransaction",
)


def has_native_delta(spark: SparkSession) -> bool:
    """Whether the transactions of open-source Delta can be reached from here."""
    return getattr(spark, "_jvm", None) is not None and all(_has_class(spark, name) for name in _INTERNALS)


def has_delta_format(spark: SparkSession) -> bool:
    """Whether ``format("delta")`` means something, whoever provides it."""
    if getattr(spark, "_jvm", None) is None:
        # Nothing can be looked up; the first question about a table will tell.
        return True
    try:
        sources = jvm(spark).org.apache.spark.sql.execution.datasources.DataSource
        sources.lookupDataSource("delta", spark._jsparkSession.sessionState().conf())
    except FROM_THE_JVM:
        return False
    return True


def _has_class(spark: SparkSession, name: str) -> bool:
    try:
        loader = jvm(spark).java.lang.Thread.currentThread().getContextClassLoader()
        jvm(spark).java.lang.Class.forName(name, False, loader)
    except FROM_THE_JVM:
        return False
    return True
