"""The store under a job directory: five methods, immutable sealed objects, durable when they return.

A lost race is a return value, never an exception. :class:`LocalStore` keeps the promises on a local disk:
an object is visible whole or not at all, and both the file and its directory are synced before a write
returns, so that what was decided survives a power cut. Absent optional objects are None
(:class:`SealedObjects`); a corrupt object is always an error and never skipped.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import stat
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol, TypeVar, runtime_checkable

from flinkish_spark.core.clock import Clock, tries
from flinkish_spark.core.errors import CorruptObjectError, JobDirError, StoreError
from flinkish_spark.core.watchdog import note_failure
from flinkish_spark.protocol.envelope import FORMAT, NewerFormatError, unseal


class CreateResult(enum.Enum):
    CREATED = "CREATED"
    EXISTS = "EXISTS"


class ObjectMissing(KeyError):
    """There is no object under that key. Expected by callers that ask for optional objects."""


class Store(Protocol):
    """Keys are relative POSIX paths like ``checkpoints/7/decision.json``."""

    def read(self, key: str) -> bytes: ...

    def put(self, key: str, data: bytes) -> None: ...

    def create_if_absent(self, key: str, data: bytes) -> CreateResult:
        """Write the object only if the key is free; of several callers exactly one gets CREATED."""

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys directly below a folder, sorted, without hidden ones; empty if missing."""

    def delete(self, key: str) -> None: ...


class FileStore(Store, Protocol):
    """A remote store in which Spark, too, writes files, so that they are listed and deleted in bulk."""

    def sizes_below(self, folder: str) -> Mapping[str, int]:
        """Return the sizes in bytes of all objects below a folder, by relative names; hidden ones, too."""

    def read_start(self, key: str, most_bytes: int) -> bytes:
        """Return the first bytes of the object, or all of it; raise ObjectMissing if there is none."""

    def copy(self, key: str, other: str) -> None:
        """Copy an object within the store, replacing an older one; raise ObjectMissing if there is none."""

    def delete_all(self, keys: Collection[str]) -> None:
        """Delete objects in any order; missing ones are no error."""


def make_directories(folder: Path) -> None:
    """Make a directory and its parents; the names of new ones are durable on return."""
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


def _open_nonblocking(path: str, flags: int) -> int:
    # A FIFO in the place of an object would keep its reader waiting for a writer.
    return os.open(path, flags | os.O_NONBLOCK)


def parse_key(key: str) -> PurePosixPath:
    path = PurePosixPath(key)
    if path.is_absolute() or not path.parts or any(part in ("..", ".") for part in path.parts):
        raise ValueError(f"not a store key: {key!r}")
    return path


class LocalStore:
    """A :class:`Store` on a local (or NFS-like POSIX) file system."""

    def __init__(self, root: Path) -> None:
        if not root.is_absolute():
            raise ValueError(f"the store needs an absolute path, got {str(root)!r}")
        self.root = root

    def read(self, key: str) -> bytes:
        try:
            with open(self._path(key), "rb", opener=_open_nonblocking) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OSError(errno.EINVAL, "it is not a file")
                return file.read()
        except FileNotFoundError:
            raise ObjectMissing(key) from None
        except OSError as error:
            raise self._make_error("read", key, error) from error

    def put(self, key: str, data: bytes) -> None:
        try:
            target = self._path(key)
            temporary = self._write_temporary(target, data)
            os.replace(temporary, target)
            sync_directory(target.parent)
        except OSError as error:
            raise self._make_error("write", key, error) from error

    def create_if_absent(self, key: str, data: bytes) -> CreateResult:
        """Write the object only if the key is free: link(2) fails if the name exists."""
        try:
            target = self._path(key)
            temporary = self._write_temporary(target, data)
            try:
                os.link(temporary, target)
            except FileExistsError:
                # Over NFS the answer to a link may be lost, and the client asks again and finds its own:
                # open(2). Only this call knows the temporary file, so a second link to it is the one it made.
                if os.stat(temporary).st_nlink != 2:
                    return CreateResult.EXISTS
            finally:
                os.unlink(temporary)
            sync_directory(target.parent)
            return CreateResult.CREATED
        except OSError as error:
            raise self._make_error("create", key, error) from error

    def list(self, prefix: str) -> tuple[str, ...]:
        folder = self._path(prefix)
        try:
            names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise self._make_error("list", prefix, error) from error
        above = PurePosixPath(prefix)
        return tuple(f"{above}/{name}" for name in names)

    def delete(self, key: str) -> None:
        target = self._path(key)
        try:
            target.unlink(missing_ok=True)
            if target.parent.is_dir():
                sync_directory(target.parent)
            if target.parent != self.root:
                # An object store has no empty folders, so a local store has none either.
                with contextlib.suppress(OSError):
                    target.parent.rmdir()
        except OSError as error:
            raise self._make_error("delete", key, error) from error

    def _path(self, key: str) -> Path:
        return self.root / parse_key(key)

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

    def _make_error(self, verb: str, key: str, error: OSError) -> StoreError:
        return StoreError.from_os_error(
            error,
            f"cannot {verb} {key} in the job directory {self.root}",
            what_to_do="check that the disk is there, has room, and may be written by this user",
            key=key,
        )


