"""The operator for patterns in a keyed stream: waiting events, partial matches, emitted matches."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.cep.automaton import Automaton
from flinkish_spark.cep.conditions import ColumnCondition, Comparison, ContextCondition, Leaf
from flinkish_spark.cep.expressions import Expression
from flinkish_spark.cep.functions import Match, PatternProcessFunction, open_matches
from flinkish_spark.cep.matcher import Event, EventAnswers, FlatMatches, Matcher, PartialMatch
from flinkish_spark.cep.stages import AfterMatchSkip, OpenMatches, Stage
from flinkish_spark.cep.timed_rows import DueRows, TimedRows
from flinkish_spark.cep.timed_runner import TimedRowsOperator
from flinkish_spark.core.elements import (
    CLOSED,
    DISCARDED,
    MATCHES,
    MIN_WATERMARK_MS,
    OPENED,
    TIMED_OUT,
    OutputTag,
    TimeDomain,
    Timer,
)
from flinkish_spark.operators.context import FunctionContext, NoKeyedState, move_timer
from flinkish_spark.operators.joins import Entry, TimedBuffer, time_of
from flinkish_spark.operators.process import Processor
from flinkish_spark.state.descriptors import ListStateDescriptor
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.timers import Timers
from flinkish_spark.types.ddl import ddl_of
from flinkish_spark.types.rows import ElementType
from flinkish_spark.types.to_python import as_it_is


@dataclass(frozen=True)
class LookedFor:
    #: Its name in the program; empty if it is the only one.
    name: str
    automaton: Automaton
    skip: AfterMatchSkip
    stages: tuple[Stage, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Identity of stored partial matches: names and states of the automaton; conditions may change."""
        return f"{self.name}{self.automaton.fingerprint}"


@dataclass(frozen=True)
class PatternSearch:
    #: Patterns to match each event with, in this order.
    patterns: tuple[LookedFor, ...]
    function: PatternProcessFunction
    #: Clock of the events: event time, or the processing time of their micro-batch.
    clock: TimeDomain = TimeDomain.EVENT_TIME
    #: Field with the time of an event; None: its event time.
    time_field: str | None = None
    #: Comparison function that orders events of the same time; None: in the order of arrival.
    compare: Callable[[Any, Any], int] | None = None
    #: Side output of late events; None: they are dropped and counted.
    late_output: OutputTag | None = None
    #: Limit of open partial matches per key and pattern; None: no limit.
    limit: OpenMatches | None = None
    #: SQL texts of conditions whose answers follow the fields of each event, in this order.
    column_conditions: tuple[str, ...] = ()
    #: Compiled expressions of SQL conditions that read earlier events, by their texts.
    comparisons: Mapping[str, Expression] = field(default_factory=dict)


class _NoState(NoKeyedState):
    """Runtime context for `open` of a condition."""

    refusal = (
        "a condition of operator '{uid}' asks for the state '{name}', but it sees only the events of its "
        "partial match; use state in the function for matches"
    )


class MatchContext:
    """Context of a pattern function; one object, updated for each match."""

    def __init__(self, context: FunctionContext, timers: Timers) -> None:
        self._context = context
        self.get_current_key = context.get_current_key
        self.current_processing_time = timers.current_processing_time
        self.name, self.time_ms = "", MIN_WATERMARK_MS

    def pattern_name(self) -> str:
        return self.name

    def pattern_version(self) -> int:
        return 0

    def timestamp(self) -> int:
        return self.time_ms

    def output(self, tag: OutputTag, value: Any) -> None:
        self._context.emit_to(tag, value, self.time_ms)


#: Prefix of the names of states with partial matches.
_MATCHES_OF = "pattern/matches of "


