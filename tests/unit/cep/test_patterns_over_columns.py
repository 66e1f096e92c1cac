"""Events of many keys at a time, as columns, beside the operator that takes them one by one.

Two subtasks get the same micro-batches: one takes events as columns where that can be, the other never does.
What they emit, count and store has to be the same, wherever the micro-batches end.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from flinkish_spark import OutputTag
from flinkish_spark.cep import Pattern, PatternProcessFunction, SqlCondition
from flinkish_spark.cep.columnar_matcher import find_long_keys
from flinkish_spark.cep.columnar_runner import ColumnarPatternOperator, PatternRunner, make_pattern_operator
from flinkish_spark.cep.compiler import compile_pattern
from flinkish_spark.cep.conditions import ColumnCondition, Comparison
from flinkish_spark.cep.functions import MeasuredMatches
from flinkish_spark.cep.match_recognize import parse_comparison, parse_measures
from flinkish_spark.cep.pattern_operator import LookedFor, PatternSearch
from flinkish_spark.cep.timed_runner import TimedRunner
from flinkish_spark.core.elements import MAX_WATERMARK_MS
from flinkish_spark.core.errors import PatternError
from flinkish_spark.state.descriptors import ValueStateDescriptor
from flinkish_spark.state.key_group import BasePolicy
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.rows import ElementType
from flinkish_spark.worker import keyed_operator
from flinkish_spark.worker.runners import RowShape
from tests.support import effort
from tests.support.cep_cases import cases
from tests.support.flink_cep import Case, condition, looks_back, pattern_of, skip_of
from tests.support.operator_harness import (
    ColumnsHarness,
    Snapshot,
    input_shape,
    whole_records,
)

GROUPS, EVENT, OUTPUT = (
    2,
    "key STRING, id LONG, name STRING, value LONG",
    "key STRING, found STRING, nth LONG",
)
LATE, LOST = OutputTag("late", EVENT), OutputTag("lost", OUTPUT)


class Show(PatternProcessFunction):
    """Tells what was taken, and of how many matches of the key this is one: a state of its own."""

    def open(self, context: Any) -> None:
        self.count = context.get_state(ValueStateDescriptor("count", "LONG"))

    def process_match(self, match: Any, ctx: Any) -> Any:
        yield self._row(match, ctx)

    def process_timed_out_match(self, match: Any, ctx: Any) -> None:
        ctx.output(LOST, self._row(match, ctx))

    def _row(self, match: Any, ctx: Any) -> tuple[str, str, int]:
        nth = (self.count.value() or 0) + 1
        self.count.update(nth)
        ids = {name: [one.id for one in events] for name, events in match.items()}
        return ctx.get_current_key(), f"{ctx.pattern_name()}{json.dumps(ids)}", nth


class ShowLost(PatternProcessFunction):
    def process_match(self, match: Any, ctx: Any) -> None:
        raise AssertionError("rows of matches are made by text")

    def process_timed_out_match(self, match: Any, ctx: Any) -> None:
        ids = {name: [one.id for one in events] for name, events in match.items()}
        ctx.output(LOST, (ctx.get_current_key(), json.dumps(ids), ctx.timestamp()))


def as_sql(given_: dict[str, Any]) -> str | None:
    """Return a condition of :mod:`tests.support.flink_cep` as SQL text; None if it cannot be."""
    ((kind, value),) = given_.items()
    match kind:
        case "true":
            return "TRUE"
        case "name":
            return f"name = '{value}'"
        case "value" | "time":
            # Of times Python alone can ask; here they stand for other numbers.
            return f"value {value[0].replace('==', '=')} {value[1]}"
        case "and" | "or":
            parts = [as_sql(part) for part in value]
            return None if None in parts else "(" + f" {kind} ".join(map(str, parts)) + ")"
        case "not":
            part = as_sql(value[0])
            return None if part is None else f"NOT ({part})"
        case "last":
            name, compare, number = value
            return f"COALESCE(value - {name}.value, 0) {compare.replace('==', '=')} {number}"
        case "count" | "sum" | "total":
            name, compare, number = value
            said = {
                "count": f"COUNT({name}.*)",
                "sum": f"value + COALESCE(SUM({name}.value), 0)",
                "total": f"COALESCE(SUM({name}.value), 0)",
            }[kind]
            return f"{said} {compare.replace('==', '=')} {number}"
    return None


#: Rows have no classes.
_PLAIN = ("subtype",)


def in_columns(given_: dict[str, Any]) -> Any:
    """Return a condition as the pattern is given it: text that somebody else answers, or that looks back."""
    if not looks_back(given_):
        return json.dumps(given_)
    text = as_sql(given_)
    return condition(given_) if text is None else SqlCondition(text)


def told_as_text(wanted: Any) -> tuple[MeasuredMatches, Any]:
    """Return what tells of matches by SQL text, the key in front, and its fields."""
    names = list(dict.fromkeys(name for one in wanted for name in one.automaton.names))
    keys = ", ".join([f"{name}.key" for name in names])
    parts = [f"COALESCE({keys}) AS key" if len(names) > 1 else keys]
    parts += [f"FIRST({name}.id) AS first_{name}, {name}.value + 1 AS last_{name}" for name in names]
    expressions, fields = parse_measures(", ".join(parts), parse_ddl(EVENT), names)
    return MeasuredMatches("", ShowLost(), expressions), fields


class Subtask(ColumnsHarness):
    """All key groups; as columns, or event by event."""

    def __init__(
        self,
        patterns: dict[str, Pattern],
        is_text: bool,
        *,
        as_columns: bool,
        restore: Snapshot | None = None,
        bases: Any = None,
    ) -> None:
        wanted = tuple(LookedFor(name, compile_pattern(one), one.skip) for name, one in patterns.items())
        leaves = [leaf for one in wanted for leaf in one.automaton.leaves]
        self.texts = tuple(dict.fromkeys(leaf.text for leaf in leaves if isinstance(leaf, ColumnCondition)))
        said = {
            leaf.text: parse_comparison(leaf.text, parse_ddl(EVENT), one.automaton.names)
            for one in wanted
            for leaf in one.automaton.leaves
            if isinstance(leaf, Comparison)
        }
        function, output = told_as_text(wanted) if is_text else (Show(), parse_ddl(OUTPUT))
        settings = {"late_output": LATE, "column_conditions": self.texts, "comparisons": said}
        search = PatternSearch(wanted, function, **settings)
        operator = make_pattern_operator(search, ElementType(EVENT))
        answers = "".join(f", __holds_{at} BOOLEAN" for at in range(len(self.texts)))
        fields = parse_ddl(EVENT + answers)
        travels = whole_records(fields, 0)
        shape = RowShape(
            (input_shape(travels, fields.names),),
            travels.key_types,
            (output, *map(parse_ddl, (EVENT, OUTPUT))),
            ("late", "lost"),
            True,
        )
        self.is_columnar = isinstance(operator, ColumnarPatternOperator)
        make = keyed_operator.make_runner
        if as_columns:
            runner = make(operator, "found", GROUPS, shape)
            assert isinstance(runner, TimedRunner)
            assert isinstance(runner, PatternRunner) == self.is_columnar
        else:
            runner = TimedRunner(operator, "found", GROUPS, shape)
        policy = BasePolicy(smallest_bytes=900, smallest_delta_rows=3)
        own = {"max_parallelism": GROUPS, "restore": restore, "policy": policy, "bases": bases}
        super().__init__(runner, fields, 0, travels, None, ("late", "lost"), **own)

    def rows_of(self, events: Any) -> list[Any]:
        """Return events with the answers to the conditions behind their fields."""
        asks = [condition(json.loads(text)) for text in self.texts]
        return [((*one, *(bool(ask(_Given(*one))) for ask in asks)), time_ms) for one, time_ms in events]


class _Given:
    def __init__(self, key: str, number: int, name: str, value: int) -> None:
        self.key, self.id, self.name, self.value = key, number, name, value


def by_key(output: Any) -> dict[str, Any]:
    """Return what is emitted of each key, in its order, and what is counted."""
    found: dict[str, Any] = defaultdict(list)
    for row, time_ms in zip(output.rows, output.times_ms, strict=True):
        found[f"main {row[0]}"].append((row, time_ms))
    for side, rows in output.side.items():
        for row in rows:
            found[f"{side} {row[0]}"].append(row)
    return {**found, "counts": {name: count for name, count in output.counts.items() if count}}


def open_of(subtask: Subtask) -> dict[Any, Any]:
    """Return what is stored of each key, but for its timers."""
    names = [name for name in subtask._runner.layout.states if name.startswith("pattern/")]
    names += [name for name in subtask._runner.layout.states if name == "count"]
    return {name: dict(subtask.entries(name)) for name in names}


@st.composite
def streams(draw: Any) -> tuple[list[Case], list[Any], bool]:
    """Cases, and events in micro-batches: in disorder, over a few keys, with watermarks and restarts."""
    found = [draw(cases()) for _ in range(draw(st.sampled_from([1, 1, 1, 2])))]
    events = [step for case in found for step in case["steps"] if len(step) > 1]
    numbered = [
        ((draw(st.sampled_from("xyz")), at, name, value), time_ms)
        for at, (time_ms, name, value, _) in enumerate(events * draw(st.sampled_from([1, 2])))
    ]
    shuffled = draw(st.permutations(numbered)) if draw(st.booleans()) else numbered
    batches, watermark_ms = [], 0
    while shuffled:
        size = draw(st.integers(1, 9))
        watermark_ms += draw(st.integers(0, 7))
        then = draw(st.sampled_from(["", "", "", "restore", "exchange"]))
        batches.append((shuffled[:size], watermark_ms, then))
        shuffled = shuffled[size:]
    return found, [*batches, ([], MAX_WATERMARK_MS, "")], draw(st.integers(0, 3)) == 0


@pytest.mark.timeout(3_600 if effort.is_night else 300)
@settings(
    max_examples=4_000 if effort.is_night else 80,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    # An example takes a tenth of a second, and says in itself which micro-batch differs.
    phases=[Phase.generate],
)
@given(streams())
def test_columns_find_what_events_one_by_one_find(drawn: tuple[list[Case], list[Any], bool]) -> None:
    found, batches, is_text = drawn
    try:
        patterns = {
            f"p{at}" if at else "": pattern_of(case["pattern"], skip_of(case["skip"]), in_columns, _PLAIN)
            for at, case in enumerate(found)
        }
        pair = [Subtask(patterns, is_text, as_columns=as_columns) for as_columns in (True, False)]
    except PatternError:
        event("refused")
        return
    event("columns" if pair[0].is_columnar else "event by event")
    for events, watermark_ms, then in batches:
        outputs: list[Any] = []
        for subtask in pair:
            try:
                subtask.micro_batch(subtask.rows_of(events), watermark_ms=watermark_ms)
            except Exception as error:
                outputs.append((type(error), str(error)))
            else:
                outputs.append(by_key(subtask.take()))
        assert outputs[0] == outputs[1]
        if isinstance(outputs[0], tuple):
            event("failed")
            return
        event("matches" if any(one.startswith("main") for one in outputs[0]) else "no matches")
        assert plain(open_of(pair[0])) == plain(open_of(pair[1]))
        if then:
            # Who takes over may be the other kind: what they store is the same.
            snapshots = [(subtask.snapshot(), subtask.bases) for subtask in pair]
            if then == "exchange":
                snapshots.reverse()
            pair = [
                Subtask(patterns, is_text, as_columns=number == 0, restore=snapshot, bases=bases)
                for number, (snapshot, bases) in enumerate(snapshots)
            ]


def plain(stored: dict[Any, Any]) -> dict[Any, Any]:
    """Return what is stored; of partial matches what each has taken: links may stand in another order."""
    found = {name: entries for name, entries in stored.items() if " of " not in name}
    parts: dict[Any, dict[str, Any]] = defaultdict(dict)
    for name in stored.keys() - found.keys():
        kind, _, pattern = name.removeprefix("pattern/").partition(" of ")
        for key, rows in stored[name].items():
            parts[pattern, key][kind] = rows
    return {**found, **{at: [paths(own, match) for match in own["matches"]] for at, own in parts.items()}}


def paths(parts: dict[str, Any], match: Any) -> Any:
    state, chain, is_held = match
    taken = []
    while chain is not None:
        stage, number, chain = parts["chains"][chain]
        taken.append((stage, tuple(parts["events"][number])))
    return state, is_held, taken


def test_a_key_with_many_more_events_than_others_is_taken_alone() -> None:
    counts = np.array([3, 40_000, 4, 2] + [5] * 100)
    assert np.flatnonzero(find_long_keys(counts)).tolist() == [1]
    assert not find_long_keys(np.full(1_000, 50)).any()
    assert not find_long_keys(np.zeros(3, dtype=np.int64)).any()
    assert len(find_long_keys(np.empty(0, dtype=np.int64))) == 0
