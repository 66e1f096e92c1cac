"""Staged files: are they there, what is left over, away with it.

Through Hadoop where the session has a JVM, else through Spark's readers and writers, which is slower.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from flinkish_spark.bridge.delta_errors import FROM_THE_JVM, condition_of

_GLOB = re.compile(r"([{}\[\]*?\\])")


class TableFiles(Protocol):
    """What a sink asks of the file system below its table. Paths are absolute or URIs."""

    def missing(self, paths: Mapping[str, int | None]) -> list[str]:
        """Return those that are not there with the size in bytes that is given, if one is."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the data files of a folder with their sizes in bytes; empty if there is none."""
        ...

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder; empty if it is not there."""
        ...

    def delete(self, folder: str) -> None:
        """Delete a folder with all that is in it."""
        ...


def files_of(spark: SparkSession) -> TableFiles:
    """Return the way to the files that this session has."""
    return PublicFiles(spark) if getattr(spark, "_jvm", None) is None else HadoopFiles(spark)


class HadoopFiles:
    """By Hadoop's own client, as Spark has it configured."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._path = spark._jvm.org.apache.hadoop.fs.Path  # type: ignore[union-attr]

    def missing(self, paths: Mapping[str, int | None]) -> list[str]:
        """Return those that are not there with their size."""
        if not paths:
            return []
        system = self._system(next(iter(paths)))
        sizes = {path: self._size(system, path) for path in paths}
        return [p for p, size in paths.items() if sizes[p] is None or size not in (None, sizes[p])]

    def _size(self, system: Any, path: str) -> int | None:
        try:
            return int(system.getFileStatus(self._path(path)).getLen())
        except Py4JJavaError as error:
            if error.java_exception.getClass().getSimpleName() != "FileNotFoundException":
                raise
            return None

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the data files of a folder with their sizes in bytes."""
        return {
            str(one.getPath().getName()): int(one.getLen())
            for one in self._list(folder)
            if one.isFile() and not str(one.getPath().getName()).startswith(("_", "."))
        }

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder."""
        return [str(one.getPath().getName()) for one in self._list(folder) if one.isDirectory()]

    def delete(self, folder: str) -> None:
        """Delete a folder with all that is in it."""
        self._system(folder).delete(self._path(folder), True)

    def _list(self, folder: str) -> list[Any]:
        system = self._system(folder)
        return list(system.listStatus(self._path(folder))) if system.exists(self._path(folder)) else []

    def _system(self, path: str) -> Any:
        return self._path(path).getFileSystem(self._spark._jsparkSession.sessionState().newHadoopConf())


class PublicFiles:
    """By Spark's public interfaces alone, which cannot delete a folder but can empty it."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def missing(self, paths: Mapping[str, int | None]) -> list[str]:
        """Return those that are not there with their size; no two may have the same name."""
        found = list(paths) if self._are_there(list(paths)) else [p for p in paths if self._is_there(p)]
        sizes = self._sizes([path for path in found if paths[path] is not None])
        return [
            path
            for path, size in paths.items()
            if path not in found or size not in (None, sizes.get(path.rsplit("/", 1)[-1]))
        ]

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the data files of a folder with their sizes in bytes."""
        return self._sizes([folder]) if self._is_there(folder) else {}

    def _sizes(self, paths: Sequence[str]) -> dict[str, int]:
        """Return name and size of files, or of those in folders."""
        if not paths:
            return {}
        reader = self._spark.read.format("binaryFile")
        listed = reader.load([escaped(path) for path in paths]).select("path", "length")
        return {unquote(str(row.path)).rsplit("/", 1)[-1]: int(row.length) for row in listed.collect()}

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder that hold a file."""
        if not self._is_there(folder):
            return []
        reader = self._spark.read.format("binaryFile").option("recursiveFileLookup", "true")
        parts = F.split(F.col("path"), "/")
        name = reader.load(escaped(folder)).where("length > 0").select(F.element_at(parts, -2).alias("name"))
        return [str(row.name) for row in name.distinct().collect()]

    def delete(self, folder: str) -> None:
        """Empty a folder."""
        self._spark.createDataFrame([], "value STRING").write.mode("overwrite").text(folder)

    def _are_there(self, paths: Sequence[str]) -> bool:
        try:
            if paths:
                # Spark looks for the files when it is asked for the schema.
                _ = self._spark.read.format("binaryFile").load([escaped(path) for path in paths]).schema
            return True
        except FROM_THE_JVM as error:
            if condition_of(error) != "PATH_NOT_FOUND":
                raise
            return False

    def _is_there(self, path: str) -> bool:
        return self._are_there([path])


def escaped(path: str) -> str:
    """Return a path that Spark's readers do not take for a pattern."""
    return _GLOB.sub(r"\\\1", path)
