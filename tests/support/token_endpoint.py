"""An identity provider on loopback: a token endpoint that signs what it gives, and its keys as a file."""

from __future__ import annotations

import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

_KEY_ID = "the-only-one"


class TokenEndpoint:
    """Answers `POST /token`, grant `client_credentials`.

    Parameters
    ----------
    clients
        Secret by client id; the id becomes the principal.
    life_s
        Of a token.

    Attributes
    ----------
    asked
        The scope of each request that was answered with a token.
    status, location
        What is answered in place of a token, if it is not 200.
    """

    def __init__(self, clients: dict[str, str], *, life_s: int = 3_600) -> None:
        self.clients, self.life_s = dict(clients), life_s
        self.asked: list[str] = []
        self.heads: list[dict[str, str]] = []
        self.status, self.location, self.body = 200, "", b""
        self._key = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                owner._answer(self)

            def log_message(self, *_: Any) -> None:
                """Be silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/token"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def options(self, client: str, secret: str = "", more: str = "") -> dict[str, str]:
        """Return the options by which a client logs in, for Java and Python."""
        package = "org.apache.kafka.common.security.oauthbearer"
        login = f'clientId="{client}" clientSecret="{secret or self.clients[client]}" {more}'
        return {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.login.callback.handler.class": f"{package}.OAuthBearerLoginCallbackHandler",
            "sasl.oauthbearer.token.endpoint.url": self.url,
            "sasl.jaas.config": f"{package}.OAuthBearerLoginModule required {login};",
        }

    def write_keys(self, file: Path) -> Path:
        """Write what brokers check signatures with, as a JSON Web Key Set."""
        numbers = self._key.public_key().public_numbers()
        key = {"kty": "RSA", "alg": "RS256", "use": "sig", "kid": _KEY_ID}
        key |= {name: _encoded(_bytes(getattr(numbers, name))) for name in ("n", "e")}
        file.write_text(json.dumps({"keys": [key]}), encoding="ascii")
        return file

    def token(self, client: str, scope: str) -> str:
        """Return a signed token."""
        now = int(time.time())
        claims = {"sub": client, "scope": scope or "kafka", "iat": now, "exp": now + self.life_s}
        head = {"alg": "RS256", "typ": "JWT", "kid": _KEY_ID}
        signed = ".".join(_encoded(json.dumps(part).encode()) for part in (head, claims))
        signature = self._key.sign(signed.encode("ascii"), padding.PKCS1v15(), hashes.SHA256())
        return f"{signed}.{_encoded(signature)}"

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        form = parse_qs(request.rfile.read(int(request.headers["Content-Length"])).decode())
        self.heads.append(dict(request.headers))
        kind, _, login = request.headers.get("Authorization", "").partition(" ")
        client, _, secret = base64.b64decode(login).decode().partition(":")
        known = kind == "Basic" and self.clients.get(client) == secret
        status = 401 if self.status == 200 and not known else self.status
        body = b"{}"
        if status == 200:
            scope = form.get("scope", [""])[0]
            self.asked.append(scope)
            given = {"access_token": self.token(client, scope), "token_type": "Bearer"}
            body = self.body or json.dumps({**given, "expires_in": self.life_s}).encode()
        request.send_response(status)
        if self.location:
            request.send_header("Location", self.location)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)


def _bytes(number: int) -> bytes:
    return number.to_bytes((number.bit_length() + 7) // 8, "big")


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")
