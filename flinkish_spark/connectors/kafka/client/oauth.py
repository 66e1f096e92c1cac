"""Bearer tokens for SASL OAUTHBEARER: from an identity provider's token endpoint, or from a file.

The grant is `client_credentials` (RFC 6749, 4.4). The options are those of Kafka's
`OAuthBearerLoginCallbackHandler` that say where tokens come from; its others are refused.

- The process keeps a token for four fifths of its lifetime, as Java's client does. Brokers that set
  `connections.max.reauth.ms` ask for a new one later than that.
- Redirects are refused: one would send the client's secret to another host.
- No message and no `repr` contains a secret or a token.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kafka.errors as kafka_errors
from kafka.net.sasl.oauth import AbstractTokenProvider

from flinkish_spark.core.clock import Clock, SystemClock
from flinkish_spark.core.errors import AuthorizationError, ConfigError

_HANDLER = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler"
_MODULE = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
_URL, _HANDLER_OPTION = "sasl.oauthbearer.token.endpoint.url", "sasl.login.callback.handler.class"
OAUTH_OPTIONS = frozenset({_URL, _HANDLER_OPTION})
_EXTENSION = "extension_"
#: Names and values of extensions that Kafka's client accepts (RFC 7628).
_EXTENSION_NAME, _EXTENSION_VALUE = re.compile(r"(?!auth$)[A-Za-z]+"), re.compile(r"[\x21-\x7E \t\r\n]+")
_READ_TIMEOUT_S = 10
_MOST_ANSWER_BYTES = 1_000_000
#: Share of a token's lifetime for which it is used.
_USED_SHARE = 0.8
#: Status codes for a wrong client, secret or scope; a retry may lock the client.
_REFUSALS = (400, 401, 403)
_CLOCK = SystemClock()

#: Makes the endpoint's SSL context from options by Kafka's names; None if there are none of them.
TakeTls = Callable[[dict[str, str]], ssl.SSLContext | None]


def take_token_source(
    left: dict[str, str], jaas: Mapping[str, str] | None, take_tls: TakeTls
) -> dict[str, object]:
    handler, url = left.pop(_HANDLER_OPTION, ""), left.pop(_URL, "")
    if handler.rpartition(".")[2] != _HANDLER.rpartition(".")[2]:
        raise make_option_error(
            _HANDLER_OPTION,
            "without a handler, Java's client makes unsecured tokens, which are for development only"
            if not handler
            else "Python cannot run a handler of your own",
            f"set it to {_HANDLER}",
            missing=not handler,
        )
    kind = urllib.parse.urlsplit(url).scheme.lower()
    if kind not in ("http", "https", "file"):
        raise make_option_error(_URL, "tokens come from there", "give an https or file URL", missing=not url)
    if jaas is None or (kind != "file" and not (jaas.get("clientId") and jaas.get("clientSecret"))):
        raise make_option_error(
            "sasl.jaas.config",
            "OAUTHBEARER needs one of its form",
            f'write it as: {_MODULE} required clientId="..." clientSecret="..." scope="...";',
        )
    extensions = {
        name.removeprefix(_EXTENSION): value for name, value in jaas.items() if name.startswith(_EXTENSION)
    }
    for name, value in extensions.items():
        if not _EXTENSION_NAME.fullmatch(name) or not _EXTENSION_VALUE.fullmatch(value):
            what_to_do = "use letters for its name"
            raise make_option_error("sasl.jaas.config", f"the extension {name!r} cannot be sent", what_to_do)
    client, secret, scope = (jaas.get(name, "").strip() for name in ("clientId", "clientSecret", "scope"))
    tls = tuple(sorted((name, value) for name, value in jaas.items() if name.startswith("ssl.")))
    source = TokenSource(url, client, secret, scope, tls)
    return {"sasl_oauth_token_provider": Tokens(source, extensions, take_tls)}


def make_option_error(option: str, why: str, what_to_do: str, *, missing: bool = False) -> ConfigError:
    """Return the error of a connection option; `why` must not quote a secret."""
    return ConfigError(
        f"Kafka option {option!r} {'is missing' if missing else 'cannot be used'}",
        why=why,
        what_to_do=what_to_do,
    )


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Endpoint, client and scope of tokens; the key of the token cache."""

    url: str
    client_id: str
    client_secret: str = field(repr=False)
    scope: str = ""
    #: TLS options of the endpoint, by Kafka's names.
    tls: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def shown_url(self) -> str:
        """The URL without user, password and query."""
        parts = urllib.parse.urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"


