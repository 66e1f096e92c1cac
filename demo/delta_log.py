"""A Delta table's log and rows, read without Spark: as the audit of the package reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pyarrow import parquet

from flinkish_spark.audit import outputs
from flinkish_spark.audit.outputs import DeltaLog, TableVersion

__all__ = ["DeltaLog", "Table", "TableVersion"]


@dataclass(frozen=True)
class Table(outputs.Table):
    """The current state of a table, and the files in its folder."""

    #: Parquet files in the table's folder that its log never named.
    orphans: tuple[Path, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(self.added_in)

    @classmethod
    def read(cls, table: Path) -> Self:
        found = super().read(table)
        ever = {table / path for version in found.versions for path in version.added}
        there = sorted(table.rglob("*.parquet")) if table.is_dir() else []
        data = [path for path in there if outputs.LOG_FOLDER not in path.relative_to(table).parts]
        return replace(found, orphans=tuple(path for path in data if path not in ever))

    def rows(self, *columns: str) -> Iterator[tuple[object, ...]]:
        for path in self.files:
            content = parquet.ParquetFile(path).read(columns=list(columns))
            yield from zip(*(content.column(name).to_pylist() for name in columns), strict=True)
