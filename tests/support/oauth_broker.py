"""A local broker that lets in whoever has a token of an identity provider's, signed and not expired."""

from __future__ import annotations

from pathlib import Path

from flinkish_spark.testing.broker import _HOST, LocalBroker, free_port

_PACKAGE = "org.apache.kafka.common.security.oauthbearer"
_VALIDATOR = f"{_PACKAGE}.OAuthBearerValidatorCallbackHandler"
_LISTENER = "listener.name.sasl_plaintext.oauthbearer"


class OAuthBroker(LocalBroker):
    """A :class:`LocalBroker` whose clients log in by OAUTHBEARER; it itself has a listener of its own.

    Parameters
    ----------
    directory, jars_dir
        As for :class:`LocalBroker`.
    keys
        JSON Web Key Set of whoever signs tokens.
    session_ms
        After how long a client must log in again; a token that expires before ends it earlier.
    """

    def __init__(self, directory: Path, *, jars_dir: Path, keys: Path, session_ms: int) -> None:
        super().__init__(directory, jars_dir=jars_dir)
        self._keys, self._session_ms = keys.resolve(), session_ms
        self._own_port = free_port(*self._ports)
        self._ports.append(self._own_port)

    def _security_properties(self) -> dict[str, str]:
        doors = f"SASL_PLAINTEXT://{self.bootstrap_servers},ITSELF://{_HOST}:{self._own_port}"
        return {
            "listeners": f"{doors},{self._controller}",
            "advertised.listeners": doors,
            "listener.security.protocol.map": ",".join(
                ["CONTROLLER:PLAINTEXT", "SASL_PLAINTEXT:SASL_PLAINTEXT", "ITSELF:PLAINTEXT"]
            ),
            "inter.broker.listener.name": "ITSELF",
            "sasl.enabled.mechanisms": "OAUTHBEARER",
            "connections.max.reauth.ms": str(self._session_ms),
            # Without both the broker believes any token that has the right form.
            "sasl.oauthbearer.jwt.validator.class": f"{_PACKAGE}.BrokerJwtValidator",
            "sasl.oauthbearer.jwks.endpoint.url": self._keys.as_uri(),
            f"{_LISTENER}.sasl.jaas.config": f"{_PACKAGE}.OAuthBearerLoginModule required;",
            f"{_LISTENER}.sasl.server.callback.handler.class": _VALIDATOR,
        }

    def _jvm_options(self) -> list[str]:
        # Which keys a broker may believe is said on its command line (KIP-1139).
        allowed = "-Dorg.apache.kafka.sasl.oauthbearer.allowed"
        return [f"{allowed}.urls={self._keys.as_uri()}", f"{allowed}.files={self._keys}"]

    def _probe_arguments(self) -> dict[str, object]:
        return {"bootstrap_servers": f"{_HOST}:{self._own_port}"}
