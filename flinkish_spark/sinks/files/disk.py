"""What the file sink does to a file system, durably; every call is one place where a process can die."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from flinkish_spark.store import make_directories, sync_directory

_CHUNK_BYTES = 1 << 20


class Disk:
    """The machine's file systems.

    Raises
    ------
    OSError
        From every method, when the file system refuses.
    """

    def exists(self, path: Path) -> bool:
        """Whether there is a file or folder."""
        return path.exists()

    def size(self, path: Path) -> int:
        """Return the bytes of a file."""
        return path.stat().st_size

    def folders(self, path: Path) -> tuple[str, ...]:
        """Return the names directly below a folder, sorted; empty if there is none."""
        try:
            return tuple(sorted(os.listdir(path)))
        except FileNotFoundError:
            return ()

    def files_below(self, path: Path) -> Iterator[Path]:
        """Yield every file below a folder, whatever its name, in order; nothing if there is none."""

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        for folder, folders, names in os.walk(path, onerror=fail):
            folders.sort()
            for name in sorted(names):
                yield Path(folder, name)

    def make_folder(self, path: Path) -> None:
        """Make a folder and its parents, durably."""
        make_directories(path)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name; durable with :meth:`sync_folders`."""
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name, or copy it where the file system has no links."""
        try:
            os.link(source, target)
        except FileExistsError:
            return
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK):
                raise
            shutil.copyfile(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file; one that is gone is no error."""
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder with everything in it; one that is gone is no error.

        A task that is still writing may put something into it meanwhile; it is then left to the next sweep.
        """
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)

    def remove_empty(self, path: Path) -> None:
        """Remove a folder if nothing is in it."""
        with contextlib.suppress(OSError):
            path.rmdir()

    def sync_files(self, paths: Iterable[Path]) -> None:
        """Make the contents of files durable."""
        for path in paths:
            sync_directory(path)

    def sync_folders(self, paths: Iterable[Path]) -> None:
        """Make the names in folders durable."""
        for path in paths:
            sync_directory(path)

    def create_empty(self, path: Path) -> None:
        """Make an empty file, durably; one that is there stays."""
        with open(path, "ab") as file:
            os.fsync(file.fileno())
        sync_directory(path.parent)

    def concatenate(self, sources: Sequence[tuple[Path, int]], target: Path) -> None:
        """Write the files one behind the other, durably, replacing what half a try left.

        Parameters
        ----------
        sources
            Each with the number of bytes to leave out at its beginning.
        """
        with open(target, "wb") as output:
            for source, skipped in sources:
                with open(source, "rb") as piece:
                    piece.seek(skipped)
                    _copy(piece, output)
            output.flush()
            os.fsync(output.fileno())


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    while block := source.read(_CHUNK_BYTES):
        target.write(block)
