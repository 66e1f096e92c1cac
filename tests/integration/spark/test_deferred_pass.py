"""The last pass of a plan runs where its only sink stages, and makes the rows that Spark would make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark import (
    AggregateColumn,
    DeltaSink,
    Fold,
    Json,
    KafkaSink,
    KafkaSource,
)
from flinkish_spark.contracts.source import NO_JOB
from flinkish_spark.planning.planner import Planner
from flinkish_spark.planning.sink_rows import PlannedJob, SinkPart, TaggedStream, tag
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.sink_rows import ToSinkRows
from flinkish_spark.types.ddl import parse_ddl
from tests.support.jobs import environment


def counts(stream: Any) -> Any:
    return stream.key_by("a").fold(AggregateColumn("n", Fold.COUNT), uid="counts")


def in_spark(frame: Any) -> Any:
    return frame.withColumn("a", F.col("a") + 1)


def below(model: bytes) -> Callable[[Any], bool]:
    return lambda one: one.a < len(model)


DEFERRED: dict[str, Callable[[Any], Any]] = {
    "records": lambda stream: stream,
    "fields that are chosen": lambda stream: stream.transform(lambda df: df.select("t")),
    "functions of records": lambda stream: stream.map(lambda one: (one.a,), output="a LONG").filter(
        lambda one: one.a > 0
    ),
    "behind an operator": counts,
    "functions behind an operator": lambda stream: (
        counts(stream).map(lambda one: (one.n, [one.a]), output="n LONG, a ARRAY<LONG>").filter(bool)
    ),
}
NOT_DEFERRED: dict[str, Callable[[Any], Any]] = {
    "a transform that computes": lambda stream: stream.transform(in_spark),
    "a transform behind an operator": lambda stream: counts(stream).transform(lambda df: df.select("n")),
    "a transform among functions behind an operator": lambda stream: (
        counts(stream).filter(bool).transform(lambda df: df.select("n")).filter(bool)
    ),
    "rows that move": lambda stream: stream.rebalance().map(lambda one: (one.a,), output="a LONG"),
    "a field without a hash": lambda stream: stream.map(lambda one: ({"a": 1},), output="m MAP<STRING, INT>"),
    "a large function": lambda stream: stream.filter(below(b"x" * (2 << 20))),
}


def planned(spark: Any, folder: Path, program: Callable[[Any], Any], sinks: int = 1) -> PlannedJob:
    env = environment(spark, folder / "job")
    stream = env.from_source(KafkaSource("localhost:9", ["in"], value=Json("a LONG, t STRING")), uid="in")
    made = program(stream)
    made.sink_to(KafkaSink("localhost:9", "out", value=Json()), uid="out")
    for number in range(1, sinks):
        made.sink_to(DeltaSink(str(folder / f"table-{number}")), uid=f"table-{number}")
    return Planner(spark, NO_JOB, 2).plan(env.graph)


@pytest.mark.parametrize("program", DEFERRED)
def test_the_pass_that_makes_a_sinks_rows_is_left_to_it(spark: Any, tmp_path: Path, program: str) -> None:
    job = planned(spark, tmp_path, DEFERRED[program])
    assert job.deferred is not None
    # Neither records nor parts of them are among the rows that the query ends with.
    ends_with = set(job.deferred.frame.columns)
    assert C.PIECE in ends_with or C.BLOCK in ends_with
    assert job.deferred.columns.names == [*C.SINK_CONTROL, *job.sinks[0].schema.names]
    as_run = PlannedJob(job.deferred.frame, job.sinks)
    assert as_run.layout() == job.layout()


@pytest.mark.parametrize("program", NOT_DEFERRED)
def test_rows_that_spark_has_a_part_in_are_made_by_the_query(
    spark: Any, tmp_path: Path, program: str
) -> None:
    assert planned(spark, tmp_path, NOT_DEFERRED[program]).deferred is None


def test_rows_of_several_sinks_are_made_once(spark: Any, tmp_path: Path) -> None:
    assert planned(spark, tmp_path, DEFERRED["records"], sinks=2).deferred is None


@pytest.mark.parametrize("side", [None, 1])
def test_rows_and_hashes_are_those_of_spark(spark: Any, side: int | None) -> None:
    fields = parse_ddl("name STRING, number DOUBLE, parts ARRAY<STRUCT<n: LONG>>")
    assert isinstance(fields, T.StructType)
    control = [T.StructField(C.KIND, T.IntegerType())]
    control += [T.StructField(name, T.LongType()) for name in (C.CHECKPOINT, C.CHANNEL, C.SEQUENCE)]
    control += [] if side is None else [T.StructField(C.SIDE, T.IntegerType())]
    record, barrier, report = int(C.Kind.RECORD), int(C.Kind.BARRIER), C.FIRST_REPORT + 2
    rows = [
        (record, 0, 3, 7, 1, "a", 0.5, [(1,), None]),
        (record, 0, 3, 8, 0, None, None, None),
        (record, 0, 3, 9, 1, "", -0.0, []),
        (barrier, 5, 0, 0, None, None, None, None),
        (report, 11, 4, 12, 0, None, None, None),
    ]
    given = [one if side is not None else (*one[:4], *one[5:]) for one in rows]
    frame = spark.createDataFrame(given, T.StructType([*control, *fields])).coalesce(1)
    outputs = () if side is None else ((), tuple(fields.names))
    stream = TaggedStream(frame, fields, frozenset({0}), outputs=outputs, side=side or 0)
    columns = tuple(f"s0_{at}" for at in range(len(fields)))
    part = SinkPart(0, columns, tuple(fields.names), frozenset({0}), side=side)
    by_spark = part.with_control.of(tag(stream, 0).where(part.is_own)).collect()
    worker = ToSinkRows(fields, tuple(fields.names), side)
    by_worker = C.map_in_arrow(frame, worker, worker.columns).collect()
    assert sorted(map(repr, by_worker)) == sorted(map(repr, by_spark))
    assert len(by_worker) == (5 if side is None else 4)
