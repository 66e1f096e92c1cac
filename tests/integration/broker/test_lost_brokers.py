"""Both ways to stage, in three brokers: a coordinator or leader is lost in each phase of a checkpoint."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.client import Isolation
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.shared_transaction import SHARED_TASK
from flinkish_spark.connectors.kafka.writer import KafkaSinkCommittable
from flinkish_spark.core.errors import BrokerUnavailableError, EnvironmentFault
from flinkish_spark.protocol.ids import TransactionalId
from flinkish_spark.protocol.records import Outcome
from flinkish_spark.testing.broker import LocalBroker
from flinkish_spark.testing.broker_cluster import BrokerCluster
from tests.integration.broker.test_atomic_cluster import committed
from tests.integration.broker.test_atomic_sink import FIVE, Rig, names
from tests.support.jobs import eventually
from tests.support.open_transactions import still_open
from tests.support.services import BROKER_JARS

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.nightly(by_day="tests/integration/broker/test_atomic_sink.py"),
]
STATE, OFFSETS = "__transaction_state", "__consumer_offsets"
#: The lost one is missed after three seconds; for so long requests to a paused one stay without an answer.
_AWAY_S = 12.0
#: What is to happen to a broker later, unless the test is over.
TIMERS: list[threading.Timer] = []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerCluster]:
    with BrokerCluster(tmp_path_factory.mktemp("lost"), jars_dir=BROKER_JARS) as brokers:
        yield brokers


@contextmanager
def rig_on(
    spark: Any, cluster: BrokerCluster, atomic: bool, configs: dict[str, str] | None = None
) -> Iterator[Rig]:
    topic = f"out-{uuid.uuid4().hex[:8]}"
    cluster.create_topic(topic, 4, configs or {})
    rig = Rig(spark, cluster.bootstrap_servers, topic, atomic=atomic)
    try:
        yield rig
    finally:
        revive(cluster)
        rig.close()


def revive(cluster: BrokerCluster) -> None:
    """Start whoever was killed, let those go on that were paused."""
    while TIMERS:
        timer = TIMERS.pop()
        timer.cancel()
        timer.join()
    for node in cluster.nodes:
        if node.is_paused:
            node.resume()
        node.start()
    cluster.await_in_sync()


# -- a checkpoint, as the coordinator of a job takes it ----------------------------------------------


def patiently(what: Callable[[], Any], within_s: float = 120) -> Any:
    """As the job does: what nobody answered is asked again."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return what()
        except BrokerUnavailableError:
            assert time.monotonic() < deadline


def staged_again_in_doubt(rig: Rig, stage: Callable[[], list[Any]]) -> list[Any]:
    """As a job that goes back to its last checkpoint: what was staged is given up, and staged again."""
    for _ in range(3):
        try:
            return stage()
        except (EnvironmentFault, Py4JJavaError, PySparkException) as doubt:
            # By an answer that was lost an attempt cannot tell itself from another one.
            assert not isinstance(doubt, EnvironmentFault) or doubt.restartable
            print(f"staged again: {str(doubt)[:300]}")
            rig.writer = rig.sink.create_writer(rig.spark, rig.context)
            deadline = time.monotonic() + 120
            while patiently(lambda: swept(rig)):
                assert time.monotonic() < deadline
    raise AssertionError("staged three times in vain")


def swept(rig: Rig) -> bool:
    """Abort what was left open, and return whether something still is."""
    rig.committer.sweep([], frozenset)
    return bool(still_open(rig.client, rig.job))


def first_id(rig: Rig, atomic: bool) -> str:
    """The transactional id under which the next micro-batch stages."""
    block = next(rig.blocks)
    rig.blocks = iter(range(block + 1, 1_000_000))
    # A micro-batch takes two numbers; the second one is its block.
    task = SHARED_TASK if atomic else 0
    return str(TransactionalId(rig.job, rig.context.owner_epoch, block + 2, task, 0))


def id_of(rig: Rig, result: Any) -> str:
    return KafkaSinkCommittable.of(rig.committables(result)[0].payload).transaction[0]


# -- losses -----------------------------------------------------------------------------------------


def later(seconds: float, what: Callable[[], Any]) -> None:
    TIMERS.append(threading.Timer(seconds, what))
    TIMERS[-1].start()


