"""The Kafka sink by its own writer and committer: records, acks and committables."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient, NewPartitions
from pyspark.sql import functions as F

from flinkish_spark import (
    Avro,
    CheckpointConfig,
    DeadLetter,
    DeliveryGuarantee,
    Json,
    KafkaSink,
    KafkaSource,
    MemorySink,
    OnBadRecord,
    Raw,
    RecordHeaders,
)
from flinkish_spark.checkpoint.failures import classify
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.contracts.sink import StageRequest, StageResult
from flinkish_spark.core.errors import BadRecordError, ConfigError, EnvironmentFault, GraphError, SchemaError
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import Committable, Outcome
from flinkish_spark.sources import EndAtLatest, KafkaRecordsSource
from flinkish_spark.transport import columns as C
from tests.support.jobs import PATIENCE_S, environment, eventually, failure_of, read_committed
from tests.support.open_transactions import still_open
from tests.support.sinks import sink_context_of

pytestmark = pytest.mark.timeout(240)
SCHEMA = "k STRING, v BINARY, ts BIGINT, at TIMESTAMP, p INT, t STRING"
SCHEMA += ", trace STRING, raw BINARY, n BIGINT, need STRING"
CONTROL = f"{C.KIND} INT, {C.CHECKPOINT} BIGINT, {C.CHANNEL} BIGINT, {C.HASH} BIGINT"
#: A value for every field, so that a test names only what it is about.
DEFAULTS = {"k": None, "v": b"v", "ts": None, "at": None, "p": None, "t": None}
DEFAULTS |= {"trace": None, "raw": None, "n": None, "need": "x"}


class Rig:
    """Stages rows by a sink's own writer, and ends them by its committer."""

    def __init__(self, spark: Any, servers: str) -> None:
        self.spark, self.servers = spark, servers
        self.job = JobUuid(uuid.uuid4().hex)
        self.client = TransactionClient(KafkaConnection(servers))
        self.blocks = iter(range(1, 1_000_000))

    def context(self, schema: str = SCHEMA) -> Any:
        fields = self.spark.createDataFrame([], schema).schema
        config = CheckpointConfig(interval_ms=1_000, restart_budget_ms=10_000)
        return sink_context_of(self.job, OwnerEpoch(1), "out", fields, config)

    def sink(self, topic: str, **settings: Any) -> KafkaSink:
        given = {"value": Raw("v"), "transaction_timeout_ms": 60_000, **settings}
        return KafkaSink(self.servers, topic, **given)

    def frame(self, *rows: Mapping[str, Any], partitions: int = 1) -> Any:
        full = [(0, None, None, 1, *{**DEFAULTS, **row}.values()) for row in rows]
        spread = self.spark.sparkContext.parallelize(full, partitions)
        return self.spark.createDataFrame(spread, f"{CONTROL}, {SCHEMA}")

    def stage(self, sink: KafkaSink, *rows: Mapping[str, Any], frame: Any = None) -> StageResult:
        writer = sink.create_writer(self.spark, self.context())
        rows_in = self.frame(*rows) if frame is None else frame
        request = StageRequest(rows_in, Lineage(2), BatchId(7), next(self.blocks), CheckpointId(31))
        return writer.stage(request)

    def commit(self, result: StageResult, sink: KafkaSink) -> None:
        committer = sink.create_committer(self.spark, self.context())
        staged = [Committable("out", json.loads(json.dumps(payload))) for payload in result.payloads]
        answers = committer.commit(CheckpointId(31), staged)
        assert [answer.outcome for answer in answers] == [Outcome.COMMITTED] * len(staged)
        committer.close()

    def read(self, topic: str) -> list[Any]:
        return read_committed(self.servers, topic)

    def open_ids(self) -> list[Any]:
        return still_open(self.client, self.job)


@pytest.fixture(scope="module")
def rig(spark: Any, broker: Any) -> Iterator[Rig]:
    made = Rig(spark, broker.bootstrap_servers)
    yield made
    for found in made.client.list_open_transactions(made.job):
        made.client.abort_open(found.transactional_id)
    made.client.close()


