"""Counts the input offsets that an output names, and checks the order of keys.

An input offset costs one byte, for the input and each output; a key costs 16 bytes per source partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
#: (topic, partition)
Place = tuple[str, int]
#: Number of examples of each kind of fault.
EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Extent:
    """The audited offsets of one partition: from `start` to before `end`."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"there are no offsets from {self.start} to {self.end}")

    def __len__(self) -> int:
        return self.end - self.start


class InputOffsets:
    """The audited offsets that have a record, which control markers and aborted records are not."""

    def __init__(self, extents: Mapping[Place, Extent]) -> None:
        self.places: tuple[Place, ...] = tuple(extents)
        self.extents: tuple[Extent, ...] = tuple(extents.values())
        self.present = [np.zeros(len(extent), np.bool_) for extent in self.extents]

    def note(self, place: int, offsets: Int64s) -> None:
        extent = self.extents[place]
        inside = offsets[(offsets >= extent.start) & (offsets < extent.end)]
        self.present[place][inside - extent.start] = True

    @property
    def records(self) -> int:
        return sum(int(found.sum()) for found in self.present)


class NamedOffsets:
    """The input offsets that one output names, and the repeated ones."""

    def __init__(self, expected: InputOffsets) -> None:
        # It must be complete before `find_lost` and `unexpected` are called.
        self._expected = expected
        self.seen = [np.zeros(len(extent), np.bool_) for extent in expected.extents]
        #: Rows with the same origin as an earlier row.
        self.duplicated = 0
        #: Rows of another partition, or outside the audited offsets.
        self.outside = 0
        self.examples: list[str] = []

    def add(self, places: Int64s, offsets: Int64s) -> Bools:
        """Count rows; return which of them are inside the extents and the first of their origin."""
        first = np.zeros(len(offsets), np.bool_)
        for place, extent in enumerate(self._expected.extents):
            rows = np.flatnonzero((places == place) & (offsets >= extent.start) & (offsets < extent.end))
            if len(rows):
                first[rows] = self._add(place, offsets[rows])
                self.outside -= len(rows)
        self.outside += len(offsets)
        return first

    def _add(self, place: int, offsets: Int64s) -> Bools:
        found, begins = np.unique(offsets, return_index=True)
        seen, at = self.seen[place], found - self._expected.extents[place].start
        is_new = ~seen[at]
        seen[at] = True
        first = np.zeros(len(offsets), np.bool_)
        first[begins[is_new]] = True
        again = len(offsets) - int(is_new.sum())
        self.duplicated += again
        if again and len(self.examples) < EXAMPLES:
            topic, partition = self._expected.places[place]
            self.examples += [f"{topic}-{partition} offset {o}" for o in offsets[~first][:EXAMPLES].tolist()]
        return first

    @property
    def unexpected(self) -> int:
        return sum(int(found.sum()) for found in self._find_unexpected())

    @property
    def examples_of_unexpected(self) -> list[str]:
        expected = zip(self._expected.places, self._expected.extents, self._find_unexpected(), strict=True)
        return [
            f"{topic}-{partition} offset {offset}"
            for (topic, partition), extent, found in expected
            for offset in (np.flatnonzero(found)[:EXAMPLES] + extent.start).tolist()
        ][:EXAMPLES]

    def _find_unexpected(self) -> Iterator[Bools]:
        pairs = zip(self.seen, self._expected.present, strict=True)
        return (seen & ~present for seen, present in pairs)


@dataclass(frozen=True, slots=True)
class LostRecords:
    count: int
    examples: tuple[str, ...]


def find_lost(expected: InputOffsets, outputs: Sequence[NamedOffsets]) -> LostRecords:
    count, examples = 0, []
    for number, (topic, partition) in enumerate(expected.places):
        missing = expected.present[number].copy()
        for output in outputs:
            missing &= ~output.seen[number]
        count += int(missing.sum())
        at = np.flatnonzero(missing)[:EXAMPLES] + expected.extents[number].start
        examples += [f"{topic}-{partition} offset {offset}" for offset in at.tolist()]
    return LostRecords(count, tuple(examples[:EXAMPLES]))


UInt64s = npt.NDArray[np.uint64]


class KeyOrder:
    """The order check of one output partition; keys are distinguished by 64-bit hashes."""

    def __init__(self) -> None:
        # Among a million keys two have the same hash with a probability of 3 in 100 million; then unrelated
        # records are compared.
        self._keys = np.zeros(0, np.uint64)
        self._last = np.zeros(0, np.int64)

    def add(self, keys: UInt64s, offsets: Int64s) -> int:
        """Count the records that come after one of the same key with a higher offset."""
        if not len(keys):
            return 0
        order = np.argsort(keys, kind="stable")
        keys, offsets = keys[order], offsets[order]
        begins = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
        found = keys[begins]
        before = self._find_last(found)
        highest = _running_maximum(offsets, begins, before)
        behind = int((offsets < highest).sum())
        self._keep(found, np.maximum(before, np.maximum.reduceat(offsets, begins)))
        return behind

    def _find_last(self, keys: UInt64s) -> Int64s:
        """Return the highest offset of each key so far, -1 for a new one."""
        if not len(self._keys):
            return np.full(len(keys), -1, np.int64)
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[at] == keys, self._last[at], -1)

    def _keep(self, keys: UInt64s, last: Int64s) -> None:
        at = np.searchsorted(self._keys, keys)
        inside = at < len(self._keys)
        is_known = np.zeros(len(keys), np.bool_)
        is_known[inside] = self._keys[at[inside]] == keys[inside]
        self._last[at[is_known]] = last[is_known]
        if not is_known.all():
            new = ~is_known
            self._keys = np.insert(self._keys, at[new], keys[new])
            self._last = np.insert(self._last, at[new], last[new])


class BatchOrder:
    """The order check of micro-batches in one output partition: records must come after all earlier ones'."""

    def __init__(self) -> None:
        self._newest = (-1, -1)

    def add(self, places: Sequence[tuple[int, int] | None]) -> Bools:
        """Return which records come after one of a later micro-batch."""
        ranked = {place: rank for rank, place in enumerate(sorted({self._newest, *filter(None, places)}))}
        ranks = np.array([-1 if place is None else ranked[place] for place in places], np.int64)
        if not len(ranks):
            return np.zeros(0, np.bool_)
        highest = np.maximum(np.maximum.accumulate(ranks), ranked[self._newest])
        self._newest = list(ranked)[int(highest[-1])]
        behind: Bools = (ranks >= 0) & (ranks < highest)
        return behind


def _running_maximum(offsets: Int64s, begins: npt.NDArray[np.intp], before: Int64s) -> Int64s:
    """Return for each record the highest offset before it, within its run."""
    runs = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(offsets))))
    # Ranks instead of offsets do not overflow when combined with a run's number.
    values, ranks = np.unique(offsets, return_inverse=True)
    lifted = np.maximum.accumulate(runs * len(values) + ranks)
    highest = np.empty(len(offsets), np.int64)
    highest[1:] = values[(lifted[:-1] - runs[:-1] * len(values))]
    highest[begins] = -1
    return np.maximum(highest, before[runs])
