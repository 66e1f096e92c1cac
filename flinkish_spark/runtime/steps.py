"""The steps of a checkpoint that can be watched from outside.

A crash test kills the process right before or after a step; a metric counts them. Observers are
called in the thread that takes the step and must not raise.
"""

from __future__ import annotations

import enum
from typing import Protocol


class Step(enum.Enum):
    """Every durable or outward step, in the order of a checkpoint."""

    TRIGGER = "trigger"
    STAGED_FILE = "staged-file"
    #: before: foreachBatch is about to return; after: commits/N was read.
    SPARK_COMMIT = "spark-commit"
    DECISION = "decision"
    SINK_COMMIT = "sink-commit"
    GROUP_OFFSETS = "group-offsets"
    RECEIPT = "receipt"
    REWIND_INTENT = "rewind-intent"
    REWIND_DELETE = "rewind-delete"


class Observer(Protocol):
    """Told about steps; see :class:`Step`."""

    def before(self, step: Step, subject: str) -> None:
        """Note what comes: called right before the step; `subject` is a sink uid, a log entry or an id."""

    def after(self, step: Step, subject: str) -> None:
        """Note what is done: called right after the step."""


class SilentObserver:
    """Watches nothing."""

    def before(self, step: Step, subject: str) -> None:
        """Do nothing."""

    def after(self, step: Step, subject: str) -> None:
        """Do nothing."""
