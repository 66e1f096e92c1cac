"""Jobs that would run out of time are refused by real brokers' settings, before anything starts."""

from __future__ import annotations

import logging

import pytest

from flinkish_spark import CheckpointConfig, Json, KafkaSink, KafkaSource
from flinkish_spark.connectors.kafka.checks import read_topic_retention
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.core.errors import ConfigError
from tests.support.jobs import ORDER, environment, order, produce, read_committed, rows, run_until

CHECKPOINT = CheckpointConfig(interval_ms=500, restart_budget_ms=59_500)
NEEDED_MS = "60000"


def copy_job(spark, broker, job_dir, sources, sink, checkpoint=CHECKPOINT, **settings):
    env = environment(spark, job_dir, checkpoint=checkpoint)
    source = KafkaSource(broker.bootstrap_servers, sources, value=Json(ORDER))
    stream = env.from_source(source, uid="orders")
    stream.sink_to(KafkaSink(broker.bootstrap_servers, sink, **settings), uid="copy")
    return env


def refusal(env, job_dir) -> str:
    with pytest.raises(ConfigError) as caught:
        env.execute()
    assert not job_dir.exists(), "a job that is refused leaves nothing behind"
    return str(caught.value)


def test_a_topic_that_forgets_before_a_replay_is_refused(spark, broker, topic, job_dir) -> None:
    short = topic(configs={"retention.ms": "59999"})
    text = refusal(copy_job(spark, broker, job_dir, [short], topic()), job_dir)
    for part in (short, "'orders'", "retention.ms = 59999", f"{NEEDED_MS} ms", f"to {NEEDED_MS} or more"):
        assert part in text


def test_a_compacted_topic_is_warned_of_unless_it_keeps_what_is_young(
    spark, broker, topic, job_dir, caplog
) -> None:
    """Whoever reads such a topic has agreed to miss superseded records; a replay may miss others."""
    out, enough = topic(), topic(configs={"retention.ms": NEEDED_MS})
    compacted = topic(configs={"cleanup.policy": "compact", "retention.ms": "1"})
    for source in (compacted, enough):
        produce(broker.bootstrap_servers, source, [order("ann")], key=b"ann")
    with caplog.at_level(logging.WARNING):
        run_until(
            copy_job(spark, broker, job_dir, [compacted, enough], out),
            lambda client: rows(client, "copy") == 2,
        )
    said = [r.getMessage() for r in caplog.records if "is compacted" in r.getMessage()]
    assert len(said) == 1 and compacted in said[0] and "min.compaction.lag.ms is 0" in said[0]
    assert NEEDED_MS in said[0] and len(read_committed(broker.bootstrap_servers, out)) == 2
    assert enough not in caplog.text, "its records stay just long enough"
    patient = topic(configs={"cleanup.policy": "compact", "min.compaction.lag.ms": NEEDED_MS})
    found = read_topic_retention(KafkaConnection(broker.bootstrap_servers), [compacted, patient])
    assert [one.compacts_before(int(NEEDED_MS)) for one in found.values()] == [True, False]


def test_brokers_that_allow_less_than_the_job_needs(spark, broker, topic, job_dir) -> None:
    """The advice is not to lower what the next check would have to be raised again.

    A broker allows 900 s unless it is told otherwise.
    """
    source, out = topic(), topic()
    patient = CheckpointConfig(interval_ms=500, restart_budget_ms=999_500)
    text = refusal(
        copy_job(spark, broker, job_dir, [source], out, patient, transaction_timeout_ms=1_200_000), job_dir
    )
    for part in ("'copy'", "1200000 ms", "transaction.max.timeout.ms, which is 900000 ms", "1000000"):
        assert part in text
    assert "to 900000 or less" in text
    env = copy_job(spark, broker, job_dir, [source], out, transaction_timeout_ms=59_999)
    assert f"59999 ms, shorter than checkpoint interval + restart budget = {NEEDED_MS}" in refusal(
        env, job_dir
    )
    env = copy_job(spark, broker, job_dir, [source], out, transaction_timeout_ms=900_001)
    text = refusal(env, job_dir)
    assert "900001 ms, which the brokers do not allow" in text
    assert "lower transaction_timeout_ms to 900000" in text
