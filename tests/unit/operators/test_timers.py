"""Timers of both clocks in the harness, beside a plain set of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.core.elements import MAX_WATERMARK_MS, TimeDomain, Timer
from flinkish_spark.operators.process import KeyedStreamOperator
from flinkish_spark.state.key_group import BasePolicy
from flinkish_spark.windows import TimeWindow
from tests.support.effort import examples, seeds
from tests.support.operator_harness import MemoryBases, OperatorHarness, Snapshot
from tests.support.stumbling import Restarting

EVENT, PROCESSING = TimeDomain.EVENT_TIME, TimeDomain.PROCESSING_TIME
#: Bases from the second entry on, and new ones all the time.
TINY = BasePolicy(smallest_bytes=1, delta_share=0.5, smallest_delta_rows=2)
GROUPS = 6
NAMESPACES = (None, TimeWindow(0, 10), TimeWindow(10, 20))


class Command(NamedTuple):
    """What an element asks for: to register or delete a timer, and what the timer deletes when it fires."""

    key: str
    verb: str
    domain: TimeDomain
    time_ms: int
    namespace: TimeWindow | None = None


class Timing(KeyedStreamOperator):
    """Does what elements say. A timer says that it has fired; at a multiple of 7 it sets one 5 later."""

    def open(self, states: Any, context: Any, timers: Any) -> None:
        self._scope, self._context, self._timers = states.scope, context, timers

    def processors(self) -> Any:
        return (self._on_command,)

    def _on_command(self, command: Command, ctx: Any) -> None:
        self._scope.enter(command.key, command.namespace)
        clock = "event" if command.domain is EVENT else "processing"
        getattr(self._timers, f"{command.verb}_{clock}_time_timer")(command.time_ms)

    def on_timer(self, timer: Timer, domain: TimeDomain) -> Iterator[Any]:
        if timer.time_ms % 7 == 0:
            clock = "event" if domain is EVENT else "processing"
            getattr(self._timers, f"register_{clock}_time_timer")(timer.time_ms + 5)
        yield (domain, *timer)


def in_order(fired: Iterable[Any]) -> list[Any]:
    """Return what fired in an order that is no promise: by clock, time, key and namespace."""
    return sorted(fired, key=lambda row: (row[0].value, *row[1:3], row[3] or ()))


class Model:
    """A set of timers."""

    def __init__(self) -> None:
        self.timers: set[tuple[TimeDomain, int, str, TimeWindow | None]] = set()
        self.now_ms = {EVENT: -1, PROCESSING: 0}

    def command(self, command: Command) -> None:
        timer = (command.domain, command.time_ms, command.key, command.namespace)
        (self.timers.add if command.verb == "register" else self.timers.discard)(timer)

    def advance(self, domain: TimeDomain, now_ms: int) -> list[Any]:
        """Return what fires."""
        self.now_ms[domain] = max(self.now_ms[domain], now_ms)
        fired = []
        while due := [timer for timer in self.timers if timer[1] <= self.now_ms[timer[0]]]:
            # In order: what a timer sets may be there already.
            timer = min(due, key=lambda timer: timer[1])
            self.timers.discard(timer)
            fired.append(timer)
            if timer[1] % 7 == 0:
                self.timers.add((timer[0], timer[1] + 5, *timer[2:]))
        return in_order(fired)


class Subtasks:
    """One operator in several subtasks, each with some key groups."""

    def __init__(self, parallelism: int, snapshot: Snapshot | None, bases: MemoryBases) -> None:
        self._bases, self._number = bases, parallelism
        own = [range(at, GROUPS, parallelism) for at in range(parallelism)]
        self._parts = [self._part(None if snapshot is None else snapshot.part(groups)) for groups in own]

    def _part(self, snapshot: Snapshot | None) -> OperatorHarness:
        return OperatorHarness(
            Timing(),
            key=lambda command: command.key,
            key_type="STRING",
            max_parallelism=GROUPS,
            policy=TINY,
            restore=snapshot,
            bases=self._bases,
        )

    def push(self, commands: list[Command]) -> None:
        for command in commands:
            group = self._parts[0].group_of(command.key)
            self._parts[group % self._number].push(command)

    def advance(self, domain: TimeDomain, now_ms: int) -> None:
        for part in self._parts:
            do(part, (domain, now_ms))

    def take(self) -> list[Any]:
        """Return what fired; each key's in the order of times."""
        rows = [row for part in self._parts for row in part.take().rows]
        for key in {(row[0], row[2]) for row in rows}:
            times = [row[1] for row in rows if (row[0], row[2]) == key]
            assert times == sorted(times), rows
        return in_order(rows)

    def rescaled(self, parallelism: int) -> Subtasks:
        together = Snapshot.together(part.snapshot() for part in self._parts)
        return Subtasks(parallelism, together, self._bases)

    @property
    def timer_count(self) -> int:
        return sum(part.timer_count() for part in self._parts)


COMMANDS = st.builds(
    Command,
    st.sampled_from("abcdefg"),
    st.sampled_from(["register", "register", "delete"]),
    st.sampled_from([EVENT, PROCESSING]),
    st.integers(0, 40),
    st.sampled_from(NAMESPACES),
)
STEPS = st.one_of(
    st.lists(COMMANDS, min_size=1, max_size=6),
    st.tuples(st.sampled_from([EVENT, PROCESSING]), st.integers(1, 45)),
    st.integers(1, 4),
)


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(STEPS, max_size=20))
def test_timers_fire_once_by_key_namespace_and_time_over_restores_and_rescales(steps) -> None:
    """Behaviours 161, 164: a number is a snapshot, restored into as many subtasks."""
    model, one = Model(), Subtasks(1, None, MemoryBases())
    for step in [*steps, (PROCESSING, 100), (EVENT, MAX_WATERMARK_MS)]:
        expected: list[Any] = []
        match step:
            case list():
                # Timers in the past fire with the next advance of their clock, not with elements.
                one.push([command for command in step if command.time_ms > model.now_ms[command.domain]])
                for command in step:
                    if command.time_ms > model.now_ms[command.domain]:
                        model.command(command)
            case (domain, now_ms):
                if now_ms > model.now_ms[domain]:
                    one.advance(domain, now_ms)
                    expected = model.advance(domain, now_ms)
            case parallelism:
                one = one.rescaled(parallelism)
        assert one.take() == expected
        assert one.timer_count == len(model.timers)
    assert {timer[0] for timer in model.timers} <= {PROCESSING}


