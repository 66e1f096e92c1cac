"""Secrets of Kafka and of a schema registry that are elsewhere: which are, who reads them, and when."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from flinkish_spark import EnvironmentSecret, FileSecret, JdbcSink, KafkaSource, SchemaRegistry
from flinkish_spark.connectors.formats.registry import _options
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.core.errors import ConfigError, EnvironmentFault

LOGIN = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "SCRAM-SHA-512"}
MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule required"


def connection(**options: object) -> KafkaConnection:
    return KafkaConnection("b:9092", options)  # type: ignore[arg-type]


def test_a_secret_is_read_where_a_client_is_made_and_each_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "key-password"
    file.write_text("first\n")
    monkeypatch.setenv("KEY", "-----BEGIN PRIVATE KEY-----")
    one = connection(**{"ssl.key.password": f"file:{file}", "kafka.ssl.keystore.key": "env:KEY"})
    assert one.to_java_options()["ssl.key.password"] == "first"
    assert one.to_spark_options()["kafka.ssl.keystore.key"] == "-----BEGIN PRIVATE KEY-----"
    file.write_text("second\n")
    assert one.to_java_options()["ssl.key.password"] == "second"
    assert "second" not in repr(one) and one.options["ssl.key.password"] == f"file:{file}"


@pytest.mark.parametrize("quote", ['"', "'"])
def test_a_password_within_a_login_may_be_elsewhere(quote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD", 'a"b\\c')
    jaas = f"{MODULE} username={quote}alice{quote} password={quote}env:WORD{quote};"
    one = connection(**LOGIN, **{"sasl.jaas.config": jaas})
    assert (
        one.to_java_options()["sasl.jaas.config"]
        == f'{MODULE} username={quote}alice{quote} password="a\\"b\\\\c";'
    )
    assert one.to_client_arguments()["sasl_plain_password"] == 'a"b\\c'


def test_a_whole_login_may_be_elsewhere_and_an_object_says_so_too(tmp_path: Path) -> None:
    file = tmp_path / "jaas"
    file.write_text(f'{MODULE} username="alice" password="word";\n')
    for value in (f"file:{file}", f"file://{file}", FileSecret(str(file))):
        found = connection(**LOGIN, **{"sasl.jaas.config": value}).to_client_arguments()
        assert (found["sasl_plain_username"], found["sasl_plain_password"]) == ("alice", "word")


def test_the_secret_of_an_oauth_client_may_be_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint's URL is none, although it may begin with file:."""
    monkeypatch.setenv("CLIENT", "hush")
    jaas = 'OAuthBearerLoginModule required clientId="job" clientSecret="{}" scope="env:CLIENT";'
    endpoint = {"sasl.oauthbearer.token.endpoint.url": "file:/tokens/job"}
    options = {"sasl.jaas.config": jaas.format("env:CLIENT"), **endpoint}
    assert connection(**options).to_java_options() == {
        "bootstrap.servers": "b:9092",
        "sasl.jaas.config": jaas.format("hush"),
        **endpoint,
    }


def test_a_task_gets_the_secret_itself_and_looks_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD", "env:ANOTHER")
    one = connection(**{"ssl.key.password": "env:WORD"})
    packed = pickle.dumps(one)
    monkeypatch.delenv("WORD")
    of_task = pickle.loads(packed)
    assert of_task.to_java_options()["ssl.key.password"] == "env:ANOTHER"
    assert pickle.loads(pickle.dumps(of_task)).to_java_options()["ssl.key.password"] == "env:ANOTHER"


def test_what_is_missing_or_names_no_place_is_refused_by_name(tmp_path: Path) -> None:
    for value in ("env:", "env:9", "file:relative", "file:"):
        with pytest.raises(ConfigError, match=r"the secret ssl\.key\.password names no place"):
            KafkaSource("b:9092", ["in"], options={"kafka.ssl.key.password": value})
    with pytest.raises(EnvironmentFault, match="environment variable FLINKISH_NO_SUCH is not set"):
        connection(**{"ssl.key.password": EnvironmentSecret("FLINKISH_NO_SUCH")}).to_java_options()
    with pytest.raises(EnvironmentFault, match="cannot be read"):
        connection(**{"ssl.key.password": f"file:{tmp_path}/none"}).to_java_options()


def test_what_is_no_secret_stays_as_it_is() -> None:
    assert connection(**{"client.id": "env:HOME"}).to_java_options()["client.id"] == "env:HOME"


def test_a_registry_and_a_database_take_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD", "hush")
    registry = SchemaRegistry("http://r:1", username="job", password="env:WORD")
    token = SchemaRegistry("http://r:1", token="env:WORD")
    assert _options(registry)["basic.auth.user.info"] == "job:hush"
    assert _options(token)["bearer.auth.token"] == "hush"
    sink = JdbcSink("jdbc:postgresql://h/d", "t", user="u", password="env:WORD")
    assert sink.password == EnvironmentSecret("WORD")
    packed = pickle.dumps(registry)
    monkeypatch.delenv("WORD")
    assert _options(pickle.loads(packed))["basic.auth.user.info"] == "job:hush"
    with pytest.raises(ConfigError, match="the secret token of the schema registry names no place"):
        SchemaRegistry("http://r:1", token="env:")
