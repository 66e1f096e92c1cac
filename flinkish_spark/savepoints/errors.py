"""What can be wrong with a savepoint; all of it is said before anything is created."""

from __future__ import annotations

from flinkish_spark.errors import CorruptObjectError, EnvironmentFault, UserError


class SavepointNotFound(UserError):
    """There is no savepoint at that path, or it was never finished."""


class SavepointMisfit(UserError):
    """The savepoint does not fit the job; `problems` holds every reason."""


class SavepointClaimed(UserError):
    """A job owns the savepoint's files and may delete them at any time."""


class SavepointDamaged(CorruptObjectError):
    """A file of the savepoint is missing, torn or altered."""


class SavepointFailed(EnvironmentFault):
    """The state could not be exported; the job and its checkpoints are not affected."""


class RescaleRefused(UserError):
    """The number of shuffle partitions was changed and the job cannot follow."""


class CheckpointNotRetained(UserError):
    """The job directory does not have that checkpoint, or not its state any more."""


class BootstrapRefused(UserError):
    """What is to be written into a savepoint does not fit together; nothing was written."""
