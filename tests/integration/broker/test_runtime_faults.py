"""Bad input and bad luck while a job runs: it stops with a clear message or goes on, and loses nothing."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest
from kafka import TopicPartition
from kafka.admin import KafkaAdminClient

from flinkish_spark import DeadLetter, FixedDelay, Json, KafkaSink, KeyedProcessFunction, OnBadRecord
from flinkish_spark.core.errors import BadRecordError, InputLostError, JobDirError, UserFunctionError
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
    rows,
    run_until,
    running,
    totals_in,
)

#: Values that are not a JSON object of `user STRING, amount LONG`.
BAD = [
    b"not json",
    None,
    b"",
    b" \n",
    b"null",
    b"5",
    b'"text"',
    b"[]",
    order("ann").join([b"[", b"]"]),
    b'{"user": "ann", "amount": "many"}',
    b'{"user": "ann", "amount": 1.5}',
    b"{'user': 'ann', 'amount': 1}",
    order("ann") + b" and more",
    b'{"user": "ann", "amount": 1',
    b"\xff\xfe",
    b'{"user": "\xff", "amount": 1}',
]


class RaisesOnce(KeyedProcessFunction):
    """Raises on the amount 13, in every attempt."""

    def process_element(self, order, ctx):
        if order.amount == 13:
            raise ValueError("unlucky")
        yield order.user, order.amount


def totals_job(spark, job_dir, servers, source, out, *, value=None, function=None, **settings):
    """Totals of one topic to another; `settings` are those of the source."""
    env = environment(spark, job_dir, restart_strategy=FixedDelay(attempts=3, delay_ms=100))
    orders = env.from_source(
        orders_source(servers, source, value=value or Json(ORDER), **settings), uid="orders"
    )
    totals = orders.key_by("user").process(function or RunningTotal(), output=TOTAL, uid="totals")
    totals.sink_to(KafkaSink(servers, out, key="user"), uid="out")
    return env


def counts(count: int):
    return lambda client: rows(client, "out") >= count


# -- values that are not JSON -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"not json", "the value is no JSON object"),
        pytest.param(None, "the record has no value", marks=pytest.mark.nightly),
        pytest.param(b"", "the value is no JSON object", marks=pytest.mark.nightly),
        pytest.param(
            b'{"user": "ann", "amount": "many"}',
            "the value cannot be read: "
            "its field 'amount' is \"many\", which is no bigint: it is no whole number",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_bad_value_stops_the_job_with_its_place(spark, broker, topic, job_dir, bad, why) -> None:
    servers, source, out = broker.bootstrap_servers, topic(partitions=2), topic()
    produce(servers, source, [order("ann")] * 3 + [bad, order("ann")], partition=1)
    env = totals_job(spark, job_dir, servers, source, out)
    with running(env) as client:
        with pytest.raises(BadRecordError) as caught:
            client.wait(timeout_ms=240_000)
        error = caught.value
        assert f"topic {source}, partition 1, offset 3" in str(error), str(error)
        assert (error.topic, error.partition, error.offset, error.why) == (source, 1, 3, why)
        assert "OnBadRecord.DROP" in error.what_to_do and client.progress.restarts == 0
        assert read_committed(servers, out) == []


@pytest.mark.nightly
def test_a_stopped_job_goes_on_with_another_policy(spark, broker, topic, job_dir) -> None:
    """FAIL, then DROP on the same job directory; a dead-letter topic needs a new one, and says so."""
    servers, source, out, letters = broker.bootstrap_servers, topic(), topic(), topic()
    produce(servers, source, [order("ann", 1)])
    run_until(totals_job(spark, job_dir, servers, source, out), counts(1))
    produce(servers, source, [order("ann", 2), b"bad", order("ann", 3)])
    assert isinstance(failure_of(totals_job(spark, job_dir, servers, source, out)), BadRecordError)
    value = Json(ORDER, on_bad_record=DeadLetter(letters))
    error = failure_of(totals_job(spark, job_dir, servers, source, out, value=value))
    assert isinstance(error, JobDirError) and "orders-dead-letter" in str(error), repr(error)
    value = Json(ORDER, on_bad_record=OnBadRecord.DROP)
    client = run_until(totals_job(spark, job_dir, servers, source, out, value=value), counts(2))
    assert client.progress.dropped == 1
    assert totals_in(servers, out) == expected_totals({"ann": [1, 2, 3]})


@pytest.mark.nightly
def test_bad_values_go_to_the_dead_letters_once(spark, broker, topic, job_dir) -> None:
    """Over two starts, in the checkpoints of everything else."""
    servers, source, out, letters = broker.bootstrap_servers, topic(partitions=2), topic(), topic()
    value = Json(ORDER, on_bad_record=DeadLetter(letters))
    produce(servers, source, [order("ann", 1), *BAD, order("ann", 2)], partition=0, key=b"k")
    job = totals_job(spark, job_dir, servers, source, out, value=value)
    run_until(job, lambda c: rows(c, "out") >= 2 and rows(c, "orders-dead-letter") >= len(BAD))
    produce(servers, source, [*BAD[:3], order("bob", 4)], partition=1)
    job = totals_job(spark, job_dir, servers, source, out, value=value)
    run_until(job, lambda c: rows(c, "out") >= 1 and rows(c, "orders-dead-letter") >= 3)
    assert totals_in(servers, out) == expected_totals({"ann": [1, 2], "bob": [4]})
    dead = Counter((r.key, r.value) for r in read_committed(servers, letters))
    assert dead == Counter([*((b"k", bad) for bad in BAD), (None, BAD[0]), (b"null", None), (None, BAD[2])])


@pytest.mark.nightly
def test_bad_values_are_dropped_and_counted(spark, broker, topic, job_dir) -> None:
    """Null users and null record keys are not bad: they are a key like any other."""
    servers, source, out = broker.bootstrap_servers, topic(partitions=2), topic()
    good = [order("ann", 1), order(None, 5), order("ann", 2), order(None, 6)]
    produce(servers, source, [*BAD, *good], partition=0)
    produce(servers, source, BAD[:3], partition=1, key=b"k")
    value = Json(ORDER, on_bad_record=OnBadRecord.DROP)
    # Several micro-batches, so that a count read twice or skipped would show.
    job = totals_job(spark, job_dir, servers, source, out, value=value, max_offsets_per_trigger=6)
    client = run_until(job, counts(len(good)))
    assert client.progress.dropped == len(BAD) + 3
    assert totals_in(servers, out) == expected_totals({"ann": [1, 2], None: [5, 6]})
    keys = {(r.key, json.loads(r.value)["user"]) for r in read_committed(servers, out)}
    assert keys == {(b"ann", "ann"), (None, None)}


# -- records that the broker does not take ----------------------------------------------------------

HUGE = "x" * 5_000


@pytest.fixture
def small(broker, topic):
    """Topic names: an input, an output that takes at most 2,000 bytes, and dead letters; all filled."""
    source, out, letters = topic(), topic(configs={"max.message.bytes": "2000"}), topic()
    produce(broker.bootstrap_servers, source, [order("ann", 1), order(HUGE, 1), order("ann", 2)])
    return source, out, letters


def test_an_oversize_record_stops_the_job_once(spark, broker, small, job_dir) -> None:
    servers, (source, out, _) = broker.bootstrap_servers, small
    with running(totals_job(spark, job_dir, servers, source, out)) as client:
        with pytest.raises(BadRecordError, match=rf"(?s){out}.*2000.*To do"):
            client.wait(timeout_ms=240_000)
        assert client.progress.restarts == 0
        assert read_committed(servers, out) == []


def test_an_oversize_record_is_dropped_and_counted_or_goes_to_the_dead_letters(
    spark, broker, topic, small, job_dir
) -> None:
    """By the policy of each of a job's sinks."""
    servers, (source, dropping, letters) = broker.bootstrap_servers, small
    keeping = topic(configs={"max.message.bytes": "2000"})
    env = environment(spark, job_dir, restart_strategy=FixedDelay(attempts=3, delay_ms=100))
    orders = env.from_source(orders_source(servers, source), uid="orders")
    totals = orders.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
    for out, policy in ((dropping, OnBadRecord.DROP), (keeping, DeadLetter(letters))):
        totals.sink_to(KafkaSink(servers, out, key="user", on_oversize=policy), uid=out)
    client = run_until(env, lambda c: c.progress.dropped >= 1 and rows(c, keeping) >= 2)
    assert (client.progress.dropped, client.progress.restarts) == (1, 0)
    for out in (dropping, keeping):
        assert totals_in(servers, out) == expected_totals({"ann": [1, 2]})
    assert len(read_committed(servers, letters)) == 1


