"""The operator for patterns over columns, and its runner; it uses columns for keys where that is possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flinkish_spark.cep.columnar_matcher import (
    FAR_MS,
    NONE,
    ColumnarMatcher,
    EarlierEventCondition,
    Events,
    MatchColumns,
    Outcome,
    StoredMatches,
    can_be_in_columns,
    find_long_keys,
    to_stored_lists,
)
from flinkish_spark.cep.conditions import ColumnCondition, Comparison
from flinkish_spark.cep.expressions import Expression
from flinkish_spark.cep.functions import Match, MeasuredMatches, tells_of_lost
from flinkish_spark.cep.pattern_operator import PatternOperator, PatternSearch
from flinkish_spark.cep.row_conditions import ComparedWithEarlier, compute_measure, earlier_events
from flinkish_spark.cep.timed_rows import DueColumns, DueRows
from flinkish_spark.cep.timed_runner import TimedRunner
from flinkish_spark.core.elements import (
    CLOSED,
    MATCHES,
    MIN_WATERMARK_MS,
    OPENED,
    TIMED_OUT,
    Progress,
    TimeDomain,
    Timer,
)
from flinkish_spark.operators.context import FunctionContext
from flinkish_spark.state.key_group import GroupState
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.layered import Array
from flinkish_spark.state.timers import Timers
from flinkish_spark.transport.blocks import BEHIND
from flinkish_spark.types.arrow_types import as_schema
from flinkish_spark.types.rows import ElementType
from flinkish_spark.types.to_python import Copier, to_values
from flinkish_spark.worker.runners import InputRows, OutputRows, RowShape, runs


class FoundMatch(NamedTuple):
    number: int
    is_lost: bool
    time_ms: int
    match: Match


class FoundMatches(NamedTuple):
    """The matches and timed-out partial matches of a key, in their order."""

    #: Smallest and greatest of their times.
    first_ms: int
    last_ms: int
    #: Yields them.
    matches: Callable[[], Iterator[FoundMatch]]


class _EventColumns:
    """Fields of the events of a micro-batch: first those of stored partial matches, then the new ones."""

    def __init__(self, stored: pa.StructArray, due: DueColumns) -> None:
        self.kind, self.taken = stored.type, len(stored)
        self._stored, self._due = stored.flatten(), due
        self.times_ms = due.times_ms
        if self.taken:
            self.times_ms = np.concatenate([self._stored[-1].to_numpy(), due.times_ms])
        self._whole: dict[int, pa.Array] = {}

    def __getitem__(self, at: int) -> pa.Array:
        if at not in self._whole:
            self._whole[at] = self.take(at, np.arange(len(self.times_ms)))
        return self._whole[at]

    def take(self, at: int, events: Array) -> pa.Array:
        came = events >= self.taken
        column, rows = self._due.fields[at], self._due.rows
        if came.all():
            return column.take(pa.array(rows[events - self.taken]))
        own = self._stored[at].take(pa.array(events[~came]))
        others = column.take(pa.array(rows[events[came] - self.taken]))
        place = np.where(came, np.cumsum(came) - 1 + len(own), np.cumsum(~came) - 1)
        return pa.concat_arrays([own, others.cast(own.type)]).take(pa.array(place))

    def values(self, events: Array) -> list[tuple[Any, ...]]:
        fields = range(len(self._due.fields))
        return list(zip(*(to_values(self.take(at, events)) for at in fields), strict=True))

    def to_stored(self, events: Array) -> pa.StructArray:
        columns = [self.take(at, events) for at in range(len(self._due.fields))]
        arrays = [*columns, pa.array(self.times_ms[events])]
        own = [one.cast(field.type) for one, field in zip(arrays, self.kind, strict=True)]
        return pa.StructArray.from_arrays(own, fields=list(self.kind))


@dataclass(frozen=True)
class _Field:
    """A field of events; takes values by position, null for a null position."""

    columns: _EventColumns
    at: int

    def take(self, places: pa.Array) -> pa.Array:
        if not places.null_count:
            return self.columns.take(self.at, places.to_numpy())
        there = places.drop_null().to_numpy()
        number = np.cumsum(places.is_valid().to_numpy(zero_copy_only=False)) - 1
        own = self.columns.take(self.at, there)
        return own.take(pa.array(number, mask=places.is_null().to_numpy(zero_copy_only=False)))


@dataclass
class _PatternRun:
    """One pattern in a micro-batch: its stored partial matches, events and outcome."""

    search: ColumnarMatcher
    stored: StoredMatches
    columns: _EventColumns
    outcome: Outcome


class _Paths:
    """The events of one pattern's matches, built on demand; valid during one call."""

    def __init__(
        self,
        number: int,
        worked: _PatternRun,
        found: MatchColumns,
        gather: Callable[[Any], Any],
        take: Copier | None,
    ) -> None:
        chains, stages = worked.outcome.chains, worked.search.automaton.stages
        last = np.flatnonzero(found.stages != NONE)
        which, names, events = [last], [found.stages[last]], [found.events[last]]
        for at, link in chains.walk(found.chains):
            which.append(at)
            names.append(chains.stages[link])
            events.append(chains.events[link])
        # They were read from the last event to the first: reverse them, and group them by match.
        of_match, name, event = (np.concatenate(parts[::-1]) for parts in (which, names, events))
        order = np.argsort(of_match, kind="stable")
        needed, places = np.unique(event[order], return_inverse=True)
        self._rows, self._gather = worked.columns.values(needed), gather
        self._places: list[int] = places.tolist()
        self._offsets = np.searchsorted(of_match[order], np.arange(len(found.keys) + 1)).tolist()
        self._names = [stages[at] for at in name[order].tolist()]
        self._number, self._take = number, take
        self._is_lost, self._times_ms = found.is_lost.tolist(), found.times_ms.tolist()

    def matches(self, which: Iterable[int]) -> Iterator[FoundMatch]:
        """Yield some of the matches, which belong to one key."""
        names, places, offsets, rows, gather, take = (
            *(self._names, self._places, self._offsets),
            *(self._rows, self._gather, self._take),
        )
        made: dict[int, Any] = {}
        for one in which:
            match: dict[str, list[Any]] = {}
            for at in range(offsets[one], offsets[one + 1]):
                place, name = places[at], names[at]
                event = made.get(place)
                if event is None:
                    event = made[place] = gather(rows[place])
                if take is not None:
                    event = take(event)
                if name in match:
                    match[name].append(event)
                else:
                    match[name] = [event]
            yield FoundMatch(self._number, self._is_lost[one], self._times_ms[one], match)


