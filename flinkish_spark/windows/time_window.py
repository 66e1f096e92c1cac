"""Windows as spans of time, and checks of their parameters."""

from __future__ import annotations

import datetime
from typing import NamedTuple

from flinkish_spark.core.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from flinkish_spark.core.fields import Range
from flinkish_spark.core.validation import raise_config_errors
from flinkish_spark.protocol.limits import check_whole

#: The range of a number of elements, or of a length of time.
POSITIVE = Range(1, MAX_WATERMARK_MS)


def check_offset_ms(offset_ms: int, period_ms: int) -> int:
    """Return an offset; raise ConfigError unless its absolute value is less than a period."""
    with raise_config_errors(f"set offset_ms to less than the {period_ms} ms after which windows begin"):
        return check_whole("offset_ms", offset_ms, least=1 - period_ms, most=period_ms - 1)


_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MILLISECOND = datetime.timedelta(milliseconds=1)


class TimeWindow(NamedTuple):
    """A span of time from `start_ms` up to, but without, `end_ms`, in milliseconds since 1970.

    It is a tuple, and equal to the plain tuple that is stored in state.

    Examples
    --------
    >>> TimeWindow(0, 10).max_timestamp_ms, TimeWindow(0, 10) == (0, 10)
    (9, True)
    """

    start_ms: int
    end_ms: int

    @property
    def max_timestamp_ms(self) -> int:
        """The greatest time inside, which is the time of the window's results."""
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
        """Return whether two windows overlap or touch, so that sessions merge."""
        return self.start_ms <= other.end_ms and self.end_ms >= other.start_ms

    def cover(self, other: TimeWindow) -> TimeWindow:
        """Return the smallest window that contains both."""
        return TimeWindow(min(self.start_ms, other.start_ms), max(self.end_ms, other.end_ms))


#: The only window of :class:`~flinkish_spark.windows.GlobalWindows`.
GLOBAL_WINDOW = TimeWindow(MIN_WATERMARK_MS, MAX_WATERMARK_MS)


def window_at(start_ms: int, size_ms: int) -> TimeWindow:
    return TimeWindow(max(start_ms, MIN_WATERMARK_MS), min(start_ms + size_ms, MAX_WATERMARK_MS))


def _datetime(time_ms: int) -> datetime.datetime | None:
    try:
        return _EPOCH + time_ms * _MILLISECOND
    except OverflowError:
        return None


class NoEventTime(ValueError):
    """An element without a timestamp reached event-time windows."""

    def __init__(self) -> None:
        super().__init__(
            "event-time windows need elements with a timestamp; assign timestamps and watermarks before "
            "the windows, or use processing-time windows"
        )
