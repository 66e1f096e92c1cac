"""Names below the target of a file sink, and what can be read from them.

Everything that is not finished lies below one hidden folder per sink, on the same file system as the
target, so that finishing a file is a rename.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from flinkish_spark.protocol.ids import JobUuid, OwnerEpoch

#: Holds what readers must not see of all sinks of a target; Spark and Hive skip names that begin with "_".
HIDDEN = "_flinkish"
_STAGED = re.compile(r"(\d{1,18})-(\d{1,18})-[0-9a-f]{8}")
#: What Spark calls the files of one task: part-<task>-<uuid>.c<count><extension>, or without a count.
_TASK_FILE = re.compile(r"part-(\d+)-[0-9a-f-]{36}(?:-c\d+|\.c\d+)?((?:\.[A-Za-z0-9_]+)*)")


@dataclass(frozen=True, slots=True)
class StagedId:
    """Name of the folder that one micro-batch of one sink is staged in.

    `block` is leased until the receipt; `nonce` keeps two uses of the same block apart.
    """

    owner_epoch: OwnerEpoch
    block: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.owner_epoch}-{self.block}-{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> StagedId | None:
        """Return the id, or None if `text` is not one."""
        match = _STAGED.fullmatch(text)
        if match is None:
            return None
        return cls(OwnerEpoch(int(match[1])), int(match[2]), text.rsplit("-", 1)[1])


@dataclass(frozen=True, slots=True)
class PartName:
    """Name of a finished file.

    Parameters
    ----------
    first, last
        Checkpoints whose records it holds; it was finished at the last.
    index
        Counts the files that were finished together.
    extension
        With its dot; Spark's own, such as ``.snappy.parquet``.
    """

    first: int
    last: int
    index: int
    extension: str


@dataclass(frozen=True, slots=True)
class SinkFiles:
    """Where the files of one sink are.

    Parameters
    ----------
    root
        The target, absolute.
    job, uid
        Whose sink.

    Examples
    --------
    >>> files = SinkFiles(Path("/lake/orders"), JobUuid("0" * 32), "orders")
    >>> files.finished_name(PartName(7, 7, 0, ".json"))
    'part-orders-30d47f2f75900c0b-7-7-0.json'
    """

    root: Path
    job: JobUuid
    uid: str

    @property
    def tag(self) -> str:
        """Tell sinks apart that have the same uid in different jobs, or a uid that begins like another."""
        return hashlib.sha256(f"{self.job}/{self.uid}".encode()).hexdigest()[:16]

    @property
    def hidden(self) -> Path:
        """The folder of everything that is not finished."""
        return self.root / HIDDEN / f"{self.uid}-{self.tag}"

    @property
    def in_progress(self) -> Path:
        """Holds a folder for each micro-batch whose tasks are writing, or failed."""
        return self.hidden / "in-progress"

    @property
    def pending(self) -> Path:
        """Holds a folder for each micro-batch that is durable: to be decided, or to be rolled."""
        return self.hidden / "pending"

    @property
    def merged(self) -> Path:
        """Holds a folder for each checkpoint whose small files are being merged."""
        return self.hidden / "merged"

    def finished_name(self, part: PartName) -> str:
        """Return the name that readers see."""
        return f"part-{self.uid}-{self.tag}-{part.first}-{part.last}-{part.index}{part.extension}"

    def parse_finished(self, name: str) -> PartName | None:
        """Return what a finished file of this sink says, or None for any other file."""
        prefix = f"part-{self.uid}-{self.tag}-"
        match = re.fullmatch(r"(\d+)-(\d+)-(\d+)((?:\..*)?)", name.removeprefix(prefix))
        if not name.startswith(prefix) or match is None:
            return None
        return PartName(int(match[1]), int(match[2]), int(match[3]), match[4])


def task_file(name: str) -> tuple[int, str] | None:
    """Return task and extension of a file that Spark wrote, or None if it is not a task's file.

    Examples
    --------
    >>> task_file("part-00003-894e7d00-1ed4-4ff5-9f09-81bfb758af7c.c000.snappy.parquet")
    (3, '.snappy.parquet')
    >>> task_file("_SUCCESS")
    """
    match = _TASK_FILE.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def is_hidden(name: str) -> bool:
    """Whether readers skip a file or folder of that name."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def bucket_of(relative: str) -> str:
    """Return the folder of a file, relative to the target; empty at the top."""
    parent = str(PurePosixPath(relative).parent)
    return "" if parent == "." else parent