Topics = Callable[..., str]


def parts(record: Any) -> tuple[Any, ...]:
    return (
        record.topic,
        record.partition,
        record.key,
        record.value,
        record.timestamp,
        tuple(record.headers),
    )


def await_records(condition: Callable[[], bool]) -> None:
    assert eventually(condition, PATIENCE_S)


# -- records ----------------------------------------------------------------------------------------


def test_every_part_of_a_record_is_written_and_another_sink_of_its_topic_commits(
    rig: Rig, topic: Topics
) -> None:
    """Nulls included; the acks tell of every row."""
    main, other = topic(partitions=3), topic(partitions=3)
    sink = rig.sink(
        main,
        key="k",
        headers={"trace": "trace", "ü": "raw"},
        timestamp="ts",
        partition="p",
        topic_column="t",
        other_topics=[other],
        record_headers=RecordHeaders.FULL,
    )
    rows = [
        {"k": "a", "v": b"1", "ts": 1_700_000_000_000, "p": 2, "t": other, "trace": "x", "raw": b"\xff"},
        {"k": "b", "v": None, "ts": 5, "p": 0, "trace": None, "raw": b""},
        {"k": None, "v": b"", "ts": 0, "p": 1, "t": main},
        {"k": "", "v": b"4", "ts": 7, "t": other, "trace": ""},
    ]
    staged = rig.stage(sink, frame=rig.frame(*rows, partitions=2))
    assert rig.read(main) == rig.read(other) == []
    # Whoever wrote it: a committer goes by the handles alone.
    rig.commit(staged, rig.sink(main))
    found = [parts(one)[1:] for one in rig.read(main) + rig.read(other)]
    assert {record.topic for record in rig.read(other)} == {other}
    assert [(task.partition, task.rows, task.digest) for task in staged.tasks] == [(0, 2, 2), (1, 2, 2)]
    assert len(staged.payloads) == 2
    ours = (
        ("flinkish-job", str(rig.job).encode()),
        ("flinkish-uid", b"out"),
        ("flinkish-checkpoint", b"31"),
        ("flinkish-batch", b"2/7"),
    )
    by_key = {key: (partition, value, at, headers) for partition, key, value, at, headers in found}
    assert by_key[b"a"] == (2, b"1", 1_700_000_000_000, (*ours, ("trace", b"x"), ("ü", b"\xff")))
    assert by_key[b"b"] == (0, None, 5, (*ours, ("ü", b"")))
    assert by_key[None] == (1, b"", 0, ours)
    assert by_key[b""][1:] == (b"4", 7, (*ours, ("trace", b"")))


def test_timestamps_of_sparks_type_and_missing_ones(rig: Rig, topic: Topics) -> None:
    name = topic()
    sink = rig.sink(name, key="k", timestamp="at")
    at = datetime(2024, 2, 29, 12, 0, 0, 123_999, UTC)
    began_ms = datetime.now(UTC).timestamp() * 1000
    rig.commit(rig.stage(sink, {"k": "then", "at": at}, {"k": "now"}), sink)
    then, now = sorted(rig.read(name), key=lambda r: r.key, reverse=True)
    assert (then.timestamp, then.headers) == (1_709_208_000_123, [])
    assert began_ms - 5_000 < now.timestamp < began_ms + 120_000


def test_partitions_that_were_added_can_be_named(rig: Rig, topic: Topics) -> None:
    name = topic(partitions=1)
    sink = rig.sink(name, partition="p")
    rig.commit(rig.stage(sink, {"p": 0}), sink)
    with KafkaAdminClient(bootstrap_servers=rig.servers) as admin:
        admin.create_partitions({name: NewPartitions(total_count=3)})
    rig.commit(rig.stage(sink, {"p": 2}), sink)
    assert [record.partition for record in rig.read(name)] == [0, 2]


