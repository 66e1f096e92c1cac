"""Counting alignment: a checkpoint is acknowledged only by barriers that really arrived.

Every sink must see the barrier exactly once on every channel, in the micro-batch that carries the
checkpoint. A channel is one upstream partition: the control source has one, a keyed operator has one per
shuffle partition. A barrier that is missing, doubled or unknown declines the checkpoint, with a reason that
names sink and channel.

A Kafka source that injects barriers itself has one channel per Kafka partition, and partitions may be added
while a job runs. Its channels are *announced*: each barrier says how many channels there are.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import SinkAck

_INDEX_BITS = 32


class AnnouncedChannels(enum.Enum):
    """Placeholder for channels whose number the barriers announce."""

    ANNOUNCED = "ANNOUNCED"


#: The channels whose barriers an operator or a sink must see.
ExpectedChannels = frozenset[int] | AnnouncedChannels


def encode_announced_channel(index: int, total: int) -> int:
    if not 0 <= index < total < 1 << _INDEX_BITS - 1:
        raise ValueError(f"there is no channel {index} of {total}")
    return total << _INDEX_BITS | index


def resolve_expected(seen: Collection[int], expected: ExpectedChannels) -> frozenset[int]:
    """Return the channels that must show a barrier; of several announced totals, the channels of each."""
    if not isinstance(expected, AnnouncedChannels):
        return expected
    totals = {channel >> _INDEX_BITS for channel in seen}
    return frozenset(encode_announced_channel(index, total) for total in totals for index in range(total))


def find_misalignment(
    checkpoint: CheckpointId, acks: Sequence[SinkAck], expected: Mapping[str, ExpectedChannels]
) -> str:
    """Return how the barriers that sinks saw differ from the expected ones; empty if they do not."""
    by_sink = {ack.sink: ack for ack in acks}
    for sink, wanted in expected.items():
        if sink not in by_sink:
            return f"sink '{sink}' did not acknowledge"
        seen = Counter(b.channel for b in by_sink[sink].barriers if b.checkpoint == checkpoint)
        channels = resolve_expected(seen, wanted)
        if not channels:
            return f"sink '{sink}' saw no barrier {checkpoint} at all"
        for found, what in (
            (channels - seen.keys(), f"no barrier {checkpoint} on channel"),
            (seen.keys() - channels, f"barrier {checkpoint} on channel"),
            ([one for one, count in seen.items() if count > 1], f"barrier {checkpoint} twice on channel"),
        ):
            if found:
                return f"sink '{sink}' saw {what} {min(found)}"
    return ""


def find_reached_sinks(
    checkpoint: CheckpointId, acks: Sequence[SinkAck], expected: Mapping[str, ExpectedChannels]
) -> set[str]:
    """Return the sinks that saw the barrier on every channel, at least once, in this micro-batch."""
    by_sink = {ack.sink: ack for ack in acks}
    reached = set()
    for sink, wanted in expected.items():
        barriers = by_sink[sink].barriers if sink in by_sink else ()
        seen = {barrier.channel for barrier in barriers if barrier.checkpoint == checkpoint}
        if seen and resolve_expected(seen, wanted) <= seen:
            reached.add(sink)
    return reached
