"""What a task writes to a real broker: what it prepares, how it fails, what faults do to it."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from kafka.admin import (
    ACL,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    KafkaAdminClient,
    ResourcePattern,
    ResourceType,
)
from kafka.partitioner.default import murmur2

from flinkish_spark.checkpoint.failures import classify
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.client import WIRES
from flinkish_spark.connectors.kafka.client.codecs import Codec
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.producer import StagedTransaction
from flinkish_spark.connectors.kafka.client.settings import (
    OnRefusal,
    ProducerSettings,
    StagingSettings,
    TaskAttempt,
)
from flinkish_spark.connectors.kafka.client.transactions import KafkaCommittable, TransactionClient
from flinkish_spark.core.errors import (
    AuthorizationError,
    BadRecordError,
    EnvironmentFault,
    RetriableError,
    UnavailableError,
)
from flinkish_spark.protocol.ids import JobUuid, OwnerEpoch, TransactionalId
from flinkish_spark.protocol.records import Outcome
from flinkish_spark.testing import LocalBroker
from tests.support.jobs import read_committed
from tests.support.open_transactions import still_open
from tests.support.services import BROKER_JARS


class Kafka:
    """Stages under fresh transactional ids, ends transactions like the driver, reads like a consumer."""

    def __init__(self, servers: str) -> None:
        self.connection = KafkaConnection(servers)
        self.job = JobUuid(uuid.uuid4().hex)
        self.blocks = iter(range(1_000_000))
        self.client = TransactionClient(self.connection)

    def settings(self, topic: str | None, **changes: Any) -> StagingSettings:
        name = TransactionalId(self.job, OwnerEpoch(1), next(self.blocks), 0, 0)
        return StagingSettings(
            connection=self.connection,
            producer=ProducerSettings.of(changes.pop("producer", {})),
            **{
                "transactional_id": str(name),
                "transaction_timeout_ms": 60_000,
                "default_topic": topic,
                **changes,
            },
        )

    def stage(self, settings: StagingSettings, *values: bytes | None, **columns: Any) -> KafkaCommittable:
        keys = columns.pop("keys", None)
        with StagedTransaction(settings) as transaction:
            transaction.write(keys, pa.array(values, pa.binary()), **columns)
            committable = transaction.prepare()
        assert committable is not None
        return committable

    def commit(self, committable: KafkaCommittable | None) -> None:
        assert committable is not None
        answer = self.client.commit(committable)
        assert answer.outcome is Outcome.COMMITTED, answer

    def open_ids(self) -> set[str]:
        return {str(one.transactional_id) for one in still_open(self.client, self.job)}

    def read(self, topic: str, isolation: str = "read_committed") -> list[Any]:
        return read_committed(self.connection.servers, topic, isolation)

    def values(self, topic: str, isolation: str = "read_committed") -> list[bytes]:
        return sorted(m.value for m in self.read(topic, isolation))

    def close(self) -> None:
        for found in self.client.list_open_transactions(self.job):
            self.client.abort_open(found.transactional_id)
        self.client.close()


@pytest.fixture(scope="module")
def kafka(broker: LocalBroker) -> Iterator[Kafka]:
    made = Kafka(broker.bootstrap_servers)
    yield made
    made.close()
    WIRES.close()


Topics = Callable[..., str]


def numbers(count: int, first: int = 0) -> Any:
    return pa.array([b"%08d" % n + b"." * 92 for n in range(first, first + count)], pa.binary())


# -- what is written --------------------------------------------------------------------------------


def test_prepared_records_become_visible_at_the_commit(kafka: Kafka, topic: Topics) -> None:
    name, other = topic(partitions=2), topic()
    with StagedTransaction(kafka.settings(name)) as transaction:
        values = pa.array([b"a", b"b", b"c"])
        transaction.write(pa.array([b"k", b"k", None]), values, topics=pa.array([None, None, other]))
        committable = transaction.prepare()
    assert committable is not None and committable.records == 3
    assert (transaction.counts.sent, transaction.counts.bytes) == (3, 5)
    assert KafkaCommittable.from_json(json.loads(json.dumps(committable.to_json()))) == committable

    assert kafka.values(name) == kafka.values(other) == []
    assert kafka.values(name, "read_uncommitted") == [b"a", b"b"]
    assert kafka.open_ids() == {committable.transactional_id}
    assert kafka.client.is_alive([committable])[committable].alive
    kafka.commit(committable)
    assert (kafka.values(name), kafka.values(other)) == ([b"a", b"b"], [b"c"])
    assert kafka.client.commit(committable).outcome.is_done


def test_another_process_commits_what_this_one_prepared(kafka: Kafka, topic: Topics) -> None:
    name = topic()
    committable = kafka.stage(kafka.settings(name), b"x")
    program = (
        "import json, sys; from flinkish_spark.connectors.kafka.client import *\n"
        "client = TransactionClient(KafkaConnection(sys.argv[1]))\n"
        "print(client.commit(KafkaCommittable.from_json(json.loads(sys.argv[2]))).outcome.name)\n"
    )
    arguments = [kafka.connection.servers, json.dumps(committable.to_json())]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "COMMITTED"
    assert kafka.values(name) == [b"x"]


def test_every_part_of_a_record_arrives(kafka: Kafka, topic: Topics) -> None:
    name = topic(partitions=3)
    entry = pa.struct([("key", pa.string()), ("value", pa.binary())])
    headers = pa.array(
        [[{"key": "h", "value": b"1"}, {"key": "h", "value": None}], [], None, [{"key": "ü", "value": b""}]],
        pa.list_(entry),
    )
    with StagedTransaction(kafka.settings(name)) as transaction:
        transaction.write(
            pa.array([b"tombstone", None, b"", b"k" * 300]),
            pa.array([None, b"v", b"", b"x" * 70_000]),
            headers,
            partitions=pa.array([2, 1, 2, 0], pa.int32()),
            timestamps_ms=np.array([1, 1_700_000_000_000, 5, 2]),
        )
        transaction.write(pa.array(["s"]), pa.array(["ß"]), (("all", b"x"),), partitions=pa.array([1]))
        committable = transaction.prepare()
    kafka.commit(committable)
    found = {(m.partition, m.key, m.value, tuple(m.headers), m.timestamp) for m in kafka.read(name)}
    now_ms = int(time.time() * 1000)
    (written_now,) = {m for m in found if m[1] == b"s"}
    assert written_now[:4] == (1, b"s", "ß".encode(), (("all", b"x"),))
    assert now_ms - 60_000 < written_now[4] <= now_ms
    assert found - {written_now} == {
        (2, b"tombstone", None, (("h", b"1"), ("h", None)), 1),
        (1, None, b"v", (), 1_700_000_000_000),
        (2, b"", b"", (), 5),
        (0, b"k" * 300, b"x" * 70_000, (("ü", b""),), 2),
    }


def test_many_records_arrive_once_in_order_and_where_other_producers_put_their_keys(
    kafka: Kafka, topic: Topics
) -> None:
    name, count = topic(partitions=4), 100_000
    keys = pa.array([b"key-%d" % (n % 997) if n % 10 else None for n in range(count)], pa.binary())
    with StagedTransaction(kafka.settings(name)) as transaction:
        for first in range(0, count, 10_000):
            transaction.write(keys.slice(first, 10_000), numbers(10_000, first))
        kafka.commit(transaction.prepare())
    found = kafka.read(name)
    assert Counter(m.value for m in found) == Counter(numbers(count).to_pylist())
    assert all((murmur2(m.key) & 0x7FFFFFFF) % 4 == m.partition for m in found if m.key is not None)
    spread = Counter(m.partition for m in found if m.key is None)
    assert min(spread.values()) > 0.5 * max(spread.values()), spread
    for partition in range(4):
        log = [m.value for m in sorted(found, key=lambda m: m.offset) if m.partition == partition]
        assert log == sorted(log)


def test_every_codec_arrives(kafka: Kafka, broker: LocalBroker, topic: Topics) -> None:
    """Read with Kafka's own Java reader: kafka-python has not the libraries for all of them."""
    logs = []
    for codec in Codec:
        name = topic()
        producer = {"compression.type": codec.name.lower(), "batch.size": "100000"}
        with StagedTransaction(kafka.settings(name, producer=producer)) as transaction:
            transaction.write(None, numbers(3_000))
            kafka.commit(transaction.prepare())
        logs += broker.log.parent.glob(f"data/{name}-0/00000000000000000000.log")
    command = ["java", "-cp", f"{BROKER_JARS}/*", "kafka.tools.DumpLogSegments", "--print-data-log"]
    files = ",".join(map(str, logs))
    done = subprocess.run(
        [*command, "--files", files], capture_output=True, text=True, timeout=120, check=True
    )
    # One for each log, in the order in which they were named.
    dumps = done.stdout.split("Dumping ")[1:]
    for codec, dumped in zip(Codec, dumps, strict=True):
        assert re.findall(r"payload: (\S+)", dumped) == [v.decode() for v in numbers(3_000).to_pylist()]
        used = re.findall(r"isControl: false .*?compresscodec: (\w+)", dumped)
        assert set(used) == {codec.name.lower()} and len(used) > 2


