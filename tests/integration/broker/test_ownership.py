"""One owner: a second driver is refused, and a zombie can neither decide nor commit."""

from __future__ import annotations

from collections import Counter

import pytest

from flinkish_spark import DeltaSink, KafkaSink, NoRestart
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection as Connection
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.core.errors import CommittableLostError, FencedError, OwnedElsewhereError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.steps import Step
from flinkish_spark.core.store import LocalStore
from flinkish_spark.protocol.decisions import Verdict
from flinkish_spark.protocol.ids import JobUuid
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
    totals_in,
)
from tests.support.open_transactions import still_open


def job(spark, broker, job_dir, source, sink, table=None, **settings):
    env = environment(spark, job_dir, **settings)
    stream = env.from_source(orders_source(broker.bootstrap_servers, source), uid="orders")
    totals = stream.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
    totals.sink_to(KafkaSink(broker.bootstrap_servers, sink, key="user"), uid="kafka")
    if table is not None:
        totals.sink_to(DeltaSink(str(table)), uid="delta")
    return env


def open_transactions(broker, job_dir):
    uuid, _ = JobDir(LocalStore(job_dir)).read_or_create_job({})
    with TransactionClient(KafkaConnection(broker.bootstrap_servers)) as client:
        return still_open(client, JobUuid(str(uuid)))


def test_a_second_driver_is_refused_while_the_first_lives(spark, broker, topic, job_dir):
    source, sink = topic(), topic()
    produce(broker.bootstrap_servers, source, [order("a")])
    client = job(spark, broker, job_dir, source, sink).execute_async()
    try:
        await_that(lambda: rows(client, "kafka") == 1, client)
        with pytest.raises(OwnedElsewhereError, match=r"owned by process \d+ .*, which is alive"):
            raise failure_of(job(spark, broker, job_dir, source, sink))
        assert client.is_running
    finally:
        end(client)


def test_a_zombie_is_fenced_and_the_newcomer_is_exact(spark, broker, topic, job_dir, tmp_path):
    """The lock is lost while its holder lives on: a file server hands it to somebody else."""
    source, sink, table = topic(2), topic(2), tmp_path / "table"
    produce(broker.bootstrap_servers, source, [order("a", n) for n in range(50)], key=b"a")
    zombie = job(spark, broker, job_dir, source, sink, table).execute_async()
    newcomer = None
    try:
        await_that(lambda: rows(zombie, "kafka") == 50, zombie)
        (job_dir / "owner.lock").unlink()
        newcomer = job(spark, broker, job_dir, source, sink, table).execute_async()
        with pytest.raises(FencedError, match="owner 2 has taken this job over from owner 1"):
            zombie.wait(timeout_ms=240_000)
        produce(broker.bootstrap_servers, source, [order("a", n) for n in range(50, 80)], key=b"a")
        await_that(lambda: rows(newcomer, "kafka") >= 30, newcomer)
        newcomer.stop_with_checkpoint()
        assert newcomer.wait(240_000)
    finally:
        end(zombie)
        if newcomer is not None:
            end(newcomer)
    expected = expected_totals({"a": list(range(80))})
    assert totals_in(broker.bootstrap_servers, sink) == expected
    assert Counter((r["user"], r["total"]) for r in read_delta(table)) == expected
    assert open_transactions(broker, job_dir) == []
    owners = {d.owner_epoch.value for d in decisions(job_dir)}
    assert owners == {1, 2}


def decisions(job_dir):
    folder = JobDir(LocalStore(job_dir))
    found = [folder.decision(checkpoint) for checkpoint in folder.list_checkpoint_ids()]
    return [d for d in found if d is not None and d.verdict is Verdict.COMMIT]


class EndTransactionsOf:
    """Aborts what a checkpoint has just decided, as a broker does when the timeout has passed."""

    def __init__(self, broker):
        self._connection = Connection(broker.bootstrap_servers)
        self.job_dir = None

    def on_step_start(self, step, subject):
        pass

    def on_step_end(self, step, subject):
        newest = decisions(self.job_dir)[-1] if step is Step.DECISION else None
        if newest is not None and newest.group_by_sink().get("kafka"):
            with TransactionClient(self._connection) as client:
                for found in client.list_open_transactions(
                    JobUuid(JobDir(LocalStore(self.job_dir)).read_or_create_job({})[0].value)
                ):
                    client.abort_open(found.transactional_id)


def test_a_lost_committable_stops_the_job_and_nothing_later_is_decided(spark, broker, topic, job_dir):
    """Behaviours 128, 139: the next start stages it again before it decides anything else."""
    source, sink = topic(), topic()
    produce(broker.bootstrap_servers, source, [order("a", 1)])
    env = job(spark, broker, job_dir, source, sink, restart_strategy=NoRestart())
    thief = EndTransactionsOf(broker)
    thief.job_dir = job_dir
    env.observe(thief)
    error = failure_of(env)
    assert isinstance(error, CommittableLostError)
    assert "of sink 'kafka' in checkpoint" in str(error)
    lost = error.checkpoint
    assert decisions(job_dir)[-1].checkpoint == lost
    assert JobDir(LocalStore(job_dir)).receipt(lost) is None
    assert totals_in(broker.bootstrap_servers, sink) == Counter()
    produce(broker.bootstrap_servers, source, [order("a", 1)])
    run_until(job(spark, broker, job_dir, source, sink), lambda c: rows(c, "kafka") >= 1)
    assert totals_in(broker.bootstrap_servers, sink) == expected_totals({"a": [1, 1]})


class AbortStagedOnce:
    """Aborts a staged transaction before its decision, once."""

    def __init__(self, broker, job_dir):
        self._broker, self._job_dir, self.done = broker, job_dir, False

    def on_step_start(self, step, subject):
        pass

    def on_step_end(self, step, subject):
        if step is Step.STAGED_FILE and not self.done:
            with TransactionClient(Connection(self._broker.bootstrap_servers)) as client:
                for found in open_transactions(self._broker, self._job_dir):
                    client.abort_open(found.transactional_id)
                    self.done = True


def test_staged_data_that_dies_before_the_decision_is_staged_again(spark, broker, topic, job_dir):
    source, sink = topic(), topic()
    produce(broker.bootstrap_servers, source, [order("a", n) for n in range(20)])
    env = job(spark, broker, job_dir, source, sink)
    thief = AbortStagedOnce(broker, job_dir)
    env.observe(thief)
    client = run_until(env, lambda c: rows(c, "kafka") >= 20)
    assert thief.done
    assert client.progress.restarts == 1
    assert JobDir(LocalStore(job_dir)).lineage().value == 1
    assert totals_in(broker.bootstrap_servers, sink) == expected_totals({"a": list(range(20))})
