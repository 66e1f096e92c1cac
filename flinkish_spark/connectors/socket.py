"""A source of text lines from a TCP socket; lines are made durable before the job sees them."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import socket
import struct
import threading
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pyspark.sql import SparkSession

from flinkish_spark.connectors.rates import RateLimit
from flinkish_spark.connectors.split_positions import Offset, find_scan_positions
from flinkish_spark.connectors.splits import SourceUnavailable, SplitSource
from flinkish_spark.core.errors import (
    ConfigError,
    CorruptObjectError,
    FlinkishError,
    InputLostError,
    StoreError,
)
from flinkish_spark.core.fields import Range, TextPattern, check_arguments
from flinkish_spark.core.forks import OwnFile
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import LocalStore, ObjectMissing, make_directories, sync_directory
from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.protocol.limits import MOST_MS, Limit, exceeds
from flinkish_spark.protocol.plan_layout import Position

# The log is a folder of segments, each named by the position of its first byte in the log. A line is stored
# as a frame: length, checksum, bytes. A process that dies may leave a half-written frame; the next writer
# cuts it off. No reader has returned its position: readers return positions only after an fsync. The end of
# the input is marked by a separate file, so no line can be mistaken for it. One process writes at a time: it
# holds a lock on an open file, and the lock ends with the process.
_FRAME = struct.Struct(">II")
_ENDING, _LAST = ".log", "end"
#: Segments are deleted as a whole, so one should not be much larger than the lines of a few checkpoints.
SEGMENT_BYTES = 16 << 20
#: Longest frame; a greater length means that the file is damaged.
MOST_LINE_BYTES = 1 << 28


def find_segments(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    stems = [name.removesuffix(_ENDING) for name in names if name.endswith(_ENDING)]
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def _path(folder: Path, first: int) -> Path:
    return folder / f"{first:020d}{_ENDING}"


def _frames(file: BinaryIO, at: int) -> Iterator[tuple[int, bytes]]:
    """Yield the end position and bytes of each complete frame; `at` is the log position of `file`."""
    while True:
        head = file.read(_FRAME.size)
        if len(head) < _FRAME.size:
            return
        length, checksum = _FRAME.unpack(head)
        data = file.read(length) if length <= MOST_LINE_BYTES else b""
        if len(data) < length or _checksum(data) != checksum:
            return
        at += _FRAME.size + length
        yield at, data


def _checksum(data: bytes) -> int:
    # Starts at 1, so that zeros, which a file system may leave after a power cut, are not an empty line.
    return zlib.crc32(data, 1)


class SocketLogWriter:
    """Appends lines to the log; belongs to one thread of one process."""

    def __init__(self, folder: Path, lock: OwnFile) -> None:
        self._folder, self._lock = folder, lock
        known = find_segments(folder)
        self._first = known[-1] if known else 0
        self._file = self._open(_path(folder, self._first))
        self._at = max((after for after, _ in _frames(self._file, self._first)), default=self._first)
        self._file.truncate(self._at - self._first)
        self._file.seek(self._at - self._first)

    @property
    def is_ended(self) -> bool:
        return (self._folder / _LAST).exists()

    @classmethod
    def take(cls, folder: Path) -> SocketLogWriter | None:
        """Return a writer; None while another process holds the lock."""
        try:
            make_directories(folder)
            lock = OwnFile(folder / "lock", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return None
            return cls(folder, lock)
        except OSError as error:
            raise _to_store_error(folder, error) from error

    def append(self, lines: Sequence[bytes]) -> None:
        """Write lines; they are durable on return."""
        data = b"".join(_FRAME.pack(len(line), _checksum(line)) + line for line in lines)
        try:
            if self._at - self._first >= SEGMENT_BYTES:
                self._file.close()
                self._first = self._at
                self._file = self._open(_path(self._folder, self._first))
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            # This writer must not be used again.
            raise _to_store_error(self._folder, error) from error
        self._at += len(data)

    def end(self) -> None:
        LocalStore(self._folder).put(_LAST, str(self._at).encode())

    def _open(self, path: Path) -> BinaryIO:
        is_new = not path.exists()
        # Not opened for appending only, so that a half-written frame can be cut off.
        file = open(path, "w+b" if is_new else "r+b")  # noqa: SIM115 - held until close()
        if is_new:
            sync_directory(self._folder)
        return file

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        if self._lock.is_open:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()


class SocketLogReader:
    """Reads the log while a writer may append; may be used by any process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def extent(self) -> tuple[int, int]:
        known = find_segments(self._folder)
        return (known[0], known[-1] + _path(self._folder, known[-1]).stat().st_size) if known else (0, 0)

    def advance(self, start: int, limit: int | None) -> int:
        """Return the position after at most `limit` lines from `start` on; they are durable on return."""
        with contextlib.closing(self._lines(start, is_synced=True)) as lines:
            return max((at for at, _ in itertools.islice(lines, limit)), default=start)

    def _lines(self, start: int, *, is_synced: bool = False) -> Generator[tuple[int, bytes], None, None]:
        """Yield the lines from `start` on, each with the position after it; closing makes them durable."""
        known, at = find_segments(self._folder), start
        if start < (known[0] if known else 0) or (start and not known):
            raise InputLostError(
                f"the lines from position {start} of {self._folder} on are gone",
                why="they were before the oldest retained checkpoint, or the folder was cleared",
                what_to_do="restore the folder from a backup, or start a new job with a new job_dir",
            )
        ends = [*known[1:], None] if known else []
        for first in (one for one, end in zip(known, ends, strict=True) if end is None or end > start):
            if first > at:
                raise self._to_corrupt_error(at, first)
            with open(_path(self._folder, first), "rb") as file:
                before = file.seek(at - first) + first
                try:
                    for after, data in _frames(file, at):
                        at = after
                        yield at, data
                finally:
                    # The writer may not have called fsync yet.
                    if is_synced and at > before:
                        os.fsync(file.fileno())

    def ends_at(self) -> int | None:
        """Return the position after the last line, once the input has ended; None before that."""
        try:
            return int(LocalStore(self._folder).read(_LAST))
        except ObjectMissing:
            return None

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the lines between two positions that :meth:`advance` returned."""
        at = start
        for at, data in self._lines(start) if start < end else ():
            if at <= end:
                yield data
            if at >= end:
                break
        if at != end:
            raise self._to_corrupt_error(at, end)

    def _to_corrupt_error(self, at: int, end: int) -> CorruptObjectError:
        return CorruptObjectError(
            f"the log in {self._folder} cannot be read from position {at} to {end}",
            why="a line fails its checksum, or is gone",
            what_to_do="restore the folder from a backup",
        )


def delete_before(folder: Path, position: int) -> None:
    for first, following in itertools.pairwise(find_segments(folder)):
        if following <= position:
            _path(folder, first).unlink(missing_ok=True)


def _to_store_error(folder: Path, error: OSError) -> StoreError:
    return StoreError.from_os_error(
        error,
        f"the log of lines in {folder} cannot be written",
        what_to_do="check that the disk is there, has room, and may be written by this user",
    )


_RECEIVE_BYTES = 1 << 16
_CONNECT_TIMEOUT_S = 10.0
#: How often a stop is looked for while the peer sends nothing.
_LOOK_UP_S = 0.2


@dataclass(frozen=True)
class Peer:
    host: str
    port: int
    delimiter: bytes
    #: Most consecutive connections without data; 0 for a single connection.
    max_retries: Limit
    retry_delay_ms: int
    max_line_bytes: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class LineTooLong(ConfigError):
    """A line is longer than allowed; `lines` are the complete lines received before it in the same chunk."""

    def __init__(self, length: int, most: int, lines: list[bytes]) -> None:
        super().__init__(
            f"a line of {length} bytes came over the socket, and max_line_bytes is {most}",
            what_to_do="raise max_line_bytes, or check that the peer uses the same delimiter",
        )
        self.lines = lines


class LineSplitter:
    def __init__(self, delimiter: bytes, max_line_bytes: int) -> None:
        self._delimiter, self._most = delimiter, max_line_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(self._delimiter)
        bare = [self._bare(line) for line in lines]
        for at, line in enumerate((*lines, self._rest)):
            if len(line) > self._most:
                raise LineTooLong(len(line), self._most, bare[:at])
        return bare

    def finish(self) -> list[bytes]:
        rest, self._rest = self._rest, b""
        return [self._bare(rest)] if rest else []

    def _bare(self, line: bytes) -> bytes:
        return line.removesuffix(b"\r") if self._delimiter == b"\n" else line


class Connection:
    """Receives lines in a thread until the peer has ended or no retry is left."""

    def __init__(self, peer: Peer, writer: SocketLogWriter) -> None:
        self._peer, self._writer = peer, writer
        self._stopping = threading.Event()
        #: Why no more lines will come, although the peer did not end the input.
        self.failure: FlinkishError | None = None
        self._thread = threading.Thread(target=self._run, name=f"flinkish-socket-{peer}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
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
                    what_to_do="check the peer; the restart strategy says how often the job tries again",
                )
            self._stopping.wait(self._peer.retry_delay_ms / 1_000)

    def _one_connection(self) -> tuple[bool, OSError | None]:
        """Return if data was received, and the connection's error; None if the peer closed it."""
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
                        # The peer does not send the lines before it again.
                        self._keep(error.lines)
                        raise
            trouble = None
        except OSError as error:
            trouble = error
        # The next connection does not continue a line, so the unfinished line is kept as a line.
        self._keep(splitter.finish())
        return found, trouble

    def _keep(self, lines: list[bytes]) -> None:
        if lines:
            self._writer.append(lines)


