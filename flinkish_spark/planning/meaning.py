"""The meaning of an operator's state: named facts, stored beside the names and types of its states."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pyspark.sql import Column

from flinkish_spark.cep.stages import AfterMatchSkip, Stage
from flinkish_spark.functions.aggregates import AggregateColumn
from flinkish_spark.functions.keyed import RichFunction
from flinkish_spark.functions.match_recognize import MatchRecognize
from flinkish_spark.joins.spec import IntervalJoin, TemporalJoin, WindowCoGroup, WindowJoin
from flinkish_spark.operators.patterns import LookedFor, PatternSearch
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
    RowPatterns,
    Windows,
)
from flinkish_spark.planning.stream_graph import KeyedNode, base_of
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

#: What may change under the same uid, by class: all other fields are part of the meaning. `docs/state.md`
#: says what becomes of the state, and `tests/unit/planning/test_meaning.py` shows it of each.
HARMLESS: Mapping[type, frozenset[str]] = {
    # Windows end where they began to; a window of another size, or another gap, is one of its own.
    **dict.fromkeys(
        (TumblingEventTimeWindows, TumblingProcessingTimeWindows), frozenset({"size_ms", "offset_ms"})
    ),
    **dict.fromkeys(
        (SlidingEventTimeWindows, SlidingProcessingTimeWindows),
        frozenset({"size_ms", "slide_ms", "offset_ms"}),
    ),
    **dict.fromkeys((EventTimeSessionWindows, ProcessingTimeSessionWindows), frozenset({"gap_ms"})),
    WindowSpec: frozenset({"allowed_lateness_ms", "late_output", "retraction_field"}),
    # Types of states evolve by the names of their fields.
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
    # Who joins is decided when a result is made, of elements that wait without a mark of the type.
    **dict.fromkeys(
        (IntervalJoin, WindowJoin),
        frozenset({"left_type", "right_type", "join_type", "function", "left_late", "right_late"}),
    ),
    WindowCoGroup: frozenset({"left_type", "right_type", "function", "left_late", "right_late"}),
    TemporalJoin: frozenset(
        {"left_type", "right_type", "join_type", "function", "version_ttl", "late_output"}
    ),
    PatternSearch: frozenset({"function", "late_output", "limit", "column_conditions", "comparisons"}),
    # The states of partial matches have the name and the automaton in their names.
    LookedFor: frozenset({"name", "automaton"}),
    Stage: frozenset({"name", "condition", "until"}),
    AfterMatchSkip: frozenset({"raises"}),
    # What is kept are rows, which another text reads as well.
    RowPatterns: frozenset({"keys", "late_output"}),
}

#: What is told in place of a field's value.
_INSTEAD: Mapping[tuple[type, str], Callable[[Any], Any]] = {
    (WindowSpec, "trigger"): lambda spec: spec.actual_trigger,
    (MatchRecognize, "clauses"): lambda said: said.clauses.get("WITHIN"),
}


def meaning_of(node: KeyedNode) -> dict[str, str]:
    """Return facts about an operator's state; functions, names and types of states change freely."""
    facts = {
        f"key of input {number}": ", ".join(map(_key_text, entry.keys))
        for number, entry in enumerate(node.entries, 1)
        if entry.distribution is Distribution.BY_KEY
    }
    function = node.function
    if isinstance(function, Joining):
        # By what they come from: where inputs change places, the state of each would be the other's.
        bases = [base_of(entry.parent) for entry in node.entries]
        if len(set(bases)) == len(bases):
            facts |= {
                f"elements of '{base}'": side for base, side in zip(bases, ("left", "right"), strict=True)
            }
    is_code = isinstance(function, RichFunction | BroadcastFunctions | UnkeyedCheckpointedFunction)
    facts |= {_OPERATOR: _FUNCTION} if is_code else dict(_facts(_OPERATOR, function))
    return facts


def _key_text(key: Any) -> str:
    if isinstance(key, Column):
        # Numbers behind the variables of a lambda depend on what the session has made before.
        text = str(key)
        return re.sub(r"_\d+\b", "", text) if "lambda" in text else text
    return key if isinstance(key, str) else _FUNCTION


def _facts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield what a value says, by name; what lies in a value has the names of both."""
    ours = next((one for one in type(value).__mro__ if one.__module__.startswith("flinkish_spark.")), None)
    if value is None or isinstance(value, str | int | float):
        yield name, "none" if value is None else str(value)
    elif isinstance(value, enum.Enum):
        yield name, value.name.lower().replace("_", " ")
    elif isinstance(value, AggregateColumn):
        yield name, f"{value.name} {value.fold.name}({value.field or '*'})"
    elif isinstance(value, tuple) and all(isinstance(one, AggregateColumn) for one in value):
        yield name, ", ".join(sorted(text for one in value for _, text in _facts(name, one)))
    elif isinstance(value, tuple):
        for number, one in enumerate(value, 1):
            yield from _facts(_name_of(name, one, number), one)
    elif ours is None or isinstance(value, RichFunction):
        yield name, _FUNCTION
    else:
        # A trigger of the program's fires when it says so, whatever it derives from: windows that have not
        # fired at their end would be taken for those that have.
        is_own = isinstance(value, Trigger) and type(value) is not ours is not Trigger
        yield name, f"{ours.__name__} of the program" if is_own else ours.__name__
        if isinstance(value, WindowAssigner):
            yield f"{name}.clock", value.clock.name.lower().replace("_", " ")
        for field, own in _fields(value, ours):
            if field not in HARMLESS.get(ours, ()):
                instead = _INSTEAD.get((ours, field))
                inner = field if name == _OPERATOR else f"{name}.{field}"
                yield from _facts(inner, own if instead is None else instead(value))


def _name_of(name: str, value: Any, number: int) -> str:
    if isinstance(value, LookedFor):
        return f"{name} {value.fingerprint}"
    return f"{name} {value.name}" if isinstance(value, Stage) else f"{name} {number}"


def _fields(value: Any, ours: type) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(ours):
        yield from ((one.name, getattr(value, one.name)) for one in dataclasses.fields(ours))
        return
    for parameter in inspect.signature(ours).parameters:
        if f"_{parameter}" in vars(value):
            yield parameter, vars(value)[f"_{parameter}"]
