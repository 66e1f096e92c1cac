"""Pins in the simulated job directory: the same promises as `runtime.pins.SparkPins`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from flinkish_spark.checkpoint.retention import PINS
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.store import ObjectMissing
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import BatchId, CheckpointId
from flinkish_spark.protocol.micro_batches import COMMITS, OFFSETS
from tests.simulation.spark_files import state_key, state_version


class SimPins:
    """:class:`~flinkish_spark.checkpoint.retention.CheckpointPins` over the simulated Spark's files."""

    def __init__(self, log: SparkLog) -> None:
        self._log, self._store = log, log.store

    def pin(self, decision: Decision) -> None:
        """Copy what the checkpoint needs, then write its manifest."""
        if decision.checkpoint in self.pinned():
            return
        at = decision.batch
        entries = {f"{OFFSETS}/{at}": decision.offsets_text, f"{COMMITS}/{at}": decision.commits_text}
        if at > BatchId(0):
            before = BatchId(at.value - 1)
            text = self._log.read(OFFSETS, before)
            if text is None:
                raise CorruptObjectError(f"the simulated log entry {OFFSETS}/{before} is gone")
            entries[f"{OFFSETS}/{before}"] = text
        name = state_key(decision.commits_text, int(at))
        try:
            state = self._store.read(f"{self._log.folder}/state/{name}")
        except ObjectMissing:
            raise CorruptObjectError(f"the simulated state {name} is gone") from None
        self._store.put(f"{PINS}/state/{name}", state)
        manifest = {"log": entries, "state": name, "version": state_version(name)}
        self._store.create_if_absent(f"{PINS}/{decision.checkpoint}.json", json.dumps(manifest).encode())

    def pinned(self) -> frozenset[CheckpointId]:
        """Return the checkpoints that have a manifest."""
        names = (key.rpartition("/")[2].removesuffix(".json") for key in self._store.list(PINS))
        return frozenset(CheckpointId(int(name)) for name in names if name.isdecimal())

    def why_not_restorable(self, checkpoint: CheckpointId) -> str:
        """Return what a pin lacks."""
        manifest = self._manifest(checkpoint)
        if manifest is None:
            return "the state that it needs is not kept any more"
        try:
            self._store.read(f"{PINS}/state/{manifest['state']}")
        except ObjectMissing:
            return f"the kept state {manifest['state']} is gone"
        return ""

    def log_entries(self, checkpoint: CheckpointId) -> Mapping[str, str]:
        """Return the pinned log entries by key."""
        manifest = self._manifest(checkpoint)
        return {} if manifest is None else dict(manifest["log"])

    def restore(self, checkpoint: CheckpointId) -> None:
        """Put state and entries back; state of other versions goes."""
        manifest = self._manifest(checkpoint)
        trouble = self.why_not_restorable(checkpoint)
        if manifest is None or trouble:
            raise CorruptObjectError(f"checkpoint {checkpoint} cannot be restored", why=trouble)
        folder, name = f"{self._log.folder}/state", manifest["state"]
        self._store.put(f"{folder}/{name}", self._store.read(f"{PINS}/state/{name}"))
        for key in self._store.list(folder):
            if key != f"{folder}/{name}":
                self._store.delete(key)
        for entry, text in manifest["log"].items():
            log, _, batch = entry.partition("/")
            if self._log.read(log, BatchId(int(batch))) != text:
                self._log.restore(log, BatchId(int(batch)), text)

    def unpin(self, checkpoint: CheckpointId) -> None:
        """Delete the manifest, then the state that no other pin names."""
        self._store.delete(f"{PINS}/{checkpoint}.json")
        manifests = [self._manifest(one) for one in sorted(self.pinned())]
        needed = {manifest["state"] for manifest in manifests if manifest is not None}
        for key in self._store.list(f"{PINS}/state"):
            if key.rpartition("/")[2] not in needed:
                self._store.delete(key)

    def clean(self, require_owner: Callable[[], None]) -> None:
        """Do nothing: Spark cleans up."""

    def _manifest(self, checkpoint: CheckpointId) -> dict[str, Any] | None:
        try:
            manifest: dict[str, Any] = json.loads(self._store.read(f"{PINS}/{checkpoint}.json"))
        except ObjectMissing:
            return None
        except ValueError as error:
            raise CorruptObjectError(
                f"the pin of checkpoint {checkpoint} cannot be read", why=str(error)
            ) from error
        return manifest
