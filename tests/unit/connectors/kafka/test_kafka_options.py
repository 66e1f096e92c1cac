"""KafkaConnection: one description, three spellings, and no secret ever printed."""

from __future__ import annotations

import copy
import pickle
import ssl
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.errors import (
    CoordinatorNotAvailableError,
    KafkaConnectionError,
    NotCoordinatorError,
    NotLeaderForPartitionError,
)
from kafka.future import Future
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector

from flinkish_spark import FileSink, Json, KafkaManifest, KafkaSink, KafkaSource
from flinkish_spark.connectors.kafka.client.client import KafkaWire
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection, _Manager
from flinkish_spark.core.errors import ConfigError
from tests.support.tls import LocalCertificates, make_certificates

PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
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
    assert sasl().to_spark_options() == {
        "kafka.bootstrap.servers": "b1:9092,b2:9093",
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "SCRAM-SHA-512",
        "kafka.sasl.jaas.config": JAAS,
    }


def test_java_gets_bare_names() -> None:
    properties = sasl().to_java_options()
    assert properties["bootstrap.servers"] == "b1:9092,b2:9093"
    assert properties["sasl.jaas.config"] == JAAS


def test_python_gets_keyword_arguments() -> None:
    assert sasl(**{"kafka.client.id": "me", "request.timeout.ms": "5000"}).to_client_arguments() == {
        "bootstrap_servers": ["b1:9092", "b2:9093"],
        "client_id": "me",
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "alice",
        "sasl_plain_password": 's3cr"et=x',
        "request_timeout_ms": 5000,
    }


@pytest.mark.parametrize("text", [repr, str, "{}".format, "{!r}".format])
def test_secrets_are_not_printed(text: object) -> None:
    secrets = ("ssl.key.password", "ssl.truststore.password", "ssl.keystore.key")
    connection = sasl(**dict.fromkeys(secrets, "hush"))
    printed = text(connection)  # type: ignore[operator]
    assert "s3cr" not in printed
    assert "hush" not in printed
    assert "SCRAM-SHA-512" in printed


def test_sinks_sources_and_manifests_print_no_secret_and_refuse_what_is_no_setting(tmp_path: Path) -> None:
    """A message about a wrong argument shows what was given, and that may be a sink."""
    options = {"sasl.jaas.config": "hunter2", "ssl.key.password": "hunter2"}
    sink = KafkaSink("broker:9092", "out", options=options, producer={"linger.ms": "7"})
    source = KafkaSource("broker:9092", topics=["in"], value=Json("a INT"), options=options)
    for one in (sink, source, KafkaManifest("broker:9092", "checkpoints", options=options)):
        assert "hunter2" not in repr(one)
    with pytest.raises(ConfigError) as caught:
        FileSink(str(tmp_path), bucket_by=sink)  # type: ignore[arg-type]
    assert "hunter2" not in str(caught.value)
    wrong: tuple[dict[str, Any], ...] = ({"options": "text"}, {"producer": "text"}, {"on_bad_record": sink})
    for one in wrong:
        with pytest.raises(ConfigError, match=next(iter(one))):
            KafkaSink("broker:9092", "out", **one)


def test_secrets_are_hidden_in_what_python_gets() -> None:
    arguments = sasl().to_client_arguments()
    assert arguments["sasl_plain_password"] == 's3cr"et=x'
    assert "s3cr" not in repr(arguments) + "{}".format(arguments) + "%s" % arguments  # noqa: UP031, UP032


