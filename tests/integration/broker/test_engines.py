"""Jobs whose Kafka side runs in Python."""

from __future__ import annotations

from collections import Counter

import pytest
from kafka.admin import KafkaAdminClient, NewPartitions
from pyspark.sql import functions as F

from flinkish_spark import DeadLetter, DeltaSink, Json, KafkaSink, KafkaSource, OnBadRecord, StartingOffsets
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.protocol.ids import JobUuid
from tests.support.jobs import (
    ORDER,
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
    read_delta,
    rows,
    run_until,
    running,
    totals_in,
)
from tests.support.open_transactions import still_open

pytestmark = pytest.mark.timeout(240)
USERS = tuple(f"u{i}" for i in range(12))


def put(servers, topic, first, count):
    """`count` orders for every user, each user's in one partition; returns the amounts by user."""
    for user in USERS:
        produce(servers, topic, [order(user, first + n) for n in range(count)], key=user.encode())
    return {user: [first + n for n in range(count)] for user in USERS}


def totals_job(spark, job_dir, servers, source, out, **source_settings):
    env = environment(spark, job_dir)
    orders = env.from_source(orders_source(servers, source, **source_settings), uid="orders")
    totals = orders.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
    totals.sink_to(KafkaSink(servers, out, key="user"), uid="out")
    return env, orders, totals


@pytest.mark.nightly
def test_a_job_that_starts_again_leaves_no_transaction_open(spark, broker, topic, job_dir):
    servers, source, out = broker.bootstrap_servers, topic(3), topic(2)
    amounts = {user: [] for user in USERS}
    for turn in range(2):
        for user, more in put(servers, source, 10 * turn, 10).items():
            amounts[user] += more
        env, _, _ = totals_job(spark, job_dir, servers, source, out)
        done = 10 * (turn + 1) * len(USERS)
        run_until(env, lambda _, done=done: sum(totals_in(servers, out).values()) == done)
    assert totals_in(servers, out) == expected_totals(amounts)
    with TransactionClient(KafkaConnection(servers)) as client:
        assert not still_open(client, JobUuid(env._supervisor()._job_dir.find_uuid().value))


@pytest.mark.nightly
def test_what_one_start_staged_the_next_one_commits(spark, broker, topic, job_dir):
    """Cancelled with data staged and not decided; the next start keeps it."""
    servers, source, out = broker.bootstrap_servers, topic(2), topic(2)
    amounts = put(servers, source, 0, 20)
    env, _, _ = totals_job(spark, job_dir, servers, source, out)
    with running(env) as client:
        await_that(lambda: rows(client, "out") == 20 * len(USERS), client)
        for user, more in put(servers, source, 20, 5).items():
            amounts[user] += more
        client.cancel()
        client.wait(timeout_ms=240_000)
    env, _, _ = totals_job(spark, job_dir, servers, source, out)
    run_until(env, lambda _: sum(totals_in(servers, out).values()) == 25 * len(USERS))
    assert totals_in(servers, out) == expected_totals(amounts)


@pytest.mark.nightly
def test_partitions_are_added_while_every_channel_is_counted(spark, broker, topic, job_dir):
    servers, source, out = broker.bootstrap_servers, topic(1), topic(1)
    env, _, _ = totals_job(spark, job_dir, servers, source, out)
    amounts = put(servers, source, 0, 5)
    with running(env) as client:
        await_that(lambda: rows(client, "out") == 5 * len(USERS), client)
        admin = KafkaAdminClient(bootstrap_servers=servers)
        admin.create_partitions({source: NewPartitions(total_count=3)})
        admin.close()
        for number, user in enumerate(USERS):
            values = [order(user, 100 + n) for n in range(5)]
            produce(servers, source, values, key=user.encode(), partition=number % 3)
            amounts[user] += [100 + n for n in range(5)]
        await_that(lambda: rows(client, "out") == 10 * len(USERS), client)
        before = client.progress.checkpoints
        await_that(lambda: client.progress.checkpoints > before + 2, client)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=240_000)
    # Orders of one user came through two partitions, so only their sets are determined.
    assert Counter(user for user, _ in totals_in(servers, out).elements()) == Counter(
        dict.fromkeys(USERS, 10)
    )


