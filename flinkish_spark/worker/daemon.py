"""PySpark's daemon, with what tasks of this package import in it already."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import zipimport

from pyspark import daemon

# ----------------------------------------------------------------------------------------------------------
# PySpark's daemon, with what tasks of this package import in it already.
#
# Spark forks its Python workers off a daemon that has imported nothing of what they need, so each of them
# imports pandas, pyarrow and this package anew: more than a second of CPU, for every worker that a job
# starts and for every one that is started again after a minute without work. Here the daemon imports them
# once, and a fork has them at once, in memory that all of them share.
#
# Spark is told of it by ``spark.python.daemon.module``; :mod:`flinkish_spark.bridge.session` does so for
# local masters. Elsewhere it is right wherever this package is installed in the executors' Python: the
# daemon starts before Spark has fetched what ``--py-files`` names.
#
# PySpark's own daemon imports nothing, since a fork has only the thread that forked. Of what is imported
# here OpenBLAS, Arrow and its allocators have threads; each of them starts its own anew in a fork.


#: What tasks import, directly or not.
PRELOADED = (
    "pandas",
    "pyarrow.compute",
    "pyarrow.json",
    "pyspark.worker",
    "pyspark.sql.conversion",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.streaming.state",
    "flinkish_spark.worker.keyed_operator",
    "flinkish_spark.worker.functions",
    "flinkish_spark.connectors.splits",
    "flinkish_spark.connectors.buffer",
    "flinkish_spark.connectors.kafka.writer",
    "flinkish_spark.connectors.two_phase",
    "flinkish_spark.connectors.kafka.format.reader",
    "flinkish_spark.connectors.kafka.format.writer",
)


def preload() -> None:
    """Import it, and take it out of what garbage collections look at; forks inherit that."""
    for name in PRELOADED:
        importlib.import_module(name)
    # A worker begins with invalidate_caches(), which reads the directory of pyspark.zip once for each package
    # that was imported from it: a third of a second. Importers that are gone come again when they are needed.
    for path, importer in list(sys.path_importer_cache.items()):
        if isinstance(importer, zipimport.zipimporter):
            del sys.path_importer_cache[path]
    gc.collect()
    gc.freeze()


# ----------------------------------------------------------------------------------------------------------
# Keeps the pauses between the tasks of a Python worker short.
#
# PySpark's daemon collects garbage after every task. A worker that has pandas, pyarrow and a Kafka client
# loaded has hundreds of thousands of objects, and each of these collections looks at all of them: 50 ms of
# CPU for a task that may have taken 5. Modules do not become garbage, so they are taken out of what is
# looked at.


#: The process in which it was done; a fork has to do it for itself.
_frozen_in: int | None = None


def freeze_modules() -> None:
    """Take what is loaded by now out of garbage collection; does it once in a process.

    Called by every task of ours when its imports are done. What is alive then is still freed when
    nothing refers to it; only cycles among it would stay.
    """
    global _frozen_in
    if _frozen_in != os.getpid():
        gc.collect()
        gc.freeze()
        _frozen_in = os.getpid()


if __name__ == "__main__":
    preload()
    daemon.manager()
