"""Window x trigger x clock x lateness x accumulation, beside a model that recomputes all by brute force."""

from __future__ import annotations

import itertools
import random
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.core.elements import MAX_WATERMARK_MS
from tests.support.effort import examples, sampled
from tests.support.stumbling import Restarting
from tests.support.windows_model import Model
from tests.support.windows_support import (
    KINDS,
    MORE_TRIGGERS,
    TABLE,
    TINY,
    TRIGGERS,
    Combination,
    Step,
    apply,
    left,
    taken,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "what-is-tested.md"
END: list[Step] = [("watermark", MAX_WATERMARK_MS), ("time", 1_000)]


def script(seed: int, length: int) -> list[Step]:
    """Return steps as a job has them: times that advance, elements that are early, late, too late."""
    chance, steps, now_ms = random.Random(seed), [], 0
    numbers = iter(range(1_000))
    for _ in range(length):
        now_ms += chance.choice((0, 1, 2, 9))
        match chance.randrange(4):
            case 0:
                steps.append(("watermark", now_ms))
            case 1:
                steps.append(("time", now_ms))
            case _:
                count = chance.randrange(1, 4)
                elements = [
                    (chance.choice("ab"), next(numbers), max(0, now_ms + chance.randrange(-15, 10)))
                    for _ in range(count)
                ]
                steps.append(("push", elements))
    return steps


def check(combination: Combination, steps: list[Step]) -> None:
    """Run a combination with and without a restore after every step, and the model."""
    model, plain = Model(combination), combination.run()
    restored = combination.run(policy=TINY)
    for at, step in enumerate([*steps, *END]):
        expected = model.step(step)
        apply(plain, step)
        apply(restored, step)
        assert taken(plain) == expected, step
        assert taken(restored) == expected, step
        restored = combination.run(policy=TINY, restore=restored.snapshot(), bases=restored.bases)
        if at % 4 == 0:
            assert left(restored) == left(plain)
            assert restored.timer_count() == plain.timer_count()
    if combination.has_end:
        assert (left(plain), plain.timer_count()) == ({}, 0)


def test_the_page_lists_the_table() -> None:
    clocks = (("event time", 0), ("event time", 7), ("processing time", 0))
    modes = {"both": (False, True), "discarding": (True,), "accumulating": (False,), "-": ()}
    listed: set[tuple[str, str, str, int, bool]] = set()
    text = PAGE.read_text(encoding="utf-8").partition("## Windows")[2]
    for line in text.splitlines():
        kinds, triggers, *cells = [cell.strip().split(", ") for cell in line.strip("|").split("|")] + [[""]]
        if not (set(kinds) <= set(KINDS) and set(triggers) <= {*TRIGGERS, *MORE_TRIGGERS}):
            continue
        for (clock, lateness_ms), (cell,) in zip(clocks, cells, strict=False):
            found = set(itertools.product(kinds, triggers, [clock], [lateness_ms], modes[cell]))
            assert not listed & found
            listed |= found
    plain = [one for one in TABLE if (one.computation, one.evicts, one.retracts) == ("process", False, False)]
    assert listed == {(one.kind, one.trigger, one.clock, one.lateness_ms, one.is_discarding) for one in plain}
    assert f"{len(TABLE)} in all" in text


@pytest.mark.parametrize("combination", TABLE, ids=str)
def test_a_combination_does_what_the_model_says_with_a_restore_after_every_step(combination) -> None:
    check(combination, script(seed=7, length=examples(14, least=6)))


@pytest.mark.parametrize("combination", sampled(TABLE, one_in=4), ids=str)
def test_a_combination_survives_crashes_in_the_middle_of_steps(combination) -> None:
    """Behaviour 161, for timers of windows: in front of and behind elements and timers."""
    chance, model = random.Random(5), Model(combination)
    one = Restarting(combination.operator, partial(combination.run, policy=TINY), chance)
    for step in [*script(seed=8, length=examples(12, least=5)), *END]:
        expected = model.step(step)
        one.do(partial(apply, step=step))
        assert taken(one.harness) == expected, step
    if combination.has_end:
        assert (left(one.harness), one.harness.timer_count()) == ({}, 0)


ELEMENTS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 20), st.integers(0, 40)), min_size=1, max_size=4
)
STEPS = st.one_of(
    ELEMENTS.map(lambda elements: ("push", elements)),
    st.integers(0, 45).map(lambda time_ms: ("watermark", time_ms)),
    st.integers(0, 45).map(lambda time_ms: ("time", time_ms)),
)


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from(TABLE), st.lists(STEPS, max_size=12))
def test_any_combination_does_what_the_model_says_for_any_elements_and_watermarks(combination, steps) -> None:
    check(combination, steps)
