"""The one connection of a socket source: from bytes to lines in the log, in a thread of its own."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass

from flinkish_spark.errors import ConfigError, FlinkishError
from flinkish_spark.protocol.limits import Limit, exceeds
from flinkish_spark.sources.socket_log import SocketLogWriter
from flinkish_spark.sources.splits import SourceUnavailable

_RECEIVE_BYTES = 1 << 16
_CONNECT_TIMEOUT_S = 10.0
#: How long a stop may have to wait for a quiet peer.
_LOOK_UP_S = 0.2


@dataclass(frozen=True)
class Peer:
    """Whom to read from, and how stubbornly.

    Parameters
    ----------
    max_retries
        How many tries in a row may bring nothing; 0 for one connection.
    retry_delay_ms
        Between two tries.
    """

    host: str
    port: int
    delimiter: bytes
    max_retries: Limit
    retry_delay_ms: int
    max_line_bytes: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class LineTooLong(ConfigError):
    """A line is longer than allowed; `lines` are those in front of it that ended in the same piece."""

    def __init__(self, length: int, most: int, lines: list[bytes]) -> None:
        super().__init__(
            f"a line of {length} bytes came over the socket, and max_line_bytes is {most}",
            what_to_do="raise max_line_bytes, or look whether the delimiter is the peer's",
        )
        self.lines = lines


class LineSplitter:
    r"""Cuts a stream of bytes into lines, wherever the pieces end.

    Examples
    --------
    >>> lines = LineSplitter(b"\n", 100)
    >>> lines.feed(b"a\r\nb"), lines.feed(b"c\nd"), lines.finish()
    ([b'a'], [b'bc'], [b'd'])
    """

    def __init__(self, delimiter: bytes, max_line_bytes: int) -> None:
        self._delimiter, self._most = delimiter, max_line_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that end in `data`.

        Raises
        ------
        LineTooLong
            A line is longer than allowed.
        """
        *lines, self._rest = (self._rest + data).split(self._delimiter)
        bare = [self._bare(line) for line in lines]
        for at, line in enumerate((*lines, self._rest)):
            if len(line) > self._most:
                raise LineTooLong(len(line), self._most, bare[:at])
        return bare

    def finish(self) -> list[bytes]:
        """Return what came behind the last delimiter, if anything did."""
        rest, self._rest = self._rest, b""
        return [self._bare(rest)] if rest else []

    def _bare(self, line: bytes) -> bytes:
        return line.removesuffix(b"\r") if self._delimiter == b"\n" else line


class Connection:
    """Receives until the peer is done or tries are used up.

    Parameters
    ----------
    writer
        Of the log; closed with this.
    """

    def __init__(self, peer: Peer, writer: SocketLogWriter) -> None:
        self._peer, self._writer = peer, writer
        self._stopping = threading.Event()
        #: Why no more lines will come, though the peer did not end them.
        self.failure: FlinkishError | None = None
        self._thread = threading.Thread(target=self._run, name=f"flinkish-socket-{peer}", daemon=True)

    def start(self) -> None:
        """Begin in a thread."""
        self._thread.start()

    def close(self) -> None:
        """End the connection; what it has received is in the log."""
        self._stopping.set()
        self._thread.join(_CONNECT_TIMEOUT_S + 1)
        self._writer.close()

    def _run(self) -> None:
        try:
            self._receive_until_over()
        except FlinkishError as error:
            self.failure = error
        except Exception as error:
            self.failure = SourceUnavailable(f"reading from {self._peer} failed", why=repr(error))

    def _receive_until_over(self) -> None:
        tries = 0
        while not self._stopping.is_set() and not self._writer.is_ended:
            found, trouble = self._one_connection()
            if self._stopping.is_set():
                return
            tries = 1 if found else tries + 1
            if exceeds(tries, self._peer.max_retries):
                if trouble is None:
                    self._writer.end()
                    return
                raise SourceUnavailable(
                    f"no more lines come from {self._peer}",
                    why=str(trouble),
                    what_to_do="see to the peer; the restart strategy says how often the job tries again",
                )
            self._stopping.wait(self._peer.retry_delay_ms / 1_000)

    def _one_connection(self) -> tuple[bool, OSError | None]:
        """Return whether anything came, and how it ended: None if the peer closed it in order."""
        splitter, found = LineSplitter(self._peer.delimiter, self._peer.max_line_bytes), False
        try:
            address = (self._peer.host, self._peer.port)
            with socket.create_connection(address, _CONNECT_TIMEOUT_S) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.settimeout(_LOOK_UP_S)
                while not self._stopping.is_set():
                    try:
                        data = connection.recv(_RECEIVE_BYTES)
                    except TimeoutError:
                        continue
                    if not data:
                        break
                    found = True
                    try:
                        self._keep(splitter.feed(data))
                    except LineTooLong as error:
                        # Nobody sends again what came in front of it.
                        self._keep(error.lines)
                        raise
            trouble = None
        except OSError as error:
            trouble = error
        # A line does not go on in another connection, and what was received is not thrown away.
        self._keep(splitter.finish())
        return found, trouble

    def _keep(self, lines: list[bytes]) -> None:
        if lines:
            self._writer.append(lines)
