"""Pins in the simulated job directory: the same promises as `runtime.pins.SparkPins`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from flinkish_spark.checkpoint.pins import PINS, CheckpointPins, PinManifest
from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.store import ObjectMissing
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import CheckpointId
from tests.simulation.spark_files import state_key


class SimPins(CheckpointPins):
    """Pins over the simulated Spark's files."""

    def pin(self, decision: Decision) -> None:
        """Copy what the checkpoint needs, then write its manifest."""
        if decision.checkpoint in self.list_pinned():
            return
        entries = self._read_entries(decision)
        name = state_key(decision.commits_text, int(decision.batch))
        try:
            state = self._store.read(f"{self._log.folder}/state/{name}")
        except ObjectMissing:
            raise CorruptObjectError(f"the simulated state {name} is gone") from None
        self._store.put(f"{PINS}/state/{name}", state)
        self._write(PinManifest(decision.checkpoint, decision.batch, entries, {name: len(state)}))

    def _find_sizes(self, manifest: PinManifest) -> dict[str, int]:
        found = {}
        for name in manifest.files:
            with contextlib.suppress(ObjectMissing):
                found[name] = len(self._store.read(f"{manifest.folder}/{name}"))
        return found

    def restore(self, checkpoint: CheckpointId) -> None:
        """Put state and entries back; state of other versions goes."""
        manifest = self._read_restorable(checkpoint)
        folder = f"{self._log.folder}/state"
        for name in manifest.files:
            self._store.put(f"{folder}/{name}", self._store.read(f"{manifest.folder}/{name}"))
        for key in self._store.list(folder):
            if key.rpartition("/")[2] not in manifest.files:
                self._store.delete(key)
        self._put_entries_back(manifest)

    def unpin(self, checkpoint: CheckpointId) -> None:
        """Delete the manifest, then the state that no other pin names."""
        super().unpin(checkpoint)
        manifests = [self._read_manifest(one) for one in sorted(self.list_pinned())]
        needed = {name for manifest in manifests if manifest is not None for name in manifest.files}
        for key in self._store.list(f"{PINS}/state"):
            if key.rpartition("/")[2] not in needed:
                self._store.delete(key)

    def clean(self, require_owner: Callable[[], None]) -> None:
        """Do nothing: Spark cleans up."""
