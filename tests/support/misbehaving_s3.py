"""A server that speaks enough of S3, or of Google's XML API, and answers as it is told to."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import threading
import time
from collections import Counter, deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from flinkish_spark.core.store_spec import StoreSpec

#: Of both: what metadata begin with, and how a client says that the key must be free.
_META = ("x-amz-meta-", "x-goog-meta-")
_FREE = {"If-None-Match": "*", "x-goog-if-generation-match": "0"}
_ERROR = "<Error><Code>{}</Code><Message>as told</Message></Error>"


class Answer(enum.Enum):
    """What becomes of one request; those that store are for creates."""

    OBEYS = "obeys"
    STORES_THEN_DROPS = "stores, then drops the connection"
    STORES_THEN_500 = "stores, then answers 500"
    STORES_THEN_503 = "stores, then answers 503"
    STORES_THEN_HANGS = "stores, then hangs"
    DROPS = "drops the connection"
    SAYS_500 = "answers 500"
    SAYS_503 = "answers 503"
    SAYS_400_TOO_SLOW = "answers 400, the body came too slowly"
    HANGS = "hangs"
    SAYS_409 = "answers 409, a conflict without effect"
    SAYS_403 = "answers 403"
    SAYS_404 = "answers that there is no bucket"

    @property
    def stores(self) -> bool:
        return self.name.startswith("STORES") or self is Answer.OBEYS


class MisbehavingS3:
    """The server; use it as a context.

    Parameters
    ----------
    keeps_metadata
        Whether objects are given back with the metadata that they came with.
    obeys_conditions
        Whether a create is refused whose key is taken; else it overwrites what is there.
    """

    #: How long a client of :attr:`spec` waits for an answer, and how long the server hangs.
    timeout_ms, hang_s = 300, 0.8

    def __init__(self, *, keeps_metadata: bool = True, obeys_conditions: bool = True) -> None:
        self.objects: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.creates: deque[Answer] = deque()
        self.looks: deque[Answer] = deque()
        #: Answers given once there are no others.
        self.always_create = self.always_look = Answer.OBEYS
        self.requests: Counter[str] = Counter()
        self._keeps_metadata, self._obeys_conditions = keeps_metadata, obeys_conditions
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def spec(self) -> StoreSpec:
        options = {
            "endpoint": f"http://127.0.0.1:{self._server.server_port}",
            "allow_http": "true",
            "region": "us-east-1",
            "skip_signature": "true",
            "timeout": f"{self.timeout_ms} ms",
        }
        return StoreSpec.parse("s3://bucket/job", options)

    @property
    def google_spec(self) -> StoreSpec:
        """The same store as Google's, which sends no credentials; sets a variable of this process."""
        account = {"gcs_base_url": f"http://127.0.0.1:{self._server.server_port}", "disable_oauth": True}
        key = json.dumps({**account, "client_email": "", "private_key": "", "private_key_id": ""})
        os.environ["FLINKISH_TEST_GOOGLE_ACCOUNT"] = key
        options = {"allow_http": "true", "timeout": f"{self.timeout_ms} ms"}
        options["service_account_key"] = "env:FLINKISH_TEST_GOOGLE_ACCOUNT"
        return StoreSpec.parse("gs://bucket/job", options)

    def __enter__(self) -> MisbehavingS3:
        # Often asked whether it is over: tests start dozens.
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    # -- the service ----------------------------------------------------------------------------
    def create(self, path: str, body: bytes, metadata: dict[str, str]) -> tuple[int, bool]:
        """Return a status, and whether to hang up in place of giving it."""
        with self._lock:
            self.requests["create"] += 1
            answer = self.creates.popleft() if self.creates else self.always_create
            is_free = not self._obeys_conditions or path not in self.objects
            if answer.stores and is_free:
                self.objects[path] = body, metadata if self._keeps_metadata else {}
        if answer is Answer.OBEYS:
            return (200 if is_free else 412), False
        return self._answer(answer)

    def look(self) -> tuple[int, bool]:
        with self._lock:
            self.requests["look"] += 1
            answer = self.looks.popleft() if self.looks else self.always_look
        return (0, False) if answer is Answer.OBEYS else self._answer(answer)

    def _answer(self, answer: Answer) -> tuple[int, bool]:
        if answer in (Answer.STORES_THEN_HANGS, Answer.HANGS):
            time.sleep(self.hang_s)
        statuses = [word for word in answer.name.split("_") if word.isdecimal()]
        return (int(statuses[0]), False) if statuses else (0, True)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                names = [name for name in self.headers if name.lower().startswith(_META)]
                metadata = {name.lower(): str(self.headers[name]) for name in names}
                if any(self.headers.get(name) == value for name, value in _FREE.items()):
                    self._reply(*service.create(self.path, body, metadata))
                    return
                service.objects[self.path] = body, metadata
                self._reply(200)

            def do_HEAD(self) -> None:
                self._get(*service.look())

            def do_GET(self) -> None:
                self._get(0, False)

            def do_DELETE(self) -> None:
                self._reply(204 if service.objects.pop(self.path, None) else 404, body="")

            def do_POST(self) -> None:
                # A bulk delete of what a client has tried out.
                asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
                key = asked.partition("<Key>")[2].partition("</Key>")[0]
                service.objects.pop(f"/bucket/{key}", None)
                self._reply(200, body=f"<DeleteResult><Deleted><Key>{key}</Key></Deleted></DeleteResult>")

            def _get(self, status: int, hangs_up: bool) -> None:
                if status or hangs_up:
                    self._reply(status, hangs_up)
                elif self.path not in service.objects:
                    self._reply(404, body=_ERROR.format("NoSuchKey"))
                else:
                    body, metadata = service.objects[self.path]
                    self._reply(200, body=body.decode(), headers=metadata)

            def _reply(
                self,
                status: int,
                hangs_up: bool = False,
                body: str | None = None,
                headers: dict[str, str] | None = None,
            ) -> None:
                if hangs_up:
                    self.close_connection = True
                    with contextlib.suppress(OSError):
                        self.connection.shutdown(2)
                    return
                codes = {404: "NoSuchBucket", 409: "ConditionalRequestConflict", 400: "RequestTimeout"}
                if body is None:
                    body = "" if status < 300 else _ERROR.format(codes.get(status, "InternalError"))
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    for name, value in {"ETag": '"1"', "x-goog-generation": "1", **(headers or {})}.items():
                        self.send_header(name, value)
                    self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
                    self.send_header("Content-Length", str(len(body.encode())))
                    self.end_headers()
                    if self.command != "HEAD":
                        self.wfile.write(body.encode())

        return Handler
