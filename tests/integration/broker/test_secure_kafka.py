"""TLS and logins, on a broker that insists: Python's clients and Java's take one set of options."""

from __future__ import annotations

import logging
import stat
import subprocess
import time
import uuid
from pathlib import Path

import pytest
from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient, UserScramCredentialUpsertion

from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import Evidence, KafkaCommittable, TransactionClient
from flinkish_spark.core.errors import AuthorizationError, ConfigError, FlinkishError, RetriableError
from flinkish_spark.protocol.ids import JobUuid, OwnerEpoch, TransactionalId
from flinkish_spark.protocol.records import Outcome
from tests.support.jobs import read_committed
from tests.support.secure_broker import SecureBroker
from tests.support.tls import LocalCertificates, make_certificates

from .conftest import BROKER_JARS

WRONG = "not-the-password"
USERS = {"alice": "wonderland"}


@pytest.fixture(params=["PLAIN", "SCRAM-SHA-512"])
def login(request: pytest.FixtureRequest, secured: SecureBroker) -> dict[str, str]:
    return secured.login("alice", request.param)


def certificate_login(certificates: LocalCertificates) -> dict[str, str]:
    return {
        "security.protocol": "SSL",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(certificates.authority),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(certificates.client),
    }


def in_texts(options: dict[str, str]) -> dict[str, str]:
    """Return the same options without a file."""
    changed = dict(options)
    changed["ssl.truststore.certificates"] = Path(changed.pop("ssl.truststore.location")).read_text()
    if "ssl.keystore.location" in changed:
        key, begin, certificate = (
            Path(changed.pop("ssl.keystore.location")).read_text().partition("-----BEGIN CERT")
        )
        changed |= {"ssl.keystore.key": key, "ssl.keystore.certificate.chain": begin + certificate}
    return changed


def new_topic(servers: str, options: dict[str, str]) -> str:
    name = f"topic-{uuid.uuid4().hex[:12]}"
    with KafkaAdmin(KafkaConnection(servers, options)) as admin:
        admin.create_topic(name, 1)
    return name


def refusal(servers: str, options: dict[str, str], caplog: pytest.LogCaptureFixture) -> FlinkishError:
    """Connect in vain, which must take one attempt and be told by one error alone."""
    began = time.monotonic()
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(FlinkishError) as caught,
        KafkaAdmin(KafkaConnection(servers, options)) as admin,
    ):
        admin.topics(["t"])
    # Kafka itself answers a wrong password after 0.1 s; a repeated attempt would fill 15 s.
    assert time.monotonic() - began < 8
    assert not caplog.records
    # Certificates may be renewed on either side; a refusal that comes back ends the job.
    assert (
        caught.value.restartable
        is caught.value.ends_when_repeated
        is isinstance(caught.value, RetriableError)
    )
    assert "\n" not in str(caught.value)
    assert WRONG not in str(caught.value) and WRONG not in repr(caught.value.__cause__)
    return caught.value


# -- what works -------------------------------------------------------------------------------------


def test_questions(secured: SecureBroker, login: dict[str, str]) -> None:
    name = new_topic(secured.bootstrap_servers, login)
    connection = KafkaConnection(secured.bootstrap_servers, login)
    producer = KafkaProducer(**connection.to_client_arguments())
    producer.send(name, b"v").get(timeout=10)
    producer.close()
    with KafkaAdmin(connection) as admin:
        assert admin.topics([name, "no-such-topic"]).keys() == {name}
        assert admin.end_offsets([(name, 0)]) == {(name, 0): 1}


@pytest.mark.parametrize(("verb", "visible"), [("commit", 3), ("abort", 0)])
def test_transactions_that_a_task_prepared(
    secured: SecureBroker, login: dict[str, str], verb: str, visible: int
) -> None:
    name = new_topic(secured.bootstrap_servers, login)
    connection = KafkaConnection(secured.bootstrap_servers, login)
    transaction = str(TransactionalId(JobUuid(uuid.uuid4().hex), OwnerEpoch(1), 0, 0, 0))
    producer = KafkaProducer(**connection.to_client_arguments(), transactional_id=transaction, acks="all")
    producer.init_transactions()
    producer.begin_transaction()
    last = [producer.send(name, b"%d" % n, partition=0) for n in range(3)][-1].get(timeout=10)
    grant = producer._transaction_manager.producer_id_and_epoch
    prepared = KafkaCommittable(
        transaction, grant.producer_id, grant.epoch, Evidence(name, 0, last.offset), 3
    )
    with TransactionClient(connection) as client, KafkaAdmin(connection) as admin:
        assert client.is_alive([prepared])[prepared].alive
        assert admin.end_offsets([(name, 0)]) == {(name, 0): 0}
        assert getattr(client, verb)(prepared).outcome is Outcome.COMMITTED
        assert getattr(client, verb)(prepared).outcome.is_done
        # Records and the marker behind them; of an aborted transaction a reader sees the marker only.
        assert admin.end_offsets([(name, 0)]) == {(name, 0): 4}
    assert len(read_committed(connection.to_client_arguments(), name)) == visible
    producer.close(timeout=1)


