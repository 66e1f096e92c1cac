"""What a user says about restoring."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flinkish_spark.arguments import instance_of, refused_as_config_errors
from flinkish_spark.errors import ConfigError
from flinkish_spark.protocol.limits import checked_choice
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
        The savepoint's directory, an absolute path as a str.
    claim
        Who owns the savepoint's files afterwards.
    non_restored
        What becomes of state that nothing in the job takes.
    unpositioned
        What becomes of sources that cannot be told where to begin.

    Raises
    ------
    ConfigError
        The path is not absolute, or a value is of another type.

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
        instance_of("path", self.path, str, what_to_do='give RestoreSettings("/absolute/path")')
        with refused_as_config_errors("give RestoreSettings one of these, without quotes"):
            checked_choice("claim", self.claim, ClaimMode)
            checked_choice("non_restored", self.non_restored, NonRestoredState)
            checked_choice("unpositioned", self.unpositioned, UnpositionedSources)
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
