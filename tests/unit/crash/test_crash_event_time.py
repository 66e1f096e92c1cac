"""What the crash test of event time compares with: its functions in the harness, and its recomputation."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

import pytest

from flinkish_spark.cep import CEP
from flinkish_spark.core.elements import MIN_WATERMARK_MS
from flinkish_spark.operators.windowing import window_operator
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.windows import (
    EventTimeSessionWindows,
    ProcessWindow,
    TumblingEventTimeWindows,
    WindowSpec,
    sliding_count_window,
)
from tests.crash.event_time_app import (
    CALL,
    FOUND,
    GAP_MS,
    LAST,
    LATENESS_MS,
    LOST,
    OUT_OF_ORDER_MS,
    READING,
    SESSION,
    WINDOW_MS,
    Numbers,
    Pairs,
    Timers,
    WithTheOneBefore,
    by_number,
    pairs_beginning,
)
from tests.crash.event_time_rig import (
    PARTITIONS,
    Found,
    Session,
    expected_pairs,
    expected_sessions,
    last_readings,
    readings,
)
from tests.crash.event_time_updates import Firing, Reading, Update, told, updates_that_are_wrong
from tests.support.operator_harness import OperatorHarness

WINDOWS = WindowSpec(TumblingEventTimeWindows(WINDOW_MS), allowed_lateness_ms=LATENESS_MS)


def harness(spec, function, input_type, **restore) -> OperatorHarness:
    operator = window_operator(spec, ProcessWindow(function), input_type)
    return harness_of(operator, **restore)


def harness_of(operator, **restore) -> OperatorHarness:
    return OperatorHarness(operator, key=lambda row: row[0], key_type="STRING", max_parallelism=3, **restore)


class Chain:
    """The job's operators, as micro-batches run them."""

    def __init__(self) -> None:
        self.timers = harness_of(Timers())
        self.sessions = self._sessions()
        self.windows = harness(WINDOWS, Numbers(), READING)
        self.pairs = harness(sliding_count_window(2, 1), WithTheOneBefore(), SESSION)
        self.updates: list[Update] = []
        self.found: Counter[Session] = Counter()
        self.calls: Counter[tuple[str, str, int]] = Counter()
        self.clocks: dict[str, list[tuple[int, int, int]]] = {}
        self.now_ms, self.greatest = 0, [MIN_WATERMARK_MS] * PARTITIONS

    def _sessions(self, **restore) -> OperatorHarness:
        return harness(
            WindowSpec(EventTimeSessionWindows(GAP_MS)), Numbers(), "user STRING, n LONG", **restore
        )

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
        self.windows.watermark(min(self.greatest) - 1)
        self.windows.push_all([(reading, reading.at) for reading in map(told, given)])
        firings = self.windows.take()
        self.pairs.push_all(list(zip(firings.rows, firings.times_ms, strict=True)))
        names = ("user", "begin_ms", "end_ms", "numbers", "begin_before", "numbers_before")
        self.updates += [Update.of(dict(zip(names, row, strict=True))) for row in self.pairs.take().rows]
        self.timers.push_all([(reading, reading.at) for reading in given])
        for reading in given:
            place = reading.n % PARTITIONS
            self.greatest[place] = max(self.greatest[place], reading.at)

    def restored(self) -> None:
        """Go on from a snapshot."""
        self.timers = harness_of(Timers(), restore=self.timers.snapshot(), bases=self.timers.bases)
        self.sessions = self._sessions(restore=self.sessions.snapshot(), bases=self.sessions.bases)
        self.windows = harness(
            WINDOWS, Numbers(), READING, restore=self.windows.snapshot(), bases=self.windows.bases
        )


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
    found = Found(given, chain.found, chain.calls, chain.clocks, chain.updates, expected_pairs(given))
    assert found.is_complete and found.differences() == [] and found.clocks_that_go_back() == []
    assert len(expected_sessions(given)) > 10
    assert updates_that_are_wrong(given, chain.updates) == [] and len(chain.updates) > 100
    for at in (0, len(chain.updates) // 2, -1):
        lost, twice = list(chain.updates), [*chain.updates, chain.updates[at]]
        del lost[at]
        assert updates_that_are_wrong(given, lost) and updates_that_are_wrong(given, twice)
    assert updates_that_are_wrong(given, [*chain.updates, Update(Firing("u1", 0, (1,)), None)])


def test_what_is_lost_or_comes_twice_is_found() -> None:
    given = list(islice(readings(3), 300))
    sessions = expected_sessions(given)
    calls = Counter(("call", user, n) for user, n, _ in given)
    right = Found(given, sessions, calls, {}, [], expected_pairs(given))
    assert right.differences() == []
    first = next(iter(sessions))
    cut = first._replace(numbers=first.numbers[1:])
    wrong = Found(
        given,
        sessions - Counter([first]) + Counter([cut]),
        Counter(right.calls),
        {},
        [],
        Counter(right.pairs),
    )
    wrong.calls["call", given[0].user, 0] += 1
    del wrong.calls["call", given[1].user, 1]
    pair, other = islice(wrong.pairs, 2)
    wrong.pairs[pair] += 1
    del wrong.pairs[other]
    assert [one.split(" ")[1] for one in wrong.differences()] == ["missing", "surplus"] * 3
    back = {"u1": [(0, 5, 7), (4, 6, 6)], "u2": [(9, 8, 1)]}
    assert len(Found(given, sessions, Counter(), back, [], Counter()).clocks_that_go_back()) == 2


def test_the_pattern_finds_what_a_recomputation_finds() -> None:
    def program(stream):
        pattern = pairs_beginning(lambda reading: reading.n % 3 == 0 and reading.user != LAST)
        return CEP.pattern(stream.key_by("user"), pattern, by_number).process(
            Pairs(), output=FOUND, uid="pairs"
        )

    given = [*islice(readings(5), 1_000), *last_readings()]
    harness = ProgramHarness(program, READING, side_outputs=[LOST])
    harness.push_all([(reading, reading.at) for reading in reversed(given)])
    harness.end_of_input()
    output = harness.take()
    found = Counter(map(tuple, [*output.rows, *output.side["lost"]]))
    assert found == expected_pairs(given)
    assert len(output.rows) > 200 and len(output.side["lost"]) > 20
