"""The JVM side: rows staged in open Kafka transactions, and the tap in front of a writer that is not ours."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kafka import KafkaConsumer, TopicPartition
from kafka.admin import (
    ACL,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    KafkaAdminClient,
    ResourcePattern,
    ResourceType,
)
from py4j.protocol import Py4JJavaError
from pyspark.sql import functions as F

from flinkish_spark.bridge.shim import TappedRows, stage_kafka
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import KafkaCommittable, TransactionClient
from flinkish_spark.protocol.ids import JobUuid, OwnerEpoch, TransactionalId
from flinkish_spark.protocol.records import Outcome
from flinkish_spark.testing import LocalBroker
from tests.support.open_transactions import still_open
from tests.support.services import BROKER_JARS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RECORD, BARRIER, TICK = 0, 1, 3
SCHEMA = "kind INT, checkpoint BIGINT, channel BIGINT, hash BIGINT, key BINARY, value BINARY, topic STRING"
TIMEOUT_MS = 60_000
Report = dict[str, Any]


def record(
    value: bytes, hashed: int = 1, key: bytes | None = None, topic: str | None = None
) -> tuple[Any, ...]:
    return (RECORD, None, None, hashed, key, value, topic)


def barrier(checkpoint: int, channel: int) -> tuple[Any, ...]:
    return (BARRIER, checkpoint, channel, None, None, None, None)


class Kafka:
    """Stages under fresh transactional ids, ends transactions like the driver, reads like a consumer."""

    def __init__(self, servers: str) -> None:
        self.servers = servers
        self.job = JobUuid(uuid.uuid4().hex)
        self.blocks = iter(range(1_000_000))
        self.client = TransactionClient(KafkaConnection(servers))
        self.leftovers: list[TransactionalId] = []

    def options(self, topic: str, **changes: Any) -> dict[str, Any]:
        return {
            "producer": {"bootstrap.servers": self.servers},
            "topic": topic,
            "transactional_id_prefix": TransactionalId.prefix(self.job, OwnerEpoch(1), next(self.blocks)),
            "max_attempt_index": 64,
            "transaction_timeout_ms": TIMEOUT_MS,
            "headers": {},
            "max_record_bytes": 1_000_000,
            "oversize": "fail",
            "dead_letter_topic": None,
            **changes,
        }

    def commit(self, reports: Sequence[Report]) -> None:
        for report in reports:
            if report["committable"] is not None:
                answer = self.client.commit(KafkaCommittable.from_json(report["committable"]))
                assert answer.outcome is Outcome.COMMITTED, answer

    def open_ids(self, options: Mapping[str, Any]) -> set[str]:
        """Return the ids under the options' prefix whose transactions are open."""
        found = {str(one.transactional_id) for one in still_open(self.client, self.job)}
        return {name for name in found if name.startswith(options["transactional_id_prefix"] + "-")}

    def read(self, topic: str, isolation: str = "read_committed") -> list[Any]:
        consumer = KafkaConsumer(
            bootstrap_servers=self.servers,
            isolation_level=isolation,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            consumer_timeout_ms=700,
        )
        partitions = consumer.partitions_for_topic(topic) or {0}
        consumer.assign([TopicPartition(topic, p) for p in partitions])
        try:
            return list(consumer)
        finally:
            consumer.close()

    def values(self, topic: str, isolation: str = "read_committed") -> list[bytes]:
        return sorted(m.value for m in self.read(topic, isolation))


@pytest.fixture(scope="module")
def kafka(broker: LocalBroker) -> Iterator[Kafka]:
    made = Kafka(broker.bootstrap_servers)
    yield made
    for found in made.client.list_of_job(made.job):
        made.client.abort_open(found.transactional_id)
    made.client.close()


