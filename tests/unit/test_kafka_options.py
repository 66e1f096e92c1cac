"""KafkaConnection: one description, three spellings, and no secret ever printed."""

from __future__ import annotations

import copy
import pickle

import pytest

from flinkish_spark.errors import ConfigError
from flinkish_spark.kafka import KafkaConnection

JAAS = (
    "org.apache.kafka.common.security.scram.ScramLoginModule required "
    'username="alice" password="s3cr\\"et=x";'
)


def sasl(**more: str) -> KafkaConnection:
    return KafkaConnection(
        "b1:9092, b2:9093",
        {
            "kafka.security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "kafka.sasl.jaas.config": JAAS,
            **more,
        },
    )


def test_spark_gets_prefixed_names() -> None:
    assert sasl().for_spark() == {
        "kafka.bootstrap.servers": "b1:9092,b2:9093",
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "SCRAM-SHA-512",
        "kafka.sasl.jaas.config": JAAS,
    }


def test_java_gets_bare_names() -> None:
    properties = sasl().for_java()
    assert properties["bootstrap.servers"] == "b1:9092,b2:9093"
    assert properties["sasl.jaas.config"] == JAAS


def test_python_gets_keyword_arguments() -> None:
    assert sasl(**{"kafka.client.id": "me", "request.timeout.ms": "5000"}).for_python() == {
        "bootstrap_servers": ["b1:9092", "b2:9093"],
        "client_id": "me",
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "alice",
        "sasl_plain_password": 's3cr"et=x',
        "request_timeout_ms": 5000,
    }


def test_python_gets_pem_files() -> None:
    connection = KafkaConnection(
        ["b:1"],
        {
            "kafka.ssl.truststore.location": "ca.pem",
            "kafka.ssl.truststore.type": "PEM",
            "kafka.ssl.keystore.location": "me.pem",
            "kafka.ssl.keystore.type": "pem",
            "kafka.ssl.key.password": "hush",
            "kafka.ssl.endpoint.identification.algorithm": "",
        },
    )
    assert connection.for_python() == {
        "bootstrap_servers": ["b:1"],
        "ssl_cafile": "ca.pem",
        "ssl_certfile": "me.pem",
        "ssl_keyfile": "me.pem",
        "ssl_password": "hush",
        "ssl_check_hostname": False,
    }
    assert "hush" not in repr(connection)
    assert "me.pem" in repr(connection)


def test_a_store_that_python_cannot_read_is_refused() -> None:
    connection = KafkaConnection("b:1", {"ssl.truststore.location": "ca.jks"})
    with pytest.raises(ConfigError, match=r"ssl\.truststore\.location.*JKS.*PEM"):
        connection.for_python()


@pytest.mark.parametrize("text", [repr, str, "{}".format, "{!r}".format])
def test_secrets_are_not_printed(text: object) -> None:
    connection = sasl(**{"ssl.key.password": "hush", "sasl.oauthbearer.token": "hush", "my.secret": "hush"})
    printed = text(connection)  # type: ignore[operator]
    assert "s3cr" not in printed
    assert "hush" not in printed
    assert "SCRAM-SHA-512" in printed


def test_secrets_are_not_in_error_messages() -> None:
    wrong = [
        {"sasl.jaas.config": 'Other required username="a" password="hush";'},
        {"sasl.jaas.config": "PlainLoginModule required password=hush;"},
        {"my.password": "hush"},
    ]
    for options in wrong:
        with pytest.raises(ConfigError) as caught:
            KafkaConnection("b:1", options).for_python()
        assert "hush" not in str(caught.value)
        assert next(iter(options)) in str(caught.value)
    with pytest.raises(ConfigError) as twice:
        KafkaConnection("b:1", {"my.password": "hush", "kafka.my.password": "hush2"})
    assert "hush" not in str(twice.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kafka.acks": "all"}, "'acks' cannot be used"),
        ({"group.id": "g"}, "'group.id' cannot be used"),
        ({"security.protocol": "TLS"}, "use one of PLAINTEXT"),
        ({"sasl.mechanism": "GSSAPI"}, "use one of PLAIN"),
        ({"request.timeout.ms": "5s"}, "whole number"),
    ],
)
def test_what_python_does_not_know_is_named(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KafkaConnection("b:1", options).for_python()


@pytest.mark.parametrize("servers", ["", "b", "b:x", "b:0", "b:70000", [], ["b:1", ""], None, 9092, "b 1:9"])
def test_unusable_servers_are_refused(servers: object) -> None:
    with pytest.raises(ConfigError, match="bootstrap"):
        KafkaConnection(servers)  # type: ignore[arg-type]


@pytest.mark.parametrize("servers", ["b:1", "10.0.0.1:9092", "[::1]:9092", "SSL://b.example.com:9093"])
def test_usable_servers(servers: str) -> None:
    assert KafkaConnection(servers).servers == servers


def test_options_must_be_strings_and_given_once() -> None:
    with pytest.raises(ConfigError, match="must be a string, not int"):
        KafkaConnection("b:1", {"request.timeout.ms": 5})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="bootstrap_servers only"):
        KafkaConnection("b:1", {"kafka.bootstrap.servers": "b:2"})


def test_it_is_a_value() -> None:
    assert sasl() == sasl()
    assert hash(sasl()) == hash(sasl())
    assert copy.copy(sasl()) == sasl() == pickle.loads(pickle.dumps(sasl()))
    with pytest.raises(TypeError):
        sasl().options["x"] = "y"  # type: ignore[index]