def test_secrets_are_not_in_error_messages() -> None:
    wrong = [
        {"sasl.jaas.config": 'Other required username="a" password="hush";'},
        {"sasl.jaas.config": "PlainLoginModule required password=hush;"},
        {"my.password": "hush"},
    ]
    for options in wrong:
        with pytest.raises(ConfigError) as caught:
            KafkaConnection("b:1", {"sasl.mechanism": "PLAIN", **options}).to_client_arguments()
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
        ({"sasl.mechanism": "scram-sha-512"}, "use one of PLAIN"),
        ({"security.protocol": "SASL_SSL"}, "'sasl.mechanism' is missing"),
        ({"sasl.jaas.config": JAAS}, "'sasl.mechanism' is missing"),
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"}, "'sasl.jaas.config' is missing"),
        ({"ssl.cipher.suites": "TLS_AES_128_GCM_SHA256"}, "'ssl.cipher.suites' cannot be used"),
        ({"request.timeout.ms": "5s"}, "whole number"),
    ],
)
def test_what_python_does_not_know_is_named(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KafkaConnection("b:1", options).to_client_arguments()


@pytest.mark.parametrize("servers", ["", "b", "b:x", "b:0", "b:70000", [], ["b:1", ""], None, 9092, "b 1:9"])
def test_unusable_servers_are_refused(servers: object) -> None:
    with pytest.raises(ConfigError, match="bootstrap"):
        KafkaConnection(servers)  # type: ignore[arg-type]


@pytest.mark.parametrize("servers", ["b:1", "10.0.0.1:9092", "[::1]:9092", "SSL://b.example.com:9093"])
def test_usable_servers(servers: str) -> None:
    assert KafkaConnection(servers).servers == servers


def test_options_must_be_strings_and_given_once() -> None:
    with pytest.raises(ConfigError, match="must be text, not int"):
        KafkaConnection("b:1", {"request.timeout.ms": 5})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="bootstrap_servers only"):
        KafkaConnection("b:1", {"kafka.bootstrap.servers": "b:2"})


def test_it_is_a_value() -> None:
    assert sasl() == sasl()
    assert hash(sasl()) == hash(sasl())
    assert copy.copy(sasl()) == sasl() == pickle.loads(pickle.dumps(sasl()))
    with pytest.raises(TypeError):
        sasl().options["x"] = "y"  # type: ignore[index]


# -- logins -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mechanism", "jaas", "user", "password"),
    [
        ("PLAIN", f'{PLAIN} required username="a" password="b";', "a", "b"),
        ("PLAIN", f" {PLAIN}\n required\n username='a'\n password='b' ;\n", "a", "b"),
        ("PLAIN", f"{PLAIN} required username=a.b-c_d password=e;", "a.b-c_d", "e"),
        ("PLAIN", f'{PLAIN} required password="b"username="a";', "a", "b"),
        ("PLAIN", f'{PLAIN} required username="x" username="a" password="b";', "a", "b"),
        ("PLAIN", f'{PLAIN} required serviceName="k" username="a" password="b";', "a", "b"),
        ("PLAIN", f'{PLAIN} required hint="username=\\"x\\"" username="a" password="b";', "a", "b"),
        ("PLAIN", f'{PLAIN} required username="a" password="b;c\\\\d\\"e\\101\\tf";', "a", 'b;c\\d"eA\tf'),
        ("PLAIN", f'kafkashaded.{PLAIN} required username="a" password="b";', "a", "b"),
        ("PLAIN", f'{PLAIN} required username="a,b=c" password="d";', "a,b=c", "d"),
        ("SCRAM-SHA-256", f'{SCRAM} required username="a,b=c" password="d,=";', "a=2Cb=3Dc", "d,="),
        ("SCRAM-SHA-512", f'{SCRAM} required username="a" password="b" tokenauth="false";', "a", "b"),
    ],
)
def test_logins_are_read_as_java_reads_them(mechanism: str, jaas: str, user: str, password: str) -> None:
    options = {"sasl.mechanism": mechanism, "sasl.jaas.config": jaas}
    assert KafkaConnection("b:1", options).to_client_arguments() == {
        "bootstrap_servers": ["b:1"],
        "sasl_mechanism": mechanism,
        "sasl_plain_username": user,
        "sasl_plain_password": password,
    }


