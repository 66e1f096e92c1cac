"""Runs an automaton over the events of one key, in the order of their times.

A partial match is a state and the last taken event; each taken event points to the previous one. So partial
matches with a common beginning share it, one may branch off another at no cost, and events that no partial
match needs are garbage-collected. This replaces Flink's shared buffer.

An event in a state: proceeds are followed at once, and the transitions found there count as if they were
here. Each take and each ignore whose condition holds makes a new partial match, which replaces the old one;
the start state stays. If one of them reaches a stop state, all of them are discarded.

A match is emitted when it reaches the final state. With a skip strategy it is held while an older partial
match is open, since a match of that one would have to be emitted first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flinkish_spark.cep.automaton import Action, Automaton, StateKind
from flinkish_spark.cep.conditions import Always, ColumnCondition, Leaf, Take
from flinkish_spark.cep.stages import AfterMatchSkip, OpenMatches, Overflow, Skip
from flinkish_spark.core.errors import PatternError


# Frozen dataclasses take five times as long to create, and most events need two objects.
@dataclass(slots=True, eq=False)
class Event:
    """An event that a partial match has taken; immutable."""

    #: Its position among all events: its time, and a number that distinguishes events of one time, in the
    #: order in which they were taken.
    at: tuple[int, int]
    value: Any

    @property
    def time_ms(self) -> int:
        return self.at[0]


@dataclass(slots=True, eq=False)
class TakenEvent:
    """A taken event with its name in the pattern, linked to the previous one; immutable."""

    stage: str
    event: Event
    before: TakenEvent | None
    first: Event

    def path(self) -> list[TakenEvent]:
        """Return the chain of taken events up to this one, the first event first."""
        found, one = [], self
        while True:
            found.append(one)
            if one.before is None:
                return found[::-1]
            one = one.before


class PartialMatch(NamedTuple):
    state: int
    last: TakenEvent | None


#: Makes a PartialMatch of a pair, without a Python call for each.
_partial_match: Callable[[tuple[int, TakenEvent | None]], PartialMatch] = functools.partial(
    tuple.__new__, PartialMatch
)


class MatchQueue:
    """A binary heap of partial matches by their first events; one without an event is last."""

    # The heap's order among matches with the same first event decides which of them a skip strategy keeps: it
    # is part of the semantics, is stored unchanged, and is the same as in Flink.
    __slots__ = ("_heap",)

    def __init__(self, heap: Iterable[PartialMatch] = ()) -> None:
        self._heap = list(heap)

    def __iter__(self) -> Iterator[PartialMatch]:
        return iter(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    @staticmethod
    def of(matches: Iterable[PartialMatch]) -> MatchQueue:
        queue, kept, before = MatchQueue(), list(matches), _BEFORE_ALL_EVENTS
        for one in kept:
            begin = _NOT_BEGUN if one.last is None else one.last.first.at
            if begin < before:
                break
            before = begin
        else:
            # Matches in order, the usual case, are a heap already.
            queue._heap = kept
            return queue
        for one in kept:
            queue.add(one)
        return queue

    def first(self) -> PartialMatch | None:
        return self._heap[0] if self._heap else None

    def add(self, match: PartialMatch) -> None:
        """Add a match, after others with the same first event that are above it."""
        heap, at = self._heap, len(self._heap)
        heap.append(match)
        if not at:
            return
        begin = begins(match)
        while at > 0:
            above = (at - 1) >> 1
            if begin >= begins(heap[above]):
                break
            heap[at], at = heap[above], above
        heap[at] = match

    def pop(self) -> PartialMatch:
        heap = self._heap
        found, last = heap[0], heap.pop()
        if heap:
            self._sink(0, last)
        return found

    def remove(self, is_over: Callable[[PartialMatch], bool]) -> None:
        kept = [one for one in self._heap if not is_over(one)]
        if len(kept) < len(self._heap):
            self._heap = kept
            for at in range((len(kept) >> 1) - 1, -1, -1):
                self._sink(at, kept[at])

    def _sink(self, at: int, match: PartialMatch) -> None:
        heap, count, begin = self._heap, len(self._heap), begins(match)
        while at < count >> 1:
            below = 2 * at + 1
            if below + 1 < count and begins(heap[below]) > begins(heap[below + 1]):
                below += 1
            if begin <= begins(heap[below]):
                break
            heap[at], at = heap[below], below
        heap[at] = match


_NOT_BEGUN = (1 << 63, 0)
_BEFORE_ALL = -(1 << 63)
_BEFORE_ALL_EVENTS = (_BEFORE_ALL - 1, 0)


def begins(match: PartialMatch) -> tuple[int, int]:
    return _NOT_BEGUN if match.last is None else match.last.first.at


def order_of_emission(firsts: Sequence[int]) -> list[int]:
    """Return the order in which matches completed by one event are emitted, if none is held."""
    queue = MatchQueue()
    for number, first in enumerate(firsts):
        event = Event((first, 0), None)
        queue.add(PartialMatch(number, TakenEvent("", event, None, event)))
    return [queue.pop().state for _ in firsts]


#: Events of a match by name, in the order of their first events.
Match = dict[str, list[Any]]


def _match(path: Iterable[TakenEvent], take: Take | None) -> Match:
    found: Match = {}
    for one in path:
        event = one.event.value
        found.setdefault(one.stage, []).append(event if take is None else take(event))
    return found


@dataclass(slots=True)
class MatchState:
    #: Open partial matches, including the start state unless the key can never match again.
    partial: MatchQueue
    #: Matches that wait for older partial matches.
    held: MatchQueue = field(default_factory=MatchQueue)
    #: The number of the next taken event.
    next_number: int = 0

    @property
    def is_initial(self) -> bool:
        heap = self.partial._heap
        return len(heap) == 1 and heap[0].last is None and not self.held._heap

    @property
    def open_count(self) -> int:
        return sum(one.last is not None for one in self.partial)


class FlatMatches(NamedTuple):
    """The stored form of a key's open matches: rows that refer to each other by their indexes."""

    #: The taken events, in order.
    events: Sequence[Event]
    #: Of each taken event: the number of its name, the event's index, and the index of the previous one.
    chains: Sequence[tuple[int, int, int | None]]
    #: Of each partial match: the state, the index of its last taken event, and whether it is held.
    matches: Sequence[tuple[int, int | None, bool]]

    @staticmethod
    def of(state: MatchState, numbers: Mapping[str, int]) -> FlatMatches:
        """Flatten the open matches of a key; `numbers` has the numbers of names."""
        places: dict[TakenEvent, int] = {}
        events: dict[Event, int] = {}
        chains: list[tuple[int, int, int | None]] = []
        matches = []
        for queue, is_held in ((state.partial, False), (state.held, True)):
            for one in queue:
                for taken in () if one.last is None else one.last.path():
                    if taken not in places:
                        event = events.setdefault(taken.event, len(events))
                        before = None if taken.before is None else places[taken.before]
                        places[taken] = len(chains)
                        chains.append((numbers[taken.stage], event, before))
                matches.append((one.state, None if one.last is None else places[one.last], is_held))
        # Events are stored in order; their indexes distinguish events of one time.
        order = sorted(events, key=lambda event: event.at)
        at = {events[event]: place for place, event in enumerate(order)}
        return FlatMatches(order, [(stage, at[event], before) for stage, event, before in chains], matches)

    def state(self, names: Sequence[str]) -> MatchState:
        """Return the matching state; `names` are in the order of their numbers."""
        events, chains = self.events, list[TakenEvent]()
        for stage, event, before in self.chains:
            last = None if before is None else chains[before]
            first = events[event] if last is None else last.first
            chains.append(TakenEvent(names[stage], events[event], last, first))
        found: tuple[list[PartialMatch], list[PartialMatch]] = ([], [])
        for state, chain, is_held in self.matches:
            found[is_held].append(PartialMatch(state, None if chain is None else chains[chain]))
        partial, held = map(MatchQueue, found)
        return MatchState(partial, held, len(events))


