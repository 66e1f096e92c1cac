"""Patterns that come and go while a job runs, by rules as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flinkish_spark import OutputTag
from flinkish_spark.cep import (
    PATTERN_RULES,
    REFUSED_RULES,
    AfterMatchSkip,
    IterativeCondition,
    OpenMatches,
    Overflow,
    Pattern,
    PatternProcessFunction,
    PatternsFromStream,
    WithinType,
)
from flinkish_spark.cep.compiler import compile_pattern
from flinkish_spark.cep.rules import KnownToRules
from flinkish_spark.core.elements import MAX_WATERMARK_MS
from flinkish_spark.core.errors import ConfigError, PatternError
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.types.ddl import DdlError
from tests.support.cep_cases import cases
from tests.support.effort import examples
from tests.support.flink_cep import Case, pattern_of, skip_of
from tests.unit.cep.test_pattern_operator import Model, ids, named, of_names

FIELDS = "key STRING, id LONG, name STRING, value LONG"
RULE = "id STRING, version LONG, rule STRING"
OUTPUT = "key STRING, rule STRING, version LONG, taken STRING"
LATE, LOST = OutputTag("late", FIELDS), OutputTag("lost", OUTPUT)


class Show(PatternProcessFunction):
    def process_match(self, match, ctx):
        yield ctx.get_current_key(), ctx.pattern_name(), ctx.pattern_version(), ids(match)

    def process_timed_out_match(self, match, ctx):
        ctx.output(LOST, (ctx.get_current_key(), ctx.pattern_name(), ctx.pattern_version(), ids(match)))


PATTERNS = {
    "ab": of_names("a", "b"),
    "ab within": lambda window_ms: of_names("a", "b").within(window_ms),
    "abc": of_names("a", "b", "c"),
}


class Longer(IterativeCondition):
    """Fits while fewer than `most` events were taken under its name."""

    def __init__(self, most: int) -> None:
        self.most, self.is_open = most, False

    def open(self, context: Any) -> None:
        assert context.uid == "found"
        self.is_open = True

    def filter(self, event: Any, ctx: Any) -> bool:
        assert self.is_open
        return len(ctx.events_for("b")) < self.most


CONDITIONS = {"is_a": named("a"), "is": named, "Longer": Longer}


def started(patterns: Any = None, restore: Any = None, parallelism: int = 2, **more: Any) -> ProgramHarness:
    def program(events: Any, rules: Any) -> Any:
        connected = events.key_by("key").connect(rules.broadcast(PATTERN_RULES))
        function = PatternsFromStream(FIELDS, Show(), patterns or PATTERNS, CONDITIONS, **more)
        return connected.process(function, output=OUTPUT, uid="found")

    sides = [REFUSED_RULES, LATE, LOST]
    return ProgramHarness(program, FIELDS, RULE, side_outputs=sides, restore=restore, parallelism=parallelism)


def tell(harness: ProgramHarness, name: str, version: int | None, rule: Any) -> None:
    text = rule if rule is None or isinstance(rule, str) else json.dumps(rule)
    harness.push((name, version, text), source=1)


def read(harness: ProgramHarness, *events: tuple[str, int], key: str = "k") -> None:
    """Push events, each a name and its time, and let the watermark reach the last of them."""
    harness.push_all([((key, time_ms, name, 0), time_ms) for name, time_ms in events])
    harness.watermark(max(time_ms for _, time_ms in events))


def found(harness: ProgramHarness) -> list[tuple[Any, ...]]:
    return [tuple(row)[1:] for row in harness.take().rows]


def refused(harness: ProgramHarness) -> list[Any]:
    """Return what was refused; each subtask says so."""
    return list(dict.fromkeys(harness.take().side.get("refused_rules", [])))


# -- what becomes of partial matches -----------------------------------------------------------------------


def test_a_rule_is_searched_for_from_the_next_events_on() -> None:
    harness = started()
    read(harness, ("a", 1))
    tell(harness, "r", 1, {"pattern": "ab"})
    read(harness, ("b", 2), ("a", 3), ("b", 4))
    assert found(harness) == [("r", 1, '{"a": [3], "b": [4]}')]


def test_partial_matches_go_on_with_a_rule_of_the_same_states() -> None:
    harness = started()
    tell(harness, "r", 1, {"pattern": "ab"})
    read(harness, ("a", 1))
    assert harness.take().counts == {"partial_matches_opened": 1}
    harness = started(restore=harness.snapshot(), parallelism=3)
    tell(harness, "r", 2, {"pattern": "ab within", "args": [10]})
    read(harness, ("b", 4), ("a", 5))
    assert found(harness) == [("r", 2, '{"a": [1], "b": [4]}')]
    harness.watermark(15)
    assert [row[3] for row in harness.take().side["lost"]] == ['{"a": [5]}']
    assert harness.timer_count() == 0 and not harness.entries("open") and not harness.entries("waiting")


def test_partial_matches_of_other_states_are_given_up() -> None:
    harness = started()
    tell(harness, "r", 1, {"pattern": "ab"})
    read(harness, ("a", 1), ("a", 2))
    harness.take()
    tell(harness, "r", 2, {"pattern": "abc"})
    read(harness, ("b", 3), ("c", 4))
    output = harness.take()
    assert output.rows == []
    assert output.counts == {"partial_matches_closed": 2, "partial_matches_discarded": 2}
    read(harness, ("a", 5), ("b", 6), ("c", 7))
    assert found(harness) == [("r", 2, '{"a": [5], "b": [6], "c": [7]}')]


def test_partial_matches_go_with_their_rule_without_another_event_of_their_key() -> None:
    harness = started()
    tell(harness, "r", 1, {"pattern": "ab"})
    tell(harness, "other", 1, {"pattern": "ab"})
    read(harness, ("a", 1), ("a", 2))
    read(harness, ("a", 3), ("a", 4), key="l")
    harness = started(restore=harness.snapshot(), parallelism=3)
    harness.take()
    tell(harness, "r", 2, None)
    assert harness.take().counts == {"partial_matches_closed": 4, "partial_matches_discarded": 4}
    assert {key: list(rules) for key, rules in harness.entries("open").items()} == {
        "k": ["other"],
        "l": ["other"],
    }
    # The same again, and another one of the same states, change nothing of it.
    tell(harness, "r", 2, None)
    tell(harness, "other", 2, {"pattern": "ab within", "args": [10]})
    assert harness.take().counts == {}
    read(harness, ("b", 5))
    assert found(harness) == [("other", 2, '{"a": [1], "b": [5]}'), ("other", 2, '{"a": [2], "b": [5]}')]
    tell(harness, "other", 3, {"pattern": "abc"})
    assert harness.take().counts == {"partial_matches_closed": 2, "partial_matches_discarded": 2}
    assert not harness.entries("open")


def test_what_comes_back_begins_anew() -> None:
    harness = started()
    tell(harness, "r", 1, {"pattern": "ab"})
    read(harness, ("a", 1))
    tell(harness, "r", 2, None)
    tell(harness, "r", 3, {"pattern": "ab"})
    # Of the key nothing has happened in between.
    read(harness, ("b", 2))
    assert found(harness) == []
    tell(harness, "r", 4, None)
    harness = started(restore=harness.snapshot())
    tell(harness, "r", 4, {"pattern": "ab"})
    (row,) = refused(harness)
    assert "version 4 of the rule 'r' is not newer than 4" in row.why
    read(harness, ("a", 3), ("b", 4))
    assert found(harness) == []


def test_an_older_version_is_refused_and_the_same_one_is_nothing_new() -> None:
    harness = started()
    tell(harness, "r", 5, {"pattern": "ab"})
    read(harness, ("a", 1))
    tell(harness, "r", 5, {"pattern": "ab"})
    assert refused(harness) == []
    for version in (4, 5):
        tell(harness, "r", version, {"pattern": "abc"})
        (row,) = refused(harness)
        assert row[:2] == ("r", version) and "is not newer than 5" in row.why
    tell(harness, "r", 6, '{"pattern": "nobody"}')
    assert len(refused(harness)) == 1
    read(harness, ("b", 2))
    assert found(harness) == [("r", 5, '{"a": [1], "b": [2]}')]


def test_several_rules_are_told_apart() -> None:
    harness = started()
    tell(harness, "x", 1, {"pattern": "abc"})
    tell(harness, "y", 7, {"pattern": "ab"})
    read(harness, ("a", 1), ("b", 2), ("c", 3))
    assert found(harness) == [("y", 7, '{"a": [1], "b": [2]}'), ("x", 1, '{"a": [1], "b": [2], "c": [3]}')]
    assert harness.take().counts == {}


def test_a_rule_that_the_program_knows_no_more_stops_the_job_until_a_newer_one_comes() -> None:
    harness = started()
    tell(harness, "r", 1, {"pattern": "ab"})
    read(harness, ("a", 1))
    stored = harness.snapshot()
    other = {"abc": PATTERNS["abc"]}
    with pytest.raises(PatternError, match="the rule 'r' was taken over once"):
        read(started(other, stored), ("b", 2))
    harness = started(other, stored)
    tell(harness, "r", 2, {"pattern": "abc"})
    read(harness, ("a", 2), ("b", 3), ("c", 4))
    assert found(harness) == [("r", 2, '{"a": [2], "b": [3], "c": [4]}')]


@st.composite
def streams(draw: Any) -> tuple[Case, list[Any]]:
    """A case, and its events in micro-batches: in disorder, with watermarks and restarts."""
    case = draw(cases())
    assume("subtype" not in json.dumps(case["pattern"]))
    events = [step for step in case["steps"] if len(step) > 1]
    numbered = [(draw(st.sampled_from("xy")), at, *event) for at, event in enumerate(events)]
    shuffled, batches = draw(st.permutations(numbered)), []
    while shuffled:
        size = draw(st.integers(1, 4))
        batches.append((shuffled[:size], draw(st.integers(0, 12)), draw(st.booleans())))
        shuffled = shuffled[size:]
    return case, batches


@settings(max_examples=examples(120))
@given(streams())
def test_a_rule_finds_what_the_matcher_finds(drawn: tuple[Case, list[Any]]) -> None:
    case, batches = drawn
    try:
        pattern = pattern_of(case["pattern"], skip_of(case["skip"]))
        compile_pattern(pattern)
    except PatternError:
        assume(False)
    models = {"x": Model(pattern), "y": Model(pattern)}
    harness, watermark_ms, matches, lost = started({"p": pattern}), -1, [], []
    tell(harness, "r", 1, {"pattern": "p"})

    def take() -> None:
        out = harness.take()
        matches.extend((row.key, row.taken, at) for row, at in zip(out.rows, out.times_ms, strict=True))
        lost.extend((row.key, row.taken) for row in out.side.get("lost", []))

    try:
        for events, reached_ms, is_restored in [*batches, ([], MAX_WATERMARK_MS, False)]:
            harness.push_all([((key, at, name, value), time) for key, at, time, name, value, _ in events])
            for key, at, time, name, value, _ in events:
                if time > watermark_ms:
                    models[key].waiting.append((time, Event(key, at, name, value)))
            if is_restored:
                take()
                harness = started({"p": pattern}, harness.snapshot(), parallelism=1 + len(events) % 3)
            watermark_ms = max(watermark_ms, reached_ms)
            harness.watermark(watermark_ms)
            for model in models.values():
                model.reach(watermark_ms)
    except PatternError:
        with pytest.raises(PatternError):
            for model in models.values():
                model.reach(MAX_WATERMARK_MS)
        return
    take()
    for key, model in models.items():
        assert [(taken, at) for of, taken, at in matches if of == key] == model.matches
        assert [taken for of, taken in lost if of == key] == [taken for taken, _ in model.lost]
    assert harness.timer_count() == 0 and not harness.entries("waiting")
    if all(model.state.is_initial for model in models.values()):
        assert not harness.entries("open")


class Event:
    def __init__(self, key: str, number: int, name: str, value: int) -> None:
        self.key, self.id, self.name, self.value = key, number, name, value


def test_late_events_and_too_many_partial_matches() -> None:
    limit = OpenMatches(1, Overflow.DISCARD_OLDEST)
    for late, counts in (LATE, {}), (None, {"late_records_dropped": 1}):
        harness = started(late_output=late, limit=limit)
        tell(harness, "r", 1, {"pattern": "ab"})
        read(harness, ("a", 1), ("a", 2), ("b", 3))
        harness.push(("k", 9, "b", 0), 2)
        output = harness.take()
        assert [row.taken for row in output.rows] == ['{"a": [2], "b": [3]}']
        assert len(output.side.get("late", [])) == (late is not None)
        assert output.counts == {"matches": 1, "partial_matches_discarded": 1, **counts}
    with pytest.raises(PatternError, match="go by event time"):
        harness.push(("k", 9, "b", 0))


# -- what rules say ----------------------------------------------------------------------------------------


def node(name: str, condition: Any = None, *properties: str, **quantifier: Any) -> dict[str, Any]:
    own = {"consumingStrategy": "SKIP_TILL_NEXT", "properties": list(properties or ["SINGLE"]), **quantifier}
    condition = condition if isinstance(condition, dict | None) else {"type": "SQL", "expression": condition}
    return {"name": name, "type": "ATOMIC", "quantifier": own, "condition": condition}


def graph(*parts: Any, **more: Any) -> dict[str, Any]:
    """A graph of nodes, with the types of edges between them."""
    nodes, kinds = parts[::2], parts[1::2]
    pairs = zip(nodes, nodes[1:], kinds, strict=False)
    edges = [{"source": one["name"], "target": other["name"], "type": kind} for one, other, kind in pairs]
    # Their order does not matter.
    return {"nodes": list(nodes)[::-1], "edges": edges[::-1], "type": "COMPOSITE", "version": 1, **more}


MINUTES_3 = {"unit": "MINUTES", "size": 3}
A, B = "name = 'a'", "name = 'b'"
GRAPHS = [
    (graph(node("a", A)), Pattern.begin("a").where(A)),
    (graph(node("a"), "STRICT", node("b", B)), Pattern.begin("a").next("b").where(B)),
    (
        graph(
            node("a", A), "SKIP_TILL_NEXT", node("b", B), "SKIP_TILL_ANY", node("c"),
            window={"time": MINUTES_3},
        ),
        Pattern.begin("a").where(A).followed_by("b").where(B).followed_by_any("c").within(180_000),
    ),
    (
        graph(
            node("a"), "NOT_FOLLOW", node("b", B), "STRICT", node("c"),
            window={"type": "PREVIOUS_AND_CURRENT", "time": {"unit": "SECONDS", "size": 5}},
        ),
        Pattern.begin("a").not_followed_by("b").where(B).next("c")
        .within(5_000, WithinType.PREVIOUS_AND_CURRENT),
    ),
    (graph(node("a"), "NOT_NEXT", node("b", B)), Pattern.begin("a").not_next("b").where(B)),
    (
        graph(
            node("a", A, "LOOPING", times={"from": 3, "to": 3, "windowTime": MINUTES_3}),
            "SKIP_TILL_NEXT",
            node("b", B, "TIMES", "OPTIONAL", consumingStrategy="STRICT", times={"from": 1, "to": 2}),
            afterMatchStrategy={"type": "SKIP_PAST_LAST_EVENT", "patternName": None},
        ),
        Pattern.begin("a", AfterMatchSkip.past_last_event()).where(A).times_or_more(3, 180_000)
        .followed_by("b").where(B).times(1, 2).consecutive().optional(),
    ),
    (
        graph(
            node(
                "a", A, "LOOPING", "GREEDY",
                untilCondition={"type": "SQL", "expression": "value > 5"},
            ),
            "SKIP_TILL_ANY",
            node("b", B, "LOOPING", consumingStrategy="SKIP_TILL_ANY", times={"from": 2}),
            afterMatchStrategy={"type": "SKIP_TO_FIRST", "patternName": "b"},
        ),
        Pattern.begin("a", AfterMatchSkip.to_first("b")).where(A).one_or_more().greedy().until("value > 5")
        .followed_by_any("b").where(B).times_or_more(2).allow_combinations(),
    ),
    (
        graph(
            node("a"),
            "STRICT",
            {
                **graph(node("b", B), "STRICT", node("c")), "name": "bc",
                "quantifier": {"properties": ["TIMES"], "times": {"from": 2, "to": 2}},
            },
        ),
        Pattern.begin("a").next(Pattern.begin("b").where(B).next("c")).times(2),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "pattern"), GRAPHS)
def test_a_graph_is_the_pattern_that_it_says(rule: Any, pattern: Pattern) -> None:
    made = KnownToRules().pattern(json.dumps(rule))
    assert made.explain() == pattern.explain() and made.skip == pattern.skip


def test_conditions_of_a_rule_are_sql_text_or_named() -> None:
    harness = started()
    of_class = {"type": "CLASS", "className": "is", "args": ["b"]}
    rule = graph(
        node("a", {"type": "CLASS", "className": "is_a"}),
        "SKIP_TILL_NEXT",
        node("b", of_class),
        "SKIP_TILL_NEXT",
        node("c", "name IN ('c', NULL) AND value / 2 < 1"),
    )
    tell(harness, "r", 1, rule)
    read(harness, ("a", 1), ("b", 2), ("x", 3), ("c", 4))
    assert found(harness) == [("r", 1, '{"a": [1], "b": [2], "c": [4]}')]
    longer = {"type": "CLASS", "className": "Longer", "args": [2]}
    loop = node("b", longer, "LOOPING", consumingStrategy="STRICT")
    tell(harness, "r", 2, graph(node("a", A), "STRICT", loop, "STRICT", node("c", "name = 'c'")))
    read(harness, ("a", 5), ("b", 6), ("b", 7), ("c", 8))
    assert found(harness) == [("r", 2, '{"a": [5], "b": [6, 7], "c": [8]}')]


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("{", "a rule is no JSON"),
        ("[]", "A rule is an object"),
        ({}, "It has no nodes"),
        ({"pattern": "nobody"}, "no pattern of that name; it has ab, ab within, abc"),
        ({"pattern": "ab", "other": 1}, "Unknown members: other"),
        ({"pattern": "ab within", "args": 5}, "Args are a list"),
        ({"pattern": "ab within", "args": ["x"]}, "cannot be made of these: PatternError"),
        ({"pattern": "ab within"}, "cannot be made of these: TypeError"),
        ({"pattern": "ab", "args": []}, "'Pattern' object is not callable"),
        ({"nodes": []}, "one at least"),
        ({"nodes": [{"name": 1}]}, "'name' is text"),
        (graph(node("a"), "STRICT", node("a")), "Edges lead from one node"),
        ({"nodes": [node("a"), node("b")]}, "Edges lead from one node"),
        (graph(node("a"), "SIDEWAYS", node("b")), "An edge's type is one of STRICT"),
        ({"nodes": [node("a")], "edges": [{"source": "a", "target": "z", "type": "STRICT"}]}, "no node 'z'"),
        (graph(node("a"), "NOT_FOLLOW", node("b")), "Without a window"),
        (graph(node("a", "nothing > 1")), "There is no field nothing"),
        (graph(node("a", "PREV(value) > 1")), "It looks at other rows"),
        (graph(node("a", "value")), "is a bigint"),
        (graph(node("a", {"type": "AVIATOR", "expression": "value > 1"})), "one of SQL, CLASS"),
        (graph(node("a", {"type": "CLASS", "className": "os.system"})), "no condition of that name"),
        (graph(node("a", None, "OFTEN")), "SINGLE, LOOPING, TIMES, OPTIONAL, GREEDY"),
        (graph(node("a", None, times={"from": 2, "to": 2})), "the property TIMES or LOOPING"),
        (graph(node("a"), condition={"type": "SQL"}), "A graph has no condition"),
        (graph(node("a"), window={"time": {"unit": "WEEKS", "size": 1}}), "A unit is one of"),
        (graph(node("a"), window={"time": {"unit": "HOURS", "size": 1.5}}), "A size is a whole number"),
        (graph(node("a"), afterMatchStrategy={"type": "SKIP_TO_FIRST"}), "have a patternName"),
        (graph(node("a"), afterMatchStrategy={"type": "SKIP_TO_FIRST", "patternName": "z"}), "does not have"),
        (graph({**node("a"), "extra": 1}), "Unknown members: extra"),
    ],
)
def test_a_rule_that_cannot_be_is_told_and_changes_nothing(rule: Any, why: str) -> None:
    harness = started(parallelism=1)
    tell(harness, "r", 1, {"pattern": "ab"})
    tell(harness, "r", 2, rule)
    (told,) = harness.take().side["refused_rules"]
    assert told[:2] == ("r", 2) and why in told.why
    read(harness, ("a", 1), ("b", 2))
    assert found(harness) == [("r", 1, '{"a": [1], "b": [2]}')]


def test_what_cannot_be_is_refused_at_the_call() -> None:
    for given_ in ((FIELDS, Show), (FIELDS, Show(), [1]), (FIELDS, Show(), {}, 5)):
        with pytest.raises(ConfigError, match="To do: "):
            PatternsFromStream(*given_)
    with pytest.raises(ConfigError, match="To do: "):
        PatternsFromStream(FIELDS, Show(), late_output="late")
    with pytest.raises(DdlError, match="no list of fields"):
        PatternsFromStream("LONG", Show())
    harness = started()
    harness.push((None, 1, "{}"), source=1)
    assert "has no id" in refused(harness)[0].why
