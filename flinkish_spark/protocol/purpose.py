"""What a checkpoint is taken for."""

from __future__ import annotations

import enum


class CheckpointPurpose(enum.Enum):
    """Who asked for a checkpoint, and what it will be used for.

    The purpose gives a request its rank: savepoints and last checkpoints go before what a user or
    the job asks for, and all of them before the timer.
    """

    #: The interval was over.
    PERIODIC = "PERIODIC"
    #: The job asked: something staged has to be decided soon (kept micro-batches after a recovery,
    #: a long backlog, what an aborted checkpoint left).
    FOLLOW_UP = "FOLLOW_UP"
    #: A user or a program asked for a checkpoint that the job owns like any other.
    USER = "USER"
    #: A user asked for a checkpoint to keep: it will be exported to a place of the user's.
    SAVEPOINT = "SAVEPOINT"
    #: The last one: the job stops behind it.
    FINAL = "FINAL"
    #: The last one, and exported.
    FINAL_SAVEPOINT = "FINAL_SAVEPOINT"
    #: The same, and event time comes to its end behind the last records: all windows are in what it commits.
    DRAINED_SAVEPOINT = "DRAINED_SAVEPOINT"

    @property
    def is_savepoint(self) -> bool:
        """Whether it is exported; such a checkpoint is never subsumed."""
        return self is CheckpointPurpose.SAVEPOINT or self.stops_with_savepoint

    @property
    def is_final(self) -> bool:
        """Whether the job ends behind its barrier."""
        return self is CheckpointPurpose.FINAL or self.stops_with_savepoint

    @property
    def stops_with_savepoint(self) -> bool:
        """Whether it is both; the job goes on if it fails."""
        return self in (CheckpointPurpose.FINAL_SAVEPOINT, CheckpointPurpose.DRAINED_SAVEPOINT)

    @property
    def rank(self) -> int:
        """Its place among purposes; the lowest goes first."""
        if self.is_savepoint or self.is_final:
            return 0
        return 2 if self is CheckpointPurpose.PERIODIC else 1
