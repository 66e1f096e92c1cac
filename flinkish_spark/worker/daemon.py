"""PySpark's daemon with the imports of this package's tasks preloaded.

Spark forks its Python workers from a daemon that has imported nothing, so each worker would import pandas,
pyarrow and this package itself, which takes more than a second of CPU. ``spark.python.daemon.module`` selects
this daemon (:mod:`flinkish_spark.bridge.session` sets it for local masters). On a cluster it needs this
package installed in the executors' Python, since the daemon starts before Spark has fetched ``--py-files``.

A fork has only the thread that forked. OpenBLAS, Arrow and its allocators have threads, which they start
again in a fork.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import sys
import zipimport
from collections.abc import Callable
from socket import socket
from threading import Thread
from types import FrameType

from pyspark import daemon

#: Modules that tasks import, directly or not.
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
    "flinkish_spark.cep.columnar_runner",
    "flinkish_spark.connectors.splits",
    "flinkish_spark.connectors.buffer",
    "flinkish_spark.connectors.kafka.writer",
    "flinkish_spark.connectors.two_phase",
    "flinkish_spark.connectors.kafka.format.reader",
    "flinkish_spark.connectors.kafka.format.sink",
)


def preload() -> None:
    """Import the modules and exclude them from garbage collection; forks inherit both."""
    for name in PRELOADED:
        importlib.import_module(name)
    # A worker begins with invalidate_caches(), which reads the directory of pyspark.zip once for each package
    # imported from it: a third of a second. Python recreates removed importers when it needs them.
    for path, importer in list(sys.path_importer_cache.items()):
        if isinstance(importer, zipimport.zipimporter):
            del sys.path_importer_cache[path]
    gc.collect()
    gc.freeze()


# PySpark's daemon collects garbage after every task: 50 ms of CPU with pandas, pyarrow and a Kafka client
# loaded. Modules do not become garbage, so they are excluded.

#: Process that has done it, and how often it has been asked to; a fork must do it again.
_frozen_in: int | None = None
_asked = 0


def freeze_modules() -> None:
    """Exclude loaded objects from garbage collection; every task calls this.

    The first tasks of a process load more, so it is done at the first, second, fourth, eighth and so on call:
    seldom enough that garbage in cycles, which stays when it is frozen, does not add up.
    """
    global _frozen_in, _asked
    if _frozen_in != os.getpid():
        _frozen_in, _asked = os.getpid(), 0
        end_with_the_task()
    _asked += 1
    if _asked.bit_count() == 1:
        gc.collect()
        gc.freeze()


# Spark kills the worker of a cancelled task if the task does not end within two seconds. But a task whose
# thread is reading from the worker or writing to it ends at once, since Java closes the socket of an
# interrupted thread; then Spark does not kill the worker, and the user's function would run beside the next
# attempt. So the worker itself watches for the closed connection.
_ENDED = 1
#: The peer has closed its side of the connection.
_READ_HANGUP = getattr(select, "POLLRDHUP", select.POLLHUP)


def end_with_the_task() -> None:
    """End this worker when Spark closes its connection; called once per process, within a task.

    Without PySpark's daemon (on Windows) there is no such connection, and nothing is done.
    """
    # PySpark's daemon holds the socket in the frame that runs the worker.
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code != daemon.worker.__code__:
        frame = frame.f_back
    found = None if frame is None else frame.f_locals.get("sock")
    if isinstance(found, socket):
        Thread(target=_watch, args=(found.fileno(),), name="flinkish-task-end", daemon=True).start()


def _watch(descriptor: int) -> None:
    poll = select.poll()
    # Ignore incoming data; errors and hang-ups are always reported.
    poll.register(descriptor, _READ_HANGUP)
    poll.poll()
    # Exit without running handlers: the task must stop here.
    os._exit(_ENDED)


def end_quietly(worker: Callable[[socket, bool], int]) -> Callable[[socket, bool], int]:
    """Return PySpark's function for one task, without the traceback of a worker whose task was cancelled.

    Over a Unix socket a write fails at once when Spark has closed the connection; over TCP it does not.
    """

    def run(sock: socket, authenticated: bool) -> int:
        try:
            return worker(sock, authenticated)
        except (BrokenPipeError, ConnectionResetError):
            # Only of Spark's own connection: an error of the user's function does not come this far.
            os._exit(_ENDED)

    return run


if __name__ == "__main__":
    preload()
    daemon.worker = end_quietly(daemon.worker)  # type: ignore[assignment]
    daemon.manager()
