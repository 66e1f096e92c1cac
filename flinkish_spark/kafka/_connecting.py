"""Opening a kafka-python admin client, or saying at once why it cannot be opened.

Rules of this file, where kafka-python 3.0.12 has others:

- A refused login or certificate ends the attempt, as in Kafka's Java client. kafka-python would
  ask again until its time is over, which can lock an account, and forget the reason.
- What a broker said before it hung up is heard. kafka-python drops what arrives together with the
  end of the stream, and that is how a broker says that the password is wrong.
- A client that was not opened leaves neither thread nor socket behind.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

import kafka.errors as kafka_errors
from kafka import KafkaAdminClient
from kafka.net.compat import KafkaNetClient
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector

from flinkish_spark.errors import AuthorizationError, EnvironmentFault

_LOGIN_REFUSALS = (
    kafka_errors.AuthorizationError,
    kafka_errors.IllegalSaslStateError,
    kafka_errors.SaslAuthenticationFailedError,
    kafka_errors.UnsupportedSaslMechanismError,
)
#: A broker that dies during a handshake; another attempt may succeed.
_TLS_CUT_SHORT = (ssl.SSLEOFError, ssl.SSLSyscallError, ssl.SSLZeroReturnError)
#: OpenSSL's codes for a certificate of another host name or address.
_OTHER_NAME = (62, 64)


def connected_admin(arguments: Mapping[str, object], servers: str, within_ms: int) -> Any:
    """Return a kafka-python admin client that has reached a broker.

    Parameters
    ----------
    arguments
        Keyword arguments of kafka-python.
    servers
        What the messages call the brokers.
    within_ms
        How long to try.

    Raises
    ------
    AuthorizationError
        If a broker refused the login.
    EnvironmentFault
        If TLS failed in a way that another attempt cannot change.
    kafka.errors.KafkaError, OSError
        The last reason why no broker could be reached.
    """
    made: list[tuple[KafkaNetClient, _Manager]] = []

    def make(**configs: Any) -> KafkaNetClient:
        net = NetworkSelector(**configs)
        manager = _Manager(net, **configs)
        made.append((KafkaNetClient(net, manager), manager))
        return made[-1][0]

    try:
        admin = KafkaAdminClient(**arguments, bootstrap_timeout_ms=max(1, within_ms), kafka_client=make)
    except (kafka_errors.KafkaError, OSError) as failed:
        # The constructor leaves its thread and sockets behind when it raises: hours of a broker being
        # down would otherwise pile them up.
        reason: BaseException = failed
        for client, manager in made:
            reason = manager.failure or reason
            client.close()
            manager._net.stop()
        if isinstance(reason, _LOGIN_REFUSALS):
            raise _login_refused(servers, reason) from reason
        if (broken := _final_tls_error(reason)) is not None:
            raise _tls_failed(servers, broken) from reason
        raise reason from None
    for _, manager in made:
        manager.opening = False
    return admin


class _Manager(KafkaConnectionManager):  # type: ignore[misc]  # kafka-python has no types
    """While opening, remembers the last failure, and gives up when asking again cannot help."""

    #: Later on a closed manager would leave the requests of others without an answer.
    opening = True
    failure: BaseException | None = None

    def get_connection(self, *args: Any, **how: Any) -> Any:
        connection = super().get_connection(*args, **how)
        if self.opening:
            connection.init_future.add_errback(self._failed)
        return connection

    def _failed(self, error: BaseException) -> None:
        if self.closed or not self.opening:
            return  # closed by us: the reason for that is the one that counts
        # A mechanism's own checks raise what they like.
        ours = isinstance(error, kafka_errors.KafkaError | OSError)
        self.failure = error if ours else kafka_errors.KafkaConnectionError(error)
        if isinstance(error, _LOGIN_REFUSALS) or _final_tls_error(error) is not None:
            self._net.call_soon(self.close)

    async def _build_transport(self, *args: Any, **how: Any) -> Any:
        transport = await super()._build_transport(*args, **how)
        receive = transport._sock_recv
        ended: list[Any] = []

        def receive_all_before_the_end() -> tuple[bytes, Any]:
            data, error = (b"", ended.pop()) if ended else receive()
            if data and error is not None:
                ended.append(error)  # the next call, which comes at once, tells
                error = None
            return data, error

        transport._sock_recv = receive_all_before_the_end
        return transport


def _final_tls_error(error: BaseException) -> ssl.SSLError | None:
    # kafka-python keeps the error as context or as argument of its own.
    for candidate in (error, error.__context__, *error.args):
        if isinstance(candidate, ssl.SSLError) and not isinstance(candidate, _TLS_CUT_SHORT):
            return candidate
    return None


def _login_refused(servers: str, error: BaseException) -> AuthorizationError:
    return AuthorizationError(
        f"Kafka at {servers} refuses the login",
        why=str(error),
        what_to_do="correct security.protocol, sasl.mechanism, or name and password in sasl.jaas.config",
        bootstrap_servers=servers,
    )


def _tls_failed(servers: str, error: ssl.SSLError) -> EnvironmentFault:
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
    return EnvironmentFault(
        f"There is no TLS connection to Kafka at {servers}",
        why=why,
        what_to_do=what_to_do,
        bootstrap_servers=servers,
    )