# -- topics that change -----------------------------------------------------------------------------


@pytest.fixture
def admin(broker):
    client = KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    yield client
    client.close()


def create_again(admin, name: str) -> None:
    admin.delete_topics([name])
    deadline = time.monotonic() + 30
    while True:
        try:
            admin.create_topics({name: {"num_partitions": 1, "replication_factor": 1}})
            return
        except Exception:
            assert time.monotonic() < deadline
            time.sleep(0.5)


def test_an_input_topic_created_again_while_the_job_is_stopped(spark, broker, topic, admin, job_dir) -> None:
    servers, source, out = broker.bootstrap_servers, topic(), topic()
    produce(servers, source, [order("ann")] * 4)
    run_until(totals_job(spark, job_dir, servers, source, out), counts(4))
    create_again(admin, source)
    produce(servers, source, [order("ann")] * 9)
    error = failure_of(totals_job(spark, job_dir, servers, source, out))
    assert isinstance(error, InputLostError), repr(error)
    assert f"'{source}' was deleted and created again" in str(error)
    assert f"{source}-0 from 4 on" in str(error) and error.what_to_do
    assert len(read_committed(servers, out)) == 4


@pytest.mark.nightly
def test_an_input_topic_deleted_while_the_job_is_stopped(spark, broker, topic, admin, job_dir) -> None:
    servers, source, out = broker.bootstrap_servers, topic(), topic()
    produce(servers, source, [order("ann")] * 4)
    run_until(totals_job(spark, job_dir, servers, source, out), counts(4))
    admin.delete_topics([source])
    error = failure_of(totals_job(spark, job_dir, servers, source, out))
    assert f"'{source}'" in str(error) and error.what_to_do, repr(error)


