"""`to_dataframe`: the records of a stream in a query of the user's own, beside the job and without it."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException

from flinkish_spark import MemorySink, WatermarkStrategy
from tests.support.jobs import (
    ORDER,
    TOTAL,
    RunningTotal,
    await_that,
    environment,
    expected_totals,
    rows,
    running,
)

pytestmark = pytest.mark.timeout(300)
AMOUNTS: dict[str | None, list[int]] = {"ann": [1, 2, 3], "bob": [10, 20], None: [5]}


@pytest.fixture
def unchecked(spark) -> Iterator[None]:
    """The setting that `to_dataframe` names: positions within a task are more than Spark's check allows."""
    name = "spark.sql.streaming.unsupportedOperationCheck"
    spark.conf.set(name, "false")
    yield
    spark.conf.unset(name)


def read(frame: Any) -> Counter:
    """Run a query of one's own over all that there is by now."""
    assert frame.isStreaming
    name = f"own_{uuid.uuid4().hex[:8]}"
    query = frame.writeStream.format("memory").queryName(name).outputMode("append").start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    return Counter(map(tuple, frame.sparkSession.table(name).collect()))


def orders_of(env: Any, folder: Path) -> Any:
    """A stream of two sources of which one record is left out."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"user": u, "amount": a}) for u, all_ in AMOUNTS.items() if u != "bob" for a in all_]
    (folder / "0.json").write_text("\n".join([*lines, json.dumps({"user": "ann", "amount": 0})]))
    files = env.from_dataframe(env.spark.readStream.schema(ORDER).json(str(folder)), uid="files")
    bob = env.from_collection([("bob", amount) for amount in AMOUNTS["bob"]], ORDER, uid="collection")
    return files.transform(lambda df: df.where("amount > 0")).union(bob)


def test_the_records_of_a_source_with_an_order_of_its_own(spark, job_dir) -> None:
    numbers = environment(spark, job_dir).from_collection(list(range(9)), "n LONG", uid="numbers")
    frame = numbers.filter(lambda row: row.n > 2).to_dataframe()
    assert frame.columns == ["n"]
    assert read(frame) == Counter((n,) for n in range(3, 9))
    assert not job_dir.exists()


def test_a_dataframe_needs_the_setting(spark, job_dir, tmp_path) -> None:
    frame = orders_of(environment(spark, job_dir), tmp_path / "in").to_dataframe()
    with pytest.raises(AnalysisException, match="monotonically_increasing_id"):
        read(frame)


@pytest.mark.usefixtures("unchecked")
def test_the_records_of_sources_and_functions_without_anything_of_ours(spark, job_dir, tmp_path) -> None:
    orders = orders_of(environment(spark, job_dir), tmp_path / "in")
    frame = orders.map(lambda order: (order.user, order.amount * 2), output=ORDER).to_dataframe()
    assert frame.columns == ["user", "amount"]
    wanted = Counter((user, 2 * amount) for user, amounts in AMOUNTS.items() for amount in amounts)
    assert read(frame) == wanted
    assert not job_dir.exists()


@pytest.mark.usefixtures("unchecked")
def test_records_with_event_times_before_anything_has_a_sink(spark, job_dir) -> None:
    """Whoever counts the inputs of sinks alone does not know who reports the times."""
    orders = environment(spark, job_dir).from_collection([("ann", 1), ("ann", 2)], ORDER, uid="orders")
    by_amount = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("amount")
    timed = orders.assign_timestamps_and_watermarks(by_amount)
    totals = timed.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
    assert read(totals.to_dataframe()) == Counter([("ann", 1), ("ann", 3)])


@pytest.mark.usefixtures("unchecked")
def test_the_records_of_a_keyed_operator_and_the_job_beside_it(spark, job_dir, tmp_path) -> None:
    """Each has a state of its own: the query is no part of the job, and takes nothing from it."""
    env, sink = environment(spark, job_dir), MemorySink(str(tmp_path))
    totals = (
        orders_of(env, tmp_path / "in").key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
    )
    totals.sink_to(sink, uid="out")
    frame, wanted = (
        totals.transform(lambda df: df.where("total > 1")).to_dataframe(),
        expected_totals(AMOUNTS),
    )
    with running(env) as client:
        await_that(lambda: rows(client, "out") == wanted.total(), client)
        assert read(frame) == Counter({row: count for row, count in wanted.items() if row[1] > 1})
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=60_000)
    assert Counter(map(tuple, sink.rows())) == wanted
