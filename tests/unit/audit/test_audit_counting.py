"""The arrays behind the audit, against dictionaries that do the same slowly."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from flinkish_spark.audit.counting import Extent, InputOffsets, KeyOrder, NamedOffsets, find_lost
from tests.support.effort import seeds

EXTENTS = {("in", 0): Extent(5, 25), ("in", 1): Extent(0, 10), ("other", 0): Extent(3, 3)}


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("seed", seeds(40))
def test_origins_are_counted_as_a_dictionary_counts_them(seed: int) -> None:
    chance = random.Random(seed)
    expected = InputOffsets(EXTENTS)
    present = set()
    for place, extent in enumerate(EXTENTS.values()):
        there = [o for o in range(extent.start, extent.end) if chance.random() < 0.8]
        expected.note(place, ints(there))
        present |= {(place, o) for o in there}
    named, seen, outside = NamedOffsets(expected), Counter(), 0
    for _ in range(4):
        rows = [(chance.randint(-1, 2), chance.randint(0, 30)) for _ in range(chance.randint(0, 15))]
        first = named.add(ints([p for p, _ in rows]), ints([o for _, o in rows]))
        for row, is_first in zip(rows, first.tolist(), strict=True):
            place, offset = row
            extent = list(EXTENTS.values())[place] if place >= 0 else Extent(0, 0)
            inside = extent.start <= offset < extent.end
            outside += not inside
            assert is_first == (inside and row not in seen)
            seen[row] += inside
    inside_rows = {row: n for row, n in seen.items() if n}
    assert named.outside == outside and expected.records == len(present)
    assert named.duplicated == sum(n - 1 for n in inside_rows.values())
    assert named.unexpected == len(inside_rows.keys() - present)
    assert find_lost(expected, [named]).count == len(present - inside_rows.keys())


def test_several_outputs_can_share_the_input_out() -> None:
    expected = InputOffsets({("in", 0): Extent(0, 4)})
    expected.note(0, ints([0, 1, 2, 3]))
    left, right = NamedOffsets(expected), NamedOffsets(expected)
    left.add(ints([0, 0]), ints([0, 1]))
    right.add(ints([0]), ints([2]))
    assert find_lost(expected, [left, right]).examples == ("in-0 offset 3",)
    assert (find_lost(expected, [left]).count, find_lost(expected, [right]).count) == (2, 3)


def test_faults_are_named() -> None:
    expected = InputOffsets({("in", 3): Extent(10, 20)})
    expected.note(0, ints(list(range(10, 20))))
    named = NamedOffsets(expected)
    named.add(ints([0] * 4), ints([11, 12, 12, 13]))
    named.add(ints([0]), ints([11]))
    assert named.examples == ["in-3 offset 12", "in-3 offset 11"] and named.duplicated == 2
    assert find_lost(expected, [named]).examples[0] == "in-3 offset 10"
    expected.present[0][3] = False
    assert named.examples_of_unexpected == ["in-3 offset 13"] and named.unexpected == 1


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (4, 3)])
def test_an_extent_has_a_beginning_before_its_end(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="no offsets"):
        Extent(start, end)


@pytest.mark.parametrize("seed", seeds(60))
def test_order_is_counted_as_a_dictionary_counts_it(seed: int) -> None:
    chance = random.Random(seed)
    order, last = KeyOrder(), {}
    for _ in range(6):
        size = chance.randint(0, 40)
        keys = [chance.choice([0, 1, 7, 2**64 - 1]) for _ in range(size)]
        offsets = [chance.choice([0, 1, 2, 50, 2**60]) for _ in range(size)]
        behind = 0
        for key, offset in zip(keys, offsets, strict=True):
            behind += offset < last.get(key, -1)
            last[key] = max(offset, last.get(key, -1))
        assert order.add(np.array(keys, np.uint64), ints(offsets)) == behind


def test_many_keys_take_little_memory() -> None:
    order = KeyOrder()
    keys = np.arange(1_000_000, dtype=np.uint64)
    for begin in range(0, 1_000_000, 250_000):
        assert order.add(keys[begin : begin + 250_000], np.arange(250_000)) == 0
    assert order.add(keys[:5], ints([7, 7, 7, 7, 0])) == 1
    assert order._keys.nbytes + order._last.nbytes == 16_000_000
