"""Patterns in a keyed stream: the operator beside the bare matcher; time, state, limits, what is refused."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flinkish_spark import OutputTag, ValueStateDescriptor
from flinkish_spark.cep import (
    CEP,
    AfterMatchSkip,
    IterativeCondition,
    OpenMatches,
    Overflow,
    Pattern,
    PatternProcessFunction,
    WithinType,
)
from flinkish_spark.cep.columnar_runner import make_pattern_operator
from flinkish_spark.cep.compiler import compile_pattern
from flinkish_spark.cep.matcher import Matcher
from flinkish_spark.cep.pattern_operator import LookedFor, PatternSearch
from flinkish_spark.core.elements import MAX_WATERMARK_MS, TimeDomain
from flinkish_spark.core.errors import ConfigError, PatternError, SchemaError
from flinkish_spark.operators.process import TimerError
from flinkish_spark.state.evolution import StateMismatch
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.rows import ElementType
from flinkish_spark.worker.keyed_operator import make_runner
from flinkish_spark.worker.runners import RowShape
from tests.support.cep_cases import cases
from tests.support.effort import examples
from tests.support.flink_cep import Case, pattern_of, skip_of
from tests.support.operator_harness import (
    ColumnsHarness,
    MemoryBases,
    Snapshot,
    input_shape,
    whole_records,
)

EVENT = "key STRING, id LONG, name STRING, value LONG"
LATE = OutputTag("late", EVENT)
LOST = OutputTag("lost", "key STRING, taken STRING, at LONG")
OUTPUT = "key STRING, pattern STRING, taken STRING"


def ids(match: Any) -> str:
    return json.dumps({name: [event.id for event in events] for name, events in match.items()})


class Show(PatternProcessFunction):
    def process_match(self, match, ctx):
        yield ctx.get_current_key(), ctx.pattern_name(), ids(match)

    def process_timed_out_match(self, match, ctx):
        ctx.output(LOST, (ctx.get_current_key(), ids(match), ctx.timestamp()))


def named(name: str) -> Any:
    return lambda event: event.name == name


def of_names(*names: str) -> Pattern:
    first, *others = names
    made = Pattern.begin(first).where(named(first))
    for name in others:
        made = made.followed_by(name).where(named(name))
    return made


def searching(pattern: Pattern | dict[str, Pattern], function: Any = None, **more: Any) -> ProgramHarness:
    """Return a harness that looks for patterns by key; `more` are calls of the pattern stream."""
    restore, comparator = more.pop("restore", None), more.pop("comparator", None)

    def program(events: Any) -> Any:
        keyed = events.key_by("key")
        if isinstance(pattern, Pattern):
            stream = CEP.pattern(keyed, pattern, comparator)
        else:
            stream = CEP.patterns(keyed, pattern, comparator)
        for call, given_ in more.items():
            stream = getattr(stream, call)(*given_)
        return stream.process(function or Show(), output=OUTPUT, uid="found")

    return ProgramHarness(program, EVENT, side_outputs=[LATE, LOST], restore=restore)


def push(harness: ProgramHarness, *events: tuple[str, int], key: str = "k") -> None:
    """Push events, each a name and its time, numbered by time."""
    harness.push_all([((key, time_ms, name, 0), time_ms) for name, time_ms in events])


def found(harness: ProgramHarness) -> list[dict[str, list[int]]]:
    return [json.loads(row.taken) for row in harness.take().rows]


# -- beside the bare matcher -------------------------------------------------------------------------------


@st.composite
def streams(draw: Any) -> tuple[Case, list[Any]]:
    """A case, and its events in micro-batches: in disorder, over two keys, with watermarks and crashes."""
    case = draw(cases())
    text = json.dumps(case["pattern"])
    assume("subtype" not in text)
    events = [step for step in case["steps"] if len(step) > 1]
    numbered = [(draw(st.sampled_from("xy")), at, *event) for at, event in enumerate(events)]
    shuffled = draw(st.permutations(numbered))
    batches = []
    while shuffled:
        size = draw(st.integers(1, 4))
        then = draw(st.sampled_from(["", "", "restore"]))
        batches.append((shuffled[:size], draw(st.integers(0, 12)), then))
        shuffled = shuffled[size:]
    return case, batches


class Model:
    """One key: the matcher, given what the watermark has reached."""

    def __init__(self, pattern: Pattern) -> None:
        self.matcher = Matcher(compile_pattern(pattern), pattern.skip)
        self.state, self.waiting = self.matcher.initial(), []
        self.matches: list[tuple[str, int]] = []
        self.lost: list[tuple[str, int]] = []

    def reach(self, watermark_ms: int) -> None:
        due = sorted((one for one in self.waiting if one[0] <= watermark_ms), key=lambda one: one[0])
        self.waiting = [one for one in self.waiting if one[0] > watermark_ms]
        for time_ms, event in due:
            self._advance(time_ms)
            self.matches += [(ids(m), time_ms) for m in self.matcher.process(self.state, event, time_ms)]
        self._advance(watermark_ms)

    def _advance(self, time_ms: int) -> None:
        matches, lost = self.matcher.advance(self.state, time_ms)
        self.matches += [(ids(one.match), one.time_ms) for one in matches]
        self.lost += [(ids(one.match), one.time_ms) for one in lost]


class Given:
    def __init__(self, key: str, number: int, name: str, value: int) -> None:
        self.key, self.id, self.name, self.value = key, number, name, value


class Run:
    """A harness that is given up for another one now and then, and all that has come out of them."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern, self.harness = pattern, searching(pattern, side_output_late_data=(LATE,))
        self.matches: list[tuple[str, str, int]] = []
        self.side: dict[str, list[Any]] = {"late": [], "lost": []}

    def take(self) -> None:
        out = self.harness.take()
        self.matches += [(row.key, row.taken, at) for row, at in zip(out.rows, out.times_ms, strict=True)]
        for name, rows in out.side.items():
            self.side[name] += rows

    def restore(self) -> None:
        self.take()
        stored = self.harness.snapshot()
        self.harness = searching(self.pattern, restore=stored, side_output_late_data=(LATE,))


