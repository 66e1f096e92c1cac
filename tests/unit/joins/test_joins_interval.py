"""Interval joins beside a model that goes through all pairs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.core.elements import LATE_RECORDS_DROPPED, MAX_WATERMARK_MS, MIN_WATERMARK_MS, OutputTag
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.joins import Bound, IntervalJoin, JoinType, ProcessJoinFunction
from flinkish_spark.operators.joins import IntervalJoinOperator
from flinkish_spark.operators.process import ElementError
from flinkish_spark.state import ValueStateDescriptor
from flinkish_spark.types.rows import ElementType
from tests.support.effort import examples
from tests.support.joins_support import END, LEFT, RIGHT, apply, element, harness, script
from tests.support.operator_harness import OperatorHarness

LATE = OutputTag("late left", LEFT), OutputTag("late right", RIGHT)
BOUNDS = [
    (-3, 3, Bound.INCLUSIVE, Bound.INCLUSIVE),
    (-3, 3, Bound.EXCLUSIVE, Bound.EXCLUSIVE),
    (0, 0, Bound.INCLUSIVE, Bound.INCLUSIVE),
    (2, 5, Bound.INCLUSIVE, Bound.EXCLUSIVE),
    (-6, -2, Bound.EXCLUSIVE, Bound.INCLUSIVE),
]


def join_of(bounds=BOUNDS[0], kind=JoinType.INNER, function=None, late=LATE) -> IntervalJoin:
    lower_ms, upper_ms, lower, upper = bounds
    return IntervalJoin(LEFT, RIGHT, lower_ms, upper_ms, lower, upper, kind, function, *late)


class Model:
    """All elements for ever; a pair comes out when its second element comes."""

    def __init__(self, join: IntervalJoin) -> None:
        self.join, self.watermark_ms = join, MIN_WATERMARK_MS
        self.items: list[dict] = []

    def is_pair(self, left, right) -> bool:
        distance = right["time"] - left["time"]
        lower, upper = self.join.lower_ms, self.join.upper_ms
        is_above = distance > lower if self.join.lower is Bound.EXCLUSIVE else distance >= lower
        is_below = distance < upper if self.join.upper is Bound.EXCLUSIVE else distance <= upper
        return left["value"][0] == right["value"][0] and is_above and is_below

    def last_ms(self, item) -> int:
        """Return the greatest time that a partner may have, or the item's own."""
        reach = self.join.greatest_ms if item["source"] == 0 else -self.join.least_ms
        return item["time"] + max(reach, 0)

    def step(self, step):
        what, argument = step
        rows, late = [], ([], [])
        if what == "watermark":
            self.watermark_ms = max(self.watermark_ms, argument)
            for item in self.items:
                if not item["gone"] and self.last_ms(item) < self.watermark_ms:
                    item["gone"] = True
                    if not item["joined"] and (
                        self.join.join_type.keeps_left
                        if item["source"] == 0
                        else self.join.join_type.keeps_right
                    ):
                        row = (
                            (*item["value"], *[None] * 3)
                            if item["source"] == 0
                            else (None, None, *item["value"])
                        )
                        rows.append((row, self.last_ms(item) + 1))
        else:
            for value, time_ms in argument:
                if time_ms < self.watermark_ms:
                    late[what].append(value)
                    continue
                item = {"source": what, "value": value, "time": time_ms, "joined": False, "gone": False}
                for other in self.items:
                    if other["source"] == what:
                        continue
                    left, right = (item, other) if what == 0 else (other, item)
                    if self.is_pair(left, right):
                        item["joined"] = other["joined"] = True
                        rows.append(((*left["value"], *right["value"]), max(left["time"], right["time"])))
                self.items.append(item)
        return sorted(rows, key=repr), (sorted(late[0]), sorted(late[1]))

    def waiting(self, source):
        found = {}
        for item in self.items:
            if item["source"] == source and not item["gone"]:
                found.setdefault(item["value"][0], []).append((*item["value"], item["time"]))
        return {key: sorted(entries) for key, entries in found.items()}


