"""One watermark out of many: the smallest one of the channels that count, never back.

The rules are those of Flink's valve. A channel is *active* or *idle*. Of the active ones those *count*
that have once caught up with what the valve has put out: a channel that was idle, and comes back with
an older watermark than that, holds nobody back until it is there.

A transition takes all that one micro-batch says at once, so its result depends on no order.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Generic, TypeVar

from flinkish_spark.protocol.codec import whole

#: Before any watermark was seen: nothing is late.
MIN_WATERMARK_MS = -(1 << 63)
#: No record comes any more: the end of a bounded input. Fires every event-time timer.
MAX_WATERMARK_MS = (1 << 63) - 1
#: As they are stored.
WatermarkMs = Annotated[int, whole(MIN_WATERMARK_MS, MAX_WATERMARK_MS)]

_K = TypeVar("_K")


class ChannelStatus(enum.Enum):
    """Whether a channel takes part."""

    ACTIVE = "ACTIVE"
    #: Nothing came for some time; the others go on without it.
    IDLE = "IDLE"


@dataclass(frozen=True, slots=True)
class ValveChannel:
    """What the valve knows of a channel.

    Parameters
    ----------
    watermark_ms
        The greatest that came while it was active.
    status
        An idle channel never counts.
    counts
        Whether it has caught up.
    """

    watermark_ms: int = MIN_WATERMARK_MS
    status: ChannelStatus = ChannelStatus.ACTIVE
    counts: bool = True

    def __post_init__(self) -> None:
        if self.counts and self.status is ChannelStatus.IDLE:
            raise ValueError("an idle channel cannot count")


# Without slots: Python 3.11 cannot make a `Valve[str]()` that is frozen and has them.
@dataclass(frozen=True)
class Valve(Generic[_K]):
    """Channels, and the watermark that came of them. A value: every method returns another valve.

    Parameters
    ----------
    channels
        By name; each begins as active, and counts.
    watermark_ms
        What was put out last.

    Examples
    --------
    >>> valve = Valve[str]().with_channels(["a", "b"]).advanced({"a": 20, "b": 10})
    >>> valve.watermark_ms, valve.silenced(["b"]).watermark_ms
    (10, 20)
    """

    channels: Mapping[_K, ValveChannel] = field(default_factory=dict)
    watermark_ms: int = MIN_WATERMARK_MS

    @property
    def status(self) -> ChannelStatus:
        """IDLE if every channel is; a valve without channels is active."""
        if self.channels and not self._has_active(self.channels):
            return ChannelStatus.IDLE
        return ChannelStatus.ACTIVE

    def with_channels(self, added: Iterable[_K]) -> Valve[_K]:
        """Add channels; those that are there are left alone.

        A new one counts at once, so it holds the watermark where it is until something comes through it:
        its first records may be as old as any.
        """
        new = {key: ValveChannel() for key in added if key not in self.channels}
        return replace(self, channels={**self.channels, **new})

    def resumed(self, keys: Iterable[_K]) -> Valve[_K]:
        """Make idle channels active again."""
        back = {
            key: self._active_at(self.channels[key].watermark_ms)
            for key in keys
            if self.channels[key].status is ChannelStatus.IDLE
        }
        return self._settled({**self.channels, **back})

    def advanced(self, watermarks_ms: Mapping[_K, int]) -> Valve[_K]:
        """Take watermarks. Those of idle channels, and those that go back, are left out."""
        moved = {}
        for key, watermark_ms in watermarks_ms.items():
            channel = self.channels[key]
            if channel.status is ChannelStatus.ACTIVE and watermark_ms > channel.watermark_ms:
                came = self._active_at(watermark_ms)
                moved[key] = replace(came, counts=came.counts or channel.counts)
        return self._settled({**self.channels, **moved})

    def silenced(self, keys: Iterable[_K]) -> Valve[_K]:
        """Make active channels idle; with the last one the greatest watermark of all comes out."""
        gone = {key for key in keys if self.channels[key].status is ChannelStatus.ACTIVE}
        idle = {
            key: ValveChannel(self.channels[key].watermark_ms, ChannelStatus.IDLE, counts=False)
            for key in gone
        }
        return self._left_by(gone, {**self.channels, **idle})

    def without(self, keys: Iterable[_K]) -> Valve[_K]:
        """Take channels away, for good. The others go on as if they had become idle."""
        gone = set(keys)
        return self._left_by(gone, {key: one for key, one in self.channels.items() if key not in gone})

    def _active_at(self, watermark_ms: int) -> ValveChannel:
        return ValveChannel(watermark_ms, counts=watermark_ms >= self.watermark_ms)

    def _left_by(self, gone: Iterable[_K], channels: dict[_K, ValveChannel]) -> Valve[_K]:
        counted = any(self.channels[key].counts for key in gone if key in self.channels)
        if self._has_active(channels) or not counted:
            return self._settled(channels)
        # Nobody is left whom those that wait could overtake. Where the last one to leave had itself
        # not caught up, nobody had waited for it, and there is nothing to let out.
        greatest_ms = max((one.watermark_ms for one in channels.values()), default=self.watermark_ms)
        return Valve(channels, max(self.watermark_ms, greatest_ms))

    def _settled(self, channels: dict[_K, ValveChannel]) -> Valve[_K]:
        counting = [one.watermark_ms for one in channels.values() if one.counts]
        return Valve(channels, max(self.watermark_ms, min(counting, default=self.watermark_ms)))

    @staticmethod
    def _has_active(channels: Mapping[_K, ValveChannel]) -> bool:
        return any(one.status is ChannelStatus.ACTIVE for one in channels.values())