def test_keys_of_several_fields_and_chosen_fields_of_a_value(rig: Rig, topic: Topics) -> None:
    name = topic()
    sink = rig.sink(name, key=Json("k STRING, n LONG"), value=Json("need STRING"))
    rig.commit(rig.stage(sink, {"k": "a", "n": 3}), sink)
    (record,) = rig.read(name)
    assert (json.loads(record.key), json.loads(record.value)) == ({"k": "a", "n": 3}, {"need": "x"})
    assert record.headers == []


def test_producer_settings_reach_the_producer(rig: Rig, broker: Any, topic: Topics) -> None:
    """One codec: that each arrives is in `tests/integration/broker/test_python_staging.py`."""
    name = topic()
    sink = rig.sink(
        name,
        producer={"kafka.compression.type": "zstd", "batch.size": "20000"},
        record_headers=RecordHeaders.BATCH,
    )
    sink.preflight(rig.spark, rig.context())
    values = [b"%05d" % n + b"." * 95 for n in range(2_000)]
    rig.commit(rig.stage(sink, *({"v": value} for value in values)), sink)
    options = {"kafka.bootstrap.servers": rig.servers, "subscribe": name, "includeHeaders": "true"}
    read = rig.spark.read.format("kafka").options(**options).option("kafka.isolation.level", "read_committed")
    rows = read.load().select("value", F.element_at("headers.key", 1).alias("first")).collect()
    assert sorted(bytes(row.value) for row in rows) == values
    assert {row.first for row in rows} == {"flinkish-batch"}
    (log,) = broker.log.parent.glob(f"data/{name}-0/00000000000000000000.log")
    assert log.stat().st_size < 100_000, "200,000 bytes of values were compressed"


# -- guarantees -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guarantee", "producer"),
    [
        (DeliveryGuarantee.AT_LEAST_ONCE, {}),
        (DeliveryGuarantee.NONE, {"acks": "1"}),
        (DeliveryGuarantee.NONE, {"acks": "0"}),
        (DeliveryGuarantee.NONE, {}),
    ],
)
def test_without_transactions_records_are_visible_when_the_task_is_done(
    rig: Rig, topic: Topics, guarantee: DeliveryGuarantee, producer: dict[str, str]
) -> None:
    name, letters = topic(partitions=2), topic()
    sink = rig.sink(
        name,
        key="k",
        delivery=guarantee,
        producer=producer,
        partition="p",
        on_bad_record=DeadLetter(letters),
        # Shorter than the checkpoint interval, of no meaning here.
        transaction_timeout_ms=1,
    )
    sink.preflight(rig.spark, rig.context())
    before = {one.transactional_id for one in rig.open_ids()}
    for turn in range(2):
        rows = [{"k": f"{turn}-{n}"} for n in range(300)]
        result = rig.stage(sink, frame=rig.frame(*rows, {"k": "bad", "p": 9}, partitions=2))
        assert result.payloads == ()
        assert sum(task.rows for task in result.tasks) == 301
        assert sum(task.dead_lettered for task in result.tasks) == 1
    # Without acknowledgements the last ones may still be on their way.
    await_records(lambda: len(rig.read(name)) >= 600)
    keys = sorted(record.key for record in rig.read(name))
    assert keys == sorted(f"{turn}-{n}".encode() for turn in range(2) for n in range(300))
    assert [record.key for record in rig.read(letters)] == [b"bad"] * 2
    assert {one.transactional_id for one in rig.open_ids()} == before
    # What an earlier start staged in transactions is still committed.
    exact = rig.sink(name)
    rig.commit(rig.stage(exact, {}), sink)
    assert len(rig.read(name)) == 601


# -- records that are refused -----------------------------------------------------------------------

