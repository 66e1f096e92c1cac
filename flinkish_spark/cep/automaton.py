"""The automaton of a pattern: a table of states and transitions that is printed, drawn and run."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flinkish_spark.cep.conditions import Always, Condition, Leaf, Take


class StateKind(enum.Enum):
    """The kind of a state: what happens to a partial match that reaches it."""

    START = "start"
    NORMAL = "normal"
    #: The partial match becomes a match when its window is over.
    PENDING = "pending"
    #: The partial match is a match.
    FINAL = "final"
    #: The partial match is discarded: an event came that must not come.
    STOP = "stop"


class Action(enum.Enum):
    #: The event becomes part of the match.
    TAKE = "take"
    #: The event is ignored.
    IGNORE = "ignore"
    #: The event is tried in the target state at once.
    PROCEED = "proceed"


@dataclass(frozen=True, slots=True)
class Transition:
    """A transition out of a state; `target` is the index of a state in the table."""

    action: Action
    target: int
    condition: Condition


@dataclass(frozen=True, slots=True)
class State:
    #: Unique; stored partial matches refer to the state by it.
    name: str
    #: The name in the pattern under which this state takes events.
    stage: str
    kind: StateKind
    transitions: tuple[Transition, ...]
    #: Time that a partial match may stay here after its last event; None: as long as its window allows.
    from_previous_ms: int | None = None


@dataclass(slots=True, eq=False)
class Draft:
    """A state under construction: transitions are added, and some get further conditions."""

    name: str
    stage: str
    kind: StateKind
    ways: list[tuple[Action, Draft, Condition]] = field(default_factory=list)
    from_previous_ms: int | None = None

    def add(self, action: Action, target: Draft, condition: Condition) -> None:
        self.ways.append((action, target, condition))


@dataclass(frozen=True)
class Automaton:
    #: The states, in an order that does not depend on conditions.
    states: tuple[State, ...]
    #: Maximum duration of a match; None: unlimited.
    first_to_last_ms: int | None = None

    @staticmethod
    def of(drafts: Collection[Draft], first_to_last_ms: int | None = None) -> Automaton:
        places = {one.name: at for at, one in enumerate(drafts)}
        states = []
        for one in drafts:
            ways = (Transition(action, places[to.name], condition) for action, to, condition in one.ways)
            states.append(State(one.name, one.stage, one.kind, tuple(ways), one.from_previous_ms))
        return Automaton(tuple(states), first_to_last_ms)

    @cached_property
    def start(self) -> int:
        return next(at for at, state in enumerate(self.states) if state.kind is StateKind.START)

    @cached_property
    def looks_back(self) -> tuple[bool, ...]:
        """For each state: True if its transitions depend on the events taken before."""
        return tuple(
            any(one.condition.looks_back for near in self.find_reachable(at) for one in near.transitions)
            for at in range(len(self.states))
        )

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        found = dict.fromkeys(
            leaf
            for state in self.states
            for transition in state.transitions
            for leaf in transition.condition.leaves()
        )
        return tuple(found)

    @cached_property
    def stages(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(state.stage for state in self.states))

    @property
    def names(self) -> tuple[str, ...]:
        stages = [state.stage for state in reversed(self.states) if not state.stage.startswith("$")]
        return tuple(dict.fromkeys(stages))

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of names and states, on which stored matches depend; conditions may change."""
        states = [(state.name, state.kind.value) for state in self.states]
        names = ", ".join(self.names)
        return f"({names}) {zlib.crc32(repr(states).encode()):08x}"

    @property
    def has_pending(self) -> bool:
        return any(state.kind is StateKind.PENDING for state in self.states)

    @cached_property
    def passes_over_others(self) -> bool:
        """True if an event for which no condition of the program holds changes nothing."""
        # It changes something under strict contiguity; and in loops and before optional stages, where it
        # turns one partial match into two.
        nothing = _Nothing({leaf: False for leaf in self.leaves})
        if any(leaf.looks_back for leaf in self.leaves):
            return False
        for at, state in enumerate(self.states):
            ways = [
                (one.action, one.target)
                for near in self.find_reachable(at)
                for one in near.transitions
                if one.condition.holds(nothing)
            ]
            # Proceeds alone take nothing; the loop also visits the states they lead to.
            others = [way for way in ways if way[0] is not Action.PROCEED]
            is_waiting = state.kind in (StateKind.NORMAL, StateKind.PENDING)
            if others != ([(Action.IGNORE, at)] if is_waiting else []):
                return False
        return True

    def find_reachable(self, start: int) -> Iterator[State]:
        """Yield a state and all states that it reaches by proceeds alone."""
        seen, waiting = {start}, [start]
        while waiting:
            state = self.states[waiting.pop()]
            yield state
            for one in state.transitions:
                if one.action is Action.PROCEED and one.target not in seen:
                    seen.add(one.target)
                    waiting.append(one.target)

    def deadline_ms(self, state: int, first_ms: int, previous_ms: int) -> int | None:
        from_previous = self.states[state].from_previous_ms
        ends = [
            begun + window
            for begun, window in ((first_ms, self.first_to_last_ms), (previous_ms, from_previous))
            if window is not None
        ]
        return min(ends, default=None)

    def __str__(self) -> str:
        rows = [("state", "kind", "on an event", "that is", "to")]
        for state in self.states:
            name, kind = state.name, state.kind.value
            if state.from_previous_ms is not None:
                kind += f", {state.from_previous_ms} ms"
            for one in state.transitions:
                rows.append((name, kind, one.action.value, str(one.condition), self.states[one.target].name))
                name = kind = ""
            if not state.transitions:
                rows.append((name, kind, "", "", ""))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        ]
        window = "any time" if self.first_to_last_ms is None else f"{self.first_to_last_ms} ms"
        return "\n".join([*(line.rstrip() for line in lines), f"first to last: {window}"])

    def to_dot(self) -> str:
        shapes = {StateKind.FINAL: "doublecircle", StateKind.STOP: "box", StateKind.START: "diamond"}
        lines = ["digraph pattern {", "  rankdir=LR;"]
        for state in self.states:
            lines.append(f"  {_quote(state.name)} [shape={shapes.get(state.kind, 'circle')}];")
        for state in self.states:
            for one in state.transitions:
                condition = "" if isinstance(one.condition, Always) else f"\n{one.condition}"
                label = _quote(f"{one.action.value}{condition}")
                target = _quote(self.states[one.target].name)
                lines.append(f"  {_quote(state.name)} -> {target} [label={label}];")
        return "\n".join([*lines, "}"])


@dataclass(slots=True)
class _Nothing:
    """An event with known answers to all conditions, none of which looks back."""

    facts: dict[Leaf, bool]
    event: Any = None
    take: Take | None = None
    context: Any = None


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