def killed(cluster: BrokerCluster, name: str) -> None:
    cluster.coordinator_of(name).kill()


def paused(cluster: BrokerCluster, name: str) -> None:
    """Comes back in the middle of what is done about it, and may answer what others were asked since."""
    node = cluster.coordinator_of(name)
    node.pause()
    later(_AWAY_S, node.resume)


def moved(cluster: BrokerCluster, name: str) -> None:
    """The coordinator is another broker from one request to the next; nobody is away."""
    node = cluster.coordinator_of(name)
    other = cluster.nodes[(cluster.nodes.index(node) + 1) % len(cluster.nodes)]
    for partition in range(4):
        if cluster.leader_of(STATE, partition) is node:
            cluster.move_leader(STATE, partition, other)


def killed_under_way(cluster: BrokerCluster, name: str) -> None:
    """Takes requests and does not answer, and dies with them a moment later."""
    node = cluster.coordinator_of(name)
    node.pause()
    later(1.5, node.kill)


LOSSES = {one.__name__: one for one in (killed, paused, moved, killed_under_way)}
PHASES = ("begin", "go on", "look", "commit", "commit again", "abort")


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "default"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("phase", PHASES)
def test_a_coordinator_is_lost_in_a_phase_of_a_checkpoint(
    spark: Any, cluster: BrokerCluster, phase: str, loss: str, atomic: bool
) -> None:
    """Whatever the phase and the loss: the records of what is committed, each once, and nothing left open."""
    with rig_on(spark, cluster, atomic) as rig:
        left = [phase]

        def lose(at: str, name: str) -> None:
            if at in left:
                left.remove(at)
                LOSSES[loss](cluster, name)

        committed(rig, rig.stage(names(0, 50), barrier=FIVE))

        def stage() -> list[Any]:
            lose("begin", first_id(rig, atomic))
            first = rig.stage(names(50, 50))
            lose("go on", id_of(rig, first))
            second = rig.stage(names(100, 50), barrier=FIVE)
            lose("look", id_of(rig, first))
            assert patiently(lambda: rig.committer.why_dead(rig.committables(first, second))) == {}
            return [first, second]

        results = staged_again_in_doubt(rig, stage)
        if phase == "abort":
            lose("abort", id_of(rig, results[0]))
            deadline = time.monotonic() + 120
            while any(a.outcome is Outcome.RETRY for a in rig.committer.abort(rig.committables(*results))):
                assert time.monotonic() < deadline
            wanted = names(0, 50)
        else:
            lose("commit", id_of(rig, results[0]))
            committed(rig, *results)
            lose("commit again", id_of(rig, results[0]))
            # What was done stays done, though somebody else is asked now.
            committed(rig, *results)
            wanted = names(0, 150)
        assert not left
        # A broker that was away lists for a moment what another one has ended meanwhile.
        assert eventually(
            lambda: patiently(lambda: still_open(rig.client, rig.job, 60_000)) == [], within_s=20
        )
        revive(cluster)
        assert rig.seen() == Counter(wanted)


def test_a_group_is_found_where_its_coordinator_has_moved_to(cluster: BrokerCluster) -> None:
    """By a client that has asked before, and stays connected with everybody."""
    topic, group = f"in-{uuid.uuid4().hex[:8]}", f"group-{uuid.uuid4().hex[:8]}"
    cluster.create_topic(topic, 1)
    with KafkaAdmin(KafkaConnection(cluster.bootstrap_servers)) as admin:
        admin.commit_offsets(group, {(topic, 0): 0})
        for at in range(3):
            node = cluster.coordinator_of_group(group)
            other = cluster.nodes[cluster.nodes.index(node) - 1]
            for partition in range(4):
                if cluster.leader_of(OFFSETS, partition) is node:
                    cluster.move_leader(OFFSETS, partition, other)
            assert admin.committed_offsets(group, Isolation.READ_COMMITTED) == {(topic, 0): at}
            admin.commit_offsets(group, {(topic, 0): at + 1})


@pytest.mark.parametrize("how", ["paused", "killed"])
def test_a_broker_that_does_not_answer_costs_a_part_of_the_time_allowed(
    cluster: BrokerCluster, how: str
) -> None:
    """Whichever of the servers a new client tries first."""
    node = cluster.nodes[1]
    (node.pause if how == "paused" else node.kill)()
    try:
        for _ in range(12):
            began = time.monotonic()
            with KafkaAdmin(KafkaConnection(cluster.bootstrap_servers)) as admin:
                admin.topics(["no-such-topic"])
            assert time.monotonic() - began < 14
    finally:
        revive(cluster)


