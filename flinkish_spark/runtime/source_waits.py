"""What a chained source waits for, as far as the coordinator is concerned.

Such a source stands still at a cut until a checkpoint of this job is drawn there, and a checkpoint
waits for the source to come to one.
"""

from __future__ import annotations

from dataclasses import replace

from flinkish_spark.protocol.coordination import Abort, Coordination
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.purpose import CheckpointPurpose
from flinkish_spark.runtime.control_source import ControlFile


def source_wants_checkpoint(control: ControlFile, state: Coordination) -> bool:
    """Return whether to ask for a checkpoint that the source waits for, and nobody has asked for."""
    if state.barrier_on_its_way or state.queue.holds(CheckpointPurpose.FOLLOW_UP):
        return False
    status = control.source_status()
    return status is not None and status.wants_checkpoint


def explained(effect: Abort, control: ControlFile) -> Abort:
    """Return the effect; if the checkpoint expired, with what its source was waiting for."""
    status = control.source_status()
    if effect.reason is not CheckpointFailureReason.EXPIRED or status is None:
        return effect
    return replace(effect, text=f"{effect.text}; the source {status.text}")
