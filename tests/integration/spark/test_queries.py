"""Queries of Spark's over streams of a job: SQL and DataFrame functions, their state, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import functions as F

from flinkish_spark import (
    CaughtUp,
    DeltaSink,
    KeyedProcessFunction,
    Upsert,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from flinkish_spark.core.errors import GraphError, SchemaError
from flinkish_spark.sources import Discovery, FileSource, JsonLines
from flinkish_spark.state_processor import read_native_state
from tests.support.jobs import environment, read_delta, run_until

ORDER, CLICK = "user STRING, ts TIMESTAMP, amount LONG", "who STRING, at TIMESTAMP, page STRING"


def second(number: int) -> str:
    return f"2026-01-01T00:{number // 60:02}:{number % 60:02}Z"


def put(folder: Path, name: str, *rows: dict) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f".{name}").write_text("\n".join(map(json.dumps, rows)))
    (folder / f".{name}").rename(folder / name)


def order(user: str, at: int, amount: int) -> dict:
    return {"user": user, "ts": second(at), "amount": amount}


def click(who: str, at: int, page: str) -> dict:
    return {"who": who, "at": second(at), "page": page}


def add_streams(env, folder: Path):
    """Add both sources, and give them names for SQL."""

    def read(name: str, schema: str) -> FileSource:
        return FileSource(str(folder / name), JsonLines(), schema, discovery=Discovery.CONTINUOUS)

    orders = env.from_source(read("orders", ORDER), uid="orders")
    clicks = env.from_source(read("clicks", CLICK), uid="clicks")
    env.create_temporary_view("orders", orders).create_temporary_view("clicks", clicks)
    return orders, clicks


def rows(folder: Path, *names: str) -> Counter:
    if not folder.exists():
        return Counter()
    return Counter(tuple(row[name] for name in names) for row in read_delta(folder))


JOIN = """
    SELECT user, amount, page
    FROM orders WATERMARK ts DELAY OF INTERVAL 5 SECONDS
    JOIN clicks WATERMARK at DELAY OF INTERVAL 5 SECONDS
      ON user = who AND at BETWEEN ts - INTERVAL 10 SECONDS AND ts