def run(*commands: Command, **settings: Any) -> OperatorHarness:
    harness = OperatorHarness(Timing(), key=lambda c: c.key, key_type="STRING", policy=TINY, **settings)
    for command in commands:
        harness.push(command)
    return harness


def advance(harness: OperatorHarness, domain: TimeDomain, now_ms: int) -> list[Any]:
    do(harness, (domain, now_ms))
    return harness.take().rows


@pytest.mark.parametrize("domain", [EVENT, PROCESSING])
def test_a_timer_that_is_set_again_is_one_and_others_are_others(domain: TimeDomain) -> None:
    """Behaviour 161."""
    again = [Command("a", "register", domain, 10)] * 3
    others = [
        Command("b", "register", domain, 10),
        Command("a", "register", domain, 11),
        Command("a", "register", domain, 10, NAMESPACES[1]),
        Command("a", "register", PROCESSING if domain is EVENT else EVENT, 10),
    ]
    one = run(*again, *others)
    assert one.timer_count() == 5
    assert advance(one, domain, 9) == []
    assert in_order(advance(one, domain, 10)) == in_order(
        [(domain, 10, "a", None), (domain, 10, "a", NAMESPACES[1]), (domain, 10, "b", None)]
    )
    assert advance(one, domain, 10) == []
    assert advance(one, domain, 11) == [(domain, 11, "a", None)]
    assert one.timer_count() == 1


@pytest.mark.parametrize("domain", [EVENT, PROCESSING])
def test_a_deleted_timer_does_not_fire_and_may_be_set_again(domain: TimeDomain) -> None:
    """Behaviour 161: only that of the key and namespace; deleting what is not there does nothing."""
    one = run(
        *(Command("a", "register", domain, 10, namespace) for namespace in NAMESPACES),
        Command("b", "register", domain, 10),
        Command("a", "delete", domain, 10, NAMESPACES[2]),
        Command("c", "delete", domain, 10),
        Command("a", "delete", domain, 9),
        Command("b", "delete", domain, 10),
        Command("b", "register", domain, 10),
    )
    fired = [(domain, 10, "a", None), (domain, 10, "a", NAMESPACES[1]), (domain, 10, "b", None)]
    assert in_order(advance(one, domain, 12)) == in_order(fired)
    assert one.timer_count() == 0


@pytest.mark.parametrize("domain", [EVENT, PROCESSING])
def test_a_timer_that_a_timer_sets_in_the_past_fires_in_the_same_round(domain: TimeDomain) -> None:
    one = run(Command("a", "register", domain, 7))
    assert advance(one, domain, 30) == [(domain, 7, "a", None), (domain, 12, "a", None)]


def test_many_timers_of_the_wall_clock_ask_for_the_earliest_alone() -> None:
    """Behaviour 162: an earlier one moves the call forward, a deleted one moves it back."""
    times = [50 + 10 * n for n in range(100)]
    random.Random(3).shuffle(times)
    one = run(*(Command(f"k{n % 9}", "register", PROCESSING, time_ms) for n, time_ms in enumerate(times)))
    assert one.next_timer_ms(PROCESSING) == 50 and one.next_timer_ms(EVENT) is None
    one.push(Command("early", "register", PROCESSING, 45))
    assert one.next_timer_ms(PROCESSING) == 45
    one.push(Command("early", "delete", PROCESSING, 45))
    assert one.next_timer_ms(PROCESSING) == 50
    # One call that is late is one call for all that are due by then.
    fired = sorted(row[1] for row in advance(one, PROCESSING, 549))
    assert [time_ms for time_ms in fired if time_ms % 10 == 0] == list(range(50, 550, 10))
    assert one.next_timer_ms(PROCESSING) == 550


@pytest.mark.parametrize("seed", seeds(8))
def test_a_crash_in_the_middle_of_a_step_has_done_nothing(seed: int) -> None:
    """Behaviour 161."""
    chance, model = random.Random(seed), Model()

    harness = partial(OperatorHarness, key=lambda c: c.key, key_type="STRING", policy=TINY)
    one, now_ms = Restarting(Timing, harness, chance), 0
    for _ in range(60):
        commands = [
            Command(chance.choice("abcd"), "register", chance.choice((EVENT, PROCESSING)), now_ms + at)
            for at in chance.sample(range(1, 30), 4)
        ]
        now_ms += chance.randrange(1, 9)
        step: Any = chance.choice((commands, (EVENT, now_ms), (PROCESSING, now_ms)))
        one.do(partial(do, step=step))
        expected = model.advance(*step) if isinstance(step, tuple) else []
        for command in step if isinstance(step, list) else ():
            model.command(command)
        assert in_order(one.harness.take().rows) == expected
    assert one.crashes > 5


def do(harness: OperatorHarness, step: Any) -> None:
    """Push commands as one micro-batch, or let a clock advance."""
    if isinstance(step, list):
        harness.push_all([(command, None) for command in step])
    else:
        (harness.watermark if step[0] is EVENT else harness.processing_time)(step[1])
