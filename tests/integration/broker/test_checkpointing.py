"""A running job's checkpoints on real parts: by hand, with hooks, with listeners, in standby."""

from __future__ import annotations

import pytest
from kafka import KafkaAdminClient, TopicPartition

from flinkish_spark import (
    UNLIMITED,
    AnswerKind,
    CheckpointConfig,
    CheckpointRetention,
    JobStatus,
    KafkaSink,
    MasterHook,
    NoRestart,
    QuietListener,
    Standby,
)
from flinkish_spark.core.errors import JobDirError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.job.rewind import RewindState
from flinkish_spark.protocol.decisions import Verdict
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import Lineage
from flinkish_spark.protocol.job_status import JobStatusChange
from flinkish_spark.protocol.statistics import CheckpointStatus
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
    rows,
    run_until,
    running,
    totals_in,
)


def job(spark, broker, job_dir, source, sink, **settings):
    env = environment(spark, job_dir, **settings)
    stream = env.from_source(orders_source(broker.bootstrap_servers, source), uid="orders")
    totals = stream.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
    totals.sink_to(KafkaSink(broker.bootstrap_servers, sink, key="user"), uid="kafka")
    return env


class Notes(QuietListener):
    """Remembers what it was told."""

    def __init__(self):
        self.statuses, self.complete, self.aborted = [], [], []

    def on_change(self, change):
        if isinstance(change, JobStatusChange):
            self.statuses.append(change.after)

    def on_checkpoint_complete(self, checkpoint):
        self.complete.append(int(checkpoint))

    def on_checkpoint_aborted(self, checkpoint, newest):
        self.aborted.append((int(checkpoint), newest and int(newest)))


class Catalog(MasterHook):
    """A system outside whose version belongs to each checkpoint."""

    name = "catalog"

    def __init__(self):
        self.version, self.restored, self.fails = 0, [], 0

    def trigger(self, checkpoint_id):
        if self.fails:
            self.fails -= 1
            raise ConnectionError("the catalog is away")
        self.version += 1
        return {"version": self.version}

    def restore(self, checkpoint_id, state):
        self.restored.append((checkpoint_id, state))

    def reset(self):
        self.restored.append(None)


def test_a_checkpoint_by_hand_commits_and_is_told(spark, broker, topic, job_dir):
    """Behaviour 1: it is asked for once, and listeners hear of it once."""
    source, sink, notes = topic(), topic(), Notes()
    produce(broker.bootstrap_servers, source, [order("a"), order("a")])
    rare = CheckpointConfig(interval_ms=600_000, restart_budget_ms=1_000)
    env = job(spark, broker, job_dir, source, sink, checkpoint=rare)
    env.add_listener(notes)
    with running(env) as client:
        await_that(lambda: client.status is JobStatus.RUNNING, client)
        answer = client.trigger_checkpoint().wait(240_000)
        assert answer.kind is AnswerKind.COMPLETED and answer.checkpoint is not None
        assert notes.complete == [int(answer.checkpoint)]
        one = client.statistics.find(answer.checkpoint)
        assert one.status is CheckpointStatus.COMPLETED and one.rows == 2
        assert one.durations.end_to_end_ms >= one.durations.sync_ms >= 0
        assert [(p.uid, p.kind.value) for p in one.participants] == [
            ("kafka", "sink"),
            ("totals", "operator"),
        ]
        assert all(p.is_acknowledged and p.ack_ms is not None for p in one.participants)
        kafka = one.participants[0]
        assert (kafka.rows, kafka.barriers, kafka.bytes, one.bytes_staged) == (2, 2, None, None)
        assert len(kafka.channels) == 2 and kafka.sync_ms is not None
        client.cancel()
        assert client.wait(240_000)
    assert notes.statuses == [JobStatus.RUNNING, JobStatus.CANCELLING, JobStatus.CANCELED]
    assert totals_in(broker.bootstrap_servers, sink) == expected_totals({"a": [1, 1]})
    assert client.trigger_checkpoint().wait(1_000).reason is CheckpointFailureReason.SHUT_DOWN


