"""DataFrame functions that choose, rename and compare run where records are read, with Spark's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.plans import Projection, RowPlan, name_scan, origins_of, row_plan
from flinkish_spark.planning.between import RecordStream, transform_records
from flinkish_spark.protocol.plan_layout import ScanRole
from flinkish_spark.transport import columns as C
from flinkish_spark.types.arrow_types import arrow_schema
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.expressions import ColumnReference, FormattedDay

FIELDS: Any = parse_ddl(
    "n INT, b STRUCT<a: LONG, s: STRING, deep: STRUCT<d: DATE>>, f DOUBLE, flag BOOLEAN, at TIMESTAMP, "
    "tags ARRAY<INT>"
)
PLACES: Any = parse_ddl("_fs_channel LONG, _fs_seq LONG")
NESTED = [
    None,
    {"a": 1, "s": "x", "deep": None},
    {"a": None, "s": None, "deep": {"d": 0}},
    {"a": -5, "s": "", "deep": {"d": 9}},
]
VALUES = {
    "n": [1, None, 3, -(2**31)],
    "b": NESTED,
    "f": [1.5, None, float("nan"), 0.0],
    "flag": [True, False, None, True],
    "at": [0, 1, None, -1],
    "tags": [[1, None], None, [], [2]],
}


class Reads:
    """Makes one batch of records of what is to be read."""

    def __call__(self, batches: Any) -> Any:
        for _ in batches:
            schema = arrow_schema(T.StructType([*PLACES, *FIELDS]))
            own = [pa.array(VALUES[one.name], schema.field(one.name).type) for one in FIELDS]
            places = [pa.array([2] * 4), pa.array(range(4))]
            yield pa.RecordBatch.from_arrays([*places, *own], names=schema.names)


def stream_of(spark: Any) -> RecordStream:
    pieces = spark.range(1).coalesce(1)
    frame = C.read_records(pieces, Reads(), T.StructType([*PLACES, *FIELDS]))
    return RecordStream("in", frame, C.Origins(), lambda: spark.range(0), frozenset())


def nodes_of(frame: DataFrame) -> list[str]:
    node, found = frame._jdf.queryExecution().analyzed(), []
    while node.children().size():
        found.append(node.getClass().getSimpleName())
        node = node.children().apply(0)
    return found


IN_THE_PASS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "chosen": lambda df: df.select("n", "flag"),
    "renamed": lambda df: df.withColumnRenamed("n", "N n").drop("f"),
    "opened": lambda df: df.select("b.*", F.col("b.deep.d").alias("day"), "n"),
    "not null": lambda df: df.where("b IS NOT NULL AND b.a IS NOT NULL").select("b.a"),
    "null": lambda df: df.where(F.col("b.deep").isNull() | F.col("flag")),
    "not": lambda df: df.where(~F.col("flag")),
    "numbers": lambda df: df.where((F.col("b.a") >= -5) & (F.col("n") < 2)),
    "texts": lambda df: df.where(F.col("b.s") == "x").withColumn("const", F.lit("ä'")),
    "times": lambda df: df.where("at <= at").select("at"),
    "first of": lambda df: df.select(F.coalesce("b.a", F.lit(7).cast("long")).alias("v"), F.col("n") == 3),
    "none": lambda df: df.where("n IS NULL AND n IS NOT NULL"),
    "all": lambda df: df.where(F.lit(True)).select("*", F.lit(True).alias("t")),
    "twice": lambda df: df.select(F.col("n").alias("a"), F.col("n").alias("b")),
    "cases": lambda df: df.select(
        F.when(F.col("b.a") > 0, 1).alias("one"),
        F.when(F.col("n") > 2, "much").when(F.col("n").isNull(), "none").otherwise(F.col("b.s")).alias("two"),
        F.when(F.col("flag"), F.col("at")).otherwise(F.lit(None)).alias("three"),
        F.expr("if(flag, b.a, -1L)").alias("four"),
        F.when(F.lit(True), F.col("n")).alias("five"),
    ),
    "between": lambda df: df.where(F.col("n").between(-(2**31), 1)).select(F.col("b.a").between(0, 5)),
    "remainders": lambda df: df.select(
        (F.col("b.a") % 2).alias("v"), (F.col("n") % -7).alias("w"), (F.col("b.a") % (2**40)).alias("x")
    ),
    "times since 1970": lambda df: df.select(
        F.unix_micros("at").alias("v"), F.unix_millis("at").alias("w"), F.unix_seconds("at").alias("x")
    ),
    "days": lambda df: df.select(
        F.date_format("at", "yyyy-MM-dd").alias("v"),
        F.date_format("at", "dd/MM. yyyy").alias("w"),
        F.when(F.date_format("at", "yyyy") == "1970", F.date_format("at", "MM")).alias("x"),
    ),
}
IN_THE_JVM: dict[str, Callable[[DataFrame], DataFrame]] = {
    "arithmetic": lambda df: df.select((F.col("f") + 1).alias("v"), (F.col("n") + 1).alias("w")),
    "times that may be an error": lambda df: df.select(F.timestamp_millis("b.a").alias("v")),
    "a remainder that may be an error": lambda df: df.select((F.col("b.a") % (F.col("n") + 7)).alias("v")),
    "a case that guards": lambda df: df.select(
        F.when(F.col("n") > 0, F.col("n") + 1).alias("v"), F.coalesce(F.col("n"), F.col("n") + 1).alias("w")
    ),
    "names of months": lambda df: df.select(F.date_format("at", "MMM").alias("v")),
    "letters in quotes": lambda df: df.select(F.date_format("at", "yyyy'MM'").alias("v")),
    "floating numbers": lambda df: df.where(F.col("f") == F.col("f")),
    "order of texts": lambda df: df.where(F.col("b.s") < "y"),
    "texts of a collation": lambda df: df.where(F.collate("b.s", "UTF8_LCASE") == "X"),
    "a cast": lambda df: df.select(F.col("n").cast("string")),
    "the clock": lambda df: df.where(F.hour(F.current_timestamp()) >= 0).select("n"),
    "types that differ in nulls": lambda df: df.select(
        F.coalesce(F.col("tags"), F.array(F.lit(1))).alias("v")
    ),
    "a constant that would be an error": lambda df: df.select(
        F.when(F.lit(False), F.lit("x").cast("int")).alias("v")
    ),
}


def typed(fields: T.StructType) -> list[tuple[str, T.DataType]]:
    return [(one.name, one.dataType) for one in fields]


def rows_of(frame: DataFrame) -> list[str]:
    return sorted(str(row.asDict(recursive=True)) for row in frame.collect())


@pytest.mark.parametrize("way", [*IN_THE_PASS, *IN_THE_JVM])
def test_a_function_has_spark_s_values_wherever_it_runs(spark: Any, way: str) -> None:
    function = (IN_THE_PASS | IN_THE_JVM)[way]
    given = stream_of(spark)
    made = transform_records(given, function)
    wanted = function(spark.createDataFrame(given.frame.drop(*PLACES.names).collect(), FIELDS))
    fields = made.frame.drop(*PLACES.names)
    assert [(one.name, one.dataType) for one in made.schema] == [
        (one.name, one.dataType) for one in wanted.schema
    ]
    assert rows_of(fields) == rows_of(wanted)
    places = {row[C.CHANNEL] for row in made.frame.collect()}
    assert places <= {2}, "records keep their places"
    in_jvm = {"Project", "Filter"} & set(nodes_of(made.frame))
    assert bool(in_jvm) == (way in IN_THE_JVM) and nodes_of(made.frame).count("MapInArrow") == 1


def test_columns_are_known_as_those_of_the_source_behind_functions_in_its_pass(spark: Any) -> None:
    stream = transform_records(stream_of(spark), lambda df: df.select("b.*", F.col("n").alias("m")))
    stream = transform_records(
        stream, lambda df: df.select(F.coalesce("a", "m").alias("v"), F.lit(1).alias("one"))
    )
    found = origins_of(name_scan(stream.frame, ScanRole.RECORDS, "in"))
    assert found["v"] == {("in", "b"), ("in", "n")} and found["one"] == frozenset()


@pytest.mark.parametrize(
    "micros",
    [
        *(-(2**63), 2**63 - 1, -1, 0, 951_782_400_000_000, 951_868_800_000_000),
        *(253_402_300_799_999_999, 253_402_300_800_000_000, -62_135_596_800_000_000, -62_135_596_800_000_001),
        *(-62_167_219_200_000_001, -99_999_999_999_999_999),
    ],
)
def test_days_of_all_times_are_spark_s(spark: Any, micros: int) -> None:
    made = F.date_format(F.timestamp_micros(F.lit(micros)), "yyyy-MM-dd")
    (wanted,) = spark.range(1).select(made).first()
    day = FormattedDay(ColumnReference("at"), ("yyyy", "-", "MM", "-", "dd"))
    column = pa.array([micros], pa.int64()).cast(pa.timestamp("us", "UTC"))
    assert day.evaluate({"at": column}).to_pylist() == [wanted]


def test_another_calendar_is_for_the_jvm(spark: Any) -> None:
    spark.conf.set("spark.sql.legacy.timeParserPolicy", "legacy")
    try:
        given = spark.createDataFrame([], "at TIMESTAMP")
        read = row_plan(given, given.select(F.date_format("at", "yyyy").alias("v")), ("at",), "made")
    finally:
        spark.conf.unset("spark.sql.legacy.timeParserPolicy")
    assert isinstance(read, RowPlan) and isinstance(read.steps[0], Projection)
    assert read.steps[0].columns[0].in_arrow is None