@pytest.mark.parametrize(
    ("mechanism", "jaas"),
    [
        ("PLAIN", ""),
        ("PLAIN", f'{PLAIN} required username="a" password="hush"'),
        ("PLAIN", f'{PLAIN} username="a" password="hush";'),
        ("PLAIN", f'{PLAIN} required username="a" password="hush;'),
        ("PLAIN", f'{PLAIN} required username="" password="hush";'),
        ("PLAIN", f'{PLAIN} required username="a";'),
        ("PLAIN", f'{SCRAM} required username="a" password="hush";'),
        ("PLAIN", 2 * f'{PLAIN} required username="a" password="hush";'),
        ("SCRAM-SHA-512", f'{PLAIN} required username="a" password="hush";'),
        ("SCRAM-SHA-512", f'{SCRAM} required username="a" password="hush" tokenauth="true";'),
    ],
)
def test_other_logins_are_refused(mechanism: str, jaas: str) -> None:
    options = {"sasl.mechanism": mechanism, "sasl.jaas.config": jaas}
    with pytest.raises(
        ConfigError, match=r"'sasl\.jaas\.config' cannot be used.*required username="
    ) as caught:
        KafkaConnection("b:1", options).to_client_arguments()
    assert "hush" not in str(caught.value)


# -- TLS --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> LocalCertificates:
    return make_certificates(tmp_path_factory.mktemp("tls"), names=("127.0.0.1",))


def trusting(authority: Path) -> dict[str, str]:
    return {"kafka.ssl.truststore.type": "PEM", "kafka.ssl.truststore.location": str(authority)}


def inline(certificates: LocalCertificates) -> dict[str, str]:
    """The trusted authority and the client's identity as texts."""
    key, _, certificate = certificates.client.read_text().partition("-----BEGIN CERTIFICATE")
    return {
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": certificates.authority.read_text(),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.key": key,
        "ssl.keystore.certificate.chain": "-----BEGIN CERTIFICATE" + certificate,
    }


def context_of(options: dict[str, str]) -> ssl.SSLContext:
    arguments = KafkaConnection("b:1", {"security.protocol": "SSL", **options}).to_client_arguments()
    context = arguments.pop("ssl_context")
    assert isinstance(context, ssl.SSLContext)
    assert arguments == {"bootstrap_servers": ["b:1"], "security_protocol": "SSL"}
    return context


def shake_hands(options: dict[str, str], certificates: LocalCertificates, host: str = "127.0.0.1") -> str:
    """Connect to a server without a network; return the name of the client that it saw."""
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(certificates.server)
    server_context.load_verify_locations(certificates.authority)
    server_context.verify_mode = ssl.CERT_OPTIONAL
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context_of(options).wrap_bio(to_client, to_server, server_hostname=host)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    waiting = [client, server, client, server]
    for side in waiting:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    seen = server.getpeercert()
    return dict(part for parts in seen["subject"] for part in parts)["commonName"] if seen else ""


def test_pem_files(certificates: LocalCertificates) -> None:
    identity = {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(certificates.client)}
    assert shake_hands(trusting(certificates.authority), certificates) == ""
    assert shake_hands({**trusting(certificates.authority), **identity}, certificates) == "client"


@pytest.mark.parametrize("separator", ["\n", " ", "\r\n"])
def test_pem_texts(certificates: LocalCertificates, separator: str) -> None:
    """Properties files and environment variables lose line breaks; Java does not mind."""
    options = {name: value.replace("\n", separator) for name, value in inline(certificates).items()}
    assert shake_hands(options, certificates) == "client"


