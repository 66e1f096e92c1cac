"""Access rules for requests: host names, origins, and the token for changes.

A foreign page that is open in the same browser can send requests to any server of this machine. So:

1. A request must name this server as its host. A request with another host (DNS rebinding) is refused.
2. A request that a browser sends for a page (it has an `Origin`) must come from this server's own page.
3. A change must have the token, in a header that pages of other origins cannot set. GET changes nothing.
4. If the server listens beyond this machine, reading needs the token, too.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Maximum size of a request's body; our largest one is a path.
_MOST_BODY = 65_536
_READING = frozenset({"GET", "HEAD"})
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def new_token() -> str:
    return secrets.token_urlsafe(24)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Access:
    host: str
    token: str = field(repr=False)
    #: Further host names of the server, for example behind a proxy.
    names: frozenset[str] = frozenset()
    can_change: bool = True

    def why_refused(self, method: str, path: str, headers: Headers) -> tuple[int, str] | None:
        """Return HTTP status and reason if a request is refused; else None."""
        host = headers.get("host", "")
        if not self._is_mine(host):
            return 421, "this server does not answer to that name; give it with --name"
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return 403, "the request comes from a page of another origin"
        if headers.get("sec-fetch-site") == "cross-site" and method not in _READING:
            return 403, "the request comes from a page of another site"
        is_change = method not in _READING
        if is_change and not self.can_change:
            return 403, "this server only shows jobs"
        is_api = path not in PUBLIC_PATHS
        if (is_change or (is_api and not is_loopback(self.host))) and not self._has_token(headers):
            return 401, "the token of this server is needed; it was shown when the server started"
        return None

    def _is_mine(self, host: str) -> bool:
        name = (
            host.rpartition(":")[0]
            if host.rpartition(":")[2].isdecimal() and not host.endswith("]")
            else host
        )
        return is_loopback(name) or name == self.host or name in self.names

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.token.encode())


#: The page's own files, which contain no data of jobs.
PUBLIC_PATHS = frozenset({"/", "/page.css", "/page.js", "/icon.svg"})


class Guard:
    """The middleware that applies the rules to each request first, and adds headers to each answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        refused = self._access.why_refused(scope["method"], scope["path"], headers)
        length = headers.get("content-length", "0")
        if refused is None and not (length.isdecimal() and int(length) <= _MOST_BODY):
            refused = 413, "the request is too long"
        if refused is None and "transfer-encoding" in headers:
            refused = 411, "the request has to say how long it is"
        if refused is None:
            await self._app(scope, receive, send_with_headers)
            return
        status, why = refused
        await errors(status, why)(scope, receive, send_with_headers)


def errors(status: int, *texts: str) -> Response:
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"errors": list(texts)}, status_code=status, headers=headers)