class _Search:
    """One pattern in an opened operator, with the current key's partial matches.

    They are stored in three states that refer to each other by position, so a key's states are written
    together. A key without open partial matches has no state.
    """

    def __init__(self, wanted: LookedFor, element: ElementType, states: KeyedStates) -> None:
        self.name, own = wanted.name, wanted.fingerprint
        self.matcher = Matcher(wanted.automaton, wanted.skip, element.take)
        self._stages = wanted.automaton.stages
        self._stage_numbers = {name: number for number, name in enumerate(self._stages)}
        fields = ddl_of(T.StructType([*element.fields, T.StructField("__time_ms", T.LongType())]))
        kinds = {
            f"pattern/events of {own}": fields,
            f"pattern/chains of {own}": "stage INT, event INT, before INT",
            f"{_MATCHES_OF}{own}": "state INT, chain INT, is_held BOOLEAN",
        }
        for name, kind in kinds.items():
            states.get_list_state(ListStateDescriptor(name, kind))
        #: Names of the states: events, chains, partial matches.
        self.states = tuple(kinds)
        self._events, self._chains, self._matches = (states.tables[name] for name in kinds)
        self._scope, self._gather, self._spread = states.scope, element.gathering(), element.to_tuple
        self.state = self.matcher.initial()
        self._before = self._open()

    def enter(self) -> int | None:
        """Load the current key's partial matches; return when the first one times out."""
        matches = self._matches.read(self._scope)
        if not matches:
            self.state = self.matcher.initial()
        else:
            rows = self._events.read(self._scope) or ()
            events = [Event((row[-1], at), self._gather(row[:-1])) for at, row in enumerate(rows)]
            flat = FlatMatches(events, self._chains.read(self._scope) or (), matches)
            self.state = flat.state(self._stages)
        self._before = self._open()
        return self.matcher.next_deadline_ms(self.state)

    def leave(self) -> int | None:
        """Store the current key's partial matches; return when the first one times out."""
        if self._open() != self._before:
            self._write()
        return self.matcher.next_deadline_ms(self.state)

    @property
    def more_open(self) -> int:
        return len(self.state.partial) - len(self._before[0])

    def _open(self) -> tuple[list[PartialMatch], ...]:
        return list(self.state.partial), list(self.state.held)

    def _write(self) -> None:
        if self.state.is_initial:
            for table in (self._events, self._chains, self._matches):
                table.remove(self._scope)
            return
        flat, spread = FlatMatches.of(self.state, self._stage_numbers), self._spread
        self._events.write(self._scope, [(*spread(event.value), event.time_ms) for event in flat.events])
        self._chains.write(self._scope, list(flat.chains))
        self._matches.write(self._scope, list(flat.matches))


