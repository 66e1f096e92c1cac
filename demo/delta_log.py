"""A Delta table's log and rows, read without Spark: as the audit of the package reads them."""

from __future__ import annotations

from flinkish_spark.audit.outputs import DeltaLog, Table, TableVersion

__all__ = ["DeltaLog", "Table", "TableVersion"]
