"""Checks of the timestamps of Kafka's records: valid times, and times that a topic allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flinkish_spark.core.errors import bad_time

Int64s = npt.NDArray[np.int64]


#: The years 1 to 9999, which a TIMESTAMP can hold.
FIRST_MS, LAST_MS = -62_135_596_800_000, 253_402_300_799_999
#: Kafka's value for a record without a timestamp.
NO_TIME_MS = -1
_ANY_MS = (1 << 63) - 1
#: Margin for differences of clocks and for the time that a record waits: a refused record fails its
#: transaction.
_SLACK_MS = 10_000
_TYPE, _BEFORE, _AFTER = (f"message.timestamp.{name}" for name in ("type", "before.max.ms", "after.max.ms"))
#: The limit for both directions, before Kafka 3.6.
_DIFFERENCE = "message.timestamp.difference.max.ms"


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How far from now a topic's record timestamps may be; a refused record fails its transaction."""

    #: Most milliseconds before and after now.
    before_ms: int = _ANY_MS
    after_ms: int = _ANY_MS

    #: Names of the topic's settings.
    SETTINGS = (_TYPE, _BEFORE, _AFTER, _DIFFERENCE)

    @classmethod
    def from_settings(cls, settings: Mapping[str, str]) -> TimeLimits:
        """Return the limits of a topic's settings; none if they are hidden, or brokers set the timestamps."""
        if settings.get(_TYPE) == "LogAppendTime":
            return cls()
        of_both = int(settings.get(_DIFFERENCE, _ANY_MS))
        found = [int(settings.get(name, _ANY_MS)) for name in (_BEFORE, _AFTER)]
        limits = [of_both if one == _ANY_MS else one for one in found]
        return cls(*(one if one == _ANY_MS else one - min(_SLACK_MS, one // 2) for one in limits))

    @classmethod
    def merge(cls, limits: Iterable[TimeLimits]) -> TimeLimits:
        known = (cls(), *limits)
        return cls(min(one.before_ms for one in known), min(one.after_ms for one in known))

    def range_at(self, now_ms: int) -> tuple[int, int]:
        return max(0, now_ms - self.before_ms), min(LAST_MS, now_ms + self.after_ms)

    @staticmethod
    def why_outside(time_ms: int, now_ms: int) -> str:
        if time_ms < 0:
            return "before 1970"
        if time_ms > LAST_MS:
            return "after 9999"
        return f"which {_BEFORE if time_ms < now_ms else _AFTER} of a topic does not allow"


def check_times(topic: str, partition: int, offsets: Int64s, timestamps_ms: Int64s) -> None:
    """Refuse a time that a TIMESTAMP cannot hold: converted to microseconds it would silently change."""
    outside = (timestamps_ms < FIRST_MS) | (timestamps_ms > LAST_MS)
    if outside.any():
        at = int(outside.argmax())
        raise bad_time(topic, partition, int(offsets[at]), int(timestamps_ms[at]))
