"""The drop-in door in a real session against a real broker, with the options Spark users have."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest
from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient, NewPartitions
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F

import flinkish_spark
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.connectors.kafka.format.sink import SINK
from flinkish_spark.contracts.sink import StageResult
from flinkish_spark.core.steps import SilentObserver
from flinkish_spark.core.stream_readers import TELLS_READERS
from flinkish_spark.protocol.ids import BatchId
from tests.support.door_files import decided, make_commits, place, sink_uuid
from tests.support.jobs import eventually, produce, read_committed
from tests.support.open_transactions import still_open

pytestmark = pytest.mark.timeout(240)

#: Of a query that is to read what is there in four micro-batches: on Spark 4.1 a start is one.
STARTS = 1 if TELLS_READERS else 4


@pytest.fixture(autouse=True)
def _registered(spark):
    flinkish_spark.register(spark)


@pytest.fixture
def door(spark, broker, tmp_path):
    return Door(spark, broker.bootstrap_servers, tmp_path)


class Door:
    """Builds queries over one broker."""

    def __init__(self, spark, servers, tmp_path):
        self.spark, self.servers, self.tmp_path = spark, servers, tmp_path
        self.kafka = {"kafka.bootstrap.servers": servers}

    def stream(self, topic, source="flinkish-kafka", **options):
        options = {"startingOffsets": "earliest", **options}
        where = {} if {"assign", "subscribePattern"} & set(options) else {"subscribe": topic}
        return self.spark.readStream.format(source).options(**self.kafka, **where, **options).load()

    def batch(self, topic, **options):
        where = {"subscribe": topic} if "assign" not in options else {}
        reader = self.spark.read.format("flinkish-kafka").options(**self.kafka, **where, **options)
        return reader.load()

    def run(self, frame, checkpoint="c", **options):
        """Read all that there is. On Spark 4.1 a start is one micro-batch, however little is let into it."""
        query = self.start(frame, checkpoint, **options)
        assert query.awaitTermination(120)
        is_over = TELLS_READERS or query.lastProgress is None or query.lastProgress["numInputRows"] == 0
        return query if is_over else self.run(frame, checkpoint, **options)

    def start(self, frame, checkpoint="c", trigger=None, **options):
        writer = frame.writeStream.format("flinkish-kafka").options(**self.kafka, **options)
        writer = writer.option("checkpointLocation", str(self.checkpoint(checkpoint)))
        return writer.trigger(**(trigger or {"availableNow": True})).start()

    def checkpoint(self, name="c") -> Path:
        return self.tmp_path / name

    def put(self, topic, count, first=0, **where):
        values = [str(n).encode() for n in range(first, first + count)]
        produce(self.servers, topic, values, **where)
        return values

    def values(self, topic):
        return sorted(record.value for record in read_committed(self.servers, topic))

    def open_transactions(self, name="c"):
        with TransactionClient(KafkaConnection(self.servers)) as client:
            return still_open(client, sink_uuid(self.checkpoint(name)))


# -- Spark's own examples, with the word changed -------------------------------------------------------
def test_the_examples_of_sparks_kafka_guide(door, topic):
    one, two, out = topic(2), topic(1), topic(2)
    door.put(one, 5, key=b"k")
    door.put(two, 3, first=100, key=b"k")
    # Subscribe to 1 topic; write key-value data to a specific topic given in an option.
    frame = door.stream(one).selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)")
    door.run(frame, topic=out)
    assert door.values(out) == [b"0", b"1", b"2", b"3", b"4"]
    # Subscribe to several topics; write to a topic named in the data.
    frame = door.stream(f"{one},{two}").selectExpr(
        f"'{out}' AS topic", "CAST(key AS STRING)", "CAST(value AS STRING)"
    )
    door.run(frame, "several")
    assert len(door.values(out)) == 5 + 8
    # Subscribe to a pattern, at the earliest and latest offsets, in a batch query.
    frame = door.spark.read.format("flinkish-kafka").options(**door.kafka)
    frame = frame.option("subscribePattern", f"({one}|{two}).*").option("startingOffsets", "earliest")
    assert frame.option("endingOffsets", "latest").load().count() == 8
    # Subscribe to multiple topics, specifying explicit Kafka offsets.
    ends = {one: {"0": -1, "1": -1}, two: {"0": 2}}
    starts = {one: {"0": -2, "1": -2}, two: {"0": 1}}
    rows = door.batch(f"{one},{two}", startingOffsets=json.dumps(starts), endingOffsets=json.dumps(ends))
    assert rows.where(F.col("topic") == two).select("value").collect()[0].value == bytearray(b"101")
    assert rows.count() == 6


def test_columns_are_those_of_sparks_source(door, topic):
    # The timestamps are of 2023: retention would take the records at its next look.
    name, out = topic(3, {"retention.ms": "-1"}), topic(3)
    producer = KafkaProducer(bootstrap_servers=door.servers)
    for n in range(30):
        producer.send(
            name, key=b"k%d" % n, value=b"v%d" % n, partition=n % 3, timestamp_ms=1_700_000_000_000 + n,
            headers=[("a", b"1"), ("b", b"")] if n % 2 else None,
        )  # fmt: skip
    producer.send(name, key=b"tomb", value=None, partition=0, timestamp_ms=1_700_000_000_099)
    producer.close()
    options = {**door.kafka, "subscribe": name, "includeHeaders": "true"}
    ours = door.spark.read.format("flinkish-kafka").options(**options).load()
    spark = door.spark.read.format("kafka").options(**options).load()
    assert ours.schema.simpleString() == spark.schema.simpleString()
    key = ["partition", "offset"]
    assert ours.orderBy(*key).collect() == spark.orderBy(*key).collect()
    # And back: headers, topic and partition columns.
    frame = door.stream(name, includeHeaders="true")
    door.run(frame.withColumn("topic", F.lit(out)).select("key", "value", "headers", "topic", "partition"))
    copied = door.batch(out, includeHeaders="true").select("key", "value", "headers", "partition")
    same = ["key", "value", "headers", "partition"]
    assert sorted(map(str, copied.collect())) == sorted(map(str, ours.select(*same).collect()))


@pytest.mark.nightly
def test_the_word_can_be_changed_in_the_middle(door, topic):
    """A checkpoint of Spark's own source is continued by ours, and the other way round."""
    name, out = topic(2), topic(1)
    for round_, source in enumerate(("kafka", "flinkish-kafka", "kafka", "flinkish-kafka")):
        door.put(name, 10, first=10 * round_)
        door.run(door.stream(name, source).select("value"), topic=out)
    assert Counter(door.values(out)) == Counter(str(n).encode() for n in range(40))


