"""Delta's own transactions, opened up: write files now, commit them later (py4j only).

Staging lets Delta check schema and partitioning, write the Parquet files and collect their
statistics, and then keeps the actions instead of committing them. Committing opens a new
transaction with those actions and SetTransaction(appId, version), Delta's idempotency marker
(Delta protocol, "Transaction Identifiers").
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from flinkish_spark.bridge.delta_errors import FROM_THE_JVM, DeltaConflict, DeltaRefused, translated
from flinkish_spark.bridge.session import jvm
from flinkish_spark.errors import raise_translated
from flinkish_spark.sinks.delta_modes import OverwritePartitions, mode_from_json
from flinkish_spark.sinks.delta_table import TableInfo, why_not_as_files

__all__ = ["FROM_THE_JVM", "DeltaConflict", "DeltaRefused", "DeltaTables", "NotAsFiles", "translated"]


class NotAsFiles(Exception):
    """Staged files cannot be named in the table as it is now; their rows may still fit."""


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

    def stage(
        self,
        frame: DataFrame,
        path: str,
        partition_by: Sequence[str],
        options: Mapping[str, str],
        aligned: Callable[[TableInfo | None], DataFrame | None],
    ) -> dict[str, Any] | None:
        """Write `frame`'s files below the table's path; nothing enters its log.

        Parameters
        ----------
        aligned
            Given the table as the transaction sees it (None if there is none), returns `frame` as it is to be
            written; or None if this table cannot take files of it, and then nothing is written.

        Returns
        -------
        dict or None
            JSON values: `actions`, `metadata`, `protocol`, as Delta would have committed them.

        Raises
        ------
        DeltaRefused
            Schema or partitioning do not fit the table.
        """
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

    def version(self, path: str) -> int:
        """Return the table's newest version; -1 if there is no table."""
        return int(self._log(path).startTransaction().readVersion())

    def info(self, path: str) -> TableInfo | None:
        """Return the table as it is now; None if there is none."""
        return self._info(self._log(path).startTransaction())

    def committed_version(self, path: str, app_id: str) -> int:
        """Return the last version that `app_id` committed to the table; -1 if none."""
        transaction = self._log(path).startTransaction()
        return self._seen(transaction, app_id)

    def recent(self, path: str, limit: int) -> Iterator[dict[str, Any]]:
        """Yield at most `limit` of the newest commits, newest first, as `DeltaHistory.recent` does.

        Reads one file of the log for each, when it is asked for; no Spark job. Ends early where such a file
        is not in its place, or does not begin with what Delta says about the commit.
        """
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
                    "operationParameters": first.get("operationParameters"),
                    "userMetadata": first.get("userMetadata"),
                }
        except FROM_THE_JVM as error:
            raise_translated(translated(error), error)

    def commit(
        self,
        path: str,
        staged: Sequence[Mapping[str, Any]],
        app_id: str,
        version: int,
        note: str,
        check: Callable[[int], None],
    ) -> int | None:
        """Commit several staged sets as one table version.

        Parameters
        ----------
        note
            For the table's history.
        check
            Called with the last version that `app_id` committed, -1 if none, within the transaction: a commit
            of that id by somebody else in between is a conflict. What it raises passes.

        Returns
        -------
        int or None
            The table's new version; None if `app_id` had committed `version` (or a later one) before:
            nothing was done.

        Raises
        ------
        DeltaConflict
            Repeat the call.
        NotAsFiles
            The table changed so that the staged files no longer fit.
        DeltaRefused
            It refuses for another reason.
        """
        try:
            transaction = self._log(path).startTransaction()
            seen = self._seen(transaction, app_id)
            check(seen)
            if seen >= version:
                return None
            if transaction.readVersion() < 0:
                self._make_table(transaction, staged)
            else:
                self._check_metadata(transaction, staged)
            adding = [self._action(a) for s in staged for a in s["actions"]]
            replaces = isinstance(mode_from_json(staged[0].get("mode")), OverwritePartitions)
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
            why = why_not_as_files(part["metadata"], current, stored_names(part))
            if why:
                raise NotAsFiles(why)

    def _replaced(self, transaction: Any, adding: Sequence[Any]) -> list[Any]:
        """Return the removal of what the touched partitions hold; having asked, other writers conflict."""
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


def stored_names(staged: Mapping[str, Any]) -> list[str]:
    """Return the columns that a staged set writes; in older ones all that the table had."""
    if "schema" in staged:
        return [str(f["name"]) for f in staged["schema"]["fields"]]
    return [str(f["name"]) for f in TableInfo.from_log(staged["metadata"]).fields]