#: Between two tries.
_FIRST_PAUSE_MS, _LONGEST_PAUSE_MS = 100, 5_000


class UnknownOutcomeError(Exception):
    """A request may or may not have been carried out: an error, a time-out, or no answer at all."""


class ConditionalPuts(Protocol):
    """The requests of a remote store from which :func:`create_by_id` makes a create."""

    def put_new(self, key: str, data: bytes, write_id: str) -> bool:
        """Send the object with its id once; return False if the store says that the key is taken."""

    def write_id_at(self, key: str) -> str | None:
        """Return the id that the object carries; None if no create has written it."""


@runtime_checkable
class BucketStore(FileStore, ConditionalPuts, Protocol):
    """A store with conditional puts; HDFS renames files instead."""


# A remote store may write an object and lose the answer, or answer 500; a client that repeats the request, as
# client libraries do, is told that the key is taken: by its own write. The store may also say so while the
# key is free (S3's ConditionalRequestConflict). So the stored object decides, and not the answer:
#
# 1. Every create has an id of its own, the same for all of its tries, and the object carries it.
# 2. After every answer but a plain yes the object is read: our id means CREATED, another one EXISTS.
# 3. If there is no object, or the store does not answer, the same create is tried again.
# 4. If it is given up, the error says that the outcome is unknown: a try may have been carried out, or may
#    yet be.
#
# One risk is left: a try that was given up may arrive later, and be carried out if the key is free by then. A
# key that is deleted and used again must therefore hold a value by which a reader tells it from an older one.
def create_by_id(
    puts: ConditionalPuts, key: str, data: bytes, write_id: str, clock: Clock, patience_ms: int
) -> CreateResult:
    """Write an object only if the key is free, whatever the store answers."""
    may_be_there = False
    for _ in tries(patience_ms, clock, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS):
        try:
            if puts.put_new(key, data, write_id):
                return CreateResult.CREATED
            why = "the store says that the key is taken, and nothing is there"
        except UnknownOutcomeError as lost:
            why, may_be_there = str(lost), True
        except StoreError as refused:
            # This try has done nothing; an earlier one may have.
            raise (_unknown(key, str(refused), refused) if may_be_there else refused) from None
        try:
            return compare_write_ids(puts.write_id_at(key), write_id)
        except ObjectMissing:
            pass
        except UnknownOutcomeError as lost:
            why = f"{why}; then: {lost}"
        except StoreError as refused:
            raise _unknown(key, f"{why}; then: {refused}", refused) from None
        note_failure(why)
    raise _unknown(key, why)


def compare_write_ids(found: str | None, write_id: str) -> CreateResult:
    """Return CREATED if the existing object carries our write id, else EXISTS."""
    return CreateResult.CREATED if found == write_id else CreateResult.EXISTS


def _unknown(key: str, why: str, refused: StoreError | None = None) -> StoreError:
    found = StoreError(
        f"it is not known whether {key} was written",
        why=why,
        what_to_do="none, if the store answers again: the job reads the object when it restarts",
    )
    found.ends_when_repeated = refused is not None and refused.ends_when_repeated
    return found


