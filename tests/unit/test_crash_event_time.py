"""What the crash test of event time compares with: its functions in the harness, and its recomputation."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

import pytest

from flinkish_spark.operators.elements import MIN_WATERMARK_MS
from flinkish_spark.operators.window_operator import window_operator
from flinkish_spark.testing.operator_harness import OperatorHarness
from flinkish_spark.windows import EventTimeSessionWindows, ProcessWindow, WindowSpec
from tests.crash.event_time_app import CALL, GAP_MS, OUT_OF_ORDER_MS, Numbers, Timers
from tests.crash.event_time_rig import (
    PARTITIONS,
    Found,
    Reading,
    Session,
    expected_sessions,
    last_readings,
    readings,
)


class Chain:
    """The job's two operators, one behind the other, as micro-batches run them."""

    def __init__(self) -> None:
        self.timers = OperatorHarness(Timers(), key=lambda r: r.user, key_type="STRING")
        self.sessions = self._sessions()
        self.found: Counter[Session] = Counter()
        self.calls: Counter[tuple[str, str, int]] = Counter()
        self.clocks: dict[str, list[tuple[int, int, int]]] = {}
        self.now_ms, self.greatest = 0, [MIN_WATERMARK_MS] * PARTITIONS

    def _sessions(self, **restore) -> OperatorHarness:
        spec = WindowSpec(EventTimeSessionWindows(GAP_MS))
        operator = window_operator(spec, ProcessWindow(Numbers()), "user STRING, n LONG")
        return OperatorHarness(operator, key=lambda row: row[0], key_type="STRING", **restore)

    def micro_batch(self, given: list[Reading]) -> None:
        """Run one with the watermark of those before it."""
        self.now_ms += 100
        watermark_ms = min(self.greatest) - OUT_OF_ORDER_MS - 1
        self.timers.processing_time(self.now_ms)
        self.timers.watermark(watermark_ms)
        output = self.timers.take()
        self.sessions.push_all(list(zip(output.rows, output.times_ms, strict=True)))
        self.sessions.watermark(watermark_ms)
        for user, begin, end, numbers in self.sessions.take().rows:
            self.found[Session(user, begin, end, tuple(numbers))] += 1
        for kind, user, n, *clocks in output.side.get(CALL.name, ()):
            self.calls[kind, user, n] += 1
            self.clocks.setdefault(user, []).append(tuple(clocks))
        self.timers.push_all([(reading, reading.at) for reading in given])
        for reading in given:
            place = reading.n % PARTITIONS
            self.greatest[place] = max(self.greatest[place], reading.at)

    def restored(self) -> None:
        """Go on from a snapshot."""
        self.timers = OperatorHarness(
            Timers(),
            key=lambda r: r.user,
            key_type="STRING",
            restore=self.timers.snapshot(),
            bases=self.timers.bases,
        )
        self.sessions = self._sessions(restore=self.sessions.snapshot(), bases=self.sessions.bases)


@pytest.mark.parametrize("seed", [1, 2])
def test_operators_and_recomputation_agree_however_the_input_is_cut(seed: int) -> None:
    chance, chain = random.Random(seed), Chain()
    given, source = [], readings(seed)
    for _ in range(25):
        batch = list(islice(source, chance.randrange(0, 160)))
        given += batch
        chain.micro_batch(batch)
        if chance.random() < 0.3:
            chain.restored()
    given += last_readings()
    chain.micro_batch(last_readings())
    for _ in range(25):
        chain.micro_batch([])
    found = Found(given, chain.found, chain.calls, chain.clocks)
    assert found.is_complete and found.differences() == [] and found.clocks_that_go_back() == []
    assert len(expected_sessions(given)) > 10


def test_what_is_lost_or_comes_twice_is_found() -> None:
    given = list(islice(readings(3), 300))
    sessions = expected_sessions(given)
    right = Found(given, sessions, Counter(("call", user, n) for user, n, _ in given), {})
    assert right.differences() == []
    first = next(iter(sessions))
    cut = first._replace(numbers=first.numbers[1:])
    wrong = Found(given, sessions - Counter([first]) + Counter([cut]), Counter(right.calls), {})
    wrong.calls["call", given[0].user, 0] += 1
    del wrong.calls["call", given[1].user, 1]
    assert [one.split(" ")[1] for one in wrong.differences()] == ["missing", "surplus", "missing", "surplus"]
    back = {"u1": [(0, 5, 7), (4, 6, 6)], "u2": [(9, 8, 1)]}
    assert len(Found(given, sessions, Counter(), back).clocks_that_go_back()) == 2