def rows_in(spark: SparkSession, *partitions: Sequence[tuple[Any, ...]]) -> DataFrame:
    """Return a DataFrame with exactly these rows in exactly these partitions."""
    rows = spark.sparkContext.parallelize(partitions, len(partitions)).flatMap(lambda partition: partition)
    return spark.createDataFrame(rows, SCHEMA)


def staged_in_kafka(rows: DataFrame, options: Mapping[str, Any]) -> list[Report]:
    """Stage the rows of one sink."""
    (reports,) = stage_kafka(rows, [options])
    return reports


def producer_threads(spark: SparkSession) -> set[str]:
    """Return the names of the staging producers' threads that are alive in the JVM."""
    threads = spark.sparkContext._jvm.java.lang.Thread.getAllStackTraces().keySet()
    names = {thread.getName() for thread in threads}
    return {name for name in names if name.startswith("kafka-producer-network-thread | flinkish")}


def test_staged_records_become_visible_at_the_commit(
    spark: SparkSession, kafka: Kafka, topic: Callable[..., str]
) -> None:
    """Behaviour 144: the task without records has no committable."""
    name, other = topic(partitions=2), topic()
    frame = rows_in(
        spark,
        [record(b"a", 2**63 - 1, b"k"), record(b"b", 5), barrier(7, 0), (TICK, 9, 9, 9, b"x", b"x", name)],
        [],
        [record(b"c", -3, topic=other), barrier(7, 2), barrier(8, 2)],
    )
    reports = staged_in_kafka(frame, kafka.options(name, headers={"flinkish-batch": "0/12"}))

    assert [r["partition"] for r in reports] == [0, 1, 2]
    assert [r["rows"] for r in reports] == [2, 0, 1]
    assert [int(r["digest"]) for r in reports] == [-(2**63) + 4, 0, -3]
    assert [r["barriers"] for r in reports] == [[[7, 0]], [], [[7, 2], [8, 2]]]
    assert [r["bytes"] for r in reports] == [3, 0, 1]
    assert reports[1]["committable"] is None
    assert reports[2]["committable"]["evidence"] == {"topic": other, "partition": 0, "offset": 0}
    assert reports[0]["committable"]["records"] == 2

    assert kafka.values(name) == kafka.values(other) == []
    assert kafka.values(name, "read_uncommitted") == [b"a", b"b"]
    kafka.commit(reports)
    assert kafka.values(name) == [b"a", b"b"]
    assert kafka.values(other) == [b"c"]
    assert {(m.key, *m.headers) for m in kafka.read(name)} == {
        (b"k", ("flinkish-batch", b"0/12")),
        (None, ("flinkish-batch", b"0/12")),
    }


@pytest.mark.nightly
def test_a_reused_producer_leaves_its_earlier_transaction_open(
    spark: SparkSession, kafka: Kafka, topic: Callable[..., str]
) -> None:
    """InitProducerId must run for every transaction: else one handle would name two of them."""
    name = topic()
    options = [kafka.options(name) for _ in range(4)]
    staged = [staged_in_kafka(rows_in(spark, [record(b"0")]), options[0])]
    clients = producer_threads(spark)
    staged += [staged_in_kafka(rows_in(spark, [record(b"%d" % n)]), options[n]) for n in (1, 2, 3)]
    # Threads of clients that earlier tests closed may be ending still: there may be fewer now than before.
    assert producer_threads(spark) <= clients, "no client was built for the later transactions"

    handles = [reports[0]["committable"] for reports in staged]
    assert len({h["producer_id"] for h in handles}) == 4, "each id has a producer id of its own"
    assert [kafka.open_ids(one) for one in options] == [{h["transactional_id"]} for h in handles]
    assert kafka.values(name) == []
    kafka.client.abort(KafkaCommittable.from_json(handles[1]))
    for n in (3, 0, 2):
        kafka.commit(staged[n])
    assert kafka.values(name) == [b"0", b"2", b"3"]


