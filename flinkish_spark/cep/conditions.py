"""Conditions of patterns, on an event alone or together with the events of a partial match."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flinkish_spark.cep.expressions import Expression, Frame, names_in
from flinkish_spark.core.errors import PatternError
from flinkish_spark.core.iterators import is_true
from flinkish_spark.core.validation import check_function, check_methods

#: A function that copies an event.
Take = Callable[[Any], Any]


class ConditionContext(Protocol):
    """The context of conditions that look back; valid only inside the call."""

    def events_for(self, name: str) -> Sequence[Any]:
        """Return the events that the partial match has taken under a name of the pattern, in order."""

    def timestamp(self) -> int:
        """Return the time of the event in milliseconds: event time, or the micro-batch's processing time."""

    def current_processing_time(self) -> int:
        """Return the micro-batch's processing time."""


class IterativeCondition(ABC):
    """A condition that reads the earlier events of its partial match, or needs open() and close().

    Called once for each partial match that waits for it. It must be a function of its arguments alone: after
    a crash a micro-batch is processed again.

    Examples
    --------
    >>> class Rising(IterativeCondition):
    ...     def filter(self, event, ctx):
    ...         return all(event.value > before.value for before in ctx.events_for("rise"))
    """

    def open(self, context: Any) -> None:
        """Create resources that cannot be pickled; called once per instance, with a context without state."""

    @abstractmethod
    def filter(self, event: Any, ctx: ConditionContext) -> bool:
        """Return True if the event fits."""

    def close(self) -> None:
        """Release the resources of `open`."""


@dataclass(frozen=True, slots=True)
class SqlCondition:
    """A condition in SQL that may refer to events that the partial match has taken.

    A field without a name is the event's own. With a name of the pattern before it, it is the field of the
    last event taken under that name, or null if there is none: the event itself is not taken yet.
    `FIRST(name.field)`, `LAST(name.field, n)`, and aggregates such as `SUM(name.field)` and `COUNT(name.*)`
    read the other events. The text is parsed and evaluated as in MATCH_RECOGNIZE, over columns of many events
    where possible; see docs/cep.md. Give text without names directly to `where`: then Spark evaluates it.

    Parameters
    ----------
    text
        The condition. Put names that are no identifiers in double quotes.

    Raises
    ------
    PatternError
        It is not a string. The text is checked when the fields of the events are known.

    Examples
    --------
    >>> from flinkish_spark.cep import Pattern
    >>> first = Pattern.begin("first")
    >>> rising = first.next("second").where(SqlCondition("value > first.value"))
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip():
            raise PatternError(
                f"SqlCondition got {self.text!r} ({type(self.text).__name__})",
                what_to_do='give it the text of a condition, as "value > first.value"',
            )


#: A condition as users write it: SQL text, a function of an event, a function of an event and a context, or
#: an object with `filter(event, ctx)`.
ConditionLike = str | Callable[..., Any] | IterativeCondition | SqlCondition


class ConditionInput(Protocol):
    """The input of a condition: one event and one partial match."""

    event: Any
    #: The function that copies the event for a user function; None if events are immutable.
    take: Take | None
    #: Results of the conditions on the event alone; the same dict for all partial matches.
    facts: dict[Leaf, bool]
    context: Any


class Condition(ABC):
    """A condition of a transition: a tree whose leaves are the user's conditions."""

    #: True if the result depends on the partial match, and not on the event alone.
    looks_back = False

    @abstractmethod
    def holds(self, given: ConditionInput) -> bool: ...

    def leaves(self) -> Iterator[Leaf]:
        return iter(())


class Leaf(Condition):
    """A condition of the user; two are equal only if they are the same object."""

    #: Its name in printed tables.
    label: str

    def leaves(self) -> Iterator[Leaf]:
        yield self

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True, slots=True, eq=False)
class EventCondition(Leaf):
    """A condition on one event; evaluated once per event, however many partial matches there are."""

    function: Callable[[Any], Any]
    label: str

    def holds(self, given: ConditionInput) -> bool:
        known = given.facts.get(self)
        if known is None:
            event = given.event if given.take is None else given.take(given.event)
            known = given.facts[self] = is_true(self.function(event), self.label)
        return known


