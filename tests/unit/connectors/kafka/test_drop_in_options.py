"""Options of the door: Spark's names, clear refusals, offsets arithmetic as in Spark's own source."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import SparkNoSuchElementException

from flinkish_spark.connectors.kafka import offset_ranges as plan
from flinkish_spark.connectors.kafka.client.client import Isolation
from flinkish_spark.connectors.kafka.data_source import register
from flinkish_spark.connectors.kafka.format.options import parse_sink
from flinkish_spark.connectors.kafka.offset_ranges import Range
from flinkish_spark.connectors.kafka.stream_options import (
    EARLIEST,
    LATEST,
    parse_any,
    parse_batch,
    parse_stream,
)
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.types.ddl import parse_ddl

BASE = {"kafka.bootstrap.servers": "localhost:9092", "subscribe": "a, b"}
SINK = {"kafka.bootstrap.servers": "localhost:9092", "topic": "t", "checkpointlocation": "/data/c"}
ROWS = parse_ddl("key STRING, value BINARY")
SECRET = "hunter2"
JAAS = f'org.apache.kafka.common.security.scram.ScramLoginModule required username="u" password="{SECRET}";'


def test_the_options_of_sparks_documentation_are_understood() -> None:
    options = parse_stream(
        {
            **BASE,
            "startingOffsets": '{"a":{"0":23,"1":-1},"b":{"0":-2}}',
            "maxOffsetsPerTrigger": "1000",
            "minPartitions": "8",
            "failOnDataLoss": "false",
            "includeHeaders": "true",
            "kafka.group.id": "ignored",
            "groupIdPrefix": "ignored",
            "kafka.isolation.level": "read_uncommitted",
            "kafka.max.poll.records": "5",
            "maxTriggerDelay": "15m",
            "kafkaConsumer.pollTimeoutMs": "120000",
        }
    )
    assert options.subscription.topics == ("a", "b")
    assert options.starting.offsets == {("a", 0): 23, ("a", 1): LATEST, ("b", 0): EARLIEST}
    assert (options.max_per_trigger, options.min_partitions, options.max_trigger_delay_ms) == (
        1000,
        8,
        900_000,
    )
    assert options.reader.isolation is Isolation.READ_UNCOMMITTED
    assert not options.reader.fail_on_data_loss
    assert options.reader.include_headers


def test_defaults_are_sparks_but_for_the_isolation() -> None:
    assert parse_stream(BASE).starting.everywhere == LATEST
    assert parse_batch(BASE).starting.everywhere == EARLIEST
    assert parse_batch(BASE).ending.everywhere == LATEST
    assert parse_any(BASE).reader.isolation is Isolation.READ_COMMITTED
    assert parse_any(BASE).reader.fail_on_data_loss


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"startingOffset": "earliest"}, "Did you mean 'startingOffsets'"),
        ({"subscribepatern": "x"}, "Did you mean 'subscribePattern'"),
        ({"assign": '{"a":[0]}'}, "assign and subscribe"),
        ({"startingOffsets": "middle"}, "startingOffsets"),
        ({"startingOffsets": '{"a":{"0":-3}}'}, "-3"),
        ({"startingTimestamp": "yesterday"}, "milliseconds since 1970"),
        ({"maxOffsetsPerTrigger": "0"}, "whole number above 0"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "3"}, "above maxOffsetsPerTrigger"),
        ({"maxTriggerDelay": "soon"}, "15m or 30s"),
        ({"failOnDataLoss": "maybe"}, "true or false"),
        ({"failOnDataLoss": "fal\u017fe"}, "true or false"),
        ({"startingTimestamp": "\u0663"}, "milliseconds since 1970"),
        ({"kafka.auto.offset.reset": "earliest"}, "startingOffsets"),
        ({"kafka.enable.auto.commit": "true"}, "flinkish.group.id"),
        ({"kafka.value.deserializer": "x"}, "bytes"),
        ({"kafka.no.such.thing": "x"}, "no.such.thing"),
        ({"kafka.isolation.level": "chaos"}, "read_committed"),
        ({"endingOffsets": "latest"}, "batch reads"),
        ({"kafka.bootstrap.servers": ""}, "kafka.bootstrap.servers"),
        ({"startingOffsetsByTimestampStrategy": "guess", "startingTimestamp": "1"}, "error or latest"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(more: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_stream({**BASE, **more})


@pytest.mark.parametrize(
    "subscription",
    [
        {"subscribe": " , "},
        {"subscribePattern": ""},
        {"assign": "[1]"},
        {"assign": "{}"},
        {"assign": '{"a":1}'},
        {},
    ],
)
def test_a_source_needs_exactly_one_subscription(subscription: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        parse_stream({"kafka.bootstrap.servers": "localhost:9092", **subscription})


def test_the_sink_takes_sparks_columns_and_options() -> None:
    options = parse_sink(
        {
            **SINK,
            "kafka.compression.type": "gzip",
            "kafka.linger.ms": "5",
            "kafka.acks": "all",
            "kafka.enable.idempotence": "true",
            "kafka.retries": "3",
        },
        ROWS,
    )
    assert (options.topic, options.columns) == ("t", ("key", "value"))
    everything = parse_ddl(
        "headers ARRAY<STRUCT<key: STRING, value: BINARY>>, topic STRING, partition INT, value STRING, "
        "other DOUBLE"
    )
    without = {name: value for name, value in SINK.items() if name != "topic"}
    assert parse_sink(without, everything).columns == ("value", "headers", "topic", "partition")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"checkpointlocation": None}, "checkpointLocation"),
        ({"checkpointlocation": "relative/path"}, "absolute path"),
        ({"checkpointlocation": "wasb://c@account/c"}, "no store for wasb"),
        ({"checkpointlocation": "file://host/c"}, "names a host"),
        ({"checkpointlocation": "relative/c"}, "absolute path"),
        ({"topic": None}, "no topic"),
        ({"topic": " "}, "empty"),
        ({"topics": "t"}, "Did you mean 'topic'"),
        ({"kafka.transactional.id": "x"}, "leases"),
        ({"kafka.acks": "1"}, "must be all"),
        ({"kafka.enable.idempotence": "false"}, "idempotent"),
        ({"kafka.transaction.timeout.ms": "long"}, "milliseconds"),
        ({"kafka.no.such.thing": "x"}, "no.such.thing"),
    ],
)
def test_a_sink_that_cannot_work_is_refused(options: dict[str, str | None], says: str) -> None:
    given = {name: value for name, value in {**SINK, **options}.items() if value is not None}
    with pytest.raises(ConfigError, match=says):
        parse_sink(given, ROWS)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("key STRING", "no column 'value'"),
        ("value INT", "CAST"),
        ("value STRING, partition BIGINT", "partition"),
        ("value STRING, headers MAP<STRING, STRING>", "headers"),
    ],
)
def test_columns_of_a_wrong_type_are_refused(schema: str, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        parse_sink(SINK, parse_ddl(schema))


def test_a_local_path_is_understood_in_its_spellings() -> None:
    for text in ("/data/my%20c", "file:///data/my%20c", "file:/data/my%20c"):
        assert (
            parse_sink({**SINK, "checkpointlocation": text}, ROWS).checkpoint_location.url == "/data/my%20c"
        )


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3a://bucket/c/", "s3://bucket/c"),
        ("abfss://box@account.dfs.core.windows.net/c", "abfss://box@account.dfs.core.windows.net/c"),
        ("hdfs://namenode:8020/c", "hdfs://namenode:8020/c"),
    ],
)
def test_a_folder_in_a_bucket_is_written_as_spark_takes_it(text: str, url: str) -> None:
    assert parse_sink({**SINK, "checkpointlocation": text}, ROWS).checkpoint_location.url == url


def test_secrets_are_in_no_printed_form() -> None:
    secrets = {
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "SCRAM-SHA-512",
        "kafka.sasl.jaas.config": JAAS,
    }
    assert SECRET not in repr(parse_any({**BASE, **secrets}))
    assert SECRET not in repr(parse_sink({**SINK, **secrets}, ROWS))
    with pytest.raises(ConfigError) as refused:
        parse_any({**BASE, **secrets, "kafka.sasl.jaas.config": JAAS.replace("Scram", "Odd"), "oops": "1"})
    assert SECRET not in str(refused.value)


# -- offsets ----------------------------------------------------------------------------------------
def test_a_limit_is_shared_by_what_each_partition_has_left() -> None:
    start, end = {("a", 0): 0, ("a", 1): 100, ("a", 2): 7}, {("a", 0): 900, ("a", 1): 200, ("a", 2): 7}
    assert plan.apply_limit(start, end, 100) == {("a", 0): 90, ("a", 1): 110, ("a", 2): 7}
    assert plan.apply_limit(start, end, 5_000) == end
    # A small partition is not starved by a big one.
    tiny = plan.apply_limit({}, {("a", 0): 1_000_000, ("a", 1): 1}, 10)
    assert tiny == {("a", 0): 9, ("a", 1): 1}


def test_a_limited_plan_always_goes_on_and_never_beyond_the_end() -> None:
    chance = random.Random(1)
    for _ in range(200):
        places = [("t", p) for p in range(chance.randint(1, 6))]
        start = {place: chance.randint(0, 50) for place in places}
        end = {place: start[place] + chance.choice((0, chance.randint(0, 300))) for place in places}
        most = chance.randint(1, 120)
        rounds = 0
        while start != end:
            now = plan.apply_limit(start, end, most)
            assert all(start[p] <= now[p] <= end[p] for p in places)
            assert plan.count_available(start, now) <= most + len(places)
            assert now != start
            start, rounds = now, rounds + 1
            assert rounds < 2_000


def test_pieces_cover_every_offset_once_and_mark_the_last() -> None:
    chance = random.Random(2)
    for _ in range(200):
        ranges = [Range("t", p, s := chance.randint(0, 9), s + chance.randint(0, 40)) for p in range(4)]
        cut = plan.split_ranges(
            ranges,
            min_partitions=chance.choice((None, chance.randint(1, 20))),
            max_per_partition=chance.choice((None, chance.randint(1, 20))),
        )
        for whole in ranges:
            mine = [piece for piece in cut if piece.partition == whole.partition]
            assert [o for piece in mine for o in range(piece.start, piece.end)] == list(
                range(whole.start, whole.end)
            )
            assert [piece.is_last for piece in mine] == [False] * (len(mine) - 1) + [True]


def test_offsets_are_logged_as_sparks_own_source_logs_them() -> None:
    offsets = {("b", 0): 5, ("a", 10): 1, ("a", 2): 3}
    assert plan.to_json(offsets) == {"a": {"2": 3, "10": 1}, "b": {"0": 5}}
    assert plan.from_json(plan.to_json(offsets)) == offsets


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("(?i)url", "(?i)url|"),
        ("mine", "mine|"),
        (None, "(?i)url|"),
        (SparkNoSuchElementException("not set"), "(?i)url|"),
    ],
)
def test_a_session_hides_our_secrets_beside_what_it_hides_already(before: Any, found: str) -> None:
    """A server of Spark Connect 4.3 raises where a setting has its default."""
    kept: dict[str, str] = {}

    def get(name: str) -> Any:
        if name in kept:
            return kept[name]
        if isinstance(before, Exception):
            raise before
        return before

    spark: Any = SimpleNamespace(
        conf=SimpleNamespace(get=get, set=kept.__setitem__),
        dataSource=SimpleNamespace(register=lambda kind: None),
    )
    for _ in range(2):
        register(spark)
    (pattern,) = kept.values()
    assert pattern.startswith(found) and pattern.count("jaas") == 1
