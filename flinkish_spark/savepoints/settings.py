"""What a user says about restoring."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flinkish_spark.errors import ConfigError
from flinkish_spark.protocol.restoring import NonRestoredState, RestoreRules, UnpositionedSources
from flinkish_spark.protocol.seeding import ClaimMode


@dataclass(frozen=True)
class RestoreSettings:
    """Start a new job from a savepoint.

    Counts at the first start of a job directory. A later start with the same savepoint goes on from
    the job's own checkpoints; with another one it is refused.

    Parameters
    ----------
    path
        The savepoint's directory, absolute.
    claim
        Who owns the savepoint's files afterwards.
    non_restored
        What becomes of state that nothing in the job takes.
    unpositioned
        What becomes of sources that cannot be told where to begin.

    Raises
    ------
    ConfigError
        The path is not absolute.

    Examples
    --------
    >>> RestoreSettings("/savepoints/orders-17").claim.name
    'NO_CLAIM'
    """

    path: str
    claim: ClaimMode = ClaimMode.NO_CLAIM
    non_restored: NonRestoredState = NonRestoredState.REFUSE
    unpositioned: UnpositionedSources = UnpositionedSources.REFUSE

    def __post_init__(self) -> None:
        if not self.folder.is_absolute():
            raise ConfigError(
                f"the savepoint {self.path!r} cannot be used",
                why="half of the code runs in other processes, with other working directories",
                what_to_do="give an absolute path",
            )

    @property
    def folder(self) -> Path:
        """Return the path without the scheme of a local file."""
        return Path(self.path.removeprefix("file://"))

    @property
    def rules(self) -> RestoreRules:
        """Return what the user allows."""
        return RestoreRules(self.non_restored, self.unpositioned)