class CachedReads:
    """A :class:`FileStore` with a cache of the objects that are written once.

    One for each process and store: an object that another one has deleted may still be read here. Objects
    that are missing, or that :meth:`put` has written, are not cached.
    """

    def __init__(
        self, store: FileStore, is_written_once: Callable[[str], bool], most_bytes: int = 16 * 1024 * 1024
    ) -> None:
        self._store, self._is_written_once, self._most_bytes = store, is_written_once, most_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        # Number of puts and deletes: an object that was read during one may be gone already.
        self._changes = 0
        self._lock = threading.Lock()

    def read(self, key: str) -> bytes:
        if not self._is_written_once(key):
            return self._store.read(key)
        with self._lock:
            changes = self._changes
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        data = self._store.read(key)
        self._keep(key, data, changes)
        return data

    def put(self, key: str, data: bytes) -> None:
        with self._changing(key):
            self._store.put(key, data)

    def create_if_absent(self, key: str, data: bytes) -> CreateResult:
        changes = self._changes
        result = self._store.create_if_absent(key, data)
        if result is CreateResult.CREATED and self._is_written_once(key):
            self._keep(key, data, changes)
        return result

    def list(self, prefix: str) -> tuple[str, ...]:
        return self._store.list(prefix)

    def sizes_below(self, folder: str) -> Mapping[str, int]:
        return self._store.sizes_below(folder)

    def read_start(self, key: str, most_bytes: int) -> bytes:
        return self._store.read_start(key, most_bytes)

    def copy(self, key: str, other: str) -> None:
        with self._changing(other):
            self._store.copy(key, other)

    def delete_all(self, keys: Collection[str]) -> None:
        with self._changing(*keys):
            self._store.delete_all(keys)

    def delete(self, key: str) -> None:
        with self._changing(key):
            self._store.delete(key)

    def _keep(self, key: str, data: bytes, changes: int) -> None:
        with self._lock:
            if changes != self._changes or key in self._kept or len(data) > self._most_bytes:
                return
            self._kept[key] = data
            self._bytes += len(data)
            while self._bytes > self._most_bytes:
                self._bytes -= len(self._kept.popitem(last=False)[1])

    @contextlib.contextmanager
    def _changing(self, *keys: str) -> Iterator[None]:
        """Forget objects before and after they are changed."""

        def forget() -> None:
            with self._lock:
                for key in keys:
                    self._changes += 1
                    self._bytes -= len(self._kept.pop(key, b""))

        forget()
        try:
            yield
        finally:
            forget()


T = TypeVar("T")


class SealedObjects:
    """Reads objects that `protocol.envelope.seal` has sealed."""

    def __init__(self, store: Store, place: str) -> None:
        self._store, self._place = store, place

    def read(self, key: str, kind: str, parse: Callable[[Mapping[str, Any]], T]) -> T:
        data = self._store.read(key)
        try:
            return parse(unseal(kind, data))
        except NewerFormatError as error:
            raise JobDirError(
                f"{key} was {error}",
                why=f"this version of flinkish_spark writes format {FORMAT}",
                what_to_do="use the newer version of flinkish_spark that wrote it",
            ) from error
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise CorruptObjectError(
                f"{key} in {self._place} cannot be trusted",
                why=str(error),
                what_to_do="restore the file from a backup; an older checkpoint is never used silently",
                key=key,
            ) from error

    def optional(self, key: str, kind: str, parse: Callable[[Mapping[str, Any]], T]) -> T | None:
        try:
            return self.read(key, kind, parse)
        except ObjectMissing:
            return None

    def numbers(self, folder: str, ending: str = ".json") -> frozenset[int]:
        """Return the numbers after which the objects (or, without ending, folders) in `folder` are named."""
        names = [key.rsplit("/", 1)[1] for key in self._store.list(folder)]
        stems = [name.removesuffix(ending) for name in names if name.endswith(ending)]
        return frozenset(int(stem) for stem in stems if stem.isdecimal() and str(int(stem)) == stem)
