"""State of a chained source between two cuts, as its offsets hold it; see `core/upstream_cut.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.connectors.kafka.offset_ranges import to_json
from flinkish_spark.core.upstream_cut import CHANNEL_STATE_KEY, UPSTREAM_KEY, Cut, CutPhase, flatten
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Place
from flinkish_spark.protocol.input_gate import AlignmentSettings, InputGate
from flinkish_spark.protocol.plan_layout import OWN_KEYS


@dataclass(frozen=True, slots=True)
class CutState:
    """The gate and what the source has passed, after each micro-batch."""

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
                "passed": to_json({place: int(checkpoint) for place, checkpoint in self.passed.items()}),
                "resting": _to_lists(self.resting),
                "outside": _to_lists(outside),
                "gate": gate,
                "micro_batches": self.micro_batches,
            }
        }
        if self.channel_state:
            ranges = {place: [positions[place], end] for place, end in self.channel_state.items()}
            entries[CHANNEL_STATE_KEY] = to_json(ranges)
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


def _to_lists(places: Iterable[Place]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for topic, partition in sorted(places):
        found.setdefault(topic, []).append(partition)
    return found


def _parse_places(value: Mapping[str, list[int]]) -> frozenset[Place]:
    return frozenset((topic, int(partition)) for topic, of_topic in value.items() for partition in of_topic)


def _gate_at(positions: Mapping[Place, int], settings: AlignmentSettings) -> InputGate:
    return InputGate.of({channel_of(place): offset for place, offset in positions.items()}, settings)
