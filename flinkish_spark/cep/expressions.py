"""Expressions over the rows of a match: columns, navigation, aggregates, and SQL functions of them.

Null is None, and logic has three values. The functions of values that are not null are in
:mod:`flinkish_spark.cep.values`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


class UnknownRowError(Exception):
    """The expression reads a row after the last known one, and more rows may come."""


@dataclass(slots=True)
class Frame:
    """The rows of a match, or of a possible match, as the input of expressions."""

    #: Rows of the key, in order, including those before the match and the known ones after it.
    rows: Sequence[Sequence[Any]]
    #: Index of the match's first row.
    start: int
    #: Variables of the match's rows, as far as they are known.
    labels: Sequence[str]
    #: Number of the match's rows that navigation and aggregates read: up to the current one, or all.
    counted: int
    known: int
    match_number: int = 0
    #: True if no more rows can come.
    is_ended: bool = False

    @classmethod
    def of(cls, events: Mapping[str, Sequence[Any]]) -> Frame:
        """Return the whole match of events by name; an event is a tuple, or the value of its only field."""
        rows = [one if isinstance(one, tuple) else (one,) for own in events.values() for one in own]
        labels = [name for name, own in events.items() for _ in own]
        return cls(rows, 0, labels, len(rows), len(rows), is_ended=True)

    def places(self, variables: frozenset[str] | None, count: int) -> Iterator[int]:
        for at in range(count):
            if variables is None or self.labels[at] in variables:
                yield self.start + at

    def last_place(self, variables: frozenset[str] | None, offset: int) -> int | None:
        """Return the index of the variables' last row, or of the `offset`-th row of theirs before it."""
        for at in range(self.counted - 1, -1, -1):
            if variables is None or self.labels[at] in variables:
                if offset == 0:
                    return self.start + at
                offset -= 1
        return None


class Expression(ABC):
    """An expression tree; an immutable value that serves all rows."""

    #: True if it reads other rows than the current one, apart from its parts.
    looks_around = False

    @abstractmethod
    def value(self, frame: Frame, place: int | None) -> Any:
        """Return the value at a row index; at None, each column is read at the row of its variable."""

    def parts(self) -> Sequence[Expression]:
        of = getattr(self, "of", None) or ()
        return (of,) if isinstance(of, Expression) else of

    def all_parts(self) -> Iterator[Expression]:
        yield self
        for part in self.parts():
            yield from part.all_parts()


@dataclass(frozen=True, slots=True)
class Column(Expression):
    """A field of the last row of one of the variables; None: of the current row."""

    field: int
    variables: frozenset[str] | None = None

    def value(self, frame: Frame, place: int | None) -> Any:
        if place is None:
            place = frame.last_place(self.variables, 0)
        return None if place is None else frame.rows[place][self.field]


@dataclass(frozen=True, slots=True)
class Literal(Expression):
    given: Any

    def value(self, frame: Frame, place: int | None) -> Any:
        return self.given


@dataclass(frozen=True, slots=True)
class Navigation(Expression):
    """An expression at another row: the first or last row of a variable, plus an offset."""

    of: Expression
    variables: frozenset[str] | None = None
    from_first: bool = False
    #: Offset among the rows of the variable, from the first or the last.
    offset: int = 0
    #: Number of rows after that one; negative for rows before it.
    rows: int = 0
    looks_around = True

    def value(self, frame: Frame, place: int | None) -> Any:
        if self.from_first:
            # FIRST reads all known rows of the variable: RUNNING does not limit it.
            places = frame.places(self.variables, frame.known)
            place = next((at for number, at in enumerate(places) if number == self.offset), None)
        else:
            place = frame.last_place(self.variables, self.offset)
        if place is None:
            return None
        place += self.rows
        if place >= len(frame.rows) and not frame.is_ended:
            raise UnknownRowError
        return self.of.value(frame, place) if 0 <= place < len(frame.rows) else None


