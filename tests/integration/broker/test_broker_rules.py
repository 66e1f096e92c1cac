"""What brokers demand and take away: quotas, racks, compaction with deletion, records of 20 MB."""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient
from kafka.protocol.admin.client_quotas import AlterClientQuotasRequest

from flinkish_spark import Json, KafkaSink
from flinkish_spark.connectors.kafka.client.client import KafkaWire
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.reader import OffsetRange, RangeReader
from flinkish_spark.connectors.kafka.client.settings import ReaderSettings
from flinkish_spark.testing.broker_cluster import BrokerCluster
from tests.support.jobs import environment, orders_source, produce, read_committed, rows, run_until
from tests.support.services import BROKER_JARS

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.nightly(by_day="tests/integration/broker/test_range_reader.py"),
]
WAYS = pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "default"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerCluster]:
    with BrokerCluster(tmp_path_factory.mktemp("rules"), jars_dir=BROKER_JARS) as brokers:
        yield brokers


def created(cluster: BrokerCluster, partitions: int = 2, **configs: str) -> str:
    name = f"topic-{uuid.uuid4().hex[:8]}"
    cluster.create_topic(name, partitions, {key.replace("_", "."): value for key, value in configs.items()})
    return name


def order(number: int, pad: int = 0) -> bytes:
    return json.dumps({"user": f"u{number % 7}-" + "x" * pad, "amount": number}).encode()


def copy(
    spark: Any, cluster: BrokerCluster, folder: Path, source: str, target: str, count: int, **how: Any
) -> None:
    """Copy by a job."""
    servers = cluster.bootstrap_servers
    env = environment(spark, folder / "job")
    orders = orders_source(servers, source, reader_options=how.get("reader_options", {}))
    settings = {"key": "user", "value": Json(), **how.get("sink", {})}
    sink = KafkaSink(servers, target, atomic=how["atomic"], **settings)
    env.from_source(orders, uid="orders").sink_to(sink, uid="out")
    run_until(env, lambda client: rows(client, "out") >= count)


def amounts_in(cluster: BrokerCluster, topic: str) -> Counter[int]:
    """How often each amount is in a topic."""
    shown = read_committed(cluster.bootstrap_servers, topic)
    return Counter(json.loads(record.value)["amount"] for record in shown)


# -- quotas -----------------------------------------------------------------------------------------


def set_quotas(cluster: BrokerCluster, **rates: float | None) -> None:
    """For every client that has no quota of its own; None takes one away."""
    request_type = AlterClientQuotasRequest
    entry = request_type.EntryData(
        entity=[request_type.EntryData.EntityData(entity_type="client-id", entity_name=None)],
        ops=[
            request_type.EntryData.OpData(key=name, value=rate or 0.0, remove=rate is None)
            for name, rate in rates.items()
        ],
    )
    with KafkaAdminClient(bootstrap_servers=cluster.bootstrap_servers) as admin:
        request = request_type(entries=[entry], validate_only=False)
        answer = admin._manager.run(lambda: admin._manager.send(request))
        assert [row.error_code for row in answer.entries] == [0]


@WAYS
def test_quotas_slow_a_job_and_nothing_else(
    spark: Any, cluster: BrokerCluster, tmp_path: Path, atomic: bool
) -> None:
    """Bytes in and out, and the share of time that requests of any kind may take."""
    source, target = created(cluster), created(cluster)
    count = 4_000
    produce(cluster.bootstrap_servers, source, [order(n, pad=1_000) for n in range(count)])
    quotas = {"producer_byte_rate": 200_000.0, "consumer_byte_rate": 400_000.0, "request_percentage": 3.0}
    set_quotas(cluster, **quotas)
    began = time.monotonic()
    try:
        copy(spark, cluster, tmp_path, source, target, count, atomic=atomic)
    finally:
        set_quotas(cluster, **dict.fromkeys(quotas))
    # 4 MB at 200,000 bytes a second and broker, of which a window of eleven seconds may be had at once.
    assert time.monotonic() - began > 3
    assert amounts_in(cluster, target) == Counter(range(count))


