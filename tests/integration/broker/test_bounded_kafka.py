"""Kafka sources with an end: the job reads up to it, commits everything and is over."""

from __future__ import annotations

from collections import Counter

import pytest
from pyspark.sql import functions as F

from flinkish_spark import JobStatus, KafkaSink, MemorySink
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.sources import (
    EndAtLatest,
    EndAtOffsets,
    FileSource,
    HybridSource,
    KafkaRecordsSource,
    TextLines,
)
from tests.support.jobs import (
    ORDER,
    TOTAL,
    RunningTotal,
    await_that,
    environment,
    expected_totals,
    order,
    orders_source,
    produce,
    run_until,
    running,
    totals_in,
)
from tests.support.open_transactions import still_open

pytestmark = pytest.mark.timeout(600)
AMOUNTS = {f"u{i}": [i + n for n in range(20)] for i in range(6)}


def produce_orders(broker, topic):
    for user, amounts in AMOUNTS.items():
        produce(broker.bootstrap_servers, topic, [order(user, a) for a in amounts], key=user.encode())


def run_to_its_end(env):
    with running(env) as client:
        assert client.wait(timeout_ms=240_000), f"the job did not end; {client.progress}"
        assert client.status is JobStatus.FINISHED
    return client


@pytest.mark.nightly
def test_what_comes_behind_the_end_is_not_read(spark, broker, topic, job_dir, tmp_path) -> None:
    """Behaviours 130, 160."""
    servers, source, target = broker.bootstrap_servers, topic(2), topic(1)
    sink, group = MemorySink(str(tmp_path / "rows")), f"group-{source}"
    produce_orders(broker, source)

    def job():
        env = environment(spark, job_dir)
        given = orders_source(servers, source, group_id=group, ending=EndAtLatest())
        totals = env.from_source(given, uid="orders").key_by("user")
        totals = totals.process(RunningTotal(), output=TOTAL, uid="totals")
        totals.sink_to(KafkaSink(servers, target), uid="out")
        totals.sink_to(sink, uid="memory")
        return env

    run_to_its_end(job())
    produce(servers, source, [order("late", n) for n in range(10)])
    run_to_its_end(job())
    assert totals_in(servers, target) == expected_totals(AMOUNTS)
    assert len(sink.rows()) == sum(map(len, AMOUNTS.values()))
    with KafkaAdmin(KafkaConnection(servers, {})) as admin:
        committed = admin.committed_offsets(group)
    assert sum(committed.values()) == len(sink.rows())
    with TransactionClient(KafkaConnection(servers, {})) as client:
        assert list(still_open(client, JobDir(LocalStore(job_dir)).find_uuid())) == []


def test_an_end_in_the_future_is_waited_for(spark, broker, topic, job_dir, tmp_path) -> None:
    servers, source, sink = broker.bootstrap_servers, topic(), MemorySink(str(tmp_path))
    produce(servers, source, [order("a", n) for n in range(5)])
    env = environment(spark, job_dir)
    given = orders_source(servers, source, ending=EndAtOffsets({source: {0: 8}}))
    env.from_source(given, uid="orders").sink_to(sink, uid="memory")
    with running(env) as client:
        await_that(lambda: len(sink.rows()) == 5, client)
        # It has nothing else to wait for.
        seen = client.progress.checkpoints
        await_that(lambda: client.progress.checkpoints > seen + 1, client)
        produce(servers, source, [order("a", n) for n in range(5, 20)])
        assert client.wait(timeout_ms=200_000) and client.status is JobStatus.FINISHED
    assert sorted(row.amount for row in sink.rows()) == list(range(8))


@pytest.mark.nightly
def test_history_in_files_and_then_kafka(spark, broker, topic, job_dir, tmp_path) -> None:
    """In one order, over a restart; the group's offsets are those of the last checkpoint."""
    servers, source, sink = broker.bootstrap_servers, topic(2), MemorySink(str(tmp_path))
    (tmp_path / "in").mkdir()
    for n in range(3):
        lines = [order("a", 10 * n + i).decode() for i in range(10)]
        (tmp_path / "in" / f"{n}.json").write_text("\n".join(lines))
    produce(servers, source, [order("a", n) for n in range(30, 40)], partition=1)

    def job():
        env = environment(spark, job_dir)
        history = FileSource(str(tmp_path / "in"), TextLines(), "value STRING", max_files_per_batch=1)
        live = KafkaRecordsSource(servers, [source], group_id=f"group-{source}")
        orders = env.from_source(HybridSource(history, live), uid="orders")
        orders = orders.transform(
            lambda frame: frame.select(F.from_json("value", ORDER).alias("o")).select("o.*")
        )
        totals = orders.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
        totals.sink_to(sink, uid="memory")
        return env

    run_until(job(), lambda client: len(sink.rows()) == 40)
    produce(servers, source, [order("a", n) for n in range(40, 50)], partition=1)
    run_until(job(), lambda client: len(sink.rows()) == 50)
    assert Counter((row.user, row.total) for row in sink.rows()) == expected_totals({"a": list(range(50))})
    with KafkaAdmin(KafkaConnection(servers, {})) as admin:
        assert admin.committed_offsets(f"group-{source}") == {(source, 0): 0, (source, 1): 20}
