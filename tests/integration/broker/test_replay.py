"""Commit or replay: what is decided and then destroyed is staged again, and nothing else is."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter

import pytest
from kafka import TopicPartition
from kafka.admin import KafkaAdminClient

from flinkish_spark import CheckpointConfig, DeltaSink, KafkaSink, NoRestart
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.core.errors import CommittableLostError, NotReplayableError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.steps import Step
from flinkish_spark.core.store import LocalStore
from flinkish_spark.protocol.decisions import Verdict
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.testing.broker import LocalBroker
from tests.integration.broker.conftest import BROKER_JARS
from tests.support.jobs import (
    TOTAL,
    RunningTotal,
    await_that,
    end,
    environment,
    expected_totals,
    failure_of,
    order,
    orders_source,
    produce,
    read_delta,
    rows,
    run_until,
    running,
    totals_in,
)
from tests.support.open_transactions import still_open
from tests.support.savepoint_support import started, stop


def job(spark, broker, job_dir, source, sinks=(), table=None, **settings):
    env = environment(spark, job_dir, **settings)
    stream = env.from_source(orders_source(broker.bootstrap_servers, source, group_id="g"), uid="orders")
    totals = stream.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
    for number, sink in enumerate(sinks):
        kafka = KafkaSink(broker.bootstrap_servers, sink, key="user")
        totals.sink_to(kafka, uid=f"kafka-{number}")
    if table is not None:
        totals.sink_to(DeltaSink(str(table)), uid="delta")
    return env


#: It may delete what is new, and lists a small folder without a hundred tasks.
QUICK_VACUUM = {
    "spark.databricks.delta.retentionDurationCheck.enabled": "false",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
}


class AfterDecisions:
    """Does something right behind a decision that holds data, once; behind the first `spared` ones."""

    def __init__(self, job_dir, action, spared=0):
        self._job_dir, self._action, self._left = JobDir(LocalStore(job_dir)), action, spared
        self.struck: list[int] = []

    def on_step_start(self, step, subject):
        pass

    def on_step_end(self, step, subject):
        if step is not Step.DECISION or self.struck:
            return
        decision = self._job_dir.decision(CheckpointId(int(subject)))
        if decision.verdict is Verdict.COMMIT and any(b.committables for b in decision.batches):
            self._left -= 1
            if self._left < 0:
                self.struck.append(int(subject))
                self._action(decision)


def abort_transactions(broker, only=lambda position: True):
    """Return what ends the transactions that a decision names, as a broker does behind their timeout."""

    def abort(decision):
        names = [c.payload.get("transactional_id") for b in decision.batches for c in b.committables]
        with TransactionClient(KafkaConnection(broker.bootstrap_servers)) as client:
            for position, name in enumerate(name for name in names if name):
                if only(position):
                    found = [
                        t
                        for t in client.list_open_transactions(_uuid_in(name))
                        if str(t.transactional_id) == name
                    ]
                    client.abort_open(found[0].transactional_id)

    return abort


def _uuid_in(name):
    from flinkish_spark.protocol.ids import TransactionalId

    return TransactionalId.parse(name).job


def make_topics(broker, **partitions):
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    for name, count in partitions.items():
        options = {"num_partitions": count, "replication_factor": 1, "configs": {}}
        admin.create_topics({name: options}, wait_for_metadata=True)
    admin.close()


def delete_records(broker, topic, before):
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    admin.delete_records({TopicPartition(topic, p): offset for p, offset in before.items()})
    admin.close()


def amounts(count):
    return {"a": list(range(count)), "b": list(range(count))}


def feed(broker, source, start, end_):
    """Orders of two users in turn, each user in one partition and in order."""
    for user, partition in (("a", 0), ("b", 1)):
        produce(
            broker.bootstrap_servers,
            source,
            [order(user, n) for n in range(start, end_)],
            key=user.encode(),
            partition=partition,
        )


def fed(broker, source, start, end_, parts=4):
    """Feed in parts, so that there are several micro-batches."""
    step = (end_ - start) // parts
    for first in range(start, end_, step):
        feed(broker, source, first, first + step)
        time.sleep(0.7)


def several_batches():
    return CheckpointConfig(interval_ms=2_500, restart_budget_ms=5_000)


def visible(broker, sink):
    return totals_in(broker.bootstrap_servers, sink).total()


def replays(job_dir, checkpoints):
    found = [JobDir(LocalStore(job_dir)).find_restaged(CheckpointId(n)) for n in checkpoints]
    return [one.number for one in found if one is not None]


def test_decided_transactions_that_the_broker_aborts_are_replayed(spark, broker, topic, job_dir, tmp_path):
    """Behaviours 128, 139: an epoch of several micro-batches with state; the other sink is left alone."""
    source, sink, table = topic(2), topic(2), tmp_path / "table"
    env = job(spark, broker, job_dir, source, [sink], table, checkpoint=several_batches())
    feed(broker, source, 0, 5)
    thief = AfterDecisions(job_dir, abort_transactions(broker), spared=1)
    env.observe(thief)
    client = env.execute_async()
    try:
        await_that(lambda: rows(client, "kafka-0") == 10, client)
        feeder = threading.Thread(target=fed, args=(broker, source, 5, 45))
        feeder.start()
        feeder.join()
        await_that(lambda: visible(broker, sink) == 90, client)
        client.stop_with_checkpoint()
        assert client.wait(240_000)
    finally:
        end(client)
    assert thief.struck
    assert client.progress.restarts == 1
    assert replays(job_dir, thief.struck) == [1]
    assert not (job_dir / "replay").exists()
    expected = expected_totals(amounts(45))
    assert totals_in(broker.bootstrap_servers, sink) == expected
    assert Counter((r["user"], r["total"]) for r in read_delta(table)) == expected


@pytest.mark.nightly
def test_the_first_epoch_is_replayed_from_where_the_sources_began(spark, broker, topic, job_dir):
    source, sink = topic(2), topic()
    feed(broker, source, 0, 20)
    env = job(spark, broker, job_dir, source, [sink])
    thief = AfterDecisions(job_dir, abort_transactions(broker))
    env.observe(thief)
    run_until(env, lambda c: visible(broker, sink) == 40)
    assert replays(job_dir, thief.struck) == [1]
    assert totals_in(broker.bootstrap_servers, sink) == expected_totals(amounts(20))


@pytest.mark.nightly
def test_what_two_sinks_lose_is_replayed_for_both(spark, broker, topic, job_dir):
    source, one, other = topic(2), topic(), topic(2)
    env = job(spark, broker, job_dir, source, [one, other])
    thief = AfterDecisions(job_dir, abort_transactions(broker))
    env.observe(thief)
    feed(broker, source, 0, 20)
    run_until(env, lambda c: visible(broker, one) == visible(broker, other) == 40)
    assert replays(job_dir, thief.struck) == [2]
    for sink in (one, other):
        assert totals_in(broker.bootstrap_servers, sink) == expected_totals(amounts(20))


@pytest.mark.nightly
def test_staged_files_that_are_vacuumed_behind_the_decision_are_replayed(
    spark, broker, topic, job_dir, tmp_path
):
    source, sink, table = topic(2), topic(), tmp_path / "table"
    env = job(spark, broker, job_dir, source, [sink], table)
    feed(broker, source, 0, 10)
    run_until(env, lambda c: rows(c, "delta") >= 20)

    def vacuum(decision):
        for name, value in QUICK_VACUUM.items():
            spark.conf.set(name, value)
        spark.sql(f"VACUUM delta.`{table}` RETAIN 0 HOURS")

    env = job(spark, broker, job_dir, source, [sink], table)
    thief = AfterDecisions(job_dir, vacuum)
    env.observe(thief)
    feed(broker, source, 10, 30)
    with running(env) as client:
        await_that(lambda: len(read_delta(table)) == 60, client, timeout_s=200)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=240_000)
    assert replays(job_dir, thief.struck) == [1]
    expected = expected_totals(amounts(30))
    assert totals_in(broker.bootstrap_servers, sink) == expected
    assert Counter((r["user"], r["total"]) for r in read_delta(table)) == expected


@pytest.mark.nightly
def test_a_task_that_is_lost_alone_is_replayed_alone(spark, broker, topic, job_dir):
    """One transaction of a micro-batch is committed, the other one is gone."""
    source, sink = topic(2), topic(2)
    feed(broker, source, 0, 20)
    env = job(spark, broker, job_dir, source, [sink])
    thief = AfterDecisions(job_dir, abort_transactions(broker, only=lambda position: position == 1))
    env.observe(thief)
    run_until(env, lambda c: visible(broker, sink) == 40)
    assert replays(job_dir, thief.struck) == [1]
    assert totals_in(broker.bootstrap_servers, sink) == expected_totals(amounts(20))


@pytest.mark.nightly
def test_a_job_that_was_stopped_until_its_decided_transactions_timed_out(spark, tmp_path, job_dir):
    """The transaction coordinator itself aborts them; nobody of ours is there."""
    quick = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"}
    with LocalBroker(tmp_path / "broker", jars_dir=BROKER_JARS, extra_properties=quick) as broker:
        make_topics(broker, orders=2, totals=2)
        stopped = threading.Event()

        def stop(decision):
            broker.pause()
            stopped.set()

        config = CheckpointConfig(interval_ms=500, restart_budget_ms=2_000)

        def timed_job():
            env = environment(spark, job_dir, checkpoint=config)
            stream = env.from_source(orders_source(broker.bootstrap_servers, "orders"), uid="orders")
            totals = stream.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
            sink = KafkaSink(broker.bootstrap_servers, "totals", transaction_timeout_ms=5_000)
            totals.sink_to(sink, uid="kafka-0")
            return env

        feed(broker, "orders", 0, 20)
        env = timed_job()
        thief = AfterDecisions(job_dir, stop)
        env.observe(thief)
        client = env.execute_async()
        try:
            assert stopped.wait(60)
        finally:
            end(client)
        broker.resume()
        uuid = JobDir(LocalStore(job_dir)).find_uuid()
        with TransactionClient(KafkaConnection(broker.bootstrap_servers)) as transactions:
            deadline = time.monotonic() + 30
            while still_open(transactions, uuid) and time.monotonic() < deadline:
                time.sleep(0.2)
            assert still_open(transactions, uuid) == []
        feed(broker, "orders", 20, 30)
        run_until(timed_job(), lambda c: visible(broker, "totals") == 60)
        assert replays(job_dir, thief.struck) == [1]
        assert totals_in(broker.bootstrap_servers, "totals") == expected_totals(amounts(30))


def test_without_the_input_the_job_stops_and_names_the_missing_offsets(spark, broker, topic, job_dir):
    source, sink = topic(2), topic()
    env = job(spark, broker, job_dir, source, [sink], restart_strategy=NoRestart())
    feed(broker, source, 0, 10)
    run_until(env, lambda c: rows(c, "kafka-0") >= 20)
    thief = AfterDecisions(job_dir, abort_transactions(broker))
    env = job(spark, broker, job_dir, source, [sink], restart_strategy=NoRestart())
    env.observe(thief)
    feed(broker, source, 10, 20)
    assert isinstance(failure_of(env), CommittableLostError)
    delete_records(broker, source, {0: 15, 1: 20})
    stopped = failure_of(job(spark, broker, job_dir, source, [sink]))
    assert isinstance(stopped, NotReplayableError)
    assert f"{source}-0 from 10 to 14" in str(stopped)
    assert f"{source}-1 from 10 to 19" in str(stopped)
    assert not JobDir(LocalStore(job_dir)).receipt(CheckpointId(thief.struck[0]))


@pytest.mark.nightly
def test_a_job_with_another_number_of_partitions_replays_with_the_number_that_it_had(
    spark, broker, topic, job_dir
):
    source, sink = topic(2), topic(2)
    feed(broker, source, 0, 10)
    run_until(job(spark, broker, job_dir, source, [sink]), lambda c: rows(c, "kafka-0") >= 20)
    env = job(spark, broker, job_dir, source, [sink], restart_strategy=NoRestart())
    thief = AfterDecisions(job_dir, abort_transactions(broker))
    env.observe(thief)
    feed(broker, source, 10, 20)
    assert isinstance(failure_of(env), CommittableLostError)
    feed(broker, source, 20, 30)
    with started(job(spark, broker, job_dir, source, [sink]), partitions=5) as client:
        await_that(lambda: visible(broker, sink) >= 60, client, timeout_s=120)
        stop(client)
    assert replays(job_dir, thief.struck) == [1]
    assert totals_in(broker.bootstrap_servers, sink) == expected_totals(amounts(30))


@pytest.mark.nightly
def test_a_job_that_is_told_to_stop_replays_its_last_checkpoint_first(spark, broker, topic, job_dir):
    """Nobody may start it again for long."""
    source, sink = topic(2), topic()
    feed(broker, source, 0, 20)
    config = CheckpointConfig(interval_ms=600_000, restart_budget_ms=5_000)
    env = job(spark, broker, job_dir, source, [sink], checkpoint=config)
    thief = AfterDecisions(job_dir, abort_transactions(broker))
    env.observe(thief)
    with running(env) as client:
        await_that(lambda: list((job_dir / "staged/0").glob("*.json")), client)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=120_000)
    assert replays(job_dir, thief.struck) == [1]
    assert totals_in(broker.bootstrap_servers, sink) == expected_totals(amounts(20))


def test_rows_that_come_out_otherwise_stop_the_job(spark, broker, topic, job_dir):
    """A function that is not deterministic cannot be replayed, and its rows are not mixed."""
    source, sink = topic(), topic()
    env = environment(spark, job_dir)
    stream = env.from_source(orders_source(broker.bootstrap_servers, source), uid="orders")
    changed = stream.transform(lambda frame: frame.selectExpr("user", "uuid() AS total"))
    changed.sink_to(KafkaSink(broker.bootstrap_servers, sink, key="user"), uid="kafka-0")
    thief = AfterDecisions(job_dir, abort_transactions(broker))
    env.observe(thief)
    produce(broker.bootstrap_servers, source, [order("a", n) for n in range(10)])
    stopped = failure_of(env)
    assert isinstance(stopped, NotReplayableError)
    assert "or other ones" in str(stopped)
    assert f"{source}-0 from " in str(stopped)
    assert json.dumps(sorted(totals_in(broker.bootstrap_servers, sink))) == "[]"


@pytest.fixture(autouse=True)
def no_leftover_setting(spark):
    yield
    for name in QUICK_VACUUM:
        spark.conf.unset(name)
