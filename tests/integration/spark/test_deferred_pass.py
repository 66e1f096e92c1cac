"""The last pass of a plan runs where its sinks stage, and makes the rows that Spark would make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
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
from flinkish_spark.core.arrow_pass import ComposedWorker, map_in_arrow
from flinkish_spark.planning.planner import Planner
from flinkish_spark.planning.sink_rows import (
    PlannedJob,
    SinkPart,
    SinkWorkers,
    TaggedStream,
    WorkersRows,
)
from flinkish_spark.planning.stream_union import tag
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.sink_rows import SinkFanOut, ToSinkRows
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
    "a transform behind an operator": lambda stream: counts(stream).transform(
        lambda df: df.where("n > 1").select("n", F.col("n").alias("m"), F.lit("x").alias("x"))
    ),
    "functions behind an operator": lambda stream: (
        counts(stream).map(lambda one: (one.n, [one.a]), output="n LONG, a ARRAY<LONG>").filter(bool)
    ),
}
NOT_DEFERRED: dict[str, Callable[[Any], Any]] = {
    "a transform that computes": lambda stream: stream.transform(in_spark),
    "a transform behind an operator that computes": lambda stream: counts(stream).transform(in_spark),
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
    assert job.deferred.sinks["out"].columns.names == [*C.SINK_CONTROL, *job.sinks[0].schema.names]
    as_run = PlannedJob(job.deferred.frame, job.sinks)
    assert as_run.layout == job.layout


@pytest.mark.parametrize("program", NOT_DEFERRED)
def test_rows_that_spark_has_a_part_in_are_made_by_the_query(
    spark: Any, tmp_path: Path, program: str
) -> None:
    assert planned(spark, tmp_path, NOT_DEFERRED[program]).deferred is None


def test_the_pass_of_several_sinks_of_one_stream_is_left_to_them(spark: Any, tmp_path: Path) -> None:
    job = planned(spark, tmp_path, DEFERRED["behind an operator"], sinks=3)
    assert job.deferred is not None and [*job.deferred.sinks] == ["out", "table-1", "table-2"]


def test_sinks_of_two_streams_get_rows_of_the_query(spark: Any, tmp_path: Path) -> None:
    env = environment(spark, tmp_path / "job")
    for name in ("one", "two"):
        stream = env.from_source(KafkaSource("localhost:9", [name], value=Json("a LONG")), uid=name)
        stream.sink_to(KafkaSink("localhost:9", f"{name}-out", value=Json()), uid=f"{name}-out")
    assert Planner(spark, NO_JOB, 2).plan(env.graph).deferred is None


def test_a_union_may_hold_the_nulls_of_each_of_its_streams(spark: Any, tmp_path: Path) -> None:
    env = environment(spark, tmp_path / "job")
    stream = env.from_source(KafkaSource("localhost:9", ["in"], value=Json("a LONG")), uid="in")
    zeros, nulls = (
        stream.transform(lambda df, one=one: df.select(F.array(F.lit(one).cast("long")).alias("a")))
        for one in (0, None)
    )
    zeros.union(nulls).sink_to(DeltaSink(str(tmp_path / "table")), uid="out")
    (sink,) = Planner(spark, NO_JOB, 2).plan(env.graph).sinks
    kind: Any = sink.schema["a"].dataType
    assert kind.containsNull


def test_operators_that_share_tasks_have_barriers_of_their_own(spark: Any, tmp_path: Path) -> None:
    env = environment(spark, tmp_path / "job")
    stream = env.from_source(KafkaSource("localhost:9", ["in"], value=Json("a LONG, t STRING")), uid="in")
    for name in ("one", "two"):
        made = stream.key_by("a").fold(AggregateColumn("n", Fold.COUNT), uid=name)
        made.sink_to(KafkaSink("localhost:9", name, value=Json()), uid=f"{name}-out")
    deferred = Planner(spark, NO_JOB, 2).plan(env.graph).deferred
    assert deferred is not None
    workers: list[Any] = [deferred.sinks[f"{name}-out"].workers[0] for name in ("one", "two")]
    assert [one.sides for one in workers] == [{0}, {1}]
    given = pa.record_batch(
        {
            C.KIND: pa.array([0, 0, 1, 1], pa.int32()),
            **{name: pa.array([0, 0, 5, 5]) for name in (C.CHECKPOINT, C.CHANNEL, C.SEQUENCE)},
            C.SIDE: pa.array([0, 1, 0, 1], pa.int32()),
            **{name: pa.array([1, None, None, None]) for name in workers[0].names},
            **{name: pa.array([None, 1, None, None], pa.int64()) for name in workers[1].names},
        }
    )
    for worker in workers:
        (rows,) = worker(iter([given]))
        assert rows.column(C.KIND).to_pylist() == [0, 1]


def test_batches_are_kept_as_bytes_and_dealt_to_sinks(spark: Any) -> None:
    fields = parse_ddl("a LONG, b STRING")
    assert isinstance(fields, T.StructType)
    control = [T.StructField(C.KIND, T.IntegerType())]
    control += [T.StructField(name, T.LongType()) for name in (C.CHECKPOINT, C.CHANNEL, C.SEQUENCE)]
    rows = [(0, 0, 1, at, at, f"b {at}") for at in range(10)] + [(1, 7, 0, 0, None, None)]
    frame = spark.createDataFrame(rows, T.StructType([*control, *fields])).repartition(3)
    sinks = ToSinkRows(fields, ("a", "b")), ToSinkRows(T.StructType([fields["b"]]), ("b",))
    workers = SinkWorkers((sinks[0],), sinks[0].columns), SinkWorkers((sinks[1],), sinks[1].columns)
    given = WorkersRows(frame, ComposedWorker(()), dict(zip(("one", "two"), workers, strict=True)))
    kept = given.keep()
    kept.run()
    for place in (given, kept):
        one, two = (
            map_in_arrow(place.frame, ComposedWorker((place.worker, sink)), sink.columns) for sink in sinks
        )
        assert sorted(row.b or "" for row in one.collect()) == ["", *(f"b {at}" for at in range(10))]
        assert {row.b for row in two.collect()} == {row.b for row in one.collect()}
        each = map_in_arrow(
            place.frame, ComposedWorker((place.worker, SinkFanOut(sinks), Places())), "at INT, n INT"
        )
        assert {(row.at, row.n) for row in each.groupBy("at", "n").count().collect()} == {(0, 2), (1, 1)}
        assert each.count() == 22
    kept.release()
    assert not kept.frame.is_cached


class Places:
    """Tells of each row whose it is, and how many fields it has."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            fields = [name for name in batch.schema.names if not name.startswith("_fs")]
            count = pa.array([len(fields)] * batch.num_rows, pa.int32())
            yield pa.record_batch([batch.column(C.SINK), count], ["at", "n"])


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
    by_worker = map_in_arrow(frame, worker, worker.columns).collect()
    assert sorted(map(repr, by_worker)) == sorted(map(repr, by_spark))
    assert len(by_worker) == (5 if side is None else 4)
