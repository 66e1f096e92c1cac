"""A Spark session for a process that lives for a dozen micro-batches and is started again and again."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from flinkish_spark.bridge.session import delta_conf


def light_session(name: str, scratch: Path, *, master: str = "local[2]") -> SparkSession:
    """Return a session that finds the JARs on the class path, where `tests/crash/conftest.py` puts them."""
    builder = (
        SparkSession.builder.appName(name)
        .master(master)
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.local.dir", str(scratch / "local"))
        .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
        .config("spark.databricks.delta.snapshotPartitions", "1")
        # The process ends before generated code would have paid for its compilation.
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        .config("spark.python.daemon.module", "tests.crash.preloading_daemon")
    )
    spark = builder.config(map=delta_conf()).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark
