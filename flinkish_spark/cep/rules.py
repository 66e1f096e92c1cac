"""Patterns in JSON, for rules that arrive while a job runs; the format is that of dynamic Flink CEP.

A rule names a pattern of the program, or is a graph: nodes with conditions and quantifiers, edges for their
order. It is data only: all functions that it names must be in the program.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from flinkish_spark.cep.conditions import ConditionLike
from flinkish_spark.cep.pattern import Pattern
from flinkish_spark.cep.stages import AfterMatchSkip, WithinType
from flinkish_spark.core.errors import PatternError

_UNITS_MS = {"MILLISECONDS": 1, "SECONDS": 1_000, "MINUTES": 60_000, "HOURS": 3_600_000, "DAYS": 86_400_000}
#: Contiguity by the type of an edge.
_EDGES: dict[str, Callable[[Pattern, Any], Pattern]] = {
    "STRICT": Pattern.next,
    "SKIP_TILL_NEXT": Pattern.followed_by,
    "SKIP_TILL_ANY": Pattern.followed_by_any,
    "NOT_NEXT": Pattern.not_next,
    "NOT_FOLLOW": Pattern.not_followed_by,
}
_SKIPS: dict[str, Callable[..., AfterMatchSkip]] = {
    "NO_SKIP": AfterMatchSkip.no_skip,
    "SKIP_TO_NEXT": AfterMatchSkip.to_next,
    "SKIP_PAST_LAST_EVENT": AfterMatchSkip.past_last_event,
    "SKIP_TO_FIRST": AfterMatchSkip.to_first,
    "SKIP_TO_LAST": AfterMatchSkip.to_last,
}
_PROPERTIES = ("SINGLE", "LOOPING", "TIMES", "OPTIONAL", "GREEDY")
_CONDITIONS = ("SQL", "CLASS")


@dataclass(frozen=True)
class KnownToRules:
    """The patterns and conditions that rules may name; rules can call no other functions."""

    #: By name, a pattern, or a function of a rule's arguments that returns one.
    patterns: Mapping[str, Pattern | Callable[..., Pattern]] = field(default_factory=dict)
    #: By name, a condition, or a function of a rule's arguments that returns one.
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def pattern(self, rule: str) -> Pattern:
        try:
            said = json.loads(rule)
        except (ValueError, RecursionError) as error:
            raise PatternError("a rule is no JSON", why=str(error), what_to_do="send an object") from None
        if not isinstance(said, dict):
            _refuse(said, "a rule is an object")
        if "pattern" not in said:
            return self._graph(said)
        _check_members(said, {"pattern"}, {"args"})
        found = self._resolve("pattern", self.patterns, said["pattern"], said.get("args"), Pattern)
        assert isinstance(found, Pattern)
        return found

    def _graph(self, said: Mapping[str, Any]) -> Pattern:
        _check_members(said, {"nodes"}, _GRAPH)
        if said.get("condition") is not None:
            _refuse(said["condition"], "a graph has no condition; its nodes have")
        pattern: Pattern | None = None
        for node, edge in _sort_nodes(said["nodes"], said.get("edges") or []):
            is_group = node.get("type") == "COMPOSITE"
            what: str | Pattern = self._graph(node) if is_group else _text(node, "name")
            if pattern is None:
                pattern = Pattern.begin(what, _skip(said.get("afterMatchStrategy")))
            else:
                pattern = _one_of(_EDGES, edge, "an edge's type")(pattern, what)
            pattern = self._node(pattern, node, is_group)
        assert pattern is not None
        window = said.get("window")
        if window is not None:
            _check_members(window, {"time"}, {"type"})
            kind = window.get("type", WithinType.FIRST_AND_LAST.value)
            within = _one_of({one.value: one for one in WithinType}, kind, "a window's type")
            pattern = pattern.within(_time_ms(window["time"]), within)
        return pattern

    def _node(self, pattern: Pattern, node: Mapping[str, Any], is_group: bool) -> Pattern:
        if not is_group:
            _check_members(node, {"name"}, _NODE)
            if node.get("condition") is not None:
                pattern = pattern.where(self._condition(node["condition"]))
        said = node.get("quantifier")
        if said is None:
            return pattern
        _check_members(said, set(), {"consumingStrategy", "properties", "times", "untilCondition"})
        properties = said.get("properties") or ["SINGLE"]
        for one in properties:
            if one not in _PROPERTIES:
                _refuse(one, f"a quantifier's properties are {', '.join(_PROPERTIES)}")
        return self._quantify(pattern, said, properties)

    def _quantify(self, pattern: Pattern, said: Mapping[str, Any], properties: Sequence[str]) -> Pattern:
        times = said.get("times") or {}
        if times:
            _check_members(times, {"from"}, {"to", "windowTime"})
        window = times.get("windowTime")
        window_ms = None if window is None else _time_ms(window)
        least = times.get("from", 1)
        if "LOOPING" in properties:
            pattern = pattern.times_or_more(least, window_ms)
        elif "TIMES" in properties:
            pattern = pattern.times(least, times.get("to", least), window_ms=window_ms)
        elif times:
            _refuse(times, "a node with times needs the property TIMES or LOOPING")
        if "LOOPING" in properties or "TIMES" in properties:
            strategy = said.get("consumingStrategy", "SKIP_TILL_NEXT")
            pattern = _one_of(_BETWEEN, strategy, "a quantifier's consumingStrategy")(pattern)
        if "GREEDY" in properties:
            pattern = pattern.greedy()
        if said.get("untilCondition") is not None:
            pattern = pattern.until(self._condition(said["untilCondition"]))
        return pattern.optional() if "OPTIONAL" in properties else pattern

    def _condition(self, said: Any) -> ConditionLike:
        if not isinstance(said, dict) or said.get("type") not in _CONDITIONS:
            _refuse(said, f"a condition is an object whose type is one of {', '.join(_CONDITIONS)}")
        if said["type"] == "SQL":
            _check_members(said, {"type", "expression"}, set())
            return _text(said, "expression")
        _check_members(said, {"type", "className"}, {"args"})
        found: ConditionLike = self._resolve(
            "condition", self.conditions, said["className"], said.get("args"), object
        )
        return found

    @staticmethod
    def _resolve(kind: str, known: Mapping[str, Any], name: Any, args: Any, wanted: type) -> Any:
        if name not in known:
            _refuse(name, f"the program has no {kind} of that name; it has {', '.join(known) or 'none'}")
        found = known[name]
        if args is None and isinstance(found, wanted):
            return found
        if args is not None and not isinstance(args, list):
            _refuse(args, "args are a list")
        try:
            made = found(*(args or ()))
        except Exception as error:
            _refuse(args, f"the {kind} '{name}' cannot be made of these: {type(error).__name__}: {error}")
        if not isinstance(made, wanted):
            _refuse(args, f"what '{name}' makes of these is no {kind}, but a {type(made).__name__}")
        return made


_BETWEEN: dict[str, Callable[[Pattern], Pattern]] = {
    "STRICT": Pattern.consecutive,
    "SKIP_TILL_NEXT": lambda pattern: pattern,
    "SKIP_TILL_ANY": Pattern.allow_combinations,
}
_NODE = {"name", "type", "quantifier", "condition"}
#: A graph may be a node of another graph.
_GRAPH = _NODE | {"nodes", "edges", "window", "afterMatchStrategy", "version"}


def _sort_nodes(nodes: Any, edges: Any) -> list[tuple[Mapping[str, Any], str]]:
    """Return the nodes in the order of the edges, each with the type of the edge that leads to it."""
    if not isinstance(nodes, list) or not nodes or not all(isinstance(one, dict) for one in nodes):
        _refuse(nodes, "nodes are a list of objects, one at least")
    by_name = {_text(one, "name"): one for one in nodes}
    following: dict[str, tuple[str, str]] = {}
    for edge in edges:
        _check_members(edge, {"source", "target", "type"}, set())
        for end in ("source", "target"):
            if edge[end] not in by_name:
                _refuse(edge, f"there is no node {edge[end]!r}")
        following[edge["source"]] = edge["target"], edge["type"]
    targets = {target for target, _ in following.values()}
    first = [name for name in by_name if name not in targets]
    found = [(by_name[first[0]], "")] if first else []
    name = first[0] if first else ""
    while name in following and len(found) <= len(nodes):
        name, kind = following[name]
        found.append((by_name[name], kind))
    if not len(found) == len(nodes) == len(by_name) == len(edges) + 1:
        _refuse([dict(one) for one in edges], "edges lead from one node through all others, each once")
    return found


def _skip(said: Any) -> AfterMatchSkip | None:
    if said is None:
        return None
    _check_members(said, {"type"}, {"patternName"})
    make, name = _one_of(_SKIPS, said["type"], "an afterMatchStrategy's type"), said.get("patternName")
    wants_name = make in (AfterMatchSkip.to_first, AfterMatchSkip.to_last)
    if wants_name != isinstance(name, str):
        _refuse(said, "SKIP_TO_FIRST and SKIP_TO_LAST have a patternName, and no other one has")
    skip: AfterMatchSkip = make(name) if wants_name else make()
    return skip


def _time_ms(said: Any) -> int:
    _check_members(said, {"unit", "size"}, set())
    unit_ms: int = _one_of(_UNITS_MS, said["unit"], "a unit")
    if type(said["size"]) is not int:
        _refuse(said, "a size is a whole number")
    return unit_ms * int(said["size"])


def _text(said: Mapping[str, Any], name: str) -> str:
    value = said.get(name)
    if not isinstance(value, str):
        _refuse(dict(said), f"'{name}' is text")
    return value


def _one_of(known: Mapping[str, Any], value: Any, what: str) -> Any:
    if not isinstance(value, str) or value not in known:
        _refuse(value, f"{what} is one of {', '.join(known)}")
    return known[value]


def _check_members(said: Any, needed: set[str], others: set[str]) -> None:
    """Refuse a value that is no object, lacks a required member, or has an unknown one."""
    if not isinstance(said, dict):
        _refuse(said, "this must be an object")
    missing, unknown = needed - said.keys(), said.keys() - needed - others
    if missing or unknown:
        why = [f"it has no {', '.join(sorted(missing))}"] if missing else []
        why += [f"unknown members: {', '.join(sorted(unknown))}"] if unknown else []
        _refuse(said, "; ".join(why))


def _refuse(said: Any, why: str) -> NoReturn:
    text = said if isinstance(said, str) else json.dumps(said, default=str)
    raise PatternError(f"a rule says {text[:200]}", why=why, what_to_do="correct the rule")
