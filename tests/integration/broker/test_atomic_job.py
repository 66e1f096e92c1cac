"""A job with an atomic Kafka sink: every checkpoint one transaction, through restarts and a lost one."""

from __future__ import annotations

import time

import pytest

from flinkish_spark import CheckpointConfig, KafkaSink
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.connectors.kafka.writer import KafkaSinkCommittable
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.steps import Step
from flinkish_spark.core.store import LocalStore
from flinkish_spark.protocol.decisions import Verdict
from tests.contracts.script import Stumbling, bring
from tests.integration.broker.test_replay import (
    AfterDecisions,
    abort_transactions,
    amounts,
    feed,
    replays,
    visible,
)
from tests.support.jobs import (
    TOTAL,
    RunningTotal,
    environment,
    expected_totals,
    orders_source,
    rows,
    running,
    totals_in,
)
from tests.support.open_transactions import still_open

pytestmark = pytest.mark.timeout(300)


def job(spark, broker, job_dir, source, topic):
    env = environment(spark, job_dir, checkpoint=CheckpointConfig(interval_ms=600_000, retained=100))
    orders = env.from_source(
        orders_source(broker.bootstrap_servers, source, group_id=f"group-of-{source}"), uid="orders"
    )
    totals = orders.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
    sink = KafkaSink(broker.bootstrap_servers, topic, key="user", atomic=True)
    totals.sink_to(sink, uid="out")
    return env


def decisions(job_dir):
    directory = JobDir(LocalStore(job_dir))
    found = (directory.decision(checkpoint) for checkpoint in directory.list_checkpoint_ids())
    return [one for one in found if one is not None and one.verdict is Verdict.COMMIT]


def transactions(decision):
    return {
        KafkaSinkCommittable.of(c.payload).transaction
        for staged in decision.batches
        for c in staged.committables
    }


def test_a_checkpoint_is_one_transaction_through_a_failure_in_front_of_a_decision(
    spark, broker, topic, job_dir
):
    """What is staged and undecided does not go on: the job goes back and stages all of it as one."""
    source, out = topic(2), topic(3)
    env = job(spark, broker, job_dir, source, out)
    stumbling = Stumbling()
    env.observe(stumbling)
    with running(env) as client:
        feed(broker, source, 0, 10)
        bring(client, lambda: rows(client, "out") >= 20)
        stumbling.left.append(("before", Step.DECISION, ""))
        feed(broker, source, 10, 20)
        time.sleep(2)
        feed(broker, source, 20, 30)
        bring(client, lambda: rows(client, "out") >= 60)
        client.stop_with_checkpoint()
        assert client.wait(240_000)
    assert not stumbling.left
    assert client.progress.restarts == 1
    assert totals_in(broker.bootstrap_servers, out) == expected_totals(amounts(30))
    with_data = [one for one in decisions(job_dir) if any(staged.committables for staged in one.batches)]
    assert with_data
    assert [len(transactions(one)) for one in with_data] == [1] * len(with_data)
    with KafkaAdmin(KafkaConnection(broker.bootstrap_servers)) as admin:
        found = admin.committed_offsets(f"group-of-{source}")
    assert sum(found.values()) == 60
    with TransactionClient(KafkaConnection(broker.bootstrap_servers)) as client_of_broker:
        uuid = next(iter(transactions(with_data[0])))[0]
        assert still_open(client_of_broker, _uuid_of(uuid)) == []


def _uuid_of(name):
    from flinkish_spark.protocol.ids import TransactionalId

    return TransactionalId.parse(name).job


@pytest.mark.nightly
def test_a_decided_transaction_that_the_broker_aborts_is_replayed_as_a_whole(spark, broker, topic, job_dir):
    source, out = topic(2), topic(3)
    env = job(spark, broker, job_dir, source, out)
    thief = AfterDecisions(job_dir, abort_transactions(broker, lambda position: position == 0), spared=1)
    env.observe(thief)
    with running(env) as client:
        feed(broker, source, 0, 10)
        bring(client, lambda: rows(client, "out") >= 20)
        feed(broker, source, 10, 20)
        time.sleep(2)
        feed(broker, source, 20, 30)
        bring(client, lambda: visible(broker, out) >= 60)
        client.stop_with_checkpoint()
        assert client.wait(240_000)
    assert thief.struck
    assert replays(job_dir, thief.struck) == [1]
    assert totals_in(broker.bootstrap_servers, out) == expected_totals(amounts(30))