"""


def test_a_join_in_sql_keeps_its_state_from_run_to_run(spark, job_dir, tmp_path) -> None:
    (tmp_path / "clicks").mkdir()
    put(tmp_path / "orders", "0.json", order("ann", 10, 5), order("ben", 11, 7))

    def run() -> Counter:
        env = environment(spark, job_dir)
        add_streams(env, tmp_path)
        joined = env.sql(JOIN, uid="joined")
        joined.sink_to(DeltaSink(str(tmp_path / "table")), uid="table")
        joined.map(lambda row: (row.page, row.amount + 1), output="page STRING, next LONG").sink_to(
            DeltaSink(str(tmp_path / "mapped")), uid="mapped"
        )
        env.execute(until=CaughtUp())
        return rows(tmp_path / "table", "user", "amount", "page")

    assert run() == Counter()
    put(tmp_path / "clicks", "0.json", click("ann", 9, "shoes"), click("cat", 9, "hats"))
    assert run() == Counter({("ann", 5, "shoes"): 1})
    put(tmp_path / "clicks", "1.json", click("ben", 10, "hats"))
    put(tmp_path / "orders", "1.json", order("ben", 12, 1))
    assert run() == Counter({("ann", 5, "shoes"): 1, ("ben", 7, "hats"): 1, ("ben", 1, "hats"): 1})
    assert rows(tmp_path / "mapped", "page", "next") == Counter(
        {("shoes", 6): 1, ("hats", 8): 1, ("hats", 2): 1}
    )
    # Each sink's stream is a chain of its own, with its own scans and state.
    state = read_native_state(
        spark,
        str(job_dir),
        "joined",
        chain="table",
        options={"joinSide": "left"},
        scratch=str(tmp_path),
    )
    assert state.count() > 0


class Count(KeyedProcessFunction):
    def open(self, context):
        self.count = context.get_state(ValueStateDescriptor("count", "LONG"))

    def process_element(self, row, ctx):
        self.count.update((self.count.value() or 0) + 1)
        yield row.user, self.count.value()


def test_a_query_in_front_of_a_keyed_operator_beside_another_source(spark, job_dir, tmp_path) -> None:
    put(tmp_path / "orders", "0.json", order("ann", 1, 5), order("ann", 2, 1), order("ben", 2, 7))
    put(tmp_path / "orders", "1.json", order("ann", 40, 5))
    put(tmp_path / "clicks", "0.json", click("ann", 9, "shoes"), click("ben", 9, "hats"))

    def run() -> Counter:
        env = environment(spark, job_dir)
        orders, clicks = add_streams(env, tmp_path)
        big = orders.filter(lambda row: row.amount > 2)

        def totals(frame):
            windows = frame.withWatermark("ts", "0 seconds").groupBy(F.window("ts", "10 seconds"), "user")
            return windows.agg(F.sum("amount").alias("total")).select("user", "total")

        summed = env.from_query(totals, big, uid="totals")
        seen = clicks.map(lambda row: (row.who, 0), output="user STRING, total LONG")
        counted = (
            summed.union(seen).key_by("user").process(Count(), output="user STRING, count LONG", uid="count")
        )
        counted.sink_to(DeltaSink(str(tmp_path / "table")), uid="table")
        env.execute(until=CaughtUp())
        return rows(tmp_path / "table", "user", "count")

    assert run() == Counter({("ann", 1): 1, ("ann", 2): 1, ("ben", 1): 1, ("ben", 2): 1})
    put(tmp_path / "orders", "2.json", order("ben", 60, 5))
    put(tmp_path / "clicks", "1.json", click("cat", 9, "hats"))
    # The window of second 40 is over.
    assert run() - Counter({("ann", 1): 1, ("ann", 2): 1, ("ben", 1): 1, ("ben", 2): 1}) == Counter(
        {("ann", 3): 1, ("cat", 1): 1}
    )


def test_changed_rows_of_a_query_in_sql_replace_earlier_ones(spark, job_dir, tmp_path) -> None:
    (tmp_path / "clicks").mkdir()
    put(tmp_path / "orders", "0.json", order("ann", 1, 5), order("ben", 2, 7))

    def run() -> Counter:
        env = environment(spark, job_dir)
        add_streams(env, tmp_path)
        totals = "SELECT user, sum(amount) AS total FROM orders GROUP BY user"
        changes = env.sql(totals, output_mode="update", uid="totals")
        changes.sink_to(DeltaSink(str(tmp_path / "table"), mode=Upsert(keys=["user"])), uid="table")
        env.execute(until=CaughtUp())
        return rows(tmp_path / "table", "user", "total")

    assert run() == Counter({("ann", 5): 1, ("ben", 7): 1})
    put(tmp_path / "orders", "1.json", order("ann", 3, 1))
    assert run() == Counter({("ann", 6): 1, ("ben", 7): 1})


def test_a_query_joins_tables_of_the_session_and_leaves_no_view(spark, job_dir, tmp_path) -> None:
    (tmp_path / "clicks").mkdir()
    put(tmp_path / "orders", "0.json", order("ann", 1, 5), order("ben", 2, 7))
    spark.createDataFrame([("ann", "Bern")], "name STRING, city STRING").createOrReplaceTempView("towns")
    try:
        env = environment(spark, job_dir)
        add_streams(env, tmp_path)
        found = env.sql("SELECT city, amount FROM orders JOIN towns ON user = name", uid="found")
        found.sink_to(DeltaSink(str(tmp_path / "table")), uid="table")
        env.execute(until=CaughtUp())
    finally:
        spark.catalog.dropTempView("towns")
    assert rows(tmp_path / "table", "city", "amount") == Counter({("Bern", 5): 1})
    assert not spark.catalog.tableExists("orders")


def test_readers_of_one_aggregate_have_its_watermark_each(spark, job_dir, tmp_path) -> None:
    """Spark gave it to the first of two aggregates that were alike, and the second returned nothing."""
    for at in range(3):
        put(tmp_path / "orders", f"{at}.json", order("ann", 20 * at + 1, 1), order("ben", 20 * at + 2, 2))

    def add(env, totals, name: str) -> None:
        totals.sink_to(DeltaSink(str(tmp_path / name)), uid=name)
        counted = totals.key_by("user").process(
            Count(), output="user STRING, count LONG", uid=f"{name}-count"
        )
        counted.sink_to(DeltaSink(str(tmp_path / f"{name}-count")), uid=f"{name}-counts")

    def windows(frame):
        summed = frame.withWatermark("ts", "0 seconds").groupBy(F.window("ts", "10 seconds"), "user")
        return summed.agg(F.sum("amount").alias("total")).select("user", "total")

    env = environment(spark, job_dir)
    orders, _ = add_streams(env, tmp_path)
    add(env, env.from_query(windows, orders, uid="queried"), "query")
    files = spark.readStream.schema(ORDER).json(str(tmp_path / "orders"))
    add(env, env.from_dataframe(windows(files), uid="framed"), "frame")

    def is_there(_) -> bool:
        folders = [tmp_path / name for name in ("query", "query-count", "frame", "frame-count")]
        return all(rows(folder, "user").total() == 4 for folder in folders)

    run_until(env, is_there)
    for name in ("query", "frame"):
        assert rows(tmp_path / name, "user", "total") == Counter({("ann", 1): 2, ("ben", 2): 2})
        assert rows(tmp_path / f"{name}-count", "user", "count") == Counter(
            (user, count) for user in ("ann", "ben") for count in (1, 2)
        )


def test_a_stream_twice_joins_with_itself(spark, job_dir, tmp_path) -> None:
    put(tmp_path / "orders", "0.json", order("ann", 10, 5), order("ben", 11, 5))
    env = environment(spark, job_dir)
    orders, _ = add_streams(env, tmp_path)
    env.create_temporary_view("others", orders)
    pairs = env.sql(
        "SELECT o.user, p.user AS other FROM orders o JOIN others p "
        "ON o.amount = p.amount AND o.user < p.user",
        uid="pairs",
    )
    pairs.name("pairs of orders").sink_to(DeltaSink(str(tmp_path / "table")), uid="table")
    assert "pairs of orders" in str(env.get_job_graph())
    with pytest.raises(GraphError, match="the query 'pairs'"):
        pairs.uid("another")
    env.execute(until=CaughtUp())
    assert rows(tmp_path / "table", "user", "other") == Counter({("ann", "ben"): 1})


# -- refused ----------------------------------------------------------------------------------------


def refuse(spark, job_dir, tmp_path, add) -> str:
    for name in ("orders", "clicks"):
        (tmp_path / name).mkdir(exist_ok=True)
    env = environment(spark, job_dir)
    streams = add_streams(env, tmp_path)
    with pytest.raises((GraphError, SchemaError)) as refused:
        add(env, *streams).sink_to(DeltaSink(str(tmp_path / "table")), uid="table")
        env.execute()
    assert not [*Path(job_dir).glob("checkpoints/*")]
    return str(refused.value)


def timed(env, orders):
    return orders.assign_timestamps_and_watermarks(
        WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("ts")
    )


def foreign(env, orders):
    rate = env.spark.readStream.format("rate").load()
    return env.from_query(lambda frame: frame.join(rate, frame.amount == rate.value), orders, uid="query")


def add_timed_query(env, orders, **settings):
    summed = env.from_query(lambda frame: frame, orders, uid="query")
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("ts")
    timed = summed.assign_timestamps_and_watermarks(
        strategy.with_watermark_alignment("group", 1_000) if settings else strategy
    )
    return timed.key_by("user").process(Count(), output="user STRING, count LONG", uid="count")


def bounded(env, _):
    return env.from_collection([("ann", None, 1)], ORDER, uid="few")


TOWNS = "(SELECT explode(array('ann', 'zoe')) AS town) t"
REFUSED = {
    "a table that keeps its rows": (
        lambda env, *_: env.sql(f"SELECT town, amount FROM {TOWNS} LEFT JOIN orders ON town = user", uid="q"),
        "not supported",
    ),
    "numbers over all rows": (
        lambda env, *_: env.sql("SELECT row_number() OVER (ORDER BY ts) AS n FROM orders", uid="q"),
        "NON_TIME_WINDOW_NOT_SUPPORTED",
    ),
    "rows of one without the other's": (
        lambda env, *_: env.sql("SELECT user FROM orders EXCEPT SELECT who FROM clicks", uid="q"),
        "not supported",
    ),
    "times behind a query that ends": (
        lambda env, orders, _: add_timed_query(env, bounded(env, orders)),
        "'few' ends",
    ),
    "an alignment behind a query": (
        lambda env, orders, _: add_timed_query(env, orders, aligned=True),
        "cannot have watermark alignment",
    ),
    "a text that is no query": (lambda env, *_: env.sql("SELEKT 1"), "cannot parse the statement"),
    "a query without a stream": (lambda env, *_: env.sql("SELECT 1"), "reads no stream"),
    "a field that is not there": (
        lambda env, *_: env.sql("SELECT price FROM orders", uid="query"),
        "price",
    ),
    "an aggregate without a watermark": (
        lambda env, *_: env.sql("SELECT user, count(*) AS n FROM orders GROUP BY user", uid="query"),
        "watermark",
    ),
    "a stream that is not read": (
        lambda env, orders, clicks: env.from_query(lambda one, other: one, orders, clicks, uid="query"),
        "does not read the stream 'clicks'",
    ),
    "a stream that is read twice": (
        lambda env, orders, _: env.from_query(lambda one: one.union(one), orders, uid="query"),
        "reads the stream 'orders' twice",
    ),
    "a stream of its own": (lambda env, orders, _: foreign(env, orders), "a stream of its own"),
    "no DataFrame": (lambda env, orders, _: env.from_query(lambda one: 1, orders, uid="query"), "a int"),
    "two columns of one name": (
        lambda env, *_: env.sql("SELECT user, user FROM orders", uid="query"),
        "user",
    ),
    "event times in front": (
        lambda env, orders, _: env.from_query(lambda one: one, timed(env, orders), uid="query"),
        "has event times",
    ),
    "a query over a query": (
        lambda env, orders, _: env.from_query(
            lambda one: one, env.from_query(lambda one: one, orders, uid="first"), uid="query"
        ),
        "another query",
    ),
    "a name that is taken": (
        lambda env, orders, _: env.create_temporary_view("Orders", orders),
        "a view or table 'Orders' already",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_query_is_refused(spark, job_dir, tmp_path, case: str) -> None:
    add, says = REFUSED[case]
    assert says in refuse(spark, job_dir, tmp_path, add)
