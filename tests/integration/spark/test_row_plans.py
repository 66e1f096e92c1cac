"""DataFrame functions that are done to each row by itself, so that control rows pass by."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.planning.transforms import NonRowTransform, RowByRow, read_functions
from flinkish_spark.transport import columns as C

FIELDS = T.StructType(
    [
        T.StructField("user", T.StringType()),
        T.StructField("amount", T.LongType(), True, {"comment": "in cents"}),
        T.StructField("tags", T.ArrayType(T.LongType())),
    ]
)
RECORDS = [("ann", 3, [1, 2]), ("ben", None, None), ("cid", 0, []), ("dan", 7, [3, None])]
CONTROL = [(1, 4), (1, 5), (16, 0), (4, 1)]
NAMES = ("s0_0", "s0_1", "s0_2")


def rows_with_control(spark: Any) -> DataFrame:
    """Records among control rows, which have no fields; as the tagged union has them."""
    rows = [(0, 0, *record) for record in RECORDS]
    for at, (kind, checkpoint) in enumerate(CONTROL):
        rows.insert(2 * at, (kind, checkpoint, None, None, None))
    columns = f"{C.KIND} INT, {C.CHECKPOINT} LONG, s0_0 STRING, s0_1 LONG, s0_2 ARRAY<BIGINT>"
    return spark.createDataFrame(rows, columns).coalesce(1)


def described(frame: DataFrame) -> list[tuple[str, str, dict[str, Any]]]:
    return [(field.name, field.dataType.simpleString(), field.metadata) for field in frame.schema]


def computed(frame: DataFrame) -> DataFrame:
    more = frame.withColumn("twice", F.col("amount") * 2).withColumnRenamed("user", "who")
    return more.where("amount IS NOT NULL").drop("tags").alias("x").select("x.who", "twice", "amount")


FUNCTIONS = {
    "nothing": lambda frame: frame,
    "computed": computed,
    "filled": lambda frame: frame.na.fill(5).toDF("a", "b", "c").where("b > 2 AND a <> 'dan'"),
    "dropped": lambda frame: frame.dropna().select("tags"),
    "own": lambda frame: frame.select(frame["user"], (frame["amount"] + 1).alias("amount")),
    "nested": lambda frame: frame.select(
        F.transform("tags", lambda one: one + F.col("amount")).alias("sums"),
        F.struct("user", "amount").alias("s"),
    ),
    "lateral": lambda frame: frame.selectExpr(
        "amount + 1 AS more", "more * 2 AS much", "amount AS more_or_less"
    ),
    "replaced": lambda frame: frame.withColumn("amount", F.nvl("amount", F.lit(1))).where("amount = 1"),
    "constant": lambda frame: frame.select(F.lit(1).alias("one"), F.lit(None).cast("int").alias("none")),
    "typed": lambda frame: frame.to(T.StructType([T.StructField("amount", T.StringType())])),
    "hidden": lambda frame: frame.select("user").where("amount > 1"),
    "guarded": lambda frame: frame.withColumn("amount", F.coalesce("amount", F.lit(9))).select(
        F.when(F.col("user").isNull(), F.raise_error(F.lit("no user")))
        .otherwise(F.col("user"))
        .alias("user"),
        F.assert_true(F.col("amount").isNotNull()).alias("checked"),
    ),
    "guarded_filter": lambda frame: frame.where(
        F.when(F.col("user").isNull(), F.raise_error(F.lit("no user")).cast("boolean")).otherwise(F.lit(True))
    ).where((F.lit(6) / F.coalesce(F.length("user"), F.lit(0))) > 1),
}


@pytest.mark.nightly
def test_records_become_what_they_become_alone_and_control_rows_pass(spark: Any) -> None:
    rows = rows_with_control(spark)
    records = spark.createDataFrame(RECORDS, FIELDS)
    for name, function in FUNCTIONS.items():
        schema, found = read_functions(spark, [function], FIELDS, NAMES)
        wanted = function(records)
        assert isinstance(found, RowByRow) and schema == wanted.schema, (name, found)
        made = found.apply(rows).select(C.KIND, C.CHECKPOINT, *found.named_fields)
        kinds = [tuple(row) for row in made.select(C.KIND, C.CHECKPOINT).collect() if row[0]]
        assert kinds == CONTROL, name
        own = made.where(F.col(C.KIND) == 0).drop(C.KIND, C.CHECKPOINT)
        assert own.collect() == wanted.collect(), name
        assert described(own) == described(wanted), name
    assert not rows.where((F.col(C.KIND) != 0) & F.col("s0_0").isNotNull()).count()


def test_several_functions_are_one_and_the_first_that_is_not_by_row_is_named(spark: Any) -> None:
    def small(frame: DataFrame) -> DataFrame:
        return frame.where("twice < 10")

    _, found = read_functions(spark, [computed, small], FIELDS, NAMES)
    assert isinstance(found, RowByRow) and found.schema.names == ["who", "twice", "amount"]
    made = found.apply(rows_with_control(spark)).where(F.col(C.KIND) == 0).select(*found.named_fields)
    assert [tuple(row) for row in made.collect()] == [("ann", 6, 3), ("cid", 0, 0)]

    def spread(frame: DataFrame) -> DataFrame:
        return frame.repartition(3)

    schema, spoiled = read_functions(spark, [computed, spread, small], FIELDS, NAMES)
    assert spoiled == NonRowTransform(spread, "repartition() or coalesce()")
    assert schema.names == ["who", "twice", "amount"]


def test_what_is_not_done_to_single_rows_is_told(spark: Any) -> None:
    identity = F.udf(lambda value: value)
    pandas = F.pandas_udf(lambda values: values, "long")
    cases = {
        "distinct": lambda frame: frame.distinct(),
        "limit": lambda frame: frame.limit(3),
        "orderBy": lambda frame: frame.select("user").orderBy("user").where("user > 'a'"),
        "a join": lambda frame: frame.join(spark.range(3), F.col("id") == F.col("amount")),
        "a union": lambda frame: frame.union(frame),
        "an aggregate": lambda frame: frame.groupBy("user").count(),
        "a window": lambda frame: frame.select(F.sum("amount").over(Window.partitionBy("user"))),
        "explode": lambda frame: frame.select(F.explode("tags")),
        "mapInPandas": lambda frame: frame.mapInPandas(lambda parts: parts, frame.schema),
        "sample": lambda frame: frame.sample(0.5),
        "observe": lambda frame: frame.observe("seen", F.count("*").alias("n")),
        "a hint": lambda frame: frame.hint("broadcast"),
        "rand": lambda frame: frame.withColumn("chance", F.rand() + 1),
        "monotonically_increasing_id": lambda frame: frame.select(F.monotonically_increasing_id()),
        "a subquery": lambda frame: frame.where("amount IN (SELECT id FROM range(3))"),
        "a function in Python": lambda frame: frame.withColumn("user", identity(F.upper("user"))),
        "another DataFrame": lambda frame: spark.range(3),
    }
    for what, function in cases.items():
        _, found = read_functions(spark, [function], FIELDS, NAMES)
        assert isinstance(found, NonRowTransform) and found.function is function and what in found.what, (
            what,
            found,
        )
    _, found = read_functions(spark, [lambda frame: frame.where(pandas("amount") > 1)], FIELDS, NAMES)
    assert isinstance(found, NonRowTransform) and found.what == "a function in Python"


@pytest.mark.parametrize("missing", ["output", "projectList"])
def test_another_version_of_spark_is_no_failure(spark: Any, monkeypatch: Any, missing: str) -> None:
    from py4j.java_gateway import JavaObject

    plain = JavaObject.__getattr__

    def renamed(self: Any, name: str) -> Any:
        return plain(self, f"{name}2" if name == missing else name)

    monkeypatch.setattr(JavaObject, "__getattr__", renamed)
    _, found = read_functions(spark, [lambda frame: frame.select("user")], FIELDS, NAMES)
    assert isinstance(found, NonRowTransform) and "version of Spark" in found.what
