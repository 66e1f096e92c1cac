"""Bearer tokens for SASL OAUTHBEARER: from an identity provider's token endpoint, or from a file.

It has the options of Kafka's `OAuthBearerLoginCallbackHandler` for Java's client: the grant is
`client_credentials` (RFC 6749, 4.4), or a file contains the token.

- The process keeps a token for four fifths of its lifetime, as Java's client does. Brokers that set
  `connections.max.reauth.ms` ask for a new one later than that.
- Redirects are refused: one would send the client's secret to another host.
- No message and no `repr` contains a secret or a token.
"""

from __future__ import annotations

import base64
import json
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import kafka.errors as kafka_errors
from kafka.net.sasl.oauth import AbstractTokenProvider

from flinkish_spark.core.clock import Clock, SystemClock
from flinkish_spark.core.errors import AuthorizationError, ConfigError

_HANDLER = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler"
_URL, _HANDLER_OPTION = "sasl.oauthbearer.token.endpoint.url", "sasl.login.callback.handler.class"
_READ_TIMEOUT, _URLENCODE = "sasl.login.read.timeout.ms", "sasl.oauthbearer.header.urlencode"
#: Options of the Java client without a meaning here: refresh, retries, names of claims.
_JAVA_ONLY = frozenset(
    {
        *("sasl.login.connect.timeout.ms", "sasl.login.refresh.buffer.seconds"),
        *("sasl.login.refresh.min.period.seconds", "sasl.login.refresh.window.factor"),
        *("sasl.login.refresh.window.jitter", "sasl.login.retry.backoff.max.ms"),
        *("sasl.login.retry.backoff.ms", "sasl.oauthbearer.scope.claim.name"),
        "sasl.oauthbearer.sub.claim.name",
    }
)
OAUTH_OPTIONS = _JAVA_ONLY | {_URL, _HANDLER_OPTION, _READ_TIMEOUT, _URLENCODE}
_EXTENSION = "extension_"
#: Names and values of extensions that Kafka's client accepts (RFC 7628).
_EXTENSION_NAME, _EXTENSION_VALUE = re.compile(r"[A-Za-z]+"), re.compile(r"[\x21-\x7E \t\r\n]+")
_DEFAULT_READ_TIMEOUT_MS = 10_000
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
    """Take the options of OAUTHBEARER out of `left` and translate them for kafka-python."""
    given = {name: left.pop(name) for name in OAUTH_OPTIONS & left.keys()}
    handler, url = given.get(_HANDLER_OPTION, ""), given.get(_URL, "")
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
        module = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
        raise make_option_error(
            "sasl.jaas.config",
            "OAUTHBEARER needs one of its form",
            f'write it as: {module} required clientId="..." clientSecret="..." scope="...";',
        )
    timeout = given.get(_READ_TIMEOUT, str(_DEFAULT_READ_TIMEOUT_MS))
    if not timeout.isdecimal() or int(timeout) == 0:
        raise make_option_error(_READ_TIMEOUT, "it is no number of ms above 0", "give a whole number")
    extensions = {
        name.removeprefix(_EXTENSION): value for name, value in jaas.items() if name.startswith(_EXTENSION)
    }
    for name, value in extensions.items():
        if name == "auth" or not _EXTENSION_NAME.fullmatch(name) or not _EXTENSION_VALUE.fullmatch(value):
            what_to_do = "use letters for its name"
            raise make_option_error("sasl.jaas.config", f"the extension {name!r} cannot be sent", what_to_do)
    source = TokenSource(
        url,
        jaas.get("clientId", "").strip(),
        jaas.get("clientSecret", "").strip(),
        jaas.get("scope", "").strip(),
        int(timeout),
        given.get(_URLENCODE, "false").lower() == "true",
        tuple(sorted((name, value) for name, value in jaas.items() if name.startswith("ssl."))),
    )
    return {"sasl_oauth_token_provider": Tokens(source, extensions, take_tls)}


