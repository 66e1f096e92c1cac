"""Looking for barriers ahead of a position, with as little reading as possible."""

from __future__ import annotations

import random

import pytest

from flinkish_spark.connectors.kafka.chaining import upstream as look_ahead
from flinkish_spark.connectors.kafka.chaining.upstream import BarrierFinder, PassedBarrier
from flinkish_spark.connectors.kafka.client.barriers import BarrierScan, SeenBarrier
from flinkish_spark.protocol.ids import CheckpointId, JobUuid
from tests.support.chained_log import JOB, mark
from tests.support.effort import seeds

PLACE = ("t", 0)


class Partition:
    """Records, and barriers by offset; counts how much of it is looked at."""

    def __init__(
        self, length: int, barriers: dict[int, tuple[int, int | None]], gaps: set[int] = frozenset()
    ) -> None:
        self.length, self.barriers, self.gaps = length, barriers, gaps
        self.looked_at: list[tuple[int, int]] = []

    def scan(self, place: tuple[str, int], start: int, end: int) -> BarrierScan:
        assert place == PLACE
        assert start < end <= self.length
        self.looked_at.append((start, end))
        return self.truth(start, end)

    def truth(self, start: int, end: int) -> BarrierScan:
        seen = [o for o in range(start, end) if o not in self.gaps]
        barriers = tuple(
            SeenBarrier(o, mark(*self.barriers[o][:1], previous=self.barriers[o][1]))
            for o in seen
            if o in self.barriers
        )
        return BarrierScan(seen[-1] + 1 if seen else start, barriers)

    @property
    def read(self) -> int:
        return sum(end - start for start, end in self.looked_at)


def passed(checkpoint: int, job: JobUuid = JOB) -> PassedBarrier:
    return PassedBarrier(job, CheckpointId(checkpoint))


def offsets(scanned: BarrierScan) -> list[int]:
    return [seen.offset for seen in scanned.barriers]


def test_a_reader_that_keeps_up_looks_at_the_end_only() -> None:
    log = Partition(50_000, {49_990: (7, 6)})
    ahead = BarrierFinder(log.scan)
    seen = ahead.find_ahead(PLACE, 10, 50_000, passed(6))
    assert (offsets(seen), seen.end) == ([49_990], 50_000)
    assert log.read == 64
    # Nothing new, no look; also when the reader has moved on.
    assert offsets(ahead.find_ahead(PLACE, 20_000, 50_000, passed(6))) == [49_990]
    assert offsets(ahead.find_ahead(PLACE, 49_991, 50_000, passed(7))) == []
    assert log.read == 64


@pytest.mark.parametrize(
    ("previous", "known"),
    [(6, None), (6, passed(5)), (None, passed(6)), (6, passed(6, JobUuid("b" * 32)))],
    ids=["nothing passed", "lags", "restarted upstream", "another job"],
)
def test_where_the_barrier_does_not_tell_everything_in_between_is_looked_at(
    previous: int | None, known: PassedBarrier | None
) -> None:
    log = Partition(6_000, {2_000: (6, 5), 5_990: (7, previous)})
    seen = BarrierFinder(log.scan).find_ahead(PLACE, 10, 6_000, known)
    assert offsets(seen) == [2_000, 5_990]


def test_a_long_way_is_looked_at_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_ahead, "_PORTION", 1_000)
    log = Partition(20_000, {1_500: (1, None), 19_990: (9, 8)})
    ahead = BarrierFinder(log.scan)
    seen = ahead.find_ahead(PLACE, 0, 20_000, None)
    assert (offsets(seen), seen.end) == ([], 1_000)
    seen = ahead.find_ahead(PLACE, 1_000, 20_000, None)
    assert (offsets(seen), seen.end) == ([1_500], 2_000)


def test_what_is_not_visible_is_no_end() -> None:
    """Markers of transactions: a job whose upstream rests has nothing to read."""
    log = Partition(12, {9: (7, 6)}, gaps={10, 11})
    ahead = BarrierFinder(log.scan)
    assert ahead.find_ahead(PLACE, 0, 12, passed(6)).end == 10
    assert ahead.find_ahead(PLACE, 10, 12, passed(7)) == BarrierScan(10, ())
    log.length = 14
    log.gaps |= {12, 13}
    assert ahead.find_ahead(PLACE, 10, 14, passed(7)) == BarrierScan(10, ())


def test_a_reader_that_goes_back_is_looked_for_anew() -> None:
    log = Partition(100, {40: (6, 5), 90: (7, 6)})
    ahead = BarrierFinder(log.scan)
    assert offsets(ahead.find_ahead(PLACE, 50, 100, passed(6))) == [90]
    assert offsets(ahead.find_ahead(PLACE, 0, 100, None)) == [40, 90]


@pytest.mark.parametrize("seed", seeds(40))
def test_whatever_the_way_what_is_found_is_what_there_is(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_ahead, "_WINDOWS", (2, 5, 20))
    monkeypatch.setattr(look_ahead, "_PORTION", 30)
    chance = random.Random(seed)
    length, checkpoint, staged = 300, 0, None
    barriers: dict[int, tuple[int, int | None]] = {}
    for offset in sorted(chance.sample(range(length), 15)):
        checkpoint += 1
        if chance.random() < 0.3:
            # Staged and aborted: named as the previous one, and not in the log.
            staged, checkpoint = checkpoint, checkpoint + 1
        if chance.random() < 0.1:
            staged = None
        barriers[offset] = (checkpoint, staged)
        staged = checkpoint
    gaps = {o for o in range(length) if chance.random() < 0.3} - barriers.keys()
    log, position, end, last = Partition(length, barriers, gaps), 0, 0, None
    ahead = BarrierFinder(log.scan)
    for _ in range(60):
        end = min(length, end + chance.choice((0, 3, 40)))
        seen = ahead.find_ahead(PLACE, position, end, last)
        truth = log.truth(position, end)
        if seen.end != truth.end:
            assert seen.end < truth.end
            truth = log.truth(position, seen.end)
        assert offsets(seen) == offsets(truth)
        position = chance.randint(position, seen.end)
        gone = [c for o, (c, _) in sorted(barriers.items()) if o < position]
        last = passed(gone[-1]) if gone else None