_SPLIT = "lines"


#: Surrogates are no characters, and no text in UTF-8 has them.
_Text = Annotated[str, TextPattern("[^\ud800-\udfff]+", "a text that is not empty, of Unicode characters")]


class SocketTextSource(SplitSource):
    r"""Reads lines that a server sends.

    Each line is written to a log in the job directory before the job sees it; from then on it takes part in
    checkpoints like a record of any other source. Lines that were received and not yet logged when the
    process died are lost, since a socket cannot be read twice.

    The job ends when the peer closes the connection normally and no retry is left. If the connection fails
    and no retry is left, the query fails, and the restart strategy decides.

    Parameters
    ----------
    host, port
        Address of the server. A job has one connection, however many streams read it.
    delimiter
        Separates lines. With ``"\n"``, a ``"\r"`` before it is removed. Text after the last delimiter is a
        line when the connection ends.
    max_retries
        Most consecutive reconnects without data; 0 for none, UNLIMITED for any number.
    retry_delay_ms
        Pause between two tries.
    max_line_bytes
        A longer line fails the job.
    rate
        Limits the records of a micro-batch.

    Examples
    --------
    >>> lines = SocketTextSource("logs.example.org", 9_999, max_retries=5)
    >>> lines.schema
    'value STRING'
    """

    kind = "socket"
    schema = "value STRING"
    is_bounded = True

    @check_arguments()
    def __init__(
        self,
        host: _Text,
        port: Annotated[int, Range(1, 65_535)],
        *,
        delimiter: _Text = "\n",
        max_retries: Annotated[Limit, Range(0)] = 0,
        retry_delay_ms: Annotated[Milliseconds, Range(0, MOST_MS)] = 500,
        max_line_bytes: Annotated[int, Range(1, MOST_LINE_BYTES)] = 1 << 24,
        rate: RateLimit | None = None,
    ) -> None:
        self.rate = RateLimit() if rate is None else rate
        self.peer = Peer(host, port, delimiter.encode(), max_retries, retry_delay_ms, max_line_bytes)
        self._connection: Connection | None = None

    # Between micro-batches:
    def splits(self) -> Sequence[str]:
        return [_SPLIT]

    def latest(self, split: str, start: int, limit: int | None) -> int:
        """Return the end of the log; connect if no process is connected."""
        log = SocketLogReader(self.job_folder)
        # Another process may be receiving already.
        if (
            log.ends_at() is None
            and self._connection is None
            and (writer := SocketLogWriter.take(self.job_folder))
        ):
            self._connection = Connection(self.peer, writer)
            self._connection.start()
        end = log.advance(start, limit)
        # Raised only when all lines received before the failure were read.
        if end == start and self._connection is not None and self._connection.failure is not None:
            raise self._connection.failure
        return end

    @property
    def has_ends(self) -> bool:
        """Return False: nobody can tell what the peer is about to send."""
        return False

    def end(self, split: str) -> int | None:
        """Return where the lines end; None while more may come."""
        return SocketLogReader(self.job_folder).ends_at()

    def records_between(self, split: str, start: int, end: int) -> int:
        """Count the lines: positions are in bytes."""
        return sum(1 for _ in SocketLogReader(self.job_folder).read(start, end))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # In a task:
    def read(self, split: str, start: int, end: int) -> Iterator[tuple[str]]:
        """Yield lines from the log; bytes that are no UTF-8 are replaced."""
        for line in SocketLogReader(self.job_folder).read(start, end):
            yield (line.decode("utf-8", errors="replace"),)

    # On the driver:
    def on_release(self, offsets: Mapping[str, Offset]) -> None:
        """Delete segments of the log that no checkpoint needs."""
        delete_before(self.job_folder, offsets[_SPLIT])

    def preflight(self, spark: SparkSession, job_dir: JobDir, uid: str) -> None:
        """Refuse a job directory in a bucket: lines are appended to local files."""
        super().preflight(spark, job_dir, uid)
        _ = self.job_folder

    def check_input(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> None:
        """Refuse a start position whose lines were deleted."""
        super().check_input(job_dir, uid, position)
        first, last = SocketLogReader(self.job_folder).extent()
        for scan in find_scan_positions(position, uid) if position is not None else ():
            at = scan.offsets.get(_SPLIT, 0)
            if not first <= at <= last:
                raise InputLostError(
                    f"lines of source '{uid}' are gone: it stood at {at}, and there are {first} to {last}",
                    why="they were before the oldest retained checkpoint, or the folder was cleared",
                    what_to_do="go back to a retained checkpoint, or start a new job with a new job_dir",
                )

    def check_start(self, uid: str, position: Position) -> None:
        """Refuse a savepoint: its lines are in the directory of the job that took it."""
        raise InputLostError(
            f"the source '{uid}' cannot go on where the savepoint stood",
            why="the lines of its socket are in the directory of the job that took the savepoint",
            what_to_do="give the source another uid, and allow its old position to be left out: "
            "non_restored=NonRestoredState.ALLOW",
        )

    def __getstate__(self) -> dict[str, Any]:
        # A connection belongs to one process.
        return {**self.__dict__, "_connection": None}
