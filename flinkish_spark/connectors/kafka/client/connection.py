"""Connection settings for Kafka, usable by Spark, Java and Python, and opening a connection.

No ``repr``, message or log line of this module contains the value of a secret option, and a private key is
never in a named file. Options that Java refuses are refused here, too, so one set of options serves both.
"""

from __future__ import annotations

import re
import shlex
import ssl
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import kafka.errors as kafka_errors
from kafka import KafkaAdminClient
from kafka.future import Future
from kafka.net.compat import KafkaNetClient
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector

from flinkish_spark.connectors.kafka.client.oauth import (
    OAUTH_OPTIONS,
    Tokens,
    make_option_error,
    take_token_source,
)
from flinkish_spark.core.errors import AuthorizationError, ConfigError, RetriableError
from flinkish_spark.core.secrets import EnvironmentSecret, FileSecret, place_of, secret_of
from flinkish_spark.core.validation import unusable
from flinkish_spark.protocol.choices import closest

_OPTIONS = frozenset(
    {
        *("ssl.endpoint.identification.algorithm", "ssl.key.password", "ssl.keystore.certificate.chain"),
        *("ssl.keystore.key", "ssl.keystore.location", "ssl.keystore.password", "ssl.keystore.type"),
        *("ssl.truststore.certificates", "ssl.truststore.location", "ssl.truststore.password"),
        "ssl.truststore.type",
    }
)
_PEM_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----([^-:]*)-----END \1-----")


def take_tls(left: dict[str, str]) -> ssl.SSLContext | None:
    """Take the TLS options out of `left` and make an SSL context of them; PEM only."""
    options = {name: left.pop(name) for name in _OPTIONS & left.keys()}
    if not options:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # As in Java, trust everything in the truststore, even an intermediate authority alone.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    # In Kafka an empty string turns the check of the host name off.
    context.check_hostname = options.get("ssl.endpoint.identification.algorithm", "https") != ""
    for store, inline in (("truststore", ("certificates",)), ("keystore", ("key", "certificate.chain"))):
        _check_store(store, [f"ssl.{store}.{name}" for name in inline], options)
    _load_trusted(context, options)
    _load_identity(context, options)
    return context


def _check_store(store: str, inline: list[str], options: Mapping[str, str]) -> None:
    kind, location = options.get(f"ssl.{store}.type", "JKS"), options.get(f"ssl.{store}.location")
    given = [name for name in inline if name in options]
    if location is not None and kind.upper() != "PEM":
        raise make_option_error(
            f"ssl.{store}.location",
            f"its type is {kind}, and Python reads PEM only",
            f"run `{_to_pem_command(store, kind, location)}`{'' if store == 'truststore' else _GUARD}, then "
            f"set ssl.{store}.location to the new file, ssl.{store}.type to PEM, and no ssl.{store}.password",
        )
    if (given or location is not None) and kind != "PEM":
        raise make_option_error(f"ssl.{store}.type", f"it is {kind}", "set it to PEM, in capitals")
    if given and location is not None:
        raise make_option_error(given[0], f"ssl.{store}.location is given as well", "keep one of them")
    if given and given != inline:
        raise make_option_error(given[0], "the other half is missing", f"give {' and '.join(inline)}")
    if f"ssl.{store}.password" in options:
        raise make_option_error(
            f"ssl.{store}.password",
            f"a {store} in PEM has none",
            "remove it; a key of its own password needs ssl.key.password",
        )


_GUARD = ", guard the new file, whose key has no password"


def _to_pem_command(store: str, kind: str, location: str) -> str:
    """Return a command line that converts a Java store to PEM; it asks for the passwords."""
    # It writes the key unencrypted: Java 17 cannot read openssl's encryption (PBES2).
    source, pem, p12 = (shlex.quote(f"{location}{suffix}") for suffix in ("", ".pem", ".p12"))
    if store == "truststore":
        return f"keytool -list -rfc -keystore {source} > {pem}"
    if kind.upper() == "PKCS12":
        return f"openssl pkcs12 -in {source} -nodes -out {pem}"
    first = f"keytool -importkeystore -srckeystore {source} -destkeystore {p12} -deststoretype PKCS12"
    return f"{first} && openssl pkcs12 -in {p12} -nodes -out {pem}"


