"""Base files of key groups: the unchanged part of a big state, kept out of the state value.

An attempt of a task writes a file once, under a new name, and only the state value of the same attempt names
it. So no state value names the file of a lost attempt.

On a disk the files lie in the query's checkpoint, are pinned and restored like Spark's own state
(:mod:`.checkpoint.retention`), and later state values delete them. In a bucket they lie beside the
checkpoint; tasks report them to the driver, which deletes them (:mod:`flinkish_spark.protocol.bases`).
"""

from __future__ import annotations

import mmap
import secrets
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import IO

from flinkish_spark.core.store import ObjectMissing, Store
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.bases import BASE_NAME
from flinkish_spark.state.codec import BaseRef, Frame, FrameError, check_frame
from flinkish_spark.state.evolution import StateMismatch

#: Number of key groups whose base a worker keeps mapped.
_MAPPED_GROUPS = 4096


def bases_of(bases: StoreSpec, uid: str, chain: str) -> StoreSpec:
    return bases.to_child(uid) if bases.is_local else bases.to_child(f"{uid}/{chain}")


class MappedBases:
    """Base files of an operator, mapped once per worker; each is checked at its first read."""

    def __init__(self, place: StoreSpec) -> None:
        self.place = place
        #: By key group, the file's name and its sections.
        self._frames: OrderedDict[str, tuple[str, Frame]] = OrderedDict()

    @cached_property
    def _bucket(self) -> Store:
        # Opened once: its connections serve all key groups of all micro-batches.
        return self.place.open_bucket()

    def frame(self, ref: BaseRef) -> Frame:
        known, frame = self._frames.get(_group(ref.file), (None, {}))
        return frame if known == ref.file else self._map(ref, self._open(check_base_name(ref.file)))

    def _open(self, name: str) -> IO[bytes]:
        try:
            if self.place.is_local:
                return open(self.place.folder / name, "rb")
            return _to_unnamed_file(self._bucket.read(name))
        except ObjectMissing:
            raise FrameError(f"the base {name!r} is gone") from None
        except OSError as error:
            raise FrameError(f"the base {name!r} cannot be read: {error}") from error

    def _map(self, ref: BaseRef, file: IO[bytes]) -> Frame:
        try:
            with file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise FrameError(f"the base {ref.file!r} cannot be read: {error}") from error
        if len(mapped) != ref.offset + ref.length:
            raise FrameError(f"the base {ref.file!r} has {len(mapped)} bytes instead of {ref.length}")
        frame = check_frame(memoryview(mapped)[ref.offset :])
        self._frames.pop(_group(ref.file), None)
        self._frames[_group(ref.file)] = ref.file, frame
        while len(self._frames) > _MAPPED_GROUPS:
            self._frames.popitem(last=False)
        return frame

    def put(self, ref: BaseRef, frame: bytes) -> None:
        self._bucket.put(ref.file, frame)
        self._map(ref, _to_unnamed_file(frame))

    def forget(self, name: str) -> None:
        if self._frames.get(_group(name), (None, {}))[0] == name:
            del self._frames[_group(name)]


def _group(name: str) -> str:
    return name.partition("-")[0]


def _to_unnamed_file(content: bytes) -> IO[bytes]:
    """Return a temporary file, which the caller closes after mapping it."""
    file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(content)
    file.flush()
    return file


def check_base_name(name: str) -> str:
    if not BASE_NAME.fullmatch(name):
        raise FrameError(f"{name!r} is not the name of a base")
    return name


class Bases:
    """The store of bases as a micro-batch sees it, each written once; this class keeps none."""

    #: The micro-batch, and the oldest one to which the job may still go back, if known.
    batch = 0
    retained_batch: int | None = None

    def read(self, ref: BaseRef) -> Frame:
        """Return the sections of a base, checked by `check_frame`; the file stays mapped while in use."""
        raise StateMismatch(f"the state names the base {ref.file!r}, and this operator keeps none")

    def write(self, group: int, frame: bytes) -> BaseRef:
        raise StateMismatch(f"key group {group} was to move into a base, and this operator keeps none")

    def delete(self, file: str) -> None:
        """Delete a file; a missing one is no error."""


class BaseFiles(Bases):
    """The bases of an operator on a disk, as one task sees them."""

    def __init__(self, mapped: MappedBases, batch: int, retained_batch: int | None) -> None:
        self._mapped, self.batch, self.retained_batch = mapped, batch, retained_batch

    def read(self, ref: BaseRef) -> Frame:
        return self._mapped.frame(ref)

    def write(self, group: int, frame: bytes) -> BaseRef:
        name = self._new_name(group)
        path = self._mapped.place.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not synced here: it becomes durable with the state value that names it.
        path.write_bytes(frame)
        return BaseRef(name, 0, len(frame))

    def _new_name(self, group: int) -> str:
        return f"{group}-{self.batch}-{secrets.token_hex(8)}"

    def delete(self, file: str) -> None:
        self._mapped.forget(file)
        (self._mapped.place.folder / check_base_name(file)).unlink(missing_ok=True)


class BaseObjects(BaseFiles):
    """The bases of an operator in a bucket, as one task sees them."""

    def __init__(self, mapped: MappedBases, batch: int, tell: Callable[[str], None]) -> None:
        # The driver knows which checkpoints name a base and deletes it; a task only forgets it.
        super().__init__(mapped, batch, retained_batch=batch)
        self._tell = tell

    def write(self, group: int, frame: bytes) -> BaseRef:
        ref = BaseRef(self._new_name(group), 0, len(frame))
        self._tell(ref.file)
        self._mapped.put(ref, frame)
        return ref

    def delete(self, file: str) -> None:
        self._mapped.forget(file)
