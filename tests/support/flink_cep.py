"""Patterns and inputs as JSON, run by our matcher and by Flink's own, behind tests/support/FlinkMatcher.java.

A case is a dict:

    pattern  stages: {"link": "begin" | "next" | "followed_by" | "followed_by_any" | "not_next" |
             "not_followed_by", "name": text or "group": stages, "calls": [[call, argument ...] ...]}
    skip     ["none"], ["next"], ["past_last"], ["first", name], ["last", name]; with a true behind it raises
    steps    [time] says that no event before it comes; [time, name, value, is_special] is an event

A condition is a dict of one entry: {"name": text}, {"value" | "time": [operator, number]}, {"true": true},
{"and" | "or" | "not": [conditions]}, {"count" | "total" | "sum" | "last": [name, operator, number]}. The last
four compare what a name has taken: how many, their sum, that with this event, the difference to the last.
"""

from __future__ import annotations

import json
import operator
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flinkish_spark.cep.automaton import StateKind
from flinkish_spark.cep.compiler import compile_pattern
from flinkish_spark.cep.matcher import Match, Matcher
from flinkish_spark.cep.pattern import Pattern
from flinkish_spark.cep.stages import AfterMatchSkip, WithinType
from flinkish_spark.core.errors import PatternError

ROOT = Path(__file__).resolve().parents[2]
JARS = ROOT / "build" / "flink-jars"
DRIVER = Path(__file__).with_name("FlinkMatcher.java")
Case = dict[str, Any]

OPERATORS = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    ">=": operator.ge,
    ">": operator.gt,
}
SKIPS = {
    "none": AfterMatchSkip.no_skip,
    "next": AfterMatchSkip.to_next,
    "past_last": AfterMatchSkip.past_last_event,
    "first": AfterMatchSkip.to_first,
    "last": AfterMatchSkip.to_last,
}


class Event(NamedTuple):
    id: int
    name: str
    value: int = 0


class Special(Event):
    """What `subtype` asks for."""

    __slots__ = ()


def condition(given: dict[str, Any]) -> Any:
    """Return the condition: a function of an event, or of an event and a context."""
    ((kind, value),) = given.items()
    match kind:
        case "true":
            return lambda event: True
        case "name":
            return lambda event: event.name == value
        case "value":
            compare, number = OPERATORS[value[0]], value[1]
            return lambda event: compare(event.value, number)
        case "time":
            compare, number = OPERATORS[value[0]], value[1]
            return lambda event, ctx: compare(ctx.timestamp(), number)
        case "and" | "or" | "not":
            parts = [_of_two(condition(part)) for part in value]
            joined = {"and": all, "or": any, "not": lambda found: not next(iter(found))}[kind]
            if any(looks_back(part) for part in value):
                return lambda event, ctx: joined(part(event, ctx) for part in parts)
            return lambda event: joined(part(event, None) for part in parts)
    name, compare, number = value[0], OPERATORS[value[1]], value[2]

    def looking_back(event: Event, ctx: Any) -> bool:
        before = ctx.events_for(name)
        if kind == "count":
            return compare(len(before), number)
        if kind in ("sum", "total"):
            own = event.value if kind == "sum" else 0
            return compare(own + sum(one.value for one in before), number)
        return compare(event.value - before[-1].value if before else 0, number)

    return looking_back


def looks_back(given: dict[str, Any]) -> bool:
    ((kind, value),) = given.items()
    if kind in ("and", "or", "not"):
        return any(looks_back(part) for part in value)
    return kind in ("time", "count", "sum", "total", "last")


def _of_two(function: Any) -> Any:
    return function if function.__code__.co_argcount == 2 else lambda event, ctx: function(event)


def pattern_of(
    stages: Sequence[dict[str, Any]],
    skip: AfterMatchSkip | None = None,
    conditions: Callable[[dict[str, Any]], Any] = condition,
    leaves_out: Sequence[str] = (),
) -> Pattern:
    """Return the pattern, made by the public calls in their order.

    Parameters
    ----------
    conditions
        Makes what a call is given of a condition.
    leaves_out
        Calls that are not made.
    """
    made: Any = None
    for stage in stages:
        is_group = "group" in stage
        what = pattern_of(stage["group"], None, conditions, leaves_out) if is_group else stage["name"]
        link = stage["link"]
        made = Pattern.begin(what, skip) if link == "begin" else getattr(made, link)(what)
        for call, *arguments in stage.get("calls", ()):
            if call not in leaves_out:
                made = _called(made, call, arguments, conditions)
    return made


