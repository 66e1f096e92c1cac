"""The automaton of a pattern over the events of many keys at once, as columns.

All keys take their first event together, then their second one, and so on; one array holds the partial
matches of all keys. Transitions come from :meth:`Matcher.outcome`, so both implementations agree. Keys that
cannot be processed as columns are `left`: the caller processes them again, event by event, with a
:class:`~flinkish_spark.cep.matcher.Matcher`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.cep.automaton import Automaton
from flinkish_spark.cep.matcher import Matcher, order_of_emission
from flinkish_spark.cep.row_conditions import ComparedWithEarlier
from flinkish_spark.cep.stages import AfterMatchSkip, Skip
from flinkish_spark.state.layered import Array

#: No event, no chain, no name.
NONE = -1
#: Rows of the array of partial matches: key, state, last link of the chain, first event, its time, time of
#: the last event. Further rows have the earlier events that conditions read.
_KEY, _STATE, _CHAIN, _FIRST, _FIRST_MS, _LAST_MS, _NAMED = range(7)
#: Greatest time to which a window can be added. Ends of windows are below _BEHIND_ALL_MS, no end is above it.
FAR_MS = 1 << 60
_BEHIND_ALL_MS, _NO_WINDOW_MS = 5 * FAR_MS // 2, 4 * FAR_MS
_LAST_STEP = 1 << 31
#: Approximate costs of a step over columns, and of an event processed by itself, in microseconds.
_STEP_COSTS, _EVENT_COSTS = 150, 4


def can_be_in_columns(automaton: Automaton, skip: AfterMatchSkip) -> bool:
    windows = [automaton.first_to_last_ms, *(state.from_previous_ms for state in automaton.states)]
    if len(automaton.leaves) > 10 or any(window is not None and window > FAR_MS for window in windows):
        return False
    if skip.kind is Skip.NONE:
        return True
    # Which of two matches that end together survives a skip depends on when time is advanced.
    return skip.kind in (Skip.PAST_LAST, Skip.TO_NEXT) and not automaton.has_pending


class Chains(NamedTuple):
    """Events of partial matches as linked lists: each link has an event, its name and its predecessor."""

    #: By link: number of the name, number of the event, the link before, number of the key.
    stages: Array
    events: Array
    before: Array
    keys: Array

    def find_firsts(self) -> Array:
        found, link = self.events.copy(), self.before.copy()
        while (there := np.flatnonzero(link != NONE)).size:
            found[there] = self.events[link[there]]
            link[there] = self.before[link[there]]
        return found

    def walk(self, ends: Array) -> Iterator[tuple[Array, Array]]:
        """Yield the remaining chains and their next links, from the end of the chains to the beginning."""
        which = np.flatnonzero(ends != NONE)
        link = ends[which]
        while len(which):
            yield which, link
            link = self.before[link]
            goes_on = link != NONE
            which, link = which[goes_on], link[goes_on]


class Partial(NamedTuple):
    #: By partial match: number of the key, its state, and where its chain ends.
    keys: Array
    states: Array
    chains: Array


@dataclass
class Events:
    """The events of a micro-batch: first those in stored partial matches, then the new ones."""

    #: Number of events in stored partial matches.
    taken: int
    #: By key, the position of its first new event among all new ones, and the number of its new events.
    begins: Array
    counts: Array
    times_ms: Array
    #: By new event, the results of the conditions on single events, one bit each, in their order.
    answers: Array


@dataclass(frozen=True)
class EarlierEventCondition:
    #: Its position among the conditions of the automaton.
    bit: int
    #: The events it reads: number of the name, and True for its last event, False for its first.
    named: tuple[tuple[int, bool], ...]
    compare: ComparedWithEarlier


class MatchColumns(NamedTuple):
    """Matches and timed-out partial matches as columns, by key and in the order of emission."""

    keys: Array
    #: The first event of each.
    firsts: Array
    #: When each was found: twice the number of the key's event before it, plus one after it.
    steps: Array
    times_ms: Array
    #: True for a timed-out partial match.
    is_lost: Array
    #: Last link of the chain; the last event may come after it:
    chains: Array
    #: Number of the name, and the event after the chain; negative if there is none.
    stages: Array
    events: Array

    def select(self, which: Array) -> MatchColumns:
        return MatchColumns(*(part[which] for part in self))


@dataclass
class Outcome:
    #: The partial matches that are open after all events.
    partial: Partial
    chains: Chains
    found: MatchColumns
    #: By key, whether its partial matches have changed.
    is_changed: Array
    #: By key, whether it must be processed event by event, and this outcome does not count.
    is_left: Array
    #: By key, when its first partial match times out; :data:`NEVER_MS` if none does.
    due_ms: Array


NEVER_MS = (1 << 63) - 1


def find_long_keys(counts: Array) -> Array:
    """Return the mask of keys with so many events that event by event is faster for them."""
    order = np.argsort(-counts, kind="stable")
    descending = counts[order]
    alone = np.concatenate([[0], np.cumsum(descending)]) * _EVENT_COSTS
    together = np.append(descending, 0) * _STEP_COSTS
    found = np.zeros(len(counts), dtype=bool)
    found[order[: int(np.argmin(alone + together))]] = True
    return found


class ColumnarMatcher:
    """Runs one automaton over many keys; keeps no state of them."""

    def __init__(
        self,
        matcher: Matcher,
        skip: AfterMatchSkip,
        looks_back: Sequence[EarlierEventCondition],
        states: tuple[str, ...],
        answers: tuple[int | None, ...],
    ) -> None:
        automaton = matcher.automaton
        self.automaton, self.skip, self.looks_back = automaton, skip, tuple(looks_back)
        #: Names of its three states.
        self.states = states
        #: By condition, the number of its column of answers; None if it reads earlier events.
        self.answers = answers
        self.table = _Table(matcher)
        #: The earlier events that conditions read, each once; each has a row in the array of partial matches.
        self.named = tuple(dict.fromkeys(one for leaf in looks_back for one in leaf.named))
        self.state_looks_back = np.array(automaton.looks_back, dtype=bool)
        self.window_ms = automaton.first_to_last_ms
        self.from_previous_ms = np.array(
            [
                _NO_WINDOW_MS if one.from_previous_ms is None else one.from_previous_ms
                for one in automaton.states
            ]
        )
        self.has_between = any(one.from_previous_ms is not None for one in automaton.states)

    def run(self, events: Events, partial: Partial, chains: Chains, is_left: Array, now_ms: int) -> Outcome:
        return _Run(self, events, partial, chains, is_left).outcome(now_ms)


class _Table:
    """Cache of transitions by the answers of an event and the state of a partial match."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._count = len(matcher.automaton.states)
        self.start, self._leaves = matcher.automaton.start, len(matcher.automaton.leaves)
        self._stages = {name: at for at, name in enumerate(matcher.automaton.stages)}
        self._known = np.full((1 << self._leaves) * self._count, NONE)
        self._kept: list[list[tuple[int, int]]] = []
        self._complete: list[list[int]] = []
        self._facts: list[tuple[bool, bool]] = []
        self.is_pending = np.array([state.kind.value == "pending" for state in matcher.automaton.states])

    def find_outcomes(self, answers: Array, states: Array | int) -> Array:
        asked = answers * self._count + states
        found: Array = self._known[asked]
        if len(found) and found.min() < 0:
            for one in np.unique(asked[found < 0]).tolist():
                self._fill(one)
            return self.find_outcomes(answers, states)
        return found

    def _fill(self, asked: int) -> None:
        answers, state = divmod(asked, self._count)
        outcome = self._matcher.outcome(state, [bool(answers >> at & 1) for at in range(self._leaves)])
        stages = self._stages
        kept = [(target, NONE if stage is None else stages[stage]) for target, stage in outcome.kept]
        complete = [NONE if stage is None else stages[stage] for stage in outcome.complete]
        is_same = kept == [(state, NONE)] and not complete
        self._known[asked] = len(self._kept)
        self._kept.append(kept)
        self._complete.append(complete)
        self._facts.append((is_same, outcome.is_stopped))
        self.kept_counts = np.array([len(one) for one in self._kept])
        self.kept_begins = np.cumsum(self.kept_counts) - self.kept_counts
        flat = [one for own in self._kept for one in own]
        self.targets = np.array([target for target, _ in flat], dtype=np.int64)
        self.kept_stages = np.array([stage for _, stage in flat], dtype=np.int64)
        self.complete_counts = np.array([len(one) for one in self._complete])
        self.complete_begins = np.cumsum(self.complete_counts) - self.complete_counts
        self.complete_stages = np.array([one for own in self._complete for one in own], dtype=np.int64)
        self.is_same, self.is_stopped = np.array(self._facts, dtype=bool).T


