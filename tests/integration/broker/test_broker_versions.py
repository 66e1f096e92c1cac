"""Transactions as they were before Kafka 4, another make of brokers, a cluster that is upgraded meanwhile."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka.admin import KafkaAdminClient

from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.writer import KafkaSinkCommittable
from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.protocol.records import Outcome
from flinkish_spark.testing.broker import LocalBroker
from flinkish_spark.testing.broker_cluster import BrokerCluster
from tests.integration.broker.test_atomic_sink import FIVE, Rig, append_as_a_zombie, names
from tests.integration.broker.test_lost_brokers import committed
from tests.support.copying import Copying
from tests.support.jobs import environment, orders_source, produce, read_committed, rows, run_until
from tests.support.older_wire import OlderWire
from tests.support.open_transactions import still_open
from tests.support.services import BROKER_JARS, BUILD

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.nightly(by_day="tests/integration/broker/test_atomic_sink.py"),
]
OLD_JARS = BUILD / "broker-3.9-jars"
ENGINES, WAYS = ["jvm", "python"], pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "default"])
needs_old = pytest.mark.skipif(
    not any(OLD_JARS.glob("kafka_2.13-*.jar")), reason="there is no Kafka 3.9: make jars"
)


# -- transactions of before Kafka 4 -----------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("3.9", marks=needs_old),
        "4.1 with version 0",
        "4.1 with version 1",
    ],
)
def old_broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalBroker]:
    """No end of a transaction raises the epoch, and no broker adds a partition by itself."""
    place = tmp_path_factory.mktemp("old")
    if request.param == "3.9":
        broker = LocalBroker(place, jars_dir=OLD_JARS)
    else:
        level = int(request.param[-1])
        broker = LocalBroker(place, jars_dir=BROKER_JARS, features={"transaction.version": level})
    with broker:
        yield broker


def created(servers: str, partitions: int = 4) -> str:
    name = f"topic-{time.time_ns()}"
    with KafkaAdmin(KafkaConnection(servers)) as admin:
        admin.create_topic(name, partitions)
    return name


@WAYS
def test_transactions_of_before_kafka_4_are_enough(spark: Any, old_broker: LocalBroker, atomic: bool) -> None:
    """What is committed shows once, what is aborted never, and what outlives its transaction is refused."""
    servers = old_broker.bootstrap_servers
    rig = Rig(spark, servers, created(servers), atomic=atomic)
    first, second = rig.stage(names(0, 50)), rig.stage(names(50, 50), barrier=FIVE)
    assert rig.committer.why_dead(rig.committables(first, second)) == {}
    committed(rig, first, second)
    # Until its markers are written a partition takes what goes on with the transaction.
    assert still_open(rig.client, rig.job) == []
    if atomic:
        with pytest.raises(EnvironmentFault):
            append_as_a_zombie(rig, KafkaSinkCommittable.of(rig.committables(second)[0].payload))
    committed(rig, first, second)
    third = rig.stage(names(100, 50), barrier=FIVE)
    rig.committer.abort(rig.committables(third))
    fourth = rig.stage(names(150, 50), barrier=FIVE)
    committed(rig, fourth)
    assert rig.seen() == Counter([*names(0, 100), *names(150, 50)])
    assert still_open(rig.client, rig.job) == []
    rig.close()


# -- Redpanda's versions of requests ----------------------------------------------------------------


@pytest.fixture(scope="module")
def as_redpanda(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Servers of a broker that knows the requests that Redpanda knows, with transactions of version 0."""
    with OlderWire() as wire:
        address = f"PLAINTEXT://127.0.0.1:{wire.port}"
        broker = LocalBroker(
            tmp_path_factory.mktemp("redpanda"),
            jars_dir=BROKER_JARS,
            features={"transaction.version": 0},
            extra_properties={"advertised.listeners": address},
        )
        wire.in_front_of(int(broker.bootstrap_servers.rpartition(":")[2]))
        with broker:
            yield address.rpartition("/")[2]


def test_a_job_on_brokers_with_the_requests_of_redpanda(spark: Any, as_redpanda: str, tmp_path: Path) -> None:
    from flinkish_spark import Json, KafkaSink

    servers = as_redpanda
    source, target = created(servers, 1), created(servers, 2)
    produce(servers, source, [b'{"user": "u%d", "amount": %d}' % (n % 5, n) for n in range(500)])
    env = environment(spark, tmp_path / "job")
    orders = env.from_source(orders_source(servers, source, group_id=f"group-{source}"), uid="orders")
    orders.sink_to(KafkaSink(servers, target, key="user", value=Json()), uid="out")
    run_until(env, lambda client: rows(client, "out") >= 500)
    seen = Counter(record.value for record in read_committed(servers, target))
    assert len(seen) == 500 and set(seen.values()) == {1}
    with KafkaAdmin(KafkaConnection(servers)) as admin:
        assert sum(admin.committed_offsets(f"group-{source}").values()) == 500


def test_what_such_brokers_do_with_a_transaction(spark: Any, as_redpanda: str) -> None:
    rig = Rig(spark, as_redpanda, created(as_redpanda), atomic=False)
    first, second = rig.stage(names(0, 50), barrier=FIVE), rig.stage(names(50, 50), barrier=FIVE)
    assert rig.commit(first)[-1] is Outcome.COMMITTED
    rig.committer.abort(rig.committables(second))
    assert rig.commit(second)[-1] is Outcome.LOST
    assert rig.seen() == Counter(names(0, 50))
    assert still_open(rig.client, rig.job) == []
    rig.close()


def test_an_atomic_sink_is_refused_there(spark: Any, as_redpanda: str) -> None:
    """By the versions that they know nobody can tell that they refuse what comes too late."""
    with pytest.raises(ConfigError, match=r"older than Kafka 3\.7, or not Apache Kafka"):
        Rig(spark, as_redpanda, created(as_redpanda), atomic=True)


# -- an upgrade -------------------------------------------------------------------------------------


@needs_old
@pytest.mark.parametrize("engine", ENGINES)
@WAYS
def test_brokers_are_upgraded_while_a_job_copies(tmp_path: Path, atomic: bool, engine: str) -> None:
    """From 3.9, one after the other, then the cluster's features: to transactions of version 2."""
    with BrokerCluster(tmp_path / "brokers", jars_dir=OLD_JARS) as cluster:
        folder = tmp_path / "copy"
        folder.mkdir()
        with Copying(
            cluster, folder, engine=engine, atomic=atomic, ordered=False, records=100_000
        ) as copying:
            copying.await_copied(2_000)
            for node in cluster.nodes:
                node.stop()
                node.run_from(BROKER_JARS)
                node.start()
                cluster.await_in_sync()
            cluster.raise_features({name: newest(cluster, name) for name in ("metadata.version",)})
            cluster.raise_features({"transaction.version": 2})
            left = copying.records - copying.watch.count
            copied = copying.finish()
        assert newest(cluster, "transaction.version", "finalized") == 2
        print({"upgrade": True, "engine": engine, "atomic": atomic, "left": left, **vars(copied)})
        assert copied.is_exact, copied


def newest(cluster: BrokerCluster, feature: str, kind: str = "supported") -> int:
    with KafkaAdminClient(bootstrap_servers=cluster.bootstrap_servers) as admin:
        return int(admin.describe_features()[feature][kind][1])
