"""Spark's own state inside a job: what is taken, in which order it is numbered, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import functions as F

from flinkish_spark import DeltaSink, KeyedProcessFunction, Upsert, ValueStateDescriptor, WatermarkStrategy
from flinkish_spark.core.errors import ConfigError, GraphError, UserError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.state_processor import read_native_state
from tests.support.jobs import await_that, environment, failure_of, read_delta, run_until, running

ORDER = "user STRING, ts TIMESTAMP, amount LONG"


class Count(KeyedProcessFunction):
    """Counts the rows of each user."""

    def open(self, context):
        self.count = context.get_state(ValueStateDescriptor("count", "LONG"))

    def process_element(self, row, ctx):
        count = (self.count.value() or 0) + 1
        self.count.update(count)
        yield row.user, count


COUNT = "user STRING, count LONG"


def put(folder: Path, name: str, *orders: tuple[str, int, int]) -> None:
    """Write a file of orders: user, second, amount."""
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps(
            {"user": user, "ts": f"2026-01-01T00:{second // 60:02}:{second % 60:02}Z", "amount": amount}
        )
        for user, second, amount in orders
    ]
    (folder / f".{name}").write_text("\n".join(lines))
    (folder / f".{name}").rename(folder / name)


def orders(spark, folder: Path):
    return spark.readStream.schema(ORDER).option("maxFilesPerTrigger", 1).json(str(folder))


def totals(frame):
    """Return the total of each user in windows of ten seconds, once a window is over."""
    windows = frame.withWatermark("ts", "0 seconds").groupBy(F.window("ts", "10 seconds"), "user")
    return windows.agg(F.sum("amount").alias("total")).selectExpr("window.end AS until", "user", "total")


def numbers_of_operators(job_dir: Path) -> dict[int, str]:
    """Return the names that Spark gave to the operators in its checkpoint, by their numbers."""
    found = {}
    (state,) = (job_dir / "spark").glob("*/state")
    for path in sorted(state.glob("*/_metadata/**/*")):
        if path.is_file() and not path.name.startswith("."):
            body = json.loads(path.read_text().partition("\n")[2])
            found[body["operatorInfo"]["operatorId"]] = body["operatorInfo"]["operatorName"]
    return found


# -- taken ------------------------------------------------------------------------------------------


def test_changed_rows_replace_earlier_ones(spark, job_dir, tmp_path) -> None:
    put(tmp_path / "in", "0.json", ("ann", 1, 5), ("ben", 2, 7))

    def job():
        env = environment(spark, job_dir)
        by_user = orders(spark, tmp_path / "in").groupBy("user").agg(F.sum("amount").alias("total"))
        changes = env.from_dataframe(by_user, output_mode="update", uid="by-user")
        changes.sink_to(DeltaSink(str(tmp_path / "table"), mode=Upsert(keys=["user"])), uid="table")
        return env

    def table():
        return {(row["user"], row["total"], row["_row_kind"]) for row in read_delta(tmp_path / "table")}

    run_until(job(), lambda _: (tmp_path / "table").exists() and len(table()) == 2)
    put(tmp_path / "in", "1.json", ("ann", 3, 1))
    run_until(job(), lambda _: ("ann", 6, "+U") in table())
    assert table() == {("ann", 6, "+U"), ("ben", 7, "+U")}


def test_an_aggregate_in_front_of_a_keyed_operator_over_two_starts(spark, job_dir, tmp_path) -> None:
    def job():
        env = environment(spark, job_dir)
        stream = env.from_dataframe(totals(orders(spark, tmp_path / "in")), uid="totals")
        stream = stream.assign_timestamps_and_watermarks(
            WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("until")
        )
        counted = stream.key_by("user").process(Count(), output=COUNT, uid="windows-of-a-user")
        counted.sink_to(DeltaSink(str(tmp_path / "table")), uid="table")
        return env

    def table():
        return Counter((row["user"], row["count"]) for row in read_delta(tmp_path / "table"))

    put(tmp_path / "in", "0.json", ("ann", 1, 5), ("ben", 2, 7))
    put(tmp_path / "in", "1.json", ("ann", 11, 5))
    run_until(job(), lambda _: (tmp_path / "table").exists() and table().total() == 2)
    # Our operator is above the aggregate in the plan, so Spark gives it the first number.
    assert numbers_of_operators(job_dir) == {0: "applyInPandasWithState", 1: "stateStoreSave"}
    state = read_native_state(spark, str(job_dir), "totals", scratch=str(tmp_path))
    assert [row.asDict() for row in state.select("key.user", "value.sum").collect()] == [
        {"user": "ann", "sum": 5}
    ]
    with pytest.raises(UserError, match=r"choose from: totals \(an aggregate"):
        read_native_state(spark, str(job_dir), "totals", operator=1, scratch=str(tmp_path))
    put(tmp_path / "in", "2.json", ("ann", 25, 1))
    run_until(job(), lambda _: table().total() == 3)
    assert table() == Counter({("ann", 1): 1, ("ben", 1): 1, ("ann", 2): 1})


def test_state_in_a_transform_sees_fields_and_no_places(spark, job_dir, tmp_path) -> None:
    """With its place in the source each row would differ from all others."""
    put(tmp_path / "in", "0.json", ("ann", 1, 5), ("ann", 1, 5), ("ben", 2, 7))
    env = environment(spark, job_dir)
    stream = env.from_dataframe(orders(spark, tmp_path / "in"), uid="orders")
    once = stream.transform(lambda frame: frame.withWatermark("ts", "1 hour").dropDuplicates())
    once.sink_to(DeltaSink(str(tmp_path / "table")), uid="table")
    run_until(env, lambda client: client.progress.rows_by_sink.get("table", 0) >= 2)
    assert Counter(row["user"] for row in read_delta(tmp_path / "table")) == Counter({"ann": 1, "ben": 1})


# -- refused ----------------------------------------------------------------------------------------

UNFIT = {
    "an aggregate without a watermark": (lambda df: df.groupBy("user").count(), "append", "watermark"),
    "a sort": (lambda df: df.orderBy("amount"), "append", "Sorting is not supported"),
    "a limit in update mode": (lambda df: df.limit(3), "update", "not supported"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_spark_cannot_stream(spark, job_dir, tmp_path, case) -> None:
    build, mode, why = UNFIT[case]
    (tmp_path / "in").mkdir()
    env = environment(spark, job_dir)
    with pytest.raises(GraphError, match=why):
        env.from_dataframe(build(orders(spark, tmp_path / "in")), output_mode=mode, uid="frame")
    stream = env.from_dataframe(orders(spark, tmp_path / "in"), uid="orders")
    if mode == "append":
        stream.transform(build).sink_to(DeltaSink(str(tmp_path / "table")), uid="table")
        assert why in str(failure_of(env))


def test_complete_mode(spark, job_dir, tmp_path) -> None:
    (tmp_path / "in").mkdir()
    by_user = orders(spark, tmp_path / "in").groupBy("user").count()
    with pytest.raises(ConfigError, match="'append' or 'update'"):
        environment(spark, job_dir).from_dataframe(by_user, output_mode="complete", uid="frame")


def test_two_output_modes_in_one_job(spark, job_dir, tmp_path) -> None:
    (tmp_path / "in").mkdir()
    frame, env = orders(spark, tmp_path / "in"), environment(spark, job_dir)
    by_user = env.from_dataframe(frame.groupBy("user").count(), output_mode="update", uid="by-user")
    by_user.sink_to(DeltaSink(str(tmp_path / "one")), uid="one")
    env.from_dataframe(totals(frame), uid="totals").sink_to(DeltaSink(str(tmp_path / "two")), uid="two")
    error = failure_of(env)
    assert isinstance(error, GraphError)
    assert "'by-user'" in str(error) and "'totals'" in str(error) and "output mode" in str(error)


def test_a_transform_that_brings_another_stream(spark, job_dir, tmp_path) -> None:
    (tmp_path / "in").mkdir()
    frame, env = orders(spark, tmp_path / "in"), environment(spark, job_dir)
    other = frame.selectExpr("user AS other")
    stream = env.from_dataframe(frame, uid="orders").transform(
        lambda df: df.join(other, F.expr("user = other"))
    )
    stream.sink_to(DeltaSink(str(tmp_path / "table")), uid="table")
    assert "brings another stream" in str(failure_of(env))


def test_savepoints_and_other_partitions(spark, job_dir, tmp_path) -> None:
    put(tmp_path / "in", "0.json", ("ann", 1, 5))

    def job():
        env = environment(spark, job_dir)
        stream = env.from_dataframe(totals(orders(spark, tmp_path / "in")), uid="totals")
        stream.sink_to(DeltaSink(str(tmp_path / "table")), uid="table")
        return env

    with running(job()) as client:
        await_that(lambda: JobDir(LocalStore(job_dir)).live_commits(), client)
        answer = client.stop_with_savepoint(str(tmp_path / "savepoint")).wait(60_000)
        assert "an aggregate" in str(answer) and "Spark's own" in str(answer)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=120_000)
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "3")
    try:
        assert "cannot change to 3" in str(failure_of(job()))
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before)


def test_parts_that_spark_would_check_together(spark, job_dir, tmp_path) -> None:
    (tmp_path / "in").mkdir()
    frame = orders(spark, tmp_path / "in")
    by_user = frame.groupBy("user").count()
    for number, (given, mode, function) in enumerate(
        [
            (totals(frame), "append", lambda df: df.dropDuplicates()),
            (frame.withWatermark("ts", "1 hour"), "append", lambda df: df.withWatermark("ts", "1 second")),
            (by_user, "update", lambda df: df.dropDuplicates()),
        ]
    ):
        env = environment(spark, job_dir)
        stream = env.from_dataframe(given, output_mode=mode, uid="orders").transform(function)
        stream.sink_to(DeltaSink(str(tmp_path / f"table-{number}")), uid="table")
        assert "a part of the query before it" in str(failure_of(env)), number
    assert not job_dir.exists()


def test_a_distinct_of_sql_has_the_output_mode_of_an_aggregate(spark, job_dir, tmp_path) -> None:
    (tmp_path / "in").mkdir()
    orders(spark, tmp_path / "in").createOrReplaceTempView("orders_of_distinct")
    distinct = spark.sql("SELECT DISTINCT user FROM orders_of_distinct")
    env = environment(spark, job_dir)
    with pytest.raises(GraphError, match="watermark"):
        env.from_dataframe(distinct, uid="append")
    env.from_dataframe(distinct, output_mode="update", uid="users").sink_to(
        DeltaSink(str(tmp_path / "one")), uid="one"
    )
    windows = env.from_dataframe(totals(orders(spark, tmp_path / "in")), uid="totals")
    windows.sink_to(DeltaSink(str(tmp_path / "two")), uid="two")
    assert "output mode" in str(failure_of(env))
