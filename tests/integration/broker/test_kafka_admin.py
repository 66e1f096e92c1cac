"""Topics, group offsets and the checks before a start, on a real broker."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient
from kafka.structs import OffsetAndMetadata

from flinkish_spark import KafkaSource
from flinkish_spark.connectors.kafka.client.admin import GroupCommit, KafkaAdmin, OffsetDirection
from flinkish_spark.connectors.kafka.client.client import Isolation
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.core.errors import BrokerUnavailableError, ConfigError, EnvironmentFault, InputLostError
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.testing.broker import LocalBroker
from tests.support.jobs import PATIENCE_S, eventually, produce

TopicFactory = Callable[..., str]


@pytest.fixture
def admin(broker: LocalBroker) -> Iterator[KafkaAdmin]:
    with KafkaAdmin(KafkaConnection(broker.bootstrap_servers)) as made:
        yield made


@pytest.fixture
def group() -> str:
    return f"group-{uuid.uuid4().hex[:12]}"


def test_topics_are_described_and_unknown_ones_absent(admin: KafkaAdmin) -> None:
    name, plain = f"made-{uuid.uuid4().hex}", f"made-{uuid.uuid4().hex}"
    admin.create_topic(name, 3, {"max.message.bytes": "12345"})
    admin.create_topic(plain, 1)
    found = admin.topics([name, plain, "no-such-topic"])
    assert found.keys() == {name, plain}
    assert (found[name].partitions, found[name].max_message_bytes) == (3, 12345)
    assert found[plain].max_message_bytes == 1_048_588
    assert admin.topics([]) == {}
    assert admin.topics(["no-such-topic"]) == {}
    with pytest.raises(ConfigError, match="exists already"):
        admin.create_topic(name, 3)


def test_a_topic_created_again_has_another_id(admin: KafkaAdmin, broker: LocalBroker) -> None:
    name = f"made-{uuid.uuid4().hex}"
    admin.create_topic(name, 1)
    before = admin.topics([name])[name].topic_id
    with KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers) as raw:
        raw.delete_topics([name])
    admin.create_topic(name, 1)
    after = admin.topics([name])[name].topic_id
    assert before is not None
    assert after is not None
    assert before != after


def test_offsets_end_before_an_open_transaction(
    admin: KafkaAdmin, broker: LocalBroker, topic: TopicFactory
) -> None:
    name = topic(partitions=2)
    producer = KafkaProducer(
        bootstrap_servers=broker.bootstrap_servers, transactional_id=uuid.uuid4().hex, acks="all"
    )
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(name, b"x", partition=0).get(timeout=10)
    places = [(name, 0), (name, 1)]
    assert admin.beginning_offsets(places) == {(name, 0): 0, (name, 1): 0}
    assert admin.end_offsets(places) == {(name, 0): 0, (name, 1): 0}
    assert admin.end_offsets(places, Isolation.READ_UNCOMMITTED)[name, 0] == 1
    producer.commit_transaction()
    assert eventually(lambda: admin.end_offsets(places)[name, 0] == 2)
    producer.close()
    assert admin.end_offsets([]) == {}
    with pytest.raises(InputLostError, match="does not exist"):
        admin.end_offsets([("no-such-topic", 0)])


def test_group_offsets_are_never_lowered(admin: KafkaAdmin, topic: TopicFactory, group: str) -> None:
    name = topic(partitions=2)
    assert admin.committed_offsets(group) == {}
    assert admin.commit_offsets(group, {(name, 0): 5, (name, 1): 7}) is GroupCommit.COMMITTED
    assert admin.commit_offsets(group, {(name, 0): 3, (name, 1): 9}) is GroupCommit.COMMITTED
    assert admin.committed_offsets(group) == {(name, 0): 5, (name, 1): 9}
    assert admin.commit_offsets(group, {(name, 0): 3, (name, 1): 9}) is GroupCommit.UNCHANGED
    assert admin.commit_offsets(group, {}) is GroupCommit.UNCHANGED


def test_offsets_of_a_group_in_an_open_transaction_are_waited_for(
    admin: KafkaAdmin, broker: LocalBroker, topic: TopicFactory, group: str
) -> None:
    """As by a read_committed consumer: by the old ones what is about to be done would be done once more."""
    name = topic(partitions=1)
    admin.commit_offsets(group, {(name, 0): 1})
    producer = KafkaProducer(
        bootstrap_servers=broker.bootstrap_servers, transactional_id=uuid.uuid4().hex, acks="all"
    )
    producer.init_transactions()
    producer.begin_transaction()
    producer.send_offsets_to_transaction({TopicPartition(name, 0): OffsetAndMetadata(4, "mine", -1)}, group)
    assert admin.committed_offsets(group) == {(name, 0): 1}
    with (
        KafkaAdmin(KafkaConnection(broker.bootstrap_servers), timeout_ms=2_000) as impatient,
        pytest.raises(BrokerUnavailableError, match="UnstableOffsetCommitError"),
    ):
        impatient.committed_offsets(group, Isolation.READ_COMMITTED)
    producer.commit_transaction()
    assert admin.committed_offsets(group, Isolation.READ_COMMITTED) == {(name, 0): 4}
    assert admin.find_committed_notes(group, Isolation.READ_COMMITTED) == {(name, 0): "mine"}
    producer.close()


def test_offsets_of_many_partitions_are_more_than_one_request_can_store(
    admin: KafkaAdmin, topic: TopicFactory, group: str
) -> None:
    """As those of 10,000 partitions: a broker keeps the offsets of a request as one batch of at most 1 MB."""
    name, note = topic(partitions=300), "n" * 4_000
    offsets = {(name, number): 0 for number in range(300)}
    assert admin.commit_offsets(group, offsets, note=note) is GroupCommit.COMMITTED
    assert admin.committed_offsets(group) == offsets
    assert admin.commit_offsets(group, offsets, note=note) is GroupCommit.UNCHANGED


def test_a_rewind_may_lower_group_offsets(admin: KafkaAdmin, topic: TopicFactory, group: str) -> None:
    name = topic(partitions=2)
    admin.commit_offsets(group, {(name, 0): 5, (name, 1): 7})
    lower = {(name, 0): 2, (name, 1): 7}
    assert admin.commit_offsets(group, lower, OffsetDirection.REWIND) is GroupCommit.COMMITTED
    assert admin.committed_offsets(group) == lower
    assert admin.commit_offsets(group, lower, OffsetDirection.REWIND) is GroupCommit.UNCHANGED


def test_a_group_with_members_is_an_outcome_and_holds_no_checkpoint(
    admin: KafkaAdmin, broker: LocalBroker, topic: TopicFactory, group: str
) -> None:
    name = topic()
    source = KafkaSource(broker.bootstrap_servers, [name], group_id=group).bind("orders")
    done = LoggedOffsets(({name: {"0": 1}},))
    produce(broker.bootstrap_servers, name, [b"one"])
    member = KafkaConsumer(
        name, bootstrap_servers=broker.bootstrap_servers, group_id=group, auto_offset_reset="earliest"
    )
    try:
        # One long poll: kafka-python 3.0.12 forgets an assignment that comes between two polls.
        assert member.poll(timeout_ms=PATIENCE_S * 1000)
        assert admin.commit_offsets(group, {(name, 0): 1}) is GroupCommit.ACTIVE_MEMBERS
        assert source.commit_offsets(done) == {}
    finally:
        member.close()
    assert eventually(lambda: bool(source.commit_offsets(done)), PATIENCE_S)
    assert admin.committed_offsets(group) == {(name, 0): 1}


def test_offsets_of_a_topic_that_does_not_exist_are_refused(group: str, broker: LocalBroker) -> None:
    with (
        KafkaAdmin(KafkaConnection(broker.bootstrap_servers), timeout_ms=1_000) as admin,
        pytest.raises(EnvironmentFault),
    ):
        admin.commit_offsets(group, {("no-such-topic", 0): 1})


def test_transaction_timeouts_are_checked_before_a_start(admin: KafkaAdmin) -> None:
    transactional_id = f"flinkish-probe-{uuid.uuid4().hex}"
    assert admin.broker_transaction_max_timeout_ms() == 900_000
    admin.probe_transactional_id(transactional_id, 900_000)
    admin.probe_transactional_id(transactional_id, 900_000)
    with pytest.raises(
        ConfigError, match=r"3600000 ms.*transaction\.max\.timeout\.ms, which is 900000 ms"
    ) as caught:
        admin.probe_transactional_id(transactional_id, 3_600_000)
    assert caught.value.facts["maximum_ms"] == 900_000


@pytest.mark.parametrize("ask", ["topics", "committed_offsets", "probe"])
def test_a_broker_that_is_down_is_named_in_time(ask: str) -> None:
    threads = threading.active_count()
    admin = KafkaAdmin(KafkaConnection("127.0.0.1:19"), timeout_ms=1_500)
    started = time.monotonic()
    with pytest.raises(BrokerUnavailableError, match=r"127\.0\.0\.1:19") as caught:
        match ask:
            case "topics":
                admin.topics(["t"])
            case "committed_offsets":
                admin.committed_offsets("g")
            case _:
                admin.probe_transactional_id("flinkish-probe", 60_000)
    assert time.monotonic() - started < 3
    assert caught.value.restartable
    assert eventually(lambda: threading.active_count() <= threads), (
        "a failed connection left its thread behind"
    )


@pytest.mark.nightly
def test_the_same_admin_works_after_a_broker_restart(own_broker: LocalBroker) -> None:
    own_broker.start()
    with KafkaAdmin(KafkaConnection(own_broker.bootstrap_servers), timeout_ms=2_000) as admin:
        admin.create_topic("t", 2)
        admin.commit_offsets("g", {("t", 0): 1})
        own_broker.kill()
        started = time.monotonic()
        with pytest.raises(BrokerUnavailableError, match=own_broker.bootstrap_servers):
            admin.topics(["t"])
        assert time.monotonic() - started < 4
        own_broker.start()
        assert admin.topics(["t"])["t"].partitions == 2
        assert eventually(lambda: _is_answered(lambda: admin.committed_offsets("g") == {("t", 0): 1}))
        own_broker.pause()
        started = time.monotonic()
        with pytest.raises(BrokerUnavailableError):
            admin.topics(["t"])
        assert time.monotonic() - started < 6
        own_broker.resume()
        assert eventually(lambda: _is_answered(lambda: bool(admin.topics(["t"]))))


def _is_answered(ask: Callable[[], bool]) -> bool:
    try:
        return ask()
    except BrokerUnavailableError:
        return False
