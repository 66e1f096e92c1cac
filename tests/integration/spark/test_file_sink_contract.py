"""The cases that every sink of this package must hold, with files."""

from __future__ import annotations

import pytest

from flinkish_spark import ColumnBuckets, Compaction, FileFormat, FileSink, RollOnCheckpoint
from flinkish_spark.testing import sink_contract as sinks
from flinkish_spark.testing.sink_contract import SINK_CASES, SinkUnderTest, check_sink

SETTINGS = {
    "parquet": {},
    "compacted": {"format": FileFormat.JSON, "compaction": Compaction(), "bucket_by": ColumnBuckets("user")},
    "sized": {"format": FileFormat.JSON, "rolling": RollOnCheckpoint(part_bytes=100)},
}


#: All cases once; of the other settings those in which it matters that files are merged or split.
CASES = {
    "parquet": SINK_CASES,
    "compacted": (
        sinks.a_commit_may_be_repeated,
        sinks.another_process_can_commit,
        sinks.micro_batches_of_one_checkpoint_come_together,
        sinks.a_sweep_removes_leftovers_and_nothing_else,
    ),
    "sized": (
        sinks.every_row_and_barrier_is_acknowledged,
        sinks.a_task_that_is_tried_again_writes_once,
        sinks.micro_batches_of_one_checkpoint_come_together,
    ),
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
    check_sink(subject, CASES[name])