# -- exactly once --------------------------------------------------------------------------------------
def test_a_batch_run_again_after_its_commit_finishes_the_recorded_one(door, topic):
    name, out = topic(2), topic(2)
    door.put(name, 200)
    door.run(door.stream(name, maxOffsetsPerTrigger="100").select("value"), topic=out)
    assert len(door.values(out)) == 200
    newest = max(int(p.name) for p in (door.checkpoint() / "commits").iterdir() if p.name.isdecimal())
    # What a crash right before commits/N leaves; and one right behind the write-ahead.
    (door.checkpoint() / "commits" / str(newest)).unlink()
    (door.checkpoint() / "commits" / f".{newest}.crc").unlink()
    attempt = decided(door.checkpoint())[BatchId(newest)].checkpoint
    (door.checkpoint() / "flinkish" / "checkpoints" / str(attempt) / "receipt.json").unlink()
    door.put(name, 50, first=200)
    door.run(door.stream(name).select("value"), topic=out)
    assert Counter(door.values(out)) == Counter(str(n).encode() for n in range(250))
    assert not door.open_transactions()


def test_available_now_ends_with_all_that_there_is_or_with_one_micro_batch_on_spark_4_1(door, topic):
    name, out = topic(2), topic(2)
    door.put(name, 50)
    frame = door.stream(name, maxOffsetsPerTrigger="30").select("value")
    assert door.start(frame, topic=out).awaitTermination(120)
    # The limit is shared out among the partitions, and rounded.
    read = len(door.values(out))
    assert read == 50 if TELLS_READERS else 28 <= read <= 32
    # The newest one again, as behind a crash; of the first one Spark asks anew where it begins.
    newest = max(int(p.name) for p in (door.checkpoint() / "commits").iterdir() if p.name.isdecimal())
    (door.checkpoint() / "commits" / str(newest)).unlink()
    (door.checkpoint() / "commits" / f".{newest}.crc").unlink()
    latest = door.stream(name, startingOffsets="latest").select("value")
    door.run(latest, topic=out)
    assert Counter(door.values(out)) == Counter(str(n).encode() for n in range(50))
    assert not door.open_transactions()