def test_hooks_take_part_and_are_restored(spark, broker, topic, job_dir):
    """Behaviours 41, 54, 80, 81, 83: a failing hook aborts, its state returns, foreign state is refused."""
    source, sink, catalog, notes = topic(), topic(), Catalog(), Notes()
    catalog.fails = 1
    produce(broker.bootstrap_servers, source, [order("a")])
    env = job(spark, broker, job_dir, source, sink)
    env.add_master_hook(catalog)
    env.add_listener(notes)
    run_until(env, lambda client: rows(client, "kafka") == 1)
    assert catalog.restored == [None]
    assert notes.aborted[0] == (1, None) and min(notes.complete) > 1
    folder = JobDir(LocalStore(job_dir))
    newest = folder.newest_commit()
    version = newest.hook_states["catalog"]["version"]
    assert 0 < version <= catalog.version

    refused = failure_of(job(spark, broker, job_dir, source, sink, restart_strategy=NoRestart()))
    assert isinstance(refused, JobDirError) and "'catalog'" in str(refused)

    produce(broker.bootstrap_servers, source, [order("a")])
    again, env = Catalog(), job(spark, broker, job_dir, source, sink)
    env.add_master_hook(again)
    run_until(env, lambda client: rows(client, "kafka") == 1)
    assert again.restored == [(int(newest.checkpoint), {"version": version})]
    assert totals_in(broker.bootstrap_servers, sink) == expected_totals({"a": [1, 1]})
    # Counters go on over processes; what was read in front of the first checkpoint nobody knows.
    totals = folder.statistics().totals
    assert totals["kafka"]["numRecordsOut"] == 2 and totals["kafka"]["successfulCommittables"] > 0
    assert totals["orders"]["numRecordsIn"] in (1, 2)


@pytest.mark.nightly
def test_how_many_records_wait_is_told(spark, broker, topic, job_dir):
    source, sink = topic(1), topic(1)
    produce(broker.bootstrap_servers, source, [order("a") for _ in range(400)])
    env = environment(spark, job_dir)
    slow = orders_source(broker.bootstrap_servers, source, max_offsets_per_trigger=20)
    stream = env.from_source(slow, uid="orders").key_by("user")
    totals = stream.process(RunningTotal(), output=TOTAL, uid="totals")
    totals.sink_to(KafkaSink(broker.bootstrap_servers, sink, key="user"), uid="kafka")
    waited = []

    def is_done(client):
        waiting = client.statistics.totals.get("orders", {}).get("pendingRecords")
        waited.extend([waiting] if waiting is not None and waiting not in waited else [])
        return rows(client, "kafka") == 400 and waiting == 0

    run_until(env, is_done)
    assert len(waited) > 2 and waited == sorted(waited, reverse=True) and max(waited) % 20 == 0


def test_several_checkpoints_in_flight_stay_exact(spark, broker, topic, job_dir):
    """Behaviours 2 and 8: the next is triggered while the sinks commit the one before."""
    source, sink = topic(2), topic(2)
    config = CheckpointConfig(interval_ms=50, max_concurrent=3, tolerable_failures=UNLIMITED)
    env = job(spark, broker, job_dir, source, sink, checkpoint=config)
    with running(env) as client:
        for first in range(0, 60, 10):
            values = [order("a", n) for n in range(first, first + 10)]
            produce(broker.bootstrap_servers, source, values, key=b"a")
        await_that(lambda: rows(client, "kafka") == 60 and client.progress.checkpoints >= 5, client)
        client.stop_with_checkpoint()
        assert client.wait(240_000)
    assert totals_in(broker.bootstrap_servers, sink) == expected_totals({"a": list(range(60))})
    folder = JobDir(LocalStore(job_dir))
    commits = [d for d in map(folder.decision, folder.list_checkpoint_ids()) if d.verdict is Verdict.COMMIT]
    batches = [d.batch for d in commits]
    assert batches == sorted(batches)


