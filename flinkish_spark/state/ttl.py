"""How long an entry of a state lives."""

from __future__ import annotations

import enum
from dataclasses import dataclass


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
        Positive. An entry, or element, is expired when this much time has passed since it was touched last.
    update
        What counts as a touch.

    Raises
    ------
    ValueError
        The time is not positive.

    Examples
    --------
    >>> StateTtl(ttl_ms=3_600_000).update
    <TtlUpdate.ON_CREATE_AND_WRITE: 'ON_CREATE_AND_WRITE'>
    """

    ttl_ms: int
    update: TtlUpdate = TtlUpdate.ON_CREATE_AND_WRITE

    def __post_init__(self) -> None:
        if isinstance(self.ttl_ms, bool) or not isinstance(self.ttl_ms, int) or self.ttl_ms <= 0:
            raise ValueError(f"ttl_ms must be a positive number of milliseconds, not {self.ttl_ms!r}")

    def is_expired(self, touched_ms: int, now_ms: int) -> bool:
        """Return whether an entry that was touched then is expired now."""
        return touched_ms + self.ttl_ms <= now_ms