def _called(
    made: Pattern, call: str, given: list[Any], conditions: Callable[[dict[str, Any]], Any]
) -> Pattern:
    match call:
        case "where" | "or_where" | "until":
            return getattr(made, call)(conditions(given[0]))
        case "subtype":
            return made.subtype(Special)
        case "one_or_more":
            return made.one_or_more(*given)
        case "times_or_more":
            return made.times_or_more(*given)
        case "times":
            return made.times(given[0], window_ms=given[1] if len(given) > 1 else None)
        case "times_range":
            return made.times(given[0], given[1], window_ms=given[2] if len(given) > 2 else None)
        case "within":
            kind = given[1] if len(given) > 1 else "first_and_last"
            return made.within(given[0], WithinType[kind.upper()])
    return getattr(made, call)(*given)


def skip_of(given: Sequence[Any]) -> AfterMatchSkip:
    kind, *rest = given
    made = SKIPS[kind](*rest[:1])
    return made.raise_on_miss() if rest[1:] == [True] else made


def ids(match: Match) -> dict[str, list[int]]:
    return {name: [event.id for event in events] for name, events in match.items()}


def ours(case: Case) -> dict[str, Any]:
    """Return what our matcher makes of a case, as the driver answers."""
    answer: dict[str, Any] = {"steps": []}
    try:
        pattern = pattern_of(case["pattern"], skip_of(case.get("skip", ["none"])))
        automaton = compile_pattern(pattern)
    except PatternError as error:
        return answer | {"refused": "PatternError", "says": str(error)}
    matcher = Matcher(automaton, pattern.skip)
    at_once = automaton.find_reachable(automaton.start)
    is_empty = any(state.kind is StateKind.FINAL for state in at_once)
    answer |= {"empty": is_empty, "states": len(automaton.states)}
    state, number = matcher.initial(), 0
    for time_ms, *event in case["steps"]:
        try:
            complete, over = matcher.advance(state, time_ms)
            matches = [one.match for one in complete]
            if event:
                name, value, is_special = (*event, 0, False)[:3]
                kind = Special if is_special else Event
                matches += matcher.process(state, kind(number, name, value), time_ms)
                number += 1
        except PatternError as error:
            return answer | {"failed": "PatternError", "says": str(error)}
        answer["steps"].append(
            {
                "matches": [ids(match) for match in matches],
                "timeouts": [[ids(lost.match), lost.time_ms] for lost in over],
                "open": len(state.partial),
                "held": len(state.held),
            }
        )
    return answer


class Flink:
    """Flink's own matcher, in a process that takes any number of cases."""

    def __init__(self) -> None:
        command = ["java", "-Xmx1g", "-Xshare:auto", "-cp", f"{JARS}/*", str(DRIVER)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def __call__(self, case: Case) -> dict[str, Any]:
        """Return what Flink makes of a case."""
        return self.all([case])[0]

    def all(self, cases: Iterable[Case]) -> list[dict[str, Any]]:
        """Return what Flink makes of cases; a pipe holds a few at a time."""
        assert self._process.stdin is not None and self._process.stdout is not None
        answers = []
        for case in cases:
            self._process.stdin.write(json.dumps(case) + "\n")
            self._process.stdin.flush()
            answers.append(json.loads(self._process.stdout.readline()))
        return answers

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(30)


def why_not() -> str | None:
    """Return why Flink's matcher cannot run here; None if it can."""
    if not any(JARS.glob("flink-cep-*-tests.jar")):
        return "no JARs of Flink's (`make flink`)"
    return None if shutil.which("java") else "no Java"


def difference(own: dict[str, Any], flinks: dict[str, Any]) -> str | None:
    """Return how two answers differ; None if they do not."""
    for outcome in ("refused", "failed"):
        if (outcome in own) != (outcome in flinks):
            return f"{outcome}: ours {own.get('says')!r}, Flink's {flinks.get('says')!r}"
    for name in ("empty", "states"):
        if own.get(name) != flinks.get(name):
            return f"{name}: ours {own.get(name)}, Flink's {flinks.get(name)}"
    for at, (here, there) in enumerate(zip(own["steps"], flinks["steps"], strict=False)):
        for name, found in here.items():
            if found != there[name]:
                return f"step {at}, {name}: ours {found}, Flink's {there[name]}"
    return None