def check(join, steps) -> None:
    model = Model(join)
    plain, restored = harness(IntervalJoinOperator(join)), harness(IntervalJoinOperator(join))
    for step in [*steps, *END]:
        expected, late = model.step(step)
        for one in (plain, restored):
            apply(one, step)
            output = one.take()
            assert sorted(zip(map(tuple, output.rows), output.times_ms, strict=True), key=repr) == expected, (
                step
            )
            assert tuple(sorted(output.side.get(tag.name, [])) for tag in LATE) == late
        restored = harness(IntervalJoinOperator(join), restore=restored.snapshot(), bases=restored.bases)
        for source, name in enumerate(("join/left", "join/right")):
            has_facts = len(RIGHT.split(",")) + 1 if source else len(LEFT.split(",")) + 1
            kept = {
                key: sorted((*entry[: has_facts - 1], entry[-1]) for entry in entries)
                for key, entries in restored.entries(name).items()
            }
            assert kept == model.waiting(source)
        keys = set(model.waiting(0)) | set(model.waiting(1))
        assert restored.timer_count() == plain.timer_count() == len(keys)
    assert plain.timer_count() == 0


@pytest.mark.parametrize("kind", JoinType)
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_a_join_does_what_the_model_says_with_a_restore_after_every_step(bounds, kind) -> None:
    check(join_of(bounds, kind), script(seed=BOUNDS.index(bounds), length=examples(20, least=8)))


ELEMENTS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 20)), min_size=1, max_size=3
)
STEPS = st.one_of(
    ELEMENTS.map(lambda some: (0, [(element(0, k, n), t) for k, n, t in some])),
    ELEMENTS.map(lambda some: (1, [(element(1, k, n), t) for k, n, t in some])),
    st.integers(0, 25).map(lambda time_ms: ("watermark", time_ms)),
)


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from(BOUNDS), st.sampled_from(JoinType), st.lists(STEPS, max_size=12))
def test_any_elements_and_watermarks_do_what_the_model_says(bounds, kind, steps) -> None:
    check(join_of(bounds, kind), steps)


def test_partners_come_by_time_and_at_one_time_in_the_order_of_their_coming() -> None:
    one = harness(IntervalJoinOperator(join_of()))
    for number, time_ms in ((1, 6), (2, 4), (3, 5), (4, 4)):
        one.push(("a", number), time_ms)
    one.push(("a", 9, "x"), 5, source=1)
    output = one.take()
    assert [row[1] for row in output.rows] == [2, 4, 3, 1]
    assert output.times_ms == [5, 5, 5, 6]


def test_late_elements_without_a_side_output_are_counted() -> None:
    one = harness(IntervalJoinOperator(join_of(late=(None, None))))
    one.watermark(10)
    one.push(("a", 1), 9)
    one.push(("a", 1, ""), 9, source=1)
    one.push(("a", 1), 10)
    assert one.take().counts == {LATE_RECORDS_DROPPED: 2}
    assert one.entries("join/left") == {"a": [("a", 1, 10)]}


def test_an_element_at_the_watermark_meets_all_its_partners() -> None:
    """What is not late is joined with everything that was not late; Flink may have removed it by then."""
    one = harness(IntervalJoinOperator(join_of(BOUNDS[2])))
    one.push(("a", 1), 10)
    one.watermark(10)
    one.push(("a", 2, "x"), 10, source=1)
    assert [row[1] for row in one.take().rows] == [1]
    one.watermark(11)
    assert (one.entries("join/left"), one.entries("join/right"), one.timer_count()) == ({}, {}, 0)


class Difference(ProcessJoinFunction):
    SIDE = OutputTag("far", "k STRING, far LONG")

    def open(self, context):
        self.pairs = context.get_state(ValueStateDescriptor("pairs", "LONG", default=0))

    def process_element(self, left, right, ctx):
        self.pairs.update(self.pairs.value() + 1)
        if left is None or right is None:
            yield None, ctx.left_timestamp(), ctx.right_timestamp(), ctx.timestamp()
            return
        difference = right.m - left.n
        if abs(ctx.right_timestamp() - ctx.left_timestamp()) > 2:
            ctx.output(self.SIDE, (left.k, difference))
        else:
            yield difference, ctx.left_timestamp(), ctx.right_timestamp(), ctx.timestamp()


