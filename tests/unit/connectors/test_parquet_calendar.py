"""Files whose footers say that their old dates and times are of the calendar before 1582."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flinkish_spark.connectors.files.input_formats import ParquetFiles

UTC = datetime.UTC
OLD_DAY, FIRST_DAY = datetime.date(1582, 10, 14), datetime.date(1582, 10, 15)
OLD_TIME = datetime.datetime(1899, 12, 31, 23, 59, 59, 999999, UTC)
FIRST_TIME = datetime.datetime(1900, 1, 1, tzinfo=UTC)
INSTANT, LOCAL = pa.timestamp("us", "UTC"), pa.timestamp("us")
SPARK = "org.apache.spark.version"
OLD_DATES = {SPARK: "4.2.0", "org.apache.spark.legacyDateTime": ""}
OLD_INT96 = {SPARK: "4.2.0", "org.apache.spark.legacyINT96": ""}


def written(path: Path, value: Any, kind: pa.DataType, said: dict[str, str], **more: Any) -> str:
    table = pa.table({"c": pa.array([None, value], kind)})
    # Without Arrow's own schema in it, as Spark writes files.
    with pq.ParquetWriter(path / "x.parquet", table.schema, store_schema=False, **more) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(said)
    return str(path / "x.parquet")


def read(file: str, kind: pa.DataType) -> Any:
    (batch,) = ParquetFiles().batches(file, pa.schema([("c", kind)]))
    return batch.column(0)[1].as_py()


@pytest.mark.parametrize(
    "said",
    [
        OLD_DATES,
        {SPARK: "2.4.8"},
        {"org.apache.spark.legacyDateTime": ""},
        {"writer.date.proleptic": "false"},
    ],
)
def test_what_is_older_than_the_calendar_is_refused(tmp_path: Path, said: dict[str, str]) -> None:
    for kind, old, first in [(pa.date32(), OLD_DAY, FIRST_DAY), (INSTANT, OLD_TIME, FIRST_TIME)]:
        with pytest.raises(ValueError, match="the column 'c' has a date before 1582-10-15, or a time before"):
            read(written(tmp_path, old, kind, said), kind)
        assert read(written(tmp_path, first, kind, said), kind) == first
        assert read(written(tmp_path, None, kind, said), kind) is None


@pytest.mark.parametrize("said", [{}, {SPARK: "3.0.0"}, OLD_INT96, {"writer.date.proleptic": "true"}])
def test_what_is_of_the_calendar_is_what_is_written(tmp_path: Path, said: dict[str, str]) -> None:
    for kind, old in [(pa.date32(), datetime.date(1000, 1, 1)), (INSTANT, OLD_TIME)]:
        assert read(written(tmp_path, old, kind, said), kind) == old


@pytest.mark.parametrize(
    ("said", "is_old"),
    [
        (OLD_INT96, True),
        ({SPARK: "2.4.8"}, True),
        ({SPARK: "3.0.3"}, True),
        ({SPARK: "3.1.0"}, False),
        (OLD_DATES, False),
        ({}, False),
    ],
)
def test_int96_has_a_calendar_of_its_own(tmp_path: Path, said: dict[str, str], is_old: bool) -> None:
    for value in (OLD_TIME, FIRST_TIME):
        file = written(tmp_path, value, INSTANT, said, use_deprecated_int96_timestamps=True)
        if is_old and value == OLD_TIME:
            with pytest.raises(ValueError, match="of the old calendar"):
                read(file, INSTANT)
        else:
            # Arrow gives INT96 no zone; the source does.
            assert read(file, INSTANT) == value.replace(tzinfo=None)


def test_times_without_a_zone_never_were_of_another(tmp_path: Path) -> None:
    old = datetime.datetime(1000, 1, 1)
    assert read(written(tmp_path, old, LOCAL, {**OLD_DATES, **OLD_INT96}), LOCAL) == old


@pytest.mark.parametrize("wrap", ["list", "struct", "map"])
def test_a_date_within_a_value_is_looked_at(tmp_path: Path, wrap: str) -> None:
    kind, value = {
        "list": (pa.list_(pa.date32()), [FIRST_DAY, OLD_DAY]),
        "struct": (pa.struct([("s", pa.struct([("d", pa.date32())]))]), {"s": {"d": OLD_DAY}}),
        "map": (pa.map_(pa.string(), pa.date32()), [("k", OLD_DAY)]),
    }[wrap]
    with pytest.raises(ValueError, match="of the old calendar"):
        read(written(tmp_path, value, kind, OLD_DATES), kind)
    assert read(written(tmp_path, value, kind, {}), kind) == value
