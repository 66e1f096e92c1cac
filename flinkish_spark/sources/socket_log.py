"""Lines that came over a socket, durable before anybody is told of them.

A folder of segments, each named by the position of its first byte in the whole log. A line is a frame:
length, checksum, bytes. A process that dies may leave a frame half written; the next writer cuts it off.
It was never offered: a reader makes what it offers durable first. The end is a file of its own, so that
no line can be taken for it.

One process writes at a time: it holds a lock on a file that it has open, so the lock goes with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from flinkish_spark.errors import CorruptObjectError, InputLostError, StoreError
from flinkish_spark.forks import OwnFile
from flinkish_spark.store import LocalStore, ObjectMissing, make_directories, sync_directory

_FRAME = struct.Struct(">II")
_ENDING, _LAST = ".log", "end"
#: A segment is deleted whole, so it should not be much larger than what a few checkpoints cover.
SEGMENT_BYTES = 16 << 20
#: No frame is longer; a length above it is damage.
MOST_LINE_BYTES = 1 << 28


def segments(folder: Path) -> list[int]:
    """Return the positions at which segments begin, in order."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    stems = [name.removesuffix(_ENDING) for name in names if name.endswith(_ENDING)]
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def _path(folder: Path, first: int) -> Path:
    return folder / f"{first:020d}{_ENDING}"


def _frames(file: BinaryIO, at: int) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes of whole frames and the position behind each; `at` is where `file` stands."""
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
    # Begun at 1: zeros, which a file system may leave behind a power cut, are no empty line.
    return zlib.crc32(data, 1)


class SocketLogWriter:
    """Appends; belongs to one thread of one process.

    Parameters
    ----------
    folder
        Of the log.
    lock
        The lock, which this writer now owns.
    """

    def __init__(self, folder: Path, lock: OwnFile) -> None:
        self._folder, self._lock = folder, lock
        known = segments(folder)
        self._first = known[-1] if known else 0
        self._file = self._opened(_path(folder, self._first))
        self._at = max((behind for behind, _ in _frames(self._file, self._first)), default=self._first)
        self._file.truncate(self._at - self._first)
        self._file.seek(self._at - self._first)

    @property
    def is_ended(self) -> bool:
        """Whether it was written that no line will follow."""
        return (self._folder / _LAST).exists()

    @classmethod
    def take(cls, folder: Path) -> SocketLogWriter | None:
        """Return the writer, or None while another process has it.

        Raises
        ------
        StoreError
            The disk refuses.
        """
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
            raise _failed(folder, error) from error

    def append(self, lines: Sequence[bytes]) -> None:
        """Write lines; they are durable on return.

        Raises
        ------
        StoreError
            The disk refuses. This writer must not be used any more.
        """
        data = b"".join(_FRAME.pack(len(line), _checksum(line)) + line for line in lines)
        try:
            if self._at - self._first >= SEGMENT_BYTES:
                self._file.close()
                self._first = self._at
                self._file = self._opened(_path(self._folder, self._first))
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _failed(self._folder, error) from error
        self._at += len(data)

    def end(self) -> None:
        """Write that no line will follow; durable on return."""
        LocalStore(self._folder).put(_LAST, str(self._at).encode())

    def _opened(self, path: Path) -> BinaryIO:
        is_new = not path.exists()
        # Not for appending alone: what is half written is cut off.
        file = open(path, "w+b" if is_new else "r+b")  # noqa: SIM115 - held until close()
        if is_new:
            sync_directory(self._folder)
        return file

    def close(self) -> None:
        """Let another process write."""
        with contextlib.suppress(OSError):
            self._file.close()
        if self._lock.is_open:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()


class SocketLogReader:
    """Reads what there is, beside any writer; may be used by any process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def extent(self) -> tuple[int, int]:
        """Return the positions in front of the first and behind the last byte that is there."""
        known = segments(self._folder)
        return (known[0], known[-1] + _path(self._folder, known[-1]).stat().st_size) if known else (0, 0)

    def advance(self, start: int, limit: int | None) -> int:
        """Return the position behind at most `limit` lines from `start` on; they are durable on return.

        Raises
        ------
        InputLostError
            There are no lines at `start` any more.
        """
        known, at, left = segments(self._folder), start, limit
        self._check_first(start, known)
        for first in _from(known, start):
            if first > at:
                raise self._damaged(at, first)
            with open(_path(self._folder, first), "rb") as file:
                file.seek(at - first)
                before = at
                for behind, _ in itertools.islice(_frames(file, at), left):
                    at, left = behind, None if left is None else left - 1
                if at > before:
                    # The writer may not have come to it yet.
                    os.fsync(file.fileno())
            if left == 0:
                break
        return at

    def ends_at(self) -> int | None:
        """Return the position behind the last line for ever; None while lines may follow."""
        try:
            return int(LocalStore(self._folder).read(_LAST))
        except ObjectMissing:
            return None

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the lines between two positions that :meth:`advance` gave.

        Raises
        ------
        InputLostError
            They were deleted, since no checkpoint needed them any more.
        CorruptObjectError
            They are damaged.
        """
        known, at = segments(self._folder), start
        if start < end:
            self._check_first(start, known)
        for first in _from(known, start):
            if at == end:
                return
            if first > at:
                break
            with open(_path(self._folder, first), "rb") as file:
                file.seek(at - first)
                for behind, data in _frames(file, at):
                    if behind > end:
                        break
                    at = behind
                    yield data
        if at != end:
            raise self._damaged(at, end)

    def _damaged(self, at: int, end: int) -> CorruptObjectError:
        return CorruptObjectError(
            f"the log in {self._folder} cannot be read from position {at} to {end}",
            why="a line fails its checksum, or is gone",
            what_to_do="restore the folder from a backup",
        )

    def _check_first(self, start: int, known: Sequence[int]) -> None:
        if start < (known[0] if known else 0) or (start and not known):
            raise InputLostError(
                f"the lines from position {start} of {self._folder} on are gone",
                why="they lay behind the oldest retained checkpoint, or the folder was cleared",
                what_to_do="restore the folder from a backup, or start a new job with a new job_dir",
            )


def _from(known: Sequence[int], start: int) -> list[int]:
    """Return the segments that hold something from `start` on."""
    return [*(first for first, following in itertools.pairwise(known) if following > start), *known[-1:]]


def forget_before(folder: Path, position: int) -> None:
    """Delete the segments that lie wholly before a position; the newest stays."""
    for first, following in itertools.pairwise(segments(folder)):
        if following <= position:
            _path(folder, first).unlink(missing_ok=True)


def _failed(folder: Path, error: OSError) -> StoreError:
    return StoreError.of_system(
        error,
        f"the log of lines in {folder} cannot be written",
        what_to_do="check that the disk is there, has room, and may be written by this user",
    )
