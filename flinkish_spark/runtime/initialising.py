"""The first steps of a checkpoint, before its barrier goes out: its record, its hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.clock import Clock
from flinkish_spark.errors import EnvironmentFault, StoreError
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.checkpoint import Participant
from flinkish_spark.protocol.decisions import TriggerRecord
from flinkish_spark.protocol.failures import CheckpointFailureReason as Reason
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.purpose import CheckpointPurpose
from flinkish_spark.runtime.master_hooks import HookFailed, MasterHooks
from flinkish_spark.runtime.ownership import Ownership
from flinkish_spark.store import CreateResult


@dataclass(frozen=True, slots=True)
class Initialised:
    """How it went: `reason` is None where it went well."""

    hooks: Mapping[Participant, Any] = field(default_factory=dict)
    reason: Reason | None = None
    text: str = ""
    cause: EnvironmentFault | None = None


class Initialisation:
    """Prepares checkpoints, each in a thread of its own."""

    def __init__(self, job_dir: JobDir, ownership: Ownership, clock: Clock, hooks: MasterHooks) -> None:
        self._job_dir, self._ownership, self._clock, self._hooks = job_dir, ownership, clock, hooks

    def run(self, checkpoint: CheckpointId, purpose: CheckpointPurpose) -> Initialised:
        """Make `checkpoint`'s record, then call the hooks.

        Raises
        ------
        FencedError
            Another owner has that id.
        """
        record = TriggerRecord(checkpoint, self._ownership.epoch, purpose, self._clock.wall_ms())
        try:
            # This order matters: a new owner seals the ids that have a record. An id whose barrier
            # is out and which has none could be decided behind the new owner's back.
            created = self._job_dir.create_trigger(record)
        except StoreError as error:
            return Initialised(reason=Reason.INITIALISATION_FAILED, text=str(error), cause=error)
        if created is CreateResult.EXISTS:
            self._ownership.check()
            return Initialised(reason=Reason.ID_COUNTER_FAILED, text=f"id {checkpoint} is in use")
        try:
            return Initialised(self._hooks.trigger(checkpoint))
        except HookFailed as error:
            return Initialised(reason=Reason.HOOK_FAILED, text=str(error), cause=error)
