"""Delta's own transactions and its errors, opened up (py4j only); files of a table.

Staging lets Delta check schema and partitioning, write the Parquet files and collect their statistics, and
then keeps the actions instead of committing them. Committing opens a new transaction with those actions and
SetTransaction(appId, version), Delta's idempotency marker (Delta protocol, "Transaction Identifiers").
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError
from pyspark.errors.exceptions.base import PySparkException
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from flinkish_spark.bridge.session import active_session, has_class, jvm
from flinkish_spark.connectors.delta.table import (
    OverwritePartitions,
    TableInfo,
    mode_from_json,
    why_not_as_files,
)
from flinkish_spark.core.errors import raise_translated

Method = TypeVar("Method", bound=Callable[..., Any])


class DeltaRefused(Exception):
    """Delta refused; the message is Delta's own, without the stack."""


class DeltaViolated(DeltaRefused):
    """A row breaks a rule of the table; the message names both."""


class DeltaConflict(Exception):
    """Another writer was faster; the same call may be repeated."""


#: PySpark turns the exceptions that it knows into its own; Delta's refusals are among them.
FROM_THE_JVM = (Py4JJavaError, CapturedException, PySparkException)
_CONFLICTS = (
    "ConcurrentTransactionException",
    "MetadataChangedException",
    "ProtocolChangedException",
    "ConcurrentAppendException",
    "ConcurrentWriteException",
    "ConcurrentDeleteReadException",
    "ConcurrentDeleteDeleteException",
    "ConcurrentModificationException",
)
#: Starts the message of a check of ours in a task; what follows says which rule and which row.
VIOLATION_MARKER = "[FLINKISH_DELTA_RULE]"
#: Conditions of an error about a path that holds no table.
NO_TABLE = (
    "DELTA_TABLE_ONLY_OPERATION",
    "DELTA_MISSING_DELTA_TABLE",
    "DELTA_TABLE_NOT_FOUND",
    "DELTA_PATH_DOES_NOT_EXIST",
    "PATH_NOT_FOUND",
)
_VIOLATIONS = ("DeltaInvariantViolationException", "InvariantViolationException")
#: Delta's own that are no refusals: a file or a disk that is not as it should be.
_FAILURES = ("DeltaIOException", "DeltaFileNotFoundException", "DeltaChecksumException")
_MOST_CAUSES = 12


def translated(error: Exception) -> Exception:
    """Return one of the exceptions above for one of :data:`FROM_THE_JVM`, or the same if none fits."""
    # The same is what a full disk or a failed task comes to; `raise_translated` raises it.
    causes = list(_causes(error))
    for _, message in causes:
        if VIOLATION_MARKER in message:
            return DeltaViolated(message.split(VIOLATION_MARKER, 1)[1].split("SQLSTATE", 1)[0].strip()[:2000])
    for name, message in causes:
        if name in _VIOLATIONS:
            return DeltaViolated(message[:2000].strip())
    for name, message in causes:
        if any(conflict in name for conflict in _CONFLICTS):
            return DeltaConflict(f"{name}: {message[:500]}")
    name, message = causes[0]
    if "AnalysisException" in name or (name.startswith("Delta") and name not in _FAILURES):
        return DeltaRefused(message[:2000])
    return error


def condition_of(error: Exception) -> str:
    getter = getattr(error, "getCondition", None)
    return str(getter() or "") if getter is not None else ""


def _causes(error: Exception) -> list[tuple[str, str]]:
    """Return class and message of an exception and of all that caused it."""
    java: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    if java is None:
        return [(type(error).__name__, str(error).split("\n\tat ")[0])]
    found: list[tuple[str, str]] = []
    # A chain of Java's, too, can come back to where it was.
    while java is not None and len(found) < _MOST_CAUSES:
        message = str(java.getMessage()).split("\n\tat ")[0]
        found.append((str(java.getClass().getSimpleName()), message))
        java = java.getCause()
    return found


class NotAsFiles(Exception):
    """Staged files cannot be named in the table as it is now; their rows may still fit."""


def _in_session(method: Method) -> Method:
    """Return a method during which Delta finds the session."""

    # Where Delta reads the checkpoint of a log it asks the thread for its session, and threads of a
    # coordinator or of a recovery have none.
    @functools.wraps(method)
    def run(self: DeltaTables, *given: Any, **named: Any) -> Any:
        with active_session(self._spark):
            return method(self, *given, **named)

    return cast("Method", run)