@dataclass(frozen=True, slots=True)
class _Token:
    text: str = field(repr=False)
    fresh_until_ms: int


#: Newest token of each source in this process; a forked worker may use it, too.
_known: dict[TokenSource, _Token] = {}


class Tokens(AbstractTokenProvider):  # type: ignore[misc]  # kafka-python has no types
    def __init__(
        self, source: TokenSource, extensions: Mapping[str, str], take_tls: TakeTls, *, clock: Clock = _CLOCK
    ) -> None:
        super().__init__()
        self._source, self._extensions = source, dict(extensions)
        self._take_tls, self._clock = take_tls, clock

    def token(self) -> str:
        """Return the cached token, or fetch a new one if less than a fifth of its lifetime is left."""
        if self._source.url.lower().startswith("file:"):
            return self._read_file()
        known = _known.get(self._source)
        if known is None or self._clock.wall_ms() >= known.fresh_until_ms:
            known = _known[self._source] = self._fetch()
        return known.text

    def extensions(self) -> dict[str, str]:
        return self._extensions

    def _read_file(self) -> str:
        path = urllib.request.url2pathname(urllib.parse.urlsplit(self._source.url).path)
        try:
            return _check_token(Path(path).read_text(encoding="ascii").strip())
        except (OSError, ValueError) as unreadable:
            raise kafka_errors.KafkaConnectionError(
                f"the token in {path} cannot be read: {type(unreadable).__name__}"
            ) from None

    def _fetch(self) -> _Token:
        asked_ms, place = self._clock.wall_ms(), self._source.shown_url
        try:
            body = self._post()
        except urllib.error.HTTPError as refused:
            if refused.code not in _REFUSALS:
                raise kafka_errors.KafkaConnectionError(
                    f"the token endpoint {place} answers {refused.code}"
                ) from None
            raise AuthorizationError(
                f"the token endpoint {place} gives the client {self._source.client_id!r} no token",
                why=f"it answers {refused.code}",
                what_to_do="correct clientId, clientSecret and scope in sasl.jaas.config",
                bootstrap_servers=place,
            ) from None
        except (OSError, ValueError, http.client.HTTPException) as failed:
            reason = getattr(failed, "reason", None) or type(failed).__name__
            raise kafka_errors.KafkaConnectionError(
                f"the token endpoint {place} did not answer: {reason}"
            ) from None
        try:
            answer = json.loads(body)
            text = _check_token(answer["access_token"])
        except (ValueError, KeyError, TypeError):
            raise kafka_errors.KafkaConnectionError(
                f"the answer of the token endpoint {place} has no access_token"
            ) from None
        return _Token(text, asked_ms + int(_life_ms(text, answer) * _USED_SHARE))

    def _post(self) -> bytes:
        source = self._source
        login = base64.b64encode(f"{source.client_id}:{source.client_secret}".encode()).decode("ascii")
        asked = {"grant_type": "client_credentials", **({"scope": source.scope} if source.scope else {})}
        request = urllib.request.Request(
            source.url,
            data=urllib.parse.urlencode(asked).encode("ascii"),
            headers={"Accept": "application/json", "Authorization": f"Basic {login}"},
        )
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if source.tls:
            handlers.append(urllib.request.HTTPSHandler(context=self._take_tls(dict(source.tls))))
        opener = urllib.request.build_opener(*handlers)
        with opener.open(request, timeout=_READ_TIMEOUT_S) as answer:
            return bytes(answer.read(_MOST_ANSWER_BYTES))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Refuse to follow the redirect."""


def _check_token(token: object) -> str:
    if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7E]+", token):
        raise ValueError("no token")
    return token


def _life_ms(token: str, answer: Mapping[str, Any]) -> int:
    """Return a token's lifetime from the endpoint's answer, or else from its claims; 0 if unknown."""
    seconds = answer.get("expires_in")
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds > 0:
        return int(seconds * 1000)
    try:
        encoded = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))
        return max(0, int((claims["exp"] - claims["iat"]) * 1000))
    except (IndexError, KeyError, TypeError, ValueError):
        return 0
