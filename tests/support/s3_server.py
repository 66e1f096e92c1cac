"""``python -m tests.support.s3_server HOST PORT``: moto's S3, one request at a time.

As shipped its server is threaded, looks whether a key is free and then stores: one of 150 races had two
winners.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class _Silent(WSGIRequestHandler):
    # Clients keep their connections.
    protocol_version = "HTTP/1.1"

    def log(self, *args: Any, **kwargs: Any) -> None:
        pass


def main(host: str, port: int) -> None:
    lock, app = threading.Lock(), DomainDispatcherApplication(create_backend_app)

    def one_at_a_time(environ: Any, start_response: Any) -> Iterable[bytes]:
        with lock:
            return list(app(environ, start_response))

    make_server(host, port, one_at_a_time, threaded=True, request_handler=_Silent).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