def test_an_id_used_again_gets_a_higher_epoch(
    spark: SparkSession, kafka: Kafka, topic: Callable[..., str]
) -> None:
    """Behaviour 141."""
    options = kafka.options(topic())
    first, second = (
        staged_in_kafka(rows_in(spark, [record(b"x")]), options)[0]["committable"] for _ in range(2)
    )
    assert first["transactional_id"] == second["transactional_id"]
    assert first["producer_id"] == second["producer_id"]
    assert first["producer_epoch"] < second["producer_epoch"]


def test_oversize_records_fail_the_batch(
    spark: SparkSession, kafka: Kafka, topic: Callable[..., str]
) -> None:
    name = topic()
    frame = rows_in(spark, [record(b"small"), record(b"x" * 5000, key=b"key")])
    options = kafka.options(name, max_record_bytes=2000)
    with pytest.raises(Py4JJavaError) as failure:
        staged_in_kafka(frame, options)
    message = str(failure.value)
    assert "[FLINKISH_BAD_RECORD]" in message
    assert name in message and "2000" in message and "its key: 3 bytes" in message
    assert kafka.values(name) == []
    assert not kafka.open_ids(options), "the attempts aborted what they had begun"


def test_oversize_records_are_dropped(spark: SparkSession, kafka: Kafka, topic: Callable[..., str]) -> None:
    name = topic()
    frame = rows_in(spark, [record(b"x" * 5000, 10), record(b"small", 1)], [record(b"x" * 5000, 10)])
    reports = staged_in_kafka(frame, kafka.options(name, max_record_bytes=2000, oversize="drop"))
    assert [(r["rows"], r["dropped"], r["digest"]) for r in reports] == [(2, 1, "11"), (1, 1, "10")]
    assert reports[1]["committable"] is None, "a task that sent nothing has no transaction"
    kafka.commit(reports)
    assert kafka.values(name) == [b"small"]


def test_oversize_records_go_to_the_dead_letter_topic_with_the_rest(
    spark: SparkSession, kafka: Kafka, topic: Callable[..., str]
) -> None:
    name, dead = topic(), topic()
    frame = rows_in(spark, [record(b"x" * 5000, key=b"k"), record(b"small"), record(b"y", key=b"k" * 3000)])
    changes = {"max_record_bytes": 2000, "oversize": "dead-letter", "dead_letter_topic": dead}
    reports = staged_in_kafka(frame, kafka.options(name, **changes))
    assert (reports[0]["rows"], reports[0]["dead_lettered"]) == (3, 2)
    assert reports[0]["committable"]["records"] == 3
    assert kafka.values(dead) == []
    kafka.commit(reports)
    assert kafka.values(name) == [b"small"]
    long_value, long_key = kafka.read(dead)
    assert (long_value.key, long_value.value) == (b"k", b"x" * 1024)
    assert (long_key.key, long_key.value) == (None, b"y")
    headers = dict(long_value.headers)
    assert headers["flinkish-topic"] == name.encode()
    assert int(headers["flinkish-size"]) >= 5001
    assert headers["flinkish-error"] == b"oversize"


def test_batches_are_as_small_as_a_topic_takes_them(
    spark: SparkSession, kafka: Kafka, topic: Callable[..., str]
) -> None:
    """Also where the client has to cut one that it has compressed less than it thought it would."""
    name = topic(configs={"max.message.bytes": "20000"})
    noise = random.Random(1)
    for value in (bytes(500), None):
        frame = rows_in(spark, [record(noise.randbytes(500) if value is None else value) for _ in range(400)])
        options = kafka.options(name, max_record_bytes=20_000)
        options["producer"]["compression.type"] = "gzip"
        kafka.commit(staged_in_kafka(frame, options))
    values = kafka.values(name)
    assert len(values) == 800 and values[:400] == [bytes(500)] * 400 and len(set(values[400:])) == 400


