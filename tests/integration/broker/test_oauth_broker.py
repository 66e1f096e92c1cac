"""OAUTHBEARER on a broker that checks signatures: one set of options for Python's clients and Java's."""

from __future__ import annotations

import itertools
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

from flinkish_spark import Json, KafkaSink, KafkaSource
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.client import KafkaWire
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.core.errors import AuthorizationError
from tests.support.jobs import ORDER, environment, order, read_committed, rows, run_until
from tests.support.oauth_broker import OAuthBroker
from tests.support.services import BROKER_JARS
from tests.support.token_endpoint import TokenEndpoint

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.nightly(by_day="tests/unit/connectors/kafka/test_oauth.py"),
]
SECRET = "of-the-job"
#: A client must log in again so often.
SESSION_MS = 4_000


@pytest.fixture(scope="module")
def endpoint() -> Iterator[TokenEndpoint]:
    with pytest.MonkeyPatch.context() as patch, TokenEndpoint({"job": SECRET}) as made:
        patch.setenv("no_proxy", "127.0.0.1")
        yield made


@pytest.fixture(scope="module")
def guarded(endpoint: TokenEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OAuthBroker]:
    place = tmp_path_factory.mktemp("oauth")
    keys = endpoint.write_keys(place / "keys.json")
    with OAuthBroker(place / "broker", jars_dir=BROKER_JARS, keys=keys, session_ms=SESSION_MS) as broker:
        yield broker


def created(connection: KafkaConnection, partitions: int = 2) -> str:
    name = f"topic-{uuid.uuid4().hex[:8]}"
    with KafkaAdmin(connection) as admin:
        admin.create_topic(name, partitions)
    return name


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "default"])
def test_a_job_logs_in_by_tokens_and_outlives_its_sessions(
    spark: Any, guarded: OAuthBroker, endpoint: TokenEndpoint, tmp_path: Path, atomic: bool
) -> None:
    servers, options = guarded.bootstrap_servers, endpoint.options("job")
    connection = KafkaConnection(servers, options)
    source, target = created(connection), created(connection)
    producer = KafkaProducer(**connection.to_client_arguments(), acks="all")
    env = environment(spark, tmp_path / "job")
    read = KafkaSource(servers, [source], value=Json(ORDER), options=options, group_id="g")
    sink = KafkaSink(servers, target, key="user", value=Json(), options=options, atomic=atomic)
    env.from_source(read, uid="orders").sink_to(sink, uid="out")
    sent = iter(range(40))

    def all_there(client: Any) -> bool:
        # For longer than three sessions.
        for number in itertools.islice(sent, 2):
            producer.send(source, order(f"u{number}", number)).get(timeout=20)
        time.sleep(0.5)
        return rows(client, "out") >= 40

    began = time.monotonic()
    run_until(env, all_there)
    producer.close()
    assert time.monotonic() - began > 2 * SESSION_MS / 1000
    seen = Counter(record.key.decode() for record in read_committed(connection.to_client_arguments(), target))
    assert seen == Counter(f"u{number}" for number in range(40))


def test_a_token_that_has_expired_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens live for six seconds, and the connection for twenty."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with TokenEndpoint({"brief": SECRET}, life_s=6) as brief:
        keys = brief.write_keys(tmp_path / "keys.json")
        with OAuthBroker(tmp_path / "broker", jars_dir=BROKER_JARS, keys=keys, session_ms=60_000) as broker:
            wire = KafkaWire(KafkaConnection(broker.bootstrap_servers, brief.options("brief")))
            end = time.monotonic() + 20
            while time.monotonic() < end:
                assert wire.verifies_partitions()
                wire.list_transactions()
                time.sleep(0.1)
            wire.close()
        assert len(brief.asked) >= 4


def test_a_wrong_secret_and_somebody_elses_token_are_refused(
    guarded: OAuthBroker, endpoint: TokenEndpoint
) -> None:
    began = time.monotonic()
    servers = guarded.bootstrap_servers
    with (
        pytest.raises(AuthorizationError, match="no token"),
        KafkaAdmin(KafkaConnection(servers, endpoint.options("job", secret="wrong"))) as admin,
    ):
        admin.topics(["t"])
    # Signed, but by another key.
    with (
        TokenEndpoint({"job": SECRET}) as forger,
        pytest.raises(AuthorizationError, match="refuses the login"),
        KafkaAdmin(KafkaConnection(servers, forger.options("job"))) as admin,
    ):
        admin.topics(["t"])
    assert time.monotonic() - began < 16
