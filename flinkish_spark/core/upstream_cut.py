"""The upstream checkpoint at which a chained job's checkpoint was drawn, as stored in offsets.

A *cut* is the place of an upstream checkpoint in all partitions: right after its barrier records. Spark logs
an offset before it runs the micro-batch, so after a crash this state still fits the positions, and nothing
else has to be stored.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.protocol.codec import StoredObject
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Place
from flinkish_spark.protocol.input_gate import AlignmentSettings, InputGate
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


@dataclass(frozen=True, slots=True)
class CutState:
    """State of a chained source between two cuts; see the module's head."""

    #: Aligns the upstream checkpoint after `cut`. A partition that was added and is not in a cut
    #: yet is no channel of it.
    gate: InputGate
    #: The upstream job; None until its first barrier was seen.
    job: JobUuid | None = None
    #: The newest barrier that was passed, by partition.
    passed: Mapping[Place, CheckpointId] = field(default_factory=dict)
    #: Partitions from which nothing was read since that barrier, or at all.
    resting: frozenset[Place] = frozenset()
    #: The newest cut; None before the first.
    cut: Cut | None = None
    #: Partitions that have not come to their barrier of an unaligned cut, and the offset of that
    #: barrier, None while it is not visible. A restore replays these first.
    channel_state: Mapping[Place, int | None] = field(default_factory=dict)
    #: Number of micro-batches since the last one with a barrier of this job.
    micro_batches: int = 0

    @classmethod
    def create_at_start(cls, positions: Mapping[Place, int], settings: AlignmentSettings) -> CutState:
        return cls(_gate_at(positions, settings), resting=frozenset(positions))

    @classmethod
    def create_midway(cls, positions: Mapping[Place, int], settings: AlignmentSettings) -> CutState:
        return cls(_gate_at(positions, settings))

    @property
    def is_reached(self) -> bool:
        return self.cut is not None and self.cut.phase is CutPhase.REACHED

    @property
    def stands_at_cut(self) -> bool:
        """True if the gate's partitions have been read exactly up to the newest cut, or not at all."""
        wanted = None if self.cut is None else self.cut.checkpoint
        places = map(place_of, self.gate.channels)
        return all(place in self.resting and self.passed.get(place) == wanted for place in places)

    def to_json(self, positions: Mapping[Place, int]) -> dict[str, Any]:
        """Return the entries for the offset; `positions` are the offset's own."""
        cut = self.cut
        outside = [place for place in positions if channel_of(place) not in self.gate.channels]
        # The offset has the positions of its channels already.
        gate = {name: value for name, value in self.gate.to_json().items() if name != "channels"}
        entries: dict[str, Any] = {
            UPSTREAM_KEY: {
                "job": None if self.job is None else str(self.job),
                "cut": None if cut is None else cut.to_json(),
                "passed": nest({place: int(checkpoint) for place, checkpoint in self.passed.items()}),
                "resting": _to_lists(self.resting),
                "outside": _to_lists(outside),
                "gate": gate,
                "micro_batches": self.micro_batches,
            }
        }
        if self.channel_state:
            ranges = {place: [positions[place], end] for place, end in self.channel_state.items()}
            entries[CHANNEL_STATE_KEY] = nest(ranges)
        return entries

    @classmethod
    def from_json(cls, offset: Mapping[str, Any], settings: AlignmentSettings) -> CutState | None:
        """Read the entries of :meth:`to_json` from an offset; None if it has none."""
        value = offset.get(UPSTREAM_KEY)
        if value is None:
            return None
        cut, outside = value["cut"], _parse_places(value["outside"])
        ranges = flatten(offset.get(CHANNEL_STATE_KEY, {}))
        positions = flatten({topic: of for topic, of in offset.items() if not topic.startswith(OWN_KEYS)})
        channels = {channel_of(place): at for place, at in positions.items() if place not in outside}
        return cls(
            InputGate.from_json({**value["gate"], "channels": channels}, settings),
            None if value["job"] is None else JobUuid(value["job"]),
            {place: CheckpointId(checkpoint) for place, checkpoint in flatten(value["passed"]).items()},
            _parse_places(value["resting"]),
            None if cut is None else Cut.from_json(cut),
            {place: end for place, (_, end) in ranges.items()},
            int(value["micro_batches"]),
        )


def channel_of(place: Place) -> str:
    return f"{place[0]}/{place[1]}"


def place_of(channel: str) -> Place:
    topic, _, partition = channel.rpartition("/")
    return topic, int(partition)


def nest(values: Mapping[Place, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for (topic, partition), value in sorted(values.items()):
        found.setdefault(topic, {})[str(partition)] = value
    return found


def flatten(values: Mapping[str, Mapping[str, Any]]) -> dict[Place, Any]:
    return {(topic, int(p)): value for topic, of_topic in values.items() for p, value in of_topic.items()}


def _to_lists(places: Iterable[Place]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for topic, partition in sorted(places):
        found.setdefault(topic, []).append(partition)
    return found


def _parse_places(value: Mapping[str, list[int]]) -> frozenset[Place]:
    return frozenset((topic, int(partition)) for topic, of_topic in value.items() for partition in of_topic)


def _gate_at(positions: Mapping[Place, int], settings: AlignmentSettings) -> InputGate:
    return InputGate.of({channel_of(place): offset for place, offset in positions.items()}, settings)


@dataclass(frozen=True, slots=True)
class UpstreamCut:
    """The upstream checkpoint at which a checkpoint of a chained job was drawn."""

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