class _Run:
    """One micro-batch. Keys are numbered by rank: those with most events first."""

    def __init__(
        self, matcher: ColumnarMatcher, events: Events, partial: Partial, chains: Chains, is_left: Array
    ) -> None:
        self._matcher, self._table, self._events = matcher, matcher.table, events
        counts = np.where(is_left, 0, events.counts)
        self._order = np.argsort(-counts, kind="stable")
        self._rank = np.empty(len(counts), dtype=np.int64)
        self._rank[self._order] = np.arange(len(counts))
        self._begins, self._counts = events.begins[self._order], counts[self._order]
        #: Links in pieces; each event may add one.
        self._links = [chains]
        self._link_count = len(chains.stages)
        self._is_left, self._is_changed = is_left[self._order], np.zeros(len(counts), dtype=bool)
        nothing = np.empty(0, dtype=np.int64)
        self._told = [
            MatchColumns(nothing, nothing, nothing, nothing, nothing.astype(bool), nothing, nothing, nothing)
        ]
        self._partial = self._enter(partial, chains)
        table = self._table
        #: Transitions of the start state by new event; None if they depend on earlier events.
        self._starts: Array | None = None
        if not matcher.state_looks_back[table.start]:
            self._starts = table.find_outcomes(events.answers, table.start)
            self._refuse_stops(self._starts, np.repeat(np.arange(len(events.counts)), events.counts))

    def outcome(self, now_ms: int) -> Outcome:
        done = [self._partial[:, :0]]
        steps = int(self._counts.max(initial=0))
        # Number of keys that have a first event, a second one, and so on.
        active = np.searchsorted(-self._counts, -np.arange(steps), side="left").tolist()
        for step in range(steps):
            live = int(np.searchsorted(self._partial[_KEY], active[step]))
            if live < self._partial.shape[1]:
                done.append(self._partial[:, live:])
                self._partial = self._partial[:, :live]
            self._take(step, active[step])
        done.append(self._partial)
        self._partial = np.concatenate(done, axis=1)
        self._partial = self._partial[:, np.argsort(self._partial[_KEY], kind="stable")]
        if self._partial.shape[1]:
            self._advance(np.full(len(self._counts), now_ms), _LAST_STEP)
        return self._end()

    def _enter(self, partial: Partial, chains: Chains) -> Array:
        named, times_ms = self._matcher.named, self._events.times_ms
        found = np.full((_NAMED + len(named), len(partial.keys)), NONE)
        ends = partial.chains
        found[_KEY], found[_STATE], found[_CHAIN] = self._rank[partial.keys], partial.states, ends
        if len(ends):
            found[_FIRST] = chains.find_firsts()[ends]
            found[_FIRST_MS], found[_LAST_MS] = times_ms[found[_FIRST]], times_ms[chains.events[ends]]
            for which, link in chains.walk(ends) if named else ():
                for at, (stage, is_last) in enumerate(named, _NAMED):
                    # Chains are read from the end, so the first event found is the last one.
                    own = chains.stages[link] == stage
                    own &= (found[at, which] == NONE) | (not is_last)
                    found[at, which[own]] = chains.events[link[own]]
        kept = ~self._is_left[found[_KEY]]
        found = found[:, kept]
        return found[:, np.argsort(found[_KEY], kind="stable")]

    def _refuse_stops(self, outcomes: Array, keys: Array) -> None:
        if len(outcomes) and self._table.is_stopped[outcomes].any():
            self._is_left[self._rank[keys[self._table.is_stopped[outcomes]]]] = True

    def _take(self, step: int, keys: int) -> None:
        """Process one event of each of the first keys."""
        events = self._events
        rows = self._begins[:keys] + step
        own_ms = events.times_ms[events.taken + rows]
        if self._partial.shape[1]:
            self._advance(own_ms, 2 * step)
        answers = events.answers[rows]
        complete = [*self._continue(step, rows, own_ms, answers), *self._begin(step, rows, own_ms, answers)]
        if complete:
            self._add_complete(complete)

    def _complete(
        self, step: int, keys: Array, firsts: Array, rows: Array, own_ms: Array, chains: Array, stages: Array
    ) -> MatchColumns:
        count, events = len(keys), rows[keys] + self._events.taken
        return MatchColumns(
            *(keys, firsts, np.full(count, 2 * step + 1), own_ms[keys]),
            *(np.zeros(count, dtype=bool), chains, stages, events),
        )

    def _continue(self, step: int, rows: Array, own_ms: Array, answers: Array) -> Iterator[MatchColumns]:
        """Advance open partial matches by an event; yield completed ones."""
        open_, table = self._partial, self._table
        if not open_.shape[1]:
            return
        keys, states = open_[_KEY], open_[_STATE]
        outcomes = table.find_outcomes(self._answer_look_backs(open_, rows, answers[keys]), states)
        is_same = table.is_same[outcomes]
        if is_same.all():
            return
        self._is_changed[keys[~is_same]] = True
        counts = table.complete_counts[outcomes]
        if counts.any():
            which, at = _expand(counts, table.complete_begins[outcomes])
            stages = table.complete_stages[at]
            firsts, chains = open_[_FIRST, which], open_[_CHAIN, which]
            yield self._complete(step, keys[which], firsts, rows, own_ms, chains, stages)
        which, at = _expand(table.kept_counts[outcomes], table.kept_begins[outcomes])
        kept = open_[:, which]
        kept[_STATE] = table.targets[at]
        self._add_links(kept, table.kept_stages[at], rows, own_ms)
        self._partial = kept

    def _begin(self, step: int, rows: Array, own_ms: Array, answers: Array) -> Iterator[MatchColumns]:
        """Begin new partial matches; yield those that one event completes."""
        table, starts = self._table, self._starts
        if starts is None:
            unbegun = np.full((_NAMED + len(self._matcher.named), len(rows)), NONE)
            unbegun[_KEY] = np.arange(len(rows))
            outcomes = table.find_outcomes(
                self._answer_look_backs(unbegun, rows, answers, is_start=True), table.start
            )
            self._refuse_stops(outcomes, self._order[: len(rows)])
        else:
            outcomes = starts[rows]
        counts = table.complete_counts[outcomes]
        if counts.any():
            own, at = _expand(counts, table.complete_begins[outcomes])
            firsts, nothing = rows[own] + self._events.taken, np.full(len(own), NONE)
            yield self._complete(step, own, firsts, rows, own_ms, nothing, table.complete_stages[at])
        counts = table.kept_counts[outcomes]
        if not counts.any():
            return
        own, at = _expand(counts, table.kept_begins[outcomes])
        self._is_changed[own] = True
        born = np.full((self._partial.shape[0], len(own)), NONE)
        born[_KEY], born[_STATE] = own, table.targets[at]
        born[_FIRST], born[_FIRST_MS] = rows[own] + self._events.taken, own_ms[own]
        self._add_links(born, table.kept_stages[at], rows, own_ms)
        if not self._partial.shape[1]:
            self._partial = born
            return
        both = np.concatenate([self._partial, born], axis=1)
        # Stable: new partial matches come after older ones.
        self._partial = both[:, np.argsort(both[_KEY], kind="stable")]

    def _answer_look_backs(self, open_: Array, rows: Array, answers: Array, is_start: bool = False) -> Array:
        """Add the answers of conditions that read earlier events."""
        matcher, taken = self._matcher, self._events.taken
        for leaf in matcher.looks_back:
            if is_start:
                asked = np.arange(len(answers))
            else:
                asked = np.flatnonzero(matcher.state_looks_back[open_[_STATE]])
            if not len(asked):
                continue
            keys = open_[_KEY, asked]
            before = [open_[_NAMED + matcher.named.index(one), asked] for one in leaf.named]
            holds = leaf.compare(rows[keys] + taken, before)
            if holds is None:
                self._is_left[keys] = True
                continue
            answers[asked] |= holds.astype(np.int64) << leaf.bit
        return answers

    def _add_links(self, partial: Array, stages: Array, rows: Array, own_ms: Array) -> None:
        """Append their key's event to partial matches that have a name for it."""
        which = np.flatnonzero(stages != NONE)
        if not len(which):
            return
        keys, own = partial[_KEY, which], stages[which]
        events = rows[keys] + self._events.taken
        self._links.append(Chains(own, events, partial[_CHAIN, which], self._order[keys]))
        partial[_CHAIN, which] = np.arange(self._link_count, self._link_count + len(own))
        self._link_count += len(own)
        partial[_LAST_MS, which] = own_ms[keys]
        for at, (stage, is_last) in enumerate(self._matcher.named, _NAMED):
            is_meant = own == stage
            if not is_last:
                is_meant &= partial[at, which] == NONE
            partial[at, which[is_meant]] = events[is_meant]

    def _join_links(self) -> Chains:
        if len(self._links) > 1:
            self._links = [Chains(*map(np.concatenate, zip(*self._links, strict=True)))]
        return self._links[0]

    def _find_ends(self) -> Array:
        """Return when each partial match times out: the earlier end of its two windows."""
        matcher, open_ = self._matcher, self._partial
        ends: Array = open_[_LAST_MS] + matcher.from_previous_ms[open_[_STATE]]
        if matcher.window_ms is not None:
            np.minimum(ends, open_[_FIRST_MS] + matcher.window_ms, out=ends)
        return ends

    def _advance(self, own_ms: Array, step: int) -> None:
        """Time out partial matches whose window ends by the time of their key."""
        matcher, open_ = self._matcher, self._partial
        if matcher.window_ms is None and not matcher.has_between:
            return
        now_ms = np.minimum(own_ms[open_[_KEY]], _BEHIND_ALL_MS)
        is_over = self._find_ends() <= now_ms
        if not is_over.any():
            return
        over = open_[:, is_over]
        ends = over[_LAST_MS] + matcher.from_previous_ms[over[_STATE]]
        if matcher.window_ms is not None:
            # The time between two events takes precedence.
            ends = np.where(ends <= now_ms[is_over], ends, over[_FIRST_MS] + matcher.window_ms)
        self._is_changed[over[_KEY]] = True
        self._partial = open_[:, ~is_over]
        count = over.shape[1]
        nothing, is_pending = np.full(count, NONE), self._table.is_pending[over[_STATE]]
        found = MatchColumns(
            *(over[_KEY], over[_FIRST], np.full(count, step), ends),
            *(~is_pending, over[_CHAIN], nothing, nothing),
        )
        if is_pending.any():
            self._told.append(_sort_matches(found.select(is_pending)))
            found = found.select(~is_pending)
        if len(found.keys):
            self._told.append(found)

    def _add_complete(self, parts: list[MatchColumns]) -> None:
        complete = parts[0]
        if len(parts) > 1:
            complete = MatchColumns(*map(np.concatenate, zip(*parts, strict=True)))
            complete = complete.select(np.argsort(complete.keys, kind="stable"))
        is_whole = self._matcher.skip.kind is Skip.NONE
        self._told.append(_sort_matches(complete) if is_whole else self._skip(complete))

    def _skip(self, complete: MatchColumns) -> MatchColumns:
        """Apply the skip strategy; return the matches to emit. Mark keys as left where order matters."""
        open_, kind = self._partial, self._matcher.skip.kind
        keys, first, counts = np.unique(complete.keys, return_index=True, return_counts=True)
        told = complete.select(first)
        oldest = np.searchsorted(open_[_KEY], keys)
        there = np.flatnonzero(oldest < open_.shape[1])
        there = there[open_[_KEY, oldest[there]] == keys[there]]
        # A match waits for partial matches that began before it, and one match may end another.
        self._is_left[keys[there][open_[_FIRST, oldest[there]] < told.firsts[there]]] = True
        up_to = np.full(len(self._counts), NONE)
        if kind is Skip.TO_NEXT:
            self._is_left[keys[counts > 1]] = True
            up_to[keys] = told.firsts
        else:
            last = told.events.copy()
            behind = told.stages == NONE
            if behind.any():
                last[behind] = self._join_links().events[told.chains[behind]]
            up_to[keys] = last
        kept = (open_[_FIRST] > up_to[open_[_KEY]]) & ~self._is_left[open_[_KEY]]
        self._is_changed[open_[_KEY, ~kept]] = True
        self._partial = open_[:, kept]
        return told

    def _end(self) -> Outcome:
        keys, open_ = self._order, self._partial
        open_ = open_[:, ~self._is_left[open_[_KEY]]]
        numbers = keys[open_[_KEY]]
        by_key = np.argsort(numbers, kind="stable")
        partial = Partial(numbers[by_key], open_[_STATE, by_key], open_[_CHAIN, by_key])
        due_ms = np.full(len(keys), NEVER_MS)
        if self._matcher.window_ms is not None or self._matcher.has_between:
            self._partial = open_
            ends = self._find_ends()
            in_time = ends < _BEHIND_ALL_MS
            np.minimum.at(due_ms, numbers[in_time], ends[in_time])
        is_left, is_changed = np.empty_like(self._is_left), np.empty_like(self._is_changed)
        is_left[keys], is_changed[keys] = self._is_left, self._is_changed
        found = MatchColumns(*map(np.concatenate, zip(*self._told, strict=True)))
        found = found._replace(keys=keys[found.keys])
        found = found.select(~is_left[found.keys])
        found = found.select(np.lexsort((found.steps, found.keys)))
        return Outcome(partial, self._join_links(), found, is_changed, is_left, due_ms)


