"""The product's daemon, with what the functions of the jobs here import, too.

A life is short, and each of its Python workers would import these anew: more than half of what a worker uses
its processor for.
"""

from __future__ import annotations

from pyspark import daemon

from flinkish_spark.worker import daemon as python_daemon

#: What names what functions, sources and sinks of the jobs need.
_OF_THE_JOBS = (
    "psycopg",
    "tests.support.chained_jobs",
    "tests.crash.cluster_app",
    "tests.crash.event_time_app",
    "tests.crash.sources_app",
    "tests.support.two_phase_page",
)

if __name__ == "__main__":
    python_daemon.PRELOADED = (*python_daemon.PRELOADED, *_OF_THE_JOBS)
    python_daemon.preload()
    daemon.manager()