@settings(max_examples=examples(250))
@given(streams())
def test_events_in_disorder_are_matched_as_in_order(drawn: tuple[Case, list[Any]]) -> None:
    case, batches = drawn
    try:
        pattern = pattern_of(case["pattern"], skip_of(case["skip"]))
        compile_pattern(pattern)
    except PatternError:
        assume(False)
    models = {"x": Model(pattern), "y": Model(pattern)}
    run, watermark_ms, late = Run(pattern), -1, []
    try:
        for events, reached_ms, then in [*batches, ([], MAX_WATERMARK_MS, "")]:
            run.harness.push_all([((key, at, name, value), time) for key, at, time, name, value, _ in events])
            for key, at, time, name, value, _ in events:
                if time > watermark_ms:
                    models[key].waiting.append((time, Given(key, at, name, value)))
                else:
                    late.append(at)
            if then == "restore":
                run.restore()
            watermark_ms = max(watermark_ms, reached_ms)
            run.harness.watermark(watermark_ms)
            for model in models.values():
                model.reach(watermark_ms)
    except PatternError:
        # A match cannot be skipped from: then in the model, too.
        with pytest.raises(PatternError):
            for model in models.values():
                model.reach(MAX_WATERMARK_MS)
        return
    run.take()
    for key, model in models.items():
        assert [(taken, at) for of, taken, at in run.matches if of == key] == model.matches
        assert [(row.taken, row.at) for row in run.side["lost"] if row.key == key] == model.lost
    assert sorted(row.id for row in run.side["late"]) == sorted(late)
    assert run.harness.timer_count() == 0
    if all(model.state.is_initial for model in models.values()):
        assert not any(run.harness.entries(state) for state in states_of(pattern))


def states_of(pattern: Pattern) -> list[str]:
    """Return the names of the states of an operator that looks for one pattern."""
    mark = LookedFor("", compile_pattern(pattern), pattern.skip).fingerprint
    return ["pattern/waiting", *(f"pattern/{kind} of {mark}" for kind in ("events", "chains", "matches"))]


