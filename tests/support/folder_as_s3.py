"""A folder, read as S3 serves a bucket; a process of its own, for delta-rs waits for answers with the GIL."""

from __future__ import annotations

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_TIME = "Thu, 01 Jan 2026 00:00:00 GMT"


class FolderAsS3:
    """The bucket `bkt`; use it as a context."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log, self._out = folder.with_name("requests"), folder.with_name("is-out")
        self.options = {"allow_http": "true", "region": "us-east-1", "skip_signature": "true"}

    def __enter__(self) -> FolderAsS3:
        self.folder.mkdir()
        command = [sys.executable, __file__, str(self.folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.options["endpoint"] = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def refuse_data(self) -> None:
        """From now on Parquet files are found, and reads of them answered by an error."""
        self._out.touch()

    def requests(self) -> list[str]:
        """Return the requests since the last call."""
        found = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder = Path()

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        key = unquote(asked.path).removeprefix("/bkt").removeprefix("/")
        query = parse_qs(asked.query)
        is_list = "list-type" in query
        with self.folder.with_name("requests").open("a") as log:
            log.write(f"{'LIST' if is_list else self.command} {key}\n")
        path = self.folder / key
        is_read = self.command == "GET" and key.endswith(".parquet")
        if is_list:
            self._reply(200, self._listed(query.get("prefix", [""])[0]).encode())
        elif not path.is_file():
            self._reply(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif is_read and self.folder.with_name("is-out").exists():
            # A client tries again behind 503, for minutes; what it says in the end is of the same kind.
            self._reply(400, b"<Error><Code>SlowDown</Code></Error>")
        elif span := self.headers.get("Range"):
            data = path.read_bytes()
            first, _, last = span.removeprefix("bytes=").partition("-")
            begin = int(first) if first else len(data) - int(last)
            end = min(int(last) + 1, len(data)) if first and last else len(data)
            self._reply(206, data[begin:end], f"bytes {begin}-{end - 1}/{len(data)}")
        else:
            self._reply(200, path.read_bytes())

    def _listed(self, prefix: str) -> str:
        found = {one.relative_to(self.folder).as_posix(): one for one in sorted(self.folder.rglob("*"))}
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{one.stat().st_size}</Size><ETag>1</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, one in found.items()
            if one.is_file() and key.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"

    def _reply(self, status: int, body: bytes, span: str = "") -> None:
        self.send_response(status)
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", _TIME)
        if span:
            self.send_header("Content-Range", span)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


if __name__ == "__main__":
    _Handler.folder = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