class TimedMatch(NamedTuple):
    """A match or a timed-out partial match, and the time at which its window ended."""

    match: Match
    time_ms: int


#: A take or ignore transition for an event: the name of the state, True for a take, the target state and its
#: kind.
_Way = tuple[str, bool, int, StateKind]


@dataclass(slots=True, eq=False)
class EventAnswers:
    """Results of conditions computed before matching; events with equal results share one object."""

    #: Results of the conditions on one event.
    facts: dict[Leaf, bool]
    #: Transitions for such an event by state, filled on demand; None if conditions must be evaluated.
    ways: dict[int, list[_Way]] | None
    #: True if such an event may change something while no partial match is open.
    may_begin: bool = True


class EventOutcome(NamedTuple):
    """The result of one event for a partial match: its successors, and the completed matches."""

    #: Of each successor its state, and the name under which it has taken the event; None: ignored.
    kept: Sequence[tuple[int, str | None]]
    #: Of each completed match that name.
    complete: Sequence[str | None]
    #: True if a stop state was reached; then no successor is kept.
    is_stopped: bool


class _KnownByAnswers(dict[tuple[bool | None, ...], EventAnswers]):
    def __init__(self, make: Callable[[tuple[bool | None, ...]], EventAnswers]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, answers: tuple[bool | None, ...]) -> EventAnswers:
        found = self[answers] = self._make(answers)
        return found


