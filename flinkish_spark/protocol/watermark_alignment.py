"""Watermark alignment over sources: the channels that are held back until others have caught up.

:func:`~flinkish_spark.protocol.watermarks.find_channels_to_hold` returns the channels ahead of their group.
Several chains of a plan may read a source, each with an assigner of its own, and all of its scans get the
same advice: a channel is held back only if it is ahead for every assigner. So the slowest channel of a group
is never held back, whichever chains read it.

This is advice only: a micro-batch has read what its offsets say. A source that gets the advice late reads
further than it should, and a channel that is held back brings the same records later.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, cast

from flinkish_spark.protocol.codec import read, whole, write
from flinkish_spark.protocol.ids import Uid
from flinkish_spark.protocol.time_plan import TimePlan
from flinkish_spark.protocol.watermarks import EventTime, find_channels_to_hold


class Channels(enum.Enum):
    """Placeholder for channels without numbers."""

    #: A transform before the strategy chose its own columns, so all channels are one.
    ALL = "ALL"


_CHANNELS = frozenset[Annotated[int, whole(0)]]


@dataclass(frozen=True, slots=True)
class HeldChannels:
    """Channels of one source that bring no records in the next micro-batch."""

    #: Numbers as in the column ``_fs_channel``, or all channels.
    channels: frozenset[int] | Channels = frozenset()

    def holds(self, channel: int) -> bool:
        return self.channels is Channels.ALL or channel in self.channels

    def to_json(self) -> Any:
        return Channels.ALL.value if isinstance(self.channels, Channels) else sorted(self.channels)

    @classmethod
    def from_json(cls, value: Any) -> HeldChannels:
        return cls(Channels.ALL if value == Channels.ALL.value else read(_CHANNELS, value))


#: For a source that is not held back.
NONE_HELD = HeldChannels()
#: By uid of the source; a source that is not named is not held back.
HeldSources = Mapping[str, HeldChannels]
_HELD = Mapping[Uid, HeldChannels]


def find_held_sources(plan: TimePlan, state: EventTime) -> dict[str, HeldChannels]:
    aligned: dict[str, list[str]] = {}
    for uid, assigner in plan.assigners.items():
        if assigner.rules.alignment is not None:
            aligned.setdefault(assigner.source, []).append(uid)
    if not aligned:
        return {}
    ahead = find_channels_to_hold(plan.rules, state)
    found = {}
    for source, uids in aligned.items():
        held: frozenset[int] | Channels = Channels.ALL
        for uid in uids:
            channels = frozenset(channel for assigner, channel in ahead if assigner == uid)
            if channels and not plan.assigners[uid].has_channels:
                continue
            held = channels if isinstance(held, Channels) else held & channels
        if held:
            found[source] = HeldChannels(held)
    return found


def encode_held(held: HeldSources) -> dict[str, Any]:
    return cast("dict[str, Any]", write(_HELD, dict(sorted(held.items()))))


def decode_held(value: Any) -> dict[str, HeldChannels]:
    return cast("dict[str, HeldChannels]", read(_HELD, value))