@dataclass(frozen=True, slots=True, eq=False)
class ColumnCondition(Leaf):
    """A condition on one event in SQL; Spark evaluates it before the matcher gets the event."""

    #: A column expression over the fields of an event. Null means False.
    text: str

    @property
    def label(self) -> str:  # type: ignore[override]
        return self.text

    def holds(self, given: ConditionInput) -> bool:
        known = given.facts.get(self)
        if known is None:
            raise PatternError(
                f"the condition {self.text!r} was not evaluated",
                why="Spark evaluates SQL text when an event is read, and this one was read without Spark, or "
                "when the program had another text",
                what_to_do="give the pattern a function of an event; or take the savepoint with a drain, so "
                "that no event waits",
            )
        return known


@dataclass(frozen=True, slots=True, eq=False)
class ContextCondition(Leaf):
    filter: Callable[[Any, ConditionContext], Any]
    label: str
    #: The object with open() and close(), if the condition has them.
    owner: Any = None
    looks_back = True

    def holds(self, given: ConditionInput) -> bool:
        event = given.event if given.take is None else given.take(given.event)
        return is_true(self.filter(event, given.context), self.label)


class Comparison(Leaf):
    """A condition in SQL that may refer to events of its partial match; see :class:`SqlCondition`."""

    looks_back = True

    def __init__(self, text: str) -> None:
        self.text = self.label = text
        #: The parsed text, once the fields of events are known.
        self.expression: Expression | None = None

    def holds(self, given: ConditionInput) -> bool:
        known = given.facts.get(self)
        if known is not None:
            return known
        if self.expression is None:
            raise PatternError(
                f"the condition {self.text!r} is evaluated on an event whose fields are not known",
                what_to_do="give the pattern to a stream: CEP.pattern(stream, pattern)",
            )
        events = {name: given.context.events_for(name) for name in names_in(self.expression)}
        # The event itself is the last one, and has no name yet.
        frame = Frame.of({**events, "": (given.event,)})
        return self.expression.value(frame, None) is True


@dataclass(frozen=True, slots=True)
class Always(Condition):
    def holds(self, given: ConditionInput) -> bool:
        return True

    def __str__(self) -> str:
        return "any"


ALWAYS = Always()


@dataclass(frozen=True, slots=True)
class Not(Condition):
    of: Condition

    @property
    def looks_back(self) -> bool:  # type: ignore[override]
        return self.of.looks_back

    def holds(self, given: ConditionInput) -> bool:
        return not self.of.holds(given)

    def leaves(self) -> Iterator[Leaf]:
        return self.of.leaves()

    def __str__(self) -> str:
        return f"not ({self.of})"


@dataclass(frozen=True, slots=True)
class _BinaryCondition(Condition):
    first: Condition
    second: Condition

    @property
    def looks_back(self) -> bool:  # type: ignore[override]
        return self.first.looks_back or self.second.looks_back

    def leaves(self) -> Iterator[Leaf]:
        yield from self.first.leaves()
        yield from self.second.leaves()


@dataclass(frozen=True, slots=True)
class And(_BinaryCondition):
    def holds(self, given: ConditionInput) -> bool:
        return self.first.holds(given) and self.second.holds(given)

    def __str__(self) -> str:
        return f"({self.first}) and ({self.second})"


@dataclass(frozen=True, slots=True)
class Or(_BinaryCondition):
    def holds(self, given: ConditionInput) -> bool:
        return self.first.holds(given) or self.second.holds(given)

    def __str__(self) -> str:
        return f"({self.first}) or ({self.second})"


def both(first: Condition, second: Condition) -> Condition:
    if isinstance(first, Always):
        return second
    return first if isinstance(second, Always) else And(first, second)


def condition_of(given: ConditionLike, where: str) -> Leaf:
    if isinstance(given, str) and given.strip():
        return ColumnCondition(text=given.strip())
    if isinstance(given, SqlCondition):
        return Comparison(given.text.strip())
    method = getattr(given, "filter", None)
    if not isinstance(given, type) and callable(method):
        check_methods(given, IterativeCondition, f"the condition of {where}()")
        return ContextCondition(method, f"{where}: {type(given).__name__}", given)
    if callable(given) and not isinstance(given, type):
        name = getattr(given, "__name__", type(given).__name__)
        label = where if name == "<lambda>" else f"{where}: {name}"
        wanted = _count_required(given)
        check_function(given, f"the condition of {where}()", None)
        if wanted == 1:
            return EventCondition(given, label)
        if wanted == 2:
            return ContextCondition(given, label)
    raise PatternError(
        f"{where}() got {given!r} ({type(given).__name__})",
        what_to_do="give a function of an event, one of an event and a context, SQL text, a SqlCondition or "
        "an IterativeCondition",
    )


def _count_required(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [one for one in parameters if one.default is one.empty and one.kind in positional]
    is_open = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters)
    return len(required) or (1 if is_open or parameters else 0)
