"""Ranges of real partitions: what is read is what was written, and what is gone is told."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kafka import KafkaProducer, TopicPartition
from kafka.admin import (
    ACL,
    ACLOperation,
    ACLPermissionType,
    KafkaAdminClient,
    ResourcePattern,
    ResourceType,
)
from kafka.protocol.admin.client_quotas import AlterClientQuotasRequest

from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin, TopicPattern, list_places
from flinkish_spark.connectors.kafka.client.client import Isolation, WirePool
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.fetch import FetchClient, FetchLimits
from flinkish_spark.connectors.kafka.client.reader import OffsetRange, RangeReader, record_schema
from flinkish_spark.connectors.kafka.client.settings import ReaderSettings
from flinkish_spark.core.errors import AuthorizationError, BrokerUnavailableError, InputLostError
from flinkish_spark.testing.broker import LocalBroker
from tests.support import effort
from tests.support.jobs import eventually
from tests.support.services import BROKER_JARS, topics_of

BUILD = Path(__file__).resolve().parents[3] / "build"
TopicFactory = Callable[..., str]
COMMITTED, UNCOMMITTED = Isolation.READ_COMMITTED, Isolation.READ_UNCOMMITTED


@pytest.fixture(scope="module")
def broker() -> Iterator[LocalBroker]:
    """A broker that compacts at once and knows ACLs; these tests may kill it and start it again."""
    scratch = tempfile.mkdtemp(prefix="test-range-broker-", dir=BUILD)
    properties = {
        "log.cleaner.backoff.ms": "100",
        # Some records here are years old.
        "log.retention.ms": "-1",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with LocalBroker(scratch, jars_dir=BROKER_JARS, extra_properties=properties) as running:
        yield running
    shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture(scope="module")
def topic(broker: LocalBroker) -> TopicFactory:
    return topics_of(broker)


@pytest.fixture
def pool() -> Iterator[WirePool]:
    made = WirePool()
    yield made
    made.close()


@pytest.fixture
def positions(broker: LocalBroker) -> Iterator[KafkaAdmin]:
    with KafkaAdmin(KafkaConnection(broker.bootstrap_servers)) as made:
        yield made


@pytest.fixture
def read(broker: LocalBroker, pool: WirePool) -> Callable[..., pa.Table]:
    """Call it for the rows of a range; the last reader is its attribute `reader`."""

    def run(topic: str, start: int, end: int, partition: int = 0, **settings: Any) -> pa.Table:
        made = ReaderSettings(**settings)
        run.reader = RangeReader(KafkaConnection(broker.bootstrap_servers), made, pool=pool)  # type: ignore[attr-defined]
        found = list(run.reader.read(OffsetRange(topic, partition, start, end)))  # type: ignore[attr-defined]
        assert all(batch.num_rows for batch in found)
        return pa.Table.from_batches(found, record_schema(include_headers=made.include_headers))

    return run


@pytest.fixture
def producer(broker: LocalBroker) -> Iterator[KafkaProducer]:
    made = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, acks="all", linger_ms=20)
    yield made
    made.close()


def send(producer: KafkaProducer, topic: str, *values: bytes | None, **fields: Any) -> list[int]:
    """Send and return the offsets."""
    futures = [producer.send(topic, value, partition=0, **fields) for value in values]
    producer.flush()
    return [future.get(timeout=10).offset for future in futures]


# -- what was written is read -------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_all_columns_come_back_in_order(
    compression: str, topic: TopicFactory, producer: KafkaProducer, read: Any
) -> None:
    name = topic(configs={"compression.type": compression})  # the broker compresses anew
    rng = random.Random(compression)
    rows = []
    for number in range(3_000):
        key = rng.choice([None, b"", rng.randbytes(rng.randint(1, 20))])
        # kafka-python refuses to send a record without both.
        empty = rng.choice([b"", None] if key is not None else [b""])
        value = rng.choice([empty, rng.randbytes(rng.randint(1, 30)) * rng.randint(1, 100)])
        headers = [(f"h{i}", rng.choice([b"", b"x" * i])) for i in range(rng.choice([0, 0, 1, 3]))]
        rows.append((key, value, 1_700_000_000_000 + rng.randint(0, 10**6), headers))
        producer.send(name, value, key=key, headers=headers, partition=0, timestamp_ms=rows[number][2])
    producer.flush()
    for settings in ({}, {"max_partition_fetch_bytes": 20_000}, {"fetch_max_bytes": 1, "check_crcs": False}):
        table = read(name, 0, 3_000, include_headers=True, **settings)
        assert table.schema == record_schema(include_headers=True)
        assert table["offset"].to_pylist() == list(range(3_000))
        assert table["key"].to_pylist() == [key for key, *_ in rows]
        assert table["value"].to_pylist() == [value for _, value, *_ in rows]
        assert table["timestamp"].cast(pa.int64()).to_pylist() == [ms * 1000 for _, _, ms, _ in rows]
        expected = [[{"key": k, "value": v} for k, v in headers] or None for *_, headers in rows]
        assert table["headers"].to_pylist() == expected
    assert set(table["topic"].to_pylist()) == {name}
    assert set(table["partition"].to_pylist()) == set(table["timestampType"].to_pylist()) == {0}
    assert read(name, 0, 10).schema == record_schema(include_headers=False)


def test_gzip_from_the_producer(broker: LocalBroker, topic: TopicFactory, read: Any) -> None:
    name = topic()
    packing = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, compression_type="gzip", linger_ms=20)
    values = [b"%d" % i * 50 for i in range(500)]
    send(packing, name, *values)
    packing.close()
    assert read(name, 0, 500)["value"].to_pylist() == values


def test_a_range_may_cut_through_batches(topic: TopicFactory, producer: KafkaProducer, read: Any) -> None:
    name = topic(partitions=2)
    for number in range(300):
        producer.send(name, b"%d" % number, partition=1)
    producer.flush()
    for start, end in ((0, 300), (37, 61), (37, 38), (299, 300), (1, 299)):
        table = read(name, start, end, partition=1)
        assert table["value"].to_pylist() == [b"%d" % number for number in range(start, end)]
        assert set(table["partition"].to_pylist()) == {1}
    assert read(name, 150, 150, partition=1).num_rows == 0
    assert read("no-such-topic", 7, 7).num_rows == 0


def test_a_message_larger_than_a_fetch_is_read(broker: LocalBroker, topic: TopicFactory, read: Any) -> None:
    name = topic(configs={"max.message.bytes": "4000000"})
    large = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, max_request_size=4_000_000)
    values = [b"a", b"b" * 3_000_000, b"c", b"d" * 2_000_000, b"e"]
    for value in values:
        send(large, name, value)
    large.close()
    assert read(name, 0, 5)["value"].to_pylist() == values
    assert read(name, 0, 5, max_partition_fetch_bytes=1)["value"].to_pylist() == values


def test_the_brokers_time_is_named_as_such(topic: TopicFactory, producer: KafkaProducer, read: Any) -> None:
    name = topic(configs={"message.timestamp.type": "LogAppendTime"})
    before_ms = int(time.time() * 1000)
    send(producer, name, b"a", b"b", timestamp_ms=5)
    table = read(name, 0, 2)
    assert table["timestampType"].to_pylist() == [1, 1]
    assert all(before_ms - 1000 <= us // 1000 for us in table["timestamp"].cast(pa.int64()).to_pylist())


# -- transactions -------------------------------------------------------------------------------


@dataclass
class Written:
    """What a random history left in partition 0: offsets and values, and where it ends."""

    committed: list[tuple[int, bytes]]
    all: list[tuple[int, bytes]]
    end: int


def write_history(broker: LocalBroker, name: str, seed: int, steps: int = 120) -> Written:
    rng = random.Random(seed)
    servers = broker.bootstrap_servers
    plain = KafkaProducer(bootstrap_servers=servers, acks="all")
    makers = [
        KafkaProducer(bootstrap_servers=servers, acks="all", transactional_id=uuid.uuid4().hex)
        for _ in range(3)
    ]
    for maker in makers:
        maker.init_transactions()
    pending: dict[int, list[tuple[int, bytes]]] = {}
    written = Written([], [], 0)

    def end(number: int, *, commit: bool) -> None:
        if commit:
            makers[number].commit_transaction()
            written.committed += pending[number]
        else:
            makers[number].abort_transaction()
        del pending[number]

    for step in range(steps):
        values = [b"%d-%d" % (step, i) for i in range(rng.randint(1, 6))]
        number = rng.randrange(4)
        if number == 3:
            sent = list(zip(send(plain, name, *values), values, strict=True))
            written.committed += sent
            written.all += sent
        elif number in pending and rng.random() < 0.4:
            end(number, commit=rng.random() < 0.5)
        else:
            if number not in pending:
                makers[number].begin_transaction()
            sent = list(zip(send(makers[number], name, *values), values, strict=True))
            pending.setdefault(number, []).extend(sent)
            written.all += sent
    for number in list(pending):
        end(number, commit=rng.random() < 0.5)  # so that markers are the last there is
    with KafkaAdmin(KafkaConnection(servers)) as positions:
        place = (name, 0)
        assert eventually(
            lambda: positions.end_offsets([place], COMMITTED) == positions.end_offsets([place], UNCOMMITTED)
        )
        written.end = positions.end_offsets([place], COMMITTED)[place]
    for maker in (plain, *makers):
        maker.close()
    written.committed.sort()
    written.all.sort()
    return written


def rows_of(table: pa.Table) -> list[tuple[int, bytes]]:
    return list(zip(table["offset"].to_pylist(), table["value"].to_pylist(), strict=True))


@pytest.mark.parametrize("seed", effort.seeds(3))
def test_interleaved_transactions_are_told_apart(
    seed: int, broker: LocalBroker, topic: TopicFactory, read: Any
) -> None:
    name = topic()
    written = write_history(broker, name, seed)
    assert written.end > written.all[-1][0] + 1  # markers end the range
    rng = random.Random(seed)
    ranges = [sorted(rng.sample(range(written.end + 1), 2)) for _ in range(15)]
    for start, end in [(0, written.end), (written.all[-1][0] + 1, written.end), *ranges]:
        most_bytes = rng.choice([1, 300, 1_000, 1_048_576])
        for isolation, expected in ((COMMITTED, written.committed), (UNCOMMITTED, written.all)):
            table = read(name, start, end, isolation=isolation, max_partition_fetch_bytes=most_bytes)
            assert rows_of(table) == [row for row in expected if start <= row[0] < end]


def test_an_open_transaction_is_no_part_of_what_is_committed(
    broker: LocalBroker, topic: TopicFactory, positions: KafkaAdmin, read: Any
) -> None:
    name = topic()
    maker = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, transactional_id=uuid.uuid4().hex)
    maker.init_transactions()
    maker.begin_transaction()
    send(maker, name, b"open")
    with pytest.raises(BrokerUnavailableError, match="A transaction is open at offset 0"):
        read(name, 0, 1, default_api_timeout_ms=1)
    assert read(name, 0, 1, isolation=UNCOMMITTED)["value"].to_pylist() == [b"open"]
    threading.Timer(1, maker.commit_transaction).start()
    assert read(name, 0, 1)["value"].to_pylist() == [b"open"]
    maker.close()


def test_a_compacted_topic_has_gaps(
    topic: TopicFactory, producer: KafkaProducer, positions: KafkaAdmin, read: Any
) -> None:
    name = topic(
        configs={
            "cleanup.policy": "compact",
            "min.cleanable.dirty.ratio": "0.001",
            "segment.ms": "1000",
            "min.compaction.lag.ms": "0",
        }
    )
    newest: dict[bytes, int] = {}
    rng = random.Random(7)
    for _ in range(40):
        keys = [b"%d" % rng.randrange(30) for _ in range(20)]
        for key in keys:
            newest[key] = send(producer, name, b"v", key=key)[0]
    time.sleep(1.1)
    send(producer, name, b"rolls the segment", key=b"last")
    end = positions.end_offsets([(name, 0)], COMMITTED)[name, 0]
    expected = sorted(newest.values())
    assert eventually(lambda: read(name, 0, end)["offset"].to_pylist()[:-1] == expected)
    for start, stop in ((0, end), (100, 700), (expected[3] + 1, expected[-1])):
        found = read(name, start, stop, max_partition_fetch_bytes=500)["offset"].to_pylist()
        assert found == [offset for offset in [*expected, end - 1] if start <= offset < stop]


# -- what is gone -------------------------------------------------------------------------------


def test_deleted_records_are_lost_or_skipped(
    broker: LocalBroker, topic: TopicFactory, producer: KafkaProducer, read: Any
) -> None:
    name = topic()
    for number in range(100):
        send(producer, name, b"%d" % number)
    with KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers) as admin:
        admin.delete_records({TopicPartition(name, 0): 60})
    with pytest.raises(InputLostError, match=rf"offsets 40 to 59 of topic '{name}' partition 0") as caught:
        read(name, 40, 80)
    assert caught.value.facts["missing_end"] == 60
    table = read(name, 40, 80, fail_on_data_loss=False)
    assert table["offset"].to_pylist() == list(range(60, 80))
    assert [str(loss.range) for loss in read.reader.losses] == [f"{name}-0 offsets 40 to 59"]
    assert read(name, 60, 100)["offset"].to_pylist() == list(range(60, 100))
    with pytest.raises(InputLostError, match="offsets 10 to 49"):
        read(name, 10, 50)


def test_records_deleted_out_of_the_middle_of_a_batch_are_not_read(
    broker: LocalBroker, topic: TopicFactory, read: Any
) -> None:
    name = topic()
    with closing(KafkaProducer(bootstrap_servers=broker.bootstrap_servers, linger_ms=500)) as slow:
        sent = [slow.send(name, value=b"%d" % number, partition=0) for number in range(20)]
        slow.flush()
        assert [one.get(10).offset for one in sent] == list(range(20))
    with KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers) as admin:
        admin.delete_records({TopicPartition(name, 0): 7})
    table = read(name, 0, 20, fail_on_data_loss=False)
    assert table["offset"].to_pylist() == list(range(7, 20))


@pytest.mark.nightly
def test_a_range_beyond_the_log_is_lost_or_skipped(
    topic: TopicFactory, producer: KafkaProducer, read: Any
) -> None:
    name = topic()
    send(producer, name, *[b"x"] * 10)
    with pytest.raises(InputLostError, match=r"offsets 10 to 19.*log ends at 10"):
        read(name, 5, 20)
    with pytest.raises(InputLostError, match=r"offsets 15 to 19.*log ends at 10"):
        read(name, 15, 20)
    assert read(name, 5, 20, fail_on_data_loss=False)["offset"].to_pylist() == list(range(5, 10))
    assert [str(loss.range) for loss in read.reader.losses] == [f"{name}-0 offsets 10 to 19"]


@pytest.mark.nightly
def test_a_topic_that_was_deleted_and_created_again(
    broker: LocalBroker, topic: TopicFactory, producer: KafkaProducer, read: Any
) -> None:
    name = topic()
    send(producer, name, *[b"old"] * 10)
    with KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers) as admin:
        admin.delete_topics([name])
        with pytest.raises(InputLostError, match=r"offsets 0 to 9.*does not know the topic"):
            read(name, 0, 10)
        assert read(name, 0, 10, fail_on_data_loss=False).num_rows == 0
        assert [loss.range for loss in read.reader.losses] == [OffsetRange(name, 0, 0, 10)]
        admin.create_topics({name: {"num_partitions": 1, "replication_factor": 1}}, wait_for_metadata=True)
    with pytest.raises(InputLostError, match="offsets 4 to 9"):
        read(name, 4, 10)
    with pytest.raises(InputLostError, match="does not know the topic or the partition"):
        read(name, 0, 10, partition=3)


def test_a_topic_that_may_not_be_read(broker: LocalBroker, topic: TopicFactory, read: Any) -> None:
    name = topic()
    with KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers) as admin:
        allow = ACLPermissionType.ALLOW
        where = ResourcePattern(ResourceType.TOPIC, name)
        admin.create_acls([ACL("User:somebody", "*", ACLOperation.READ, allow, where)])
    assert eventually(lambda: _is_refused(lambda: read(name, 0, 10)))
    with pytest.raises(AuthorizationError, match=name) as caught:
        read(name, 0, 10)
    assert "\n" not in str(caught.value)


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except AuthorizationError:
        return True
    except InputLostError:
        return False
    return False


# -- brokers that come and go ---------------------------------------------------------------------


@pytest.mark.nightly
def test_a_broker_that_is_killed_while_a_range_is_read(
    broker: LocalBroker, topic: TopicFactory, producer: KafkaProducer, pool: WirePool
) -> None:
    name = topic()
    for number in range(2_000):
        producer.send(name, b"%d" % number * 20, partition=0)
    producer.flush()
    settings = ReaderSettings(max_partition_fetch_bytes=20_000)
    reader = RangeReader(KafkaConnection(broker.bootstrap_servers), settings, pool=pool)
    found: list[int] = []
    try:
        for batch in reader.read(OffsetRange(name, 0, 0, 2_000)):
            if not found:
                broker.kill()
                threading.Thread(target=broker.start).start()
            found += batch["offset"].to_pylist()
    finally:
        assert eventually(lambda: broker._process is not None)
        broker.start()
    assert found == list(range(2_000))
    # The wires of the pool are dead now, or were built again: either way the next read works.
    assert sum(b.num_rows for b in reader.read(OffsetRange(name, 0, 0, 2_000))) == 2_000


@pytest.mark.nightly
def test_a_broker_that_stays_away_is_named_in_time(
    broker: LocalBroker, topic: TopicFactory, producer: KafkaProducer, pool: WirePool, read: Any
) -> None:
    name = topic()
    send(producer, name, b"x")
    assert read(name, 0, 1).num_rows == 1
    broker.kill()
    try:
        began = time.monotonic()
        with pytest.raises(BrokerUnavailableError, match=rf"{name}-0 offsets 0 to 0"):
            read(name, 0, 1, default_api_timeout_ms=5_000)
        assert time.monotonic() - began < 8
    finally:
        broker.start()
    assert read(name, 0, 1).num_rows == 1


def test_a_broker_that_hangs_for_a_while(
    broker: LocalBroker, topic: TopicFactory, producer: KafkaProducer, read: Any
) -> None:
    name = topic()
    send(producer, name, b"x")
    assert read(name, 0, 1).num_rows == 1
    broker.pause()
    timer = threading.Timer(2.5, broker.resume)
    timer.start()
    try:
        assert read(name, 0, 1, request_timeout_ms=1_000, default_api_timeout_ms=20_000).num_rows == 1
    finally:
        timer.join()


@pytest.mark.nightly
def test_a_quota_slows_reading_and_nothing_else(
    broker: LocalBroker, topic: TopicFactory, producer: KafkaProducer, read: Any
) -> None:
    name = topic()
    values = [b"%d" % number * 1_000 for number in range(500)]
    send(producer, name, *values)
    set_quota(broker, 300_000.0)
    try:
        # The broker counts over eleven seconds; what exceeds them is answered with nothing, later.
        for _ in range(4):
            assert read(name, 0, 500, max_partition_fetch_bytes=400_000)["value"].to_pylist() == values
    finally:
        set_quota(broker, None)


def set_quota(broker: LocalBroker, bytes_per_s: float | None) -> None:
    request_type = AlterClientQuotasRequest
    entry = request_type.EntryData(
        entity=[request_type.EntryData.EntityData(entity_type="client-id", entity_name=None)],
        ops=[
            request_type.EntryData.OpData(
                key="consumer_byte_rate", value=bytes_per_s or 0.0, remove=bytes_per_s is None
            )
        ],
    )
    with KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers) as admin:
        request = request_type(entries=[entry], validate_only=False)
        answer = admin._manager.run(lambda: admin._manager.send(request))
        assert [row.error_code for row in answer.entries] == [0]


def test_one_fetch_may_ask_for_several_partitions(
    broker: LocalBroker, topic: TopicFactory, producer: KafkaProducer, pool: WirePool
) -> None:
    name, other = topic(partitions=2), topic()
    producer.send(name, b"zero", partition=0)
    producer.send(name, b"one", partition=1)
    producer.flush()
    limits = FetchLimits(COMMITTED, 1_000_000, 1_000_000, 10_000)
    with pool.wire(KafkaConnection(broker.bootstrap_servers)) as wire:
        client = FetchClient(wire)
        offsets = {(name, 0): 0, (name, 1): 0, (other, 0): 0, (other, 7): 0}
        answer = client.send(offsets, limits, connect_within_ms=10_000).result()
        assert {place: (seen.code, seen.high_watermark) for place, seen in answer.items()} == {
            (name, 0): (0, 1),
            (name, 1): (0, 1),
            (other, 0): (0, 0),
            (other, 7): (3, -1),
        }
        assert b"one" in answer[name, 1].records and not answer[other, 0].records
        # What is not there yet is waited for, if that is asked for.
        began = time.monotonic()
        waiting = FetchLimits(COMMITTED, 1_000_000, 1_000_000, 10_000, max_wait_ms=20_000, min_bytes=1)
        pending = client.send({(other, 0): 0}, waiting, connect_within_ms=10_000)
        send(producer, other, b"late")
        assert b"late" in pending.result()[other, 0].records
        assert time.monotonic() - began < 10


def test_a_reading_that_is_dropped_gives_its_connection_back(
    broker: LocalBroker, topic: TopicFactory, producer: KafkaProducer, pool: WirePool
) -> None:
    name = topic()
    send(producer, name, *[b"x" * 1_000] * 200)
    settings = ReaderSettings(max_partition_fetch_bytes=10_000)
    reader = RangeReader(KafkaConnection(broker.bootstrap_servers), settings, pool=pool)
    before = threading.active_count()
    for _ in range(20):
        reading = reader.read(OffsetRange(name, 0, 0, 200))
        assert next(reading).num_rows
        reading.close()
    assert threading.active_count() <= before + 1
    assert sum(batch.num_rows for batch in reader.read(OffsetRange(name, 0, 0, 200))) == 200


# -- positions ------------------------------------------------------------------------------------


def test_topics_by_pattern(topic: TopicFactory, positions: KafkaAdmin, broker: LocalBroker) -> None:
    prefix = f"p{uuid.uuid4().hex[:8]}"
    with KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers) as admin:
        wanted = {f"{prefix}-{n}": {"num_partitions": n, "replication_factor": 1} for n in (1, 2, 3)}
        admin.create_topics(wanted, wait_for_metadata=True)
    found = positions.find_matching_topics(TopicPattern(f"{prefix}-[12]"))
    assert found == {f"{prefix}-1": 1, f"{prefix}-2": 2}
    assert positions.partition_counts([*found, "no-such-topic"]) == found
    assert list_places(found) == [(f"{prefix}-1", 0), (f"{prefix}-2", 0), (f"{prefix}-2", 1)]
    assert not [name for name in positions.find_matching_topics(TopicPattern(".*")) if name.startswith("__")]
    assert positions.find_matching_topics(TopicPattern(prefix)) == {}
    assert positions.partition_counts([]) == {}


def test_offsets_by_time_and_ends(
    broker: LocalBroker, topic: TopicFactory, producer: KafkaProducer, positions: KafkaAdmin
) -> None:
    name = topic(partitions=2)
    place, other = (name, 0), (name, 1)
    for number in range(5):
        send(producer, name, b"x", timestamp_ms=1_000_000 + 100 * number)
    assert positions.offsets_at({place: 1_000_150, other: 0}, COMMITTED) == {place: 2, other: None}
    assert positions.offsets_at({place: 1_000_401}, COMMITTED) == {place: None}
    assert positions.offsets_at({place: 0}, COMMITTED) == {place: 0}
    maker = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, transactional_id=uuid.uuid4().hex)
    maker.init_transactions()
    maker.begin_transaction()
    send(maker, name, b"open", timestamp_ms=2_000_000)
    assert positions.end_offsets([place, other], COMMITTED) == {place: 5, other: 0}
    assert positions.end_offsets([place, other], UNCOMMITTED) == {place: 6, other: 0}
    assert positions.offsets_at({place: 2_000_000}, COMMITTED) == {place: None}
    assert positions.offsets_at({place: 2_000_000}, UNCOMMITTED) == {place: 5}
    maker.abort_transaction()
    maker.close()
    assert positions.beginning_offsets([place, other]) == {place: 0, other: 0}
    with pytest.raises(InputLostError, match="does not exist"):
        positions.end_offsets([(name, 9)], COMMITTED)
