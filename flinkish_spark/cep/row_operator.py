"""The operator for MATCH_RECOGNIZE over a keyed stream: waiting rows, kept rows, emitted matches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flinkish_spark.cep.row_conditions import Answers, answer_conditions
from flinkish_spark.cep.rows import RowMatcher, RowSearch, RowsPerMatch, RowState
from flinkish_spark.cep.timed_rows import DueRows, TimedRows
from flinkish_spark.cep.timed_runner import TimedRowsOperator
from flinkish_spark.core.elements import MATCHES, OutputTag, TimeDomain, Timer
from flinkish_spark.operators.context import FunctionContext, move_timer
from flinkish_spark.operators.joins import TimedBuffer, time_of
from flinkish_spark.operators.process import Processor
from flinkish_spark.state.descriptors import ValueStateDescriptor
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.timers import Timers
from flinkish_spark.types.rows import ElementType


class RowPatternOperator(TimedRowsOperator):
    """Runs a :class:`~flinkish_spark.cep.rows.RowSearch` by event time.

    The state of a key contains only rows, so a changed row pattern can continue with it.
    """

    def __init__(
        self,
        search: RowSearch,
        element: ElementType,
        time_field: int | None,
        key_fields: Sequence[int],
        late_output: OutputTag | None,
    ) -> None:
        self._matcher, self._key_fields = RowMatcher(search), tuple(key_fields)
        self._one_row = search.rows is RowsPerMatch.ONE_ROW
        self.timed: TimedRows = TimedRows("rows/waiting", element, "", time_field, late_output)
        self._rows = TimedBuffer("rows/kept", element)
        self._width = len(element.fields)
        #: Answers of conditions for the due rows of the current key group.
        self._answered: tuple[DueRows | None, dict[str, Answers]] = None, {}

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        self._context, self._timers, self._scope = context, timers, states.scope
        self.timed.open(states)
        self._rows.open(states)
        self._place = states.get_state(
            ValueStateDescriptor("rows/place", "start INT, covered INT, gone LONG, matches LONG")
        )

    def processors(self) -> tuple[Processor, ...]:
        return (self.timed.late,)

    def on_timer(self, timer: Timer, domain: TimeDomain) -> None:
        watermark_ms, due = self._timers.watermark_ms, self.timed.due
        if self._answered[0] is not due:
            # Before rows are taken: the answers cover all due rows.
            self._answered = due, answer_conditions(self._matcher.search, due.columns, due.begins)
        places = due.take(self._scope.key, watermark_ms)
        entries, place = self._rows.read(), self._place.value()
        kept: list[Sequence[Any]] = [entry[: self._width] for entry in entries]
        state = RowState(kept, [time_of(entry) for entry in entries], *(place or (0, 0, 0, 0)))
        before_ms = self._matcher.next_deadline_ms(state)
        for name, own in self._answered[1].items():
            state.facts[name] = [*([None] * len(state.rows)), *own[places.start : places.stop]]
        state.rows += due.rows[places.start : places.stop]
        state.times_ms += due.times_ms[places.start : places.stop]
        matches = state.matches
        for told in self._matcher.run(state, watermark_ms):
            front = [told.first[at] for at in self._key_fields] if self._one_row else told.row or ()
            self._context.emit(((*front, *told.values),), told.time_ms)
        state.forget(self._matcher.count_unneeded(state))
        if state.matches > matches:
            self._context.count(MATCHES, state.matches - matches)
        self._write(state)
        due_ms = self._matcher.next_deadline_ms(state)
        move_timer(self._timers, TimeDomain.EVENT_TIME, before_ms, due_ms)
        later_ms = due.next_ms(self._scope.key)
        if later_ms is not None:
            self._timers.register_event_time_timer(later_ms)

    def _write(self, state: RowState) -> None:
        """Store the remaining rows; for a key without rows only the numbers that the row pattern needs."""
        rows = [(*row, at) for row, at in zip(state.rows, state.times_ms, strict=True)]
        self._rows.replace(rows)
        gone = state.gone if self._matcher.asks_for_first else 0
        matches = state.matches if self._matcher.asks_for_number else 0
        place = (state.start, state.covered, gone, matches)
        if rows or any(place):
            self._place.update(place)
        else:
            self._place.clear()
