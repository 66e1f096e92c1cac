"""A real job whose branches show a barrier in different micro-batches: AT_LEAST_ONCE, beside EXACTLY_ONCE.

What the mode changes here: a checkpoint whose barrier comes late in some branch completes with the
last one, and is declined in EXACTLY_ONCE. What it does not change: a decision covers every micro-batch
up to the last barrier as a whole, offsets, state and committables, so nothing comes twice; only a
branch whose barrier was early has more in the checkpoint than what lay in front of that barrier.

Branches that begin at one place share a scan, and with it their barriers. Those of a restored job may
stand at different places: then each has a scan of its own, and with the Python reader each learns for
itself of a checkpoint. `tests/support/late_reader.py` makes one always the last.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest

from flinkish_spark import CheckpointConfig, CheckpointingMode, KafkaSink, NoRestart
from flinkish_spark.connectors.kafka import source as kafka_source
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.planning.beginning import Beginning
from flinkish_spark.protocol.decisions import Decision
from tests.support.jobs import (
    TOTAL,
    RunningTotal,
    await_that,
    environment,
    expected_totals,
    failure_of,
    order,
    orders_source,
    produce,
    read_committed,
    rows,
    running,
    totals_in,
)
from tests.support.late_reader import register_late

USERS = ("a", "b", "c")


@pytest.fixture(autouse=True)
def uneven_branches(monkeypatch):
    """The next job that starts registers the source as it should be."""
    monkeypatch.setattr(kafka_source, "register", register_late)
    # As if each chain had a position of its own in a savepoint.
    monkeypatch.setattr(Beginning, "find_input_label", lambda self, chain, name: chain.name)


def job(spark, broker, job_dir, topics, mode, **config):
    """Two branches: totals, and the orders themselves."""
    source, totals_topic, orders_topic = topics
    config = CheckpointConfig(interval_ms=300, mode=mode, retained=1_000, **config)
    env = environment(spark, job_dir, checkpoint=config, restart_strategy=NoRestart())
    orders = env.from_source(orders_source(broker.bootstrap_servers, source), uid="orders")
    totals = orders.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
    totals.sink_to(KafkaSink(broker.bootstrap_servers, totals_topic, key="user"), uid="totals-kafka")
    orders.sink_to(KafkaSink(broker.bootstrap_servers, orders_topic, key="user"), uid="orders-kafka")
    return env


def put(broker, topic, first, count):
    for user in USERS:
        produce(broker.bootstrap_servers, topic, [order(user, first + n) for n in range(count)])


def orders_in(broker, topic):
    found = (json.loads(record.value) for record in read_committed(broker.bootstrap_servers, topic))
    return Counter((row["user"], row["amount"]) for row in found)


def completed(job_dir) -> tuple[Decision, ...]:
    return JobDir(LocalStore(job_dir)).live_commits()


def shown_in(decision: Decision) -> list[list[int]]:
    """The micro-batches in which each sink saw the decision's own barrier, the earliest sink first."""
    shown: dict[str, set[int]] = {}
    for batch in decision.batches:
        for ack in batch.acks:
            numbers = shown.setdefault(ack.sink, set())
            numbers |= {int(batch.batch) for b in ack.barriers if b.checkpoint == decision.checkpoint}
    return sorted(sorted(numbers) for numbers in shown.values())


def test_at_least_once_a_checkpoint_completes_with_its_last_barrier(spark, broker, topic, job_dir):
    """Behaviours 60, 110, 112: cancelled and started again; every record is visible, and here once."""
    topics = topic(), topic(), topic()

    def visible(client, count):
        """Whether both branches have committed that many orders of each user in this start."""
        return all(rows(client, sink) >= count * len(USERS) for sink in ("orders-kafka", "totals-kafka"))

    put(broker, topics[0], 0, 5)
    with running(job(spark, broker, job_dir, topics, CheckpointingMode.AT_LEAST_ONCE)) as client:
        await_that(lambda: client.progress.checkpoints > 0, client)
        put(broker, topics[0], 5, 5)
        await_that(lambda: visible(client, 10), client)
        client.cancel()
        assert client.wait(240_000)
    before = completed(job_dir)
    # Each branch showed the barrier once, never both in one micro-batch, and the checkpoint reaches to
    # the later one.
    assert len(before) >= 2
    for decision in before:
        (early,), (late,) = shown_in(decision)
        assert early < late == int(decision.batch)

    put(broker, topics[0], 10, 5)
    with running(job(spark, broker, job_dir, topics, CheckpointingMode.AT_LEAST_ONCE)) as client:
        await_that(lambda: visible(client, 5), client)
        client.stop_with_checkpoint()
        assert client.wait(240_000)
    assert len(completed(job_dir)) > len(before)
    assert orders_in(broker, topics[2]) == Counter((user, n) for user in USERS for n in range(15))
    amounts = {user: list(range(15)) for user in USERS}
    assert totals_in(broker.bootstrap_servers, topics[1]) == expected_totals(amounts)


@pytest.mark.nightly
def test_exactly_once_the_same_checkpoint_is_declined(spark, broker, topic, job_dir):
    """Behaviour 31: it would be drawn at two places."""
    topics = topic(), topic(), topic()
    put(broker, topics[0], 0, 3)
    env = job(spark, broker, job_dir, topics, CheckpointingMode.EXACTLY_ONCE, tolerable_failures=0)
    failure = failure_of(env)
    assert "more checkpoints in a row than the job tolerates" in str(failure)
    assert "did not see the barrier exactly once on every channel" in str(failure)
    assert not completed(job_dir)
    assert not orders_in(broker, topics[2]) and not totals_in(broker.bootstrap_servers, topics[1])