@pytest.mark.nightly
def test_transforms_expressions_and_several_sinks_of_one_stream(spark, broker, topic, job_dir, tmp_path):
    servers, source, out, plain = broker.bootstrap_servers, topic(2), topic(1), topic(1)
    put(servers, source, 0, 10)
    env = environment(spark, job_dir)
    orders = env.from_source(orders_source(servers, source), uid="orders")
    large = orders.transform(lambda df: df.where("amount >= 5"))
    # A key that would fail on a row without fields, as barriers are.
    key = F.when(F.col("user").isNull(), F.raise_error(F.lit("no user"))).otherwise(F.col("user"))
    totals = orders.key_by(key).process(RunningTotal(), output=TOTAL, uid="totals")
    totals.sink_to(KafkaSink(servers, out, key="user"), uid="out")
    large.sink_to(KafkaSink(servers, plain, key="user"), uid="plain")
    orders.sink_to(DeltaSink(str(tmp_path / "table")), uid="table")
    run_until(
        env,
        lambda c: (rows(c, "out"), rows(c, "plain"), rows(c, "table")) == (10 * 12, 5 * 12, 10 * 12),
    )
    assert totals_in(servers, out) == expected_totals({user: list(range(10)) for user in USERS})
    assert len(read_committed(servers, plain)) == 5 * 12
    assert len(read_delta(tmp_path / "table")) == 10 * 12


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["drop", "dead-letter"])
def test_bad_records_leave_barriers_alone(spark, broker, topic, job_dir, policy):
    servers, source, out, letters = broker.bootstrap_servers, topic(2), topic(1), topic(1)
    amounts = put(servers, source, 0, 5)
    produce(servers, source, [b"not json", b"", b"[1]"])
    on_bad = OnBadRecord.DROP if policy == "drop" else DeadLetter(letters)
    value = Json(ORDER, on_bad_record=on_bad)
    env, _, _ = totals_job(spark, job_dir, servers, source, out, value=value)
    client = run_until(
        env,
        lambda c: rows(c, "out") == 5 * 12 and (policy == "drop" or rows(c, "orders-dead-letter") == 3),
    )
    assert totals_in(servers, out) == expected_totals(amounts)
    if policy == "drop":
        assert client.progress.dropped == 3
    else:
        assert sorted(r.value for r in read_committed(servers, letters)) == [b"", b"[1]", b"not json"]


def test_a_bad_record_is_named(spark, broker, topic, job_dir):
    servers, source, out = broker.bootstrap_servers, topic(1), topic(1)
    produce(servers, source, [order("a"), b'{"user": "ann", "amount": "many"}'])
    env, _, _ = totals_job(spark, job_dir, servers, source, out)
    error = failure_of(env)
    assert f"topic {source}, partition 0, offset 1 cannot be read" in str(error)
    why = "its field 'amount' is \"many\", which is no bigint"
    assert error.why.startswith(f"the value cannot be read: {why}")


@pytest.mark.nightly
def test_the_latest_offsets_are_those_of_the_first_start(spark, broker, topic, job_dir):
    servers, source, out = broker.bootstrap_servers, topic(1), topic(1)
    put(servers, source, 0, 5)
    env, _, _ = totals_job(spark, job_dir, servers, source, out, starting_offsets=StartingOffsets.LATEST)
    with running(env) as client:
        await_that(lambda: client.progress.checkpoints > 0, client)
        amounts = put(servers, source, 100, 5)
        await_that(lambda: rows(client, "out") == 5 * 12, client)
        client.stop_with_checkpoint()
        client.wait(timeout_ms=240_000)
    assert totals_in(servers, out) == expected_totals(amounts)
    assert list((job_dir / "control" / "first-offsets").glob("*.json"))


def test_an_engine_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="reader is 'rust'"):
        KafkaSource("localhost:9092", ["a"], reader="rust")