REFUSED = [
    ({"t": "undeclared"}, "undeclared-topic", "names the topic undeclared, which the sink does not declare"),
    ({"p": 2}, "no-such-partition", "names partition 2 of topic {topic}, which has the partitions 0 to 1"),
    ({"p": -1}, "no-such-partition", "names partition -1 of topic"),
    ({"ts": -5}, "bad-timestamp", "a timestamp of -5 ms, before 1970"),
    ({"ts": 253_402_300_800_000}, "bad-timestamp", "a timestamp of 253402300800000 ms, after 9999"),
]


def test_what_cannot_be_written_goes_to_the_dead_letters_whole(rig: Rig, topic: Topics) -> None:
    name, letters = topic(partitions=2), topic()
    columns: dict[str, Any] = {"key": "k", "partition": "p", "timestamp": "ts", "topic_column": "t"}
    columns["headers"] = {"trace": "trace"}
    bad = DeadLetter(letters)
    sink = rig.sink(name, on_bad_record=bad, record_headers=RecordHeaders.BATCH, **columns)
    value = b"whole" * 1000
    rows = [{"k": str(n), "v": value, "trace": "x", **row} for n, (row, _, _) in enumerate(REFUSED)]
    large = {"k": "large", "v": b"x" * 2_000_000, "ts": 9, "trace": "x"}
    begun_ms = int(time.time() * 1_000) - 1
    result = rig.stage(sink, {"k": "fine", "v": b"1"}, *rows, large)
    assert [(task.rows, task.dead_lettered) for task in result.tasks] == [(7, 6)]
    assert rig.read(letters) == []
    rig.commit(result, sink)
    assert [record.key for record in rig.read(name)] == [b"fine"]
    found = {record.key.decode(): record for record in rig.read(letters)}
    for number, (row, reason, words) in enumerate(REFUSED):
        record = found[str(number)]
        headers = dict(record.headers)
        assert (record.value, headers["flinkish-error"]) == (value, reason.encode())
        assert headers["flinkish-topic"].decode() == row.get("t", name)
        assert words.format(topic=name) in headers["flinkish-detail"].decode()
        assert headers["flinkish-batch"] == b"2/7" and record.timestamp > begun_ms
    headers = dict(found["large"].headers)
    assert (found["large"].value, headers["flinkish-timestamp"]) == (b"x" * 1024, b"9")
    assert found["large"].timestamp > begun_ms
    assert headers["flinkish-error"] == b"oversize" and int(headers["flinkish-size"]) > 2_000_000


def test_a_dead_letter_has_the_headers_and_the_time_of_its_record(rig: Rig, topic: Topics) -> None:
    """In their order, one name twice, one without value; ours behind."""
    name, letters, begun_ms = topic(partitions=2), topic(), int(time.time() * 1_000) - 1
    own = [("trace", b"1"), ("", b""), ("trace", b"2"), ("empty", None)]
    rows = rig.frame({"k": "bad", "p": 7, "ts": 1_234}, {"k": "fine", "p": 1}, {"k": "none", "p": -1})
    entries = ", ".join(
        f"named_struct('key', '{key}', 'value', {'NULL' if value is None else f'X{value.hex()!r}'})"
        for key, value in own
    )
    column = f"IF(k = 'none', NULL, CAST(array({entries}) AS array<struct<key:string,value:binary>>))"
    sink = rig.sink(
        name,
        key="k",
        partition="p",
        timestamp="ts",
        headers="h",
        on_bad_record=DeadLetter(letters),
        record_headers=RecordHeaders.BATCH,
    )
    schema = f"{SCHEMA}, h ARRAY<STRUCT<key: STRING, value: BINARY>>"
    sink.preflight(rig.spark, rig.context(schema))
    writer = sink.create_writer(rig.spark, rig.context(schema))
    request = StageRequest(
        rows.withColumn("h", F.expr(column)), Lineage(2), BatchId(7), next(rig.blocks), CheckpointId(31)
    )
    rig.commit(writer.stage(request), sink)
    ours = ("flinkish-batch", b"2/7")
    (fine,) = rig.read(name)
    assert fine.headers == [ours, *own]
    found = {record.key: record for record in rig.read(letters)}
    # By its own time the retention of its topic goes: with the record's it would be gone at once.
    assert found[b"bad"].timestamp > begun_ms and found[b"bad"].value == b"v"
    detail = f"a record names partition 7 of topic {name}, which has the partitions 0 to 1"
    behind = {"error": "no-such-partition", "sink": "out", "topic": name, "partition": "7"}
    behind |= {"timestamp": "1234", "detail": detail}
    said = [(f"flinkish-{what}", text.encode()) for what, text in behind.items()]
    assert found[b"bad"].headers == [*own, *said, ours]
    assert [key for key, _ in found[b"none"].headers] == [key for key, _ in (*said, ours)]


