"""The meaning of an operator's state: named facts, stored beside the names and types of its states."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql import Column

from flinkish_spark.contracts.operators import MeaningRules, OperatorFactory
from flinkish_spark.functions.aggregates import AggregateColumn
from flinkish_spark.functions.keyed import RichFunction
from flinkish_spark.joins.spec import IntervalJoin, TemporalJoin, WindowCoGroup, WindowJoin
from flinkish_spark.planning.factories import (
    Aggregating,
    AggregatingColumns,
    BroadcastFunctions,
    ChangelogAggregating,
    ChangelogFolding,
    FoldingColumns,
    FoldingElements,
    Joining,
    Normalizing,
    Reducing,
    ReducingColumns,
    Windows,
)
from flinkish_spark.planning.stream_graph import KeyedNode, name_bases
from flinkish_spark.transport.routing import Distribution
from flinkish_spark.windows.assigners import (
    EventTimeSessionWindows,
    ProcessingTimeSessionWindows,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WindowAssigner,
)
from flinkish_spark.windows.spec import AggregateWindow, ProcessWindow, ReduceWindow, WindowSpec
from flinkish_spark.windows.triggers import Trigger
from flinkish_spark.worker.broadcast_runner import UnkeyedCheckpointedFunction

_OPERATOR, _FUNCTION = "operator", "a function of the program"

#: Fields that may change under the same uid, by class; all others are part of the meaning. `docs/state.md`
#: describes what happens to the state, and `tests/unit/planning/test_meaning.py` shows it for each.
HARMLESS: Mapping[type, frozenset[str]] = {
    # Open windows keep their end; a window of another size or gap is a different window.
    **dict.fromkeys(
        (TumblingEventTimeWindows, TumblingProcessingTimeWindows), frozenset({"size_ms", "offset_ms"})
    ),
    **dict.fromkeys(
        (SlidingEventTimeWindows, SlidingProcessingTimeWindows),
        frozenset({"size_ms", "slide_ms", "offset_ms"}),
    ),
    **dict.fromkeys((EventTimeSessionWindows, ProcessingTimeSessionWindows), frozenset({"gap_ms"})),
    WindowSpec: frozenset({"allowed_lateness_ms", "late_output", "retraction_field"}),
    # State types evolve by field name.
    Windows: frozenset({"result"}),
    AggregateWindow: frozenset({"aggregate", "accumulator_type", "then"}),
    ReduceWindow: frozenset({"reduce", "then"}),
    ProcessWindow: frozenset({"process"}),
    Reducing: frozenset({"reduce", "ttl"}),
    ReducingColumns: frozenset({"reduce", "ttl"}),
    Aggregating: frozenset({"aggregate", "accumulator_type", "ttl"}),
    AggregatingColumns: frozenset({"aggregate", "accumulator_type", "ttl"}),
    FoldingElements: frozenset({"ttl"}),
    FoldingColumns: frozenset({"ttl"}),
    ChangelogAggregating: frozenset({"aggregate", "accumulator_type", "ttl"}),
    ChangelogFolding: frozenset({"ttl"}),
    Normalizing: frozenset({"ttl"}),
    # Pairs are found when a result is made; stored elements do not depend on the join type.
    **dict.fromkeys(
        (IntervalJoin, WindowJoin),
        frozenset({"left_type", "right_type", "join_type", "function", "left_late", "right_late"}),
    ),
    WindowCoGroup: frozenset({"left_type", "right_type", "function", "left_late", "right_late"}),
    TemporalJoin: frozenset(
        {"left_type", "right_type", "join_type", "function", "version_ttl", "late_output"}
    ),
}

_RULES = MeaningRules(HARMLESS, {(WindowSpec, "trigger"): lambda spec: spec.actual_trigger})


def describe_meaning(node: KeyedNode) -> dict[str, str]:
    """Return facts about an operator's state; functions, names and types of states change freely."""
    facts = {
        f"key of input {number}": ", ".join(map(_describe_key, entry.keys))
        for number, entry in enumerate(node.entries, 1)
        if entry.distribution is Distribution.BY_KEY
    }
    function = node.function
    if isinstance(function, Joining):
        # Named by their base: if the inputs were swapped, each side would get the other's state.
        bases = [name_bases(entry.parent) for entry in node.entries]
        if len(set(bases)) == len(bases):
            facts |= {
                f"elements of '{base}'": side for base, side in zip(bases, ("left", "right"), strict=True)
            }
    is_code = isinstance(function, RichFunction | BroadcastFunctions | UnkeyedCheckpointedFunction)
    facts |= (
        {_OPERATOR: _FUNCTION} if is_code else dict(_find_facts(_OPERATOR, function, find_rules(function)))
    )
    return facts


def find_rules(function: object) -> MeaningRules:
    return _RULES.merge(function.meaning_rules) if isinstance(function, OperatorFactory) else _RULES


def _describe_key(key: Any) -> str:
    if isinstance(key, Column):
        # Number suffixes of a lambda's variables depend on earlier expressions of the session.
        text = str(key)
        return re.sub(r"_\d+\b", "", text) if "lambda" in text else text
    return key if isinstance(key, str) else _FUNCTION


def _find_facts(name: str, value: Any, rules: MeaningRules) -> Iterator[tuple[str, str]]:
    """Yield the facts of a value by name; facts of nested values have dotted names."""
    ours = next((one for one in type(value).__mro__ if one.__module__.startswith("flinkish_spark.")), None)
    if value is None or isinstance(value, str | int | float):
        yield name, "none" if value is None else str(value)
    elif isinstance(value, enum.Enum):
        yield name, value.name.lower().replace("_", " ")
    elif isinstance(value, AggregateColumn):
        yield name, f"{value.name} {value.fold.name}({value.field or '*'})"
    elif isinstance(value, tuple) and all(isinstance(one, AggregateColumn) for one in value):
        yield name, ", ".join(sorted(text for one in value for _, text in _find_facts(name, one, rules)))
    elif isinstance(value, tuple):
        for number, one in enumerate(value, 1):
            yield from _find_facts(_name_fact(name, one, number, rules), one, rules)
    elif ours is None or isinstance(value, RichFunction):
        yield name, _FUNCTION
    else:
        # A trigger of the program may fire at other times than the class it derives from: windows that have
        # not fired at their end would be mistaken for fired ones.
        is_own = isinstance(value, Trigger) and type(value) is not ours is not Trigger
        yield name, f"{ours.__name__} of the program" if is_own else ours.__name__
        if isinstance(value, WindowAssigner):
            yield f"{name}.clock", value.clock.name.lower().replace("_", " ")
        for field, own in _find_fields(value, ours):
            if field not in rules.harmless.get(ours, ()):
                instead = rules.instead.get((ours, field))
                inner = field if name == _OPERATOR else f"{name}.{field}"
                yield from _find_facts(inner, own if instead is None else instead(value), rules)


def _name_fact(name: str, value: Any, number: int, rules: MeaningRules) -> str:
    part_name = rules.part_names.get(type(value))
    return f"{name} {number if part_name is None else part_name(value)}"


def _find_fields(value: Any, ours: type) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(ours):
        yield from ((one.name, getattr(value, one.name)) for one in dataclasses.fields(ours))
        return
    for parameter in inspect.signature(ours).parameters:
        if f"_{parameter}" in vars(value):
            yield parameter, vars(value)[f"_{parameter}"]
