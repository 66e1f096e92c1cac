"""Lines of text from a TCP socket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flinkish_spark.arguments import instance_of, refused_as_config_errors, unusable
from flinkish_spark.errors import ConfigError, InputLostError
from flinkish_spark.protocol.limits import MOST_MS, Limit, checked_limit, checked_whole
from flinkish_spark.sources.rates import RateLimit
from flinkish_spark.sources.socket_connection import Connection, Peer
from flinkish_spark.sources.socket_log import (
    MOST_LINE_BYTES,
    SocketLogReader,
    SocketLogWriter,
    forget_before,
)
from flinkish_spark.sources.split_positions import Offset, logged_positions
from flinkish_spark.sources.splits import SplitSource

if TYPE_CHECKING:
    from flinkish_spark.job_dir import JobDir
    from flinkish_spark.protocol.scans import Position
    from flinkish_spark.runtime.spark_log import LoggedOffsets

_SPLIT = "lines"


class SocketTextSource(SplitSource):
    r"""Reads lines that a server sends.

    A line is written to a log in the job directory and is durable before the job sees it: from then on it
    takes part in checkpoints like a record of any other source. What the peer sent and this process had not
    written down when it died is gone, since nobody can ask a socket twice.

    The job ends when the peer closes the connection in order and no retry is left; an error then fails
    the query, and the restart strategy decides.

    Parameters
    ----------
    host, port
        Of the server. One connection per job, whatever reads the stream.
    delimiter
        Between lines. With ``"\n"``, a ``"\r"`` in front of it is taken away. What comes behind the last
        one is a line, too, when the connection ends.
    max_retries
        How many tries in a row to connect again may bring nothing; 0 for none, UNLIMITED for ever.
    retry_delay_ms
        Between two tries.
    max_line_bytes
        A longer line fails the job.
    rate
        What micro-batches may take.

    Raises
    ------
    ConfigError
        An argument cannot be used.

    Examples
    --------
    >>> lines = SocketTextSource("logs.example.org", 9_999, max_retries=5)
    >>> lines.schema
    'value STRING'
    """

    kind = "socket"
    schema = "value STRING"
    is_bounded = True

    def __init__(
        self,
        host: str,
        port: int,
        *,
        delimiter: str = "\n",
        max_retries: Limit = 0,
        retry_delay_ms: int = 500,
        max_line_bytes: int = 1 << 24,
        rate: RateLimit | None = None,
    ) -> None:
        for name, text in (("host", host), ("delimiter", delimiter)):
            if not instance_of(name, text, str, what_to_do="give a text"):
                raise ConfigError(f"{name} is empty", what_to_do="give a text")
            if any("\ud800" <= letter <= "\udfff" for letter in text):
                raise unusable(name, text, wanted="a text of Unicode characters", what_to_do="give a text")
        with refused_as_config_errors("see the documentation of SocketTextSource"):
            checked_whole("port", port, least=1, most=65_535)
            checked_limit("max_retries", max_retries, least=0)
            checked_whole("retry_delay_ms", retry_delay_ms, least=0, most=MOST_MS)
            checked_whole("max_line_bytes", max_line_bytes, least=1, most=MOST_LINE_BYTES)
        self.rate = RateLimit() if rate is None else rate
        self.peer = Peer(host, port, delimiter.encode(), max_retries, retry_delay_ms, max_line_bytes)
        self._connection: Connection | None = None

    # -- between micro-batches ------------------------------------------------------------------
    def splits(self) -> Sequence[str]:
        """Return the one split."""
        return [_SPLIT]

    def latest(self, split: str, start: int, limit: int | None) -> int:
        """Return how far the log goes; connect, if no other process has the connection.

        Raises
        ------
        SourceUnavailable
            The tries are used up.
        """
        log = SocketLogReader(self.job_folder)
        if log.ends_at() is None:
            self._connect()
        end = log.advance(start, limit)
        # Only now: what came before a failure is not held back by it.
        if end == start and self._connection is not None and self._connection.failure is not None:
            raise self._connection.failure
        return end

    def _connect(self) -> None:
        """Begin to receive, unless this process or another one does already."""
        if self._connection is None:
            writer = SocketLogWriter.take(self.job_folder)
            if writer is not None:
                self._connection = Connection(self.peer, writer)
                self._connection.start()

    def end(self, split: str) -> int | None:
        """Return where the lines ended; None while more may come."""
        return SocketLogReader(self.job_folder).ends_at()

    def records_between(self, split: str, start: int, end: int) -> int:
        """Count the lines: positions are bytes."""
        return sum(1 for _ in SocketLogReader(self.job_folder).read(start, end))

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # -- in a task ------------------------------------------------------------------------------
    def read(self, split: str, start: int, end: int) -> Iterator[tuple[str]]:
        """Yield lines out of the log; bytes that are no UTF-8 are replaced."""
        for line in SocketLogReader(self.job_folder).read(start, end):
            yield (line.decode("utf-8", errors="replace"),)

    # -- on the driver --------------------------------------------------------------------------
    def released(self, offsets: Mapping[str, Offset]) -> None:
        """Delete segments of the log that no checkpoint needs."""
        forget_before(self.job_folder, offsets[_SPLIT])

    def check_input(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> None:
        """Refuse to go on, or back, to lines that were deleted."""
        super().check_input(job_dir, uid, position)
        first, last = SocketLogReader(self.job_folder).extent()
        for scan in logged_positions(position, uid) if position is not None else ():
            at = scan.offsets.get(_SPLIT, 0)
            if not first <= at <= last:
                raise InputLostError(
                    f"lines of source '{uid}' are gone: it stood at {at}, and there are {first} to {last}",
                    why="they lay behind the oldest retained checkpoint, or the folder was cleared",
                    what_to_do="go back to a retained checkpoint, or start a new job with a new job_dir",
                )

    def check_start(self, uid: str, position: Position) -> None:
        """Refuse a savepoint of another job: its lines are in that job's directory.

        Raises
        ------
        InputLostError
            Always.
        """
        raise InputLostError(
            f"the source '{uid}' cannot go on where the savepoint stood",
            why="what came over its socket is kept in the directory of the job that took the savepoint",
            what_to_do="give the source another uid, and allow its old position to be left out: "
            "non_restored=NonRestoredState.ALLOW",
        )

    def __getstate__(self) -> dict[str, Any]:
        # A connection belongs to one process.
        return {**self.__dict__, "_connection": None}