def test_what_cannot_be_written_is_dropped_or_ends_the_task(rig: Rig, topic: Topics) -> None:
    name, letters = topic(partitions=2), topic()
    columns = {"partition": "p", "timestamp": "ts", "topic_column": "t"}
    sink = rig.sink(name, on_bad_record=OnBadRecord.DROP, on_oversize=DeadLetter(letters), **columns)
    large = {"v": b"x" * 2_000_000}
    result = rig.stage(sink, {"v": b"1"}, *(row for row, _, _ in REFUSED), large)
    assert [(t.rows, t.dropped, t.dead_lettered) for t in result.tasks] == [(7, 5, 1)]
    rig.commit(result, sink)
    assert [record.value for record in rig.read(name)] == [b"1"]
    assert len(rig.read(letters)) == 1
    row, _, words = REFUSED[0]
    with pytest.raises(Exception, match="which the sink does not declare") as failure:
        rig.stage(rig.sink(name, **columns), {"v": b"1"}, row)
    assert type(classify(failure.value)) is BadRecordError
    assert words in str(classify(failure.value))


def test_a_header_without_a_name_and_a_change_without_a_key_meet_the_policy(rig: Rig, topic: Topics) -> None:
    """The topic is compacted: a record without a key would end the transaction."""
    name, letters = topic(configs={"cleanup.policy": "compact"}), topic()
    kind = "ARRAY<STRUCT<key: STRING, value: BINARY>>"
    schema = f"{SCHEMA}, h {kind}"
    sink = rig.sink(
        name,
        key="k",
        value=Json("n LONG"),
        headers="h",
        row_kind="t",
        on_bad_record=DeadLetter(letters),
    )
    nameless = (
        "array(named_struct('key', 'a', 'value', X'31'), named_struct('key', NULL, 'value', X'32'), NULL)"
    )
    rows = rig.frame(
        {"k": "good", "n": 1, "t": "+I"},
        {"k": "nameless", "n": 2, "t": "+I"},
        {"k": None, "n": 3, "t": "-D"},
        {"k": "gone", "n": 4, "t": "-D"},
    ).withColumn("h", F.expr(f"CAST(IF(k = 'nameless', {nameless}, NULL) AS {kind})"))
    sink.preflight(rig.spark, rig.context(schema))
    request = StageRequest(rows, Lineage(2), BatchId(7), next(rig.blocks), CheckpointId(31))
    result = sink.create_writer(rig.spark, rig.context(schema)).stage(request)
    assert [(task.rows, task.dead_lettered) for task in result.tasks] == [(4, 2)]
    rig.commit(result, sink)
    assert [(one.key, one.value) for one in rig.read(name)] == [(b"good", b'{"n":1}'), (b"gone", None)]
    found = {one.key: (json.loads(one.value), one.headers) for one in rig.read(letters)}
    (fields, headers), (keyless, more) = found[b"nameless"], found[None]
    assert (fields["n"], fields["t"], headers[0]) == (2, "+I", ("a", b"1"))
    assert dict(headers)["flinkish-detail"].endswith(b"does not fit its format: a header of it has no name")
    assert (keyless["n"], keyless["t"]) == (3, "-D")
    assert dict(more)["flinkish-detail"].endswith(b"does not fit its format: it has no key")


