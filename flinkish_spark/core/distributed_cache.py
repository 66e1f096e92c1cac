"""Files that a program has registered, as its functions find them; names as in Flink."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextvars import ContextVar

from pyspark import SparkFiles, TaskContext

#: Local property of a query of ours: where tasks find registered files, by name, below Spark's files.
CACHED_FILES_PROPERTY = "flinkish.cachedFiles"
#: In a harness: the files themselves.
CACHED_FILES_IN_HARNESS: ContextVar[Mapping[str, str] | None] = ContextVar(
    "CACHED_FILES_IN_HARNESS", default=None
)


class DistributedCache:
    """The files that `register_cached_file` has registered; given by a runtime context.

    Examples
    --------
    >>> from flinkish_spark import MapFunction
    >>> class Rate(MapFunction):
    ...     def open(self, context):
    ...         with open(context.get_distributed_cache().get_file("rates")) as lines:
    ...             self.rates = dict(line.split() for line in lines)
    ...     def map(self, order):
    ...         return order.user, float(self.rates[order.currency])
    """

    def __init__(self, uid: str, files: Mapping[str, str]) -> None:
        self._uid, self._files = uid, files

    def get_file(self, name: str) -> str:
        """Return the path of a registered file or folder on this host; it is for reading.

        Raises
        ------
        ValueError
            No file of that name is registered.
        FileNotFoundError
            Somebody has deleted it on this host.
        """
        if name not in self._files:
            known = ", ".join(repr(one) for one in self._files) or "none"
            raise ValueError(
                f"'{self._uid}' asks for the cached file {name!r:.200}, and there is {known}; register it: "
                "env.register_cached_file(path, name), in a harness ProgramHarness(cached_files={name: path})"
            )
        path = self._files[name]
        if not os.path.exists(path):
            raise FileNotFoundError(
                f"the cached file '{name}' of '{self._uid}' is not at {path} any more; Spark keeps its files "
                "in spark.local.dir, on a cluster in its workers' folders: do not delete files there"
            )
        return path


def find_cached_files(uid: str) -> DistributedCache:
    """Return the registered files that the current task, or a harness, has; none outside of both."""
    given = CACHED_FILES_IN_HARNESS.get()
    if given is not None:
        return DistributedCache(uid, given)
    task = TaskContext.get()
    told = None if task is None else task.getLocalProperty(CACHED_FILES_PROPERTY)
    shipped = {} if told is None else json.loads(told)
    return DistributedCache(uid, {name: SparkFiles.get(place) for name, place in shipped.items()})
