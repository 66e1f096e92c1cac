"""Patterns as a program writes them: names in an order, with conditions, repetitions and windows.

The words and what they mean are Flink's; a pattern is a value, though: each call returns another one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

from flinkish_spark.cep.compiler import compile_pattern
from flinkish_spark.cep.conditions import Always, ConditionLike, EventCondition, Or, both, condition_of
from flinkish_spark.cep.stages import DELIMITER, AfterMatchSkip, Contiguity, Stage, Stages, Times, WithinType
from flinkish_spark.core.errors import PatternError
from flinkish_spark.protocol.durations import Duration, milliseconds
from flinkish_spark.protocol.limits import UnusableValueError


@dataclass(frozen=True, slots=True)
class Pattern(Stages):
    """What is looked for in a stream, one event after the other.

    Begun by :meth:`begin`. What is called then says more about the name that stands last: conditions,
    repetitions, windows; or adds another name. A pattern never changes; each call returns a new one.

    Raises
    ------
    PatternError
        Of every call: what it says cannot be. The message says why, and names what it is said of.

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
    def begin(first: str | Pattern, skip: AfterMatchSkip | None = None) -> Pattern:
        """Begin with a name, or with a group: a pattern that can be repeated as a whole.

        Parameters
        ----------
        skip
            What a match puts an end to; by default nothing, and every match is emitted.
        """
        if skip is not None and not isinstance(skip, AfterMatchSkip):
            raise PatternError(
                f"begin() got {skip!r} as its skip strategy",
                what_to_do="give one of AfterMatchSkip, as AfterMatchSkip.past_last_event()",
            )
        return Pattern((_stage(first, Contiguity.STRICT),), skip or AfterMatchSkip())

    def next(self, following: str | Pattern) -> Pattern:
        """Add what the very next event has to be."""
        return self._add_stage(following, Contiguity.STRICT)

    def followed_by(self, following: str | Pattern) -> Pattern:
        """Add what has to come; events that do not fit may stand before it."""
        return self._add_stage(following, Contiguity.RELAXED)

    def followed_by_any(self, following: str | Pattern) -> Pattern:
        """Add what has to come; of several that fit each is tried."""
        return self._add_stage(following, Contiguity.RELAXED_ANY)

    def not_next(self, name: str) -> Pattern:
        """Add what the very next event must not be."""
        return self._add_negation(name, Contiguity.NOT_NEXT)

    def not_followed_by(self, name: str) -> Pattern:
        """Add what must not come before what follows; at the end of a pattern, before its window is over."""
        return self._add_negation(name, Contiguity.NOT_FOLLOWED_BY)

    def where(self, condition: ConditionLike) -> Pattern:
        """Ask for a condition of the last name, besides those that it has."""
        self._no_group("where")
        last, asked = self._last, condition_of(condition, f"{self._last.name}.where")
        return self._last_as(condition=both(last.condition, asked))

    def or_where(self, condition: ConditionLike) -> Pattern:
        """Let events of the last name fit that meet this condition, whatever it asked for before."""
        self._no_group("or_where")
        last, asked = self._last, condition_of(condition, f"{self._last.name}.or_where")
        return self._last_as(
            condition=asked if isinstance(last.condition, Always) else Or(last.condition, asked)
        )

    def subtype(self, kind: type) -> Pattern:
        """Ask events of the last name to be instances of a class, besides all else."""
        self._no_group("subtype")
        if not isinstance(kind, type):
            raise PatternError(f"subtype() of {self._last} got {kind!r}", what_to_do="give it a class")
        last = self._last
        asked = EventCondition(_IsInstance(kind), f"is a {kind.__name__}")
        return self._last_as(condition=both(last.condition, asked))

    def until(self, condition: ConditionLike) -> Pattern:
        """End the repetitions of the last name, or group, with an event; it is none of them itself."""
        last = self._last
        if last.until is not None:
            self._refuse("has two until()", "one event ends it", "join the conditions in one function")
        if not last.is_loop:
            self._refuse(
                "has an until()",
                "only what comes any number of times can be ended by it",
                "call one_or_more() or times_or_more() before it",
            )
        return self._last_as(until=condition_of(condition, f"{last.name}.until"))

    def optional(self) -> Pattern:
        """Let the last name, or group, be missing."""
        last = self._last
        if len(self.stages) > 1 and self.stages[-2].is_greedy:
            self._refuse(
                "is optional",
                f"{self.stages[-2]} before it is greedy, so it would never be tried",
                "leave one of the two out",
            )
        if last.is_optional:
            self._refuse("is optional twice", "once says it all", "leave the second out")
        if last.contiguity.is_negation:
            self._refuse("is optional", "it says what must not come", "leave optional() out")
        return self._last_as(is_optional=True)

    def one_or_more(self, window_ms: Duration | None = None) -> Pattern:
        """Let the last name, or group, come any number of times.

        Parameters
        ----------
        window_ms
            How much time may lie between two of them; by default any. Of all repetitions.
        """
        return self._repeat("one_or_more", Times(1, None, _to_ms(window_ms)))

    def times(self, least: int, most: int | None = None, *, window_ms: Duration | None = None) -> Pattern:
        """Ask for the last name, or group, so many times.

        Parameters
        ----------
        least, most
            From so many to so many times; `most` is `least` if it is left out. From 0: it may be missing.
        """
        _check_whole("times", least, 0 if most is not None else 1)
        if most is not None:
            _check_whole("times", most, max(least, 1))
        repeated = self._repeat(
            "times", Times(max(least, 1), least if most is None else most, _to_ms(window_ms))
        )
        return repeated._last_as(is_optional=True) if least == 0 else repeated

    def times_or_more(self, least: int, window_ms: Duration | None = None) -> Pattern:
        """Ask for the last name, or group, so many times at least."""
        _check_whole("times_or_more", least, 1)
        return self._repeat("times_or_more", Times(least, None, _to_ms(window_ms)))

    def greedy(self) -> Pattern:
        """Let the last name take as many events as it can: one that fits is not tried as what follows."""
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
        """Let nothing stand between the repetitions of the last name."""
        return self._set_contiguity(Contiguity.STRICT, "consecutive")

    def allow_combinations(self) -> Pattern:
        """Let repetitions of the last name pass over events that fit."""
        return self._set_contiguity(Contiguity.RELAXED_ANY, "allow_combinations")

    def within(self, window_ms: Duration, within: WithinType = WithinType.FIRST_AND_LAST) -> Pattern:
        """Give a match no more time than this.

        Parameters
        ----------
        window_ms
            From 1. A partial match for which the time is up is timed out; events that are just so far apart
            are too far apart.
        within
            From the first event of the pattern to its last: then the least of all that were said counts. Or
            from the event before to the one of the last name.
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
        """Return the automaton as a table: the very one that runs.

        Raises
        ------
        PatternError
            The pattern cannot be compiled; of this call, and where it is given to a stream.
        """
        return str(compile_pattern(self))

    def to_dot(self) -> str:
        """Return the automaton as a graph, in the language of Graphviz."""
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
                f"what is {contiguity.value} is the group {given.names}",
                why="a group has no condition that an event could fail",
                what_to_do="give a name, and its condition by where()",
            )
        if self._last.is_optional:
            self._refuse(
                f"is optional, and '{name}' is {contiguity.value}",
                "where it is missing nobody could say from which event on",
                "use two patterns, one with the optional name and one without",
            )
        return self._add_stage(name, contiguity)

    def _repeat(self, call: str, times: Times) -> Pattern:
        self._no_negation(call)
        if self._last.times is not None:
            self._refuse(f"has {call}() and another repetition", "it has one", "leave one of them out")
        if times.window_ms is not None:
            _check_whole(call, times.window_ms, 1)
        # What was said of the name before counts no more, as in Flink: optional() comes behind it.
        return self._last_as(times=times, is_optional=False, is_greedy=False, inner=Contiguity.RELAXED)

    def _set_contiguity(self, inner: Contiguity, call: str) -> Pattern:
        last = self._last
        if last.times is None:
            self._refuse(f"has {call}()", "it comes once", "call times() or one_or_more() before it")
        if last.inner is inner:
            self._refuse(f"has {call}() twice", "once says it all", "leave the second out")
        if last.inner is not Contiguity.RELAXED:
            self._refuse(
                "has consecutive() and allow_combinations()",
                "one lets nothing stand between events, the other everything",
                "leave one of the two out",
            )
        return self._last_as(inner=inner)

    def _no_negation(self, call: str) -> None:
        if self._last.contiguity.is_negation:
            self._refuse(f"has {call}()", "it says what must not come", f"leave {call}() out")

    def _no_group(self, call: str) -> None:
        if self._last.group is not None:
            self._refuse(f"has {call}()", "its names have conditions", "give the condition to a name of it")

    def _refuse(self, what: str, why: str, what_to_do: str) -> NoReturn:
        raise PatternError(f"{self._last} {what}", why=why, what_to_do=what_to_do, name=self._last.name)


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