@pytest.mark.parametrize("given", [dict, in_texts])
def test_a_certificate_is_a_login(secured: SecureBroker, certificates: LocalCertificates, given) -> None:
    options = given(certificate_login(certificates))
    new_topic(secured.certificate_servers, options)


def test_a_name_and_a_password_that_need_escapes(
    secured: SecureBroker, certificates: LocalCertificates
) -> None:
    user, password = "a,b=c d", 'say "\\ö\t\\n=,;'
    connection = KafkaConnection(secured.bootstrap_servers, secured.login("alice"))
    with KafkaAdminClient(**connection.to_client_arguments()) as admin:
        made = admin.alter_user_scram_credentials(
            [UserScramCredentialUpsertion(user, "SCRAM-SHA-512", password)]
        )
    assert made == {user: None}
    quoted = password.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t")
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    options = {
        **secured.login("alice"),
        "sasl.jaas.config": f'{module} required username="{user}" password="{quoted}";',
    }
    name = new_topic(secured.bootstrap_servers, options)
    assert name in topics_of_a_java_client(secured.bootstrap_servers, options, certificates.client.parent)


def test_even_a_talkative_log_does_not_hold_the_password(
    secured: SecureBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Of SCRAM; PLAIN sends the password, and at this level kafka-python prints what it sends."""
    with caplog.at_level(logging.DEBUG, logger="kafka"):
        new_topic(secured.bootstrap_servers, secured.login("alice"))
    assert "sasl_plain_password" in caplog.text
    assert "wonderland" not in caplog.text


# -- what is refused --------------------------------------------------------------------------------


def test_a_wrong_password(secured: SecureBroker, login: dict[str, str], caplog) -> None:
    servers = secured.bootstrap_servers
    wrong = {**login, "sasl.jaas.config": login["sasl.jaas.config"].replace("wonderland", WRONG)}
    error = refusal(servers, wrong, caplog)
    assert type(error) is AuthorizationError
    assert all(part in str(error) for part in (servers, "sasl.jaas.config", "uthentication failed"))
    with TransactionClient(KafkaConnection(servers, wrong)) as client, pytest.raises(AuthorizationError):
        client.list_open_transactions(JobUuid(uuid.uuid4().hex))


def test_an_authority_that_is_not_trusted(secured: SecureBroker, tmp_path: Path, caplog) -> None:
    other = make_certificates(tmp_path)
    options = {**secured.login("alice"), "ssl.truststore.location": str(other.authority)}
    error = refusal(secured.bootstrap_servers, options, caplog)
    assert type(error) is RetriableError
    assert "certificate is not accepted" in str(error) and "ssl.truststore.location" in error.what_to_do


def test_a_host_name_that_the_certificate_does_not_hold(secured: SecureBroker, caplog) -> None:
    servers = secured.bootstrap_servers.replace("127.0.0.1", "localhost")
    check = "ssl.endpoint.identification.algorithm"
    error = refusal(servers, secured.login("alice"), caplog)
    assert "'localhost'" in error.why and check in error.what_to_do
    new_topic(servers, {**secured.login("alice"), check: ""})


@pytest.mark.parametrize("whose", ["nobody", "a stranger"])
def test_a_certificate_that_the_broker_does_not_accept(
    secured: SecureBroker, certificates: LocalCertificates, tmp_path: Path, caplog, whose: str
) -> None:
    options = certificate_login(certificates)
    if whose == "nobody":
        del options["ssl.keystore.location"], options["ssl.keystore.type"]
    else:
        options["ssl.keystore.location"] = str(make_certificates(tmp_path).client)
    error = refusal(secured.certificate_servers, options, caplog)
    assert type(error) is RetriableError
    assert "client's certificate" in error.why and "ssl.keystore.location" in error.what_to_do


def test_a_listener_that_wants_no_password(
    secured: SecureBroker, certificates: LocalCertificates, caplog
) -> None:
    both = {**certificate_login(certificates), **secured.login("alice")}
    error = refusal(secured.certificate_servers, both, caplog)
    assert type(error) is AuthorizationError and "security.protocol" in error.what_to_do


# -- the same options in Java -----------------------------------------------------------------------


def topics_of_a_java_client(servers: str, options: dict[str, str], directory: Path) -> list[str]:
    """List topics by Kafka's own tool, configured with exactly what Spark's source would get."""
    connection = KafkaConnection(servers, options)
    java = {name.removeprefix("kafka."): value for name, value in connection.to_spark_options().items()}
    assert java == connection.to_java_options() == {"bootstrap.servers": servers, **options}
    file = directory / f"client-{uuid.uuid4().hex}.properties"
    lines = [f"{name}={_in_properties(value)}\n" for name, value in java.items()]
    file.write_text("".join(lines), encoding="ascii")
    command = ["java", "-Xmx128m", "-cp", f"{BROKER_JARS}/*", "org.apache.kafka.tools.TopicCommand"]
    command += ["--bootstrap-server", servers, "--command-config", str(file), "--list"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


def _in_properties(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("\n", "\\n")
    return "".join(c if c.isascii() else f"\\u{ord(c):04x}" for c in escaped)


def test_java_takes_the_same_login(secured: SecureBroker, login: dict[str, str], tmp_path: Path) -> None:
    name = new_topic(secured.bootstrap_servers, login)
    assert name in topics_of_a_java_client(secured.bootstrap_servers, login, tmp_path)


def test_java_takes_the_same_texts(
    secured: SecureBroker, certificates: LocalCertificates, tmp_path: Path
) -> None:
    options = in_texts(certificate_login(certificates))
    one_line = {name: value.replace("\n", " ") for name, value in options.items()}
    # The encryption that Java 17 can read: not openssl's default.
    command = ["openssl", "pkcs8", "-topk8", "-v1", "PBE-SHA1-3DES", "-passout", "pass:phrase"]
    key = options["ssl.keystore.key"]
    locked = subprocess.run(command, input=key, capture_output=True, text=True, check=True).stdout
    for given in (one_line, {**options, "ssl.keystore.key": locked, "ssl.key.password": "phrase"}):
        name = new_topic(secured.certificate_servers, given)
        assert name in topics_of_a_java_client(secured.certificate_servers, given, tmp_path)


@pytest.mark.nightly
def test_java_stores_are_converted_by_the_commands_of_the_refusal(
    secured: SecureBroker, certificates: LocalCertificates, tmp_path: Path
) -> None:
    """Both the result's users: Python, which wanted PEM, and Java, which must take it as well."""
    options = {
        "security.protocol": "SSL",
        "ssl.truststore.location": str(certificates.java_truststore("trusted")),
        "ssl.truststore.password": "trusted",
        "ssl.keystore.location": str(certificates.java_keystore("private")),
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.password": "private",
    }
    topics_of_a_java_client(secured.certificate_servers, options, tmp_path)
    for store, answers in (("truststore", "trusted\n"), ("keystore", "private\n")):
        with pytest.raises(ConfigError, match=rf"ssl\.{store}\.location") as refused:
            KafkaConnection(secured.certificate_servers, options).to_client_arguments()
        command = refused.value.what_to_do.split("`")[1]
        # Without a terminal the tools read the passwords from their input.
        subprocess.run(command, shell=True, input=answers, text=True, check=True, start_new_session=True)
        options[f"ssl.{store}.location"] += ".pem"
        options[f"ssl.{store}.type"] = "PEM"
        del options[f"ssl.{store}.password"]
    assert stat.S_IMODE(Path(options["ssl.keystore.location"]).stat().st_mode) == 0o600
    name = new_topic(secured.certificate_servers, options)
    assert name in topics_of_a_java_client(secured.certificate_servers, options, tmp_path)


# -- the tools of the test --------------------------------------------------------------------------


def test_files_with_secrets_are_for_their_owner_only(
    secured: SecureBroker, certificates: LocalCertificates
) -> None:
    store = certificates.java_keystore("private")
    secret = [certificates.server, certificates.client, store, secured.log.with_name("server.properties")]
    assert {stat.S_IMODE(file.stat().st_mode) for file in secret} == {0o600}


def test_users_that_cannot_be_written_down_are_refused(
    certificates: LocalCertificates, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="'a,b'") as refused:
        SecureBroker(tmp_path, jars_dir=BROKER_JARS, certificates=certificates, users={"a,b": WRONG})
    assert WRONG not in str(refused.value)