# -- what is not written ----------------------------------------------------------------------------


def test_abandoned_and_aborted_transactions_leave_nothing(kafka: Kafka, topic: Topics) -> None:
    name = topic(partitions=2)
    with StagedTransaction(kafka.settings(name)) as transaction:
        transaction.write(None, numbers(50_000))
    assert len(kafka.values(name, "read_uncommitted")) > 0, "some of it was sent"
    aborted = kafka.stage(kafka.settings(name), b"aborted")
    assert kafka.client.abort(aborted).outcome is Outcome.COMMITTED
    with pytest.raises(ZeroDivisionError), StagedTransaction(kafka.settings(name)) as transaction:
        transaction.write(None, numbers(50_000))
        _ = 1 // 0
    assert kafka.open_ids() == set()
    assert kafka.values(name) == []


def test_oversize_records_fail_the_transaction(kafka: Kafka, topic: Topics) -> None:
    name = topic()
    with pytest.raises(BadRecordError) as failure:
        kafka.stage(
            kafka.settings(name, max_record_bytes=2000), b"s", b"x" * 5000, keys=pa.array([None, b"key"])
        )
    message = str(failure.value)
    assert message.startswith("[FLINKISH_BAD_RECORD] ") and "\n" not in message
    assert name in message and "2000" in message and "its key: 3 bytes" in message
    assert type(classify(Exception(message))) is BadRecordError
    assert kafka.values(name) == []
    assert kafka.open_ids() == set()


