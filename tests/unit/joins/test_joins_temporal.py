"""Temporal joins beside a model that keeps all versions for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.core.elements import LATE_RECORDS_DROPPED, MAX_WATERMARK_MS, MIN_WATERMARK_MS, OutputTag
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.joins import JoinType, ProcessJoinFunction, TemporalJoin
from flinkish_spark.operators.joins import TemporalJoinOperator
from flinkish_spark.operators.process import ElementError
from flinkish_spark.state import StateTtl
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.windows import TumblingEventTimeWindows
from tests.support.effort import examples, seeds
from tests.support.joins_support import END, LEFT, RIGHT, apply, element, harness, script

LATE = OutputTag("late", LEFT)


def is_deletion(right) -> bool:
    return right[1] % 5 == 0


def join_of(kind=JoinType.INNER, **given) -> TemporalJoin:
    return TemporalJoin(LEFT, RIGHT, kind, is_deletion=is_deletion, late_output=LATE, **given)


class Model:
    """All versions for ever; knows nothing that is late."""

    def __init__(self, kind) -> None:
        self.kind, self.watermark_ms = kind, MIN_WATERMARK_MS
        self.waiting, self.versions = [], {}

    def step(self, step):
        what, argument = step
        rows = []
        if what == "watermark":
            self.watermark_ms = max(self.watermark_ms, argument)
            for value, time_ms in self.waiting:
                rows += self.joined(value, time_ms) if time_ms <= self.watermark_ms else []
            self.waiting = [one for one in self.waiting if one[1] > self.watermark_ms]
        elif what == 0:
            self.waiting += argument
        else:
            for value, time_ms in argument:
                self.versions.setdefault(value[0], {})[time_ms] = value
        return sorted(rows, key=repr)

    def joined(self, value, time_ms):
        versions = self.versions.get(value[0], {})
        valid = max((at for at in versions if at <= time_ms), default=None)
        if valid is None or is_deletion(versions[valid]):
            return [((*value, None, None, None), time_ms)] if self.kind is JoinType.LEFT else []
        return [((*value, *versions[valid]), time_ms)]


def check(kind, steps) -> None:
    operator = lambda: TemporalJoinOperator(join_of(kind))  # noqa: E731
    model, plain, restored = Model(kind), harness(operator()), harness(operator())
    for step in [*steps, *END]:
        expected = model.step(step)
        for one in (plain, restored):
            apply(one, step)
            output = one.take()
            rows = sorted(zip(map(tuple, output.rows), output.times_ms, strict=True), key=repr)
            assert (rows, output.side) == (expected, {}), step
        restored = harness(operator(), restore=restored.snapshot(), bases=restored.bases)
    assert plain.entries("join/left") == {}
    assert plain.timer_count() == restored.timer_count() == 0
    newest = {key: [versions[max(versions)]] for key, versions in model.versions.items()}
    kept = {key: [entry[:3] for entry in one] for key, one in plain.entries("join/right").items()}
    assert kept == newest


@pytest.mark.parametrize("kind", [JoinType.INNER, JoinType.LEFT])
@pytest.mark.parametrize("seed", seeds(4))
def test_each_left_element_gets_the_version_of_its_time_with_a_restore_after_every_step(seed, kind) -> None:
    steps = [
        step if step[0] == "watermark" else (step[0], in_time(step[1]))
        for step in script(seed, examples(30, least=15))
    ]
    check(kind, steps)


def in_time(elements):
    """Return what comes as it is; what is late is the other tests' concern."""
    return [(value, time_ms + 7) for value, time_ms in elements]


ELEMENTS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 20)), min_size=1, max_size=3
)


@st.composite
def in_time_steps(draw):
    """Draw steps of which nothing is late."""
    steps, watermark_ms = [], -1
    for what in draw(st.lists(st.sampled_from(("watermark", 0, 1)), max_size=14)):
        if what == "watermark":
            watermark_ms += draw(st.integers(1, 6))
            steps.append((what, watermark_ms))
        else:
            some = draw(ELEMENTS)
            steps.append((what, [(element(what, k, n), watermark_ms + 1 + t) for k, n, t in some]))
    return steps


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from([JoinType.INNER, JoinType.LEFT]), in_time_steps())
def test_any_elements_in_time_do_what_the_model_says(kind, steps) -> None:
    check(kind, steps)


def rate(one, number, time_ms):
    one.push(("a", number, f"o{number}"), time_ms, source=1)


def taken(one):
    output = one.take()
    return [row[1:4:2] for row in output.rows], output.side.get("late", []), output.counts


def test_a_late_left_element_is_joined_as_long_as_its_version_is_known() -> None:
    one = harness(TemporalJoinOperator(join_of(JoinType.LEFT)))
    one.push(("b", 1), 3)
    rate(one, 1, 5)
    rate(one, 2, 10)
    one.watermark(12)
    assert taken(one)[0] == [(1, None)]
    for number, time_ms in ((1, 9), (2, 10), (3, 12)):
        one.push(("a", number), time_ms)
    assert taken(one) == ([(2, 2), (3, 2)], [("a", 1)], {})
    one.push(("b", 2), 4)
    assert taken(one) == ([(2, None)], [], {})


def test_a_late_version_counts_if_somebody_may_still_ask_for_it() -> None:
    one = harness(TemporalJoinOperator(join_of()))
    rate(one, 1, 4)
    rate(one, 2, 5)
    one.push(("a", 1), 14)
    one.watermark(12)
    rate(one, 3, 3)
    rate(one, 4, 11)
    one = harness(TemporalJoinOperator(join_of()), restore=one.snapshot(), bases=one.bases)
    one.push(("a", 2), 20)
    one.watermark(20)
    assert taken(one)[0] == [(1, 4), (2, 4)]
    assert [entry[1] for entry in one.entries("join/right")["a"]] == [4]


