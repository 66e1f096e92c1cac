"""How many offsets a second a Kafka source may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flinkish_spark.drop_in.option_names import PER_SECOND
from flinkish_spark.engines import Engine
from flinkish_spark.errors import ConfigError
from flinkish_spark.protocol.limits import UNLIMITED, Unlimited
from flinkish_spark.sources.rates import RateLimit

if TYPE_CHECKING:
    from flinkish_spark.chaining.upstream import UpstreamJob


def checked_pace(
    most: float | Unlimited, reader: str | Engine, aligned_with: UpstreamJob | None
) -> float | Unlimited:
    """Return what a user gave as `max_offsets_per_second`, or raise ConfigError."""
    if most is UNLIMITED:
        return most
    if Engine.of(reader, "reader") is not Engine.PYTHON:
        raise ConfigError(
            "max_offsets_per_second needs the Python reader",
            why="Spark's own Kafka source counts records of a micro-batch, and no seconds",
            what_to_do='add reader="python"; or set max_offsets_per_trigger, and trigger_interval_ms of '
            "the environment",
        )
    if aligned_with is not None:
        raise ConfigError(
            "max_offsets_per_second and aligned_with are set for one source",
            why="a micro-batch ends where the upstream job's checkpoint does",
            what_to_do="set max_offsets_per_trigger, or leave one of them out",
        )
    return RateLimit(records_per_second=most).records_per_second


def pace_option(most: float | Unlimited) -> dict[str, str]:
    """Return the option that tells the reader."""
    return {} if isinstance(most, Unlimited) else {PER_SECOND: repr(float(most))}
