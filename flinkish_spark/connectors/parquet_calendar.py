"""Reading of Parquet files, with a check for dates of the old calendar.

Dates before 1582 and times before 1900 may be in the hybrid Julian calendar. The footer says so, and Spark
then rebases them. This reader does not: it refuses such values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flinkish_spark.types.arrow_columns import leaves

#: Footer key of the Spark version that wrote a file; earlier versions wrote dates, or INT96, in the old
#: calendar.
_WRITTEN_BY, _DATES_BEFORE, _INT96_BEFORE = b"org.apache.spark.version", b"3.0.0", b"3.1.0"
_OLD_DATES, _OLD_INT96 = b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96"
#: Hive's.
_NEW_DATES = b"writer.date.proleptic"
#: Both calendars agree from 1582-10-15 on, and from 1900 on in every time zone.
_FIRST_DAY, _FIRST_SECOND = -141_427, -2_208_988_800
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


#: Bytes of a column chunk that are read at once; without this limit Arrow reads the whole chunk.
_BUFFER_BYTES = 1 << 20


def open_parquet(source: Any) -> pq.ParquetFile:
    import pyarrow.parquet as pq

    # Spark writes times as INT96. Arrow reads INT96 as nanoseconds, which end in 2262.
    return pq.ParquetFile(source, coerce_int96_timestamp_unit="us", buffer_size=_BUFFER_BYTES)


def read_batches(
    file: pq.ParquetFile, columns: list[str], rows: int, begin: int = 0, end: int | None = None
) -> Iterator[pa.RecordBatch]:
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
    """Return if a file's dates and times are in the old calendar, and if its INT96 values are."""
    said = file.metadata.metadata or {}
    # Spark, too, compares versions as texts.
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
        # Arrow reads INT96 as times without a zone. Others without one are TIMESTAMP_NTZ, never in the old
        # calendar.
        first = pa.scalar(_FIRST_SECOND * _PER_SECOND[kind.unit], pa.int64()).cast(kind)
        is_of_old = int96 if kind.tz is None else dates
    else:
        return False
    return is_of_old and bool(pc.any(pc.less(leaf, first)).as_py())
