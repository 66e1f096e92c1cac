"""What only a broker can tell is refused before anything starts, with one message and no trace."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from kafka.admin import KafkaAdminClient

from flinkish_spark import CheckpointConfig, DeadLetter, Json, KafkaSink, MemorySink
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.core.errors import AuthorizationError, ConfigError, FlinkishError, GraphError
from flinkish_spark.testing.broker import LocalBroker
from tests.support.jobs import (
    ORDER,
    environment,
    failure_of,
    order,
    orders_source,
    produce,
    read_committed,
    run_until,
)
from tests.support.services import BROKER_JARS


def copy_job(spark, job_dir, servers, source: str, sink: str, *, value=None, **settings):
    """Orders from one topic to another."""
    options = settings.pop("options", {})
    env = environment(spark, job_dir, **settings.pop("environment", {}))
    orders = orders_source(servers, source, value=value or Json(ORDER), options=options)
    stream = env.from_source(orders, uid="orders")
    stream.sink_to(KafkaSink(servers, sink, options=options, **settings), uid="copy")
    return env


def assert_refused(env, kind, job_dir: Path, *parts: str) -> FlinkishError:
    error = failure_of(env)
    assert type(error) is kind, repr(error)
    assert all(part in str(error) for part in parts), str(error)
    assert not job_dir.exists(), sorted(job_dir.iterdir())
    return error


def topics_of(servers) -> set[str]:
    admin = KafkaAdminClient(bootstrap_servers=servers)
    try:
        return set(admin.list_topics())
    finally:
        admin.close()


def test_unknown_topics_and_a_corrected_retry(spark, broker, topic, job_dir) -> None:
    """The refused job leaves nothing, on the broker or on disk, and its correction just runs."""
    servers, known, out = broker.bootstrap_servers, topic(), topic()
    refused = copy_job(spark, job_dir, servers, "no-such-input", out)
    assert_refused(refused, GraphError, job_dir, "'no-such-input' of source 'orders'", servers, "create it")
    refused = copy_job(spark, job_dir, servers, known, "no-such-output")
    assert_refused(refused, GraphError, job_dir, "'no-such-output' of sink 'copy'", "create it")
    dead_letters = DeadLetter("no-such-letters")
    refused = copy_job(spark, job_dir, servers, known, out, on_oversize=dead_letters)
    assert_refused(refused, GraphError, job_dir, "'no-such-letters'")
    refused = copy_job(spark, job_dir, servers, known, out, value=Json(ORDER, on_bad_record=dead_letters))
    assert_refused(refused, GraphError, job_dir, "'no-such-letters'")
    assert not [name for name in topics_of(servers) if name.startswith("no-such")]
    produce(servers, known, [order("ann")])
    run_until(copy_job(spark, job_dir, servers, known, out), lambda c: c.progress.rows_by_sink.get("copy"))


def test_a_dead_letter_topic_that_is_a_source(spark, broker, topic, job_dir) -> None:
    servers, source, out = broker.bootstrap_servers, topic(), topic()
    value = Json(ORDER, on_bad_record=DeadLetter(source))
    assert_refused(
        copy_job(spark, job_dir, servers, source, out, value=value), GraphError, job_dir, "dead-letter"
    )
    env = copy_job(spark, job_dir, servers, source, out, on_oversize=DeadLetter(source))
    assert_refused(env, GraphError, job_dir, "read and written")


def test_a_uid_that_the_dead_letters_need(spark, broker, topic, job_dir) -> None:
    servers, source, out, letters = broker.bootstrap_servers, topic(), topic(), topic()
    value = Json(ORDER, on_bad_record=DeadLetter(letters))
    env = copy_job(spark, job_dir, servers, source, out, value=value)
    other = env.from_source(orders_source(servers, topic()), uid="orders-dead-letter")
    other.sink_to(MemorySink("other"), uid="other")
    assert_refused(env, GraphError, job_dir, "'orders-dead-letter' is used twice")


def test_a_transaction_timeout_above_the_brokers_maximum(spark, broker, topic, job_dir) -> None:
    """The broker's default maximum is 15 minutes."""
    env = copy_job(spark, job_dir, broker.bootstrap_servers, topic(), topic(), transaction_timeout_ms=900_001)
    assert_refused(env, ConfigError, job_dir, "900001", "900000", "transaction.max.timeout.ms", "lower")


def test_a_transaction_timeout_below_interval_and_budget(spark, broker, topic, job_dir) -> None:
    checkpoint = CheckpointConfig(interval_ms=10_000, restart_budget_ms=20_000)
    env = copy_job(
        spark,
        job_dir,
        broker.bootstrap_servers,
        topic(),
        topic(),
        transaction_timeout_ms=29_999,
        environment={"checkpoint": checkpoint},
    )
    assert_refused(env, ConfigError, job_dir, "29999", "30000")


# -- rights -----------------------------------------------------------------------------------------


