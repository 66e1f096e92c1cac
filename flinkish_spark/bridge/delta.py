"""Delta's own transactions, opened up: write files now, commit them later (py4j only).

Staging lets Delta check schema and partitioning, write the Parquet files and collect their
statistics, and then keeps the actions instead of committing them. Committing opens a new
transaction with those actions and SetTransaction(appId, version), Delta's idempotency marker
(Delta protocol, "Transaction Identifiers").
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from flinkish_spark.bridge.session import jvm


class DeltaRefused(Exception):
    """Delta refused; the message is Delta's own, without the stack."""


class DeltaConflict(Exception):
    """Another writer was faster; the same call may be repeated."""


#: PySpark turns the exceptions that it knows into its own; Delta's refusals are among them.
FROM_THE_JVM = (Py4JJavaError, CapturedException)
_CONFLICTS = (
    "ConcurrentTransactionException",
    "MetadataChangedException",
    "ProtocolChangedException",
    "ConcurrentAppendException",
    "ConcurrentWriteException",
)


class DeltaTables:
    """Stage and commit; one per process, used from the epoch writer and the coordinator.

    Parameters
    ----------
    spark
        A session with Delta's JARs and extension.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._jvm = jvm(spark)
        self._session = spark._jsparkSession
        self._delta = self._jvm.org.apache.spark.sql.delta
        self._none = self._jvm.scala.Option.empty()
        self._logs: dict[str, Any] = {}

    def stage(
        self, frame: DataFrame, path: str, partition_by: Sequence[str], options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Write `frame`'s files below the table's path; nothing enters its log.

        Returns
        -------
        dict
            JSON values: `actions`, `metadata`, `protocol`, as Delta would have committed them.

        Raises
        ------
        DeltaRefused
            Schema or partitioning do not fit the table.
        """
        try:
            log = self._log(path)
            transaction = log.startTransaction()
            write = self._write_command(log, frame, partition_by, options)
            actions = self._to_list(write.write(transaction, self._session, self._none, False))
            return {
                "actions": [json.loads(a.json()) for a in actions],
                "metadata": json.loads(transaction.metadata().json()),
                "protocol": json.loads(transaction.protocol().json()),
            }
        except FROM_THE_JVM as error:
            raise translated(error) from error

    def check_schema(
        self, schema: StructType, path: str, partition_by: Sequence[str], options: Mapping[str, str]
    ) -> None:
        """Let Delta compare a schema with the table's, as a write would; nothing is written.

        Raises
        ------
        DeltaRefused
            Schema or partitioning do not fit the table.
        """
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
            raise translated(error) from error

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

    def version(self, path: str) -> int:
        """Return the table's newest version; -1 if there is no table."""
        return int(self._log(path).startTransaction().readVersion())

    def committed_version(self, path: str, app_id: str) -> int:
        """Return the last version that `app_id` committed to the table; -1 if none."""
        transaction = self._log(path).startTransaction()
        return self._seen(transaction, app_id)

    def missing_files(self, path: str, actions: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return staged files that are no longer there."""
        hadoop = self._jvm.org.apache.hadoop.fs.Path
        root = hadoop(path)
        file_system = root.getFileSystem(self._session.sessionState().newHadoopConf())
        missing = []
        for action in actions:
            if "add" in action:
                relative = hadoop(self._jvm.java.net.URI(action["add"]["path"]))
                if not file_system.exists(hadoop(root, relative)):
                    missing.append(str(action["add"]["path"]))
        return missing

    def commit(self, path: str, staged: Sequence[Mapping[str, Any]], app_id: str, version: int) -> bool:
        """Commit several staged sets as one table version.

        Returns
        -------
        bool
            False if `app_id` had committed `version` (or a later one) before: nothing was done.

        Raises
        ------
        DeltaConflict
            Repeat the call.
        DeltaRefused
            The table changed so that the staged files no longer fit.
        """
        try:
            transaction = self._log(path).startTransaction()
            if self._seen(transaction, app_id) >= version:
                return False
            from_json = self._delta.actions.Action.fromJson
            if transaction.readVersion() < 0:
                transaction.updateMetadataForNewTable(from_json(json.dumps(staged[0]["metadata"])))
            else:
                self._check_metadata(transaction, staged)
            now = self._jvm.java.lang.System.currentTimeMillis()
            marker = self._delta.actions.SetTransaction(app_id, version, self._jvm.scala.Some(now))
            actions = [marker] + [from_json(json.dumps(a)) for s in staged for a in s["actions"]]
            operation = getattr(self._delta, "DeltaOperations$StreamingUpdate")(
                self._jvm.org.apache.spark.sql.streaming.OutputMode.Append(), app_id, version, self._none
            )
            transaction.commit(self._seq(actions), operation)
            return True
        except FROM_THE_JVM as error:
            raise translated(error) from error

    def why_unfit(self, path: str, staged: Mapping[str, Any]) -> str:
        """Return why the table would refuse a staged set now; empty if it would take it."""
        transaction = self._log(path).startTransaction()
        if transaction.readVersion() < 0:
            return ""
        try:
            self._check_metadata(transaction, [staged])
        except DeltaRefused as refused:
            return str(refused)
        return ""

    def _check_metadata(self, transaction: Any, staged: Sequence[Mapping[str, Any]]) -> None:
        current = json.loads(transaction.metadata().json())["metaData"]
        have = {f["name"].lower(): f["type"] for f in json.loads(current["schemaString"])["fields"]}
        for part in staged:
            wanted = part["metadata"]["metaData"]
            if current.get("partitionColumns", []) != wanted.get("partitionColumns", []):
                raise DeltaRefused("the table's partitioning changed since the files were staged")
            for field in json.loads(wanted["schemaString"])["fields"]:
                if have.get(field["name"].lower()) != field["type"]:
                    raise DeltaRefused(
                        f"the table's column {field['name']} changed since the files were staged"
                    )

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


def translated(error: Exception) -> Exception:
    """Return one of the exceptions above for one of :data:`FROM_THE_JVM`, or the same if none fits."""
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    if java is None:
        return error
    name = str(java.getClass().getSimpleName())
    message = str(java.getMessage()).split("\n\tat ")[0]
    if any(conflict in name for conflict in _CONFLICTS):
        return DeltaConflict(f"{name}: {message[:500]}")
    if "AnalysisException" in name or name.startswith("Delta"):
        return DeltaRefused(message[:2000])
    return error