def test_oversize_records_are_dropped(kafka: Kafka, topic: Topics) -> None:
    name = topic()
    settings = kafka.settings(name, max_record_bytes=2000, oversize=OnRefusal.DROP)
    with StagedTransaction(settings) as transaction:
        transaction.write(None, pa.array([b"x" * 5000, b"small", b"x" * 5000]))
        committable = transaction.prepare()
    assert (transaction.counts.sent, transaction.counts.dropped) == (1, 2)
    kafka.commit(committable)
    assert kafka.values(name) == [b"small"]


def test_oversize_records_go_to_the_dead_letter_topic_with_the_rest(kafka: Kafka, topic: Topics) -> None:
    name, dead = topic(), topic()
    policy = {"max_record_bytes": 2000, "oversize": OnRefusal.DEAD_LETTER, "dead_letter_topic": dead}
    with StagedTransaction(kafka.settings(name, **policy)) as transaction:
        keys = pa.array([b"k", None, b"k" * 3000])
        transaction.write(keys, pa.array([b"x" * 5000, b"small", b"y"]))
        committable = transaction.prepare()
    assert committable is not None and committable.records == 3
    assert transaction.counts.dead_lettered == 2
    assert kafka.values(dead) == []
    kafka.commit(committable)
    assert kafka.values(name) == [b"small"]
    long_value, long_key = kafka.read(dead)
    assert (long_value.key, long_value.value) == (b"k", b"x" * 1024)
    assert (long_key.key, long_key.value) == (None, b"y")
    headers = dict(long_value.headers)
    assert headers["flinkish-topic"] == name.encode()
    assert int(headers["flinkish-size"]) >= 5001
    assert headers["flinkish-error"] == b"oversize"


