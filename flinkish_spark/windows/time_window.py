"""A window: a span of time, or everything."""

from __future__ import annotations

import datetime
from typing import NamedTuple

from flinkish_spark.operators.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MILLISECOND = datetime.timedelta(milliseconds=1)


class TimeWindow(NamedTuple):
    """A span of time: from `start_ms`, up to `end_ms` without it. Milliseconds since 1970.

    It is a tuple and equal to the plain one, which is what stands in the state.

    Examples
    --------
    >>> TimeWindow(0, 10).max_timestamp_ms, TimeWindow(0, 10) == (0, 10)
    (9, True)
    """

    start_ms: int
    end_ms: int

    @property
    def max_timestamp_ms(self) -> int:
        """Greatest time inside; the time of the window's results. A window without end has no less."""
        return self.end_ms - 1 if self.end_ms != MAX_WATERMARK_MS else MAX_WATERMARK_MS

    @property
    def start(self) -> datetime.datetime | None:
        """The start as a TIMESTAMP value (in UTC); None if it has none that a datetime can hold."""
        return _datetime(self.start_ms)

    @property
    def end(self) -> datetime.datetime | None:
        """The end as a TIMESTAMP value (in UTC); None if it has none that a datetime can hold."""
        return _datetime(self.end_ms)

    def intersects(self, other: TimeWindow) -> bool:
        """Return whether two windows overlap or touch: sessions of which that is true are one."""
        return self.start_ms <= other.end_ms and self.end_ms >= other.start_ms

    def cover(self, other: TimeWindow) -> TimeWindow:
        """Return the smallest window that contains both."""
        return TimeWindow(min(self.start_ms, other.start_ms), max(self.end_ms, other.end_ms))


#: The only window of :class:`~flinkish_spark.windows.GlobalWindows`.
GLOBAL_WINDOW = TimeWindow(MIN_WATERMARK_MS, MAX_WATERMARK_MS)


def window_at(start_ms: int, size_ms: int) -> TimeWindow:
    """Return a window, cut where 64 bits end."""
    return TimeWindow(max(start_ms, MIN_WATERMARK_MS), min(start_ms + size_ms, MAX_WATERMARK_MS))


def _datetime(time_ms: int) -> datetime.datetime | None:
    try:
        return _EPOCH + time_ms * _MILLISECOND
    except OverflowError:
        return None