# -- time --------------------------------------------------------------------------------------------------


def test_a_match_has_the_time_of_the_event_that_completes_it() -> None:
    harness = searching(of_names("a", "b"))
    push(harness, ("b", 9), ("a", 3), ("b", 5))
    assert found(harness) == []
    harness.watermark(7)
    out = harness.take()
    assert [json.loads(row.taken) for row in out.rows] == [{"a": [3], "b": [5]}] and out.times_ms == [5]


def test_what_must_not_come_has_not_come_when_the_window_is_over() -> None:
    pattern = of_names("a").not_followed_by("b").where(named("b")).within(10)
    harness = searching(pattern)
    push(harness, ("a", 1), ("a", 4), ("b", 12))
    harness.watermark(20)
    out = harness.take()
    # Not when the next event came, or the watermark: however the input falls into micro-batches.
    assert [json.loads(row.taken) for row in out.rows] == [{"a": [1]}] and out.times_ms == [11]


@pytest.mark.parametrize("within", WithinType)
def test_a_window_ends_by_the_watermark_alone(within: WithinType) -> None:
    pattern = of_names("a", "b").within(10, within)
    harness = searching(pattern)
    push(harness, ("a", 1))
    harness.watermark(10)
    assert harness.next_timer_ms(TimeDomain.EVENT_TIME) == 11 and harness.take().side == {}
    harness.watermark(11)
    out = harness.take()
    assert out.side["lost"] == [("k", '{"a": [1]}', 11)] and out.counts["partial_matches_timed_out"] == 1
    assert out.counts["partial_matches_closed"] == 1
    assert harness.timer_count() == 0 and not any(harness.entries(state) for state in states_of(pattern))


def test_late_events_go_out_or_are_counted() -> None:
    for more, side in ({"side_output_late_data": (LATE,)}, ["k"]), ({}, []):
        harness = searching(of_names("a"), **more)
        harness.watermark(5)
        push(harness, ("a", 5), ("a", 6))
        harness.watermark(6)
        out = harness.take()
        assert [row.key for row in out.side.get("late", [])] == side
        assert out.counts.get("late_records_dropped", 0) == 1 - len(side)
        assert [json.loads(row.taken) for row in out.rows] == [{"a": [6]}]


def test_by_processing_time_events_are_taken_as_they_come() -> None:
    pattern = of_names("a", "b").within(10)
    harness = searching(pattern, in_processing_time=())
    harness.processing_time(100)
    push(harness, ("a", 5), ("b", 3))
    assert found(harness) == [{"a": [5], "b": [3]}]
    push(harness, ("a", 7))
    harness.processing_time(109)
    assert harness.take().side == {}
    harness.processing_time(110)
    assert harness.take().side["lost"] == [("k", '{"a": [7]}', 110)]
    assert harness.timer_count() == 0


@pytest.mark.parametrize("kind", ["LONG", "TIMESTAMP"])
def test_a_field_says_the_time_where_nothing_else_does(kind: str) -> None:
    def at(time_ms: int) -> Any:
        instant = datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC)
        return time_ms if kind == "LONG" else instant

    def program(events: Any) -> Any:
        last = events.key_by("key").count_window(1).reduce(lambda a, b: b, uid="last")
        stream = CEP.pattern(last.key_by("key"), Pattern.begin("a").next("b")).in_event_time("at")
        return stream.select(lambda match: (len(match),), output="n INT", uid="found")

    harness = ProgramHarness(program, f"key STRING, at {kind}")
    harness.push_all([(("k", at(7_000)), 7_000), (("k", at(5_000)), 5_000)])
    assert harness.take().rows == []
    harness.watermark(7_000)
    out = harness.take()
    assert out.rows == [(2,)] and out.times_ms == [7_000]


def test_a_field_that_is_no_time_is_refused() -> None:
    for field in ("nothing", "name"):
        with pytest.raises(SchemaError, match=f"the field '{field}' cannot be the time"):
            searching(of_names("a"), in_event_time=(field,))


