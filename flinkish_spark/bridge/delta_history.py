"""Delta's history and its way back, through SQL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from pyspark.sql import SparkSession

from flinkish_spark.bridge.delta_errors import FROM_THE_JVM, NO_TABLE, DeltaRefused, condition_of, translated
from flinkish_spark.bridge.delta_files import files_of
from flinkish_spark.runtime.columns import quoted

_NOTE = "spark.databricks.delta.commitInfo.userMetadata"
_FIRST_PAGE = 100


class DeltaHistory:
    """Reads a table's commits and restores older versions.

    Parameters
    ----------
    spark
        A session with Delta's JARs and extension.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def commits(self, path: str) -> Iterator[dict[str, Any]]:
        """Yield the table's commits, newest first; nothing if there is no table.

        Each has `version`, `operation`, `operationParameters` and `userMetadata`. A long history is
        read in growing pages, so that whoever stops early has not waited for all of it.
        """
        read, page = 0, _FIRST_PAGE
        while True:
            rows = self.recent(path, page)
            yield from rows[read:]
            if len(rows) < page:
                return
            read, page = page, page * 10

    def recent(self, path: str, limit: int) -> list[dict[str, Any]]:
        """Return at most `limit` of the newest commits, newest first; none if there is no table."""
        try:
            return [row.asDict() for row in self._sql(f"DESCRIBE HISTORY {_quoted(path)} LIMIT {limit}")]
        except DeltaRefused as refused:
            cause = refused.__cause__
            if isinstance(cause, Exception) and condition_of(cause) in NO_TABLE:
                return []
            raise

    def newest(self, path: str) -> int:
        """Return the table's newest version; -1 if there is no table."""
        rows = self.recent(path, 1)
        return int(rows[0]["version"]) if rows else -1

    def missing_at(self, path: str, version: int) -> list[str]:
        """Return files of an older version that the newest no longer has and that are gone."""
        try:
            reader = self._spark.read.format("delta")
            older = set(reader.option("versionAsOf", version).load(path).inputFiles())
            gone = older - set(self._spark.read.format("delta").load(path).inputFiles())
            return files_of(self._spark).missing(dict.fromkeys(unquote(name) for name in sorted(gone)))
        except FROM_THE_JVM as error:
            raise translated(error) from error

    def restore(self, path: str, version: int, note: str) -> None:
        """Commit a version that holds what `version` held; `note` goes into its history.

        Raises
        ------
        DeltaConflict
            Another writer was faster; look at the history again.
        DeltaRefused
            Delta cannot restore that version.
        """
        self._sql(f"RESTORE TABLE {_quoted(path)} TO VERSION AS OF {version}", note)

    def delete_rows(self, path: str, note: str) -> None:
        """Commit a version without rows; raises as :meth:`restore`."""
        self._sql(f"DELETE FROM {_quoted(path)}", note)

    def _sql(self, text: str, note: str = "") -> list[Any]:
        # A session of its own: the note must not get into commits that others make meanwhile.
        session = self._spark.newSession()
        if note:
            session.conf.set(_NOTE, note)
        try:
            return session.sql(text).collect()
        except FROM_THE_JVM as error:
            raise translated(error) from error


def _quoted(path: str) -> str:
    return f"delta.{quoted(path)}"
