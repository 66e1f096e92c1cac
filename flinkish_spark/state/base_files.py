"""Bases of key groups as files: what of a big state does not change stays out of the state value.

A file holds one key group's entries as they were at some micro-batch. It is written once, by whichever
attempt of a task; its name is new, and only the state value that this attempt stores names it. So what a lost
attempt wrote is named by nobody. It lies in the query's checkpoint and moves with it.

    <Spark's checkpoint>/state/bases/<operator>/<key group>-<micro-batch>-<random>

There they are pinned and restored like Spark's own state (:mod:`.checkpoint.retention`). State values
delete the files that they named once (:mod:`flinkish_spark.state.key_group`).
"""

from __future__ import annotations

import mmap
import secrets
from collections import OrderedDict
from pathlib import Path

from flinkish_spark.protocol.micro_batches import BASE_NAME
from flinkish_spark.state.codec import BaseRef, Frame, FrameError, checked_frame

#: Mapped files that a worker keeps; one key group has one.
_MAPPED_FILES = 4096


class MappedBases:
    """Files of a folder, mapped once per worker: each is checked when it is read first.

    Parameters
    ----------
    folder
        Of one operator.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._frames: OrderedDict[str, Frame] = OrderedDict()

    def frame(self, ref: BaseRef) -> Frame:
        """Return the sections of a base.

        Raises
        ------
        FrameError
            The file is missing, torn or altered.
        """
        if ref.file in self._frames:
            self._frames.move_to_end(ref.file)
            return self._frames[ref.file]
        path = self.path(ref.file)
        try:
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise FrameError(f"the base {ref.file!r} cannot be read: {error}") from error
        if len(mapped) != ref.offset + ref.length:
            raise FrameError(f"the base {ref.file!r} has {len(mapped)} bytes instead of {ref.length}")
        frame = checked_frame(memoryview(mapped)[ref.offset :])
        self._frames[ref.file] = frame
        while len(self._frames) > _MAPPED_FILES:
            self._frames.popitem(last=False)
        return frame

    def path(self, name: str) -> Path:
        """Return where a file lies; its name comes from a state value and becomes a path."""
        if not BASE_NAME.fullmatch(name):
            raise FrameError(f"{name!r} is not the name of a base")
        return self.folder / name

    def forget(self, name: str) -> None:
        """Let go of a file's memory as soon as nobody uses it."""
        self._frames.pop(name, None)


class BaseFiles:
    """The bases of an operator, as one task sees them; see `Bases` in `state/key_group.py`.

    Parameters
    ----------
    mapped
        Files of the operator; lives as long as the worker.
    batch, retained_batch
        See `Bases`.
    """

    def __init__(self, mapped: MappedBases, batch: int, retained_batch: int | None) -> None:
        self._mapped, self._batch, self._retained_batch = mapped, batch, retained_batch

    @property
    def batch(self) -> int:
        """The micro-batch's number."""
        return self._batch

    @property
    def retained_batch(self) -> int | None:
        """The oldest micro-batch whose state may be asked for again."""
        return self._retained_batch

    def read(self, ref: BaseRef) -> Frame:
        """Return a base's sections."""
        return self._mapped.frame(ref)

    def write(self, group: int, frame: bytes) -> BaseRef:
        """Write a file under a new name."""
        name = f"{group}-{self._batch}-{secrets.token_hex(8)}"
        path = self._mapped.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not synced here: the state value that names it is Spark's, and is made durable with it.
        path.write_bytes(frame)
        return BaseRef(name, 0, len(frame))

    def delete(self, file: str) -> None:
        """Delete a file that no state names."""
        self._mapped.forget(file)
        self._mapped.path(file).unlink(missing_ok=True)