def test_a_size_that_only_the_broker_refuses(kafka: Kafka, topic: Topics) -> None:
    """Behaviour 145. A batch of several records is cut, a single record is a bad one."""
    name = topic(configs={"max.message.bytes": "1000"})
    with StagedTransaction(kafka.settings(name)) as transaction:
        transaction.write(None, numbers(2_000))
        kafka.commit(transaction.prepare())
    assert kafka.values(name) == numbers(2_000).to_pylist()
    with pytest.raises(BadRecordError, match=r"^\[FLINKISH_BAD_RECORD\] the broker refuses a record"):
        kafka.stage(kafka.settings(name), b"fine", b"x" * 5000)
    assert kafka.open_ids() == set()


def test_records_that_the_broker_refuses_are_bad_ones(kafka: Kafka, topic: Topics) -> None:
    name = topic(configs={"cleanup.policy": "compact"})
    with pytest.raises(BadRecordError, match=r"87 INVALID_RECORD, .*Compacted topic cannot accept"):
        kafka.stage(kafka.settings(name), b"no key")


def test_unknown_topics_and_partitions_are_named(kafka: Kafka, topic: Topics) -> None:
    name = topic(partitions=2)
    with pytest.raises(RetriableError, match="topic 'no-such-topic' does not exist"):
        kafka.stage(kafka.settings("no-such-topic"), b"x")
    with pytest.raises(RetriableError, match="topic 'bad name!' does not exist"):
        kafka.stage(kafka.settings("bad name!"), b"x")
    with pytest.raises(BadRecordError, match="names no topic"):
        kafka.stage(kafka.settings(None), b"x", b"y", topics=pa.array([name, None]))
    with pytest.raises(BadRecordError, match="names partition 2 of topic"):
        kafka.stage(kafka.settings(name), b"x", b"y", partitions=pa.array([None, 2]))
    assert kafka.open_ids() == set()


# -- ids and epochs ---------------------------------------------------------------------------------


def test_an_old_handle_never_commits_a_newer_transaction(kafka: Kafka, topic: Topics) -> None:
    """Behaviour 141. InitProducerId must run for each transaction: else a handle would name two of them."""
    name = topic()
    settings = kafka.settings(name)
    first = kafka.stage(settings, b"1")
    kafka.commit(first)
    second = kafka.stage(settings, b"2")
    assert first.producer_id == second.producer_id
    assert first.producer_epoch < second.producer_epoch
    assert kafka.client.commit(first).outcome is Outcome.ALREADY_COMMITTED
    assert kafka.values(name) == [b"1"]
    kafka.commit(second)
    assert kafka.values(name) == [b"1", b"2"]


def test_a_reused_connection_leaves_earlier_transactions_open(kafka: Kafka, topic: Topics) -> None:
    name = topic()
    WIRES.close()
    committables = [kafka.stage(kafka.settings(name), b"0")]
    before = set(threading.enumerate())
    committables += [kafka.stage(kafka.settings(name), b"%d" % n) for n in (1, 2, 3)]
    # As many as before or fewer: a thread that an earlier test has told to end may still be on its way out.
    assert set(threading.enumerate()) <= before, "no client was built for the later transactions"
    assert len({one.producer_id for one in committables}) == 4, "each id has a producer id of its own"
    assert kafka.open_ids() == {one.transactional_id for one in committables}
    kafka.client.abort(committables[1])
    for n in (3, 0, 2):
        kafka.commit(committables[n])
    assert kafka.values(name) == [b"0", b"2", b"3"]


def test_an_attempt_that_takes_the_id_fences_the_one_before(kafka: Kafka, topic: Topics) -> None:
    name = topic()
    settings = kafka.settings(name)
    with pytest.raises(UnavailableError, match="no longer ours"), StagedTransaction(settings) as first:
        first.write(None, numbers(60_000))
        second = kafka.stage(settings, b"second")
        first.write(None, numbers(60_000))
        first.prepare()
    assert kafka.client.is_alive([second])[second].alive, "the loser's abort did not touch the winner"
    kafka.commit(second)
    assert kafka.values(name) == [b"second"]


