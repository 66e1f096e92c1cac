"""The write-ahead buffer with real tasks: every type exact, failed attempts told apart."""

from __future__ import annotations

import datetime as dt
import math
import os
from decimal import Decimal
from pathlib import Path

import pytest
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.connectors.buffer import BufferedCommitter, BufferWriter, require_bufferable
from flinkish_spark.contracts.sink import StageRequest
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome
from flinkish_spark.transport import columns as C
from tests.support.sinks import sink_context_of

JOB = JobUuid("0" * 31 + "b")

EVERYTHING = T.StructType(
    [
        T.StructField("n", T.IntegerType()),
        T.StructField("boolean", T.BooleanType()),
        T.StructField("byte", T.ByteType()),
        T.StructField("short", T.ShortType()),
        T.StructField("long", T.LongType()),
        T.StructField("float", T.FloatType()),
        T.StructField("double", T.DoubleType()),
        T.StructField("decimal", T.DecimalType(38, 18)),
        T.StructField("string", T.StringType()),
        T.StructField("binary", T.BinaryType()),
        T.StructField("date", T.DateType()),
        T.StructField("timestamp", T.TimestampType()),
        T.StructField("local", T.TimestampNTZType()),
        T.StructField("array", T.ArrayType(T.DoubleType())),
        T.StructField("map", T.MapType(T.StringType(), T.LongType())),
        T.StructField("struct", T.StructType([T.StructField("of", T.ArrayType(T.DecimalType(10, 2)))])),
    ]
)
ROWS = [
    (0, *[None] * 15),
    (
        1,
        True,
        -128,
        -(2**15),
        -(2**63),
        1.5,
        math.nan,
        Decimal("99999999999999999999.999999999999999999"),
        "π ' ; --\0",
        b"\x00\xff",
        dt.date(1, 1, 1),
        dt.datetime(2024, 3, 31, 1, 30, 0, 1, tzinfo=dt.UTC),
        dt.datetime(1582, 10, 4, 23, 59, 59, 999999),
        [None, math.nan, math.inf],
        {"a": None, "": 2**63 - 1},
        {"of": [Decimal("0.01"), None]},
    ),
]


class Collecting(BufferedCommitter):
    """Keeps what it is given."""

    rows: list[dict]

    def apply(self, checkpoint, rows):
        self.rows = [row for batch in rows.batches() for row in batch.to_pylist()]
        return CommitAnswer(Outcome.COMMITTED)


def with_control(frame):
    control = [
        F.lit(0).alias(C.KIND),
        F.lit(None).cast("long").alias(C.CHECKPOINT),
        F.lit(None).cast("int").alias(C.CHANNEL),
        F.lit(7).cast("long").alias(C.HASH),
    ]
    return frame.select(*control, "*")


def request(rows, block=1):
    return StageRequest(rows, Lineage(0), BatchId(3), block, CheckpointId(1))


def context_of(schema, folder: Path):
    return sink_context_of(JOB, OwnerEpoch(1), "out", schema, CheckpointConfig(), folder)


def committed(context, staged):
    committer = Collecting(context)
    answers = committer.commit(CheckpointId(1), [Committable("out", p) for p in staged.payloads])
    assert all(answer.outcome is Outcome.COMMITTED for answer in answers)
    return committer.rows


def test_every_type_comes_out_as_it_went_in(spark, tmp_path) -> None:
    context = context_of(EVERYTHING, tmp_path / "deep" / "out")
    require_bufferable(context)
    frame = spark.createDataFrame(ROWS, EVERYTHING).coalesce(1)
    staged = BufferWriter(context).stage(request(with_control(frame)))
    assert (sum(ack.rows for ack in staged.tasks), len(staged.payloads)) == (2, 1)
    empty, full = committed(context, staged)
    assert list(empty.values()) == [0, *[None] * 15]
    expected = dict(zip(EVERYTHING.names, ROWS[1], strict=True))
    expected["map"], full["map"] = [("", 2**63 - 1), ("a", None)], sorted(full["map"])
    full["timestamp"] = full["timestamp"].astimezone(dt.UTC)
    # NaN is not equal to itself; as text it is.
    assert repr(full) == repr(expected)


def test_a_failed_attempt_leaves_a_file_that_nothing_names(spark, tmp_path) -> None:
    flag = tmp_path / "failed"

    def fail_once(batches):
        for batch in batches:
            yield batch
            if 7 in batch["id"].to_pylist() and not flag.exists():
                flag.touch()
                os._exit(1)

    context = context_of(T.StructType([T.StructField("id", T.LongType())]), tmp_path / "out")
    frame = spark.range(0, 10, numPartitions=2).mapInArrow(fail_once, "id LONG")
    staged = BufferWriter(context).stage(request(with_control(frame)))
    assert flag.exists()
    assert [row["id"] for row in committed(context, staged)] == list(range(10))
    names = {payload["file"] for payload in staged.payloads}
    assert names <= {path.name for path in (tmp_path / "out").iterdir()}
    committer = Collecting(context)
    committer.sweep([Committable("out", p) for p in staged.payloads], frozenset)
    assert names == {path.name for path in (tmp_path / "out").iterdir()}


def test_a_type_that_cannot_be_buffered_is_refused(spark, tmp_path) -> None:
    schema = T.StructType([T.StructField("span", T.CalendarIntervalType())])
    with pytest.raises(SchemaError, match="cannot buffer the field 'span' of type interval"):
        require_bufferable(context_of(schema, tmp_path))