def by_name(first: Any, second: Any) -> int:
    return (first.name > second.name) - (first.name < second.name)


def test_a_comparator_orders_events_of_one_time() -> None:
    harness = searching(of_names("a", "b"), comparator=by_name)
    push(harness, ("b", 5), ("a", 5))
    harness.watermark(5)
    assert found(harness) == [{"a": [5], "b": [5]}]
    harness = searching(of_names("a", "b"), comparator=by_name, in_processing_time=())
    harness.processing_time(50)
    push(harness, ("b", 5), ("a", 6))
    assert found(harness) == []
    harness.processing_time(51)
    assert found(harness) == [{"a": [6], "b": [5]}]


def test_events_without_a_time_are_refused_by_event_time() -> None:
    harness = searching(of_names("a"))
    with pytest.raises(ValueError, match="in_processing_time"):
        harness.push(("k", 1, "a", 0))


# -- functions ---------------------------------------------------------------------------------------------


def test_select_makes_one_row_and_flat_select_any_number() -> None:
    tag = OutputTag("lost", "n INT, at LONG")

    def one(events: Any) -> Any:
        return CEP.pattern(events.key_by("key"), of_names("a", "b").within(5)).select(
            lambda match: (len(match), match["b"][0].id),
            output="n INT, id LONG",
            uid="one",
            timed_out=(tag, lambda match, time_ms: (len(match), time_ms)),
        )

    def many(events: Any) -> Any:
        return CEP.pattern(events.key_by("key"), of_names("a", "b").within(5)).flat_select(
            lambda match: [(event.id,) for events in match.values() for event in events],
            output="id LONG",
            uid="many",
            timed_out=(tag, lambda match, time_ms: [(1, time_ms), (2, time_ms)]),
        )

    for program, rows, lost in (
        (one, [(2, 4)], [(1, 13)]),
        (many, [(3,), (4,)], [(1, 13), (2, 13)]),
    ):
        harness = ProgramHarness(program, EVENT, side_outputs=[tag])
        push(harness, ("a", 3), ("b", 4), ("a", 8))
        harness.watermark(20)
        out = harness.take()
        assert out.rows == rows and out.side["lost"] == lost


def test_a_function_has_state_of_its_key() -> None:
    class Count(PatternProcessFunction):
        def open(self, context):
            self.count = context.get_state(ValueStateDescriptor("count", "LONG", default=0))

        def process_match(self, match, ctx):
            self.count.update(self.count.value() + 1)
            yield ctx.get_current_key(), "", str(self.count.value())

    harness = searching(of_names("a"), Count())
    push(harness, ("a", 1), ("a", 2))
    push(harness, ("a", 1), key="other")
    harness.watermark(9)
    assert sorted((row.key, row.taken) for row in harness.take().rows) == [
        ("k", "1"),
        ("k", "2"),
        ("other", "1"),
    ]


class Threshold(IterativeCondition):
    """Opened with the task's facts; sees what was taken."""

    closed = 0

    def open(self, context):
        self.least = len(context.uid)

    def filter(self, event, ctx):
        return len(ctx.events_for("a")) >= self.least and ctx.timestamp() == event.id

    def close(self):
        Threshold.closed += 1


def test_conditions_are_opened_and_closed() -> None:
    pattern = of_names("a").one_or_more().followed_by("b").where(Threshold()).where(named("b"))
    harness = searching(pattern)
    push(harness, *((name, at) for at, name in enumerate("aaaaab")))
    harness.watermark(9)
    assert found(harness) == [{"a": [0, 1, 2, 3, 4], "b": [5]}]
    harness.close()
    assert Threshold.closed == 1


def test_a_condition_has_no_state() -> None:
    class Counting(IterativeCondition):
        def open(self, context):
            context.get_state(ValueStateDescriptor("n", "LONG"))

        def filter(self, event, ctx):
            return True

    with pytest.raises(TypeError, match="a condition of operator 'found'"):
        searching(Pattern.begin("a").where(Counting())).push(("k", 1, "a", 0), 1)


