"""``python -m tests.support.s3_server HOST PORT [google]``: moto's S3, one request at a time.

As shipped its server is threaded, looks whether a key is free and then stores: one of 150 races had two
winners.

With ``google`` it speaks as Google Cloud's store does to clients of its XML interface, which is S3's with
other names: conditions by generation, headers of ``x-goog-``, a 404 for who deletes what is missing.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

#: moto looks at the service in it, and at nothing else.
SIGNED = (
    "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=none"
)


class _Silent(WSGIRequestHandler):
    # Clients keep their connections.
    protocol_version = "HTTP/1.1"

    def log(self, *args: Any, **kwargs: Any) -> None:
        pass


class _AsGoogle:
    """Translates headers between Google's clients and an application that is S3; one request at a time."""

    def __init__(self, app: Any) -> None:
        self._app, self._generations = app, itertools.count(1_000)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        google = {name: environ.pop(name) for name in list(environ) if name.startswith("HTTP_X_GOOG_")}
        environ["HTTP_AUTHORIZATION"] = SIGNED
        # moto reads the bucket out of the path as it came, and Google's clients escape slashes and dashes.
        query = environ.get("QUERY_STRING")
        path = quote(environ["PATH_INFO"].encode("latin-1"))
        environ["RAW_URI"] = environ["REQUEST_URI"] = f"{path}?{query}" if query else path
        if google.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None) == "0":
            environ["HTTP_IF_NONE_MATCH"] = "*"
        for name, value in google.items():
            environ[name.replace("X_GOOG", "X_AMZ")] = value

        def answer(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            told = [(name.lower().replace("x-amz-", "x-goog-"), value) for name, value in headers]
            return start_response(status, [*told, ("x-goog-generation", str(next(self._generations)))], *more)

        if environ["REQUEST_METHOD"] == "DELETE":
            there: list[str] = []
            look = {**environ, "REQUEST_METHOD": "HEAD"}
            list(self._app(look, lambda status, headers, *more: there.append(status)))
            if there[0].startswith("404"):
                environ["REQUEST_METHOD"] = "GET"
        return list(self._app(environ, answer))


def main(host: str, port: int, speaks: str = "") -> None:
    lock, app = threading.Lock(), DomainDispatcherApplication(create_backend_app)
    if speaks == "google":
        app = _AsGoogle(app)

    def one_at_a_time(environ: Any, start_response: Any) -> Iterable[bytes]:
        with lock:
            return list(app(environ, start_response))

    make_server(host, port, one_at_a_time, threaded=True, request_handler=_Silent).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
