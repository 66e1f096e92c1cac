"""Names of the transactions of two-phase sinks: one per task attempt, told apart exactly."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from flinkish_spark.protocol.ids import JobUuid, OwnerEpoch

_NAME = re.compile(r"flinkish-([0-9a-f]{32})-([0-9a-f]{8})-(\d{1,18})-(\d{1,18})-(\d{1,9})-(\d{1,18})")


@dataclass(frozen=True, slots=True, order=True)
class TransactionName:
    """Name of what one task attempt stages: job, sink, owner epoch, block, task, attempt.

    At most 130 characters, of lower-case letters, digits and dashes: fit for a file, a table's key or
    the global id of a prepared transaction.

    Parameters
    ----------
    sink
        Eight hex digits made from the sink's uid, see :meth:`mark_of`.
    block
        Leased for the micro-batch; used again only behind the receipt of it.
    task
        Spark partition index.
    attempt
        Spark's number of the task attempt, which no other attempt in its application has. The number
        that counts from 0 is not: it begins anew when a stage is run again while old tasks still write.

    Examples
    --------
    >>> name = TransactionName(JobUuid("0" * 32), TransactionName.mark_of("table"), OwnerEpoch(1), 2, 3, 4)
    >>> TransactionName.parse(str(name)) == name
    True
    """

    job: JobUuid
    sink: str
    owner_epoch: OwnerEpoch
    block: int
    task: int
    attempt: int

    def __str__(self) -> str:
        parts = (self.owner_epoch, self.block, self.task, self.attempt)
        return self.prefix(self.job, self.sink) + "-".join(map(str, parts))

    @staticmethod
    def mark_of(uid: str) -> str:
        """Return eight hex digits for a sink's uid, which may be too long for a name."""
        return hashlib.sha256(uid.encode()).hexdigest()[:8]

    @staticmethod
    def prefix(job: JobUuid, sink: str) -> str:
        """Return what all names of one sink of one job begin with."""
        return f"flinkish-{job}-{sink}-"

    @classmethod
    def parse(cls, text: str) -> TransactionName | None:
        """Return the name, or None if `text` is not one of ours."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        job, sink, owner, block, task, attempt = match.groups()
        return cls(JobUuid(job), sink, OwnerEpoch(int(owner)), int(block), int(task), int(attempt))