class DeltaTables:
    """Stage and commit; one per process, used from the epoch writer and the coordinator."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._jvm = jvm(spark)
        self._session = spark._jsparkSession
        self._delta = self._jvm.org.apache.spark.sql.delta
        self._none = self._jvm.scala.Option.empty()

    def stage(
        self,
        frame: DataFrame,
        path: str,
        partition_by: Sequence[str],
        options: Mapping[str, str],
        aligned: Callable[[TableInfo | None], DataFrame | None],
    ) -> dict[str, Any] | None:
        """Write `frame`'s files below the table's path; nothing enters its log."""
        try:
            log = self._log(path)
            transaction = log.startTransaction()
            fitting = aligned(self._info(transaction))
            if fitting is None:
                return None
            write = self._write_command(log, fitting, partition_by, options)
            actions = self._to_list(write.write(transaction, self._session, self._none, False))
            return {
                "actions": [json.loads(a.json()) for a in actions],
                "metadata": json.loads(transaction.metadata().json()),
                "protocol": json.loads(transaction.protocol().json()),
            }
        except FROM_THE_JVM as error:
            raise_translated(translated(error), error)

    @_in_session
    def check_schema(
        self, schema: StructType, path: str, partition_by: Sequence[str], options: Mapping[str, str]
    ) -> None:
        """Let Delta compare a schema with the table's, as a write would; nothing is written."""
        try:
            log = self._log(path)
            empty = self._spark.createDataFrame([], schema)
            self._write_command(log, empty, partition_by, options).updateMetadata(
                self._session,
                log.startTransaction(),
                empty._jdf.schema(),
                self._seq(list(partition_by)),
                self._map({}),
                False,
                False,
            )
        except FROM_THE_JVM as error:
            raise_translated(translated(error), error)

    def _write_command(
        self, log: Any, frame: DataFrame, partition_by: Sequence[str], options: Mapping[str, str]
    ) -> Any:
        delta_options = self._delta.DeltaOptions(
            self._map(dict(options)), self._session.sessionState().conf()
        )
        return self._delta.commands.WriteIntoDelta(
            log,
            self._jvm.org.apache.spark.sql.SaveMode.Append,
            delta_options,
            self._seq(list(partition_by)),
            self._map({}),
            frame._jdf,
            self._none,
            self._none,
            False,
        )

    @_in_session
    def info(self, path: str) -> TableInfo | None:
        return self._info(self._log(path).startTransaction())

    @_in_session
    def committed_version(self, path: str, app_id: str) -> int:
        transaction = self._log(path).startTransaction()
        return self._seen(transaction, app_id)

    def recent(self, path: str, limit: int) -> Iterator[dict[str, Any]]:
        """Yield the newest commits, newest first, as `DeltaHistory.recent` does."""
        # Reads one file of the log for each, when it is asked for; no Spark job. Ends early where such a file
        # is not in its place, or does not begin with what Delta says about the commit.
        try:
            log = self._log(path)
            newest, conf = int(log.startTransaction().readVersion()), log.newDeltaHadoopConf()
            for version in range(newest, max(-1, newest - limit), -1):
                file = self._jvm.org.apache.hadoop.fs.Path(log.logPath(), f"{version:020d}.json")
                if not file.getFileSystem(conf).exists(file):
                    return
                lines = log.store().readAsIterator(file, conf)
                try:
                    first = json.loads(lines.next()).get("commitInfo") if lines.hasNext() else None
                finally:
                    lines.close()
                if first is None:
                    return
                yield {
                    "version": version,
                    "operation": first.get("operation"),
                    "userMetadata": first.get("userMetadata"),
                }
        except FROM_THE_JVM as error:
            raise_translated(translated(error), error)

    @_in_session
    def commit(
        self,
        path: str,
        staged: Sequence[Mapping[str, Any]],
        app_id: str,
        version: int,
        note: str,
        check: Callable[[int], None],
    ) -> int | None:
        """Commit several staged sets as one table version; return it, or None if it was there."""
        try:
            transaction = self._log(path).startTransaction()
            seen = self._seen(transaction, app_id)
            # Within the transaction: a commit of the same id by somebody else in between is a conflict.
            check(seen)
            if seen >= version:
                return None
            if transaction.readVersion() < 0:
                self._make_table(transaction, staged)
            else:
                self._check_metadata(transaction, staged)
            adding = [self._action(a) for s in staged for a in s["actions"]]
            replaces = isinstance(mode_from_json(staged[0]["mode"]), OverwritePartitions)
            removing = self._replaced(transaction, adding) if replaces else []
            now = self._jvm.java.lang.System.currentTimeMillis()
            marker = self._delta.actions.SetTransaction(app_id, version, self._jvm.scala.Some(now))
            output = self._jvm.org.apache.spark.sql.streaming.OutputMode
            operation = getattr(self._delta, "DeltaOperations$StreamingUpdate")(
                output.Complete() if replaces else output.Append(),
                app_id,
                version,
                self._jvm.scala.Some(note),
            )
            return int(transaction.commit(self._seq([marker, *removing, *adding]), operation))
        except FROM_THE_JVM as error:
            raise_translated(translated(error), error)

    def _make_table(self, transaction: Any, staged: Sequence[Mapping[str, Any]]) -> None:
        first = staged[0]["metadata"]
        for other in staged[1:]:
            if TableInfo.from_log(other["metadata"]) != TableInfo.from_log(first):
                raise NotAsFiles("the files were staged for different tables")
        transaction.updateMetadataForNewTable(self._action(first))

    def _check_metadata(self, transaction: Any, staged: Sequence[Mapping[str, Any]]) -> None:
        current = json.loads(transaction.metadata().json())
        for part in staged:
            names = [str(field["name"]) for field in part["schema"]["fields"]]
            why = why_not_as_files(part["metadata"], current, names)
            if why:
                raise NotAsFiles(why)

    def _replaced(self, transaction: Any, adding: Sequence[Any]) -> list[Any]:
        # Having asked for them, other writers conflict.
        files = transaction.filterFiles(self._seq(list(adding)))
        return [file.remove() for file in self._to_list(files)]

    def _action(self, stored: Mapping[str, Any]) -> Any:
        return self._delta.actions.Action.fromJson(json.dumps(stored))

    @staticmethod
    def _info(transaction: Any) -> TableInfo | None:
        if transaction.readVersion() < 0:
            return None
        return TableInfo.from_log(json.loads(transaction.metadata().json()))

    def _seen(self, transaction: Any, app_id: str) -> int:
        if transaction.readVersion() < 0:
            return -1
        checksum = transaction.snapshot().checksumOpt()
        if checksum.isDefined() and checksum.get().setTransactions().isDefined():
            # Four times faster than txnVersion(), which reconstructs the state; the id must be
            # registered as read, so that a concurrent commit under the same id conflicts.
            transaction.readTxn().addOne(app_id)
            for known in self._to_list(checksum.get().setTransactions().get()):
                if known.appId() == app_id:
                    return int(known.version())
            return -1
        return int(transaction.txnVersion(app_id))

    def _log(self, path: str) -> Any:
        log = self._delta.DeltaLog.forTable(self._session, path)
        log.update(False, self._none, self._none)
        return log

    def _seq(self, values: Sequence[Any]) -> Any:
        java = self._jvm.java.util.ArrayList()
        for value in values:
            java.add(value)
        return self._jvm.org.apache.spark.api.python.PythonUtils.toSeq(java)

    def _map(self, values: Mapping[str, str]) -> Any:
        java = self._jvm.java.util.HashMap()
        for key, value in values.items():
            java.put(key, value)
        return self._jvm.org.apache.spark.api.python.PythonUtils.toScalaMap(java)

    @staticmethod
    def _to_list(values: Any) -> list[Any]:
        iterator, found = values.iterator(), []
        while iterator.hasNext():
            found.append(iterator.next())
        return found