def test_a_wrapper_that_would_ask_for_an_end_before_it_says_where_to_begin_is_refused(door, topic):
    name, out = topic(2), topic(2)
    frame = door.stream(name).select("value")
    door.put(name, 50)
    door.spark.conf.set("spark.sql.streaming.triggerAvailableNowWrapper.enabled", "true")
    try:
        assert door.start(frame, topic=out).awaitTermination(120)
        door.put(name, 50, first=50)
        query = door.start(frame, topic=out)
        if TELLS_READERS:
            assert query.awaitTermination(120)
        else:
            with pytest.raises(StreamingQueryException, match="before it said where it begins"):
                query.awaitTermination(120)
    finally:
        door.spark.conf.unset("spark.sql.streaming.triggerAvailableNowWrapper.enabled")
    door.run(frame, topic=out)
    assert Counter(door.values(out)) == Counter(str(n).encode() for n in range(100))


@pytest.mark.nightly
def test_two_queries_write_one_topic_at_the_same_time(door, topic):
    one, two, out = topic(2), topic(2), topic(3)
    for n in range(3):
        door.put(one, 100, first=100 * n)
        door.put(two, 100, first=1_000 + 100 * n)
    for _ in range(STARTS):
        queries = [
            door.start(door.stream(t, maxOffsetsPerTrigger="100").select("value"), t, topic=out)
            for t in (one, two)
        ]
        assert all(query.awaitTermination(120) for query in queries)
    wanted = [str(n).encode() for n in (*range(300), *range(1_000, 1_300))]
    assert Counter(door.values(out)) == Counter(wanted)
    assert not door.open_transactions(one) + door.open_transactions(two)


def test_a_failing_task_is_repeated_and_a_failing_batch_leaves_nothing(door, topic):
    name, out = topic(2), topic(2)
    door.put(name, 100)
    once = door.tmp_path / "once"

    @F.udf("string")
    def fail_once(value):
        if value == b"57" and not once.exists():
            once.touch()
            raise RuntimeError("once")
        return value.decode()

    door.run(door.stream(name).select(fail_once("value").alias("value")), topic=out)
    assert Counter(door.values(out)) == Counter(str(n).encode() for n in range(100))

    @F.udf("string")
    def fail(value):
        if value == b"157":
            raise RuntimeError("always")
        return value.decode()

    door.put(name, 100, first=100)
    with pytest.raises(StreamingQueryException):
        door.run(door.stream(name).select(fail("value").alias("value")), topic=out)
    assert len(door.values(out)) == 100
    assert not door.open_transactions()
    door.run(door.stream(name).select("value"), topic=out)
    assert Counter(door.values(out)) == Counter(str(n).encode() for n in range(200))


def test_a_decided_transaction_that_the_broker_aborts_is_replaced(door, topic):
    """With real transactions: decided, lost before the commit, run again."""
    import pyarrow as pa

    from flinkish_spark.connectors.kafka.client.producer import StagedTransaction
    from flinkish_spark.connectors.kafka.client.settings import StagingSettings
    from flinkish_spark.core.errors import CommittableLostError
    from flinkish_spark.protocol.ids import TransactionalId
    from flinkish_spark.protocol.records import TaskAck

    out, connection = topic(1), KafkaConnection(door.servers)
    checkpoint = door.checkpoint()
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "offsets" / "0").write_text("v1\n{}\n{}")

    class Dies(Exception):
        pass

    class DieBehindTheDecision(SilentObserver):
        def on_step_end(self, step, subject):
            if step.value == "decision":
                raise Dies

    def attempt(observer, digest):
        with TransactionClient(connection) as client:
            commits = make_commits(place(checkpoint), client, observer, "test")
            lease = commits.plan()
            acks, staged = [], []
            for task in range(2):
                name = TransactionalId(lease.job, lease.owner, 1, task, 0)
                settings = StagingSettings(
                    connection=connection, transactional_id=str(name), transaction_timeout_ms=60_000
                )
                with StagedTransaction(settings) as transaction:
                    rows = pa.array([f"{task}-{n}".encode() for n in range(3)])
                    transaction.write(pa.nulls(3, pa.binary()), rows, topics=out)
                    staged.append(transaction.prepare().to_json())
                    acks.append(TaskAck(task, 3, digest))
            result = StageResult(tuple(acks), tuple(staged))
            commits.commit(lease.to_staged_batch(BatchId(0), {SINK: result}))

    with pytest.raises(Dies):
        attempt(DieBehindTheDecision(), 1)
    (staged,) = decided(checkpoint)[BatchId(0)].batches
    lost = TransactionalId.parse(staged.committables[1].payload["transactional_id"])
    with TransactionClient(connection) as client:
        client.abort_open(lost)
    with pytest.raises(CommittableLostError, match="other ones"):
        attempt(SilentObserver(), 2)
    attempt(SilentObserver(), 1)
    assert door.values(out) == [b"0-0", b"0-1", b"0-2", b"1-0", b"1-1", b"1-2"]
    assert not door.open_transactions()


