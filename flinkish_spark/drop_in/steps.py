"""The steps of a micro-batch that can be watched from outside; a crash test dies at them."""

from __future__ import annotations

import enum
from typing import Protocol


class EpochStep(enum.Enum):
    """Every durable or outward step of the driver's side, in order."""

    #: Before a micro-batch's tasks, and right behind Spark's commit of the one before it.
    PLAN = "plan"
    #: The write-ahead: which transactions make up the batch.
    DECISION = "decision"
    END_TRANSACTION = "end-transaction"
    RECEIPT = "receipt"


class EpochObserver(Protocol):
    """Told about steps, in the process that takes them; must not raise."""

    def before(self, step: EpochStep, subject: str) -> None:
        """Note what comes; `subject` is the batch or the transactional id."""

    def after(self, step: EpochStep, subject: str) -> None:
        """Note what is done."""


class SilentEpochObserver:
    """Watches nothing."""

    def before(self, step: EpochStep, subject: str) -> None:
        """Do nothing."""

    def after(self, step: EpochStep, subject: str) -> None:
        """Do nothing."""
