"""Spark's Python processes: how they start, how they talk to the JVM, and warm-up."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import weakref
from collections.abc import Iterator
from typing import Any

from pyspark import SparkContext
from pyspark.sql import SparkSession

from flinkish_spark.bridge import interpreter
from flinkish_spark.bridge.session import jvm, runs_tasks_itself
from flinkish_spark.core.clock import span

LOG = logging.getLogger(__name__)

#: A daemon that forks Python workers after the imports that they need.
PRELOADING_DAEMON = "flinkish_spark.worker.daemon"
#: Spark's setting for Unix sockets between the JVM and its Python processes.
UNIX_SOCKETS = "spark.python.unix.domain.socket.enabled"
_SOCKET_FOLDER = "spark.python.unix.domain.socket.dir"
#: Longest folder for them: an address has 104 bytes on macOS, of which Spark's names take 44.
_MOST_FOLDER_BYTES = 60
#: JVMs that are warmed up or warming up.
_WARMED: weakref.WeakSet[SparkContext] = weakref.WeakSet()


def preload_workers(spark: SparkSession) -> None:
    """Make Spark's Python processes load compiled modules; those of a local master import before they fork.

    They also use Unix sockets: over TCP the JVM's second message waits for the worker's acknowledgement of
    the first, which the kernel delays by 40 ms. What the user has chosen stays.
    """
    # Each function that is sent to Spark carries this environment. A host without the folder ignores it.
    environment, first = spark.sparkContext.environment, str(interpreter.FOLDER)
    entries = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if first not in entries:
        environment["PYTHONPATH"] = os.pathsep.join([first, *entries])
    if not runs_tasks_itself(spark):
        return
    # Spark reads these settings whenever it starts a Python task. Not by `SparkEnv`, which has the same: on
    # Spark 4.3 its methods have types of Protobuf that a default install lacks, and Py4J's thread dies.
    conf = spark.sparkContext._jsc.sc().conf()
    folder = conf.get(_SOCKET_FOLDER, jvm(spark).java.lang.System.getProperty("java.io.tmpdir"))
    if os.name != "nt" and len(os.fsencode(folder)) <= _MOST_FOLDER_BYTES:
        conf.setIfMissing(UNIX_SOCKETS, "true")
    # Even tasks of a local master may get this package by --py-files, which is too late for a daemon.
    if _has_package(spark.sparkContext.pythonExec):
        conf.setIfMissing("spark.python.daemon.module", PRELOADING_DAEMON)


@functools.cache
def _has_package(python: str) -> bool:
    """Return True if an interpreter finds this package without the paths that Spark adds for tasks."""
    look = "import importlib.util as util; raise SystemExit(util.find_spec('flinkish_spark') is None)"
    return subprocess.run([python, "-c", look], check=False, stderr=subprocess.DEVNULL).returncode == 0


def is_cold(spark: SparkSession) -> bool:
    """Return True, once per JVM, if tasks run in this session's JVM and it is not warmed up."""
    if not runs_tasks_itself(spark) or spark.sparkContext in _WARMED:
        return False
    _WARMED.add(spark.sparkContext)
    return True


def warm_up(spark: SparkSession) -> None:
    """Run an empty Python task, and load RocksDB; never raises."""
    try:
        with span("Python's workers to be started, beside the start"):
            rows = spark.range(0, 1, 1, 1).mapInArrow(_pass_through, "id BIGINT")
            rows._jdf.queryExecution().toRdd().count()
        with span("RocksDB to be loaded, beside the start"):
            jvm(spark).org.rocksdb.RocksDB.loadLibrary()
    except Exception as error:
        # The first micro-batch reports the same error better.
        LOG.debug("warming up failed: %s", error)


def _pass_through(batches: Iterator[Any]) -> Iterator[Any]:
    return batches
