"""The store under a job directory: five methods, immutable sealed objects, durable when they return."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import stat
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol, TypeVar

from flinkish_spark.core.errors import CorruptObjectError, JobDirError, StoreError
from flinkish_spark.protocol.envelope import FORMAT, NewerFormatError, unseal

# ----------------------------------------------------------------------------------------------------------
# The store under a job directory: five methods, immutable objects, durable when they return.
#
# A lost race is a return value, never an exception. :class:`LocalStore` keeps the promises on a local disk:
# an object is visible whole or not at all, and both the file and its directory are synced before a write
# returns, so that what was decided survives a power cut.


class CreateResult(enum.Enum):
    """Answer of create-if-absent."""

    CREATED = "CREATED"
    EXISTS = "EXISTS"


class ObjectMissing(KeyError):
    """There is no object under that key. Expected by callers that ask for optional objects."""


class Store(Protocol):
    """Keys are relative POSIX paths like ``checkpoints/7/decision.json``."""

    def read(self, key: str) -> bytes:
        """Return the object; raise ObjectMissing if there is none."""

    def put(self, key: str, data: bytes) -> None:
        """Write the object, replacing an older one atomically."""

    def create_if_absent(self, key: str, data: bytes) -> CreateResult:
        """Write the object only if the key is free; of several callers exactly one gets CREATED."""

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys directly below a folder, sorted, without hidden ones; empty if missing."""

    def delete(self, key: str) -> None:
        """Delete the object; a missing one is no error."""


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """How any process opens a store: it travels to Spark's own processes.

    Parameters
    ----------
    url
        A folder, absolute, on a disk that every process sees which opens it.
    """

    url: str

    def open(self) -> Store:
        """Return the store."""
        return LocalStore(Path(self.url))

    def below(self, key: str) -> StoreSpec:
        """Return the part of it below a folder."""
        return StoreSpec(str(Path(self.url, key)))