def test_times_that_a_topic_does_not_allow_meet_the_policy(rig: Rig, topic: Topics) -> None:
    """Brokers refuse them, and with them the transaction. Kafka 4 allows an hour ahead by default."""
    limits = {"message.timestamp.after.max.ms": "3600000", "message.timestamp.before.max.ms": "7200000"}
    name, letters, hour_ms = topic(configs=limits), topic(configs=limits), 3_600_000
    sink = rig.sink(name, key="k", timestamp="ts", partition="p", on_bad_record=DeadLetter(letters))
    now_ms = int(time.time() * 1_000)
    given = {"good": -1, "none": None, "ahead": 2, "behind": -3, "both": 2}
    rows = [
        {"k": k, "ts": None if h is None else now_ms + h * hour_ms, "p": int(k == "both")}
        for k, h in given.items()
    ]
    rig.commit(rig.stage(sink, *rows), sink)
    assert {one.key: one.timestamp for one in rig.read(name)}[b"good"] == now_ms - hour_ms
    assert {one.key for one in rig.read(name)} == {b"good", b"none"}
    found = {one.key: (dict(one.headers), one.timestamp) for one in rig.read(letters)}
    assert set(found) == {b"ahead", b"behind", b"both"}
    assert all(abs(at - now_ms) < hour_ms / 2 for _, at in found.values()), (
        "the letters' topic has limits, too"
    )
    said = [
        (found[key][0]["flinkish-error"], found[key][0]["flinkish-detail"]) for key in (b"ahead", b"behind")
    ]
    assert [error for error, _ in said] == [b"bad-timestamp"] * 2
    assert b"message.timestamp.after.max.ms of a topic" in said[0][1]
    assert b"message.timestamp.before.max.ms of a topic" in said[1][1]
    assert found[b"both"][0]["flinkish-error"] == b"no-such-partition"
    # A topic that writes times of its own takes any.
    own = topic(configs={**limits, "message.timestamp.type": "LogAppendTime"})
    appending = rig.sink(own, key="k", timestamp="ts")
    rig.commit(rig.stage(appending, *rows), appending)
    assert len(rig.read(own)) == 5


def test_a_record_without_a_key_in_a_compacted_topic_is_a_bad_record_wherever_it_stands(
    rig: Rig, topic: Topics
) -> None:
    """Of a batch in which one record is refused, Java's client tells the first only that another one was."""
    name, letters = topic(configs={"cleanup.policy": "compact,delete"}), topic()
    sink = rig.sink(name, key="k", on_bad_record=DeadLetter(letters))
    rig.commit(rig.stage(sink, {"k": "a"}, {"k": None, "v": b"keyless"}, {"k": "", "v": b""}), sink)
    assert [one.key for one in rig.read(name)] == [b"a", b""]
    (letter,) = rig.read(letters)
    said = dict(letter.headers)
    assert (letter.value, said["flinkish-error"]) == (b"keyless", b"no-key")
    assert (
        said["flinkish-detail"]
        == f"a record for topic {name} has no key, and the topic is compacted".encode()
    )

    # Of a topic that is compacted since the start only the broker knows.
    since = topic()
    sink = rig.sink(since, key="k", on_bad_record=OnBadRecord.DROP)
    writer = sink.create_writer(rig.spark, rig.context())
    with KafkaAdminClient(bootstrap_servers=rig.servers) as admin:
        compacting = {"cleanup.policy": "compact"}
        admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, since, compacting)])
    rows = rig.frame({"k": "a"}, {"k": None}, {"k": "b"})
    request = StageRequest(rows, Lineage(2), BatchId(7), next(rig.blocks), CheckpointId(31))
    with pytest.raises(Exception, match="without key") as failure:
        writer.stage(request)
    assert type(classify(failure.value)) is BadRecordError


