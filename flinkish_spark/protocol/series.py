"""Lines of a job over time, for people: rates, lag, checkpoints, starts. They decide nothing.

The last hour is kept in slots of 15 seconds and the last week in slots of 15 minutes: at most 912 points,
which are less than 200 kB with the largest numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from flinkish_spark.protocol.codec import StoredObject, StoredRow, whole

#: Width of a slot, and number of slots: an hour, and a week.
HOUR_SLOT_MS, HOUR_SLOTS = 15_000, 240
WEEK_SLOT_MS, WEEK_SLOTS = 900_000, 672

_Count = Annotated[int, whole(0)]


@dataclass(frozen=True, slots=True)
class SeriesPoint(StoredRow):
    """The checkpoints that were confirmed in a slot, and the starts in it; None for what nobody measured."""

    #: Wall clock time at which the slot begins.
    at_ms: _Count
    #: Time over which records were counted.
    span_ms: _Count = 0
    read: _Count | None = None
    written: _Count | None = None
    #: The most records that were there and not read: over all partitions, and in one.
    lag: _Count | None = None
    worst_lag: _Count | None = None
    #: The longest checkpoint, from its request to its receipt.
    took_ms: _Count | None = None
    #: Number of times that the job went on from a checkpoint.
    starts: _Count = 0

    def merge(self, later: SeriesPoint) -> SeriesPoint:
        return SeriesPoint(
            self.at_ms,
            self.span_ms + later.span_ms,
            sum_known((self.read, later.read)),
            sum_known((self.written, later.written)),
            _most((self.lag, later.lag)),
            _most((self.worst_lag, later.worst_lag)),
            _most((self.took_ms, later.took_ms)),
            self.starts + later.starts,
        )

    def to_rate(self, count: int | None) -> float | None:
        """Return records per second; None if unknown."""
        return round(count * 1_000 / self.span_ms, 1) if count is not None and self.span_ms else None


@dataclass(frozen=True, slots=True)
class Series(StoredObject):
    hour: tuple[SeriesPoint, ...] = ()
    week: tuple[SeriesPoint, ...] = ()

    def add(self, point: SeriesPoint) -> Series:
        """Return the lines with one more point; what is older than a line is long falls out of it."""
        return Series(
            _add(self.hour, point, HOUR_SLOT_MS, HOUR_SLOTS), _add(self.week, point, WEEK_SLOT_MS, WEEK_SLOTS)
        )


def _add(
    points: tuple[SeriesPoint, ...], point: SeriesPoint, width_ms: int, at_most: int
) -> tuple[SeriesPoint, ...]:
    slot_ms = point.at_ms - point.at_ms % width_ms
    # Points of the future are from before the clock was set back.
    kept = [one for one in points if slot_ms - width_ms * at_most < one.at_ms <= slot_ms]
    begun = kept.pop() if kept and kept[-1].at_ms == slot_ms else SeriesPoint(slot_ms)
    return (*kept, begun.merge(point))


def sum_known(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
