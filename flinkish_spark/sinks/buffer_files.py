"""Files of the write-ahead buffer: rows of one task as Arrow, durable, named in a committable.

A name is ``<owner epoch>-<block>-<task>-<attempt>-<random>.arrow``: whatever an attempt leaves behind
tells whose it is, and no two attempts share a file. A file is read only through the committable that
names it, with its size and checksum, so a part of a file is never taken for a whole one.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from flinkish_spark.errors import EnvironmentFault
from flinkish_spark.protocol.ids import OwnerEpoch
from flinkish_spark.store import make_directories, sync_directory

if TYPE_CHECKING:
    import pyarrow as pa

_NAME = re.compile(r"(\d{1,18})-(\d{1,18})-(\d{1,9})-(\d{1,9})-[0-9a-f]{16}\.arrow")
_HEX = re.compile(r"[0-9a-f]{64}")


class BufferFault(EnvironmentFault):
    """The buffer's folder cannot be read or written now."""

    restartable = True


class BufferedFileGone(Exception):
    """A file that a committable names is missing or not what was written; it will not come back."""


@dataclass(frozen=True, slots=True)
class BufferName:
    """Name of a buffer file: which task attempt of which owner wrote it."""

    owner_epoch: OwnerEpoch
    block: int
    task: int
    attempt: int
    random: str

    @classmethod
    def new(cls, owner_epoch: OwnerEpoch, block: int, task: int, attempt: int) -> BufferName:
        """Return a name that nobody has."""
        return cls(owner_epoch, block, task, attempt, os.urandom(8).hex())

    @classmethod
    def parse(cls, text: str) -> BufferName | None:
        """Return the name, or None if `text` is not one of ours."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        owner, block, task, attempt = map(int, match.groups())
        return cls(OwnerEpoch(owner), block, task, attempt, text[-22:-6])

    def __str__(self) -> str:
        return f"{self.owner_epoch}-{self.block}-{self.task}-{self.attempt}-{self.random}.arrow"


@dataclass(frozen=True, slots=True)
class BufferedFile:
    """A finished file, as its committable names it.

    Parameters
    ----------
    name
        Below the sink's folder.
    lineage, batch, task
        The micro-batch, and the Spark partition whose rows it holds.
    rows, bytes, sha256
        What was written.
    """

    name: str
    lineage: int
    batch: int
    task: int
    rows: int
    bytes: int
    sha256: str

    def to_payload(self) -> dict[str, Any]:
        """Return the committable's payload."""
        return {
            "file": self.name,
            "lineage": self.lineage,
            "batch": self.batch,
            "task": self.task,
            "rows": self.rows,
            "bytes": self.bytes,
            "sha256": self.sha256,
        }

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> BufferedFile:
        """Read a payload; raise ValueError for one that no buffer wrote."""
        name, digest = str(payload["file"]), str(payload["sha256"])
        if BufferName.parse(name) is None or _HEX.fullmatch(digest) is None:
            raise ValueError(f"not a file of a write-ahead buffer: {name!r}")
        lineage, batch, task, rows, size = (
            int(payload[key]) for key in ("lineage", "batch", "task", "rows", "bytes")
        )
        return cls(name, lineage, batch, task, rows, size, digest)


class BufferFileWriter:
    """Writes the rows of one task attempt into a file of its own; made in a task.

    Parameters
    ----------
    folder
        The sink's folder; made if it is missing.
    name
        Of this attempt alone.

    Raises
    ------
    OSError
        From every method, if the file system refuses.
    """

    def __init__(self, folder: Path, name: BufferName) -> None:
        self._path, self._rows = folder / str(name), 0
        self._file: _HashedFile | None = None
        self._arrow: Any = None

    def write(self, records: pa.RecordBatch) -> None:
        """Append rows; the first call makes the file."""
        import pyarrow as pa

        if self._file is None:
            make_directories(self._path.parent)
            self._file = _HashedFile(self._path.open("xb"))
            self._arrow = pa.ipc.new_stream(self._file, records.schema)
        self._arrow.write_batch(records)
        self._rows += records.num_rows

    def finish(self) -> dict[str, Any] | None:
        """Make the file and its name durable; return its report, or None if nothing was written."""
        if self._file is None:
            return None
        self._arrow.close()
        self._file.finish()
        sync_directory(self._path.parent)
        return {
            "file": self._path.name,
            "rows": self._rows,
            "bytes": self._file.bytes,
            "sha256": self._file.sha256,
        }


class _HashedFile:
    """A file for Arrow to write into, which knows the size and checksum of what went in."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._file.write(view)
        self._hash.update(view)
        self.bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


class BufferFolder:
    """The files below a sink's folder, as the driver sees them.

    Parameters
    ----------
    folder
        Of the sink; need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder

    def why_gone(self, file: BufferedFile) -> str:
        """Return why a file is not what was written; empty if it is.

        Raises
        ------
        BufferFault
            It cannot be read now; nothing is concluded.
        """
        try:
            with open(self.path / file.name, "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                if size != file.bytes:
                    return f"the buffer file {file.name} has {size} bytes instead of {file.bytes}"
                if hashlib.file_digest(stream, "sha256").hexdigest() != file.sha256:
                    return f"the buffer file {file.name} is damaged"
        except FileNotFoundError:
            return f"the buffer file {file.name} is gone"
        except OSError as error:
            raise self.fault("read", error) from error
        return ""

    def has_size(self, file: BufferedFile) -> bool:
        """Whether a file is there with its size; cheaper than :meth:`why_gone`."""
        try:
            return (self.path / file.name).stat().st_size == file.bytes
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self.fault("read", error) from error

    def batches(self, file: BufferedFile) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file in the order in which they were written.

        Raises
        ------
        BufferedFileGone
            It went away, or does not have the rows that its committable says.
        """
        import pyarrow as pa

        rows = 0
        try:
            with pa.memory_map(str(self.path / file.name)) as source, pa.ipc.open_stream(source) as reader:
                for batch in reader:
                    rows += batch.num_rows
                    yield batch
        except (FileNotFoundError, pa.ArrowInvalid) as error:
            raise BufferedFileGone(f"the buffer file {file.name} cannot be read: {error}") from error
        except OSError as error:
            raise self.fault("read", error) from error
        if rows != file.rows:
            raise BufferedFileGone(f"the buffer file {file.name} has {rows} rows instead of {file.rows}")

    def names(self) -> list[BufferName]:
        """Return the names of all files of ours; what others put there is left alone."""
        try:
            found = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self.fault("list", error) from error
        return [name for name in map(BufferName.parse, sorted(found)) if name is not None]

    def delete(self, names: list[str]) -> int:
        """Delete files; return how many were there. Durable on return."""
        deleted = 0
        try:
            for name in names:
                with suppress(FileNotFoundError):
                    (self.path / name).unlink()
                    deleted += 1
            if deleted:
                sync_directory(self.path)
        except OSError as error:
            raise self.fault("delete from", error) from error
        return deleted

    def fault(self, verb: str, error: OSError) -> BufferFault:
        """Return the error for one of the file system."""
        return BufferFault.of_system(
            error,
            f"cannot {verb} the write-ahead buffer {self.path}",
            what_to_do="check that the job directory's disk is there, has room, and may be used by this user",
        )