def test_a_task_of_a_repeated_stage_takes_another_id(kafka: Kafka, topic: Topics) -> None:
    """Spark numbers its attempts from 0 again, while the old one's transaction may be accepted."""
    name, prefix = topic(), f"flinkish-{uuid.uuid4().hex}-0-1"

    def staged(attempt: int) -> str:
        settings = kafka.settings(name, transactional_id=prefix, attempt=TaskAttempt(7, attempt))
        return kafka.stage(settings, b"x").transactional_id

    # Each is asked for when it is used: both were made before either had begun.
    made = [
        StagedTransaction(kafka.settings(name, transactional_id=prefix, attempt=TaskAttempt(7, 0)))
        for _ in range(2)
    ]
    for transaction in made:
        transaction.write(None, pa.array([b"x"]))
    assert [one.transactional_id for one in (each.prepare() for each in made) if one] == [
        f"{prefix}-7-{index}" for index in (0, 16)
    ]
    assert [staged(0), staged(0)] == [f"{prefix}-7-32", f"{prefix}-7-48"]
    with pytest.raises(EnvironmentFault, match="no transactional id left"):
        staged(0)
    assert staged(1) == f"{prefix}-7-1"
    with pytest.raises(EnvironmentFault, match="no transactional id left"):
        staged(16)


def test_a_forked_worker_makes_a_connection_of_its_own(kafka: Kafka, topic: Topics) -> None:
    name = topic()
    kafka.commit(kafka.stage(kafka.settings(name), b"parent"))
    settings = kafka.settings(name)
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)

    def work() -> None:
        send.send(kafka.stage(settings, b"child").to_json())
        os._exit(0)

    child = fork.Process(target=work)
    child.start()
    assert receive.poll(30)
    committable = KafkaCommittable.from_json(receive.recv())
    child.join(10)
    kafka.commit(kafka.stage(kafka.settings(name), b"parent again"))
    kafka.commit(committable)
    assert kafka.values(name) == [b"child", b"parent", b"parent again"]


# -- faults -----------------------------------------------------------------------------------------

#: Records of a write: some requests of each connection.
PART = 20_000


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    own = LocalBroker(tmp_path_factory.mktemp("victim"), jars_dir=BROKER_JARS)
    yield own
    own.kill()


@pytest.fixture
def ruined(victim: LocalBroker) -> Iterator[tuple[LocalBroker, Kafka, str]]:
    """A broker to be killed and paused, with a topic of four partitions."""
    # An earlier test may have killed it.
    victim.start()
    victim.resume()
    kafka, name = Kafka(victim.bootstrap_servers), f"t-{uuid.uuid4().hex[:6]}"
    with KafkaAdmin(kafka.connection) as admin:
        admin.create_topic(name, 4)
    yield victim, kafka, name
    kafka.client.close()
    WIRES.close()


@pytest.mark.nightly
def test_a_broker_that_dies_in_the_middle(ruined: tuple[LocalBroker, Kafka, str]) -> None:
    broker, kafka, name = ruined
    with StagedTransaction(kafka.settings(name)) as transaction:
        for first in range(0, 4 * PART, PART):
            transaction.write(None, numbers(PART, first))
            if first == PART:
                broker.kill()
                starting = threading.Thread(target=broker.start)
                starting.start()
        committable = transaction.prepare()
    starting.join()
    kafka.commit(committable)
    assert Counter(kafka.values(name)) == Counter(numbers(4 * PART).to_pylist())

    # The idle connection is dead and nobody has noticed yet.
    broker.kill()
    broker.start()
    kafka.commit(kafka.stage(kafka.settings(name), b"after"))
    assert len(kafka.values(name)) == 4 * PART + 1