# -- leaders ----------------------------------------------------------------------------------------


def lose_leader(cluster: BrokerCluster, topic: str, how: str) -> None:
    leader = cluster.leader_of(topic, 0)
    if how == "moved":
        cluster.move_leader(topic, 0, cluster.nodes[cluster.nodes.index(leader) - 1])
    else:
        (leader.kill if how == "killed" else leader.pause)()


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "default"])
@pytest.mark.parametrize("how", ["killed", "paused", "moved"])
def test_the_leader_of_a_partition_is_lost_between_micro_batches(
    spark: Any, cluster: BrokerCluster, how: str, atomic: bool
) -> None:
    with rig_on(spark, cluster, atomic) as rig:
        left = [how]

        def stage() -> list[Any]:
            first = rig.stage(names(0, 100))
            if left:
                left.clear()
                lose_leader(cluster, rig.topic, how)
            second = rig.stage(names(100, 100), barrier=FIVE)
            assert patiently(lambda: rig.committer.why_dead(rig.committables(first, second))) == {}
            return [first, second]

        committed(rig, *staged_again_in_doubt(rig, stage))
        assert patiently(lambda: still_open(rig.client, rig.job, 60_000)) == []
        revive(cluster)
        assert rig.seen() == Counter(names(0, 200))


# -- too few in sync --------------------------------------------------------------------------------

ALL_THREE = {"min.insync.replicas": "3"}


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "default"])
def test_staging_waits_while_too_few_replicas_are_in_sync(
    spark: Any, cluster: BrokerCluster, atomic: bool
) -> None:
    """Some batches are refused before they are written, others are written and not acknowledged."""
    with rig_on(spark, cluster, atomic, ALL_THREE) as rig:
        first = rig.stage(names(0, 100))
        away = cluster.nodes[2]
        away.kill()
        back = threading.Timer(_AWAY_S, away.start)
        back.start()
        began = time.monotonic()
        second = rig.stage(names(100, 100), barrier=FIVE)
        assert time.monotonic() - began > 2
        back.join()
        assert patiently(lambda: rig.committer.why_dead(rig.committables(first, second))) == {}
        committed(rig, first, second)
        assert rig.seen() == Counter(names(0, 200))


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "default"])
def test_a_commit_counts_though_its_markers_have_to_wait(
    spark: Any, cluster: BrokerCluster, atomic: bool
) -> None:
    """The coordinator's word is enough; readers see it when the replicas are back."""
    with rig_on(spark, cluster, atomic, ALL_THREE) as rig:
        staged = rig.stage(names(0, 100), barrier=FIVE)
        cluster.nodes[2].kill()
        committed(rig, staged)
        cluster.nodes[2].start()
        assert patiently(lambda: still_open(rig.client, rig.job, 60_000)) == []
        revive(cluster)
        assert rig.seen() == Counter(names(0, 100))


def test_what_stays_unwritable_is_an_outage_and_no_fault_of_the_job(
    spark: Any, cluster: BrokerCluster, tmp_path: Path
) -> None:
    """A restart may help, and asking again is not counted against the job."""
    from flinkish_spark.connectors.kafka.client.producer import StagedTransaction
    from flinkish_spark.connectors.kafka.client.settings import ProducerSettings, StagingSettings

    with rig_on(spark, cluster, False, ALL_THREE) as rig:
        away: LocalBroker = cluster.nodes[2]
        away.kill()
        settings = StagingSettings(
            connection=rig.sink.connection,
            transactional_id=first_id(rig, False),
            transaction_timeout_ms=60_000,
            producer=ProducerSettings(request_timeout_ms=2_000, delivery_timeout_ms=8_000),
        )
        with (
            pytest.raises(Exception, match="NOT_ENOUGH_REPLICAS") as failed,
            StagedTransaction(settings) as transaction,
        ):
            transaction.write(pa.array([b"k"]), pa.array([b"v"]), topics=rig.topic)
            transaction.prepare()
        error: Any = failed.value
        assert error.restartable and not error.ends_when_repeated