def _expand(counts: Array, begins: Array) -> tuple[Array, Array]:
    which = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return which, np.arange(len(which)) + (begins - before)[which]


def _sort_matches(complete: MatchColumns) -> MatchColumns:
    """Return matches in the order in which a `Matcher` emits them."""
    keys, firsts = complete.keys, complete.firsts
    if len(keys) < 3:
        return complete
    begins = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    ends = np.append(begins[1:], len(keys))
    is_tied = np.append((keys[1:] == keys[:-1]) & (firsts[1:] == firsts[:-1]), False)
    tied = np.add.reduceat(is_tied, begins) > 0
    order = np.arange(len(keys))
    for begin, end in zip(begins[tied].tolist(), ends[tied].tolist(), strict=True):
        if end - begin > 2:
            _, ranks = np.unique(firsts[begin:end], return_inverse=True)
            order[begin:end] = begin + np.array(_order_of(tuple(ranks.tolist())))
    return complete.select(order)


_order_of = functools.lru_cache(maxsize=4096)(order_of_emission)


@dataclass
class StoredMatches:
    #: Partial matches; events are numbered among all stored events.
    partial: Partial
    chains: Chains
    #: The stored events: fields and time.
    events: pa.StructArray
    #: By key, whether its stored matches cannot be processed as columns.
    is_odd: Array

    @staticmethod
    def read(events: pa.ListArray, chains: pa.ListArray, matches: pa.ListArray, start: int) -> StoredMatches:
        count = len(matches)
        _, event_begins, event_rows = _flatten(events)
        chain_key, chain_begins, chain_rows = _flatten(chains)
        match_key, match_begins, match_rows = _flatten(matches)
        stage, event, before = (_to_numbers(chain_rows.field(at)) for at in range(3))
        links = Chains(
            stage,
            event + event_begins[chain_key],
            np.where(before == NONE, NONE, before + chain_begins[chain_key]),
            chain_key,
        )
        state, chain = (_to_numbers(match_rows.field(at)) for at in range(2))
        is_held = match_rows.field(2).to_numpy(zero_copy_only=False).astype(bool)
        is_start = chain == NONE
        is_odd = np.zeros(count, dtype=bool)
        # The start state of a key comes after all others, and no match is held back.
        ends = np.append(match_begins[1:], len(match_key))
        has_any = ends > match_begins
        is_odd[has_any] = ~is_start[ends[has_any] - 1]
        is_odd[match_key[is_held | (is_start != (state == start))]] = True
        is_odd |= np.bincount(match_key[is_start], minlength=count) > 1
        open_ = ~is_start
        partial = Partial(match_key[open_], state[open_], (chain + chain_begins[match_key])[open_])
        if len(partial.keys) > 1:
            firsts = links.find_firsts()[partial.chains]
            back = (partial.keys[1:] == partial.keys[:-1]) & (firsts[1:] < firsts[:-1])
            is_odd[partial.keys[1:][back]] = True
        return StoredMatches(partial, links, event_rows, is_odd)


