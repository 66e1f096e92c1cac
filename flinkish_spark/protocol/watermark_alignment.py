"""Watermark alignment over sources: what of which source is held back until others have caught up.

Which assigner's channel is ahead of its group says :func:`~flinkish_spark.protocol.watermarks.to_hold_back`.
A source may be read by several chains of a plan, each with an assigner of its own, and all of its scans hear
the same: it is held back only where every one of them is ahead. So the slowest of a group is never held
back, whoever else reads it.

Advice, and nothing else: what a micro-batch has read is what its offsets say. A source that hears it late
reads further than it should, and a channel that is held back brings the same records later.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, cast

from flinkish_spark.protocol.codec import read, whole, write
from flinkish_spark.protocol.ids import Uid
from flinkish_spark.protocol.time_plan import TimePlan
from flinkish_spark.protocol.watermarks import EventTime, to_hold_back


class Channels(enum.Enum):
    """Stands for channels that need not be named."""

    #: A transform in front of the strategy chose its own columns, so channels are not told apart.
    ALL = "ALL"


_CHANNELS = frozenset[Annotated[int, whole(0)]]


@dataclass(frozen=True, slots=True)
class HeldChannels:
    """What of one source brings no records in the next micro-batch."""

    #: Numbers as its records have them in ``_fs_channel``, or all of them.
    channels: frozenset[int] | Channels = frozenset()

    def holds(self, channel: int) -> bool:
        return self.channels is Channels.ALL or channel in self.channels

    def to_json(self) -> Any:
        return Channels.ALL.value if isinstance(self.channels, Channels) else sorted(self.channels)

    @classmethod
    def from_json(cls, value: Any) -> HeldChannels:
        return cls(Channels.ALL if value == Channels.ALL.value else read(_CHANNELS, value))


#: A source that nobody holds back.
NONE_HELD = HeldChannels()
#: By uid of the source; who is not named reads on.
HeldSources = Mapping[str, HeldChannels]
_HELD = Mapping[Uid, HeldChannels]


def held_sources(plan: TimePlan, state: EventTime) -> dict[str, HeldChannels]:
    aligned: dict[str, list[str]] = {}
    for uid, assigner in plan.assigners.items():
        if assigner.rules.alignment is not None:
            aligned.setdefault(assigner.source, []).append(uid)
    if not aligned:
        return {}
    ahead = to_hold_back(plan.rules, state)
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


def held_to_json(held: HeldSources) -> dict[str, Any]:
    return cast("dict[str, Any]", write(_HELD, dict(sorted(held.items()))))


def held_from_json(value: Any) -> dict[str, HeldChannels]:
    return cast("dict[str, HeldChannels]", read(_HELD, value))
