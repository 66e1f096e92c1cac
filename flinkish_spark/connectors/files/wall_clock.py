"""Wall clocks of zones: when one is past a time for good. One may show an hour twice, or leave out a day."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

_EPOCH = datetime(1970, 1, 1)
#: No wall clock is further from UTC than this, with what a change adds.
_FARTHEST = timedelta(hours=36)
#: Zones change their offset more rarely than this.
_STEP = timedelta(hours=6)
_FINEST = timedelta(milliseconds=1)


def to_ms(local: datetime, zone: str) -> int:
    """Return the milliseconds since 1970 of a wall clock in a zone; one with a zone of its own keeps it."""
    # Of a time that is shown twice, the first one.
    known = local if local.tzinfo is not None else local.replace(tzinfo=ZoneInfo(zone))
    return (known - _EPOCH.replace(tzinfo=UTC)) // timedelta(milliseconds=1)


def last_shown_ms(begin: datetime, end: datetime, zone: str) -> int | None:
    """Return up to when a zone's wall clock shows a time from `begin` on and before `end`, the last time."""
    latest = None
    for first, behind, offset in _stretches(end - _FARTHEST, end + _FARTHEST, ZoneInfo(zone)):
        shown_from, shown_to = max(first, begin - offset), min(behind, end - offset)
        if shown_from < shown_to:
            latest = shown_to
    return None if latest is None else (latest - _EPOCH) // timedelta(milliseconds=1)


def _stretches(
    first: datetime, last: datetime, zone: ZoneInfo
) -> Iterator[tuple[datetime, datetime, timedelta]]:
    """Yield times in UTC between which a zone has one offset, and that offset, in order."""
    since, offset = first, _offset(first, zone)
    at = first
    while at < last:
        following = at + _STEP
        if _offset(following, zone) != offset:
            changed = _change(at, following, zone)
            yield since, changed, offset
            since, offset = changed, _offset(changed, zone)
        at = following
    yield since, at, offset


def _change(before: datetime, behind: datetime, zone: ZoneInfo) -> datetime:
    """Return the first time with another offset than `before`."""
    offset = _offset(before, zone)
    while behind - before > _FINEST:
        middle = before + (behind - before) / 2
        before, behind = (middle, behind) if _offset(middle, zone) == offset else (before, middle)
    # Offsets change at whole seconds.
    return behind.replace(microsecond=0)


def _offset(utc: datetime, zone: ZoneInfo) -> timedelta:
    found = utc.replace(tzinfo=UTC).astimezone(zone).utcoffset()
    assert found is not None
    return found
