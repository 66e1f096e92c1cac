"""A vectorised function whose earlier version had timers, and that has no `on_timers` any more."""

from __future__ import annotations

import pytest

from flinkish_spark import VectorizedProcessFunction
from flinkish_spark.core.elements import TimeDomain
from flinkish_spark.testing import ProgramHarness

INPUT = "user STRING, amount LONG"


class WithTimers(VectorizedProcessFunction):
    def process_batch(self, batch, ctx):
        ctx.register_event_time_timers(10)
        ctx.register_processing_time_timers(20)
        return ()

    def on_timers(self, domain, ctx):
        return ()


class WithoutTimers(VectorizedProcessFunction):
    def process_batch(self, batch, ctx):
        return ()


def run(function, restore=None) -> ProgramHarness:
    return ProgramHarness.of(function, INPUT, key="user", output="n LONG", uid="sums", restore=restore)


@pytest.mark.parametrize(
    "go_on", [lambda one: one.watermark(10), lambda one: one.processing_time(20)], ids=["event", "processing"]
)
def test_timers_that_nobody_handles_any_more_are_an_error_where_they_are_due(go_on) -> None:
    """As of a function that works element by element. They stayed, and called their key group for ever."""
    before = run(WithTimers())
    before.push(("ann", 1), 5)
    later = run(WithoutTimers(), before.snapshot())
    later.push(("ann", 2), 6)
    with pytest.raises(NotImplementedError, match="an earlier version of WithoutTimers registered"):
        go_on(later)


def test_a_function_that_has_it_again_is_rid_of_them() -> None:
    before = run(WithTimers())
    before.push(("ann", 1), 5)
    later = run(WithTimers(), before.snapshot())
    later.watermark(10)
    assert later.next_timer_ms(TimeDomain.EVENT_TIME) is None
    assert later.next_timer_ms(TimeDomain.PROCESSING_TIME) == 20


def test_what_a_function_over_columns_raises_in_a_harness_names_the_operator() -> None:
    """As docs/testing.md says of all functions; only those that work element by element had the note."""

    class Fails(WithTimers):
        def process_batch(self, batch, ctx):
            raise ArithmeticError

    with pytest.raises(ArithmeticError) as found:
        run(Fails()).push(("ann", 1), 5)
    assert found.value.__notes__ == ["in the operator 'sums'"]