def make_directories(folder: Path) -> None:
    """Make a directory and its parents; the names of those that are new are durable on return.

    Raises
    ------
    OSError
        The file system refuses.
    """
    if folder.is_dir():
        return
    make_directories(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_directory(folder.parent)


def sync_directory(folder: Path) -> None:
    """Make the names in a directory durable; raise OSError if the file system refuses."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _opened_at_once(path: str, flags: int) -> int:
    # A FIFO in the place of an object would keep its reader waiting for somebody who writes.
    return os.open(path, flags | os.O_NONBLOCK)


def _checked(key: str) -> PurePosixPath:
    path = PurePosixPath(key)
    if path.is_absolute() or not path.parts or any(part in ("..", ".") for part in path.parts):
        raise ValueError(f"not a store key: {key!r}")
    return path


class LocalStore:
    """A :class:`Store` on a local (or NFS-like POSIX) file system.

    Parameters
    ----------
    root
        The job directory, absolute: half of the code runs in other processes.

    Raises
    ------
    StoreError
        From every method, when the file system refuses.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_absolute():
            raise ValueError(f"the store needs an absolute path, got {str(root)!r}")
        self.root = root

    def read(self, key: str) -> bytes:
        """Return the object; raise ObjectMissing if there is none."""
        try:
            with open(self._path(key), "rb", opener=_opened_at_once) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OSError(errno.EINVAL, "it is not a file")
                return file.read()
        except FileNotFoundError:
            raise ObjectMissing(key) from None
        except OSError as error:
            raise self._failed("read", key, error) from error

    def put(self, key: str, data: bytes) -> None:
        """Write the object, replacing an older one atomically."""
        try:
            target = self._path(key)
            temporary = self._write_temporary(target, data)
            os.replace(temporary, target)
            sync_directory(target.parent)
        except OSError as error:
            raise self._failed("write", key, error) from error

    def create_if_absent(self, key: str, data: bytes) -> CreateResult:
        """Write the object only if the key is free: link(2) fails if the name exists."""
        try:
            target = self._path(key)
            temporary = self._write_temporary(target, data)
            try:
                os.link(temporary, target)
            except FileExistsError:
                return CreateResult.EXISTS
            finally:
                os.unlink(temporary)
            sync_directory(target.parent)
            return CreateResult.CREATED
        except OSError as error:
            raise self._failed("create", key, error) from error

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys directly below a folder, sorted, without hidden ones."""
        folder = self._path(prefix)
        try:
            names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise self._failed("list", prefix, error) from error
        return tuple(str(PurePosixPath(prefix) / name) for name in names)

    def delete(self, key: str) -> None:
        """Delete the object; a missing one is no error."""
        target = self._path(key)
        try:
            target.unlink(missing_ok=True)
            if target.parent.is_dir():
                sync_directory(target.parent)
            if target.parent != self.root:
                # Folders have no life of their own in an object store, so they get none here.
                with contextlib.suppress(OSError):
                    target.parent.rmdir()
        except OSError as error:
            raise self._failed("delete", key, error) from error

    def _path(self, key: str) -> Path:
        return self.root / _checked(key)

    def _write_temporary(self, target: Path, data: bytes) -> Path:
        temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
        try:
            with self._open_new(temporary) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return temporary

    def _open_new(self, path: Path) -> IO[bytes]:
        for _ in range(3):
            make_directories(path.parent)
            # Another thread may delete the last object of the folder, and so the folder, just now.
            with contextlib.suppress(FileNotFoundError):
                return open(path, "xb")
        return open(path, "xb")

    def _failed(self, verb: str, key: str, error: OSError) -> StoreError:
        return StoreError.of_system(
            error,
            f"cannot {verb} {key} in the job directory {self.root}",
            what_to_do="check that the disk is there, has room, and may be written by this user",
            key=key,
        )


# ----------------------------------------------------------------------------------------------------------
# Typed reads of sealed objects in a store: what is absent, what is damaged, what is too new.
#
# Absent optional objects are None here, once, so that callers see "no receipt yet" instead of a missing
# file; a corrupt object is always an error and never skipped.


T = TypeVar("T")


class SealedObjects:
    """Reads what `protocol.envelope.seal` wrote.

    Parameters
    ----------
    store
        Where the objects are.
    place
        What messages call it, such as ``"the job directory"``.
    """

    def __init__(self, store: Store, place: str) -> None:
        self._store, self._place = store, place

    def read(self, key: str, kind: str, parse: Callable[[Mapping[str, Any]], T]) -> T:
        """Return an object.

        Raises
        ------
        ObjectMissing
            There is none under that key.
        JobDirError
            A newer version of this package wrote it.
        CorruptObjectError
            It is torn, altered or of another kind, or `parse` refuses it.
        """
        data = self._store.read(key)
        try:
            return parse(unseal(kind, data))
        except NewerFormatError as error:
            raise JobDirError(
                f"{key} was {error}",
                why=f"this version of flinkish_spark writes format {FORMAT}",
                what_to_do="use the newer version of flinkish_spark that wrote it",
                key=key,
            ) from error
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise CorruptObjectError(
                f"{key} in {self._place} cannot be trusted",
                why=str(error),
                what_to_do="restore the file from a backup; an older checkpoint is never used silently",
                key=key,
            ) from error

    def optional(self, key: str, kind: str, parse: Callable[[Mapping[str, Any]], T]) -> T | None:
        """Return an object, or None if there is none; raises as :meth:`read` otherwise."""
        try:
            return self.read(key, kind, parse)
        except ObjectMissing:
            return None

    def numbers(self, folder: str, ending: str = ".json") -> frozenset[int]:
        """Return the numbers after which the objects (or, without ending, folders) in `folder` are named.

        Only what is written as we write it: `007.json` would be looked for as `7.json`.
        """
        names = [key.rsplit("/", 1)[1] for key in self._store.list(folder)]
        stems = [name.removesuffix(ending) for name in names if name.endswith(ending)]
        return frozenset(int(stem) for stem in stems if stem.isdecimal() and str(int(stem)) == stem)