@pytest.mark.nightly
@pytest.mark.parametrize("request_timeout_ms", ["30000", "700"])
def test_a_broker_that_hangs_for_a_while(
    ruined: tuple[LocalBroker, Kafka, str], request_timeout_ms: str
) -> None:
    """With the short timeout requests are given up and sent again, and the broker gets all of them."""
    broker, kafka, name = ruined
    settings = kafka.settings(name, producer={"request.timeout.ms": request_timeout_ms})
    with StagedTransaction(settings) as transaction:
        for first in range(0, 4 * PART, PART):
            transaction.write(None, numbers(PART, first))
            if first == PART:
                broker.pause()
                threading.Timer(3, broker.resume).start()
        committable = transaction.prepare()
    kafka.commit(committable)
    assert Counter(kafka.values(name)) == Counter(numbers(4 * PART).to_pylist())


@pytest.mark.nightly
def test_abandoning_is_quick_while_the_broker_hangs(ruined: tuple[LocalBroker, Kafka, str]) -> None:
    broker, kafka, name = ruined
    transaction = StagedTransaction(kafka.settings(name))
    transaction.write(None, numbers(100_000))
    broker.pause()
    transaction.write(None, numbers(50_000))
    started = time.monotonic()
    transaction.abandon()
    assert time.monotonic() - started < 5
    broker.resume()
    for open_id in kafka.client.list_open_transactions(kafka.job):
        kafka.client.abort_open(open_id.transactional_id)
    assert kafka.values(name) == []


def test_a_broker_that_stays_away_is_one_clear_error(ruined: tuple[LocalBroker, Kafka, str]) -> None:
    broker, kafka, name = ruined
    settings = kafka.settings(name, producer={"delivery.timeout.ms": "2000"})
    broker.kill()
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="2000 ms were not enough"):
        kafka.stage(settings, b"x")
    assert time.monotonic() - started < 8


# -- rights -----------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_missing_right_is_named(tmp_path: Path) -> None:
    properties = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
        "auto.create.topics.enable": "true",
    }
    with LocalBroker(tmp_path / "broker", jars_dir=BROKER_JARS, extra_properties=properties) as guarded:
        kafka = Kafka(guarded.bootstrap_servers)
        with KafkaAdmin(kafka.connection) as admin:
            admin.create_topic("guarded", 1)
        kafka.commit(kafka.stage(kafka.settings("guarded"), b"allowed"))
        with KafkaAdminClient(bootstrap_servers=guarded.bootstrap_servers) as admin:
            with pytest.raises(RetriableError, match="does not exist"):
                kafka.stage(kafka.settings("never-created"), b"x")
            assert "never-created" not in admin.list_topics()
            assert_denied(kafka, admin, ResourceType.TOPIC, ACLOperation.WRITE)
            assert_denied(kafka, admin, ResourceType.TOPIC, ACLOperation.DESCRIBE)
            assert_denied(kafka, admin, ResourceType.TRANSACTIONAL_ID, ACLOperation.WRITE)
            assert_denied(kafka, admin, ResourceType.TRANSACTIONAL_ID, ACLOperation.DESCRIBE)
        kafka.client.close()
        WIRES.close()


def assert_denied(kafka: Kafka, admin: Any, resource: ResourceType, operation: ACLOperation) -> None:
    topic = f"guarded-{uuid.uuid4().hex[:6]}"
    with KafkaAdmin(kafka.connection) as creator:
        creator.create_topic(topic, 1)
    settings = kafka.settings(topic)
    is_topic = resource is ResourceType.TOPIC
    name = topic if is_topic else settings.transactional_id
    pattern = ResourcePattern(resource, name, ACLResourcePatternType.LITERAL)
    admin.create_acls([ACL("User:ANONYMOUS", "*", operation, ACLPermissionType.DENY, pattern)])
    with pytest.raises(AuthorizationError) as failure:
        kafka.stage(settings, b"x")
    message = str(failure.value)
    right = f"topics [{topic}]" if is_topic else f"transactional id {settings.transactional_id}"
    assert message.startswith("[FLINKISH_NOT_AUTHORIZED] the producer's principal lacks "), message
    assert f"WRITE and DESCRIBE on {right}" in message, message
    assert type(classify(Exception(message))) is AuthorizationError
