"""Properties files of Kafka's clients, and where their settings go."""

from __future__ import annotations

from pathlib import Path

import pytest

from flinkish_spark import KafkaProperties, KafkaSink, KafkaSource
from flinkish_spark.core.errors import ConfigError

FILE = r"""
# of the old job
bootstrap.servers = a:9092,\
    b:9092
security.protocol=SASL_PLAINTEXT
sasl.mechanism: PLAIN
sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \
    username="app" password="hunter2";
! of consumers
group.id=old
fetch.max.bytes=1000000
isolation.level=read_committed
request.timeout.ms=20000
linger.ms=5
compression.type=zstd
key.serializer=org.apache.kafka.common.serialization.StringSerializer
"""


def test_a_file_gives_sources_and_sinks_what_each_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "client.properties").write_text(FILE)
    found = KafkaProperties.read(tmp_path / "client.properties")
    assert found.bootstrap_servers == "a:9092,b:9092"
    assert set(found.options) == {
        *("security.protocol", "sasl.mechanism", "sasl.jaas.config", "request.timeout.ms"),
    }
    assert found.reader_options == {
        "kafka.fetch.max.bytes": "1000000",
        "kafka.request.timeout.ms": "20000",
    }
    assert found.producer == {"linger.ms": "5", "compression.type": "zstd", "request.timeout.ms": "20000"}
    assert found.others == ("group.id", "isolation.level", "key.serializer")
    assert "takes it: group.id, isolation.level, key.serializer" in caplog.text
    assert "hunter2" not in caplog.text + repr(found)
    source = KafkaSource(
        found.bootstrap_servers, ["in"], options=found.options, reader_options=found.reader_options
    )
    sink = KafkaSink(found.bootstrap_servers, "out", options=found.options, producer=found.producer)
    assert source.connection.servers == sink.connection.servers == "a:9092,b:9092"
    assert "hunter2" not in repr(source) + repr(sink)


def test_a_file_that_cannot_be_read_is_named_and_its_secrets_are_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.properties cannot be read.*No such file"):
        KafkaProperties.read(tmp_path / "nothing.properties")
    (tmp_path / "a.properties").write_bytes(b"a=\xff")
    with pytest.raises(ConfigError, match="It is not UTF-8"):
        KafkaProperties.read(tmp_path / "a.properties")
    (tmp_path / "a.properties").write_text(r"sasl.password=hunter2\u12x")
    with pytest.raises(ConfigError, match="no properties file") as refused:
        KafkaProperties.read(tmp_path / "a.properties")
    assert "hunter2" not in str(refused.value) and refused.value.__cause__ is None