@dataclass(frozen=True, slots=True)
class Classifier(Expression):
    """SQL's CLASSIFIER(): the variable of the current row, or of the last row of some variables."""

    variables: frozenset[str] | None = None
    looks_around = True

    def value(self, frame: Frame, place: int | None) -> Any:
        if place is None:
            place = frame.last_place(self.variables, 0)
        at = -1 if place is None else place - frame.start
        return frame.labels[at] if 0 <= at < frame.known else None


@dataclass(frozen=True, slots=True)
class MatchNumber(Expression):
    looks_around = True

    def value(self, frame: Frame, place: int | None) -> Any:
        return frame.match_number


@dataclass(frozen=True, slots=True)
class Final(Expression):
    """SQL's FINAL: an expression over all rows of the match, even if the output is row by row."""

    of: Expression
    looks_around = True

    def value(self, frame: Frame, place: int | None) -> Any:
        return self.of.value(replace(frame, counted=frame.known), place)


@dataclass(frozen=True, slots=True)
class Aggregate(Expression):
    """An aggregate over the non-null values of a variable's rows; null if there are none."""

    #: The aggregated value of each row; None: the row itself.
    of: Expression | None
    variables: frozenset[str] | None = None
    #: The aggregate function; None counts, with 0 for no rows.
    function: Callable[[list[Any]], Any] | None = None
    looks_around = True

    def value(self, frame: Frame, place: int | None) -> Any:
        places = frame.places(self.variables, frame.counted)
        if self.of is None:
            return sum(1 for _ in places)
        values = [one for one in (self.of.value(frame, at) for at in places) if one is not None]
        if self.function is None:
            return len(values)
        return self.function(values) if values else None


@dataclass(frozen=True, slots=True)
class FunctionCall(Expression):
    """A function of other expressions; null if one of them is null."""

    function: Callable[..., Any]
    of: tuple[Expression, ...]

    def value(self, frame: Frame, place: int | None) -> Any:
        values = [one.value(frame, place) for one in self.of]
        return None if None in values else self.function(*values)


@dataclass(frozen=True, slots=True)
class All(Expression):
    """SQL's AND, three-valued."""

    of: tuple[Expression, ...]

    def value(self, frame: Frame, place: int | None) -> Any:
        found: bool | None = True
        for one in self.of:
            value = one.value(frame, place)
            if value is False:
                return False
            found = None if value is None else found
        return found


@dataclass(frozen=True, slots=True)
class Negation(Expression):
    """SQL's NOT, three-valued."""

    of: Expression

    def value(self, frame: Frame, place: int | None) -> Any:
        value = self.of.value(frame, place)
        return None if value is None else not value


def any_of(parts: tuple[Expression, ...]) -> Expression:
    return Negation(All(tuple(Negation(part) for part in parts)))


@dataclass(frozen=True, slots=True)
class IsNull(Expression):
    of: Expression

    def value(self, frame: Frame, place: int | None) -> Any:
        return self.of.value(frame, place) is None


@dataclass(frozen=True, slots=True)
class CaseWhen(Expression):
    """SQL's CASE WHEN: the value of the first condition that holds, else the last value."""

    cases: tuple[tuple[Expression, Expression], ...]
    otherwise: Expression

    def parts(self) -> Sequence[Expression]:
        return (*(part for case in self.cases for part in case), self.otherwise)

    def value(self, frame: Frame, place: int | None) -> Any:
        for condition, value in self.cases:
            if condition.value(frame, place) is True:
                return value.value(frame, place)
        return self.otherwise.value(frame, place)


@dataclass(frozen=True, slots=True)
class Coalesce(Expression):
    """SQL's COALESCE: the first value that is not null."""

    of: tuple[Expression, ...]

    def value(self, frame: Frame, place: int | None) -> Any:
        values = (one.value(frame, place) for one in self.of)
        return next((one for one in values if one is not None), None)


def names_in(made: Expression) -> list[str]:
    named = (getattr(one, "variables", None) or () for one in made.all_parts())
    return list(dict.fromkeys(name for own in named for name in sorted(own)))
