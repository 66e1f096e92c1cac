"""Patterns as values, the automaton as a table, and the matcher's state as a plain value."""

from __future__ import annotations

import pickle
import random

import pytest

from flinkish_spark.cep import AfterMatchSkip, IterativeCondition, Pattern, WithinType
from flinkish_spark.cep.compiler import compile_pattern
from flinkish_spark.cep.conditions import ColumnCondition
from flinkish_spark.cep.matcher import Matcher, MatchQueue, PartialMatch, begins
from flinkish_spark.core.errors import ConfigError, PatternError


def is_a(event: str) -> bool:
    return event == "a"


def is_b(event: str) -> bool:
    return event == "b"


class NotTwice(IterativeCondition):
    def filter(self, event, ctx):
        return event not in ctx.events_for("b")


def run(pattern: Pattern, events: str) -> list[dict[str, list[str]]]:
    matcher = Matcher(compile_pattern(pattern), pattern.skip)
    state = matcher.initial()
    return [match for time, event in enumerate(events) for match in matcher.process(state, event, time)]


def test_the_table_is_what_runs() -> None:
    pattern = Pattern.begin("a").where(is_a).followed_by("b").where(is_b).one_or_more().within(10)
    assert pattern.explain().splitlines() == [
        "state  kind    on an event  that is              to",
        "$end$  final",
        "b      normal  proceed      any                  $end$",
        "               take         b.where: is_b        b",
        "               ignore       not (b.where: is_b)  b:0",
        "b:0    normal  take         b.where: is_b        b",
        "               ignore       not (b.where: is_b)  b:0",
        "b:1    normal  take         b.where: is_b        b",
        "               ignore       not (b.where: is_b)  b:1",
        "a      start   take         a.where: is_a        b:1",
        "first to last: 10 ms",
    ]


def test_the_graph_has_every_state_and_transition() -> None:
    pattern = Pattern.begin("a").where('kind = "x"').next("b").optional()
    graph = pattern.to_dot()
    automaton = compile_pattern(pattern)
    assert graph.startswith("digraph pattern {") and graph.endswith("}")
    assert graph.count("shape=") == len(automaton.states)
    assert graph.count(" -> ") == sum(len(state.transitions) for state in automaton.states)
    assert r"kind = \"x\"" in graph


def test_a_pattern_is_a_value() -> None:
    first = Pattern.begin("a").where(is_a)
    second, third = first.next("b").where(is_b), first.one_or_more()
    assert first.names == ["a"] and second.names == ["a", "b"] and third.stages != first.stages
    assert run(first, "ab") == [{"a": ["a"]}]
    assert run(second, "ab") == [{"a": ["a"], "b": ["b"]}]


def test_a_pattern_travels() -> None:
    pattern = Pattern.begin("a").where(is_a).next("b").where(is_b).or_where(NotTwice()).one_or_more()
    automaton = pickle.loads(pickle.dumps(compile_pattern(pattern)))
    matcher = Matcher(automaton, pattern.skip)
    state = matcher.initial()
    assert [matcher.process(state, event, 0) for event in "abc"] == [
        [],
        [{"a": ["a"], "b": ["b"]}],
        [{"a": ["a"], "b": ["b", "c"]}],
    ]


def test_a_condition_of_one_event_is_asked_once_per_event() -> None:
    asked = []

    def is_any(event: str) -> bool:
        asked.append(event)
        return True

    pattern = Pattern.begin("a").where(is_any).followed_by_any("b").where(is_any)
    # Two conditions, though of one function: one for each name.
    run(pattern, "xyz")
    assert asked == ["x", "y", "y", "z", "z"]


def test_a_condition_of_columns_is_asked_of_what_is_known() -> None:
    pattern = Pattern.begin("a").where("value > 1")
    automaton = compile_pattern(pattern)
    (leaf,) = automaton.leaves
    assert isinstance(leaf, ColumnCondition) and leaf.text == "value > 1"
    matcher = Matcher(automaton, pattern.skip)
    state = matcher.initial()
    no, yes, unknown = (matcher.known[answer,] for answer in (False, True, None))
    assert matcher.process(state, 1, 0, no) == []
    assert matcher.process(state, 2, 0, yes) == [{"a": [2]}]
    # Where nothing is open an event of the first kind need not be tried.
    assert [one.may_begin for one in (no, yes, unknown)] == [False, True, True]
    with pytest.raises(PatternError, match="condition 'value > 1' was not evaluated"):
        matcher.process(state, 3, 0, unknown)
    with pytest.raises(PatternError, match="condition 'value > 1' was not evaluated"):
        matcher.process(state, 3, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Pattern.begin(""),
        lambda: Pattern.begin("a:b"),
        lambda: Pattern.begin("$end$"),
        lambda: Pattern.begin(5),
        lambda: Pattern.begin("a", skip="none"),
        lambda: Pattern.begin("a").where(None),
        lambda: Pattern.begin("a").where(lambda: True),
        lambda: Pattern.begin("a").where(lambda a, b, c: True),
        lambda: Pattern.begin("a").where(NotTwice),
        lambda: Pattern.begin("a").where(" "),
        lambda: Pattern.begin("a").subtype("str"),
        lambda: Pattern.begin("a").within(0),
        lambda: Pattern.begin("a").within(1.5),
        lambda: Pattern.begin("a").within(5, "first"),
        lambda: Pattern.begin("a").one_or_more(0),
        lambda: Pattern.begin("a").times(True),
        lambda: Pattern.begin("a").not_next(Pattern.begin("b")),
        lambda: AfterMatchSkip.past_last_event().raise_on_miss(),
        lambda: compile_pattern(Pattern.begin(Pattern.begin("a").optional()).one_or_more()),
        lambda: compile_pattern(Pattern.begin(Pattern.begin("a").optional()).not_next("b").next("c")),
        lambda: compile_pattern(Pattern.begin(Pattern.begin("a")).next(Pattern.begin("a"))),
        lambda: compile_pattern(
            Pattern.begin(
                Pattern.begin(Pattern.begin("a").not_followed_by("b").next("c").one_or_more().optional())
                .one_or_more()
                .optional()
            ).one_or_more()
        ),
    ],
)
def test_what_cannot_be_is_refused(wrong) -> None:
    with pytest.raises((ConfigError, PatternError), match="To do: "):
        wrong()