def _load_trusted(context: ssl.SSLContext, options: Mapping[str, str]) -> None:
    location, text = options.get("ssl.truststore.location"), options.get("ssl.truststore.certificates")
    try:
        if location is not None:
            context.load_verify_locations(cafile=location)
        elif text is not None:
            context.load_verify_locations(cadata=_normalize_pem(text))
        else:
            context.load_default_certs()
    except (OSError, ValueError) as unreadable:
        name = "ssl.truststore.certificates" if location is None else "ssl.truststore.location"
        raise make_option_error(name, _describe_error(unreadable, location), "give it in PEM") from None


def _load_identity(context: ssl.SSLContext, options: Mapping[str, str]) -> None:
    location, key = options.get("ssl.keystore.location"), options.get("ssl.keystore.key")
    if location is None and key is None:
        return
    name = "ssl.keystore.key" if location is None else "ssl.keystore.location"
    # Never None: OpenSSL would ask for a password at the terminal, and the driver would hang.
    password = options.get("ssl.key.password", "")
    try:
        if location is not None:
            context.load_cert_chain(location, password=password)
        else:
            chain = options["ssl.keystore.certificate.chain"]
            with (
                _nameless_file(_normalize_pem(chain)) as chain_path,
                _nameless_file(_normalize_pem(key or "")) as key_path,
            ):
                context.load_cert_chain(chain_path, key_path, password=password)
    except (OSError, ValueError) as unreadable:
        raise make_option_error(
            name,
            _describe_error(unreadable, location),
            "give a private key in PEM, followed by its certificate, and the key's password, if it has one, "
            "as ssl.key.password",
        ) from None


def _normalize_pem(text: str) -> str:
    """Return the PEM blocks of `text` with line breaks, which properties files lose."""
    blocks = [(kind, "".join(body.split())) for kind, body in _PEM_BLOCK.findall(text)]
    if not blocks:
        raise ValueError("it holds no PEM block")
    return "".join(
        "\n".join([f"-----BEGIN {kind}-----", *re.findall(".{1,64}", body), f"-----END {kind}-----", ""])
        for kind, body in blocks
    )


@contextmanager
def _nameless_file(text: str) -> Iterator[str]:
    """Yield a path to `text` that no other process can open; OpenSSL reads keys only from files."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.flush()
        file.seek(0)
        yield f"/dev/fd/{file.fileno()}"


def _describe_error(error: OSError | ValueError, location: str | None) -> str:
    text = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    return f"{location}: {text}" if location is not None else text


_PREFIX = "kafka."
_SERVER = re.compile(r"(?:[A-Za-z][A-Za-z0-9_]*://)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}")
_SECRET = re.compile(r"password|jaas|secret|token|key", re.IGNORECASE)
#: Names that the pattern matches by accident; a file's path is no secret.
_NOT_SECRET = frozenset({"ssl.keystore.location", "ssl.keystore.type"})
#: Here ``file:`` begins a URL of tokens, not the place of a secret.
_NO_PLACE = frozenset({"sasl.oauthbearer.token.endpoint.url"})
_HIDDEN = "<hidden>"

#: An entry of a JAAS configuration, parsed as in Kafka's Java client: module, flag, options.
_JAAS_WORD = r"[\w.$-]++"
_JAAS_OPTION = rf"""\s*({_JAAS_WORD})\s*=\s*("(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'|{_JAAS_WORD})"""
_JAAS = re.compile(rf"\s*({_JAAS_WORD})\s+\w++((?:{_JAAS_OPTION})*+)\s*;\s*", re.DOTALL)
#: A reference to a secret in such an entry.
_JAAS_SECRET = re.compile(
    r"""(\b(?:password|clientSecret)\s*=\s*)("(?:env|file):[^"\\]*"|'(?:env|file):[^'\\]*')"""
)
_JAAS_ESCAPE = re.compile(r"\\([0-3][0-7]{0,2}|[4-7][0-7]?|.)", re.DOTALL)
_JAAS_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
#: Mechanism -> the login module that Kafka's Java client needs for it.
_SASL_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "OAUTHBEARER": "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule",
}
_SECURITY_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")