class ColumnarPatternOperator(PatternOperator):
    """A :class:`.PatternOperator` whose runner finds matches as columns; here they are only emitted."""

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        #: By key, matches found as columns, to be emitted here, and the time up to which they have been.
        self.found: dict[Any, tuple[FoundMatches, int]] = {}
        super().open(states, context, timers)

    def on_timer(self, timer: Timer, domain: TimeDomain) -> None:
        if self._scope.key in self.found:
            self._emit_found(*self.found.pop(self._scope.key))
        else:
            super().on_timer(timer, domain)

    def _emit_found(self, found: FoundMatches, after_ms: int) -> None:
        """Emit the current key's matches with times after `after_ms`, up to the watermark."""
        watermark_ms = self._timers.watermark_ms
        if found.last_ms > watermark_ms:
            # The input ends, so the watermark will advance once more.
            self.found[self._scope.key] = found, watermark_ms
            self._timers.register_event_time_timer(found.last_ms)
        function, context, emit = self.function, self._match_context, self._context.emit
        lost = matches = 0
        for number, is_lost, time_ms, match in found.matches():
            if not after_ms < time_ms <= watermark_ms:
                continue
            context.name, context.time_ms = self._searches[number].name, time_ms
            if is_lost:
                lost += 1
                rows = function.process_timed_out_match(match, context)
            else:
                matches += 1
                rows = function.process_match(match, context)
            if rows is not None:
                emit(rows, time_ms)
            self._settle()
        for name, count in ((TIMED_OUT, lost), (MATCHES, matches)):
            if count:
                self._context.count(name, count)

    @property
    def measures(self) -> tuple[Expression, ...] | None:
        """Expressions to emit for a match, if all of them can be computed over columns; else None."""
        function = self.function
        if not isinstance(function, MeasuredMatches):
            return None
        in_columns = all(earlier_events(one) is not None for one in function.measures)
        return function.measures if in_columns else None

    def make_columnar_matchers(self) -> list[ColumnarMatcher]:
        found = []
        for one, wanted in zip(self._searches, self._search.patterns, strict=True):
            automaton, looks_back = wanted.automaton, []
            numbers = {name: at for at, name in enumerate(automaton.stages)}
            for bit, leaf in enumerate(automaton.leaves):
                if isinstance(leaf, Comparison) and leaf.expression is not None:
                    named = earlier_events(leaf.expression) or ()
                    places = tuple((numbers[name], is_last) for name, is_last in named)
                    looks_back.append(
                        EarlierEventCondition(bit, places, ComparedWithEarlier(leaf.expression, named))
                    )
            answers = tuple(map(self._columns.get, automaton.leaves))
            found.append(ColumnarMatcher(one.matcher, wanted.skip, looks_back, one.states, answers))
        return found


