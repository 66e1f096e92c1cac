"""Counting alignment: a checkpoint is acknowledged only by barriers that really arrived.

Every (sink, channel) must show its barrier exactly once in the micro-batch that carries the
checkpoint. A channel is one upstream partition: the control source has one, a keyed operator has
one per shuffle partition. A barrier that is missing, doubled or unknown declines the checkpoint
with a reason that names sink and channel.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import SinkAck


class Alignment(enum.Enum):
    """Result of counting one checkpoint's barriers."""

    ALIGNED = "ALIGNED"
    MISSING = "MISSING"
    DUPLICATE = "DUPLICATE"
    UNEXPECTED = "UNEXPECTED"


@dataclass(frozen=True, slots=True)
class AlignmentReport:
    """The result, and the first place that did not fit."""

    alignment: Alignment
    detail: str = ""


def count_barriers(
    checkpoint: CheckpointId, acks: Sequence[SinkAck], expected: Mapping[str, frozenset[int]]
) -> AlignmentReport:
    """Compare the barriers that the sinks saw with those that they must see.

    Parameters
    ----------
    checkpoint
        The id to count; barriers of other ids are not looked at (a late barrier of an aborted
        checkpoint does not disturb the next one).
    acks
        One per sink of the micro-batch.
    expected
        Channels by sink uid.

    Examples
    --------
    >>> count_barriers(CheckpointId(1), [], {"totals": frozenset({0})}).detail
    "sink 'totals' did not acknowledge"
    """
    by_sink = {ack.sink: ack for ack in acks}
    for sink, channels in expected.items():
        if sink not in by_sink:
            return AlignmentReport(Alignment.MISSING, f"sink '{sink}' did not acknowledge")
        seen = Counter(b.channel for b in by_sink[sink].barriers if b.checkpoint == checkpoint)
        missing = sorted(channels - seen.keys())
        if missing:
            return AlignmentReport(
                Alignment.MISSING, f"sink '{sink}' saw no barrier {checkpoint} on channel {missing[0]}"
            )
        strange = sorted(seen.keys() - channels)
        if strange:
            return AlignmentReport(
                Alignment.UNEXPECTED, f"sink '{sink}' saw barrier {checkpoint} on channel {strange[0]}"
            )
        twice = sorted(channel for channel, count in seen.items() if count > 1)
        if twice:
            return AlignmentReport(
                Alignment.DUPLICATE, f"sink '{sink}' saw barrier {checkpoint} twice on channel {twice[0]}"
            )
    return AlignmentReport(Alignment.ALIGNED)