def test_a_window_between_events_has_its_own_time() -> None:
    pattern = Pattern.begin("a").followed_by("b").where(is_b).within(5, WithinType.PREVIOUS_AND_CURRENT)
    matcher = Matcher(compile_pattern(pattern), pattern.skip)
    state = matcher.initial()
    matcher.process(state, "a", 3)
    assert matcher.next_deadline_ms(state) == 8
    assert matcher.advance(state, 7) == ([], [])
    assert matcher.advance(state, 8) == ([], [({"a": ["a"]}, 8)])
    assert state.is_initial and matcher.next_deadline_ms(state) is None


def test_a_queue_hands_out_what_begins_first() -> None:
    pattern = Pattern.begin("a").followed_by_any("b")
    matcher = Matcher(compile_pattern(pattern), pattern.skip)
    state = matcher.initial()
    for time in (3, 5, 5, 8):
        matcher.process(state, "x", time)
    everything = list(state.partial)
    for seed in range(20):
        random.Random(seed).shuffle(everything)
        queue = MatchQueue()
        for one in everything:
            queue.add(one)
        queue.remove(lambda one: begins(one)[0] == 3)
        found = [queue.pop() for _ in range(len(queue))]
        assert [begins(one) for one in found] == sorted(begins(one) for one in found)
        assert len(found) == 4 and found[-1] == PartialMatch(compile_pattern(pattern).start, None)


X, Y = "x", "y"


@pytest.mark.parametrize(
    ("pattern", "is_so"),
    [
        (Pattern.begin("a").where(X).followed_by("b").where(Y), True),
        (Pattern.begin("a").where(X).followed_by_any("b").where(Y), True),
        (Pattern.begin("a").where(X).times(3).followed_by("b").where(Y), True),
        (Pattern.begin("a").where(X).not_followed_by("b").where(Y).followed_by("c").where(X), True),
        (Pattern.begin("a").where(X).not_followed_by("b").where(Y).within(5), True),
        (Pattern.begin("a").where(X).next("b").where(Y), False),
        (Pattern.begin("a").where(X).times(3).consecutive(), False),
        (Pattern.begin("a").where(X).not_next("b").where(Y).followed_by("c").where(X), False),
        (Pattern.begin("a").followed_by("b").where(Y), False),
        (
            Pattern.begin("a").where(X).followed_by("b").where(Y).one_or_more().followed_by("c").where(X),
            False,
        ),
        (Pattern.begin("a").where(X).followed_by("b").where(Y).optional().followed_by("c").where(X), False),
        (Pattern.begin("a").where(X).followed_by("b").where(NotTwice()), False),
    ],
)
def test_events_that_meet_no_condition_change_nothing(pattern: Pattern, is_so: bool) -> None:
    automaton = compile_pattern(pattern)
    assert automaton.passes_over_others is is_so
    if not is_so:
        return
    # And so it is, whatever stands before and behind such an event.
    _, *others = automaton.leaves
    for seed in range(50):
        chance = random.Random(seed)
        events = [chance.choice(["first", "other", ""]) for _ in range(12)]
        found = []
        for left_out in (False, True):
            matcher = Matcher(automaton, pattern.skip)
            state, own = matcher.initial(), []
            for time_ms, event in enumerate(events):
                if left_out and not event:
                    continue
                known = matcher.known[event == "first", *(event == "other" for _ in others)]
                complete, over = matcher.advance(state, time_ms)
                own += [*complete, *over]
                own += [(match, time_ms) for match in matcher.process(state, time_ms, time_ms, known)]
            complete, over = matcher.advance(state, 99)
            found.append([*own, *complete, *over])
        assert found[0] == found[1]
