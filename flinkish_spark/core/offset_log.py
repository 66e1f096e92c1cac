"""Offsets in the entries of Spark's own offset log.

Spark's checkpoint of the query is the folder ``spark/<owner epoch>``: taking a job over renames it, and
a JVM of the previous owner that still writes does so to a path that no longer exists. Within one owner
the path stays, so restarts inside a process need no rename.

Entries are written by Spark (temporary file, then rename), so an entry is whole or absent. Each
has a hidden checksum file beside it that must go with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.protocol.control_offset import CHECKPOINT_KEY, ControlOffset
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.plan_layout import OWN_KEYS

#: Key of the checkpoint id in a source's offset; no Kafka topic can have this name.
OFFSET_KEY = CHECKPOINT_KEY


@dataclass(frozen=True, slots=True)
class LoggedOffsets:
    """The parsed content of an offsets/N entry: one JSON value per source, in Spark's order."""

    sources: tuple[Any, ...]
    #: The wall clock when the micro-batch was planned; None if the entry has none.
    processing_time_ms: int | None = None

    @classmethod
    def parse(cls, text: str) -> LoggedOffsets:
        lines = text.strip().split("\n")
        if lines[0] != "v1" or len(lines) < 2:
            raise CorruptObjectError(
                f"Spark's offset log entry has version {lines[0][:20]!r}",
                what_to_do="run the Spark version that wrote this job directory",
            )
        try:
            sources = tuple(None if line == "-" else json.loads(line) for line in lines[2:])
            facts = json.loads(lines[1] or "{}")
        except ValueError as error:
            raise CorruptObjectError(
                "an entry of Spark's offset log is cut off or was changed",
                why=str(error),
                what_to_do="restore the file from a backup, or go back to an older checkpoint (flinkish "
                "rewind)",
            ) from error
        planned_ms = facts.get("batchTimestampMs") if isinstance(facts, dict) else None
        return cls(sources, planned_ms)

    @property
    def checkpoint(self) -> CheckpointId:
        given = (source.get(OFFSET_KEY, 0) for source in self.sources if isinstance(source, dict))
        return CheckpointId(max((int(checkpoint) for checkpoint in given), default=0))

    @property
    def control(self) -> ControlOffset:
        return ControlOffset.find_newest(self.sources)

    def kafka(self, topics: frozenset[str]) -> dict[str, dict[int, int]]:
        """Return topic -> partition -> next offset of the source that reads `topics`, its lowest scan's."""
        lowest: dict[str, dict[int, int]] = {}
        for source in self.sources:
            if not isinstance(source, dict):
                continue
            for topic in source.keys() & topics:
                known = lowest.setdefault(topic, {})
                for partition, offset in source[topic].items():
                    number = int(partition)
                    known[number] = min(int(offset), known.get(number, int(offset)))
        return lowest

    def partitions(self) -> dict[str, dict[int, int]]:
        return self.kafka(self.topics())

    def topics(self) -> frozenset[str]:
        return frozenset(topic for source in self.sources for topic in _partitions(source))

    def add_partitions(self, end: LoggedOffsets) -> LoggedOffsets:
        """Return these offsets, and 0 for partitions that were added to their topics until `end`."""
        known = self.partitions()
        added = {
            topic: {str(p): 0 for p in ends if p not in known[topic]}
            for topic, ends in end.partitions().items()
            if topic in known
        }
        found = {topic: begins for topic, begins in added.items() if begins}
        return LoggedOffsets((*self.sources, found)) if found else self

    def describe_ranges(self, begin: LoggedOffsets | None) -> str:
        """Describe the ranges between `begin` and these offsets; from the start if it is None."""
        ranges = []
        for position, source in enumerate(self.sources):
            first = {} if begin is None or position >= len(begin.sources) else begin.sources[position]
            for topic, ends in _partitions(source).items():
                starts = _partitions(first).get(topic, {})
                ranges += [
                    f"{topic}-{p} from {starts.get(p, 'the start')} to {end}"
                    for p, end in sorted(ends.items())
                    if starts.get(p) != end
                ]
        return "; ".join(dict.fromkeys(ranges)) or "nothing that can be named"


def _partitions(source: Any) -> dict[str, dict[str, int]]:
    """Return the part of a source's offset that has the form of partitions of topics."""
    if not isinstance(source, dict):
        return {}
    return {
        str(name): value
        for name, value in source.items()
        if isinstance(value, dict) and not name.startswith(OWN_KEYS)
    }
