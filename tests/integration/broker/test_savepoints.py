"""Savepoints of jobs that read Kafka: the restored job reads on where the savepoint was drawn, exactly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from kafka.admin import KafkaAdminClient, NewPartitions

from flinkish_spark import CheckpointConfig, CheckpointRetention, DeadLetter, Json, KafkaSink
from flinkish_spark.core.errors import InputLostError, JobDirError
from flinkish_spark.protocol.lineage import RewindKind
from flinkish_spark.savepoints.files import RestoreSettings, SavepointDir
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
    read_committed,
    rows,
    totals_in,
)
from tests.support.savepoint_support import COUNT, Count, failure, started, stop, stop_with, take

pytestmark = pytest.mark.timeout(280)
USERS = tuple(f"u{n}" for n in range(12))


def put(servers, topic, first, count) -> None:
    """`count` orders for every user, each user's in one partition, of growing amounts."""
    for user in USERS:
        produce(servers, topic, [order(user, first + n) for n in range(count)], key=user.encode())


def totals_between(start: int, end: int) -> Counter:
    """What RunningTotal emits for the orders `start` to `end` of amounts 1, 2, 3, ..."""
    everything = expected_totals({user: list(range(1, end + 1)) for user in USERS})
    return everything - expected_totals({user: list(range(1, start + 1)) for user in USERS})


def job(spark, job_dir, servers, source, out, checkpoint=None, **settings):
    env = environment(spark, job_dir, **({} if checkpoint is None else {"checkpoint": checkpoint}))
    orders = env.from_source(orders_source(servers, source, **settings), uid="orders")
    totals = orders.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
    totals.sink_to(KafkaSink(servers, out, key="user"), uid="out")
    return env


@pytest.mark.nightly
@pytest.mark.parametrize("rescales", [(4,), (2, 4)])
def test_a_restored_job_reads_on_and_changes_its_parallelism_in_place(
    spark, broker, topic, job_dir, tmp_path, rescales
) -> None:
    """Totals of a reference over savepoint, more partitions, and rescales."""
    servers, source, out, later = broker.bootstrap_servers, topic(3), topic(2), topic(2)
    put(servers, source, 1, 10)
    with started(job(spark, job_dir, servers, source, out)) as client:
        await_that(lambda: rows(client, "out") == 120, client)
        metadata = stop_with(client, tmp_path / "savepoint")
    (chain,) = metadata.chains
    assert sum(chain.positions["orders"][source].values()) == 120
    assert chain.sinks == ("out",)

    # What came in between is read by the restored job, and so is a partition that was added.
    put(servers, source, 11, 5)
    admin = KafkaAdminClient(bootstrap_servers=servers)
    admin.create_partitions({source: NewPartitions(total_count=4)})
    admin.close()
    produce(servers, source, [order("late", 7)], partition=3)
    new, settings = tmp_path / "new", RestoreSettings(str(tmp_path / "savepoint"))
    expected = totals_between(10, 15) + Counter({("late", 7): 1})
    with started(job(spark, new, servers, source, later), settings, partitions=5) as client:
        await_that(lambda: rows(client, "out") == 61, client)
        stop(client)
    assert totals_in(servers, later) == expected
    assert totals_in(servers, out) == totals_between(0, 10)

    # Another number of shuffle partitions, in the same job directory (behaviours 85, 91).
    for turn, partitions in enumerate(rescales):
        first = 16 + 3 * turn
        produce(servers, source, [order(u, first + n) for n in range(3) for u in USERS], partition=0)
        with started(job(spark, new, servers, source, later), partitions=partitions) as client:
            await_that(lambda: rows(client, "out") == 36, client)
            stop(client)
        expected += totals_between(first - 1, first + 2)
        assert totals_in(servers, later) == expected
        history = client._supervisor._job_dir.history()
        assert [past.kind for past in history.rewinds] == [RewindKind.RESEED] * (turn + 1)

    # And once more as it is.
    produce(servers, source, [order("late", 3)], partition=3)
    with started(job(spark, new, servers, source, later), partitions=4) as client:
        await_that(lambda: rows(client, "out") == 1, client)
        stop(client)
    assert totals_in(servers, later) == expected + Counter({("late", 10): 1})


def test_a_savepoint_of_a_running_job_is_one_cut_and_the_job_goes_on(
    spark, broker, topic, job_dir, tmp_path
) -> None:
    servers, source, out, fork = broker.bootstrap_servers, topic(3), topic(2), topic(2)
    put(servers, source, 1, 20)
    slow = {"max_offsets_per_trigger": 30}
    with started(job(spark, job_dir, servers, source, out, **slow)) as client:
        await_that(lambda: rows(client, "out") >= 30, client)
        metadata = take(client, tmp_path / "savepoint")
        await_that(lambda: rows(client, "out") == 240, client)
        stop(client)
    assert totals_in(servers, out) == totals_between(0, 20)
    (chain,) = metadata.chains
    read = sum(chain.positions["orders"][source].values())
    assert 30 <= read < 240

    env = job(spark, tmp_path / "fork", servers, source, fork)
    with started(env, RestoreSettings(str(tmp_path / "savepoint")), partitions=3) as client:
        await_that(lambda: rows(client, "out") == 240 - read, client)
        stop(client)
    found, whole = totals_in(servers, fork), totals_between(0, 20)
    assert found.total() == 240 - read
    assert found <= whole
    # Of every user it is the end: totals only grow.
    for user in USERS:
        mine = sorted(total for name, total in found if name == user)
        assert mine == sorted(total for name, total in whole if name == user)[20 - len(mine) :]