def test_a_function_sees_names_times_and_state_and_has_side_outputs() -> None:
    one = harness(IntervalJoinOperator(join_of(kind=JoinType.FULL, function=Difference())))
    one.push(("a", 1), 10)
    one = harness(
        IntervalJoinOperator(join_of(kind=JoinType.FULL, function=Difference())),
        restore=one.snapshot(),
        bases=one.bases,
    )
    named = ElementType(RIGHT).naming()
    one.push(named(("a", 5, "")), 8, source=1)
    one.push(named(("a", 7, "")), 13, source=1)
    output = one.take()
    assert (output.rows, output.times_ms) == ([(4, 10, 8, 10)], [10])
    assert one.entries("pairs") == {"a": 2}
    assert output.side == {"far": [("a", 6)]}
    one.push(("b", 5, ""), 20, source=1)
    one.watermark(MAX_WATERMARK_MS)
    output = one.take()
    assert (output.rows, output.times_ms) == ([(None, None, 20, 24)], [24])


def test_elements_of_one_type_are_joined_as_they_are() -> None:
    join = IntervalJoin("STRING", "DOUBLE", -1, 1, join_type=JoinType.RIGHT)
    one = OperatorHarness(IntervalJoinOperator(join), key=lambda value: "k", key_type="STRING")
    one.push("x", 5)
    one.push(2.5, 5, source=1)
    one.push(3.5, 9, source=1)
    one.watermark(MAX_WATERMARK_MS)
    assert one.take().rows == [("x", 2.5), (None, 3.5)]


def test_elements_that_wait_may_get_a_field() -> None:
    one = harness(IntervalJoinOperator(join_of()))
    one.push(("a", 1), 10)
    wider = IntervalJoin("k STRING, note STRING, n LONG", RIGHT, -3, 3)
    one = harness(IntervalJoinOperator(wider), restore=one.snapshot(), bases=one.bases)
    one.push(("a", "new", 2), 10)
    one.push(("a", 5, "x"), 10, source=1)
    assert one.take().rows == [("a", None, 1, "a", 5, "x"), ("a", "new", 2, "a", 5, "x")]


def test_a_join_that_becomes_an_outer_one_begins_with_the_elements_that_come_then() -> None:
    one = harness(IntervalJoinOperator(join_of()))
    one.push(("a", 1), 10)
    one.push(("a", 5, "x"), 10, source=1)
    one.push(("a", 2), 20)
    assert one.take().rows == [("a", 1, "a", 5, "x")]
    outer = IntervalJoinOperator(join_of(kind=JoinType.FULL))
    one = harness(outer, restore=one.snapshot(), bases=one.bases)
    # Whether those from before had a partner is not known of them; of those that come now it is.
    one.push(("a", 6, "y"), 22, source=1)
    one.push(("a", 3), 30)
    one.push(("a", 7, "z"), 40, source=1)
    one.watermark(MAX_WATERMARK_MS)
    expected = [("a", 2, "a", 6, "y"), ("a", 3, None, None, None), (None, None, "a", 7, "z")]
    assert one.take().rows == expected


def test_elements_need_a_time() -> None:
    one = harness(IntervalJoinOperator(join_of()))
    with pytest.raises(ElementError, match="interval join needs elements with a timestamp") as caught:
        one.push(("a", 1))
    assert isinstance(caught.value.error, ValueError)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lower_ms": 5}, "the interval from 5 to 3 ms is empty"),
        ({"lower_ms": 2, "lower": Bound.EXCLUSIVE, "upper": Bound.EXCLUSIVE}, "is empty"),
        ({"upper_ms": "3"}, "upper_ms is '3'"),
        ({"lower": "INCLUSIVE"}, "must be one of Bound.INCLUSIVE, Bound.EXCLUSIVE"),
        ({"join_type": True}, "JoinType.INNER"),
        ({"function": Difference}, "function is"),
        ({"left_late": "late"}, "give an OutputTag"),
        ({"left_type": "no type"}, "left_type is 'no type'"),
        ({"right_type": None}, "write the type as DDL"),
    ],
)
def test_a_join_that_cannot_be_is_refused_where_it_is_said(wrong, message) -> None:
    with pytest.raises(ConfigError, match=message):
        IntervalJoin(**({"left_type": LEFT, "right_type": RIGHT, "lower_ms": 0, "upper_ms": 3} | wrong))
