"""The files that a source has found, in the order of finding; durable before any is read.

A position of the source is a number of files in this list, so a file has its place for ever. The list is
stored in parts, each created once: whoever else looks at the same folder finds the part taken, and goes on
from there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from flinkish_spark.errors import InputLostError
from flinkish_spark.protocol.codec import StoredRow
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.sealed_objects import SealedObjects
from flinkish_spark.store import LocalStore

_PARTS, _KIND = "files", "files"


@dataclass(frozen=True)
class FoundFile(StoredRow):
    """A file as it was when it was found.

    Parameters
    ----------
    path
        Relative to the folder of the input.
    rows
        How many records it has; None if that is not known.
    partition
        Values of its records that are not in it, as texts, by field.
    """

    path: str
    size: int
    modified_ns: int
    rows: int | None
    partition: Mapping[str, str | None] = field(default_factory=dict)


class FileList:
    """The list; every process has one of its own over the same parts.

    Parameters
    ----------
    folder
        Of the source in the job directory.
    """

    def __init__(self, folder: Path) -> None:
        self._store = LocalStore(folder)
        self._objects = SealedObjects(self._store, str(folder))
        self._files: list[FoundFile] = []
        #: Size and time of each, by its path.
        self._known: dict[str, tuple[int, int]] = {}
        #: Whether the list will not grow any more.
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> FoundFile:
        return self._files[index]

    def __iter__(self) -> Iterator[FoundFile]:
        return iter(self._files)

    def read(self) -> FileList:
        """Take in the parts that were added since; return this list."""
        while not self.is_closed:
            part = self._objects.optional(self._key(), _KIND, dict)
            if part is None:
                break
            found = [FoundFile.from_json(one) for one in part["files"]]
            if not found and not part["is_last"]:
                break
            self._files += found
            self._known |= {one.path: (one.size, one.modified_ns) for one in found}
            self.is_closed = bool(part["is_last"])
        return self

    def add(self, found: Sequence[FoundFile], is_last: bool) -> None:
        """Store a part, unless somebody else has stored it; either way, take it in."""
        if found or is_last:
            body = {"files": [one.to_json() for one in found], "is_last": is_last}
            self._store.create_if_absent(self._key(), seal(_KIND, body))
        self.read()

    def look(self, root: Path, pattern: str, rows: Callable[[str], int | None]) -> list[FoundFile]:
        """Return the files below `root` that are not in the list, the oldest first.

        Raises
        ------
        OSError
            A folder cannot be listed.
        InputLostError
            A file of the list is another one by now.
        """
        found, prefix = [], os.path.join(root, "")
        for entry in _entries(root, pattern):
            name = entry.path[len(prefix) :]
            try:
                # A listing does not tell it; without it what is added to a file would be lost unseen.
                stat = entry.stat()
                now, known = (stat.st_size, stat.st_mtime_ns), self._known.get(name)
                if known is None:
                    found.append(FoundFile(name, *now, rows(entry.path)))
                elif now != known:
                    raise _changed(entry.path)
            except FileNotFoundError:
                continue  # Gone before it was ours, or behind that: what has been read may be deleted.
        return sorted(found, key=lambda one: (one.modified_ns, one.path))

    def _key(self) -> str:
        return f"{_PARTS}/{len(self._files):012d}.json"


def _changed(path: str) -> InputLostError:
    return InputLostError(
        f"the file {path} has changed since it was found",
        why="a file is read once, so what was added to it, or has replaced it, would not be read",
        what_to_do="put it back as it was, with its time, or delete it if it has been read; write new "
        "records to a file of another name. Or start a new job with a new job_dir",
    )


def _entries(root: Path, pattern: str) -> Iterator[os.DirEntry[str]]:
    """Yield the files below a folder; links to folders are not followed.

    Raises
    ------
    OSError
        A folder cannot be listed. To go on without it would be to take it for an empty one.
    """
    folders = [str(root)]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as found:
                entries = [one for one in found if one.name[0] not in "._"]
        except FileNotFoundError:
            if folder == str(root):
                raise
            continue  # Gone before it was ours.
        for one in entries:
            if one.is_dir():
                folders += [] if one.is_symlink() else [one.path]
            elif fnmatch(one.name, pattern):
                yield one
