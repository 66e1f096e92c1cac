"""The pins of checkpoints: their manifests, and the interface by which a job keeps, restores and drops them.

How the files are kept is in :mod:`flinkish_spark.checkpoint.retention`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from flinkish_spark.checkpoint.spark_log import SparkLog, missing_entry
from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.store import SealedObjects
from flinkish_spark.protocol.bases import BASES, Base, LiveBases
from flinkish_spark.protocol.codec import LEFT_OUT, Check, StoredObject
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import BatchId, CheckpointId
from flinkish_spark.protocol.micro_batches import COMMITS, OFFSETS, STATE

#: Folder of the pins below the job directory.
PINS = "pins"


def pin_key(checkpoint: CheckpointId) -> str:
    return f"{PINS}/{checkpoint}.json"


def _name_of_a_file(name: str) -> str:
    if Path(name).is_absolute() or ".." in name.split("/"):
        raise ValueError(f"{name!r} is not the name of a state file")
    return name


@dataclass(frozen=True, slots=True)
class PinManifest(StoredObject):
    checkpoint: CheckpointId
    batch: BatchId
    #: Log entries byte for byte by their key below Spark's checkpoint.
    log: Mapping[str, str]
    #: Files below Spark's state folder, with their sizes in bytes.
    files: Mapping[Annotated[str, Check(_name_of_a_file)], int]
    #: Folder of these files, below the job directory.
    folder: Annotated[str, Check(_name_of_a_file)] = field(default=f"{PINS}/{STATE}", metadata=LEFT_OUT)
    #: Files of big key groups in a bucket, below their own folder.
    bases: tuple[Base, ...] = field(default=(), metadata=LEFT_OUT)

    @property
    def live_bases(self) -> LiveBases:
        return LiveBases(self.batch, frozenset(self.bases))


class CheckpointPins(abc.ABC):
    """Keeps the files that retained checkpoints need; used by one thread at a time."""

    def __init__(self, log: SparkLog) -> None:
        self._log, self._store = log, log.store
        self._objects = SealedObjects(log.store, "the job directory")
        self._manifests: dict[CheckpointId, PinManifest] = {}

    @abc.abstractmethod
    def pin(self, decision: Decision) -> None:
        """Keep the files of a decided checkpoint; Spark may run meanwhile. A second call does nothing."""

    def why_not_restorable(self, checkpoint: CheckpointId) -> str:
        """Return which file a pin lacks; empty if :meth:`restore` will work."""
        manifest = self._read_manifest(checkpoint)
        if manifest is None:
            return "the state that it needs is not kept any more"
        found = self._find_sizes(manifest)
        for name in (*manifest.files, *(f"{BASES}/{base}" for base in manifest.bases)):
            if name not in found:
                return f"the kept state file {name} is gone"
            if found[name] != (size := manifest.files.get(name, found[name])):
                return f"the kept state file {name} has {found[name]} bytes instead of {size}"
        return ""

    @abc.abstractmethod
    def _find_sizes(self, manifest: PinManifest) -> Mapping[str, int]:
        """Return the sizes of the files of a pin that are there, and of its bases below their folder."""

    @abc.abstractmethod
    def restore(self, checkpoint: CheckpointId) -> None:
        """Set Spark's state and log entries back to a checkpoint; may be cut off and repeated."""

    def unpin(self, checkpoint: CheckpointId) -> None:
        """Delete a pin; a missing one is no error."""
        self._store.delete(pin_key(checkpoint))
        self._manifests.pop(checkpoint, None)

    def clean(self, require_owner: Callable[[], None]) -> None:
        """Delete files that no pin needs, if a cleaning is due; called after each receipt."""

    def list_pinned(self) -> frozenset[CheckpointId]:
        return frozenset(CheckpointId(number) for number in self._objects.numbers(PINS))

    def log_entries(self, checkpoint: CheckpointId) -> Mapping[str, str]:
        """Return the pinned log entries by key, such as ``"offsets/7"``; empty without a pin."""
        manifest = self._read_manifest(checkpoint)
        return {} if manifest is None else manifest.log

    def _write(self, manifest: PinManifest) -> None:
        self._store.create_if_absent(pin_key(manifest.checkpoint), seal("pin", manifest.to_json()))
        self._manifests[manifest.checkpoint] = manifest

    def _read_manifest(self, checkpoint: CheckpointId) -> PinManifest | None:
        if checkpoint not in self._manifests:
            found = self._objects.optional(pin_key(checkpoint), "pin", PinManifest.from_json)
            if found is None:
                return None
            self._manifests[checkpoint] = found
        return self._manifests[checkpoint]

    def _read_all_manifests(self) -> list[PinManifest]:
        return [manifest for one in self.list_pinned() if (manifest := self._read_manifest(one)) is not None]

    def _read_entries(self, decision: Decision) -> dict[str, str]:
        at = decision.batch
        entries = {f"{OFFSETS}/{at}": decision.offsets_text, f"{COMMITS}/{at}": decision.commits_text}
        if at > BatchId(0):
            # Spark's restart also reads the entry before the newest.
            before = BatchId(at.value - 1)
            text = self._log.read(OFFSETS, before)
            if text is None:
                raise missing_entry(OFFSETS, before, decision.checkpoint)
            entries[f"{OFFSETS}/{before}"] = text
        return entries

    def _put_entries_back(self, manifest: PinManifest) -> None:
        for entry, text in manifest.log.items():
            log, _, batch = entry.partition("/")
            if self._log.read(log, BatchId(int(batch))) != text:
                self._log.restore(log, BatchId(int(batch)), text)

    def _read_restorable(self, checkpoint: CheckpointId) -> PinManifest:
        manifest, trouble = self._read_manifest(checkpoint), self.why_not_restorable(checkpoint)
        if manifest is None or trouble:
            raise CorruptObjectError(
                f"checkpoint {checkpoint} cannot be restored",
                why=trouble,
                what_to_do="go back to another checkpoint",
                checkpoint=checkpoint,
            )
        return manifest
