"""Durable operations of the file sink on a file system, and the names of its files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from flinkish_spark.core.store import make_directories, sync_directory
from flinkish_spark.protocol.ids import JobUuid

_CHUNK_BYTES = 1 << 20


class Disk:
    """The machine's file systems: every call is one place where a process can die."""

    def exists(self, path: Path) -> bool:
        return path.exists()

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def folders(self, path: Path) -> tuple[str, ...]:
        try:
            return tuple(sorted(os.listdir(path)))
        except FileNotFoundError:
            return ()

    def files_below(self, path: Path) -> Iterator[Path]:
        """Yield every file below a folder, in order; nothing if the folder does not exist."""

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        for folder, folders, names in os.walk(path, onerror=fail):
            folders.sort()
            for name in sorted(names):
                yield Path(folder, name)

    def make_folder(self, path: Path) -> None:
        make_directories(path)

    def rename(self, source: Path, target: Path) -> None:
        # Durable with sync_folders() only.
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
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder with everything in it; a missing folder is no error."""
        # A task that still writes may create a file in it meanwhile: the next sweep removes that.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)

    def sync_folders(self, paths: Iterable[Path]) -> None:
        for path in paths:
            sync_directory(path)

    def concatenate(self, sources: Sequence[tuple[Path, int]], target: Path) -> None:
        """Write the contents of files into one, durably, replacing the result of an interrupted try."""
        with open(target, "wb") as output:
            for source, skipped in sources:
                with open(source, "rb") as piece:
                    piece.seek(skipped)
                    shutil.copyfileobj(piece, output, _CHUNK_BYTES)
            output.flush()
            os.fsync(output.fileno())


#: Folder of the hidden files of all sinks of a target; Spark and Hive skip names that begin with "_".
#: On the same file system as the target, so that finishing a file is a rename.
HIDDEN = "_flinkish"


@dataclass(frozen=True, slots=True)
class PartName:
    #: First and last checkpoint whose records it holds; it was finished at the last.
    first: int
    last: int
    #: Number among the files that were finished together.
    index: int
    #: With its dot; Spark's own, such as ``.snappy.parquet``.
    extension: str


@dataclass(frozen=True, slots=True)
class SinkFiles:
    root: Path
    job: JobUuid
    uid: str

    @property
    def tag(self) -> str:
        # Distinguishes sinks with the same uid in different jobs, or with a uid that begins like another.
        return hashlib.sha256(f"{self.job}/{self.uid}".encode()).hexdigest()[:16]

    @property
    def hidden(self) -> Path:
        return self.root / HIDDEN / f"{self.uid}-{self.tag}"

    @property
    def in_progress(self) -> Path:
        """Folder with one folder for each micro-batch whose tasks are writing, or failed."""
        return self.hidden / "in-progress"

    @property
    def pending(self) -> Path:
        """Folder with one folder for each durable micro-batch whose files wait for a decision or a roll."""
        return self.hidden / "pending"

    @property
    def merged(self) -> Path:
        """Folder with one folder for each checkpoint whose small files are being merged."""
        return self.hidden / "merged"

    def make_finished_name(self, part: PartName) -> str:
        return f"part-{self.uid}-{self.tag}-{part.first}-{part.last}-{part.index}{part.extension}"

    def parse_finished(self, name: str) -> PartName | None:
        prefix = f"part-{self.uid}-{self.tag}-"
        match = re.fullmatch(r"(\d+)-(\d+)-(\d+)((?:\..*)?)", name.removeprefix(prefix))
        if not name.startswith(prefix) or match is None:
            return None
        return PartName(int(match[1]), int(match[2]), int(match[3]), match[4])


def bucket_of(relative: str) -> str:
    parent = str(PurePosixPath(relative).parent)
    return "" if parent == "." else parent