def login(user: str) -> dict[str, str]:
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.jaas.config": f'{module} required username="{user}" password="{user}-secret";',
    }


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A broker that asks who you are: `admin` may all, the others what a test allows them."""
    users = " ".join(f'user_{user}="{user}-secret"' for user in ("admin", "app", "atomic"))
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    broker = LocalBroker(
        tmp_path_factory.mktemp("guarded"),
        jars_dir=BROKER_JARS,
        extra_properties={
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            # The plain listener is for the fixture; its nameless user is a super user as well.
            "super.users": "User:admin;User:ANONYMOUS",
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.security.protocol.map": ",".join(
                ["CONTROLLER:PLAINTEXT", "PLAINTEXT:PLAINTEXT", "GUARDED:SASL_PLAINTEXT"]
            ),
            "listener.name.guarded.plain.sasl.jaas.config": f"{module} required {users};",
            "inter.broker.listener.name": "PLAINTEXT",
        },
    )
    port = free_port()
    for setting in ("listeners", "advertised.listeners"):
        plain = f"PLAINTEXT://{broker.bootstrap_servers}"
        controller = f",CONTROLLER://127.0.0.1:{broker._controller_port}" if setting == "listeners" else ""
        broker._extra[setting] = f"{plain},GUARDED://127.0.0.1:{port}{controller}"
    with broker:
        yield broker.bootstrap_servers, f"127.0.0.1:{port}"


def free_port() -> int:
    from flinkish_spark.testing.broker import free_port

    return free_port()


def allow(servers: str, *grants: tuple[str, str, tuple[str, ...]], user: str = "app") -> None:
    """Give somebody rights: resource type, name prefix, operations."""
    from kafka.admin import (
        ACL,
        ACLOperation,
        ACLPermissionType,
        ACLResourcePatternType,
        ResourcePattern,
        ResourceType,
    )

    admin = KafkaAdminClient(bootstrap_servers=servers)
    acls = [
        ACL(
            principal=f"User:{user}",
            host="*",
            operation=ACLOperation[operation],
            permission_type=ACLPermissionType.ALLOW,
            resource_pattern=ResourcePattern(ResourceType[kind], name, ACLResourcePatternType.PREFIXED),
        )
        for kind, name, operations in grants
        for operation in operations
    ]
    admin.create_acls(acls)
    admin.close()
    time.sleep(1)


@pytest.mark.nightly
def test_no_right_on_the_transactional_id(spark, guarded, job_dir, caplog) -> None:
    """One message that names the right; and with the right, the same job runs."""
    plain, servers = guarded
    with KafkaAdmin(KafkaConnection(plain)) as admin:
        for name in ("in", "out"):
            admin.create_topic(name, 1)
    topic_rights = ("READ", "WRITE", "DESCRIBE", "DESCRIBE_CONFIGS")
    allow(plain, ("TOPIC", "in", topic_rights), ("TOPIC", "out", topic_rights), ("GROUP", "", ("READ",)))
    env = copy_job(spark, job_dir, servers, "in", "out", options=login("app"))
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        error = assert_refused(env, AuthorizationError, job_dir, "transactional id", "WRITE", "'flinkish-'")
    assert time.monotonic() - began < 20 and not error.restartable
    assert "\n" not in str(error) and "app-secret" not in str(error) + caplog.text
    assert len(caplog.records) <= 1, caplog.text

    allow(plain, ("TRANSACTIONAL_ID", "flinkish-", ("WRITE", "DESCRIBE")))
    produce(plain, "in", [order("ann")])
    env = copy_job(spark, job_dir, servers, "in", "out", options=login("app"))
    run_until(env, lambda c: c.progress.rows_by_sink.get("copy"))
    assert len(read_committed(plain, "out")) == 1


@pytest.mark.nightly
def test_the_rights_of_an_atomic_sink(spark, guarded, job_dir) -> None:
    """Those that docs/kafka-sink.md lists, each of which is missed by name; with them the job writes."""
    plain, servers = guarded
    names = ("atomic-in", "atomic-out")
    with KafkaAdmin(KafkaConnection(plain)) as admin:
        for name in names:
            admin.create_topic(name, 2)
    produce(plain, "atomic-in", [order("ann"), order("bob")])

    def job():
        env = environment(spark, job_dir, job="atomic")
        login_of_it = login("atomic")
        orders = orders_source(servers, "atomic-in", group_id="atomic-group", options=login_of_it)
        stream = env.from_source(orders, uid="orders")
        sink = KafkaSink(servers, "atomic-out", atomic=True, options=login_of_it)
        stream.sink_to(sink, uid="copy")
        return env

    allow(plain, ("TOPIC", "atomic-in", ("READ",)), ("GROUP", "atomic-", ("DESCRIBE",)), user="atomic")
    missing = (
        (("TOPIC", "atomic-", ("WRITE",)), ("atomic-out", "allows READ on it for a source, WRITE")),
        (("TOPIC", "atomic-", ("READ",)), ("READ on the topic 'atomic-out'", "DescribeProducers")),
        (("TRANSACTIONAL_ID", "flinkish-", ("WRITE", "DESCRIBE")), ("transactional id", "'flinkish-'")),
    )
    for right, parts in missing:
        assert_refused(job(), AuthorizationError, job_dir, *parts)
        allow(plain, right, user="atomic")
    error = failure_of(job())
    assert isinstance(error, AuthorizationError) and "READ on the consumer group atomic-group" in str(error)
    assert "atomic-secret" not in str(error) and read_committed(plain, "atomic-out") == []
    allow(plain, ("GROUP", "atomic-", ("READ",)), user="atomic")
    run_until(job(), lambda c: c.progress.rows_by_sink.get("copy"))
    assert len(read_committed(plain, "atomic-out")) == 2
    with KafkaAdmin(KafkaConnection(plain)) as admin:
        assert sum(admin.committed_offsets("atomic-group").values()) == 2


def test_a_login_that_is_refused(spark, guarded, job_dir) -> None:
    _, servers = guarded
    env = copy_job(spark, job_dir, servers, "in", "out", options=login("stranger"))
    error = assert_refused(env, AuthorizationError, job_dir, servers, "refuses the login", "sasl.jaas.config")
    assert "stranger-secret" not in str(error)
