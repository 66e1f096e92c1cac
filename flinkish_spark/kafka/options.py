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
from flinkish_spark.kafka._tls import take_tls

_PREFIX = "kafka."
_SERVER = re.compile(r"(?:[A-Za-z][A-Za-z0-9_]*://)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}")
_SECRET = re.compile(r"password|jaas|secret|token|key", re.IGNORECASE)
#: Hidden although the pattern matches only by accident; a file's place is no secret.
_NOT_SECRET = frozenset({"ssl.keystore.location", "ssl.keystore.type"})
_HIDDEN = "<hidden>"

#: One entry of a JAAS configuration, as Kafka's Java client splits it: module, flag, options.
_JAAS_WORD = r"[\w.$-]++"
_JAAS_OPTION = rf"""\s*({_JAAS_WORD})\s*=\s*("(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'|{_JAAS_WORD})"""
_JAAS = re.compile(rf"\s*({_JAAS_WORD})\s+\w++((?:{_JAAS_OPTION})*+)\s*;\s*", re.DOTALL)
_JAAS_ESCAPE = re.compile(r"\\([0-3][0-7]{0,2}|[4-7][0-7]?|.)", re.DOTALL)
_JAAS_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
#: Mechanism -> the login module that Kafka's Java client needs for it.
_SASL_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
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
#: Options of the Java client that have a meaning there only; harmless to leave out here.
_JAVA_ONLY = frozenset({"ssl.enabled.protocols", "ssl.protocol", "ssl.provider"})


def is_connection_option(option: str) -> bool:
    """Return whether `option`, without the prefix ``kafka.``, says how to reach Kafka.

    The rest are settings of a producer or a consumer.
    """
    return option == "client.id" or option in _MILLISECONDS or option.startswith(_CONNECTION_PREFIXES)


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

        Call it in the process that connects, before every connect: it reads the files named in
        the options, and with TLS options the result holds an ``ssl_context``, which cannot be
        pickled. Certificates and keys must be PEM, as files or as text in the options
        (``ssl.truststore.type`` and ``ssl.keystore.type`` PEM); Python cannot read JKS or PKCS12.

        At level DEBUG kafka-python's own logger ``kafka`` prints what it sends, and PLAIN sends the
        password; SCRAM does not.

        Raises
        ------
        ConfigError
            If an option has no counterpart in kafka-python, or a file or key cannot be used; the
            message names the option.
        """
        assert isinstance(self.bootstrap_servers, tuple)
        servers = [server.rpartition("://")[2] for server in self.bootstrap_servers]
        arguments: dict[str, object] = {"bootstrap_servers": servers}
        # Kafka's Java client trims all values as well.
        left = {name: value.strip() for name, value in self.options.items()}
        if "client.id" in left:
            arguments["client_id"] = left.pop("client.id")
        if "security.protocol" in left:
            arguments["security_protocol"] = _one_of(
                "security.protocol", left.pop("security.protocol"), _SECURITY_PROTOCOLS
            )
        for name in sorted(left.keys() & _MILLISECONDS.keys()):
            arguments[_MILLISECONDS[name]] = _milliseconds(name, left.pop(name))
        arguments.update(_take_sasl(left, str(arguments.get("security_protocol", ""))))
        arguments.update(take_tls(left))
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


def _take_sasl(left: dict[str, str], security_protocol: str) -> dict[str, object]:
    """Move the SASL options out of `left` and translate them."""
    mechanism, jaas = left.pop("sasl.mechanism", None), left.pop("sasl.jaas.config", None)
    wanted = security_protocol.startswith("SASL_")
    if mechanism is None:
        if wanted or jaas is not None:
            raise ConfigError(
                "Kafka option 'sasl.mechanism' is missing",
                why="its default GSSAPI is not supported",
                what_to_do=f"use one of {', '.join(_SASL_MODULES)}",
                option="sasl.mechanism",
            )
        return {}
    if mechanism not in _SASL_MODULES:
        raise ConfigError(
            f"Kafka option 'sasl.mechanism' cannot be {mechanism!r}",
            what_to_do=f"use one of {', '.join(_SASL_MODULES)}",
            option="sasl.mechanism",
        )
    if jaas is None and not wanted:
        return {}
    user, password = _jaas_login(jaas, mechanism)
    if mechanism != "PLAIN":
        # In SCRAM both separate fields (RFC 5802); kafka-python leaves that to its caller.
        user = user.replace("=", "=3D").replace(",", "=2C")
    return {
        "sasl_mechanism": mechanism,
        "sasl_plain_username": user,
        "sasl_plain_password": _Secret(password),
    }


def _jaas_login(jaas: str | None, mechanism: str) -> tuple[str, str]:
    """Return name and password; the error never holds a part of `jaas`."""
    entry = _JAAS.fullmatch(jaas or "")
    fields = {name: _unquoted(value) for name, value in re.findall(_JAAS_OPTION, entry[2])} if entry else {}
    module = _SASL_MODULES[mechanism]
    # Some distributions move Kafka's classes to a package of their own.
    named = entry is not None and entry[1].rpartition(".")[2] == module.rpartition(".")[2]
    token = fields.get("tokenauth", "").lower() == "true"
    if not named or token or not fields.get("username") or not fields.get("password"):
        raise ConfigError(
            f"Kafka option 'sasl.jaas.config' {'is missing' if jaas is None else 'cannot be used'}",
            why="Python cannot use a delegation token" if token else f"{mechanism} needs one of its form",
            what_to_do=f'write it as: {module} required username="..." password="...";',
            option="sasl.jaas.config",
        )
    return fields["username"], fields["password"]


def _unquoted(text: str) -> str:
    def meant(escape: re.Match[str]) -> str:
        code = escape[1]
        return chr(int(code, 8)) if code[0] in "01234567" else _JAAS_ESCAPED.get(code, code)

    return _JAAS_ESCAPE.sub(meant, text[1:-1]) if text[0] in "\"'" else text


class _Secret(str):
    """A string that a log line or a traceback shows as hidden."""

    __slots__ = ()

    def __repr__(self) -> str:
        return _HIDDEN
