"""Patterns that change while a job runs: a broadcast stream brings rules with versions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NoReturn

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.cep.automaton import Automaton
from flinkish_spark.cep.compiler import compile_pattern
from flinkish_spark.cep.conditions import ColumnCondition, Comparison, ContextCondition, Leaf
from flinkish_spark.cep.expressions import Expression, Frame
from flinkish_spark.cep.functions import Match, PatternProcessFunction, open_matches
from flinkish_spark.cep.match_recognize import parse_comparison, parse_condition
from flinkish_spark.cep.matcher import Event, EventAnswers, FlatMatches, Matcher
from flinkish_spark.cep.pattern import Pattern
from flinkish_spark.cep.rules import KnownToRules
from flinkish_spark.cep.stages import OpenMatches
from flinkish_spark.core.elements import (
    CLOSED,
    DISCARDED,
    LATE_RECORDS_DROPPED,
    MATCHES,
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    OPENED,
    TIMED_OUT,
    OutputTag,
)
from flinkish_spark.core.errors import PatternError
from flinkish_spark.core.fields import check_arguments
from flinkish_spark.core.subtask import SubtaskFacts
from flinkish_spark.core.validation import check_function
from flinkish_spark.functions.keyed import (
    BroadcastOnTimerContext,
    KeyedBroadcastContext,
    KeyedBroadcastProcessFunction,
    KeyedReadOnlyContext,
    RuntimeContext,
)
from flinkish_spark.state.descriptors import ListStateDescriptor, MapStateDescriptor
from flinkish_spark.types.ddl import DdlError, ddl_of, parse_ddl, type_text
from flinkish_spark.types.rows import ElementType

#: Rules by id: the descriptor for `broadcast()` of the stream of rules. Partial matches since version `since`
#: continue; a removed rule keeps its version, without a text.
PATTERN_RULES = MapStateDescriptor("pattern_rules", "STRING", "version LONG, since LONG, rule STRING")
#: Side output of invalid rules.
REFUSED_RULES = OutputTag("refused_rules", "id STRING, version LONG, rule STRING, why STRING")
_OPEN = "open"
_CHAIN, _MATCH = ("stage", "event", "before"), ("state", "chain", "is_held")
_CHAIN_TYPE = T.StructType([T.StructField(name, T.IntegerType()) for name in _CHAIN])
_MATCH_TYPE = T.StructType(
    [T.StructField(name, T.BooleanType() if name == "is_held" else T.IntegerType()) for name in _MATCH]
)


class PatternsFromStream(KeyedBroadcastProcessFunction):
    """A function that looks for patterns by event time, whose rules are a broadcast stream; see docs/cep.md.

    An element of that stream has an `id`, a `version` and a `rule`: JSON, which names a pattern of the
    program or is a graph as in dynamic Flink CEP. It applies from the next events on. A rule replaces the
    rule with the same id if its version is greater. Partial matches continue with it if it has the same names
    and states; otherwise they are given up, and counted as discarded. A null rule removes the pattern of that
    id. A rule that is invalid, or not newer, goes to :data:`REFUSED_RULES`, and the old rule stays; a
    repeated rule changes nothing.

    All partitions change in the same micro-batch, before its events; so a checkpoint is either before or
    after the change.

    Parameters
    ----------
    elements
        Fields of the keyed stream, as DDL.
    function
        Makes rows of matches; its context has the rule's id and version.
    patterns
        Patterns that rules may name, or functions that make a pattern of a rule's arguments.
    conditions
        Conditions that nodes of rules may name, as for :meth:`Pattern.where`, or functions that make one.
    late_output
        Side output of late events; None: they are dropped and counted.
    limit
        The most open partial matches of a key and rule; None for any number.

    Raises
    ------
    DdlError
        `elements` is no DDL.
    ConfigError
        Another parameter is not what it should be.

    Examples
    --------
    >>> from flinkish_spark.testing import ProgramHarness
    >>> class Alarm(PatternProcessFunction):
    ...     def process_match(self, match, ctx):
    ...         yield ctx.pattern_name(), ctx.pattern_version(), match["second"][0].value
    >>> def rising(least):
    ...     first = Pattern.begin("first").where(lambda event: event.value >= least)
    ...     second = first.next("second")
    ...     return second.where(lambda event, ctx: event.value > ctx.events_for("first")[0].value)
    >>> fields = "cell STRING, value LONG"
    >>> def program(readings, rules):
    ...     return readings.key_by("cell").connect(rules.broadcast(PATTERN_RULES)).process(
    ...         PatternsFromStream(fields, Alarm(), {"rising": rising}),
    ...         output="id STRING, version LONG, value LONG", uid="alarms",
    ...     )
    >>> harness = ProgramHarness(program, fields, "id STRING, version LONG, rule STRING")
    >>> harness.push(("steep", 1, '{"pattern": "rising", "args": [5]}'), 0, source=1)
    >>> harness.push_all([(("u33", value), at) for at, value in enumerate([1, 4, 6, 9])])
    >>> harness.watermark(3)
    >>> harness.take().rows
    [Record(id='steep', version=1, value=9)]
    """

    @check_arguments(
        patterns='give them by name: {"rising": rising}', conditions='give them by name: {"high": is_high}'
    )
    def __init__(
        self,
        elements: str,
        function: PatternProcessFunction,
        patterns: Mapping[str, Pattern | Callable[..., Pattern]] | None = None,
        conditions: Mapping[str, Any] | None = None,
        *,
        late_output: OutputTag | None = None,
        limit: OpenMatches | None = None,
    ) -> None:
        for name, known in (("patterns", patterns), ("conditions", conditions)):
            for called, one in (known or {}).items():
                # A class makes an object of the rule's arguments.
                if callable(one) and not isinstance(one, type):
                    check_function(one, f"{called!r} of {name}", None)
        fields = parse_ddl(elements)
        if not isinstance(fields, T.StructType):
            raise DdlError(f"{elements!r} is no list of fields; write them as: cell STRING, value LONG")
        self._fields, self._function = fields, function
        self._known = KnownToRules(dict(patterns or {}), dict(conditions or {}))
        self._late_output, self._limit = late_output, limit
        self._searches: dict[str, _Search] = {}

    def open(self, context: RuntimeContext) -> None:
        element = ElementType(ddl_of(self._fields))
        self._take = element.take
        self._gather, self._spread = element.gathering(), element.to_tuple
        time = T.StructField("__time_ms", T.LongType())
        self._row = row = T.StructType([*self._fields.fields, time])
        self._waiting = context.get_list_state(ListStateDescriptor("waiting", ddl_of(row)))
        parts = ("events", row), ("chains", _CHAIN_TYPE), ("matches", _MATCH_TYPE)
        lists = ", ".join(f"{name} array<{type_text(kind)}>" for name, kind in parts)
        stored = f"version LONG, automaton STRING, {lists}"
        self._open_states = MapStateDescriptor(_OPEN, "STRING", stored)
        self._open = context.get_map_state(self._open_states)
        self._facts = _ConditionFacts(context.uid, context.max_parallelism)
        self._function.open(context)

    def count_open_items(self, state: str, rows: pa.RecordBatch) -> int | None:
        """Return how many partial matches are open in entries of a state; None if it has none."""
        if state != _OPEN:
            return None
        return open_matches(rows.column("value_0").items.field("matches"))

    def close(self) -> None:
        self._function.close()
        for search in self._searches.values():
            search.close()

    # -- rules ------------------------------------------------------------------------------------------
    def process_broadcast_element(self, value: Any, ctx: KeyedBroadcastContext) -> None:
        """Add or replace a rule, or remove a pattern."""
        rules = ctx.get_broadcast_state(PATTERN_RULES)
        before = rules.get(value.id)
        try:
            taken = self._check_rule(value, None if before is None else tuple(before))
        except PatternError as error:
            ctx.output(REFUSED_RULES, (value.id, value.version, value.rule, str(error)))
            return
        if taken is not None:
            rules[value.id] = taken
            if before is not None and before[2] is not None and before[1] != taken[1]:
                ctx.apply_to_keyed_state(self._open_states, partial(_give_up, value.id, taken[1], ctx))
            used = {rule for _, _, rule in rules.values()}
            for text in [text for text in self._searches if text not in used]:
                self._searches.pop(text).close()

    def _check_rule(self, value: Any, before: Any) -> tuple[int, int, str | None] | None:
        """Return the state to store for a rule; None if the rule is a repetition."""
        if value.id is None or value.version is None:
            raise PatternError("a rule has no id, or no version", what_to_do="give it both")
        search = None if value.rule is None else self._find_search(value.rule)
        if before is None:
            return value.version, value.version, value.rule
        version, since, rule = before
        if (value.version, value.rule) == (version, rule):
            return None
        if value.version <= version:
            raise PatternError(
                f"version {value.version} of the rule '{value.id}' is not newer than {version}",
                what_to_do="send it with a greater version",
            )
        goes_on = False
        # The program may have changed, and no longer know what the old rule named.
        with contextlib.suppress(PatternError):
            if search is not None and rule is not None:
                goes_on = self._find_search(rule).automaton.fingerprint == search.automaton.fingerprint
        return value.version, since if goes_on else value.version, value.rule

    def _find_search(self, rule: str) -> _Search:
        """Return the compiled search of a rule; its conditions are opened once per copy of the function."""
        found = self._searches.get(rule)
        if found is None:
            pattern = self._known.pattern(rule)
            automaton = compile_pattern(pattern)
            asked: dict[Leaf, Expression] = {
                leaf: parse_condition(leaf.text, self._fields)
                for leaf in automaton.leaves
                if isinstance(leaf, ColumnCondition)
            }
            for leaf in automaton.leaves:
                if isinstance(leaf, Comparison):
                    leaf.expression = parse_comparison(leaf.text, self._fields, automaton.names)
            found = self._searches[rule] = _Search(
                automaton, Matcher(automaton, pattern.skip, self._take), asked
            )
            found.open(self._facts)
        return found

    # -- events -----------------------------------------------------------------------------------------
    def process_element(self, value: Any, ctx: KeyedReadOnlyContext) -> None:
        """Store an event until the watermark reaches it, unless it is late."""
        time_ms, timers = ctx.timestamp(), ctx.timer_service()
        if time_ms is None or time_ms == MIN_WATERMARK_MS:
            raise PatternError(
                "patterns from a stream go by event time, and an event has none",
                what_to_do="call assign_timestamps_and_watermarks() before key_by(), and let no time be null",
            )
        if time_ms <= timers.current_watermark():
            if self._late_output is None:
                _find_operator(ctx).count(LATE_RECORDS_DROPPED)
            else:
                ctx.output(self._late_output, value)
            return
        self._waiting.add((*self._spread(value), time_ms))
        timers.register_event_time_timer(time_ms)

    def on_timer(self, time_ms: int, ctx: BroadcastOnTimerContext) -> None:
        """Process the events that the watermark has reached, and time out partial matches."""
        timers = ctx.timer_service()
        now_ms = timers.current_watermark()
        waiting = sorted(map(tuple, self._waiting.get()), key=itemgetter(-1))
        due = [row for row in waiting if row[-1] <= now_ms]
        runs = self._enter_rules(ctx)
        before_ms = _first(run.deadline_ms for run in runs)
        reached_ms = None
        for row in due:
            at_ms, event = row[-1], self._gather(row[:-1])
            for run in runs:
                if at_ms != reached_ms:
                    run.advance(at_ms)
                run.take(event, at_ms, timers.current_processing_time())
            reached_ms = at_ms
        for run in runs:
            run.advance(now_ms)
            run.leave()
        later = waiting[len(due) :]
        if due:
            self._waiting.update(later)
        due_ms = _first(run.deadline_ms for run in runs)
        if before_ms is not None and before_ms != due_ms:
            timers.delete_event_time_timer(before_ms)
        for next_ms in (due_ms, later[0][-1] if later else None):
            if next_ms is not None and now_ms < MAX_WATERMARK_MS:
                timers.register_event_time_timer(next_ms)

    def _enter_rules(self, ctx: BroadcastOnTimerContext) -> list[_Run]:
        """Return the runs of all rules over the current key; give up matches that no rule continues."""
        rules = dict(ctx.get_broadcast_state(PATTERN_RULES).items())
        runs = []
        for name in sorted(rules):
            version, since, rule = rules[name]
            if rule is not None:
                context = _RuleContext(ctx, name, version)
                runs.append(
                    _Run(self._require_search(name, rule), context, self._function, self._limit, since)
                )
        live = {run.context.name: run for run in runs}
        for name, stored in list(self._open.items()):
            own = live.get(name)
            if own is None or not own.goes_on_with(stored):
                _count_given_up(stored, ctx)
                del self._open[name]
        for run in runs:
            run.enter(self._open, self._row.names, self._gather, self._spread)
        return runs

    def _require_search(self, name: str, rule: str) -> _Search:
        try:
            return self._find_search(rule)
        except PatternError as error:
            raise PatternError(
                f"the rule '{name}' was taken over once, and cannot be searched for any more",
                why=str(error),
                what_to_do="give the program what the rule names, or send a newer rule of that id",
            ) from None


@dataclass(frozen=True)
class _Search:
    """A compiled rule, for all keys."""

    automaton: Automaton
    matcher: Matcher
    #: The parsed SQL conditions of single events.
    asked: Mapping[Leaf, Expression]

    def classify(self, event: Any) -> EventAnswers:
        frame = Frame.of({"A": (event,)})
        asked = map(self.asked.get, self.automaton.leaves)
        answers = (None if one is None else one.value(frame, None) is True for one in asked)
        return self.matcher.known[tuple(answers)]

    def open(self, facts: _ConditionFacts) -> None:
        for owner in self._find_owners():
            owner.open(facts)

    def close(self) -> None:
        for owner in self._find_owners():
            owner.close()

    def _find_owners(self) -> list[Any]:
        leaves = self.automaton.leaves
        owners = [leaf.owner for leaf in leaves if isinstance(leaf, ContextCondition)]
        return [owner for owner in owners if hasattr(owner, "open") and hasattr(owner, "close")]


class _Run:
    """A rule over the events of one key in one micro-batch."""

    def __init__(
        self,
        search: _Search,
        context: _RuleContext,
        function: PatternProcessFunction,
        limit: OpenMatches | None,
        since: int,
    ) -> None:
        self._search, self.context, self._function, self._limit = search, context, function, limit
        self._since = since
        self._state = search.matcher.initial()

    def goes_on_with(self, stored: Any) -> bool:
        is_same: bool = stored.automaton == self._search.automaton.fingerprint
        return is_same and int(stored.version) >= self._since

    def enter(self, states: Any, names: Sequence[str], gather: Any, spread: Any) -> None:
        """Load the current key's partial matches; `names` are the names of an event's fields."""
        self._states, self._names, self._spread = states, names, spread
        stored = states.get(self.context.name)
        if stored is not None:
            rows = enumerate(_to_rows(stored.events))
            events = [Event((row[-1], place), gather(row[:-1])) for place, row in rows]
            flat = FlatMatches(events, _to_rows(stored.chains), _to_rows(stored.matches))
            self._state = flat.state(self._search.automaton.stages)
        self._before = self._list_matches()
        self._opened = self._state.open_count

    def take(self, event: Any, time_ms: int, processing_time_ms: int) -> None:
        matcher, known = self._search.matcher, self._search.classify(event)
        for match in matcher.process(self._state, event, time_ms, known, processing_time_ms):
            self._emit(match, time_ms)
        discarded = 0 if self._limit is None else matcher.keep_to(self._state, self._limit)
        if discarded:
            self.context.count(DISCARDED, discarded)

    def advance(self, time_ms: int) -> None:
        """Advance to a time before which no more events come."""
        completed, timed_out = self._search.matcher.advance(self._state, time_ms)
        for complete in completed:
            self._emit(complete.match, complete.time_ms)
        for lost in timed_out:
            self.context.count(TIMED_OUT)
            self.context.give(self._function.process_timed_out_match, lost.match, lost.time_ms)

    def leave(self) -> None:
        more = self._state.open_count - self._opened
        if more:
            self.context.count(OPENED if more > 0 else CLOSED, abs(more))
        if self._list_matches() == self._before:
            return
        if self._state.is_initial:
            del self._states[self.context.name]
            return
        automaton, spread = self._search.automaton, self._spread
        flat = FlatMatches.of(self._state, {name: at for at, name in enumerate(automaton.stages)})
        events = [(*spread(event.value), event.time_ms) for event in flat.events]
        parts = (self._names, events), (_CHAIN, flat.chains), (_MATCH, flat.matches)
        lists = ([dict(zip(names, row, strict=True)) for row in rows] for names, rows in parts)
        self._states[self.context.name] = (self.context.version, automaton.fingerprint, *lists)

    @property
    def deadline_ms(self) -> int | None:
        return self._search.matcher.next_deadline_ms(self._state)

    def _emit(self, match: Match, time_ms: int) -> None:
        self.context.count(MATCHES)
        self.context.give(self._function.process_match, match, time_ms)

    def _list_matches(self) -> tuple[list[Any], list[Any]]:
        return list(self._state.partial), list(self._state.held)


class _RuleContext:
    """The context of a call for a match; see :class:`~flinkish_spark.cep.functions.PatternContext`."""

    def __init__(self, ctx: BroadcastOnTimerContext, name: str, version: int) -> None:
        self._ctx, self.name, self.version, self._time_ms = ctx, name, version, MIN_WATERMARK_MS
        self.get_current_key = ctx.get_current_key
        self.count = _find_operator(ctx).count

    def pattern_name(self) -> str:
        return self.name

    def pattern_version(self) -> int:
        return self.version

    def timestamp(self) -> int:
        return self._time_ms

    def current_processing_time(self) -> int:
        return self._ctx.timer_service().current_processing_time()

    def output(self, tag: OutputTag, value: Any) -> None:
        _find_operator(self._ctx).emit_to(tag, value, self._time_ms)

    def give(self, call: Callable[..., Iterable[Any] | None], match: Match, time_ms: int) -> None:
        self._time_ms = time_ms
        rows = call(match, self)
        if rows is not None:
            _find_operator(self._ctx).emit(rows, time_ms)


class _ConditionFacts(SubtaskFacts):
    """The context for `open` of a condition, which has no state."""

    def __init__(self, uid: str, max_parallelism: int) -> None:
        self.uid, self.max_parallelism = uid, max_parallelism

    def _refuse(self, descriptor: Any) -> NoReturn:
        raise PatternError(
            f"a condition of a rule asks for the state '{descriptor.name}'",
            why="it sees only what its partial match has taken",
            what_to_do="give state to the function of the matches",
        )

    get_state = get_list_state = get_map_state = get_reducing_state = get_aggregating_state = _refuse


def _give_up(name: str, since: int, ctx: KeyedBroadcastContext, key: Any, states: Any) -> None:
    """Remove a key's partial matches of a rule that began before a version of it."""
    stored = states.get(name)
    if stored is not None and stored.version < since:
        _count_given_up(stored, ctx)
        del states[name]


def _count_given_up(stored: Any, ctx: Any) -> None:
    given_up = sum(chain is not None and not held for _, chain, held in _to_rows(stored.matches))
    for counter in (CLOSED, DISCARDED) if given_up else ():
        _find_operator(ctx).count(counter, given_up)


def _to_rows(structs: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [tuple(one.values()) for one in structs]


def _first(times_ms: Iterable[int | None]) -> int | None:
    return min((one for one in times_ms if one is not None), default=None)


def _find_operator(context: Any) -> Any:
    # The operator's own context: a user's context cannot count, and gives rows the time of the element.
    return context