def test_the_last_of_two_versions_of_one_time_counts() -> None:
    one = harness(TemporalJoinOperator(join_of()))
    for number in (1, 2, 3):
        rate(one, number, 4)
    one.push(("a", 9), 4)
    one.watermark(4)
    rate(one, 4, 4)
    one.push(("a", 8), 4)
    one.push(("a", 7), 3)
    assert taken(one) == ([(9, 3), (8, 4)], [], {})
    assert len(one.entries("join/right")["a"]) == 1


def test_a_version_that_is_replaced_still_says_that_older_ones_are_forgotten() -> None:
    one = harness(TemporalJoinOperator(join_of(JoinType.LEFT)))
    rate(one, 1, 4)
    rate(one, 2, 5)
    one.watermark(6)
    rate(one, 3, 5)
    one.push(("a", 1), 4)
    one.push(("a", 2), 5)
    assert taken(one) == ([(2, 3)], [("a", 1)], {})


def test_without_a_tag_late_elements_are_counted() -> None:
    one = harness(TemporalJoinOperator(TemporalJoin(LEFT, RIGHT)))
    rate(one, 1, 4)
    rate(one, 2, 5)
    one.watermark(6)
    one.push(("a", 1), 4)
    assert one.take().counts == {LATE_RECORDS_DROPPED: 1}


def test_versions_expire_when_none_came_for_their_time_to_live() -> None:
    def make(**given):
        return harness(TemporalJoinOperator(join_of(JoinType.LEFT, version_ttl=StateTtl(100))), **given)

    one = make()
    rate(one, 1, 4)
    rate(one, 2, 20)
    one.push(("a", 1), 30)
    one.processing_time(99)
    one = make(restore=one.snapshot(), bases=one.bases)
    one.push(("a", 2), 7)
    one.watermark(7)
    assert taken(one)[0] == [(2, 1)]
    one.processing_time(200)
    one.push(("a", 3), 25)
    one.watermark(MAX_WATERMARK_MS)
    assert taken(one)[0] == [(3, None), (1, None)]
    assert (one.entries("join/left"), one.timer_count()) == ({}, 0)


def test_forgetting_old_versions_does_not_let_the_others_live_longer() -> None:
    def make(**given):
        return harness(TemporalJoinOperator(join_of(JoinType.LEFT, version_ttl=StateTtl(100))), **given)

    one = make()
    rate(one, 1, 4)
    rate(one, 2, 20)
    one.processing_time(60)
    rate(one, 3, 30)
    one.processing_time(90)
    one.watermark(25)
    one = make(restore=one.snapshot(), bases=one.bases)
    assert [entry[1] for entry in one.entries("join/right")["a"]] == [2, 3]
    # All versions of a key live for as long as the last one that came.
    for now_ms, valid in ((159, 2), (160, None)):
        one.processing_time(now_ms)
        one.push(("a", now_ms), 25)
        assert taken(one)[0] == [(now_ms, valid)]


def test_a_function_gets_the_times_of_both() -> None:
    class Times(ProcessJoinFunction):
        def process_element(self, left, right, ctx):
            yield left.n, right and right.m, ctx.left_timestamp(), ctx.right_timestamp(), ctx.timestamp()

    one = harness(TemporalJoinOperator(join_of(JoinType.LEFT, function=Times())))
    one.push(("a", 1), 3)
    one.push(("a", 2), 5)
    rate(one, 7, 4)
    one.watermark(MAX_WATERMARK_MS)
    assert one.take().rows == [(1, None, 3, None, 3), (2, 7, 5, 4, 5)]


def test_elements_need_a_time() -> None:
    with pytest.raises(ElementError, match="temporal join needs elements with a timestamp"):
        harness(TemporalJoinOperator(join_of())).push(("a", 1, ""), source=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"join_type": JoinType.FULL}, "cannot be a FULL join"),
        ({"join_type": "LEFT"}, "JoinType.LEFT"),
        ({"is_deletion": 3}, "is_deletion is 3"),
        ({"version_ttl": 1_000}, "give a StateTtl"),
        ({"late_output": "late"}, "give an OutputTag"),
        ({"left_type": ""}, "left_type is ''"),
    ],
)
def test_a_join_that_cannot_be_is_refused_where_it_is_said(wrong, message) -> None:
    with pytest.raises(ConfigError, match=message):
        TemporalJoin(**({"left_type": LEFT, "right_type": RIGHT} | wrong))


@pytest.mark.parametrize("kind", ["interval", "temporal", "window"])
def test_null_is_a_key_whose_elements_meet(kind: str) -> None:
    """As in PyFlink, and not in SQL; `docs/joins.md` says how to leave them out."""

    def program(orders, rates):
        both = orders.key_by("user").join(rates.key_by("user"))
        if kind == "interval":
            return both.interval(lower_ms=-5, upper_ms=5, uid="op")
        if kind == "temporal":
            return both.temporal(uid="op")
        return both.window(TumblingEventTimeWindows(10), uid="op")

    run = ProgramHarness(program, "user STRING, amount LONG", "user STRING, rate LONG")
    run.micro_batch([((None, 5), 3), (("ann", 7), 3)], [((None, 3), 1), (("ann", 4), 1)])
    run.end_of_input()
    assert sorted(map(tuple, run.take().rows), key=str) == [("ann", 7, "ann", 4), (None, 5, None, 3)]
