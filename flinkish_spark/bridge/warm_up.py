"""What a first micro-batch would wait for, begun beside the checks in front of the start.

Spark starts Python with the first task that needs it, and unpacks and loads RocksDB with the first task that
has state: a second or two in a new session, while the processors have little to do before. In a session of
one process both can be had early. Nothing depends on it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flinkish_spark.bridge.session import jvm
from flinkish_spark.spans import span

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

LOG = logging.getLogger(__name__)
#: In which it was done, or has begun.
_WARMED: weakref.WeakSet[SparkContext] = weakref.WeakSet()


def is_cold(spark: SparkSession) -> bool:
    """Whether tasks run in this session's own JVM, and nobody has warmed it up; afterwards somebody has."""
    if getattr(spark, "_jvm", None) is None:
        return False
    context = spark.sparkContext
    master = context.master or ""
    is_local = master == "local" or master.startswith("local[")
    if context in _WARMED or not is_local:
        return False
    _WARMED.add(context)
    return True


def warm_up(spark: SparkSession) -> None:
    """Run a task in Python that does nothing, and load RocksDB; never raises."""
    try:
        with span("Python's workers to be started, beside the start"):
            rows = spark.range(0, 1, 1, 1).mapInArrow(_unchanged, "id BIGINT")
            rows._jdf.queryExecution().toRdd().count()
        with span("RocksDB to be loaded, beside the start"):
            jvm(spark).org.rocksdb.RocksDB.loadLibrary()
    except Exception as error:
        # Whatever it is, the first micro-batch says it better.
        LOG.debug("warming up failed: %s", error)


def _unchanged(batches: Iterator[Any]) -> Iterator[Any]:
    return batches
