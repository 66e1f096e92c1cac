"""Compiles a pattern to its automaton, from the last name to the first.

The states and their names are Flink's, in the same order: a differential test compares the results. A name
becomes:

    once           one state: take goes on, ignore stays
    n to m times   a row of m such states; those above n may be left by proceed
    any number     a state that takes into itself and proceeds, after a row for the minimum number

An optional name has a proceed past it. A negated name has no state of its own but a proceed into a stop
state, from every state in which its event could come; at the end of a pattern with a window it is a pending
state. A group is its names, once for each of its repetitions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from flinkish_spark.cep.automaton import Action, Automaton, Draft, StateKind
from flinkish_spark.cep.conditions import ALWAYS, Condition, Not, both
from flinkish_spark.cep.stages import DELIMITER, Contiguity, Stage, Stages, Times
from flinkish_spark.core.errors import PatternError

#: Names that are not allowed for stages.
_END, _GROUP = "$end$", "$group$"


def compile_pattern(pattern: Stages) -> Automaton:
    names = pattern.names
    for name in names:
        if names.count(name) > 1:
            raise PatternError(
                f"the pattern has two names '{name}'",
                why="a match contains events by name",
                what_to_do="give each another one",
            )
    skipped_to = pattern.skip.name
    own = [stage.name for stage in pattern.stages if stage.group is None]
    if skipped_to is not None and skipped_to not in own:
        why = "it is in a group" if skipped_to in names else f"its names are {', '.join(own)}"
        raise PatternError(
            f"a match is to be skipped to '{skipped_to}', which the pattern does not have",
            why=why,
            what_to_do="skip to one of the names outside groups",
        )
    return _Compiler(pattern).compile()


@dataclass(frozen=True, slots=True)
class _Enclosing:
    stage: Stage
    #: True for the first repetition of the group.
    is_first: bool


@dataclass(frozen=True, slots=True)
class _Place:
    stages: tuple[Stage, ...]
    at: int
    #: The stages after it, also outside its group.
    following: Stage | None
    group: _Enclosing | None

    @property
    def stage(self) -> Stage:
        return self.stages[self.at]

    @property
    def is_head(self) -> bool:
        return self.group is not None and self.at == 0

    def negations(self) -> Iterable[Stage]:
        """Yield the negated stages before this one: directly before, or before optional stages in between."""
        for stage in reversed(self.stages[: self.at]):
            if stage.contiguity is Contiguity.NOT_FOLLOWED_BY:
                yield stage
            elif not stage.is_optional:
                return

    def ending(self) -> Condition | None:
        return None if self.group is None else self.group.stage.until

    def take(self, stage: Stage | None = None) -> Condition:
        return _unless(self.ending(), (stage or self.stage).condition)

    def proceed(self) -> Condition:
        return _unless(self.ending(), ALWAYS)

    def ignore(self) -> Condition | None:
        """Return the condition for ignoring an event before the stage's first one; None: never ignored."""
        contiguity = self.stage.contiguity
        if self.is_head:
            assert self.group is not None
            own = self.group.stage
            contiguity = own.contiguity if self.group.is_first else own.inner
        return self._passing(contiguity)

    def ignore_inside(self) -> Condition | None:
        """Return the condition for ignoring an event between two of the stage; None: never ignored."""
        contiguity = self.stage.inner
        if self.is_head:
            assert self.group is not None
            contiguity = self.group.stage.inner
        return self._passing(contiguity)

    def _passing(self, contiguity: Contiguity) -> Condition | None:
        if contiguity is Contiguity.RELAXED:
            return _unless(self.ending(), Not(self.stage.condition))
        return _unless(self.ending(), ALWAYS) if contiguity is Contiguity.RELAXED_ANY else None


def _unless(ending: Condition | None, condition: Condition) -> Condition:
    return condition if ending is None else both(Not(ending), condition)


def _endless(state: str) -> PatternError:
    return PatternError(
        "a group is repeated in which every name is optional",
        why="it could be repeated without an event, for ever",
        what_to_do="leave one of its names not optional, or do not repeat it",
    )