def test_several_patterns_are_found_in_one_pass() -> None:
    patterns = {"up": of_names("a", "b"), "down": of_names("b", "a").within(5)}
    harness = searching(patterns)
    push(harness, ("a", 1), ("b", 2), ("a", 3))
    harness.watermark(3)
    restored = searching(patterns, restore=harness.snapshot())
    assert [(row.pattern, json.loads(row.taken)) for row in harness.take().rows] == [
        ("up", {"a": [1], "b": [2]}),
        ("down", {"b": [2], "a": [3]}),
    ]
    push(restored, ("b", 5))
    restored.watermark(8)
    assert [(row.pattern, json.loads(row.taken)) for row in restored.take().rows] == [
        ("up", {"a": [3], "b": [5]})
    ]


def test_a_stream_without_a_key_is_searched_as_a_whole() -> None:
    def program(events: Any) -> Any:
        return CEP.pattern(events, of_names("a", "b")).process(
            Show(), output=OUTPUT.replace("key STRING", "key INT"), uid="u"
        )

    harness = ProgramHarness(program, EVENT, parallelism=3)
    harness.push_all([(("x", 1, "a", 0), 1), (("y", 2, "b", 0), 2)])
    harness.watermark(2)
    assert found(harness) == [{"a": [1], "b": [2]}]


def test_partial_matches_are_found_again_with_another_parallelism() -> None:
    def program(events: Any) -> Any:
        return CEP.pattern(events.key_by("key"), of_names("a", "b")).process(Show(), output=OUTPUT, uid="u")

    harness = ProgramHarness(program, EVENT, parallelism=1)
    for key in "abcdefgh":
        push(harness, ("a", 1), key=key)
    harness.watermark(1)
    harness = ProgramHarness(program, EVENT, parallelism=5, restore=harness.snapshot())
    for key in "abcdefgh":
        push(harness, ("b", 2), key=key)
    harness.watermark(2)
    assert sorted(row.key for row in harness.take().rows) == list("abcdefgh")


# -- limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overflow", "left"),
    [(Overflow.DISCARD_OLDEST, [2, 3]), (Overflow.DISCARD_NEWEST, [1, 2])],
)
def test_open_partial_matches_are_kept_to_a_limit(overflow: Overflow, left: list[int]) -> None:
    harness = searching(of_names("a", "b"), limit_open_matches=(OpenMatches(2, overflow),))
    push(harness, ("a", 1), ("a", 2), ("a", 3))
    harness.watermark(3)
    assert harness.take().counts == {"partial_matches_discarded": 1, "partial_matches_opened": 2}
    push(harness, ("b", 9))
    harness.watermark(9)
    assert found(harness) == [{"a": [one], "b": [9]} for one in left]


def test_too_many_open_partial_matches_stop_the_job_if_nothing_else_is_said() -> None:
    harness = searching(of_names("a", "b"), limit_open_matches=(OpenMatches(2),))
    push(harness, ("a", 1), ("a", 2), ("a", 3))
    with pytest.raises(PatternError, match="3 partial matches of one key are open"):
        harness.watermark(3)


# -- evolution ---------------------------------------------------------------------------------------------


def test_partial_matches_go_on_with_other_conditions() -> None:
    harness = searching(of_names("a", "b"))
    push(harness, ("a", 1))
    harness.watermark(1)
    changed = Pattern.begin("a").where(named("z")).followed_by("b").where(named("c"))
    harness = searching(changed, restore=harness.snapshot())
    push(harness, ("c", 4))
    harness.watermark(4)
    assert found(harness) == [{"a": [1], "b": [4]}]