def test_texts_stay_a_value_and_leave_no_file(
    certificates: LocalCertificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    connection = KafkaConnection("b:1", inline(certificates))
    assert pickle.loads(pickle.dumps(connection)) == connection
    connection.to_client_arguments()
    assert not list(tmp_path.iterdir())
    secret = inline(certificates)["ssl.keystore.key"].splitlines()[1]
    assert secret not in repr(connection)
    assert secret not in repr(connection.to_client_arguments())
    for name, value in {"ssl.keystore.certificate.chain": "x", "ssl.truststore.certificates": "y"}.items():
        with pytest.raises(ConfigError, match="holds no PEM block") as caught:
            context_of({**inline(certificates), name: value})
        assert secret not in str(caught.value)


def test_an_encrypted_key_needs_its_password(certificates: LocalCertificates, tmp_path: Path) -> None:
    key = inline(certificates)["ssl.keystore.key"]
    command = ["openssl", "pkcs8", "-topk8", "-passout", "pass:hush"]
    locked = subprocess.run(command, input=key, capture_output=True, text=True, check=True).stdout
    options = {**inline(certificates), "ssl.keystore.key": locked}
    assert "ENCRYPTED" in locked
    assert shake_hands({**options, "ssl.key.password": "hush"}, certificates) == "client"
    file = tmp_path / "client.pem"
    file.write_text(locked + options.pop("ssl.keystore.certificate.chain"))
    del options["ssl.keystore.key"]
    options["ssl.keystore.location"] = str(file)
    assert shake_hands({**options, "ssl.key.password": "hush\n"}, certificates) == "client"
    for password in ({}, {"ssl.key.password": "hushed"}):
        with pytest.raises(ConfigError, match=r"ssl\.keystore\.location.*ssl\.key\.password") as caught:
            context_of({**options, **password})
        assert "hush" not in str(caught.value)


def test_who_is_trusted(certificates: LocalCertificates, tmp_path: Path) -> None:
    other = make_certificates(tmp_path)
    for untrusting in (trusting(other.authority), {"ssl.endpoint.identification.algorithm": ""}):
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(untrusting, certificates)
    # As in Java, a certificate may be trusted without its issuer.
    assert shake_hands(trusting(certificates.server), certificates) == ""


def test_host_names_are_checked_unless_told_otherwise(certificates: LocalCertificates) -> None:
    trust, name = trusting(certificates.authority), "kafka.ssl.endpoint.identification.algorithm"
    for checking in ({}, {name: "https"}, {name: "HTTPS"}):
        with pytest.raises(ssl.SSLCertVerificationError, match="not valid for 'localhost'"):
            shake_hands({**trust, **checking}, certificates, host="localhost")
    assert shake_hands({**trust, name: " "}, certificates, host="localhost") == ""


def test_a_store_that_python_cannot_read_is_refused_with_the_way_out() -> None:
    for options, command in [
        (
            {"ssl.truststore.location": "my ca.jks"},
            "keytool -list -rfc -keystore 'my ca.jks' > 'my ca.jks.pem'",
        ),
        (
            {"ssl.truststore.location": "ca.p12", "ssl.truststore.type": "PKCS12"},
            "keytool -list -rfc -keystore ca.p12 > ca.p12.pem",
        ),
        (
            {"ssl.keystore.location": "me.p12", "ssl.keystore.type": "PKCS12"},
            "`openssl pkcs12 -in me.p12 -nodes -out me.p12.pem`, guard the new file",
        ),
        (
            {"ssl.keystore.location": "me.jks", "ssl.keystore.password": "hush"},
            "-srckeystore me.jks -destkeystore me.jks.p12 -deststoretype PKCS12 && "
            "openssl pkcs12 -in me.jks.p12 -nodes -out me.jks.pem",
        ),
    ]:
        store = next(iter(options)).rpartition(".")[0]
        with pytest.raises(ConfigError) as caught:
            context_of(options)
        assert command in caught.value.what_to_do
        assert f"{store}.type to PEM, and no {store}.password" in caught.value.what_to_do
        assert f"'{store}.location'" in caught.value.what and "Python reads PEM only" in caught.value.why
        assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ssl.truststore.type": "pem"}, r"ssl\.truststore\.type.*in capitals"),
        ({"ssl.truststore.type": "JKS"}, r"ssl\.truststore\.type.*It is JKS"),
        ({"ssl.truststore.location": "ca.pem"}, r"ssl\.truststore\.location is given as well"),
        ({"ssl.truststore.password": "hush"}, r"ssl\.truststore\.password.*remove it"),
        ({"ssl.keystore.password": "hush"}, r"ssl\.keystore\.password.*ssl\.key\.password"),
        ({"ssl.keystore.location": "me.pem"}, r"ssl\.keystore\.location is given as well"),
        ({"ssl.keystore.key": None}, r"ssl\.keystore\.certificate\.chain.*other half"),
        ({"ssl.keystore.certificate.chain": None}, r"ssl\.keystore\.key.*other half"),
        ({"ssl.keystore.key": "hush"}, r"ssl\.keystore\.key.*holds no PEM block"),
        (
            {"ssl.truststore.certificates": None, "ssl.truststore.location": "no/such.pem"},
            r"ssl\.truststore\.location.*no/such\.pem: No such file",
        ),
    ],
)
def test_what_java_refuses_is_refused(
    certificates: LocalCertificates, change: dict[str, str | None], words: str
) -> None:
    options = {name: value for name, value in {**inline(certificates), **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=words) as caught:
        context_of(options)
    assert "hush" not in str(caught.value)


def test_a_key_of_another_certificate_is_refused(certificates: LocalCertificates, tmp_path: Path) -> None:
    other = inline(make_certificates(tmp_path))
    with pytest.raises(ConfigError, match=r"ssl\.keystore\.key"):
        context_of({**inline(certificates), "ssl.keystore.key": other["ssl.keystore.key"]})


def test_spark_and_java_get_what_was_given(certificates: LocalCertificates) -> None:
    given = {**inline(certificates), "security.protocol": "SASL_SSL", "sasl.jaas.config": JAAS}
    connection = KafkaConnection("b:1", {f"kafka.{name}": value for name, value in given.items()})
    assert connection.to_java_options() == {"bootstrap.servers": "b:1", **given}
    assert connection.to_spark_options() == {
        f"kafka.{name}": value for name, value in connection.to_java_options().items()
    }


# -- brokers that hang, move or throttle ------------------------------------------------------------


class Throttled:
    """A connection that may not be written to for a while."""

    def __init__(self) -> None:
        self.paused, self.closed = {"throttle"}, False
        self.sent: list[int] = []

    def send_request(self, request: int, request_timeout_ms: int | None = None) -> Future:
        self.sent.append(request)
        if request == 2:
            raise RuntimeError("the socket closed under its feet")
        return Future().success(request)


def test_requests_of_a_throttled_client_wait_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    net = NetworkSelector()
    manager = _Manager(net)
    throttled = Throttled()
    monkeypatch.setattr(manager, "get_connection", lambda _node: throttled)

    async def ask() -> list[Any]:
        answers = [manager.send(number, 1) for number in range(3)]
        await net.sleep(0.02)
        assert not throttled.sent
        throttled.paused = set()
        answers.append(manager.send(3, 1))
        await net.sleep(0.02)
        answers.append(manager.send(4, 1))
        return [one.exception or one.value for one in answers]

    zero, one, lost, *rest = manager.run(ask)
    assert (zero, one, rest, throttled.sent) == (0, 1, [3, 4], [0, 1, 2, 3, 4])
    assert isinstance(lost, KafkaConnectionError)
    net.close()


def test_one_of_several_servers_gets_a_part_of_the_time_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take the connection and never answer."""
    given: list[Any] = []

    def connected(_: Any, _node: Any, timeout_ms: Any = None) -> Any:
        given.append(timeout_ms)
        return SimpleNamespace(init_future=Future())

    monkeypatch.setattr(KafkaConnectionManager, "get_connection", connected)
    for servers in (["a:1"], ["a:1", "b:2"]):
        net = NetworkSelector()
        manager = _Manager(net, bootstrap_servers=servers, socket_connection_setup_timeout_ms=3_000)
        manager.get_connection("first", timeout_ms=15_000)
        manager.get_connection(1)
        net.close()
    assert given == [15_000, None, 3_000, None]


@pytest.mark.parametrize(
    ("error", "is_forgotten"),
    [(NotCoordinatorError, True), (CoordinatorNotAvailableError, True), (NotLeaderForPartitionError, False)],
)
def test_who_coordinates_is_forgotten_when_somebody_says_that_it_has_moved(
    error: type[Exception], is_forgotten: bool
) -> None:
    known = {("GROUP", "g"): 1, ("TRANSACTION", "t"): 2}
    wire = KafkaWire(KafkaConnection("b:1"))
    wire._admin = SimpleNamespace(_manager=SimpleNamespace(cluster=SimpleNamespace(_coordinators=known)))

    def refused(_admin: Any) -> None:
        raise error

    with pytest.raises(error):
        wire.attempt("read the offsets of a group", refused, connect_within_ms=1)
    assert not known if is_forgotten else len(known) == 2