@pytest.mark.nightly
def test_a_job_whose_checkpoints_were_deleted_begins_anew_with_the_savepoint_given_again(
    spark, broker, topic, job_dir, tmp_path
) -> None:
    """It is refused without: the state that it began with was let go behind its first checkpoint."""
    servers, source, out, later = broker.bootstrap_servers, topic(2), topic(2), topic(2)
    put(servers, source, 1, 5)
    with started(job(spark, job_dir, servers, source, out)) as client:
        await_that(lambda: rows(client, "out") == 60, client)
        stop_with(client, tmp_path / "savepoint")
    put(servers, source, 6, 5)
    new, restore = tmp_path / "new", RestoreSettings(str(tmp_path / "savepoint"))
    deleting = CheckpointConfig(interval_ms=500, retention=CheckpointRetention.DELETE_ON_CANCELLATION)
    expected = Counter()
    for _ in range(2):
        with started(job(spark, new, servers, source, later, deleting), restore) as client:
            await_that(lambda: rows(client, "out") == 60, client)
            await_that(lambda: not list((new / "seeds").rglob("*.parquet")), client)
            client.cancel()
            client.wait(240_000)
        assert not list((new / "checkpoints").glob("*/receipt.json"))
        expected += totals_between(5, 10)
        assert totals_in(servers, later) == expected
        error = failure(job(spark, new, servers, source, later))
        assert isinstance(error, JobDirError) and "neither a checkpoint nor the state" in str(error)


@pytest.mark.nightly
def test_a_sink_behind_a_new_operator_gets_nothing_twice(spark, broker, topic, job_dir, tmp_path) -> None:
    """Two scans of one source stand at different places; each sink goes on where its own stood."""
    servers, source, out, copied = broker.bootstrap_servers, topic(2), topic(2), topic(2)

    def two(job_dir, is_counted):
        env = environment(spark, job_dir)
        orders = env.from_source(orders_source(servers, source), uid="orders")
        totals = orders.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
        totals.sink_to(KafkaSink(servers, out, key="user"), uid="out")
        if is_counted:
            orders = orders.key_by("user").process(Count(), output=COUNT, uid="counts")
        orders.sink_to(KafkaSink(servers, copied, key="user"), uid="copy")
        return env

    put(servers, source, 1, 5)
    with started(two(job_dir, False)) as client:
        await_that(lambda: (rows(client, "out"), rows(client, "copy")) == (60, 60), client)
        metadata = stop_with(client, tmp_path / "savepoint")
    assert {chain.chain.name: chain.sinks for chain in metadata.chains} == {
        "totals": ("out",),
        "copy": ("copy",),
    }
    # As if the other scan had been slower: Spark gives no say in that.
    place = SavepointDir(tmp_path / "savepoint")
    behind = {"orders": {**metadata.chains[0].positions["orders"], source: {"0": 0, "1": 0}}}
    (place.path / "savepoint.json").unlink()
    place.finish(
        replace(metadata, chains=(replace(metadata.chains[0], positions=behind), metadata.chains[1]))
    )
    with started(two(tmp_path / "new", True), RestoreSettings(str(place.path))) as client:
        await_that(lambda: rows(client, "out") == 60, client)
        stop(client)
        assert rows(client, "copy") == 0
    assert len(read_committed(servers, copied)) == 60


@pytest.mark.nightly
def test_dead_letters_have_a_place_of_their_own(spark, broker, topic, job_dir, tmp_path) -> None:
    """The source is scanned twice; each scan goes on where it stood."""
    servers, source, out, letters = broker.bootstrap_servers, topic(2), topic(2), topic()
    value = Json(ORDER, on_bad_record=DeadLetter(letters))
    bad = [f"bad {n}".encode() for n in range(8)]
    put(servers, source, 1, 5)
    produce(servers, source, bad[:4])
    with started(job(spark, job_dir, servers, source, out, value=value)) as client:
        await_that(lambda: (rows(client, "out"), rows(client, "orders-dead-letter")) == (60, 4), client)
        metadata = stop_with(client, tmp_path / "savepoint")
    assert {chain.chain.name for chain in metadata.chains} == {"totals", "orders-dead-letter"}
    put(servers, source, 6, 5)
    produce(servers, source, bad[4:])
    env = job(spark, tmp_path / "new", servers, source, out, value=value)
    with started(env, RestoreSettings(str(tmp_path / "savepoint"))) as client:
        await_that(lambda: (rows(client, "out"), rows(client, "orders-dead-letter")) == (60, 4), client)
        stop(client)
    assert totals_in(servers, out) == totals_between(0, 10)
    assert sorted(r.value for r in read_committed(servers, letters)) == bad


@pytest.mark.nightly
def test_input_that_is_another_or_gone_is_found(spark, broker, topic, job_dir, tmp_path) -> None:
    servers, source, out = broker.bootstrap_servers, topic(2), topic(2)
    put(servers, source, 1, 5)
    with started(job(spark, job_dir, servers, source, out)) as client:
        await_that(lambda: rows(client, "out") == 60, client)
        stop_with(client, tmp_path / "savepoint")
    put(servers, source, 6, 5)
    admin = KafkaAdminClient(bootstrap_servers=servers)
    from kafka import TopicPartition

    admin.delete_records({TopicPartition(source, p): -1 for p in range(2)})
    new, settings = tmp_path / "new", RestoreSettings(str(tmp_path / "savepoint"))
    error = failure(job(spark, new, servers, source, out), settings)
    assert isinstance(error, InputLostError) and "no longer has the offsets" in str(error)
    assert not new.exists()

    admin.delete_topics([source])
    admin.create_topics({source: {"num_partitions": 2, "replication_factor": 1}}, wait_for_metadata=True)
    admin.close()
    put(servers, source, 1, 20)
    error = failure(job(spark, new, servers, source, out), settings)
    assert isinstance(error, InputLostError) and "created again" in str(error)
