"""Row patterns that change while a job runs: a broadcast stream brings their texts."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.cep.match_recognize import match_recognize
from flinkish_spark.cep.rows import RowMatcher, RowsPerMatch, RowState
from flinkish_spark.core.elements import LATE_RECORDS_DROPPED, MATCHES, MAX_WATERMARK_MS, OutputTag
from flinkish_spark.core.errors import PatternError
from flinkish_spark.core.fields import check_arguments
from flinkish_spark.functions.keyed import (
    BroadcastOnTimerContext,
    KeyedBroadcastContext,
    KeyedBroadcastProcessFunction,
    KeyedReadOnlyContext,
    RuntimeContext,
)
from flinkish_spark.state.descriptors import ListStateDescriptor, MapStateDescriptor, ValueStateDescriptor
from flinkish_spark.types.ddl import DdlError, ddl_of, parse_ddl

#: Texts by name: the descriptor for `broadcast()` of the stream of row patterns.
ROW_PATTERNS = MapStateDescriptor("row_patterns", "STRING", "STRING")
#: Side output of invalid row patterns.
REFUSED_PATTERNS = OutputTag("refused_patterns", "name STRING, text STRING, why STRING")
#: A match: its pattern, the times of its first and last row, and its measures as JSON.
MATCH_FIELDS = "pattern STRING, first_ms LONG, last_ms LONG, measures STRING"
_PLACE = "start INT, covered INT, gone LONG, matches LONG"


class RowPatternsFromStream(KeyedBroadcastProcessFunction):
    """A function that looks for row patterns whose texts come from a broadcast stream, by event time.

    An element of that stream has a `name` and a `text`: the clauses of MATCH_RECOGNIZE without PARTITION BY
    and ORDER BY, one row per match. It applies from the next rows on. A text replaces the text of the same
    name, and continues with the rows with which a match of the old one might still begin. A null text removes
    the pattern of that name. An invalid text goes to :data:`REFUSED_PATTERNS`, and the old pattern stays.

    All partitions change in the same micro-batch, before its rows; so a checkpoint is either before or after
    the change.

    Parameters
    ----------
    elements
        Fields of the keyed stream, as DDL.
    late_output
        Side output of late rows; None: they are dropped and counted.

    Raises
    ------
    DdlError
        It is no DDL.

    Examples
    --------
    >>> from flinkish_spark.testing import ProgramHarness
    >>> fields = "cell STRING, value LONG"
    >>> def program(readings, patterns):
    ...     rules = patterns.broadcast(ROW_PATTERNS)
    ...     return readings.key_by("cell").connect(rules).process(
    ...         RowPatternsFromStream(fields), output=MATCH_FIELDS, uid="found"
    ...     )
    >>> harness = ProgramHarness(program, fields, "name STRING, text STRING")
    >>> rising = "MEASURES LAST(B.value) AS top PATTERN (A B+) DEFINE B AS value > PREV(value)"
    >>> harness.push(("rising", rising), 0, source=1)
    >>> harness.push_all([(("u33", value), at) for at, value in enumerate([1, 5, 9, 2])])
    >>> harness.end_of_input()
    >>> harness.take().rows
    [Record(pattern='rising', first_ms=0, last_ms=2, measures='{"top": 9}')]
    """

    @check_arguments()
    def __init__(self, elements: str, late_output: OutputTag | None = None) -> None:
        self._late_output = late_output
        fields = parse_ddl(elements)
        if not isinstance(fields, T.StructType):
            raise DdlError(f"{elements!r} is no list of fields; write them as: cell STRING, value LONG")
        self._fields: T.StructType = fields
        self._matchers: dict[str, RowMatcher] = {}

    def open(self, context: RuntimeContext) -> None:
        time = T.StructField("__time_ms", T.LongType())
        rows = ddl_of(T.StructType([*self._fields.fields, time]))
        self._rows = context.get_list_state(ListStateDescriptor("rows", rows))
        self._places = context.get_map_state(MapStateDescriptor("places", "STRING", _PLACE))
        #: Number of rows that the watermark has reached.
        self._reached = context.get_state(ValueStateDescriptor("reached", "INT", default=0))

    def process_broadcast_element(self, value: Any, ctx: KeyedBroadcastContext) -> None:
        """Add or replace a text, or remove a pattern."""
        patterns = ctx.get_broadcast_state(ROW_PATTERNS)
        if value.text is None:
            if value.name in patterns:
                del patterns[value.name]
            return
        try:
            self._matcher(value.text)
        except PatternError as error:
            ctx.output(REFUSED_PATTERNS, (value.name, value.text, str(error)))
        else:
            patterns[value.name] = value.text

    def process_element(self, value: Any, ctx: KeyedReadOnlyContext) -> None:
        """Store a row until the watermark reaches it, unless it is late."""
        time_ms, timers = ctx.timestamp(), ctx.timer_service()
        if time_ms is None:
            raise PatternError(
                "row patterns go by event time, and the stream has no timestamps",
                what_to_do="call assign_timestamps_and_watermarks() before key_by()",
            )
        if time_ms <= timers.current_watermark():
            if self._late_output is None:
                # As operators know it: functions of users count nothing.
                operator: Any = ctx
                operator.count(LATE_RECORDS_DROPPED)
            else:
                ctx.output(self._late_output, value)
            return
        rows = self._rows.get()
        rows.insert(bisect_right(rows, time_ms, key=itemgetter(-1)), (*value, time_ms))
        self._rows.update(rows)
        timers.register_event_time_timer(time_ms)

    def on_timer(self, time_ms: int, ctx: BroadcastOnTimerContext) -> Iterator[Any]:
        """Search in the rows that the watermark has reached."""
        operator: Any = ctx
        watermark_ms, before = ctx.timer_service().current_watermark(), self._reached.value() or 0
        patterns = dict(ctx.get_broadcast_state(ROW_PATTERNS).items())
        for name in [name for name in self._places if name not in patterns]:
            del self._places[name]
        rows = self._rows.get()
        reached = bisect_right(rows, watermark_ms, key=itemgetter(-1))
        states = []
        for name in sorted(patterns):
            matcher = self._matcher(patterns[name])
            place = self._places.get(name)
            state = RowState(
                [tuple(row)[:-1] for row in rows[:reached]],
                [row[-1] for row in rows[:reached]],
                *(place if place is not None else (before, 0, 0, 0)),
            )
            for told in matcher.run(state, watermark_ms):
                measures = zip((own for own, _ in matcher.search.measures), told.values, strict=True)
                operator.count(MATCHES)
                yield name, told.first_ms, told.time_ms, json.dumps(dict(measures), default=str)
            states.append((name, matcher, state))
        self._keep(rows, reached, states)
        deadlines = [matcher.next_deadline_ms(state) for _, matcher, state in states]
        due = min((one for one in deadlines if one is not None), default=None)
        if due is not None and watermark_ms < MAX_WATERMARK_MS:
            ctx.timer_service().register_event_time_timer(due)

    def _keep(
        self, rows: list[Any], reached: int, states: Iterable[tuple[str, RowMatcher, RowState]]
    ) -> None:
        """Store the rows that some pattern still needs, with their places."""
        states = list(states)
        unneeded = min((matcher.count_unneeded(state) for _, matcher, state in states), default=reached)
        for name, _, state in states:
            state.forget(unneeded)
            self._places[name] = (state.start, state.covered, state.gone, state.matches)
        self._rows.update(rows[unneeded:])
        self._reached.update(reached - unneeded)
        if len(rows) == unneeded and not any(state.matches for _, _, state in states):
            self._places.clear()
            self._reached.clear()

    def _matcher(self, text: str) -> RowMatcher:
        """Return the matcher of a text, which is parsed once per copy of the function."""
        if text not in self._matchers:
            said = match_recognize(text)
            search, _ = said.search(self._fields)
            if said.partition or said.order or search.rows is not RowsPerMatch.ONE_ROW:
                raise PatternError(
                    "a row pattern from a stream says PARTITION BY, ORDER BY or ALL ROWS PER MATCH",
                    why="the stream has its key and its time, and matches of all have the same fields",
                    what_to_do="leave these out",
                )
            self._matchers[text] = RowMatcher(search)
        return self._matchers[text]