_INTERNALS = (
    "org.apache.spark.sql.delta.DeltaLog",
    "org.apache.spark.sql.delta.commands.WriteIntoDelta",
    "org.apache.spark.sql.delta.actions.SetTransaction",
)


def has_native_delta(spark: SparkSession) -> bool:
    return getattr(spark, "_jvm", None) is not None and all(has_class(spark, name) for name in _INTERNALS)


def has_delta_format(spark: SparkSession) -> bool:
    """Say if ``format("delta")`` means something, whoever provides it."""
    if getattr(spark, "_jvm", None) is None:
        # Nothing can be looked up; the first question about a table will tell.
        return True
    try:
        sources = jvm(spark).org.apache.spark.sql.execution.datasources.DataSource
        sources.lookupDataSource("delta", spark._jsparkSession.sessionState().conf())
    except FROM_THE_JVM:
        return False
    return True


_GLOB = re.compile(r"([{}\[\]*?\\])")


class TableFiles(Protocol):
    """The file system below a table, as a sink needs it; paths are absolute or URIs."""

    def missing(self, paths: Mapping[str, int | None]) -> list[str]:
        """Return those that are not there with the size in bytes that is given, if one is."""

    def sizes(self, folder: str) -> dict[str, int]: ...

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder; empty if it is not there."""

    def delete(self, folder: str) -> None: ...


def files_of(spark: SparkSession) -> TableFiles:
    return PublicFiles(spark) if getattr(spark, "_jvm", None) is None else HadoopFiles(spark)


class HadoopFiles:
    """By Hadoop's own client, as Spark has it configured."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._path = spark._jvm.org.apache.hadoop.fs.Path  # type: ignore[union-attr]

    def missing(self, paths: Mapping[str, int | None]) -> list[str]:
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
        return {
            str(one.getPath().getName()): int(one.getLen())
            for one in self._list(folder)
            if one.isFile() and not str(one.getPath().getName()).startswith(("_", "."))
        }

    def folders(self, folder: str) -> list[str]:
        return [str(one.getPath().getName()) for one in self._list(folder) if one.isDirectory()]

    def delete(self, folder: str) -> None:
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
        return self._sizes([folder]) if self._is_there(folder) else {}

    def _sizes(self, paths: Sequence[str]) -> dict[str, int]:
        if not paths:
            return {}
        reader = self._spark.read.format("binaryFile")
        listed = reader.load([escaped(path) for path in paths]).select("path", "length")
        return {unquote(str(row.path)).rsplit("/", 1)[-1]: int(row.length) for row in listed.collect()}

    def folders(self, folder: str) -> list[str]:
        if not self._is_there(folder):
            return []
        reader = self._spark.read.format("binaryFile").option("recursiveFileLookup", "true")
        parts = F.split(F.col("path"), "/")
        name = reader.load(escaped(folder)).where("length > 0").select(F.element_at(parts, -2).alias("name"))
        return [str(row.name) for row in name.distinct().collect()]

    def delete(self, folder: str) -> None:
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