class Matcher:
    """Runs one automaton; has no state of keys."""

    def __init__(self, automaton: Automaton, skip: AfterMatchSkip, take: Take | None = None) -> None:
        self.automaton, self._skip, self.take = automaton, skip, take
        self._states = automaton.states
        self._kinds = tuple(state.kind for state in automaton.states)
        self._looks_back = automaton.looks_back
        self._has_windows_between = any(state.from_previous_ms is not None for state in automaton.states)
        self._window_ms = automaton.first_to_last_ms
        self._has_windows = self._window_ms is not None or self._has_windows_between
        #: Of each transition by state: its condition, None if it always holds; its take or ignore, None for a
        #: proceed; and its target.
        self._transitions = tuple(
            tuple(
                (
                    None if isinstance(one.condition, Always) else one.condition.holds,
                    None
                    if one.action is Action.PROCEED
                    else (state.stage, one.action is Action.TAKE, one.target, self._kinds[one.target]),
                    one.target,
                )
                for one in state.transitions
            )
            for state in automaton.states
        )
        self._proceeds = tuple(any(way is None for _, way, _ in ways) for ways in self._transitions)
        #: The same for states without proceeds; None for others.
        self._direct = tuple(
            None if proceeds else tuple((asked, way) for asked, way, _ in ways if way is not None)
            for proceeds, ways in zip(self._proceeds, self._transitions, strict=True)
        )
        self._begin = PartialMatch(automaton.start, None)
        self._step = _Step(self)
        self._asks_nobody = all(isinstance(leaf, ColumnCondition) for leaf in automaton.leaves)
        #: Cache by results of the automaton's conditions, in order; a result is None if it was not evaluated.
        self.known: Mapping[tuple[bool | None, ...], EventAnswers] = _KnownByAnswers(self._answer)

    def initial(self) -> MatchState:
        return MatchState(MatchQueue([self._begin]))

    def process(
        self,
        state: MatchState,
        event: Any,
        time_ms: int,
        known: EventAnswers | None = None,
        processing_time_ms: int = 0,
    ) -> list[Match]:
        # The caller has advanced the time to the event.
        step, proceeds, looks_back = self._step, self._proceeds, self._looks_back
        ways: dict[int, list[_Way]] | None = None
        if known is None:
            step.facts = {}
        else:
            ways = known.ways
            step.facts = known.facts if ways is not None else dict(known.facts)
        if ways is None:
            ways = {}
        step.event, step.time_ms, step.processing_time_ms = event, time_ms, processing_time_ms
        made = _partial_match
        kept: list[PartialMatch] = []
        complete: list[PartialMatch] = []
        taken: Event | None = None
        changed = False
        for one in state.partial._heap:
            (at, before), so_far, is_stopped = one, len(kept), False
            step.last = before
            found = None if looks_back[at] else ways.get(at)
            if found is None:
                found = ways[at] = step.find_ways(at)
            for stage, is_taken, target, kind in found:
                if is_taken:
                    if taken is None:
                        taken = Event((time_ms, state.next_number), event)
                        state.next_number += 1
                    last = TakenEvent(stage, taken, before, taken if before is None else before.first)
                    following = made((target, last))
                    final = step.final_past(target) if proceeds[target] else None
                    if final is not None:
                        complete.append(made((final, last)))
                elif before is None:
                    continue
                else:
                    following = one if target == at else made((target, before))
                if kind is StateKind.FINAL:
                    complete.append(following)
                elif kind is StateKind.STOP:
                    is_stopped = True
                else:
                    kept.append(following)
            if before is None:
                kept.append(one)
            if is_stopped:
                del kept[so_far:]
            changed = changed or len(kept) != so_far + 1 or kept[so_far] is not one
        if changed:
            state.partial = MatchQueue.of(kept)
        # An event may also discard partial matches that have held a match back.
        if not state.held._heap:
            if not complete:
                return []
            if self._skip.kind is Skip.NONE and len(complete) == 1:
                end = complete[0].last
                assert end is not None
                return [_match(end.path(), self.take)]
        return [match for _, match in self._collect_matches(state, complete)]

    def outcome(self, state: int, answers: Sequence[bool]) -> EventOutcome:
        """Return the result of an event for a partial match in a state; the same as in :meth:`process`."""
        # The start state is not among the successors: it stays, unless the event stops it.
        step, is_start = self._step, state == self.automaton.start
        step.facts, step.last = dict(zip(self.automaton.leaves, answers, strict=True)), None
        kept: list[tuple[int, str | None]] = []
        complete: list[str | None] = []
        is_stopped = False
        for stage, is_taken, target, kind in step.find_ways(state):
            if is_taken and self._proceeds[target] and step.final_past(target) is not None:
                complete.append(stage)
            if is_start and not is_taken:
                continue
            name = stage if is_taken else None
            if kind is StateKind.FINAL:
                complete.append(name)
            elif kind is StateKind.STOP:
                is_stopped = True
            else:
                kept.append((target, name))
        return EventOutcome([] if is_stopped else kept, complete, is_stopped)

    def is_due(self, state: MatchState, time_ms: int) -> bool:
        """Return True if time must be advanced since a partial match may have timed out."""
        if self._has_windows_between:
            return True
        heap = state.partial._heap
        if self._window_ms is None or not heap:
            return False
        # With one window for all, the oldest partial match times out first.
        oldest = heap[0].last
        return oldest is not None and time_ms >= oldest.first.at[0] + self._window_ms

    def _answer(self, answers: tuple[bool | None, ...]) -> EventAnswers:
        given = zip(self.automaton.leaves, answers, strict=True)
        facts = {leaf: answer for leaf, answer in given if answer is not None}
        if not self._asks_nobody:
            return EventAnswers(facts, None)
        if None in answers:
            # A condition without a result raises an error where it is used.
            return EventAnswers(facts, {})
        self._step.facts, self._step.last = facts, None
        begins = self._step.find_ways(self.automaton.start)
        return EventAnswers(
            facts, {}, any(is_taken or kind is StateKind.STOP for _, is_taken, _, kind in begins)
        )

    def advance(self, state: MatchState, time_ms: int) -> tuple[list[TimedMatch], list[TimedMatch]]:
        """Advance the time, before which no event comes any more; return completed and timed-out matches."""
        if not self._has_windows or not self.is_due(state, time_ms):
            return [], []
        # Times are those of window ends, so they do not depend on how often this is called. A match that was
        # held has the time at which the last partial match that held it timed out.
        partial, complete, over = MatchQueue(), [], []
        completed_ms: dict[int, int] = {}
        freed_ms = _BEFORE_ALL
        for one in state.partial:
            ended_ms = self._find_timeout_ms(one, time_ms)
            if ended_ms is None:
                partial.add(one)
                continue
            freed_ms = max(freed_ms, ended_ms)
            if self._kinds[one.state] is StateKind.PENDING:
                complete.append(one)
                completed_ms[id(one)] = ended_ms
            else:
                assert one.last is not None
                over.append(TimedMatch(_match(one.last.path(), self.take), ended_ms))
        state.partial = partial
        found = self._collect_matches(state, complete)
        return [TimedMatch(match, completed_ms.get(id(one), freed_ms)) for one, match in found], over

    def keep_to(self, state: MatchState, limit: OpenMatches) -> int:
        """Discard partial matches above the limit, and return their number; held matches stay."""
        too_many = state.open_count - limit.most
        if too_many <= 0:
            return 0
        if limit.overflow is Overflow.FAIL:
            raise PatternError(
                f"{state.open_count} partial matches of one key are open",
                why=f"no more than {limit.most} may be",
                what_to_do="give the pattern a window, make its conditions narrower, or let some be lost: "
                "OpenMatches(most, Overflow.DISCARD_OLDEST)",
            )
        begun = sorted((one for one in state.partial if one.last is not None), key=begins)
        over = begun[:too_many] if limit.overflow is Overflow.DISCARD_OLDEST else begun[-too_many:]
        gone = {id(one) for one in over}
        state.partial.remove(lambda one: id(one) in gone)
        return too_many

    def next_deadline_ms(self, state: MatchState) -> int | None:
        if not self._has_windows:
            return None
        ends = (
            self.automaton.deadline_ms(one.state, one.last.first.time_ms, one.last.event.time_ms)
            for one in state.partial
            if one.last is not None
        )
        return min((end for end in ends if end is not None), default=None)

    def _find_timeout_ms(self, one: PartialMatch, time_ms: int) -> int | None:
        if one.last is None:
            return None
        window, from_previous = self.automaton.first_to_last_ms, self._states[one.state].from_previous_ms
        # The shorter window comes first: its end is the time of the timeout, even if the other has ended,
        # too.
        if from_previous is not None and time_ms >= one.last.event.time_ms + from_previous:
            return one.last.event.time_ms + from_previous
        if window is not None and time_ms >= one.last.first.time_ms + window:
            return one.last.first.time_ms + window
        return None

    def _collect_matches(
        self, state: MatchState, complete: list[PartialMatch]
    ) -> list[tuple[PartialMatch, Match]]:
        """Return the matches that can be emitted now, in the order of their first events."""
        for one in MatchQueue.of(complete):
            state.held.add(one)
        found: list[tuple[PartialMatch, Match]] = []
        while (first := state.held.first()) is not None:
            older = state.partial.first()
            if self._skip.kind is not Skip.NONE and older is not None and begins(older) < begins(first):
                break
            state.held.pop()
            assert first.last is not None
            path = first.last.path()
            is_over = self._make_skip_predicate(path)
            if is_over is not None:
                state.partial.remove(is_over)
                state.held.remove(is_over)
            found.append((first, _match(path, self.take)))
        return found

    def _make_skip_predicate(self, path: list[TakenEvent]) -> Callable[[PartialMatch], bool] | None:
        """Return the predicate for matches that this one discards; None if it discards none."""
        match self._skip.kind:
            case Skip.NONE:
                return None
            case Skip.TO_NEXT:
                up_to = path[0].event.at
            case Skip.PAST_LAST:
                up_to = path[-1].event.at
            case kind:
                named = [one.event.at for one in path if one.stage == self._skip.name]
                self._check_skip(path, named, kind)
                if not named:
                    return None
                before = named[0] if kind is Skip.TO_FIRST else named[-1]
                return lambda one: one.last is not None and begins(one) < before
        return lambda one: one.last is not None and begins(one) <= up_to

    def _check_skip(self, path: list[TakenEvent], named: list[tuple[int, int]], kind: Skip) -> None:
        if not self._skip.raises:
            return
        at = None if not named else named[0] if kind is Skip.TO_FIRST else named[-1]
        if at is None or at == path[0].event.at:
            raise PatternError(
                f"a match cannot be skipped to '{self._skip.name}'",
                why="it has taken no event of that name" if at is None else "that is where it begins itself",
                what_to_do="leave raise_on_miss() out, or skip to a name that every match has later on",
            )


