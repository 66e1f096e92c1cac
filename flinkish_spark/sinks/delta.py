"""The Delta sink: rows are staged per micro-batch and enter the table with the checkpoint.

One table version per checkpoint, however many micro-batches it has, marked with
SetTransaction(appId = job uuid and sink uid, version = checkpoint id): a repeated commit, by this
process or any other, changes nothing. See docs/delta-sink.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flinkish_spark.bridge import probe
from flinkish_spark.bridge.delta import DeltaTables
from flinkish_spark.bridge.delta_commits import DeltaCommits
from flinkish_spark.bridge.delta_files import files_of
from flinkish_spark.bridge.delta_history import DeltaHistory
from flinkish_spark.bridge.delta_probe import has_native_delta
from flinkish_spark.bridge.delta_rows import DeltaRows
from flinkish_spark.errors import EnvironmentFault
from flinkish_spark.sinks.base import Committer, Sink, SinkContext, SinkWriter
from flinkish_spark.sinks.delta_checks import check_sink
from flinkish_spark.sinks.delta_committing import DeltaCommitter
from flinkish_spark.sinks.delta_modes import (
    Append,
    DeltaWriter,
    OverwritePartitions,
    SchemaEvolution,
    Upsert,
)
from flinkish_spark.sinks.delta_sink_settings import DeltaSinkSettings
from flinkish_spark.sinks.delta_staging import CountedRows, DeltaStaging, RowsDifferError, StagingTools

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "Append",
    "CountedRows",
    "DeltaSink",
    "DeltaWriter",
    "OverwritePartitions",
    "RowsDifferError",
    "SchemaEvolution",
    "Upsert",
    "require_delta",
]


@dataclass(frozen=True)
class DeltaSink(DeltaSinkSettings, Sink):
    """Write to a Delta table, exactly once.

    Parameters
    ----------
    path
        Absolute path or URI of the table; created with the first checkpoint if it is missing.
    partition_by
        Partition columns.
    options
        Options of Delta's writer, such as ``{"maxRecordsPerFile": "100000"}``. Those that the other
        parameters stand for, and those of the marker, are refused.
    mode
        ``Append()``, ``Upsert(keys=...)`` or ``OverwritePartitions()``.
    schema_evolution
        What the stream may have that the table does not have yet. The table gets it with the first
        checkpoint that has rows.
    writer
        `DeltaWriter` or its word: ``"native"`` stages data files by Delta's own transactions,
        ``"portable"`` needs nothing but Delta's public interfaces, ``"auto"`` takes the first where it can.

    Raises
    ------
    ConfigError
        A path that is relative, an option that is refused, a value of another type.

    Examples
    --------
    >>> DeltaSink("/lake/totals", partition_by=("day",)).path
    '/lake/totals'
    >>> DeltaSink("/lake/users", mode=Upsert(keys=("id",), delete_when="op = 'D'")).mode.keys
    ('id',)
    """

    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Compare stream and table, mode and retention."""
        check_sink(self, spark, context, self._native(spark))

    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        """Return the staging half."""
        has_shim = getattr(spark, "_jvm", None) is not None and probe(spark).has_shim
        tools = StagingTools(self._native(spark), DeltaRows(spark), files_of(spark), has_shim=has_shim)
        return DeltaStaging(self, context, tools)

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Return the committing half."""
        commits = DeltaCommits.of(spark, native=self._native(spark))
        return DeltaCommitter(self, commits, DeltaHistory(spark), context)

    def _native(self, spark: SparkSession) -> DeltaTables | None:
        """Return Delta's transactions if this sink works with them."""
        if self.writer is DeltaWriter.PORTABLE:
            return None
        if has_native_delta(spark):
            return DeltaTables(spark)
        if self.writer is DeltaWriter.NATIVE:
            raise EnvironmentFault(
                "this Spark session does not let Delta's transactions be reached",
                why="it is a Spark Connect session, or its Delta is not the open-source one",
                what_to_do='give the DeltaSink writer="portable", or leave writer out',
            )
        return None


def require_delta(has_delta: bool) -> None:
    """Raise EnvironmentFault if the session was started without Delta's JARs."""
    if not has_delta:
        raise EnvironmentFault(
            "this Spark session has no Delta Lake",
            what_to_do="start the session with flinkish_spark.configure_spark_with_jars(...)",
        )