# -- racks ------------------------------------------------------------------------------------------


class _Asked:
    """Which brokers were sent a Fetch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from flinkish_spark.connectors.kafka.client import fetch

        self.nodes: list[int] = []
        fetched = fetch._send_fetch

        async def noted(admin: Any, node: int, *more: Any) -> Any:
            self.nodes.append(node)
            return await fetched(admin, node, *more)

        monkeypatch.setattr(fetch, "_send_fetch", noted)


def read_all(cluster: BrokerCluster, topic: str, count: int, rack: str) -> list[bytes]:
    settings = ReaderSettings(client_rack=rack, max_partition_fetch_bytes=20_000, request_timeout_ms=4_000)
    reader = RangeReader(KafkaConnection(cluster.bootstrap_servers), settings)
    batches = reader.read(OffsetRange(topic, 0, 0, count))
    return [value for batch in batches for value in batch["value"].to_pylist()]


def test_a_reader_that_names_its_rack_reads_there(
    cluster: BrokerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = created(cluster, 1)
    values = [b"%d" % number * 50 for number in range(1_000)]
    produce(cluster.bootstrap_servers, topic, values)
    leader = cluster.nodes.index(cluster.leader_of(topic, 0)) + 1
    follower = leader % 3 + 1
    time.sleep(1)  # until the follower knows how far it is committed
    asked = _Asked(monkeypatch)
    assert read_all(cluster, topic, len(values), f"rack-{follower}") == values
    # Once the leader, which names the other one.
    assert asked.nodes[0] == leader and Counter(asked.nodes)[follower] > 5
    assert Counter(asked.nodes)[leader] <= 2
    asked.nodes.clear()
    for rack in ("", f"rack-{leader}", "elsewhere"):
        assert read_all(cluster, topic, len(values), rack) == values
    assert set(asked.nodes) == {leader}


@pytest.mark.parametrize("how", ["killed", "paused"])
def test_a_reader_goes_on_when_the_replica_in_its_rack_is_lost(cluster: BrokerCluster, how: str) -> None:
    topic = created(cluster, 1)
    values = [b"%d" % number * 50 for number in range(1_000)]
    produce(cluster.bootstrap_servers, topic, values)
    follower = cluster.nodes[(cluster.nodes.index(cluster.leader_of(topic, 0)) + 1) % 3]
    rack = f"rack-{cluster.nodes.index(follower) + 1}"
    assert read_all(cluster, topic, len(values), rack) == values
    (follower.kill if how == "killed" else follower.pause)()
    try:
        assert read_all(cluster, topic, len(values), rack) == values
    finally:
        if how == "killed":
            follower.start()
        else:
            follower.resume()
        cluster.await_in_sync()


def test_a_job_reads_in_a_rack(spark: Any, cluster: BrokerCluster, tmp_path: Path) -> None:
    source, target = created(cluster), created(cluster)
    produce(cluster.bootstrap_servers, source, [order(n) for n in range(2_000)])
    rack = {"kafka.client.rack": "rack-2"}
    copy(spark, cluster, tmp_path, source, target, 2_000, atomic=False, reader_options=rack)
    assert amounts_in(cluster, target) == Counter(range(2_000))


def test_what_a_replica_does_not_have_yet_is_the_leaders_to_say(cluster: BrokerCluster) -> None:
    """A range that the planner has seen, read at once: the follower may not know how far it is committed."""
    topic = created(cluster, 1)
    leader = cluster.nodes.index(cluster.leader_of(topic, 0)) + 1
    with KafkaProducer(bootstrap_servers=cluster.bootstrap_servers, acks="all") as producer:
        for number in range(100):
            place = producer.send(topic, b"%d" % number).get(timeout=30)
            found = read_all(cluster, topic, place.offset + 1, f"rack-{leader % 3 + 1}")
            assert len(found) == number + 1


# -- compaction and deletion ------------------------------------------------------------------------

COMPACTED = {
    "cleanup_policy": "compact,delete",
    "segment_ms": "500",
    "min_cleanable_dirty_ratio": "0.001",
    "retention_ms": "3600000",
}


def compacted(cluster: BrokerCluster, count: int) -> str:
    """A topic in which all but the newest record of a key, and one more each, may be gone."""
    topic = created(cluster, 1, **COMPACTED)
    values = [order(n) for n in range(count)]
    with KafkaProducer(bootstrap_servers=cluster.bootstrap_servers, acks="all") as producer:
        for number, value in enumerate(values):
            producer.send(topic, value, key=b"%d" % (number % 20)).get(timeout=30)
        end = time.monotonic() + 120
        # Each new record rolls a segment, and lets the cleaner look at what was before.
        while len(read_committed(cluster.bootstrap_servers, topic)) > count // 2:
            assert time.monotonic() < end, "nothing was compacted"
            time.sleep(1)
            producer.send(topic, order(count - 1), key=b"%d" % ((count - 1) % 20)).get(timeout=30)
    return topic


@WAYS
def test_a_topic_with_compaction_and_deletion_is_read_and_written(
    spark: Any, cluster: BrokerCluster, tmp_path: Path, atomic: bool
) -> None:
    """Offsets have gaps, batches have lost records, and the log begins behind 0."""
    source, target = compacted(cluster, 400), created(cluster, 2, **COMPACTED)
    with KafkaAdminClient(bootstrap_servers=cluster.bootstrap_servers) as admin:
        from kafka import TopicPartition

        admin.delete_records({TopicPartition(source, 0): 10})
    left = list(amounts_in(cluster, source).elements())
    copy(spark, cluster, tmp_path, source, target, len(left), atomic=atomic)
    seen = amounts_in(cluster, target)
    newest: dict[str, int] = {f"u{amount % 7}-": amount for amount in left}
    # The target is compacted, too: of each user the newest record is there, and nothing that was not sent.
    assert set(newest.values()) <= set(seen) <= set(left)


# -- records of 20 MB -------------------------------------------------------------------------------


@WAYS
def test_records_of_20_mb_are_replicated_and_copied(
    spark: Any, cluster: BrokerCluster, tmp_path: Path, atomic: bool
) -> None:
    limit = "21000000"
    source, target = created(cluster, max_message_bytes=limit), created(cluster, max_message_bytes=limit)
    servers = cluster.bootstrap_servers
    with KafkaProducer(bootstrap_servers=servers, max_request_size=int(limit), acks="all") as producer:
        for number in range(4):
            # Spark's JSON takes texts of 20,000,000 characters and no longer ones.
            producer.send(source, order(number, pad=19_999_990 if number % 2 else 10)).get(timeout=120)
    # Without a key: it would have the long text once more.
    big = {"key": "", "producer": {"max.request.size": limit}}
    copy(spark, cluster, tmp_path, source, target, 4, atomic=atomic, sink=big)
    assert amounts_in(cluster, target) == Counter(range(4))


def test_the_connection_of_a_client_that_is_throttled_is_kept(cluster: BrokerCluster) -> None:
    """Requests of all kinds wait; before, each lost its connection, and what was under way on it."""
    topic = created(cluster, 1)
    wire = KafkaWire(KafkaConnection(cluster.bootstrap_servers))
    set_quotas(cluster, request_percentage=0.05)
    try:
        for _ in range(20):
            wire.verifies_partitions()
            wire.producers([(topic, 0)])
            admin = wire._admin
            wire.list_transactions()
            assert wire._admin is admin
    finally:
        set_quotas(cluster, request_percentage=None)
        wire.close()