def test_a_letter_that_is_not_its_whole_record_says_so(rig: Rig, topic: Topics) -> None:
    name, letters = topic(), topic(configs={"max.message.bytes": "5000"})
    sink = rig.sink(
        name, key="k", partition="p", headers={"trace": "trace"}, on_bad_record=DeadLetter(letters)
    )
    long = "x" * 6_000
    rows = [{"k": "whole"}, {"k": "value", "v": long.encode()}, {"k": long}, {"k": "headers", "trace": long}]
    rig.commit(rig.stage(sink, *({**row, "p": 9} for row in rows)), sink)
    found = {one.key: (len(one.value), dict(one.headers)) for one in rig.read(letters)}
    sizes = {key: int(headers.get("flinkish-size", 0)) for key, (_, headers) in found.items()}
    assert sizes.pop(b"whole") == 0 and all(6_000 < size < 7_000 for size in sizes.values())
    assert {key: length for key, (length, _) in found.items()} == {
        b"whole": 1,
        b"value": 1_024,
        None: 1,
        b"headers": 1,
    }
    assert found[b"headers"][1]["flinkish-headers-left-out"] == b"1"


def test_records_are_as_large_as_java_s_client_counts_them(rig: Rig, topic: Topics) -> None:
    """Many headers with long names, and records a few bytes apart; the numbers are those of its producer."""
    name, letters = topic(configs={"max.message.bytes": "200000"}), topic()
    headers = {f"a long name of a header, ü {number}": "trace" for number in range(40)}
    sink = rig.sink(name, key="k", headers=headers, on_oversize=DeadLetter(letters))
    sizes = {"headers": 197_500, "too many": 199_000}
    rows = [{"k": key, "v": b"x" * size, "trace": "1"} for key, size in sizes.items()]
    rows += [{"k": str(over), "v": b"x" * (199_900 + over)} for over in range(8, 16)]
    rig.commit(rig.stage(sink, *rows, {"k": None, "v": b"x" * 199_915}), sink)
    told = {one.key: dict(one.headers)["flinkish-size"] for one in rig.read(letters)}
    assert {one.key for one in rig.read(name)} == {b"headers", b"8", b"9", b"10", b"11"}
    assert told == {
        b"too many": b"200405",
        b"12": b"200001",
        b"13": b"200002",
        b"14": b"200003",
        b"15": b"200004",
        None: b"200002",
    }


# -- Avro -------------------------------------------------------------------------------------------

ORDER_AVRO = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "need", "type": "string"}, {"name": "n", "type": ["null", "long"]}],
    }
)


def test_avro_by_a_given_schema(rig: Rig, topic: Topics) -> None:
    """Zero, the id, then the record: need, then the branch of n and n itself as varints."""
    name, plain = topic(), topic()
    sink = rig.sink(name, key=Avro(ORDER_AVRO), value=Avro(ORDER_AVRO, schema_id=258))
    sink.preflight(rig.spark, rig.context())
    rig.commit(rig.stage(sink, {"need": "ab", "n": 5}, {"need": "c", "n": None}), sink)
    records = {(record.key, record.value) for record in rig.read(name)}
    with_id = b"\x00\x00\x00\x01\x02"
    assert records == {
        (b"\x04ab\x02\x0a", with_id + b"\x04ab\x02\x0a"),
        (b"\x02c\x00", with_id + b"\x02c\x00"),
    }
    derived = rig.sink(plain, value=Avro())
    derived.preflight(rig.spark, rig.context())
    rig.commit(rig.stage(derived, {"k": "k", "v": b"v", "p": 1, "need": None}), derived)
    (record,) = rig.read(plain)
    assert record.value == b"\x02\x02k\x02\x02v\x00\x00\x02\x02\x00\x00\x00\x00\x00"


