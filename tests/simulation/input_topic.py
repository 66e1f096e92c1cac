"""The job's input: partitions that grow, and the consumer group's offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tests.simulation.scenario import Scenario
from tests.simulation.scheduler import US_PER_MS

TOPIC, GROUP = "input", "simulated"
#: The uid of the source that reads it.
SOURCE = "input"


class Row(NamedTuple):
    """What the job makes of one record: how often its key was there, this one included."""

    partition: int
    offset: int
    key: int
    nth: int

    @property
    def place(self) -> tuple[int, int]:
        """Return where the record lies."""
        return self.partition, self.offset


class InputTopic:
    """Records are numbered; their keys follow from their place."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        #: The group's offset by partition: everything below is done.
        self.committed: dict[int, int] = {}
        #: The first record of each partition that retention has left.
        self.begins: dict[int, int] = {}

    def expire(self) -> None:
        """Delete what the group has read: only a job that goes back could want it again."""
        self.expire_to(self.committed)

    def expire_to(self, ends: Mapping[int, int]) -> None:
        """Delete what lies below `ends`."""
        self.begins.update({p: max(at, self.begins.get(p, 0)) for p, at in ends.items()})

    def why_lost(self, ends: Mapping[int, int]) -> str:
        """Return why a reader that stands at `ends` cannot go on; empty if it can."""
        lost = [f"{TOPIC}-{p}: {at}-{self.begins[p]}" for p, at in ends.items() if at < self.begins.get(p, 0)]
        return ", ".join(lost)

    def end(self, partition: int, now_us: int) -> int:
        """Return how many records a partition holds."""
        there = 1 + now_us // (self._scenario.record_gap_ms * US_PER_MS) - 3 * partition
        return max(0, min(self._scenario.records, there))

    def key(self, partition: int, offset: int) -> int:
        """Return a record's key."""
        return (partition * 7 + offset * 5 + offset // 3) % self._scenario.keys

    @property
    def final(self) -> dict[int, int]:
        """Return every partition's end once all is written."""
        return dict.fromkeys(range(self._scenario.partitions), self._scenario.records)
