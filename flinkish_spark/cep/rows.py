"""SQL row patterns (MATCH_RECOGNIZE): a regular expression over adjacent rows.

A row pattern is compiled to the same kind of table as a :class:`~flinkish_spark.cep.pattern.Pattern`, with a
state's transitions in the order of preference. It has its own matcher, since SQL needs not all matches but,
for each start row, the preferred one, among the rows after earlier matches.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.cep.automaton import Action, Automaton, Draft, StateKind
from flinkish_spark.cep.conditions import ALWAYS, Condition, Not
from flinkish_spark.cep.expressions import (
    Column,
    Expression,
    Frame,
    MatchNumber,
    Navigation,
    UnknownRowError,
)
from flinkish_spark.cep.stages import DELIMITER, Skip
from flinkish_spark.core.errors import PatternError


class RowPattern:
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Variable(RowPattern):
    name: str


@dataclass(frozen=True, slots=True)
class Concatenation(RowPattern):
    """A sequence of parts; without parts it matches nothing, which always fits."""

    parts: tuple[RowPattern, ...] = ()


@dataclass(frozen=True, slots=True)
class OneOf(RowPattern):
    options: tuple[RowPattern, ...]


@dataclass(frozen=True, slots=True)
class Repetition(RowPattern):
    """A part with a quantifier, greedy or reluctant; `most` None: unlimited."""

    of: RowPattern
    least: int
    most: int | None
    is_greedy: bool = True


@dataclass(frozen=True, slots=True)
class Exclusion(RowPattern):
    """SQL's {- -}: a part whose rows are left out of ALL ROWS PER MATCH."""

    of: RowPattern


@dataclass(frozen=True, slots=True)
class Anchor(RowPattern):
    """SQL's ^ before the first row of the key, or $ after the last one, which is known only at the end."""

    is_first: bool


class RowsPerMatch(enum.Enum):
    """The output rows of a match, and of rows without one."""

    ONE_ROW = "ONE ROW PER MATCH"
    ALL_ROWS = "ALL ROWS PER MATCH SHOW EMPTY MATCHES"
    ALL_ROWS_OMIT_EMPTY = "ALL ROWS PER MATCH OMIT EMPTY MATCHES"
    ALL_ROWS_WITH_UNMATCHED = "ALL ROWS PER MATCH WITH UNMATCHED ROWS"


@dataclass(frozen=True)
class RowSearch:
    """A row pattern with its clauses: the input of compiler and matcher."""

    pattern: RowPattern
    #: Conditions of variables; any row fits a variable without one.
    defined: dict[str, Expression] = field(default_factory=dict)
    #: Measures of a match, by name.
    measures: tuple[tuple[str, Expression], ...] = ()
    rows: RowsPerMatch = RowsPerMatch.ONE_ROW
    #: The row after a match at which the search continues, and the variables that it is relative to.
    skip: Skip = Skip.PAST_LAST
    skip_to: frozenset[str] = frozenset()
    #: Maximum duration of a match; None: unlimited.
    window_ms: int | None = None


_CHOICE, _ROUND, _END = "$choice$", "$round$", "$end$"
#: Prefix of the name of a state whose rows are excluded from the output.
_HIDDEN = "-"
#: Limit of the number of states.
_MOST_STATES = 10_000


@dataclass(frozen=True, slots=True)
class _AnchorCondition(Condition):
    is_first: bool
    looks_back = True

    def holds(self, given: Any) -> bool:
        place: _RowGap = given
        if self.is_first:
            return place.is_first
        if place.is_known_last is None:
            raise UnknownRowError
        return place.is_known_last

    def __str__(self) -> str:
        return "before the first row" if self.is_first else "behind the last row"


@dataclass(frozen=True, slots=True)
class _RowGap:
    """A gap between two rows; `is_known_last` is None while another row may follow."""

    is_first: bool
    is_known_last: bool | None
    #: Loop rounds that began at this gap.
    begun: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _EmptyRound(Condition):
    """The condition that a loop round, named by its first state, took no row."""

    round: str
    looks_back = True

    def holds(self, given: Any) -> bool:
        place: _RowGap = given
        return self.round in place.begun

    def __str__(self) -> str:
        return f"{self.round} has no row"


