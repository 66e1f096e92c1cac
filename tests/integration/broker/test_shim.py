"""The row tap: counts what goes into a writer that is not ours, and takes the control rows out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F

from flinkish_spark.bridge.shim import TappedRows
from flinkish_spark.connectors.row_count import CountedRows
from flinkish_spark.transport import columns as C

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RECORD, BARRIER, TICK = 0, 1, 3
SCHEMA = "kind INT, checkpoint BIGINT, channel BIGINT, hash BIGINT, key BINARY, value BINARY, topic STRING"


def record(
    value: bytes, hashed: int = 1, key: bytes | None = None, topic: str | None = None
) -> tuple[Any, ...]:
    return (RECORD, None, None, hashed, key, value, topic)


def barrier(checkpoint: int, channel: int) -> tuple[Any, ...]:
    return (BARRIER, checkpoint, channel, None, None, None, None)


def rows_in(spark: SparkSession, *partitions: Sequence[tuple[Any, ...]]) -> DataFrame:
    """Return a DataFrame with exactly these rows in exactly these partitions."""
    rows = spark.sparkContext.parallelize(partitions, len(partitions)).flatMap(lambda partition: partition)
    return spark.createDataFrame(rows, SCHEMA)


def frame_for_a_table(spark: SparkSession) -> DataFrame:
    many = [record(b"%d" % n, n) for n in range(5000)]
    tick = (TICK, 1, 1, 1, None, None, None)
    return rows_in(spark, [barrier(7, 0), *many, tick], [barrier(7, 1)], [record(b"last"), barrier(7, 2)])


EXPECTED_ACKS = [(0, 5000, sum(range(5000)), [(7, 0)]), (1, 0, 0, [(7, 1)]), (2, 1, 1, [(7, 2)])]


def acks_of(tapped: TappedRows) -> list[Any]:
    return [
        (ack.partition, ack.rows, ack.digest, [(int(b.checkpoint), b.channel) for b in ack.barriers])
        for ack in tapped.acks()
    ]


@pytest.mark.parametrize("persisted", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_tap_in_front_of_delta(spark: SparkSession, tmp_path: Path, persisted: bool) -> None:
    frame = frame_for_a_table(spark)
    if persisted:
        frame = frame.persist()
    tapped = TappedRows(frame, "delta")
    tapped.records.write.format("delta").save(str(tmp_path / "table"))
    frame.unpersist()
    table = spark.read.format("delta").load(str(tmp_path / "table"))
    assert acks_of(tapped) == EXPECTED_ACKS
    assert table.count() == table.where(F.col("kind") == RECORD).count() == 5001
    assert table.selectExpr("sum(hash)").first()[0] == sum(range(5000)) + 1
    assert table.select("value").distinct().count() == 5001, "no row was overwritten on its way"


def test_the_tap_behind_a_shuffle_and_in_front_of_a_partitioned_table(
    spark: SparkSession, tmp_path: Path
) -> None:
    frame = frame_for_a_table(spark).repartition(3).withColumn("bucket", F.expr("hash % 3")).persist()
    tapped = TappedRows(frame, "partitioned")
    tapped.records.write.format("delta").partitionBy("bucket").save(str(tmp_path / "table"))
    frame.unpersist()
    table = spark.read.format("delta").load(str(tmp_path / "table"))
    acks = tapped.acks()
    assert sum(a.rows for a in acks) == table.count() == table.select("value").distinct().count() == 5001
    assert sum(len(a.barriers) for a in acks) == 3


def test_the_tap_in_front_of_noop_counts_the_newest_run(spark: SparkSession) -> None:
    tapped = TappedRows(frame_for_a_table(spark), "noop")
    for _ in range(2):
        tapped.records.write.format("noop").mode("overwrite").save()
    assert acks_of(tapped) == EXPECTED_ACKS
    assert tapped._tapped.partitions() == 3
    assert len(json.loads(tapped._tapped.acksJson())) == 3


@pytest.mark.nightly
def test_both_ways_of_counting_agree_on_one_persisted_batch(spark: SparkSession) -> None:
    frame = frame_for_a_table(spark).repartition(2).toDF(*C.SINK_CONTROL, "key", "value", "topic").persist()
    tapped = TappedRows(frame, "noop")
    tapped.records.write.format("noop").mode("overwrite").save()
    assert tapped.acks() == CountedRows(frame).acks()
    frame.unpersist()
