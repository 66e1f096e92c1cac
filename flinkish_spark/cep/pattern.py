"""The API of patterns: names in an order, with conditions, repetitions and windows.

Names and semantics are Flink's, but a pattern is immutable: each call returns a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

from flinkish_spark.cep.compiler import compile_pattern
from flinkish_spark.cep.conditions import Always, ConditionLike, EventCondition, Or, both, condition_of
from flinkish_spark.cep.stages import DELIMITER, AfterMatchSkip, Contiguity, Stage, Stages, Times, WithinType
from flinkish_spark.core.errors import PatternError
from flinkish_spark.core.fields import check_arguments
from flinkish_spark.protocol.durations import Duration, milliseconds
from flinkish_spark.protocol.limits import UnusableValueError


@dataclass(frozen=True, slots=True)
class Pattern(Stages):
    """A sequence of events to search for in a stream.

    Create one with :meth:`begin`. Later calls describe the last name (conditions, repetitions, windows) or
    add another name. A pattern is immutable; each call returns a new one.

    Raises
    ------
    PatternError
        From every call: the pattern would be invalid. The message has the reason, and the name in the
        pattern.

    Examples
    --------
    >>> rising = (
    ...     Pattern.begin("first").where(lambda reading: reading.difference > 0)
    ...     .next("second").where(lambda reading: reading.difference > 0)
    ...     .within(15 * 60_000)
    ... )
    >>> rising.names
    ['first', 'second']
    """

    @staticmethod
    @check_arguments("first", skip="give one of AfterMatchSkip, as AfterMatchSkip.past_last_event()")
    def begin(first: str | Pattern, skip: AfterMatchSkip | None = None) -> Pattern:
        """Begin with a name, or with a group: a pattern that can be repeated as a whole.

        Parameters
        ----------
        skip
            The matches that a match discards; by default none, so that every match is emitted.
        """
        return Pattern((_stage(first, Contiguity.STRICT),), skip or AfterMatchSkip())

    def next(self, following: str | Pattern) -> Pattern:
        """Add a name for the very next event."""
        return self._add_stage(following, Contiguity.STRICT)

    def followed_by(self, following: str | Pattern) -> Pattern:
        """Add a name for a later event; events that do not fit may come in between."""
        return self._add_stage(following, Contiguity.RELAXED)

    def followed_by_any(self, following: str | Pattern) -> Pattern:
        """Add a name for a later event; each event that fits gives a match."""
        return self._add_stage(following, Contiguity.RELAXED_ANY)

    def not_next(self, name: str) -> Pattern:
        """Add a negated name: the very next event must not fit."""
        return self._add_negation(name, Contiguity.NOT_NEXT)

    def not_followed_by(self, name: str) -> Pattern:
        """Add a negated name: no event may fit before the next name's event, or before the window is over."""
        return self._add_negation(name, Contiguity.NOT_FOLLOWED_BY)

    def where(self, condition: ConditionLike) -> Pattern:
        """Add a condition to the last name; events must meet all of its conditions."""
        self._no_group("where")
        last, asked = self._last, condition_of(condition, f"{self._last.name}.where")
        return self._last_as(condition=both(last.condition, asked))

    def or_where(self, condition: ConditionLike) -> Pattern:
        """Add an alternative to the last name's conditions: an event must meet this or all of them."""
        self._no_group("or_where")
        last, asked = self._last, condition_of(condition, f"{self._last.name}.or_where")
        return self._last_as(
            condition=asked if isinstance(last.condition, Always) else Or(last.condition, asked)
        )

    def subtype(self, kind: type) -> Pattern:
        """Add a condition to the last name: its events must be instances of a class."""
        self._no_group("subtype")
        if not isinstance(kind, type):
            raise PatternError(f"subtype() of {self._last} got {kind!r}", what_to_do="give it a class")
        last = self._last
        asked = EventCondition(_IsInstance(kind), f"is a {kind.__name__}")
        return self._last_as(condition=both(last.condition, asked))

    def until(self, condition: ConditionLike) -> Pattern:
        """End the repetitions of the last name, or group, at an event that meets a condition."""
        last = self._last
        if last.until is not None:
            self._refuse("has two until()", "one event ends it", "join the conditions in one function")
        if not last.is_loop:
            self._refuse(
                "has an until()",
                "it can end only a name that repeats any number of times",
                "call one_or_more() or times_or_more() before it",
            )
        return self._last_as(until=condition_of(condition, f"{last.name}.until"))

    def optional(self) -> Pattern:
        """Make the last name, or group, optional."""
        last = self._last
        if len(self.stages) > 1 and self.stages[-2].is_greedy:
            self._refuse(
                "is optional",
                f"{self.stages[-2]} before it is greedy, so it would never be tried",
                "leave one of the two out",
            )
        if last.is_optional:
            self._refuse("is optional twice", "once is enough", "leave the second out")
        if last.contiguity.is_negation:
            self._refuse("is optional", "the name is negated", "leave optional() out")
        return self._last_as(is_optional=True)

    def one_or_more(self, window_ms: Duration | None = None) -> Pattern:
        """Repeat the last name, or group, one or more times.

        Parameters
        ----------
        window_ms
            Maximum time between two repetitions; by default unlimited.
        """
        return self._repeat("one_or_more", Times(1, None, _to_ms(window_ms)))

    def times(self, least: int, most: int | None = None, *, window_ms: Duration | None = None) -> Pattern:
        """Repeat the last name, or group, a number of times.

        Parameters
        ----------
        least, most
            Minimum and maximum number of repetitions; `most` is `least` by default. With `least` 0 it is
            optional.
        """
        _check_whole("times", least, 0 if most is not None else 1)
        if most is not None:
            _check_whole("times", most, max(least, 1))
        repeated = self._repeat(
            "times", Times(max(least, 1), least if most is None else most, _to_ms(window_ms))
        )
        return repeated._last_as(is_optional=True) if least == 0 else repeated

    def times_or_more(self, least: int, window_ms: Duration | None = None) -> Pattern:
        """Repeat the last name, or group, at least a number of times."""
        _check_whole("times_or_more", least, 1)
        return self._repeat("times_or_more", Times(least, None, _to_ms(window_ms)))

    def greedy(self) -> Pattern:
        """Make the last name greedy: an event that fits it is not tried for the next name."""
        last = self._last
        self._no_negation("greedy")
        if last.group is not None:
            self._refuse("is greedy", "a group cannot be", "leave greedy() out, or make a name greedy")
        if last.inner is Contiguity.RELAXED_ANY:
            self._refuse(
                "is greedy and allows combinations",
                "combinations pass over events that fit, and greedy ones do not",
                "leave one of the two out",
            )
        if last.times is None:
            self._refuse("is greedy", "it comes once", "call times() or one_or_more() before it")
        return self._last_as(is_greedy=True)

    def consecutive(self) -> Pattern:
        """Allow no events between the repetitions of the last name."""
        return self._set_contiguity(Contiguity.STRICT, "consecutive")

    def allow_combinations(self) -> Pattern:
        """Allow the repetitions of the last name to ignore events that fit."""
        return self._set_contiguity(Contiguity.RELAXED_ANY, "allow_combinations")

    def within(self, window_ms: Duration, within: WithinType = WithinType.FIRST_AND_LAST) -> Pattern:
        """Limit the duration of a match.

        Parameters
        ----------
        window_ms
            At least 1. A partial match times out at this duration; events exactly this far apart do not
            match.
        within
            The window is from the first event of the pattern to its last (the shortest of several counts), or
            from the previous event to the one of the last name.
        """
        most_ms = _to_ms(window_ms)
        _check_whole("within", most_ms, 1)
        if within is WithinType.FIRST_AND_LAST:
            return self._last_as(first_to_last_ms=most_ms)
        if within is WithinType.PREVIOUS_AND_CURRENT:
            return self._last_as(from_previous_ms=most_ms)
        raise PatternError(
            f"within() of {self._last} got {within!r}",
            what_to_do="give WithinType.FIRST_AND_LAST or WithinType.PREVIOUS_AND_CURRENT",
        )

    def explain(self) -> str:
        """Return the automaton that will run, as a table.

        Raises
        ------
        PatternError
            The pattern cannot be compiled. Giving it to a stream raises the same error.
        """
        return str(compile_pattern(self))

    def to_dot(self) -> str:
        """Return the automaton as a graph in Graphviz's DOT."""
        return compile_pattern(self).to_dot()

    @property
    def _last(self) -> Stage:
        return self.stages[-1]

    def _last_as(self, **facts: Any) -> Pattern:
        return replace(self, stages=(*self.stages[:-1], replace(self._last, **facts)))

    def _add_stage(self, following: str | Pattern, contiguity: Contiguity) -> Pattern:
        return replace(self, stages=(*self.stages, _stage(following, contiguity)))

    def _add_negation(self, name: str, contiguity: Contiguity) -> Pattern:
        given: object = name
        if isinstance(given, Pattern):
            raise PatternError(
                f"{contiguity.value} has the group {given.names}",
                what_to_do="give a name, and its condition by where()",
            )
        if self._last.is_optional:
            self._refuse(
                f"is optional, and '{name}' is {contiguity.value}",
                "without an event of it the negation has no first event",
                "use two patterns, one with the optional name and one without",
            )
        return self._add_stage(name, contiguity)

    def _repeat(self, call: str, times: Times) -> Pattern:
        self._no_negation(call)
        if self._last.times is not None:
            self._refuse(f"has {call}() and another repetition", "it has one", "leave one of them out")
        if times.window_ms is not None:
            _check_whole(call, times.window_ms, 1)
        # As in Flink, a repetition resets optional() and greedy(): call them after it.
        return self._last_as(times=times, is_optional=False, is_greedy=False, inner=Contiguity.RELAXED)

    def _set_contiguity(self, inner: Contiguity, call: str) -> Pattern:
        last = self._last
        if last.times is None:
            self._refuse(f"has {call}()", "it comes once", "call times() or one_or_more() before it")
        if last.inner is inner:
            self._refuse(f"has {call}() twice", "once is enough", "leave the second out")
        if last.inner is not Contiguity.RELAXED:
            self._refuse(
                "has consecutive() and allow_combinations()",
                "one allows no events in between, the other one all",
                "leave one of the two out",
            )
        return self._last_as(inner=inner)

    def _no_negation(self, call: str) -> None:
        if self._last.contiguity.is_negation:
            self._refuse(f"has {call}()", "the name is negated", f"leave {call}() out")

    def _no_group(self, call: str) -> None:
        if self._last.group is not None:
            self._refuse(f"has {call}()", "its names have conditions", "give the condition to a name of it")

    def _refuse(self, what: str, why: str, what_to_do: str) -> NoReturn:
        raise PatternError(f"{self._last} {what}", why=why, what_to_do=what_to_do)


@dataclass(frozen=True, slots=True)
class _IsInstance:
    kind: type

    def __call__(self, event: Any) -> bool:
        return isinstance(event, self.kind)


def _stage(given: str | Pattern, contiguity: Contiguity) -> Stage:
    if isinstance(given, Pattern):
        return Stage("+".join(given.names), contiguity, given)
    if not isinstance(given, str) or not given or DELIMITER in given or given.startswith("$"):
        raise PatternError(
            f"{given!r} is no name of a pattern",
            why=f"a name is text that does not begin with $ and has no {DELIMITER}",
            what_to_do='give one, as "first", or a Pattern as a group',
        )
    return Stage(given, contiguity)


def _to_ms(window_ms: Duration | None) -> int | None:
    try:
        found: int | None = milliseconds("window_ms", window_ms)
    except UnusableValueError as wrong:
        why = f"it must be {wrong.wanted}"
        raise PatternError(f"window_ms is {wrong.value!r}", why=why, what_to_do='give "10 seconds"') from None
    return found


def _check_whole(call: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise PatternError(
            f"{call}() got {value!r} ({type(value).__name__})",
            why=f"it must be a whole number, {least} or more",
            what_to_do="give one",
        )
