"""Tokens for OAUTHBEARER: which options mean what, how long a token is kept, and that no secret shows."""

from __future__ import annotations

import base64
import json
import pickle
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka.errors import KafkaConnectionError

from flinkish_spark.connectors.kafka.client import oauth
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.oauth import Tokens, TokenSource
from flinkish_spark.core.errors import AuthorizationError, ConfigError
from tests.support.clocks import ManualClock
from tests.support.token_endpoint import TokenEndpoint

SECRET = "s3cr/et+x"


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenEndpoint]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(oauth, "_known", {})
    with TokenEndpoint({"job": SECRET}) as made:
        yield made


def tokens_of(options: dict[str, str]) -> Tokens:
    found = KafkaConnection("b:1", options).to_client_arguments()["sasl_oauth_token_provider"]
    assert isinstance(found, Tokens)
    return found


def tokens(endpoint: TokenEndpoint, clock: ManualClock, **more: Any) -> Tokens:
    source = TokenSource(endpoint.url, "job", SECRET, **more)
    return Tokens(source, {}, lambda _options: pytest.fail("no TLS"), clock=clock)


def claims(token: str) -> Any:
    part = token.split(".")[1]
    return json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))


def test_a_token_comes_from_the_endpoint_with_scope_and_extensions(endpoint: TokenEndpoint) -> None:
    found = tokens_of(endpoint.options("job", more='scope="a b" extension_tenant="x"'))
    assert claims(found.token())["sub"] == "job"
    assert endpoint.asked == ["a b"]
    assert found.extensions() == {"tenant": "x"}
    assert (
        endpoint.heads[0]["Authorization"] == "Basic " + base64.b64encode(f"job:{SECRET}".encode()).decode()
    )


def test_a_token_is_kept_for_four_fifths_of_its_life_by_all_of_a_process(endpoint: TokenEndpoint) -> None:
    clock = ManualClock(1_000)
    first = tokens(endpoint, clock).token()
    clock.now_ms += 3_600_000 * 4 // 5 - 1
    assert tokens(endpoint, clock).token() == first
    assert len(endpoint.asked) == 1
    clock.now_ms += 1
    tokens(endpoint, clock).token()
    assert len(endpoint.asked) == 2
    tokens(endpoint, clock, scope="other").token()
    assert endpoint.asked == ["", "", "other"]


@pytest.mark.parametrize(
    ("claimed", "answered", "life_ms"),
    [
        ({"iat": 10, "exp": 20}, {}, 10_000),
        ({"iat": 10, "exp": 20}, {"expires_in": 5}, 5_000),
        ({}, {"expires_in": "soon"}, 0),
        ({}, {}, 0),
    ],
)
def test_how_long_a_token_lives(claimed: Any, answered: Any, life_ms: int) -> None:
    part = base64.urlsafe_b64encode(json.dumps(claimed).encode()).decode().rstrip("=")
    assert oauth._life_ms(f"x.{part}.y", answered) == life_ms
    assert oauth._life_ms("opaque", {}) == 0


def test_a_file_is_read_each_time(tmp_path: Path, endpoint: TokenEndpoint) -> None:
    file = tmp_path / "to ken"
    options = endpoint.options("job") | {"sasl.oauthbearer.token.endpoint.url": file.as_uri()}
    options["sasl.jaas.config"] = (
        "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;"
    )
    found = tokens_of(options)
    with pytest.raises(KafkaConnectionError, match="FileNotFoundError"):
        found.token()
    for content in ("a.b.c\n", "d.e.f"):
        file.write_text(content)
        assert found.token() == content.strip()
    file.write_text("not a\ntoken")
    with pytest.raises(KafkaConnectionError) as refused:
        found.token()
    assert "not a" not in str(refused.value)


def test_a_refusal_is_one_and_says_no_secret(endpoint: TokenEndpoint) -> None:
    found = tokens_of(endpoint.options("job", secret="wrong-one"))
    with pytest.raises(AuthorizationError, match=r"gives the client 'job' no token.*401") as refused:
        found.token()
    assert "wrong-one" not in str(refused.value) and refused.value.__cause__ is None


@pytest.mark.parametrize("status", [302, 429, 500, 503])
def test_another_answer_is_an_outage_and_no_redirect_is_followed(
    endpoint: TokenEndpoint, status: int
) -> None:
    """A redirect would carry the secret to whom it names."""
    with TokenEndpoint({"job": SECRET}) as other:
        endpoint.status, endpoint.location = status, other.url
        with pytest.raises(KafkaConnectionError, match=str(status)):
            tokens_of(endpoint.options("job")).token()
        assert not other.heads