@pytest.mark.nightly
@pytest.mark.parametrize("refilled", [0, 2, 9])
def test_an_input_topic_created_again_under_a_running_job(
    spark, broker, topic, admin, job_dir, refilled
) -> None:
    """Also when the new topic is longer than the old one was, which Spark does not notice by itself."""
    servers, source, out = broker.bootstrap_servers, topic(), topic()
    produce(servers, source, [order("ann")] * 4)
    with running(totals_job(spark, job_dir, servers, source, out)) as client:
        await_that(lambda: rows(client, "out") == 4, client)
        create_again(admin, source)
        produce(servers, source, [order("new")] * refilled)
        with pytest.raises(InputLostError, match=rf"'{source}' was deleted"):
            ended = client.wait(timeout_ms=240_000)
            raise AssertionError(f"ended: {ended}, {client.progress}")
        assert totals_in(servers, out) == expected_totals({"ann": [1] * 4})


def test_expired_offsets_stop_the_job_with_the_missing_ranges(spark, broker, topic, admin, job_dir) -> None:
    servers, source, out = broker.bootstrap_servers, topic(partitions=2), topic()
    produce(servers, source, [order("ann")] * 3, partition=0)
    run_until(totals_job(spark, job_dir, servers, source, out), counts(3))
    produce(servers, source, [order("ann")] * 7, partition=0)
    produce(servers, source, [order("ann")] * 2, partition=1)
    admin.delete_records({TopicPartition(source, 0): 8, TopicPartition(source, 1): 1})
    with running(totals_job(spark, job_dir, servers, source, out)) as client:
        with pytest.raises(InputLostError) as caught:
            client.wait(timeout_ms=240_000)
        assert f"{source}-0 from 3 to 7" in str(caught.value), str(caught.value)
        assert f"{source}-1 from 0 to 0" in str(caught.value)
        assert client.progress.restarts == 0
        assert len(read_committed(servers, out)) == 3