def to_stored_lists(
    partial: Partial, chains: Chains, chosen: Array, start: int, events: Callable[[Array], pa.StructArray]
) -> tuple[pa.ListArray, pa.ListArray, pa.ListArray]:
    """Return the three stored lists of the chosen keys, all of which have partial matches."""
    own = chosen[partial.keys]
    keys, states, ends = partial.keys[own], partial.states[own], partial.chains[own]
    is_live = np.zeros(len(chains.stages), dtype=bool)
    for _, link in chains.walk(ends):
        is_live[link] = True
    links = np.flatnonzero(is_live)
    # A key's links stay in order: each comes after its predecessor.
    links = links[np.argsort(chains.keys[links], kind="stable")]
    link_keys = chains.keys[links]
    # Each event of a key once, in their order.
    events_of = chains.events[links]
    by_event = np.lexsort((events_of, link_keys))
    is_first = np.append(True, (np.diff(events_of[by_event]) != 0) | (np.diff(link_keys[by_event]) != 0))
    event_of = np.empty(len(links), dtype=np.int64)
    event_of[by_event] = np.cumsum(is_first) - 1
    taken = link_keys[by_event][is_first], events_of[by_event][is_first]
    number = np.cumsum(chosen) - 1
    count = int(chosen.sum())
    event_begins, event_offsets = _find_bounds(number[taken[0]], count)
    link_begins, link_offsets = _find_bounds(number[link_keys], count)
    at = np.full(len(chains.stages), NONE)
    at[links] = np.arange(len(links)) - link_begins[number[link_keys]]
    before = chains.before[links]
    own_before = np.where(before == NONE, NONE, at[before])
    chain_rows = _make_structs(
        ("stage", chains.stages[links], None),
        ("event", event_of - event_begins[number[link_keys]], None),
        ("before", own_before, own_before == NONE),
    )
    # The start state comes after all others.
    every = np.flatnonzero(chosen)
    match_keys = np.concatenate([keys, every])
    order = np.argsort(match_keys, kind="stable")
    match_states = np.concatenate([states, np.full(count, start)])[order]
    match_chains = np.concatenate([at[ends], np.full(count, NONE)])[order]
    _, match_offsets = _find_bounds(number[match_keys[order]], count)
    flags = pa.array(np.zeros(len(match_states), dtype=bool))
    match_rows = _make_structs(
        ("state", match_states, None), ("chain", match_chains, match_chains == NONE), held=flags
    )
    lists = (event_offsets, events(taken[1])), (link_offsets, chain_rows), (match_offsets, match_rows)
    made = [pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), rows) for offsets, rows in lists]
    return made[0], made[1], made[2]


def _flatten(lists: pa.ListArray) -> tuple[Array, Array, pa.StructArray]:
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    begins = np.cumsum(lengths) - lengths
    return np.repeat(np.arange(len(lists)), lengths), begins, lists.flatten()


def _to_numbers(column: pa.Array) -> Array:
    found: Array = pc.fill_null(column, NONE).to_numpy().astype(np.int64)
    return found


def _find_bounds(numbers: Array, count: int) -> tuple[Array, Array]:
    offsets = np.searchsorted(numbers, np.arange(count + 1))
    return offsets[:-1], offsets


def _make_structs(*fields: tuple[str, Array, Array | None], held: pa.Array | None = None) -> pa.StructArray:
    arrays = [pa.array(numbers, pa.int32(), mask=mask) for _, numbers, mask in fields]
    names = [name for name, _, _ in fields]
    if held is not None:
        arrays, names = [*arrays, held], [*names, "is_held"]
    return pa.StructArray.from_arrays(arrays, names=names)