#: Kafka's name -> kafka-python's name, for values that are whole numbers of milliseconds.
_MILLISECONDS = {
    "connections.max.idle.ms": "connections_max_idle_ms",
    "metadata.max.age.ms": "metadata_max_age_ms",
    "reconnect.backoff.max.ms": "reconnect_backoff_max_ms",
    "reconnect.backoff.ms": "reconnect_backoff_ms",
    "request.timeout.ms": "request_timeout_ms",
    "retry.backoff.ms": "retry_backoff_ms",
}
_CONNECTION_PREFIXES = ("security.", "sasl.", "ssl.")
#: Options of the Java client without a meaning here; ignored.
_JAVA_ONLY = frozenset({"ssl.enabled.protocols", "ssl.protocol", "ssl.provider"})


#: All options of a connection, without the prefix ``kafka.``.
CONNECTION_OPTIONS = (
    frozenset({"client.id", "security.protocol", "sasl.mechanism", "sasl.jaas.config"})
    | _MILLISECONDS.keys()
    | _OPTIONS
    | OAUTH_OPTIONS
    | _JAVA_ONLY
)


def is_connection_option(option: str) -> bool:
    """Return whether `option`, without the prefix ``kafka.``, says how to reach Kafka."""
    return option == "client.id" or option in _MILLISECONDS or option.startswith(_CONNECTION_PREFIXES)


def is_secret(option: str) -> bool:
    bare = option.removeprefix(_PREFIX)
    return bare not in _NOT_SECRET and _SECRET.search(bare) is not None


@dataclass(frozen=True, slots=True, repr=False)
class KafkaConnection:
    """Servers and login of Kafka; a plain value, checked on construction and safe to print."""

    #: ``"host:port"``, or several separated by commas.
    servers: str
    #: Connection and security settings by Kafka's names, with or without the prefix ``kafka.``
    #: that Spark wants, such as ``{"kafka.security.protocol": "SASL_SSL"}``. Values are strings. A
    #: secret, and ``password`` or ``clientSecret`` within ``sasl.jaas.config``, may be ``env:NAME`` or
    #: ``file:/path``.
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "servers", _check_servers(self.servers))
        object.__setattr__(self, "options", MappingProxyType(_check_options(self.options)))

    def __reduce__(self) -> tuple[Callable[..., KafkaConnection], tuple[str, dict[str, str]]]:
        # The read-only view of the options cannot be pickled, but Spark tasks need this value. They get the
        # secrets themselves, since references to them are valid on the driver only.
        return (_rebuild_connection, (self.servers, self._resolve_secrets()))

    def __hash__(self) -> int:
        return hash((self.servers, frozenset(self.options.items())))

    def __repr__(self) -> str:
        shown = {name: _HIDDEN if is_secret(name) else value for name, value in self.options.items()}
        return f"KafkaConnection({self.servers!r}, {shown!r})"

    def to_spark_options(self) -> dict[str, str]:
        return {_PREFIX + name: value for name, value in self.to_java_options().items()}

    def to_java_options(self) -> dict[str, str]:
        return {"bootstrap.servers": self.servers, **self._resolve_secrets()}

    def _resolve_secrets(self) -> dict[str, str]:
        return {name: _read(name, value) for name, value in self.options.items()}

    def to_client_arguments(self) -> dict[str, object]:
        """Return the arguments of a kafka-python client, with secrets in clear; never pickle them."""
        # Called before every connect, since it reads files. At level DEBUG kafka-python logs what it sends:
        # with PLAIN the password, with OAUTHBEARER the token, with SCRAM neither.
        servers = [server.rpartition("://")[2] for server in self.servers.split(",")]
        arguments: dict[str, object] = {"bootstrap_servers": servers}
        # Kafka's Java client trims all values, too.
        left = {name: value.strip() for name, value in self._resolve_secrets().items()}
        if "client.id" in left:
            arguments["client_id"] = left.pop("client.id")
        if "security.protocol" in left:
            protocol = left.pop("security.protocol").upper()
            if protocol not in _SECURITY_PROTOCOLS:
                what_to_do = f"use one of {', '.join(_SECURITY_PROTOCOLS)}"
                raise make_option_error("security.protocol", f"it is {protocol!r}", what_to_do)
            arguments["security_protocol"] = protocol
        for name in sorted(left.keys() & _MILLISECONDS.keys()):
            text = left.pop(name)
            if not text.isdecimal():
                raise make_option_error(name, f"it is {text!r}, no whole number", "give whole milliseconds")
            arguments[_MILLISECONDS[name]] = int(text)
        arguments.update(_take_sasl(left, str(arguments.get("security_protocol", ""))))
        if (context := take_tls(left)) is not None:
            arguments["ssl_context"] = context
        unknown = sorted(left.keys() - _JAVA_ONLY)
        if unknown:
            why = "it does not go with the security.protocol and the sasl.mechanism that are given"
            raise make_option_error(unknown[0], why, "remove it, or correct these")
        return arguments