class _Compiler:
    def __init__(self, pattern: Stages) -> None:
        self._pattern = pattern
        self._states: dict[str, Draft] = {}
        self._stops: dict[str, Draft] = {}
        #: The state after a greedy loop that its until() has ended, by name of the state that follows the
        #: loop.
        self._ended: dict[str, Draft] = {}
        self._first_to_last_ms: int | None = None

    def compile(self) -> Automaton:
        stages = self._pattern.stages
        end = self._state(_END, StateKind.FINAL)
        self._first_to_last_ms = stages[-1].first_to_last_ms
        start = self._chain(stages, end, None, None)
        start.kind = StateKind.START
        self._check_windows()
        self._check_loops()
        self._check_start(start)
        return Automaton.of(self._states.values(), self._first_to_last_ms)

    def _chain(
        self, stages: tuple[Stage, ...], sink: Draft, following: Stage | None, group: _Enclosing | None
    ) -> Draft:
        """Return the first state of a sequence of stages that leads to `sink`."""
        for at in range(len(stages) - 1, -1, -1):
            place = _Place(stages, at, following, group)
            contiguity = place.stage.contiguity
            if at == 0 or not contiguity.is_negation:
                sink = self._convert_stage(place, sink)
            elif contiguity is Contiguity.NOT_NEXT:
                sink = self._not_next(place, sink)
            elif sink.kind is StateKind.FINAL and (
                place.stage.from_previous_ms is not None or self._first_to_last_ms is not None
            ):
                # At the end of a pattern with a window it is a state that waits until the window is over.
                sink, unwanted = self._make_state(place.stage, StateKind.PENDING), place.take()
                sink.add(Action.PROCEED, self._stop(place.stage.name, unwanted), unwanted)
                sink.add(Action.IGNORE, sink, Not(unwanted))
            # Elsewhere a negated stage is a condition of the states around it.
            following = place.stage
            if at > 0:
                windows = (self._first_to_last_ms, stages[at - 1].first_to_last_ms)
                self._first_to_last_ms = min((one for one in windows if one is not None), default=None)
        return sink

    def _not_next(self, place: _Place, sink: Draft) -> Draft:
        state = self._make_state(place.stage, StateKind.NORMAL)
        unwanted = place.take()
        stop = self._stop(place.stage.name, unwanted)
        # A proceed into the final state would be followed before the next event comes.
        onwards = Action.IGNORE if sink.kind is StateKind.FINAL else Action.PROCEED
        state.add(onwards, sink, Not(unwanted))
        state.add(Action.PROCEED, stop, unwanted)
        return state

    def _convert_stage(self, place: _Place, sink: Draft) -> Draft:
        stage = place.stage
        if stage.times is None:
            first = self._single(
                place, sink, sink, place.take(), place.ignore(), stage.is_optional, is_first=True
            )
        elif stage.is_loop:
            # Once the loop has begun, negations before optional names no longer matter.
            loop = self._loop(place, self._drop_negations(place, sink))
            first = self._repeat(place, loop, sink, stage.times)
        else:
            first = self._repeat(place, sink, sink, stage.times)
        self._stop_at_negations(place, first)
        return first

    def _repeat(self, place: _Place, sink: Draft, past: Draft, times: Times) -> Draft:
        """Return a row of states before `sink`, one per repetition; `past` is the state after all of them."""
        stage, until = place.stage, place.stage.until
        take, ignore = _unless(until, place.take()), place.ignore_inside()
        if ignore is not None:
            ignore = _unless(until, ignore)
        least, most = times.least, times.least if times.most is None else times.most
        if stage.is_greedy and least != most:
            self._refuse_what_fits(sink, take)
        inner_places = [(True, past)] * (most - least) + [(False, None)] * (least - 1)
        for is_optional, beyond in inner_places:
            sink = self._single(place, sink, beyond, take, ignore, is_optional, is_first=False)
            self._stop_at_following(place, sink)
        return self._single(place, sink, past, take, place.ignore(), stage.is_optional, is_first=True)

    def _single(
        self,
        place: _Place,
        sink: Draft,
        past: Draft | None,
        take: Condition,
        ignore: Condition | None,
        is_optional: bool,
        *,
        is_first: bool,
    ) -> Draft:
        """Return a state that takes one event; for a group, the first state of its sequence."""
        stage = place.stage
        if stage.group is not None:
            first = self._chain(stage.group.stages, sink, place.following, _Enclosing(stage, is_first))
            if is_optional:
                assert past is not None
                first.add(Action.PROCEED, past, place.proceed())
            return first
        state = self._make_state(stage, StateKind.NORMAL)
        onwards = self._drop_negations(place, sink)
        state.add(Action.TAKE, onwards, take)
        if is_optional:
            assert past is not None
            self._pass(place, state, past)
        if ignore is not None:
            group = place.group
            head_may_miss = place.is_head and group is not None and group.is_first and group.stage.is_optional
            waiting = state
            if is_optional or head_may_miss:
                # A partial match that has ignored an event cannot skip the optional name any more.
                waiting = self._state(stage.name, StateKind.NORMAL)
                waiting.add(Action.TAKE, onwards, take)
                waiting.add(Action.IGNORE, waiting, ignore)
                self._stop_at_negations(place, waiting)
            state.add(Action.IGNORE, waiting, ignore)
        return state

    def _pass(self, place: _Place, state: Draft, past: Draft) -> None:
        """Add a proceed, by which a state is left without taking an event."""
        stage, proceed = place.stage, place.proceed()
        if stage.is_greedy and stage.until is not None:
            ended = self._ended.get(past.name)
            if ended is None:
                raise PatternError(
                    f"{stage} is optional and greedy, has an until(), and follows a negated name",
                    why="its states cannot be distinguished",
                    what_to_do="leave one of these out",
                )
            state.add(Action.PROCEED, ended, both(proceed, stage.until))
            proceed = both(proceed, Not(stage.until))
        state.add(Action.PROCEED, past, proceed)

    def _loop(self, place: _Place, sink: Draft) -> Draft:
        """Return a state that takes any number of events, and can be left for `sink` at each event."""
        stage, until = place.stage, place.stage.until
        if stage.group is not None:
            again = self._make_state(stage, StateKind.NORMAL)
            first = self._chain(stage.group.stages, again, place.following, _Enclosing(stage, is_first=False))
            first.add(Action.PROCEED, sink, place.proceed())
            again.add(Action.PROCEED, first, place.proceed())
            return first
        ignore = place.ignore_inside()
        if ignore is not None:
            ignore = _unless(until, ignore)
        take, proceed = _unless(until, place.take()), place.proceed()
        state = self._make_state(stage, StateKind.NORMAL)
        if stage.is_greedy:
            if until is not None:
                # The event that ends a greedy loop may also be the one that follows it, which the loop would
                # else take.
                ended = self._copy(sink)
                state.add(Action.PROCEED, ended, both(proceed, until))
                self._ended[sink.name] = ended
                proceed = both(proceed, Not(until))
            state.add(Action.PROCEED, sink, proceed)
            self._refuse_what_fits(sink, place.take())
        else:
            state.add(Action.PROCEED, sink, proceed)
        state.add(Action.TAKE, state, take)
        self._stop_at_following(place, state)
        if ignore is not None:
            waiting = self._state(stage.name, StateKind.NORMAL)
            waiting.add(Action.TAKE, state, take)
            waiting.add(Action.IGNORE, waiting, ignore)
            state.add(Action.IGNORE, waiting, ignore)
            self._stop_at_following(place, waiting)
        return state

    @staticmethod
    def _refuse_what_fits(sink: Draft, take: Condition) -> None:
        sink.ways = [(action, target, both(asked, Not(take))) for action, target, asked in sink.ways]

    def _stop(self, name: str, unwanted: Condition) -> Draft:
        if name not in self._stops:
            stop = self._stops[name] = self._state(name, StateKind.STOP)
            stop.add(Action.TAKE, stop, unwanted)
        return self._stops[name]

    def _stop_at_negations(self, place: _Place, state: Draft) -> None:
        for negation in place.negations():
            unwanted = place.take(negation)
            state.add(Action.PROCEED, self._stop(negation.name, unwanted), unwanted)

    def _stop_at_following(self, place: _Place, state: Draft) -> None:
        following = place.following
        if following is not None and following.contiguity is Contiguity.NOT_FOLLOWED_BY:
            unwanted = place.take(following)
            state.add(Action.PROCEED, self._stop(following.name, unwanted), unwanted)

    def _drop_negations(self, place: _Place, sink: Draft) -> Draft:
        """Return the states after a stage that has taken an event, without the negations before the stage."""
        negations = {stage.name for stage in place.negations()}
        if not negations or not place.stage.is_optional:
            return sink

        def copy_states(of: Draft, above: frozenset[str]) -> Draft:
            if of.name in above:
                raise _endless(of.name)
            copy = self._state(of.name, of.kind)
            for action, target, asked in of.ways:
                if action is not Action.PROCEED:
                    copy.add(action, copy if target is of else target, asked)
                elif target.kind is not StateKind.STOP:
                    copy.add(action, copy_states(target, above | {of.name}), asked)
                elif target.name not in negations:
                    copy.add(action, target, asked)
            return copy

        return copy_states(sink, frozenset())

    def _copy(self, of: Draft) -> Draft:
        copy = self._state(of.name.split(DELIMITER)[0], of.kind)
        for action, target, asked in of.ways:
            copy.add(action, copy if target is of else target, asked)
        return copy

    def _make_state(self, stage: Stage, kind: StateKind) -> Draft:
        state = self._state(stage.name if stage.group is None else _GROUP, kind)
        if stage.times is None:
            state.from_previous_ms = stage.from_previous_ms
        elif DELIMITER in state.name:
            state.from_previous_ms = stage.times.window_ms
        return state

    def _state(self, name: str, kind: StateKind) -> Draft:
        numbered = (f"{name}{DELIMITER}{number}" for number in itertools.count())
        unused = next(one for one in itertools.chain([name], numbered) if one not in self._states)
        state = self._states[unused] = Draft(unused, name.split(DELIMITER)[0], kind)
        return state

    def _check_windows(self) -> None:
        last, window = self._pattern.stages[-1], self._first_to_last_ms
        between = [one.from_previous_ms for one in self._states.values() if one.from_previous_ms is not None]
        if window is not None and max(between, default=0) > window:
            raise PatternError(
                f"two events of the pattern may be {max(between)} ms apart, its first and last {window} ms",
                why="so the longer window never ends first",
                what_to_do="give a window between two events no more time than the one around all",
            )
        waits = last.name in self._states and self._states[last.name].from_previous_ms is not None
        if last.contiguity is Contiguity.NOT_FOLLOWED_BY and window is None and not waits:
            raise PatternError(
                f"{last} is negated and is the last one",
                why="without a window it is never known that no such event comes",
                what_to_do="call within() after it",
            )

    def _check_loops(self) -> None:
        """Refuse automata in which one event could follow proceeds in a circle."""
        done: set[str] = set()

        def visit(state: Draft, above: frozenset[str]) -> None:
            if state.name in above:
                raise _endless(state.name)
            if state.name not in done:
                for action, target, _ in state.ways:
                    if action is Action.PROCEED:
                        visit(target, above | {state.name})
                done.add(state.name)

        for state in self._states.values():
            visit(state, frozenset())

    def _check_start(self, start: Draft) -> None:
        """Refuse automata in which an event could stop the start state."""
        waiting, seen = [start], {start.name}
        while waiting:
            for action, target, _ in waiting.pop().ways:
                if action is not Action.PROCEED or target.name in seen:
                    continue
                if target.kind is StateKind.STOP:
                    name = target.stage
                    raise PatternError(
                        f"'{name}' is negated, and all names before it are optional",
                        why="without an event of them the negation has no first event",
                        what_to_do="use two patterns, one with the optional names and one without",
                    )
                seen.add(target.name)
                waiting.append(target)
