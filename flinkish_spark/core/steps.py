"""The steps of a checkpoint that observers can follow.

A crash test kills the process right before or after a step; a metric counts them. Observers are
called in the thread that takes the step and must not raise.
"""

from __future__ import annotations

import enum
from typing import Protocol, TypeVar


class Step(enum.Enum):
    """Every durable or outward step, in the order of a checkpoint."""

    TRIGGER = "trigger"
    STAGED_FILE = "staged-file"
    #: before: foreachBatch is about to return; after: commits/N was read.
    SPARK_COMMIT = "spark-commit"
    DECISION = "decision"
    SINK_COMMIT = "sink-commit"
    SINK_COMPLETE = "sink-complete"
    MANIFEST = "manifest"
    GROUP_OFFSETS = "group-offsets"
    RECEIPT = "receipt"
    RESTAGED = "restaged"
    REWIND_INTENT = "rewind-intent"
    REWIND_DELETE = "rewind-delete"


StepT_contra = TypeVar("StepT_contra", contravariant=True)


class StepObserver(Protocol[StepT_contra]):
    """Told about steps of one kind, in the thread and process that takes them; must not raise."""

    def on_step_start(self, step: StepT_contra, subject: str) -> None:
        """Note a step right before it is taken; `subject` is a sink uid, a log entry or an id."""

    def on_step_end(self, step: StepT_contra, subject: str) -> None:
        """Note a step right after it was taken."""


Observer = StepObserver[Step]


class SilentObserver:
    def on_step_start(self, step: enum.Enum, subject: str) -> None: ...

    def on_step_end(self, step: enum.Enum, subject: str) -> None: ...
