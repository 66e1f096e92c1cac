"""Functions without a key, and broadcast sides, behind a window: what they make of its results is on time."""

from __future__ import annotations

import pytest

from flinkish_spark import (
    BroadcastProcessFunction,
    KeyedBroadcastProcessFunction,
    MapStateDescriptor,
    OutputTag,
)
from flinkish_spark.core.elements import MIN_WATERMARK_MS
from flinkish_spark.functions.stream import CheckpointedProcessFunction
from flinkish_spark.operators.process import OperatorOutput
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.windows import TumblingEventTimeWindows

ORDERS = "user STRING, amount LONG"
RULES = MapStateDescriptor("rules", "STRING", "LONG")
SEEN = OutputTag("seen", "amount LONG, watermark LONG")


def passed_on(value, ctx):
    ctx.output(SEEN, (value.amount, ctx.current_watermark()))
    return [(value.user, value.amount)]


class Broadcast(BroadcastProcessFunction):
    def process_element(self, value, ctx):
        return passed_on(value, ctx)

    def process_broadcast_element(self, value, ctx):
        return ()


class FromBroadcast(BroadcastProcessFunction):
    def process_element(self, value, ctx):
        return ()

    def process_broadcast_element(self, value, ctx):
        return passed_on(value, ctx)


class FromKeyedBroadcast(KeyedBroadcastProcessFunction):
    def process_element(self, value, ctx):
        return ()

    def process_broadcast_element(self, value, ctx):
        return passed_on(value, ctx)


class Checkpointed(CheckpointedProcessFunction):
    def process_element(self, value, ctx):
        return passed_on(value, ctx)


def tens(orders):
    """Sums of ten milliseconds, beside the orders themselves."""
    sums = orders.key_by("user").window(TumblingEventTimeWindows(10)).sum("amount", uid="tens")
    return sums.map(lambda one: (one.user, one.amount), output=ORDERS)


def through_broadcast(orders, rules):
    return tens(orders).connect(rules.broadcast(RULES)).process(Broadcast(), output=ORDERS, uid="on")


def as_broadcast(orders, rules):
    both = rules.connect(tens(orders).broadcast(RULES))
    return both.process(FromBroadcast(), output=ORDERS, uid="on")


def as_keyed_broadcast(orders, rules):
    both = rules.key_by("user").connect(tens(orders).broadcast(RULES))
    return both.process(FromKeyedBroadcast(), output=ORDERS, uid="on")


def checkpointed(orders, rules):
    return tens(orders).process_with_state(Checkpointed(), output=ORDERS, uid="on")


WAYS = [through_broadcast, as_broadcast, as_keyed_broadcast, checkpointed]


@pytest.mark.parametrize("way", WAYS, ids=lambda one: one.__name__)
def test_the_results_of_a_window_come_into_the_next_one_in_the_same_micro_batch(way) -> None:
    """They were dropped there as late: whatever came out without a key came behind the watermark."""

    def program(orders, rules):
        on = way(orders, rules)
        return on.key_by("user").window(TumblingEventTimeWindows(20)).sum("amount", uid="twenties")

    run = ProgramHarness(program, ORDERS, ORDERS)
    run.push_all([(("ann", 1), 1), (("ann", 2), 11), (("ann", 4), 21)])
    run.watermark(19)
    output = run.take()
    assert [tuple(row)[:2] for row in output.rows] == [("ann", 3)] and not output.counts
    run.end_of_input()
    output = run.take()
    assert [tuple(row)[:2] for row in output.rows] == [("ann", 4)] and not output.counts


@pytest.mark.parametrize("way", WAYS, ids=lambda one: one.__name__)
def test_an_element_sees_the_watermark_of_its_side(way) -> None:
    run = ProgramHarness(way, ORDERS, ORDERS, side_outputs=[SEEN])
    run.push_all([(("ann", 1), 1), (("ann", 2), 11)])
    run.watermark(9)
    run.watermark(19)
    assert run.take().side["seen"] == [(1, MIN_WATERMARK_MS), (2, 9)]


def test_an_element_of_a_source_is_behind_the_watermark() -> None:
    def program(orders):
        return orders.process_with_state(Checkpointed(), output=ORDERS, uid="on")

    run = ProgramHarness(program, ORDERS, side_outputs=[SEEN])
    run.micro_batch([(("ann", 1), 1)], watermark_ms=9)
    assert run.take().side["seen"] == [(1, 9)]


def test_what_two_steps_emit_is_joined_on_each_side() -> None:
    first = OperatorOutput(["a", "b"], [1, 2], 1, {"x": [("c", 3)], "y": [("d", 4), ("e", 5)]}, {"y": 1})
    second = OperatorOutput(["f", "g"], [6, 7], 2, {"y": [("h", 8)], "z": [("i", 9)]}, {"y": 1, "z": 0})
    both = first.then(second)
    assert (both.rows, both.times_ms, both.before) == (["a", "f", "g", "b"], [1, 6, 7, 2], 3)
    assert both.side == {"x": [("c", 3)], "y": [("d", 4), ("h", 8), ("e", 5)], "z": [("i", 9)]}
    assert both.side_before == {"x": 0, "y": 2, "z": 0}
