"""PySpark's daemon, with what tasks of this package import in it already.

Spark forks its Python workers off a daemon that has imported nothing of what they need, so each of them
imports pandas, pyarrow and this package anew: more than a second of CPU, for every worker that a job starts
and for every one that is started again after a minute without work. Here the daemon imports them once, and
a fork has them at once, in memory that all of them share.

Spark is told of it by ``spark.python.daemon.module``; :mod:`flinkish_spark.session` does so for local
masters. Elsewhere it is right wherever this package is installed in the executors' Python: the daemon starts
before Spark has fetched what ``--py-files`` names.

PySpark's own daemon imports nothing, since a fork has only the thread that forked. Of what is imported
here OpenBLAS, Arrow and its allocators have threads; each of them starts its own anew in a fork.
"""

from __future__ import annotations

import gc
import importlib
import sys
import zipimport

from pyspark import daemon

#: What tasks import, directly or not.
PRELOADED = (
    "pandas",
    "pyarrow.compute",
    "pyarrow.json",
    "pyspark.worker",
    "pyspark.sql.conversion",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.streaming.state",
    "flinkish_spark.runtime.keyed_operator",
    "flinkish_spark.runtime.lookup_rows",
    "flinkish_spark.runtime.row_functions",
    "flinkish_spark.runtime.time_stage",
    "flinkish_spark.sources.split_reader",
    "flinkish_spark.sinks.buffer",
    "flinkish_spark.sinks.python_tasks",
    "flinkish_spark.sinks.two_phase_tasks",
    "flinkish_spark.drop_in.rows",
    "flinkish_spark.drop_in.stream_writer",
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


if __name__ == "__main__":
    preload()
    daemon.manager()
