"""The steps of a micro-batch that can be watched from outside; a crash test dies at them."""

from __future__ import annotations

import enum

from flinkish_spark.runtime.steps import StepObserver


class EpochStep(enum.Enum):
    """Every durable or outward step of the driver's side, in order."""

    #: Before a micro-batch's tasks, and right behind Spark's commit of the one before it.
    PLAN = "plan"
    #: The write-ahead: which transactions make up the batch.
    DECISION = "decision"
    END_TRANSACTION = "end-transaction"
    RECEIPT = "receipt"


EpochObserver = StepObserver[EpochStep]