@pytest.mark.parametrize(
    "body", [b"no json", b"{}", b"[]", b'{"access_token": "a b"}', b'{"access_token": 5}']
)
def test_an_answer_without_a_token_is_an_outage_and_is_not_shown(
    endpoint: TokenEndpoint, body: bytes
) -> None:
    endpoint.body = body
    with pytest.raises(KafkaConnectionError, match="has no access_token"):
        tokens_of(endpoint.options("job")).token()


def test_an_endpoint_that_is_not_there_is_an_outage(endpoint: TokenEndpoint) -> None:
    options = endpoint.options("job") | {
        "sasl.oauthbearer.token.endpoint.url": "http://127.0.0.1:1/token?k=v"
    }
    with pytest.raises(KafkaConnectionError, match=r"127\.0\.0\.1:1/token did not answer") as gone:
        tokens_of(options).token()
    assert "k=v" not in str(gone.value)


@pytest.mark.parametrize(
    "answer", [b"no HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\ncut", b""]
)
def test_an_endpoint_that_speaks_no_http_is_an_outage(endpoint: TokenEndpoint, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/token"

        def serve() -> None:
            with server.accept()[0] as caller:
                caller.recv(65_536)
                caller.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        options = endpoint.options("job") | {"sasl.oauthbearer.token.endpoint.url": url}
        with pytest.raises(KafkaConnectionError, match="token endpoint"):
            tokens_of(options).token()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sasl.login.callback.handler.class": ""}, "callback.handler.class' is missing.*unsecured"),
        ({"sasl.login.callback.handler.class": "org.example.Mine"}, "a handler of your own"),
        ({"sasl.oauthbearer.token.endpoint.url": ""}, "endpoint.url' is missing"),
        ({"sasl.oauthbearer.token.endpoint.url": "ftp://x/y"}, "endpoint.url' cannot be used"),
        ({"sasl.jaas.config": "PlainLoginModule required clientId=a clientSecret=b;"}, "jaas.config"),
        ({"sasl.jaas.config": "OAuthBearerLoginModule required clientId=a;"}, "jaas.config"),
        (
            {"sasl.jaas.config": "OAuthBearerLoginModule required clientId=a clientSecret=b extension_a1=c;"},
            "extension 'a1'",
        ),
        ({"sasl.oauthbearer.jwks.endpoint.url": "http://x"}, "jwks"),
    ],
)
def test_what_cannot_be_used_is_named(endpoint: TokenEndpoint, change: dict[str, str], words: str) -> None:
    options = {name: value for name, value in {**endpoint.options("job"), **change}.items() if value}
    with pytest.raises(ConfigError, match=words) as refused:
        KafkaConnection("b:1", options).to_client_arguments()
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "option",
    [
        "sasl.login.connect.timeout.ms",
        "sasl.login.read.timeout.ms",
        "sasl.login.refresh.window.factor",
        "sasl.login.retry.backoff.ms",
        "sasl.oauthbearer.header.urlencode",
        "sasl.oauthbearer.sub.claim.name",
    ],
)
def test_options_that_java_alone_has_are_refused_by_name(endpoint: TokenEndpoint, option: str) -> None:
    with pytest.raises(ConfigError) as refused:
        KafkaConnection("b:1", {**endpoint.options("job"), f"kafka.{option}": "0.5"})
    assert str(refused.value) == (
        f"Kafka option {option!r} cannot be used. Of Java's login handler Python has only "
        "sasl.login.callback.handler.class and sasl.oauthbearer.token.endpoint.url. To do: leave it out."
    )


def test_the_endpoints_tls_is_that_of_the_jaas_entry(endpoint: TokenEndpoint, tmp_path: Path) -> None:
    more = f'ssl.truststore.type=PEM ssl.truststore.location="{tmp_path}/no.pem"'
    options = endpoint.options("job", more=more)
    options["sasl.oauthbearer.token.endpoint.url"] = "https://127.0.0.1:1/token"
    with pytest.raises(ConfigError, match=r"ssl\.truststore\.location"):
        tokens_of(options).token()


def test_nothing_of_a_login_is_printed_and_a_task_can_have_it(endpoint: TokenEndpoint) -> None:
    connection = KafkaConnection("b:1", endpoint.options("job"))
    found = tokens_of(endpoint.options("job"))
    found.token()
    for thing in (connection, found, found._source, oauth._known):
        assert SECRET not in repr(thing) and found.token() not in repr(thing)
    assert pickle.loads(pickle.dumps(connection)) == connection
