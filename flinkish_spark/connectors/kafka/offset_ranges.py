"""Offsets of partitions: in JSON, limited to a micro-batch, and split among tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from flinkish_spark.protocol.ids import Place

# Limits and splits are computed as in Spark's own Kafka source, so that micro-batches keep their sizes.
T = TypeVar("T")
Offsets = Mapping[Place, int]


@dataclass(frozen=True, slots=True, order=True)
class Range:
    topic: str
    partition: int
    start: int
    end: int
    is_last: bool = True

    @property
    def size(self) -> int:
        return self.end - self.start


def apply_limit(start: Offsets, end: Offsets, most: int) -> dict[Place, int]:
    """Limit a micro-batch to about `most` offsets, shared among partitions in proportion to their sizes."""
    # Each partition gets at least one offset, so that none starves; the sum may exceed `most`.
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


def count_available(start: Offsets, end: Offsets) -> int:
    return sum(max(0, end[place] - start.get(place, 0)) for place in end)


def split_ranges(
    ranges: Sequence[Range], *, min_partitions: int | None, max_per_partition: int | None
) -> tuple[Range, ...]:
    # Keep empty ranges: the last range of every partition carries its barrier.
    counts = {r: 1 for r in ranges}
    if max_per_partition is not None:
        counts = {r: max(1, math.ceil(r.size / max_per_partition)) for r in ranges}
    total = sum(r.size for r in ranges)
    if min_partitions is not None and sum(counts.values()) < min_partitions and total:
        for r in ranges:
            counts[r] = max(counts[r], round(r.size / total * min_partitions), 1)
    return tuple(piece for r in ranges for piece in _split(r, min(counts[r], max(1, r.size))))


def _split(whole: Range, count: int) -> list[Range]:
    edges = [whole.start + whole.size * i // count for i in range(count + 1)]
    return [
        Range(whole.topic, whole.partition, edges[i], edges[i + 1], is_last=i == count - 1)
        for i in range(count)
    ]


def to_json(offsets: Mapping[Place, T]) -> dict[str, dict[str, T]]:
    """Return offsets in their stored form, which is also that of Spark's options."""
    found: dict[str, dict[str, T]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        found.setdefault(topic, {})[str(partition)] = offset
    return found


def from_json(value: Mapping[str, Mapping[Any, int]]) -> dict[Place, int]:
    return {(topic, int(p)): int(o) for topic, ps in value.items() for p, o in ps.items()}
