"""Which reader a source may name, and which options readers and writers are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import types as T

from flinkish_spark import (
    KafkaManifest,
    KafkaSink,
    KafkaSource,
)
from flinkish_spark.connectors.kafka.client.settings import ProducerSettings
from flinkish_spark.connectors.kafka.format.options import parse_sink
from flinkish_spark.connectors.kafka.stream_options import parse_stream
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.sources import KafkaRecordsSource


@pytest.mark.parametrize("reader", [None, "python"])
def test_there_is_one_reader_and_it_may_be_named(reader: str | None) -> None:
    assert KafkaSource("b:9092", ["orders"], reader=reader) == KafkaSource("b:9092", ["orders"])


@pytest.mark.parametrize("reader", ["jvm", "rust", 3, ["python"]])
def test_another_reader_is_refused(reader: Any) -> None:
    with pytest.raises(ConfigError, match=r"^reader is .* must be 'python'. To do: leave it out"):
        KafkaSource("b:9092", ["orders"], reader=reader)


# -- options that are passed on --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        # Several tasks read one partition: the last record of a key was n=3000 of 4000 in the sink.
        ("minPartitions", "a later record could come out before an earlier one.*rebalance"),
        ("MAXRECORDSPERPARTITION", "a later record could come out before an earlier one"),
        # Spark prefers it to the offsets that the job gives.
        ("startingTimestamp", "changes nothing that the source promises"),
        ("startingOffsetsByTimestamp", "changes nothing that the source promises"),
        ("startingOffsets", "changes nothing that the source promises"),
        ("kafka.isolation.level", "changes nothing that the source promises"),
        ("kafka.group.instance.id", "changes nothing that the source promises"),
        ("flinkish.barrier.records", "changes nothing that the source promises"),
        ("minOffsetPerTrigger", r"Did you mean 'minOffsetsPerTrigger'\?"),
        ("fetch.max.bytes", r"Did you mean 'kafka.fetch.max.bytes'\?"),
        ("kafka.sasl.jaas.config", "give it to options"),
    ],
)
def test_a_reader_option_that_is_not_known_to_be_harmless_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        KafkaSource("b:9092", ["orders"], reader_options={name: "4"})
    assert f"'{name}' cannot be set" in str(refused.value)


def test_reader_options_that_change_no_promise_are_taken() -> None:
    taken = {"minOffsetsPerTrigger": "9", "kafka.client.rack": "a", "KAFKA.MAX.POLL.RECORDS": "5"}
    assert KafkaSource("b:9092", ["orders"], reader_options=taken).reader_options == taken


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("compresion.type", r"Did you mean 'compression.type'\?"),
        ("kafka.batch.sizes", r"Did you mean 'batch.size'\?"),
        ("interceptor.classes", "changes nothing that the sink promises"),
        ("partitioner.class", "changes nothing that the sink promises"),
        ("partitioner.ignore.keys", "changes nothing that the sink promises"),
        ("ssl.key.password", "give it to options"),
    ],
)
def test_a_producer_setting_that_is_not_known_to_be_harmless_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        KafkaSink("b:9092", "copies", producer={name: "s3cret"})
    assert f"'{name}' is not known" in str(refused.value) and "s3cret" not in str(refused.value)


@pytest.mark.parametrize("writer", [None, "python"])
def test_records_are_written_in_python(writer: str | None) -> None:
    assert KafkaSink("b:9092", "copies", writer=writer).writer == "python"


@pytest.mark.parametrize("writer", ["jvm", "rust", "", 7])
def test_another_writer_is_refused(writer: Any) -> None:
    with pytest.raises(ConfigError, match=f"writer is {writer!r}") as refused:
        KafkaSink("b:9092", "copies", writer=writer)
    assert refused.value.what_to_do == "leave writer out"


def test_what_the_java_producer_takes_beside_is_taken_by_the_one_in_python() -> None:
    both = {"buffer.memory": "1000000", "kafka.batch.size": "65536", "retry.backoff.ms": "50"}
    KafkaSink("b:9092", "copies", producer=both)
    assert ProducerSettings.of(both).batch_bytes == 65536
    with pytest.raises(ConfigError, match=r"'compression.zstd.level' is not known.*compression.type"):
        ProducerSettings.of({"compression.zstd.level": "3"})


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("secruity.protocol", r"Did you mean 'security.protocol'\?"),
        ("kafka.ssl.truststore.locatoin", r"Did you mean 'ssl.truststore.location'\?"),
        ("compression.type", "producer="),
    ],
)
def test_every_door_refuses_an_option_of_a_connection_that_it_does_not_know(option: str, words: str) -> None:
    options = {option: "s3cret"}
    doors: list[Callable[[], object]] = [
        lambda: KafkaSource("b:9092", ["orders"], options=options),
        lambda: KafkaRecordsSource("b:9092", ["orders"], options=options),
        lambda: KafkaSink("b:9092", "copies", options=options),
        lambda: KafkaManifest("b:9092", "checkpoints", options=options),
    ]
    for door in doors:
        with pytest.raises(ConfigError, match=words) as refused:
            door()
        assert option.removeprefix("kafka.") in str(refused.value) and "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("kafka.fetch.max.byte", r"Did you mean 'fetch.max.bytes'\?"),
        ("kafka.ssl.truststore.locatoin", r"Did you mean 'ssl.truststore.location'\?"),
        ("startingOffset", r"Did you mean 'startingOffsets'\?"),
    ],
)
def test_the_format_s_reader_suggests_the_option_that_was_meant(option: str, words: str) -> None:
    given = {"kafka.bootstrap.servers": "b:9092", "subscribe": "orders", option: "9"}
    with pytest.raises(ConfigError, match=words):
        parse_stream(given)


def test_the_format_s_writer_suggests_the_option_that_was_meant() -> None:
    given = {"kafka.bootstrap.servers": "b:9092", "topic": "copies", "checkpointLocation": "/tmp/c"}
    value = T.StructType([T.StructField("value", T.StringType())])
    with pytest.raises(ConfigError, match=r"Did you mean 'compression.type'\?"):
        parse_sink({**given, "kafka.compresion.type": "zstd"}, value)
    assert parse_sink({**given, "kafka.buffer.memory": "1000000"}, value).topic == "copies"