@pytest.mark.nightly
def test_a_size_that_only_the_broker_refuses_is_a_bad_record_too(
    spark: SparkSession, kafka: Kafka, topic: Callable[..., str]
) -> None:
    """Behaviour 145."""
    name, fine = topic(configs={"max.message.bytes": "1000"}), topic()
    staged_in_kafka(rows_in(spark, [record(b"x")]), kafka.options(fine))
    clients = producer_threads(spark)
    with pytest.raises(Py4JJavaError, match=r"\[FLINKISH_BAD_RECORD\]"):
        staged_in_kafka(rows_in(spark, [record(b"x" * 5000)]), kafka.options(name))
    assert producer_threads(spark) < clients, "a client that failed is closed, not used again"
    reports = staged_in_kafka(rows_in(spark, [record(b"y")]), kafka.options(fine))
    kafka.commit(reports)


def test_secrets_are_not_in_messages(spark: SparkSession, kafka: Kafka, topic: Callable[..., str]) -> None:
    options = kafka.options(topic())
    options["producer"]["linger.ms"] = "secret-value"
    with pytest.raises(Py4JJavaError) as failure:
        staged_in_kafka(rows_in(spark, [record(b"x")]), options)
    assert "linger.ms" in str(failure.value)
    assert "secret-value" not in str(failure.value)


def test_a_retried_task_has_one_committable_and_another_id(
    spark: SparkSession, kafka: Kafka, topic: Callable[..., str], tmp_path: Path
) -> None:
    name, failed = topic(), tmp_path / "failed"

    def fail_once(value: bytes) -> bytes:
        if value == b"poison" and not failed.exists():
            failed.touch()
            raise RuntimeError("first attempt")
        return value

    # More rows than one Python batch, so that the attempt fails after it has begun its transaction.
    many = [record(b"%05d" % n) for n in range(20_000)]
    frame = rows_in(spark, [record(b"left")], [*many, record(b"poison")])
    frame = frame.withColumn("value", F.udf(fail_once, "binary", useArrow=False)("value"))
    options = kafka.options(name)
    reports = staged_in_kafka(frame, options)

    assert [r["attempt"] for r in reports] == [0, 1]
    assert [r["rows"] for r in reports] == [1, 20_001]
    prefix = options["transactional_id_prefix"]
    assert [r["committable"]["transactional_id"] for r in reports] == [f"{prefix}-0-0", f"{prefix}-1-1"]
    assert kafka.open_ids(options) == {r["committable"]["transactional_id"] for r in reports}
    assert len(kafka.read(name, "read_uncommitted")) > 20_002, "the failed attempt had sent records"
    kafka.commit(reports)
    assert len(kafka.values(name)) == 20_002


def frame_for_a_table(spark: SparkSession) -> DataFrame:
    many = [record(b"%d" % n, n) for n in range(5000)]
    tick = (TICK, 1, 1, 1, None, None, None)
    return rows_in(spark, [barrier(7, 0), *many, tick], [barrier(7, 1)], [record(b"last"), barrier(7, 2)])


EXPECTED_ACKS = [(0, 5000, sum(range(5000)), [(7, 0)]), (1, 0, 0, [(7, 1)]), (2, 1, 1, [(7, 2)])]


def acks_of(tapped: TappedRows) -> list[Any]:
    return [
        (ack.partition, ack.rows, ack.digest, [(int(b.checkpoint), b.channel) for b in ack.barriers])
        for ack in tapped.acks()
    ]


