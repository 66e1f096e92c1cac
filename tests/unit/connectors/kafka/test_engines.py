"""The reader and the writer of a job for which nobody chose them; which options they are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import types as T

from flinkish_spark import (
    Json,
    KafkaManifest,
    KafkaSink,
    KafkaSource,
    StreamExecutionEnvironment,
)
from flinkish_spark.connectors.kafka import source as sources
from flinkish_spark.connectors.kafka.client.settings import ProducerSettings
from flinkish_spark.connectors.kafka.format.options import parse_sink, parse_stream
from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.core.formats import Engine
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.sources import KafkaRecordsSource

PYTHON, JVM = Engine.PYTHON, Engine.JVM


class Session:
    """As much of a session as declaring a job asks of it."""

    readStream = None  # noqa: N815 - Spark's name
    sparkContext = None  # noqa: N815 - Spark's name
    _jvm = object()


def session(monkeypatch: pytest.MonkeyPatch, *, has_jars: bool) -> Any:
    monkeypatch.setattr(sources, "has_kafka_source", lambda spark: has_jars)
    return Session()


def declared(spark: Any, job_dir: Path, **chosen: Any) -> Engine:
    env = StreamExecutionEnvironment(spark, "orders", str(job_dir))
    source = KafkaSource("b:9092", ["orders"], value=Json("n LONG"), **chosen)
    env.from_source(source, uid="orders")
    (read,) = env.graph.sources
    return read.source.reader  # type: ignore[attr-defined, no-any-return]


def begin(job_dir: Path, source: str) -> None:
    JobDir(LocalStore(job_dir)).read_or_create_job({"job": "orders", "sources": [source]})


@pytest.mark.parametrize(
    ("has_jars", "chosen", "expected"),
    [
        (True, {}, JVM),
        (False, {}, PYTHON),
        (True, {"reader": "python"}, PYTHON),
        # Refused later, by the preflight, as it was: it was asked for by name.
        (False, {"reader": "jvm"}, JVM),
    ],
)
def test_a_new_job_takes_what_its_session_has_unless_somebody_chose(
    has_jars: bool, chosen: Any, expected: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert declared(session(monkeypatch, has_jars=has_jars), tmp_path, **chosen) == expected


@pytest.mark.parametrize("has_jars", [True, False])
def test_a_job_that_python_began_is_read_in_python_when_the_jars_have_come(
    has_jars: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin(tmp_path, "orders kafka-python")
    assert declared(session(monkeypatch, has_jars=has_jars), tmp_path) is PYTHON


def test_a_job_that_sparks_source_began_is_refused_by_name_when_the_jars_are_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin(tmp_path, "orders")
    assert declared(session(monkeypatch, has_jars=True), tmp_path) is JVM
    with pytest.raises(EnvironmentFault, match="'orders' was begun with Spark's Kafka source"):
        declared(session(monkeypatch, has_jars=False), tmp_path)


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
@pytest.mark.parametrize("reader", ["jvm", "python"])
def test_a_reader_option_that_is_not_known_to_be_harmless_is_refused(
    name: str, words: str, reader: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        KafkaSource("b:9092", ["orders"], reader=reader, reader_options={name: "4"})
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


@pytest.mark.parametrize("writer", ["jvm", "rust", "", Engine.PYTHON])
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