# -- the source ----------------------------------------------------------------------------------------
@pytest.mark.nightly
def test_limits_pieces_and_timestamps(door, topic):
    name = topic(2, {"retention.ms": "-1"})
    producer = KafkaProducer(bootstrap_servers=door.servers)
    for n in range(100):
        producer.send(name, value=str(n).encode(), partition=n % 2, timestamp_ms=1_700_000_000_000 + n)
    producer.close()
    seen = []
    frame = door.stream(name, maxOffsetsPerTrigger="30", minPartitions="6")

    def count(batch, _):
        seen.append((batch.count(), batch.rdd.getNumPartitions()))

    checkpoint = str(door.checkpoint("limits"))
    query = frame.writeStream.foreachBatch(count).option("checkpointLocation", checkpoint)
    for _ in range(STARTS):
        assert query.trigger(availableNow=True).start().awaitTermination(120)
    assert sum(rows for rows, _ in seen) == 100
    assert all(rows <= 32 for rows, _ in seen)
    # The first micro-batch is empty: it logs where the query begins. On Spark 4.1 its end says so.
    assert (seen[0][0] == 0) == TELLS_READERS
    assert seen[1][1] == 6
    late = door.batch(name, startingTimestamp=str(1_700_000_000_090))
    assert sorted(int(r.value.decode()) for r in late.collect()) == list(range(90, 100))
    by = {name: {"0": 1_700_000_000_096, "1": 1_700_000_000_099}}
    assert door.batch(name, startingOffsetsByTimestamp=json.dumps(by)).count() == 3
    assert door.batch(name, assign=json.dumps({name: [1]})).count() == 50
    with pytest.raises(Exception, match=r"no record of .* is as new"):
        door.batch(name, startingTimestamp="1800000000000").count()


@pytest.mark.nightly
def test_new_partitions_and_new_topics_are_found_while_it_runs(door, topic):
    name, out = topic(1), topic(1)
    other = f"{name}-more"
    door.put(name, 5)
    frame = door.stream("", subscribePattern=f"{name}.*").select("value")
    query = door.start(frame, trigger={"processingTime": "0 seconds"}, topic=out)
    try:
        _await(lambda: len(door.values(out)) == 5, query)
        admin = KafkaAdminClient(bootstrap_servers=door.servers)
        admin.create_partitions({name: NewPartitions(total_count=2)})
        admin.create_topics({other: {"num_partitions": 1, "replication_factor": 1}})
        admin.close()
        time.sleep(1)
        door.put(name, 5, first=5, partition=1)
        door.put(other, 5, first=10)
        _await(lambda: len(door.values(out)) == 15, query)
    finally:
        query.stop()
    assert Counter(door.values(out)) == Counter(str(n).encode() for n in range(15))


@pytest.mark.nightly
def test_lost_input_stops_the_query_or_is_skipped(door, topic):
    name, out = topic(1), topic(1)
    door.put(name, 20)
    door.run(door.stream(name).select("value"), topic=out)
    door.put(name, 20, first=20)
    admin = KafkaAdminClient(bootstrap_servers=door.servers)
    from kafka import TopicPartition

    admin.delete_records({TopicPartition(name, 0): 30})
    admin.close()
    with pytest.raises(StreamingQueryException, match=r"20 to 29"):
        door.run(door.stream(name).select("value"), topic=out)
    door.run(door.stream(name, failOnDataLoss="false").select("value"), topic=out)
    assert Counter(door.values(out)) == Counter(str(n).encode() for n in (*range(20), *range(30, 40)))