class PatternOperator(TimedRowsOperator):
    """Runs a :class:`PatternSearch`; a key has one timer, for the first event or time-out that is due.

    By event time, events wait for the watermark and are processed in the order of their times. By processing
    time they are processed on arrival; if a comparison orders events of one time, they wait until it is over.
    """

    def __init__(self, search: PatternSearch, element: ElementType, time_field: int | None = None) -> None:
        self._search, self.function, self.element = search, search.function, element
        # Named after their texts: a waiting event has no answer to a changed condition.
        answers = [f"__holds_{zlib.crc32(text.encode()):08x} BOOLEAN" for text in search.column_conditions]
        waiting = "pattern/waiting", element, ", ".join(answers)
        self.timed = self._buffer = None
        if search.clock is TimeDomain.EVENT_TIME:
            self.timed = TimedRows(*waiting, time_field, search.late_output)
        elif search.compare is not None:
            self._buffer = TimedBuffer(*waiting)

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        search = self._search
        self._context, self._timers, self._scope = context, timers, states.scope
        self._match_context = MatchContext(context, timers)
        self._width = len(self.element.fields)
        self._gather = self.element.gathering()
        self._key_of = None if search.compare is None else functools.cmp_to_key(search.compare)
        for waiting in (self.timed, self._buffer):
            if waiting is not None:
                waiting.open(states)
        self._searches = [_Search(one, self.element, states) for one in search.patterns]
        self._known: tuple[DueRows | None, Sequence[Sequence[EventAnswers]]] = None, ()
        #: By condition, the number of its answer after the fields of an event.
        self._columns: dict[Leaf, int] = {}
        opened = _NoState(states.uid, states.max_parallelism)
        for leaf in self._list_conditions():
            if isinstance(leaf, ColumnCondition):
                self._columns[leaf] = search.column_conditions.index(leaf.text)
            elif isinstance(leaf, Comparison):
                leaf.expression = search.comparisons[leaf.text]
            elif isinstance(leaf, ContextCondition) and hasattr(leaf.owner, "open"):
                leaf.owner.open(opened)
        self._settle = states.puts.settle
        self.function.open(states.view_for_function())

    def processors(self) -> tuple[Processor, ...]:
        if self.timed is not None:
            return (self.timed.late,)
        return (self._process_now if self._buffer is None else self._keep,)

    def on_timer(self, timer: Timer, domain: TimeDomain) -> None:
        """Process the events that are due, and time out partial matches."""
        if self.timed is not None:
            now_ms, due = self._timers.watermark_ms, self.timed.due
            self._take(due, due.take(self._scope.key, now_ms), now_ms)
            later_ms = due.next_ms(self._scope.key)
            if later_ms is not None:
                self._timers.register_event_time_timer(later_ms)
            return
        now_ms, entries = self._timers.processing_time_ms, []
        if self._buffer is not None:
            # The timer fires after the millisecond of the buffered events is over, so take all of them.
            entries = self._buffer.read()
            self._buffer.replace([])
        self._take_entries(entries, now_ms)

    def count_open_items(self, state: str, rows: pa.RecordBatch) -> int | None:
        if not state.startswith(_MATCHES_OF):
            return None
        return open_matches(rows.column("value_0"))

    def close(self) -> None:
        self.function.close()
        for leaf in self._list_conditions():
            if isinstance(leaf, ContextCondition) and hasattr(leaf.owner, "close"):
                leaf.owner.close()

    def _keep(self, value: Any, context: FunctionContext) -> None:
        assert self._buffer is not None
        now_ms = self._timers.processing_time_ms
        self._buffer.add(value[: self._width], now_ms, value[self._width :])
        self._timers.register_processing_time_timer(now_ms + 1)

    def _process_now(self, value: Any, context: FunctionContext) -> None:
        now_ms = self._timers.processing_time_ms
        self._take_entries([(*value, now_ms)], now_ms)

    def _take_entries(self, entries: Sequence[Entry], now_ms: int) -> None:
        rows = [entry[: self._width] for entry in entries]
        facts = list(zip(*(entry[self._width : -1] for entry in entries), strict=True))
        due = DueRows(rows, [time_of(entry) for entry in entries], facts)
        self._take(due, range(len(entries)), now_ms)

    def _take(self, due: DueRows, places: range, now_ms: int) -> None:
        """Process events of the current key, then advance time to `now_ms`."""
        searches, limit = self._searches, self._search.limit
        before_ms = [one.enter() for one in searches]
        processing_ms, reached_ms = self._timers.processing_time_ms, None
        rows, times_ms, gather = due.rows, due.times_ms, self._gather
        known = list(zip(searches, self._find_known(due), strict=True))
        for at in places if self._key_of is None else self._sort_places(due, places):
            time_ms = times_ms[at]
            if time_ms != reached_ms:
                reached_ms = time_ms
                for one in searches:
                    if one.matcher.is_due(one.state, time_ms):
                        self._advance(one, time_ms)
            for one, facts in known:
                own = facts[at]
                if not own.may_begin and one.state.is_initial:
                    continue
                matches = one.matcher.process(one.state, gather(rows[at]), time_ms, own, processing_ms)
                if matches:
                    self._emit(one, matches, time_ms)
                if limit is not None:
                    discarded = one.matcher.keep_to(one.state, limit)
                    if discarded:
                        self._context.count(DISCARDED, discarded)
        for one in searches:
            self._advance(one, now_ms)
        for one in searches:
            more = one.more_open
            if more:
                self._context.count(OPENED if more > 0 else CLOSED, abs(more))
        due_ms = [one.leave() for one in searches]
        first_ms = (min((at for at in own if at is not None), default=None) for own in (before_ms, due_ms))
        # The timer is for the first time-out.
        move_timer(self._timers, self._search.clock, *first_ms)

    def _find_known(self, due: DueRows) -> Sequence[Sequence[EventAnswers]]:
        """Return, by pattern, the known facts about each event of the current key group."""
        if self._known[0] is not due:
            found = []
            for one in self._searches:
                nothing = [None] * len(due.rows)
                places = (self._columns.get(leaf) for leaf in one.matcher.automaton.leaves)
                columns = [nothing if place is None else due.facts[place] for place in places]
                answers = zip(*columns, strict=True) if columns else repeat((), len(due.rows))
                found.append(list(map(one.matcher.known.__getitem__, answers)))
            self._known = due, found
        return self._known[1]

    def _sort_places(self, due: DueRows, places: range) -> Iterable[int]:
        key_of, take = self._key_of, self.element.take or as_it_is
        assert key_of is not None
        return sorted(places, key=lambda at: (due.times_ms[at], key_of(take(self._gather(due.rows[at])))))

    def _advance(self, one: _Search, time_ms: int) -> None:
        completed, timed_out = one.matcher.advance(one.state, time_ms)
        for complete in completed:
            self._emit(one, (complete.match,), complete.time_ms)
        for lost in timed_out:
            self._context.count(TIMED_OUT)
            self._call(self.function.process_timed_out_match, one, lost.match, lost.time_ms)

    def _emit(self, one: _Search, matches: Sequence[Match], time_ms: int) -> None:
        self._context.count(MATCHES, len(matches))
        for match in matches:
            self._call(self.function.process_match, one, match, time_ms)

    def _call(self, call: Any, one: _Search, match: Match, time_ms: int) -> None:
        context = self._match_context
        context.name, context.time_ms = one.name, time_ms
        rows = call(match, context)
        if rows is not None:
            self._context.emit(rows, time_ms)
        self._settle()

    def _list_conditions(self) -> Iterable[Leaf]:
        return (leaf for one in self._search.patterns for leaf in one.automaton.leaves)