def _rebuild_connection(servers: str, options: dict[str, str]) -> KafkaConnection:
    """Return a task's connection, whose secrets are already resolved."""
    connection = object.__new__(KafkaConnection)
    object.__setattr__(connection, "servers", servers)
    object.__setattr__(
        connection, "options", MappingProxyType({n: _ResolvedValue(v) for n, v in options.items()})
    )
    return connection


class _ResolvedValue(str):
    """A resolved value, which is no reference to a secret even if it begins like one."""

    __slots__ = ()


def _is_place(name: str) -> bool:
    return is_secret(name) and name not in _NO_PLACE


def _read(name: str, value: str) -> str:
    if isinstance(value, _ResolvedValue) or not _is_place(name):
        return value
    text = secret_of(value.strip(), name).read() if value.strip().startswith(("env:", "file:")) else value
    return _JAAS_SECRET.sub(_read_in_jaas, text) if name == "sasl.jaas.config" else text


def _read_in_jaas(found: re.Match[str]) -> str:
    secret = secret_of(found[2][1:-1], f"{found[1].strip()} of sasl.jaas.config").read()
    escaped = secret.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'{found[1]}"{escaped}"'


def _check_servers(servers: object) -> str:
    if not isinstance(servers, str):
        what_to_do = 'give one text, such as "broker1:9092,broker2:9092"'
        raise unusable("bootstrap_servers", servers, wanted="a text", what_to_do=what_to_do)
    checked = [one.strip() for one in servers.split(",")]
    for one in checked:
        if not _SERVER.fullmatch(one) or not 0 < int(one.rpartition(":")[2]) < 65536:
            what_to_do = "write it as host:port, with a port from 1 to 65535"
            raise ConfigError(f"bootstrap server {one!r} cannot be used", what_to_do=what_to_do)
    return ",".join(checked)


