"""Jobs that would run out of time are refused by real brokers' settings, before anything starts."""

from __future__ import annotations

import logging

import pytest

from flinkish_spark import CheckpointConfig, KafkaSink
from flinkish_spark.errors import ConfigError
from flinkish_spark.kafka import KafkaAdmin, KafkaConnection
from flinkish_spark.sources.kafka_retention import keeping_of
from tests.support import environment, order, orders_source, produce, read_committed, rows, run_until

CHECKPOINT = CheckpointConfig(interval_ms=500, restart_budget_ms=59_500)
NEEDED_MS = "60000"


def copy_job(spark, broker, job_dir, source, sink, **settings):
    env = environment(spark, job_dir, checkpoint=CHECKPOINT)
    stream = env.from_source(orders_source(broker.bootstrap_servers, source), uid="orders")
    stream.sink_to(KafkaSink(broker.bootstrap_servers, sink, **settings), uid="copy")
    return env


def refusal(env, job_dir) -> str:
    with pytest.raises(ConfigError) as caught:
        env.execute()
    assert not job_dir.exists(), "a job that is refused leaves nothing behind"
    return str(caught.value)


def test_a_topic_that_forgets_before_a_replay_is_refused(spark, broker, topic, job_dir, caplog) -> None:
    short, out = topic(configs={"retention.ms": "59999"}), topic()
    text = refusal(copy_job(spark, broker, job_dir, short, out), job_dir)
    for part in (short, "'orders'", "retention.ms = 59999", f"{NEEDED_MS} ms", f"to {NEEDED_MS} or more"):
        assert part in text
    enough = topic(configs={"retention.ms": NEEDED_MS})
    produce(broker.bootstrap_servers, enough, [order("ann")])
    with caplog.at_level(logging.WARNING):
        run_until(copy_job(spark, broker, job_dir, enough, out), lambda client: rows(client, "copy") == 1)
    assert "compacted" not in caplog.text and "retention" not in caplog.text


def test_a_compacted_topic_is_warned_of_unless_it_keeps_what_is_young(
    spark, broker, topic, job_dir, caplog
) -> None:
    """Whoever reads such a topic has agreed to miss superseded records; a replay may miss others."""
    out = topic()
    compacted = topic(configs={"cleanup.policy": "compact", "retention.ms": "1"})
    produce(broker.bootstrap_servers, compacted, [order("ann")], key=b"ann")
    with caplog.at_level(logging.WARNING):
        run_until(copy_job(spark, broker, job_dir, compacted, out), lambda client: rows(client, "copy") == 1)
    said = [r.getMessage() for r in caplog.records if "is compacted" in r.getMessage()]
    assert len(said) == 1 and compacted in said[0] and "min.compaction.lag.ms is 0" in said[0]
    assert NEEDED_MS in said[0] and len(read_committed(broker.bootstrap_servers, out)) == 1
    patient = topic(configs={"cleanup.policy": "compact", "min.compaction.lag.ms": NEEDED_MS})
    found = keeping_of(KafkaConnection(broker.bootstrap_servers), [compacted, patient])
    assert [one.compacts_before(int(NEEDED_MS)) for one in found.values()] == [True, False]


def test_brokers_that_allow_less_than_the_job_needs(spark, own_broker, job_dir) -> None:
    """The advice is not to lower what the next check would have to be raised again."""
    own_broker._extra["transaction.max.timeout.ms"] = "50000"
    own_broker.start()
    with KafkaAdmin(KafkaConnection(own_broker.bootstrap_servers)) as admin:
        admin.create_topic("in", 1)
        admin.create_topic("out", 1)
    text = refusal(copy_job(spark, own_broker, job_dir, "in", "out"), job_dir)
    for part in (
        "'copy'",
        "900000 ms",
        "transaction.max.timeout.ms, which is 50000 ms",
        NEEDED_MS,
        "50000 or",
    ):
        assert part in text
    env = copy_job(spark, own_broker, job_dir, "in", "out", transaction_timeout_ms=59_999)
    assert f"59999 ms, shorter than checkpoint interval + restart budget = {NEEDED_MS}" in refusal(
        env, job_dir
    )
    env = copy_job(spark, own_broker, job_dir, "in", "out", transaction_timeout_ms=60_000)
    assert "60000 ms, which the brokers do not allow" in refusal(env, job_dir)
