"""The atomic Kafka sink where leaders and coordinators move."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from kafka.admin import KafkaAdminClient

from flinkish_spark.protocol.records import Outcome
from flinkish_spark.testing.broker_cluster import BrokerCluster
from tests.integration.broker.test_atomic_sink import FIVE, Rig, names
from tests.support.open_transactions import still_open
from tests.support.services import BROKER_JARS

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.nightly(by_day="tests/integration/broker/test_atomic_sink.py"),
]


def made(servers: str, replicas: int) -> str:
    admin = KafkaAdminClient(bootstrap_servers=servers)
    name = f"out-{time.time_ns()}"
    admin.create_topics(
        {name: {"num_partitions": 4, "replication_factor": replicas, "configs": {}}}, wait_for_metadata=True
    )
    admin.close()
    return name


def committed(rig: Rig, *results: Any) -> None:
    """Commit as the confirmation does: again for as long as nobody can tell."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = rig.commit(*results)
        if all(one.is_done for one in found) and len(found) == len(rig.committables(*results)):
            return
        assert found[-1] is Outcome.RETRY
        time.sleep(0.5)
    raise AssertionError("nobody committed it")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerCluster]:
    with BrokerCluster(tmp_path_factory.mktemp("cluster"), jars_dir=BROKER_JARS) as brokers:
        yield brokers


def test_a_broker_dies_between_two_micro_batches_and_in_front_of_the_commit(
    spark: Any, cluster: BrokerCluster
) -> None:
    """Each of the three in turn, so that leaders of partitions move, and the coordinator."""
    topic, seen = made(cluster.bootstrap_servers, 3), Counter[str]()
    rig = Rig(spark, cluster.bootstrap_servers, topic)
    for number, node in enumerate(cluster.nodes):
        first = rig.stage(names(300 * number, 100))
        node.kill()
        second = rig.stage(names(300 * number + 100, 100), barrier=FIVE)
        assert len(rig.transactions(first, second)) == 1
        assert rig.committer.why_dead(rig.committables(first, second)) == {}
        committed(rig, first, second)
        node.start()
        third = rig.stage(names(300 * number + 200, 100), barrier=FIVE)
        node.kill()
        assert rig.committer.why_dead(rig.committables(third)) == {}
        committed(rig, third)
        node.start()
        seen.update(names(300 * number, 300))
        assert rig.seen() == seen
    assert still_open(rig.client, rig.job) == []
    rig.close()