def _check_options(options: Mapping[str, object]) -> dict[str, str]:
    checked: dict[str, str] = {}
    for name, value in options.items():
        if not isinstance(name, str) or not name.removeprefix(_PREFIX):
            what_to_do = "name it as Kafka's documentation does"
            raise ConfigError(f"{name!r} is not the name of a Kafka option", what_to_do=what_to_do)
        bare = name.removeprefix(_PREFIX)
        if isinstance(value, EnvironmentSecret | FileSecret):
            value = place_of(value)
        if not isinstance(value, str):
            raise make_option_error(bare, f"it must be text, not {type(value).__name__}", "write it as text")
        if bare == "bootstrap.servers":
            raise make_option_error(bare, "it is given twice", "use bootstrap_servers only")
        if bare.startswith(("sasl.login.", "sasl.oauthbearer.")) and bare not in OAUTH_OPTIONS:
            known = " and ".join(sorted(OAUTH_OPTIONS))
            raise make_option_error(bare, f"of Java's login handler Python has only {known}", "leave it out")
        if bare not in CONNECTION_OPTIONS:
            raise make_option_error(
                bare,
                "flinkish_spark also talks to Kafka from Python and does not know it there",
                closest(bare, CONNECTION_OPTIONS)
                or "leave it out; settings of the producer go into a sink's producer=, those of the consumer "
                "into a source's reader_options=",
            )
        if _is_place(bare):
            secret_of(value.strip(), bare)  # Raises if it is an invalid reference.
        if checked.setdefault(bare, value) != value:
            what_to_do = f"keep one of {bare!r} and {_PREFIX + bare!r}"
            raise make_option_error(bare, "it is given twice with different values", what_to_do)
    return checked


def _take_sasl(left: dict[str, str], security_protocol: str) -> dict[str, object]:
    """Take the SASL options out of `left` and translate them for kafka-python."""
    mechanism, jaas = left.pop("sasl.mechanism", None), left.pop("sasl.jaas.config", None)
    wanted = security_protocol.startswith("SASL_")
    what_to_do = f"use one of {', '.join(_SASL_MODULES)}"
    if mechanism is None:
        if wanted or jaas is not None:
            raise make_option_error(
                "sasl.mechanism", "GSSAPI, its default, is not known", what_to_do, missing=True
            )
        return {}
    if mechanism not in _SASL_MODULES:
        raise make_option_error("sasl.mechanism", f"it is {mechanism!r}", what_to_do)
    if jaas is None and not wanted:
        return {}
    if mechanism == "OAUTHBEARER":
        source = take_token_source(left, _jaas_options(jaas, mechanism), take_tls)
        return {"sasl_mechanism": mechanism, **source}
    fields, module = _jaas_options(jaas, mechanism) or {}, _SASL_MODULES[mechanism]
    user, password = fields.get("username"), fields.get("password")
    is_token = fields.get("tokenauth", "").lower() == "true"
    if is_token or not user or not password:
        # The error never contains a part of `jaas`.
        raise make_option_error(
            "sasl.jaas.config",
            "Python cannot use a delegation token" if is_token else f"{mechanism} needs one of its form",
            f'write it as: {module} required username="..." password="...";',
            missing=jaas is None,
        )
    if mechanism != "PLAIN":
        # Both are separators in SCRAM (RFC 5802), which kafka-python does not escape.
        user = user.replace("=", "=3D").replace(",", "=2C")
    return {
        "sasl_mechanism": mechanism,
        "sasl_plain_username": user,
        "sasl_plain_password": _Secret(password),
    }


def _jaas_options(jaas: str | None, mechanism: str) -> dict[str, str] | None:
    entry = _JAAS.fullmatch(jaas or "")
    # Some distributions move Kafka's classes to another package.
    if entry is None or entry[1].rpartition(".")[2] != _SASL_MODULES[mechanism].rpartition(".")[2]:
        return None
    return {name: _unquote(value) for name, value in re.findall(_JAAS_OPTION, entry[2])}


def _unquote(text: str) -> str:
    def unescape(escape: re.Match[str]) -> str:
        code = escape[1]
        return chr(int(code, 8)) if code[0] in "01234567" else _JAAS_ESCAPED.get(code, code)

    return _JAAS_ESCAPE.sub(unescape, text[1:-1]) if text[0] in "\"'" else text