class _RowCompiler:
    def __init__(self) -> None:
        self._states: dict[str, Draft] = {}
        self._numbers: dict[str, int] = {}

    def compile(self, pattern: RowPattern) -> Automaton:
        end = self._state(_END, _END, StateKind.FINAL)
        start = self._state("$start$", _CHOICE, StateKind.START)
        start.add(Action.PROCEED, self._build(pattern, end, is_excluded=False), ALWAYS)
        return Automaton.of(self._states.values())

    def _build(self, part: RowPattern, then: Draft, *, is_excluded: bool) -> Draft:
        """Return the first state of a part that continues with `then`."""
        match part:
            case Variable(name):
                state = self._state(name, (_HIDDEN if is_excluded else "") + name, StateKind.NORMAL)
                state.add(Action.TAKE, then, ALWAYS)
                return state
            case Concatenation(parts):
                for one in reversed(parts):
                    then = self._build(one, then, is_excluded=is_excluded)
                return then
            case OneOf(options):
                return self._choice([self._build(one, then, is_excluded=is_excluded) for one in options])
            case Exclusion(of):
                return self._build(of, then, is_excluded=True)
            case Anchor(is_first):
                state = self._state(_CHOICE, _CHOICE, StateKind.NORMAL)
                state.add(Action.PROCEED, then, _AnchorCondition(is_first))
                return state
            case Repetition(of, least, most, is_greedy):
                return self._repeat(of, least, most, is_greedy, then, is_excluded)
        raise AssertionError(part)

    def _repeat(
        self,
        of: RowPattern,
        least: int,
        most: int | None,
        is_greedy: bool,
        then: Draft,
        is_excluded: bool,
    ) -> Draft:
        after = then
        if most is None:
            loop = self._state(_CHOICE, _CHOICE, StateKind.NORMAL)
            again = self._round(of, loop, after, is_excluded)
            self._prefer(loop, [again, after] if is_greedy else [after, again])
            then = loop
        else:
            for _ in range(most - least):
                again = self._round(of, then, after, is_excluded)
                then = self._choice([again, after] if is_greedy else [after, again])
        if least:
            then = self._round(of, then, after, is_excluded)
        for _ in range(least - 1):
            then = self._build(of, then, is_excluded=is_excluded)
        return then

    def _round(self, of: RowPattern, then: Draft, after: Draft, is_excluded: bool) -> Draft:
        """Return the first state of a loop round; a round without a row ends the loop."""
        if then is after or not _may_be_nothing(of):
            return self._build(of, then, is_excluded=is_excluded)
        begin = self._state(_ROUND, _CHOICE, StateKind.NORMAL)
        end = self._state(_CHOICE, _CHOICE, StateKind.NORMAL)
        without = _EmptyRound(begin.name)
        end.ways += [(Action.PROCEED, after, without), (Action.PROCEED, then, Not(without))]
        self._prefer(begin, [self._build(of, end, is_excluded=is_excluded)])
        return begin

    def _choice(self, options: Sequence[Draft]) -> Draft:
        state = self._state(_CHOICE, _CHOICE, StateKind.NORMAL)
        self._prefer(state, options)
        return state

    @staticmethod
    def _prefer(state: Draft, options: Sequence[Draft]) -> None:
        state.ways.extend((Action.PROCEED, one, ALWAYS) for one in options)

    def _state(self, name: str, stage: str, kind: StateKind) -> Draft:
        if len(self._states) >= _MOST_STATES:
            raise PatternError(
                f"a row pattern has more than {_MOST_STATES} states",
                why="each counted repetition has its own states, and PERMUTE has those of all orders",
                what_to_do="use smaller numbers of repetitions, or permute fewer variables",
            )
        number = self._numbers[name] = self._numbers.get(name, -1) + 1
        unused = f"{name}{DELIMITER}{number}"
        state = self._states[unused] = Draft(unused, stage, kind)
        return state


def _may_be_nothing(pattern: RowPattern) -> bool:
    match pattern:
        case Variable():
            return False
        case Concatenation(parts):
            return all(map(_may_be_nothing, parts))
        case OneOf(options):
            return any(map(_may_be_nothing, options))
        case Repetition(of, least):
            return least == 0 or _may_be_nothing(of)
        case Exclusion(of):
            return _may_be_nothing(of)
    return True


@dataclass(slots=True)
class RowState:
    #: Rows from `start` on, and those before it that expressions may read.
    rows: list[Sequence[Any]] = field(default_factory=list)
    times_ms: list[int] = field(default_factory=list)
    #: Index of the row with which the next match may begin.
    start: int = 0
    #: End index of the rows that are in an emitted match.
    covered: int = 0
    #: Number of rows of the key that were deleted.
    gone: int = 0
    matches: int = 0
    #: For each variable, by row: True if the row can be it, None if not evaluated. May be left out.
    facts: dict[str, list[bool | None]] = field(default_factory=dict)

    def forget(self, count: int) -> None:
        del self.rows[:count], self.times_ms[:count]
        for own in self.facts.values():
            del own[:count]
        self.start -= count
        self.covered = max(self.covered - count, 0)
        self.gone += count


