"""One description of how to reach Kafka, for Spark, for Java and for Python.

Users write connection settings once, under the names Spark and Kafka use. The three clients of
a job need them in three spellings. Secrets pass through here, so here they are hidden: no
``repr``, message or log line of this module holds the value of a secret option.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from flinkish_spark.errors import ConfigError

_PREFIX = "kafka."
_SERVER = re.compile(r"(?:[A-Za-z][A-Za-z0-9_]*://)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}")
_SECRET = re.compile(r"password|jaas|secret|token|key", re.IGNORECASE)
#: Hidden although the pattern matches only by accident; a file's place is no secret.
_NOT_SECRET = frozenset({"ssl.keystore.location", "ssl.keystore.type"})
_HIDDEN = "<hidden>"

_JAAS_FIELD = re.compile(r"""\b(username|password)\s*=\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""")
_JAAS_MODULES = ("PlainLoginModule", "ScramLoginModule")
_SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
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
#: Options of the Java client that have a meaning there only; harmless to leave out here.
_JAVA_ONLY = frozenset({"ssl.enabled.protocols", "ssl.protocol", "ssl.provider", "ssl.truststore.password"})


def is_secret(option: str) -> bool:
    """Return whether the value of `option` must never be printed."""
    bare = option.removeprefix(_PREFIX)
    return bare not in _NOT_SECRET and _SECRET.search(bare) is not None


@dataclass(frozen=True, slots=True, repr=False)
class KafkaConnection:
    """Where Kafka is and how to log in: a plain value, safe to print, checked on construction.

    Parameters
    ----------
    bootstrap_servers
        ``"host:port"``, several separated by commas, or a list of them.
    options
        Connection and security settings by Kafka's names, with or without the prefix ``kafka.``
        that Spark wants, such as ``{"kafka.security.protocol": "SASL_SSL"}``. Values are strings.

    Raises
    ------
    ConfigError
        If a server, an option's name or its value cannot be used. The message names the option,
        never a secret value.

    Examples
    --------
    >>> connection = KafkaConnection("broker:9092", {"kafka.security.protocol": "PLAINTEXT"})
    >>> connection.for_spark()["kafka.bootstrap.servers"]
    'broker:9092'
    """

    bootstrap_servers: str | list[str] | tuple[str, ...]
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bootstrap_servers", _checked_servers(self.bootstrap_servers))
        object.__setattr__(self, "options", MappingProxyType(_checked_options(self.options)))

    def __reduce__(self) -> tuple[type[KafkaConnection], tuple[str, dict[str, str]]]:
        # The read-only view of the options cannot be pickled, and a Spark task needs this value.
        return (KafkaConnection, (self.servers, dict(self.options)))

    def __hash__(self) -> int:
        return hash((self.servers, frozenset(self.options.items())))

    @property
    def servers(self) -> str:
        """The bootstrap servers as one comma-separated string."""
        assert isinstance(self.bootstrap_servers, tuple)
        return ",".join(self.bootstrap_servers)

    def __repr__(self) -> str:
        shown = {name: _HIDDEN if is_secret(name) else value for name, value in self.options.items()}
        return f"KafkaConnection({self.servers!r}, {shown!r})"

    def for_spark(self) -> dict[str, str]:
        """Return the options of ``spark.readStream.format("kafka")``; holds secrets in clear."""
        return {_PREFIX + name: value for name, value in self.for_java().items()}

    def for_java(self) -> dict[str, str]:
        """Return the properties of a Java Kafka client; holds secrets in clear."""
        return {"bootstrap.servers": self.servers, **self.options}

    def for_python(self) -> dict[str, object]:
        """Return the keyword arguments of a kafka-python client; holds secrets in clear.

        Certificates must be PEM files (``ssl.truststore.type`` and ``ssl.keystore.type`` PEM);
        kafka-python cannot read JKS or PKCS12 stores.

        Raises
        ------
        ConfigError
            If an option has no counterpart in kafka-python; the message names it.
        """
        assert isinstance(self.bootstrap_servers, tuple)
        servers = [server.rpartition("://")[2] for server in self.bootstrap_servers]
        arguments: dict[str, object] = {"bootstrap_servers": servers}
        left = dict(self.options)
        if "client.id" in left:
            arguments["client_id"] = left.pop("client.id")
        if "security.protocol" in left:
            arguments["security_protocol"] = _one_of(
                "security.protocol", left.pop("security.protocol"), _SECURITY_PROTOCOLS
            )
        for name in sorted(left.keys() & _MILLISECONDS.keys()):
            arguments[_MILLISECONDS[name]] = _milliseconds(name, left.pop(name))
        arguments.update(_take_sasl(left))
        arguments.update(_take_tls(left))
        unknown = sorted(left.keys() - _JAVA_ONLY)
        if unknown:
            raise ConfigError(
                f"Kafka option {unknown[0]!r} cannot be used",
                why="flinkish_spark also talks to Kafka from Python and does not know it there",
                what_to_do="remove it, or give it to the source or sink that needs it",
                option=unknown[0],
            )
        return arguments


def _checked_servers(servers: object) -> tuple[str, ...]:
    entries = servers.split(",") if isinstance(servers, str) else servers
    if not isinstance(entries, (list, tuple)) or not entries:
        raise ConfigError(
            "bootstrap_servers must be 'host:port' or a list of them", option="bootstrap_servers"
        )
    checked = []
    for entry in entries:
        server = entry.strip() if isinstance(entry, str) else entry
        if not isinstance(server, str) or not _SERVER.fullmatch(server):
            raise ConfigError(
                f"bootstrap server {entry!r} cannot be used",
                what_to_do="write it as host:port",
                option="bootstrap_servers",
            )
        if not 0 < int(server.rpartition(":")[2]) < 65536:
            raise ConfigError(f"bootstrap server {entry!r} has no such port", option="bootstrap_servers")
        checked.append(server)
    return tuple(checked)


def _checked_options(options: Mapping[str, str]) -> dict[str, str]:
    checked: dict[str, str] = {}
    for name, value in options.items():
        if not isinstance(name, str) or not name.removeprefix(_PREFIX):
            raise ConfigError(f"{name!r} is not the name of a Kafka option")
        bare = name.removeprefix(_PREFIX)
        if not isinstance(value, str):
            raise ConfigError(
                f"Kafka option {name!r} must be a string, not {type(value).__name__}", option=bare
            )
        if bare == "bootstrap.servers":
            raise ConfigError(
                f"Kafka option {name!r} is given twice", what_to_do="use bootstrap_servers only", option=bare
            )
        if checked.setdefault(bare, value) != value:
            raise ConfigError(
                f"Kafka option {bare!r} is given twice with different values",
                what_to_do=f"keep one of {bare!r} and {_PREFIX + bare!r}",
                option=bare,
            )
    return checked


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value.upper() not in allowed:
        raise ConfigError(
            f"Kafka option {name!r} cannot be {value!r}",
            what_to_do=f"use one of {', '.join(allowed)}",
            option=name,
        )
    return value.upper()


def _milliseconds(name: str, value: str) -> int:
    if not value.strip().isdecimal():
        raise ConfigError(f"Kafka option {name!r} must be a whole number, not {value!r}", option=name)
    return int(value)


def _take_sasl(left: dict[str, str]) -> dict[str, object]:
    """Move the SASL options out of `left` and translate them."""
    arguments: dict[str, object] = {}
    mechanism = left.pop("sasl.mechanism", None)
    if mechanism is not None:
        arguments["sasl_mechanism"] = _one_of("sasl.mechanism", mechanism, _SASL_MECHANISMS)
    jaas = left.pop("sasl.jaas.config", None)
    if jaas is not None:
        fields = {name: _unquoted(value) for name, value in _JAAS_FIELD.findall(jaas)}
        if not any(module in jaas for module in _JAAS_MODULES) or fields.keys() != {"username", "password"}:
            raise ConfigError(
                "Kafka option 'sasl.jaas.config' cannot be used",
                why=f"only {' and '.join(_JAAS_MODULES)} with a quoted username and password are understood",
                option="sasl.jaas.config",
            )
        arguments["sasl_plain_username"] = fields["username"]
        arguments["sasl_plain_password"] = fields["password"]
    return arguments


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1])


def _take_tls(left: dict[str, str]) -> dict[str, object]:
    """Move the TLS options out of `left` and translate them, PEM files only."""
    arguments: dict[str, object] = {}
    for store, target in (("truststore", ("ssl_cafile",)), ("keystore", ("ssl_certfile", "ssl_keyfile"))):
        kind = left.pop(f"ssl.{store}.type", "JKS")
        location = left.pop(f"ssl.{store}.location", None)
        if location is None:
            continue
        if kind.upper() != "PEM":
            raise ConfigError(
                f"Kafka option 'ssl.{store}.location' cannot be used",
                why=f"its type is {kind}, and Python reads PEM only",
                what_to_do=f"convert the store and set ssl.{store}.type to PEM",
                option=f"ssl.{store}.location",
            )
        arguments.update({name: location for name in target})
    password = left.pop("ssl.key.password", None)
    if password is not None:
        arguments["ssl_password"] = password
    if "ssl.endpoint.identification.algorithm" in left:
        # Kafka's way to say "do not check the host name" is an empty string.
        arguments["ssl_check_hostname"] = bool(left.pop("ssl.endpoint.identification.algorithm").strip())
    return arguments
