"""Delta through its public interfaces: staged rows enter a table by one append, overwrite or MERGE.

Every commit carries Delta's own marker (`txnAppId`, `txnVersion`), which is the one that
`flinkish_spark/bridge/delta.py` writes, too: Delta skips a write whose marker it has seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from flinkish_spark.bridge.delta_alignment import aligned_columns
from flinkish_spark.bridge.delta_errors import (
    FROM_THE_JVM,
    NO_TABLE,
    DeltaConflict,
    DeltaRefused,
    condition_of,
    translated,
)
from flinkish_spark.bridge.delta_staged_rows import BATCH, DELETED, ORDER, read_staged
from flinkish_spark.bridge.session_settings import SETTINGS, settings_of
from flinkish_spark.errors import raise_translated
from flinkish_spark.runtime.columns import quoted
from flinkish_spark.sinks.delta_modes import (
    Append,
    OverwritePartitions,
    SchemaEvolution,
    Upsert,
    WriteMode,
    mode_from_json,
    stored_fields,
)
from flinkish_spark.sinks.delta_table import TableInfo

_CONF = "spark.databricks.delta."
_VIEW = "flinkish_staged"


class DeltaRows:
    """Tables as every Spark with Delta has them, also without a JVM of its own.

    Parameters
    ----------
    spark
        A session with Delta.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._own: SparkSession | None = None

    def info(self, path: str) -> TableInfo | None:
        """Return the table as it is now; None if there is none."""
        try:
            detail = self._spark.sql(f"DESCRIBE DETAIL {table_name(path)}").collect()[0]
            if detail.format != "delta":
                return None
            schema = json.loads(self._spark.read.format("delta").load(path).schema.json())
            return TableInfo(
                tuple(schema["fields"]), tuple(detail.partitionColumns), dict(detail.properties or {})
            )
        except FROM_THE_JVM as error:
            if condition_of(error) in NO_TABLE:
                return None
            raise_translated(translated(error), error)

    def commit(
        self,
        path: str,
        staged: Sequence[Mapping[str, Any]],
        app_id: str,
        version: int,
        note: str,
        info: TableInfo | None,
    ) -> None:
        """Write the rows of several staged sets as one table version, unless the marker is there.

        Parameters
        ----------
        info
            The table as it is now; None if there is none.

        Raises
        ------
        DeltaConflict
            Another writer was faster; repeat the call.
        DeltaRefused
            The table does not take these rows.
        """
        mode = mode_from_json(staged[0].get("mode"))
        evolution = SchemaEvolution(staged[0].get("schema_evolution", "NONE"))
        marker = {"txnAppId": app_id, "txnVersion": str(version), "userMetadata": note}
        try:
            rows = read_staged(self._session(), staged)
            if isinstance(mode, Upsert):
                newest = _newest_per_key(rows, mode)
                if info is not None:
                    self._merge(
                        path, info, _aligned(newest, mode, info, keep_control=True), mode, evolution, marker
                    )
                    return
                rows = newest.where(~F.col(DELETED))
            self._write(path, info, _aligned(rows, mode, info), mode, evolution, staged[0], marker)
        except FROM_THE_JVM as error:
            if "PATH_EXISTS" in condition_of(error) or "ALREADY_EXISTS" in condition_of(error):
                raise DeltaConflict("somebody made the table at the same moment") from error
            raise_translated(translated(error), error)

    def interrupt(self) -> None:
        """Let the Spark jobs of a commit that another thread is in fail."""
        if self._own is not None:
            # Nobody else runs anything in it.
            self._own.interruptAll()

    def _write(
        self,
        path: str,
        info: TableInfo | None,
        rows: DataFrame,
        mode: WriteMode,
        evolution: SchemaEvolution,
        first: Mapping[str, Any],
        marker: Mapping[str, str],
    ) -> None:
        writer = rows.write.format("delta").options(**first.get("options", {})).options(**marker)
        if info is None:
            partition_by = first.get("partition_by", ())
            writer = writer.partitionBy(*partition_by) if partition_by else writer
            # A table that somebody makes meanwhile may hold rows that these would have to replace.
            writer.mode("append" if isinstance(mode, Append) else "error").save(path)
            return
        if evolution is not SchemaEvolution.NONE:
            writer = writer.option("mergeSchema", "true")
        if isinstance(mode, OverwritePartitions):
            writer.option("partitionOverwriteMode", "dynamic").mode("overwrite").save(path)
        else:
            writer.mode("append").save(path)

    def _merge(
        self,
        path: str,
        info: TableInfo,
        rows: DataFrame,
        mode: Upsert,
        evolution: SchemaEvolution,
        marker: Mapping[str, str],
    ) -> None:
        session = self._session()
        session.conf.set(f"{_CONF}write.txnAppId", marker["txnAppId"])
        session.conf.set(f"{_CONF}write.txnVersion", marker["txnVersion"])
        session.conf.set(f"{_CONF}commitInfo.userMetadata", marker["userMetadata"])
        rows.createOrReplaceTempView(_VIEW)
        names = stored_fields(mode, [n for n in rows.columns if n not in (BATCH, ORDER, DELETED)])
        # A table without the column has no sequence to compare with; the MERGE adds it.
        by_sequence = mode.sequence_by in names and info.has_column(str(mode.sequence_by))
        text = merge_statement(path, mode, names, evolution, by_sequence=by_sequence)
        session.sql(text).collect()

    def _session(self) -> SparkSession:
        """Return a session of our own: settings of a commit must not get into what others write."""
        if self._own is None:
            clone: Callable[[], SparkSession] | None = getattr(self._spark, "cloneSession", None)
            self._own = clone() if clone is not None else self._spark.newSession()
        # A new session has the settings that Spark was started with, not those made since.
        wanted, there = SETTINGS.all(self._spark), settings_of(self._own)
        for name in wanted.keys() | there.keys():
            if wanted.get(name) == there.get(name) or not self._own.conf.isModifiable(name):
                continue
            if name in wanted:
                self._own.conf.set(name, wanted[name])
            else:
                self._own.conf.unset(name)
        return self._own


