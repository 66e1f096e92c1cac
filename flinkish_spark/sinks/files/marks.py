"""The mark of a file sink: which checkpoint was made visible last, and by which timeline.

Beside the files and not in the job directory: it is there to tell whether that directory is an older copy.
One object per checkpoint, created if absent, so that of two processes which commit the same id one is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flinkish_spark.errors import InternalError
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.timeline import NO_TIMELINE, Mark, Timeline, token_in
from flinkish_spark.sealed_objects import SealedObjects
from flinkish_spark.sinks.base import another_timeline
from flinkish_spark.sinks.files.names import SinkFiles
from flinkish_spark.store import LocalStore

_FOLDER, _KIND = "timeline", "file-sink-mark"


@dataclass(frozen=True)
class FileMarks:
    """Reads and leaves marks; nothing is remembered between calls.

    Parameters
    ----------
    files
        Where the sink's files are.
    timeline
        Of the job directory.
    """

    files: SinkFiles
    timeline: Timeline = NO_TIMELINE

    def newest(self) -> Mark | None:
        """Return the newest mark; None if nothing was committed, or by versions that left none."""
        newest = max(self._objects.numbers(_FOLDER), default=None)
        return None if newest is None else self._read(newest)

    def leave(self, checkpoint: int) -> None:
        """Leave the mark of a checkpoint before the first of its files can be seen. May be repeated.

        Raises
        ------
        AnotherTimelineError
            The target holds checkpoints of another timeline.
        """
        ours = self.timeline.mark_of(CheckpointId(checkpoint))
        found = self.newest()
        if found is None or found.checkpoint < ours.checkpoint:
            if found is not None:
                self._require_ours(found, ours)
            value = {"checkpoint": checkpoint, "token": ours.token or ""}
            self._store.create_if_absent(f"{_FOLDER}/{checkpoint}.json", seal(_KIND, value))
            # Whoever was first stands, and may be somebody else.
            found = self._read(checkpoint)
            if found is None:
                raise InternalError(f"the mark of checkpoint {checkpoint} of sink '{self.files.uid}' is gone")
        self._require_ours(found, ours)
        for older in self._objects.numbers(_FOLDER):
            if older < checkpoint:
                self._store.delete(f"{_FOLDER}/{older}.json")

    def _require_ours(self, found: Mark, ours: Mark) -> None:
        why = self.timeline.why_not_ours(found, ours.checkpoint)
        if why:
            raise another_timeline(f"sink '{self.files.uid}'", found, ours.checkpoint, why)

    def _read(self, checkpoint: int) -> Mark | None:
        return self._objects.optional(f"{_FOLDER}/{checkpoint}.json", _KIND, _mark_from)

    @property
    def _store(self) -> LocalStore:
        return LocalStore(self.files.hidden)

    @property
    def _objects(self) -> SealedObjects:
        return SealedObjects(self._store, "the target of a file sink")


def _mark_from(value: Mapping[str, Any]) -> Mark:
    return Mark(CheckpointId(value["checkpoint"]), token_in([str(value["token"])]))
