"""The upstream checkpoint at which a chained job's checkpoint was drawn, as stored in offsets.

A *cut* is the place of an upstream checkpoint in all partitions: right after its barrier records. Spark logs
an offset before it runs the micro-batch, so after a crash this state still fits the positions, and nothing
else has to be stored.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.protocol.codec import StoredObject
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Place
from flinkish_spark.protocol.plan_layout import OWN_KEYS

#: Keys in the offset, beside the topics.
UPSTREAM_KEY = "flinkish:upstream"
CHANNEL_STATE_KEY = "flinkish:channel-state"


class CutPhase(enum.Enum):
    """State of the newest cut that the source reached."""

    #: It waits for a checkpoint of this job.
    REACHED = "REACHED"
    #: A checkpoint of this job was drawn there.
    TAKEN = "TAKEN"


@dataclass(frozen=True, slots=True)
class Cut(StoredObject):
    """The newest upstream checkpoint whose cut the source reached."""

    checkpoint: CheckpointId
    phase: CutPhase
    #: From the writing of its barrier records to the first one that was passed.
    start_delay_ms: int = 0
    #: From there to the cut.
    alignment_ms: int = 0


def flatten(values: Mapping[str, Mapping[str, Any]]) -> dict[Place, Any]:
    return {(topic, int(p)): value for topic, of_topic in values.items() for p, value in of_topic.items()}


@dataclass(frozen=True, slots=True)
class UpstreamCut:
    job: JobUuid
    checkpoint: CheckpointId
    #: For an unaligned cut: the offsets, start and end, that the upstream checkpoint holds and this
    #: job's checkpoint does not. A restored job reads them before anything else. The end is None
    #: where the barrier was not visible: then it is that barrier.
    channel_state: Mapping[Place, tuple[int, int | None]] = field(default_factory=dict)
    #: From the writing of the barrier records to the first one that was passed, and from there to
    #: the cut. None for an unaligned cut that was drawn before the last barrier was visible.
    start_delay_ms: int | None = None
    alignment_ms: int | None = None


def upstream_cut(offsets_text: str) -> dict[str, UpstreamCut]:
    found: dict[str, UpstreamCut] = {}
    if UPSTREAM_KEY not in offsets_text:  # asked for every checkpoint, and most jobs are not chained
        return found
    for line in offsets_text.strip().split("\n")[2:]:
        offset = None if line == "-" else json.loads(line)
        if not isinstance(offset, dict) or UPSTREAM_KEY not in offset:
            continue
        value = offset[UPSTREAM_KEY]
        cut = None if value["cut"] is None else Cut.from_json(value["cut"])
        if cut is None or cut.phase is not CutPhase.TAKEN:
            continue
        ranges = {
            place: (int(start), None if end is None else int(end))
            for place, (start, end) in flatten(offset.get(CHANNEL_STATE_KEY, {})).items()
        }
        is_measured = all(end is not None for _, end in ranges.values())
        times_ms = (cut.start_delay_ms, cut.alignment_ms) if is_measured else (None, None)
        taken = UpstreamCut(JobUuid(value["job"]), cut.checkpoint, ranges, *times_ms)
        found.update((topic, taken) for topic in offset if not topic.startswith(OWN_KEYS))
    return found


def slowest_cut(offsets_text: str) -> UpstreamCut | None:
    """Return the upstream cut that took longest, of those with measured times; None if there is none."""
    times_ms = [
        (cut.start_delay_ms + cut.alignment_ms, topic, cut)
        for topic, cut in upstream_cut(offsets_text).items()
        if cut.start_delay_ms is not None and cut.alignment_ms is not None
    ]
    return max(times_ms)[-1] if times_ms else None
