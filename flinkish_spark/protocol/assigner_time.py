"""Where one assigner stands between two micro-batches: its channels, who is silent, whether it has ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from flinkish_spark.protocol.codec import ADDED, Stored, whole
from flinkish_spark.protocol.time_facts import AssignerInput, AssignerRules, Untimed, once_each
from flinkish_spark.protocol.watermark_valve import (
    MAX_WATERMARK_MS,
    ChannelStatus,
    Valve,
    ValveChannel,
    WatermarkMs,
)


@dataclass(frozen=True, slots=True)
class AssignerTime:
    """Where one assigner stands.

    Parameters
    ----------
    valve
        Over its channels.
    known_since_ms
        Processing time of the first micro-batch that knew it; where all of its channels are gone, of the last
        one in which they had records.
    silent_since_ms
        By channel, the processing time of the last micro-batch in which it had records, was held back,
        or was new.
    has_ended
        Whether its input is over.
    """

    known_since_ms: int
    valve: Valve[int] = field(default_factory=Valve)
    silent_since_ms: Mapping[int, int] = field(default_factory=dict)
    has_ended: bool = False

    def status(self, rules: AssignerRules, now_ms: int) -> ChannelStatus:
        """Return whether it takes part; without channels, it is idle when it has been so for long enough."""
        if isinstance(rules.generation, Untimed):
            return ChannelStatus.IDLE
        if self.valve.channels:
            return self.valve.status
        return ChannelStatus.IDLE if _is_silent(rules, self.known_since_ms, now_ms) else ChannelStatus.ACTIVE

    def after(
        self,
        rules: AssignerRules,
        now_ms: int,
        times_ms: Mapping[int, int | None],
        known: AssignerInput | None,
        held_back: Collection[int],
    ) -> AssignerTime:
        """Return where it stands behind a micro-batch."""
        present = None if known is None else known.channels
        has_ended = self.has_ended if known is None else known.has_ended
        new = (times_ms.keys() | (present or frozenset())) - self.valve.channels.keys()
        generation = rules.generation
        watermarks = {
            channel: generation.watermark_ms(time_ms)
            for channel, time_ms in times_ms.items()
            if time_ms is not None
        }
        valve = self.valve.with_channels(sorted(new)).resumed(times_ms).advanced(watermarks)
        stirred = times_ms.keys() | new | set(held_back)
        silent_since_ms = {
            channel: now_ms if channel in stirred else self.silent_since_ms[channel]
            for channel in valve.channels
        }
        known_since_ms = self.known_since_ms
        if present is not None:
            # The records of a channel that ends in this micro-batch were part of it.
            valve = valve.without(valve.channels.keys() - present)
            if not valve.channels:
                # The next split may come at once: it is not idle before it has been silent for long enough.
                known_since_ms = max(silent_since_ms.values(), default=known_since_ms)
            silent_since_ms = {channel: silent_since_ms[channel] for channel in valve.channels}
        quiet = [c for c, since_ms in silent_since_ms.items() if _is_silent(rules, since_ms, now_ms)]
        return replace(
            self,
            known_since_ms=known_since_ms,
            valve=valve.silenced(quiet),
            silent_since_ms=silent_since_ms,
            has_ended=has_ended,
        )

    def to_json(self) -> Any:
        """Return the stored form."""
        channels = tuple(
            (number, one.watermark_ms, one.status, one.counts, self.silent_since_ms[number])
            for number, one in sorted(self.valve.channels.items())
        )
        return _Members(self.known_since_ms, self.valve.watermark_ms, self.has_ended, channels).to_json()

    @classmethod
    def from_json(cls, value: Any) -> AssignerTime:
        """Read the stored form; raise ValueError if it is none."""
        found = _Members.from_json(value)
        once_each("channel", (number for number, *_ in found.channels))
        valve = Valve({one[0]: ValveChannel(*one[1:4]) for one in found.channels}, found.watermark_ms)
        silent_since_ms = {number: since_ms for number, *_, since_ms in found.channels}
        return cls(found.known_since_ms, valve, silent_since_ms, found.has_ended)


_TimeMs = Annotated[int, whole(0, MAX_WATERMARK_MS)]
_Channel = tuple[Annotated[int, whole(0)], WatermarkMs, ChannelStatus, bool, _TimeMs]


@dataclass(frozen=True, slots=True)
class _Members(Stored):
    """An :class:`AssignerTime` as it is stored: what is known of a channel stands together."""

    known_since_ms: _TimeMs
    watermark_ms: WatermarkMs
    has_ended: bool
    channels: tuple[_Channel, ...] = field(default=(), metadata=ADDED)


def _is_silent(rules: AssignerRules, since_ms: int, now_ms: int) -> bool:
    return rules.idleness_ms is not None and now_ms - since_ms >= rules.idleness_ms