@pytest.mark.nightly
def test_a_job_goes_back_as_far_as_its_input_is_there(spark, broker, topic, job_dir):
    """What cannot be done is refused before anything is touched, and the job goes on."""
    source, sink, servers = topic(), topic(), broker.bootstrap_servers
    with running(job(spark, broker, job_dir, source, sink)) as client:

        def checkpoint_behind(number, amount):
            produce(servers, source, [order("a", amount)])
            await_that(lambda: rows(client, "kafka") == number, client)
            return client.progress.newest

        first, second, third = (checkpoint_behind(n + 1, 10**n) for n in range(3))
        assert first < second < third
        admin = KafkaAdminClient(bootstrap_servers=servers)
        try:
            admin.delete_records({TopicPartition(source, 0): 2})
        finally:
            admin.close()
        refused = client.rewind(first).wait(240_000)
        assert refused.state is RewindState.REFUSED and source in refused.text, refused
        assert JobDir(LocalStore(job_dir)).history().live == Lineage(0)
        assert totals_in(servers, sink) == expected_totals({"a": [1, 10, 100]})
        done = client.rewind(second).wait(240_000)
        assert (done.state, done.lineage) == (RewindState.DONE, Lineage(1)), done
        # The third record is read again, and its total counted from the second checkpoint's state.
        await_that(lambda: totals_in(servers, sink)[("a", 111)] == 2, client)


def test_a_standby_takes_over_when_the_owner_has_ended(spark, broker, topic, job_dir):
    source, sink = topic(), topic()
    produce(broker.bootstrap_servers, source, [order("a")])
    with running(job(spark, broker, job_dir, source, sink)) as owner:
        await_that(lambda: rows(owner, "kafka") == 1, owner)
        with running(job(spark, broker, job_dir, source, sink, standby=Standby.WAIT)) as standby:
            assert not standby.wait(timeout_ms=2_000)
            assert standby.status is JobStatus.CREATED
            owner.cancel()
            assert owner.wait(240_000)
            produce(broker.bootstrap_servers, source, [order("a")])
            await_that(lambda: rows(standby, "kafka") == 1, standby)
            standby.stop_with_checkpoint()
            assert standby.wait(240_000)
            assert standby.status is JobStatus.FINISHED
    assert totals_in(broker.bootstrap_servers, sink) == expected_totals({"a": [1, 1]})


def test_a_cancelled_job_may_delete_its_checkpoints(spark, broker, topic, job_dir):
    """Behaviours 60 and 75."""
    source, sink = topic(), topic()
    produce(broker.bootstrap_servers, source, [order("a")])
    config = CheckpointConfig(interval_ms=500, retention=CheckpointRetention.DELETE_ON_CANCELLATION)
    with running(job(spark, broker, job_dir, source, sink, checkpoint=config)) as client:
        await_that(lambda: rows(client, "kafka") == 1, client)
        client.cancel()
        assert client.wait(240_000)
    folder = JobDir(LocalStore(job_dir))
    assert folder.newest_commit() is None
    assert len(folder.list_checkpoint_ids()) == 1, "ids are counted from it"


def test_more_failures_than_tolerated_fail_the_job(spark, broker, topic, job_dir):
    """Behaviour 47."""
    source, sink, catalog = topic(), topic(), Catalog()
    catalog.fails = 1_000
    produce(broker.bootstrap_servers, source, [order("a")])
    config = CheckpointConfig(interval_ms=300, tolerable_failures=0)
    env = job(spark, broker, job_dir, source, sink, checkpoint=config, restart_strategy=NoRestart())
    env.add_master_hook(catalog)
    failure = failure_of(env)
    assert "more checkpoints in a row than the job tolerates" in str(failure)
    assert "the catalog is away" in str(failure)