@pytest.mark.parametrize("persisted", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_tap_in_front_of_delta(spark: SparkSession, tmp_path: Path, persisted: bool) -> None:
    frame = frame_for_a_table(spark)
    if persisted:
        frame = frame.persist()
    tapped = TappedRows(frame, "delta")
    tapped.records.write.format("delta").save(str(tmp_path / "table"))
    frame.unpersist()
    table = spark.read.format("delta").load(str(tmp_path / "table"))
    assert acks_of(tapped) == EXPECTED_ACKS
    assert table.count() == table.where(F.col("kind") == RECORD).count() == 5001
    assert table.selectExpr("sum(hash)").first()[0] == sum(range(5000)) + 1
    assert table.select("value").distinct().count() == 5001, "no row was overwritten on its way"


def test_the_tap_behind_a_shuffle_and_in_front_of_a_partitioned_table(
    spark: SparkSession, tmp_path: Path
) -> None:
    frame = frame_for_a_table(spark).repartition(3).withColumn("bucket", F.expr("hash % 3")).persist()
    tapped = TappedRows(frame, "partitioned")
    tapped.records.write.format("delta").partitionBy("bucket").save(str(tmp_path / "table"))
    frame.unpersist()
    table = spark.read.format("delta").load(str(tmp_path / "table"))
    acks = tapped.acks()
    assert sum(a.rows for a in acks) == table.count() == table.select("value").distinct().count() == 5001
    assert sum(len(a.barriers) for a in acks) == 3


def test_the_tap_in_front_of_noop_counts_the_newest_run(spark: SparkSession) -> None:
    tapped = TappedRows(frame_for_a_table(spark), "noop")
    for _ in range(2):
        tapped.records.write.format("noop").mode("overwrite").save()
    assert acks_of(tapped) == EXPECTED_ACKS
    assert tapped._tapped.partitions() == 3
    assert len(json.loads(tapped._tapped.acksJson())) == 3


@pytest.mark.nightly
def test_both_ways_agree_on_one_persisted_batch(
    spark: SparkSession, kafka: Kafka, topic: Callable[..., str]
) -> None:
    frame = frame_for_a_table(spark).repartition(2).persist()
    reports = staged_in_kafka(frame, kafka.options(topic()))
    tapped = TappedRows(frame, "noop")
    tapped.records.write.format("noop").mode("overwrite").save()
    frame.unpersist()
    assert [(a.partition, a.rows, a.digest) for a in tapped.acks()] == [
        (r["partition"], r["rows"], int(r["digest"])) for r in reports
    ]
    kafka.commit(reports)


def test_an_unknown_topic_is_named(spark: SparkSession, kafka: Kafka) -> None:
    options = kafka.options("no-such-topic")
    options["producer"]["max.block.ms"] = "500"
    with pytest.raises(Py4JJavaError, match="no-such-topic"):
        staged_in_kafka(rows_in(spark, [record(b"x")]), options)
    with KafkaAdminClient(bootstrap_servers=kafka.servers) as admin:
        assert "no-such-topic" not in admin.list_topics()


@pytest.mark.nightly
def test_a_missing_right_is_named(spark: SparkSession, tmp_path: Path) -> None:
    acls = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with LocalBroker(tmp_path / "broker", jars_dir=BROKER_JARS, extra_properties=acls) as guarded:
        kafka = Kafka(guarded.bootstrap_servers)
        options = kafka.options("guarded")
        with KafkaAdminClient(bootstrap_servers=guarded.bootstrap_servers) as admin:
            admin.create_topics(
                {"guarded": {"num_partitions": 1, "replication_factor": 1}}, wait_for_metadata=True
            )
            for resource in (ResourceType.TOPIC, ResourceType.TRANSACTIONAL_ID):
                name = (
                    "guarded"
                    if resource is ResourceType.TOPIC
                    else options["transactional_id_prefix"] + "-0-0"
                )
                admin.create_acls([deny_write(resource, name)])
                with pytest.raises(Py4JJavaError) as failure:
                    staged_in_kafka(rows_in(spark, [record(b"x")]), options)
                assert "[FLINKISH_NOT_AUTHORIZED] the producer's principal lacks WRITE" in str(failure.value)
        kafka.client.close()


def deny_write(resource: ResourceType, name: str) -> ACL:
    pattern = ResourcePattern(resource, name, ACLResourcePatternType.LITERAL)
    return ACL("User:ANONYMOUS", "*", ACLOperation.WRITE, ACLPermissionType.DENY, pattern)
