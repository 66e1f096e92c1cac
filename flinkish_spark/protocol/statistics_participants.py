"""What each participant did for one checkpoint, and through which channels.

The stored form leaves out what was not measured, and what is left out is None when it is read:
an older form has fewer members. `to_json` and `from_json` are exact inverses.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar

from flinkish_spark.protocol.checkpoint import ParticipantKind
from flinkish_spark.protocol.codec import Presence, Stored, read
from flinkish_spark.protocol.ids import checked_name
from flinkish_spark.protocol.json_values import measured, text_of
from flinkish_spark.protocol.limits import checked_whole

_OF_A_CHANNEL = ("rows", "bytes", "alignment_ms")
_OF_A_PARTICIPANT = ("ack_ms", "rows", "bytes", "sync_ms", "commit_ms", "barriers", "late_dropped")
_numbers_of = attrgetter(*_OF_A_PARTICIPANT)


@functools.lru_cache(maxsize=10_000)
def _checked_uid(uid: str) -> None:
    """Raise ValueError if `uid` is not usable; asked for the same thousand of them per checkpoint."""
    checked_name(uid, "uid")


@dataclass(frozen=True, slots=True)
class ChannelStatistics(Stored):
    """What one channel brought to a sink in one checkpoint.

    Parameters
    ----------
    channel
        Its number, as text.
    barriers
        Barriers of this checkpoint that came through it; 1 if all is well.
    rows
        Records that came through it in the micro-batch of the barrier; None where the records of
        several channels cannot be told apart.
    bytes
        None: tasks do not count them by channel.
    alignment_ms
        From its barrier to the last one of the checkpoint; None where all came with one micro-batch.
    """

    DEFAULTS: ClassVar = Presence.LEFT_OUT

    channel: str
    barriers: int
    rows: int | None = None
    bytes: int | None = None
    alignment_ms: int | None = None

    def __post_init__(self) -> None:
        text_of(self.channel, "channel")
        checked_whole("barriers", self.barriers, least=0)
        for name in _OF_A_CHANNEL:
            measured(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class ParticipantStatistics(Stored):
    """What one operator, sink or master hook did for one checkpoint.

    Parameters
    ----------
    uid, kind
        Who it is.
    is_acknowledged
        Whether it has acknowledged. Who has not is what a failed checkpoint waited for.
    ack_ms
        From the request to its acknowledgement.
    rows, bytes
        What it staged for the checkpoint, over all its micro-batches. None for operators and hooks,
        and where the checkpoint failed; bytes are None where the system does not tell.
    sync_ms
        How long it took to stage the checkpoint's last micro-batch.
    commit_ms
        How long its commit took; None where it had nothing to commit.
    barriers
        How many barriers of the checkpoint it saw, over all channels; None for operators and hooks.
    channels
        One entry per channel that showed a barrier.
    late_dropped
        How many late records an operator has dropped for the checkpoint, over all its micro-batches; None
        where there were none.
    """

    DEFAULTS: ClassVar = Presence.LEFT_OUT

    uid: str
    kind: ParticipantKind
    is_acknowledged: bool = True
    ack_ms: int | None = None
    rows: int | None = None
    bytes: int | None = None
    sync_ms: int | None = None
    commit_ms: int | None = None
    barriers: int | None = None
    channels: tuple[ChannelStatistics, ...] = ()
    late_dropped: int | None = None

    def __post_init__(self) -> None:
        _checked_uid(self.uid)
        if not isinstance(self.is_acknowledged, bool):
            raise ValueError(f"is_acknowledged must be true or false, got {self.is_acknowledged!r}")
        for number in _numbers_of(self):
            # Looked at here and not by a function: a thousand participants are made per checkpoint.
            if number is not None and (type(number) is not int or number < 0):
                raise ValueError(f"the numbers of '{self.uid}' must be whole and >= 0, got {number!r}")

    @property
    def detail_count(self) -> int:
        """How many entries of a list it takes: its own and one per channel."""
        return 1 + len(self.channels)

    @classmethod
    def _of_older(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return an object as it is written today; an older form knew sinks only."""
        if "kind" in value:
            return value
        channels = read(tuple[ChannelStatistics, ...], value.get("channels", []))
        barriers = sum(channel.barriers for channel in channels)
        return {**value, "kind": ParticipantKind.SINK.value, "barriers": barriers}


def listed(participants: Iterable[ParticipantStatistics], at_most: int) -> tuple[ParticipantStatistics, ...]:
    """Return the participants that may be listed, with the channels for which there is room.

    Participants come before channels, and those that have not acknowledged before the others. The
    channels of one participant are listed all or not at all.

    Parameters
    ----------
    at_most
        How many participants and channels.
    """
    kept = sorted(participants, key=lambda one: one.is_acknowledged)[:at_most]
    room = at_most - len(kept)
    result = []
    for one in kept:
        fits = len(one.channels) <= room
        room -= len(one.channels) if fits else 0
        result.append(one if fits else replace(one, channels=()))
    return tuple(result)
