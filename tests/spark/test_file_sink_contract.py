"""The cases that every sink of this package must hold, with files."""

from __future__ import annotations

import pytest

from flinkish_spark import ColumnBuckets, Compaction, FileFormat, FileSink, RollOnCheckpoint
from flinkish_spark.testing.sinks import SINK_CASES, SinkUnderTest, check_sink

SETTINGS = {
    "parquet": {},
    "compacted": {"format": FileFormat.JSON, "compaction": Compaction(), "bucket_by": ColumnBuckets("user")},
    "sized": {"format": FileFormat.JSON, "rolling": RollOnCheckpoint(part_bytes=100)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_cases_of_the_contract(spark, tmp_path, name) -> None:
    settings = SETTINGS[name]
    root = tmp_path / "out"

    def visible():
        if not any(root.rglob("part-*")):
            return []
        frame = spark.read.format(settings.get("format", FileFormat.PARQUET).value)
        found = frame.schema("user STRING, amount LONG").load(str(root))
        return [tuple(row) for row in found.select("user", "amount").collect()]

    def pending():
        return len(
            [p for p in (root / "_flinkish").glob("*/*/*") if p.parent.name in ("pending", "in-progress")]
        )

    def sink():
        return FileSink(str(root), **settings)

    subject = SinkUnderTest(sink, visible, spark, tmp_path / "folder", count_open=pending)
    check_sink(subject, SINK_CASES)
