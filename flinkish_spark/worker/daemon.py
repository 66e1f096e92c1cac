"""PySpark's daemon, with what tasks of this package import in it already.

Spark forks its Python workers off a daemon that has imported nothing: each would import pandas, pyarrow and
this package anew, more than a second of CPU. Spark is told of this one by ``spark.python.daemon.module``
(:mod:`flinkish_spark.bridge.session` does so for local masters); elsewhere it is right wherever this package
is installed in the executors' Python, since the daemon starts before Spark has fetched what ``--py-files``
names.

A fork has only the thread that forked. Of what is imported here OpenBLAS, Arrow and its allocators have
threads; each of them starts its own anew in a fork.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import sys
import zipimport
from socket import socket
from threading import Thread
from types import FrameType

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


# PySpark's daemon collects garbage after every task: 50 ms of CPU with pandas, pyarrow and a Kafka client
# loaded. Modules do not become garbage, so they are taken out of what is looked at.

#: The process in which it was done; a fork has to do it for itself.
_frozen_in: int | None = None


def freeze_modules() -> None:
    """Take what is loaded by now out of garbage collection, once in a process; every task calls it."""
    global _frozen_in
    if _frozen_in != os.getpid():
        gc.collect()
        gc.freeze()
        _frozen_in = os.getpid()
        end_with_the_task()


# Spark kills the worker of a task that was cancelled if the task goes on for two seconds. A task whose thread
# is just reading from the worker or writing to it ends at once, since Java closes what an interrupted thread
# works on; then nobody kills the worker, and a function of the user's in it would go on beside the next
# attempt. The worker itself can see it: the other end of its connection is closed.
_ENDED = 1
#: The other side sends nothing more.
_READ_HANGUP = getattr(select, "POLLRDHUP", select.POLLHUP)


def end_with_the_task() -> None:
    """Let this worker end when Spark has closed its connection; called once in a process, within a task.

    Without PySpark's daemon (on Windows) there is no such connection, and nothing is done.
    """
    # PySpark's daemon has the connection in the frame that runs the worker.
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code != daemon.worker.__code__:
        frame = frame.f_back
    found = None if frame is None else frame.f_locals.get("sock")
    if isinstance(found, socket):
        Thread(target=_watch, args=(found.fileno(),), name="flinkish-task-end", daemon=True).start()


def _watch(descriptor: int) -> None:
    poll = select.poll()
    # Data that comes is none of our business; errors and a hang-up are always told.
    poll.register(descriptor, _READ_HANGUP)
    poll.poll()
    # No exit that runs anything: whatever the task does is to stop here.
    os._exit(_ENDED)


if __name__ == "__main__":
    preload()
    daemon.manager()