@dataclass(frozen=True, slots=True)
class OutputRow:
    """An output row: of a match, or an unmatched row."""

    #: Times of the match's first and last row, or of the unmatched row.
    first_ms: int
    time_ms: int
    #: The input row; None for ONE ROW PER MATCH.
    row: Sequence[Any] | None
    #: Values of the measures; null for an unmatched row.
    values: tuple[Any, ...]
    first: Sequence[Any]


class RowMatcher:
    """Runs one row pattern; has no state of keys."""

    def __init__(self, search: RowSearch) -> None:
        self.search, self.automaton = search, _RowCompiler().compile(search.pattern)
        self._names = [state.stage.removeprefix(_HIDDEN) for state in self.automaton.states]
        self._hides = [state.stage.startswith(_HIDDEN) for state in self.automaton.states]
        expressions = (*search.defined.values(), *(measure for _, measure in search.measures))
        parts = [one for made in expressions for one in made.all_parts()]
        #: Number of rows before a match that expressions read.
        self._rows_before = max((-one.rows for one in parts if isinstance(one, Navigation)), default=0)
        #: True if expressions read MATCH_NUMBER(); True if the pattern has the anchor ^.
        self.asks_for_number = any(isinstance(one, MatchNumber) for one in parts)
        self.asks_for_first = any(
            isinstance(one.condition, _AnchorCondition) and one.condition.is_first
            for at in self.automaton.states
            for one in at.transitions
        )
        #: Variables whose conditions do not depend on the match.
        self._of_place = [name for name, made in search.defined.items() if is_of_place(name, made)]
        # If all variables are such, a row index that has failed once fails again.
        self._is_local = len(self._of_place) == len(search.defined)
        self._first = self._first_variables()

    def run(self, state: RowState, ended_to_ms: int) -> list[OutputRow]:
        """Return the output rows that are certain now: no row up to `ended_to_ms` comes any more."""
        told: list[OutputRow] = []
        for name in self._of_place:
            own = state.facts.setdefault(name, [])
            own += [None] * (len(state.rows) - len(own))
        first = [state.facts[name] for name in self._first]
        while state.start < len(state.rows):
            if first and all(own[state.start] is False for own in first):
                self._pass_over(state, told)
                continue
            window = self.search.window_ms
            is_ended = ended_to_ms >= _END_OF_TIME or (
                window is not None and ended_to_ms >= state.times_ms[state.start] + window
            )
            try:
                found = self._attempt(state, is_ended, ended_to_ms)
                if found is None:
                    self._pass_over(state, told)
                    continue
                labels, hidden = found
                told += list(self._tell(state, labels, hidden, is_ended))
            except UnknownRowError:
                break
            state.matches += 1
            state.covered = max(state.covered, state.start + len(labels))
            state.start = self._next_start(state.start, labels)
        return told

    def next_deadline_ms(self, state: RowState) -> int | None:
        """Return the time at which the waiting rows are decided at the latest; None if no row waits."""
        if state.start >= len(state.rows):
            return None
        if self.search.window_ms is None:
            return _END_OF_TIME
        return min(state.times_ms[state.start] + self.search.window_ms, _END_OF_TIME)

    def _attempt(
        self, state: RowState, is_ended: bool, ended_to_ms: int
    ) -> tuple[list[str], list[bool]] | None:
        """Return the preferred match at the start: variables by row, and whether each row is excluded.

        None if there is none; raises UnknownRowError if later rows may change it.
        """
        # Paths are tried in the order of preference. A path that needs a row which has not come is preferred
        # to all later ones, so nothing is certain before that row comes.
        states, start, times = self.automaton.states, state.start, state.times_ms
        count, window = len(state.rows), self.search.window_ms
        labels, hidden = [""] * (count - start), [False] * (count - start)
        begun, tried = frozenset[str](), set[tuple[int, int, frozenset[str]]]()
        waiting = [(self.automaton.start, start, begun, tried)]
        while waiting:
            at, place, begun, tried = waiting.pop()
            if states[at].kind is StateKind.FINAL:
                return labels[: place - start], hidden[: place - start]
            # A state that was visited with the same rows leads to nothing new.
            if (at, place, begun) in tried:
                continue
            tried.add((at, place, begun))
            ways = states[at].transitions
            if ways[0].action is Action.PROCEED:
                if states[at].name.startswith(_ROUND):
                    begun |= {states[at].name}
                is_last = None if place == count and ended_to_ms < _END_OF_TIME else place == count
                about: Any = _RowGap(state.gone + place == 0, is_last, begun)
                waiting += [
                    (one.target, place, begun, tried) for one in reversed(ways) if one.condition.holds(about)
                ]
                continue
            if place == count:
                if not is_ended:
                    raise UnknownRowError
                continue
            if window is not None and times[place] - times[start] >= window:
                continue
            labels[place - start], hidden[place - start] = self._names[at], self._hides[at]
            if self._fits(state, labels, place, is_ended):
                # If conditions depend on the row alone, the rows before it do not matter.
                seen = tried if self._is_local else set()
                waiting.append((ways[0].target, place + 1, frozenset(), seen))
        return None

    def _fits(self, state: RowState, labels: list[str], place: int, is_ended: bool) -> bool:
        at = place - state.start
        condition = self.search.defined.get(labels[at])
        if condition is None:
            return True
        own = state.facts.get(labels[at])
        known = None if own is None else own[place]
        if known is not None:
            return known
        frame = Frame(state.rows, state.start, labels, at + 1, at + 1, state.matches + 1, is_ended)
        found = condition.value(frame, None) is True
        if own is not None:
            own[place] = found
        return found

    def _first_variables(self) -> list[str]:
        """Return the variables possible for a match's first row; empty if conditions depend on more rows."""
        reached = list(self.automaton.find_reachable(self.automaton.start))
        if any(state.kind is StateKind.FINAL for state in reached):
            return []
        taking = (state for state in reached if state.transitions[0].action is Action.TAKE)
        names = dict.fromkeys(state.stage.removeprefix(_HIDDEN) for state in taking)
        return list(names) if all(name in self._of_place for name in names) else []

    def _tell(
        self, state: RowState, labels: list[str], hidden: list[bool], is_ended: bool
    ) -> Iterator[OutputRow]:
        search = self.search
        first, number = state.rows[state.start], state.matches + 1
        last_ms = state.times_ms[state.start + max(len(labels) - 1, 0)]

        def make_row(row: Sequence[Any] | None, counted: int) -> OutputRow:
            frame = Frame(state.rows, state.start, labels, counted, len(labels), number, is_ended)
            values = tuple(measure.value(frame, None) for _, measure in search.measures)
            return OutputRow(state.times_ms[state.start], last_ms, row, values, first)

        if search.rows is RowsPerMatch.ONE_ROW:
            yield make_row(None, len(labels))
        elif not labels and search.rows is not RowsPerMatch.ALL_ROWS_OMIT_EMPTY:
            yield make_row(first, 0)
        for at, is_hidden in enumerate(hidden):
            if search.rows is not RowsPerMatch.ONE_ROW and not is_hidden:
                yield make_row(state.rows[state.start + at], at + 1)

    def _pass_over(self, state: RowState, told: list[OutputRow]) -> None:
        """Skip a row with which no match begins."""
        if self.search.rows is RowsPerMatch.ALL_ROWS_WITH_UNMATCHED and state.start >= state.covered:
            row = state.rows[state.start]
            at_ms, nothing = state.times_ms[state.start], (None,) * len(self.search.measures)
            told.append(OutputRow(at_ms, at_ms, row, nothing, row))
        state.start += 1

    def _next_start(self, start: int, labels: Sequence[str]) -> int:
        if not labels or self.search.skip in (Skip.TO_NEXT, Skip.NONE):
            return start + 1
        if self.search.skip is Skip.PAST_LAST:
            return start + len(labels)
        found = [at for at, label in enumerate(labels) if label in self.search.skip_to]
        at = None if not found else found[0] if self.search.skip is Skip.TO_FIRST else found[-1]
        if not at:
            names = ", ".join(sorted(self.search.skip_to))
            raise PatternError(
                f"a match cannot be skipped to {names}",
                why="it has no such row"
                if at is None
                else "that is its first row, and it would be found again",
                what_to_do="skip to a variable that every match has after its first row",
            )
        return start + at

    def count_unneeded(self, state: RowState) -> int:
        return max(state.start - max(self._rows_before, 0), 0)


_END_OF_TIME = (1 << 63) - 1


def is_of_place(name: str, made: Expression) -> bool:
    """Return True if a variable's condition reads only its own row and rows directly before it."""
    if isinstance(made, Column):
        return made.variables is None or name in made.variables
    if isinstance(made, Navigation):
        is_current = not made.from_first and not made.offset and made.rows <= 0
        is_own = made.variables is None or name in made.variables
        return is_current and is_own and not any(one.looks_around for one in made.of.all_parts())
    return not made.looks_around and all(is_of_place(name, one) for one in made.parts())


def names_in(pattern: RowPattern) -> Iterator[str]:
    match pattern:
        case Variable(name):
            yield name
        case Concatenation(parts) | OneOf(parts):
            for one in parts:
                yield from names_in(one)
        case Repetition(of=of) | Exclusion(of):
            yield from names_in(of)
