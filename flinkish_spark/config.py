"""Settings of a job, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

from flinkish_spark.errors import ConfigError


def require_positive(name: str, value: int) -> None:
    """Raise ConfigError unless `value` is a positive whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(
            f"{name} is {value!r}",
            why="it must be a positive whole number of milliseconds" if name.endswith("_ms") else "",
            what_to_do=f"set {name} to 1 or more",
            setting=name,
            value=value,
        )


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """When checkpoints are taken and how long they may last.

    Parameters
    ----------
    interval_ms
        Time from one periodic trigger to the next. Independent of Spark's trigger interval.
    timeout_ms
        A checkpoint not decided this long after its trigger is aborted; what it staged passes to
        the next one.
    min_pause_ms
        Least time between the end of one checkpoint and the next periodic trigger; 0 for none.
    restart_budget_ms
        How long the job may be down with data staged but not decided. A Kafka sink's transaction
        timeout must be at least ``interval_ms + restart_budget_ms``.
    retained
        How many confirmed checkpoints keep their metadata.

    Raises
    ------
    ConfigError
        A value is not positive.

    Examples
    --------
    >>> CheckpointConfig(interval_ms=2_000).timeout_ms
    600000
    """

    interval_ms: int = 10_000
    timeout_ms: int = 600_000
    min_pause_ms: int = 0
    restart_budget_ms: int = 120_000
    retained: int = 50

    def __post_init__(self) -> None:
        for name in ("interval_ms", "timeout_ms", "restart_budget_ms", "retained"):
            require_positive(name, getattr(self, name))
        if not isinstance(self.min_pause_ms, int) or self.min_pause_ms < 0:
            raise ConfigError(f"min_pause_ms is {self.min_pause_ms!r}", what_to_do="set it to 0 or more")
