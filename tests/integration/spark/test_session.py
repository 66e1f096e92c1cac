"""A configured session has Kafka, Delta and the shim: a Delta table written and read, a Kafka topic too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest
from pyspark.sql import SparkSession

from flinkish_spark.bridge.session import hold_stage_bars, suppress_traces
from flinkish_spark.bridge.worker_processes import UNIX_SOCKETS, _has_package, preload_workers
from flinkish_spark.jars import shim_jar

if TYPE_CHECKING:
    from collections.abc import Callable

    from flinkish_spark.testing.broker import LocalBroker

BUILD = Path(__file__).resolve().parents[3] / "build"


def test_a_delta_table_written_is_read(spark: SparkSession, tmp_path: Path) -> None:
    table = str(tmp_path / "table")
    spark.range(100).write.format("delta").save(table)
    assert spark.read.format("delta").load(table).count() == 100
    assert spark.sql(f"SELECT sum(id) AS total FROM delta.`{table}`").collect()[0].total == 4950


def test_traces_and_bars_are_held_back_and_come_back(spark: SparkSession) -> None:
    log4j = spark.sparkContext._jvm.org.apache.logging.log4j
    executor, own = "org.apache.spark.executor.Executor", "org.apache.spark.util.Utils"

    def level(name: str) -> str:
        return str(log4j.LogManager.getLogger(name).getLevel())

    log4j.core.config.Configurator.setLevel(own, log4j.Level.INFO)
    before = level(executor)
    with suppress_traces(spark):
        # What somebody has set up is as it was.
        assert (level(executor), level(own)) == ("OFF", "INFO")
        hold_stage_bars(spark)
    assert (level(executor), level(own)) == (before, "INFO") and before != "OFF"
    context = log4j.LogManager.getContext(False)
    context.getConfiguration().removeLogger(own)
    context.updateLoggers()


def test_a_kafka_topic_written_is_read(
    spark: SparkSession, broker: LocalBroker, topic: Callable[..., str]
) -> None:
    options = {"kafka.bootstrap.servers": broker.bootstrap_servers}
    name = topic(partitions=2)
    rows = spark.range(100).selectExpr("CAST(id AS STRING) AS value")
    rows.write.format("kafka").options(**options, topic=name).save()
    assert spark.read.format("kafka").options(**options, subscribe=name).load().count() == 100


def test_the_shim_is_on_the_class_path(spark: SparkSession) -> None:
    assert shim_jar().name in spark.conf.get("spark.jars", "")


def test_workers_are_forked_with_their_imports_done(spark: SparkSession) -> None:
    def program(_: int) -> str:
        return sys.modules["__main__"].__spec__.name

    preload_workers(spark)
    assert spark.sparkContext.parallelize([0], 1).map(program).collect() == ["flinkish_spark.worker.daemon"]


def test_workers_talk_over_unix_sockets_unless_somebody_says_no(spark: SparkSession) -> None:
    """Over TCP a worker's acknowledgements come 40 ms late, and the JVM waits for them."""

    def family(_: int) -> str:
        frame = sys._getframe()
        while "sock" not in frame.f_locals:
            frame = frame.f_back
        return frame.f_locals["sock"].family.name

    conf = spark.sparkContext._jsc.sc().env().conf()
    preload_workers(spark)
    assert conf.get(UNIX_SOCKETS) == "true"
    assert spark.sparkContext.parallelize([0], 1).map(family).collect() == ["AF_UNIX"]
    conf.set(UNIX_SOCKETS, "false")
    try:
        preload_workers(spark)
        assert conf.get(UNIX_SOCKETS) == "false"
    finally:
        conf.set(UNIX_SOCKETS, "true")


def test_a_folder_with_a_long_name_gets_no_unix_sockets(spark: SparkSession) -> None:
    """An address has 104 bytes; a worker whose address is longer would not start."""
    conf = spark.sparkContext._jsc.sc().env().conf()
    conf.set("spark.python.unix.domain.socket.dir", "/tmp/" + "x" * 80)
    conf.remove(UNIX_SOCKETS)
    try:
        preload_workers(spark)
        assert not conf.contains(UNIX_SOCKETS)
    finally:
        conf.remove("spark.python.unix.domain.socket.dir")
        preload_workers(spark)


def test_workers_take_pyspark_from_its_folder(spark: SparkSession) -> None:
    """From the archive each process would compile it."""
    preload_workers(spark)
    before = dict(spark.sparkContext.environment)
    preload_workers(spark)
    assert spark.sparkContext.environment == before
    places = spark.sparkContext.parallelize([0], 1).map(lambda _: sys.modules["pyspark"].__file__).collect()
    assert places == [pyspark.__file__]


def test_a_package_that_only_tasks_find_has_no_daemon(tmp_path: Path) -> None:
    """As with --py-files: the daemon starts before Spark adds what they name."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\ncd /; exec {sys.executable} -IS "$@"\n')
    program.chmod(0o755)
    assert not _has_package(str(program)) and _has_package(sys.executable)


def test_a_daemon_that_somebody_has_chosen_stays(spark: SparkSession) -> None:
    conf = spark.sparkContext._jsc.sc().env().conf()
    before = conf.get("spark.python.daemon.module", "")
    try:
        conf.set("spark.python.daemon.module", "another.daemon")
        preload_workers(spark)
        assert conf.get("spark.python.daemon.module") == "another.daemon"
    finally:
        conf.remove("spark.python.daemon.module")
        if before:
            conf.set("spark.python.daemon.module", before)


@pytest.mark.nightly
def test_spark_fetches_the_pinned_jars_by_itself(tmp_path: Path) -> None:
    """In a process of its own: the resolver runs when a JVM starts."""
    program = f"""
from pyspark.sql import SparkSession
from flinkish_spark.bridge.session import configure_spark_with_packages
builder = SparkSession.builder.master("local[2]").config(map={{
    "spark.jars.ivy": {str(BUILD / "ivy")!r}, "spark.ui.enabled": "false",
    "spark.sql.warehouse.dir": {str(tmp_path / "warehouse")!r},
}})
spark = configure_spark_with_packages(builder).getOrCreate()
spark.range(10).write.format("delta").save({str(tmp_path / "table")!r})
kafka = spark.readStream.format("kafka").option("subscribe", "t")
kafka.option("kafka.bootstrap.servers", "127.0.0.1:1").load()
print("rows:", spark.read.format("delta").load({str(tmp_path / "table")!r}).count())
spark.stop()
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.stdout.strip().endswith("rows: 10"), done.stderr[-2000:]
