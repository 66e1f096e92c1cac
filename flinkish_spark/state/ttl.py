"""How long an entry of a state lives."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flinkish_spark.arguments import instance_of, refused_as_config_errors
from flinkish_spark.protocol.limits import checked_whole

#: A time of today and this much more is far from what 64 bits cannot hold.
_MOST_MS = 1 << 53


class TtlUpdate(enum.Enum):
    """What begins an entry's time to live anew (Flink's `StateTtlConfig.UpdateType`)."""

    ON_CREATE_AND_WRITE = "ON_CREATE_AND_WRITE"
    ON_READ_AND_WRITE = "ON_READ_AND_WRITE"


@dataclass(frozen=True, slots=True)
class StateTtl:
    """Time to live of a state's entries, by processing time; of lists and maps that of each element.

    The clock is the micro-batch's processing time, which a micro-batch that is run again has again. What has
    expired is never returned. It is removed when its key is worked on, and when its key group stores
    something: of a small one (up to 128 KiB) at once, of a larger one when most of its older entries have
    expired, or when enough has changed that they are written anew. A key group that gets nothing more is
    called when all that a state has there has expired, at the next full quarter of the time to live.

    Parameters
    ----------
    ttl_ms
        1 or more. An entry, or element, is expired when this much time has passed since it was touched last.
    update
        What counts as a touch.

    Raises
    ------
    ConfigError
        The time is not positive, or no whole number; `update` is no :class:`TtlUpdate`.

    Examples
    --------
    >>> StateTtl(ttl_ms=3_600_000).update
    <TtlUpdate.ON_CREATE_AND_WRITE: 'ON_CREATE_AND_WRITE'>
    """

    ttl_ms: int
    update: TtlUpdate = TtlUpdate.ON_CREATE_AND_WRITE

    def __post_init__(self) -> None:
        with refused_as_config_errors("set ttl_ms to a number of milliseconds, 1 or more"):
            checked_whole("ttl_ms", self.ttl_ms, least=1, most=_MOST_MS)
        what_to_do = "give TtlUpdate.ON_CREATE_AND_WRITE or TtlUpdate.ON_READ_AND_WRITE"
        instance_of("update", self.update, TtlUpdate, what_to_do=what_to_do)

    def is_expired(self, touched_ms: int, now_ms: int) -> bool:
        """Return whether an entry that was touched then is expired now."""
        return touched_ms + self.ttl_ms <= now_ms


def check_ttl(name: str, ttl: StateTtl | None) -> None:
    """Raise ConfigError for what is neither a time to live nor None; `name` is that of the argument."""
    if ttl is not None:
        instance_of(name, ttl, StateTtl, what_to_do="give a StateTtl(3_600_000), or leave it out")