class SqlHarness(ColumnsHarness):
    """A pattern whose only condition is SQL text: its answers are the last field of each event."""

    def __init__(self, text: str, restore: Snapshot | None = None, bases: MemoryBases | None = None) -> None:
        pattern = Pattern.begin("a").where(text)
        wanted = LookedFor("", compile_pattern(pattern), pattern.skip)
        search = PatternSearch((wanted,), Show(), column_conditions=(text,))
        operator = make_pattern_operator(search, ElementType("key STRING, id LONG"))
        fields = parse_ddl("key STRING, id LONG, answer BOOLEAN")
        travels = whole_records(fields, 0)
        shape = RowShape(
            (input_shape(travels, fields.names),), travels.key_types, (parse_ddl(OUTPUT),), with_times=True
        )
        runner = make_runner(operator, "found", 16, shape)
        super().__init__(
            runner,
            fields,
            0,
            travels,
            None,
            (),
            max_parallelism=16,
            restore=restore,
            policy=None,
            bases=bases,
        )


def test_an_event_that_waits_has_no_answer_of_a_condition_that_is_new() -> None:
    one = SqlHarness("id > 0")
    one.push_all([(("k", 1, True), 5), (("k", 2, False), 6)])
    other = SqlHarness("id > 0", one.snapshot(), one.bases)
    other.watermark(6)
    assert [row[2] for row in other.take().rows] == ['{"a": [1]}']
    changed = SqlHarness("id > 1", one.snapshot(), one.bases)
    with pytest.raises(TimerError, match="condition 'id > 1' was not evaluated"):
        changed.watermark(6)


def test_partial_matches_of_another_automaton_are_refused_by_name() -> None:
    before = of_names("a", "b")
    harness = searching(before)
    push(harness, ("a", 1))
    harness.watermark(1)
    stored = harness.snapshot()
    with pytest.raises(StateMismatch, match=r"'pattern/\w+ of \(a, b\) \w{8}' is no longer declared"):
        searching(of_names("a", "b", "c"), restore=stored).watermark(2)

    class Forget(Show):
        def open(self, context):
            for name in states_of(before)[1:]:
                context.drop_state(name)

    harness = searching(of_names("a", "b", "c"), Forget(), restore=stored)
    push(harness, ("a", 2), ("b", 3), ("c", 4))
    harness.watermark(4)
    assert found(harness) == [{"a": [2], "b": [3], "c": [4]}]


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda s: CEP.pattern(s.key_by("key"), "a"), ConfigError),
        (lambda s: CEP.patterns(s.key_by("key"), {}), ConfigError),
        (lambda s: CEP.patterns(s.key_by("key"), {1: of_names("a")}), ConfigError),
        (lambda s: CEP.pattern("events", of_names("a")), ConfigError),
        (lambda s: CEP.pattern(s, of_names("a").next("a")), PatternError),
        (lambda s: CEP.pattern(s, of_names("a"), lambda one: 0), ConfigError),
        (lambda s: CEP.pattern(s, of_names("a")).process(Show, output=OUTPUT, uid="u"), ConfigError),
        (lambda s: CEP.pattern(s, of_names("a")).process(Show(), uid="u"), SchemaError),
        (lambda s: CEP.pattern(s, of_names("a")).select(None, output="n INT", uid="u"), ConfigError),
        (lambda s: CEP.pattern(s, of_names("a")).side_output_late_data("late"), ConfigError),
        (lambda s: CEP.pattern(s, of_names("a")).limit_open_matches(5), ConfigError),
        (lambda s: OpenMatches(0), ConfigError),
        (lambda s: OpenMatches(1, "FAIL"), ConfigError),
    ],
)
def test_what_cannot_be_is_refused_at_the_call(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="To do: "):
        ProgramHarness(wrong, EVENT)


def test_late_events_must_fit_their_side_output() -> None:
    with pytest.raises(SchemaError, match="late"):
        searching(of_names("a"), side_output_late_data=(OutputTag("late", "n INT"),))


def test_a_skip_that_misses_stops_the_job() -> None:
    skip = AfterMatchSkip.to_first("b").raise_on_miss()
    pattern = Pattern.begin("a", skip).where(named("a")).next("b").where(named("b")).optional()
    harness = searching(pattern)
    push(harness, ("a", 1))
    with pytest.raises(PatternError, match="cannot be skipped to 'b'"):
        harness.watermark(1)
