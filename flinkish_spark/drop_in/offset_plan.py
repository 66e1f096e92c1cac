"""How much of a topic one micro-batch reads, and in which pieces. Pure arithmetic on offsets.

The rules are those of Spark's own Kafka source, so that a query keeps its habits when the word is
changed: `maxOffsetsPerTrigger` is shared out by how much each partition has left, `minPartitions`
and `maxRecordsPerPartition` cut big ranges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flinkish_spark.kafka.answers import Place

Offsets = Mapping[Place, int]


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Offsets `start` to `end`, without `end`, of one partition.

    Parameters
    ----------
    is_last
        Whether it is the last piece of its partition in the micro-batch.
    """

    topic: str
    partition: int
    start: int
    end: int
    is_last: bool = True

    @property
    def size(self) -> int:
        """How many offsets; some may hold no record."""
        return self.end - self.start


def limited(start: Offsets, end: Offsets, most: int) -> dict[Place, int]:
    """Return where a micro-batch of at most about `most` offsets ends.

    Each partition gets a share in proportion to what it has left, at least one offset, so a small
    partition is not starved; the sum can therefore be above `most` by the number of partitions.
    """
    sizes = {place: max(0, end[place] - start.get(place, 0)) for place in end}
    total = sum(sizes.values())
    if total <= most:
        return dict(end)
    ends = {}
    for place, size in sizes.items():
        share = most * (size / total)
        offset = start.get(place, 0) + (math.ceil(share) if share < 1 else math.floor(share))
        ends[place] = min(end[place], offset) if size else end[place]
    return ends


def available(start: Offsets, end: Offsets) -> int:
    """Return how many offsets lie between two positions."""
    return sum(max(0, end[place] - start.get(place, 0)) for place in end)


def pieces(
    ranges: Sequence[Range], *, min_partitions: int | None, max_per_partition: int | None
) -> tuple[Range, ...]:
    """Cut ranges so that there are about `min_partitions` and none is above `max_per_partition`.

    Empty ranges are kept: the last piece of every partition carries its barrier.
    """
    counts = {r: 1 for r in ranges}
    if max_per_partition is not None:
        counts = {r: max(1, math.ceil(r.size / max_per_partition)) for r in ranges}
    total = sum(r.size for r in ranges)
    if min_partitions is not None and sum(counts.values()) < min_partitions and total:
        for r in ranges:
            counts[r] = max(counts[r], round(r.size / total * min_partitions), 1)
    return tuple(piece for r in ranges for piece in _cut(r, min(counts[r], max(1, r.size))))


def _cut(whole: Range, count: int) -> list[Range]:
    edges = [whole.start + whole.size * i // count for i in range(count + 1)]
    return [
        Range(whole.topic, whole.partition, edges[i], edges[i + 1], is_last=i == count - 1)
        for i in range(count)
    ]


def to_json(offsets: Offsets) -> dict[str, dict[str, int]]:
    """Return offsets as Spark's Kafka source logs them."""
    found: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        found.setdefault(topic, {})[str(partition)] = offset
    return found


def from_json(value: Mapping[str, Mapping[str, int]]) -> dict[Place, int]:
    """Read what :func:`to_json`, or Spark's own source, wrote."""
    return {(topic, int(p)): int(o) for topic, ps in value.items() for p, o in ps.items()}