def test_group_offsets_follow_the_sink(door, topic):
    name, out, group = topic(2), topic(1), f"group-{uuid.uuid4().hex[:8]}"
    door.put(name, 40)
    frame = door.stream(name, **{"flinkish.group.id": group}).select("value")
    query = door.start(frame, trigger={"processingTime": "0 seconds"}, topic=out)
    try:
        with KafkaAdmin(KafkaConnection(door.servers)) as admin:
            _await(lambda: sum(admin.committed_offsets(group).values()) == 40, query)
        assert len(door.values(out)) == 40
    finally:
        query.stop()


def test_only_committed_records_are_read_by_default(door, topic):
    name = topic(1)
    producer = KafkaProducer(bootstrap_servers=door.servers, transactional_id=f"t-{uuid.uuid4().hex}")
    producer.init_transactions()
    for value, end in ((b"no", producer.abort_transaction), (b"yes", producer.commit_transaction)):
        producer.begin_transaction()
        producer.send(name, value=value).get(10)
        end()
    producer.close()
    with KafkaAdmin(KafkaConnection(door.servers)) as admin:
        # Two records with a marker each: a broker writes markers behind its answer.
        assert eventually(lambda: admin.end_offsets([(name, 0)])[name, 0] == 4)
    assert [bytes(r.value) for r in door.batch(name).collect()] == [b"yes"]
    uncommitted = door.batch(name, **{"kafka.isolation.level": "read_uncommitted"})
    assert sorted(bytes(r.value) for r in uncommitted.collect()) == [b"no", b"yes"]


def last_line(error: BaseException) -> str:
    """What people read of an error; Spark puts its plan behind what was refused."""
    return str(error).rstrip().splitlines()[-1]


# -- refusals ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"startingOffset": "earliest"}, "Did you mean 'startingOffsets'"),
        ({"kafka.auto.offset.reset": "earliest"}, "startingOffsets"),
        ({"kafka.fetch.maximum": "1"}, "fetch.maximum"),
        ({"subscribePattern": "x"}, "subscribe and subscribePattern"),
    ],
)
def test_a_misspelt_source_is_refused_when_it_is_loaded(door, topic, options, says):
    with pytest.raises(Exception, match=says) as refused:
        reader = door.spark.readStream.format("flinkish-kafka").options(**door.kafka, subscribe="a")
        reader.options(**options).load()
    assert re.search(says, last_line(refused.value))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"topics": "x"}, "Did you mean 'topic'"),
        ({"topic": "no-such-topic-here"}, "no-such-topic-here"),
        ({"kafka.retires": "1"}, "Did you mean 'retries'"),
        ({"kafka.transaction.timeout.ms": "99999999"}, "transaction.max.timeout.ms|timeout"),
    ],
)
def test_a_sink_that_cannot_work_says_why_and_writes_nothing(door, topic, options, says):
    name, out = topic(1), topic(1)
    door.put(name, 3)
    with pytest.raises(StreamingQueryException, match=says) as refused:
        door.run(door.stream(name).select("value"), **{"topic": out, **options})
    assert re.search(says, last_line(refused.value))
    assert door.values(out) == []


def test_a_sink_without_checkpoint_location_and_a_batch_write_are_refused(door, topic):
    name, out = topic(1), topic(1)
    door.put(name, 3)
    door.spark.conf.set("spark.sql.streaming.checkpointLocation", str(door.tmp_path / "root"))
    try:
        writer = door.stream(name).select("value").writeStream.format("flinkish-kafka").options(**door.kafka)
        with pytest.raises(StreamingQueryException, match="checkpointLocation"):
            writer.option("topic", out).trigger(availableNow=True).start().awaitTermination(60)
    finally:
        door.spark.conf.unset("spark.sql.streaming.checkpointLocation")
    with pytest.raises(Exception, match="writes streams only"):
        rows = door.spark.createDataFrame([("a",)], "value STRING")
        rows.write.format("flinkish-kafka").options(**door.kafka, topic=out).mode("append").save()


def _await(condition, query, timeout_s=90):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert query.isActive, query.exception()
        assert time.monotonic() < deadline
        time.sleep(0.2)
