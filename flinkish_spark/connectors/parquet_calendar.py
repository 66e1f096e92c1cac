"""Parquet files as sources read them.

Old dates and times may be of the calendar that was in use before 1582. A footer says so, and Spark then
counts the days anew. Nobody here does: such values are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flinkish_spark.types.arrow_columns import leaves

#: Spark's name of what wrote a file, and up to which one dates and times, or INT96, were of the old calendar.
_WRITTEN_BY, _DATES_BEFORE, _INT96_BEFORE = b"org.apache.spark.version", b"3.0.0", b"3.1.0"
_OLD_DATES, _OLD_INT96 = b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96"
#: Hive's.
_NEW_DATES = b"writer.date.proleptic"
#: From 1582-10-15 on both calendars have the same days; from 1900 on every zone has the same clock, too.
_FIRST_DAY, _FIRST_SECOND = -141_427, -2_208_988_800
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


#: What is read of a column at once: else all that a row group has of it, whatever its size.
_BUFFER_BYTES = 1 << 20


def open_parquet(source: Any) -> pq.ParquetFile:
    import pyarrow.parquet as pq

    # Spark writes times as INT96, of which Arrow makes nanoseconds, that end in 2262.
    return pq.ParquetFile(source, coerce_int96_timestamp_unit="us", buffer_size=_BUFFER_BYTES)


def read_batches(
    file: pq.ParquetFile, columns: list[str], rows: int, begin: int = 0, end: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the row groups from `begin` up to `end`."""
    dates, int96 = _old_kinds(file)
    groups = [*range(begin, file.num_row_groups if end is None else end)]
    for batch in file.iter_batches(batch_size=rows, columns=columns, row_groups=groups):
        for name, column in zip(batch.schema.names, batch.columns, strict=True) if dates or int96 else ():
            if any(_has_old(leaf, dates=dates, int96=int96) for leaf in leaves(column)):
                raise ValueError(
                    f"the column {name!r} has a date before 1582-10-15, or a time before 1900, and the "
                    "footer says that it is of the old calendar: let Spark write the file again, or read it "
                    "by env.from_dataframe"
                )
        yield batch


def _old_kinds(file: pq.ParquetFile) -> tuple[bool, bool]:
    """Return whether a file's dates and times are of the old calendar, and whether its INT96 are."""
    said = file.metadata.metadata or {}
    # Spark compares them as texts, too.
    version, is_hive_s = said.get(_WRITTEN_BY, _INT96_BEFORE), said.get(_NEW_DATES, b"").lower() == b"false"
    dates = version < _DATES_BEFORE or _OLD_DATES in said or is_hive_s
    int96 = version < _INT96_BEFORE or _OLD_INT96 in said or is_hive_s
    kinds = (file.schema.column(number).physical_type for number in range(len(file.schema)))
    return dates, int96 and "INT96" in kinds


def _has_old(leaf: pa.Array, *, dates: bool, int96: bool) -> bool:
    import pyarrow.compute as pc

    kind = leaf.type
    if pa.types.is_date(kind):
        first, is_of_old = pa.scalar(_FIRST_DAY, pa.int32()).cast(kind), dates
    elif pa.types.is_timestamp(kind):
        # Arrow gives those of INT96 no zone. Others without one are TIMESTAMP_NTZ, which never were of it.
        first = pa.scalar(_FIRST_SECOND * _PER_SECOND[kind.unit], pa.int64()).cast(kind)
        is_of_old = int96 if kind.tz is None else dates
    else:
        return False
    return is_of_old and bool(pc.any(pc.less(leaf, first)).as_py())