def make_pattern_operator(
    search: PatternSearch, element: ElementType, time_field: int | None = None
) -> PatternOperator:
    is_columnar = (
        search.clock is TimeDomain.EVENT_TIME
        and search.compare is None
        and search.limit is None
        and all(can_be_in_columns(one.automaton, one.skip) for one in search.patterns)
        and all(
            earlier_events(search.comparisons[leaf.text]) is not None
            if isinstance(leaf, Comparison)
            else isinstance(leaf, ColumnCondition)
            for one in search.patterns
            for leaf in one.automaton.leaves
        )
    )
    return (ColumnarPatternOperator if is_columnar else PatternOperator)(search, element, time_field)


@runs(ColumnarPatternOperator)
class PatternRunner(TimedRunner):
    """Runs a :class:`~flinkish_spark.cep.pattern_operator.PatternOperator` with matches as columns.

    Keys that can be processed as columns have no state objects and one timer, for their first due event or
    time-out; the operator only emits their matches. Other keys are processed as in any :class:`.TimedRunner`.
    """

    def __init__(
        self, operator: ColumnarPatternOperator, uid: str, max_parallelism: int, shape: RowShape
    ) -> None:
        super().__init__(operator, uid, max_parallelism, shape)
        self._patterns, self._searches = operator, operator.make_columnar_matchers()
        self.also_due = [one.states[-1] for one in self._searches]
        self._element = operator.element
        self._worked: list[_PatternRun] = []
        #: Counters, and rows that were made as columns, before and behind the watermark.
        self._counted: Counter[str] = Counter()
        self._measured: tuple[list[pa.RecordBatch], list[pa.RecordBatch]] = ([], [])

    def process(self, inputs: InputRows, group: GroupState, progress: Progress) -> Iterator[OutputRows]:
        """Yield rows made as columns before the others, on each side of the watermark."""
        others = list(super().process(inputs, group, progress))
        for name, count in self._counted.items():
            if count:
                self.counts[name] = self.counts.get(name, 0) + count
        for first, made in ((0, self._measured[0]), (BEHIND, self._measured[1])):
            own = [one for one in others if not one.side and one.first == first]
            batches = [*made, *(one.rows for one in own)]
            if batches:
                yield OutputRows(0, first, batches[0] if len(batches) == 1 else pa.concat_batches(batches))
        yield from (one for one in others if one.side)

    def _load_due(self, late: dict[object, int], group: GroupState, progress: Progress) -> DueRows:
        waiting = self._waiting
        limit_ms, index = progress.limits_ms[TimeDomain.EVENT_TIME], waiting.index
        due = waiting.take_due_columns(limit_ms)
        is_left = self._run_columns(due, group, progress, limit_ms)
        # Keys with the same hash are loaded together, so all or none of them are processed as columns.
        same = np.flatnonzero(index.hashes[1:] == index.hashes[:-1])
        for at in same.tolist():
            is_left[at : at + 2] |= is_left[at : at + 2].any()
        self._is_left, self._later_ms = is_left, due.later_ms
        told = self._collect_found(progress)
        left = np.flatnonzero(is_left)
        keys, hashes = waiting.keys, index.hashes.tolist()
        hash_of = {keys[at]: hashes[at] for at in (*left.tolist(), *told)}
        hash_of.update(late)
        left_hashes = np.unique(index.hashes[left])
        own = {name: left_hashes for one in self._searches for name in one.states}
        group.load_keys(
            self._run.states, self._run.timers, hash_of, progress.processing_time_ms, own, left_hashes
        )
        queue = self._run.timers.queues[TimeDomain.EVENT_TIME]
        if len(left):
            for key, time_ms in waiting.list_first_new(is_left):
                queue.register(Timer(time_ms, key, None))
        self._patterns.found = {}
        for at, found in told.items():
            self._patterns.found[keys[at]] = found, MIN_WATERMARK_MS
            queue.register(Timer(found.first_ms, keys[at], None))
        return waiting.take_due(limit_ms, is_left)

    def _run_columns(self, due: DueColumns, group: GroupState, progress: Progress, limit_ms: int) -> Array:
        """Run the patterns over columns; return the mask of keys to process event by event."""
        index, self._worked = self._waiting.index, []
        now_ms = progress.processing_time_ms
        is_left = find_long_keys(due.counts)
        far = np.repeat(np.arange(len(index)), due.counts)[np.abs(due.times_ms) > FAR_MS]
        is_left[far] = True
        is_left |= (due.later_ms > FAR_MS) & (due.later_ms < (1 << 63) - 1)
        for search in self._searches:
            events, chains, matches = (group.columns(name, index, now_ms).column() for name in search.states)
            stored = StoredMatches.read(events, chains, matches, search.automaton.start)
            columns = _EventColumns(stored.events, due)
            is_left |= stored.is_odd
            if (np.abs(columns.times_ms[: columns.taken]) > FAR_MS).any():
                is_left[stored.partial.keys] = True
            answers, unknown = self._answers(search, due)
            if unknown.any():
                is_left[np.repeat(np.arange(len(index)), due.counts)[unknown]] = True
            coming = Events(columns.taken, due.begins, due.counts, columns.times_ms, answers)
            for leaf in search.looks_back:
                leaf.compare.columns = columns
            outcome = search.run(coming, stored.partial, stored.chains, is_left, limit_ms)
            is_left = is_left | outcome.is_left
            self._worked.append(_PatternRun(search, stored, columns, outcome))
        return is_left

    @staticmethod
    def _answers(search: ColumnarMatcher, due: DueColumns) -> tuple[Array, Array]:
        """Return the answers of each event as bits, and the mask of events with an unknown answer."""
        count = len(due.times_ms)
        found, unknown = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=bool)
        for bit, place in enumerate(search.answers):
            if place is None:
                continue
            column = due.facts[place]
            if column.null_count:
                unknown |= column.is_null().to_numpy(zero_copy_only=False)
                column = column.fill_null(False)
            found |= column.to_numpy(zero_copy_only=False).astype(np.int64) << bit
        return found, unknown

    def _to_tell(self, worked: _PatternRun, watermark_ms: int) -> MatchColumns:
        """Return the matches for the operator to emit; emit those that need no function as columns."""
        found = worked.outcome.found
        found = found.select(~self._is_left[found.keys])
        if not tells_of_lost(self._patterns.function) and found.is_lost.any():
            self._counted[TIMED_OUT] += int(found.is_lost.sum())
            found = found.select(~found.is_lost)
        measures = self._patterns.measures
        if measures is None:
            return found
        matches = found.select(~found.is_lost)
        columns = self._columns_of_matches(worked, matches, measures)
        if columns is None or not len(matches.keys):
            return found
        self._counted[MATCHES] += len(matches.keys)
        schema = self._shape.block_schemas[0]
        times = [pa.array(matches.times_ms)] if self._shape.with_times else []
        rows = pa.RecordBatch.from_arrays([*times, *columns], names=schema.names)
        rows = as_schema(rows, schema)
        is_before = matches.times_ms <= watermark_ms
        for side, which in zip(self._measured, (is_before, ~is_before), strict=True):
            if which.any():
                side.append(rows if which.all() else rows.filter(pa.array(which)))
        return found.select(found.is_lost)

    def _columns_of_matches(
        self, worked: _PatternRun, found: MatchColumns, measures: Sequence[Expression]
    ) -> list[pa.Array] | None:
        """Return the columns to emit for matches; None if they cannot be computed over columns."""
        chains = worked.outcome.chains
        numbers = {name: at for at, name in enumerate(worked.search.automaton.stages)}
        named: dict[tuple[str, bool], Array] = {}
        for one in measures:
            for name, is_last in earlier_events(one) or ():
                named.setdefault((name, is_last), np.full(len(found.keys), NONE))
        for (name, is_last), event in named.items():
            stage = numbers.get(name, NONE - 1)
            own = found.stages == stage
            event[own] = found.events[own]
            for which, link in chains.walk(found.chains):
                own = chains.stages[link] == stage
                own &= (event[which] == NONE) | (not is_last)
                event[which[own]] = chains.events[link[own]]
        fields = [_Field(worked.columns, at) for at in range(len(self._element.fields))]
        made: list[pa.Array] = []
        for one in measures:
            column = compute_measure(one, fields, named, len(found.keys))
            if column is None:
                return None
            made.append(column)
        return made

    def _collect_found(self, progress: Progress) -> dict[int, FoundMatches]:
        """Return the matches for the operator to emit, by the number of the key."""
        self._counted, self._measured = Counter(), ([], [])
        own = [self._to_tell(one, progress.watermark_ms) for one in self._worked]
        gather = self._element.gathering()
        paths = [
            _Paths(number, worked, found, gather, self._element.take)
            for number, (worked, found) in enumerate(zip(self._worked, own, strict=True))
        ]
        keys, steps, times_ms = (
            np.concatenate([getattr(one, name) for one in own]) for name in ("keys", "steps", "times_ms")
        )
        if not len(keys):
            return {}
        order = np.lexsort((steps, keys))
        keys, times_ms = keys[order], times_ms[order]
        begins = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        bounds = zip(begins.tolist(), [*begins[1:].tolist(), len(keys)], strict=True)
        first_ms = np.minimum.reduceat(times_ms, begins).tolist()
        last_ms = np.maximum.reduceat(times_ms, begins).tolist()
        made: list[Callable[[], Iterator[FoundMatch]]]
        if len(own) == 1:
            made = [partial(paths[0].matches, range(begin, end)) for begin, end in bounds]
        else:
            # Number of the pattern, and number of the match among the pattern's matches.
            of_pattern = np.repeat(np.arange(len(own)), [len(one.keys) for one in own])[order].tolist()
            number = np.concatenate([np.arange(len(one.keys)) for one in own])[order].tolist()
            made = [
                partial(_matches_of, paths, of_pattern[begin:end], number[begin:end]) for begin, end in bounds
            ]
        rows = zip(keys[begins].tolist(), first_ms, last_ms, made, strict=True)
        return {key: FoundMatches(*found) for key, *found in rows}

    def _store(self, group: GroupState) -> None:
        super()._store(group)
        index, columnar = self._waiting.index, ~self._is_left
        due_ms = self._later_ms.copy()
        now_ms = self._run.timers.processing_time_ms
        for worked in self._worked:
            outcome = worked.outcome
            np.minimum(due_ms, outcome.due_ms, out=due_ms)
            before, behind = (
                np.bincount(partial.keys, minlength=len(index))
                for partial in (worked.stored.partial, outcome.partial)
            )
            more = np.where(columnar, behind - before, 0)
            self._counted[OPENED] += int(more[more > 0].sum())
            self._counted[CLOSED] -= int(more[more < 0].sum())
            written = columnar & outcome.is_changed & (behind > 0)
            gone = columnar & outcome.is_changed & (behind == 0) & (before > 0)
            lists: Sequence[Any] = ()
            if written.any():
                start = worked.search.automaton.start
                lists = to_stored_lists(
                    outcome.partial, outcome.chains, written, start, worked.columns.to_stored
                )
            for at, name in enumerate(worked.search.states):
                if written.any():
                    group.columns(name, index, now_ms).put([lists[at]], where=written)
                if gone.any():
                    group.columns(name, index, now_ms).remove(gone)
        group.timers.set_single_timers(TimeDomain.EVENT_TIME, index, due_ms, columnar)


def _matches_of(
    paths: Sequence[_Paths], patterns: Sequence[int], numbers: Sequence[int]
) -> Iterator[FoundMatch]:
    for pattern, number in zip(patterns, numbers, strict=True):
        yield from paths[pattern].matches((number,))
