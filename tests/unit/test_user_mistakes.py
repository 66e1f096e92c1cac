"""Mistakes in functions and triggers are errors that say what to do, not bare ones of Python's."""

from __future__ import annotations

from typing import Any

import pytest

from flinkish_spark import (
    KeyedProcessFunction,
    MapStateDescriptor,
    ValueStateDescriptor,
    VectorizedProcessFunction,
)
from flinkish_spark.operators.keyed_context import StateNotDeclared, StateRedeclared
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.windows import (
    EventTimeSessionWindows,
    EventTimeTrigger,
    ProcessWindowFunction,
    PurgingTrigger,
    Trigger,
    TriggerResult,
    TumblingEventTimeWindows,
)

ORDERS = "user STRING, amount LONG"
KNOWN, OTHER = ValueStateDescriptor("known", "LONG"), MapStateDescriptor("other", "STRING", "LONG")


class Asking(KeyedProcessFunction):
    """Keeps what `open` was given, and asks it for a state at each element."""

    def __init__(self, ask: Any) -> None:
        self.ask = ask

    def open(self, context: Any) -> None:
        self.context = context
        context.get_state(KNOWN)

    def process_element(self, value: Any, ctx: Any) -> Any:
        self.ask(self.context)
        yield (1,)


class AskingByBatch(VectorizedProcessFunction):
    def __init__(self, ask: Any) -> None:
        self.ask = ask

    def open(self, context: Any) -> None:
        self.context = context
        context.get_state(KNOWN)

    def process_batch(self, batch: Any, ctx: Any) -> Any:
        self.ask(self.context, ctx)
        return []


def asked(function: Any) -> ProgramHarness:
    harness = ProgramHarness.of(function, ORDERS, key="user", output="n LONG", uid="asks")
    harness.push(("ann", 1))
    return harness


@pytest.mark.parametrize(
    "function",
    [
        Asking(lambda context: context.get_map_state(OTHER)),
        AskingByBatch(lambda context, ctx: context.get_map_state(OTHER)),
        AskingByBatch(lambda context, ctx: ctx.state("other")),
    ],
)
def test_a_state_that_open_has_not_asked_for_is_refused_by_name(function: Any) -> None:
    with pytest.raises(
        StateNotDeclared, match=r"'asks' uses the state 'other', for .* states are asked for in open\(\)"
    ):
        asked(function)


def test_a_state_that_open_has_asked_for_may_be_asked_for_again() -> None:
    harness = asked(Asking(lambda context: context.get_state(KNOWN).update(3)))
    assert harness.entries("known") == {"ann": 3}
    with pytest.raises(StateRedeclared, match="declares the state 'known' as"):
        asked(Asking(lambda context: context.get_state(ValueStateDescriptor("known", "STRING"))))


def test_a_state_is_given_up_in_open_only() -> None:
    with pytest.raises(ValueError, match=r"drops the state 'old' too late: call it in open\(\)"):
        asked(Asking(lambda context: context.drop_state("old")))


class Silent(Trigger):
    """Returns nothing in one of its methods."""

    def __init__(self, silent_in: str, said: object = None) -> None:
        self.silent_in, self.said = silent_in, said

    def _said(self, method: str, otherwise: Any) -> Any:
        return self.said if method == self.silent_in else otherwise

    def on_element(self, value, timestamp_ms, window, ctx):
        ctx.register_event_time_timer(window.max_timestamp_ms)
        ctx.register_processing_time_timer(50)
        return self._said("on_element", TriggerResult.CONTINUE)

    def on_event_time(self, time_ms, window, ctx):
        return self._said("on_event_time", TriggerResult.FIRE)

    def on_processing_time(self, time_ms, window, ctx):
        return self._said("on_processing_time", TriggerResult.CONTINUE)

    def can_merge(self):
        return True

    def on_merge(self, window, ctx):
        pass

    def clear(self, window, ctx):
        pass


@pytest.mark.parametrize("method", ["on_element", "on_event_time", "on_processing_time"])
@pytest.mark.parametrize("windows", [TumblingEventTimeWindows(10), EventTimeSessionWindows(10)])
@pytest.mark.parametrize("wrap", [lambda one: one, PurgingTrigger])
@pytest.mark.parametrize("said", [None, True])
def test_a_trigger_that_returns_no_result_is_named(method: str, windows: Any, wrap: Any, said: Any) -> None:
    def program(orders: Any) -> Any:
        own = wrap(Silent(method, said))
        return (
            orders.key_by("user")
            .window(windows)
            .trigger(own)
            .reduce(lambda first, second: first, uid="first")
        )

    harness = ProgramHarness(program, ORDERS)
    with pytest.raises(
        TypeError, match=f"the trigger Silent has returned {said}; .* must return TriggerResult.CONTINUE, "
    ):
        harness.push(("ann", 1), 1)
        harness.processing_time(60)
        harness.watermark(100)


def test_window_functions_with_states_of_their_own_go_on() -> None:
    class Counted(ProcessWindowFunction):
        """Asks for its states at each window: those that `open` has asked for."""

        def open(self, context: Any) -> None:
            context.get_state(KNOWN)
            context.window_state.get_map_state(OTHER)

        def process(self, key, context, elements):
            known = context.global_state.get_state(KNOWN)
            known.update((known.value() or 0) + 1)
            fired = context.window_state.get_map_state(OTHER)
            fired["n"] = fired.get("n", 0) + 1
            yield key, known.value(), fired["n"]

        def clear(self, context):
            context.window_state.get_map_state(OTHER).clear()

    def program(orders: Any) -> Any:
        windows = orders.key_by("user").window(TumblingEventTimeWindows(10)).trigger(EventTimeTrigger())
        return windows.process(Counted(), output="user STRING, known LONG, n LONG", uid="counted")

    harness = ProgramHarness(program, ORDERS)
    for time_ms in (1, 11):
        harness.push(("ann", 1), time_ms)
        harness.watermark(time_ms + 8)
    assert [tuple(row) for row in harness.take().rows] == [("ann", 1, 1), ("ann", 2, 1)]