@pytest.mark.nightly
def test_partitions_added_while_the_job_runs(spark, broker, topic, admin, job_dir) -> None:
    servers, source, out = broker.bootstrap_servers, topic(), topic()
    produce(servers, source, [order("ann", 1)] * 3)
    with running(totals_job(spark, job_dir, servers, source, out, group_id=f"{source}-group")) as client:
        await_that(lambda: rows(client, "out") == 3, client)
        admin.create_partitions({source: 4})
        for partition in range(4):
            produce(servers, source, [order(f"u{partition}", n) for n in range(1, 4)], partition=partition)
        await_that(lambda: rows(client, "out") == 15, client)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=240_000)
        expected = expected_totals({"ann": [1] * 3, **{f"u{p}": [1, 2, 3] for p in range(4)}})
        assert totals_in(servers, out) == expected
        assert client.progress.restarts == 0
        offsets = admin.list_group_offsets({f"{source}-group": None})[f"{source}-group"]
        assert {p.partition: o.offset for p, o in offsets.items()} == {0: 6, 1: 3, 2: 3, 3: 3}


# -- functions and brokers that fail ----------------------------------------------------------------


def test_a_function_that_raises_names_the_record(spark, broker, topic, job_dir) -> None:
    """Restarted once; the second failure on the same record ends the job."""
    servers, source, out = broker.bootstrap_servers, topic(partitions=3), topic()
    produce(servers, source, [order("ann", n) for n in (1, 2)], partition=0)
    job = totals_job(spark, job_dir, servers, source, out, function=RaisesOnce())
    with running(job) as client:
        await_that(lambda: rows(client, "out") == 2, client)
        produce(servers, source, [order("ann", n) for n in (3, 4, 13, 5)], partition=2)
        with pytest.raises(UserFunctionError) as caught:
            client.wait(timeout_ms=240_000)
        error = caught.value
        assert (error.topic, error.partition, error.offset) == (source, 2, 2)
        assert "'totals'" in str(error) and "ValueError: unlucky" in str(error)
        assert f"topic {source}, partition 2, offset 2" in str(error)
        assert client.progress.restarts == 1
        assert totals_in(servers, out) == Counter([("ann", 1), ("ann", 2)])


@pytest.mark.nightly
def test_a_broker_that_is_down_for_a_while(spark, own_broker, job_dir) -> None:
    """Killed in the middle of the work, back after 20 s: the job waits, goes on, and is exact."""
    own_broker.start()
    servers, amounts = own_broker.bootstrap_servers, list(range(1, 201))
    admin = KafkaAdminClient(bootstrap_servers=servers)
    for name in ("orders", "totals"):
        admin.create_topics({name: {"num_partitions": 2, "replication_factor": 1}}, wait_for_metadata=True)
    admin.close()
    for partition, user in enumerate(("ann", "bob")):
        produce(servers, "orders", [order(user, n) for n in amounts], partition=partition)
    job = totals_job(
        spark, job_dir, servers, "orders", "totals", max_offsets_per_trigger=40, group_id="orders-app"
    )
    with running(job) as client:
        await_that(lambda: rows(client, "out") >= 80, client)
        own_broker.kill()
        time.sleep(20)
        assert client.is_running
        own_broker.start()
        await_that(lambda: rows(client, "out") == 400, client, timeout_s=120)
        produce(servers, "orders", [order("ann", 1_000)], partition=0)
        await_that(lambda: rows(client, "out") == 401, client)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=240_000)
        assert totals_in(servers, "totals") == expected_totals({"ann": [*amounts, 1_000], "bob": amounts})