class _Step:
    """One event during its match with all partial matches of its key: the input and context of conditions."""

    __slots__ = ("_matcher", "context", "event", "facts", "last", "processing_time_ms", "take", "time_ms")

    def __init__(self, matcher: Matcher) -> None:
        self._matcher, self.context, self.take = matcher, self, matcher.take
        self.event: Any = None
        self.facts: dict[Leaf, bool] = {}
        self.last: TakenEvent | None = None
        self.time_ms = self.processing_time_ms = 0

    def events_for(self, name: str) -> list[Any]:
        one, found, take = self.last, [], self.take
        while one is not None:
            if one.stage == name:
                event = one.event.value
                found.append(event if take is None else take(event))
            one = one.before
        return found[::-1]

    def timestamp(self) -> int:
        return self.time_ms

    def current_processing_time(self) -> int:
        return self.processing_time_ms

    def find_ways(self, state: int) -> list[_Way]:
        """Return the takes and ignores of the event in a state, also those after proceeds."""
        direct = self._matcher._direct[state]
        if direct is not None:
            return [way for holds, way in direct if holds is None or holds(self)]
        found: list[_Way] = []
        transitions, waiting = self._matcher._transitions, [state]
        while waiting:
            for holds, way, target in transitions[waiting.pop()]:
                if holds is not None and not holds(self):
                    continue
                if way is None:
                    waiting.append(target)
                else:
                    found.append(way)
        return found

    def final_past(self, state: int) -> int | None:
        """Return the final state that a state reaches without another event; None if there is none."""
        kinds, transitions, waiting = self._matcher._kinds, self._matcher._transitions, [state]
        while waiting:
            for holds, way, target in transitions[waiting.pop()]:
                if way is None and (holds is None or holds(self)):
                    if kinds[target] is StateKind.FINAL:
                        return target
                    waiting.append(target)
        return None