def table_name(path: str) -> str:
    """Return a path as SQL names the table there."""
    return f"delta.{quoted(path)}"


def merge_statement(
    path: str, mode: Upsert, names: Sequence[str], evolution: SchemaEvolution, *, by_sequence: bool
) -> str:
    """Return the MERGE of :data:`_VIEW`, which has one row per key, into a table.

    Parameters
    ----------
    by_sequence
        Whether rows of the table that are newer stay.

    Examples
    --------
    >>> names = ["id", "v"]
    >>> print(merge_statement("/t", Upsert(("id",)), names, SchemaEvolution.NONE, by_sequence=False))
    MERGE INTO delta.`/t` AS t USING flinkish_staged AS s ON t.`id` = s.`id`
    WHEN MATCHED AND s.`_fs_deleted` THEN DELETE
    WHEN MATCHED THEN UPDATE SET `v` = s.`v`
    WHEN NOT MATCHED AND NOT s.`_fs_deleted` THEN INSERT (`id`, `v`) VALUES (s.`id`, s.`v`)
    """
    keys = [quoted(key) for key in mode.keys]
    others = [quoted(name) for name in names if name not in mode.keys]
    newer = ""
    if mode.sequence_by is not None and by_sequence:
        at = quoted(mode.sequence_by)
        newer = f" AND (t.{at} IS NULL OR s.{at} >= t.{at})"
    every = [quoted(name) for name in names]
    evolving = "" if evolution is SchemaEvolution.NONE else " WITH SCHEMA EVOLUTION"
    changed = ", ".join(f"{name} = s.{name}" for name in others or keys)
    lines = [
        f"MERGE{evolving} INTO {table_name(path)} AS t USING {_VIEW} AS s "
        f"ON {' AND '.join(f't.{key} = s.{key}' for key in keys)}",
        f"WHEN MATCHED AND s.{quoted(DELETED)}{newer} THEN DELETE",
        f"WHEN MATCHED{newer} THEN UPDATE SET {changed}",
        f"WHEN NOT MATCHED AND NOT s.{quoted(DELETED)} THEN INSERT ({', '.join(every)}) "
        f"VALUES ({', '.join(f's.{name}' for name in every)})",
    ]
    return "\n".join(lines)


def _newest_per_key(rows: DataFrame, mode: Upsert) -> DataFrame:
    order = [F.col(BATCH).desc(), F.col(ORDER).desc()]
    if mode.sequence_by is not None:
        order.insert(0, F.col(quoted(mode.sequence_by)).desc_nulls_last())
    window = Window.partitionBy(*[F.col(quoted(key)) for key in mode.keys]).orderBy(*order)
    place = "_fs_place"
    return rows.withColumn(place, F.row_number().over(window)).where(F.col(place) == 1).drop(place)


def _aligned(
    rows: DataFrame, mode: WriteMode, info: TableInfo | None, *, keep_control: bool = False
) -> DataFrame:
    """Return the stored columns; those that are narrower than the table's get the table's type."""
    names = stored_fields(mode, [n for n in rows.columns if n not in (BATCH, ORDER, DELETED)])
    control = [F.col(DELETED)] if keep_control else []
    return rows.select(*aligned_columns(rows, names, info), *control)


__all__ = ["DeltaConflict", "DeltaRefused", "DeltaRows", "merge_statement", "table_name"]