def test_a_record_that_does_not_fit_its_avro_schema(rig: Rig, topic: Topics) -> None:
    name, letters = topic(), topic()
    sink = rig.sink(name, key="k", value=Avro(ORDER_AVRO), on_bad_record=DeadLetter(letters))
    result = rig.stage(sink, {"k": "fine"}, {"k": "bad", "need": None, "n": 4, "raw": b"\x01"})
    rig.commit(result, sink)
    assert [record.value for record in rig.read(name)] == [b"\x02x\x00"]
    (letter,) = rig.read(letters)
    assert letter.key == b"bad"
    assert {**json.loads(letter.value), "v": None} == {**DEFAULTS, "k": "bad", "v": None, "need": None} | {
        "n": 4,
        "raw": "AQ==",
    }
    headers = dict(letter.headers)
    assert headers["flinkish-error"] == b"does-not-fit"
    assert headers["flinkish-detail"].decode().endswith("does not fit its format: the field 'need' is null")
    with pytest.raises(Exception, match="the field 'need' is null") as failure:
        rig.stage(rig.sink(name, value=Avro(ORDER_AVRO)), {"need": None})
    assert type(classify(failure.value)) is BadRecordError


# -- before anything starts -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"partition": "k"}, SchemaError, "'k' of type string"),
        ({"timestamp": "p"}, SchemaError, "must be timestamp or bigint"),
        ({"headers": {"h": "n"}}, SchemaError, "the header 'h' of sink 'out'"),
        ({"headers": "k"}, SchemaError, "the list of headers of sink 'out' is the column 'k' of type string"),
        ({"topic_column": "missing"}, SchemaError, "which its stream does not have"),
        ({"key": Json("nope STRING")}, SchemaError, "'nope'"),
        (
            {"value": Avro(ORDER_AVRO.replace("need", "gone"))},
            SchemaError,
            "the column 'gone', which its stream",
        ),
        ({"value": Avro(ORDER_AVRO.replace('"string"', '"int"'))}, SchemaError, "avroType = .int"),
        ({"topic_column": "t", "other_topics": ["not-there"]}, GraphError, "'not-there' of sink 'out'"),
        ({"on_bad_record": DeadLetter("no-letters")}, GraphError, "'no-letters'"),
        ({"producer": {"batch.size": "s3cret"}}, ConfigError, "batch.size"),
        ({"producer": {"compression.type": "s3cret"}}, ConfigError, "compression.type"),
    ],
)
def test_what_cannot_work_is_refused(
    rig: Rig, topic: Topics, settings: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as refused:
        rig.sink(topic(), **settings).preflight(rig.spark, rig.context())
    assert "s3cret" not in str(refused.value)


def test_letters_of_which_a_topic_would_keep_some_are_refused(
    rig: Rig, topic: Topics, tmp_path: Path
) -> None:
    """It is compacted: of two letters of one key one would go, and it takes none without a key."""
    name, letters = topic(), topic(configs={"cleanup.policy": "compact,delete"})
    bad, words = DeadLetter(letters), f"the dead-letter topic '{letters}' of"
    for settings in ({"on_bad_record": bad}, {"on_oversize": bad}):
        with pytest.raises(ConfigError, match=f"{words} sink 'out' is compacted"):
            rig.sink(name, **settings).preflight(rig.spark, rig.context())
    value = Json("n LONG", bad)
    for source in (
        KafkaSource(rig.servers, [name], value=value, ending=EndAtLatest()),
        KafkaRecordsSource(rig.servers, [name], value=value, ending=EndAtLatest()),
    ):
        env = environment(rig.spark, tmp_path / type(source).__name__)
        env.from_source(source, uid="in").sink_to(MemorySink(str(tmp_path / "out")), uid="out")
        with pytest.raises(ConfigError, match=f"{words} source 'in' is compacted"):
            raise failure_of(env)


def test_a_codec_that_pyarrow_lacks(rig: Rig, topic: Topics, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(is_available=lambda _name: False)
    monkeypatch.setattr("flinkish_spark.connectors.kafka.client.codecs.pa", SimpleNamespace(Codec=fake))
    sink = rig.sink(topic(), producer={"compression.type": "zstd"})
    with pytest.raises(EnvironmentFault, match="cannot compress with zstd"):
        sink.preflight(rig.spark, rig.context())