def make_option_error(option: str, why: str, what_to_do: str, *, missing: bool = False) -> ConfigError:
    """Return the error of an make_option_error connection option; `why` must not quote a secret."""
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
    read_timeout_ms: int = _DEFAULT_READ_TIMEOUT_MS
    urlencode: bool = False
    #: TLS options of the endpoint, by Kafka's names.
    tls: tuple[tuple[str, str], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class _Token:
    text: str = field(repr=False)
    fresh_until_ms: int


#: Newest token of each source in this process; a forked worker may use it, too.
_known: dict[TokenSource, _Token] = {}


class Tokens(AbstractTokenProvider):  # type: ignore[misc]  # kafka-python has no types
    def __init__(
        self,
        source: TokenSource,
        extensions: Mapping[str, str],
        take_tls: TakeTls,
        *,
        clock: Clock = _CLOCK,
    ) -> None:
        super().__init__()
        self._source, self._extensions = source, dict(extensions)
        self._take_tls, self._clock = take_tls, clock

    def token(self) -> str:
        """Return the cached token, or fetch a new one if less than a fifth of its lifetime is left."""
        if self._source.url.lower().startswith("file:"):
            return self._from_file()
        known = _known.get(self._source)
        if known is None or self._clock.wall_ms() >= known.fresh_until_ms:
            known = _known[self._source] = self._fetch()
        return known.text

    def extensions(self) -> dict[str, str]:
        return self._extensions

    def _from_file(self) -> str:
        path = urllib.request.url2pathname(urllib.parse.urlsplit(self._source.url).path)
        try:
            return _check_token(Path(path).read_text(encoding="ascii").strip())
        except (OSError, ValueError) as unreadable:
            raise kafka_errors.KafkaConnectionError(
                f"the token in {path} cannot be read: {type(unreadable).__name__}"
            ) from None

    def _fetch(self) -> _Token:
        asked_ms = self._clock.wall_ms()
        try:
            body = self._post()
        except urllib.error.HTTPError as refused:
            self._raise_refusal(refused)
        except (OSError, ValueError) as failed:
            reason = getattr(failed, "reason", None) or type(failed).__name__
            raise kafka_errors.KafkaConnectionError(
                f"the token endpoint {self._place} did not answer: {reason}"
            ) from None
        try:
            answer = json.loads(body)
            text = _check_token(answer["access_token"])
        except (ValueError, KeyError, TypeError):
            raise kafka_errors.KafkaConnectionError(
                f"the answer of the token endpoint {self._place} has no access_token"
            ) from None
        return _Token(text, asked_ms + int(_life_ms(text, answer) * _USED_SHARE))

    def _post(self) -> bytes:
        source = self._source
        names = (source.client_id, source.client_secret)
        if source.urlencode:
            names = (urllib.parse.quote_plus(names[0]), urllib.parse.quote_plus(names[1]))
        login = base64.b64encode(":".join(names).encode()).decode("ascii")
        asked = {"grant_type": "client_credentials", **({"scope": source.scope} if source.scope else {})}
        request = urllib.request.Request(
            source.url,
            data=urllib.parse.urlencode(asked).encode("ascii"),
            headers={
                "Accept": "application/json",
                "Authorization": f"Basic {login}",
                "Content-Type": "application/x-www-form-urlencoded",
            },
        )
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if source.tls:
            handlers.append(urllib.request.HTTPSHandler(context=self._take_tls(dict(source.tls))))
        opener = urllib.request.build_opener(*handlers)
        with opener.open(request, timeout=source.read_timeout_ms / 1000) as answer:
            return bytes(answer.read(_MOST_ANSWER_BYTES))

    @property
    def _place(self) -> str:
        parts = urllib.parse.urlsplit(self._source.url)
        return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"

    def _raise_refusal(self, refused: urllib.error.HTTPError) -> NoReturn:
        if refused.code not in _REFUSALS:
            raise kafka_errors.KafkaConnectionError(
                f"the token endpoint {self._place} answers {refused.code}"
            ) from None
        raise AuthorizationError(
            f"the token endpoint {self._place} gives the client {self._source.client_id!r} no token",
            why=f"it answers {refused.code}",
            what_to_do="correct clientId, clientSecret and scope in sasl.jaas.config",
            bootstrap_servers=self._place,
        ) from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Turns a redirect into an error."""

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
