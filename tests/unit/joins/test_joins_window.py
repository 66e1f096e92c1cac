"""Joins and co-groups within windows, beside the model of windows: even numbers are left, odd ones right."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from flinkish_spark.core.elements import LATE_RECORDS_DROPPED, MAX_WATERMARK_MS, OutputTag
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.joins import (
    CoGroupFunction,
    JoinType,
    ProcessJoinFunction,
    Side,
    WindowCoGroup,
    WindowJoin,
)
from flinkish_spark.operators.joins import WindowCoGroupOperator
from flinkish_spark.state import ValueStateDescriptor
from flinkish_spark.windows import (
    DeltaEvictor,
    DynamicEventTimeSessionWindows,
    EventTimeSessionWindows,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    WindowSpec,
)
from tests.support.effort import examples
from tests.support.joins_support import LEFT, RIGHT, harness
from tests.support.windows_model import Model
from tests.support.windows_support import TABLE, TRIGGERS, Combination, left

LATE = OutputTag("late", LEFT), OutputTag("late too", RIGHT)


class Sides(CoGroupFunction):
    def co_group(self, key, context, lefts, rights):
        numbers = sorted(e.n for e in lefts), sorted(e.m for e in rights)
        assert all(e.o == f"o{e.m}" for e in rights)
        yield (key, *context.window, *map(tuple, numbers))


@dataclass(frozen=True)
class CoGrouped(Combination):
    def result(self, key, window, numbers):
        sides = (tuple(sorted(n for n in numbers if n % 2 == odd)) for odd in (0, 1))
        return (key, *window, *sides)

    def operator(self):
        spec = self.spec()
        spec = WindowSpec(spec.assigner, spec.trigger, spec.evictor, spec.allowed_lateness_ms)
        return WindowCoGroupOperator(WindowCoGroup(LEFT, RIGHT, spec, Sides(), *LATE))


CO_GROUPS = [
    CoGrouped(one.kind, one.trigger, one.clock, one.lateness_ms, one.is_discarding, "process", one.evicts)
    for one in TABLE
    if one.computation == "process" and one.kind != "dynamic session"
    # An own trigger has to know of sides, and joins have no retractions.
    if one.trigger in TRIGGERS and not one.retracts
]


def script(seed, length):
    chance, steps, now_ms = random.Random(seed), [], 0
    numbers = iter(range(1_000))
    for _ in range(length):
        now_ms += chance.choice((0, 1, 2, 9))
        what = chance.choice(("watermark", "time", "push", "push"))
        argument = now_ms
        if what == "push":
            argument = [(chance.choice("ab"), next(numbers), max(0, now_ms + chance.randrange(-15, 10)))]
        steps.append((what, argument))
    return [*steps, ("watermark", MAX_WATERMARK_MS), ("time", 1_000)]


def apply(one, step):
    what, argument = step
    if what == "watermark":
        one.watermark(argument)
    elif what == "time":
        one.processing_time(argument)
    else:
        for key, number, time_ms in argument:
            source = number % 2
            one.push((key, number, f"o{number}") if source else (key, number), time_ms, source)


def taken(one):
    output = one.take()
    rows = sorted(zip(map(tuple, output.rows), output.times_ms, strict=True), key=repr)
    late = [tuple(row)[:2] for tag in LATE for row in output.side.get(tag.name, [])]
    return rows, sorted(late)


@pytest.mark.parametrize("of", CO_GROUPS, ids=str)
def test_a_co_group_has_both_sides_of_each_window_with_a_restore_after_every_step(of) -> None:
    model, one = Model(of), harness(of.operator(), max_parallelism=1)
    for step in script(seed=5, length=examples(16, least=6)):
        rows, late = model.step(step)
        apply(one, step)
        assert taken(one) == (rows, sorted(late)), step
        one = harness(of.operator(), max_parallelism=1, restore=one.snapshot(), bases=one.bases)
    if of.has_end:
        assert (left(one), one.timer_count()) == ({}, 0)


@pytest.mark.parametrize("kind", JoinType)
@pytest.mark.parametrize(
    "assigner",
    [TumblingEventTimeWindows(10), SlidingEventTimeWindows(12, 5), EventTimeSessionWindows(4)],
    ids=lambda one: type(one).__name__,
)
def test_a_join_has_all_pairs_of_each_window_and_what_is_alone_if_asked(assigner, kind) -> None:
    spec = WindowSpec(assigner, allowed_lateness_ms=3)
    join = WindowCoGroupOperator(WindowJoin(LEFT, RIGHT, spec, kind, None, *LATE))
    groups = WindowCoGroupOperator(WindowCoGroup(LEFT, RIGHT, spec, Sides(), *LATE))
    pairs, whole = harness(join, max_parallelism=1), harness(groups, max_parallelism=1)
    kinds = set()
    for step in script(seed=3, length=60):
        apply(pairs, step)
        apply(whole, step)
        expected = []
        for (key, _, _, lefts, rights), time_ms in taken(whole)[0]:
            kinds.add((bool(lefts), bool(rights)))
            if not rights and kind.keeps_left:
                expected += [((key, n, None, None, None), time_ms) for n in lefts]
            elif not lefts and kind.keeps_right:
                expected += [((None, None, key, m, f"o{m}"), time_ms) for m in rights]
            expected += [((key, n, key, m, f"o{m}"), time_ms) for n, m in itertools.product(lefts, rights)]
        assert taken(pairs)[0] == sorted(expected, key=repr)
    assert kinds == {(True, True), (True, False), (False, True)}


def test_a_sessions_of_both_sides_are_one() -> None:
    spec = WindowSpec(EventTimeSessionWindows(5))
    one = harness(WindowCoGroupOperator(WindowCoGroup(LEFT, RIGHT, spec, Sides())))
    for number, time_ms in ((0, 3), (2, 12), (1, 8), (3, 30)):
        apply(one, ("push", [("a", number, time_ms)]))
    one.watermark(MAX_WATERMARK_MS)
    output = one.take()
    assert output.rows == [("a", 3, 17, (0, 2), (1,)), ("a", 30, 35, (), (3,))]
    assert output.times_ms == [16, 34]


def test_assigners_and_evictors_see_which_side_an_element_is_of() -> None:
    def gap_ms(element):
        return element.value.n if element.side is Side.LEFT else element.value.m

    spec = WindowSpec(
        DynamicEventTimeSessionWindows(gap_ms),
        evictor=DeltaEvictor(5, lambda a, b: abs(gap_ms(b) - gap_ms(a))),
    )
    one = harness(WindowCoGroupOperator(WindowCoGroup(LEFT, RIGHT, spec, Sides())))
    for number, time_ms in ((10, 0), (3, 9), (12, 11), (11, 12)):
        apply(one, ("push", [("a", number, time_ms)]))
        one = harness(
            WindowCoGroupOperator(WindowCoGroup(LEFT, RIGHT, spec, Sides())),
            restore=one.snapshot(),
            bases=one.bases,
        )
    one.watermark(MAX_WATERMARK_MS)
    assert one.take().rows == [("a", 0, 23, (10, 12), (11,))]


def test_a_side_without_a_tag_for_late_elements_counts_them() -> None:
    spec = WindowSpec(TumblingEventTimeWindows(10))
    one = harness(WindowCoGroupOperator(WindowJoin(LEFT, RIGHT, spec, right_late=LATE[1])))
    one.watermark(9)
    apply(one, ("push", [("a", 0, 9), ("a", 1, 8), ("a", 2, 10)]))
    output = one.take()
    assert output.counts == {LATE_RECORDS_DROPPED: 1}
    assert output.side == {LATE[1].name: [("a", 1, "o1")]}


class Rows(ProcessJoinFunction):
    SIDE = OutputTag("side", "n LONG")

    def open(self, context):
        self.pairs = context.get_state(ValueStateDescriptor("pairs", "LONG", default=0))

    def process_element(self, left, right, ctx):
        self.pairs.update(self.pairs.value() + 1)
        ctx.output(self.SIDE, (self.pairs.value(),))
        yield ctx.timestamp(), ctx.left_timestamp(), ctx.right_timestamp()


def test_a_function_of_pairs_has_state_of_the_key_and_side_outputs() -> None:
    spec = WindowSpec(TumblingEventTimeWindows(10))
    one = harness(WindowCoGroupOperator(WindowJoin(LEFT, RIGHT, spec, function=Rows())))
    apply(one, ("push", [("a", 0, 9), ("a", 1, 8), ("a", 2, 1)]))
    one.watermark(9)
    output = one.take()
    assert (output.rows, output.side) == ([(9, None, None)] * 2, {"side": [(1,), (2,)]})
    assert one.entries("pairs") == {"a": 2}


def test_elements_in_a_window_may_get_a_field_on_either_side() -> None:
    spec = WindowSpec(TumblingEventTimeWindows(10))
    one = harness(WindowCoGroupOperator(WindowJoin(LEFT, RIGHT, spec)))
    apply(one, ("push", [("a", 0, 1), ("a", 1, 2)]))
    wider = WindowJoin("k STRING, x LONG, n LONG", "note STRING, k STRING, m LONG, o STRING", spec)
    one = harness(WindowCoGroupOperator(wider), restore=one.snapshot(), bases=one.bases)
    one.push(("a", 7, 2), 3)
    one.watermark(9)
    assert one.take().rows == [("a", None, 0, None, "a", 1, "o1"), ("a", 7, 2, None, "a", 1, "o1")]


def test_fields_may_have_any_names() -> None:
    # They are names within another type, where those that are no plain words need quotes.
    left, right = "k STRING, `order id` LONG", "k STRING, `größe` STRUCT<`a``b`: INT>"
    join = WindowJoin(left, right, WindowSpec(TumblingEventTimeWindows(10)))
    one = harness(WindowCoGroupOperator(join))
    one.push(("a", 1), 1)
    one = harness(WindowCoGroupOperator(join), restore=one.snapshot(), bases=one.bases)
    one.push(("a", (2,)), 2, source=1)
    one.watermark(9)
    assert one.take().rows == [("a", 1, "a", {"a`b": 2})]


SPEC = WindowSpec(TumblingEventTimeWindows(10))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: WindowJoin(LEFT, RIGHT, WindowSpec(SPEC.assigner, late_output=LATE[0])),
            "left_late and right_late",
        ),
        (lambda: WindowJoin(LEFT, RIGHT, SPEC.assigner), "give a WindowSpec"),
        (lambda: WindowJoin(LEFT, RIGHT, SPEC, "LEFT"), "JoinType.LEFT"),
        (lambda: WindowJoin(LEFT, 3, SPEC), "right_type is 3"),
        (lambda: WindowCoGroup(LEFT, RIGHT, SPEC, Rows()), "give an object of a subclass of CoGroupFunction"),
    ],
)
def test_a_join_that_cannot_be_is_refused_where_it_is_said(make, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
