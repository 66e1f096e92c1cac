"""A local broker that asks who you are: TLS, and a password or a client's certificate."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.testing.broker import _HOST, LocalBroker, free_port
from tests.support.tls import LocalCertificates

_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
_SCRAM_MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512")
#: A user of the broker itself: markers of transactions come in by a listener.
_ITSELF = "the-broker-itself"
#: What needs no quoting, neither in JAAS nor on StorageTool's command line.
_UNQUOTED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


class SecureBroker(LocalBroker):
    """A :class:`LocalBroker` without an open door for clients.

    Clients come in by one of two listeners: `bootstrap_servers` wants TLS and a login by SASL
    (PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512), `certificate_servers` wants TLS with a client's
    certificate. The controller's own port stays open to this machine: it is a test's broker.

    Parameters
    ----------
    certificates
        Whom the broker trusts and how it shows who it is; the files must stay where they are.
    users
        Passwords by name, of letters, digits, ``-`` and ``_``; the same for every mechanism.
        SCRAM keeps those of the first start. Do not use a password that matters: it is on a command
        line for a moment.
    directory, jars_dir, port, extra_properties, start_timeout_ms
        As for :class:`LocalBroker`.

    Examples
    --------
    >>> from flinkish_spark.testing import make_certificates
    >>> broker = SecureBroker(  # doctest: +SKIP
    ...     "build/doc-broker",
    ...     jars_dir="build/broker-jars",
    ...     certificates=make_certificates("build/doc-certificates"),
    ...     users={"alice": "wonderland"},
    ... )
    >>> with broker:  # doctest: +SKIP
    ...     KafkaConnection(broker.bootstrap_servers, broker.login("alice"))
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        jars_dir: str | Path,
        certificates: LocalCertificates,
        users: Mapping[str, str],
        port: int = 0,
        extra_properties: Mapping[str, str] = MappingProxyType({}),
        start_timeout_ms: int = 60_000,
    ) -> None:
        super().__init__(
            directory,
            jars_dir=jars_dir,
            port=port,
            extra_properties=extra_properties,
            start_timeout_ms=start_timeout_ms,
        )
        for name, password in users.items():
            if not name or not password or not _UNQUOTED.issuperset(name + password):
                raise ConfigError(
                    f"User {name!r} of the broker cannot be used",
                    what_to_do="make name and password of letters, digits, '-' and '_'",
                )
        self._certificates = certificates
        self._users = dict(users)
        self._own_password = secrets.token_hex(16)
        self._certificate_port = free_port(*self._ports)
        self._ports.append(self._certificate_port)

    @property
    def certificate_servers(self) -> str:
        """``host:port`` for clients that show a certificate; the same after every restart."""
        return f"{_HOST}:{self._certificate_port}"

    def login(self, user: str, mechanism: str = "SCRAM-SHA-512") -> dict[str, str]:
        """Return the options by which `user` comes in at `bootstrap_servers`; holds the password."""
        return self._options(user, self._users[user], mechanism)

    def _options(self, user: str, password: str, mechanism: str) -> dict[str, str]:
        module = _PLAIN if mechanism == "PLAIN" else _SCRAM
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": mechanism,
            "sasl.jaas.config": f'{module} required username="{user}" password="{password}";',
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self._certificates.authority),
        }

    def _security_properties(self) -> dict[str, str]:
        doors = f"SASL_SSL://{self.bootstrap_servers},SSL://{self.certificate_servers}"
        users = {_ITSELF: self._own_password, **self._users}
        known = " ".join(f'user_{name}="{password}"' for name, password in users.items())
        itself = f'username="{_ITSELF}" password="{self._own_password}"'
        return {
            "listeners": f"{doors},{self._controller}",
            "advertised.listeners": doors,
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,SASL_SSL:SASL_SSL,SSL:SSL",
            "inter.broker.listener.name": "SASL_SSL",
            "sasl.mechanism.inter.broker.protocol": "PLAIN",
            "sasl.enabled.mechanisms": ",".join(["PLAIN", *_SCRAM_MECHANISMS]),
            "listener.name.sasl_ssl.plain.sasl.jaas.config": f"{_PLAIN} required {itself} {known};",
            **{
                f"listener.name.sasl_ssl.{mechanism.lower()}.sasl.jaas.config": f"{_SCRAM} required;"
                for mechanism in _SCRAM_MECHANISMS
            },
            "listener.name.ssl.ssl.client.auth": "required",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self._certificates.server),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self._certificates.authority),
        }

    def _first_users(self) -> list[str]:
        return [
            argument
            for name, password in self._users.items()
            for mechanism in _SCRAM_MECHANISMS
            for argument in ("--add-scram", f"{mechanism}=[name={name},password={password}]")
        ]

    def _probe_arguments(self) -> dict[str, object]:
        options = self._options(_ITSELF, self._own_password, "PLAIN")
        return KafkaConnection(self.bootstrap_servers, options).to_client_arguments()
