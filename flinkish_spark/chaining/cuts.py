"""Reading from Spark's offset log at which upstream checkpoint a job's checkpoint was drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.chaining.cut_state import CHANNEL_STATE_KEY, UPSTREAM_KEY, Cut, CutPhase, flat
from flinkish_spark.kafka.answers import Place
from flinkish_spark.protocol.ids import CheckpointId, JobUuid
from flinkish_spark.protocol.scans import OWN_KEYS


@dataclass(frozen=True, slots=True)
class UpstreamCut:
    """The upstream checkpoint at which a checkpoint of a chained job was drawn.

    Parameters
    ----------
    job, checkpoint
        Upstream.
    channel_state
        For an unaligned cut: the offsets, start and end, that the upstream checkpoint holds and this
        job's checkpoint does not. A restored job reads them before anything else. The end is None
        where the barrier was not visible: then it is that barrier.
    start_delay_ms, alignment_ms
        From the writing of the barrier records to the first one that was passed, and from there to
        the cut. None for an unaligned cut that was drawn before the last barrier was visible.
    """

    job: JobUuid
    checkpoint: CheckpointId
    channel_state: Mapping[Place, tuple[int, int | None]] = field(default_factory=dict)
    start_delay_ms: int | None = None
    alignment_ms: int | None = None


def upstream_cut(offsets_text: str) -> dict[str, UpstreamCut]:
    r"""Return the upstream cut by topic.

    Parameters
    ----------
    offsets_text
        An entry of Spark's offset log, as decisions hold it. Only one of a micro-batch with a barrier
        of this job, as all of them, says where a checkpoint was drawn.

    Returns
    -------
    dict
        Empty for a job without a chained source, and for a checkpoint drawn before the first cut.

    Examples
    --------
    >>> upstream_cut('v1\n{"batchTimestampMs":0}\n{"orders":{"0":5},"flinkish:checkpoint":1}')
    {}
    """
    found: dict[str, UpstreamCut] = {}
    if UPSTREAM_KEY not in offsets_text:  # asked for every checkpoint, and most jobs are not chained
        return found
    for line in offsets_text.strip().split("\n")[2:]:
        offset = None if line == "-" else json.loads(line)
        if isinstance(offset, dict) and UPSTREAM_KEY in offset:
            found.update(_cut_in(offset))
    return found


def slowest_cut(offsets_text: str) -> UpstreamCut | None:
    r"""Return the measured upstream cut that took longest, from its barrier records on; None for none.

    Where a checkpoint is one cut with several upstreams it had to wait for this one.

    Examples
    --------
    >>> slowest_cut('v1\n{"batchTimestampMs":0}\n{"orders":{"0":5},"flinkish:checkpoint":1}') is None
    True
    """
    times_ms = [
        (cut.start_delay_ms + cut.alignment_ms, topic, cut)
        for topic, cut in upstream_cut(offsets_text).items()
        if cut.start_delay_ms is not None and cut.alignment_ms is not None
    ]
    return max(times_ms)[-1] if times_ms else None


def _cut_in(offset: Mapping[str, Any]) -> dict[str, UpstreamCut]:
    value = offset[UPSTREAM_KEY]
    cut = None if value["cut"] is None else Cut.from_json(value["cut"])
    if cut is None or cut.phase is not CutPhase.TAKEN:
        return {}
    stored = flat(offset.get(CHANNEL_STATE_KEY, {}))
    ranges = {
        place: (int(start), None if end is None else int(end)) for place, (start, end) in stored.items()
    }
    is_measured = all(end is not None for _, end in ranges.values())
    times_ms = (cut.start_delay_ms, cut.alignment_ms) if is_measured else (None, None)
    found = UpstreamCut(JobUuid(value["job"]), cut.checkpoint, ranges, *times_ms)
    topics = [topic for topic in offset if not topic.startswith(OWN_KEYS)]
    return dict.fromkeys(topics, found)