class _Secret(str):
    """A string that a log line or a traceback shows as hidden."""

    __slots__ = ()

    def __repr__(self) -> str:
        return _HIDDEN


_LOGIN_REFUSALS = (
    kafka_errors.AuthorizationError,
    kafka_errors.IllegalSaslStateError,
    kafka_errors.SaslAuthenticationFailedError,
    kafka_errors.UnsupportedSaslMechanismError,
)
#: The broker died during the handshake; another attempt may succeed.
_TLS_CUT_SHORT = (ssl.SSLEOFError, ssl.SSLSyscallError, ssl.SSLZeroReturnError)
#: OpenSSL's codes for a certificate of another host name or address.
_OTHER_NAME = (62, 64)
_THROTTLE_POLL_S = 0.005
#: Least time to connect and log in; otherwise a third of the request timeout.
_LEAST_SETUP_MS = 3_000


def connect_admin(arguments: Mapping[str, object], servers: str, within_ms: int) -> Any:
    made: list[tuple[KafkaNetClient, _Manager]] = []

    def make(**configs: Any) -> KafkaNetClient:
        net = NetworkSelector(**configs)
        patience_ms = max(_LEAST_SETUP_MS, int(configs["request_timeout_ms"]) // 3)
        manager = _Manager(net, **{**configs, "socket_connection_setup_timeout_ms": patience_ms})
        made.append((KafkaNetClient(net, manager), manager))
        return made[-1][0]

    if isinstance(tokens := arguments.get("sasl_oauth_token_provider"), Tokens):
        # Fetch a token now: this error says what the endpoint answered, a failed login would not.
        tokens.token()
    try:
        admin = KafkaAdminClient(**arguments, bootstrap_timeout_ms=max(1, within_ms), kafka_client=make)
    except (kafka_errors.KafkaError, OSError) as failed:
        # A failed constructor leaves its thread and sockets behind; they would pile up while a broker is
        # down.
        reason: BaseException = failed
        for client, manager in made:
            reason = manager.failure or reason
            client.close()
            manager._net.stop()
        if isinstance(reason, _LOGIN_REFUSALS):
            raise AuthorizationError(
                f"Kafka at {servers} refuses the login",
                why=str(reason),
                what_to_do="correct security.protocol, sasl.mechanism, or the login in sasl.jaas.config",
                bootstrap_servers=servers,
            ) from reason
        if (broken := _final_tls_error(reason)) is not None:
            raise _make_tls_error(servers, broken) from reason
        raise reason from None
    for _, manager in made:
        manager.opening = False
    return admin


class _Manager(KafkaConnectionManager):  # type: ignore[misc]  # kafka-python has no types
    """Remembers the last failure while opening, and gives up if another attempt cannot help."""

    # While a broker throttles this client, requests wait here. kafka-python would refuse them, which looks
    # like a lost connection: the client would close it and lose all other requests on it.

    #: False after opening: closing the manager then would leave other requests without an answer.
    opening = True
    failure: BaseException | None = None

    def __init__(self, *args: Any, **configs: Any) -> None:
        super().__init__(*args, **configs)
        self._waiting: dict[Any, deque[tuple[Any, int | None, Future]]] = {}

    def send(self, request: Any, node_id: Any = None, request_timeout_ms: int | None = None) -> Future:
        """Send a request after those that wait for the same broker; to any broker without `node_id`."""
        try:
            connection = self.get_connection(self.least_loaded_node() if node_id is None else node_id)
        except kafka_errors.NodeNotReadyError as unknown:
            return Future().failure(unknown)
        if connection not in self._waiting:
            if not connection.paused or connection.closed:
                return _send_request(connection, request, request_timeout_ms)
            self._waiting[connection] = deque()
            self._net.call_soon(lambda: self._send_when_allowed(connection))
        answer = Future()
        self._waiting[connection].append((request, request_timeout_ms, answer))
        return answer

    def least_loaded_node(self) -> Any:
        found = super().least_loaded_node()
        throttling = (node for node, one in self._conns.items() if one.paused and not one.closed)
        return next(throttling, None) if found is None else found

    async def _send_when_allowed(self, connection: Any) -> None:
        waiting = self._waiting[connection]
        try:
            while waiting:
                while connection.paused and not connection.closed:
                    await self._net.sleep(_THROTTLE_POLL_S)
                request, request_timeout_ms, answer = waiting.popleft()
                sent = _send_request(connection, request, request_timeout_ms)
                sent.add_callback(answer.success).add_errback(answer.failure)
        finally:
            del self._waiting[connection]

    def get_connection(self, node_id: Any, timeout_ms: float | None = None, **how: Any) -> Any:
        if timeout_ms is not None and len(self.cluster.bootstrap_brokers()) > 1:
            # kafka-python would spend the whole timeout on the first broker that it tries, which may hang.
            timeout_ms = min(timeout_ms, self.config["socket_connection_setup_timeout_ms"])
        connection = super().get_connection(node_id, timeout_ms, **how)
        if self.opening:
            connection.init_future.add_errback(self._on_failure)
        return connection

    def _on_failure(self, error: BaseException) -> None:
        if self.closed or not self.opening:
            return  # closed by us; the first reason counts
        # A SASL mechanism may raise any type.
        ours = isinstance(error, kafka_errors.KafkaError | OSError)
        self.failure = error if ours else kafka_errors.KafkaConnectionError(error)
        # kafka-python would retry until its timeout, which can lock an account.
        if isinstance(error, _LOGIN_REFUSALS) or _final_tls_error(error) is not None:
            self._net.call_soon(self.close)

    async def _build_transport(self, *args: Any, **how: Any) -> Any:
        # kafka-python drops data that arrives together with the end of the stream, such as a broker's answer
        # that the password is wrong.
        transport = await super()._build_transport(*args, **how)
        receive = transport._sock_recv
        ended: list[Any] = []

        def receive_all_before_the_end() -> tuple[bytes, Any]:
            data, error = (b"", ended.pop()) if ended else receive()
            if data and error is not None:
                ended.append(error)  # returned by the next call, which follows at once
                error = None
            return data, error

        transport._sock_recv = receive_all_before_the_end
        return transport


def _send_request(connection: Any, request: Any, request_timeout_ms: int | None) -> Future:
    try:
        return connection.send_request(request, request_timeout_ms=request_timeout_ms)
    except RuntimeError as closed:
        # kafka-python raises this if the socket was closed meanwhile.
        return Future().failure(kafka_errors.KafkaConnectionError(str(closed)))


def _final_tls_error(error: BaseException) -> ssl.SSLError | None:
    # kafka-python keeps the error as context or as an argument.
    for candidate in (error, error.__context__, *error.args):
        if isinstance(candidate, ssl.SSLError) and not isinstance(candidate, _TLS_CUT_SHORT):
            return candidate
    return None


def _make_tls_error(servers: str, error: ssl.SSLError) -> RetriableError:
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = f"the broker's certificate is not accepted: {error.verify_message.rstrip('.')}"
        what_to_do = (
            "use a name of the broker that its certificate holds; an empty "
            "ssl.endpoint.identification.algorithm turns the check off"
            if error.verify_code in _OTHER_NAME
            else "give the authority that signed it in ssl.truststore.location or ssl.truststore.certificates"
        )
    elif "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        why = f"the broker does not accept the client's certificate, or wants one: {reason}"
        what_to_do = "give one that it trusts in ssl.keystore.location or ssl.keystore.key"
    else:
        why = str(error)
        what_to_do = "check that security.protocol fits the port, and TLS versions and ciphers"
    return RetriableError(
        f"There is no TLS connection to Kafka at {servers}",
        why=why,
        what_to_do=what_to_do,
        bootstrap_servers=servers,
        kind="TLS",
    )
